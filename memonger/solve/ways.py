"""The two ways to plan, marks and schedules: what plans cost, how they are found and bound.

All calls of the planners are here.
"""

from __future__ import annotations

import abc
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from memonger.costs.bind import bind, has_mkldnn, planned_mb
from memonger.costs.held import Held, held_by
from memonger.costs.lower_bound import LowerBound, lower_bound
from memonger.costs.time import measured as timing
from memonger.graph import marks
from memonger.graph.forward import KeptCopy
from memonger.graph.operators.recompute import CPU, GPU, targets_of
from memonger.graph.read import forward_graph
from memonger.graph.training import training_graphs
from memonger.planners.marks import chen2016
from memonger.planners.marks import search as marks_search
from memonger.planners.marks.copies import settle
from memonger.planners.marks.rules import Rules, kept_summary, refuse
from memonger.planners.marks.search import MarkPlan, NodeTimes, settled
from memonger.planners.marks.smallest import by_time, fastest, smallest, smallest_bound
from memonger.planners.pareto import not_dominated
from memonger.planners.trees import search as trees
from memonger.schedules import schedule as schedules
from memonger.schedules.execution.arrays import tensors_of
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import parts, unroll
from memonger.solve.memory import Memory, of_marks, of_step, wanted
from memonger.solve.request import Options, Request, fingerprint
from memonger.support.cache import Latest
from memonger.support.errors import MB
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

MARKS_PATIENCE = 0.1  # of the search for marks that a search for schedules starts from


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a search has found: nodes to mark and copies to keep, or a schedule."""

    origin: str
    counted_bytes: int  # as MXNet counts them, predicted
    recomputed: np.ndarray  # of bool, for each node
    copies: tuple[KeptCopy, ...] = ()
    schedule: schedules.Schedule | None = None
    added_time: float | None = None  # as a share of a step without a plan
    native: tuple[int, ...] = ()  # nodes that run with MXNet's own kernel instead of cuDNN's

    def carry_out(self, symbol: Any) -> Any:
        """Copy a symbol (without marks) so that it trains by this plan."""
        if self.schedule is not None:
            return scheduled(symbol, self.schedule)
        if self.recomputed.any():
            return marks.apply(symbol, self.recomputed, self.native, self.copies)
        return marks.clear(symbol)


@dataclass(frozen=True, eq=False)
class Found:
    """What a search has found: of two plans the faster first, or the smallest plan alone."""

    plans: Sequence[Candidate]
    interrupted: bool
    costs: Mapping[str, int] | None = None  # of all that was compared, as MXNet counts bytes
    unfused: int | None = None  # the least that was found without pointwise fusion


_fronts: Latest[Found] = Latest(48)


class Way(abc.ABC):
    """A network that is to be planned in one of two ways: its graphs, its rules, its costs."""

    noun = "plan"

    def __init__(self, request: Request, options: Options) -> None:
        self.request, self.options = request, options
        self.graph = graph = forward_graph(request.symbol, request.spec)
        refuse(graph)
        if any(marks.RECORD in node.hidden for node in graph.nodes):
            log.info("the network has force_mirroring marks; they are planned anew")
        self.stages = marks.stages(graph)  # the user's ``mirror_stage``
        asked, shapes = wanted(graph, request.grad_req), request.spec.shapes
        # Module asks for no gradients of its data and labels, which leaves fewer readers.
        parameters = tuple(a for a in graph.arguments if graph.nodes[a].name not in shapes)
        others = {graph.arguments, parameters} - {asked}
        trainings = training_graphs(graph, [asked, *sorted(others)])
        self.training = trainings[0]  # with the gradients that were asked for
        targets = targets_of(None if request.ctx is None else request.ctx.device_type)
        self.rules = Rules(trainings, targets, request.until, bare=not options.rules)
        self.nothing = np.zeros(len(graph.nodes), dtype=np.bool_)

    def cost(self, mask: np.ndarray) -> int:
        """Return the pool of marks as MXNet counts it; it is bound where a replay is not exact."""
        if self.unplanned.exact:
            return self.rules.replay(mask).pool_bytes
        return MB * self._bound_mb(marks.apply(self.request.symbol, mask))

    def _bound_mb(self, symbol: Any, grad_req: Any = "write") -> int:
        device = self.request.device
        return planned_mb(bind(symbol, self.graph, device, self.training.wanted, grad_req))

    @cached_property
    def unplanned(self) -> Memory:
        """What the network takes without a plan; it is bound once for it."""
        found = self._replayed(self.rules, self.nothing, self._bound_mb(self.request.symbol))
        if not found.exact:
            log.info("each plan is bound to learn its memory, for %s", found.why_inexact)
        return found

    @cached_property
    def held(self) -> Held:
        """What operators hold in training, on a GPU where no device was given."""
        ctx = self.request.ctx
        gpu = ctx is None or ctx.device_type == "gpu"
        return held_by(self.graph, GPU if gpu else CPU, not gpu and has_mkldnn(ctx))

    @cached_property
    def floor(self) -> LowerBound:
        """What no plan can do without."""
        return lower_bound(self.training, rules=not self.rules.bare)

    @cached_property
    def times(self) -> timing.Times:
        """What the operators take, without a plan."""
        return timing.times_of(self.training, self.request.device, self.options.measure)

    @property
    def no_plan(self) -> Candidate:
        """The network as it is."""
        return Candidate("no plan", self.unplanned.counted_bytes, self.nothing, added_time=0.0)

    def taken(self, memory: Memory) -> int:
        """Return the bytes of a plan that the budget bounds."""
        budget, nodes = self.options.budget, self.graph.nodes
        assert budget is not None
        if budget.of == "pool":
            return memory.pool_bytes
        inputs = self.request.spec.shapes  # which are not learned
        learned = [a for a in self.training.wanted if nodes[a].name not in inputs]
        elements = sum(self.graph.tensors[a][0].elements for a in learned)
        return memory.device_bytes + round(budget.state * elements)

    def within(self, mask: np.ndarray) -> np.ndarray:
        """Return the part of a plan that comes before ``until``."""
        until = self.request.until
        return mask if until is None else mask & (np.arange(len(mask)) < until)

    def front(self, others: Sequence[Candidate] = ()) -> Found:
        """Search for the plans that no other beats in both memory and time, or remember them.

        A search for marks starts from ``others`` too, plans of this network at other shapes.
        Ctrl-C ends the search with what it has found; KeyboardInterrupt if that is nothing.
        """
        key = fingerprint(self.request, replace(self.options, work=None, budget=None))
        found = _fronts.get(key)
        if found is not None:
            log.info("the plans of this network were searched before; one of them is chosen")
            return found
        found = self._front(others)
        if not found.interrupted:
            _fronts.put(key, found)
        return found

    def pools(self, plans: Sequence[Candidate]) -> list[int]:
        """Estimate the pools of plans: as much of what is counted as the first really takes."""
        like = self.memory(plans[0])
        real = like.planned.allocated_bytes / max(1, like.planned.pool_bytes)
        return [round(plan.counted_bytes * real) - like.gradient_bytes for plan in plans]

    def _replayed(self, rules: Rules, mask: np.ndarray, bound: int | None = None) -> Memory:
        """Replay the network, or that with kept copies whose rules these are."""
        return of_marks(rules.trainings[0], mask, bound, self.held, rules.fuses)

    @abc.abstractmethod
    def smallest(self) -> Found:
        """Search for the plan of least memory."""

    @abc.abstractmethod
    def _front(self, others: Sequence[Candidate]) -> Found: ...

    @abc.abstractmethod
    def memory(self, plan: Candidate) -> Memory:
        """Predict what a plan takes."""

    @abc.abstractmethod
    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        """Make what MXNet can carry out of a plan into a symbol, and have MXNet bind it."""


class Marks(Way):
    """Marks on the operators, by which each result is recomputed at most once."""

    def smallest(self) -> Found:
        about = self.stages, self.cost, self.rules, self.options.ntrial
        with progress_bar() as progress:
            if self.unplanned.exact:
                copies, effort = self.options.kept_copies, self._effort
                found = smallest(*about, copies, effort=effort, progress=progress)
            else:
                found = smallest_bound(*about)
        for name, counted in found.costs.items():
            log.info("%s: %.1f MB", name, counted / MB)
        self._log_kept()
        origin = min(found.costs, key=lambda name: found.costs[name])  # the first
        plan = Candidate(origin, found.plan.pool_bytes, found.plan.mask, found.plan.copies)
        return Found([plan], found.interrupted, found.costs, found.unfused)

    def _front(self, others: Sequence[Candidate]) -> Found:
        if not self.unplanned.exact:
            least = self.smallest()
            return replace(self.known(least.plans), interrupted=least.interrupted)
        about = self.stages, self.rules, self._node_times, [_mark_plan(each) for each in others]
        copies, effort = self.options.kept_copies, self._effort
        with progress_bar() as progress:
            found, interrupted = fastest(*about, copies, effort=effort, progress=progress)
        return Found([self._candidate(plan) for plan in found], interrupted)

    def known(self, others: Sequence[Candidate]) -> Found:
        """Choose of no plan and these those that no other beats, without a search."""
        plans = [MarkPlan(0, 0.0, self.nothing), *map(_mark_plan, others)]
        plans = [settled(self.rules, self._node_times, plan) for plan in plans]
        if not self.unplanned.exact:
            plans = [plan._replace(pool_bytes=self.cost(plan.mask)) for plan in plans]
        return Found([self._candidate(plan) for plan in not_dominated(plans, by_time)], False)

    def memory(self, plan: Candidate) -> Memory:
        return self._replayed(*settle(self.rules, plan.recomputed, plan.copies)[:2])

    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        symbol, shapes = self.request.symbol, self.request.spec.shapes
        copies = marks.inferable(symbol, plan.copies, shapes)
        rules, full, mask, copies = settle(self.rules, plan.recomputed, copies)
        native = tuple(self.rules.native(mask))
        plan = replace(plan, recomputed=mask, copies=copies, native=native)
        made = plan.carry_out(symbol)
        return plan, made, self._replayed(rules, full, self._bound_mb(made))

    @property
    def _effort(self) -> marks_search.Effort:
        return marks_search.EFFORT.times(self.options.patience)

    def _node_times(self, rules: Rules) -> NodeTimes:
        training = rules.trainings[0]
        found = timing.times_of(training, self.request.device, self.options.measure)
        moved = timing.moved_bytes(training)[: training.tables.forward]
        return NodeTimes(found.forward, found.gradient, moved)

    def _candidate(self, plan: MarkPlan) -> Candidate:
        origin = "fastest" if plan.mask.any() else "no plan"
        added = plan.seconds / self.times.step if self.times.step else 0.0
        return Candidate(origin, plan.pool_bytes, plan.mask, plan.copies, added_time=added)

    def _log_kept(self) -> None:
        reasons = self.rules.reasons.items()
        kept = kept_summary((self.graph.nodes[i].op, why) for i, why in reasons)
        if kept:
            log.info("kept by rule: %s", kept)


def _mark_plan(plan: Candidate) -> MarkPlan:
    return MarkPlan(plan.counted_bytes, 0.0, plan.recomputed, plan.copies)


class Original(Marks):
    """The original's search (Chen et al. 2016), trial for trial."""

    def smallest(self) -> Found:
        ntrial, interrupted = self.options.ntrial, False
        tried: list[tuple[int, np.ndarray]] = []

        def counted(mask: np.ndarray) -> int:
            mask = self.within(mask)
            tried.append((self.cost(mask) // MB, mask))
            progress(len(tried) / (3 + ntrial))
            return tried[-1][0]

        try:
            with progress_bar() as progress:
                for trial in chen2016.search(self.graph, self.stages, counted, ntrial):
                    log.info("Search threshold=%d MB, cost=%d MB", trial.threshold, trial.cost)
        except KeyboardInterrupt:
            if not tried:
                raise
            interrupted = True
        before, mask = min(tried, key=lambda pair: pair[0])  # of equals the first
        mask = self.rules.apply(mask)
        counted_bytes = self.cost(mask)
        if self.options.rules:
            self._log_kept()
            after = counted_bytes // MB
            log.info("cost=%s MB before the rules, %s MB with them", before, after)
        costs = {"no plan": self.unplanned.counted_bytes, "chen2016": counted_bytes}
        return Found([Candidate("chen2016", counted_bytes, mask)], interrupted, costs)


class Schedules(Way):
    """Schedules, by which results are recomputed as often as it pays."""

    noun = "schedule"

    def __init__(self, request: Request, options: Options) -> None:
        super().__init__(request, options)
        training, nodes = self.training, self.graph.nodes
        tensors_of(training.graph)  # refuses what is sparse
        self.load = schedules.workload(training, request.until)
        added = [a for a in training.wanted if request.grad_req[nodes[a].name] == "add"]
        self.mkldnn = request.ctx is None or has_mkldnn(request.ctx)
        self.parts = parts(self.load, (), self.mkldnn)
        self.written = parts(self.load, added, self.mkldnn) if added else self.parts

    def smallest(self) -> Found:
        return self._least([])

    def _front(self, others: Sequence[Candidate]) -> Found:
        found = self._searched(trees.ScheduleSearch.front, self.times.forward)
        return replace(found, plans=[self._timed(plan) for plan in found.plans])

    def deeper(self, found: Found) -> Found:
        """Search with little memory in mind: within a limit of work that may find less."""
        last = found.plans[-1]
        least = self._least([(last.origin, last.schedule)])
        return replace(least, plans=[*found.plans, *map(self._timed, least.plans)])

    def _least(self, others: Sequence[tuple[str, Any]]) -> Found:
        """Search for the least memory, also from ``others``: known schedules with their origins."""
        work = self.options.work
        return self._searched(lambda s, known: [s.least_memory(work, [*known, *others])])

    def _searched(
        self, search: Callable[[trees.ScheduleSearch, Any], Any], weights: np.ndarray | None = None
    ) -> Found:
        """Search from the best marks of a short search; they are what there is if that is ended."""
        options, rules, known = self.options, self.rules.unfused(), []  # as it is bound
        about = self.stages, (lambda mask: rules.replay(mask).pool_bytes), rules, options.ntrial
        interrupted = False
        with progress_bar() as progress:
            if self.unplanned.exact:
                effort = marks_search.EFFORT.times(options.patience * MARKS_PATIENCE)
                short = smallest(*about, effort=effort)
                held = [copy.node for copy in short.plan.copies]
                known = [("marks", schedules.of_marks(self.load, short.plan.mask, held))]
                interrupted = short.interrupted
            recursive = trees.ScheduleSearch(
                self.load, options.patience, progress, weights, self.parts
            )
            if interrupted:
                best = recursive.evaluate(known[0][1])
                if options.work is not None and best.work > options.work:
                    raise KeyboardInterrupt
                found = [trees.Found(best, "marks", True)]
            else:
                found = search(recursive, known)
        plans = []
        for each in found:
            schedule = each.best.schedule
            again = self._counts(schedule) > 1
            plans.append(Candidate(each.origin, each.best.pool_bytes, again, schedule=schedule))
        return Found(plans, found[0].interrupted)

    def memory(self, plan: Candidate) -> Memory:
        assert plan.schedule is not None
        step = unroll(self.written, plan.schedule)
        return of_step(step, self.request.grad_req, None, self.held)

    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        grad_req, schedule = self.request.grad_req, plan.schedule
        assert schedule is not None
        schedules.check(self.load, schedule)
        step, made = unroll(self.written, schedule), scheduled(self.request.symbol, schedule)
        made.remember(step, grad_req, self.mkldnn)
        return plan, made, of_step(step, grad_req, self._bound_mb(made, grad_req), self.held)

    def _counts(self, schedule: Any) -> np.ndarray:
        """Count how often each node runs forward."""
        return np.bincount(schedule.forwards, minlength=len(self.nothing))

    def _timed(self, plan: Candidate) -> Candidate:
        """Add to a plan the time that it is predicted to add to a step."""
        again = np.maximum(self._counts(plan.schedule) - 1, 0)
        return replace(plan, added_time=float((again * self.times.forward).sum() / self.times.step))


def way_of(request: Request, options: Options) -> Way:
    """Make the way that is asked for."""
    if options.how == "schedule":
        return Schedules(request, options)
    return (Original if options.planner == "chen2016" else Marks)(request, options)
