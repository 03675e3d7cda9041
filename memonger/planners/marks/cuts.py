"""Find cuts of a network: points of its execution order where few bytes of results are alive."""

from __future__ import annotations

from typing import Collection, Iterator, NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import Entry, ForwardGraph
from memonger.support.types import Doubles, Int64s


class Cut(NamedTuple):
    """A point of the execution order, and the results that are alive there."""

    after: int  # the last operator before the cut
    entries: tuple[Entry, ...]  # results from before the cut that operators behind it read

    @property
    def keep(self) -> tuple[int, ...]:
        """The operators whose results are alive at the cut, ascending."""
        return tuple(sorted({a for a, _ in self.entries}))


def _results(graph: ForwardGraph) -> Int64s:
    """Return node, output, last reader and bytes of the results that operators read, (4, n).

    MXNet's planner counts 4 bytes an element, and so do these.
    """
    last = {entry: i for i, node in enumerate(graph.nodes) for entry in node.inputs}
    entries = sorted(entry for entry in last if not graph.nodes[entry[0]].is_variable)
    results = [(a, b, last[a, b], 4 * graph.tensors[a][b].elements) for a, b in entries]
    return np.array(results, dtype=np.int64).reshape(-1, 4).T


def _alive(graph: ForwardGraph, results: Int64s, weights: Int64s | None) -> Doubles:
    """Return the total weight (default: 1 each) of the results alive after each node, (nodes,)."""
    maker, _, last, _ = results
    change = [np.bincount(nodes, weights, len(graph.nodes)) for nodes in (maker, last)]
    return np.cumsum(change[0] - change[1])


def cheap_cuts(graph: ForwardGraph, most: int, wanted: Collection[int] = ()) -> list[Cut]:
    """List about ``most`` cuts that are worth trying: local minima of the bytes that they save.

    Parameters
    ----------
    graph : ForwardGraph
        The network.
    most : int
        If there are more minima, their sequence is divided into ``most`` equal parts, and the
        cheapest cut of each part is returned.
    wanted : collection of int
        Operators after which a cut is returned too, unless they are more than ``most``.

    Returns
    -------
    list of Cut
        In execution order. Each saves at least one result.
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
    graph: ForwardGraph, cuts: Sequence[Cut], exponents: Sequence[float], walks: int
) -> Iterator[list[list[int]]]:
    """Choose cuts by `walk`, once for each of ``walks`` numbers of segments.

    Yields for each exponent their indices, for each walk. The bytes of results are raised to the
    exponent. MXNet's planner assigns whole blocks, so that the number of live results matters as
    well as their bytes. A smaller exponent gives the number more weight.
    """
    results, after = _results(graph), [cut.after for cut in cuts]
    maker, _, _, nbytes = results
    for exponent in exponents:
        weights = nbytes.astype(np.float64) ** exponent
        until = np.cumsum(np.bincount(maker, weights, len(graph.nodes)), dtype=np.float64)[after]
        size = _alive(graph, results, weights)[after]
        yield [walk(until, size, k) for k in np.geomspace(2, max(3, len(cuts)), walks)]


def walk(until: Doubles, size: Doubles, segments: float) -> list[int]:
    """Choose cuts that divide a network into about ``segments`` segments of equal size.

    This is the walk of Chen et al. 2016, algorithm 3, with a budget between two cuts. It chooses,
    of the cuts near the end of a segment, the one that saves least.

    Parameters
    ----------
    until, size : array of float64, (cuts,)
        The total of all results before each cut, ascending, and of the results that it saves.
    segments : float
        The number of segments.

    Returns
    -------
    list of int
        The indices of the chosen cuts, ascending.
    """
    budget = until[-1] / segments
    chosen: list[int] = []
    start = 0.0
    while True:
        ends = start + budget / 2, start + budget * 1.25, start + budget
        first, last, beyond = until.searchsorted(ends, "right").tolist()
        if first == last:
            first, last = beyond, beyond + 1
            if beyond == len(until):
                return chosen
        waste = size[first:last] + np.abs(until[first:last] - start - budget) / 4
        chosen.append(first + int(waste.argmin()))
        start = float(until[chosen[-1]])
