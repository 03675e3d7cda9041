"""The two ways to plan, marks and schedules; all calls of the planners are here."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Callable, Sequence

import numpy as np

from memonger.costs.bind import bind, has_mkldnn, planned_mb
from memonger.costs.time import measured as timing
from memonger.costs.time.flops import forward_flops
from memonger.graph import marks
from memonger.graph.forward import mask_with_copies
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
from memonger.schedules.training_step import TrainingStep
from memonger.solve.memory import Memory, of_step
from memonger.solve.request import Options, Request
from memonger.solve.way import Candidate, Found, Way
from memonger.support.errors import MB
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

FASTEST = "fastest"  # the origin of marks of a front; without unneeded copies they take other bytes
MARKS_PATIENCE = 0.1  # of the search for marks that a search for schedules starts from
SEARCHING = "memonger: searching"  # what the progress bar says

Progress = Callable[[float], None]  # is told the share of the search that is done


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

    def _front(self, others: Sequence[Candidate]) -> Found:
        with progress_bar(SEARCHING) as progress:
            if not self.cost.exact:
                least = self._smallest(progress)
                return Found(self._not_dominated([least.plan]), least.interrupted)
            about = self.stages, self.rules, self._node_times, [self._plan(each) for each in others]
            copies, effort = self.options.kept_copies, self._effort
            found, interrupted = fastest(*about, copies, effort=effort, progress=progress)
        return Found([self._candidate(plan) for plan in found], interrupted)

    def known(self, others: Sequence[Candidate]) -> Found:
        """Choose among no plan and plans of this network at other shapes, without a search."""
        return Found(self._not_dominated([self._plan(each) for each in others]), False)

    def memory(self, plan: Candidate) -> Memory:
        rules, full, _, _ = settle(self.rules, plan.recomputed, plan.copies)
        return self._replayed(rules, full, None)

    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        request = self.request
        copies = marks.inferable(request.symbol, plan.copies, request.spec.shapes)
        if copies != plan.copies or plan.origin == FASTEST and self.cost.exact:
            _, _, mask, copies = settle(self.rules, plan.recomputed, copies)
            plan = replace(plan, recomputed=mask, copies=copies)
            plan = replace(plan, counted_bytes=self.memory(plan).planned.pool_bytes)
        native = self.rules.native(plan.recomputed)
        symbol = marks.apply(request.symbol, plan.recomputed, native, plan.copies)
        executor = bind(symbol, self.graph, request.device, self.training.wanted)
        rules, moved = self.rules.with_copies(plan.copies)
        mask = mask_with_copies(plan.recomputed, moved, plan.copies, len(rules.graph.nodes))
        return plan, symbol, self._replayed(rules, mask, planned_mb(executor))

    def _smallest(self, progress: Progress) -> Least:
        about = self.stages, self.cost, self.rules, self.options.ntrial
        if not self.cost.exact:
            return smallest_bound(*about)
        return smallest(*about, self.options.kept_copies, effort=self._effort, progress=progress)

    @property
    def _effort(self) -> marks_search.Effort:
        return marks_search.EFFORT.times(self.options.patience)

    def _node_times(self, rules: Rules) -> NodeTimes:
        training = rules.trainings[0]
        found = timing.times_of(training, self.request.device, self.options.measure)
        moved = timing.moved_bytes(training)[: training.tables.forward]
        return NodeTimes(found.forward, found.gradient, moved)

    def _not_dominated(self, plans: Sequence[MarkPlan]) -> list[Candidate]:
        """Choose of no plan and these those that no other beats, the fastest first."""
        nothing = MarkPlan(0, 0.0, self.nothing)
        plans = [settled(self.rules, self._node_times, plan) for plan in (nothing, *plans)]
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
        nodes, reasons = self.graph.nodes, self.rules.reasons
        kept = kept_summary((nodes[i].op, why) for i, why in reasons.items())
        if kept:
            log.info("kept by rule: %s", kept)


class Original(Marks):
    """The original's search (Chen et al. 2016), trial for trial."""

    def smallest(self) -> Found:
        cost, ntrial = self.cost, self.options.ntrial
        tried: list[tuple[int, np.ndarray]] = []

        def counted(mask: np.ndarray) -> int:
            mask = self.within(mask)
            tried.append((cost(mask) // MB, mask))
            progress(len(tried) / (3 + ntrial))
            return tried[-1][0]

        interrupted = False
        try:
            with progress_bar(SEARCHING) as progress:
                trials = chen2016.search(self.graph, self.stages, counted, ntrial)
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
            mask = self.rules.apply(mask)
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
        found = self._searched(trees.Recursive.front, self.times.forward)
        return replace(found, plans=[self._timed(plan) for plan in found.plans])

    def deeper(self, found: Found) -> Found | None:
        """Search with little memory in mind: within a limit of work that may find less."""
        last = found.plans[-1]
        least = self._least([(last.origin, last.schedule)])
        return replace(least, plans=[*found.plans, *map(self._timed, least.plans)])

    def _least(self, others: Sequence[tuple[str, Any]]) -> Found:
        """Search for the least memory, also from ``others``: known schedules with their origins."""
        work = self.options.work
        return self._searched(lambda s, known: [s.least_memory(work, [*known, *others])])

    def _searched(
        self, search: Callable[[trees.Recursive, Any], Any], weights: np.ndarray | None = None
    ) -> Found:
        """Search from the best marks of a short search; they are what there is if that is ended."""
        options, rules, known = self.options, self.rules.unfused(), []  # as it is bound
        about = self.stages, (lambda mask: rules.replay(mask).pool_bytes), rules, options.ntrial
        interrupted = False
        with progress_bar(SEARCHING) as progress:
            if self.cost.exact:
                effort = marks_search.EFFORT.times(options.patience * MARKS_PATIENCE)
                short = smallest(*about, effort=effort)
                held = [copy.node for copy in short.plan.copies]
                known = [("marks", schedules.of_marks(self.load, short.plan.mask, held))]
                interrupted = short.interrupted
            recursive = trees.Recursive(self.load, options.patience, progress, weights, self.parts)
            if interrupted:
                best = recursive.judge(known[0][1])
                if options.work is not None and best.work > options.work:
                    raise KeyboardInterrupt
                found = [trees.Found(best, "marks", True)]
            else:
                found = search(recursive, known)
        plans = []
        for origin, best in [(each.origin, each.best) for each in found]:
            again = self._counts(best.schedule) > 1
            plans.append(Candidate(origin, best.pool_bytes, again, schedule=best.schedule))
        return Found(plans, found[0].interrupted)

    def memory(self, plan: Candidate) -> Memory:
        return of_step(self._step(plan), self.request.grad_req, None, self.held)

    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        symbol, grad_req, device = self.request.symbol, self.request.grad_req, self.request.device
        schedule: Any = plan.schedule
        schedules.check(self.load, schedule)
        step, made = self._step(plan), scheduled(symbol, schedule)
        made.remember(step, grad_req, self.mkldnn)
        mb = planned_mb(bind(made, self.graph, device, self.training.wanted, grad_req))
        return plan, made, of_step(step, grad_req, mb, self.held)

    def work(self, plan: Candidate) -> float:
        flops, counts = forward_flops(self.graph), self._counts(plan.schedule)
        once = float(flops[counts > 0].sum())
        return float((counts * flops).sum()) / once if once else 1.0

    def _counts(self, schedule: Any) -> np.ndarray:
        """Count how often each node runs forward."""
        return np.bincount(schedule.forwards, minlength=len(self.nothing))

    def _timed(self, plan: Candidate) -> Candidate:
        """Add to a plan the time that it is predicted to add to a step."""
        again = np.maximum(self._counts(plan.schedule) - 1, 0)
        return replace(plan, added_time=float((again * self.times.forward).sum() / self.times.step))

    def _step(self, plan: Candidate) -> TrainingStep:
        """Write out the training step of a schedule."""
        assert plan.schedule is not None
        return unroll(self.written, plan.schedule)


def way_of(request: Request, options: Options) -> Way:
    """Make the way that is asked for."""
    if options.how == "schedule":
        return Schedules(request, options)
    return (Original if options.planner == "chen2016" else Marks)(request, options)
