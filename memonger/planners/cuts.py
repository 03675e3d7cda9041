"""Where a network can be cut: what must be kept at each point of its execution order."""

from typing import Dict, List, NamedTuple, Set, Tuple

import numpy as np

from memonger.forward import Entry, ForwardGraph


class Cut(NamedTuple):
    """A point of the execution order and what later operators read of what came before it.

    Attributes
    ----------
    after : int
        The operator (node index) after which it lies.
    keep : tuple of int
        The operators whose results are alive there.
    size : int
        Bytes of those results, 4 to an element as MXNet's planner counts.
    """

    after: int
    keep: Tuple[int, ...]
    size: int


def all_cuts(graph: ForwardGraph) -> List[Cut]:
    """One cut after each operator but the last; variables do not count, they are there anyway."""
    last: Dict[Entry, int] = {}
    for i, node in enumerate(graph.nodes):
        for entry in node.inputs:
            last[entry] = i
    alive: Set[Entry] = set()
    size = 0
    cuts = []
    ending: Dict[int, List[Entry]] = {}
    for i in graph.operators:
        for k, tensor in enumerate(graph.tensors[i]):
            if (i, k) in last:
                alive.add((i, k))
                size += 4 * tensor.elements
                ending.setdefault(last[(i, k)], []).append((i, k))
        for entry in ending.pop(i, ()):
            alive.discard(entry)
            size -= 4 * graph.tensors[entry[0]][entry[1]].elements
        cuts.append(Cut(i, tuple(sorted({a for a, _ in alive})), size))
    return cuts[:-1]


def single_tensor_cuts(graph: ForwardGraph) -> List[int]:
    """The operators whose result alone carries everything onwards (articulation points)."""
    return [cut.after for cut in all_cuts(graph) if cut.keep == (cut.after,)]


def cheap_cuts(graph: ForwardGraph, most: int) -> List[Cut]:
    """At most ``most`` cuts that are worth trying: local minima of what they keep, spread evenly.

    Where there are more, the cheapest of each of ``most`` equal stretches of the order are taken.
    """
    cuts = all_cuts(graph)
    sizes = [cut.size for cut in cuts]
    low = [
        cut
        for k, cut in enumerate(cuts)
        if cut.keep
        and (k == 0 or sizes[k] <= sizes[k - 1])
        and (k + 1 == len(cuts) or sizes[k] <= sizes[k + 1])
    ]
    if len(low) <= most:
        return low
    bounds = np.linspace(0, len(low), most + 1).astype(int)
    return [min(low[a:b], key=lambda cut: cut.size) for a, b in zip(bounds, bounds[1:])]
