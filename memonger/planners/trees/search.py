"""Schedules of any depth: as little memory as there can be for so much work, or the other way.

A schedule is a binary tree of cuts (``unroll``): run forward to the cut, process what is right of
it, then what is left. The binomial schedule (``binomial``) is such a tree, so are a square root of
segments and all that marks can express but for single operators. The search:

1. Candidate boundaries: where little is alive (``boundaries``).
2. What the pieces between them need (``pieces``), sizes being raised to several powers
   (``entries``). Dynamic programming over trees of cuts (``least_work``), at several scales of
   memory: one table gives the trees of a whole frontier of memory and work.
3. Binomial trees over all boundaries and over fewer of them: for little memory in deep networks,
   whose boundaries are too many for the table (all of these trees: ``seeds``).
4. Every tree's schedule is replayed to the byte (``judge``), with all match ranges: MXNet tries
   them all when it binds a schedule.
5. The best few are annealed (``climb``), a thread each, then the best of these for longer. For the
   schedules of every size (``front``) they are annealed at several limits of memory, and all that
   is met counts.

Work is FLOPs, or what the caller says that each operator takes (its time). All else depends on the
network alone, not on the machine's speed or its cores.

Optimal re-forwarding of arbitrary graphs: Feng and Huang 2021, "Optimal Gradient Checkpoint Search
for Arbitrary Computation Graphs". With O(log n) memory: Chen et al. 2016, section 4.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence

import numpy as np

from memonger.planners.pareto import not_dominated
from memonger.planners.trees.climb import ENDLESS, MATCH_RANGES, Annealed, Prices, climb
from memonger.planners.trees.entries import weigh
from memonger.planners.trees.judge import Blueprint, blueprint, judge, positions
from memonger.planners.trees.seeds import (
    KNOWN,
    POWERS,
    SCALES,
    Family,
    Tree,
    binomials,
    dynamic,
    refined,
)
from memonger.planners.trees.unroll import tree_keeping, unroll
from memonger.schedules.expand import parts
from memonger.schedules.schedule import Schedule, Workload, plain
from memonger.schedules.training_step import Parts
from memonger.support.errors import MemongerError
from memonger.support.parallel import Threads

REFINEMENTS = 2  # rounds of dynamic programming over the cuts of the best trees
MOST_REFINED = 8  # trees
#: The time that a try takes while annealing, and that of each event of its schedule.
TRY, EVENT = 30, 0.17
MOST_TRIES = 6000  # for each forward operator
SEEDING, REFINING, ANNEALING = 0.3, 0.05, 0.6  # parts of the search, as far as progress knows
#: For the schedules of every size: limits of memory in each of two rounds, the tries of a round in
#: those of a usual search, the sizes that are told apart, and the part of the search.
LIMITS, FRONT, BINS, FRONT_ANNEALING = 8, 1.0, 200, 0.7
UNLIMITED = 1000.0  # times the forward work: more than any schedule is worth
#: Where no limit is given: times log2 of the operators. With n log n work there is O(log n) memory
#: (Chen et al. 2016). With more it is constant, but then MXNet's executor, which has a few KB for
#: every operator that runs, takes more of the host than is saved.
LOGARITHMS = 2.0
LEAST_UNLIMITED = 4.0
SLACK = 1 + 1e-9  # for rounding where work is compared


@dataclass(frozen=True)
class Effort:
    """How long a search is: counted, not measured, so that it is the same everywhere.

    Dynamic programming has so many operators of its trees replayed, of a whole frontier and of
    trees whose work is near a limit; annealing takes so many units of about a microsecond.
    """

    replays: int = 3_000_000
    replays_near: int = 600_000
    annealing: int = 15_000_000

    def times(self, patience: float) -> Effort:
        """So many times as much."""
        return Effort(
            replays=int(patience * self.replays),
            replays_near=int(patience * self.replays_near),
            annealing=int(patience * self.annealing),
        )


#: The effort where none is told.
EFFORT = Effort()


class Annealing(NamedTuple):
    """How the tries are spent.

    Of each round: from how many of the best trees it starts, and its share of all tries. The
    temperatures at the beginning and the end are shares of the cost; the starts take turns.
    """

    rounds: tuple[tuple[int, float], ...]
    temperatures: tuple[tuple[float, float], ...]


SHORT = Annealing(((3, 0.5), (1, 0.5)), ((0.004, 0.0002), (0.001, 0.0001)))
LONG = Annealing(((8, 0.4), (3, 0.3), (1, 0.3)), ((0.004, 0.0002), (0.001, 0.0001)))
LONG_FROM = 45_000  # tries


class Judged(NamedTuple):
    """A schedule, the bytes of its pool as MXNet counts them (gradients included), and its work.

    Work is all forward operations of the step, as a multiple of those of one forward pass.
    """

    pool_bytes: int
    work: float
    schedule: Schedule


class Found(NamedTuple):
    """The best schedule, where it comes from, and whether the user ended the search."""

    best: Judged
    origin: str
    interrupted: bool


NOTHING = "no recomputation"  # the origin of the schedule that runs nothing again


class ScheduleSearch:
    """The schedules of one network.

    All that is found is remembered: whoever asks one object for more and more memory never gets
    more work, and the other way.

    Parameters
    ----------
    workload : Workload
    patience : float
        Times the usual length of the search.
    progress : callable, optional
        Is told how much of a search is done, from 0 to 1.
    weights : np.ndarray, optional
        The work of each forward node, in any unit; by default its FLOPs.
    made : Parts, optional
        The parts of the workload, if they are there already.

    Examples
    --------
    >>> found = ScheduleSearch(workload(training)).least_memory(3.0)  # doctest: +SKIP
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
        self.progress = progress or (lambda done: None)
        self.threads = Threads(self.progress)
        self.blueprint: Blueprint = blueprint(made or parts(workload), weights)
        self.price = Prices(self.blueprint)
        self.position = positions(self.blueprint.node, len(workload.once))
        self.entries = weigh(workload, self.blueprint, POWERS)
        self.one_pass = self.price.one_pass
        self.unlimited = max(LEAST_UNLIMITED, LOGARITHMS * math.log2(len(self.blueprint.node) + 1))
        self._seeded: set[float | None] = set()
        self._repeats = 1  # of binomial trees that are among those that are found
        self._found: list[Tree] = []

    # ------------------------------------------------------------------ what is asked for

    def least_memory(
        self, work: float | None = None, others: Sequence[tuple[str, Schedule]] = ()
    ) -> Found:
        """The schedule of least memory with at most ``work`` times the forward work.

        Parameters
        ----------
        work : float, optional
            At least 1; None: no limit but what O(log n) memory takes (`LOGARITHMS`).
        others : sequence of (str, Schedule)
            Schedules that are known already, with their names: what is found is never worse, and
            the search starts from them as well.

        Raises
        ------
        MemongerError
            If no schedule does with that little work.
        """
        if work is not None and not work >= 1:
            raise MemongerError(
                f"work={work!r}: a training step runs all of the network forward at least once, so "
                "work is 1 or more; None for no limit"
            )
        limit = self.unlimited if work is None else float(work)
        known = [k for k in self._known(others) if k[0].work <= limit * SLACK]
        tree = self._search(limit * self.one_pass * SLACK)
        if tree is not None:
            known.append((self._judged(tree), "searched schedule"))
        best, name = min(known, key=lambda k: (k[0].pool_bytes, k[0].work))
        return Found(best, name, self.threads.interrupted)

    def front(self, others: Sequence[tuple[str, Schedule]] = ()) -> list[Found]:
        """The schedules that no other beats in both memory and work, the least work first.

        One search for all of them, so that who has more memory chooses among more.

        Parameters
        ----------
        others : sequence of (str, Schedule)
            Schedules that are known already, with their names.
        """
        known = self._known(others)
        self.threads = Threads(self.progress)
        try:
            self.progress(0.0)
            self._seed(None)
            if self._found:
                for part in range(2):
                    self._round(part, max(judged.pool_bytes for judged, _ in known))
            if not self.threads.interrupted:
                self.progress(1.0)
        except KeyboardInterrupt:
            self.threads.stop[0] = 1
        # Judged anew: what was met while annealing has been tried with one match range alone.
        best = not_dominated(self._found, _by_work)
        trees = [self.judge(self.schedule(tree.tree)) for tree in best]
        known += [(judged, "searched schedule") for judged in trees]
        front = not_dominated(known, lambda k: (k[0].work, k[0].pool_bytes))
        return [Found(judged, name, self.threads.interrupted) for judged, name in front]

    def judge(self, schedule: Schedule) -> Judged:
        """What a schedule costs."""
        b = self.blueprint
        nodes = schedule.events
        forward = nodes >= 0
        events = np.where(forward, self.position[nodes], ~self.position[~nodes]).astype(np.int32)
        pool = int(judge(b, events, MATCH_RANGES, ENDLESS)[0])
        work = float(b.steps.work[events[forward]].sum())
        return Judged(pool, work / self.one_pass, schedule)

    def schedule(self, tree: np.ndarray) -> Schedule:
        """The schedule of a tree of cuts."""
        b = self.blueprint
        events, _ = unroll(b, tree, np.inf, ENDLESS)
        forward = events >= 0
        nodes = np.where(forward, b.node[events], ~b.node[~events])
        return Schedule(nodes.astype(np.int32))

    # ------------------------------------------------------------------ how it is found

    def _known(self, others: Sequence[tuple[str, Schedule]]) -> list[tuple[Judged, str]]:
        """What is known already, the schedule without recomputation first; as trees as well."""
        known = [(self.judge(plain(self.workload)), NOTHING)]
        for name, schedule in others:
            known.append((self.judge(schedule), name))
            forwards = self.position[schedule.forwards]
            kept = np.bincount(forwards, minlength=len(self.blueprint.node)) == 1
            self._found += self._priced([tree_keeping(self.blueprint.steps, kept)], KNOWN)
        return known

    def _judged(self, tree: Tree) -> Judged:
        return Judged(tree.pool_bytes, tree.work / self.one_pass, self.schedule(tree.tree))

    def _search(self, most_work: float) -> Tree | None:
        """The tree of least memory of all that are found.

        None if there is none. Ctrl-C ends the search; what has been found by then counts.
        """
        self.threads = Threads(self.progress)

        def allowed() -> list[Tree]:
            return sorted((t for t in self._found if t.work <= most_work), key=_by_memory)

        try:
            self.progress(0.0)
            self._seed(most_work)
            if allowed():
                self._climb(allowed, most_work)
            if not self.threads.interrupted:
                self.progress(1.0)
        except KeyboardInterrupt:
            self.threads.stop[0] = 1
        found = allowed()
        return found[0] if found else None

    def _seed(self, most_work: float | None) -> None:
        """Find the trees to start from, once for each limit of work."""
        if most_work not in self._seeded:
            self._found += self.seeds(most_work)
            most = self.unlimited
            if most_work is not None:
                most = min(most, most_work / self.one_pass)
            trees = binomials(self.entries, range(self._repeats + 1, int(most) + 1))
            self._found += self._priced(trees, KNOWN)
            if not self.threads.interrupted:
                self._seeded.add(most_work)
                self._repeats = max(self._repeats, int(most))

    def _priced(
        self, trees: Sequence[np.ndarray], family: Family, share: float = 0.0
    ) -> list[Tree]:
        def one(tree: np.ndarray, done: np.ndarray) -> Tree | None:
            done[0] = 1
            if self.threads.interrupted:
                return None
            cost = self.price(tree, UNLIMITED * self.one_pass)
            return Tree(cost.pool_bytes, cost.work, tree, family) if cost.pool_bytes >= 0 else None

        found = self.threads.each(one, trees, 1, share)
        return [tree for tree in found if tree is not None]

    def seeds(self, most_work: float | None = None) -> list[Tree]:
        """Trees of the whole frontier, or those about a limit of work."""
        found: list[Tree] = []
        share = SEEDING / len(POWERS) / SCALES
        replays = self.effort.replays if most_work is None else self.effort.replays_near
        for family, trees in dynamic(self.entries, replays, most_work):
            found += self._priced(trees, family, share)
            if self.threads.interrupted:
                break
        return found

    def _climb(self, allowed: Callable[[], list[Tree]], most_work: float) -> None:
        """Refine and anneal the best that is found, and remember what comes of it."""
        for _ in range(REFINEMENTS):
            if self.threads.interrupted:
                return
            best = [tree for tree in allowed() if tree.family != KNOWN][:MOST_REFINED]
            if best:
                for family, found in refined(self.entries, self.effort.replays, best):
                    self._found += self._priced(found, family)
            self.threads.done += REFINING / REFINEMENTS
        trees: list[Tree] = []
        for seed in allowed():  # not too many of a family
            if sum(tree.family == seed.family for tree in trees) < 2:
                trees.append(seed)
        tries = self._tries(trees[: LONG.rounds[0][0]])
        how = SHORT if tries < LONG_FROM * self.patience else LONG
        for number, (starts, share) in enumerate(how.rounds):
            if self.threads.interrupted:
                return
            trees = sorted(trees, key=_by_memory)[:starts]
            each = max(1, int(tries * share / len(trees)))
            seeds = range(100 * number, 100 * number + len(trees))
            heats = [how.temperatures[k % len(how.temperatures)] for k in range(len(trees))]
            jobs = [(*job, 0) for job in zip(trees, seeds, heats)]
            trees = self._annealed(jobs, most_work, each, share * ANNEALING)
            self._found += trees

    def _round(self, part: int, most: int) -> None:
        """Anneal at every other of several limits of memory; remember all that is met.

        The last limit of the second round is none: the aim is then the least memory.
        """
        if self.threads.interrupted:
            return
        best = not_dominated(self._found, _by_work)
        least = best[-1].pool_bytes
        limits = np.geomspace(least, max(most, least), 2 * LIMITS + 1)[part : 2 * LIMITS : 2]
        aims = [int(limit) + 1 for limit in limits] + ([0] if part else [])
        jobs = []
        for k, limit in enumerate(aims):
            tree = next((t for t in best if t.pool_bytes <= limit), best[-1])
            jobs.append((tree, 100 * part + k, LONG.temperatures[0], limit))
        tries = max(1, int(self._tries([job[0] for job in jobs]) * FRONT / len(jobs)))
        everything = UNLIMITED * self.one_pass
        self._found += self._annealed(jobs, everything, tries, FRONT_ANNEALING / 2, most / BINS)

    def _tries(self, trees: Sequence[Tree]) -> int:
        """How many there may be while annealing."""
        count = len(self.blueprint.node)
        events = count * float(np.mean([1 + tree.work / self.one_pass for tree in trees]))
        tries = min(MOST_TRIES * count, self.effort.annealing / (TRY + EVENT * events))
        return max(1, int(self.patience * tries))

    def _annealed(
        self,
        jobs: Sequence[tuple[Tree, int, tuple[float, float], int]],
        most_work: float,
        tries: int,
        share: float,
        bin_bytes: float = 0.0,
    ) -> list[Tree]:
        """Trees after so many tries each; with each its random seed, temperatures and budget.

        With ``bin_bytes`` not only these, but for each size, in steps of so many bytes, the tree
        of least work that is met on the way.
        """

        def one(job: tuple[Tree, int, tuple[float, float], int], done: np.ndarray) -> list[Tree]:
            bins: dict[int, Annealed] = {}

            def tick() -> bool:
                done[0] += 1
                return not self.threads.interrupted

            def met(at: Annealed) -> None:
                place = int(at.pool_bytes / bin_bytes)
                if place not in bins or at.work < bins[place].work:
                    bins[place] = at

            tree, seed, (hot, cold), budget = job
            best = climb(
                self.price,
                tree.tree,
                most_work,
                budget,
                seed,
                tries,
                hot,
                cold,
                tick,
                met if bin_bytes else None,
            )
            found = [
                Tree(t.pool_bytes, t.work, t.tree, tree.family) for t in (best, *bins.values())
            ]
            return found[:1] + not_dominated(found[1:], _by_work)

        each = self.threads.each(one, jobs, tries, share)
        return [tree for found in each for tree in found]


def _by_memory(tree: Tree) -> tuple[float, float]:
    return tree.pool_bytes, tree.work


def _by_work(tree: Tree) -> tuple[float, float]:
    return tree.work, tree.pool_bytes
