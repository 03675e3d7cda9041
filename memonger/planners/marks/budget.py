"""The fastest plans for every amount of memory: what is recomputed, chosen by its time.

Between two cuts a network keeps everything, recomputes what is cheap, or recomputes all; what is
alive at a cut is kept where a piece beside it is recomputed. The search:

1. The network gets kept copies where it may be cut, as for the smallest plan (``smallest``).
2. Seeds: no plan, the smallest plan, and dynamic programming over the cuts with these three choices
   for each piece: the least of what is kept and of the time, weighed against each other in several
   ways, for several bounds on the largest piece.
3. Annealing at several limits of memory, a thread each, for the least time: pieces change their
   choice, cuts move, runs of operators flip. Each plan is one that obeys the rules, replayed to the
   byte. A second round starts from the best of the first, at limits between.

Whatever is met is kept if it is the fastest of its size, so that one search gives all plans that no
other beats. It does not depend on the budget: with more memory the choice is among more plans, and
never slower. It depends on the network and the times of its operators alone.

With the choices of Jain et al. 2020, "Checkmate", without its solver.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import numpy as np

from memonger.costs.allocator import NO_LIMIT
from memonger.costs.fusion import plan_bytes
from memonger.graph.forward import KeptCopy, mask_with_copies
from memonger.planners.marks.cuts import Weigher, Weights, cheap_cuts
from memonger.planners.marks.rules import Rules, RuleTables, obey
from memonger.planners.marks.smallest import behind_copies, copies_at, needed_copies, settle
from memonger.support.compiled import compiled
from memonger.support.parallel import Threads

MOST_CUTS = 300
BINS = 200  # sizes, of the memory without a plan: the fastest plan of each is kept
LIMITS = 12  # amounts of memory that plans are annealed for, in each of two rounds
PRICES = 12  # of memory in time, for dynamic programming
BOUNDS = 8  # on the largest piece
POWERS = (1.0, 0.5)  # of a result's bytes
CHEAP = 0.3  # of the mean time of an operator by its bytes: see ``costly``
HOT, COLD = 0.02, 0.0002  # temperatures, as shares of the time of the forward pass
WORK = 120_000_000  # nodes replayed in all tries: bounds the time
MOST_TRIES = 160_000
KEEP, CHEAP_ONLY, ALL = 0, 1, 2  # of a piece: what is recomputed


class Fast(NamedTuple):
    """A plan that none beats in both memory and time.

    Attributes
    ----------
    pool_bytes : int
        As MXNet counts them.
    seconds : float
        That it adds to a training step.
    mask : np.ndarray of bool
        The recomputed nodes.
    copies : tuple of KeptCopy
    """

    pool_bytes: int
    seconds: float
    mask: np.ndarray
    copies: tuple[KeptCopy, ...]


class Front(NamedTuple):
    """The plans that no other beats, the fastest first: from no plan to the smallest."""

    plans: tuple[Fast, ...]
    interrupted: bool


class Space(NamedTuple):
    """What is searched, for compiled code.

    Attributes
    ----------
    rules : RuleTables
    match_ranges : np.ndarray
    seconds : np.ndarray
        That each node takes when it is recomputed.
    costly : np.ndarray of bool
        The nodes that are not cheap.
    after, keep_start, keep : np.ndarray
        For each cut the node after which it lies, and the nodes that it keeps.
    flippable : np.ndarray
        The nodes that may be recomputed, but for small ones.
    copied, copies, copy_seconds : np.ndarray
        Of each kept copy that takes time its node, the copy, and the seconds that it adds to a step
        where a plan makes use of it: where the node is recomputed and the copy is not.
    """

    rules: RuleTables
    match_ranges: np.ndarray
    seconds: np.ndarray
    costly: np.ndarray
    after: np.ndarray
    keep_start: np.ndarray
    keep: np.ndarray
    flippable: np.ndarray
    copied: np.ndarray
    copies: np.ndarray
    copy_seconds: np.ndarray


class NodeTimes(NamedTuple):
    """What is known of the nodes of a network.

    Attributes
    ----------
    forward, gradient : np.ndarray
        Seconds that each takes, and its gradient.
    moved_bytes : np.ndarray
        That each reads and writes.
    """

    forward: np.ndarray
    gradient: np.ndarray
    moved_bytes: np.ndarray


class Archive(NamedTuple):
    """The fastest plan of each size; of n, plan k needs at most k + 1 n-ths of ``most`` bytes."""

    most: int
    seconds: np.ndarray
    pools: np.ndarray
    masks: np.ndarray


def costly(seconds: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The operators that take longer than moving what they read and write would.

    Parameters
    ----------
    seconds, moved : np.ndarray
        Of each node its time, and the bytes that it reads and writes.
    """
    busy = (moved > 0) & (seconds > 0)
    if not busy.any():
        return np.zeros(len(seconds), dtype=np.bool_)
    pace = np.median(seconds[busy] / moved[busy])
    share = seconds > CHEAP * seconds[busy].mean()
    return busy & share & (seconds > 2 * pace * moved)


def without_copies(
    forward: np.ndarray, moved: np.ndarray, copies: Sequence[KeptCopy]
) -> np.ndarray:
    """The seconds of nodes that are recomputed: none for what stands behind copied ones.

    Nobody reads it again, so MXNet asks for no result (``kNullOp``), and none is computed.
    """
    seconds = forward.copy()
    for copy in copies:
        place = int(moved[copy.node])
        seconds[place + 1 : place + copy.offset + 1] = 0
    return seconds


def copy_times(
    times: NodeTimes, moved: np.ndarray, copies: Sequence[KeptCopy]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the copies that take time their nodes, themselves, and the seconds (see `Space`).

    An identity takes none; a product with one runs, and so does its gradient.
    """
    places = moved[[copy.node for copy in copies]].astype(np.int64)
    kept = places + np.array([copy.offset for copy in copies], dtype=np.int64)
    until = np.concatenate([[0.0], np.cumsum(times.forward + times.gradient)])
    seconds = until[kept + 1] - until[places + 1]
    slow = seconds > 0
    return places[slow], kept[slow], seconds[slow]


@compiled
def added_seconds(s, mask, order):  # type: ignore[no-untyped-def]
    """The seconds that a plan adds to a step that runs in this order."""
    n = mask.shape[0]
    seconds = 0.0
    for row in order:
        if n <= row < 2 * n:
            seconds += s.seconds[row - n]
    for k in range(s.copied.shape[0]):
        if mask[s.copied[k]] and not mask[s.copies[k]]:
            seconds += s.copy_seconds[k]
    return seconds


@compiled
def weigh_plan(s, mask, limit):  # type: ignore[no-untyped-def]
    """Obey the rules in ``mask``; the seconds that it adds, and its bytes (more than the limit)."""
    order, reads = obey(s.rules, mask)
    seconds = added_seconds(s, mask, order)
    return seconds, plan_bytes(
        s.rules.tables, s.rules.fusible, mask, order, reads, s.match_ranges, limit
    )


@compiled
def _choose(s, mask, first, last, choice):  # type: ignore[no-untyped-def]
    """Set what is between two cuts, by their places; -1 and the number of cuts are the ends."""
    cuts = s.after.shape[0]
    start = s.after[first] + 1 if first >= 0 else 0
    stop = s.after[last] + 1 if last < cuts else mask.shape[0]
    for i in range(start, stop):
        mask[i] = choice == ALL or (choice == CHEAP_ONLY and not s.costly[i])
    for k in (first, last):
        if 0 <= k < cuts:
            for q in range(s.keep_start[k], s.keep_start[k + 1]):
                mask[s.keep[q]] = False


@compiled
def _near():  # type: ignore[no-untyped-def]
    """A distance, mostly 1 (Cauchy)."""
    way = int(round(np.tan(np.pi * (np.random.random() - 0.5)) * 2))
    if way == 0:
        way = 1 if np.random.random() < 0.5 else -1
    return way


@compiled
def _change(s, mask):  # type: ignore[no-untyped-def]
    """One change of a plan."""
    cuts = s.after.shape[0]
    kind = np.random.random()
    if cuts == 0 or kind < 0.4:
        first = np.random.randint(len(s.flippable))
        last = first
        while last + 1 < len(s.flippable) and np.random.random() < 0.7:
            last += 1
        again = np.random.random() < 0.5
        for i in s.flippable[first : last + 1]:
            mask[i] = again
    elif kind < 0.75:
        k = np.random.randint(cuts + 1) - 1
        last = min(cuts, k + abs(_near()))
        _choose(s, mask, k, last, np.random.randint(3))
    else:
        k = np.random.randint(cuts)
        for q in range(s.keep_start[k], s.keep_start[k + 1]):
            mask[s.keep[q]] = True
        if kind < 0.92:
            m = min(cuts - 1, max(0, k + _near()))
            for q in range(s.keep_start[m], s.keep_start[m + 1]):
                mask[s.keep[q]] = False


@compiled
def record(archive, seconds, pool, mask):  # type: ignore[no-untyped-def]
    """Keep a plan if it is the fastest of its size."""
    if pool > archive.most:
        return
    k = max(0, (pool * len(archive.seconds) - 1) // archive.most)
    if seconds < archive.seconds[k] or (seconds == archive.seconds[k] and pool < archive.pools[k]):
        archive.seconds[k] = seconds
        archive.pools[k] = pool
        archive.masks[k] = mask


@compiled
def quicken(s, mask, seed, tries, hot, cold, limit, archive, stop, done):  # type: ignore[no-untyped-def]
    """Anneal a plan that needs at most ``limit`` bytes for the least time.

    Parameters
    ----------
    s : Space
    mask : np.ndarray of bool
        A plan within the limit, or one that is not: nothing is done then.
    seed, tries : int
    hot, cold : float
        Temperatures at the beginning and at the end, in seconds.
    limit : float
        Bytes as MXNet counts them.
    archive : Archive
        Keeps what is met.
    stop, done : np.ndarray
        As for ``anneal.anneal``.
    """
    np.random.seed(seed)
    current, pool = weigh_plan(s, mask, NO_LIMIT)
    if pool > limit or len(s.flippable) == 0:
        return
    record(archive, current, pool, mask)
    new = mask.copy()
    for step in range(tries):
        if stop[0]:
            return
        done[0] += 1
        new[:] = mask
        while True:
            _change(s, new)
            if np.random.random() >= 0.3:
                break
        heat = hot * (cold / hot) ** (step / tries)
        most = current - heat * np.log(1 - np.random.random())  # Metropolis
        order, reads = obey(s.rules, new)
        seconds = added_seconds(s, new, order)
        if seconds > most:
            continue
        pool = plan_bytes(s.rules.tables, s.rules.fusible, new, order, reads, s.match_ranges, limit)
        if pool > limit:
            continue
        current = seconds
        mask[:] = new
        record(archive, seconds, pool, mask)


@compiled
def cheapest_choices(until, highest, keep, cheap_bytes, all_time, cheap_time, price, bound):  # type: ignore[no-untyped-def]
    """The pieces, and what is recomputed of each, that cost least in memory and time.

    Parameters
    ----------
    until, highest, keep : np.ndarray, n + 2
        As ``cuts.Weights``.
    cheap_bytes, all_time, cheap_time : np.ndarray, n + 2
        Up to each cut: what is not kept where what is cheap is recomputed; the time of all
        operators, and of the cheap ones.
    price : float
        Bytes that a second is worth.
    bound : float
        The most that a recomputed piece may need.

    Returns
    -------
    np.ndarray of int8
        For each cut what is recomputed of the piece that ends there (KEEP, CHEAP_ONLY, ALL), or -1
        where there is no cut.
    """
    count = len(keep)
    cost = np.full(count, np.inf)
    cost[0] = 0
    before = np.zeros(count, dtype=np.int64)
    choice = np.zeros(count, dtype=np.int8)
    for j in range(1, count):
        highest_here = 0.0
        for i in range(j - 1, -1, -1):
            highest_here = max(highest_here, highest[i + 1])
            held = until[j] - until[i]
            if i == j - 1 and cost[i] + held < cost[j]:
                cost[j] = cost[i] + held
                before[j] = i
                choice[j] = KEEP
            saved = cheap_bytes[j] - cheap_bytes[i]
            if saved <= bound:
                time = price * (cheap_time[j] - cheap_time[i])
                if cost[i] + held - saved + time < cost[j]:
                    cost[j] = cost[i] + held - saved + time
                    before[j] = i
                    choice[j] = CHEAP_ONLY
            if highest_here - until[i] <= bound:
                time = price * (all_time[j] - all_time[i])
                if cost[i] + keep[j] + time < cost[j]:
                    cost[j] = cost[i] + keep[j] + time
                    before[j] = i
                    choice[j] = ALL
            elif saved > bound:
                break
    chosen = np.full(count, -1, dtype=np.int8)
    at = count - 1
    while at > 0:
        chosen[at] = choice[at]
        at = before[at]
    return chosen


class Search:
    """The search for the fastest plans of one network.

    Parameters
    ----------
    rules : Rules
        Of the network without copies.
    times : callable
        From rules (of the network with copies) to `NodeTimes`.
    copies : bool
        Whether results may be kept in copies.
    progress : callable, optional
        Is told how much of the search is done, from 0 to 1.
    patience : float
        Times the usual length of the search.
    """

    def __init__(
        self,
        rules: Rules,
        times: Callable[[Rules], NodeTimes],
        copies: bool = True,
        progress: Callable[[float], None] | None = None,
        patience: float = 1.0,
    ) -> None:
        self.plain, self.times = rules, times
        self.threads = Threads(progress)
        cuts = cheap_cuts(rules.graph, MOST_CUTS)
        self.at = copies_at(rules, cuts) if copies else ()
        self.rules, self.moved = rules.with_copies(self.at)
        self.cuts = behind_copies(cuts, self.moved, self.at)
        n = len(self.rules.graph.nodes)
        known = times(self.rules)
        seconds = without_copies(known.forward, self.moved, self.at)
        keep = [i for cut in self.cuts for i in cut.keep]
        self.space = Space(
            self.rules.tables[0],
            np.array(rules.trainings[0].settings.match_ranges),
            seconds,
            costly(seconds, known.moved_bytes),
            np.array([cut.after for cut in self.cuts], dtype=np.int64),
            np.cumsum([0] + [len(cut.keep) for cut in self.cuts]),
            np.array(keep, dtype=np.int64),
            np.flatnonzero(self.rules.allowed),
            *copy_times(known, self.moved, self.at),
        )
        self.tries = int(patience * min(MOST_TRIES, WORK / n) / self.rules.effort)
        self.unplanned = int(weigh_plan(self.space, np.zeros(n, dtype=np.bool_), NO_LIMIT)[1])

    def archive(self) -> Archive:
        n = len(self.rules.graph.nodes)
        return Archive(
            max(1, self.unplanned),
            np.full(BINS, np.inf),
            np.zeros(BINS, dtype=np.int64),
            np.zeros((BINS, n), dtype=np.bool_),
        )

    def run(self, others: Sequence[tuple[np.ndarray, tuple[KeptCopy, ...]]] = ()) -> Front:
        """Search.

        Parameters
        ----------
        others : sequence of (mask, copies)
            Known plans of the plain network, such as the smallest; they are among what is returned
            unless a better one is found.
        """
        nothing = np.zeros(len(self.plain.graph.nodes), dtype=np.bool_)
        known = [self.fast(mask, copies) for mask, copies in [(nothing, ()), *others]]
        found = self.archive()
        if self.plain.allowed.any():
            at = {copy.node: copy for copy in self.at}
            for mask, copies in [(nothing, ()), *others]:
                if all(copy.node in at for copy in copies):
                    self.seed(found, self.widened(mask, copies))
            for mask in self.seeds():
                self.seed(found, mask)
            for part in range(2):
                found = self.round(found, part)
        plans = [
            self.fast(found.masks[k][self.moved], self.needed(found.masks[k]))
            for k in undominated(found)
        ]
        return Front(front_of(known + plans), self.threads.interrupted)

    def widened(self, mask: np.ndarray, copies: tuple[KeptCopy, ...]) -> np.ndarray:
        """A plan of the plain network in that with all copies."""
        n = len(self.rules.graph.nodes)
        full = mask_with_copies(mask, self.moved, self.at, n)
        wanted = {copy.node for copy in copies}
        for copy in self.at:
            if copy.node not in wanted:
                place = int(self.moved[copy.node])
                full[place + 1 : place + copy.offset + 1] = mask[copy.node]
        return full

    def needed(self, full: np.ndarray) -> tuple[KeptCopy, ...]:
        return needed_copies(self.moved, self.at, full)

    def fast(self, mask: np.ndarray, copies: tuple[KeptCopy, ...]) -> Fast:
        """A plan of the plain network as it will be carried out."""
        rules, full, mask, copies = settle(self.plain, mask, copies)
        times, moved = self.times(rules), self.plain.with_copies(copies)[1]
        copied, kept, copy_seconds = copy_times(times, moved, copies)
        space = self.space._replace(
            rules=rules.tables[0],
            seconds=without_copies(times.forward, moved, copies),
            copied=copied,
            copies=kept,
            copy_seconds=copy_seconds,
        )
        seconds, pool = weigh_plan(space, full, NO_LIMIT)
        return Fast(int(pool), float(seconds), mask, copies)

    def seed(self, found: Archive, mask: np.ndarray) -> None:
        mask = mask.copy()
        seconds, pool = weigh_plan(self.space, mask, NO_LIMIT)
        record(found, seconds, pool, mask)

    # ------------------------------------------------------------------ dynamic programming

    def seeds(self) -> list[np.ndarray]:
        """Plans of all sizes to start from."""
        space, n = self.space, len(self.rules.graph.nodes)
        allowed = self.rules.allowed
        bounds = [0] + [cut.after + 1 for cut in self.cuts] + [n]
        weigher = Weigher(self.rules.trainings[0], self.cuts)
        facts, graph = self.rules.trainings[0].facts, self.rules.graph
        seconds = np.where(allowed, space.seconds, 0.0)
        of_all = np.concatenate([[0], np.cumsum(seconds)])[bounds]
        of_cheap = np.concatenate([[0], np.cumsum(np.where(space.costly, 0, seconds))])[bounds]
        total = max(float(of_all[-1]), 1e-12)
        masks = {}
        for power in POWERS:
            weights: Weights = weigher(power)
            saved = np.zeros(n + 1)
            for i in graph.operators:
                if allowed[i] and not space.costly[i] and (facts[i].inputs or facts[i].own_output):
                    saved[i + 1] = (4.0 * graph.tensors[i][0].elements) ** power
            cheap = np.minimum(np.cumsum(saved)[bounds], weights.until)
            whole = float(weights.until[-1])
            for price in whole / total * np.geomspace(0.01, 30, PRICES):
                for bound in whole * np.geomspace(0.01, 0.6, BOUNDS):
                    chosen = cheapest_choices(
                        weights.until,
                        weights.highest,
                        weights.keep,
                        cheap,
                        of_all,
                        of_cheap,
                        price,
                        bound,
                    )
                    mask = self.of_choices(chosen)
                    masks[mask.tobytes()] = mask
        return list(masks.values())

    def of_choices(self, chosen: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(self.rules.graph.nodes), dtype=np.bool_)
        before = -1
        ends = np.flatnonzero(chosen >= 0)
        for j in ends:
            _choose(self.space, mask, before, int(j) - 1, int(chosen[j]))
            before = int(j) - 1
        return mask

    # ------------------------------------------------------------------ threads

    def round(self, found: Archive, part: int) -> Archive:
        """Anneal at several limits, a thread each; all that is the fastest of its size."""
        if self.threads.interrupted:
            return found
        met = undominated(found)
        least = int(found.pools[met].min())
        limits = np.geomspace(least, self.unplanned, 2 * LIMITS + 1)[part : 2 * LIMITS : 2]
        limits = np.maximum(limits, least)  # the first may have been rounded to less
        archives = [self.archive() for _ in limits]
        tries = self.tries // (2 * LIMITS)
        scale = float(self.space.seconds.sum())

        def work(k: int, done: np.ndarray) -> None:
            fitting = [b for b in met if found.pools[b] <= limits[k]]
            mask = found.masks[min(fitting, key=lambda b: found.seconds[b])].copy()
            quicken(
                self.space,
                mask,
                2 * k + part,
                tries,
                HOT * scale,
                COLD * scale,
                limits[k],
                archives[k],
                self.threads.stop,
                done,
            )

        self.threads.each(work, range(len(limits)), tries, 1 / 2)
        for archive in archives:
            for k in np.flatnonzero(np.isfinite(archive.seconds)):
                record(found, archive.seconds[k], archive.pools[k], archive.masks[k])
        return found


def undominated(archive: Archive) -> list[int]:
    """The plans of an archive that no smaller one is as fast as, the smallest first."""
    best, chosen = np.inf, []
    for k in np.flatnonzero(np.isfinite(archive.seconds)):
        if archive.seconds[k] < best:
            best = archive.seconds[k]
            chosen.append(int(k))
    return chosen


def front_of(plans: Sequence[Fast]) -> tuple[Fast, ...]:
    """The plans that no other beats in both memory and time, the fastest first."""
    front: list[Fast] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.pool_bytes)):
        if not front or plan.pool_bytes < front[-1].pool_bytes:
            front.append(plan)
    return tuple(front)
