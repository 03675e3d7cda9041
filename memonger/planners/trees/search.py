"""Search for rematerialization schedules of least memory within a limit of work.

A schedule is represented by a recursive checkpointing tree (``trees``): run forward to a cut,
process the right part, then the left part. The binomial schedule is such a tree, and so are a
square root of segments and all plans by marks, except for single operators. The search has two
phases:

1. Initial solutions (``tree_dp``): dynamic programming on two levels over trees with cuts where few
   bytes are alive; binomial trees, for little memory in deep networks, which have too many
   candidate cuts for dynamic programming; and lazy trees of one level, which are best for unrolled
   LSTMs and for little work.
2. Simulated annealing (``search.c``) of the best few on a thread each, then of the best of these
   for longer. For the whole front (`ScheduleSearch.front`), at several limits of memory.

Every tree that is visited is evaluated to the byte (``price``). An archive keeps the one of least
work for each size. Work is FLOPs, or a weight that the caller gives for each operator (its time).
The result depends on the network only, not on the speed or the cores of the machine.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import dataclass, replace
from typing import Callable, Sequence

import numpy as np

from memonger.planners.annealing import Cooling, empty_archive, empty_memo
from memonger.planners.candidates import Point, by_memory, by_time, pareto_front
from memonger.planners.trees.price import Limits, make_problem, positions_of_nodes, price_tree
from memonger.planners.trees.tree_dp import InitialTrees
from memonger.planners.trees.trees import LEAF, MOST_NODES
from memonger.schedules.expand import make_parts
from memonger.schedules.schedule import Schedule, Workload, adapt
from memonger.schedules.training_step import ALIGNMENT, ROOM, Parts
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled
from memonger.support.parallel import Threads
from memonger.support.types import Doubles, Int32s, Int64s

UNLIMITED = 1000.0  # forward passes, more work than any schedule needs
#: The limit of work if none is given, in forward passes: this times log2 of the operators. Work of
#: n log n allows O(log n) memory (Chen et al. 2016, section 4.4). More work allows constant memory,
#: but MXNet's executor takes a few KB of host memory for every operator that runs, more than that
#: saves.
LOGARITHMS = 2.0
LEAST_UNLIMITED = 4.0
SLACK = 1 + 1e-9  # for rounding where work is compared
INITIAL, ANNEALING = 0.3, 0.7  # shares of the search, for its progress
#: Over the seeds 1 to 7 the bytes alive of seven networks of the examples differ by 0 to 8 %
#: (largest over smallest) with work 2, and by 0 to 6 % with work 3. This one is the median of most,
#: and at most 2.7 % over it.
SEED = 1
SIZES = 200  # of visited trees, in the archive
ALTERNATIVES = 16  # to the least memory, at most
NEAR, MOST_NEAR = 1.03, 4  # times the least memory; their arenas may be smaller


@dataclass(frozen=True)
class TreeEffort:
    """The length of a search, in counted steps, so that it is the same on every machine.

    ``patience`` multiplies it; above 1 it multiplies annealing only.
    """

    patience: float = 1.0
    #: The sum of operators over the initial solutions of dynamic programming that are evaluated:
    #: for a whole frontier, and for solutions near a limit of work.
    replays: int = 3_000_000
    replays_near: int = 600_000
    #: The time of annealing in about microseconds, if a try takes ``move`` plus ``operation`` for
    #: each operation of the schedule; and the limit of tries for each operator.
    annealing: int = 4_500_000
    move: float = 4
    operation: float = 0.065
    most_tries: int = 20_000
    #: The most trees that each round starts from, and its share of all tries; the least tries of
    #: each tree.
    rounds: tuple[tuple[int, float], ...] = ((8, 0.3), (3, 0.3), (1, 0.4))
    least_tries: int = 2500
    #: As many trees of the first round do less work than allowed, so that annealing may add some.
    spread: int = 4
    #: First and last temperature, as shares of the cost; the starts use these pairs in turn.
    temperatures: tuple[tuple[float, float], ...] = ((0.004, 0.0002), (0.001, 0.0001))
    limits: int = 8  # of memory in each of two rounds, for the whole front

    def times(self, patience: float) -> TreeEffort:
        """Return the effort of a search that is ``patience`` times as long."""
        return replace(self, patience=patience * self.patience)


EFFORT = TreeEffort()


@dataclass(frozen=True, eq=False)
class Tree(Point[Int32s]):
    """A tree, with the bytes that its schedule has alive at once, and its work."""

    group: int  # of initial solutions, from which it comes


class ScheduleSearch:
    """The search for schedules of one network.

    An object remembers all trees: a later search with more memory never returns more work, nor one
    with more work more memory.

    Parameters
    ----------
    workload : Workload
        What a training step must run.
    effort : TreeEffort
        The length of each search.
    progress : callable, optional
        It is called with the share of a search that is done, from 0 to 1.
    weights : np.ndarray, optional
        (nodes,) of float64: the work of each forward node, in any unit; by default its FLOPs.
    parts : Parts, optional
        Those of the workload, if they were made before.
    """

    def __init__(
        self,
        workload: Workload,
        effort: TreeEffort,
        progress: Callable[[float], None] | None = None,
        weights: Doubles | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.workload, self.effort = workload, effort
        parts = parts or make_parts(workload)
        self.problem = make_problem(parts, weights)
        self.count = len(self.problem.node)
        self.one_pass = self.problem.one_pass
        self.unlimited = max(LEAST_UNLIMITED, LOGARITHMS * math.log2(self.count + 1))
        self._position = positions_of_nodes(self.problem.node, len(workload.recomputable))
        self._initial = InitialTrees(parts, self.problem, effort.patience)
        self._threads = Threads(progress)
        self._limits: set[float | None] = set()  # limits of work for which initial solutions exist
        self._trees: list[Tree] = []
        self._groups = itertools.count()

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the last search."""
        return self._threads.interrupted

    def least_memory(self, work: float | None = None) -> Point[Schedule]:
        """Search for the schedule of least memory within a limit of work.

        Parameters
        ----------
        work : float, optional
            The limit in forward passes, at least 1. None: what O(log n) memory takes
            (`LOGARITHMS`).

        Raises
        ------
        MemongerError
            If ``work`` is less than 1.
        """
        if work is not None and not work >= 1:
            raise MemongerError(
                f"work={work!r} is less than one forward pass; give 1 or more, or None for no limit"
            )
        passes, most_work = self._limit(work)
        plain = self.evaluate(self.plain)
        plans = [plain] if plain.time <= passes else []
        self._search(most_work)
        for tree in self._within(most_work)[:1]:
            plans.append(self.evaluate(self.schedule(tree.state)))
        return min(plans, key=by_memory)

    def alternatives(self, work: float | None = None) -> list[Point[Schedule]]:
        """Return other schedules that `least_memory` has found, the least memory first.

        They are those that take hardly more memory, and some of the Pareto-optimal ones.
        """
        within = self._within(self._limit(work)[1])
        near = [tree for tree in within if tree.nbytes <= NEAR * within[0].nbytes][1:]
        points = pareto_front(within, by_time)[-2::-1]
        some = np.linspace(0, len(points), ALTERNATIVES, endpoint=False).astype(int)
        chosen = [points[k] for k in sorted({*some.tolist()})] if points else []
        chosen = sorted({id(p): p for p in (*near[:MOST_NEAR], *chosen)}.values(), key=by_memory)
        return [self.evaluate(self.schedule(tree.state)) for tree in chosen]

    def front(self) -> list[Point[Schedule]]:
        """Search for the Pareto-optimal schedules by memory and work, the least work first.

        There is one search for all budgets, so that a larger budget never gives a slower schedule.
        """
        plans = [self.evaluate(self.plain)]
        self._search(None, plans[0].nbytes)
        for tree in pareto_front(self._trees, by_time):
            plans.append(self.evaluate(self.schedule(tree.state)))
        return pareto_front(plans, by_time)

    def evaluate(self, schedule: Schedule) -> Point[Schedule]:
        """Evaluate a schedule: the bytes alive without outputs and gradients, and all its work.

        The work is in forward passes.
        """
        alive, _ = compiled.alive_of(self.problem, schedule.operations, 1)
        work = self.problem.positions.work[self._position[schedule.forwards]].sum()
        return Point(alive, float(work) / self.one_pass, schedule)

    def count_least(self, schedule: Schedule) -> int:
        """Count the bytes that a schedule takes at least, in its arena and for the outputs.

        An output that is an identity of another has no bytes of its own.
        """
        alive, outputs = compiled.alive_of(self.problem, schedule.operations, ALIGNMENT)
        return int(alive + ROOM + outputs)

    def schedule(self, tree: Int32s) -> Schedule:
        """Make the schedule of a tree, with gradients in the required order."""
        _, run = compiled.unroll(self.problem.positions, tree, np.inf, sys.maxsize)
        node, gradients = self.problem.node, self.workload.gradients
        schedule = Schedule(np.where(run >= 0, node[run], ~node[~run]))
        is_ordered = np.array_equal(~schedule.operations[schedule.operations < 0], gradients)
        return schedule if is_ordered else adapt(self.workload, schedule)

    # ------------------------------------------------------------------ initial solutions

    def _limit(self, work: float | None) -> tuple[float, float]:
        """Return a limit of work in forward passes, and in the unit of weights."""
        passes = (self.unlimited if work is None else float(work)) * SLACK
        return passes, passes * self.one_pass

    @functools.cached_property
    def plain(self) -> Schedule:
        """The schedule that recomputes only what is forced."""
        return self.schedule(np.array([[LEAF, 0]], dtype=np.int32))

    def _within(self, most_work: float) -> list[Tree]:
        """Return the trees within a limit of work, the least memory first."""
        return sorted((tree for tree in self._trees if tree.time <= most_work), key=by_memory)

    def _search(self, most_work: float | None, most_bytes: int = 0) -> None:
        """Find initial solutions and anneal them; Ctrl-C ends the search, and keeps its trees.

        With a limit of work that is for least memory, without one for the front up to
        ``most_bytes``.
        """
        self._threads = Threads(self._threads.progress)
        try:
            self._threads.progress(0.0)
            if most_work not in self._limits:
                self.initial_trees(most_work)
            if self._trees and not self.interrupted:
                self._limits.add(most_work)
                if most_work is None:
                    self._anneal_for_front(most_bytes)
                else:
                    self._anneal_for_memory(most_work)
            if not self.interrupted:
                self._threads.progress(1.0)
        except KeyboardInterrupt:
            self._threads.stop[0] = 1

    def initial_trees(self, most_work: float | None = None) -> list[Tree]:
        """Find initial trees of the whole frontier, or those near a limit of work."""
        effort, first, most = self.effort, len(self._trees), self.unlimited
        replays, limit = effort.replays, UNLIMITED * self.one_pass
        if most_work is not None:
            replays, limit = effort.replays_near, most_work
            most = min(most, most_work / self.one_pass)
        count = int(min(1.0, effort.patience) * replays) // self.count
        for trees in self._initial.dynamic(most_work, count):
            share = INITIAL / self._initial.lists(most_work)
            self._trees += self._evaluated(trees, limit, share)
            if self.interrupted:
                return self._trees[first:]
        self._trees += self._evaluated(self._initial.binomial(range(2, int(most) + 1)), limit)
        # Only Pareto-optimal ones are kept, because each start of annealing shortens the others.
        flat = self._evaluated(self._initial.flat(), limit)
        best = {id(point) for point in pareto_front([*self._trees, *flat], by_time)}
        self._trees += [point for point in flat if id(point) in best]
        return self._trees[first:]

    def _evaluated(
        self, trees: Sequence[Int32s], most_work: float, share: float = 0.0
    ) -> list[Tree]:
        """Evaluate initial solutions within a limit of work, as a new group."""
        group = next(self._groups)

        def evaluated(tree: Int32s, steps: Int64s) -> Tree | None:
            steps[0] += 1
            price = None if self.interrupted else price_tree(self.problem, tree, most_work)
            return price and Tree(*price, tree, group)

        points = self._threads.run(evaluated, trees, 1, share)
        return [point for point in points if point is not None]

    # ------------------------------------------------------------------ annealing

    def _anneal_for_memory(self, most_work: float) -> None:
        """Anneal the best trees within a limit of work for least memory, in rounds."""
        effort = self.effort
        within = self._within(most_work)
        distinct = {tree.nbytes: tree for tree in reversed(within)}.values()
        best_of_group = {tree.group: tree for tree in distinct}
        starts = sorted(best_of_group.values(), key=by_memory)
        front = pareto_front(within, by_time)
        spread = effort.spread if front else 0
        less = [front[(len(front) - 1) * k // spread] for k in range(spread)]
        starts = [*starts[: effort.rounds[0][0] - spread], *less]
        tries = self._tries(starts) if starts else 0.0
        for number, (count, share) in enumerate(effort.rounds if starts else ()):
            count = max(1, min(count, int(tries * share / (effort.least_tries * effort.patience))))
            starts = sorted(starts, key=by_memory)[:count]
            limits = [Limits(sys.maxsize, most_work, by_work=False)] * len(starts)
            starts = self._annealed(starts, limits, tries * share, number, share * ANNEALING)

    def _anneal_for_front(self, most_bytes: int) -> None:
        """Anneal for least work within several limits of memory, then at limits between them.

        The last of the second round is annealed for least memory.
        """
        count, most_work = 2 * self.effort.limits, UNLIMITED * self.one_pass
        for part in range(2):
            best = pareto_front(self._trees, by_time)
            least = best[-1].nbytes
            ends = max(1, least), max(1, least, most_bytes)  # 0 for a network of copies
            sizes = np.geomspace(*ends, count + 1)[part:count:2].astype(int) + 1
            limits = [Limits(size, most_work, by_work=True) for size in sizes.tolist()]
            starts = [next(tree for tree in best if tree.nbytes <= size) for size in sizes]
            if part:
                limits.append(Limits(sys.maxsize, most_work, by_work=False))
                starts.append(best[-1])
            self._annealed(starts, limits, self._tries(starts), part, ANNEALING / 2)

    def _annealed(
        self,
        starts: Sequence[Tree],
        limits: Sequence[Limits],
        all_tries: float,
        number: int,
        share: float,
    ) -> list[Tree]:
        """Anneal each tree on a thread, with ``all_tries`` in total; return the best of each.

        Archived trees are kept too.
        """
        if self.interrupted:
            return list(starts)
        tries, heat = max(1, int(all_tries / len(starts))), self.effort.temperatures

        def job(k: int, done: Int64s) -> list[Tree]:
            start, limit, (hot, cold) = starts[k], limits[k], heat[k % len(heat)]
            largest = limit.most_bytes if limit.by_work else start.nbytes
            archive = empty_archive(largest, SIZES, (MOST_NODES * self.count + 2, 2), np.int32)
            cooling = Cooling(SEED + 100 * number + k, tries, hot, cold, unit=0.0)
            memo, stop = empty_memo(), self._threads.stop
            tree = compiled.anneal_trees(
                self.problem, start.state, limit, cooling, memo, archive, stop, done
            ).reshape(-1, 2)
            price = price_tree(self.problem, tree, limit.most_work)
            best = Tree(*price, tree, start.group) if price else replace(start, state=tree)
            visited = []
            for point in archive.points():  # the end of a tree is where all parts have leaves
                nodes = point.state
                end = np.argmax(np.cumsum(np.where(nodes[:, 0] == LEAF, -1, 1)) == -1) + 1
                visited.append(Tree(point.nbytes, point.time, nodes[:end].copy(), start.group))
            return [best, *pareto_front(visited, by_time)]

        plans = self._threads.run(job, range(len(starts)), tries, share)
        self._trees += [point for points in plans for point in points]
        return [points[0] for points in plans]

    def _tries(self, starts: Sequence[Tree]) -> float:
        """Return the number of tries for annealing that starts from these trees."""
        work = float(np.mean([tree.time for tree in starts])) / self.one_pass
        effort = self.effort
        cost = effort.move + effort.operation * self.count * (1 + work)
        return effort.patience * min(effort.most_tries * self.count, effort.annealing / cost)
