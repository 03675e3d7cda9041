"""The search for marks: the plan of least memory, and the fastest plans of every size.

A set of cuts is a plan: what is alive at a cut is saved, everything between is recomputed, what
comes after the last cut is not. The search:

1. Where the network may be cut it gets saved identities (``copies``) of operators that would hold
   what they were computed from if they were saved themselves.
2. Initial solutions, with sizes raised to several exponents: dynamic programming over the cuts
   (those that save least for a limit on the memory between them), for several limits; and the
   original's walk with a budget between two cuts (Chen et al. 2016, algorithm 3).
3. Simulated annealing (``search.c``) of the best of them for least memory, a thread each. Saved
   identities that turn out not to be needed are taken out, and it goes on without them.
4. For the fastest plans: annealing within several limits of memory, a thread each, from the fastest
   plan known that fits; then a second round at limits between.

Every plan that is visited obeys the rules, is replayed to the byte, and is archived if it is the
fastest of its size. So one search gives all plans that are not dominated, and with more memory the
choice is among more of them, and never slower. It depends on the network and the times of its
operators alone, not on the machine's cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import Insertion, KeptCopy
from memonger.planners.annealing import Archive, Cooling, empty_archive, empty_memo
from memonger.planners.candidates import Candidate, MarkPlan, by_memory, not_dominated
from memonger.planners.marks.copies import cuts_behind_copies, settle
from memonger.planners.marks.cuts import Cut, Weights, golden_section, walk, weigh
from memonger.planners.marks.rules import RuleArrays, Rules
from memonger.support.kernels import Struct, compiled
from memonger.support.parallel import Threads
from memonger.support.types import Bools, Doubles, Int8s, Int64s

HARD = 1e30  # the price of a byte above a limit that must be kept
SEED = 73  # of eighteen that were tried, one that is good for small and for large networks
CHEAP = 0.3  # of the mean time of an operator: see ``costly``


class Space(Struct):
    """The plans that are searched, and what a state of the search is."""

    rules: RuleArrays


class Goal(Struct):
    """The energy that annealing makes small, and the changes that it tries."""

    limit: float
    byte_price: float
    second_price: float
    flipping: float
    by_node: bool


class Phase(NamedTuple):
    """One annealing for least memory, of the smallest ``starts`` plans.

    The temperatures are taken in turn, for networks differ in what moving a cut changes.
    """

    starts: int
    part: float  # of all tries
    heats: tuple[tuple[float, float], ...]  # first and last temperature, by a plan's memory
    flipping: float  # the share of changes that flip operators instead of moving a cut


@dataclass(frozen=True)
class Effort:
    """How long the search is.

    Its phases share ``tries``, or so many that ``nodes`` are replayed, times ``patience``; the
    search for fast plans has ``fast`` times as many besides. Beyond ``large`` nodes a replay is
    slower by the node. Temperatures of ``time_heat`` are shares of the time of a forward pass.
    """

    patience: float = 1.0
    tries: int = 55_000
    nodes: int = 75_000_000
    fast: float = 2.5
    large: int = 10_000
    cuts: int = 600
    exponents: tuple[float, ...] = (1.0, 0.75, 0.5, 0.35, 0.2)
    sections: int = 10  # numbers of cuts that are tried by golden section, for each exponent
    halvings: int = 12  # of the range of the memory between cuts, for each exponent
    phases: tuple[Phase, ...] = (
        Phase(4, 0.3, ((0.004, 0.0002), (0.0015, 0.0001)), 0.0),
        Phase(2, 0.6, ((0.002, 0.0001),), 0.6),
        Phase(2, 0.1, ((0.001, 0.0001),), 1.0),
    )
    parts: int = 50  # of the smallest plan, from which annealing for time may start
    limits: int = 8  # of memory, in each of two rounds
    time_heat: tuple[float, float] = (0.04, 0.0004)
    sizes: int = 200  # of plans in the archive
    small: float = 1 / 2000  # of the largest result: smaller ones are not flipped by themselves

    def times(self, patience: float) -> Effort:
        """Return the effort of a search that is so many times as long."""
        return replace(self, patience=patience * self.patience)


EFFORT = Effort()


class NodeTimes(NamedTuple):
    """Seconds that each node takes, and its gradient; the bytes that it reads and writes."""

    forward: Doubles
    gradient: Doubles
    moved_bytes: Doubles


def costly(seconds: Doubles, moved_bytes: Doubles) -> Bools:
    """Return for each node whether it takes longer than moving what it reads and writes would."""
    busy = (moved_bytes > 0) & (seconds > 0)
    if not busy.any():
        return np.zeros(len(seconds), dtype=np.bool_)
    pace = np.median(seconds[busy] / moved_bytes[busy])
    slow = seconds > CHEAP * seconds[busy].mean()
    return busy & slow & (seconds > 2 * pace * moved_bytes)


def recomputation_times(
    times: NodeTimes, insertion: Insertion
) -> tuple[Doubles, Bools, Int64s, Int64s, Doubles]:
    """Return the times of a network with saved identities: the last five fields of `Space`.

    What is inserted behind a recomputed node takes no time: nobody reads it then, so MXNet computes
    no result (``kNullOp``). An identity takes none; a product with one runs once, and its gradient.
    """
    copies = insertion.copies
    copied = np.array([insertion.new_index[copy.node] for copy in copies], dtype=np.int64)
    identities = np.array([insertion.index_of(copy) for copy in copies], dtype=np.int64)
    seconds = times.forward.copy()
    for node, identity in zip(copied, identities):
        seconds[node + 1 : identity + 1] = 0
    until = np.concatenate([[0.0], np.cumsum(times.forward + times.gradient)])
    copy_seconds = until[identities + 1] - until[copied + 1]
    return seconds, costly(seconds, times.moved_bytes), copied, identities, copy_seconds


def price_plan(plain: Rules, times: Callable[[Rules], NodeTimes], plan: MarkPlan) -> Candidate:
    """Settle and price a plan as it is carried out, with the saved identities that it needs.

    ``plain`` are the rules of the network without any.
    """
    plan, rules, mask = settle(plain, plan)
    seconds, _, copied, identities, copy_seconds = recomputation_times(
        times(rules), rules.insertion
    )
    replayed, n = rules.replay(mask), len(mask)
    recomputed = replayed.order[(replayed.order >= n) & (replayed.order < 2 * n)] - n
    used = mask[copied] & ~mask[identities]
    total = float(seconds[recomputed].sum() + copy_seconds[used].sum())
    return Candidate(replayed.pool_bytes, total, plan)


class MarkSearch:
    """The search of one network with some saved identities.

    ``plain`` and ``cuts`` are of the network without any, ``times`` gives those of the network of
    any rules.
    """

    def __init__(
        self,
        plain: Rules,
        times: Callable[[Rules], NodeTimes],
        cuts: Sequence[Cut],
        copies: tuple[KeptCopy, ...],
        threads: Threads,
        effort: Effort,
    ) -> None:
        self.plain, self.times, self.effort = plain, times, effort
        self.threads, self.copies = threads, copies
        self.rules = plain.with_copies(copies)
        self.insertion = self.rules.insertion
        self.cuts = cuts_behind_copies(cuts, self.insertion)
        count = self.insertion.node_count
        tries = min(effort.tries, effort.nodes / count * min(1, effort.large / count))
        self.tries = int(effort.patience * tries / self.rules.slowness)
        self.unplanned = max(1, plain.replay(np.zeros_like(plain.allowed)).pool_bytes)
        self.space = self._space()
        self.forward_seconds = max(float(self.space.seconds.sum()), 1e-12)
        nothing = compiled.make_state(self.space, np.zeros(count, dtype=np.bool_))
        # Saved identities that nobody needs may take more than the network without them.
        most_bytes = max(self.unplanned, compiled.evaluate_state(self.space, nothing)[0])
        self.archive = empty_archive(most_bytes, effort.sizes, nothing.shape, np.int8)
        self._record(nothing)

    def _space(self) -> Space:
        rules = self.rules
        elements = np.array([max(t.elements for t in ts) for ts in rules.graph.tensors])
        flippable = rules.allowed & ~rules.wished
        flippable &= elements >= elements[rules.allowed].max(initial=0) * self.effort.small
        for copy in self.copies:
            node, identity = self.insertion.new_index[copy.node], self.insertion.index_of(copy)
            flippable[node + 1 : identity] = False
        return Space(
            rules.arrays[0],
            np.array(rules.trainings[0].settings.match_ranges),
            np.array([cut.after for cut in self.cuts], dtype=np.int64),
            np.cumsum([0] + [len(cut.keep) for cut in self.cuts]),
            np.array([i for cut in self.cuts for i in cut.keep], dtype=np.int64),
            np.flatnonzero(flippable),
            rules.wished,
            *recomputation_times(self.times(rules), self.insertion),
        )

    def minimise(self, starts: Sequence[Candidate], phase: Phase) -> list[Candidate]:
        """Anneal for least memory, a thread each; return what came of it, the smallest first."""
        price = 1e-6 * self.unplanned / self.forward_seconds
        goal = Goal(0.0, 1.0, price, phase.flipping, False)
        starts = starts[: phase.starts]
        jobs = [
            (start, goal, phase.heats[k % len(phase.heats)], float(start.pool_bytes))
            for k, start in enumerate(starts)
        ]
        states = {best.plan.tobytes(): best for best in self._anneal(jobs, phase.part)}
        return sorted(states.values(), key=by_memory)

    def speed_up(self) -> None:
        """Anneal archived plans for the least time within several limits, in two rounds."""
        self._add_parts()
        count = 2 * self.effort.limits
        heat, unit = self.effort.time_heat, self.forward_seconds
        for part in range(2):
            plans = not_dominated(self.archive.candidates(), by_memory)
            limits = np.geomspace(plans[0].pool_bytes, self.unplanned, count + 1)[part:count:2]
            jobs = []
            for limit in np.maximum(limits, plans[0].pool_bytes):  # the first may be rounded
                start = [plan for plan in plans if plan.pool_bytes <= limit][-1]
                jobs.append((start, Goal(limit, HARD, 1.0, 0.4, True), heat, unit))
            self._anneal(jobs, self.effort.fast / 2)

    def _add_parts(self) -> None:
        """Archive parts of the smallest plan: what comes before a cut, or behind it, and cheap."""
        smallest = self._mask(min(self.archive.candidates(), key=by_memory))
        places = [cut.after + 1 for cut in self.cuts]
        for mask in (smallest, smallest & ~self.space.costly):
            for place in places[:: 1 + len(places) // self.effort.parts]:
                for kept in (slice(place), slice(place, None)):
                    part = mask.copy()
                    part[kept] = False
                    self._record(compiled.make_state(self.space, part))

    def cuts_by_size(self) -> list[Candidate]:
        """Archive the sets of cuts to start from, and sort them by the bytes that they cost."""
        candidates: dict[bytes, Candidate] = {}
        blank = np.zeros(len(self.cuts) + self.insertion.node_count, dtype=np.int8)  # no cuts

        def cost(chosen: Sequence[int]) -> int:
            state = blank.copy()
            state[chosen] = True
            key = state.tobytes()
            if key not in candidates:
                candidates[key] = self._record(state)
            return candidates[key].pool_bytes

        for weights in weigh(self.rules.trainings[0], self.cuts, self.effort.exponents):
            low, high = 0.0, float(weights.highest.max())
            for _ in range(self.effort.halvings):
                limit = (low + high) / 2
                possible, chosen = compiled.cheapest_cuts(weights, limit)
                if possible:
                    high = limit
                    cost(chosen.tolist())
                else:
                    low = limit

            def of_segments(logarithm: float, weights: Weights = weights) -> float:
                return cost(walk(weights, np.exp(logarithm)))

            most = np.log(max(3, len(self.cuts)))
            golden_section(of_segments, np.log(2), most, self.effort.sections)
        return sorted(candidates.values(), key=by_memory)

    def add(self, plan: MarkPlan) -> Candidate | None:
        """Archive a plan of the plain network, if it needs none but these saved identities."""
        if not {*plan.copies} <= {*self.copies}:
            return None
        mask = self.insertion.extend(plan.mask)
        for copy in {*self.copies} - {*plan.copies}:  # what nobody saves is recomputed
            mask[self.insertion.new_index[copy.node] + 1 : self.insertion.index_of(copy) + 1] = True
        return self._record(compiled.make_state(self.space, mask))

    def plans(self) -> list[Candidate]:
        """List the archived plans, with their cost while no saved identity is taken out."""
        return [replace(state, plan=self.plan(state)) for state in self.archive.candidates()]

    def plan(self, state: Candidate) -> MarkPlan:
        """Make the plan of the plain network that a state is."""
        mask = self._mask(state)
        return MarkPlan(mask[self.insertion.new_index], self.insertion.needed(mask))

    def _mask(self, state: Candidate) -> Bools:
        mask: Bools = compiled.read_state(self.space, state.plan)[0]
        return mask

    def _record(self, state: Int8s) -> Candidate:
        """Evaluate and archive a state."""
        pool, seconds = compiled.evaluate_state(self.space, state)
        compiled.record(self.archive, pool, seconds, state)
        return Candidate(pool, seconds, state)

    def _anneal(
        self, jobs: Sequence[tuple[Candidate, Goal, tuple[float, float], float]], part: float
    ) -> list[Candidate]:
        """Anneal states, a thread each; archive what is visited, return the best of each.

        A job is a start, a goal, the first and the last temperature, and their unit.
        """
        tries = int(self.tries * part) // len(jobs)

        def work(k: int, done: Int64s) -> tuple[Int8s, Archive]:
            start, goal, (hot, cold), unit = jobs[k]
            most_bytes, shape = self.archive.most_bytes, start.plan.shape
            archive = empty_archive(most_bytes, self.effort.sizes, shape, np.int8)
            cooling, memo = Cooling(SEED + k, tries, hot, cold, unit), empty_memo()
            mask, stop = self._mask(start), self.threads.stop
            state = compiled.make_state(self.space, mask) if goal.by_node else start.plan
            best = compiled.anneal_masks(
                self.space, state, goal, cooling, memo, archive, stop, done
            )
            return best, archive

        annealed = self.threads.run(work, range(len(jobs)), tries, part)
        for _, archive in annealed:
            for plan in archive.candidates():
                compiled.record(self.archive, plan.pool_bytes, plan.time, plan.plan)
        return [self._record(state) for state, _ in annealed]
