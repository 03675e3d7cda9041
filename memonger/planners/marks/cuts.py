"""Where a network can be cut: what must be kept at each point of its execution order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Collection, Iterator, NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import Entry, ForwardGraph

if TYPE_CHECKING:
    from memonger.support.types import Doubles, Int64s

EXPONENTS = (0.0, 0.35, 1.0)
POWERS = (1.0, 1.5, 2.0)
COUNTS = 16  # numbers of segments that are tried
MOST_SEGMENTS = 4.0  # times the square root of the nodes


class Cut(NamedTuple):
    """A point of the execution order, and the results alive there: later operators read them."""

    after: int  # the operator before it
    entries: tuple[Entry, ...]
    size: int  # bytes, 4 to an element as MXNet's planner counts

    @property
    def keep(self) -> tuple[int, ...]:
        """The operators whose results are alive there."""
        return tuple(sorted({a for a, _ in self.entries}))


def _results(graph: ForwardGraph) -> Int64s:
    """Return maker, output, last reader and bytes of the results that operators read, (4, n)."""
    last = {entry: i for i, node in enumerate(graph.nodes) for entry in node.inputs}
    entries = sorted(entry for entry in last if not graph.nodes[entry[0]].is_variable)
    results = [(a, b, last[a, b], 4 * graph.tensors[a][b].elements) for a, b in entries]
    return np.array(results, dtype=np.int64).reshape(-1, 4).T


def _alive(graph: ForwardGraph, results: Int64s, weights: Int64s | None) -> Doubles:
    """Sum up the weights (by default 1) of the results that are alive after each node."""
    maker, _, last, _ = results
    change = [np.bincount(nodes, weights, len(graph.nodes)) for nodes in (maker, last)]
    return np.cumsum(change[0] - change[1])


def single_tensor_cuts(graph: ForwardGraph) -> list[int]:
    """List the operators whose results alone carry everything onwards (articulation points)."""
    results = _results(graph)
    own = np.bincount(results[0], minlength=len(graph.nodes))
    return np.flatnonzero((own > 0) & (own == _alive(graph, results, None))).tolist()


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
        kept = tuple([entries[k] for k in alive.tolist()])
        cuts.append(Cut(after, kept, int(nbytes[alive].sum())))
    return [cut for cut in cuts if cut.entries]


def spread_cuts(graph: ForwardGraph, cuts: Sequence[Cut]) -> Iterator[list[list[int]]]:
    """Yield groups of sets of cuts (their numbers), from few long segments to many short ones.

    A segment ends where least is kept in its second half. Its length is the sum of its results'
    elements raised to an exponent: of large results alone, or of their number too, for MXNet's
    planner hands out whole blocks. What is kept at a cut is gone once the gradients behind it have
    run, so that earlier segments may be longer (``POWERS``). A group has one exponent and power.
    """
    after = np.array([cut.after for cut in cuts], dtype=np.int64)
    size = np.array([cut.size for cut in cuts], dtype=np.int64)
    elements = np.zeros(len(graph.nodes))
    elements[list(graph.operators)] = [
        sum(tensor.elements for tensor in graph.tensors[i]) for i in graph.operators
    ]
    most = max(3, min(len(cuts) + 1, MOST_SEGMENTS * len(graph.nodes) ** 0.5))
    counts = np.unique(np.geomspace(2, most, COUNTS).astype(int))
    for exponent, power in itertools.product(EXPONENTS, POWERS):
        length = np.cumsum(np.where(elements > 0, elements**exponent, 0.0))
        group = []
        for count in counts:
            ends = length[-1] * (1 - np.linspace(1, 0, count + 1) ** power)
            middles = (ends[:-2] + ends[1:-1]) / 2
            stretches = np.searchsorted(length[after], [middles, ends[1:-1]]).T.tolist()
            group.append([lo + int(np.argmin(size[lo:hi])) for lo, hi in stretches if lo < hi])
        yield group
