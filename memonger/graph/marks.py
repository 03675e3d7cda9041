"""The marks of a plan on a symbol: written, read, taken off again. The user's symbol is copied.

MXNet recomputes the operators whose attribute ``__force_mirroring__`` is true. What a plan changes
on a node is recorded in one attribute of our own, and ``unplan`` gives the original back.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from memonger.graph.forward import INSERTED, PRODUCT, RECORD, ForwardGraph, Insertion, KeptCopy
from memonger.graph.inputs import check_symbol
from memonger.graph.operators.recompute import UNTOUCHED, truth
from memonger.graph.operators.tensors import Shape
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes, read

FORCE = "__force_mirroring__"
STAGE = "__mirror_stage__"
_GONE = -1  # where a node was that had no inputs


def hints(graph: ForwardGraph) -> dict[int, str]:
    """Return the user's ``mirror_stage`` of each node that has one."""
    return {i: node.hidden[STAGE] for i, node in enumerate(graph.nodes) if STAGE in node.hidden}


def recomputed(graph: ForwardGraph) -> np.ndarray:
    """Tell which nodes MXNet will recompute, by the marks that they carry now."""
    marked = [truth(n.hidden.get(FORCE)) and n.op not in ("null", "Dropout") for n in graph.nodes]
    return np.array(marked, dtype=np.bool_)


def apply(
    symbol: Any, mask: np.ndarray, native: Iterable[int] = (), copies: Iterable[KeptCopy] = ()
) -> Any:
    """Return a copy of an unplanned symbol in which just the operators of ``mask`` are recomputed.

    The mask is for each node of its JSON; ``native`` nodes run with MXNet's kernel, not cuDNN's.
    """
    graph, native = read(symbol), set(native)
    made = Insertion([node["name"] for node in graph["nodes"]], copies)
    nodes: list[dict[str, Any]] = []
    for i, node in enumerate(graph["nodes"]):
        if node["op"] != "null" and node["op"] not in UNTOUCHED:
            set_now = {FORCE: str(bool(mask[i])), **({"cudnn_off": "True"} if i in native else {})}
            attrs = node.setdefault("attrs", {})
            before = {**{key: attrs.get(key) for key in set_now}, **_record(attrs)}  # of ``clear``
            attrs.update(set_now, **{RECORD: json.dumps(before, sort_keys=True)})
        node["inputs"] = [[*made.entry(a, b), *rest] for a, b, *rest in node["inputs"]]
        nodes.append(node)
        for new in made.behind.get(i, ()):
            attrs = {**new.attrs, **new.hidden, FORCE: str(new.op == PRODUCT)}
            inputs = [[a, b, 0] for a, b in new.inputs]
            nodes.append({"op": new.op, "name": new.name, "attrs": attrs, "inputs": inputs})
    return _moved(nodes, [[made.moved[a], *rest] for a, *rest in graph["heads"]], made.moved)


def inferable(
    symbol: Any, copies: Sequence[KeptCopy], shapes: Mapping[str, Shape]
) -> tuple[KeptCopy, ...]:
    """Return the copies, but none unfused where MXNet infers a shape from what reads it.

    So is the first product with the state of an RNN cell, zeros of a batch that is not told.
    """
    names = [node["name"] for node in read(symbol)["nodes"]]
    found = tuple(copies)
    while any(copy.unfused for copy in found):
        try:
            apply(symbol, np.zeros(len(names), dtype=np.bool_), (), found).infer_shape(**shapes)
            break
        except mx.MXNetError as error:
            said = str(error)
        last = {i: new[-1].name for i, new in Insertion(names, found).behind.items()}
        failed = {i for i, name in last.items() if f"Error in operator {name}:" in said} or last
        found = tuple(c._replace(unfused=c.unfused and c.node not in failed) for c in found)
    return found


def unplan(symbol: Any) -> Any:
    """Give back the network as it was before memonger planned it.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        A planned symbol; one that memonger never planned comes back as an equal copy.

    Returns
    -------
    mx.sym.Symbol
        A copy without anything that a plan added, with the user's own attributes as they were.

    Raises
    ------
    MemongerError
        If it is no symbol.

    Examples
    --------
    >>> planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    >>> memonger.unplan(planned).tojson() == net.tojson()
    True
    """
    return without_plan(check_symbol(symbol))


def without_plan(symbol: Any) -> Any:
    """Do as `unplan`, of a symbol that has been checked."""
    graph = read(symbol)
    nodes: list[dict[str, Any]] = []
    moved: list[int] = []
    stands_for: dict[int, int] = {}  # an inserted node -> the output that it copies

    def entries(old: list[list[int]]) -> list[list[int]]:
        return [[moved[a], stands_for.get(a, b), *rest] for a, b, *rest in old]

    for i, node in enumerate(graph["nodes"]):
        node["inputs"] = entries(node["inputs"])
        attrs = node.get("attrs", {})
        if attrs.get(RECORD) == INSERTED:  # ``apply`` put it in
            into, stands_for[i], *_ = node["inputs"][0] if node["inputs"] else (_GONE, 0)
            moved.append(into)
            continue
        if any(a == _GONE for a, *_ in node["inputs"]):
            raise MemongerError(
                f"node {node['name']!r} reads a node that a plan added for its own use: this "
                "planned network is damaged; plan the original again"
            )
        attrs.update(_record(attrs))
        node.pop("attrs", None)
        kept = {k: v for k, v in attrs.items() if v is not None and k != RECORD}
        nodes.append({**node, "attrs": kept} if kept else node)
        moved.append(len(nodes) - 1)
    return _moved(nodes, entries(graph["heads"]), moved)


def is_planned(symbol: Any) -> bool:
    """Tell whether a network has been planned, or has marks that somebody else has set."""
    attributes = [node.get("attrs", {}) for node in read(symbol)["nodes"]]
    return any(RECORD in attrs or truth(attrs.get(FORCE)) for attrs in attributes)


def clear(symbol: Any) -> Any:
    """Return a copy in which nothing is recomputed; marks that the user set are recorded."""
    graph = read(symbol)
    for node in graph["nodes"]:
        attrs = node.get("attrs", {})
        if FORCE in attrs and node["op"] not in UNTOUCHED:
            attrs[RECORD] = json.dumps({FORCE: attrs.pop(FORCE)})
    return load_nodes(graph["nodes"], graph["heads"])


def _moved(nodes: list[dict[str, Any]], heads: list[list[int]], moved: list[int]) -> Any:
    """Make a symbol whose nodes stand at new indices; ``moved``: that of each old one."""
    for node in nodes:
        if "control_deps" in node:
            node["control_deps"] = [moved[d] for d in node["control_deps"]]
    return load_nodes(nodes, heads)


def _record(attrs: Mapping[str, str]) -> dict[str, str | None]:
    """Read what attributes were before a plan has changed them."""
    if RECORD not in attrs:
        return {}
    with contextlib.suppress(AttributeError, ValueError):  # it is no dict, or no JSON
        record = json.loads(attrs[RECORD])
        if all(value is None or isinstance(value, str) for value in record.values()):
            return record
    raise MemongerError(
        f"an attribute {RECORD} holds {attrs[RECORD]!r}, which no plan writes: this "
        "planned network is damaged; plan the original again"
    )
