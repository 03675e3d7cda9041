"""The plan of least memory, and the plans that are not dominated: searched, the original's, none.

Where pointwise fusion is on, a search without it comes first: a replay then takes a fraction of the
time, and what is found shows what fusion costs.
"""

from __future__ import annotations

from typing import Callable, Collection, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import KeptCopy
from memonger.planners.marks import chen2016
from memonger.planners.marks.copies import apart_from_fusion, copies_at
from memonger.planners.marks.cuts import Cut, cheap_cuts, single_tensor_cuts
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.search import Effort, MarkPlan, MarkSearch, NodeTimes, settled
from memonger.planners.pareto import not_dominated
from memonger.support.parallel import Threads

NO_CUTS = "no cuts"  # the original's plan for a network without marks: everything is recomputed
NO_PLAN = "no plan"
UNFUSED_SHARE = 0.4  # of the time of a search with fusion: what the one without takes

Times = Callable[[Rules], NodeTimes]


class Least(NamedTuple):
    """The plan of least memory, and the bytes of all that were compared, by name.

    ``unfused`` is the least without pointwise fusion, where that is on.
    """

    plan: MarkPlan
    costs: dict[str, int]
    interrupted: bool
    unfused: int | None = None


def smallest(
    hints: Mapping[int, str],
    cost: Callable[[np.ndarray], int],
    rules: Rules,
    ntrial: int = 6,
    copies: bool = True,
    *,
    effort: Effort,
    progress: Callable[[float], None] | None = None,
) -> Least:
    """Find the cheapest of no plan, the original's, and searched ones.

    ``cost`` tells the bytes that a set of recomputed nodes costs, by a replay; ``copies`` whether
    results may be saved in identities. All plans obey the rules. Raises KeyboardInterrupt if that
    comes before anything better than no plan was found.
    """
    threads, unfused = Threads(progress), None

    def searched() -> MarkPlan:
        nonlocal unfused
        _, plan, unfused = _least_memory(rules, _flops, hints, copies, threads, effort)
        return plan

    name = "your marks" if hints else NO_CUTS
    tried = {name: lambda: _original(hints, cost, rules, ntrial), "searched cuts": searched}
    found = _cheapest(rules, cost, tried)
    return found._replace(interrupted=found.interrupted or threads.interrupted, unfused=unfused)


def smallest_bound(
    hints: Mapping[int, str], cost: Callable[[np.ndarray], int], rules: Rules, ntrial: int = 6
) -> Least:
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
) -> tuple[list[MarkPlan], bool]:
    """Search for the plans that are not dominated in memory and time, the fastest first.

    What they cost is what the search has found. They are carried out without the saved identities
    that they do not need (``copies.settle``), and may then take other blocks: mostly less memory.

    It starts from ``known`` plans too. Also told is whether the user ended the search early.
    """
    threads = Threads(lambda done: progress(done / (1 + effort.fast)) if progress else None)
    search, least, _ = _least_memory(rules, times, hints, copies, threads, effort)
    interrupted, own = False, [MarkPlan(0, 0.0, np.zeros_like(least.mask)), *known]
    try:
        for plan in (*own, least):
            search.add(plan)
        if rules.allowed.any():
            search.speed_up()
    except KeyboardInterrupt:
        interrupted = True
    plans = [*(settled(rules, times, plan) for plan in own), least, *search.plans()]
    return not_dominated(plans, by_time), interrupted or threads.interrupted


def by_time(plan: MarkPlan) -> tuple[float, float]:
    """What plans are compared by: the seconds, then the bytes."""
    return plan.seconds, plan.pool_bytes


def _original(
    hints: Mapping[int, str], cost: Callable[[np.ndarray], int], rules: Rules, ntrial: int
) -> MarkPlan:
    """Find the original's best plan with the rules."""
    if not hints:  # then its plan is the same whatever the threshold
        mask = rules.apply(chen2016.mirror_plan(rules.graph, hints, 0).mask)
        return MarkPlan(cost(mask), 0.0, mask)
    trials = chen2016.search(rules.graph, hints, lambda mask: cost(rules.apply(mask)), ntrial)
    best = min(trials, key=lambda trial: trial.cost)  # of equals the first
    return MarkPlan(best.cost, 0.0, rules.apply(best.mask))


def _cheapest(
    rules: Rules,
    cost: Callable[[np.ndarray], int],
    tried: Mapping[str, Callable[[], MarkPlan]],
) -> Least:
    """The cheapest of no plan and what is tried in turn, until the user ends it."""
    nothing = np.zeros(len(rules.graph.nodes), dtype=np.bool_)
    found, interrupted = {NO_PLAN: MarkPlan(cost(nothing), 0.0, nothing)}, False
    try:
        for name, search in tried.items():
            found[name] = search()
    except KeyboardInterrupt:
        interrupted = True
        if all(plan.pool_bytes >= found[NO_PLAN].pool_bytes for plan in found.values()):
            raise
    least = min(found.values(), key=lambda plan: plan.pool_bytes)  # of equals the first
    return Least(least, {name: plan.pool_bytes for name, plan in found.items()}, interrupted)


def _least_memory(
    rules: Rules,
    times: Times,
    hints: Collection[int],
    copies: bool,
    threads: Threads,
    effort: Effort,
) -> tuple[MarkSearch, MarkPlan, int | None]:
    """Search for the plan of least memory; the search may go on with another goal.

    The last that is returned are the least bytes without pointwise fusion, where that is on.
    """
    cuts = cheap_cuts(rules.graph, effort.cuts, hints)
    at = copies_at(rules, cuts) if copies else ()
    if not rules.fuses:
        return (*_minimised(rules, times, cuts, at, threads, effort), None)
    known = _minimised(rules.unfused(), times, cuts, at, threads, effort, UNFUSED_SHARE)[1]
    apart = apart_from_fusion(rules, known.mask, known.copies) if copies else ()
    at, start = tuple(sorted((*at, *apart))), known._replace(copies=(*known.copies, *apart))
    found = _minimised(rules, times, cuts, at, threads, effort, 1 - UNFUSED_SHARE, start)
    return (*found, known.pool_bytes)


def _minimised(
    rules: Rules,
    times: Times,
    cuts: Sequence[Cut],
    copies: tuple[KeptCopy, ...],
    threads: Threads,
    effort: Effort,
    share: float = 1.0,
    known: MarkPlan | None = None,
) -> tuple[MarkSearch, MarkPlan]:
    """Search with these saved identities, then with those alone that are needed."""
    search = MarkSearch(rules, times, cuts, copies, threads, effort, share)
    nothing = MarkPlan(0, 0.0, np.zeros_like(rules.allowed))
    if not rules.allowed.any():
        return search, settled(rules, times, nothing)
    *first, last = effort.phases
    found = search.cuts_by_size()
    for phase in first:
        found = search.minimise(found, phase)
    plan = search.plan(found[0])
    plans = [settled(rules, times, each) for each in (nothing, plan, known) if each is not None]
    least = min(plans, key=lambda plan: plan[:2])
    narrow = MarkSearch(rules, times, (), least.copies, threads, effort, share)
    start = narrow.add(least)
    assert start is not None
    plan = narrow.plan(narrow.minimise([start] * last.starts, last)[0])
    plain = plan._replace(copies=tuple(copy for copy in plan.copies if not copy.apart))
    both = [settled(rules, times, each) for each in (plan, plain)]
    return search, min(both, key=lambda plan: plan[:2])


def _flops(rules: Rules) -> NodeTimes:
    """Operations instead of seconds, where no time is asked for."""
    return NodeTimes(rules.flops, 0 * rules.flops, 0 * rules.flops)
