"""What a user asks for, checked: which network, at which shapes, and how to plan it.

A `Request` is cheap; the `Network` that is made of it costs seconds where the network is large, and
a plan that was made before in this process does without.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import numbers
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Mapping, Sequence

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.held import Held, held_by
from memonger.costs.model import CostModel
from memonger.graph import marks
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import (
    InputSpec,
    check_count,
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
from memonger.solve.budget import Budget, read_budget
from memonger.solve.memory import wanted
from memonger.support.errors import MemongerError
from memonger.support.symbols import read

log = logging.getLogger("memonger")

WAYS, EITHER = ("marks", "schedule"), "auto"
PLANNERS = ("smallest", "chen2016")
MOST_PATIENCE = 1e9  # it is multiplied, and must stay a number


# -- the network ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Request:
    """The network that a user wants to plan.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        A copy of it without marks, and without what an earlier plan added.
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


@dataclass(frozen=True, eq=False)
class Network:
    """The graphs of a network, and the rules that a plan of it obeys.

    ``training`` has the gradients that were asked for; ``stages`` are the user's ``mirror_stage``.
    """

    request: Request
    graph: ForwardGraph
    stages: dict[int, str]
    training: TrainingGraph
    rules: Rules

    @cached_property
    def held(self) -> Held:
        """What operators hold in training, on a GPU where no device was given."""
        ctx = self.request.ctx
        device_type = GPU if ctx is None or ctx.device_type == "gpu" else CPU
        return held_by(self.graph, device_type, device_type == CPU and has_mkldnn(ctx))

    @property
    def learned(self) -> int:
        """The elements of all parameters that are learned, which inputs with shapes are not."""
        nodes, tensors = self.graph.nodes, self.graph.tensors
        inputs = self.request.spec.shapes
        learned = (a for a in self.training.wanted if nodes[a].name not in inputs)
        return sum(tensors[a][0].elements for a in learned)

    def cost_model(self) -> CostModel:
        """Bind the network once, to tell what plans of it cost."""
        request, fuses = self.request, self.rules.fuses
        return CostModel(request.symbol, self.graph, self.training, request.device, fuses)

    def within(self, mask: np.ndarray) -> np.ndarray:
        """The part of a plan that comes before ``until``."""
        if self.request.until is None:
            return mask
        return mask & (np.arange(len(mask)) < self.request.until)


def read_request(
    net: Any,
    shapes: Any,
    input_shapes: Mapping[str, Any],
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    until: str | None = None,
    devices: int = 1,
) -> Request:
    """Check which network is planned; the parameters are those of ``memonger.plan``."""
    mirroring = os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0")
    if mirroring not in ("", "0"):
        raise MemongerError(
            f"MXNET_BACKWARD_DO_MIRROR is set to {mirroring!r}: MXNet then recomputes nearly every "
            "operator, whatever the plan says, and BatchNorm statistics may stop moving; unset it"
        )
    check_symbol(net)
    check_device(ctx)
    spec = read_shapes(net, shapes, input_shapes, type_dict, devices)
    requests = read_grad_req(net.list_arguments(), grad_req)
    symbol = marks.clear(marks.unplan(without_old_types(net, spec)))
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
    asked = wanted(graph, request.grad_req)
    # Module asks for no gradients of its data and labels, which leaves fewer readers.
    inputs = request.spec.shapes
    parameters = tuple(a for a in graph.arguments if graph.nodes[a].name not in inputs)
    others = {graph.arguments, parameters} - {asked}
    trainings = training_graphs(graph, [asked, *sorted(others)])
    targets = targets_of(None if request.ctx is None else request.ctx.device_type)
    obeyed = Rules(trainings, targets, request.until, bare=not rules)
    return Network(request, graph, marks.stages(graph), trainings[0], obeyed)


def _layer(symbol: Any, name: Any) -> int:
    """The first operator of this name, or with an output of this name."""
    internals = symbol.get_internals()
    graph = read(internals)
    operators: dict[str, int] = {}
    for i, node in enumerate(graph["nodes"]):
        if node["op"] != "null":
            operators.setdefault(node["name"], i)
    outputs = {
        output: head[0]
        for head, output in reversed([*zip(graph["heads"], internals.list_outputs())])
        if graph["nodes"][head[0]]["op"] != "null"
    }
    found = {**outputs, **operators}
    if not isinstance(name, str) or name not in found:
        names = [*operators]
        some = ", ".join(map(repr, names[len(names) // 2 :][:3]))
        hint = did_you_mean(name, names, f"give the name of one, such as {some}")
        raise MemongerError(f"until={name!r} is no operator of the network{hint}")
    return found[name]


# -- how to plan it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How to plan a network: what ``memonger.plan`` is told by keywords of these names, checked."""

    how: str = "marks"
    work: float | None = None
    budget: Budget | None = None
    planner: str = "smallest"
    ntrial: int = 6
    kept_copies: bool = True
    rules: bool = True
    measure: bool = False
    patience: float = 1.0


def read_options(given: Mapping[str, Any]) -> Options:
    """Check how to plan.

    Parameters
    ----------
    given : dict
        The arguments of a call by name, those of ``memonger.plan`` or some of them.
    """
    asked = Options(
        **{f.name: given[f.name] for f in dataclasses.fields(Options) if f.name in given}
    )
    _check_choice("way (how)", asked.how, (*WAYS, EITHER))
    _check_choice("planner", asked.planner, PLANNERS)
    ntrial = check_count("ntrial", asked.ntrial, 1)
    work = check_work(asked.how, asked.work)
    patience = _number("patience", asked.patience)
    if not 0 < patience <= MOST_PATIENCE:
        raise MemongerError(
            f"patience={patience:g}: it is how many times the usual length the search takes, more "
            f"than 0 and at most {MOST_PATIENCE:g}"
        )
    of, optimizer = given.get("budget_of"), given.get("optimizer")
    budget = read_budget(asked.budget, of, optimizer, given.get("ctx"))
    if asked.planner != "smallest" or not asked.rules:
        told = f"planner={asked.planner!r}, rules={asked.rules!r}: "
        if asked.how == "schedule":
            raise MemongerError(
                told + "these are of how='marks'; a schedule has a planner of its own, and needs "
                "no rules"
            )
        if budget is not None:
            raise MemongerError(told + "a budget has a planner of its own, and needs the rules")
    checked = {"work": work, "budget": budget, "ntrial": ntrial, "patience": patience}
    flags = {name: bool(getattr(asked, name)) for name in ("kept_copies", "rules", "measure")}
    return Options(**{**dataclasses.asdict(asked), **checked, **flags})


def check_work(how: str, work: Any) -> float | None:
    """Check a limit of forward work, and that this way can keep it."""
    if work is None:
        return None
    work = _number("work", work)
    if not work >= 1:
        raise MemongerError(
            f"work={work:g}: a training step runs all of the network forward at least once, so "
            "work is 1 or more; None for no limit"
        )
    if how == "marks" and work < 2:
        raise MemongerError(
            f"work={work:g} cannot be kept with how='marks', which recomputes each result at most "
            "once (work=2); how='schedule' can"
        )
    return work


def _check_choice(what: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise MemongerError(
            f"there is no {what} {value!r}; there are {', '.join(map(repr, known))}"
        )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise MemongerError(f"{name} is larger than any number that counts here") from None


# -- what a plan depends on -------------------------------------------------------------------


def structure(symbol: Any) -> dict[str, Any]:
    """The graph of a symbol, in which operators count by their place and not by their name.

    A ``sym_gen`` that leaves naming to MXNet makes the same network under other names each time.
    """
    graph = read(symbol)
    for node in graph["nodes"]:
        if node["op"] != "null":
            del node["name"]
    return graph


def settings() -> dict[str, str]:
    """The environment variables that MXNet reads."""
    return {k: v for k, v in os.environ.items() if k.startswith(("MXNET_", "NNVM_"))}


def fingerprint(request: Request, options: Options) -> str:
    """A fingerprint of everything that a plan depends on."""
    asked = [request.spec, request.grad_req, str(request.ctx), request.until]
    about = [structure(request.symbol), settings(), asked, dataclasses.astuple(options)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
