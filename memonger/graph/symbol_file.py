"""Networks in files (``-symbol.json``): read and checked before MXNet sees them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.symbols import OWN_STATES, as_json, check_graph, check_links


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
        found = os.path.isfile(path)
        data = Path(os.fsdecode(path)).read_bytes() if found else b""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise MemongerError(f"{shown} cannot be read: {reason}") from None
    if not found:
        raise MemongerError(f"there is no file {shown}")
    what = f"{shown} holds no network that MXNet can read"
    graph = _parsed(data, shown, what)
    version = _version(graph)
    check_graph(graph, what, version)
    try:
        symbol = mx.sym.load_json(as_json(graph))
    except (mx.MXNetError, UnicodeDecodeError) as error:  # MXNet cuts lines within a character
        raise MemongerError(f"{what}: {said_by_mxnet(error)}") from None
    if version < OWN_STATES:
        check_links(symbol, what)  # with the inputs that MXNet has put in
    return symbol


def _parsed(data: bytes, shown: str, what: str) -> Any:
    """What a JSON file holds."""
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
        byte = data[error.start]
        raise MemongerError(f"{what}: byte {error.start} is not UTF-8 (0x{byte:02x})") from None
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].strip()
        if (  # whether the text is the beginning of one that would be JSON
            error.msg.startswith("Unterminated string")
            or not rest
            or (error.msg.startswith("Invalid \\u") and len(rest) < 6)
            or any(word.startswith(rest) for word in ("true", "false", "null", "-"))
        ):
            raise truncated from None
        at = len(text[: error.pos].encode()) + (data[:3] == b"\xef\xbb\xbf") * 3
        raise MemongerError(
            f"{what}: it is no JSON at byte {at}, line {error.lineno}: {error.msg}"
        ) from None
    except RecursionError:
        raise MemongerError(f"{what}: its lists are nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise MemongerError(f"{what}: {error}") from None


def _version(graph: Any) -> int:
    """The version of MXNet that has written a file."""
    attrs = graph.get("attrs") if isinstance(graph, dict) else None
    told = attrs.get("mxnet_version") if isinstance(attrs, dict) else None
    if type(told) is list and len(told) == 2 and told[0] == "int" and type(told[1]) is int:
        return told[1]
    return 800
