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
from memonger.flops import forward_flops
from memonger.forward import no_collection
from memonger.memory import Memory
from memonger.network import Network, Request, read_network
from memonger.planners.recursive import Found, Recursive
from memonger.planners.smallest import smallest
from memonger.progress import Progress
from memonger.remembered import Remembered, fingerprint
from memonger.schedule import Schedule, Workload, of_marks, workload
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
NEARLY = 1.1  # times a budget: what is predicted to take more is not looked at
REMEMBERED = 16  # fronts

#: For each network the schedules of every size that none beats, the fastest first.
_fronts: "Remembered[List[Found]]" = Remembered(REMEMBERED)


def forget() -> None:
    """Forget the schedules that were found in this process."""
    _fronts.clear()


@no_collection()
def solve_schedule(
    request: Request,
    work: Optional[float],
    budget: Optional[Budget],
    patience: float,
    ntrial: int,
    measure: bool = False,
) -> Tuple[Solution, Any]:
    """Search, and confirm what was found; the parameters are those of ``memonger.plan``.

    Without a budget that is the smallest, with one the fastest.

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

    def least_memory(others: Sequence[Tuple[str, Schedule]] = ()) -> Found:
        with Progress(SEARCHING) as progress:
            known, interrupted = _as_schedule(load, network, cost, patience, ntrial)
            search = Recursive(load, patience, progress)
            if interrupted:
                return _in_hand(search, known, work)
            return search.least_memory(work, [*known, *others])

    def front() -> List[Found]:
        with Progress(SEARCHING) as progress:
            known, interrupted = _as_schedule(load, network, cost, patience, ntrial)
            search = Recursive(load, patience, progress, times.forward)
            if interrupted:
                return [_in_hand(search, known, None)]
            return search.front(known)

    def again(schedule: Schedule) -> float:
        return _work(network, schedule, forward_flops(network.graph))

    if budget is None:
        found = least_memory()
    else:
        times = timing.times_of(network.training, request.device, measure)
        limit = budget.limit(taken(unplanned))
        if taken(unplanned) <= limit:
            return left_alone(network, cost)
        key = fingerprint(request, ["schedule", patience, ntrial, measure])
        plans = _fronts.get(key) or front()
        if not plans[0].interrupted:
            _fronts.put(key, plans)
        try:
            found = _within(network, plans, limit, work, memory, taken, again)
        except BudgetError:  # a search for nothing but little memory may find less
            plans = [*plans, least_memory([("front", plans[-1].best.schedule)])]
            found = _within(network, plans, limit, work, memory, taken, again)
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
    facts: Dict[str, Any] = {"recomputed_flops": max(0.0, again(schedule) - 1)}
    if budget is not None:
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


def _in_hand(search: Recursive, others: List[Tuple[str, Schedule]], work: Optional[float]) -> Found:
    """What is known when the user ends the search before it has begun."""
    name, schedule = others[0]
    best = search.judge(schedule)
    if work is not None and best.work > work:
        raise KeyboardInterrupt
    return Found(best, name, True)


def _work(network: Network, schedule: Schedule, weights: np.ndarray) -> float:
    """The forward work of a schedule, in times that of one forward pass."""
    counts = np.bincount(schedule.forwards, minlength=len(weights))
    once = float(weights[counts > 0].sum())
    return float((counts * weights).sum()) / once if once else 1.0


def _within(
    network: Network,
    plans: Sequence[Found],
    budget: int,
    work: Optional[float],
    memory: Callable[[Schedule], Memory],
    taken: Callable[[Memory], int],
    flops: Callable[[Schedule], float],
) -> Found:
    """The fastest of these schedules of which no more than the budget is taken.

    It is the first that fits: with more memory it can only be the same, or one before it.
    """
    usual = memory(plans[0].best.schedule)  # without recomputation
    beside = taken(usual) - usual.pool_bytes - usual.gradient_bytes  # what no schedule changes
    real = usual.replay.allocated_bytes / max(1, usual.replay.pool_bytes)
    least, most_work = usual, 0.0
    for found in plans:
        if found.best.pool_bytes * real + beside > NEARLY * budget and found is not plans[-1]:
            continue
        planned = memory(found.best.schedule)
        least = min(least, planned, key=taken)
        if taken(planned) <= budget:
            needed = flops(found.best.schedule)
            if work is None or needed <= work * (1 + 1e-9):
                return found
            most_work = max(most_work, needed)
    if work is not None and most_work:
        raise MemongerError(
            "a budget of %.1f MB takes %.2f times the forward work, more than work=%g; give either "
            "more memory or more work" % (budget / MB, most_work, work)
        )
    if plans[0].interrupted:
        raise KeyboardInterrupt
    raise _refusal(network, budget, taken(least))


def _refusal(network: Network, budget: int, least: int) -> BudgetError:
    return BudgetError(
        "no schedule was found that needs at most %s; the smallest needs %s. %s"
        % (told(budget), told(least), why_not_less(network)),
        least,
    )
