"""Where a network can be cut: what must be kept at each point of its execution order."""

from __future__ import annotations

from typing import Collection, NamedTuple, Sequence

import numpy as np

from memonger.costs.replay import replay
from memonger.graph.arrays import KEPT
from memonger.graph.forward import Entry, ForwardGraph
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled


class Cut(NamedTuple):
    """A point of the execution order, and the results alive there: later operators read them."""

    after: int  # the operator before it
    entries: tuple[Entry, ...]
    size: int  # bytes, 4 to an element as MXNet's planner counts

    @property
    def keep(self) -> tuple[int, ...]:
        """The operators whose results are alive there."""
        return tuple(sorted({a for a, _ in self.entries}))


def _results(graph: ForwardGraph) -> np.ndarray:
    """Of each result that an operator reads its maker, which output, the last reader, the bytes."""
    last: dict[Entry, int] = {}
    for i, node in enumerate(graph.nodes):
        for entry in node.inputs:
            if not graph.nodes[entry[0]].is_variable:
                last[entry] = i
    results = [(a, b, last[a, b], 4 * graph.tensors[a][b].elements) for a, b in sorted(last)]
    return np.array(results, dtype=np.int64).reshape(-1, 4).T


def _alive(graph: ForwardGraph, results: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """After each node the sum of the weights (1) of the results that are alive."""
    made, _, last, _ = results
    change = [np.bincount(at, weights, len(graph.nodes)) for at in (made, last)]
    return np.cumsum(change[0] - change[1])


def single_tensor_cuts(graph: ForwardGraph) -> list[int]:
    """The operators whose results alone carry everything onwards (articulation points)."""
    results = _results(graph)
    own = np.bincount(results[0], minlength=len(graph.nodes))
    return np.flatnonzero((own > 0) & (own == _alive(graph, results, None))).tolist()


def cheap_cuts(graph: ForwardGraph, most: int, wanted: Collection[int] = ()) -> list[Cut]:
    """At most about ``most`` cuts that are worth trying: local minima of the bytes they keep.

    Where there are more, the cheapest of each of ``most`` equal stretches of the order are taken.
    There is a cut after the ``wanted`` operators too, unless they are more than ``most``.
    """
    operators, results = np.array(graph.operators, dtype=np.int64), _results(graph)
    made, output, last, nbytes = results
    size = _alive(graph, results, nbytes)[operators]
    before = np.concatenate([[np.inf], size])[:-1]
    low = np.flatnonzero((size[:-1] <= before[:-1]) & (size[:-1] <= size[1:]))
    low = low[_alive(graph, results, None)[operators[low]] > 0]
    if len(low) > most:
        low = np.array([part[np.argmin(size[part])] for part in np.array_split(low, most)])
    where = {*operators[low].tolist(), *(wanted if len(wanted) <= most else ())}
    cuts = []
    for after in sorted(where):
        alive = (made <= after) & (last > after)
        entries = zip(made[alive].tolist(), output[alive].tolist())
        cuts.append(Cut(after, tuple(entries), int(nbytes[alive].sum())))
    return [cut for cut in cuts if cut.entries]


def recomputed_between(cuts: Sequence[Cut], nodes: int) -> np.ndarray:
    """Mark (bool, of each node) all but what is alive at cuts and what comes after the last."""
    mask = np.ones(nodes, dtype=np.bool_)
    for cut in cuts:
        mask[list(cut.keep)] = False
    if cuts:
        mask[cuts[-1].after + 1 :] = False
    return mask


class Weights(NamedTuple):
    """A network as dynamic programming over its cuts sees it: n cuts, n + 1 pieces between them.

    The first element of each array stands for the beginning of the network, the last for its end.
    """

    until: np.ndarray  # what gradients read of the results of all operators before each cut
    highest: np.ndarray  # the most while the gradients of the piece before it run, without a plan
    keep: np.ndarray  # what must be kept at each cut


def weigh(training: TrainingGraph, cuts: Sequence[Cut], exponent: float) -> Weights:
    """Weigh the results of a network with their bytes raised to an exponent.

    MXNet's planner hands out whole blocks, so that the number of live results counts as well as
    their bytes; the smaller the exponent, the more.
    """
    t, rows = training.tables, len(training.ops)
    weight = (4.0 * t.elements) ** exponent
    found = replay(training, np.zeros(t.forward, dtype=np.bool_))
    line = found.timeline()
    weights = weight[t.output_start[line.row] + line.output] * (line.row >= t.forward)
    gradients = np.zeros(line.steps + 1)  # that are alive in each step; none after the last
    np.add.at(gradients, line.start, weights)
    np.add.at(gradients, line.stop + 1, -weights)
    gradients = np.cumsum(gradients)

    place = np.full(rows, -1, dtype=np.int64)
    place[found.order] = np.arange(len(found.order))
    owned = training.owners != KEPT
    step = np.full(t.forward, -1, dtype=np.int64)  # the last in which a gradient of a node runs
    np.maximum.at(step, training.owners[owned], place[2 * t.forward :][owned])

    reader = np.repeat(np.arange(rows), np.diff(t.use_start))
    by_gradient = (reader >= 2 * t.forward) & (t.use_owner != KEPT)
    read = np.unique(t.use_entry[by_gradient])
    maker = np.searchsorted(t.output_start, read, side="right") - 1
    until = np.concatenate([[0], np.cumsum(np.bincount(maker, weight[read], t.forward))])

    highest = until[1:] + gradients[step]
    after = [0] + [cut.after + 1 for cut in cuts] + [t.forward]
    keep = [sum(weight[t.output_start[a] + b] for a, b in cut.entries) for cut in cuts]
    most = [highest[a:b].max() for a, b in zip(after, after[1:])]
    return Weights(until[after], np.array([0.0, *most]), np.array([0.0, *keep, 0.0]))


@compiled
def cheapest_cuts(weights, limit):  # type: ignore[no-untyped-def]
    """The cuts that keep least while no piece needs more than ``limit`` besides what was kept.

    Their indices in ascending order, none if there are no such cuts; and whether there are.
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
