"""Write, read and remove the marks of a plan on a copy of the user's symbol.

MXNet recomputes the operators whose attribute ``__force_mirroring__`` is true. An attribute of our
own records the values before the plan, so that ``unplan`` returns the original.
"""

from __future__ import annotations

import contextlib
import json
from typing import Iterable, Mapping, Sequence

import numpy as np

from memonger.graph.forward import (
    FUSION_BARRIER,
    INSERTED,
    RECORD,
    ForwardGraph,
    SavedIdentity,
    insert_identities,
)
from memonger.graph.inputs import check_symbol
from memonger.graph.operators.recompute import UNTOUCHED, truth
from memonger.graph.operators.tensors import Shape
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import keep_casts, load_nodes, read
from memonger.support.types import Bools, Json, Symbol

FORCE = "__force_mirroring__"
STAGE = "__mirror_stage__"
_REMOVED = -1  # the new index of an inserted node without inputs


def read_hints(graph: ForwardGraph) -> dict[int, str]:
    """Return the user's ``mirror_stage`` of each node that has one."""
    return {i: node.hidden[STAGE] for i, node in enumerate(graph.nodes) if STAGE in node.hidden}


def read_mask(graph: ForwardGraph) -> Bools:
    """Return which nodes MXNet recomputes by their marks, (nodes,) of bool."""
    marked = [truth(n.hidden.get(FORCE)) and n.op not in ("null", "Dropout") for n in graph.nodes]
    return np.array(marked, dtype=np.bool_)


def read_own_mask(graph: ForwardGraph) -> Bools:
    """Return which nodes had marks of the user before `clear` removed them, (nodes,) of bool."""
    marked = [truth(_record(node.hidden).get(FORCE)) for node in graph.nodes]
    return np.array(marked, dtype=np.bool_)


def write(
    symbol: Symbol,
    mask: Bools,
    native: Iterable[int] = (),
    identities: Iterable[SavedIdentity] = (),
) -> Symbol:
    """Write the marks of a plan on a copy of an unplanned symbol.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network.
    mask : array of bool, (nodes,)
        Which nodes of the symbol's JSON are recomputed.
    native : iterable of int
        Nodes that run MXNet's own kernel instead of cuDNN's.
    identities : iterable of SavedIdentity
        Identities to insert.

    Returns
    -------
    mx.sym.Symbol
        The planned copy.
    """
    graph, native = read(symbol), set(native)
    insertion = insert_identities([node["name"] for node in graph["nodes"]], identities)
    nodes: list[Json] = []
    records: dict[object, str] = {}
    for i, node in enumerate(graph["nodes"]):
        if node["op"] != "null" and node["op"] not in UNTOUCHED:
            changes = {FORCE: str(bool(mask[i])), **({"cudnn_off": "True"} if i in native else {})}
            attrs = node.setdefault("attrs", {})
            # ``clear`` may have recorded marks of the user already; these are the values before.
            before = {**{key: attrs.get(key) for key in changes}, **_record(attrs)}
            values = tuple(before.items())
            if values not in records:  # nearly all have the same
                records[values] = json.dumps(before, sort_keys=True)
            attrs.update(changes, **{RECORD: records[values]})
        node["inputs"] = [[*insertion.entry(a, b), *rest] for a, b, *rest in node["inputs"]]
        nodes.append(node)
        for new in insertion.behind.get(i, ()):
            attrs = {**new.attrs, **new.hidden, FORCE: str(new.op == FUSION_BARRIER)}
            inputs = [[a, b, 0] for a, b in new.inputs]
            nodes.append({"op": new.op, "name": new.name, "attrs": attrs, "inputs": inputs})
    heads = [[insertion.new_index[a], *rest] for a, *rest in graph["heads"]]
    return keep_casts(_load(nodes, heads, insertion.new_index), nodes)


def make_inferable(
    symbol: Symbol, identities: Sequence[SavedIdentity], shapes: Mapping[str, Shape]
) -> tuple[SavedIdentity, ...]:
    """Return the identities with ``unfused`` off where it prevents the inference of shapes.

    That is where MXNet infers the shape of the node from its reader. An example is the first
    product with the state of an RNN cell, which is zeros for any batch.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network without identities.
    identities : sequence of SavedIdentity
        The identities to insert.
    shapes : mapping
        Name -> shape of inputs.
    """
    identities = tuple(identities)
    while any(identity.unfused for identity in identities):
        names = [node["name"] for node in read(symbol)["nodes"]]
        nothing = np.zeros(len(names), dtype=np.bool_)
        try:
            write(symbol, nothing, (), identities).infer_shape(**shapes)
            break
        except mx.MXNetError as error:
            message = str(error)
        behind = insert_identities(names, identities).behind
        name_of = {i: new[-1].name for i, new in behind.items()}
        failed = [i for i, name in name_of.items() if f"Error in operator {name}:" in message]
        fused = {*(failed or name_of)}
        identities = tuple(k._replace(unfused=False) if k.node in fused else k for k in identities)
    return identities


def unplan(symbol: Symbol) -> Symbol:
    """Return the network as it was before memonger planned it.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        A planned symbol. Of a symbol that memonger did not plan, an equal copy is returned.

    Returns
    -------
    mx.sym.Symbol
        A copy without all that the plan added, with the user's own attributes restored.

    Raises
    ------
    MemongerError
        If it is not a Symbol, or its plan is damaged.

    Examples
    --------
    >>> planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    >>> memonger.unplan(planned).tojson() == net.tojson()
    True
    """
    return _load(*_remove_plan(read(check_symbol(symbol))))


def clear(symbol: Symbol) -> Symbol:
    """Return a copy without a plan and without marks, which records the user's own marks."""
    nodes, heads, new_index = _remove_plan(read(symbol))
    for node in nodes:
        attrs = node.get("attrs", {})
        if FORCE in attrs and node["op"] not in UNTOUCHED:
            attrs[RECORD] = json.dumps({FORCE: attrs.pop(FORCE)})
    return _load(nodes, heads, new_index)


def _remove_plan(graph: Json) -> tuple[list[Json], list[list[int]], list[int]]:
    """Return the nodes and heads of a network without its plan, and the new indices of nodes."""
    nodes: list[Json] = []
    new_index: list[int] = []
    output_of: dict[int, int] = {}  # inserted node -> the output that it copies

    def renumber(entries: list[list[int]]) -> list[list[int]]:
        return [[new_index[a], output_of.get(a, b), *rest] for a, b, *rest in entries]

    for i, node in enumerate(graph["nodes"]):
        node["inputs"] = renumber(node["inputs"])
        attrs = node.get("attrs", {})
        if attrs.get(RECORD) == INSERTED:
            source, output_of[i], *_ = node["inputs"][0] if node["inputs"] else (_REMOVED, 0)
            new_index.append(source)
            continue
        if any(a == _REMOVED for a, *_ in node["inputs"]):
            raise MemongerError(
                f"node {node['name']!r} reads a node that a plan added for its own use: this "
                "planned network is damaged; plan the original again"
            )
        attrs = {**node.pop("attrs", {}), **_record(attrs)}
        original = {k: v for k, v in attrs.items() if v is not None and k != RECORD}
        new_index.append(len(nodes))
        nodes.append({**node, "attrs": original} if original else node)
    return nodes, renumber(graph["heads"]), new_index


def is_planned(symbol: Symbol) -> bool:
    """Return whether a network has a plan of marks."""
    return any(RECORD in node.get("attrs", {}) for node in read(symbol)["nodes"])


def is_marked(symbol: Symbol) -> bool:
    """Return whether a network has marks, of a plan or of the user."""
    return any(truth(node.get("attrs", {}).get(FORCE)) for node in read(symbol)["nodes"])


def list_fixed_gammas(symbol: Symbol) -> list[str]:
    """Return the names of gammas that MXNet sets to 1 only when it recomputes their BatchNorm.

    With ``fix_gamma`` the forward pass sets gamma to 1 if its mean is read
    (``BatchNormForwardImpl`` in ``src/operator/nn/batch_norm.cc``). The gradient of a recomputed
    BatchNorm reads the mean of the second run, so that a forward pass alone sets nothing.
    """
    nodes = read(symbol)["nodes"]
    names = []
    for node in nodes:
        attrs = node.get("attrs", {})
        is_fixed = node["op"] == "BatchNorm" and truth(attrs.get("fix_gamma", "True"))
        if is_fixed and truth(attrs.get(FORCE)):
            names.append(nodes[node["inputs"][1][0]]["name"])
    return names


def _load(nodes: list[Json], heads: list[list[int]], new_index: list[int]) -> Symbol:
    """Return a symbol of nodes whose control dependencies have old indices."""
    for node in nodes:
        if "control_deps" in node:
            node["control_deps"] = [new_index[d] for d in node["control_deps"]]
    return load_nodes(nodes, heads)


def _record(attrs: Mapping[str, str]) -> dict[str, str | None]:
    """Return the values of a node's attributes before the plan, as its record has them."""
    if RECORD not in attrs:
        return {}
    with contextlib.suppress(AttributeError, ValueError):  # it is not JSON, or not a dict
        record = json.loads(attrs[RECORD])
        if all(value is None or isinstance(value, str) for value in record.values()):
            return record
    raise MemongerError(
        f"an attribute {RECORD} holds {attrs[RECORD]!r}, which no plan writes: this "
        "planned network is damaged; plan the original again"
    )
