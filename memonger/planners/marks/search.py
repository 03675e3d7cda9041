"""The search for marks: the plan of least memory, and the fastest plans of every size.

A set of cuts is a plan: what is alive at a cut is saved, everything between is recomputed, what
comes after the last cut is not. The search:

1. Where the network may be cut it gets saved identities (``copies``) of operators that would hold
   what they were computed from if they were saved themselves.
2. Initial solutions, with sizes raised to several exponents: dynamic programming over the cuts
   (those that save least for a limit on the memory between them), for several limits; and the
   original's walk with a budget between two cuts (Chen et al. 2016, algorithm 3).
3. Simulated annealing (``anneal``) of the best of them for least memory, a thread each. Saved
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
from typing import Callable, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.forward import KeptCopy, mask_with_copies
from memonger.planners.marks.anneal import (
    Archive,
    Goal,
    Space,
    anneal,
    empty_archive,
    evaluate,
    record,
)
from memonger.planners.marks.copies import behind_copies, needed_copies, settle
from memonger.planners.marks.cuts import Cut, Weights, cheapest_cuts, recomputed_between, weigh
from memonger.planners.marks.rules import Rules
from memonger.planners.pareto import not_dominated
from memonger.support.parallel import Threads

HARD = 1e30  # the price of a byte above a limit that must be kept
CHEAP = 0.3  # of the mean time of an operator by its bytes: see ``costly``

Heat = Tuple[float, float]  # the temperature at the beginning of annealing, and at the end


class Phase(NamedTuple):
    """One annealing for least memory, of the smallest ``starts`` plans known."""

    starts: int
    part: float  # of all tries
    heats: tuple[Heat, ...]  # shares of a plan's memory, taken in turn: networks differ
    flipping: float  # the share of changes that flip operators instead of moving a cut


@dataclass(frozen=True)
class Effort:
    """How long the search is.

    Its phases share ``tries``, or so many that ``nodes`` are replayed, times ``patience``; the
    search for fast plans has as many again. Beyond ``large`` nodes a replay is slower by the node.
    """

    patience: float = 1.0
    tries: int = 160_000
    nodes: int = 120_000_000
    large: int = 10_000
    cuts: int = 600
    exponents: tuple[float, ...] = (1.0, 0.75, 0.5, 0.35, 0.2)
    halvings: int = 24  # of the range of the memory between cuts, for each exponent
    walks: int = 12  # with several budgets, for each exponent
    phases: tuple[Phase, ...] = (
        Phase(8, 0.25, ((0.004, 0.0002), (0.0015, 0.0001)), 0.4),
        Phase(4, 0.55, ((0.002, 0.0001),), 0.5),
        Phase(4, 0.2, ((0.001, 0.0001),), 1.0),
    )
    parts: int = 50  # of the smallest plan, from which annealing for time may start
    limits: int = 8  # of memory, in each of two rounds
    time_heat: Heat = (0.04, 0.0004)  # shares of the time of a forward pass
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


class MarkPlan(NamedTuple):
    """The recomputed nodes and saved identities, the bytes as MXNet counts, the added seconds."""

    pool_bytes: int
    seconds: float
    mask: np.ndarray
    copies: tuple[KeptCopy, ...] = ()


def by_size(plan: MarkPlan) -> tuple[int, float]:
    """What plans are compared by: the bytes, then the seconds."""
    return plan.pool_bytes, plan.seconds


def by_time(plan: MarkPlan) -> tuple[float, int]:
    """What plans are compared by: the seconds, then the bytes."""
    return plan.seconds, plan.pool_bytes


def costly(seconds: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The nodes that take longer than moving the bytes (``moved``) that they read and write."""
    busy = (moved > 0) & (seconds > 0)
    if not busy.any():
        return busy
    pace = np.median(seconds[busy] / moved[busy])
    return busy & (seconds > CHEAP * seconds[busy].mean()) & (seconds > 2 * pace * moved)


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


def settled(plain: Rules, times: Callable[[Rules], NodeTimes], plan: MarkPlan) -> MarkPlan:
    """The plan as it is carried out, with none but the saved identities that it needs.

    ``plain`` are the rules of the network without any.
    """
    rules, full, mask, copies = settle(plain, plan.mask, plan.copies)
    moved = plain.with_copies(copies)[1]
    seconds, _, copied, kept, added = recomputation_times(times(rules), moved, copies)
    found, n = rules.replay(full), len(full)
    again = found.order[(found.order >= n) & (found.order < 2 * n)] - n
    total = float(seconds[again].sum() + added[full[copied] & ~full[kept]].sum())
    return MarkPlan(found.pool_bytes, total, mask, copies)


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
        self.nodes = len(self.rules.graph.nodes)
        tries = min(effort.tries, effort.nodes / self.nodes * min(1, effort.large / self.nodes))
        self.tries = int(effort.patience * tries / self.rules.effort)
        self.unplanned = max(1, plain.replay(np.zeros_like(plain.allowed)).pool_bytes)
        self.space = self._space()
        self.forward_seconds = max(float(self.space.seconds.sum()), 1e-12)
        nothing = np.zeros(self.nodes, dtype=np.bool_)
        # Saved identities that nobody needs may take more than the network without them.
        self.most = max(self.unplanned, int(evaluate(self.space, nothing)[0]))
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
            rules.tables[0]._replace(allowed=allowed),
            np.array(rules.trainings[0].settings.match_ranges),
            np.array([cut.after for cut in self.cuts], dtype=np.int64),
            np.cumsum([0] + [len(cut.keep) for cut in self.cuts]),
            np.array([i for cut in self.cuts for i in cut.keep], dtype=np.int64),
            np.flatnonzero(single),
            *recomputation_times(self.times(rules), self.moved, self.copies),
        )

    # ------------------------------------------------------------------ the search

    def cuts_by_size(self) -> list[MarkPlan]:
        """Archive the sets of cuts to start from, the smallest first."""
        found: dict[tuple[int, ...], MarkPlan] = {}

        def take(chosen: Sequence[int]) -> None:
            mask = recomputed_between([self.cuts[k] for k in chosen], self.nodes)
            found[tuple(chosen)] = self._record(mask)

        for exponent in self.effort.exponents:
            weights = weigh(self.rules.trainings[0], self.cuts, exponent)
            low, high = 0.0, float(weights.highest.max())
            for _ in range(self.effort.halvings):
                limit = (low + high) / 2
                chosen, possible = cheapest_cuts(weights, limit)
                if possible:
                    high = limit
                    take(chosen)
                else:
                    low = limit
            for pieces in np.geomspace(2, max(3, len(self.cuts)), self.effort.walks):
                take(walk(weights, pieces))
        return sorted(found.values(), key=by_size)

    def minimise(self, starts: Sequence[MarkPlan], phase: Phase) -> list[MarkPlan]:
        """Anneal for least memory, a thread each; what came of it, the smallest first."""
        goal = Goal(0.0, 1.0, 1e-6 * self.unplanned / self.forward_seconds, phase.flipping)
        jobs = []
        for k, start in enumerate(starts[: phase.starts]):
            hot, cold = phase.heats[k % len(phase.heats)]
            jobs.append((start, goal, (hot * start.pool_bytes, cold * start.pool_bytes)))
        return sorted(self._anneal(jobs, phase.part), key=by_size)

    def speed_up(self) -> None:
        """Anneal archived plans for the least time within several limits, in two rounds."""
        self._add_parts()
        count = 2 * self.effort.limits
        hot, cold = (part * self.forward_seconds for part in self.effort.time_heat)
        for part in range(2):
            plans = not_dominated(self.plans(), by_size)
            limits = np.geomspace(plans[0].pool_bytes, self.unplanned, count + 1)[part:count:2]
            jobs = []
            for limit in np.maximum(limits, plans[0].pool_bytes):  # the first may be rounded
                start = [plan for plan in plans if plan.pool_bytes <= limit][-1]
                jobs.append((start, Goal(limit, HARD, 1.0, 0.4), (hot, cold)))
            self._anneal(jobs, 1 / 2)

    def _add_parts(self) -> None:
        """Archive parts of the smallest plan: what comes before a cut, or behind it, and cheap."""
        smallest = self._full(min(self.plans(), key=by_size))
        places = [cut.after + 1 for cut in self.cuts]
        for mask in (smallest, smallest & ~self.space.costly):
            for place in places[:: 1 + len(places) // self.effort.parts]:
                for part in (slice(place), slice(place, None)):
                    left = mask.copy()
                    left[part] = False
                    self._record(left)

    def _anneal(self, jobs: Sequence[tuple[MarkPlan, Goal, Heat]], part: float) -> list[MarkPlan]:
        """Anneal plans, a thread each; archive what is visited, return the best of each."""
        tries = int(self.tries * part) // len(jobs)

        def work(
            job: tuple[int, tuple[MarkPlan, Goal, Heat]], done: np.ndarray
        ) -> tuple[np.ndarray, Archive]:
            seed, (start, goal, heat) = job
            mask, archive = self._full(start), self._empty_archive()
            anneal(self.space, mask, goal, seed, tries, *heat, archive, self.threads.stop, done)
            return mask, archive

        annealed = self.threads.each(work, [*enumerate(jobs)], tries, part * self.share)
        for _, archive in annealed:
            for k in np.flatnonzero(np.isfinite(archive.seconds)):
                record(self.archive, archive.pools[k], archive.seconds[k], archive.masks[k])
        return [self._record(mask) for mask, _ in annealed]

    # ------------------------------------------------------------------ the archive

    def add(self, plan: MarkPlan) -> MarkPlan | None:
        """Archive a plan of the plain network, if it needs no other saved identities."""
        return self._record(self._full(plan)) if {*plan.copies} <= {*self.copies} else None

    def plans(self) -> list[MarkPlan]:
        """The archived plans, with what they cost as long as no saved identity is taken out."""
        a = self.archive
        known = np.flatnonzero(np.isfinite(a.seconds))
        return [self._plan(a.pools[k], a.seconds[k], a.masks[k]) for k in known]

    def _empty_archive(self) -> Archive:
        return empty_archive(self.most, self.effort.sizes, self.nodes)

    def _record(self, mask: np.ndarray) -> MarkPlan:
        """Archive a plan of the network with saved identities, as the rules leave it."""
        pool, seconds = evaluate(self.space, mask)
        record(self.archive, pool, seconds, mask)
        return self._plan(pool, seconds, mask)

    def _plan(self, pool: int, seconds: float, mask: np.ndarray) -> MarkPlan:
        """The plan of the plain network that a mask is."""
        needed = needed_copies(self.moved, self.copies, mask)
        return MarkPlan(int(pool), float(seconds), mask[self.moved], needed)

    def _full(self, plan: MarkPlan) -> np.ndarray:
        """The mask that a plan of the plain network is; what nobody saves is recomputed."""
        full = mask_with_copies(plan.mask, self.moved, plan.copies, self.nodes)
        for copy in {*self.copies} - {*plan.copies}:
            place = int(self.moved[copy.node])
            full[place + 1 : place + copy.offset + 1] = True
        return full
