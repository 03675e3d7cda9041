"""Where a network can be cut: what must be kept at each point of its execution order."""

from __future__ import annotations

from typing import Collection, Iterator, NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import Entry, ForwardGraph
from memonger.support.types import Doubles, Int64s


class Cut(NamedTuple):
    """A point of the execution order, and the results alive there: later operators read them."""

    after: int  # the operator before it
    entries: tuple[Entry, ...]

    @property
    def keep(self) -> tuple[int, ...]:
        """The operators whose results are alive there."""
        return tuple(sorted({a for a, _ in self.entries}))


def _results(graph: ForwardGraph) -> Int64s:
    """Return maker, output, last reader and bytes of the results that operators read, (4, n).

    Bytes are 4 to an element, as MXNet's planner counts.
    """
    last = {entry: i for i, node in enumerate(graph.nodes) for entry in node.inputs}
    entries = sorted(entry for entry in last if not graph.nodes[entry[0]].is_variable)
    results = [(a, b, last[a, b], 4 * graph.tensors[a][b].elements) for a, b in entries]
    return np.array(results, dtype=np.int64).reshape(-1, 4).T


def _alive(graph: ForwardGraph, results: Int64s, weights: Int64s | None) -> Doubles:
    """Sum up the weights (by default 1) of the results that are alive after each node."""
    maker, _, last, _ = results
    change = [np.bincount(nodes, weights, len(graph.nodes)) for nodes in (maker, last)]
    return np.cumsum(change[0] - change[1])


def cheap_cuts(graph: ForwardGraph, most: int, wanted: Collection[int] = ()) -> list[Cut]:
    """List about ``most`` cuts that are worth trying: local minima of the bytes they keep.

    Where there are more, the cheapest of each of ``most`` equal stretches of the order are taken.
    There is a cut after the operators ``wanted`` too, unless they are more than ``most``.
    """
    operators, results = np.array(graph.operators, dtype=np.int64), _results(graph)
    maker, output, last, nbytes = results
    size = _alive(graph, results, nbytes)[operators]
    low = np.flatnonzero((size[:-1] <= np.append(np.inf, size)[:-2]) & (size[:-1] <= size[1:]))
    low = low[_alive(graph, results, None)[operators[low]] > 0]
    if len(low) > most:
        bounds = np.linspace(0, len(low), most + 1).astype(int)
        low = np.array([part[np.argmin(size[part])] for part in np.split(low, bounds[1:-1])])
    places = {*operators[low].tolist()}
    if len(wanted) <= most:
        places |= {*wanted} & {*graph.operators}
    cuts, entries = [], list(zip(maker.tolist(), output.tolist()))
    for after in sorted(places):
        alive = np.flatnonzero((maker <= after) & (last > after))
        cuts.append(Cut(after, tuple([entries[k] for k in alive.tolist()])))
    return [cut for cut in cuts if cut.entries]


def walk_over(
    graph: ForwardGraph, cuts: Sequence[Cut], exponent: float, walks: int
) -> Iterator[list[int]]:
    """Walk over cuts with so many budgets; yield the cuts chosen, by index.

    The bytes of results are raised to the exponent. MXNet's planner hands out whole blocks, so that
    the number of live results counts as well as their bytes; the smaller the exponent, the more.
    """
    results, after = _results(graph), [cut.after for cut in cuts]
    maker, _, _, nbytes = results
    weights = nbytes.astype(np.float64) ** exponent
    until = np.cumsum(np.bincount(maker, weights, len(graph.nodes)), dtype=np.float64)[after]
    size = _alive(graph, results, weights)[after]
    for segments in np.geomspace(2, max(3, len(cuts)), walks):
        yield walk(until, size, segments)


def walk(until: Doubles, size: Doubles, segments: float) -> list[int]:
    """Choose cuts, by index, that divide a network into about so many segments of equal size.

    As the original's walk (Chen et al. 2016, algorithm 3) with a budget between two cuts; of the
    cuts near the end of a segment the one that keeps least is taken. ``until`` sums up the results
    before each cut, ``size`` those that it keeps.
    """
    budget = until[-1] / segments
    chosen: list[int] = []
    start = 0.0
    while True:
        near = np.flatnonzero((until > start + budget / 2) & (until <= start + budget * 1.25))
        if not len(near):
            near = np.flatnonzero(until > start + budget)[:1]
            if not len(near):
                return chosen
        waste = size[near] + np.abs(until[near] - start - budget) / 4
        chosen.append(int(near[np.argmin(waste)]))
        start = float(until[chosen[-1]])
