"""Plan by schedules, which recompute results as often as it pays; compare ``by_marks``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Sequence

import numpy as np

from memonger.costs.usage import Usage
from memonger.planners.candidates import Candidate, Point, SearchResult, by_memory, by_seconds
from memonger.planners.trees import search as trees
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import build_step
from memonger.schedules.schedule import Schedule, check, plain
from memonger.schedules.training_step import TrainingStep, arena
from memonger.solve.facts import Facts
from memonger.support.parallel import progress_bar
from memonger.support.types import Symbol

NO_RECOMPUTATION = "no recomputation"  # the origin of the schedule that recomputes nothing
SEARCHED = "searched schedule"


def search_smallest(facts: Facts) -> SearchResult:
    """Search for the plan of least memory; others follow, because MKLDNN may not allow it."""
    work = facts.limits.work
    with progress_bar() as progress:
        effort = trees.EFFORT.times(facts.patience)
        search = trees.ScheduleSearch(facts.workload, effort, progress, parts=facts.parts)
        points = [search.least_memory(work), *search.alternatives(work)]
    return _rate(facts, search, points)


def search_front(facts: Facts, smallest: SearchResult) -> SearchResult:
    """Search for the Pareto-optimal plans, beside those of the search for least memory.

    All plans of least memory are returned: the smallest arena may belong to a plan that has more
    bytes alive than another.
    """
    searches = [smallest]
    if not searches[0].interrupted:
        with contextlib.suppress(KeyboardInterrupt):
            searches.append(search_by_time(facts, facts.patience))
    plans = [plan for searched in searches for plan in searched.plans]
    interrupted = len(searches) < 2 or searches[1].interrupted
    return SearchResult(sorted(plans, key=by_seconds), interrupted)


def search_by_time(facts: Facts, patience: float) -> SearchResult:
    """Search for the Pareto-optimal plans by the times of operators."""
    with progress_bar() as progress:
        effort, seconds = trees.EFFORT.times(patience), facts.times.forward_seconds
        search = trees.ScheduleSearch(facts.workload, effort, progress, seconds, facts.parts)
        points = search.front()
    searched = _rate(facts, search, points)
    return replace(searched, plans=sorted(searched.plans, key=by_seconds))


def _rate(
    facts: Facts, search: trees.ScheduleSearch, points: Sequence[Point[Schedule]]
) -> SearchResult:
    """Rate what a search has found, the least memory first; raise if nothing that recomputes.

    Raises
    ------
    KeyboardInterrupt
        If the user has interrupted the search before.
    """
    seconds, unchanged = facts.times.forward_seconds, search.plain.operations
    plans = []
    for point in sorted(points, key=by_memory):
        schedule = point.state
        is_plain = np.array_equal(schedule.operations, unchanged)
        plans.append(
            Candidate(
                schedule,
                search.count_least(schedule),
                float(schedule.recomputed(len(seconds)) @ seconds),
                NO_RECOMPUTATION if is_plain else SEARCHED,
            )
        )
    if search.interrupted and all(plan.origin == NO_RECOMPUTATION for plan in plans):
        raise KeyboardInterrupt
    return SearchResult(plans, search.interrupted)


def estimate_least(facts: Facts, work: float) -> int | None:
    """Estimate the least bytes with this limit of work, from initial solutions only.

    None if no schedule can hold the network, or the user has interrupted the search.
    """
    if facts.why_no_schedule:
        return None
    with progress_bar() as progress:
        few = replace(trees.EFFORT, annealing=0)
        search = trees.ScheduleSearch(facts.workload, few, progress, parts=facts.parts)
        least = search.least_memory(work)
    return None if search.interrupted else search.count_least(least.state)


def make_plain(facts: Facts) -> Candidate:
    """Make the candidate that recomputes nothing, and places tensors in an arena."""
    return Candidate(plain(facts.workload), facts.lower_bound.nbytes, 0.0, NO_RECOMPUTATION)


def predict_memory(facts: Facts, plan: Candidate) -> Usage:
    """Predict the memory of a plan.

    Raises
    ------
    LayoutMismatch
        If MKLDNN's layouts do not allow it.
    """
    schedule = plan.recipe
    assert isinstance(schedule, Schedule)
    memory = facts.memories.get(plan.key)
    if memory is None:
        memory = arena(build_step(facts.parts_of_step, schedule), facts.held)
        facts.memories.put(plan.key, memory)
    return memory


def write_plan(facts: Facts, plan: Candidate) -> tuple[Candidate, Symbol, Usage]:
    """Make the symbol of a plan, which knows the training step that was built to predict it."""
    schedule = plan.recipe
    assert isinstance(schedule, Schedule)
    check(facts.workload, schedule)
    planned, memory = scheduled(facts.network.symbol, schedule), predict_memory(facts, plan)
    step = memory.step
    assert isinstance(step, TrainingStep)
    planned.find_step(facts.graph, facts.network.grad_req, facts.mkldnn, step)
    return plan, planned, memory
