"""Networks in files (``-symbol.json``): read and checked before MXNet sees them."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Mapping, Sequence

from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.symbols import (
    OWN_STATES,
    as_json,
    attributes,
    check_graph,
    check_links,
)

_Fields = Dict[str, type]
_GRAPH: tuple[_Fields, _Fields] = (
    {"nodes": list, "arg_nodes": list, "heads": list},
    {"node_row_ptr": list, "attrs": dict},
)
_NODE: tuple[_Fields, _Fields] = (
    {"op": str, "name": str, "inputs": list},
    {
        "attrs": dict,
        "attr": dict,
        "param": dict,
        "control_deps": list,
        "subgraphs": list,
        "backward_source_id": int,
    },
)
_WORDS = {list: "a list", dict: "an object", str: "a text", int: "a whole number"}


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
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, MemongerError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise MemongerError(f"{shown} cannot be read: {reason}") from None
    what = f"{shown} holds no network that MXNet can read"
    graph = _parsed(data, shown, what)
    _check_fields(graph, what)
    version = _version(graph)
    check_graph(graph, what, version)
    symbol = _loaded(as_json(graph), what)
    if version < OWN_STATES:
        check_links(symbol, what)  # with the inputs that MXNet has put in
    return symbol


# -- the text ----------------------------------------------------------------------------------


def _parsed(data: bytes, shown: str, what: str) -> Any:
    """What a JSON file holds."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _truncated(shown, data) from None
        raise MemongerError(
            "%s: byte %d is not UTF-8 (0x%02x)" % (what, error.start, data[error.start])
        ) from None
    try:
        return json.loads(text, strict=False)  # MXNet takes control characters in names
    except json.JSONDecodeError as error:
        if _ends_early(error):
            raise _truncated(shown, data) from None
        at = len(text[: error.pos].encode()) + (data[:3] == b"\xef\xbb\xbf") * 3
        raise MemongerError(
            "%s: it is no JSON at byte %d, line %d: %s" % (what, at, error.lineno, error.msg)
        ) from None
    except RecursionError:
        raise MemongerError(f"{what}: its lists are nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise MemongerError(f"{what}: {error}") from None


def _ends_early(error: json.JSONDecodeError) -> bool:
    """Whether the text is the beginning of one that would be JSON."""
    rest = error.doc[error.pos :].strip()
    return (
        error.msg.startswith("Unterminated string")
        or not rest
        or (error.msg.startswith("Invalid \\u") and len(rest) < 6)
        or any(word.startswith(rest) for word in ("true", "false", "null", "-"))
    )


def _truncated(shown: str, data: bytes) -> MemongerError:
    if not data.strip():
        return MemongerError(f"{shown} is empty: it holds no network")
    return MemongerError(
        f"{shown} holds no whole network: it ends at byte {len(data)}, before its JSON does; it "
        "was truncated, so copy or save it again"
    )


# -- types -------------------------------------------------------------------------------------


def _check_fields(graph: Any, what: str) -> None:
    """That everything in a graph is there and has its type."""
    _check_types(graph, _GRAPH, what)
    for i, node in enumerate(graph["nodes"]):
        where = "%s: node %d" % (what, i)
        _check_types(node, _NODE, where)
        where = f"{where} ({node['name']!r})"
        _check_text(node["name"], where)
        for field in ("attrs", "attr", "param"):
            for key, value in node.get(field, {}).items():
                if not isinstance(value, str):
                    raise MemongerError(f"{where}: attribute {key!r} is no text: {value!r}")
                _check_text(key, where)
                _check_text(value, where)
        _check_entries(node["inputs"], where, "an input")
        _check_numbers(node.get("control_deps", ()), where, "control_deps")
        for subgraph in node.get("subgraphs", ()):
            _check_fields(subgraph, where + ", subgraph")
        if node["op"].startswith("_CachedOp") and "subgraph" in attributes(node):
            where += ", subgraph"
            subgraph = _parsed(attributes(node)["subgraph"].encode(), where, where)
            _check_fields(subgraph, where)
            check_graph(subgraph, where)
    _check_entries(graph["heads"], what, "an output (heads)")
    _check_numbers(graph["arg_nodes"], what, "arg_nodes")
    _check_numbers(graph.get("node_row_ptr", ()), what, "node_row_ptr")


def _check_types(found: Any, fields: tuple[_Fields, _Fields], where: str) -> None:
    required, optional = fields
    if not isinstance(found, dict):
        raise MemongerError(f"{where}: it is {_kind(found)}, not an object")
    for key, value in found.items():
        kind = required.get(key) or optional.get(key)
        if kind is None:
            raise MemongerError(f"{where}: MXNet knows no field {key!r}")
        if type(value) is not kind:
            raise MemongerError(f"{where}: {key!r} is {_kind(value)}, not {_WORDS[kind]}")
    for key in required:
        if key not in found:
            raise MemongerError(f"{where}: it has no {key!r}")


def _kind(value: Any) -> str:
    return _WORDS.get(type(value), repr(value))


def _check_text(text: str, where: str) -> None:
    """What MXNet can hold: its texts are of UTF-8 and end with a NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MemongerError(f"{where}: {text!r} is no UTF-8") from None
    if "\0" in text:
        raise MemongerError(f"{where}: {text!r} holds a NUL")


def _check_entries(entries: Sequence[Any], where: str, what: str) -> None:
    for entry in entries:
        if type(entry) is not list or len(entry) not in (2, 3) or not all(map(_is_count, entry)):
            raise MemongerError(f"{where}: {what} is written as [node, output], not {entry!r}")


def _check_numbers(numbers: Sequence[Any], where: str, what: str) -> None:
    for number in numbers:
        if not _is_count(number):
            raise MemongerError(f"{where}: {what!r} holds {number!r}, which numbers no node")


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**32


def _version(graph: Mapping[str, Any]) -> int:
    """The version of MXNet that has written a file."""
    told = graph.get("attrs", {}).get("mxnet_version")
    if type(told) is list and len(told) == 2 and told[0] == "int" and type(told[1]) is int:
        return told[1]
    return 800


def _loaded(text: str, what: str) -> Any:
    try:
        return mx.sym.load_json(text)
    except (mx.MXNetError, UnicodeDecodeError) as error:  # MXNet cuts lines within a character
        raise MemongerError(f"{what}: {said_by_mxnet(error)}") from None
