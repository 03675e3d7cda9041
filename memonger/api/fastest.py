"""The fastest plan within a budget, confirmed by MXNet; all the plans that none beats.

One search (``planners.budget``) finds the plans of every size. It is remembered in this process, so
that another budget for the same network is a choice from what is known.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from memonger.api.budgets import Budget, told
from memonger.api.explain import where_it_peaks, why_not_less
from memonger.api.memory import Memory, of_marks
from memonger.api.remembered import fingerprint
from memonger.api.request import Network, Request, read_network
from memonger.api.solution import (
    ALLOWED,
    SEARCHING,
    Candidate,
    Found,
    Solution,
    confirm,
    left_alone,
)
from memonger.costs.model import MB, CostModel
from memonger.costs.time import measured as timing
from memonger.graph import marks
from memonger.graph.forward import mask_with_copies, no_collection
from memonger.planners.marks.budget import Fast, Front, NodeTimes, Search, front_of
from memonger.planners.marks.rules import Rules
from memonger.planners.marks.smallest import smallest
from memonger.support.cache import Latest
from memonger.support.errors import BudgetError
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

REMEMBERED = 32  # fronts
MOST_BINDS = 5  # of plans whose memory MXNet plans otherwise than predicted


class Options(NamedTuple):
    """How to search; as for ``memonger.plan``."""

    ntrial: int = 6
    kept_copies: bool = True
    patience: float = 1.0
    measure: bool = False


class Known(NamedTuple):
    """A front and what is known with it."""

    front: Front
    step: float  # seconds of a training step without a plan


_fronts: Latest[Known] = Latest(REMEMBERED)


def node_times(network: Network, measure: bool) -> tuple[Callable[[Rules], NodeTimes], float]:
    """The times of nodes, as ``budget.Search`` asks for them; the seconds of an unplanned step."""
    ctx = network.request.device

    def times(rules: Rules) -> NodeTimes:
        training = rules.trainings[0]
        found = timing.times_of(training, ctx, measure)
        moved = timing.moved_bytes(training)[: training.tables.forward]
        return NodeTimes(found.forward, found.gradient, moved)

    return times, timing.times_of(network.training, ctx, measure).step


def find_front(
    network: Network,
    cost: CostModel,
    options: Options,
    others: Sequence[Fast] = (),
    searching: bool = True,
) -> Known:
    """The plans of every size that none beats; or those that are remembered.

    If it is interrupted (Ctrl-C), those that are known by then.

    Parameters
    ----------
    network : Network
    cost : CostModel
    options : Options
    others : sequence of Fast
        Known plans of this network at other shapes, from which the search starts as well.
    searching : bool
        False for the choice among what is known already: no plan, and ``others``.

    Raises
    ------
    KeyboardInterrupt
        If it is interrupted before anything was found.
    """
    key = fingerprint(network.request, [*options])
    known = _fronts.get(key)
    if known is not None:
        log.info("the plans of this network are known; one of them is chosen")
        return known
    times, step = node_times(network, options.measure)
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    plans = [(nothing, ()), *((plan.mask, plan.copies) for plan in others)]
    front = None
    with progress_bar(SEARCHING) as progress:
        interrupted = not searching
        if searching:
            least = smallest(
                network.stages,
                cost,
                network.rules,
                options.ntrial,
                cost.exact,
                options.kept_copies,
                lambda done: progress(done / 2),
                patience=options.patience,
            )
            interrupted = least.interrupted
            plans.insert(1, (least.mask, least.copies))
        search = Search(
            network.rules,
            times,
            options.kept_copies,
            lambda done: progress((1 + done) / 2),
            options.patience,
        )
        if cost.exact and not interrupted:
            try:
                front = search.run(plans[1:])
            except KeyboardInterrupt:
                interrupted = True
    if front is None:
        known_plans = [search.fast(mask, copies) for mask, copies in plans]
        if not cost.exact:
            known_plans = [plan._replace(pool_bytes=cost(plan.mask)) for plan in known_plans]
        front = Front(front_of(known_plans), interrupted)
    found = Known(front, step)
    if not front.interrupted:
        _fronts.put(key, found)
    return found


def memory_of(network: Network, cost: CostModel, plan: Fast) -> Memory:
    """What a plan takes, without a bind."""
    rules, moved = network.rules.with_copies(plan.copies)
    mask = mask_with_copies(plan.mask, moved, plan.copies, len(rules.graph.nodes))
    return of_marks(rules.trainings[0], mask, plan.pool_bytes // MB, network.held, rules.fuses)


@no_collection()
def solve_budget(
    request: Request,
    budget: Budget,
    options: Options,
    others: Sequence[Fast] = (),
    searching: bool = True,
) -> tuple[Solution, Any]:
    """The fastest plan within a budget, confirmed by MXNet; parameters as of `find_front`.

    Returns
    -------
    Solution
    mx.sym.Symbol
        The planned network.

    Raises
    ------
    BudgetError
        If none fits.
    """
    network = read_network(request)
    cost = network.cost_model()
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    held, fuses = network.held, network.rules.fuses
    unplanned = of_marks(network.training, nothing, cost.bound, held, fuses)

    def taken(memory: Memory) -> int:
        return budget.taken(memory, network)

    limit = budget.limit(taken(unplanned))
    if taken(unplanned) <= limit:
        log.info(ALLOWED)
        return left_alone(network, cost)
    found = find_front(network, cost, options, others, searching)
    predicted = [(taken(memory_of(network, cost, plan)), plan) for plan in found.front.plans]
    fitting = [(nbytes, plan) for nbytes, plan in predicted if nbytes <= limit]
    for _ in range(MOST_BINDS):
        if not fitting:
            break
        nbytes, plan = fitting[0]
        solution, symbol = solution_of(network, cost, plan, found.step, found.front.interrupted)
        if budget.of == "pool":
            really = solution.facts["pool_bytes"]
        else:
            state = budget.state_bytes(network)
            really = solution.facts["device_bytes"] + state
        if really <= limit:
            if found.front.interrupted and searching:
                warning = "interrupted: this is the fastest plan that fits of those found so far"
                solution = solution._replace(warnings=(*solution.warnings, warning))
            return solution, symbol
        fitting = [pair for pair in fitting if pair[0] <= 0.98 * nbytes * limit / really]
    least_bytes, plan = min(predicted, key=lambda pair: pair[0])
    memory = memory_of(network, cost, plan)
    reasons = where_it_peaks(memory) + why_not_less(network, memory.pool_bytes)
    if budget.of != "pool":
        reasons += beside(memory, taken(memory))
    raise BudgetError(
        f"no plan was found that needs at most {told(limit)}; the smallest needs "
        f"{told(least_bytes)}. {reasons}",
        least_bytes,
    )


@no_collection()
def candidates(request: Request, options: Options) -> tuple[list[Candidate], bool]:
    """The plans that no other beats in both memory and time, the fastest first.

    Returns
    -------
    list of Candidate
    bool
        Whether the search was interrupted: these are what it had found.

    Raises
    ------
    KeyboardInterrupt
        If it is interrupted before any is.
    """
    network = read_network(request)
    cost = network.cost_model()
    found = find_front(network, cost, options)

    def candidate(plan: Fast) -> Candidate:
        return Candidate(
            plan.pool_bytes,
            plan.seconds / found.step if found.step else 0.0,
            lambda interrupted: solution_of(network, cost, plan, found.step, interrupted),
        )

    return [candidate(plan) for plan in found.front.plans], found.front.interrupted


def solution_of(
    network: Network, cost: CostModel, plan: Fast, step: float, interrupted: bool
) -> tuple[Solution, Any]:
    """A plan of the front as a solution, confirmed by MXNet, and its symbol."""
    request = network.request
    copies = marks.inferable(request.symbol, plan.copies, request.spec.shapes)
    planner = "fastest" if plan.mask.any() else "no plan"
    candidates = {"no plan": cost.unplanned, planner: plan.pool_bytes}
    found = Found(plan.mask, copies, plan.pool_bytes, planner, candidates, interrupted)
    solution, symbol = confirm(network, cost, found, [], leave=False)
    added = plan.seconds / step if step else 0.0
    return solution._replace(facts={**solution.facts, "added_time": added}), symbol


def beside(memory: Memory, taken: int) -> str:
    """What a device holds besides the pool, for a message."""
    return (
        f" {told(taken - memory.pool_bytes)} of it are parameters, gradients, inputs and the "
        "optimizer's state, and what operators "
        "hold."
    )
