"""The plan of least memory, and the plans that are not dominated: searched, the original's, none.

Where pointwise fusion is on, a search without it comes first: a replay then takes a fraction of the
time, and what is found shows what fusion costs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Collection, Mapping, Sequence

import numpy as np

from memonger.graph.forward import KeptCopy
from memonger.planners.candidates import (
    Candidate,
    MarkPlan,
    Searched,
    by_memory,
    by_time,
    not_dominated,
)
from memonger.planners.marks import chen2016
from memonger.planners.marks.copies import apart_from_fusion, copies_at
from memonger.planners.marks.cuts import Cut, cheap_cuts, single_tensor_cuts
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.search import Effort, MarkSearch, NodeTimes, settled
from memonger.support.parallel import Threads

NO_CUTS = "no cuts"  # the original's plan for a network without marks: everything is recomputed
NO_PLAN = "no plan"
UNFUSED_SHARE = 0.4  # of the time of a search with fusion: what the one without takes

Times = Callable[[Rules], NodeTimes]


def smallest(
    hints: Mapping[int, str],
    cost: Callable[[np.ndarray], int],
    rules: Rules,
    ntrial: int = 6,
    copies: bool = True,
    *,
    effort: Effort,
    progress: Callable[[float], None] | None = None,
) -> Searched:
    """Find the cheapest of no plan, the original's, and searched ones.

    ``cost`` tells the bytes that a set of recomputed nodes costs, by a replay; ``copies`` whether
    results may be saved in identities. All plans obey the rules. Raises KeyboardInterrupt if that
    comes before anything better than no plan was found.
    """
    threads, unfused = Threads(progress), None

    def searched() -> Candidate:
        nonlocal unfused
        _, least, unfused = _least_memory(rules, _flops, hints, copies, threads, effort)
        return least

    name = "your marks" if hints else NO_CUTS
    tried = {name: lambda: _original(hints, cost, rules, ntrial), "searched cuts": searched}
    found = _cheapest(rules, cost, tried)
    interrupted = found.interrupted or threads.interrupted
    return replace(found, interrupted=interrupted, unfused=unfused)


def smallest_bound(
    hints: Mapping[int, str], cost: Callable[[np.ndarray], int], rules: Rules, ntrial: int = 6
) -> Searched:
    """Find the cheapest of no plan and the original's, where each cost is a bind.

    The original's search runs on the user's marks and on single-tensor cuts. Parameters are as of
    `smallest`.
    """
    single = dict.fromkeys(single_tensor_cuts(rules.graph), "True")
    tried = {"your marks" if hints else NO_CUTS: lambda: _original(hints, cost, rules, ntrial)}
    if single:
        tried["single-tensor cuts"] = lambda: _original(single, cost, rules, ntrial)
    return _cheapest(rules, cost, tried)


def fastest(
    hints: Collection[int],
    rules: Rules,
    times: Times,
    known: Sequence[MarkPlan],
    copies: bool = True,
    *,
    effort: Effort,
    progress: Callable[[float], None] | None = None,
) -> Searched:
    """Search for the plans that are not dominated in memory and time, the fastest first.

    What they cost is what the search has found. They are carried out without the saved identities
    that they do not need (``copies.settle``), and may then take other blocks: mostly less memory.

    It starts from ``known`` plans too.
    """
    threads = Threads(lambda done: progress(done / (1 + effort.fast)) if progress else None)
    search, least, _ = _least_memory(rules, times, hints, copies, threads, effort)
    interrupted, own = False, [MarkPlan(np.zeros_like(least.plan.mask)), *known]
    try:
        for plan in (*own, least.plan):
            search.add(plan)
        if rules.allowed.any():
            search.speed_up()
    except KeyboardInterrupt:
        interrupted = True
    plans = [*(settled(rules, times, plan) for plan in own), least, *search.plans()]
    return Searched(not_dominated(plans, by_time), interrupted or threads.interrupted)


def _original(
    hints: Mapping[int, str], cost: Callable[[np.ndarray], int], rules: Rules, ntrial: int
) -> Candidate:
    """Find the original's best plan with the rules."""
    if not hints:  # then its plan is the same whatever the threshold
        mask = rules.apply(chen2016.mirror_plan(rules.graph, hints, 0).mask)
        return Candidate(cost(mask), 0.0, MarkPlan(mask))
    trials = chen2016.search(rules.graph, hints, lambda mask: cost(rules.apply(mask)), ntrial)
    best = min(trials, key=lambda trial: trial.cost)  # of equals the first
    return Candidate(best.cost, 0.0, MarkPlan(rules.apply(best.mask)))


def _cheapest(
    rules: Rules,
    cost: Callable[[np.ndarray], int],
    tried: Mapping[str, Callable[[], Candidate]],
) -> Searched:
    """The cheapest of no plan and what is tried in turn, until the user ends it."""
    nothing = np.zeros(len(rules.graph.nodes), dtype=np.bool_)
    plans = {NO_PLAN: Candidate(cost(nothing), 0.0, MarkPlan(nothing), NO_PLAN)}
    interrupted = False
    try:
        for name, search in tried.items():
            plans[name] = replace(search(), origin=name)
    except KeyboardInterrupt:
        interrupted = True
        if all(plan.pool_bytes >= plans[NO_PLAN].pool_bytes for plan in plans.values()):
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
) -> tuple[MarkSearch, Candidate, int | None]:
    """Return the best plan, and the search with its archive, from which `fastest` continues.

    The last that is returned are the least bytes without pointwise fusion, where that is on.
    """
    cuts = cheap_cuts(rules.graph, effort.cuts, hints)
    at = copies_at(rules, cuts) if copies else ()
    if not rules.fuses:
        return (*_minimised(rules, times, cuts, at, threads, effort), None)
    unfused = _minimised(rules.unfused(), times, cuts, at, threads, effort, UNFUSED_SHARE)[1]
    mask, kept = unfused.plan
    apart = apart_from_fusion(rules, mask, kept) if copies else ()
    at, start = tuple(sorted((*at, *apart))), MarkPlan(mask, (*kept, *apart))
    search, least = _minimised(rules, times, cuts, at, threads, effort, 1 - UNFUSED_SHARE, start)
    return search, least, unfused.pool_bytes


def _minimised(
    rules: Rules,
    times: Times,
    cuts: Sequence[Cut],
    copies: tuple[KeptCopy, ...],
    threads: Threads,
    effort: Effort,
    share: float = 1.0,
    known: MarkPlan | None = None,
) -> tuple[MarkSearch, Candidate]:
    """Search with these saved identities, then with those alone that are needed."""
    search = MarkSearch(rules, times, cuts, copies, threads, effort, share)
    nothing = MarkPlan(np.zeros_like(rules.allowed))
    if not rules.allowed.any():
        return search, settled(rules, times, nothing)
    *first, last = effort.phases
    states = search.cuts_by_size()
    for phase in first:
        states = search.minimise(states, phase)
    plans = [plan for plan in (nothing, search.plan(states[0]), known) if plan is not None]
    least = min((settled(rules, times, plan) for plan in plans), key=by_memory)
    narrow = MarkSearch(rules, times, (), least.copies, threads, effort, share)
    start = narrow.add(least.plan)
    assert start is not None
    plan = narrow.plan(narrow.minimise([start] * last.starts, last)[0])
    plain = plan._replace(copies=tuple(copy for copy in plan.copies if not copy.apart))
    return search, min((settled(rules, times, each) for each in (plan, plain)), key=by_memory)


def _flops(rules: Rules) -> NodeTimes:
    """Operations instead of seconds, where no time is asked for."""
    return NodeTimes(rules.flops, 0 * rules.flops, 0 * rules.flops)
