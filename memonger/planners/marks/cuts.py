"""Where a network can be cut: what must be kept at each point of its execution order."""

from __future__ import annotations

from typing import Callable, Collection, NamedTuple

import numpy as np

from memonger.costs.replay import Timeline, replay
from memonger.graph.arrays import KEPT
from memonger.graph.forward import Entry, ForwardGraph
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled


class Cut(NamedTuple):
    """A point of the execution order and what later operators read of what came before it.

    It lies ``after`` an operator; ``entries`` are the results that are alive there, of ``size``
    bytes, 4 to an element as MXNet's planner counts.
    """

    after: int
    entries: tuple[Entry, ...]
    size: int

    @property
    def keep(self) -> tuple[int, ...]:
        """The operators whose results are alive there."""
        return tuple(sorted({a for a, _ in self.entries}))


def _ends(graph: ForwardGraph) -> dict[Entry, int]:
    """The last reader of each result of an operator that has one."""
    last: dict[Entry, int] = {}
    for i, node in enumerate(graph.nodes):
        for entry in node.inputs:
            if not graph.nodes[entry[0]].is_variable:
                last[entry] = i
    return last


def _profile(graph: ForwardGraph) -> tuple[np.ndarray, np.ndarray]:
    """After each operator the bytes and the number of results that are alive."""
    size = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    count = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    for (a, b), end in _ends(graph).items():
        nbytes = 4 * graph.tensors[a][b].elements
        size[a] += nbytes
        size[end] -= nbytes
        count[a] += 1
        count[end] -= 1
    operators = graph.operators
    return np.cumsum(size)[operators], np.cumsum(count)[operators]


def _cuts(graph: ForwardGraph, where: Collection[int]) -> list[Cut]:
    """The cuts after these operators."""
    starting: dict[int, list[Entry]] = {}
    ending: dict[int, list[Entry]] = {}
    for entry, end in _ends(graph).items():
        starting.setdefault(entry[0], []).append(entry)
        ending.setdefault(end, []).append(entry)
    alive: dict[Entry, int] = {}
    cuts = []
    for i in graph.operators:
        for a, b in sorted(starting.get(i, ())):
            alive[(a, b)] = 4 * graph.tensors[a][b].elements
        for entry in ending.get(i, ()):
            del alive[entry]
        if i in where:
            cuts.append(Cut(i, tuple(alive), sum(alive.values())))
    return cuts


def single_tensor_cuts(graph: ForwardGraph) -> list[int]:
    """The operators whose result alone carries everything onwards (articulation points)."""
    operators, (_, alive) = graph.operators, _profile(graph)
    ends = _ends(graph)
    own = [sum(ends.get((i, b), i) > i for b in range(len(graph.tensors[i]))) for i in operators]
    return [i for i, a, b in zip(operators[:-1], alive, own) if a == b > 0]


def cheap_cuts(graph: ForwardGraph, most: int, wanted: Collection[int] = ()) -> list[Cut]:
    """At most about ``most`` cuts that are worth trying: local minima of the bytes they keep.

    Where there are more, the cheapest of each of ``most`` equal stretches of the order are taken.

    After the operators ``wanted`` there is one in any case, unless they are more than ``most``.
    """
    operators, (size, count) = graph.operators, _profile(graph)
    low = [
        k
        for k in range(len(operators) - 1)
        if count[k] and (k == 0 or size[k] <= size[k - 1]) and size[k] <= size[k + 1]
    ]
    if len(low) > most:
        bounds = np.linspace(0, len(low), most + 1).astype(int)
        low = [min(low[a:b], key=lambda k: size[k]) for a, b in zip(bounds, bounds[1:])]
    where = {operators[k] for k in low}
    if len(wanted) <= most:
        where.update(i for i in wanted if i != operators[-1])
    return [cut for cut in _cuts(graph, where) if cut.entries]


class Weights(NamedTuple):
    """A network as dynamic programming over its cuts sees it: n cuts, n + 1 pieces between them.

    The first element of each array stands for the beginning of the network, the last for its end.
    ``until`` is what gradients read of the results of all operators before each cut; ``highest``
    the most that there is while the gradients of the piece before a cut run, were nothing
    recomputed (``until`` the operator, and what else is alive then); ``keep`` what must be kept at
    each cut.
    """

    until: np.ndarray
    highest: np.ndarray
    keep: np.ndarray


class Weigher:
    """Weighs the results of a network with their bytes raised to a power.

    MXNet's planner hands out whole blocks, so that the number of live results counts as well as
    their bytes; the smaller the power, the more.
    """

    def __init__(self, training: TrainingGraph, cuts: list[Cut]) -> None:
        graph, facts = training.graph, training.facts
        self.graph, self.cuts = graph, cuts
        read: set[Entry] = set()  # by gradients
        for i in graph.operators:
            read.update(graph.nodes[i].inputs[k] for k in facts[i].inputs)
            if facts[i].own_output:
                read.add((i, 0))
        self._read = sorted(entry for entry in read if not graph.nodes[entry[0]].is_variable)
        self._step, self._timeline = _gradient_steps(training)
        line = self._timeline
        self._orders = [np.argsort(at, kind="stable") for at in (self._step, line.start, line.stop)]

    def __call__(self, power: float) -> Weights:
        graph, cuts, line = self.graph, self.cuts, self._timeline

        def weight(entry: Entry) -> float:
            return float((4.0 * graph.tensors[entry[0]][entry[1]].elements) ** power)

        results = np.zeros(len(graph.nodes) + 1)
        for entry in self._read:
            results[entry[0] + 1] += weight(entry)
        until = np.cumsum(results)
        weights = line.nbytes.astype(np.float64) ** power
        besides = _besides(self._step, line.row, line.start, line.stop, weights, *self._orders)
        highest = until[1:] + besides
        after = [0] + [cut.after + 1 for cut in cuts] + [len(graph.nodes)]
        return Weights(
            until[after],
            np.array([0.0] + [highest[a:b].max() for a, b in zip(after, after[1:])]),
            np.array([0.0] + [sum(map(weight, cut.entries)) for cut in cuts] + [0.0]),
        )


def _gradient_steps(training: TrainingGraph) -> tuple[np.ndarray, Timeline]:
    """For each forward node the last step in which a gradient of it runs, -1 for none; no plan."""
    arrays = training.arrays
    found = replay(training, np.zeros(arrays.forward, dtype=np.bool_))
    step = np.full(arrays.forward, -1, dtype=np.int64)
    place = np.full(len(arrays.variable), -1, dtype=np.int64)
    place[found.order] = np.arange(len(found.order))
    rows = np.repeat(np.arange(len(arrays.variable)), np.diff(arrays.read_start))
    gradient = (arrays.read_owner != KEPT) & (rows >= 2 * arrays.forward) & (place[rows] >= 0)
    np.maximum.at(step, arrays.read_owner[gradient], place[rows[gradient]])
    return step, found.timeline()


@compiled
def _besides(step, row, start, stop, weight, asked, begin, end):  # type: ignore[no-untyped-def]
    """What is alive when the gradient of each forward node runs, but for results before it.

    These are gradients, and results of later operators whose readers have not run yet. Rows are
    forward nodes up to ``len(step)``; sums over them are kept in a tree (Fenwick 1994). The last
    three arguments sort ``step``, ``start`` and ``stop``.
    """
    n = step.shape[0]
    tree = np.zeros(n + 1)
    besides = np.zeros(n)
    gradients = 0.0
    b = e = 0
    for i in asked:
        if step[i] < 0:
            continue
        while b < len(begin) and start[begin[b]] <= step[i]:
            tensor = begin[b]
            b += 1
            if row[tensor] >= n:
                gradients += weight[tensor]
            else:
                _add(tree, row[tensor], weight[tensor])
        while e < len(end) and stop[end[e]] < step[i]:
            tensor = end[e]
            e += 1
            if row[tensor] >= n:
                gradients -= weight[tensor]
            else:
                _add(tree, row[tensor], -weight[tensor])
        later = 0.0
        at = n
        while at > 0:
            later += tree[at]
            at -= at & -at
        at = i + 1
        while at > 0:
            later -= tree[at]
            at -= at & -at
        besides[i] = max(0.0, gradients + later)
    return besides


@compiled
def _add(tree, i, weight):  # type: ignore[no-untyped-def]
    i += 1
    while i < tree.shape[0]:
        tree[i] += weight
        i += i & -i


@compiled
def cheapest_cuts(weights, limit):  # type: ignore[no-untyped-def]
    """The cuts that keep least while no piece needs more than ``limit`` besides what was kept.

    Returns their indices in ascending order, and whether there are such cuts.
    """
    count = len(weights.keep)
    kept = np.full(count, np.inf)  # at the least, if there is a cut here
    kept[0] = 0
    before = np.zeros(count, dtype=np.int64)
    for j in range(1, count):
        highest = 0.0
        for i in range(j - 1, -1, -1):
            highest = max(highest, weights.highest[i + 1])
            piece = highest - weights.until[i]
            if piece > limit:
                break
            if kept[i] + piece <= limit and kept[i] + weights.keep[j] < kept[j]:
                kept[j] = kept[i] + weights.keep[j]
                before[j] = i
    chosen = np.zeros(count, dtype=np.bool_)
    at = before[count - 1]
    while at > 0:
        chosen[at - 1] = True
        at = before[at]
    return np.flatnonzero(chosen), np.isfinite(kept[count - 1])


def walk(weights: Weights, pieces: float) -> list[int]:
    """Cuts, by index, that divide a network into about so many pieces of equal weight.

    As the original's walk (Chen et al. 2016, algorithm 3) with a budget between two cuts; of the
    cuts near the end of a piece the one that keeps least is taken.
    """
    budget = weights.until[-1] / pieces
    at, keep = weights.until[1:-1], weights.keep[1:-1]
    chosen: list[int] = []
    start = 0.0
    while True:
        near = np.flatnonzero((at > start + budget / 2) & (at <= start + budget * 1.25))
        if not len(near):
            near = np.flatnonzero(at > start + budget)[:1]
            if not len(near):
                return chosen
        waste = keep[near] + np.abs(at[near] - start - budget) / 4
        chosen.append(int(near[np.argmin(waste)]))
        start = float(at[chosen[-1]])


def golden_section(cost: Callable[[float], float], low: float, high: float, steps: int) -> None:
    """Ask for ``cost`` at ``steps`` points that close in on a minimum between low and high."""
    ratio = (5**0.5 - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = cost(a), cost(b)
    for _ in range(steps - 2):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = cost(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = cost(b)
