"""Choose a candidate of a search within the limits, and confirm its plan by a bind.

Candidates are sorted by time, or come from a search for least memory. The bytes of a candidate are
a lower bound of its memory (``least_bytes``). Its exact memory is predicted only if that bound is
within the limit. So each choice is the same as if the exact memory of all candidates was known, and
a larger budget never gives a slower plan of the same kind.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Iterable, Mapping, Sequence

import numpy as np

from memonger.costs.usage import Usage
from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, RECOMPUTED
from memonger.graph.forward import no_collection
from memonger.graph.operators.recompute import GPU, fuses
from memonger.planners.candidates import Candidate, SearchResult, by_seconds, pareto_front
from memonger.planners.marks.smallest import NO_PLAN
from memonger.schedules.layouts import LayoutMismatch
from memonger.solve import by_marks, by_schedules
from memonger.solve.describe import describe_too_little, explain_little, format_bytes
from memonger.solve.facts import SMALL_PATIENCE, Facts
from memonger.solve.limits import AUTO, MARKS, ORIGINAL, SCHEDULE, Lent, Limits
from memonger.solve.network import Network
from memonger.solve.selection import Selection
from memonger.support.errors import MB, BudgetError, MemongerError, format_size
from memonger.support.types import Symbol

log = logging.getLogger("memonger")

WORTHWHILE_SAVING = 0.1  # share of the memory that a plan must save if the call sets no limits
#: Way -> the functions that search for its plans, predict their memory and write them.
BY = {SCHEDULE: by_schedules, MARKS: by_marks}
SMALL_SAVING = 0.05  # share of the memory: a warning explains plans that save less
SLACK = 1e-9  # for rounding where work or time is compared
ONE_MORE_PASS = 2.0  # the most forward work of marks, in forward passes

WITHOUT_FUSION = (
    "the memory of this plan is predicted without pointwise fusion (on by default on a GPU), with "
    "which long chains of pointwise operators may take more; plan with ctx=mx.gpu(0) to measure "
    "it, set MXNET_USE_FUSION=0, or use how='schedule', which runs without fusion"
)
BARE = (
    "a bare plan (rules=False) may abort on a GPU, or give wrong statistics and gradients; plan "
    "with rules=True to train"
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


@no_collection()
def solve(network: Network, limits: Limits) -> Solution:
    """Search for the plan that the limits ask for, and confirm it.

    That is the plan of least memory, the fastest within a budget, the smallest within a limit of
    time, or without any of these limits a plan that is worth its time (`_judge`).

    Raises
    ------
    BudgetError
        If no plan that was found is within the limits.
    """
    is_free = limits.is_free
    facts = Facts(network, replace(limits, work=ONE_MORE_PASS) if is_free else limits)
    ways, refusal = list_ways(facts)
    left = solution = _leave(facts, ways[0])
    for way in ways if left is None else ():
        try:
            solution = choose(facts, way, search(facts, way))
            break
        except (BudgetError, LayoutMismatch) as error:
            refusal = choose_refusal(facts, refusal, error)
    if solution is None:
        assert refusal is not None
        raise refusal
    if is_free and left is None:
        solution = _judge(solution)
    if refusal is not None:
        solution = replace(solution, warnings=(explain_marks(refusal), *solution.warnings))
    if left is not None or limits.lent is not None or limits.bounds_plans:
        return solution
    return _keep_own_marks(_or_marks(solution) if is_free else solution, limits)


def _leave(facts: Facts, way: str) -> Solution | None:
    """Return a solution where nothing needs to be searched for; None elsewhere."""
    limits = facts.limits
    if limits.lent is not None and not facts.forced:
        solution = _fit_into(facts, way, limits.lent)
        if solution is not None:
            return solution
    if facts.unplanned.pool_bytes < limits.leave_below:
        least = format_size(limits.leave_below)
        text = f"less than {least}, left alone without a budget, how= or names"
        return replace(confirm(facts, way, facts.no_plan, is_fastest=True), declined=text)
    return None if limits.budget is None else fit_unplanned(facts, way)


def fit_unplanned(facts: Facts, way: str) -> Solution | None:
    """Confirm the network without a plan if it fits the budget, and nothing must be recomputed."""
    if facts.forced or facts.count_bytes(facts.unplanned) > facts.find_limit():
        return None
    log.info("the network fits the budget without a plan, so nothing is recomputed")
    return confirm(facts, way, facts.no_plan, is_fastest=True)


def list_ways(facts: Facts) -> tuple[list[str], MemongerError | None]:
    """List the ways in which ``how`` allows to plan a network, the first to be tried first.

    With 'auto' that is by schedules, and by marks if no schedule is within the limits; or by marks
    alone. What speaks against schedules is then returned too.
    """
    how = facts.limits.how
    why = "" if how == MARKS else by_schedules.why_no_schedule(facts)
    refusal = MemongerError(why) if why else None
    if refusal is not None and how == SCHEDULE:
        raise refusal
    ways = {SCHEDULE: [SCHEDULE], MARKS: [MARKS], AUTO: [SCHEDULE, MARKS]}
    return ways[MARKS if refusal else how], refusal


def choose_refusal(
    facts: Facts, before: MemongerError | None, error: MemongerError
) -> MemongerError:
    """Choose which error to raise if both ways fail: that of the plan nearest to the budget."""
    if not isinstance(before, BudgetError):
        return error
    # With a limit of time, the bytes of an error are not those of the smallest plan.
    is_nearer = isinstance(error, BudgetError) and error.least_bytes < before.least_bytes
    return error if is_nearer and facts.limits.slower_than is None else before


def explain_marks(refusal: MemongerError) -> str:
    """Write the warning that it is marks, because this speaks against schedules."""
    is_budget = isinstance(refusal, BudgetError)
    why = "is within the limits" if is_budget else f"can hold this network: {refusal}"
    return f"planning by marks, because no schedule {why}"


def search(facts: Facts, way: str) -> SearchResult:
    """Search for the Pareto-optimal plans if the limits bound memory or time, else the smallest."""
    by = BY[way]
    return by.search_front(facts) if facts.limits.bounds_plans else by.search_smallest(facts)


def predict_memory(facts: Facts, plan: Candidate) -> Usage:
    """Predict the memory of a plan; raises LayoutMismatch if MKLDNN does not allow it."""
    by = by_marks if plan.schedule is None else by_schedules
    return by.predict_memory(facts, plan)


def choose(facts: Facts, way: str, searched: SearchResult) -> Solution:
    """Choose the plan that the limits ask for, and confirm it.

    Raises
    ------
    BudgetError, LayoutMismatch
        If no plan is within the limits, or is allowed by MKLDNN's layouts.
    """
    if facts.limits.budget is not None:
        return choose_fastest(facts, way, searched)
    if facts.limits.bounds_plans:
        return _choose_within_time(facts, way, searched)
    plan, _ = choose_smallest(facts, searched.plans)
    solution = confirm(facts, way, plan or searched.plans[0])  # raises LayoutMismatch
    costs = {**searched.costs, **solution.costs}
    return _advise(replace(solution, costs=costs, interrupted=searched.interrupted))


def choose_fastest(
    facts: Facts, way: str, searched: SearchResult, others: Sequence[Candidate] = ()
) -> Solution:
    """Choose the fastest plan within the budget, and confirm it.

    ``others`` are taken where no plan of the search fits. Their bytes need not be known, because
    they were found for other shapes.

    Raises BudgetError if no plan fits, and KeyboardInterrupt if none fits because the user has
    interrupted the search.
    """
    limit = min(facts.find_limit(), facts.count_bytes(facts.unplanned))
    near = (plan for plan in searched.plans if facts.least_bytes(plan) <= limit)
    fitting = _confirm_first(facts, way, near, limit, searched.is_front)
    solution = fitting or _confirm_first(facts, way, others, limit)
    if solution is None and searched.interrupted:
        raise KeyboardInterrupt
    if solution is None:
        _check_layouts(facts, [*searched.plans, *others])
        _, found = choose_smallest(facts, searched.plans)
        known = (found, facts.unplanned, *(_predict(facts, plan) for plan in others))
        least = min((m for m in known if m is not None), key=facts.count_bytes)
        raise describe_too_little(facts, limit, least)
    if searched.interrupted:
        text = "interrupted: returning the fastest plan within the budget that was found so far"
        solution = replace(solution, interrupted=True, warnings=(*solution.warnings, text))
    most = facts.limits.slower_than
    if most is None or 1 + solution.added_time <= most + SLACK:
        return solution
    within, takes = _choose_within_time(facts, way, searched), facts.count_bytes(solution.memory)
    raise BudgetError(
        f"no plan was found that takes at most {format_bytes(facts.find_limit())} and at most "
        f"{most:g} times the time without a plan; the fastest within the memory takes "
        f"{format_bytes(takes)} and {1 + solution.added_time:.3f} times the time, the smallest "
        f"within the time takes {format_bytes(facts.count_bytes(within.memory))} and "
        f"{1 + within.added_time:.3f} times the time; give more memory or more time",
        takes,
    )


def _choose_within_time(facts: Facts, way: str, searched: SearchResult) -> Solution:
    """Choose the smallest plan within the limit of time, or the knee of the Pareto front.

    Raises BudgetError if no plan is within the limits.
    """
    limits, plans = facts.limits, searched.plans
    most = math.inf if limits.slower_than is None else limits.slower_than + SLACK
    if limits.knee:
        near = (plan for plan in _sort_by_knee(plans) if _slowdown(facts, plan) <= most)
        plan = next((plan for plan in near if _predict(facts, plan)), None)
    else:
        within = (plan for plan in plans if _slowdown(facts, plan) <= most)
        plan, _ = choose_smallest(facts, within)
    if plan is not None:
        return replace(confirm_or_none(facts, way, plan), interrupted=searched.interrupted)
    if searched.interrupted:
        raise KeyboardInterrupt
    _check_layouts(facts, plans)
    fastest = plans[0]
    bounds = {"slower_than": limits.slower_than, "work": limits.work}
    text = " and ".join(f"{name}={bound:g}" for name, bound in bounds.items() if bound is not None)
    raise BudgetError(
        f"no plan was found for {text}; the fastest takes {_slowdown(facts, fastest):.3f} times "
        f"the time and {format_bytes(fastest.pool_bytes)}; give more time, or more work",
        fastest.pool_bytes,
    )


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


def _predict(facts: Facts, plan: Candidate) -> Usage | None:
    """Predict the memory of a plan; None if it exceeds the limit of work or changes layouts."""
    most = math.inf if facts.limits.work is None else facts.limits.work + SLACK
    with contextlib.suppress(LayoutMismatch):
        memory = predict_memory(facts, plan)
        return memory if 1 + memory.recomputed_flops <= most else None
    return None


def _check_layouts(facts: Facts, plans: Iterable[Candidate]) -> None:
    """Raise LayoutMismatch if MKLDNN's layouts allow none of these plans."""
    refusal = None
    for plan in plans:
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
        memory = _predict(facts, plan)
        if memory is not None and (best[1] is None or memory.pool_bytes < best[1].pool_bytes):
            best = plan, memory
    return best


def _confirm_first(
    facts: Facts, way: str, plans: Iterable[Candidate], limit: float, is_fastest: bool = False
) -> Solution | None:
    """Confirm the first plan that takes at most ``limit`` bytes, as the budget counts them."""
    for plan in plans:
        memory = _predict(facts, plan)
        if memory is not None and facts.count_bytes(memory) <= limit:
            solution = confirm(facts, way, plan, is_fastest)
            if facts.count_bytes(solution.memory) <= limit:  # MXNet's own count may be larger
                return solution
    return None


def _judge(solution: Solution) -> Solution:
    """Return a plan that is worth its time: this one, one that recomputes nothing, or no plan.

    A plan is worth its time if it saves at least `WORTHWHILE_SAVING` of the memory, and at least as
    large a share of the memory as it adds to the time.
    """
    facts, unplanned = solution.facts, solution.facts.unplanned
    if solution.interrupted or facts.forced or solution.memory is unplanned:
        return solution
    reasons, least = [], solution.memory.judged_bytes
    plain = _confirm_plain(facts) if solution.way == SCHEDULE else None
    for other in (solution, plain):
        if other is None:
            continue
        least = min(least, other.memory.judged_bytes)
        saved = 1 - other.memory.judged_bytes / max(1, unplanned.judged_bytes)
        added = other.added_time
        if saved >= max(WORTHWHILE_SAVING, added):
            return replace(other, costs={**solution.costs, **other.costs}, least=least)
        reasons.append(f"save {100 * saved:.0f} % of the memory for {100 * added:.0f} % more time")
    none = confirm(facts, solution.way, facts.no_plan, is_fastest=True)
    rule = (
        f"{100 * WORTHWHILE_SAVING:.0f} %, and as large a share of memory as of time, is required"
    )
    text = f"the smallest {_noun(solution)} would {reasons[0]}; {rule}"
    return replace(none, costs={**solution.costs, **none.costs}, declined=text, least=least)


def _noun(solution: Solution) -> str:
    return "schedule" if solution.way == SCHEDULE else "plan"


def _or_marks(solution: Solution) -> Solution:
    """Return a solution, or one by marks where they take less memory than the smallest schedule.

    Marks are asked only where that schedule is not worth its time, or takes much more temporary
    space than they do, and only if they may be.
    """
    facts, unplanned = solution.facts, solution.facts.unplanned
    if solution.way == MARKS or solution.interrupted:
        return solution
    least = min(unplanned.judged_bytes, solution.least or solution.memory.judged_bytes)
    worthwhile = (1 - WORTHWHILE_SAVING) * unplanned.judged_bytes
    beside = unplanned.judged_bytes - unplanned.pool_bytes  # temporary space, as marks take it
    may_help = facts.lower_bound.nbytes + beside <= min(worthwhile, least)
    more = solution.memory.temporary_bytes - unplanned.temporary_bytes
    takes_more = more > WORTHWHILE_SAVING * unplanned.judged_bytes
    is_found = solution.plan.recomputes and (facts.forced or not takes_more)
    if is_found or not may_help:
        return solution
    marked = _judge(choose(facts, MARKS, by_marks.search_smallest(facts)))
    if marked.memory.judged_bytes >= least:
        return solution
    why = "planning by marks, because the smallest schedule takes more memory"
    return replace(marked, warnings=(why, *marked.warnings))


def _keep_own_marks(solution: Solution, limits: Limits) -> Solution:
    """Return the user's own marks in place of a solution that takes more memory."""
    network = solution.facts.network
    if solution.interrupted or limits.planner == ORIGINAL:
        return solution
    if not marks.read_own_mask(solution.facts.graph).any():
        return solution
    facts = Facts(replace(network, recompute=Selection()), limits)
    try:
        by_marks.refuse_marks(facts)
    except MemongerError:  # marks would give other gradients
        return solution
    plan = by_marks.read_own_marks(facts)
    memory = _predict(facts, plan)
    if memory is None or memory.pool_bytes >= solution.memory.pool_bytes:
        return solution
    kept = confirm(facts, MARKS, plan)
    text = "the network keeps its own marks (force_mirroring), which take %s; the plan takes %s"
    largest = solution.memory.pool_bytes
    sizes = format_size(kept.memory.pool_bytes, largest), format_size(largest)
    return replace(
        kept,
        costs={**solution.costs, **kept.costs},
        warnings=(*kept.warnings, text % sizes),
    )


def _confirm_plain(facts: Facts) -> Solution | None:
    """Confirm the schedule that recomputes nothing; None where MKLDNN's layouts do not allow it."""
    plan = by_schedules.make_plain(facts)
    return confirm(facts, SCHEDULE, plan, is_fastest=True) if _predict(facts, plan) else None


def _fit_into(facts: Facts, way: str, lent: Lent) -> Solution | None:
    """Find the fastest plan that fits into the memory of another executor; None if none fits.

    A network without a plan can share a pool of MXNet, and a schedule can share an arena.
    """
    if not lent.is_arena:
        fits = facts.unplanned.pool_bytes <= lent.nbytes
        return confirm(facts, way, facts.no_plan, is_fastest=True) if fits else None
    plain = _confirm_plain(facts) if way == SCHEDULE else None
    if plain is None:
        return None
    arena, *outputs = plain.memory.allocated.tolist()
    if arena <= lent.nbytes:
        return plain
    # The search is short, because buckets come by the dozen and need not fit into less memory.
    searched = by_schedules.search_by_time(facts, facts.limits.patience or SMALL_PATIENCE)
    limit = lent.nbytes + sum(outputs)
    near = (plan for plan in searched.plans if facts.least_bytes(plan) <= limit)
    return _confirm_first(facts, way, near, limit, is_fastest=True)


def confirm_or_none(facts: Facts, way: str, plan: Candidate) -> Solution:
    """Confirm a plan of a Pareto front; no plan where it saves nothing or layouts forbid it."""
    none = confirm(facts, way, facts.no_plan, is_fastest=True)
    if plan.schedule is None and not plan.recomputes:
        return none
    try:
        solution = confirm(facts, way, plan, is_fastest=True)
    except LayoutMismatch:
        return none
    if solution.memory.pool_bytes < facts.unplanned.pool_bytes:
        return solution
    return replace(none, warnings=solution.warnings)


def confirm(facts: Facts, way: str, plan: Candidate, is_fastest: bool = False) -> Solution:
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
        if plan.schedule is None and fuses(network.targets) and not is_on_gpu:
            warnings.append(WITHOUT_FUSION)
        added = facts.add_to_step(plan.seconds) if is_fastest else facts.predict_added(memory)
    solution = Solution(
        facts=facts,
        way=way,
        plan=plan,
        symbol=symbol,
        memory=memory,
        added_time=added,
        is_fastest=is_fastest,
        costs={"no plan": unplanned.counted_bytes, plan.origin: memory.counted_bytes},
    )
    if unplanned.exact and not memory.inexact and not memory.exact:
        planned = memory.planned_bytes
        text = f"the memory of this {_noun(solution)} was predicted as {planned / MB:.1f} MiB, but "
        warnings.append(text + f"MXNet plans {memory.bound} MiB; the plan reports MXNet's figure")
    return replace(solution, warnings=tuple(warnings))


def _advise(solution: Solution) -> Solution:
    """Add warnings to a solution; return the network without a plan if the plan saves nothing."""
    facts, memory, unplanned = solution.facts, solution.memory, solution.facts.unplanned
    largest = max(memory.counted_bytes, unplanned.counted_bytes)
    cost = format_size(memory.counted_bytes, largest)
    before = format_size(unplanned.counted_bytes, largest)
    pool, warnings = unplanned.pool_bytes, [*solution.warnings]
    saved = pool - memory.pool_bytes
    useless = saved <= 0
    if not facts.limits.rules:
        warnings.append(BARE)
    if solution.interrupted:
        text = (
            f"interrupted: returning the smallest {_noun(solution)} that was found so far: {cost}"
        )
        warnings.append(f"{text} ({before} without a plan)")
    if facts.limits.planner == ORIGINAL:
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
        none = confirm(facts, solution.way, facts.no_plan)
        solution = replace(none, costs=solution.costs, interrupted=solution.interrupted)
    return replace(solution, warnings=tuple(warnings))


def describe_slowest(memory: Usage) -> str:
    """Describe the most work that is recomputed in one run, with no gradient in between."""
    places, nodes, flops = memory.find_places(RECOMPUTED), memory.recomputed, memory.node_flops
    if not len(places):
        return ""
    phases = memory.step.phases[memory.order]
    gradients = np.cumsum(phases == BACKWARD)[places]  # that have run before
    runs = np.split(nodes, np.flatnonzero(np.diff(gradients)) + 1)
    run = max(runs[::-1], key=lambda run: (flops[run].sum(), len(run)))
    share = f"{100 * flops[run].sum() / memory.forward_flops:.0f} % of the forward pass"
    first, last = (memory.graph.nodes[memory.graph.user_node(k)].name for k in run[[0, -1]])
    return f"{first!r} to {last!r}: {len(run)} operators, {share}, are recomputed together"


def describe_unmet(facts: Facts, plan: Candidate) -> dict[str, str]:
    """Return why operators that ``recompute=`` names are not recomputed: name -> reason."""
    network, graph = facts.network, facts.graph
    if not network.recompute.nodes:
        return {}
    nodes, until = graph.nodes, network.until
    heads, again = {x for x, _ in graph.heads}, plan.recomputed(len(nodes))
    kept, reasons = {*network.keep.nodes}, {}
    for x in network.recompute.nodes:
        if again[x]:
            continue
        rule = graph.why_kept(x) or facts.rules.reasons.get(x)
        if x in kept:
            reason = "keep= names it too"
        elif until is not None and x >= until:
            reason = f"it does not come before {nodes[until].name!r}"
        elif x in heads:
            reason = "it is an output of the network"
        elif rule and not (plan.schedule and nodes[x].op == "Dropout"):
            reason = rule
        elif plan.origin == NO_PLAN:
            reason = "no plan that recomputes it saves memory"
        elif plan.schedule:
            reason = "no gradient reads it, so it is not saved"
        else:
            reason = "the backward pass does not read it, or must read the original"
        reasons[nodes[x].name] = reason
    return dict(sorted(reasons.items()))
