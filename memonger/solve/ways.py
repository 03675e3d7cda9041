"""The two ways to plan, marks and schedules, with one face; all calls of the planners are here."""

from __future__ import annotations

import abc
import dataclasses
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from memonger.costs.bind import bind, has_mkldnn, planned_mb
from memonger.costs.memory import CostModel
from memonger.costs.time import measured as timing
from memonger.costs.time.flops import forward_flops
from memonger.graph import marks
from memonger.graph.forward import KeptCopy, mask_with_copies
from memonger.planners.marks import chen2016
from memonger.planners.marks import search as marks_search
from memonger.planners.marks.copies import settle
from memonger.planners.marks.rules import Rules, kept_summary
from memonger.planners.marks.search import MarkPlan, NodeTimes, settled
from memonger.planners.marks.smallest import Least, by_time, fastest, smallest, smallest_bound
from memonger.planners.pareto import not_dominated
from memonger.planners.trees import search as trees
from memonger.schedules import schedule as schedules
from memonger.schedules.execution.arrays import tensors_of
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import parts, unroll
from memonger.schedules.schedule import Schedule, workload
from memonger.schedules.training_step import TrainingStep
from memonger.solve.memory import Memory, of_marks, of_step
from memonger.solve.request import Network, Options, Request, fingerprint, read_network
from memonger.support.cache import Latest
from memonger.support.errors import MB
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

MARKS_PATIENCE = 0.1  # of the search for marks that a search for schedules starts from
REMEMBERED = 48  # fronts
FASTEST = "fastest"  # the origin of marks of a front, whose bytes are at most as told there
SEARCHING = "memonger: searching"  # what the progress bar says


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a search has found: nodes to mark and copies to keep, or a schedule.

    ``counted_bytes`` are as MXNet counts them, predicted.
    """

    origin: str
    counted_bytes: int
    recomputed: np.ndarray  # of bool, for each node
    copies: tuple[KeptCopy, ...] = ()
    schedule: Schedule | None = None
    added_time: float | None = None  # as a share of a step without a plan


@dataclass(frozen=True, eq=False)
class Found:
    """What a search has found: of two plans the faster first, or the smallest plan alone."""

    plans: Sequence[Candidate]
    interrupted: bool
    costs: Mapping[str, int] | None = None  # of all that was compared, as MXNet counts bytes
    unfused: int | None = None  # the least that was found without pointwise fusion


_fronts: Latest[Found] = Latest(REMEMBERED)

Progress = Callable[[float], None]  # is told the share of the search that is done


class Way(abc.ABC):
    """A network that is to be planned, in one of two ways."""

    noun = "plan"

    def __init__(self, request: Request, options: Options) -> None:
        self.request, self.options = request, options
        self.network: Network = read_network(request, options.rules)
        self.nothing = np.zeros(len(self.network.graph.nodes), dtype=np.bool_)

    @cached_property
    def cost(self) -> CostModel:
        return self.network.cost_model()

    @cached_property
    def unplanned(self) -> Memory:
        """What the network takes without a plan."""
        network = self.network
        fuses, bound = network.rules.fuses, self.cost.bound
        return of_marks(network.training, self.nothing, bound, network.held, fuses)

    @cached_property
    def times(self) -> timing.Times:
        """What the operators take, without a plan."""
        return timing.times_of(self.network.training, self.request.device, self.options.measure)

    @property
    def no_plan(self) -> Candidate:
        return Candidate("no plan", self.cost.unplanned, self.nothing, added_time=0.0)

    def taken(self, memory: Memory) -> int:
        """The bytes of a plan that the budget bounds."""
        assert self.options.budget is not None
        return self.options.budget.taken(memory, self.network.learned)

    def front(self, others: Sequence[Candidate] = ()) -> Found:
        """Search for the plans that no other beats in both memory and time.

        A search for marks starts from ``others`` too, plans of this network at other shapes.
        Ctrl-C ends the search with what it has found; KeyboardInterrupt if that is nothing.
        """
        key = fingerprint(self.request, dataclasses.replace(self.options, work=None, budget=None))
        found = _fronts.get(key)
        if found is not None:
            log.info("the plans of this network are known; one of them is chosen")
            return found
        with progress_bar(SEARCHING) as progress:
            found = self._front(progress, others)
        if not found.interrupted:
            _fronts.put(key, found)
        return found

    def deeper(self, found: Found) -> Found | None:
        """Search for smaller plans than those of a front; None if this way knows none."""
        return None

    def feasible(self, plan: Candidate) -> Candidate:
        """The part of a plan that MXNet can carry out."""
        return plan

    def work(self, plan: Candidate) -> float:
        """The most forward work of a step, in times that of one forward pass."""
        return 2.0

    def pools(self, plans: Sequence[Candidate]) -> list[int]:
        """The pools of plans, about: as much of what is counted as the first really takes."""
        like = self.memory(plans[0])
        real = like.planned.allocated_bytes / max(1, like.planned.pool_bytes)
        return [round(plan.counted_bytes * real) - like.gradient_bytes for plan in plans]

    @abc.abstractmethod
    def smallest(self) -> Found:
        """Search for the plan of least memory."""

    @abc.abstractmethod
    def _front(self, progress: Progress, others: Sequence[Candidate]) -> Found: ...

    @abc.abstractmethod
    def memory(self, plan: Candidate) -> Memory:
        """Predict what a plan takes."""

    @abc.abstractmethod
    def bound(self, plan: Candidate) -> tuple[Any, Memory]:
        """Make a plan into a symbol, and have MXNet bind it."""


class Marks(Way):
    """Marks on the operators, by which each result is recomputed at most once."""

    def smallest(self) -> Found:
        with progress_bar(SEARCHING) as progress:
            found = self._smallest(progress)
        for name, counted in found.costs.items():
            log.info("%s: %.1f MB", name, counted / MB)
        self._log_kept()
        origin = min(found.costs, key=lambda name: found.costs[name])  # the first
        plan = Candidate(origin, found.plan.pool_bytes, found.plan.mask, found.plan.copies)
        return Found([plan], found.interrupted, found.costs, found.unfused)

    def _front(self, progress: Progress, others: Sequence[Candidate]) -> Found:
        network, options = self.network, self.options
        if not self.cost.exact:
            least = self._smallest(progress)
            return Found(self._not_dominated([least.plan]), least.interrupted)
        plans = [self._plan(each) for each in others]
        found, interrupted = fastest(
            network.stages,
            network.rules,
            self._node_times,
            plans,
            options.kept_copies,
            effort=self._effort,
            progress=progress,
        )
        return Found([self._candidate(plan) for plan in found], interrupted)

    def known(self, others: Sequence[Candidate]) -> Found:
        """No plan, and plans of this network at other shapes, without a search."""
        return Found(self._not_dominated([self._plan(each) for each in others]), False)

    def feasible(self, plan: Candidate) -> Candidate:
        """The plan with those copies alone that it needs and whose shapes MXNet will know."""
        copies = marks.inferable(self.request.symbol, plan.copies, self.request.spec.shapes)
        if copies == plan.copies and not (plan.origin == FASTEST and self.cost.exact):
            return plan
        _, _, mask, copies = settle(self.network.rules, plan.recomputed, copies)
        plan = dataclasses.replace(plan, recomputed=mask, copies=copies)
        return dataclasses.replace(plan, counted_bytes=self.memory(plan).planned.pool_bytes)

    def memory(self, plan: Candidate) -> Memory:
        """Predict what a plan takes, with none but the copies that it needs."""
        rules, full, _, _ = settle(self.network.rules, plan.recomputed, plan.copies)
        return of_marks(rules.trainings[0], full, None, self.network.held, rules.fuses)

    def bound(self, plan: Candidate) -> tuple[Any, Memory]:
        network, request = self.network, self.request
        native = network.rules.native(plan.recomputed)
        symbol = marks.apply(request.symbol, plan.recomputed, native, plan.copies)
        executor = bind(symbol, network.graph, request.device, network.training.wanted)
        return symbol, self._memory(plan, planned_mb(executor))

    def _memory(self, plan: Candidate, bound: int) -> Memory:
        rules, moved = self.network.rules.with_copies(plan.copies)
        mask = mask_with_copies(plan.recomputed, moved, plan.copies, len(rules.graph.nodes))
        return of_marks(rules.trainings[0], mask, bound, self.network.held, rules.fuses)

    def _smallest(self, progress: Progress) -> Least:
        network, cost, options = self.network, self.cost, self.options
        stages, rules, ntrial = network.stages, network.rules, options.ntrial
        if not cost.exact:
            return smallest_bound(stages, cost, rules, ntrial)
        copies, effort = options.kept_copies, self._effort
        return smallest(stages, cost, rules, ntrial, copies, effort=effort, progress=progress)

    @property
    def _effort(self) -> marks_search.Effort:
        return marks_search.EFFORT.times(self.options.patience)

    def _node_times(self, rules: Rules) -> NodeTimes:
        training = rules.trainings[0]
        found = timing.times_of(training, self.request.device, self.options.measure)
        moved = timing.moved_bytes(training)[: training.tables.forward]
        return NodeTimes(found.forward, found.gradient, moved)

    def _not_dominated(self, plans: Sequence[MarkPlan]) -> list[Candidate]:
        """Of no plan and these those that no other beats, the fastest first."""
        rules, times = self.network.rules, self._node_times
        plans = [settled(rules, times, p) for p in [MarkPlan(0, 0.0, self.nothing), *plans]]
        if not self.cost.exact:
            plans = [plan._replace(pool_bytes=self.cost(plan.mask)) for plan in plans]
        return [self._candidate(plan) for plan in not_dominated(plans, by_time)]

    def _plan(self, plan: Candidate) -> MarkPlan:
        return MarkPlan(plan.counted_bytes, 0.0, plan.recomputed, plan.copies)

    def _candidate(self, plan: MarkPlan) -> Candidate:
        origin = FASTEST if plan.mask.any() else "no plan"
        added = plan.seconds / self.times.step if self.times.step else 0.0
        return Candidate(origin, plan.pool_bytes, plan.mask, plan.copies, added_time=added)

    def _log_kept(self) -> None:
        nodes, reasons = self.network.graph.nodes, self.network.rules.reasons
        kept = kept_summary((nodes[i].op, why) for i, why in reasons.items())
        if kept:
            log.info("kept by rule: %s", kept)


def _pairs(plans: Sequence[Candidate]) -> list[tuple[np.ndarray, tuple[KeptCopy, ...]]]:
    return [(plan.recomputed, plan.copies) for plan in plans]


class Original(Marks):
    """The original's search (Chen et al. 2016), trial for trial."""

    def smallest(self) -> Found:
        network, cost, ntrial = self.network, self.cost, self.options.ntrial
        tried: list[tuple[int, np.ndarray]] = []
        interrupted = False

        def counted(mask: np.ndarray) -> int:
            mask = network.within(mask)
            tried.append((cost(mask) // MB, mask))
            progress(len(tried) / (3 + ntrial))
            return tried[-1][0]

        try:
            with progress_bar(SEARCHING) as progress:
                trials = chen2016.search(network.graph, network.stages, counted, ntrial)
            for trial in trials:
                log.info("Search threshold=%d MB, cost=%d MB", trial.threshold, trial.cost)
            best = chen2016.best(trials)
            log.info("Find best plan with threshold=%d, cost=%d MB", best.threshold, best.cost)
        except KeyboardInterrupt:
            if not tried:
                raise
            interrupted = True
        bare, mask = min(tried, key=lambda pair: pair[0])  # of equals the first
        if self.options.rules:
            mask = network.rules.apply(mask)
            self._log_kept()
            log.info("cost=%s MB before the rules, %s MB with them", bare, cost(mask) // MB)
        plan = Candidate("chen2016", cost(mask), mask)
        costs = {"no plan": cost.unplanned, "chen2016": plan.counted_bytes}
        return Found([plan], interrupted, costs)


class Schedules(Way):
    """Schedules, by which results are recomputed as often as it pays."""

    noun = "schedule"

    def __init__(self, request: Request, options: Options) -> None:
        super().__init__(request, options)
        training, nodes = self.network.training, self.network.graph.nodes
        tensors_of(request.symbol, training.graph)  # refuses what is sparse
        self.load = workload(training, request.until)
        self.parts = parts(self.load)
        self.added = [a for a in training.wanted if request.grad_req[nodes[a].name] == "add"]
        self.mkldnn = request.ctx is None or has_mkldnn(request.ctx)

    def smallest(self) -> Found:
        return self._found(self._least(), None)

    def _front(self, progress: Progress, others: Sequence[Candidate]) -> Found:
        found = self._searched(progress, self.times.forward, trees.Recursive.front)
        return self._found(found, self.times)

    def deeper(self, found: Found) -> Found | None:
        """With little memory in mind a search within a limit of work may find less."""
        last = found.plans[-1]
        least = self._found(self._least([(last.origin, last.schedule)]), self.times)
        return Found([*found.plans, *least.plans], least.interrupted)

    def _least(self, others: Sequence[tuple[str, Any]] = ()) -> list[trees.Found]:
        """``others`` are known schedules with their origins, from which the search starts too."""
        work = self.options.work

        def least(search: trees.Recursive, known: list[tuple[str, Schedule]]) -> list[trees.Found]:
            return [search.least_memory(work, [*known, *others])]

        with progress_bar(SEARCHING) as progress:
            return self._searched(progress, None, least)

    def memory(self, plan: Candidate) -> Memory:
        return self._memory(self._step(plan), None)

    def bound(self, plan: Candidate) -> tuple[Any, Memory]:
        network, request = self.network, self.request
        assert plan.schedule is not None
        schedules.check(self.load, plan.schedule)
        step = self._step(plan)
        symbol = scheduled(request.symbol, plan.schedule)
        symbol.remember(step, request.grad_req, self.mkldnn)
        wanted, grad_req = network.training.wanted, request.grad_req
        executor = bind(symbol, network.graph, request.device, wanted, grad_req)
        return symbol, self._memory(step, planned_mb(executor))

    def work(self, plan: Candidate) -> float:
        flops, counts = forward_flops(self.network.graph), self._counts(plan.schedule)
        once = float(flops[counts > 0].sum())
        return float((counts * flops).sum()) / once if once else 1.0

    def _counts(self, schedule: Any) -> np.ndarray:
        """How often each node runs forward."""
        return np.bincount(schedule.forwards, minlength=len(self.nothing))

    def _step(self, plan: Candidate) -> TrainingStep:
        assert plan.schedule is not None
        return unroll(self.parts, plan.schedule, self.mkldnn, self.added)

    def _memory(self, step: TrainingStep, bound: int | None) -> Memory:
        return of_step(step, self.request.grad_req, bound, self.network.held)

    def _searched(
        self, progress: Progress, weights: np.ndarray | None, search: Callable[..., Any]
    ) -> list[trees.Found]:
        """Search from the best marks of a short search; they are what there is if that is ended."""
        network, options = self.network, self.options
        known, interrupted = [], False
        if self.cost.exact:
            rules = network.rules.unfused()  # as a schedule is bound
            found = smallest(
                network.stages,
                lambda mask: rules.replay(mask).pool_bytes,
                rules,
                options.ntrial,
                effort=marks_search.EFFORT.times(options.patience * MARKS_PATIENCE),
            )
            held = [copy.node for copy in found.plan.copies]
            known = [("marks", schedules.of_marks(self.load, found.plan.mask, held))]
            interrupted = found.interrupted
        recursive = trees.Recursive(self.load, options.patience, progress, weights, self.parts)
        if not interrupted:
            return search(recursive, known)
        best = recursive.judge(known[0][1])
        if options.work is not None and best.work > options.work:
            raise KeyboardInterrupt
        return [trees.Found(best, "marks", True)]

    def _found(self, found: Sequence[trees.Found], times: timing.Times | None) -> Found:
        plans = []
        for each in found:
            schedule, counts = each.best.schedule, self._counts(each.best.schedule)
            plan = Candidate(each.origin, each.best.pool_bytes, counts > 1, schedule=schedule)
            if times is not None:
                again = np.maximum(counts - 1, 0)
                added = float((again * times.forward).sum() / times.step)
                plan = dataclasses.replace(plan, added_time=added)
            plans.append(plan)
        return Found(plans, found[0].interrupted)


def way_of(request: Request, options: Options) -> Way:
    """The way that is asked for."""
    if options.how == "schedule":
        return Schedules(request, options)
    return (Original if options.planner == "chen2016" else Marks)(request, options)
