"""The training steps of a network with a schedule: made when they are bound, and remembered."""

from __future__ import annotations

import hashlib
from typing import Any, Mapping, NamedTuple

import numpy as np

from memonger.graph.forward import forward_graph
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import training_graph
from memonger.schedules.execution import arrays
from memonger.schedules.execution.write import Written, write
from memonger.schedules.expand import parts, unroll
from memonger.schedules.nodes import ITSELF
from memonger.schedules.schedule import Schedule, adapt, check, workload
from memonger.schedules.training_step import TrainingStep
from memonger.support.cache import Latest

REMEMBERED = 16  # training steps of one symbol: shapes, gradients


class Step(NamedTuple):
    """A training step, ready to be bound.

    Attributes
    ----------
    written : Written
    forward, nodes : int
        How many nodes run (variables counted) before the outputs are there, and in all.
    operators : int
        How many of the nodes are operators.
    called : dict of str or None
        What MXNet calls the nodes that have another name here; None for those that it has not.
    """

    written: Written
    forward: int
    nodes: int
    operators: int
    called: Mapping[str, str | None]


class Recipe:
    """A schedule, and what was made of it; shared by copies of a symbol.

    Attributes
    ----------
    schedule : Schedule
    told : set
        The places where its loss has been told.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.told: Any = set()
        self._made: Latest[Any] = Latest(REMEMBERED)

    def tensors(self, symbol: Any, spec: InputSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Shape and type of each argument and auxiliary state of the network."""
        return self._made.get_or_make(
            _tensors_key(symbol, spec),
            lambda: arrays.tensors_of(symbol, forward_graph(symbol, spec)),
        )

    def step(
        self, symbol: Any, tensors: Mapping[str, Tensor], requests: Mapping[str, str], mkldnn: bool
    ) -> Step:
        """The training step for inputs of these shapes and types.

        Parameters
        ----------
        symbol : ScheduledSymbol
        tensors : dict of Tensor
            The arguments.
        requests : dict of str
            'write', 'add' or 'null' for each.
        mkldnn : bool
            Whether MKLDNN will compute it.
        """
        return self._made.get_or_make(
            _key(symbol, tensors, requests, mkldnn),
            lambda: make_step(symbol, self.schedule, tensors, requests, mkldnn),
        )

    def remember(
        self, symbol: Any, made: TrainingStep, requests: Mapping[str, str], mkldnn: bool
    ) -> None:
        """Take a training step that is there already; parameters as those of `step`."""
        graph = made.graph
        tensors, auxiliary = arrays.tensors_of(symbol, graph)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        types = {name: tensor.dtype for name, tensor in tensors.items()}
        self._made.put(_tensors_key(symbol, InputSpec(shapes, types)), (tensors, auxiliary))
        self._made.put(_key(symbol, tensors, requests, mkldnn), finished(made))


def _key(
    symbol: Any, tensors: Mapping[str, Tensor], requests: Mapping[str, str], mkldnn: bool
) -> Any:
    inputs = tuple(sorted(tensors.items())), tuple(sorted(requests.items()))
    return _digest(symbol), inputs, mkldnn


def _tensors_key(symbol: Any, spec: InputSpec) -> Any:
    given = tuple(sorted(spec.shapes.items())), tuple(sorted(spec.types.items()))
    return _digest(symbol), "tensors", given


def _digest(symbol: Any) -> bytes:
    """Of the network as it is now: attributes can be set at any time."""
    return hashlib.sha256(symbol.tojson(remove_amp_cast=False).encode()).digest()


def make_step(
    symbol: Any,
    schedule: Schedule,
    tensors: Mapping[str, Tensor],
    requests: Mapping[str, str],
    mkldnn: bool,
) -> Step:
    """Write out a training step; parameters as those of `Recipe.step`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    graph = forward_graph(symbol, InputSpec(shapes, types))
    asked = {a: requests[graph.nodes[a].name] for a in graph.arguments}
    work = workload(training_graph(graph, [a for a in asked if asked[a] != "null"]))
    fitting = adapt(work, schedule)
    check(work, fitting)
    added = [a for a in asked if asked[a] == "add"]
    return finished(unroll(parts(work), fitting, mkldnn, added))


def finished(step: TrainingStep) -> Step:
    """A training step, written out."""
    order = step.order()
    first = np.flatnonzero(step.rows.time[order] == 0)
    called: dict[str, str | None] = {}
    rows, usual = step.rows, step.training.names
    for name, source, what, time in zip(step.names, rows.source, rows.what, rows.time):
        if time > 0 or what != ITSELF:
            called[name] = None
        elif name != usual[source]:
            called[name] = usual[source]
    return Step(
        write(step),
        int(first.max(initial=-1)) + 1,
        len(order),
        int((~step.tables.variable[order]).sum()),
        called,
    )
