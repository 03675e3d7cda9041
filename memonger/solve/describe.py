"""Say why no plan saves much or fits a budget, and what a plan does not do or does at once."""

from __future__ import annotations

import logging
import math

import numpy as np

from memonger.costs.usage import Usage
from memonger.graph.arrays import BACKWARD, RECOMPUTED
from memonger.planners.candidates import Candidate
from memonger.planners.marks.rules import kept_summary
from memonger.planners.marks.smallest import NO_PLAN
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


def describe_slowest(memory: Usage) -> str:
    """Describe the most work that is recomputed in one run, with no gradient in between."""
    places, nodes, flops = memory.find_places(RECOMPUTED), memory.recomputed, memory.graph.flops
    if not len(places):
        return ""
    phases = memory.step.phases[memory.ran.order]
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
