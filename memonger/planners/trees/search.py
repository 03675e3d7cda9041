"""The search for rematerialisation schedules: as little memory as possible for so much work.

A schedule is that of a recursive checkpointing tree (``trees``): run forward to a cut, process what
is right of it, then what is left. The binomial schedule is such a tree, so are a square root of
segments and all that marks can express but for single operators. The search:

1. Initial solutions (``tree_dp``): dynamic programming over trees whose cuts lie where little is
   alive, on two levels; binomial trees, for little memory in deep networks, which have too many
   candidate cuts.
2. Simulated annealing (``annealing``) of the best few, a thread each, then of the best of these for
   longer. For the schedules of every size (`ScheduleSearch.front`) at several limits of memory.

Every tree that is visited is evaluated to the byte (``price``), and is kept if no other is better
in both memory and work. Work is FLOPs, or what the caller says that each operator takes (its time).
All else depends on the network alone, not on the machine's speed or its cores.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.planners.annealing import anneal
from memonger.planners.pareto import not_dominated
from memonger.planners.trees.price import (
    MATCH_RANGES,
    NO_LIMIT,
    Cost,
    Evaluator,
    pool_of,
    positions,
    problem,
)
from memonger.planners.trees.tree_dp import CUTS, LISTS, InitialTrees
from memonger.planners.trees.trees import change, tree_of_marks, unroll
from memonger.schedules.expand import parts
from memonger.schedules.schedule import Schedule, Workload, plain
from memonger.schedules.training_step import Parts
from memonger.support.errors import MemongerError
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
SEED = 33000  # of 60 that were tried, one that is good for small networks
SELDOM = 8  # tries for one with all match ranges
ARCHIVED = 300  # visited trees: beyond, those that are dominated go


@dataclass(frozen=True)
class Effort:
    """How long a search is: counted, not measured, so that it is the same everywhere."""

    #: Operators of the initial solutions that are evaluated, by dynamic programming: of a whole
    #: frontier, of those whose work is near a limit.
    replays: int = 3_000_000
    replays_near: int = 600_000
    #: Of the best of these about a limit, near whose cuts dynamic programming looks once more.
    refined: int = 8
    #: The time of annealing in about microseconds, where a try takes ``move``, and
    #: ``operation`` for each operation of the schedule; and the most tries for each operator.
    annealing: int = 11_000_000
    move: float = 30
    operation: float = 0.17
    most_tries: int = 6000
    #: How many trees each round starts from at most, and its share of all tries; the least of each.
    rounds: tuple[tuple[int, float], ...] = ((8, 0.3), (3, 0.3), (1, 0.4))
    least_tries: int = 2500
    #: Of the first round, as many do less work than they may: it leaves annealing a choice.
    spread: int = 4
    #: At the beginning and at the end, as shares of the cost; the starts take turns.
    temperatures: tuple[tuple[float, float], ...] = ((0.004, 0.0002), (0.001, 0.0001))
    #: The limits of memory in each of two rounds, for the schedules of every size.
    limits: int = 8

    def times(self, patience: float) -> Effort:
        """So many times as much."""
        return replace(
            self,
            replays=int(patience * self.replays),
            replays_near=int(patience * self.replays_near),
            annealing=int(patience * self.annealing),
        )


EFFORT = Effort()


class Evaluated(NamedTuple):
    """A schedule, the bytes of its pool as MXNet counts them (gradients included), and its work.

    Work is all forward operations of the step, as a multiple of those of one forward pass.
    """

    pool_bytes: int
    work: float
    schedule: Schedule


class Found(NamedTuple):
    """The best schedule, where it comes from, and whether the user ended the search."""

    best: Evaluated
    origin: str
    interrupted: bool


@dataclass(frozen=True)
class Point:
    """A tree, what it costs, and the number of the initial solutions that it comes from."""

    cost: Cost
    tree: np.ndarray
    group: int


@dataclass(frozen=True)
class Aim:
    """What annealing is for: as little as possible of one place of `Cost`, within limits."""

    objective: int
    most_bytes: int
    most_work: float


MEMORY, WORK = 0, 1  # objectives


def _by_memory(point: Point) -> tuple[float, float]:
    return point.cost.pool_bytes, point.cost.work


def _by_work(point: Point) -> tuple[float, float]:
    return point.cost.work, point.cost.pool_bytes


class ScheduleSearch:
    """The schedules of one network.

    All that is found is remembered: whoever asks one object for more and more memory never gets
    more work, and the other way.

    ``patience`` multiplies the length of annealing. ``progress`` is told how much of a search is
    done, from 0 to 1. ``weights`` are the work of each forward node, in any unit; by default its
    FLOPs. ``made`` are the parts of the workload, if they are there already.
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
        self.cost_of = Evaluator(self.problem)
        self.one_pass = self.cost_of.one_pass
        self.unlimited = max(LEAST_UNLIMITED, LOGARITHMS * math.log2(self.count + 1))
        self._position = positions(self.problem.node, len(workload.once))
        self._initial = InitialTrees(made, self.problem)
        self._threads = Threads(progress)
        self._searched: set[float | None] = set()  # limits of work with initial solutions
        self._found: list[Point] = []
        self._groups = itertools.count()

    def least_memory(
        self, work: float | None = None, others: Sequence[tuple[str, Schedule]] = ()
    ) -> Found:
        """Search for the schedule of least memory with at most ``work`` times the forward work.

        ``work`` is at least 1; None: no limit but what O(log n) memory takes (`LOGARITHMS`). What
        is found is never worse than ``others``, known schedules with their names, and the search
        starts from them as well.
        """
        if work is not None and not work >= 1:
            raise MemongerError(
                f"work={work!r}: a training step runs all of the network forward at least once, so "
                "work is 1 or more; None for no limit"
            )
        limit = (self.unlimited if work is None else float(work)) * SLACK
        known = [(each, name) for each, name in self._known(others) if each.work <= limit]
        self._search(lambda: self._anneal_for_memory(limit * self.one_pass), limit * self.one_pass)
        for point in self._within(limit * self.one_pass)[:1]:
            known.append((self.evaluate(self.schedule(point.tree)), SEARCHED))
        best, name = min(known, key=lambda k: (k[0].pool_bytes, k[0].work))
        return Found(best, name, self._threads.interrupted)

    def front(self, others: Sequence[tuple[str, Schedule]] = ()) -> list[Found]:
        """Search for the schedules that no other beats in both memory and work, least work first.

        ``others`` are known already, with their names. It is one search for all of them, so that
        who has more memory chooses among more.
        """
        known = self._known(others)
        most = max(each.pool_bytes for each, _ in known)
        self._search(lambda: self._anneal_for_front(most), None)
        known += [
            (self.evaluate(self.schedule(point.tree)), SEARCHED)
            for point in not_dominated(self._found, _by_work)
        ]
        front = not_dominated(known, lambda k: (k[0].work, k[0].pool_bytes))
        return [Found(each, name, self._threads.interrupted) for each, name in front]

    def evaluate(self, schedule: Schedule) -> Evaluated:
        """Evaluate a schedule."""
        b, nodes = self.problem, schedule.operations
        forward = nodes >= 0
        operations = np.where(forward, self._position[nodes], ~self._position[~nodes]).astype(
            np.int32
        )
        pool = int(pool_of(b, operations, MATCH_RANGES, NO_LIMIT)[0])
        return Evaluated(
            pool, float(b.steps.work[operations[forward]].sum()) / self.one_pass, schedule
        )

    def schedule(self, tree: np.ndarray) -> Schedule:
        """Make the schedule of a tree."""
        node = self.problem.node
        operations, _ = unroll(self.problem, tree, np.inf, NO_LIMIT)
        return Schedule(
            np.where(operations >= 0, node[operations], ~node[~operations]).astype(np.int32)
        )

    # ------------------------------------------------------------------ initial solutions

    def _known(self, others: Sequence[tuple[str, Schedule]]) -> list[tuple[Evaluated, str]]:
        """What is known already, the schedule without recomputation first; as trees as well."""
        known = [(self.evaluate(plain(self.workload)), NOTHING)]
        for name, schedule in others:
            known.append((self.evaluate(schedule), name))
            kept = np.bincount(self._position[schedule.forwards], minlength=self.count) == 1
            self._found += self._evaluated([tree_of_marks(self.problem.steps, kept)])
        return known

    def _within(self, most_work: float) -> list[Point]:
        """What is found within a limit of work, the least memory first."""
        return sorted((p for p in self._found if p.cost.work <= most_work), key=_by_memory)

    def _search(self, annealing: Callable[[], None], most_work: float | None) -> None:
        """Find initial solutions and anneal them; Ctrl-C ends it, what has been found counts."""
        self._threads = Threads(self._threads.progress)
        try:
            self._threads.progress(0.0)
            if most_work not in self._searched:
                self.initial_trees(most_work)
            if self._found and not self._threads.interrupted:
                self._searched.add(most_work)
                annealing()
            if not self._threads.interrupted:
                self._threads.progress(1.0)
        except KeyboardInterrupt:
            self._threads.stop[0] = 1

    def initial_trees(self, most_work: float | None = None) -> list[Point]:
        """Find trees of the whole frontier, or those about a limit of work."""
        effort, known = self.effort, len(self._found)
        replays = effort.replays if most_work is None else effort.replays_near
        bounds = self._initial.candidate_cuts(0, self.count, CUTS)
        rounds = 1 if most_work is None else 2  # the second at cuts near those of the best
        for _ in range(rounds):
            for trees in self._initial.dynamic(bounds, most_work, replays // self.count):
                self._found += self._evaluated(trees, INITIAL / LISTS / rounds)
                if self._threads.interrupted:
                    return self._found[known:]
            best = self._within(np.inf if most_work is None else most_work)[: effort.refined]
            bounds = self._initial.cuts_near(point.tree for point in best)
        most = self.unlimited
        if most_work is not None:
            most = min(most, most_work / self.one_pass)
        self._found += self._evaluated(self._initial.binomial(range(2, int(most) + 1)))
        return self._found[known:]

    def _evaluated(self, trees: Sequence[np.ndarray], share: float = 0.0) -> list[Point]:
        """Evaluate initial solutions, a group of their own."""
        group = next(self._groups)

        def evaluated(tree: np.ndarray, steps: np.ndarray) -> Point | None:
            steps[0] += 1
            if self._threads.interrupted:
                return None
            cost = self.cost_of(tree, UNLIMITED * self.one_pass)
            return None if cost is None else Point(cost, tree, group)

        points = self._threads.each(evaluated, trees, 1, share)
        return [point for point in points if point is not None]

    # ------------------------------------------------------------------ annealing

    def _anneal_for_memory(self, most_work: float) -> None:
        """Anneal the best trees within a limit of work for least memory, in rounds."""
        effort = self.effort
        within = self._within(most_work)
        distinct = {p.cost.pool_bytes: p for p in reversed(within)}.values()
        of_group = {p.group: p for p in distinct}  # the best of each
        starts = sorted(of_group.values(), key=_by_memory)
        front = not_dominated(within, _by_work)
        spread = effort.spread if front else 0
        less = [front[(len(front) - 1) * k // spread] for k in range(spread)]
        starts = [*starts[: effort.rounds[0][0] - spread], *less]
        tries = self._tries(starts) if starts else 0.0
        for number, (count, share) in enumerate(effort.rounds if starts else ()):
            count = max(1, min(count, int(tries * share / (effort.least_tries * self.patience))))
            starts = sorted(starts, key=_by_memory)[:count]
            aims = [Aim(MEMORY, NO_LIMIT, most_work)] * len(starts)
            starts = self._annealed(starts, aims, tries * share, number, share * ANNEALING)

    def _anneal_for_front(self, most: int) -> None:
        """Anneal for least work within several limits of memory, then at limits between them.

        The last aim of the second round is the least memory.
        """
        count, most_work = 2 * self.effort.limits, UNLIMITED * self.one_pass
        for part in range(2):
            best = not_dominated(self._found, _by_work)
            least = best[-1].cost.pool_bytes
            limits = np.geomspace(least, max(most, least), count + 1)[part:count:2].astype(int) + 1
            aims = [Aim(WORK, limit, most_work) for limit in limits.tolist()]
            starts = [next(p for p in best if p.cost.pool_bytes <= aim.most_bytes) for aim in aims]
            if part:
                aims.append(Aim(MEMORY, NO_LIMIT, most_work))
                starts.append(best[-1])
            self._annealed(starts, aims, self._tries(starts), part, ANNEALING / 2)

    def _annealed(
        self, starts: Sequence[Point], aims: Sequence[Aim], tries: float, number: int, share: float
    ) -> list[Point]:
        """Anneal trees, a thread each, with so many tries for all; the best for each aim.

        All that is visited and not dominated is kept.
        """
        if self._threads.interrupted:
            return list(starts)
        each, heat = max(1, int(tries / len(aims))), self.effort.temperatures

        def job(k: int, steps: np.ndarray) -> list[Point]:
            how = {
                "tries": each,
                "temperatures": heat[k % len(heat)],
                "seed": SEED + 100 * number + k,
            }
            return self._anneal(starts[k], aims[k], steps, how)

        visited = self._threads.each(job, range(len(aims)), each, share)
        self._found += [point for points in visited for point in points]
        return [points[0] for points in visited]

    def _tries(self, starts: Sequence[Point]) -> float:
        """Tell how many tries there may be from trees like these."""
        work = float(np.mean([point.cost.work for point in starts])) / self.one_pass
        each = self.effort.move + self.effort.operation * self.count * (1 + work)
        return self.patience * min(
            self.effort.most_tries * self.count, self.effort.annealing / each
        )

    def _anneal(
        self, start: Point, aim: Aim, steps: np.ndarray, how: Mapping[str, Any]
    ) -> list[Point]:
        """Anneal a tree; the best of all that are visited, then those that are not dominated.

        Other match ranges than the one that is best for the start are tried on the best alone.
        """
        cost, ranges = start.cost, MATCH_RANGES[start.cost.match_range : start.cost.match_range + 1]
        least = cost[aim.objective]

        def evaluate(tree: np.ndarray, most: float) -> float | None:
            nonlocal cost, ranges, least
            limits = [aim.most_bytes, aim.most_work]
            limits[aim.objective] = min(limits[aim.objective], most)
            limit = limits[WORK], int(limits[MEMORY])
            every = steps[0] % SELDOM == 0
            found = self.cost_of(tree, *limit, MATCH_RANGES if every else ranges)
            if found is None:
                return None
            if not every and found[aim.objective] < least:
                every, found = True, self.cost_of(tree, *limit) or found
            if every:
                ranges = MATCH_RANGES[found.match_range : found.match_range + 1]
            cost, least = found, min(least, found[aim.objective])
            return found[aim.objective]

        visited = [start]
        for tree in anneal(
            start.tree,
            cost[aim.objective],
            lambda tree, draw: change(tree, self.count, draw),
            evaluate,
            **how,
        ):
            steps[0] += 1
            if tree is not visited[-1].tree:
                visited.append(Point(cost, tree, start.group))
            if len(visited) > ARCHIVED:
                visited = [*not_dominated(visited[:-1], _by_work), visited[-1]]
            if self._threads.interrupted:
                break
        best = min(visited, key=_by_work if aim.objective == WORK else _by_memory)
        exact = self.cost_of(best.tree, aim.most_work) or best.cost
        return [Point(exact, best.tree, start.group), *not_dominated(visited, _by_work)]
