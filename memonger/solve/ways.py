"""The two ways to plan, marks and schedules: what plans cost, how they are found and bound.

All calls of the planners are here.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from functools import cached_property
from typing import Any, Callable, Iterator, Sequence, Union

import numpy as np

from memonger.costs.bind import bind, has_mkldnn, planned_mb
from memonger.costs.held import Held, held_by
from memonger.costs.lower_bound import LowerBound, lower_bound
from memonger.costs.time import measured as timing
from memonger.graph import marks
from memonger.graph.forward import RECORD
from memonger.graph.operators.recompute import ANY, CPU, GPU, fuses
from memonger.graph.read import forward_graph
from memonger.graph.training import training_graphs
from memonger.planners.candidates import Candidate, MarkPlan, Searched
from memonger.planners.marks import chen2016
from memonger.planners.marks import search as marks_search
from memonger.planners.marks.copies import settle
from memonger.planners.marks.rules import NoRules, Rules, kept_summary, refuse
from memonger.planners.marks.search import NodeTimes, settled
from memonger.planners.marks.smallest import NO_PLAN, fastest, smallest, smallest_bound
from memonger.planners.trees import search as trees
from memonger.schedules import schedule as schedules
from memonger.schedules.execution.executor import tensors_of
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import parts, unroll
from memonger.schedules.layouts import Refused
from memonger.solve.memory import Memory, confirmed, of_marks, of_step, state_bytes, wanted
from memonger.solve.options import EITHER, WAYS, Options
from memonger.solve.request import Request, fingerprint
from memonger.support.cache import Latest
from memonger.support.errors import MB, MemongerError, in_words
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

#: Where the pool has fewer bytes there is little to save, and such networks often come by the
#: dozen (a bucket each): they are planned with this patience.
SMALL, SMALL_PATIENCE = 16 * MB, 0.05


TIGHT = 1.005  # times what is alive: no smaller arena is looked for
#: Limits of work for which the least memory counts among the plans for more, and for a budget.
RUNGS = 2.0, 3.0

_known: Latest[Searched] = Latest(128)


class _Network:
    """A network that is to be planned in one of two ways: its graphs, its rules, its costs."""

    noun = "plan"
    for_all = True  # whether a plan must be right whatever gradients are asked for

    def __init__(self, request: Request, options: Options) -> None:
        self.request, self.options = request, options
        self.graph = graph = forward_graph(request.symbol, request.spec)
        refuse(graph)
        if any(RECORD in node.hidden for node in graph.nodes):
            log.info("the network has force_mirroring marks; they are planned anew")
        self.hints = marks.read_hints(graph)  # the user's ``mirror_stage``
        asked, shapes = wanted(graph, request.grad_req), request.spec.shapes
        # Module asks for no gradients of its data and labels, which leaves fewer readers.
        parameters = tuple(a for a in graph.arguments if graph.nodes[a].name not in shapes)
        others = {graph.arguments, parameters} - {asked}
        self.trainings = training_graphs(graph, [asked, *(sorted(others) if self.for_all else ())])
        self.training = self.trainings[0]  # with the gradients that were asked for
        self.targets = request.targets
        self.nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
        until = len(graph.nodes) if request.until is None else request.until
        self.before = np.arange(len(graph.nodes)) < until

    @cached_property
    def rules(self) -> Rules:
        """The rules for marks."""
        kind = Rules if self.options.rules else NoRules
        rules = kind(self.trainings, self.targets, self.request.until)
        reasons = [(self.graph.nodes[i].op, why) for i, why in rules.reasons.items()]
        if reasons and self.options.rules:
            log.info("kept by rule: %s", kept_summary(reasons))
        return rules

    def cost(self, mask: np.ndarray) -> int:
        """Return the pool of marks as MXNet counts it; it is bound where a replay is not exact."""
        if self.unplanned.exact:
            return self.rules.replay(mask).pool_bytes
        about = self.request.device, self.training.wanted, self.request.grad_req
        return MB * planned_mb(bind(marks.apply(self.request.symbol, mask), self.graph, *about))

    @cached_property
    def unplanned(self) -> Memory:
        """What the network takes without a plan; it is bound once for it."""
        found = of_marks(self.training, self.nothing, self.held, fuses(self.targets))
        found = confirmed(found, self.request.symbol, self.request)
        if not found.exact:
            log.info("each plan is bound to learn its memory, for %s", found.why_inexact)
        return found

    @cached_property
    def held(self) -> Held:
        """What operators hold in training, on a GPU where that may be it."""
        gpu = self.request.device_type in (GPU, ANY)
        mkldnn = not gpu and has_mkldnn(self.request.device)
        return held_by(self.graph, GPU if gpu else CPU, mkldnn)

    @cached_property
    def floor(self) -> LowerBound:
        """What no plan can do without."""
        return lower_bound(self.training, None if self.options.rules else ())

    @cached_property
    def times(self) -> timing.Times:
        """What the operators take, without a plan."""
        return timing.times_of(self.training, self.request.timed_on, self.options.measure)

    @cached_property
    def patience(self) -> float:
        """How long a search is, times the usual."""
        taken, asked = self.unplanned.pool_bytes, self.options.patience
        if asked is None and taken < SMALL:
            text = "the network takes %s without a plan, less than %s, so that it is planned with "
            log.info(text + "patience=%g", in_words(taken), in_words(SMALL), SMALL_PATIENCE)
            return SMALL_PATIENCE
        return 1.0 if asked is None else asked

    @property
    def no_plan(self) -> Candidate:
        """The network as it is."""
        plan = MarkPlan(self.nothing)
        return Candidate(self.unplanned.pool_bytes, 0.0, plan, NO_PLAN, added_time=0.0)

    @cached_property
    def real(self) -> float:
        """The real bytes of a pool as a share of what MXNet counts, as without a plan."""
        planned = self.unplanned.planned
        return planned.allocated_bytes / max(1, planned.pool_bytes)

    def taken(self, memory: Memory) -> int:
        """Return the bytes of a plan that the budget bounds."""
        budget = self.options.budget
        assert budget is not None
        if budget.of == "pool":
            return memory.pool_bytes
        return memory.device_bytes + state_bytes(budget, self.graph, self.request)

    @property
    def limit(self) -> int:
        """The budget in bytes."""
        assert self.options.budget is not None
        return self.options.budget.limit(self.taken(self.unplanned))


class Marks(_Network):
    """Marks on the operators, by which each result is recomputed at most once."""

    def smallest(self) -> Searched:
        """Search for the plan of least memory."""
        about = self.hints, self.cost, self.rules, self.options.ntrial
        effort = marks_search.EFFORT.times(self.patience)
        with progress_bar() as progress:
            if self.unplanned.exact:
                found = smallest(*about, self.options.kept_copies, effort=effort, progress=progress)
            else:
                found = smallest_bound(*about)
        for name, counted in found.costs.items():
            log.info("%s: %.1f MB", name, counted / MB)
        return found

    def front(self, others: Sequence[Candidate] = ()) -> Searched:
        """Search for the plans that no other beats, also from plans of it at other shapes."""
        if self.unplanned.exact:
            effort = marks_search.EFFORT.times(self.patience)
            with progress_bar() as progress:
                found = fastest(
                    self.hints,
                    self.rules,
                    self._times,
                    [candidate.plan for candidate in others],
                    self.options.kept_copies,
                    effort=effort,
                    progress=progress,
                )
        else:
            least = self.smallest()
            timed = settled(self.rules, self._times, least.plans[0].plan)
            none = Candidate(self.unplanned.counted_bytes, 0.0, MarkPlan(self.nothing))
            as_bound = replace(timed, pool_bytes=least.plans[0].pool_bytes)
            found = Searched([none, as_bound], least.interrupted)
        plans = [
            replace(
                candidate,
                pool_bytes=round(candidate.pool_bytes * self.real),
                origin="fastest" if candidate.recomputes else NO_PLAN,
                added_time=candidate.time / (self.times.step or 1),
            )
            for candidate in found.plans
        ]
        return Searched(plans, found.interrupted)

    def memory(self, plan: Candidate) -> Memory:
        """Predict what a plan takes."""
        rules, mask, *_ = settle(self.rules, *plan.plan)
        return of_marks(rules.trainings[0], mask, self.held, rules.fuses)

    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        """Make what MXNet can carry out of a plan into a symbol, and have MXNet bind it."""
        symbol, shapes = self.request.symbol, self.request.spec.shapes
        copies = marks.make_inferable(symbol, plan.copies, shapes)
        mask, copies = settle(self.rules, plan.plan.mask, copies)[2:]
        plan = replace(plan, plan=MarkPlan(mask, copies))
        made = marks.apply(symbol, mask, self.rules.native(mask), copies)
        return plan, made, confirmed(self.memory(plan), made, self.request)

    def _times(self, rules: Rules) -> NodeTimes:
        training = rules.trainings[0]
        found = timing.times_of(training, self.request.timed_on, self.options.measure)
        moved = timing.moved_bytes(training)[: training.arrays.forward]
        return NodeTimes(found.forward, found.gradient, moved)


class Original(Marks):
    """The original's search (Chen et al. 2016), trial for trial."""

    def smallest(self) -> Searched:
        tried: list[tuple[int, np.ndarray]] = []
        interrupted, ntrial = False, self.options.ntrial

        def counted(mask: np.ndarray) -> int:
            tried.append((self.cost(mask & self.before) // MB, mask & self.before))
            progress(len(tried) / (3 + ntrial))
            return tried[-1][0]

        try:
            with progress_bar() as progress:
                for trial in chen2016.search(self.graph, self.hints, counted, ntrial):
                    log.info("Search threshold=%d MB, cost=%d MB", trial.threshold, trial.cost)
        except KeyboardInterrupt:
            if not tried:
                raise
            interrupted = True
        before, mask = min(tried, key=lambda pair: pair[0])  # of equals the first
        mask = self.rules.apply(mask)
        after = self.cost(mask)
        if self.options.rules:
            log.info("cost=%s MB before the rules, %s MB with them", before, after // MB)
        return Searched([Candidate(after, 0.0, MarkPlan(mask), "chen2016")], interrupted)


class Schedules(_Network):
    """Schedules, by which results are recomputed as often as it pays; methods are as of `Marks`."""

    noun = "schedule"
    for_all = False

    def __init__(self, request: Request, options: Options) -> None:
        super().__init__(request, options)
        training, nodes = self.training, self.graph.nodes
        tensors_of(training.graph)  # refuses what is sparse
        self.load = schedules.workload(training, request.until)
        added = [a for a in training.wanted if request.grad_req[nodes[a].name] == "add"]
        kind = request.device_type
        self.mkldnn = kind == ANY or kind != GPU and has_mkldnn(request.device)
        self.parts = parts(self.load, (), self.mkldnn)
        self.written = parts(self.load, added, self.mkldnn) if added else self.parts
        self._placed: Latest[Memory] = Latest(8)

    def smallest(self) -> Searched:
        """Search for the least memory, with no more than for less work; then what has more."""
        work = self.options.work
        less = self._of_less_work(work)
        if less.interrupted:
            return replace(less, plans=less.plans[::-1])
        more = [(plan.origin, plan.plan) for plan in less.plans[-1:]]

        def found(search: trees.ScheduleSearch) -> Sequence[Candidate]:
            return [search.least_memory(work, more), *search.alternatives(work)]

        all_found = self._searched(found)
        if all_found.interrupted:
            return all_found
        return replace(all_found, plans=self._least_arena_first(all_found.plans, less.plans[-1:]))

    def _least_arena_first(
        self, plans: Sequence[Candidate], others: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Put first the plan of the smallest arena: of the first, of others, and of what is near.

        What is near has hardly more alive than the first; it is tried while no arena is tight.
        """

        def arena(plan: Candidate) -> float:
            try:
                return self.memory(plan).pool_bytes
            except Refused:
                return math.inf

        alive, best = plans[0].pool_bytes, plans[0]
        if arena(best) == math.inf:  # what stands in for it is looked for where it is confirmed
            return plans
        for plan in (*others, *plans[1:]):
            is_near = plan.pool_bytes <= trees.NEAR * alive and arena(best) > TIGHT * alive
            if (is_near or plan in others) and arena(plan) < arena(best):
                best = plan
        return [best, *(plan for plan in plans if plan is not best)]

    def front(self) -> Searched:
        """Search for the plans that no other beats, those of least memory included."""
        less = self._of_less_work(None)
        if less.interrupted:
            return self.timed(less)
        more = [(plan.origin, plan.plan) for plan in less.plans]
        return self.timed(self._searched(lambda search: search.front(more), self.times.forward))

    def least(self, work: float | None) -> Searched:
        """Search for the least memory with this limit of work, as if no budget were given."""
        way = copy.copy(self)  # it shares what is known of the network
        way.options, way.patience = replace(self.options, work=work, budget=None), self.patience
        return remembered(way, "smallest", way.options, level=logging.DEBUG)

    def _of_less_work(self, work: float | None) -> Searched:
        """Find the plans of least memory with less work than ``work``; the last is the smallest."""
        plans: list[Candidate] = []
        interrupted = False
        for limit in RUNGS:
            if interrupted or work is not None and limit >= work:
                break
            try:
                found = self.least(limit)
            except KeyboardInterrupt:
                if not plans:
                    raise
                interrupted = True
            else:
                plans += found.plans[:1]
                interrupted = found.interrupted
        return Searched(plans, interrupted)

    def _searched(
        self,
        search: Callable[[trees.ScheduleSearch], Sequence[Candidate]],
        weights: np.ndarray | None = None,
    ) -> Searched:
        """Search for schedules; KeyboardInterrupt before there is one that recomputes is raised."""
        with progress_bar() as progress:
            tree = trees.ScheduleSearch(self.load, self.patience, progress, weights, self.parts)
            found = search(tree)
        if tree.interrupted and all(each.origin == trees.NOTHING for each in found):
            raise KeyboardInterrupt
        heads = {(x, k) for x, k in self.graph.heads if not self.graph.nodes[x].is_variable}
        outputs = sum(self.graph.tensors[x][k].nbytes for x, k in heads)
        plans = [replace(each, pool_bytes=each.pool_bytes + outputs) for each in found]
        return Searched(plans, tree.interrupted)

    def memory(self, plan: Candidate) -> Memory:
        def placed() -> Memory:
            return of_step(unroll(self.written, plan.plan), self.held)

        return self._placed.get_or_make(plan.key, placed)

    def bound(self, plan: Candidate) -> tuple[Candidate, Any, Memory]:
        schedules.check(self.load, plan.plan)
        made, memory = scheduled(self.request.symbol, plan.plan), self.memory(plan)
        about = made, self.graph, self.request.grad_req, self.mkldnn
        made.recipe.step(*about, memory.replay.training)
        return plan, made, memory

    def timed(self, found: Searched) -> Searched:
        """Estimate the times that plans add to a step."""
        plans = []
        for plan in found.plans:
            again = plan.recomputed(len(self.nothing)) @ self.times.forward
            time = float(again) / self.times.step
            plans.append(replace(plan, added_time=time))
        return replace(found, plans=plans)


Way = Union[Marks, Schedules]


def ways_of(request: Request, options: Options) -> Iterator[Way]:
    """Make the ways that are asked for in turn; of both, those by which it can be planned."""
    by_marks = Original if options.planner == "chen2016" else Marks
    hows = WAYS if options.how == EITHER else (options.how,)
    refused = []
    for how in hows:
        try:
            kind = by_marks if how == "marks" else Schedules
            yield kind(request, replace(options, how=how))
        except MemongerError as error:  # a network that no schedule can hold
            log.info("no plans by how=%r: %s", how, error)
            refused.append(error)
    if len(refused) == len(hows):
        raise refused[0]


def front(way: Way, known: Sequence[Candidate] = ()) -> Searched:
    """Search for the plans that no other beats in both memory and time, also from known plans."""
    return remembered(way, "front", replace(way.options, work=None, budget=None), known)


def remembered(
    way: Way,
    search: str,
    options: Options,
    known: Sequence[Candidate] = (),
    level: int = logging.INFO,
) -> Searched:
    """Search by this method of a way, unless that was done before, from the same known plans."""
    key = search, fingerprint(way.request, options), tuple([plan.key for plan in known])
    found = _known.get(key)
    if found is not None:
        log.log(level, "this network was planned before; what was found then is taken")
        return found
    found = getattr(way, search)(*([known] if known else []))
    if not found.interrupted:
        _known.put(key, found)
    return found
