"""The plan of least memory, and the plans that no other beats: searched, the original's, none."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Collection, Mapping, Sequence

import numpy as np

from memonger.costs.time.flops import count_forward_flops
from memonger.planners.candidates import (
    Candidate,
    MarkPlan,
    Searched,
    by_memory,
    by_time,
    not_dominated,
)
from memonger.planners.marks import chen2016
from memonger.planners.marks.copies import copies_at
from memonger.planners.marks.cuts import cheap_cuts
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.search import Effort, MarkSearch, NodeTimes, price_plan
from memonger.support.parallel import Threads
from memonger.support.types import Bools

NO_CUTS = "no cuts"  # the original's plan for a network without marks: everything is recomputed
NO_PLAN = "no plan"
WISHED = "what recompute= names"  # and nothing else

Times = Callable[[Rules], NodeTimes]


def smallest(
    hints: Mapping[int, str],
    rules: Rules,
    ntrial: int = 6,
    copies: bool = True,
    *,
    effort: Effort,
    progress: Callable[[float], None] | None = None,
) -> Searched:
    """Find the cheapest of no plan, the original's, and searched ones.

    ``copies`` says whether results may be saved in identities. All plans obey the rules. Raises
    KeyboardInterrupt if that comes before anything better than no plan was found.
    """
    threads = Threads(progress)

    def searched() -> Candidate:
        return _least_memory(rules, _count_flops, hints, copies, threads, effort)[1]

    name = "your marks" if hints else NO_CUTS
    searches = {name: lambda: _original(hints, rules, ntrial), "searched cuts": searched}
    cheapest = _cheapest(rules, searches)
    interrupted = cheapest.interrupted or threads.interrupted
    return replace(cheapest, interrupted=interrupted)


def fastest(
    hints: Collection[int],
    rules: Rules,
    times: Times,
    starts: Sequence[MarkPlan],
    copies: bool = True,
    *,
    effort: Effort,
    progress: Callable[[float], None] | None = None,
) -> Searched:
    """Search for the plans that are not dominated in memory and time, the fastest first.

    Their costs are those of the search. They are carried out without the saved identities that they
    do not need (``copies.settle``), and may then take other blocks: mostly less memory.

    The search starts from the plans ``starts`` too.
    """
    threads = Threads(lambda done: progress(done / (1 + effort.fast)) if progress else None)
    search, least = _least_memory(rules, times, hints, copies, threads, effort)
    interrupted, plain = False, [MarkPlan(np.zeros_like(least.plan.mask)), *starts]
    try:
        for plan in (*plain, least.plan):
            search.add(plan)
        if rules.allowed.any():
            search.speed_up()
    except KeyboardInterrupt:
        interrupted = True
    plans = [*(price_plan(rules, times, plan) for plan in plain), least, *search.plans()]
    return Searched(not_dominated(plans, by_time), interrupted or threads.interrupted)


def _original(hints: Mapping[int, str], rules: Rules, ntrial: int) -> Candidate:
    """Find the original's best plan with the rules."""

    def cost(mask: Bools) -> int:
        return rules.replay(rules.apply(mask)).pool_bytes

    if not hints:  # then its plan is the same whatever the threshold
        mask = chen2016.mirror_plan(rules.graph, hints, 0).mask
        return Candidate(cost(mask), 0.0, MarkPlan(rules.apply(mask)))
    trials = chen2016.search(rules.graph, hints, cost, ntrial)
    best = min(trials, key=lambda trial: trial.cost)  # of equals the first
    return Candidate(best.cost, 0.0, MarkPlan(rules.apply(best.mask)))


def _cheapest(rules: Rules, searches: Mapping[str, Callable[[], Candidate]]) -> Searched:
    """Return the cheapest of no plan and of the searches, made in turn until the user ends them.

    In place of no plan there is what is wished, if anything is.
    """
    least_mask = rules.apply(np.zeros(len(rules.graph.nodes), dtype=np.bool_))
    name = WISHED if least_mask.any() else NO_PLAN
    first = Candidate(rules.replay(least_mask).pool_bytes, 0.0, MarkPlan(least_mask), name)
    plans, interrupted = {name: first}, False
    try:
        for name, search in searches.items():
            plans[name] = replace(search(), origin=name)
    except KeyboardInterrupt:
        interrupted = True
        if all(plan.pool_bytes >= first.pool_bytes for plan in plans.values()):
            raise
    least = min(plans.values(), key=lambda plan: plan.pool_bytes)  # of equals the first
    costs = {name: plan.pool_bytes for name, plan in plans.items()}
    return Searched([least], interrupted, costs)


def _least_memory(
    rules: Rules,
    times: Times,
    hints: Collection[int],
    copies: bool,
    threads: Threads,
    effort: Effort,
) -> tuple[MarkSearch, Candidate]:
    """Return the search with its archive, from which `fastest` continues, and the best plan.

    It searches with all saved identities that may help, then with those alone that are needed.
    """
    cuts = cheap_cuts(rules.graph, effort.cuts, hints)
    identities = copies_at(rules, cuts) if copies else ()
    search = MarkSearch(rules, times, cuts, identities, threads, effort)
    nothing = MarkPlan(np.zeros_like(rules.allowed))
    if not rules.allowed.any():
        return search, price_plan(rules, times, nothing)
    *first, last = effort.phases
    states = search.cuts_by_size()
    for phase in first:
        states = search.minimise(states, phase)
    plans = [nothing, search.plan(states[0])]
    least = min((price_plan(rules, times, plan) for plan in plans), key=by_memory)
    narrow = MarkSearch(rules, times, (), least.copies, threads, effort)
    state = narrow.add(least.plan)
    assert state is not None
    plan = narrow.plan(narrow.minimise([state] * last.starts, last)[0])
    return search, price_plan(rules, times, plan)


def _count_flops(rules: Rules) -> NodeTimes:
    """Return operations instead of seconds, for a search that compares no times."""
    flops = count_forward_flops(rules.graph).astype(np.float64)
    return NodeTimes(flops, 0 * flops, 0 * flops)
