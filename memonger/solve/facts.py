"""Find the facts about a network on which its plans depend, each once, when it is asked for."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Iterable, Mapping

import numpy as np

from memonger.costs.bind import confirm_pool, has_mkldnn
from memonger.costs.held import Held, find_held
from memonger.costs.lower_bound import LowerBound, find_lower_bound
from memonger.costs.pool import find_added_in_place, pool
from memonger.costs.time.gpus import GPUS
from memonger.costs.time.measured import measure_times
from memonger.costs.time.roofline import Times, predict_times
from memonger.costs.usage import Usage
from memonger.graph import marks
from memonger.graph.forward import FLOAT, RECORD, ForwardGraph
from memonger.graph.operators.added import WRONG
from memonger.graph.operators.recompute import ANY, CPU, GPU, targets_of
from memonger.graph.operators.tensors import MOST_ON_GPU, check_elements
from memonger.graph.read import forward_graph
from memonger.graph.training import NO_NODE, Differentiation, TrainingGraph, training_graph
from memonger.planners.candidates import Candidate, MarkPlan
from memonger.planners.marks.rules import Rules, kept_summary, refuse, refuse_padded_sums
from memonger.planners.marks.smallest import NO_PLAN
from memonger.schedules.execution.executor import why_refused
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.schedules.expand import make_parts
from memonger.schedules.schedule import Workload, why_unscheduled, workload
from memonger.schedules.training_step import Parts, arena
from memonger.solve.limits import Budget, Limits
from memonger.solve.network import Network, TimedDevice
from memonger.support.cache import Latest
from memonger.support.errors import MB, format_size

log = logging.getLogger("memonger")

#: A pool of fewer bytes is planned with this patience: there is little to save, and such networks
#: often come by the dozen (one for each bucket).
SMALL, SMALL_PATIENCE = 16 * MB, 0.05
ONE_MORE_PASS = 2.0  # the most forward work of marks, in forward passes


class Facts:
    """The graphs of a network, its rules, its memory and its times.

    Parameters
    ----------
    network : Network
        The network.
    limits : Limits
        How it is planned: the GPU or the measurement of times, and the patience.
    must_pay : bool
        Whether nothing is asked for, so that the plan must be worth its time. It then recomputes at
        most one more forward pass.

    Raises
    ------
    MemongerError
        If no plan can hold the network.
    """

    def __init__(self, network: Network, limits: Limits, must_pay: bool = False) -> None:
        self.network, self.must_pay = network, must_pay
        if must_pay:
            limits = replace(limits, work=ONE_MORE_PASS)
        self.timed_on = network.find_timing_device(limits.gpu, limits.measure)
        predicted = self.timed_on.sheet in GPUS and not limits.measure
        self.limits = replace(limits, gpu=self.timed_on.sheet if predicted else None)
        self.graph = graph = forward_graph(network.symbol, network.spec)
        refuse(graph)
        if network.device_type == GPU:
            for tensor in itertools.chain.from_iterable(graph.tensors):
                check_elements(tensor.shape, most=MOST_ON_GPU)
        if any(RECORD in node.hidden for node in graph.nodes):
            log.info("the network has force_mirroring marks, which the plan replaces")
        self.no_marks = np.zeros(len(graph.nodes), dtype=np.bool_)
        self.hints = marks.read_hints(graph)  # the user's ``mirror_stage``
        self.mkldnn = has_mkldnn(network.ctx)
        until = len(graph.nodes) if network.until is None else network.until
        #: The nodes that the user keeps, and those that the user wants recomputed.
        kept = {*range(until, len(graph.nodes)), *network.keep.nodes}
        self.kept, self.forced = sorted(kept), sorted({*network.recompute.nodes} - kept)
        self.memories: Latest[Usage] = Latest(8)  # of schedules, by the key of a candidate
        if self.mkldnn:
            refuse_padded_sums(self.training)

    @cached_property
    def _gradients(self) -> Differentiation:
        return Differentiation(self.graph)

    @cached_property
    def training(self) -> TrainingGraph:
        """The training graph with the gradients that the user wants."""
        return self._gradients.respect_to(find_wanted(self.graph, self.network.grad_req))

    @cached_property
    def trainings(self) -> list[TrainingGraph]:
        """The training graphs for which marks must be valid, that of the user first."""
        graph, shapes = self.graph, self.network.spec.shapes
        # Module requests no gradients of data and labels, so that fewer operators read results.
        parameters = tuple(a for a in graph.arguments if graph.nodes[a].name not in shapes)
        others = sorted({graph.arguments, parameters} - {self.training.wanted})
        trainings = [self.training, *map(self._gradients.respect_to, others)]
        del self._gradients  # megabytes, of which no other graph is made
        return trainings

    @cached_property
    def rules(self) -> Rules:
        """The rules for marks."""
        targets = targets_of(self.network.device_type)
        rules = Rules(self.trainings, targets, self.kept, self.forced)
        reasons = [(self.graph.nodes[i].op, why) for i, why in rules.reasons.items()]
        if reasons:
            log.info("kept by rule: %s", kept_summary(reasons))
        return rules

    @cached_property
    def workload(self) -> Workload:
        """What a schedule must run."""
        return workload(self.training, self.kept, self.forced)

    @cached_property
    def parts(self) -> Parts:
        """What steps of all schedules share, in a search, which adds no gradients."""
        return make_parts(self.workload, (), self.mkldnn)

    @cached_property
    def parts_of_step(self) -> Parts:
        """What steps of all schedules share, where gradients are added as the user wants."""
        requests, nodes = self.network.grad_req, self.graph.nodes
        added = [a for a in self.training.wanted if requests[nodes[a].name] == "add"]
        return make_parts(self.workload, added, self.mkldnn) if added else self.parts

    @cached_property
    def predicted_unplanned(self) -> Usage:
        """The memory of the network without a plan, predicted."""
        return pool(self.training, self.no_marks, self.held)

    @cached_property
    def unplanned(self) -> Usage:
        """The memory of the network without a plan, confirmed by one bind."""
        network = self.network
        memory = confirm_pool(
            self.predicted_unplanned, network.symbol, network.device, network.grad_req
        )
        if not memory.exact:
            log.info("the memory of plans is known to the MiB only, because %s", memory.why_inexact)
        return memory

    @cached_property
    def no_plan(self) -> Candidate:
        """The network without a plan, as a candidate."""
        return Candidate(MarkPlan(self.no_marks), self.unplanned.pool_bytes, 0.0, NO_PLAN)

    @cached_property
    def held(self) -> Held:
        """The memory that operators hold in training, on a GPU if the device may be one."""
        on_gpu = self.network.device_type in (GPU, ANY)
        return find_held(self.graph, GPU if on_gpu else CPU, not on_gpu and self.mkldnn)

    @cached_property
    def lower_bound(self) -> LowerBound:
        """The memory that every plan needs at least."""
        return find_lower_bound(self.training)

    @cached_property
    def times(self) -> Times:
        """The seconds of the operators without a plan, predicted or measured."""
        if self.limits.gpu is not None:
            text = "predicting times from the data sheet of %r; set gpu= for another"
            log.info(text, self.limits.gpu)
        return find_times(self.training, self.timed_on)

    @cached_property
    def patience(self) -> float:
        """The length of a search, as a multiple of the usual length."""
        if self.limits.patience is not None:
            return self.limits.patience
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

    @cached_property
    def why_no_schedule(self) -> str:
        """Why no schedule can hold the network; '' if one can."""
        why = why_refused(self.graph, self.network.device_type)
        return why or why_unscheduled(self.training) or self.parts_of_step.refusal

    @cached_property
    def added_in_place(self) -> list[tuple[int, bool]]:
        """The operators (nodes) whose gradient MXNet's executor adds to a sum in place.

        With each, whether MKLDNN may compute the gradient that is added.
        """
        training, added = self.training, []
        for row, k in find_added_in_place(training):
            by_mkldnn = self.mkldnn and training.signatures[row].tensors[k].dtype == FLOAT
            if training.origin[row] != NO_NODE:
                added.append((int(training.origin[row]), by_mkldnn))
        return added

    def describe_added(self, added: Iterable[int]) -> tuple[str, str]:
        """Name operators of `added_in_place`, and how to have MXNet add them afterwards."""
        training, nodes = self.training, self.graph.nodes
        sums = Counter(training.gradient_of[r] for r in np.flatnonzero(training.adds_gradients))
        more = max(sums.values()) + 2  # than the terms of any sum
        names = list(dict.fromkeys(f"{nodes[x].name!r} ({nodes[x].op})" for x in added))
        others = f" and {len(names) - 1} more" * (len(names) > 1)
        cure = f"set MXNET_EXEC_INPLACE_GRAD_SUM_CAP={more} before MXNet is imported"
        return names[0] + others, cure

    @cached_property
    def wrong_gradients(self) -> list[str]:
        """The warning of gradients that MXNet computes wrongly, with or without a plan."""
        wrong = [x for x, _ in self.added_in_place if self.graph.nodes[x].op in WRONG]
        if self.graph.adds_afterwards or not wrong:
            return []
        names, cure = self.describe_added(wrong)
        text = "MXNet computes wrong gradients, with or without a plan: it adds those of"
        return [f"{text} {names} to sums in place, which such operators cannot do; {cure}"]

    def add_to_step(self, seconds: float) -> float:
        """Return seconds as a share of the time of a step without a plan."""
        return seconds / (self.times.step_seconds or 1)

    def predict_added(self, memory: Usage) -> float:
        """Predict the time that recomputation adds to a step, as a share of one without a plan."""
        known = memory.training is self.training
        times = self.times if known else find_times(memory.training, self.timed_on)
        return float(times.forward_seconds[memory.recomputed].sum() / times.step_seconds)

    def count_bytes(self, memory: Usage) -> int:
        """Return the bytes of a plan as the budget counts them: of the pool, or of the device."""
        budget = self.limits.budget
        if budget is None or budget.of == "pool":
            return memory.pool_bytes
        return memory.device_bytes + count_state_bytes(budget, self.graph, self.network)

    def least_bytes(self, plan: Candidate) -> int:
        """Return a lower bound of `count_bytes`.

        The arena of a schedule may be larger than what is alive at once.
        """
        budget, unplanned = self.limits.budget, self.unplanned
        if budget is None or budget.of == "pool":
            return plan.pool_bytes
        beside = unplanned.beside_bytes + count_state_bytes(budget, self.graph, self.network)
        return plan.pool_bytes + beside

    def find_limit(self) -> int:
        """Return the budget in bytes."""
        assert self.limits.budget is not None
        return self.limits.budget.limit(self.count_bytes(self.unplanned))


def find_times(training: TrainingGraph, device: TimedDevice) -> Times:
    """Return the times of a training step: predicted, or measured if ``device.ctx`` is given."""
    times = predict_times(training, device.sheet)
    return times if device.ctx is None else measure_times(training, device.ctx, times)


def predict(network: Network) -> Usage:
    """Predict the memory of a network with the marks or the schedule that it carries."""
    symbol, grad_req = network.symbol, network.grad_req
    graph = forward_graph(symbol, network.spec)
    if isinstance(symbol, ScheduledSymbol) and symbol.schedule is not None:
        return arena(symbol.find_step(graph, grad_req, has_mkldnn(network.ctx)))
    training = training_graph(graph, find_wanted(graph, grad_req))
    return pool(training, marks.read_mask(graph))


def measure(network: Network) -> Usage:
    """Predict the memory of a network as `predict` does, and confirm a pool of MXNet by a bind."""
    memory = predict(network)
    if memory.is_arena:
        return memory
    return confirm_pool(memory, network.symbol, network.device, network.grad_req)


def find_wanted(graph: ForwardGraph, grad_req: Mapping[str, str]) -> tuple[int, ...]:
    """Find the arguments (nodes) that get a gradient."""
    return tuple(a for a in graph.arguments if grad_req[graph.nodes[a].name] != "null")


def count_state_bytes(budget: Budget, graph: ForwardGraph, network: Network) -> int:
    """Count the bytes of the optimizer's state, which a budget of the device includes."""
    wanted, inputs = find_wanted(graph, network.grad_req), network.spec.shapes
    # Gluon and ``bind`` give the shapes of parameters too.
    learned = [a for a in wanted if graph.nodes[a].name not in inputs] or wanted
    return round(budget.state * sum(graph.tensors[a][0].elements for a in learned))
