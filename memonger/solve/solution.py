"""From a search to a solution: choose within the budget, and let MXNet confirm the plan."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Mapping

import numpy as np

from memonger.costs.lower_bound import LowerBound
from memonger.graph import marks
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.graph.forward import no_collection
from memonger.graph.training import TrainingGraph
from memonger.planners.marks.rules import kept_summary
from memonger.planners.marks.smallest import NO_CUTS
from memonger.schedules.execution.symbol import scheduled
from memonger.solve.budget import in_bytes
from memonger.solve.memory import Memory
from memonger.solve.way import Candidate, Found, Way
from memonger.support.errors import MB, BudgetError, in_words

log = logging.getLogger("memonger")

LITTLE = 0.05  # of the memory: a plan that saves less is explained
NEARLY = 1.1  # times a budget: what is predicted to take more is not looked at
MOST_BINDS = 5  # of plans whose memory MXNet plans otherwise than predicted
MOST, MOST_HELD = 0.8, 0.5  # shares of the peak that are reason enough
SLACK = 1 + 1e-9  # for rounding where work is compared

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
    """What is remembered of a plan: nothing in it is the caller's, nor has an operator's name."""

    plan: Candidate
    native: tuple[int, ...]  # nodes that run with MXNet's own kernel instead of cuDNN's
    facts: Mapping[str, Any]  # the fields of ``Plan`` that do not depend on names
    warnings: tuple[str, ...]
    floor: LowerBound
    #: The most work that is recomputed with no gradient between: its first and its last node, how
    #: many operators there are, and their FLOPs as a share of the forward pass.
    slowest: tuple[int, int, int, float] | None

    def carry_out(self, symbol: Any) -> Any:
        """Copy a symbol (without marks) so that it trains by this plan."""
        plan = self.plan
        if plan.schedule is not None:
            return scheduled(symbol, plan.schedule)
        if plan.recomputed.any():
            return marks.apply(symbol, plan.recomputed, self.native, plan.copies)
        return marks.clear(symbol)


@no_collection()
def solve(way: Way, search: Callable[[], Found] | None = None) -> tuple[Solution, Any]:
    """Search for the smallest plan, or for the fastest within the budget, and confirm it.

    Within a budget, ``search`` finds the plans to choose from; ``way.front`` if it is not given.
    Returns the solution and the planned symbol.
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
        deeper = way.deeper(found)
        if deeper is None:
            raise
        found, confirmed = deeper, within(way, deeper)
    if found.interrupted:
        text = "interrupted: this is the fastest plan that fits of those found so far"
        confirmed = replace(confirmed, warnings=(*confirmed.warnings, text))
    return _solution(way, confirmed, found)


def solution_of(way: Way, plan: Candidate) -> tuple[Solution, Any]:
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
    budget, work = way.options.budget, way.options.work
    assert budget is not None
    plans, limit = found.plans, budget.limit(way.taken(way.unplanned))
    known = {k: way.memory(plans[k]) for k in {0, len(plans) - 1}}
    beside = min(way.taken(memory) - memory.pool_bytes for memory in known.values())
    allowed, least_work, binds = float(limit), math.inf, 0
    for k, pool in enumerate(way.pools(plans)):
        if k not in known and pool + beside > NEARLY * limit:
            continue
        known[k] = known.get(k) or way.memory(plans[k])
        needed = way.taken(known[k])
        if needed > allowed or binds == MOST_BINDS:
            continue
        if work is not None and way.work(plans[k]) > work * SLACK:
            least_work = min(least_work, way.work(plans[k]))
            continue
        confirmed = confirm(way, plans[k])
        really = way.taken(confirmed.memory)
        if really <= limit:
            return confirmed
        allowed, binds = 0.98 * needed * limit / really, binds + 1
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
    counted = without if plan.schedule else plan.counted_bytes
    differs = not memory.exact or memory.counted_bytes != counted
    if differs and way.cost.exact and not memory.inexact:
        said = f"the memory of this {way.noun} was predicted as {counted / MB:.1f} MB, but MXNet "
        warnings.append(said + f"plans {memory.bound} MB for it; the plan has MXNet's figure")
        memory = replace(memory, inexact=("the bind differs from the search",))
    what = "this plan takes"
    if unfused is not None and unfused < without:
        without, what = unfused, "there is a plan of"
    if without < (1 - LITTLE) * with_it:
        warnings.append(
            "pointwise fusion (MXNET_USE_FUSION, on by default on a GPU) takes memory here: "
            f"without it {what} {without / MB:.1f} MB, with it {with_it / MB:.1f} MB; set "
            "MXNET_USE_FUSION=0 and plan again, or use how='schedule', which runs without fusion"
        )
    log.info("Find best plan with cost=%s MB", memory.bound)
    return Confirmed(plan, symbol, memory, tuple(warnings))


def _advised(way: Way, found: Found, confirmed: Confirmed) -> Confirmed:
    """Warn of what the user should know; return the network as it is where no plan helps."""
    memory, unplanned, original = confirmed.memory, way.unplanned, way.options.planner == "chen2016"
    saved, before = memory.saved(unplanned), in_words(unplanned.counted_bytes)
    warnings = [] if way.options.rules else [BARE]
    if original and not way.stages:
        warnings.append(
            "the network has no mirror_stage marks, so the original planner cannot cut it; "
            "planner='smallest' needs none"
        )
    if found.interrupted:
        warnings.append(
            f"interrupted: this is the best {way.noun} that was found so far, of "
            f"{memory.counted_bytes / MB:.1f} MB ({unplanned.counted_bytes / MB:.1f} MB without a "
            "plan)"
        )
    warnings += confirmed.warnings
    worse = not original and (saved <= 0 or memory.holds_more_than(unplanned))
    little = not original and (saved <= 0 or saved < LITTLE * unplanned.pool_bytes)
    if original and saved < 0:
        warnings.append(
            f"this plan needs more memory ({in_words(memory.counted_bytes)}) than the network as "
            f"it is ({before}), which planner='smallest' never does"
        )
    elif worse and saved > 0:
        warnings.append(
            f"the network is returned unmarked: a plan takes {in_words(memory.pool_bytes)} of the "
            f"pool in place of {in_words(unplanned.pool_bytes)}, but operators would hold "
            f"{in_words(memory.taken.nbytes)} for MKLDNN in place of "
            f"{in_words(unplanned.taken.nbytes)}; set MXNET_MKLDNN_ENABLED=0 and plan again"
        )
    elif little:
        text = f"no plan costs less than the network as it is ({before}), "
        text += "so it is returned unmarked"
        if saved > 0:
            share = 100 * saved / unplanned.pool_bytes
            text = f"the plan saves {share:.1f} % of {in_words(unplanned.pool_bytes)}"
        warnings.append(f"{text}: {why_so_little(way, found.costs or {})}")
    if little and way.noun == "plan" and way.rules.watches_layouts:
        warnings.append(
            "operators are kept so that MKLDNN lays out every tensor on the CPU as it does without "
            "a plan, and rounds alike; how='schedule', ctx=mx.gpu() (a plan for GPUs alone) or "
            "MXNET_MKLDNN_ENABLED=0 may allow more"
        )
    if worse:
        confirmed = confirm(way, replace(way.no_plan, added_time=None))
    return replace(confirmed, warnings=tuple(warnings))


def _costs(way: Way, confirmed: Confirmed) -> dict[str, int]:
    """Tell what was compared where that was one plan, in bytes as MXNet counts them."""
    least = {confirmed.plan.origin: confirmed.memory.counted_bytes}
    return {"no plan": way.unplanned.counted_bytes, **least}


def _solution(way: Way, confirmed: Confirmed, found: Found | None = None) -> tuple[Solution, Any]:
    """Make what is remembered of a confirmed plan; return its symbol too."""
    plan, memory, unplanned = confirmed.plan, confirmed.memory, way.unplanned
    facts = {
        **{name: getattr(memory, name) for name in MEASURED.split()},
        "unplanned_bytes": unplanned.pool_bytes,
        "unplanned_device_bytes": unplanned.device_bytes,
        "held_bytes": memory.taken.nbytes,
        "unplanned_held_bytes": unplanned.taken.nbytes,
        "temporary_bytes": memory.taken.temporary,
        "planner": plan.origin,
        "candidates": (found and found.costs) or _costs(way, confirmed),
        "interrupted": found is not None and found.interrupted,
        "added_time": plan.added_time,
    }
    native = () if plan.schedule else tuple(way.rules.native(plan.recomputed))
    slowest = _slowest(memory, way.rules.with_copies(plan.copies)[1])
    solution = Solution(plan, native, facts, confirmed.warnings, way.floor, slowest)
    return solution, confirmed.symbol


def _slowest(memory: Memory, moved: np.ndarray) -> tuple[int, int, int, float] | None:
    """Find ``Solution.slowest``; ``moved``: how nodes are numbered with kept copies."""
    at, nodes, (each, total) = memory.run(RECOMPUTED), memory.recomputed, memory.flops
    if not len(at):
        return None
    phases = memory.replay.training.phases[memory.replay.order]
    gradients = np.cumsum(phases == BACKWARD)[at]  # that have run before
    _, start = np.unique(gradients, return_index=True)
    work = np.add.reduceat(each[nodes], start)
    count = np.diff(np.append(start, len(nodes)))
    k = int(np.lexsort((count, work))[-1])
    ends = nodes[[start[k], start[k] + count[k] - 1]]
    first, last = np.searchsorted(moved, ends, side="right") - 1
    return int(first), int(last), int(count[k]), float(work[k] / max(1.0, total))


def sets_floor(training: TrainingGraph, least: LowerBound) -> str:
    """Name what sets the floor; empty if nothing does."""
    nodes = training.graph.nodes
    node = nodes[least.operator]
    return least.sets(node.name, node.op, len(nodes)) if least.operator >= 0 else ""


def why_so_little(way: Way, costs: Mapping[str, int]) -> str:
    """Tell why no plan of a network helps much; ``costs`` are of the plans that were tried."""
    memory, rules, until, least = way.unplanned, way.rules, way.request.until, way.floor
    graph, operators, peak = way.graph, way.graph.operators, memory.peak_bytes

    def ruled(nodes: Iterable[int]) -> str:
        return kept_summary((graph.nodes[i].op, rules.reasons[i]) for i in nodes)

    if not operators:
        return NO_OPERATORS
    if not rules.allowed[operators].any():
        if until is not None and all(i >= until for i in operators if i not in rules.reasons):
            return f"nothing that could be recomputed comes before {graph.nodes[until].name!r}"
        return f"every operator must be kept ({ruled(rules.reasons)})"
    if least.own_bytes >= MOST * peak:
        return (
            f"{sets_floor(way.training, least)} alone needs {in_words(least.own_bytes)} at once, "
            f"{100 * least.own_bytes / max(1, peak):.0f} % of the {in_words(peak)} of the peak"
        )
    line = memory.timeline
    alive = memory.alive[line.kind[memory.alive] == FORWARD]
    makers = memory.operators[line.row[alive]]
    held = np.isin(makers, list(rules.reasons))
    nbytes = int(line.nbytes[alive[held]].sum())
    if nbytes >= MOST_HELD * peak:
        return (
            f"{in_words(nbytes)} of the {in_words(peak)} of the peak must not be recomputed "
            f"({ruled(dict.fromkeys(makers[held].tolist()))})"
        )
    if set(costs) <= {"no plan", NO_CUTS}:
        return "the network has no place to cut"
    tried = [f"{name} give {in_words(cost)}" for name, cost in costs.items() if name != "no plan"]
    largest, i = max((t.nbytes, i) for i in operators for t in graph.tensors[i])
    of = f"{graph.nodes[i].name!r} ({graph.nodes[i].op})"
    return f"{', '.join(tried)}; its largest result is {in_words(largest)}, of node {of}"


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
        text += f"{sets_floor(way.training, least)} needs them."
    if taken != pool:
        text += f" {in_bytes(taken - pool)} of it are parameters, gradients, inputs and the "
        text += "optimizer's state, and what operators hold."
    return text
