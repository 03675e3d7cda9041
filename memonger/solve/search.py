"""Search for the plans of a network, by schedules or by marks, and predict their memory."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import replace
from typing import Iterable, Iterator

from memonger.costs.usage import Usage
from memonger.planners.candidates import Candidate, SearchResult
from memonger.schedules.layouts import LayoutMismatch
from memonger.solve import by_marks, by_schedules
from memonger.solve.facts import SMALL_PATIENCE, Facts
from memonger.solve.limits import AUTO, MARKS, SCHEDULE, Lent
from memonger.solve.network import fingerprint
from memonger.support.cache import Latest
from memonger.support.errors import MemongerError, format_size

log = logging.getLogger("memonger")

#: Way -> the functions that search for its plans, predict their memory and write them.
BY = {SCHEDULE: by_schedules, MARKS: by_marks}
SLACK = 1e-9  # for rounding where work or time is compared

#: What was found before, by way, kind of search, network and limits.
_searches: Latest[SearchResult] = Latest(128)


def search(facts: Facts) -> SearchResult:
    """Search in the first of `list_ways`, unless the limits need no search (`settle`)."""
    way = list_ways(facts)[0]
    return settle(facts, way) or search_by(facts, way, facts.limits.bounds_plans)


def list_ways(facts: Facts) -> list[str]:
    """List the ways in which ``how`` allows to plan a network, the first to be tried first.

    With 'auto' that is by schedules, and by marks if no schedule is within the limits; or by marks
    alone. With 'schedule' MemongerError is raised if no schedule can hold the network.
    """
    how = facts.limits.how
    if how == MARKS or (how == AUTO and facts.why_no_schedule):
        return [MARKS]
    if facts.why_no_schedule:
        raise MemongerError(facts.why_no_schedule)
    return [SCHEDULE, MARKS] if how == AUTO else [SCHEDULE]


def settle(facts: Facts, way: str) -> SearchResult | None:
    """Return the plan that the limits ask for if that needs no search; None elsewhere."""
    limits = facts.limits
    settled = SearchResult([facts.no_plan], interrupted=False, way=way, is_settled=True)
    if limits.lent is not None and not facts.forced:
        plan = _find_lent(facts, way, limits.lent)
        if plan is not None:
            return replace(settled, plans=[plan])
    if facts.unplanned.pool_bytes < limits.leave_below:
        least = format_size(limits.leave_below)
        text = f"less than {least}, left alone without a budget, how= or names"
        return replace(settled, declined=text)
    if limits.budget is None or facts.forced:
        return None
    if facts.count_bytes(facts.unplanned) > facts.find_limit():
        return None
    log.info("the network fits the budget without a plan, so nothing is recomputed")
    return settled


def _find_lent(facts: Facts, way: str, lent: Lent) -> Candidate | None:
    """Find the fastest plan that fits into the memory of another executor; None if none fits.

    A network without a plan can share a pool of MXNet, and a schedule can share an arena.
    """
    if not lent.is_arena:
        return facts.no_plan if facts.unplanned.pool_bytes <= lent.nbytes else None
    plain = by_schedules.make_plain(facts) if way == SCHEDULE else None
    memory = predict_allowed(facts, plain) if plain is not None else None
    if memory is None:
        return None
    arena, *outputs = memory.allocated.tolist()
    if arena <= lent.nbytes:
        return plain
    # The search is short, because buckets come by the dozen and need not fit into less memory.
    searched = by_schedules.search_by_time(facts, facts.limits.patience or SMALL_PATIENCE)
    limit = lent.nbytes + sum(outputs)
    near = (plan for plan in searched.plans if facts.least_bytes(plan) <= limit)
    return next(list_fitting(facts, near, limit), None)


def search_by(facts: Facts, way: str, for_front: bool) -> SearchResult:
    """Search in one way for the Pareto-optimal plans, or for the plan of least memory.

    What was found for a network is returned again, unless it was interrupted.
    """
    # What a search finds does not depend on the limits of memory and time.
    limits = replace(facts.limits, how=AUTO, budget=None, knee=False, slower_than=None)
    limits = replace(limits, lent=None, leave_below=0)
    key = way, for_front, fingerprint(facts.network, limits)
    searched, by = _searches.get(key), BY[way]
    if searched is not None:
        log.info("using the cached search result for this network")
        return searched
    if for_front:
        searched = by.search_front(facts, search_by(facts, way, for_front=False))
    else:
        searched = by.search_smallest(facts)
    searched = replace(searched, way=way)
    if not searched.interrupted:
        _searches.put(key, searched)
    return searched


def predict_memory(facts: Facts, plan: Candidate) -> Usage:
    """Predict the memory of a plan; raises LayoutMismatch if MKLDNN does not allow it."""
    by = by_marks if plan.schedule is None else by_schedules
    return by.predict_memory(facts, plan)


def predict_allowed(facts: Facts, plan: Candidate) -> Usage | None:
    """Predict the memory of a plan; None if it exceeds the limit of work or changes layouts."""
    most = math.inf if facts.limits.work is None else facts.limits.work + SLACK
    with contextlib.suppress(LayoutMismatch):
        memory = predict_memory(facts, plan)
        return memory if 1 + memory.recomputed_flops <= most else None
    return None


def list_fitting(facts: Facts, plans: Iterable[Candidate], limit: float) -> Iterator[Candidate]:
    """List the plans that are predicted to take at most ``limit`` bytes, as the budget counts."""
    for plan in plans:
        memory = predict_allowed(facts, plan)
        if memory is not None and facts.count_bytes(memory) <= limit:
            yield plan
