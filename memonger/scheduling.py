"""The schedule that a search finds for a network, made into a symbol and confirmed by MXNet."""

import logging
import numbers
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from memonger import marks, timing
from memonger import memory as memories
from memonger.bounds import floor
from memonger.budgets import Budget, told
from memonger.costs import MB, CostModel
from memonger.errors import BudgetError, MemongerError
from memonger.executor import bind, has_mkldnn, planned_mb
from memonger.explanation import slowest_segment, why_not_less
from memonger.forward import no_collection
from memonger.memory import Memory
from memonger.network import Network, Request, read_network
from memonger.planners.recursive import Found, Recursive
from memonger.planners.smallest import smallest
from memonger.progress import Progress
from memonger.schedule import Schedule, Workload, of_marks, plain, workload
from memonger.scheduled import scheduled
from memonger.solution import (
    LITTLE,
    SEARCHING,
    Solution,
    left_alone,
    left_as_it_is,
    memory_facts,
    saves_little,
)
from memonger.unrolled import parts, unroll

log = logging.getLogger("memonger")

MARKS_PATIENCE = 0.1  # of the search for marks, which are schedules too: one to compare with
MOST_SEARCHES = 5  # for a budget, until what is allocated fits
TOO_MUCH = 1.01  # times what a schedule takes too much, its limit is lowered for the next search


@no_collection()
def solve_schedule(
    request: Request, work: Optional[float], budget: Optional[Budget], patience: float, ntrial: int
) -> Tuple[Solution, Any]:
    """Search, and confirm what was found; the parameters are those of ``memonger.plan``.

    Returns
    -------
    Solution
    mx.sym.Symbol
        The planned network.
    """
    network = read_network(request)
    load = workload(network.training)
    if request.until is not None:
        load.once[request.until :] = True
    made = parts(load)
    nodes = network.graph.nodes
    added = [a for a in network.training.wanted if request.grad_req[nodes[a].name] == "add"]
    mkldnn = request.ctx is None or has_mkldnn(request.ctx)
    cost = network.cost_model()
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    unplanned = memories.of_marks(network.training, nothing, cost.bound)

    def memory(schedule: Schedule, bound: Optional[int] = None) -> Memory:
        found = memories.of_step(unroll(made, schedule, mkldnn, added), request.grad_req, 0)
        return found._replace(bound=found.replay.pool_bytes // MB if bound is None else bound)

    def taken(found: Memory) -> int:
        if budget is None:
            return found.pool_bytes
        return budget.taken(found, network)

    limit = None if budget is None else budget.limit(taken(unplanned))
    if limit is not None and taken(unplanned) <= limit:
        return left_alone(network, cost)
    with Progress(SEARCHING) as progress:
        others, interrupted = _as_schedule(load, network, cost, patience, ntrial)
        search = Recursive(load, patience, progress)
        if interrupted:
            found = _in_hand(search, others, work, limit, memory, taken)
        elif limit is None:
            found = search.least_memory(work, others)
        else:
            found = _within(network, search, limit, work, others, memory, taken)
    schedule = found.best.schedule
    symbol = scheduled(request.symbol, schedule)
    wanted, grad_req = network.training.wanted, request.grad_req
    bound = planned_mb(bind(symbol, network.graph, request.device, wanted, grad_req))
    planned = memory(schedule, bound)
    warnings = []
    if not planned.inexact and not planned.exact:
        warnings.append(
            "the memory of this schedule was predicted as %.1f MB, and MXNet plans %d MB for it; "
            "the figures of the plan are MXNet's" % (planned.replay.pool_bytes / MB, bound)
        )
    if found.interrupted:
        warnings.append(
            "interrupted: this is the best schedule that was found so far, of %.1f MB (%.1f MB "
            "without a plan)" % (planned.pool_bytes / MB, unplanned.pool_bytes / MB)
        )
    candidates = {"no plan": unplanned.counted_bytes, found.origin: planned.counted_bytes}
    origin, counts = found.origin, np.bincount(schedule.forwards, minlength=len(nothing))
    facts: Dict[str, Any] = {"recomputed_flops": max(0.0, found.best.work - 1)}
    if budget is not None:
        times = timing.predicted(network.training, timing.rates_of(request.device))
        seconds = (np.maximum(counts - 1, 0) * times.forward).sum()
        facts["added_time"] = float(seconds / times.step)
    chosen: Optional[Schedule] = schedule
    if planned.saved(unplanned) <= 0:
        symbol, chosen, planned, origin = marks.clear(request.symbol), None, unplanned, "no plan"
        facts["recomputed_flops"], counts = 0.0, np.minimum(counts, 1)
        facts["added_time"] = None if budget is None else 0.0
        warnings.append(left_as_it_is(network, unplanned, candidates))
    elif budget is None and planned.saved(unplanned) < LITTLE * unplanned.pool_bytes:
        warnings.append(saves_little(network, unplanned, planned, candidates))
    facts.update(
        memory_facts(planned, unplanned),
        planner=origin,
        candidates=candidates,
        interrupted=found.interrupted,
    )
    least, slowest = floor(network.training), slowest_segment(planned.replay)
    return Solution(counts > 1, (), (), facts, tuple(warnings), chosen, least, slowest), symbol


def check_limits(how: str, work: Any, patience: Any) -> Tuple[Any, float]:
    """Check what the user says of work and the search; ``work`` and ``patience``."""
    if work is not None:
        work = _number("work", work)
        if not work >= 1:
            raise MemongerError(
                "work=%g: a training step runs all of the network forward at least once, so work "
                "is 1 or more; None for no limit" % work
            )
    if how == "marks" and work is not None and work < 2:
        raise MemongerError(
            "work=%g cannot be kept with how='marks', by which each result is computed again at "
            "most once (work=2); how='schedule' can" % work
        )
    patience = _number("patience", patience)
    if not 0 < patience < float("inf"):
        raise MemongerError(
            "patience=%g: it is how many times the usual length the search takes, more than 0"
            % patience
        )
    return work, patience


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError("%s must be a number, not %r" % (name, value))
    return float(value)


def _as_schedule(
    load: Workload, network: Network, cost: CostModel, patience: float, ntrial: int
) -> Tuple[List[Tuple[str, Schedule]], bool]:
    """The best marks of a short search, and whether it was interrupted."""
    if not cost.exact:
        return [], False
    found = smallest(
        network.stages, cost, network.rules, ntrial, patience=patience * MARKS_PATIENCE
    )
    held = [copy.node for copy in found.copies]
    return [("marks", of_marks(load, found.mask, held))], found.interrupted


def _in_hand(
    search: Recursive,
    others: List[Tuple[str, Schedule]],
    work: Optional[float],
    budget: Optional[int],
    memory: Callable[[Schedule], Memory],
    taken: Callable[[Memory], int],
) -> Found:
    """What is known when the user ends the search before it has begun."""
    name, schedule = others[0]
    best = search.judge(schedule)
    if (work is not None and best.work > work) or (
        budget is not None and taken(memory(schedule)) > budget
    ):
        raise KeyboardInterrupt
    return Found(best, name, True)


def _within(
    network: Network,
    search: Recursive,
    budget: int,
    work: Optional[float],
    others: Sequence[Tuple[str, Schedule]],
    memory: Callable[[Schedule], Memory],
    taken: Callable[[Memory], int],
) -> Found:
    """The schedule of least work of which no more than the budget is taken.

    The search counts as MXNet's planner does: 4 bytes to an element, gradients included. What is
    allocated is known of one schedule at a time, so the limit of the search is put right by what
    its schedule takes too much.
    """
    usual = memory(plain(search.workload))
    beside = taken(usual) - usual.pool_bytes - usual.gradient_bytes  # what no schedule changes
    share = usual.replay.pool_bytes / max(1, usual.replay.allocated_bytes)
    limit = max(1, int((budget - beside) * share))
    least, smallest_tried = taken(usual), False
    for _ in range(MOST_SEARCHES):
        try:
            found = search.least_work(limit, others)
        except BudgetError as error:
            if smallest_tried:
                break
            limit, smallest_tried = error.least_bytes, True
            continue
        needed = taken(memory(found.best.schedule))
        if needed <= budget:
            return _within_work(found, budget, work)
        least = min(least, needed)
        if smallest_tried:
            break
        limit = max(1, int(limit - TOO_MUCH * (needed - budget) * share))
    raise BudgetError(
        "no schedule was found that needs at most %s; the smallest needs %s. %s"
        % (told(budget), told(least), why_not_less(network)),
        least,
    )


def _within_work(found: Found, budget: int, work: Optional[float]) -> Found:
    if work is not None and found.best.work > work * (1 + 1e-9):
        raise MemongerError(
            "a budget of %.1f MB takes %.2f times the forward work, more than work=%g; give either "
            "more memory or more work" % (budget / MB, found.best.work, work)
        )
    return found
