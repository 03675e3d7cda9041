"""Choose a candidate of a search within the limits, and confirm its plan by a bind.

Candidates are sorted by time, or come from a search for least memory. The bytes of a candidate are
a lower bound of its memory (``least_bytes``). Its exact memory is predicted only if that bound is
within the limit. So each choice is the same as if the exact memory of all candidates was known, and
a larger budget never gives a slower plan of the same kind.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from dataclasses import dataclass, replace
from typing import Callable, Iterable, Mapping, Sequence, TypeVar

import numpy as np

from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, RECOMPUTED
from memonger.graph.forward import no_collection
from memonger.graph.operators.recompute import GPU, fuses
from memonger.planners.candidates import (
    Candidate,
    MarkPlan,
    SearchResult,
    by_added_time,
    by_memory,
    pareto_front,
)
from memonger.planners.marks.rules import kept_summary
from memonger.planners.marks.smallest import NO_PLAN
from memonger.schedules.layouts import LayoutMismatch
from memonger.solve.memory import Memory
from memonger.solve.options import AUTO, Lent, Options
from memonger.solve.request import Request
from memonger.solve.selection import Selection
from memonger.solve.strategies import (
    SMALL_PATIENCE,
    Marks,
    Original,
    Schedules,
    Strategy,
    search_pareto_front,
    search_smallest,
)
from memonger.support.errors import MB, BudgetError, MemongerError, format_size
from memonger.support.types import Symbol

log = logging.getLogger("memonger")

WORTHWHILE_SAVING = 0.1  # share of the memory that a plan must save if the call sets no limits
SMALL_SAVING = 0.05  # share of the memory: a warning explains plans that save less
SLACK = 1e-9  # for rounding where work or time is compared
ONE_MORE_PASS = 2.0  # the most forward work of marks, in forward passes

OWN_MARKS = "own marks"  # the origin of a plan that keeps the user's force_mirroring
NO_OPERATORS = "the network has no operators, so the backward pass needs no results"
WITHOUT_FUSION = (
    "the memory of this plan is predicted without pointwise fusion (on by default on a GPU), with "
    "which long chains of pointwise operators may take more; plan with ctx=mx.gpu(0) to measure "
    "it, set MXNET_USE_FUSION=0, or use how='schedule', which runs without fusion"
)
BARE = (
    "a bare plan (rules=False) may abort on a GPU, or give wrong statistics and gradients; plan "
    "with rules=True to train"
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Solution:
    """A candidate that a bind has confirmed, and its symbol."""

    strategy: Strategy
    plan: Candidate
    symbol: Symbol  # the planned network
    memory: Memory
    costs: Mapping[str, int]  # origin of each compared plan -> its pool in bytes, as MXNet counts
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
    declined: str = ""  # why the network is returned without the plan that was found
    least: int | None = None  # the judged bytes of the smallest plan that was found
    is_fastest: bool = False  # whether no plan that takes no more memory is faster


@no_collection()
def solve(request: Request, options: Options) -> Solution:
    """Search for the plan that the options ask for, and confirm it.

    That is the plan of least memory, the fastest within a budget, the smallest within a limit of
    time, or without any of these limits a plan that is worth its time (`_judge`).

    Raises
    ------
    BudgetError
        If no plan that was found is within the limits.
    """
    limits = options.budget, options.slower_than, options.work
    is_free = options.how == AUTO and not options.knee and limits == (None,) * 3
    find = functools.partial(solve_by, judge=_judge if is_free else None)
    within = replace(options, work=ONE_MORE_PASS) if is_free else options
    solution, remarks = plan_by(request, within, find)
    solution = replace(solution, warnings=(*remarks, *solution.warnings))
    if is_free:
        if options.lent is not None or solution.strategy.leaves_alone:
            return solution
        solution = _or_marks(request, solution, find)
    if options.knee or options.budget is not None or options.slower_than is not None:
        return solution
    return _keep_own_marks(request, options, solution)


def _keep_own_marks(request: Request, options: Options, solution: Solution) -> Solution:
    """Return the user's own marks in place of a solution that takes more memory."""
    own = marks.read_own_mask(solution.strategy.graph)
    if not own.any() or solution.interrupted or isinstance(solution.strategy, Original):
        return solution
    try:
        strategy = Marks(replace(request, recompute=Selection()), replace(options, how="marks"))
    except MemongerError:  # marks would give other gradients
        return solution
    plan = Candidate(0, 1.0, MarkPlan(strategy.rules.apply(own)), OWN_MARKS)
    memory = _predict(strategy, plan)
    if memory is None or memory.pool_bytes >= solution.memory.pool_bytes:
        return solution
    kept = _confirm(strategy, plan)
    text = "the network keeps its own marks (force_mirroring), which take %s; the plan takes %s"
    sizes = format_size(kept.memory.pool_bytes), format_size(solution.memory.pool_bytes)
    return replace(
        kept,
        costs={**solution.costs, **kept.costs},
        warnings=(*kept.warnings, text % sizes),
    )


def plan_by(
    request: Request, options: Options, find: Callable[[Strategy], T]
) -> tuple[T, tuple[str, ...]]:
    """Call ``find`` with the strategy that ``how`` names; return what it returns, and remarks.

    With 'auto' that is schedules, or marks if no schedule can hold the network or is within the
    limits. A remark says why it is marks.
    """
    refusal = None
    if options.how in ("schedule", AUTO):
        try:
            return find(Schedules(request, replace(options, how="schedule"))), ()
        except MemongerError as error:
            if options.how != AUTO:
                raise
            refusal = error
    by_marks = Original if options.planner == "chen2016" else Marks
    strategy = by_marks(request, replace(options, how="marks"))
    if not isinstance(refusal, BudgetError):
        why = f"planning by marks, because no schedule can hold this network: {refusal}"
        return find(strategy), () if refusal is None else (why,)
    try:
        return find(strategy), ("planning by marks, because no schedule is within the limits",)
    except BudgetError as error:
        # With a limit of time, the bytes of an error are not those of the smallest plan.
        is_nearer = error.least_bytes < refusal.least_bytes and options.slower_than is None
        raise (error if is_nearer else refusal) from None


def _or_marks(
    request: Request, solution: Solution, find: Callable[[Strategy], Solution]
) -> Solution:
    """Return a solution, or one by marks where they take less memory than the smallest schedule.

    Marks are asked only where that schedule is not worth its time, or takes much more temporary
    space than they do, and only if they may be.
    """
    strategy, unplanned = solution.strategy, solution.strategy.unplanned
    if isinstance(strategy, Marks) or solution.interrupted:
        return solution
    least = min(unplanned.judged_bytes, solution.least or solution.memory.judged_bytes)
    worthwhile = (1 - WORTHWHILE_SAVING) * unplanned.judged_bytes
    beside = unplanned.judged_bytes - unplanned.pool_bytes  # temporary space, as marks take it
    may_help = strategy.lower_bound.nbytes + beside <= min(worthwhile, least)
    more = solution.memory.temporary_bytes - unplanned.temporary_bytes
    takes_more = more > WORTHWHILE_SAVING * unplanned.judged_bytes
    is_found = solution.plan.recomputes and (strategy.forced or not takes_more)
    if is_found or not may_help:
        return solution
    by_marks = find(Marks(request, replace(strategy.options, how="marks")))
    if by_marks.memory.judged_bytes >= least:
        return solution
    why = "planning by marks, because the smallest schedule takes more memory"
    return replace(by_marks, warnings=(why, *by_marks.warnings))


def solve_by(
    strategy: Strategy, judge: Callable[[Strategy, Solution], Solution] | None = None
) -> Solution:
    """Search by one strategy, choose the plan that the options ask for, and confirm it."""
    options = strategy.options
    if options.lent is not None and not strategy.forced:
        solution = _find_fitting(strategy, options.lent)
        if solution is not None:
            return solution
    if strategy.leaves_alone:
        least = format_size(options.leave_below)
        text = f"less than {least}, left alone without a budget, how= or names"
        return replace(_confirm(strategy, strategy.make_no_plan()), declined=text)
    if options.budget is not None:
        return find_fastest(strategy, lambda: search_pareto_front(strategy))
    if options.knee or options.slower_than is not None:
        return _find_within_time(strategy, search_pareto_front(strategy))
    solution = _find_smallest(strategy)
    return judge(strategy, solution) if judge else solution


def _find_smallest(strategy: Strategy) -> Solution:
    """Find the plan of least memory."""
    searched = search_smallest(strategy)
    plan, _ = choose_smallest(strategy, searched.plans)
    solution = _confirm(strategy, plan or searched.plans[0])  # raises LayoutMismatch
    costs = {**searched.costs, **solution.costs}
    return _advise(strategy, replace(solution, costs=costs, interrupted=searched.interrupted))


def find_fastest(strategy: Strategy, search: Callable[[], SearchResult]) -> Solution:
    """Find the fastest plan within the budget; no plan at all if the network fits without one.

    Raises BudgetError if no plan fits, and KeyboardInterrupt if none fits because the user has
    interrupted the search.
    """
    unplanned = strategy.unplanned
    whole = strategy.count_bytes(unplanned)
    if whole <= strategy.find_limit() and not strategy.forced:
        log.info("the network fits the budget without a plan, so nothing is recomputed")
        return _confirm(strategy, strategy.make_no_plan())
    limit = min(strategy.find_limit(), whole)
    searched = search()
    solution = _confirm_first(strategy, searched.plans, limit)
    if solution is None and searched.interrupted:
        raise KeyboardInterrupt
    if solution is None:
        _check_layouts(strategy, searched.plans)
        raise _describe_too_little(strategy, limit, searched.plans)
    if searched.interrupted:
        text = "interrupted: returning the fastest plan within the budget that was found so far"
        solution = replace(solution, interrupted=True, warnings=(*solution.warnings, text))
    most = strategy.options.slower_than
    if most is None or _slowdown(solution.plan) <= most + SLACK:
        return solution
    within, takes = _find_within_time(strategy, searched), strategy.count_bytes(solution.memory)
    raise BudgetError(
        f"no plan was found that takes at most {format_bytes(strategy.find_limit())} and at most "
        f"{most:g} times the time without a plan; the fastest within the memory takes "
        f"{format_bytes(takes)} and {_slowdown(solution.plan):.3f} times the time, the smallest "
        f"within the time takes {format_bytes(strategy.count_bytes(within.memory))} and "
        f"{_slowdown(within.plan):.3f} times the time; give more memory or more time",
        takes,
    )


def _find_within_time(strategy: Strategy, searched: SearchResult) -> Solution:
    """Find the smallest plan within the limit of time, or the knee of the Pareto front.

    Raises BudgetError if no plan is within the limits.
    """
    options, plans = strategy.options, searched.plans
    most = math.inf if options.slower_than is None else options.slower_than + SLACK
    if options.knee:
        near = (plan for plan in _sort_by_knee(plans) if _slowdown(plan) <= most)
        plan = next((plan for plan in near if _predict(strategy, plan)), None)
    else:
        plan, _ = choose_smallest(strategy, (plan for plan in plans if _slowdown(plan) <= most))
    if plan is not None:
        return replace(confirm_or_none(strategy, plan), interrupted=searched.interrupted)
    if searched.interrupted:
        raise KeyboardInterrupt
    _check_layouts(strategy, plans)
    fastest = plans[0]
    limits = {"slower_than": options.slower_than, "work": options.work}
    text = " and ".join(f"{name}={limit:g}" for name, limit in limits.items() if limit is not None)
    raise BudgetError(
        f"no plan was found for {text}; the fastest takes {_slowdown(fastest):.3f} times the time "
        f"and {format_bytes(fastest.pool_bytes)}; give more time, or more work",
        fastest.pool_bytes,
    )


def _sort_by_knee(plans: Sequence[Candidate]) -> Sequence[Candidate]:
    """Sort the Pareto front by the distance from its ideal point, the least memory and least time.

    Both are scaled to [0, 1]. The nearest plan is the knee of the front (Zeleny 1973, "Compromise
    programming").
    """
    front = pareto_front(plans, by_added_time)
    costs = np.array([by_added_time(plan) for plan in front], dtype=np.float64)
    least, most = costs.min(axis=0), costs.max(axis=0)
    distance = np.hypot(*((costs - least) / np.maximum(most - least, 1e-12)).T)
    return [front[k] for k in np.argsort(distance, kind="stable")]


def _slowdown(plan: Candidate) -> float:
    """Return the predicted time of a step with a plan, as a multiple of one without."""
    return 1 + (plan.added_time or 0.0)


def _predict(strategy: Strategy, plan: Candidate) -> Memory | None:
    """Predict the memory of a plan; None if it exceeds the limit of work or changes layouts."""
    most = math.inf if strategy.options.work is None else strategy.options.work + SLACK
    with contextlib.suppress(LayoutMismatch):
        memory = strategy.predict_memory(plan)
        return memory if 1 + memory.recomputed_flops <= most else None
    return None


def _check_layouts(strategy: Strategy, plans: Iterable[Candidate]) -> None:
    """Raise LayoutMismatch if MKLDNN's layouts allow none of these plans."""
    refusal = None
    for plan in plans:
        try:
            strategy.predict_memory(plan)
            return
        except LayoutMismatch as error:
            refusal = error
    if refusal is not None:
        raise refusal


def choose_smallest(
    strategy: Strategy, plans: Iterable[Candidate]
) -> tuple[Candidate, Memory] | tuple[None, None]:
    """Return the plan with the least predicted memory, and that memory; None if none is allowed."""
    best: tuple[Candidate, Memory] | tuple[None, None] = None, None
    for plan in sorted(plans, key=by_memory):
        if best[1] is not None and plan.pool_bytes >= best[1].pool_bytes:
            break
        memory = _predict(strategy, plan)
        if memory is not None and (best[1] is None or memory.pool_bytes < best[1].pool_bytes):
            best = plan, memory
    return best


def _confirm_first(strategy: Strategy, plans: Iterable[Candidate], limit: float) -> Solution | None:
    """Confirm the first plan that takes at most ``limit`` bytes, as the budget counts them."""
    for plan in plans:
        memory = _predict(strategy, plan) if strategy.least_bytes(plan) <= limit else None
        if memory is not None and strategy.count_bytes(memory) <= limit:
            solution = _confirm(strategy, plan)
            if strategy.count_bytes(solution.memory) <= limit:  # MXNet's own count may be larger
                return solution
    return None


def _judge(strategy: Strategy, solution: Solution) -> Solution:
    """Return a plan that is worth its time: this one, one that recomputes nothing, or no plan.

    A plan is worth its time if it saves at least `WORTHWHILE_SAVING` of the memory, and at least as
    large a share of the memory as it adds to the time.
    """
    unplanned = strategy.unplanned
    if solution.interrupted or strategy.forced or solution.memory is unplanned:
        return solution
    reasons, least = [], solution.memory.judged_bytes
    for other in (solution, _confirm_plain(strategy)):
        if other is None:
            continue
        least = min(least, other.memory.judged_bytes)
        saved = 1 - other.memory.judged_bytes / max(1, unplanned.judged_bytes)
        added = other.plan.added_time or 0.0
        if saved >= max(WORTHWHILE_SAVING, added):
            return replace(other, costs={**solution.costs, **other.costs}, least=least)
        reasons.append(f"save {100 * saved:.0f} % of the memory for {100 * added:.0f} % more time")
    none = _confirm(strategy, strategy.make_no_plan())
    rule = (
        f"{100 * WORTHWHILE_SAVING:.0f} %, and as large a share of memory as of time, is required"
    )
    text = f"the smallest {strategy.noun} would {reasons[0]}; {rule}"
    return replace(none, costs={**solution.costs, **none.costs}, declined=text, least=least)


def _confirm_plain(strategy: Strategy) -> Solution | None:
    """Confirm the schedule that recomputes nothing; None where no schedule is possible."""
    if isinstance(strategy, Schedules) and _predict(strategy, strategy.make_plain()):
        return _confirm(strategy, strategy.make_plain())
    return None


def _find_fitting(strategy: Strategy, lent: Lent) -> Solution | None:
    """Find the fastest plan that fits into the memory of another executor; None if none fits.

    A network without a plan can share a pool of MXNet, and a schedule can share an arena.
    """
    if not lent.is_arena:
        fits = strategy.unplanned.pool_bytes <= lent.nbytes
        return _confirm(strategy, strategy.make_no_plan()) if fits else None
    plain = _confirm_plain(strategy)
    if plain is None or not isinstance(strategy, Schedules):
        return None
    arena, *outputs = plain.memory.replay.block_bytes().tolist()
    if arena <= lent.nbytes:
        return plain
    # The search is short, because buckets come by the dozen and need not fit into less memory.
    searched = strategy.search_by_time(strategy.options.patience or SMALL_PATIENCE)
    return _confirm_first(strategy, searched.plans, lent.nbytes + sum(outputs))


def estimate_schedule(request: Request) -> int | None:
    """Estimate the bytes of a schedule with at most the work of marks; None if there is none."""
    try:
        return Schedules(request, Options(how="schedule")).estimate_least(ONE_MORE_PASS)
    except (MemongerError, KeyboardInterrupt):
        return None


def confirm_or_none(strategy: Strategy, plan: Candidate) -> Solution:
    """Confirm a plan; return no plan where it saves nothing or MKLDNN's layouts do not allow it."""
    try:
        is_plan = plan.schedule or plan.recomputes
        solution = _confirm(strategy, plan if is_plan else strategy.make_no_plan())
    except LayoutMismatch:
        return _confirm(strategy, strategy.make_no_plan())
    if solution.memory.count_saved(strategy.unplanned) > 0:
        return solution
    return replace(_confirm(strategy, strategy.make_no_plan()), warnings=solution.warnings)


def _confirm(strategy: Strategy, plan: Candidate) -> Solution:
    """Make the symbol of a plan, and confirm its memory by one bind."""
    unplanned, warnings = strategy.unplanned, [*strategy.wrong_gradients]
    if plan.schedule is None and not plan.recomputes:
        symbol, memory = marks.clear(strategy.request.symbol), unplanned
    else:
        plan, symbol, memory = strategy.bind_plan(plan)
        log.info("Find best plan with cost=%s MiB", memory.bound)
        request = strategy.request
        is_on_gpu = request.device.device_type == GPU  # then the bind was with fusion
        if plan.schedule is None and fuses(request.targets) and not is_on_gpu:
            warnings.append(WITHOUT_FUSION)
    if unplanned.exact and not memory.inexact and not memory.exact:
        replayed = memory.replay.pool_bytes
        text = f"the memory of this {strategy.noun} was predicted as {replayed / MB:.1f} MiB, but "
        warnings.append(text + f"MXNet plans {memory.bound} MiB; the plan reports MXNet's figure")
    costs = {"no plan": unplanned.counted_bytes, plan.origin: memory.counted_bytes}
    is_fastest = plan.added_time is not None
    if not is_fastest:
        plan = replace(plan, added_time=strategy.predict_added_time(memory))
    return Solution(strategy, plan, symbol, memory, costs, tuple(warnings), is_fastest=is_fastest)


def _advise(strategy: Strategy, solution: Solution) -> Solution:
    """Add warnings to a solution; return the network without a plan if the plan saves nothing."""
    memory, unplanned = solution.memory, strategy.unplanned
    cost, before = format_size(memory.counted_bytes), format_size(unplanned.counted_bytes)
    saved, warnings = memory.count_saved(unplanned), [*solution.warnings]
    pool, useless = unplanned.pool_bytes, saved <= 0
    if not strategy.options.rules:
        warnings.append(BARE)
    if solution.interrupted:
        text = f"interrupted: returning the smallest {strategy.noun} that was found so far: {cost}"
        warnings.append(f"{text} ({before} without a plan)")
    if isinstance(strategy, Original):
        useless = False  # the original returns its plan in any case
        if not strategy.hints:
            text = "the network has no mirror_stage marks, so the original planner cannot cut it"
            warnings.append(f"{text}; planner='smallest' needs none")
        if saved < 0:
            text = f"this plan needs more memory ({cost}) than the network without it ({before})"
            warnings.append(f"{text}; planner='smallest' never returns such a plan")
    elif saved <= 0:
        of = " that recomputes what recompute= names" if strategy.forced else ""
        text = f"no plan{of} saves memory ({before} without a plan), so the network stays as it is"
        warnings.append(f"{text}: {_explain_little(strategy)}")
    elif saved < SMALL_SAVING * pool:
        text = f"the plan saves {100 * saved / pool:.1f} % of {format_size(pool)}"
        warnings.append(f"{text}: {_explain_little(strategy)}")
    if saved < SMALL_SAVING * pool and strategy.noun == "plan" and strategy.rules.watches_layouts:
        text = "some operators are kept so that MKLDNN uses the same layouts as without a plan, "
        others = "how='schedule', ctx='gpu' (a plan for GPUs) or MXNET_MKLDNN_ENABLED=0"
        warnings.append(f"{text}and rounds alike; {others} may save more")
    if useless:
        none = _confirm(strategy, replace(strategy.make_no_plan(), added_time=None))
        solution = replace(none, costs=solution.costs, interrupted=solution.interrupted)
    return replace(solution, warnings=tuple(warnings))


def describe_slowest(memory: Memory) -> str:
    """Describe the most work that is recomputed in one run, with no gradient in between."""
    places, nodes, flops = memory.find_places(RECOMPUTED), memory.recomputed, memory.node_flops
    if not len(places):
        return ""
    phases = memory.replay.training.phases[memory.replay.order]
    gradients = np.cumsum(phases == BACKWARD)[places]  # that have run before
    runs = np.split(nodes, np.flatnonzero(np.diff(gradients)) + 1)
    run = max(runs[::-1], key=lambda run: (flops[run].sum(), len(run)))
    share = f"{100 * flops[run].sum() / memory.forward_flops:.0f} % of the forward pass"
    first, last = (memory.graph.nodes[memory.graph.user_node(k)].name for k in run[[0, -1]])
    return f"{first!r} to {last!r}: {len(run)} operators, {share}, are recomputed together"


def describe_unmet(strategy: Strategy, plan: Candidate) -> dict[str, str]:
    """Return why operators that ``recompute=`` names are not recomputed: name -> reason."""
    nodes, until = strategy.graph.nodes, strategy.request.until
    heads, again = {x for x, _ in strategy.graph.heads}, plan.recomputed(len(nodes))
    rules, kept = strategy.rules.reasons, {*strategy.request.keep.nodes}
    reasons = {}
    for x in strategy.request.recompute.nodes:
        if again[x]:
            continue
        rule = strategy.graph.why_kept(x) or rules.get(x)
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


def _explain_little(strategy: Strategy) -> str:
    """Return why no plan of a network saves much memory."""
    rules, until, least = (
        strategy.rules,
        strategy.request.until,
        strategy.lower_bound,
    )
    nodes = strategy.graph.nodes
    ruled = kept_summary((nodes[i].op, why) for i, why in rules.reasons.items())
    if not strategy.graph.operators:
        return NO_OPERATORS
    if not rules.allowed.any() and until is not None:
        return f"no operator before {nodes[until].name!r} (until=) may be recomputed"
    if not rules.allowed.any():
        return f"every operator must be kept ({ruled})"
    text = f"the peak is {format_size(strategy.unplanned.peak_bytes)}; "
    if ruled and least.nbytes > least.own_bytes:
        over = format_size(least.nbytes - least.own_bytes)
        text += f"{over} must not be recomputed ({ruled}), and "
    return text + f"{least.name(nodes)} alone needs {format_size(least.own_bytes)} at once"


def format_bytes(nbytes: float) -> str:
    """Return bytes for a message, to the byte."""
    return f"{nbytes:.0f} bytes ({format_size(nbytes)})"


def _describe_too_little(strategy: Strategy, limit: int, plans: Sequence[Candidate]) -> BudgetError:
    """Make the error for a limit that no plan fits: what the smallest needs, and where it peaks."""
    work, least, unplanned = (
        strategy.options.work,
        strategy.lower_bound,
        strategy.unplanned,
    )
    _, smallest = choose_smallest(strategy, plans)
    memory = min((m for m in (smallest, unplanned) if m is not None), key=strategy.count_bytes)
    nbytes, pool = strategy.count_bytes(memory), memory.pool_bytes
    of, more = ("", "") if work is None else (f" with work={work:g}", " or more work")
    beside = strategy.options.budget.beside if strategy.options.budget else ""
    text = f"no plan{of} was found that needs at most {format_bytes(limit)}{beside}; the smallest "
    text += f"needs {format_bytes(nbytes)}; give more memory{more}."
    most = int(memory.live[memory.peak])
    # A schedule may keep results in the arrays of gradients, outside of the pool.
    if 0 < most <= pool:
        text += f" Its peak of {format_size(most)} is in {memory.running}."
    if least.operator >= 0 and least.nbytes <= pool:
        text += f" Every plan needs at least {format_size(least.nbytes)} at once, for "
        text += f"{least.name(strategy.graph.nodes)}."
    if nbytes != pool:
        text += f" {format_bytes(nbytes - pool)} of it are parameters, gradients, inputs, the "
        text += "optimizer's state and arrays that operators hold."
    return BudgetError(text, nbytes)
