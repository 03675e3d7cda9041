"""The smallest plan that is found: cuts searched on replayed costs, the original's plans, no plan.

A set of cuts is a plan: what is alive at a cut is kept, everything between is recomputed, what
comes after the last cut is not. Sets of cuts are seeded by walking the network with a budget of
bytes between two cuts (Chen et al. 2016, algorithm 3), with sizes raised to several powers, for
MXNet's planner hands out whole blocks, so that the number of live tensors counts as well as their
bytes. The best seeds are then climbed: a cut moved, left out or put in, as long as the cost falls.
Last, single operators are kept or recomputed against the plan where that lowers the cost.
"""

from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memonger.forward import ForwardGraph
from memonger.planners import chen2016
from memonger.planners.cuts import Cut, cheap_cuts, single_tensor_cuts

POWERS = (1.0, 0.6, 0.35)  # of a tensor's bytes, in the budgets of the seeds
BUDGETS = 14  # tried for each power
MOST_CUTS = 160
STARTS = 3  # seeds that are climbed
WORK = 12_000_000  # nodes replayed in one search: bounds its time


class Smallest(NamedTuple):
    """The plan that was found.

    Attributes
    ----------
    mask : np.ndarray of bool
        The recomputed nodes.
    copies : tuple of int
        Those of them whose result is kept all the same, by a copy.
    cost : int
        Bytes as MXNet counts them.
    candidates : dict
        Costs by name.
    interrupted : bool
        Whether the search was ended by the user.
    """

    mask: np.ndarray
    copies: Tuple[int, ...]
    cost: int
    candidates: Dict[str, int]
    interrupted: bool


def smallest(
    graph: ForwardGraph,
    stages: Mapping[int, str],
    cost: Callable[[np.ndarray], int],
    rules: Callable[[np.ndarray], np.ndarray],
    ntrial: int = 6,
    cheap: bool = True,
    *,
    copies: bool = True,
    progress: Optional[Callable[[float], None]] = None,
) -> Smallest:
    """The cheapest of no plan, the original's search on two sets of stages, and searched cuts.

    Parameters
    ----------
    graph : ForwardGraph
    stages : dict
        The user's ``mirror_stage`` marks.
    cost : callable
        The bytes that a set of recomputed nodes costs.
    rules : callable
        The part of a set of recomputed nodes that may be recomputed; what is returned obeys it, and
        it is the plan with the rules that is costed.
    ntrial : int
        As for the original's search.
    cheap : bool
        Whether a cost is a replay; where each is a bind, cuts are not searched.
    """
    nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
    found: List[Tuple[int, np.ndarray]] = [(cost(nothing), nothing)]
    candidates = {"no plan": found[0][0]}
    automatic = dict.fromkeys(single_tensor_cuts(graph), "True")
    for name, marked in (("your marks", stages), ("single-tensor cuts", automatic)):
        if marked:
            trials = chen2016.search(graph, marked, lambda mask: cost(rules(mask)), ntrial)
            trial = chen2016.best(trials)
            found.append((trial.cost, rules(trial.plan.mask)))
            candidates[name] = trial.cost
    if cheap:
        search = _CutSearch(graph, lambda mask: cost(rules(mask)))
        if search.cuts:
            mask = rules(search.run())
            found.append((cost(mask), mask))
            candidates["searched cuts"] = found[-1][0]
        if progress is not None:
            progress(1.0)
    least, mask = min(found, key=lambda pair: pair[0])  # of equals the first: no plan
    return Smallest(mask, (), least, candidates, False)


class _CutSearch:
    """Sets of cuts, as sorted indices into the candidate cuts, and what they cost."""

    def __init__(self, graph: ForwardGraph, cost: Callable[[np.ndarray], int]) -> None:
        self.graph, self.cost = graph, cost
        self.cuts: List[Cut] = cheap_cuts(graph, MOST_CUTS)
        self.left = max(60, WORK // len(graph.nodes))  # costs that may still be asked for
        self.known: Dict[Tuple[int, ...], int] = {}
        self.operators = np.array([not node.is_variable for node in graph.nodes])

    def run(self) -> np.ndarray:
        """The best plan that is found; deterministic."""
        seeds = {seed for power in POWERS for seed in self.seeds(power) if seed}
        best = sorted(sorted(seeds), key=self.price)[:STARTS]
        share = max(1, self.left * 2 // (3 * STARTS))
        climbed = [self.climb(seed, self.left - share) for seed in best]
        return self.polish(self.mask(sorted(climbed, key=self.price)[0]))

    def mask(self, chosen: Sequence[int]) -> np.ndarray:
        """The operators that a set of cuts recomputes."""
        mask = self.operators.copy()
        if chosen:
            mask[self.cuts[chosen[-1]].after + 1 :] = False
        for k in chosen:
            mask[list(self.cuts[k].keep)] = False
        return mask

    def price(self, chosen: Tuple[int, ...]) -> int:
        if chosen not in self.known:
            self.left -= 1
            self.known[chosen] = self.cost(self.mask(chosen))
        return self.known[chosen]

    def seeds(self, power: float) -> List[Tuple[int, ...]]:
        """Sets of cuts with about equal sums of size**power between them, for several sums."""
        sizes = np.zeros(len(self.graph.nodes) + 1)
        for i in self.graph.operators:
            sizes[i + 1] = sum((4.0 * t.elements) ** power for t in self.graph.tensors[i])
        until = np.cumsum(sizes)
        at = np.array([until[cut.after + 1] for cut in self.cuts])
        price = np.array([cut.size**power for cut in self.cuts])
        found = []
        for pieces in np.unique(np.geomspace(2, len(self.cuts) + 1, BUDGETS).astype(int)):
            budget = until[-1] / pieces
            chosen: List[int] = []
            start = 0.0
            while True:
                near = np.flatnonzero((at > start + budget / 2) & (at <= start + budget * 1.25))
                if not len(near):
                    near = np.flatnonzero(at > start + budget)[:1]
                    if not len(near):
                        break
                # The cheapest cut near the end of the piece.
                waste = price[near] + np.abs(at[near] - start - budget) * 0.25
                chosen.append(int(near[np.argmin(waste)]))
                start = at[chosen[-1]]
            found.append(tuple(chosen))
        return found

    def climb(self, best: Tuple[int, ...], until: int) -> Tuple[int, ...]:
        """Move, leave out and put in single cuts as long as the cost falls and some are left."""
        reach = max(1, len(self.cuts) // (2 * len(best) + 2))
        while True:
            before = best
            for step in sorted({reach, max(1, reach // 3), 1}, reverse=True):
                for k in range(len(self.cuts)):
                    if self.left <= until:
                        return best
                    options = []
                    if k in best:
                        rest = set(best) - {k}
                        options = [rest, rest | {k - step}, rest | {k + step}]
                    elif step == 1:
                        options = [set(best) | {k}]
                    for option in options:
                        other = tuple(sorted(m for m in option if 0 <= m < len(self.cuts)))
                        if other and self.price(other) < self.price(best):
                            best = other
            if best == before:
                return best

    def polish(self, mask: np.ndarray) -> np.ndarray:
        """Turn single operators, the largest first, from recomputed to kept or back."""
        tensors = self.graph.tensors
        order = sorted(
            self.graph.operators, key=lambda i: (-sum(t.elements for t in tensors[i]), i)
        )
        least = self.cost(mask)
        for i in order[: max(0, self.left)]:
            mask[i] = not mask[i]
            cost = self.cost(mask)
            if cost < least:
                least = cost
            else:
                mask[i] = not mask[i]
        return mask
