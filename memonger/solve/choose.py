"""Choose the plan of a search that the limits ask for, and confirm it by a bind.

The plans of a search are sorted by time, or come from a search for least memory. The bytes of a
candidate are a lower bound of its memory (``least_bytes``). Its exact memory is predicted only if
that bound is within the limit. So each choice is the same as if the exact memory of all candidates
was known, and a larger budget never gives a slower plan of the same kind.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Iterable, Mapping, Sequence

import numpy as np

from memonger.costs.usage import Usage
from memonger.graph import marks
from memonger.graph.operators.recompute import GPU, fuses
from memonger.planners.candidates import Candidate, SearchResult, by_seconds, pareto_front
from memonger.schedules.layouts import LayoutMismatch
from memonger.solve import by_marks, by_schedules
from memonger.solve.describe import describe_too_little, explain_little, format_bytes
from memonger.solve.facts import Facts
from memonger.solve.limits import AUTO, CHEN2016, MARKS, SCHEDULE
from memonger.solve.search import (
    BY,
    SLACK,
    list_fitting,
    list_ways,
    predict_allowed,
    predict_memory,
    search_by,
)
from memonger.solve.selection import Selection
from memonger.support.errors import MB, BudgetError, MemongerError, format_size
from memonger.support.types import Symbol

log = logging.getLogger("memonger")

WORTHWHILE_SAVING = 0.1  # share of the memory that a plan must save if the call sets no limits
NOUNS = {SCHEDULE: "schedule", MARKS: "plan"}  # for messages, by way
SMALL_SAVING = 0.05  # share of the memory: a warning explains plans that save less

WITHOUT_FUSION = (
    "the memory of this plan is predicted without pointwise fusion (on by default on a GPU), with "
    "which long chains of pointwise operators may take more; plan with ctx=mx.gpu(0) to measure "
    "it, set MXNET_USE_FUSION=0, or use how='schedule', which runs without fusion"
)


@dataclass(frozen=True, eq=False)
class Solution:
    """A candidate that a bind has confirmed, and its symbol."""

    facts: Facts
    way: str  # in which it was searched for: `SCHEDULE` or `MARKS`
    plan: Candidate
    symbol: Symbol  # the planned network
    memory: Usage
    added_time: float  # to a step, as a share of one without a plan
    is_fastest: bool  # whether no plan that takes no more memory is faster
    costs: Mapping[str, int]  # origin of each compared plan -> its pool in bytes, as MXNet counts
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
    declined: str = ""  # why the network is returned without the plan that was found
    least: int | None = None  # the judged bytes of the smallest plan that was found


def choose(facts: Facts, front: SearchResult) -> Solution:
    """Choose the plan that the limits ask for; search in other ways if none is within them.

    That is the plan of least memory, the fastest within a budget, the smallest within a limit of
    time, or without any of these limits a plan that is worth its time (`_judge`).

    Raises
    ------
    BudgetError
        If no plan that was found is within the limits.
    """
    limits, refusal, searched = facts.limits, None, front
    for way in list_ways(facts):
        if way != front.way:
            searched = search_by(facts, way, limits.bounds_plans)
        try:
            solution = choose_from(facts, searched)
            break
        except (BudgetError, LayoutMismatch) as error:
            refusal = choose_refusal(facts, refusal, error)
    else:
        assert refusal is not None
        raise refusal
    if facts.must_pay and not searched.is_settled:
        solution = _judge(solution, searched.plans)
    why = explain_marks(facts, searched.way, refusal)
    solution = replace(solution, warnings=(*why, *solution.warnings))
    if searched.is_settled or limits.lent is not None or limits.bounds_plans:
        return solution
    return _keep_own_marks(_or_marks(solution) if facts.must_pay else solution)


def choose_refusal(
    facts: Facts, before: MemongerError | None, error: MemongerError
) -> MemongerError:
    """Choose which error to raise if both ways fail: that of the plan nearest to the budget."""
    if not isinstance(before, BudgetError):
        return error
    # With a limit of time, the bytes of an error are not those of the smallest plan.
    is_nearer = isinstance(error, BudgetError) and error.least_bytes < before.least_bytes
    return error if is_nearer and facts.limits.slower_than is None else before


def explain_marks(facts: Facts, way: str, refusal: MemongerError | None = None) -> list[str]:
    """Write the warning that it is marks, because this speaks against schedules, if it is."""
    if way != MARKS or facts.limits.how != AUTO:
        return []
    is_budget = isinstance(refusal, BudgetError)
    what = f"can hold this network: {refusal or facts.why_no_schedule}"
    why = "is within the limits" if is_budget else what
    return [f"planning by marks, because no schedule {why}"]


def choose_from(facts: Facts, searched: SearchResult, others: Sequence[Candidate] = ()) -> Solution:
    """Choose the plan of a search that the limits ask for, and confirm it.

    ``others`` are taken where no plan of the search fits a budget. Their bytes need not be known,
    because they were found for other shapes.

    Raises
    ------
    BudgetError, LayoutMismatch
        If no plan is within the limits, or is allowed by MKLDNN's layouts.
    KeyboardInterrupt
        If none is within the limits because the user has interrupted the search.
    """
    way, plans, limits = searched.way, searched.plans, facts.limits
    if searched.is_settled:
        solution = make_solution(facts, way, plans[0], is_fastest=True)
        return replace(solution, declined=searched.declined)
    if not limits.bounds_plans:
        plan, _ = choose_smallest(facts, plans)
        solution = make_solution(facts, way, plan or plans[0])  # raises LayoutMismatch
        costs = {**searched.costs, **solution.costs}
        return _advise(replace(solution, costs=costs, interrupted=searched.interrupted))
    if limits.budget is not None:
        return _choose_fastest(facts, searched, others)
    return _choose_within_time(facts, searched)


def _choose_fastest(facts: Facts, searched: SearchResult, others: Sequence[Candidate]) -> Solution:
    """Choose the fastest plan within the budget; raise BudgetError if it takes too much time."""
    plans, way, solution = searched.plans, searched.way, None
    limit = min(facts.find_limit(), facts.count_bytes(facts.unplanned))
    near = (plan for plan in plans if facts.least_bytes(plan) <= limit)
    for plan in list_fitting(facts, itertools.chain(near, others), limit):
        bound = make_solution(facts, way, plan, is_fastest=plan not in others)
        if facts.count_bytes(bound.memory) <= limit:  # MXNet's own count may be larger
            solution = bound
            break
    if solution is None:
        _refuse_all(facts, searched, others)
        _, found = choose_smallest(facts, plans)
        known = (found, facts.unplanned, *(predict_allowed(facts, plan) for plan in others))
        least = min((m for m in known if m is not None), key=facts.count_bytes)
        raise describe_too_little(facts, limit, least)
    if searched.interrupted:
        text = "interrupted: returning the fastest plan within the budget that was found so far"
        solution = replace(solution, interrupted=True, warnings=(*solution.warnings, text))
    most = facts.limits.slower_than
    if most is None or 1 + solution.added_time <= most + SLACK:
        return solution
    within, takes = _choose_within_time(facts, searched), facts.count_bytes(solution.memory)
    raise BudgetError(
        f"no plan was found that takes at most {format_bytes(facts.find_limit())} and at most "
        f"{most:g} times the time without a plan; the fastest within the memory takes "
        f"{format_bytes(takes)} and {1 + solution.added_time:.3f} times the time, the smallest "
        f"within the time takes {format_bytes(facts.count_bytes(within.memory))} and "
        f"{1 + within.added_time:.3f} times the time; give more memory or more time",
        takes,
    )


def _choose_within_time(facts: Facts, searched: SearchResult) -> Solution:
    """Choose the smallest plan within the limit of time, or the knee of the Pareto front."""
    limits, plans = facts.limits, searched.plans
    most = math.inf if limits.slower_than is None else limits.slower_than + SLACK
    order = _sort_by_knee(plans) if limits.knee else plans
    within = [plan for plan in order if _slowdown(facts, plan) <= most]
    if limits.knee:
        chosen = next((plan for plan in within if predict_allowed(facts, plan)), None)
    else:
        chosen, _ = choose_smallest(facts, within)
    if chosen is not None:
        solution = solution_or_none(facts, searched.way, chosen)
        return replace(solution, interrupted=searched.interrupted)
    _refuse_all(facts, searched)
    bounds = {"slower_than": limits.slower_than, "work": limits.work}
    text = " and ".join(f"{name}={bound:g}" for name, bound in bounds.items() if bound is not None)
    raise BudgetError(
        f"no plan was found for {text}; the fastest takes {_slowdown(facts, plans[0]):.3f} times "
        f"the time and {format_bytes(plans[0].pool_bytes)}; give more time, or more work",
        plans[0].pool_bytes,
    )


def _refuse_all(facts: Facts, searched: SearchResult, others: Sequence[Candidate] = ()) -> None:
    """Raise what keeps all plans from the limits, if it is not these.

    That is KeyboardInterrupt of a search that was interrupted, or LayoutMismatch if MKLDNN's
    layouts allow none of the plans.
    """
    if searched.interrupted:
        raise KeyboardInterrupt
    refusal = None
    for plan in (*searched.plans, *others):
        try:
            predict_memory(facts, plan)
            return
        except LayoutMismatch as error:
            refusal = error
    if refusal is not None:
        raise refusal


def choose_smallest(
    facts: Facts, plans: Iterable[Candidate]
) -> tuple[Candidate, Usage] | tuple[None, None]:
    """Return the plan with the least predicted memory, and that memory; None if none is allowed."""
    best: tuple[Candidate, Usage] | tuple[None, None] = None, None
    for plan in sorted(plans, key=attrgetter("pool_bytes")):
        if best[1] is not None and plan.pool_bytes >= best[1].pool_bytes:
            break
        memory = predict_allowed(facts, plan)
        if memory is not None and (best[1] is None or memory.pool_bytes < best[1].pool_bytes):
            best = plan, memory
    return best


def _sort_by_knee(plans: Sequence[Candidate]) -> Sequence[Candidate]:
    """Sort the Pareto front by the distance from its ideal point, the least memory and least time.

    Both are scaled to [0, 1]. The nearest plan is the knee of the front (Zeleny 1973, "Compromise
    programming").
    """
    front = pareto_front(plans, by_seconds)
    costs = np.array([by_seconds(plan) for plan in front], dtype=np.float64)
    least, most = costs.min(axis=0), costs.max(axis=0)
    distance = np.hypot(*((costs - least) / np.maximum(most - least, 1e-12)).T)
    return [front[k] for k in np.argsort(distance, kind="stable")]


def _slowdown(facts: Facts, plan: Candidate) -> float:
    """Return the predicted time of a step with a plan, as a multiple of one without."""
    return 1 + facts.add_to_step(plan.seconds)


def _judge(solution: Solution, found: Sequence[Candidate]) -> Solution:
    """Return the smallest plan that is worth its time: this one, another that was found, or none.

    A plan is worth its time if it saves at least `WORTHWHILE_SAVING` of the memory, and at least as
    large a share of the memory as it adds to the time.
    """
    facts, unplanned, reason = solution.facts, solution.facts.unplanned, ""
    if solution.interrupted or facts.forced or solution.memory is unplanned:
        return solution
    least = solution.memory.judged_bytes
    plans = sorted(found, key=attrgetter("pool_bytes"))
    if solution.way == SCHEDULE:
        plans.append(by_schedules.make_plain(facts))
    others = (
        make_solution(facts, solution.way, plan, is_fastest=plan.seconds == 0)
        for plan in plans
        if plan is not solution.plan
        and plan.pool_bytes <= _most_worthwhile(facts, facts.add_to_step(plan.seconds))
        and predict_allowed(facts, plan)
    )
    for other in itertools.chain([solution], others):
        least = min(least, other.memory.judged_bytes)
        if other.memory.judged_bytes <= _most_worthwhile(facts, other.added_time):
            return replace(other, costs={**solution.costs, **other.costs}, least=least)
        saved = 1 - other.memory.judged_bytes / max(1, unplanned.judged_bytes)
        more = 100 * other.added_time
        reason = reason or f"save {100 * saved:.0f} % of the memory for {more:.0f} % more time"
    none = make_solution(facts, solution.way, facts.no_plan, is_fastest=True)
    rule = (
        f"{100 * WORTHWHILE_SAVING:.0f} %, and as large a share of memory as of time, is required"
    )
    text = f"the smallest {NOUNS[solution.way]} would {reason}; {rule}"
    return replace(none, costs={**solution.costs, **none.costs}, declined=text, least=least)


def _most_worthwhile(facts: Facts, added: float) -> float:
    """Return the most judged bytes of a plan that is worth this share of the time of a step."""
    return (1 - max(WORTHWHILE_SAVING, added)) * facts.unplanned.judged_bytes


def _or_marks(solution: Solution) -> Solution:
    """Return a solution, or one by marks where they take less memory than the smallest schedule.

    Marks are asked only where that schedule is not worth its time, or takes much more temporary
    space than they do, and only if they may be.
    """
    facts, unplanned = solution.facts, solution.facts.unplanned
    if solution.way == MARKS or solution.interrupted:
        return solution
    least = min(unplanned.judged_bytes, solution.least or solution.memory.judged_bytes)
    worthwhile = _most_worthwhile(facts, 0.0)
    beside = unplanned.judged_bytes - unplanned.pool_bytes  # temporary space, as marks take it
    may_help = facts.lower_bound.nbytes + beside <= min(worthwhile, least)
    more = solution.memory.temporary_bytes - unplanned.temporary_bytes
    takes_more = more > WORTHWHILE_SAVING * unplanned.judged_bytes
    is_found = solution.plan.recomputes and (facts.forced or not takes_more)
    if is_found or not may_help:
        return solution
    searched = search_by(facts, MARKS, for_front=False)
    marked = _judge(choose_from(facts, searched), searched.plans)
    if marked.memory.judged_bytes >= least:
        return solution
    why = "planning by marks, because the smallest schedule takes more memory"
    return replace(marked, warnings=(why, *marked.warnings))


def _keep_own_marks(solution: Solution) -> Solution:
    """Return the user's own marks in place of a solution that takes more memory."""
    facts = solution.facts
    if solution.interrupted or facts.limits.planner == CHEN2016:
        return solution
    if not marks.read_own_mask(facts.graph).any():
        return solution
    facts = Facts(replace(facts.network, recompute=Selection()), facts.limits)
    try:
        by_marks.refuse_marks(facts)
    except MemongerError:  # marks would give other gradients
        return solution
    plan = by_marks.read_own_marks(facts)
    memory = predict_allowed(facts, plan)
    if memory is None or memory.pool_bytes >= solution.memory.pool_bytes:
        return solution
    own = make_solution(facts, MARKS, plan)
    text = "the network keeps its own marks (force_mirroring), which take %s; the plan takes %s"
    largest = solution.memory.pool_bytes
    sizes = format_size(own.memory.pool_bytes, largest), format_size(largest)
    return replace(
        own,
        costs={**solution.costs, **own.costs},
        warnings=(*own.warnings, text % sizes),
    )


def solution_or_none(facts: Facts, way: str, plan: Candidate) -> Solution:
    """Confirm a plan of a Pareto front; no plan where it saves nothing or layouts forbid it."""
    none = make_solution(facts, way, facts.no_plan, is_fastest=True)
    with contextlib.suppress(LayoutMismatch):
        solution = make_solution(facts, way, plan, is_fastest=True)
        if solution.memory.pool_bytes < facts.unplanned.pool_bytes:
            return solution
        none = replace(none, warnings=solution.warnings)
    return none


def make_solution(facts: Facts, way: str, plan: Candidate, is_fastest: bool = False) -> Solution:
    """Make the symbol of a plan, and confirm its memory by one bind.

    ``is_fastest`` tells whether no plan that takes no more memory is faster, as in a Pareto front.
    """
    unplanned, network, warnings = facts.unplanned, facts.network, [*facts.wrong_gradients]
    if plan.schedule is None and not plan.recomputes:
        symbol, memory, added = marks.clear(network.symbol), unplanned, 0.0
    else:
        plan, symbol, memory = BY[way].write_plan(facts, plan)
        log.info("Find best plan with cost=%s MiB", memory.bound)
        is_on_gpu = network.device.device_type == GPU  # then the bind was with fusion
        if plan.schedule is None and fuses(facts.rules.targets) and not is_on_gpu:
            warnings.append(WITHOUT_FUSION)
        added = facts.add_to_step(plan.seconds) if is_fastest else facts.predict_added(memory)
    if unplanned.exact and not memory.inexact and not memory.exact:
        predicted = f"{memory.planned_bytes / MB:.1f} MiB"
        text = f"the memory of this {NOUNS[way]} was predicted as {predicted}, but MXNet plans "
        warnings.append(f"{text}{memory.bound} MiB; the plan reports MXNet's figure")
    return Solution(
        facts=facts,
        way=way,
        plan=plan,
        symbol=symbol,
        memory=memory,
        added_time=added,
        is_fastest=is_fastest,
        costs={"no plan": unplanned.counted_bytes, plan.origin: memory.counted_bytes},
        warnings=tuple(warnings),
    )


def _advise(solution: Solution) -> Solution:
    """Add warnings to a solution; return the network without a plan if the plan saves nothing."""
    facts, memory, unplanned = solution.facts, solution.memory, solution.facts.unplanned
    largest = max(memory.counted_bytes, unplanned.counted_bytes)
    cost = format_size(memory.counted_bytes, largest)
    before = format_size(unplanned.counted_bytes, largest)
    pool, warnings = unplanned.pool_bytes, [*solution.warnings]
    saved = pool - memory.pool_bytes
    useless = saved <= 0
    if solution.interrupted:
        text = f"interrupted: returning the smallest {NOUNS[solution.way]} that was found so far: "
        warnings.append(f"{text}{cost} ({before} without a plan)")
    if facts.limits.planner == CHEN2016:
        useless = False  # the original returns its plan in any case
        if not facts.hints:
            text = "the network has no mirror_stage marks, so the original planner cannot cut it"
            warnings.append(f"{text}; planner='smallest' needs none")
        if saved < 0:
            text = f"this plan needs more memory ({cost}) than the network without it ({before})"
            warnings.append(f"{text}; planner='smallest' never returns such a plan")
    elif saved <= 0:
        of = " that recomputes what recompute= names" if facts.forced else ""
        text = f"no plan{of} saves memory ({before} without a plan), so the network stays as it is"
        warnings.append(f"{text}: {explain_little(facts)}")
    elif saved < SMALL_SAVING * pool:
        text = f"the plan saves {100 * saved / pool:.1f} % of {format_size(pool)}"
        warnings.append(f"{text}: {explain_little(facts)}")
    more = memory.judged_bytes - unplanned.judged_bytes
    if not useless and more > 0 and solution.way == SCHEDULE:
        text = f"this schedule takes turns at {memory.held.spaces} temporary spaces on a CPU, and "
        text += f"with them {format_size(more)} more than no plan"
        warnings.append(f"{text}; put MXNET_CPU_TEMP_COPY=1 before the command, or use marks")
    if saved < SMALL_SAVING * pool and solution.way == MARKS and facts.rules.watches_layouts:
        text = "some operators are kept so that MKLDNN uses the same layouts as without a plan, "
        others = "how='schedule', ctx='gpu' (a plan for GPUs) or MXNET_MKLDNN_ENABLED=0"
        warnings.append(f"{text}and rounds alike; {others} may save more")
    if useless:
        none = make_solution(facts, solution.way, facts.no_plan)
        solution = replace(none, costs=solution.costs, interrupted=solution.interrupted)
    return replace(solution, warnings=tuple(warnings))
