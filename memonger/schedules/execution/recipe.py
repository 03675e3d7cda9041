"""The training steps of a network by one schedule, for the shapes and gradients of each bind."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Dict, Mapping

from memonger.graph.forward import ForwardGraph
from memonger.graph.training import training_graph
from memonger.schedules.expand import build_step, make_parts
from memonger.schedules.schedule import Schedule, adapt, check, workload
from memonger.schedules.training_step import TrainingStep
from memonger.support.cache import Latest
from memonger.support.versions import json_of

if TYPE_CHECKING:
    from memonger.support.types import NDArray, Symbol

    Arrays = Dict[str, NDArray]  # by the names of arguments or auxiliary states

Requests = Mapping[str, str]  # grad_req of each argument


def step_for(
    graph: ForwardGraph, schedule: Schedule, requests: Requests, mkldnn: bool
) -> TrainingStep:
    """Build the training step of a network for these gradients, by what fits of a schedule."""
    request = {a: requests[graph.nodes[a].name] for a in graph.arguments}
    work = workload(training_graph(graph, [a for a in request if request[a] != "null"]))
    fitting = adapt(work, schedule)
    check(work, fitting)
    added = [a for a in request if request[a] == "add"]
    return build_step(make_parts(work, added, mkldnn), fitting)


class Recipe:
    """A schedule and the latest steps by it, which copies of a symbol share."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.losses: set[str] = set()  # that have been logged: where the schedule was lost
        self._steps: Latest[TrainingStep] = Latest(16)  # for shapes, gradients, devices

    def step(
        self,
        symbol: Symbol,
        graph: ForwardGraph,
        requests: Requests,
        mkldnn: bool,
        step: TrainingStep | None = None,
    ) -> TrainingStep:
        """Return the step of the symbol's graph: remembered, or ``step``, or a new one."""
        # The network as it is now: attributes can be set at any time.
        network = hashlib.sha256(json_of(symbol).encode()).digest()
        tensors = tuple(graph.tensors[a] for a in graph.arguments)
        key = network, tensors, frozenset(requests.items()), mkldnn
        return self._steps.get_or_make(
            key, lambda: step or step_for(graph, self.schedule, requests, mkldnn)
        )
