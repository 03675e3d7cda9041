"""Find the plan of marks of least memory: of the searched ones, the original's, and no plan."""

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
from memonger.planners.marks.search import MarkEffort, MarkSearch
from memonger.support.parallel import Threads
from memonger.support.types import Bools, Doubles

NO_CUTS = "no cuts"  # the original's plan for a network without hints: everything is recomputed
NO_PLAN = "no plan"
FORCED = "forced recomputation"  # of what recompute= names, and of nothing else
SEARCHED = "searched cuts"


def smallest(
    hints: Mapping[int, str],
    rules: Rules,
    seconds: Doubles,
    ntrial: int = 6,
    *,
    effort: MarkEffort,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """Find the smallest of no plan, the original's plan, and searched plans.

    The rules are applied to all plans. The forced plan takes the place of no plan if operators are
    forced to be recomputed.

    Parameters
    ----------
    hints : mapping
        Node -> the user's ``mirror_stage``.
    rules : Rules
        The rules of the network without identities.
    seconds : array of float64, (nodes,)
        The times of its nodes.
    ntrial : int
        The number of thresholds in the original's grid.
    effort : MarkEffort
        The length of the search.
    progress : callable or None
        Receives the share of the search that is done.

    Returns
    -------
    SearchResult
        The smallest plan first, then the other compared plans, then for each size the fastest plan
        that the search has visited.

    Raises
    ------
    KeyboardInterrupt
        If the user interrupts the search before it has found anything smaller than no plan.
    """
    threads, interrupted = Threads(progress), False
    price = functools.partial(price_plan, rules, seconds)
    nothing = price(MarkPlan(np.zeros_like(rules.recomputable)), NO_PLAN)
    if nothing.recomputes:
        nothing = replace(nothing, origin=FORCED)
    compared, others = [nothing], []
    try:
        mask = _original(hints, rules, ntrial)
        compared.append(price(MarkPlan(mask), "your marks" if hints else NO_CUTS))
        cuts = cheap_cuts(rules.graph, effort.cuts, hints)
        if cuts and rules.recomputable.any():
            search = MarkSearch(rules, seconds, cuts, identities_at(rules, cuts), threads, effort)
            compared.append(price(search.plan(search.minimise().state), SEARCHED))
            # With their costs before unused identities are dropped.
            others = [
                Candidate(search.plan(point.state), point.nbytes, point.time, SEARCHED)
                for point in search.archive.points()
            ]
    except KeyboardInterrupt:
        interrupted = True
        if all(plan.pool_bytes >= nothing.pool_bytes for plan in compared):
            raise
    compared.sort(key=lambda plan: plan.pool_bytes)  # stable: of equal plans the first stays first
    costs = {plan.origin: plan.pool_bytes for plan in compared}
    return SearchResult([*compared, *others], interrupted or threads.interrupted, costs)


def _original(hints: Mapping[int, str], rules: Rules, ntrial: int) -> Bools:
    """Return the recomputed nodes of the original's best plan, before the rules are applied."""
    if not hints:  # its plan does not depend on the threshold
        return chen2016.mirror_plan(chen2016.list_results(rules.graph, hints), 0).mask
    masks = [trial.mask for trial in chen2016.search(rules.graph, hints, ntrial)]
    costs = [rules.plan_memory(rules.apply(mask)).planned_bytes for mask in masks]
    return masks[costs.index(min(costs))]  # the first of equal ones


def price_plan(plain: Rules, seconds: Doubles, plan: MarkPlan, origin: str) -> Candidate:
    """Return a plan by the rules, with the identities that it uses, and its exact costs.

    Parameters
    ----------
    plain : Rules
        The rules of the network without identities.
    seconds : array of float64, (nodes,)
        The times of its nodes.
    plan : MarkPlan
        A plan of that network.
    origin : str
        The name of the search that found the plan.
    """
    plan, rules, mask = drop_unused_identities(plain, plan)
    usage, n = rules.plan_memory(mask), len(mask)
    runs_again = np.isin(np.arange(n, 2 * n), usage.ran.order)[rules.insertion.new_index]
    added = float(seconds[runs_again].sum())
    return Candidate(plan, usage.planned_bytes, added, origin)
