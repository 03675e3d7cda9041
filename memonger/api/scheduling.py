"""The schedule that a search finds for a network, made into a symbol and confirmed by MXNet."""

from __future__ import annotations

import logging
import math
import numbers
from typing import Any, Callable, Sequence

import numpy as np

from memonger.api import memory as memories
from memonger.api.budgets import Budget, told
from memonger.api.explain import slowest_segment, why_not_less
from memonger.api.memory import Memory
from memonger.api.remembered import fingerprint
from memonger.api.request import Request, read_network
from memonger.api.solution import (
    ALLOWED,
    LITTLE,
    SEARCHING,
    Candidate,
    Solution,
    left_alone,
    left_as_it_is,
    left_for_copies,
    memory_facts,
    saves_little,
)
from memonger.costs.bind import bind, has_mkldnn, planned_mb
from memonger.costs.lower_bound import floor
from memonger.costs.model import MB
from memonger.costs.time import measured as timing
from memonger.costs.time.flops import forward_flops
from memonger.graph import marks
from memonger.graph.forward import no_collection
from memonger.planners.marks.smallest import smallest
from memonger.planners.trees.search import NOTHING, Found, Recursive
from memonger.schedules.execution.arrays import tensors_of
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import parts, unroll
from memonger.schedules.schedule import Schedule, check, of_marks, workload
from memonger.schedules.training_step import TrainingStep
from memonger.support.cache import Latest
from memonger.support.errors import BudgetError, MemongerError
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

MARKS_PATIENCE = 0.1  # of the search for marks, which are schedules too: one to compare with
MOST_PATIENCE = 1e9  # it is multiplied, and must stay a number
NEARLY = 1.1  # times a budget: what is predicted to take more is not looked at
REMEMBERED = 16  # fronts

#: For each network the schedules of every size that none beats, the fastest first.
_fronts: Latest[list[Found]] = Latest(REMEMBERED)


@no_collection()
def solve_schedule(
    request: Request,
    work: float | None,
    budget: Budget | None,
    patience: float,
    ntrial: int,
    measure: bool = False,
) -> tuple[Solution, Any]:
    """Search, and confirm what was found; the parameters are those of ``memonger.plan``.

    Without a budget that is the smallest, with one the fastest.

    Returns
    -------
    Solution
    mx.sym.Symbol
        The planned network.
    """
    scheduling = _Scheduling(request, patience, ntrial)
    if budget is None:
        return scheduling.confirmed(scheduling.smallest(work), None)
    network = scheduling.network
    unplanned = budget.taken(scheduling.unplanned, network)
    if unplanned <= budget.limit(unplanned):
        log.info(ALLOWED)
        return left_alone(network, scheduling.cost)
    times = timing.times_of(network.training, request.device, measure)
    plans = scheduling.front(times, _front_key(request, patience, ntrial, measure))
    return scheduling.confirmed(scheduling.within(plans, budget, work), times)


@no_collection()
def candidates(
    request: Request, patience: float, ntrial: int, measure: bool
) -> tuple[list[Candidate], bool]:
    """The schedules that no other beats in both memory and time, the fastest first.

    Returns
    -------
    list of Candidate
    bool
        Whether the search was interrupted: these are what it had found.
    """
    scheduling = _Scheduling(request, patience, ntrial)
    network = scheduling.network
    times = timing.times_of(network.training, request.device, measure)
    plans = scheduling.front(times, _front_key(request, patience, ntrial, measure))
    taken = scheduling.predicted(plans[0].best.schedule)

    def candidate(found: Found) -> Candidate:
        added = scheduling.added_time(found.best.schedule, times)

        def confirmed(interrupted: bool) -> tuple[Solution, Any]:
            if not added and found.origin == NOTHING:
                return left_alone(network, scheduling.cost)
            return scheduling.confirmed(found._replace(interrupted=interrupted), times)

        return Candidate(round(taken(found)), added, confirmed)

    return [candidate(found) for found in plans], plans[0].interrupted


def _front_key(request: Request, patience: float, ntrial: int, measure: bool) -> str:
    return fingerprint(request, ["schedule", patience, ntrial, measure])


class _Scheduling:
    """A network that gets a schedule: the searches for it, and what schedules take."""

    def __init__(self, request: Request, patience: float, ntrial: int) -> None:
        self.request, self.patience, self.ntrial = request, patience, ntrial
        self.network = read_network(request)
        training = self.network.training
        tensors_of(request.symbol, training.graph)  # refuses what is sparse
        self.load = workload(training, request.until)
        self.parts = parts(self.load)
        nodes = self.network.graph.nodes
        self.added = [a for a in training.wanted if request.grad_req[nodes[a].name] == "add"]
        self.mkldnn = request.ctx is None or has_mkldnn(request.ctx)
        self.cost = self.network.cost_model()
        nothing = np.zeros(len(nodes), dtype=np.bool_)
        held, fuses = self.network.held, self.network.rules.fuses
        self.unplanned = memories.of_marks(training, nothing, self.cost.bound, held, fuses)

    # ------------------------------------------------------------------ what a schedule takes

    def memory(self, schedule: Schedule) -> Memory:
        """Of a schedule, as it is predicted."""
        return self.memory_of(unroll(self.parts, schedule, self.mkldnn, self.added))

    def memory_of(self, step: TrainingStep, bound: int | None = None) -> Memory:
        """Of a training step; ``bound`` is MXNet's own total in MB, else it is predicted."""
        found = memories.of_step(step, self.request.grad_req, 0, self.network.held)
        return found._replace(bound=found.replay.pool_bytes // MB if bound is None else bound)

    def counts(self, schedule: Schedule) -> np.ndarray:
        """How often each node runs forward."""
        return np.bincount(schedule.forwards, minlength=len(self.network.graph.nodes))

    def work(self, schedule: Schedule) -> float:
        """The forward FLOPs of a schedule, in times those of one forward pass."""
        flops, counts = forward_flops(self.network.graph), self.counts(schedule)
        once = float(flops[counts > 0].sum())
        return float((counts * flops).sum()) / once if once else 1.0

    def added_time(self, schedule: Schedule, times: timing.Times) -> float:
        """Of the operators that run again, as a share of a step without a plan."""
        again = np.maximum(self.counts(schedule) - 1, 0)
        return float((again * times.forward).sum() / times.step)

    def predicted(self, like: Schedule) -> Callable[[Found], float]:
        """What tells the bytes of a schedule's pool, about: as much as `like` of what is counted.

        The search counts as MXNet's planner does, 4 bytes to an element, gradients included.
        """
        memory = self.memory(like)
        real = memory.replay.allocated_bytes / max(1, memory.replay.pool_bytes)
        return lambda found: found.best.pool_bytes * real - memory.gradient_bytes

    # ------------------------------------------------------------------ searches

    def smallest(self, work: float | None, others: Sequence[tuple[str, Schedule]] = ()) -> Found:
        """The schedule of least memory, with at most so much forward work."""
        with progress_bar(SEARCHING) as progress:
            known, interrupted = self._marks()
            search = Recursive(self.load, self.patience, progress, made=self.parts)
            if interrupted:
                return _in_hand(search, known, work)
            return search.least_memory(work, [*known, *others])

    def front(self, times: timing.Times, key: str) -> list[Found]:
        """The schedules of every size that none beats in memory and time, the fastest first.

        They are remembered by ``key``.
        """
        plans = _fronts.get(key)
        if plans is not None:
            return plans
        with progress_bar(SEARCHING) as progress:
            known, interrupted = self._marks()
            search = Recursive(self.load, self.patience, progress, times.forward, self.parts)
            if interrupted:
                return [_in_hand(search, known, None)]
            plans = search.front(known)
        if not plans[0].interrupted:
            _fronts.put(key, plans)
        return plans

    def within(self, plans: Sequence[Found], budget: Budget, work: float | None) -> Found:
        """The fastest of these schedules within a budget.

        Raises
        ------
        BudgetError
            If none fits.
        """
        try:
            return self._within(plans, budget, work)
        except BudgetError:  # a search for little memory, with so much work, may find less
            last = plans[-1]
            least = self.smallest(work, [(last.origin, last.best.schedule)])
            return self._within([*plans, least], budget, work)

    def _marks(self) -> tuple[list[tuple[str, Schedule]], bool]:
        """The best marks of a short search, and whether it was interrupted."""
        if not self.cost.exact:
            return [], False
        network, patience = self.network, self.patience * MARKS_PATIENCE
        rules = network.rules.unfused()  # as a schedule is bound

        def cost(mask: np.ndarray) -> int:
            return rules.replay(mask).pool_bytes

        found = smallest(network.stages, cost, rules, self.ntrial, patience=patience)
        held = [copy.node for copy in found.copies]
        return [("marks", of_marks(self.load, found.mask, held))], found.interrupted

    def _within(self, plans: Sequence[Found], budget: Budget, work: float | None) -> Found:
        """The first of these schedules of which no more than the budget is taken.

        So with more memory it can only be the same, or one before it.
        """

        def taken(memory: Memory) -> int:
            return budget.taken(memory, self.network)

        limit = budget.limit(taken(self.unplanned))
        usual = self.memory(plans[0].best.schedule)
        beside = taken(usual) - usual.pool_bytes  # what no schedule changes
        pool = self.predicted(plans[0].best.schedule)
        least, least_work = taken(usual), math.inf
        for found in plans:
            if pool(found) + beside > NEARLY * limit and found is not plans[-1]:
                continue
            needed = taken(self.memory(found.best.schedule))
            least = min(least, needed)
            if needed <= limit:
                needed_work = self.work(found.best.schedule)
                if work is None or needed_work <= work * (1 + 1e-9):
                    return found
                least_work = min(least_work, needed_work)
        if work is not None and least_work < math.inf:
            raise BudgetError(
                f"a budget of {limit / MB:.1f} MB takes {least_work:.2f} times the forward work, "
                f"more than work={work:g}; give "
                "either more memory or more work",
                least,
            )
        if plans[0].interrupted:
            raise KeyboardInterrupt
        message = (
            f"no schedule{('' if work is None else f' of work={work:g}')} was found that needs at "
            f"most {told(limit)}; the smallest needs {told(least)}. "
            f"{why_not_less(self.network, least - beside)}"
        )
        raise BudgetError(message.rstrip(), least)

    # ------------------------------------------------------------------ what was found

    def confirmed(self, found: Found, times: timing.Times | None) -> tuple[Solution, Any]:
        """A schedule bound by MXNet, or the network as it is if nothing is saved; its symbol.

        ``times`` are those of operators where there is a budget.
        """
        request, network, unplanned = self.request, self.network, self.unplanned
        schedule, counts = found.best.schedule, self.counts(found.best.schedule)
        check(self.load, schedule)
        step = unroll(self.parts, schedule, self.mkldnn, self.added)
        symbol = scheduled(request.symbol, schedule)
        symbol.remember(step, request.grad_req, self.mkldnn)
        wanted, grad_req = network.training.wanted, request.grad_req
        bound = planned_mb(bind(symbol, network.graph, request.device, wanted, grad_req))
        planned = self.memory_of(step, bound)
        warnings = []
        if not planned.inexact and not planned.exact:
            warnings.append(
                "the memory of this schedule was predicted as %.1f MB, and MXNet plans %d MB for "
                "it; the figures of the plan are MXNet's" % (planned.replay.pool_bytes / MB, bound)
            )
        if found.interrupted:
            warnings.append(
                "interrupted: this is the best schedule that was found so far, of "
                f"{planned.pool_bytes / MB:.1f} MB ({unplanned.pool_bytes / MB:.1f} "
                "MB without a plan)"
            )
        candidates = {"no plan": unplanned.counted_bytes, found.origin: planned.counted_bytes}
        origin = found.origin
        chosen: Schedule | None = schedule
        saved = planned.saved(unplanned)
        if saved <= 0 or (times is None and planned.holds_more_than(unplanned)):
            if saved > 0:
                warnings.append(left_for_copies(planned, unplanned))
            else:
                warnings.append(left_as_it_is(network, unplanned, candidates))
            symbol, chosen, planned, origin = (
                marks.clear(request.symbol),
                None,
                unplanned,
                "no plan",
            )
            counts = np.minimum(counts, 1)
        elif times is None and saved < LITTLE * unplanned.pool_bytes:
            warnings.append(saves_little(network, unplanned, planned, candidates))
        facts = {
            **memory_facts(planned, unplanned),
            "recomputed_flops": self.work(chosen) - 1 if chosen is not None else 0.0,
            "planner": origin,
            "candidates": candidates,
            "interrupted": found.interrupted,
        }
        if times is not None:
            facts["added_time"] = 0.0 if chosen is None else self.added_time(chosen, times)
        least, slowest = floor(network.training), slowest_segment(planned.replay)
        return Solution(counts > 1, (), (), facts, tuple(warnings), chosen, least, slowest), symbol


def _in_hand(search: Recursive, others: list[tuple[str, Schedule]], work: float | None) -> Found:
    """What is known when the user ends the search before it has begun."""
    name, schedule = others[0]
    best = search.judge(schedule)
    if work is not None and best.work > work:
        raise KeyboardInterrupt
    return Found(best, name, True)


def check_limits(how: str, work: Any, patience: Any) -> tuple[Any, float]:
    """Check what the user says of work and the search; ``work`` and ``patience``."""
    if work is not None:
        work = _number("work", work)
        if not work >= 1:
            raise MemongerError(
                f"work={work:g}: a training step runs all of the network forward at least once, so "
                "work is 1 or more; None for no limit"
            )
    if how == "marks" and work is not None and work < 2:
        raise MemongerError(
            f"work={work:g} cannot be kept with how='marks', by which each result is computed "
            "again at most once (work=2); how='schedule' can"
        )
    patience = _number("patience", patience)
    if not 0 < patience <= MOST_PATIENCE:
        raise MemongerError(
            f"patience={patience:g}: it is how many times the usual length the search takes, more "
            f"than 0 and at most {MOST_PATIENCE:g}"
        )
    return work, patience


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise MemongerError(f"{name} is larger than any number that counts here") from None
