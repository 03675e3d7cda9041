"""A user's network as it is planned: what was asked for, checked, and all that a plan needs of it.

In two steps, for the second costs seconds on a large network and a plan that was made before in
this process needs only the first.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Mapping, NamedTuple

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.held import Held, held_by
from memonger.costs.model import CostModel
from memonger.graph import marks
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import (
    InputSpec,
    check_device,
    check_symbol,
    did_you_mean,
    read_grad_req,
    read_shapes,
    without_old_types,
)
from memonger.graph.operators.recompute import CPU, GPU, targets_of
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph, training_graphs
from memonger.planners.marks.rules import Rules, refuse
from memonger.support.errors import MemongerError
from memonger.support.symbols import read

log = logging.getLogger("memonger")


class Request(NamedTuple):
    """What the user asked to plan.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        A copy of the network without marks, and without what an earlier plan added.
    spec : InputSpec
        Shapes and types of one device's inputs.
    grad_req : dict
        'write', 'add' or 'null' for each argument, in order.
    ctx : mx.Context or None
        As it was given: None plans for any device.
    until : int or None
        The node from which on everything is kept.
    """

    symbol: Any
    spec: InputSpec
    grad_req: dict[str, str]
    ctx: Any
    until: int | None

    @property
    def device(self) -> Any:
        """The device to bind on."""
        return check_device(self.ctx)


class Network(NamedTuple):
    """A network, ready to be planned.

    Attributes
    ----------
    request : Request
    graph : ForwardGraph
    stages : dict
        The user's ``mirror_stage`` marks.
    training : TrainingGraph
        With the gradients that were asked for.
    rules : Rules
        For these gradients, for all, and for those of the parameters alone; or bare.
    """

    request: Request
    graph: ForwardGraph
    stages: dict[int, str]
    training: TrainingGraph
    rules: Rules

    @property
    def held(self) -> Held:
        """What operators hold in training, on a GPU where no device was given."""
        ctx = self.request.ctx
        device_type = GPU if ctx is None or ctx.device_type == "gpu" else CPU
        return held_by(self.graph, device_type, device_type == CPU and has_mkldnn(ctx))

    def cost_model(self) -> CostModel:
        """What plans of it cost. The network is bound once for it."""
        request = self.request
        return CostModel(
            request.symbol, self.graph, self.training, request.device, self.rules.fuses
        )

    def within(self, mask: np.ndarray) -> np.ndarray:
        """The part of a plan that comes before ``until``."""
        if self.request.until is not None:
            mask = mask.copy()
            mask[self.request.until :] = False
        return mask


def read_request(
    sym: Any,
    shapes: Any,
    input_shapes: Mapping[str, Any],
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    until: str | None = None,
    devices: int = 1,
) -> Request:
    """Check what the user gives; the parameters are those of ``memonger.plan``."""
    _refuse_global_mirroring()
    check_symbol(sym)
    check_device(ctx)
    spec = read_shapes(sym, shapes, input_shapes, type_dict, devices)
    requests = read_grad_req(sym.list_arguments(), grad_req)
    symbol = marks.clear(marks.unplan(without_old_types(sym, spec)))
    return Request(symbol, spec, requests, ctx, None if until is None else _layer(symbol, until))


def read_network(request: Request, rules: bool = True) -> Network:
    """Read the graphs of a network, and make its rules (or bare ones).

    Raises
    ------
    MemongerError
        If shapes are missing or do not fit, or the network holds what cannot be planned.
    """
    graph = forward_graph(request.symbol, request.spec)
    refuse(graph)
    if any(marks.RECORD in node.hidden for node in graph.nodes):
        log.info("the network carries force_mirroring marks already; they are planned anew")
    names = [node.name for node in graph.nodes]
    asked = wanted(graph, request.grad_req)
    # Module asks for no gradients of its data and labels, which leaves fewer readers.
    parameters = tuple(a for a in graph.arguments if names[a] not in request.spec.shapes)
    others = {graph.arguments, parameters} - {asked}
    trainings = training_graphs(graph, [asked, *sorted(others)])
    targets = targets_of(None if request.ctx is None else request.ctx.device_type)
    obeyed = Rules(trainings, targets, request.until, bare=not rules)
    return Network(request, graph, marks.stages(graph), trainings[0], obeyed)


def wanted(graph: ForwardGraph, grad_req: Mapping[str, str]) -> tuple[int, ...]:
    """The arguments (nodes) whose gradient is asked for."""
    return tuple(a for a in graph.arguments if grad_req[graph.nodes[a].name] != "null")


def _layer(symbol: Any, name: Any) -> int:
    """The first operator of this name, or with an output of this name."""
    internals = symbol.get_internals()
    graph = read(internals)
    found: dict[str, int] = {}
    for i, node in enumerate(graph["nodes"]):
        if node["op"] != "null":
            found.setdefault(node["name"], i)
    operators = list(found)
    for head, output in zip(graph["heads"], internals.list_outputs()):
        if graph["nodes"][head[0]]["op"] != "null":
            found.setdefault(output, head[0])
    if not isinstance(name, str) or name not in found:
        some = ", ".join(map(repr, operators[len(operators) // 2 :][:3]))
        hint = did_you_mean(name, operators, f"give the name of one, such as {some}")
        raise MemongerError(f"until={name!r} is no operator of the network{hint}")
    return found[name]


def _refuse_global_mirroring() -> None:
    value = os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0")
    if value not in ("", "0"):
        raise MemongerError(
            f"MXNET_BACKWARD_DO_MIRROR is set to {value!r}: MXNet then recomputes nearly every "
            "operator, whatever the plan says, and BatchNorm statistics may stop moving; unset it"
        )
