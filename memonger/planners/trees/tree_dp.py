"""Initial solutions: trees by dynamic programming for little work within a memory, binomial trees.

Candidate cuts lie where little is alive. A segment between two of them is a base case (what its
gradients read is computed, then the gradients), or it is cut as in Revolve: run to the cut, process
the right part with the memory that is left, then the left part with all of it. One table gives the
trees of a whole frontier of memory and work.

Sizes are raised to several exponents: MXNet's planner hands out whole blocks, so that the number of
tensors counts as well as their bytes. The memory is an estimate from what is alive at once; every
tree is evaluated to the byte afterwards.

Optimal recomputation of arbitrary graphs: Feng and Huang 2021, "Optimal Gradient Checkpoint Search
for Arbitrary Computation Graphs".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Iterator, Sequence

import numpy as np

from memonger.graph.order import gathered
from memonger.planners.trees.price import Problem
from memonger.planners.trees.trees import LEAF, binomial_tree, fewest_states
from memonger.schedules.training_step import Parts
from memonger.support.compiled import compiled

EXPONENTS = (0.75, 0.5, 0.35, 0.2)  # of a tensor's bytes
SCALES = 2  # of memory, the last one close to the least that is possible
LISTS = len(EXPONENTS) * SCALES
SLOTS = 200  # steps of memory at each scale
WIDEST = 0.6  # of the memory without recomputation: the first scale
CLOSER = 1.5  # times the least memory that is possible: the last
CUTS = 140  # candidates; the time grows with the third power of their number
ENOUGH = 1.25  # times the cuts that are wanted: all local minima are taken
NEARBY = (0, 1, -1, 2, -2, 3, -3)  # cuts are tried so far from those of good trees
STRIDES = (1, 2, 4, 8)  # binomial trees: cuts at every operator, every second ...

IMPOSSIBLE = np.float32(1e30)
FLAGS = 3  # ALIVE, ALL, COSTLY


@dataclass(frozen=True)
class Tensors:
    """Bytes of results or of gradients, and the positions from and to which they are alive.

    Results are alive from the operator that makes them to the last one that reads them, and then
    again to the gradient of the operator ``wanted``, the first that reads them (the number of
    operators for none). Gradients are alive down to the operator ``start``. ``in_place`` tells the
    positions at which something may be written in place.
    """

    start: np.ndarray
    stop: np.ndarray
    wanted: np.ndarray
    nbytes: np.ndarray
    in_place: np.ndarray

    def alive(self, size: np.ndarray) -> np.ndarray:
        """The total size that is alive while each position runs."""
        count = len(self.in_place)
        change = np.bincount(self.start, size, count + 1)
        change -= np.bincount(self.stop + 1, size, count + 1)
        return np.cumsum(change)[:count]

    def saved(self, size: np.ndarray, made: np.ndarray, freed: np.ndarray) -> np.ndarray:
        """The size at each position that is written in place."""
        count, apart = len(self.in_place), made != freed
        freed_size = np.bincount(freed[apart], size[apart], count)
        return np.where(self.in_place, np.minimum(np.bincount(made, size, count), freed_size), 0.0)


@dataclass(frozen=True)
class Segments:
    """Sizes of segments, [s, t] from boundary s to boundary t.

    ``kept``, (flag, s, t): what is saved of it while what is right of it is processed; ``highest``:
    the most while it is run through; ``leaf``: as a base case; ``gradients``, (t,): those alive at
    a boundary; ``work``: of running through; ``recomputed``, (flag, s, t): work of a base case.
    """

    bounds: np.ndarray
    kept: np.ndarray
    highest: np.ndarray
    leaf: np.ndarray
    gradients: np.ndarray
    work: np.ndarray
    recomputed: np.ndarray


class InitialTrees:
    """The initial solutions of one network.

    Parameters
    ----------
    parts : Parts
    problem : Problem
    """

    def __init__(self, parts: Parts, problem: Problem) -> None:
        self.steps, self.count = problem.steps, len(problem.node)
        self.results, self.gradients = _tensors(parts, problem)
        low = self.results.alive(self.results.nbytes ** EXPONENTS[0])
        self.alive = low - np.bincount(
            self.results.start, self.results.nbytes ** EXPONENTS[0], self.count
        )

    def candidate_cuts(self, most: int = CUTS) -> np.ndarray:
        """Take about so many boundaries where little is alive, the ends besides.

        All of them if they are few; otherwise local minima, of these the deepest (the local minima
        among them) as long as there are enough; then the least of equal stretches.
        """
        inside = np.arange(1, self.count)
        if len(inside) > most:
            low = self._minima(inside)
            deeper = self._minima(low)
            while most <= len(deeper) < len(low):
                low, deeper = deeper, self._minima(deeper)
            if len(low) > ENOUGH * most:
                low = self._least_of_stretches(low, most)
            rest = self._least_of_stretches(np.setdiff1d(inside, low), max(0, most - len(low)))
            inside = np.union1d(low, rest)
        return np.concatenate([[0], inside, [self.count]])

    def _minima(self, where: np.ndarray) -> np.ndarray:
        here = np.concatenate([[np.inf], self.alive[where], [np.inf]])
        return where[(here[1:-1] <= here[:-2]) & (here[1:-1] < here[2:])]

    def _least_of_stretches(self, where: np.ndarray, most: int) -> np.ndarray:
        if len(where) <= most:
            return where
        stretches = np.array_split(where, most) if most else []
        return np.array([part[np.argmin(self.alive[part])] for part in stretches], dtype=np.int64)

    def cuts_near(self, trees: Sequence[np.ndarray]) -> np.ndarray:
        """Take boundaries at the cuts of good trees, the best first, and near them."""
        score: dict[int, float] = {}
        for rank, tree in enumerate(trees):
            for cut in tree[tree[:, 0] != LEAF, 0].tolist():
                score[cut] = score.get(cut, 0) + 1 / (1 + rank)
        cuts = sorted(score, key=lambda cut: (-score[cut], cut))
        near = dict.fromkeys(cut + away for away in NEARBY for cut in cuts)
        inside = [cut for cut in near if 0 < cut < self.count][:CUTS]
        return np.array([0, *sorted(inside), self.count])

    def binomial(self, repeats: Iterable[int]) -> list[np.ndarray]:
        """Make the binomial trees that run an operator at most so often, for each of these."""
        trees: dict[bytes, np.ndarray] = {}
        for stride in STRIDES:
            bounds = self.candidate_cuts(self.count // stride)
            steps = len(bounds) - 1
            for most in repeats:
                tree = binomial_tree(steps, fewest_states(steps, most))
                cut = tree[:, 0] != LEAF
                tree[cut, 0] = bounds[tree[cut, 0]]
                trees[tree.tobytes()] = tree
        return list(trees.values())

    def dynamic(
        self, bounds: np.ndarray, most_work: float | None, most: int
    ) -> Iterator[list[np.ndarray]]:
        """Make trees by dynamic programming: of the whole frontier, or those about a limit of work.

        Parameters
        ----------
        bounds : np.ndarray
            The candidate cuts and both ends.
        most_work : float, optional
        most : int
            How many trees, about.

        Yields
        ------
        list of np.ndarray
            Those of each exponent and scale, but for those that have been yielded already.
        """
        each = 1 + most // LISTS
        known: set[bytes] = set()
        for exponent in EXPONENTS:
            x = self._segments(bounds, exponent)
            memory = float(x.leaf[0, -1]) * WIDEST
            for scale in range(SCALES if memory > 0 else 0):
                unit = memory / SLOTS
                kept, leaf = (np.ceil(size / unit - 1e-9) for size in (x.kept, x.leaf))
                highest, gradients = x.highest / unit, x.gradients / unit
                work, choice = _least_work(
                    kept, highest, leaf, gradients, x.work, x.recomputed, SLOTS
                )
                slots = np.flatnonzero(np.append(IMPOSSIBLE, work[:-1]) > work)
                if not len(slots):
                    break
                if most_work is None:
                    chosen = slots[
                        np.linspace(0, len(slots) - 1, min(each, len(slots))).astype(int)
                    ]
                else:
                    away = np.abs(work[slots] - most_work)
                    chosen = slots[np.argsort(away, kind="stable")[:each]]
                trees = [_tree_of(bounds, kept, choice, slot) for slot in chosen.tolist()]
                new = {tree.tobytes(): tree for tree in trees}
                yield [tree for key, tree in new.items() if key not in known]
                known |= set(new)
                # Even steps on the way to little more than the least that is possible.
                last = CLOSER * slots[0] / SLOTS
                memory *= min(0.7, float(last ** (1 / max(1, SCALES - 1 - scale))))

    def _segments(self, bounds: np.ndarray, exponent: float) -> Segments:
        """Work out the sizes of all segments, sizes being raised to an exponent."""
        r, g, count, m = self.results, self.gradients, self.count, len(bounds)
        work, costly = self.steps.work, self.steps.costly
        size, gradient_size = r.nbytes**exponent, g.nbytes**exponent
        end = np.full(len(size), count)
        alive = _inside(bounds, r.start, r.start, r.stop, size)
        wanted, heavy = r.wanted < count, costly[r.start]
        place = np.arange(count)
        last = np.maximum(self.steps.last, place)
        total, cheap = (np.cumsum(np.append(0, each))[bounds] for each in (work, ~costly * work))
        recomputed = total - total[:, None] - _inside(bounds, place, place, last, work)
        cheaply = cheap - cheap[:, None] - _inside(bounds, place, place, last, ~costly * work)

        forward = r.saved(size, r.start, r.stop)
        backward = g.alive(gradient_size) - g.saved(gradient_size, g.stop, g.start)
        highest, leaf = np.zeros((m, m)), np.full((m, m), np.inf)
        for s, lo in enumerate(bounds[:-1].tolist()):
            own = np.where(r.start >= lo, size, 0.0)
            through = r.alive(own) - forward
            base = np.cumsum(np.bincount(r.wanted, own, count + 1))[:count] + backward
            for into, usage in ((highest, through), (leaf, base)):
                into[s, s + 1 :] = np.maximum.accumulate(usage[lo:])[bounds[s + 1 :] - lo - 1]
        later = np.maximum(r.stop, r.wanted)
        return Segments(
            bounds=bounds,
            kept=np.array(
                [
                    alive,
                    alive
                    + _inside(bounds, r.start[wanted], later[wanted], end[wanted], size[wanted]),
                    alive + _inside(bounds, r.start[heavy], r.stop[heavy], end[heavy], size[heavy]),
                ]
            ),
            highest=highest,
            leaf=leaf,
            gradients=np.append(g.alive(gradient_size), 0)[bounds]
            - np.bincount(g.start, gradient_size, count + 1)[bounds],
            work=(total - total[:, None]).astype(np.float32),
            recomputed=np.array([recomputed, np.zeros_like(recomputed), cheaply], dtype=np.float32),
        )


def _inside(
    bounds: np.ndarray, made: np.ndarray, after: np.ndarray, until: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """The total size, [s, t], of what is made in a segment and there after its end.

    That is where after < bounds[t] <= until.
    """
    m = len(bounds)
    s, start, stop = (np.searchsorted(bounds, at, "right") for at in (made, after, until))
    change = np.zeros((m + 1, m + 1))
    np.add.at(change, (s - 1, start), size)
    np.add.at(change, (s - 1, np.maximum(start, stop)), -size)
    return np.cumsum(np.cumsum(change[:m, :m], axis=1)[::-1], axis=0)[::-1]


def _tensors(parts: Parts, problem: Problem) -> tuple[Tensors, Tensors]:
    """The results and the gradients of a network."""
    t, p, count = parts.work.training.tables, parts.patterns, len(problem.node)
    rows, n = len(t.variable), p.forward
    when = np.full(rows, -1, dtype=np.int64)  # the position with which each row runs
    when[problem.node] = np.arange(count)
    place, position = gathered(p.event_start, problem.node)
    when[p.event_row[place]] = position
    row, made = (np.repeat(each, np.diff(t.output_start)) for each in (np.arange(rows), when))
    reader = np.repeat(np.arange(rows), np.diff(t.read_start))
    # What is read of the first time that an operator ran is there whatever the schedule.
    source = p.rows.read_row[: len(reader)].astype(np.int64)
    read = ~t.read_ignored & (0 <= source) & (source < rows) & (when[reader] >= 0)
    entry = t.output_start[source[read]] + p.rows.read_output[: len(reader)][read]
    reader = reader[read]
    last, first = np.full(len(row), -1), np.full(len(row), count)
    np.maximum.at(last, entry[reader < n], when[reader[reader < n]])
    np.minimum.at(first, entry[reader >= n], when[reader[reader >= n]])
    # The user's gradients stay to the end, and so does what is added up to one.
    stays = (row >= n) & (first == count)
    stays[t.output_start[problem.asked[:, 0]] + problem.asked[:, 1]] = True
    sums = np.zeros(rows, dtype=np.bool_)
    sums[2 * n :] = (parts.work.training.owners < 0) & ~t.variable[2 * n :]
    for total in np.flatnonzero(sums & (when >= 0))[::-1].tolist():
        if stays[t.output_start[total]]:
            terms = t.use_entry[t.use_start[total] : t.use_start[total + 1]]
            stays[terms[sums[row[terms]]]] = True
    nbytes = 4.0 * t.elements
    in_place = np.zeros((2, count), dtype=np.bool_)
    writes = (when >= 0) & (np.diff(t.inplace_start) > 0)
    in_place[0, when[:n][writes[:n]]] = in_place[1, when[n:][writes[n:]]] = True
    result = (made >= 0) & (row < n) & (nbytes > 0)
    gradient = (made >= 0) & (row >= n) & (nbytes > 0) & ~stays
    return (
        Tensors(
            start=made[result],
            stop=np.maximum(last, made)[result],
            wanted=first[result],
            nbytes=nbytes[result],
            in_place=in_place[0],
        ),
        Tensors(
            start=first[gradient],
            stop=made[gradient],
            wanted=first[gradient],
            nbytes=nbytes[gradient],
            in_place=in_place[1],
        ),
    )


@compiled
def _least_work(kept, highest, leaf, gradients, work, recomputed, slots):  # type: ignore[no-untyped-def]
    """Find the least work of the network within each memory up to ``slots``.

    Sizes are those of `Segments` in slots, ``kept`` and ``leaf`` whole numbers.

    Returns
    -------
    np.ndarray, (slots + 1)
        Work; `IMPOSSIBLE` where there is no way.
    np.ndarray, (s, t, slots + 1)
        For each segment and memory 0: a base case; 4 c + flag: cut at boundary c.
    """
    m = leaf.shape[0]
    far = slots + 1
    best = np.full((m, m, far), IMPOSSIBLE, dtype=np.float32)
    choice = np.zeros((m, m, far), dtype=np.uint16)
    nothing = np.zeros(far, dtype=np.float32)
    for length in range(1, m):
        for s in range(m - length):
            t = s + length
            best[s, t, int(min(far, leaf[s, t])) :] = recomputed[0, s, t]
            behind = gradients[t] + kept[0, s, t]
            for c in range(s + 1, t):
                through = min(far, math.ceil(behind + highest[s, c]))
                for flag in range(FLAGS):
                    shift = int(min(far, kept[flag, s, c]))
                    least = int(max(through, shift))
                    left, run = best[s, c], work[s, c]
                    if flag:
                        least = int(max(least, min(far, leaf[s, c])))
                        left, run = nothing, run + recomputed[flag, s, c]
                    right = best[c, t, least - shift :]
                    _lower(
                        best[s, t, least:],
                        choice[s, t, least:],
                        run,
                        right,
                        left[least:],
                        4 * c + flag,
                    )
    return best[0, -1], choice


@compiled
def _lower(best, choice, run, right, left, chosen):  # type: ignore[no-untyped-def]
    """Take a choice where it is better.

    Written so that the compiler makes vector instructions of it: nothing is read or stored under a
    condition, and no type is changed in the loop.
    """
    number = np.uint16(chosen)
    for k in range(best.shape[0]):
        total = run + right[k] + left[k]
        known, made = best[k], choice[k]
        better = total < known
        best[k] = total if better else known
        choice[k] = number if better else made


def _tree_of(bounds: np.ndarray, kept: np.ndarray, choice: np.ndarray, slot: int) -> np.ndarray:
    """Follow the choices that `_least_work` made for a memory."""
    tree = []
    pending = [(0, len(bounds) - 1, slot)]
    while pending:
        s, t, memory = pending.pop()
        chosen = int(choice[s, t, memory]) if s >= 0 else 0
        if not chosen:
            tree.append((LEAF, 0))
            continue
        c, flag = divmod(chosen, 4)
        tree.append((int(bounds[c]), flag))
        pending += [(c, t, memory - int(kept[flag, s, c])), (-1 if flag else s, c, memory)]
    return np.array(tree, dtype=np.int32)
