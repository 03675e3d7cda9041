"""The smallest plan that is found: cuts searched on replayed costs, the original's plans, no plan.

A set of cuts is a plan: what is alive at a cut is kept, everything between is recomputed, what
comes after the last cut is not. The search:

1. Where the network may be cut it gets kept copies (``forward.with_copies``) of operators that
   would hold what they were computed from if they were kept themselves.
2. Seeds: dynamic programming over the cuts with sizes raised to several powers (the cuts that keep
   least for a bound on the pieces between them), and the original's walk with a budget between two
   cuts (Chen et al. 2016, algorithm 3), its number of cuts by golden section.
3. The best seeds are annealed (``anneal``), one thread each: first cuts, then cuts and single
   operators. The rules hold inside, so that what is costed is what is returned.
4. Copies that turn out not to be needed are taken out, single operators are annealed once more
   without them, and recomputation that does not lower the cost is dropped.

All of it depends on the network alone, not on the machine's speed or its cores.
"""

from __future__ import annotations

import heapq
from typing import Callable, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.allocator import NO_LIMIT
from memonger.costs.fusion import fused_forward
from memonger.costs.time.flops import forward_flops
from memonger.graph.forward import Entry, KeptCopy, mask_with_copies
from memonger.graph.operators.recompute import CPU, GPU_FUSION
from memonger.planners.marks import chen2016
from memonger.planners.marks.anneal import Space, anneal, cheapest_cuts, fill, price
from memonger.planners.marks.cuts import (
    Cut,
    Weigher,
    Weights,
    cheap_cuts,
    golden_section,
    single_tensor_cuts,
    walk,
)
from memonger.planners.marks.rules import Rules
from memonger.support.parallel import Threads

POWERS = (1.0, 0.75, 0.5, 0.35, 0.2)  # of a result's bytes
BISECTIONS = 12  # of the bound on the pieces between cuts, for each power
SECTIONS = 10  # numbers of cuts tried by golden section, for each power
MOST_CUTS = 600
SMALL = 1 / 2000  # of the largest result: operators with smaller ones are not worth a step


class Phase(NamedTuple):
    """One annealing of several states.

    Attributes
    ----------
    starts : int
        How many states are annealed, each by itself.
    share : float
        Of all tries.
    temperatures : tuple of (float, float)
        At the beginning and the end, as shares of the cost; the states take them in turns, for
        networks differ in what a move of one cut changes.
    flipping : float
        The share of steps that flip operators instead of moving a cut.
    """

    starts: int
    share: float
    temperatures: tuple[tuple[float, float], ...]
    flipping: float


CUTS = Phase(16, 0.6, ((0.008, 0.0004), (0.0015, 0.0001)), 0.0)
BOTH = Phase(4, 0.25, ((0.002, 0.0001),), 0.75)
OPERATORS = Phase(4, 0.15, ((0.001, 0.0001),), 1.0)
WORK = 120_000_000  # nodes replayed in all tries: bounds the time
IN_CACHE = 10_000  # the replay of a network of more nodes is slower by the node
MOST_TRIES = 160_000  # enough for small networks
UNFUSED_SHARE = 0.4  # of the time of a search with fusion: what the one without takes
LEAST_PATIENCE = 1e-9  # where the user has ended the first of the two
MOST_SUMS = 8  # that are tried to keep apart from fusion, each by itself
WORTH = 0.01  # of the memory, that it must save
NO_CUTS = "no cuts"  # the original's plan for a network without marks: everything is recomputed


class Smallest(NamedTuple):
    """The plan that was found.

    Attributes
    ----------
    mask : np.ndarray of bool
        The recomputed nodes.
    copies : tuple of KeptCopy
        Of those of them whose result is kept all the same.
    cost : int
        Bytes as MXNet counts them.
    candidates : dict
        Costs by name.
    interrupted : bool
        Whether the search was ended by the user.
    unfused : int, optional
        The cost of the best plan without pointwise fusion, where that is on.
    """

    mask: np.ndarray
    copies: tuple[KeptCopy, ...]
    cost: int
    candidates: dict[str, int]
    interrupted: bool
    unfused: int | None = None


class _Candidate(NamedTuple):
    cost: int
    mask: np.ndarray
    copies: tuple[KeptCopy, ...] = ()


def smallest(
    stages: Mapping[int, str],
    cost: Callable[[np.ndarray], int],
    rules: Rules,
    ntrial: int = 6,
    cheap: bool = True,
    copies: bool = True,
    progress: Callable[[float], None] | None = None,
    patience: float = 1.0,
) -> Smallest:
    """The cheapest of no plan, the original's search, and searched cuts.

    Where pointwise fusion is on, a search without it comes first: a replay then takes a fraction of
    the time, and what is found shows what fusion costs.

    Parameters
    ----------
    stages : dict
        The user's ``mirror_stage`` marks.
    cost : callable
        The bytes that a set of recomputed nodes costs.
    rules : Rules
        What is returned obeys them, and it is the plan with the rules that is costed.
    ntrial : int
        As for the original's search.
    cheap : bool
        Whether a cost is a replay; where each is a bind, cuts are not searched: the original's
        search runs on single-tensor cuts too.
    copies : bool
        Whether results may be kept in copies.
    progress : callable, optional
        Is told how much of the search is done, from 0 to 1.
    patience : float
        Times the usual length of the search.

    Raises
    ------
    KeyboardInterrupt
        If it comes before anything better than no plan was found.
    """
    report = progress or (lambda done: None)
    if not (rules.fuses and cheap):
        return _smallest(stages, cost, rules, ntrial, cheap, copies, report, patience)
    plain = rules.unfused()

    def unfused_cost(mask: np.ndarray) -> int:
        return plain.replay(mask).pool_bytes

    known = _smallest(
        stages,
        unfused_cost,
        plain,
        ntrial,
        cheap,
        copies,
        lambda done: report(UNFUSED_SHARE * done),
        patience,
    )
    found = _smallest(
        stages,
        cost,
        rules,
        ntrial,
        cheap,
        copies,
        lambda done: report(UNFUSED_SHARE + (1 - UNFUSED_SHARE) * done),
        LEAST_PATIENCE if known.interrupted else patience,
        known,
    )
    return found._replace(interrupted=found.interrupted or known.interrupted, unfused=known.cost)


def _smallest(
    stages: Mapping[int, str],
    cost: Callable[[np.ndarray], int],
    rules: Rules,
    ntrial: int,
    cheap: bool,
    copies: bool,
    progress: Callable[[float], None],
    patience: float,
    known: Smallest | None = None,
) -> Smallest:
    """One search; ``known`` is a plan that was found elsewhere, which it may go on from."""
    graph = rules.graph
    nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
    found = {"no plan": _Candidate(cost(nothing), nothing)}
    interrupted = False
    marked = {"your marks" if stages else NO_CUTS: stages}
    single = {} if cheap else dict.fromkeys(single_tensor_cuts(graph), "True")
    if single:
        marked["single-tensor cuts"] = single
    try:
        for name, of_name in marked.items():
            trials = chen2016.search(graph, of_name, lambda mask: cost(rules.apply(mask)), ntrial)
            trial = chen2016.best(trials)
            found[name] = _Candidate(trial.cost, rules.apply(trial.plan.mask))
        if cheap:
            search = _Search(rules, stages, copies, progress, patience, known)
            try:
                search.run()
            finally:
                interrupted = search.threads.interrupted
                if search.best is not None:
                    found["searched cuts"] = search.best
    except KeyboardInterrupt:
        interrupted = True
        if all(candidate.cost >= found["no plan"].cost for candidate in found.values()):
            raise
    least = min(found.values(), key=lambda candidate: candidate.cost)  # of equals the first
    costs = {name: candidate.cost for name, candidate in found.items()}
    return Smallest(least.mask, least.copies, least.cost, costs, interrupted)


class _Search:
    """Sets of cuts of a network with copies, and what they cost."""

    def __init__(
        self,
        rules: Rules,
        stages: Mapping[int, str],
        copies: bool,
        progress: Callable[[float], None] | None = None,
        patience: float = 1.0,
        known: Smallest | None = None,
    ) -> None:
        self.known = known
        self.plain, self.threads = rules, Threads(progress)
        self.best: _Candidate | None = None
        cuts = cheap_cuts(rules.graph, MOST_CUTS, stages)
        self.at = copies_at(rules, cuts) if copies else ()
        if known is not None and copies:
            apart = apart_from_fusion(rules, known.mask, known.copies)
            self.at = tuple(sorted((*self.at, *apart)))
            self.known = known._replace(copies=tuple(sorted((*known.copies, *apart))))
        self.rules, self.moved = rules.with_copies(self.at)
        self.graph = self.rules.graph
        self.cuts = behind_copies(cuts, self.moved, self.at)
        self.space = self.make_space(self.at, self.rules.allowed, self.cuts)
        count = len(self.graph.nodes)
        tries = min(MOST_TRIES, WORK / count * min(1, IN_CACHE / count))
        self.tries = int(patience * tries / self.rules.effort)

    def make_space(
        self, copies: tuple[KeptCopy, ...], base: np.ndarray, cuts: Sequence[Cut]
    ) -> Space:
        rules, moved = self.plain.with_copies(copies)
        elements = np.array([max(t.elements for t in ts) for ts in rules.graph.tensors])
        largest = elements[rules.allowed].max(initial=0)
        added = np.zeros(
            len(elements), dtype=np.bool_
        )  # between a node and its copy; copies that stay
        for copy in copies:
            added[moved[copy.node] + 1 : moved[copy.node] + copy.offset + copy.apart] = True
        always = [moved[copy.node] + copy.offset for copy in copies if copy.apart]
        base = base.copy()
        base[always] = False
        keep = [i for cut in cuts for i in cut.keep]
        return Space(
            rules.tables[0],
            np.array(rules.trainings[0].settings.match_ranges),
            base,
            np.array([cut.after for cut in cuts], dtype=np.int64),
            np.cumsum([0] + [len(cut.keep) for cut in cuts]),
            np.array(keep, dtype=np.int64),
            np.flatnonzero(rules.allowed & ~added & (elements >= largest * SMALL)),
        )

    # ------------------------------------------------------------------ the steps

    def run(self) -> None:
        """Search; what is found is left in ``best``."""
        if not self.rules.allowed.any():
            return
        states = self.anneal(CUTS, self.space, [self.state(cuts) for cuts in self.seeds()])
        states = self.anneal(BOTH, self.space, states)
        mask = self.plan_of(self.space, states[0])
        self.offer(mask[self.moved], needed_copies(self.moved, self.at, mask))
        if self.known is not None:
            self.offer(self.known.mask, self.known.copies)
        if self.threads.interrupted:
            return
        assert self.best is not None  # it has been offered one
        copies = self.best.copies
        _, moved = self.plain.with_copies(copies)
        space = self.make_space(copies, self.full(self.best.mask, copies), ())
        no_cuts = np.zeros(0, dtype=np.bool_)
        start = _State(0, no_cuts, np.zeros(len(space.base), dtype=np.int8))
        states = self.anneal(OPERATORS, space, [start] * OPERATORS.starts)
        mask = self.plan_of(space, states[0])
        self.offer(mask[moved], needed_copies(moved, copies, mask))
        if not self.threads.interrupted:
            self.trim()
            self.offer(self.best.mask, tuple(copy for copy in self.best.copies if not copy.apart))

    def state(self, cuts: np.ndarray) -> _State:
        return _State(0, cuts, np.zeros(len(self.graph.nodes), dtype=np.int8))

    def plan_of(self, space: Space, state: _State) -> np.ndarray:
        mask = np.empty(len(space.base), dtype=np.bool_)
        fill(space, state.cuts, state.flips, mask)
        return mask

    def offer(self, mask: np.ndarray, copies: tuple[KeptCopy, ...]) -> None:
        """Take a plan of the plain network if it is the best so far."""
        rules, full, mask, copies = settle(self.plain, mask, copies)
        cost = rules.replay(full).pool_bytes
        if self.best is None or cost <= self.best.cost:
            self.best = _Candidate(cost, mask, copies)

    def full(self, mask: np.ndarray, copies: tuple[KeptCopy, ...]) -> np.ndarray:
        """A plan of the plain network for the network with these copies."""
        rules, moved = self.plain.with_copies(copies)
        return mask_with_copies(mask, moved, copies, len(rules.graph.nodes))

    def trim(self) -> None:
        """Drop recomputation that does not lower the cost: runs of operators, or halves of them.

        The runs with the most FLOPs come first.
        """
        assert self.best is not None
        best = self.best
        rules, moved = self.plain.with_copies(best.copies)
        mask = self.full(best.mask, best.copies)
        work = forward_flops(rules.graph)
        on = np.flatnonzero(mask)
        runs = [run for run in np.split(on, np.flatnonzero(np.diff(on) > 1) + 1) if len(run)]
        heap = [(-int(work[run].sum()), int(run[0]), run) for run in runs]
        heapq.heapify(heap)
        for _ in range(max(20, self.tries // 100)):
            if not heap:
                break
            _, _, run = heapq.heappop(heap)
            without = mask.copy()
            without[run] = False
            without = rules.apply(without)
            if rules.replay(without).pool_bytes <= best.cost:
                mask = without
            elif len(run) > 1:
                for half in np.array_split(run, 2):
                    heapq.heappush(heap, (-int(work[half].sum()), int(half[0]), half))
        self.offer(mask[moved], needed_copies(moved, best.copies, mask))

    # ------------------------------------------------------------------ seeds

    def seeds(self) -> list[np.ndarray]:
        """The cheapest sets of cuts to start from."""
        known: dict[bytes, int] = {}
        no_flips = np.zeros(len(self.graph.nodes), dtype=np.int8)
        mask = np.empty(len(self.graph.nodes), dtype=np.bool_)

        def cost(chosen: Sequence[int]) -> int:
            cuts = np.zeros(len(self.cuts), dtype=np.bool_)
            cuts[chosen] = True
            key = cuts.tobytes()
            if key not in known:
                known[key] = int(price(self.space, cuts, no_flips, mask, NO_LIMIT))
            return known[key]

        weigher = Weigher(self.rules.trainings[0], self.cuts)
        for power in POWERS:
            weights = weigher(power)
            low, high = 0.0, float(weights.highest.max())
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                chosen, possible = cheapest_cuts(weights, middle)
                if possible:
                    high = middle
                    cost(chosen)
                else:
                    low = middle

            def of_pieces(logarithm: float, weights: Weights = weights) -> float:
                return cost(walk(weights, np.exp(logarithm)))

            golden_section(of_pieces, np.log(2), np.log(max(3, len(self.cuts))), SECTIONS)
        if not known:
            cost([])
        best = sorted(known, key=lambda key: (known[key], key))[: CUTS.starts]
        return [np.frombuffer(key, dtype=np.bool_).copy() for key in best]

    # ------------------------------------------------------------------ threads

    def anneal(self, phase: Phase, space: Space, states: Sequence[_State]) -> list[_State]:
        """Anneal the first states, a thread each; all that came of it, the cheapest first."""
        states = states[: phase.starts]
        tries = int(self.tries * phase.share) // phase.starts

        def work(k: int, done: np.ndarray) -> _State:
            cuts, flips = states[k].cuts.copy(), states[k].flips.copy()
            hot, cold = phase.temperatures[k % len(phase.temperatures)]
            stop = self.threads.stop
            cost = anneal(space, cuts, flips, k, tries, hot, cold, phase.flipping, stop, done)
            return _State(int(cost), cuts, flips)

        annealed = self.threads.each(work, range(len(states)), tries, phase.share)
        found = {state.key: state for state in reversed(annealed)}  # of equals the first
        return sorted(found.values(), key=lambda state: state.cost)


class _State(NamedTuple):
    """Cuts, flips and what they cost."""

    cost: int
    cuts: np.ndarray
    flips: np.ndarray

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.cuts.tobytes(), self.flips.tobytes()


def settle(
    plain: Rules, mask: np.ndarray, copies: tuple[KeptCopy, ...]
) -> tuple[Rules, np.ndarray, np.ndarray, tuple[KeptCopy, ...]]:
    """The part of a plan that is right, with none but the copies that it needs.

    Parameters
    ----------
    plain : Rules
        Of the network without copies.
    mask : np.ndarray of bool
        Nodes of the plain network to recompute.
    copies : tuple of KeptCopy
        Of some of them (of ``copyable``), in their order.

    Returns
    -------
    Rules
        Of the network with the copies that are left.
    np.ndarray of bool
        The recomputed nodes of that network.
    np.ndarray of bool
        Those of the plain network, for ``marks.apply``.
    tuple of KeptCopy
        The copies that are left.
    """
    while True:
        rules, moved = plain.with_copies(copies)
        full = rules.apply(mask_with_copies(mask, moved, copies, len(rules.graph.nodes)))
        mask, needed = full[moved], needed_copies(moved, copies, full)
        if needed == copies:
            return rules, full, mask, copies
        copies = needed


def needed_copies(
    moved: np.ndarray, copies: Sequence[KeptCopy], mask: np.ndarray
) -> tuple[KeptCopy, ...]:
    """The copies that a plan of the network with copies makes use of: kept, of what is not."""
    return tuple(
        c for c in copies if c.apart or (mask[moved[c.node]] and not mask[moved[c.node] + c.offset])
    )


def copies_at(rules: Rules, cuts: Sequence[Cut]) -> tuple[KeptCopy, ...]:
    """The copies that may help where the network is cut.

    Those of what is kept, and where that needs none (a sum, whose gradient reads nothing), of what
    it was computed from: nobody would read that again.
    """
    possible = {copy.node: copy for copy in copyable(rules)}
    graph, facts = rules.graph, rules.trainings[0].facts
    found: set[int] = set()
    asked = [i for cut in cuts for i in cut.keep]
    while asked:
        i = asked.pop()
        if i not in found and not graph.nodes[i].is_variable:
            found.add(i)
            if i not in possible and not facts[i].inputs:
                asked.extend(a for a, _ in graph.nodes[i].inputs)
    return tuple(possible[i] for i in sorted(found & set(possible)))


def apart_from_fusion(
    rules: Rules, mask: np.ndarray, copies: tuple[KeptCopy, ...]
) -> tuple[KeptCopy, ...]:
    """Identities in long sums of the forward pass, where a plan needs less memory with them.

    A sum that pointwise fusion makes one operator of holds all its terms until it runs. With
    something between that is not fused each term is gone once it has been added.

    Parameters
    ----------
    rules : Rules
        Of the plain network.
    mask, copies
        A plan of it.
    """
    if not rules.fuses:
        return ()

    def cost(more: tuple[KeptCopy, ...]) -> int:
        made, full, _, _ = settle(rules, mask, tuple(sorted((*copies, *more))))
        return made.replay(full).pool_bytes

    training, places = rules.trainings[0], _places_for_copies(rules)
    found: tuple[KeptCopy, ...] = ()
    least = cost(())
    sums = [
        [i for i in nodes if i in places and not training.facts[i].inputs]
        for nodes in fused_forward(training, mask)
    ]
    for nodes in [nodes for nodes in sums if nodes][:MOST_SUMS]:
        more = (*found, *(KeptCopy(i, unfused=True, apart=True) for i in nodes))
        with_more = cost(more)
        if with_more < least * (1 - WORTH):
            found, least = more, with_more
    return found


def behind_copies(cuts: Sequence[Cut], moved: np.ndarray, copies: Sequence[KeptCopy]) -> list[Cut]:
    """The cuts of the plain network in the network with copies: there the copies are kept."""
    offsets = {copy.node: copy.offset for copy in copies}

    def entry(a: int, b: int) -> Entry:
        return (int(moved[a]) + (offsets.get(a, 0) if b == 0 else 0), b)

    return [
        Cut(entry(cut.after, 0)[0], tuple(entry(a, b) for a, b in cut.entries), cut.size)
        for cut in cuts
    ]


def copyable(rules: Rules) -> tuple[KeptCopy, ...]:
    """The copies that may help, and may stand where they do.

    Their gradients read inputs, which they would hold if they were kept themselves. Only their
    first output is read, by operators, so that the copy runs right after them; it is no output of
    the network, where two gradients would be added up in another order. They are tied where the
    recomputed copy of the operator must be read, which its gradient does not do. Pointwise fusion
    leaves them alone where the network is trained with it and nowhere else than on a GPU.
    """
    graph, facts = rules.graph, rules.trainings[0].facts
    places = _places_for_copies(rules)
    tolerant = rules.tables[0].tolerant
    unfused = GPU_FUSION in rules.targets and CPU not in rules.targets
    return tuple(
        KeptCopy(
            i, "" if tolerant[i] or facts[i].own_output else graph.tensors[i][0].dtype, unfused
        )
        for i in graph.operators
        if i in places and rules.allowed[i] and facts[i].inputs
    )


def _places_for_copies(rules: Rules) -> set[int]:
    """The nodes that a copy may stand behind (see ``copyable``)."""
    graph = rules.graph
    read = {a for node in graph.nodes for a, b in node.inputs if b == 0}
    read -= {a for node in graph.nodes for a, b in node.inputs if b > 0}
    read -= {d for node in graph.nodes for d in node.deps}
    read -= {a for a, _ in graph.heads}
    same = rules.trainings[0].same
    merged = {i for i, first in enumerate(same) if i != first}
    merged |= {same[i] for i in merged}
    return {i for i in graph.operators if i in read and i not in merged}
