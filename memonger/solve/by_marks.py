"""Plan by marks on operators, with which MXNet recomputes each result at most once."""

from __future__ import annotations

import logging
from dataclasses import replace

from memonger.costs.bind import confirm_pool
from memonger.costs.pool import pool
from memonger.costs.usage import Usage
from memonger.graph import marks
from memonger.graph.operators.added import adds_otherwise
from memonger.planners.candidates import (
    Candidate,
    MarkPlan,
    SearchResult,
    by_seconds,
    pareto_front,
)
from memonger.planners.marks import chen2016
from memonger.planners.marks import search as marks_search
from memonger.planners.marks.identities import drop_unused_identities
from memonger.planners.marks.smallest import NO_PLAN, price_plan, smallest
from memonger.schedules.expand import find_unwritten_biases, why_wrong
from memonger.solve.facts import Facts
from memonger.solve.limits import CHEN2016
from memonger.support.errors import MB, MemongerError
from memonger.support.parallel import progress_bar
from memonger.support.types import Bools, Symbol

log = logging.getLogger("memonger")

OWN_MARKS = "own marks"  # the origin of a plan that keeps the user's force_mirroring


def refuse_marks(facts: Facts) -> None:
    """Raise MemongerError if marks would give the network other gradients."""
    nodes, training = facts.graph.nodes, facts.training
    why = why_wrong(training, find_unwritten_biases(training)) if facts.mkldnn else ""
    if why:
        raise MemongerError(why)
    differ = [x for x, mkldnn in facts.added_in_place if adds_otherwise(nodes[x].op, mkldnn)]
    if facts.graph.adds_afterwards and differ:
        names, cure = facts.describe_added(differ)
        raise MemongerError(
            f"the gradients of {names} would differ with marks: MXNet's executor adds them to "
            f"sums in place, and Gluon afterwards; {cure}, or plan with how='schedule'"
        )


def search_smallest(facts: Facts) -> SearchResult:
    """Search for the plan of least memory; it comes first, others of the search follow."""
    refuse_marks(facts)
    if facts.limits.planner == CHEN2016:
        return _search_as_original(facts)
    effort, seconds = marks_search.EFFORT.times(facts.patience), facts.times.forward_seconds
    with progress_bar() as progress:
        searched = smallest(
            facts.hints,
            facts.rules,
            seconds,
            facts.limits.ntrial,
            effort=effort,
            progress=progress,
        )
    for name, counted in searched.costs.items():
        log.info("%s: %.1f MiB", name, counted / MB)
    return searched


def _search_as_original(facts: Facts) -> SearchResult:
    """Search as the original memonger does (Chen et al. 2016), trial for trial."""
    rules, ntrial, interrupted = facts.rules, facts.limits.ntrial, False
    trials: list[tuple[int, Bools]] = []
    try:
        with progress_bar() as progress:
            for trial in chen2016.search(facts.graph, facts.hints, ntrial):
                mask = trial.mask
                mask[facts.kept] = False
                cost = rules.plan_memory(mask).planned_bytes // MB
                log.info("Search threshold=%d MiB, cost=%d MiB", trial.threshold, cost)
                trials.append((cost, mask))
                progress(len(trials) / (3 + ntrial))
    except KeyboardInterrupt:
        if not trials:
            raise
        interrupted = True
    before, mask = min(trials, key=lambda pair: pair[0])  # the first of equal ones
    plan = price_plan(rules, facts.times.forward_seconds, MarkPlan(mask), CHEN2016)
    text = "cost=%s MiB before the rules, %s MiB with them"
    log.info(text, before, plan.pool_bytes // MB)
    return SearchResult([plan], interrupted)


def search_front(facts: Facts, searched: SearchResult) -> SearchResult:
    """Return the Pareto-optimal plans of the search for least memory, the fastest first."""
    plans = [
        replace(
            plan,
            pool_bytes=predict_memory(facts, plan).pool_bytes,
            origin=plan.origin if plan.recomputes else NO_PLAN,
        )
        for plan in pareto_front(searched.plans, by_seconds)
    ]
    return replace(searched, plans=pareto_front(plans, by_seconds))


def write_original(facts: Facts, threshold: int) -> tuple[chen2016.Trial, Symbol]:
    """Make the original's plan for a threshold in MiB, and write it with the rules.

    The plan that is returned is that before ``until`` and the rules.
    """
    refuse_marks(facts)
    results = chen2016.list_results(facts.graph, facts.hints)
    original, rules = chen2016.mirror_plan(results, threshold), facts.rules
    bare = original.mask.copy()
    bare[facts.kept] = False
    mask = rules.apply(bare)
    cost, ruled_cost = (rules.plan_memory(m).planned_bytes // MB for m in (bare, mask))
    log.info("cost=%d MiB before the rules, %d MiB with them", cost, ruled_cost)
    return original, marks.write(facts.network.symbol, mask, rules.native(mask))


def read_own_marks(facts: Facts) -> Candidate:
    """Return the plan of the user's own marks (force_mirroring)."""
    own = MarkPlan(marks.read_own_mask(facts.graph))
    return price_plan(facts.rules, facts.times.forward_seconds, own, OWN_MARKS)


def predict_memory(facts: Facts, plan: Candidate) -> Usage:
    """Predict the memory of a plan."""
    assert isinstance(plan.recipe, MarkPlan)
    _, rules, mask = drop_unused_identities(facts.rules, plan.recipe)
    return pool(rules.trainings[0], mask, facts.held)


def write_plan(facts: Facts, plan: Candidate) -> tuple[Candidate, Symbol, Usage]:
    """Make the symbol of a plan, without what MXNet cannot carry out, and bind it."""
    assert isinstance(plan.recipe, MarkPlan)
    network, rules = facts.network, facts.rules
    identities = marks.make_inferable(network.symbol, plan.identities, network.spec.shapes)
    marked, *_ = drop_unused_identities(rules, MarkPlan(plan.recipe.mask, identities))
    plan, native = replace(plan, recipe=marked), rules.native(marked.mask)
    planned = marks.write(network.symbol, marked.mask, native, marked.identities)
    memory = predict_memory(facts, plan)
    return plan, planned, confirm_pool(memory, planned, network.device, network.grad_req)
