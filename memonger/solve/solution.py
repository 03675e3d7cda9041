"""From a search to a solution: choose within the budget, and let MXNet confirm the plan."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Callable, Iterable, Mapping, Sequence, Tuple

import numpy as np

from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, RECOMPUTED
from memonger.graph.forward import no_collection
from memonger.planners.candidates import Candidate, Searched, not_dominated
from memonger.planners.marks.rules import kept_summary
from memonger.schedules.layouts import Refused
from memonger.solve.memory import Memory
from memonger.solve.options import Options
from memonger.solve.request import Request
from memonger.solve.ways import (
    RUNGS,
    Original,
    Schedules,
    Way,
    front,
    remembered,
    ways_of,
)
from memonger.support.errors import MB, BudgetError, in_words
from memonger.support.versions import VERSION

log = logging.getLogger("memonger")

LITTLE = 0.05  # of the memory: a plan that saves less is explained
NEARLY = 1.1  # times a budget: what is estimated to take more is not looked at
SLACK = 1e-9  # for rounding where work is compared
NEVER = 2**62  # the limit with which a plan is taken that never is

NO_OPERATORS = "the network has no operators, so nothing is held for a backward pass"
BARE = "a bare plan (rules=False) may abort on a GPU, or give wrong statistics and gradients"

Plans = Sequence[Tuple[Way, Candidate]]  # the fastest first


@dataclass(frozen=True, eq=False)
class Solution:
    """A plan that MXNet has bound."""

    way: Way
    plan: Candidate
    symbol: Any  # the planned network
    memory: Memory
    costs: Mapping[str, int]  # of the plans that were compared, as MXNet counts bytes
    warnings: tuple[str, ...] = ()
    interrupted: bool = False


@no_collection()
def solve(request: Request, options: Options) -> Solution:
    """Search for the smallest plan, or for the fastest within the budget, and confirm it."""
    ways = ways_of(request, options)
    first = next(ways)
    if options.budget is None:
        return smallest(first)
    return fastest(first, lambda: front_of(chain([first], ways)))


def smallest(way: Way) -> Solution:
    """Search for the plan of least memory."""
    found = remembered(way, "smallest", way.options)
    solution = _first(way, found)
    is_other = solution.plan is not found.plans[0]
    if isinstance(way, Schedules) and is_other and not found.interrupted:
        # What is left of this search may be more than what less work takes.
        most = way.options.work or math.inf
        for work in (each for each in RUNGS if each < most):
            with contextlib.suppress(Refused):
                other = _first(way, way.least(work))
                solution = min(solution, other, key=lambda each: each.memory.device_bytes)
    costs = {**found.costs, **solution.costs}
    return _advised(way, replace(solution, costs=costs, interrupted=found.interrupted))


def _first(way: Way, found: Searched) -> Solution:
    """Confirm the first plan that can be carried out and takes no more of the device than none.

    The first of all where each takes more; Refused where none can be carried out.
    """
    solution, refused = None, None
    for plan in found.plans:
        try:
            tried = _confirm(way, plan, found.unfused)
        except Refused as error:
            refused = refused or error
            continue
        solution = solution or tried
        if not _holds_more(tried.memory, way):
            return tried
    if solution is None and refused is not None:
        raise refused
    assert solution is not None
    return solution


def fastest(way: Way, search: Callable[[], tuple[Plans, bool]]) -> Solution:
    """Find the fastest plan within the budget: none, or one of those that are searched for."""
    if way.taken(way.unplanned) <= way.limit:
        log.info("the budget allows the network as it is, so nothing is recomputed")
        return _confirm(way, way.no_plan)
    plans, interrupted = search()
    try:
        return _within(plans, interrupted)
    except BudgetError:
        by_schedules = next((way for way, _ in plans if isinstance(way, Schedules)), None)
        if by_schedules is None:
            raise
        found = by_schedules.timed(by_schedules.least(by_schedules.options.work))
        return _within([*plans, (by_schedules, found.plans[0])], found.interrupted)


def front_of(ways: Iterable[Way]) -> tuple[Plans, bool]:
    """Search by each way for the plans that no other beats; whether the user ended the search."""
    plans: list[tuple[Way, Candidate]] = []
    interrupted = False
    try:
        for way in ways:
            found = front(way)
            plans += [(way, plan) for plan in found.plans]
            interrupted = found.interrupted
            if interrupted:
                break
    except KeyboardInterrupt:
        if not plans:
            raise
        interrupted = True
    return not_dominated(plans, lambda p: (p[1].added_time or 0.0, p[1].pool_bytes)), interrupted


def confirmed(way: Way, plan: Candidate) -> Solution:
    """Confirm one plan; the network as it is where that saves nothing, or cannot be carried out."""
    try:
        found = _confirm(way, plan if plan.schedule or plan.recomputes else way.no_plan)
    except Refused:
        return _confirm(way, way.no_plan)
    if found.memory.saved(way.unplanned) > 0 and not _larger(way, found.memory):
        return found
    return replace(_confirm(way, way.no_plan), warnings=found.warnings)


def _within(plans: Plans, interrupted: bool) -> Solution:
    """Confirm the first plan that keeps the limits: with more memory the same, or one before it.

    Raises BudgetError if none does; KeyboardInterrupt if they are all that the user waited for.
    """
    first = plans[0][0]
    limit, unplanned = first.limit, first.unplanned
    whole = first.taken(unplanned)
    beside, last = whole - unplanned.pool_bytes, plans[-1][1]
    of_pool = first.options.budget is not None and first.options.budget.of == "pool"
    predicted: dict[int, Memory] = {}  # by the number of a plan

    def needed(k: int) -> int:
        """Return the least limit with which a plan is taken."""
        way, plan = plans[k]
        try:
            predicted[k] = predicted.get(k) or way.memory(plan)
        except Refused:
            return NEVER
        if _larger(way, predicted[k]):
            return NEVER
        return max(way.taken(predicted[k]), 0 if plan is last else asked(plan))

    def asked(plan: Candidate) -> int:
        """Return the limit from which on a plan is looked at."""
        exact = plan.schedule is not None and of_pool  # no arena is smaller than what is alive
        return math.ceil((plan.pool_bytes + beside) / (1 if exact else NEARLY))

    for k, (way, plan) in enumerate(plans):
        if plan is not last and asked(plan) > limit:
            continue
        if needed(k) > limit or not _within_work(way, predicted[k]):
            continue
        found = _confirm(way, plan)
        if way.taken(found.memory) <= limit:
            if interrupted:
                text = "interrupted: this is the fastest plan that fits of those found so far"
                found = replace(found, interrupted=True, warnings=(*found.warnings, text))
            return found
        predicted[k] = found.memory
    if interrupted:
        raise KeyboardInterrupt
    least, of, memory = whole, first, unplanned
    bounds = [0 if plan is last else asked(plan) for _, plan in plans]
    for k in sorted(range(len(plans)), key=bounds.__getitem__):
        way, plan = plans[k]
        if bounds[k] >= least:
            break  # those that follow need more
        if needed(k) < least and _within_work(way, predicted[k]):
            least, of, memory = needed(k), way, predicted[k]
    raise BudgetError(_too_little(of, limit, memory, least), least)


def _holds_more(memory: Memory, way: Way) -> bool:
    """Tell whether a plan takes more of a CPU than no plan, for what operators of MKLDNN hold."""
    return memory.held.in_blocks and memory.device_bytes > way.unplanned.device_bytes


def _larger(way: Way, memory: Memory) -> bool:
    """Tell whether it is a schedule that takes more of the device than no plan does."""
    return isinstance(way, Schedules) and _holds_more(memory, way)


def _within_work(way: Way, memory: Memory) -> bool:
    """Tell whether a plan does no more work than was asked for."""
    work = way.options.work
    return work is None or 1 + memory.recomputed_flops <= work + SLACK


def _confirm(way: Way, plan: Candidate, unfused: int | None = None) -> Solution:
    """Make a plan into a symbol, and have MXNet confirm its memory with one bind."""
    unplanned, warnings = way.unplanned, []
    if plan.schedule is None and not plan.recomputes:
        symbol, memory = marks.clear(way.request.symbol), unplanned
    else:
        plan, symbol, memory = way.bound(plan)
        log.info("Find best plan with cost=%s MB", memory.bound)
    with_it, without = memory.planned.pool_bytes, memory.replay.pool_bytes
    if unplanned.exact and not memory.inexact and not memory.exact:
        text = f"the memory of this {way.noun} was predicted as {with_it / MB:.1f} MB, but MXNet "
        warnings.append(text + f"plans {memory.bound} MB for it; the plan has MXNet's figure")
    without = min(without, with_it if unfused is None else unfused)
    if without < (1 - LITTLE) * with_it and memory is not unplanned:
        sizes = f"without it a plan of {without / MB:.1f} MB, with it {with_it / MB:.1f} MB"
        text = f"pointwise fusion (on by default on a GPU) takes memory here: {sizes}; set "
        warnings.append(text + "MXNET_USE_FUSION=0 and plan again, or use how='schedule'")
    if memory.fused is not None and VERSION < 10900:
        text = "this MXNet fuses pointwise operators on a GPU in another way than 1.9, as which "
        warnings.append(text + "their memory is told; with MXNET_USE_FUSION=0 it is exact")
    costs = {"no plan": unplanned.counted_bytes, plan.origin: memory.counted_bytes}
    return Solution(way, plan, symbol, memory, costs, tuple(warnings))


def _advised(way: Way, found: Solution) -> Solution:
    """Warn of what the user should know; return the network as it is where no plan helps."""
    memory, unplanned, pool = found.memory, way.unplanned, way.unplanned.pool_bytes
    cost, before = in_words(memory.counted_bytes), in_words(unplanned.counted_bytes)
    saved, warnings = memory.saved(unplanned), [*found.warnings]
    holds_more = _holds_more(memory, way)
    useless = saved <= 0 or holds_more
    if not way.options.rules:
        warnings.append(BARE)
    if found.interrupted:
        text = f"interrupted: this is the best {way.noun} that was found so far, of {cost}"
        warnings.append(f"{text} ({before} without a plan)")
    if isinstance(way, Original):
        useless = False  # as it is asked for
        if not way.hints:
            text = "the network has no mirror_stage marks, so the original planner cannot cut it"
            warnings.append(f"{text}; planner='smallest' needs none")
        if saved < 0:
            text = f"this plan needs more memory ({cost}) than the network as it is ({before})"
            warnings.append(f"{text}, which planner='smallest' never does")
    elif saved <= 0:
        text = f"no plan costs less than the network as it is ({before}), so it is returned"
        warnings.append(f"{text} unmarked: {_why_so_little(way)}")
    elif holds_more:
        taken = memory.taken, unplanned.taken
        held, now = (in_words(each.nbytes + each.temporary) for each in taken)
        text = "the network is returned unmarked: a plan shrinks the pool, but operators of MKLDNN"
        warnings.append(f"{text} hold {held}, not {now}; set MXNET_MKLDNN_ENABLED=0 and plan again")
    elif saved < LITTLE * pool:
        text = f"the plan saves {100 * saved / pool:.1f} % of {in_words(pool)}"
        warnings.append(f"{text}: {_why_so_little(way)}")
    if saved < LITTLE * pool and way.noun == "plan" and way.rules.watches_layouts:
        text = "operators are kept so that MKLDNN lays out and rounds tensors as without a plan"
        others = "how='schedule', ctx='gpu' (a plan for GPUs) or MXNET_MKLDNN_ENABLED=0"
        warnings.append(f"{text}; {others} may allow more")
    if useless:
        none = _confirm(way, replace(way.no_plan, added_time=None))
        found = replace(none, costs=found.costs, interrupted=found.interrupted)
    return replace(found, warnings=tuple(warnings))


def slowest(memory: Memory) -> str:
    """Tell the most work that is recomputed with no gradient between, from which node to which."""
    at, nodes, (each, total) = memory.run(RECOMPUTED), memory.recomputed, memory.flops
    if not len(at):
        return ""
    phases = memory.replay.training.phases[memory.replay.order]
    gradients = np.cumsum(phases == BACKWARD)[at]  # that have run before
    runs = np.split(nodes, np.flatnonzero(np.diff(gradients)) + 1)
    run = max(runs[::-1], key=lambda run: (each[run].sum(), len(run)))
    share = f"{100 * each[run].sum() / total:.0f} % of the forward pass"
    first, last = (memory.graph.nodes[memory.graph.user_node(k)].name for k in run[[0, -1]])
    return f"{first!r} to {last!r}: {len(run)} operators, {share}, are recomputed together"


def _why_so_little(way: Way) -> str:
    """Tell why no plan of a network helps much."""
    rules, until, least, nodes = way.rules, way.request.until, way.floor, way.graph.nodes
    ruled = kept_summary((nodes[i].op, why) for i, why in rules.reasons.items())
    if not way.graph.operators:
        return NO_OPERATORS
    if not rules.allowed.any() and until is not None:
        return f"nothing that could be recomputed comes before {nodes[until].name!r}"
    if not rules.allowed.any():
        return f"every operator must be kept ({ruled})"
    text = f"of the {in_words(way.unplanned.peak_bytes)} of the peak, "
    if ruled and least.nbytes > least.own_bytes:
        over = in_words(least.nbytes - least.own_bytes)
        text += f"{over} must not be recomputed ({ruled}), and "
    return text + f"{least.sets(nodes)} alone needs {in_words(least.own_bytes)} at once"


def in_bytes(nbytes: float) -> str:
    """Return bytes for a message, to the byte."""
    return f"{nbytes:.0f} bytes ({in_words(nbytes)})"


def _too_little(way: Way, limit: int, memory: Memory, needs: int) -> str:
    """Tell that no plan fits into so many bytes, where the smallest peaks, and what bounds it."""
    work, taken, pool, least = way.options.work, way.taken(memory), memory.pool_bytes, way.floor
    text = f"was found that needs at most {in_bytes(limit)}"
    if work is not None:
        text = f"of work={work:g} {text}; give more memory or more work"
    text = f"no {way.noun} {text}; the smallest needs {in_bytes(needs)}."
    most = int(memory.live[memory.peak])
    # More is alive than the pool takes where a schedule's results lie where a gradient will be.
    if 0 < most <= pool:
        text += f" Its peak of {in_words(most)} is in {memory.running}."
    if least.operator >= 0 and least.nbytes <= pool:
        text += f" No plan can do with less than {in_words(least.nbytes)} alive at once, for "
        text += f"{least.sets(way.graph.nodes)} needs them."
    if taken != pool:
        text += f" {in_bytes(taken - pool)} of it are parameters, gradients, inputs and the "
        text += "optimizer's state, and what operators hold."
    return text
