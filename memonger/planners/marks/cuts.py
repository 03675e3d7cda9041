"""Where a network can be cut: what must be kept at each point of its execution order."""

from __future__ import annotations

from typing import Callable, Collection, Iterator, NamedTuple, Sequence

import numpy as np

from memonger.costs.replay import Timeline, replay
from memonger.graph.arrays import KEPT
from memonger.graph.forward import Entry, ForwardGraph
from memonger.graph.training import TrainingGraph
from memonger.support.kernels import Struct
from memonger.support.types import Doubles, Int64s


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


class Weights(Struct):
    """A network as dynamic programming over its cuts sees it."""


def weigh(
    training: TrainingGraph, cuts: Sequence[Cut], exponents: Sequence[float]
) -> Iterator[Weights]:
    """Weigh the results of a network with their bytes raised to each of these exponents.

    MXNet's planner hands out whole blocks, so that the number of live results counts as well as
    their bytes; the smaller the exponent, the more.
    """
    t, graph, facts = training.arrays, training.graph, training.facts
    read = {(i, 0) for i in graph.operators if facts[i].own_output}  # by gradients
    read.update(graph.nodes[i].inputs[k] for i in graph.operators for k in facts[i].inputs)
    results = sorted(entry for entry in read if not graph.nodes[entry[0]].is_variable)
    maker, output = np.array(results, dtype=np.int64).reshape(-1, 2).T
    step, line = _gradient_steps(training)
    powers = line.nbytes[:, None].astype(np.float64) ** exponents
    # Of what is alive when the gradient of each node runs, all but results before it: gradients,
    # and results of later operators whose readers have not run yet.
    row, stop = line.row.astype(np.int32), line.stop.astype(np.int32)
    started = np.searchsorted(line.start, step, side="right")
    beside = [
        powers[np.flatnonzero((row[:count] > i) & (stop[:count] >= now))].sum(axis=0)
        for i, (now, count) in enumerate(zip(step, started))
    ]
    bounds = [0] + [cut.after + 1 for cut in cuts] + [t.forward]
    kept = [(k, a, b) for k, cut in enumerate(cuts) for a, b in cut.entries]
    cut_of_kept, kept_maker, kept_output = np.array(kept, dtype=np.int64).reshape(-1, 3).T
    for exponent, more in zip(exponents, np.transpose(beside)):
        weight = (4.0 * t.elements) ** exponent
        read_by = np.bincount(maker + 1, weight[t.output_start[maker] + output], t.forward + 1)
        until = np.cumsum(read_by, dtype=np.float64)  # of integers where nothing is read
        highest = until[1:] + more
        kept_weight = weight[t.output_start[kept_maker] + kept_output]
        keep = np.bincount(cut_of_kept, kept_weight, len(cuts))
        most = [highest[a:b].max() for a, b in zip(bounds, bounds[1:])]
        yield Weights(
            until=until[bounds], highest=np.array([0.0, *most]), keep=np.array([0.0, *keep, 0.0])
        )


def _gradient_steps(training: TrainingGraph) -> tuple[Int64s, Timeline]:
    """Find the last step in which a gradient of each forward node runs (-1: none), without a plan.

    Returned too is the timeline of that.
    """
    t = training.arrays
    unplanned = replay(training, np.zeros(t.forward, dtype=np.bool_))
    step = np.full(t.forward, -1, dtype=np.int64)
    step_of_row = np.full(len(t.variable), -1, dtype=np.int64)
    step_of_row[unplanned.order] = np.arange(len(unplanned.order))
    rows = np.repeat(np.arange(len(t.variable)), np.diff(t.read_start))
    gradient = (t.read_owner != KEPT) & (rows >= 2 * t.forward)
    np.maximum.at(step, t.read_owner[gradient], step_of_row[rows[gradient]])
    return step, unplanned.timeline()


def walk(weights: Weights, segments: float) -> list[int]:
    """Choose cuts, by index, that divide a network into about so many segments of equal weight.

    As the original's walk (Chen et al. 2016, algorithm 3) with a budget between two cuts; of the
    cuts near the end of a segment the one that keeps least is taken.
    """
    budget = weights.until[-1] / segments
    until, keep = weights.until[1:-1], weights.keep[1:-1]
    chosen: list[int] = []
    start = 0.0
    while True:
        near = np.flatnonzero((until > start + budget / 2) & (until <= start + budget * 1.25))
        if not len(near):
            near = np.flatnonzero(until > start + budget)[:1]
            if not len(near):
                return chosen
        waste = keep[near] + np.abs(until[near] - start - budget) / 4
        chosen.append(int(near[np.argmin(waste)]))
        start = float(until[chosen[-1]])


def golden_section(cost: Callable[[float], float], low: float, high: float, steps: int) -> None:
    """Call ``cost`` at ``steps`` points that close in on a minimum between low and high."""
    ratio = (5**0.5 - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    cost_a, cost_b = cost(a), cost(b)
    for _ in range(steps - 2):
        if cost_a <= cost_b:
            high, b, cost_b = b, a, cost_a
            a = high - ratio * (high - low)
            cost_a = cost(a)
        else:
            low, a, cost_a = a, b, cost_b
            b = low + ratio * (high - low)
            cost_b = cost(b)
