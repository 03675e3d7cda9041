"""The outputs of a block, each by itself, as the block's own CachedOp has them.

CachedOp copies outputs that are the same as an earlier one (``CreateForwardGraph`` in
``src/imperative/cached_op.h``). It merges common subexpressions, and copies outputs that are the
same then (``EliminateCommonNodes`` in ``src/executor/eliminate_common_expr_pass.cc``). Its gradient
starts from the copies. An executor's starts from the outputs of the symbol: of two gradients of one
result it takes the last, and does not merge what CachedOp merges in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

from memonger.graph.forward import COPY, Entry
from memonger.graph.inputs import read_shapes
from memonger.graph.read import forward_graph
from memonger.graph.training import merged_nodes
from memonger.support.mxnet import Settings
from memonger.support.symbols import load_nodes, read
from memonger.support.types import Symbol

if TYPE_CHECKING:
    from memonger.graph.operators.tensors import Shape


def with_copied_outputs(
    symbol: Symbol, shapes: Mapping[str, Shape], types: Mapping[str, str]
) -> Symbol:
    """Return the symbol with copies of the outputs that CachedOp copies."""
    if len(symbol) == 1:
        return symbol
    graph = read(symbol)
    nodes, same = graph["nodes"], list(range(len(graph["nodes"])))
    if Settings().merging:
        spec = read_shapes(symbol, shapes, {}, types)
        same = merged_nodes(forward_graph(symbol, spec))
    copies: dict[Entry, Entry] = {}  # one for each result, for MXNet would merge two
    for i, node in enumerate(nodes):
        if node["op"] == COPY and not node.get("attrs"):
            (a, b, *_), *_ = node["inputs"]
            copies.setdefault((same[a], b), (same[i], 0))
    heads: list[Entry] = []
    for a, b, *_ in graph["heads"]:
        head = same[a], b
        while head in heads:
            if head not in copies:
                name = f"{nodes[head[0]]['name']}_copy{len(nodes)}"
                nodes.append({"op": COPY, "name": name, "inputs": [[*head, 0]]})
                copies[head] = len(nodes) - 1, 0
            head = copies[head]
        heads.append(head)
    return load_nodes(nodes, [[*head, 0] for head in heads])
