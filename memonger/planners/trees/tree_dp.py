"""Make initial trees: by dynamic programming for least work in a memory, and binomial trees.

Candidate cuts are where few bytes are alive. A segment between two of them is a base case (a leaf),
or it is cut as in Revolve: run to the cut, process the right part with the memory that is left,
then the left part with all of the memory. One table gives the trees of the whole frontier of memory
and work.

The memory in the table is an estimate from the bytes alive; every tree is evaluated to the byte
afterwards. Sizes are raised to several exponents to get different trees; annealing starts from the
best of each.

Optimal recomputation of arbitrary graphs: Feng and Huang 2021, "Optimal Gradient Checkpoint Search
for Arbitrary Computation Graphs".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Iterator, Sequence

import numpy as np

from memonger.graph.arrays import gather
from memonger.planners.trees.price import Problem
from memonger.planners.trees.trees import ALIVE, LAZY, LEAF, binomial_tree, fewest_states
from memonger.schedules.training_step import Parts
from memonger.support.kernels import Struct, compiled, constant
from memonger.support.types import Bools, Doubles, Floats, Int32s, Int64s

EXPONENTS = (0.75, 0.5, 0.35, 0.2)  # of a tensor's bytes; the first is best for most networks
SCALES = 4  # ranges of memory, each closer to the least that is possible
NEAR_SCALES = 2  # with a limit of work: the second range ends near the least memory for it
ZOOM = 1.25  # the end of that range, in multiples of that memory
SLOTS = 200  # steps of memory in each range
WIDEST = 0.6  # the end of the first range, as a share of the memory without recomputation
CLOSER = 1.5  # the end of the last range, in multiples of the least memory that is possible
CUTS = 140  # candidate cuts; the time grows with the third power of their number
INNER_CUTS = 16  # candidate cuts between two of them
ENOUGH = 1.25  # all local minima are taken up to this multiple of the cuts wanted
FLAT = 12  # trees of one level, with about the square root of the operators as segments
POWERS = (1.5, 2.0)  # exponents of the lengths of segments: earlier ones are longer
STRIDES = (1, 2, 4, 8)  # binomial trees have cuts at every operator, every second, and so on

DIVIDED = constant("DIVIDED")  # the choice to divide a segment further


@dataclass(frozen=True)
class Tensors:
    """Results (sorted by ``start``) or gradients, and the positions at which they are alive.

    A result is alive from the operator that computes it (``start``) to the last one that reads it
    (``stop``), and in the backward pass until the gradient of operator ``wanted``. A gradient is
    alive in the backward pass from position ``stop`` down to ``start``.
    """

    start: Int64s
    stop: Int64s
    wanted: Int64s  # the first operator whose gradient reads it; the number of operators for none
    nbytes: Doubles
    in_place: Bools  # (positions,): whether an output may be written in place there

    def saved(self, size: Doubles, taken: Int64s, freed: Int64s) -> Doubles:
        """Return the size that is written in place at each position."""
        count, differ = len(self.in_place), taken != freed
        freed_size = np.bincount(freed[differ], size[differ], count)
        return np.where(self.in_place, np.minimum(np.bincount(taken, size, count), freed_size), 0.0)


class Sizes(Struct):
    """The results of a network, and sizes of tensors: bytes raised to an exponent."""

    start: Int64s
    stop: Int64s
    wanted: Int64s
    result: Doubles
    in_place: Doubles
    backward: Doubles
    passing: Doubles


class Segments(Struct):
    """Sizes and work of segments: entry [s, t] is the segment from boundary s to boundary t."""

    bounds: Int64s
    saved_size: Doubles
    highest: Doubles
    leaf: Doubles
    gradients: Doubles
    work: Floats
    recomputed: Floats


class Table:
    """The least work of segments for each memory up to ``SLOTS`` times ``unit``."""

    def __init__(self, outer: Segments, unit: float, inner: Sequence[Segments | None]) -> None:
        self.segments, self.unit = outer, unit
        self.inner = [None if x is None else Table(x, unit, []) for x in inner]
        m = len(outer.bounds)
        divided = np.full((m - 1, SLOTS + 1), np.inf, dtype=np.float32)
        for s, table in enumerate(self.inner):
            if table is not None:
                divided[s] = table.work
        self.work: Floats
        self.work, choice = compiled.least_work(outer, unit, divided)
        self.choice = choice.reshape(m, m, SLOTS + 1)

    def tree(self, slot: int) -> list[tuple[int, int]]:
        """Return the tree for a memory (in units), by the choices in the table."""
        bounds, m, saved = self.segments.bounds, len(self.segments.bounds), self.segments.saved_size
        tree: list[tuple[int, int]] = []
        pending, choice = [(0, m - 1, slot)], self.choice.item
        while pending:
            s, t, memory = pending.pop()
            chosen = choice(s, t, memory) if s >= 0 else 0
            inner = self.inner[s] if chosen == DIVIDED else None
            if inner is not None:
                tree += inner.tree(memory)
            elif not chosen:
                tree.append((LEAF, 0))
            else:
                c, flag = divmod(chosen, 4)
                tree.append((bounds.item(c), flag))
                size = saved.item((flag * m + s) * m + c)
                right = memory - math.ceil(size / self.unit - 1e-9)
                pending += [(c, t, right), (-1 if flag else s, c, memory)]
        return tree


class InitialTrees:
    """Initial trees of one network; ``share`` of the exponents are tried."""

    def __init__(self, parts: Parts, problem: Problem, share: float = 1.0) -> None:
        self.exponents = EXPONENTS[: math.ceil(share * len(EXPONENTS))]
        self.positions, self.count = problem.positions, len(problem.node)
        self.results, self.gradients = _tensors(parts, problem)
        r, size = self.results, self.results.nbytes ** EXPONENTS[0]
        self.alive = _alive(r.start + 1, r.stop, size, self.count)

    def candidate_cuts(self, lo: int, hi: int, most: int) -> Int64s:
        """Choose about ``most`` boundaries between two, where little is alive, and add these two.

        All of them if they are few; otherwise local minima, of these the deepest (the local minima
        among them) as long as there are enough; then the least of equal stretches.
        """
        inside = np.arange(lo + 1, hi)
        if len(inside) > most:
            low = self._minima(inside)
            deeper = self._minima(low)
            while most <= len(deeper) < len(low):
                low, deeper = deeper, self._minima(deeper)
            if len(low) > ENOUGH * most:
                low = self._least_of_stretches(low, most)
            rest = self._least_of_stretches(np.setdiff1d(inside, low), max(0, most - len(low)))
            inside = np.union1d(low, rest)
        return np.concatenate([[lo], inside, [hi]])

    def _minima(self, bounds: Int64s) -> Int64s:
        alive = np.concatenate([[np.inf], self.alive[bounds], [np.inf]])
        return bounds[(alive[1:-1] <= alive[:-2]) & (alive[1:-1] < alive[2:])]

    def _least_of_stretches(self, bounds: Int64s, most: int) -> Int64s:
        if len(bounds) <= most:
            return bounds
        stretches = np.array_split(bounds, most) if most else []
        return np.array([part[np.argmin(self.alive[part])] for part in stretches], dtype=np.int64)

    def binomial(self, repeats: Iterable[int]) -> list[Int32s]:
        """Make binomial trees: for each number of ``repeats``, no operator runs more often."""
        trees: dict[bytes, Int32s] = {}
        for stride in STRIDES:
            bounds = self.candidate_cuts(0, self.count, self.count // stride)
            steps = len(bounds) - 1
            for most in repeats:
                tree = binomial_tree(steps, fewest_states(steps, most))
                cut = tree[:, 0] != LEAF
                tree[cut, 0] = bounds[tree[cut, 0]]
                trees[tree.tobytes()] = tree
        return list(trees.values())

    def flat(self) -> list[Int32s]:
        """Make lazy trees of one level (Chen et al. 2016), from few long to many short segments.

        The result saved at a cut is freed when the segment after it has been processed, so that
        earlier segments may be longer. If all operators are alike, the best lengths grow linearly
        (power 2).
        """
        trees, root = [], self.count**0.5
        for segments in np.unique(np.geomspace(1 + root / 4, 1 + root * 2, FLAT).astype(int)):
            for power in POWERS:
                ends = 1 - np.linspace(1, 0, segments + 1) ** power
                ends = np.unique((1 + ends * (self.count - 1)).astype(int))
                middle = (ends[1:] + ends[:-1]) // 2
                near = [self.alive[lo:hi] for lo, hi in zip(middle, ends[1:])]
                cuts = middle + [int(np.argmin(alive)) for alive in near]
                tree = [node for cut in cuts for node in ((cut, ALIVE), (LEAF, LAZY))]
                trees.append(np.array([*tree, (LEAF, LAZY)], dtype=np.int32))
        return trees

    def lists(self, most_work: float | None) -> int:
        """Return how many lists of trees `dynamic` yields at most."""
        return len(self.exponents) * _scales(most_work)

    def dynamic(self, most_work: float | None, most: int) -> Iterator[list[Int32s]]:
        """Make trees by dynamic programming: of the whole frontier, or near a limit of work.

        Segments between neighbouring candidate cuts are divided further, at cuts of their own.
        Yields the new trees of each exponent and each range of memory, about ``most`` in total.
        """
        trees_each = 1 + most // self.lists(most_work)
        yielded: set[bytes] = set()
        bounds = self.candidate_cuts(0, self.count, CUTS)
        within = [self.candidate_cuts(*ends, INNER_CUTS) for ends in zip(bounds, bounds[1:])]
        for exponent in self.exponents:
            sizes = self._sizes(exponent)
            outer = compiled.measure(self.positions, sizes, bounds)
            inner = [
                compiled.measure(self.positions, sizes, b) if len(b) > 2 else None for b in within
            ]
            memory = float(outer.leaf[len(bounds) - 1]) * WIDEST
            for scale in range(_scales(most_work) if memory > 0 else 0):
                table = Table(outer, memory / SLOTS, inner)
                work = table.work
                slots = np.flatnonzero(np.append(np.inf, work[:-1]) > work)
                if not len(slots):
                    break
                if most_work is None:
                    places = np.linspace(0, len(slots) - 1, min(trees_each, len(slots))).astype(int)
                else:
                    away = np.abs(work[slots] - most_work)
                    places = np.argsort(away, kind="stable")[:trees_each]
                trees = [np.array(table.tree(k), dtype=np.int32) for k in slots[places].tolist()]
                del table  # before the next one takes as many megabytes
                new = {tree.tobytes(): tree for tree in trees}
                yield [tree for key, tree in new.items() if key not in yielded]
                yielded |= set(new)
                if most_work is None:
                    # The ranges shrink by even factors to little more than the least memory.
                    last = CLOSER * slots[0] / SLOTS
                    memory *= min(0.7, float(last ** (1 / max(1, SCALES - 1 - scale))))
                else:
                    enough = slots[work[slots] <= most_work]
                    if not len(enough):
                        break
                    memory *= min(0.7, ZOOM * (enough[0] + 1) / SLOTS)

    def _sizes(self, exponent: float) -> Sizes:
        r, g, count = self.results, self.gradients, self.count
        result, gradient = r.nbytes**exponent, g.nbytes**exponent
        backward = _alive(g.start, g.stop, gradient, count)
        return Sizes(
            start=r.start,
            stop=r.stop,
            wanted=r.wanted,
            result=result,
            in_place=r.saved(result, r.start, r.stop),
            backward=backward - g.saved(gradient, g.stop, g.start),
            passing=_alive(g.start + 1, g.stop, gradient, count + 1),
        )


def _scales(most_work: float | None) -> int:
    return SCALES if most_work is None else NEAR_SCALES


def _alive(start: Int64s, stop: Int64s, size: Doubles, count: int) -> Doubles:
    """Return the total size alive at each of ``count`` positions, from start to stop inclusive."""
    change = np.bincount(start, size, count + 2)
    change -= np.bincount(stop + 1, size, count + 2)
    return np.cumsum(change, dtype=np.float64)[:count]


def _tensors(parts: Parts, problem: Problem) -> tuple[Tensors, Tensors]:
    """Return the results and the gradients of a network as Tensors."""
    t, p, count = parts.work.training.arrays, parts.variants, len(problem.node)
    rows, n = len(t.variable), p.forward_nodes
    when = np.full(rows, -1, dtype=np.int64)  # the position at which each row runs
    when[problem.node] = np.arange(count)
    place, position = gather(p.operation_start, problem.node)
    when[p.operation_row[place]] = position
    row = np.repeat(np.arange(rows), np.diff(t.output_start))
    start = when[row]
    reader = np.repeat(np.arange(rows), np.diff(t.read_start))
    # Results of the first run of an operator (`FIRST_TIME`) are saved by every schedule.
    source = p.rows.read_row[: len(reader)].astype(np.int64)
    read = ~t.read_ignored & (0 <= source) & (source < rows) & (when[reader] >= 0)
    entry = t.output_start[source[read]] + p.rows.read_output[: len(reader)][read]
    reader = reader[read]
    last, first = np.full(len(row), -1), np.full(len(row), count)
    np.maximum.at(last, entry[reader < n], when[reader[reader < n]])
    np.minimum.at(first, entry[reader >= n], when[reader[reader >= n]])
    # Gradients of arguments stay to the end, and so do the terms that are summed in place to one.
    stays = (row >= n) & (first == count)
    stays[t.output_start[problem.gradients[:, 0]] + problem.gradients[:, 1]] = True
    sums = (parts.work.training.origin < 0) & ~t.variable
    for total in np.flatnonzero(sums & (when >= 0))[::-1].tolist():
        if stays[t.output_start[total]]:
            reads = slice(*t.read_start[total : total + 2])
            terms = t.read_entry[reads][t.read_holds[reads]]
            stays[terms[sums[row[terms]]]] = True
    nbytes = 4.0 * t.elements
    in_place = np.zeros((2, count), dtype=np.bool_)
    writer = np.repeat(np.arange(rows), np.diff(t.inplace_start))
    kind = (writer >= n).astype(np.int64)  # 0: a result over a result, 1: a gradient over one
    alike = (when[writer] >= 0) & (kind == (t.read_row[t.inplace_read] >= n))
    in_place[kind[alike], when[writer[alike]]] = True
    result = np.flatnonzero((start >= 0) & (row < n) & (nbytes > 0))
    result = result[np.argsort(start[result], kind="stable")]
    gradient = (start >= 0) & (row >= n) & (nbytes > 0) & ~stays
    return (
        Tensors(
            start=start[result],
            stop=np.maximum(last, start)[result],
            wanted=first[result],
            nbytes=nbytes[result],
            in_place=in_place[0],
        ),
        Tensors(
            start=first[gradient],
            stop=start[gradient],
            wanted=first[gradient],
            nbytes=nbytes[gradient],
            in_place=in_place[1],
        ),
    )
