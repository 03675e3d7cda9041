"""The two strategies, marks and schedules: search for plans, predict their memory, bind them.

No other module calls the planners.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import Counter
from dataclasses import replace
from typing import Callable, Hashable, Iterable, Sequence, Union

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.held import Held, find_held
from memonger.costs.lower_bound import LowerBound, find_lower_bound
from memonger.costs.replay import find_added_in_place, find_adding_rows
from memonger.costs.time.gpus import GPUS
from memonger.costs.time.roofline import Times
from memonger.costs.time.times import find_times
from memonger.graph import marks
from memonger.graph.forward import FLOAT, RECORD
from memonger.graph.operators.added import WRONG, adds_otherwise
from memonger.graph.operators.recompute import ANY, CPU, GPU
from memonger.graph.operators.tensors import MOST_ON_GPU, check_elements
from memonger.graph.read import forward_graph
from memonger.graph.training import NO_NODE, training_graphs
from memonger.planners.candidates import (
    Candidate,
    MarkPlan,
    SearchResult,
    by_added_time,
    by_time,
    pareto_front,
)
from memonger.planners.marks import chen2016
from memonger.planners.marks import search as marks_search
from memonger.planners.marks.identities import drop_unused_identities
from memonger.planners.marks.rules import (
    NoRules,
    Rules,
    kept_summary,
    refuse,
    refuse_padded_sums,
)
from memonger.planners.marks.smallest import NO_PLAN, smallest
from memonger.planners.trees import search as trees
from memonger.schedules import schedule as schedules
from memonger.schedules.execution.executor import refuse_waiting, tensors_of
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.expand import build_step, find_unwritten_biases, make_parts
from memonger.schedules.training_step import TrainingStep
from memonger.solve.memory import (
    Memory,
    confirm,
    count_state_bytes,
    find_wanted,
    predict_marks,
    predict_step,
)
from memonger.solve.options import Options
from memonger.solve.request import Request, fingerprint
from memonger.support.cache import Latest
from memonger.support.errors import MB, MemongerError, format_size
from memonger.support.parallel import progress_bar
from memonger.support.types import Bools, Doubles, Symbol

log = logging.getLogger("memonger")

#: A pool of fewer bytes is planned with this patience: there is little to save, and such networks
#: often come by the dozen (one for each bucket).
SMALL, SMALL_PATIENCE = 16 * MB, 0.05

_searches: Latest[SearchResult] = Latest(128)


class _BaseStrategy:
    """What both strategies share: the graphs of a network, its rules, its memory and its times."""

    noun = "plan"
    for_all = True  # whether a plan must be valid for other gradients than the requested ones too

    def __init__(self, request: Request, options: Options) -> None:
        self.timed_on = request.find_timing_device(options.gpu, options.measure)
        predicted = self.timed_on.sheet in GPUS and not options.measure
        gpu = self.timed_on.sheet if predicted else None
        self.request, self.options = request, replace(options, gpu=gpu)
        self.graph = graph = forward_graph(request.symbol, request.spec)
        refuse(graph)
        if request.device_type == GPU:
            for tensor in itertools.chain.from_iterable(graph.tensors):
                check_elements(tensor.shape, most=MOST_ON_GPU)
        if any(RECORD in node.hidden for node in graph.nodes):
            log.info("the network has force_mirroring marks, which the plan replaces")
        self.hints = marks.read_hints(graph)  # the user's ``mirror_stage``
        wanted, shapes = find_wanted(graph, request.grad_req), request.spec.shapes
        # Module requests no gradients of data and labels, so that fewer operators read results.
        parameters = tuple(a for a in graph.arguments if graph.nodes[a].name not in shapes)
        others = sorted({graph.arguments, parameters} - {wanted}) if self.for_all else []
        self.trainings = training_graphs(graph, [wanted, *others])
        self.training = self.trainings[0]  # with the gradients that the user wants
        if CPU in request.targets and self.training.settings.mkldnn:
            refuse_padded_sums(self.training)
        self.no_marks = np.zeros(len(graph.nodes), dtype=np.bool_)
        kind = request.device_type
        self.mkldnn = kind == ANY or kind != GPU and has_mkldnn(request.device)
        until = len(graph.nodes) if request.until is None else request.until
        #: The nodes that the user keeps, and those that the user wants recomputed.
        kept = {*range(until, len(graph.nodes)), *request.keep.nodes}
        self.kept, self.forced = sorted(kept), sorted({*request.recompute.nodes} - kept)

    @functools.cached_property
    def rules(self) -> Rules:
        """The rules for marks."""
        kind = Rules if self.options.rules else NoRules
        rules = kind(self.trainings, self.request.targets, self.kept, self.forced)
        reasons = [(self.graph.nodes[i].op, why) for i, why in rules.reasons.items()]
        if reasons and self.options.rules:
            log.info("kept by rule: %s", kept_summary(reasons))
        return rules

    @functools.cached_property
    def predicted_unplanned(self) -> Memory:
        """The memory of the network without a plan, predicted."""
        return predict_marks(self.training, self.no_marks, self.held)

    @functools.cached_property
    def unplanned(self) -> Memory:
        """The memory of the network without a plan, confirmed by one bind."""
        memory = confirm(self.predicted_unplanned, self.request.symbol, self.request)
        if not memory.exact:
            log.info("the memory of plans is known to the MiB only, because %s", memory.why_inexact)
        return memory

    @property
    def leaves_alone(self) -> bool:
        """Whether the network takes so little that it is not planned."""
        return self.unplanned.pool_bytes < self.options.leave_below

    @functools.cached_property
    def held(self) -> Held:
        """The memory that operators hold in training, on a GPU if the device may be one."""
        on_gpu = self.request.device_type in (GPU, ANY)
        return find_held(self.graph, GPU if on_gpu else CPU, not on_gpu and self.mkldnn)

    @functools.cached_property
    def lower_bound(self) -> LowerBound:
        """The memory that every plan needs at least."""
        return find_lower_bound(self.training, None if self.options.rules else ())

    @functools.cached_property
    def times(self) -> Times:
        """The seconds of the operators without a plan, predicted or measured."""
        if self.options.gpu is not None:
            text = "predicting times from the data sheet of %r; set gpu= for another"
            log.info(text, self.options.gpu)
        return find_times(self.training, self.timed_on)

    def describe_added(self, differ: Callable[[str, bool], bool]) -> tuple[str, str]:
        """Describe the operators whose gradient MXNet's executor adds to a sum in place.

        Returns the names of those for which ``differ`` returns true, given the kind of the operator
        and whether MKLDNN may compute it; and how to have MXNet add their gradients afterwards.
        """
        training = self.training
        names: dict[str, None] = {}
        sums = Counter(training.gradient_of[r] for r in np.flatnonzero(find_adding_rows(training)))
        for row, k in find_added_in_place(training):
            x, by_mkldnn = training.origin[row], training.signatures[row].tensors[k].dtype == FLOAT
            if x != NO_NODE and differ(self.graph.nodes[x].op, self.mkldnn and by_mkldnn):
                names[f"{self.graph.nodes[x].name!r} ({self.graph.nodes[x].op})"] = None
        more = max(sums.values(), default=0) + 2  # than the terms of any sum
        others = f" and {len(names) - 1} more" * (len(names) > 1)
        cure = f"set MXNET_EXEC_INPLACE_GRAD_SUM_CAP={more} before MXNet is imported"
        return next(iter(names), "") + others, cure

    @functools.cached_property
    def wrong_gradients(self) -> list[str]:
        """The warning of gradients that MXNet computes wrongly, with or without a plan."""
        names, cure = self.describe_added(lambda op, _: op in WRONG)
        if self.graph.adds_afterwards or not names:
            return []
        text = "MXNet computes wrong gradients, with or without a plan: it adds those of"
        return [f"{text} {names} to sums in place, which such operators cannot do; {cure}"]

    def predict_added_time(self, memory: Memory) -> float:
        """Predict the time that recomputation adds to a step, as a share of one without a plan."""
        times = find_times(memory.training, self.timed_on)
        return float(times.forward[memory.recomputed].sum() / times.step)

    @functools.cached_property
    def patience(self) -> float:
        """The length of a search, as a multiple of the usual length."""
        if self.options.patience is not None:
            return self.options.patience
        nbytes = self.unplanned.pool_bytes
        if nbytes >= SMALL:
            return 1.0
        log.info(
            "the network takes %s without a plan, less than %s: planning with patience=%g; set "
            "patience= for a longer search",
            format_size(nbytes),
            format_size(SMALL),
            SMALL_PATIENCE,
        )
        return SMALL_PATIENCE

    def make_no_plan(self) -> Candidate:
        """Make the candidate that leaves the network without a plan."""
        nbytes = self.unplanned.pool_bytes
        return Candidate(nbytes, 0.0, MarkPlan(self.no_marks), NO_PLAN, added_time=0.0)

    def count_bytes(self, memory: Memory) -> int:
        """Return the bytes of a plan as the budget counts them: of the pool, or of the device."""
        budget = self.options.budget
        if budget is None or budget.of == "pool":
            return memory.pool_bytes
        return memory.device_bytes + count_state_bytes(budget, self.graph, self.request)

    def least_bytes(self, plan: Candidate) -> int:
        """Return a lower bound of `count_bytes`.

        The arena of a schedule may be larger than what is alive at once.
        """
        budget, unplanned = self.options.budget, self.unplanned
        if budget is None or budget.of == "pool":
            return plan.pool_bytes
        beside = unplanned.beside_bytes + count_state_bytes(budget, self.graph, self.request)
        return plan.pool_bytes + beside

    def find_limit(self) -> int:
        """Return the budget in bytes."""
        assert self.options.budget is not None
        return self.options.budget.limit(self.count_bytes(self.unplanned))


class Marks(_BaseStrategy):
    """Marks on operators, with which MXNet recomputes each result at most once."""

    def __init__(self, request: Request, options: Options) -> None:
        super().__init__(request, options)
        if self.mkldnn:
            find_unwritten_biases(self.training)  # raises for one that is shared
        names, cure = self.describe_added(adds_otherwise)
        if self.graph.adds_afterwards and names:
            raise MemongerError(
                f"the gradients of {names} would differ with marks: MXNet's executor adds them to "
                f"sums in place, and Gluon afterwards; {cure}, or plan with how='schedule'"
            )

    def search_smallest(self) -> SearchResult:
        """Search for the plan of least memory; it comes first, others of the search follow."""
        hints, rules, ntrial = self.hints, self.rules, self.options.ntrial
        effort = marks_search.EFFORT.times(self.patience)
        seconds = self.times.forward
        with progress_bar() as progress:
            searched = smallest(hints, rules, seconds, ntrial, effort=effort, progress=progress)
        for name, counted in searched.costs.items():
            log.info("%s: %.1f MiB", name, counted / MB)
        return searched

    def search_pareto_front(self) -> SearchResult:
        """Return the Pareto-optimal plans of the search for least memory, the fastest first."""
        searched, step = search_smallest(self), self.times.step or 1
        plans = [
            replace(
                candidate,
                pool_bytes=self.predict_memory(candidate).pool_bytes,
                origin=candidate.origin if candidate.recomputes else NO_PLAN,
                added_time=candidate.time / step,
            )
            for candidate in pareto_front(searched.plans, by_time)
        ]
        return replace(searched, plans=pareto_front(plans, by_added_time))

    def predict_memory(self, plan: Candidate) -> Memory:
        """Predict the memory of a plan."""
        _, rules, mask = drop_unused_identities(self.rules, plan.recipe)
        return predict_marks(rules.trainings[0], mask, self.held)

    def bind_plan(self, plan: Candidate) -> tuple[Candidate, Symbol, Memory]:
        """Make the symbol of a plan, without what MXNet cannot carry out, and bind it."""
        symbol, rules = self.request.symbol, self.rules
        identities = marks.make_inferable(symbol, plan.identities, self.request.spec.shapes)
        marked, *_ = drop_unused_identities(rules, MarkPlan(plan.recipe.mask, identities))
        plan, native = replace(plan, recipe=marked), rules.native(marked.mask)
        planned = marks.write(symbol, marked.mask, native, marked.identities)
        return plan, planned, confirm(self.predict_memory(plan), planned, self.request)


class Original(Marks):
    """The search of the original memonger (Chen et al. 2016), trial for trial."""

    def search_smallest(self) -> SearchResult:
        trials: list[tuple[int, Bools]] = []
        interrupted, ntrial = False, self.options.ntrial

        def count_mb(mask: Bools) -> int:
            mask = mask.copy()
            mask[self.kept] = False
            trials.append((self.rules.plan_memory(mask).pool_bytes // MB, mask))
            progress(len(trials) / (3 + ntrial))
            return trials[-1][0]

        try:
            with progress_bar() as progress:
                for trial in chen2016.search(self.graph, self.hints, count_mb, ntrial):
                    log.info("Search threshold=%d MiB, cost=%d MiB", trial.threshold, trial.cost)
        except KeyboardInterrupt:
            if not trials:
                raise
            interrupted = True
        before, mask = min(trials, key=lambda pair: pair[0])  # the first of equal ones
        mask = self.rules.apply(mask)
        after = self.rules.plan_memory(mask).pool_bytes
        if self.options.rules:
            log.info("cost=%s MiB before the rules, %s MiB with them", before, after // MB)
        return SearchResult([Candidate(after, 0.0, MarkPlan(mask), "chen2016")], interrupted)


class Schedules(_BaseStrategy):
    """Schedules, which recompute results as often as it pays; methods are those of `Marks`."""

    noun = "schedule"
    for_all = False

    def __init__(self, request: Request, options: Options) -> None:
        super().__init__(request, options)
        training, nodes = self.training, self.graph.nodes
        tensors_of(training.graph)  # raises for sparse arrays
        refuse_waiting(training.graph, request.device_type)
        self.workload = schedules.workload(training, self.kept, self.forced)
        added = [a for a in training.wanted if request.grad_req[nodes[a].name] == "add"]
        self.parts = make_parts(self.workload, (), self.mkldnn)  # the search adds no gradients
        self.parts_of_step = make_parts(self.workload, added, self.mkldnn) if added else self.parts
        self._memories: Latest[Memory] = Latest(8)

    def search_smallest(self) -> SearchResult:
        """Search for the plan of least memory; others follow, because MKLDNN may not allow it."""
        work = self.options.work
        return self._search(
            lambda search: [search.least_memory(work), *search.alternatives(work)],
            self.patience,
        )

    def search_pareto_front(self) -> SearchResult:
        """Search for the Pareto-optimal plans, and for those of least memory.

        All plans of least memory are returned: the smallest arena may belong to a plan that has
        more bytes alive than another.
        """
        smallest = search_smallest(self, logging.DEBUG)
        searches = [smallest]
        if not smallest.interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                searches.append(self.search_by_time(self.patience))
        plans = [plan for searched in searches for plan in searched.plans]
        interrupted = len(searches) < 2 or searches[1].interrupted
        return SearchResult(self._add_times(plans), interrupted)

    def search_by_time(self, patience: float) -> SearchResult:
        """Search for the Pareto-optimal plans by the times of operators."""
        forward = self.times.forward
        searched = self._search(lambda search: search.front(), patience, forward)
        return SearchResult(self._add_times(searched.plans), searched.interrupted)

    def _add_times(self, plans: Iterable[Candidate]) -> Sequence[Candidate]:
        """Predict the times that plans add to a step, and sort the plans by these."""
        times, timed = self.times, []
        for plan in plans:
            recomputed = plan.recomputed(len(self.graph.nodes)) @ times.forward
            timed.append(replace(plan, added_time=float(recomputed) / times.step))
        return sorted(timed, key=by_added_time)

    def make_plain(self) -> Candidate:
        """Make the candidate that recomputes nothing, and places tensors in an arena."""
        schedule = schedules.plain(self.workload)
        return Candidate(0, 1.0, schedule, trees.NO_RECOMPUTATION, added_time=0.0)

    def estimate_least(self, work: float) -> int:
        """Estimate the least bytes with this limit of work, from initial solutions only."""
        few = replace(trees.EFFORT, annealing=0)
        searched = self._search(lambda search: [search.least_memory(work)], 1.0, effort=few)
        return searched.plans[0].pool_bytes

    def _search(
        self,
        search: Callable[[trees.ScheduleSearch], Sequence[Candidate]],
        patience: float,
        weights: Doubles | None = None,
        effort: trees.Effort | None = None,
    ) -> SearchResult:
        """Search for schedules; raise KeyboardInterrupt if none was found that recomputes."""
        with progress_bar() as progress:
            effort = (effort or trees.EFFORT).times(patience)
            tree = trees.ScheduleSearch(self.workload, effort, progress, weights, self.parts)
            plans = search(tree)
        if tree.interrupted and all(plan.origin == trees.NO_RECOMPUTATION for plan in plans):
            raise KeyboardInterrupt
        plans = [replace(plan, pool_bytes=tree.count_least(plan.recipe)) for plan in plans]
        return SearchResult(plans, tree.interrupted)

    def predict_memory(self, plan: Candidate) -> Memory:
        return self._memories.get_or_make(
            plan.key,
            lambda: predict_step(build_step(self.parts_of_step, plan.recipe), self.held),
        )

    def bind_plan(self, plan: Candidate) -> tuple[Candidate, Symbol, Memory]:
        schedules.check(self.workload, plan.recipe)
        planned, memory = scheduled(self.request.symbol, plan.recipe), self.predict_memory(plan)
        step, grad_req = memory.replay.training, self.request.grad_req
        assert isinstance(step, TrainingStep)
        planned.find_step(self.graph, grad_req, self.mkldnn, step)
        return plan, planned, memory


Strategy = Union[Marks, Schedules]


def search_pareto_front(strategy: Strategy) -> SearchResult:
    """Return the Pareto-optimal plans in memory and time, from the cache of searches if it can."""
    options = replace(strategy.options, budget=None, knee=False, slower_than=None)
    return remember(strategy.search_pareto_front, "front", strategy.request, options)


def search_smallest(strategy: Strategy, level: int = logging.INFO) -> SearchResult:
    """Return the plan of least memory within the limit of work, from the cache if it can.

    ``level`` is the level of the log line that says so.
    """
    options = replace(strategy.options, budget=None, knee=False, slower_than=None)
    return remember(strategy.search_smallest, "smallest", strategy.request, options, level)


def remember(
    search: Callable[[], SearchResult],
    goal: Hashable,
    request: Request,
    options: Options,
    level: int = logging.INFO,
) -> SearchResult:
    """Return the cached result of a search with this goal; search if there is none."""
    key = goal, fingerprint(request, options)
    searched = _searches.get(key)
    if searched is not None:
        log.log(level, "using the cached search result for this network")
        return searched
    searched = search()
    if not searched.interrupted:
        _searches.put(key, searched)
    return searched
