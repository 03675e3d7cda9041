"""Networks in files (``-symbol.json``): read and checked before MXNet sees them."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path
from typing import Any

from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.symbols import OWN_STATES, as_json, check_graph, check_links

OLDEST = 800  # the version of a file that tells none


def load(path: str | bytes | os.PathLike[Any]) -> Any:
    """Read a network from a file, and check it before MXNet sees it.

    MXNet itself ends the process where a file is damaged in some ways. What it can load is loaded
    here too, also what older versions of it have saved.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file such as ``Symbol.save`` and ``Module.save_checkpoint`` write: ``*-symbol.json``.

    Returns
    -------
    mx.sym.Symbol

    Raises
    ------
    MemongerError
        If there is no such file, it is not whole, or no network of MXNet 1.9; it tells what is
        wrong at which node.

    Examples
    --------
    >>> net = memonger.load('resnet-symbol.json')
    >>> planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    """
    shown = repr(os.fsdecode(path))
    try:
        if not os.path.isfile(path):
            raise MemongerError(f"there is no file {shown}")
        data = Path(os.fsdecode(path)).read_bytes()
    except OSError as error:
        raise MemongerError(f"{shown} cannot be read: {error.strerror}") from None
    what = f"{shown} holds no network that MXNet can read"
    graph = _parsed(data, shown, what)
    attrs = graph.get("attrs") if isinstance(graph, dict) else None
    version = attrs.get("mxnet_version") if isinstance(attrs, dict) else None
    kind, number = version if type(version) is list and len(version) == 2 else ("", 0)
    if kind != "int" or type(number) is not int:
        number = OLDEST
    check_graph(graph, what, number)
    try:
        symbol = mx.sym.load_json(as_json(graph))
    except (mx.MXNetError, UnicodeDecodeError) as error:  # MXNet cuts lines within a character
        raise MemongerError(f"{what}: {said_by_mxnet(error)}") from None
    if number < OWN_STATES:
        check_links(symbol, what)  # with the inputs that MXNet has put in
    return symbol


def _parsed(data: bytes, shown: str, what: str) -> Any:
    """Parse a JSON file, or say where it is damaged."""
    truncated = MemongerError(
        f"{shown} holds no whole network: it ends at byte {len(data)}, before its JSON does; it "
        "was truncated, so copy or save it again"
        if data.strip()
        else f"{shown} is empty: it holds no network"
    )
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text, strict=False)  # MXNet takes control characters in names
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise truncated from None
        said = f"byte {error.start} is not UTF-8 (0x{data[error.start]:02x})"
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].strip()
        if (  # whether the text is the beginning of one that would be JSON
            error.msg.startswith("Unterminated string")
            or not rest
            or (error.msg.startswith("Invalid \\u") and len(rest) < 6)
            or any(word.startswith(rest) for word in ("true", "false", "null", "-"))
        ):
            raise truncated from None
        at = len(text[: error.pos].encode()) + (data[:3] == codecs.BOM_UTF8) * 3
        said = f"it is no JSON at byte {at}, line {error.lineno}: {error.msg}"
    except RecursionError:
        said = "its lists are nested too deeply"
    except ValueError as error:  # a number of thousands of digits
        said = str(error)
    raise MemongerError(f"{what}: {said}")
