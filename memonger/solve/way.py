"""A way to plan a network: its graphs, its rules, what its plans cost, and how they are found."""

from __future__ import annotations

import abc
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Mapping, Sequence

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.held import Held, held_by
from memonger.costs.lower_bound import LowerBound, lower_bound, lower_bound_without_rules
from memonger.costs.memory import CostModel
from memonger.costs.time import measured as timing
from memonger.graph import marks
from memonger.graph.forward import KeptCopy
from memonger.graph.operators.recompute import CPU, GPU, targets_of
from memonger.graph.read import forward_graph
from memonger.graph.training import training_graphs
from memonger.planners.marks.rules import Rules, refuse
from memonger.schedules.schedule import Schedule
from memonger.solve.memory import Memory, of_marks, wanted
from memonger.solve.request import Options, Request, fingerprint
from memonger.support.cache import Latest

log = logging.getLogger("memonger")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a search has found: nodes to mark and copies to keep, or a schedule."""

    origin: str
    counted_bytes: int  # as MXNet counts them, predicted
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


_fronts: Latest[Found] = Latest(48)


class Way(abc.ABC):
    """A network that is to be planned in one of two ways: its graphs, its rules, its costs."""

    noun = "plan"

    def __init__(self, request: Request, options: Options) -> None:
        """Read the graphs of a network, and make its rules.

        Raises
        ------
        MemongerError
            If shapes are missing or do not fit, or the network holds what cannot be planned.
        """
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

    @cached_property
    def cost(self) -> CostModel:
        """What marks cost; the network is bound once for it."""
        symbol, device, fuses = self.request.symbol, self.request.device, self.rules.fuses
        return CostModel(symbol, self.graph, self.training, device, fuses)

    @cached_property
    def held(self) -> Held:
        """What operators hold in training, on a GPU where no device was given."""
        ctx = self.request.ctx
        device_type = GPU if ctx is None or ctx.device_type == "gpu" else CPU
        return held_by(self.graph, device_type, device_type == CPU and has_mkldnn(ctx))

    @cached_property
    def floor(self) -> LowerBound:
        """What no plan can do without."""
        bound = lower_bound_without_rules if self.rules.bare else lower_bound
        return bound(self.training)

    @cached_property
    def unplanned(self) -> Memory:
        """What the network takes without a plan."""
        return self._replayed(self.rules, self.nothing, self.cost.bound)

    @cached_property
    def times(self) -> timing.Times:
        """What the operators take, without a plan."""
        return timing.times_of(self.training, self.request.device, self.options.measure)

    @property
    def no_plan(self) -> Candidate:
        """The network as it is."""
        return Candidate("no plan", self.cost.unplanned, self.nothing, added_time=0.0)

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

    def deeper(self, found: Found) -> Found | None:
        """Search for smaller plans than those of a front; None if this way knows none."""
        return None

    def work(self, plan: Candidate) -> float:
        """Return the most forward work of a step, in forward passes."""
        return 2.0

    def pools(self, plans: Sequence[Candidate]) -> list[int]:
        """Estimate the pools of plans: as much of what is counted as the first really takes."""
        like = self.memory(plans[0])
        real = like.planned.allocated_bytes / max(1, like.planned.pool_bytes)
        return [round(plan.counted_bytes * real) - like.gradient_bytes for plan in plans]

    def _replayed(self, rules: Rules, mask: np.ndarray, bound: int | None) -> Memory:
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
