"""From a search to a solution: choose within the budget, and let MXNet confirm the plan."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.forward import no_collection
from memonger.planners.marks.rules import kept_summary
from memonger.solve.memory import Memory
from memonger.solve.ways import Candidate, Found, Schedules, Way
from memonger.support.errors import MB, BudgetError, in_words

log = logging.getLogger("memonger")

LITTLE = 0.05  # of the memory: a plan that saves less is explained
NEARLY = 1.1  # times a budget: what is predicted to take more is not looked at
SLACK = 1e-9  # for rounding where work is compared

#: The fields of ``Plan`` that are those of the same name of `Memory`.
MEASURED = "pool_bytes counted_bytes gradient_bytes peak_bytes device_bytes exact recomputed_flops"

NO_OPERATORS = "the network has no operators, so nothing is held for a backward pass"
BARE = "a bare plan (rules=False) may abort on a GPU, or give wrong statistics and gradients"


@dataclass(frozen=True, eq=False)
class Confirmed:
    """A plan that MXNet has bound: the planned symbol, and what it takes."""

    plan: Candidate
    symbol: Any
    memory: Memory
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Solution:
    """A confirmed plan. Without its symbol nothing in it is the caller's, or has a node's name."""

    symbol: Any  # None where it is remembered
    plan: Candidate
    facts: Mapping[str, Any]  # the fields of ``Plan`` that do not depend on names
    texts: Mapping[str, tuple[str, Sequence[int]]]  # those that do, with {} for names of nodes
    warnings: tuple[str, ...]


@no_collection()
def solve(way: Way, search: Callable[[], Found] | None = None) -> Solution:
    """Search for the smallest plan, or for the fastest within the budget, and confirm it.

    Within a budget, ``search`` finds the plans to choose from; ``way.front`` if it is not given.
    """
    budget = way.options.budget
    if budget is None:
        found = way.smallest()
        confirmed = confirm(way, found.plans[0], found.unfused)
        found = replace(found, costs=found.costs or _costs(way, confirmed))
        return _solution(way, _advised(way, found, confirmed), found)
    unplanned = way.taken(way.unplanned)
    if unplanned <= budget.limit(unplanned):
        log.info("the budget allows the network as it is, so nothing is recomputed")
        return _solution(way, confirm(way, way.no_plan))
    found = (search or way.front)()
    try:
        confirmed = within(way, found)
    except BudgetError:
        if not isinstance(way, Schedules):
            raise
        found = way.deeper(found)
        confirmed = within(way, found)
    if found.interrupted:
        text = "interrupted: this is the fastest plan that fits of those found so far"
        confirmed = replace(confirmed, warnings=(*confirmed.warnings, text))
    return _solution(way, confirmed, found)


def solution_of(way: Way, plan: Candidate) -> Solution:
    """Confirm one plan; the network as it is where MXNet finds that it saves nothing."""
    confirmed = confirm(way, plan)
    if plan.recomputed.any() and confirmed.memory.saved(way.unplanned) <= 0:
        confirmed = replace(confirm(way, way.no_plan), warnings=confirmed.warnings)
    return _solution(way, confirmed)


def within(way: Way, found: Found) -> Confirmed:
    """Choose the first of these plans of which no more than the budget is taken, and confirm it.

    They are the fastest first, so with more memory it can only be the same, or one before it.
    Raises BudgetError if none fits; KeyboardInterrupt if they are all that the user has waited for.
    """
    budget, work, plans = way.options.budget, way.options.work, found.plans
    assert budget is not None
    limit = budget.limit(way.taken(way.unplanned))
    known = {plan: way.memory(plan) for plan in (plans[0], plans[-1])}
    beside = min(way.taken(memory) - memory.pool_bytes for memory in known.values())
    least_work = math.inf
    for plan, pool in zip(plans, way.pools(plans)):
        if plan not in known and pool + beside > NEARLY * limit:
            continue
        memory = known[plan] = known.get(plan) or way.memory(plan)
        forward = 1 + memory.recomputed_flops
        if way.taken(memory) <= limit and work is not None and forward > work + SLACK:
            least_work = min(least_work, forward)
        elif way.taken(memory) <= limit:
            confirmed = confirm(way, plan)
            if way.taken(confirmed.memory) <= limit:
                return confirmed
    least = min(known.values(), key=way.taken)
    text = _too_little(way, limit, least)
    if least_work < math.inf:
        text = (
            f"a budget of {limit / MB:.1f} MB needs {least_work:.2f} times the forward work, more "
            f"than work={work:g}; give more memory or more work"
        )
    elif found.interrupted:
        raise KeyboardInterrupt
    raise BudgetError(text, way.taken(least))


def confirm(way: Way, plan: Candidate, unfused: int | None = None) -> Confirmed:
    """Make a plan into a symbol, and have MXNet confirm its memory with one bind.

    ``unfused`` is the least that was found without pointwise fusion, as MXNet counts it.
    """
    if plan.schedule is None and not plan.recomputed.any():
        return Confirmed(plan, marks.clear(way.request.symbol), way.unplanned)
    plan, symbol, memory = way.bound(plan)
    warnings = []
    with_it, without = memory.planned.pool_bytes, memory.replay.pool_bytes
    if way.unplanned.exact and not memory.inexact and not memory.exact:
        warnings.append(
            f"the memory of this {way.noun} was predicted as {with_it / MB:.1f} MB, but MXNet "
            f"plans {memory.bound} MB for it; the plan has MXNet's figure"
        )
    without = min(without, with_it if unfused is None else unfused)
    if without < (1 - LITTLE) * with_it:
        warnings.append(
            "pointwise fusion (MXNET_USE_FUSION, on by default on a GPU) takes memory here: "
            f"without it there is a plan of {without / MB:.1f} MB, with it {with_it / MB:.1f} MB; "
            "set MXNET_USE_FUSION=0 and plan again, or use how='schedule', without fusion"
        )
    log.info("Find best plan with cost=%s MB", memory.bound)
    return Confirmed(plan, symbol, memory, tuple(warnings))


def _advised(way: Way, found: Found, confirmed: Confirmed) -> Confirmed:
    """Warn of what the user should know; return the network as it is where no plan helps."""
    memory, unplanned, original = confirmed.memory, way.unplanned, way.options.planner == "chen2016"
    saved, pool, before = memory.saved(unplanned), unplanned.pool_bytes, unplanned.counted_bytes
    warnings = [] if way.options.rules else [BARE]
    if original and not way.stages:
        warnings.append(
            "the network has no mirror_stage marks, so the original planner cannot cut it; "
            "planner='smallest' needs none"
        )
    if found.interrupted:
        warnings.append(
            f"interrupted: this is the best {way.noun} that was found so far, of "
            f"{memory.counted_bytes / MB:.1f} MB ({before / MB:.1f} MB without a plan)"
        )
    warnings += confirmed.warnings
    if original:
        if saved < 0:
            warnings.append(
                f"this plan needs more memory ({in_words(memory.counted_bytes)}) than the network "
                f"as it is ({in_words(before)}), which planner='smallest' never does"
            )
        return replace(confirmed, warnings=tuple(warnings))
    holds_more = memory.held.in_blocks and memory.device_bytes > unplanned.device_bytes
    little = saved <= 0 or saved < LITTLE * pool
    if saved > 0 and holds_more:
        warnings.append(
            "the network is returned unmarked: a plan takes less of the pool, but for MKLDNN "
            f"operators would hold {in_words(memory.taken.nbytes)} in place of "
            f"{in_words(unplanned.taken.nbytes)}; set MXNET_MKLDNN_ENABLED=0 and plan again"
        )
    elif little:
        text = f"the plan saves {100 * saved / max(1, pool):.1f} % of {in_words(pool)}"
        if saved <= 0:
            text = f"no plan costs less than the network as it is ({in_words(before)}), "
            text += "so it is returned unmarked"
        warnings.append(f"{text}: {why_so_little(way)}")
    if little and way.noun == "plan" and way.rules.watches_layouts:
        warnings.append(
            "operators are kept so that MKLDNN lays out every tensor on the CPU as it does without "
            "a plan, and rounds alike; how='schedule', ctx=mx.gpu() (a plan for GPUs alone) or "
            "MXNET_MKLDNN_ENABLED=0 may allow more"
        )
    if saved <= 0 or holds_more:
        confirmed = confirm(way, replace(way.no_plan, added_time=None))
    return replace(confirmed, warnings=tuple(warnings))


def _costs(way: Way, confirmed: Confirmed) -> dict[str, int]:
    """Tell what was compared where that was one plan, in bytes as MXNet counts them."""
    least = {confirmed.plan.origin: confirmed.memory.counted_bytes}
    return {"no plan": way.unplanned.counted_bytes, **least}


def _solution(way: Way, confirmed: Confirmed, found: Found | None = None) -> Solution:
    """Tell all that ``Plan`` tells of a confirmed plan."""
    plan, memory, unplanned, floor = confirmed.plan, confirmed.memory, way.unplanned, way.floor
    facts = {
        **{name: getattr(memory, name) for name in MEASURED.split()},
        "unplanned_bytes": unplanned.pool_bytes,
        "unplanned_device_bytes": unplanned.device_bytes,
        "held_bytes": memory.taken.nbytes,
        "unplanned_held_bytes": unplanned.taken.nbytes,
        "temporary_bytes": memory.taken.temporary,
        "floor_bytes": floor.nbytes,
        "planner": plan.origin,
        "candidates": (found and found.costs) or _costs(way, confirmed),
        "interrupted": found is not None and found.interrupted,
        "added_time": plan.added_time,
        "schedule": plan.schedule,
    }
    moved = way.rules.with_copies(plan.copies)[1]
    sets = floor.sets(way.graph.nodes, "{!r}"), [floor.operator]
    texts = {"floor": sets, "slowest": _slowest(memory, moved)}
    return Solution(confirmed.symbol, plan, facts, texts, confirmed.warnings)


def _slowest(memory: Memory, moved: np.ndarray) -> tuple[str, list[int]]:
    """Tell the most work that is recomputed with no gradient between, from which node to which.

    ``moved``: how nodes are numbered with kept copies.
    """
    at, nodes, (each, total) = memory.run(RECOMPUTED), memory.recomputed, memory.flops
    if not len(at):
        return "", []
    phases = memory.replay.training.phases[memory.replay.order]
    gradients = np.cumsum(phases == BACKWARD)[at]  # that have run before
    _, start = np.unique(gradients, return_index=True)
    work = np.add.reduceat(each[nodes], start)
    count = np.diff(np.append(start, len(nodes)))
    k = int(np.lexsort((count, work))[-1])
    ends = nodes[[start[k], start[k] + count[k] - 1]]
    text = (
        f"{{!r}} to {{!r}}: {count[k]} operators, {100 * work[k] / total:.0f} % of the forward "
        "pass, are recomputed together"
    )
    return text, (np.searchsorted(moved, ends, side="right") - 1).tolist()


def why_so_little(way: Way) -> str:
    """Tell why no plan of a network helps much."""
    memory, rules, until, least = way.unplanned, way.rules, way.request.until, way.floor
    graph, operators = way.graph, way.graph.operators

    def ruled(nodes: Iterable[int]) -> str:
        return kept_summary((graph.nodes[i].op, rules.reasons[i]) for i in nodes)

    if not operators:
        return NO_OPERATORS
    if not rules.allowed[operators].any():
        if until is not None and all(i >= until for i in operators if i not in rules.reasons):
            return f"nothing that could be recomputed comes before {graph.nodes[until].name!r}"
        return f"every operator must be kept ({ruled(rules.reasons)})"
    line = memory.timeline
    alive = memory.alive[line.kind[memory.alive] == FORWARD]
    makers = memory.operators[line.row[alive]]
    held = np.isin(makers, list(rules.reasons))
    text = f"of the {in_words(memory.peak_bytes)} of the peak, "
    if held.any():
        text += f"{in_words(line.nbytes[alive[held]].sum())} must not be recomputed "
        text += f"({ruled(dict.fromkeys(makers[held].tolist()))}), and "
    return text + f"{least.sets(graph.nodes)} alone needs {in_words(least.own_bytes)} at once"


def in_bytes(nbytes: float) -> str:
    """Return bytes for a message, to the byte."""
    return f"{nbytes:.0f} bytes ({in_words(nbytes)})"


def _too_little(way: Way, limit: int, memory: Memory) -> str:
    """Tell that no plan fits into so many bytes, where the smallest peaks, and what bounds it."""
    work, taken, pool, least = way.options.work, way.taken(memory), memory.pool_bytes, way.floor
    of = "" if work is None else f" of work={work:g}"
    text = f"no {way.noun}{of} was found that needs at most {in_bytes(limit)}; "
    text += f"the smallest needs {in_bytes(taken)}."
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
