"""The search for rematerialisation schedules: as little memory as possible for so much work.

A schedule is that of a recursive checkpointing tree (``trees``): run forward to a cut, process what
is right of it, then what is left. The binomial schedule is such a tree, so are a square root of
segments and all that marks can express but for single operators. The search:

1. Initial solutions (``tree_dp``): dynamic programming over trees whose cuts lie where little is
   alive, on two levels; binomial trees, for little memory in deep networks, which have too many
   candidate cuts; lazy trees of one level, which are best for unrolled LSTMs and little work.
2. Simulated annealing (``search.c``) of the best few, a thread each, then of the best of these for
   longer. For the schedules of every size (`ScheduleSearch.front`) at several limits of memory.

Every tree that is visited is evaluated to the byte (``price``), and is kept if no other is better
in both memory and work; of those of about the same size, the one of least work. Work is FLOPs, or
what the caller says that each operator takes (its time). All else depends on the network alone, not
on the machine's speed or its cores.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, replace
from typing import Callable, Sequence

import numpy as np

from memonger.planners.annealing import Archive, empty_archive, nothing_known
from memonger.planners.candidates import Candidate, by_memory, by_time, not_dominated
from memonger.planners.trees.price import Limits, cost_of, operations_of, positions, problem
from memonger.planners.trees.tree_dp import InitialTrees
from memonger.planners.trees.trees import LEAF, MOST_NODES
from memonger.schedules.expand import parts
from memonger.schedules.schedule import Schedule, Workload, plain
from memonger.schedules.training_step import Parts
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled
from memonger.support.parallel import Threads

NOTHING = "no recomputation"  # the origin of the schedule that runs nothing again
SEARCHED = "searched schedule"
UNLIMITED = 1000.0  # times the forward work: more than any schedule is worth
#: Where no limit is given: times log2 of the operators. With n log n work there is O(log n) memory
#: (Chen et al. 2016, section 4.4). With more it is constant, but then MXNet's executor, which has a
#: few KB for every operator that runs, takes more of the host than is saved.
LOGARITHMS = 2.0
LEAST_UNLIMITED = 4.0
SLACK = 1 + 1e-9  # for rounding where work is compared
INITIAL, ANNEALING = 0.3, 0.7  # parts of the search, as far as progress knows
SEED = 138600  # of hundreds that were tried, one that is good for small and for large networks
SIZES = 200  # of visited trees, in the archive
ALTERNATIVES = 16  # to the least memory, at most
NEAR, MOST_NEAR = 1.03, 4  # times the least memory; their arenas may be smaller


@dataclass(frozen=True)
class Effort:
    """How long a search is: counted, not measured, so that it is the same everywhere."""

    #: Operators of the initial solutions that are evaluated, by dynamic programming: of a whole
    #: frontier, of those whose work is near a limit.
    replays: int = 3_000_000
    replays_near: int = 600_000
    #: The time of annealing in about microseconds, where a try takes ``move``, and
    #: ``operation`` for each operation of the schedule; and the most tries for each operator.
    annealing: int = 4_500_000
    move: float = 4
    operation: float = 0.065
    most_tries: int = 20_000
    #: How many trees each round starts from at most, and its share of all tries; the least of each.
    rounds: tuple[tuple[int, float], ...] = ((8, 0.3), (3, 0.3), (1, 0.4))
    least_tries: int = 2500
    #: Of the first round, as many do less work than they may: it leaves annealing a choice.
    spread: int = 4
    #: At the beginning and at the end, as shares of the cost; the starts take turns.
    temperatures: tuple[tuple[float, float], ...] = ((0.004, 0.0002), (0.001, 0.0001))
    limits: int = 8  # of memory, in each of two rounds, for the schedules of every size


EFFORT = Effort()


class ScheduleSearch:
    """The schedules of one network.

    All that is found is remembered: whoever asks one object for more and more memory never gets
    more work, and the other way.

    ``patience`` multiplies the length of the search; more than 1 that of annealing alone.
    ``progress`` is told how much of a search is done, from 0 to 1. ``weights`` are the work of each
    forward node, in any unit; by default its FLOPs. ``made`` are the parts of the workload, if they
    are there already.
    """

    def __init__(
        self,
        workload: Workload,
        patience: float = 1.0,
        progress: Callable[[float], None] | None = None,
        weights: np.ndarray | None = None,
        made: Parts | None = None,
    ) -> None:
        self.workload, self.patience, self.effort = workload, patience, EFFORT
        made = made or parts(workload)
        self.problem = problem(made, weights)
        self.count = len(self.problem.node)
        self.one_pass = self.problem.one_pass
        self.unlimited = max(LEAST_UNLIMITED, LOGARITHMS * math.log2(self.count + 1))
        self._position = positions(self.problem.node, len(workload.once))
        self._initial = InitialTrees(made, self.problem, patience)
        self._threads = Threads(progress)
        self._searched: set[float | None] = set()  # limits of work with initial solutions
        self._found: list[Candidate] = []  # trees; their origin numbers initial solutions
        self._groups = itertools.count()

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the last search."""
        return self._threads.interrupted

    def least_memory(
        self, work: float | None = None, others: Sequence[tuple[str, Schedule]] = ()
    ) -> Candidate:
        """Search for the schedule of least memory with at most ``work`` times the forward work.

        ``work`` is at least 1; None: no limit but what O(log n) memory takes (`LOGARITHMS`). What
        is found is never worse than ``others``, known schedules with their names.
        """
        if work is not None and not work >= 1:
            raise MemongerError(
                f"work={work!r}: a training step runs all of the network forward at least once, so "
                "work is 1 or more; None for no limit"
            )
        limit = (self.unlimited if work is None else float(work)) * SLACK
        known = [each for each in self._known(others) if each.time <= limit]
        self._search(lambda: self._anneal_for_memory(limit * self.one_pass), limit * self.one_pass)
        for tree in self._within(limit * self.one_pass)[:1]:
            known.append(self.evaluate(self.schedule(tree.plan)))
        return min(known, key=by_memory)

    def alternatives(self, work: float | None = None) -> list[Candidate]:
        """Return some others that `least_memory` has found as well, the least memory first.

        They are those that take hardly more, and some of all that no other beats.
        """
        limit = (self.unlimited if work is None else float(work)) * SLACK
        within = self._within(limit * self.one_pass)
        near = [tree for tree in within if tree.pool_bytes <= NEAR * within[0].pool_bytes][1:]
        points = not_dominated(within, by_time)[-2::-1]
        some = np.linspace(0, len(points), ALTERNATIVES, endpoint=False).astype(int)
        chosen = [points[k] for k in sorted({*some.tolist()})] if points else []
        chosen = sorted({id(p): p for p in (*near[:MOST_NEAR], *chosen)}.values(), key=by_memory)
        return [self.evaluate(self.schedule(tree.plan)) for tree in chosen]

    def front(self, others: Sequence[tuple[str, Schedule]] = ()) -> list[Candidate]:
        """Search for the schedules that no other beats in both memory and work, least work first.

        ``others`` are known already, with their names. It is one search for all of them, so that
        who has more memory chooses among more.
        """
        known = self._known(others)
        most = max(each.pool_bytes for each in known)
        self._search(lambda: self._anneal_for_front(most), None)
        for tree in not_dominated(self._found, by_time):
            known.append(self.evaluate(self.schedule(tree.plan)))
        return not_dominated(known, by_time)

    def evaluate(self, schedule: Schedule, origin: str = SEARCHED) -> Candidate:
        """Evaluate a schedule: what is alive beside outputs and gradients, and all its work.

        The work is a multiple of that of one forward pass.
        """
        alive = compiled.alive_of(self.problem, schedule.operations)
        work = self.problem.steps.work[self._position[schedule.forwards]].sum()
        return Candidate(alive, float(work) / self.one_pass, schedule, origin)

    def schedule(self, tree: np.ndarray) -> Schedule:
        """Make the schedule of a tree."""
        _, positions = compiled.unroll(self.problem.steps, tree, np.inf, sys.maxsize)
        return Schedule(operations_of(self.problem, positions))

    # ------------------------------------------------------------------ initial solutions

    def _known(self, others: Sequence[tuple[str, Schedule]]) -> list[Candidate]:
        """What is known already, the schedule without recomputation first."""
        known = [(NOTHING, plain(self.workload)), *others]
        return [self.evaluate(schedule, name) for name, schedule in known]

    def _within(self, most_work: float) -> list[Candidate]:
        """What is found within a limit of work, the least memory first."""
        return sorted((tree for tree in self._found if tree.time <= most_work), key=by_memory)

    def _search(self, annealing: Callable[[], None], most_work: float | None) -> None:
        """Find initial solutions and anneal them; Ctrl-C ends it, what has been found counts."""
        self._threads = Threads(self._threads.progress)
        try:
            self._threads.progress(0.0)
            if most_work not in self._searched:
                self.initial_trees(most_work)
            if self._found and not self.interrupted:
                self._searched.add(most_work)
                annealing()
            if not self.interrupted:
                self._threads.progress(1.0)
        except KeyboardInterrupt:
            self._threads.stop[0] = 1

    def initial_trees(self, most_work: float | None = None) -> list[Candidate]:
        """Find trees of the whole frontier, or those near a limit of work."""
        effort, known, most = self.effort, len(self._found), self.unlimited
        replays, limit = effort.replays, UNLIMITED * self.one_pass
        if most_work is not None:
            replays, limit = effort.replays_near, most_work
            most = min(most, most_work / self.one_pass)
        wanted = int(min(1.0, self.patience) * replays) // self.count
        for trees in self._initial.dynamic(most_work, wanted):
            share = INITIAL / self._initial.lists(most_work)
            self._found += self._evaluated(trees, limit, share)
            if self.interrupted:
                return self._found[known:]
        self._found += self._evaluated(self._initial.binomial(range(2, int(most) + 1)), limit)
        # Those that others beat are left out: each start of annealing takes time from the others.
        flat = self._evaluated(self._initial.flat(), limit)
        best = not_dominated([*self._found, *flat], by_time)
        self._found += [point for point in flat if any(point is other for other in best)]
        return self._found[known:]

    def _evaluated(
        self, trees: Sequence[np.ndarray], most_work: float, share: float = 0.0
    ) -> list[Candidate]:
        """Evaluate initial solutions within a limit of work, a group of their own."""
        group = str(next(self._groups))

        def evaluated(tree: np.ndarray, steps: np.ndarray) -> Candidate | None:
            steps[0] += 1
            if self.interrupted:
                return None
            cost = cost_of(self.problem, tree, most_work)
            return None if cost is None else Candidate(*cost, tree, group)

        points = self._threads.run(evaluated, trees, 1, share)
        return [point for point in points if point is not None]

    # ------------------------------------------------------------------ annealing

    def _anneal_for_memory(self, most_work: float) -> None:
        """Anneal the best trees within a limit of work for least memory, in rounds."""
        effort = self.effort
        within = self._within(most_work)
        distinct = {tree.pool_bytes: tree for tree in reversed(within)}.values()
        of_group = {tree.origin: tree for tree in distinct}  # the best of each
        starts = sorted(of_group.values(), key=by_memory)
        front = not_dominated(within, by_time)
        spread = effort.spread if front else 0
        less = [front[(len(front) - 1) * k // spread] for k in range(spread)]
        starts = [*starts[: effort.rounds[0][0] - spread], *less]
        tries = self._tries(starts) if starts else 0.0
        for number, (count, share) in enumerate(effort.rounds if starts else ()):
            count = max(1, min(count, int(tries * share / (effort.least_tries * self.patience))))
            starts = sorted(starts, key=by_memory)[:count]
            limits = [Limits(sys.maxsize, most_work, by_work=False)] * len(starts)
            starts = self._annealed(starts, limits, tries * share, number, share * ANNEALING)

    def _anneal_for_front(self, most: int) -> None:
        """Anneal for least work within several limits of memory, then at limits between them.

        The last of the second round is annealed for least memory.
        """
        count, most_work = 2 * self.effort.limits, UNLIMITED * self.one_pass
        for part in range(2):
            best = not_dominated(self._found, by_time)
            least = best[-1].pool_bytes
            ends = max(1, least), max(1, least, most)  # nothing is alive in a copy
            sizes = np.geomspace(*ends, count + 1)[part:count:2].astype(int) + 1
            limits = [Limits(size, most_work, by_work=True) for size in sizes.tolist()]
            starts = [next(tree for tree in best if tree.pool_bytes <= size) for size in sizes]
            if part:
                limits.append(Limits(sys.maxsize, most_work, by_work=False))
                starts.append(best[-1])
            self._annealed(starts, limits, self._tries(starts), part, ANNEALING / 2)

    def _annealed(
        self,
        starts: Sequence[Candidate],
        limits: Sequence[Limits],
        tries: float,
        number: int,
        share: float,
    ) -> list[Candidate]:
        """Anneal trees, a thread each, with so many tries for all; the best of each.

        All that is archived is kept.
        """
        if self.interrupted:
            return list(starts)
        each, heat = max(1, int(tries / len(starts))), self.effort.temperatures

        def job(k: int, steps: np.ndarray) -> list[Candidate]:
            start, limit, (hot, cold) = starts[k], limits[k], heat[k % len(heat)]
            largest = limit.most_bytes if limit.by_work else start.pool_bytes
            shape = MOST_NODES * self.count + 2, 2
            archive = empty_archive(largest, SIZES, shape, np.int32)
            seed, known = SEED + 100 * number + k, nothing_known()
            stop = self._threads.stop
            tree = compiled.anneal_trees(
                self.problem, start.plan, limit, seed, each, hot, cold, known, archive, stop, steps
            ).reshape(-1, 2)
            exact = cost_of(self.problem, tree, limit.most_work)
            best = Candidate(*exact, tree, start.origin) if exact else replace(start, plan=tree)
            return [best, *_archived(archive, start.origin)]

        found = self._threads.run(job, range(len(starts)), each, share)
        self._found += [point for points in found for point in points]
        return [points[0] for points in found]

    def _tries(self, starts: Sequence[Candidate]) -> float:
        """Tell how many tries there may be from trees like these."""
        work = float(np.mean([tree.time for tree in starts])) / self.one_pass
        each = self.effort.move + self.effort.operation * self.count * (1 + work)
        return self.patience * min(
            self.effort.most_tries * self.count, self.effort.annealing / each
        )


def _archived(archive: Archive, origin: str) -> list[Candidate]:
    """List what is archived and not dominated. A tree ends where nothing is left to be divided."""
    trees = []
    for k in np.flatnonzero(np.isfinite(archive.seconds)):
        tree = archive.states[k]
        end = int(np.argmax(np.cumsum(np.where(tree[:, 0] == LEAF, -1, 1)) == -1)) + 1
        pool, work = int(archive.pools[k]), float(archive.seconds[k])
        trees.append(Candidate(pool, work, tree[:end].copy(), origin))
    return not_dominated(trees, by_time)
