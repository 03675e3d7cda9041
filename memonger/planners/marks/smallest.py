"""The plan of least memory: of those that are searched for, the original's, and none."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Callable, Mapping

import numpy as np

from memonger.planners.candidates import Candidate, MarkPlan, SearchResult
from memonger.planners.marks import chen2016
from memonger.planners.marks.cuts import cheap_cuts
from memonger.planners.marks.identities import drop_unused_identities, identities_at
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.search import Effort, MarkSearch
from memonger.support.parallel import Threads
from memonger.support.types import Bools, Doubles

NO_CUTS = "no cuts"  # the original's plan for a network without marks: everything is recomputed
NO_PLAN = "no plan"
FORCED = "forced recomputation"  # of what recompute= names, and of nothing else
SEARCHED = "searched cuts"


def smallest(
    hints: Mapping[int, str],
    rules: Rules,
    seconds: Doubles,
    ntrial: int = 6,
    *,
    effort: Effort,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """Find the smallest of no plan, the original's, and searched ones; list the others behind it.

    All plans obey the rules. In place of no plan there is what is forced, if anything is. The
    others are the fastest of each size that the search has come to; the ``seconds`` of each node
    tell which those are. Raises KeyboardInterrupt if that comes before anything better than no plan
    was found.
    """
    threads, interrupted = Threads(progress), False
    price = functools.partial(price_plan, rules, seconds)
    nothing = price(MarkPlan(np.zeros_like(rules.allowed)), NO_PLAN)
    if nothing.recomputes:
        nothing = replace(nothing, origin=FORCED)
    compared, others = [nothing], []
    try:
        mask = _original(hints, rules, ntrial)
        compared.append(price(MarkPlan(mask), "your marks" if hints else NO_CUTS))
        cuts = cheap_cuts(rules.graph, effort.cuts, hints)
        if cuts and rules.allowed.any():
            search = MarkSearch(rules, seconds, cuts, identities_at(rules, cuts), threads, effort)
            compared.append(price(search.plan(search.minimise()), SEARCHED))
            others = [replace(plan, origin=SEARCHED) for plan in search.plans()]
    except KeyboardInterrupt:
        interrupted = True
        if all(plan.pool_bytes >= nothing.pool_bytes for plan in compared):
            raise
    compared.sort(key=lambda plan: plan.pool_bytes)  # of equals the first stays the first
    costs = {plan.origin: plan.pool_bytes for plan in compared}
    return SearchResult([*compared, *others], interrupted or threads.interrupted, costs)


def _original(hints: Mapping[int, str], rules: Rules, ntrial: int) -> Bools:
    """Find the original's best plan with the rules."""

    def cost(mask: Bools) -> int:
        return rules.plan_memory(rules.apply(mask)).pool_bytes

    if not hints:  # then its plan is the same whatever the threshold
        return chen2016.mirror_plan(rules.graph, hints, 0).mask
    trials = chen2016.search(rules.graph, hints, cost, ntrial)
    return min(trials, key=lambda trial: trial.cost).mask  # of equals the first


def price_plan(plain: Rules, seconds: Doubles, plan: MarkPlan, origin: str) -> Candidate:
    """Price a plan as it is carried out, by the rules and with the saved identities that it needs.

    ``plain`` are the rules of the network without any, and ``seconds`` those of its nodes.
    """
    plan, rules, mask = drop_unused_identities(plain, plan)
    replayed, n = rules.plan_memory(mask), len(mask)
    runs_again = np.isin(np.arange(n, 2 * n), replayed.order)[rules.insertion.new_index]
    added = float(seconds[runs_again].sum())
    return Candidate(replayed.pool_bytes, added, plan, origin)
