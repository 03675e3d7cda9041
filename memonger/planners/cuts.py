"""Where a network can be cut: what must be kept at each point of its execution order."""

from typing import Dict, List, Set

from memonger.forward import Entry, ForwardGraph


def single_tensor_cuts(graph: ForwardGraph) -> List[int]:
    """The operators whose result alone carries everything onwards (articulation points).

    After such an operator has run, its first output is the only result that later operators read;
    parameters and inputs do not count, for they are there anyway.
    """
    last: Dict[Entry, int] = {}
    for i, node in enumerate(graph.nodes):
        for entry in node.inputs:
            last[entry] = i
    alive: Set[Entry] = set()
    cuts = []
    for i in graph.operators:
        alive = {entry for entry in alive if last[entry] > i}
        outputs = ((i, k) for k in range(len(graph.tensors[i])))
        alive.update(entry for entry in outputs if last.get(entry, -1) > i)
        if alive == {(i, 0)}:
            cuts.append(i)
    return cuts
