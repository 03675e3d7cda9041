"""Say why no plan saves much or fits a budget, and what would fit."""

from __future__ import annotations

import logging
import math

from memonger.costs.usage import Usage
from memonger.planners.marks.rules import kept_summary
from memonger.solve.by_schedules import estimate_least
from memonger.solve.facts import ONE_MORE_PASS, Facts
from memonger.solve.limits import CHEN2016, MARKS
from memonger.support.errors import BudgetError, format_size

log = logging.getLogger("memonger")

WORTH = 0.75  # of the memory of marks: a schedule that needs less is pointed out
NO_OPERATORS = "the network has no operators, so the backward pass needs no results"


def explain_little(facts: Facts) -> str:
    """Return why no plan of a network saves much memory."""
    rules, until, least, nodes = (
        facts.rules,
        facts.network.until,
        facts.lower_bound,
        facts.graph.nodes,
    )
    ruled = kept_summary((nodes[i].op, why) for i, why in rules.reasons.items())
    if not facts.graph.operators:
        return NO_OPERATORS
    if not rules.recomputable.any() and until is not None:
        return f"no operator before {nodes[until].name!r} (until=) may be recomputed"
    if not rules.recomputable.any():
        return f"every operator must be kept ({ruled})"
    text = f"the peak is {format_size(facts.unplanned.peak_bytes)}; "
    if ruled and least.nbytes > least.own_bytes:
        over = format_size(least.nbytes - least.own_bytes)
        text += f"{over} must not be recomputed ({ruled}), and "
    return text + f"{least.name(nodes)} alone needs {format_size(least.own_bytes)} at once"


def format_bytes(nbytes: float) -> str:
    """Return bytes for a message, to the byte."""
    return f"{nbytes:.0f} bytes ({format_size(nbytes)})"


def describe_too_little(facts: Facts, limit: int, smallest: Usage) -> BudgetError:
    """Make the error for a limit that no plan fits: what the smallest needs, and where it peaks."""
    work, budget, least = facts.limits.work, facts.limits.budget, facts.lower_bound
    nbytes, pool = facts.count_bytes(smallest), smallest.pool_bytes
    of, more = ("", "") if work is None else (f" with work={work:g}", " or more work")
    beside = budget.describe_beside() if budget else ""
    text = f"no plan{of} was found that needs at most {format_bytes(limit)}{beside}; the smallest "
    text += f"needs {format_bytes(nbytes)}; give more memory{more}."
    most = int(smallest.live[smallest.peak])
    # A schedule may keep results in the arrays of gradients, outside of the pool.
    if 0 < most <= pool:
        text += f" Its peak of {format_size(most)} is in {smallest.running}."
    if least.operator >= 0 and least.nbytes <= pool:
        text += f" Every plan needs at least {format_size(least.nbytes)} at once, for "
        text += f"{least.name(facts.graph.nodes)}."
    if nbytes != pool:
        text += f" {format_bytes(nbytes - pool)} of it are parameters, gradients, inputs, the "
        text += "optimizer's state and arrays that operators hold."
    return BudgetError(text + suggest(facts, limit, nbytes - pool, pool), nbytes)


def suggest(facts: Facts, limit: int, beside: int, pool: int) -> str:
    """Suggest what would fit a limit in bytes: a schedule in place of marks, a smaller batch.

    ``beside`` and ``pool`` are the bytes of the smallest plan that was found, outside the pool and
    of the pool.
    """
    text = ""
    if facts.limits.how == MARKS and facts.limits.planner != CHEN2016:
        least = estimate_least(facts, math.inf)
        if least is not None and least + beside <= limit:
            text = f" A schedule fits, with about {format_size(least + beside)}: how='schedule', "
            text += "which memonger run and enable train; a network's file has marks alone."
    sizes = {shape[0] if shape else 0 for shape in facts.network.spec.shapes.values()}
    batch = sizes.pop() if len(sizes) == 1 else 0  # a bind gives the shapes of parameters too
    smaller = int(batch * (limit - beside) / max(1, pool))
    if 0 < smaller < batch:
        text += f" A batch of about {smaller} in place of {batch} fits; memonger batch finds the "
        text += "largest."
    return text


def suggest_schedule(facts: Facts, pool_bytes: int) -> None:
    """Log that a schedule would take much less than marks, which take ``pool_bytes``, if so."""
    least = estimate_least(facts, ONE_MORE_PASS)
    if least is not None and least < WORTH * pool_bytes:
        text = "a schedule would take about %s where these marks take %s: how='schedule', work=2"
        log.info(text, format_size(least, pool_bytes), format_size(pool_bytes))
