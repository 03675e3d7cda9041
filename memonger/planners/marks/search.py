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
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import KeptCopy, mask_with_copies
from memonger.planners.annealing import Archive, empty_archive, nothing_known
from memonger.planners.candidates import Candidate, MarkPlan, by_memory, not_dominated
from memonger.planners.marks.copies import behind_copies, needed_copies, settle
from memonger.planners.marks.cuts import Cut, Weights, golden_section, walk, weigh
from memonger.planners.marks.rules import RuleArrays, Rules
from memonger.support.kernels import Struct, compiled
from memonger.support.parallel import Threads

HARD = 1e30  # the price of a byte above a limit that must be kept
SEED = 73  # of eighteen that were tried, one that is good for small and for large networks
CHEAP = 0.3  # of the mean time of an operator by its bytes: see ``costly``


class Space(Struct):
    """What is searched, and what a state of the search is."""

    rules: RuleArrays


class Goal(Struct):
    """What annealing looks for, and how."""

    limit: float
    byte_price: float
    second_price: float
    flipping: float
    by_node: bool


class Phase(NamedTuple):
    """One annealing for least memory, of the smallest ``starts`` plans known.

    The temperatures are taken in turn, for networks differ in what moving a cut changes.
    """

    starts: int
    part: float  # of all tries
    heats: tuple[tuple[float, float], ...]  # shares of a plan's memory
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
        """So many times as much."""
        return replace(self, patience=patience * self.patience)


#: The effort where none is told.
EFFORT = Effort()


class NodeTimes(NamedTuple):
    """Seconds that each node takes, and its gradient; the bytes that it reads and writes."""

    forward: np.ndarray
    gradient: np.ndarray
    moved_bytes: np.ndarray


def costly(seconds: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The operators that take longer than moving what they read and write would."""
    busy = (moved > 0) & (seconds > 0)
    if not busy.any():
        return np.zeros(len(seconds), dtype=np.bool_)
    pace = np.median(seconds[busy] / moved[busy])
    share = seconds > CHEAP * seconds[busy].mean()
    return busy & share & (seconds > 2 * pace * moved)


def recomputation_times(
    times: NodeTimes, moved: np.ndarray, copies: Sequence[KeptCopy]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Times of a network with saved identities, as `Space` has them.

    What stands behind a recomputed node takes no time: nobody reads it again, so MXNet asks for no
    result (``kNullOp``). An identity takes none; a product with one runs once, and its gradient.
    """
    copies = [copy for copy in copies if not copy.apart]
    seconds = times.forward.copy()
    places = moved[[copy.node for copy in copies]].astype(np.int64)
    ends = places + np.array([copy.offset for copy in copies], dtype=np.int64)
    for place, end in zip(places, ends):
        seconds[place + 1 : end + 1] = 0
    until = np.concatenate([[0.0], np.cumsum(times.forward + times.gradient)])
    added = until[ends + 1] - until[places + 1]
    return seconds, costly(seconds, times.moved_bytes), places, ends, added


def settled(plain: Rules, times: Callable[[Rules], NodeTimes], plan: MarkPlan) -> Candidate:
    """Settle and price a plan as it is carried out, with the saved identities that it needs.

    ``plain`` are the rules of the network without any.
    """
    rules, full, mask, copies = settle(plain, plan.mask, plan.copies)
    moved = plain.with_copies(copies)[1]
    seconds, _, copied, kept, added = recomputation_times(times(rules), moved, copies)
    found, n = rules.replay(full), len(full)
    recomputed = found.order[(found.order >= n) & (found.order < 2 * n)] - n
    total = float(seconds[recomputed].sum() + added[full[copied] & ~full[kept]].sum())
    return Candidate(found.pool_bytes, total, MarkPlan(mask, copies))


class MarkSearch:
    """The search of one network with some saved identities.

    ``plain`` and ``cuts`` are of the network without any, ``times`` gives those of the network of
    any rules; ``share`` of the progress is told for as many tries as an effort has.
    """

    def __init__(
        self,
        plain: Rules,
        times: Callable[[Rules], NodeTimes],
        cuts: Sequence[Cut],
        copies: tuple[KeptCopy, ...],
        threads: Threads,
        effort: Effort,
        share: float = 1.0,
    ) -> None:
        self.plain, self.times, self.effort = plain, times, effort
        self.threads, self.share = threads, share
        self.copies = copies
        self.rules, self.moved = plain.with_copies(copies)
        self.cuts = behind_copies(cuts, self.moved, copies)
        count = len(self.rules.graph.nodes)
        tries = min(effort.tries, effort.nodes / count * min(1, effort.large / count))
        self.tries = int(effort.patience * tries / self.rules.effort)
        self.unplanned = max(1, plain.replay(np.zeros_like(plain.allowed)).pool_bytes)
        self.space = self._space()
        self.forward_seconds = max(float(self.space.seconds.sum()), 1e-12)
        nothing = compiled.named(self.space, np.zeros(count, dtype=np.bool_))
        # Saved identities that nobody needs may take more than the network without them.
        self.most = max(self.unplanned, compiled.evaluate_state(self.space, nothing)[0])
        self.archive = self._empty_archive()
        self._record(nothing)

    def _space(self) -> Space:
        rules = self.rules
        elements = np.array([max(t.elements for t in ts) for ts in rules.graph.tensors])
        allowed, single = rules.allowed.copy(), rules.allowed.copy()
        single &= elements >= elements[rules.allowed].max(initial=0) * self.effort.small
        for copy in self.copies:
            place = int(self.moved[copy.node])
            single[place + 1 : place + copy.offset + copy.apart] = False
            allowed[place + copy.offset] &= not copy.apart
        return Space(
            rules.arrays[0].replace(allowed=allowed),
            np.array(rules.trainings[0].settings.match_ranges),
            np.array([cut.after for cut in self.cuts], dtype=np.int64),
            np.cumsum([0] + [len(cut.keep) for cut in self.cuts]),
            np.array([i for cut in self.cuts for i in cut.keep], dtype=np.int64),
            np.flatnonzero(single),
            *recomputation_times(self.times(rules), self.moved, self.copies),
        )

    # ------------------------------------------------------------------ the search

    def minimise(self, starts: Sequence[Candidate], phase: Phase) -> list[Candidate]:
        """Anneal for least memory, a thread each; all that came of it, the smallest first."""
        price = 1e-6 * self.unplanned / self.forward_seconds
        goal = Goal(0.0, 1.0, price, phase.flipping, False)
        starts = starts[: phase.starts]
        jobs = []
        for k, start in enumerate(starts):
            heat = phase.heats[k % len(phase.heats)]
            jobs.append((start, goal, [share * start.pool_bytes for share in heat]))
        states = {best.plan.tobytes(): best for best in self._anneal(jobs, phase.part)}
        return sorted(states.values(), key=by_memory)

    def speed_up(self) -> None:
        """Anneal archived plans for the least time within several limits, in two rounds."""
        self._add_parts()
        count = 2 * self.effort.limits
        heat = [part * self.forward_seconds for part in self.effort.time_heat]
        for part in range(2):
            plans = not_dominated(self._archived(), by_memory)
            limits = np.geomspace(plans[0].pool_bytes, self.unplanned, count + 1)[part:count:2]
            jobs = []
            for limit in np.maximum(limits, plans[0].pool_bytes):  # the first may be rounded
                start = [plan for plan in plans if plan.pool_bytes <= limit][-1]
                jobs.append((start, Goal(limit, HARD, 1.0, 0.4, True), heat))
            self._anneal(jobs, self.effort.fast / 2)

    def _add_parts(self) -> None:
        """Archive parts of the smallest plan: what comes before a cut, or behind it, and cheap."""
        smallest = self._mask(min(self._archived(), key=by_memory))
        places = [cut.after + 1 for cut in self.cuts]
        for mask in (smallest, smallest & ~self.space.costly):
            for place in places[:: 1 + len(places) // self.effort.parts]:
                for part in (slice(place), slice(place, None)):
                    left = mask.copy()
                    left[part] = False
                    self._record(compiled.named(self.space, left))

    def cuts_by_size(self) -> list[Candidate]:
        """Archive the sets of cuts to start from, and sort them by the bytes that they cost."""
        known: dict[bytes, Candidate] = {}

        def cost(chosen: Sequence[int]) -> int:
            state = self._state()
            state[chosen] = True
            key = state.tobytes()
            if key not in known:
                known[key] = self._record(state)
            return known[key].pool_bytes

        for weights in weigh(self.rules.trainings[0], self.cuts, self.effort.exponents):
            low, high = 0.0, float(weights.highest.max())
            for _ in range(self.effort.halvings):
                bound = (low + high) / 2
                possible, chosen = compiled.cheapest_cuts(weights, bound)
                if possible:
                    high = bound
                    cost(chosen.tolist())
                else:
                    low = bound

            def of_segments(logarithm: float, weights: Weights = weights) -> float:
                return cost(walk(weights, np.exp(logarithm)))

            most = np.log(max(3, len(self.cuts)))
            golden_section(of_segments, np.log(2), most, self.effort.sections)
        return sorted(known.values(), key=by_memory)

    def add(self, plan: MarkPlan) -> Candidate | None:
        """Archive a plan of the plain network, if it needs none but these saved identities."""
        if not {*plan.copies} <= {*self.copies}:
            return None
        full = mask_with_copies(plan.mask, self.moved, plan.copies, len(self.space.seconds))
        for copy in {*self.copies} - {*plan.copies}:  # what nobody saves is recomputed
            place = int(self.moved[copy.node])
            full[place + 1 : place + copy.offset + 1] = True
        return self._record(compiled.named(self.space, full))

    def plans(self) -> list[Candidate]:
        """List the archived plans, with their cost while no saved identity is taken out."""
        return [replace(state, plan=self.plan(state)) for state in self._archived()]

    def plan(self, state: Candidate) -> MarkPlan:
        """Make the plan of the plain network that a state is."""
        mask = self._mask(state)
        return MarkPlan(mask[self.moved], needed_copies(self.moved, self.copies, mask))

    def _mask(self, state: Candidate) -> np.ndarray:
        mask: np.ndarray = compiled.plan_of(self.space, state.plan)[0]
        return mask

    # ------------------------------------------------------------------ the archive

    def _state(self) -> np.ndarray:
        """The state in which there are no cuts and everything is recomputed."""
        return np.zeros(len(self.cuts) + len(self.space.seconds), dtype=np.int8)

    def _empty_archive(self) -> Archive:
        return empty_archive(self.most, self.effort.sizes, self._state().shape, np.int8)

    def _record(self, state: np.ndarray) -> Candidate:
        pool, seconds = compiled.evaluate_state(self.space, state)
        compiled.record(self.archive, pool, seconds, state)
        return Candidate(pool, seconds, state)

    def _archived(self) -> list[Candidate]:
        a = self.archive
        return [
            Candidate(int(a.pools[k]), float(a.seconds[k]), a.states[k].copy())
            for k in np.flatnonzero(np.isfinite(a.seconds))
        ]

    def _anneal(
        self, jobs: Sequence[tuple[Candidate, Goal, Sequence[float]]], part: float
    ) -> list[Candidate]:
        """Anneal states, a thread each; archive what is visited, return the best of each."""
        tries = int(self.tries * part) // len(jobs)

        def work(job: tuple[int, Candidate, Goal, Sequence[float]], done: np.ndarray) -> Any:
            seed, start, goal, (hot, cold) = job
            mask, archive, stop = self._mask(start), self._empty_archive(), self.threads.stop
            known = nothing_known()
            state = compiled.named(self.space, mask) if goal.by_node else start.plan.copy()
            compiled.anneal_masks(
                self.space, state, goal, seed, tries, hot, cold, known, archive, stop, done
            )
            return state, archive

        numbered = [(seed, *job) for seed, job in enumerate(jobs, SEED)]
        annealed = self.threads.run(work, numbered, tries, part * self.share)
        for _, archive in annealed:
            for k in np.flatnonzero(np.isfinite(archive.seconds)):
                compiled.record(
                    self.archive, archive.pools[k], archive.seconds[k], archive.states[k]
                )
        return [self._record(state) for state, _ in annealed]
