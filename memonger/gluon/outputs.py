"""Change the symbol of a block so that an executor computes the gradients of its CachedOp.

CachedOp copies an output that equals an earlier one (``CreateForwardGraph`` in
``src/imperative/cached_op.h``). It also merges common subexpressions, and copies outputs that are
equal then (``EliminateCommonNodes`` in ``src/executor/eliminate_common_expr_pass.cc``). Its
gradient starts from the copies. The gradient of an executor starts from the outputs of the symbol:
of two gradients of one result it uses only the last, and it does not merge what CachedOp merges.

CachedOp reads the gradient of an output from the caller's array, which it never overwrites. An
executor first copies the array (``AttrHint`` in ``src/executor/graph_executor.cc``), and may then
compute in place of the copy.

An executor adds the terms of a gradient in place (``operators.added``); CachedOp does so only with
``static_alloc``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Mapping, Sequence

from memonger.graph.forward import AFTERWARDS, IDENTITY, Entry
from memonger.graph.inputs import read_shapes
from memonger.graph.operators.inplace import reads_overwritten
from memonger.graph.read import forward_graph
from memonger.graph.training import merged_nodes
from memonger.support.errors import MemongerError
from memonger.support.mxnet import Settings
from memonger.support.symbols import attributes, load_nodes, read
from memonger.support.types import Symbol

if TYPE_CHECKING:
    from memonger.graph.operators.tensors import Shape


def merged(symbol: Symbol, shapes: Mapping[str, Shape], types: Mapping[str, str]) -> Sequence[int]:
    """Return for each node of a symbol the node with which MXNet merges it, or itself."""
    if not Settings().merging:
        return range(len(read(symbol)["nodes"]))
    return merged_nodes(forward_graph(symbol, read_shapes(symbol, shapes, {}, types)))


def adding_afterwards(symbol: Symbol) -> Symbol:
    """Return the symbol, marked if a plan must not add terms of gradients in place."""
    graph = read(symbol)
    reads = Counter(tuple(entry[:2]) for node in graph["nodes"] for entry in node["inputs"])
    reads.update(tuple(head[:2]) for head in graph["heads"])
    if max(reads.values()) < Settings().sum_cap:
        return symbol
    for node in graph["nodes"]:
        if node["op"] == "null":
            node.setdefault("attrs", {})[AFTERWARDS] = "True"
    return load_nodes(graph["nodes"], graph["heads"])


def with_copied_outputs(
    symbol: Symbol, shapes: Mapping[str, Shape], types: Mapping[str, str]
) -> Symbol:
    """Return the symbol with copies of those outputs that CachedOp copies.

    Raises
    ------
    MemongerError
        If an executor would compute other gradients than CachedOp.
    """
    graph = read(symbol)
    nodes = graph["nodes"]
    for node in (nodes[a] for a, *_ in graph["heads"]):
        if reads_overwritten(f"_backward_{node['op']}", attributes(node)):
            raise MemongerError(
                f"{node['name']!r} (PReLU) is an output of the block, where the gradient of its "
                "slope would differ from Gluon's with a plan; plan a larger block, in which "
                "another operator reads it"
            )
    if len(symbol) == 1:
        return symbol
    same = merged(symbol, shapes, types)
    copies: dict[Entry, Entry] = {}  # one for each result, because MXNet would merge two
    for i, node in enumerate(nodes):
        if node["op"] == IDENTITY and not node.get("attrs"):
            (a, b, *_), *_ = node["inputs"]
            copies.setdefault((same[a], b), (same[i], 0))
    heads: list[Entry] = []
    for a, b, *_ in graph["heads"]:
        head = same[a], b
        while head in heads:
            if head not in copies:
                name = f"{nodes[head[0]]['name']}_copy{len(nodes)}"
                nodes.append({"op": IDENTITY, "name": name, "inputs": [[*head, 0]]})
                copies[head] = len(nodes) - 1, 0
            head = copies[head]
        heads.append(head)
    return load_nodes(nodes, [[*head, 0] for head in heads])
