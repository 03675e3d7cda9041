"""The symbol of a training step: a network for MXNet that runs what the schedule says, in order.

It is written when a network with a schedule is bound, and remembered.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from memonger.graph.arrays import RowKind
from memonger.graph.forward import no_collection
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.tensors import Tensor
from memonger.graph.read import forward_graph
from memonger.graph.training import training_graph
from memonger.schedules.execution import arrays
from memonger.schedules.expand import parts, unroll
from memonger.schedules.nodes import ITSELF, MASKED, SCRATCH
from memonger.schedules.schedule import Schedule, adapt, check, workload
from memonger.schedules.training_step import Node, TrainingStep, nodes_of
from memonger.support.cache import Latest
from memonger.support.symbols import load_nodes

REMEMBERED = 16  # training steps of one symbol: shapes, gradients


@dataclass(frozen=True)
class Lowered:
    """A training step as a symbol.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        Its outputs are those of the network, then the gradients. To be bound with grad_req 'null'
        within ``environment(**training_step.BIND)``; ``forward(is_train=True)`` is a whole step.
    outputs : int
        How many of its outputs are the network's.
    gradients : dict
        For each argument that gets a gradient which output of the symbol that is; None for zeros.
    left_out : frozenset of str
        The arguments whose gradient MKLDNN leaves out: that output is not written.
    unwritten : tuple of str
        As in ``Parts``.
    totals : dict of str
        For arguments whose gradient is added to a total the argument that it is given in; the
        output is the new total.
    heads : dict
        For each output of the network whose gradient must be given the argument that it is given
        in. Empty if all outputs are losses.
    head_tensors : dict of Tensor
        Their shapes and types.
    scratch : dict of Tensor
        Auxiliary states that only the symbol has.
    forward, nodes : int
        How many nodes run (variables counted) before the outputs are there, and in all.
    operators : int
        How many of the nodes are operators.
    called : dict of str or None
        What MXNet calls the nodes that have another name here; None for those that it has not.
    """

    symbol: Any
    outputs: int
    gradients: Mapping[str, int | None]
    left_out: frozenset[str]
    unwritten: tuple[str, ...]
    totals: Mapping[str, str]
    heads: Mapping[int, str]
    head_tensors: Mapping[int, Tensor]
    scratch: Mapping[str, Tensor]
    forward: int
    nodes: int
    operators: int
    called: Mapping[str, str | None]


@no_collection()
def write(step: TrainingStep) -> Lowered:
    """Make the symbol of a training step."""
    rows, graph, names, t = nodes_of(step.rows), step.graph, step.names, step.tables
    usual, order = step.training.names, step.order()
    used = ~t.variable  # variables that nothing reads are left out
    used[step.rows.read_row] = True
    used[t.head_row] = True
    place = (np.cumsum(used) - 1).tolist()
    named = [each for each, is_used in zip(zip(names, rows, step.kinds), used) if is_used]
    multiplied = {row.source for row in rows if row.what == MASKED}
    nodes: list[dict[str, Any]] = []
    for name, row, kind in named:
        inputs = [[place[source], output, 0] for source, output in row.reads]
        node: dict[str, Any] = {"op": kind.op, "name": name, "inputs": inputs}
        attrs = _attributes(step, row, kind)
        if row.what == ITSELF and row.source in multiplied:
            # cuDNN's mask is one of bits, no factors (src/operator/nn/dropout-inl.h)
            attrs = {**attrs, "cudnn_off": "True"}
        if attrs:
            node["attrs"] = dict(attrs)
        if row.waits:
            node["control_deps"] = list(dict.fromkeys(place[before] for before in row.waits))
        nodes.append(node)
    heads = [
        (int(usual[row.source].rsplit("_", 1)[1]), name, kind)  # it is called _head_grad_k
        for name, row, kind in named
        if kind.op == "null" and row.what == ITSELF and row.source >= len(graph.nodes)
    ]
    return Lowered(
        symbol=load_nodes(nodes, [[place[row], k, 0] for row, k in step.heads]),
        outputs=len(graph.heads),
        gradients=dict(zip([graph.nodes[a].name for a in step.training.wanted], step.gradients)),
        left_out=frozenset(graph.nodes[a].name for a in step.parts.left_out),
        unwritten=step.parts.unwritten,
        totals={graph.nodes[a].name: names[variable] for a, (variable, _) in step.totals.items()},
        heads={k: name for k, name, _ in heads},
        head_tensors={k: kind.tensors[0] for k, _, kind in heads},
        scratch={name: kind.tensors[0] for name, row, kind in named if row.what == SCRATCH},
        forward=int(np.flatnonzero(step.rows.time[order] == 0).max(initial=-1)) + 1,
        nodes=len(order),
        operators=int((~t.variable[order]).sum()),
        called={
            name: None if row.what != ITSELF or row.time > 0 else usual[row.source]
            for name, row in zip(names, rows)
            if row.what != ITSELF or name != usual[row.source]
        },
    )


def _attributes(step: TrainingStep, row: Node, kind: RowKind) -> Mapping[str, str]:
    if kind.op == "null" and row.what == ITSELF and row.source < len(step.graph.nodes):
        return step.graph.nodes[row.source].hidden
    if kind.op == "_zeros_without_dtype":  # its shape is inferred from nothing
        return {**kind.attrs, "shape": str(tuple(kind.tensors[0].shape))}
    return kind.attrs


class Recipe:
    """A schedule, and the latest that was made of it; shared by copies of a symbol.

    ``told`` are the places where its loss has been told.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.told: set[str] = set()
        self._made: Latest[Any] = Latest(REMEMBERED)

    def tensors(self, symbol: Any, spec: InputSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Shape and type of each argument and auxiliary state of the network."""
        return self._made.get_or_make(
            _key(symbol, spec.shapes, spec.types),
            lambda: arrays.tensors_of(symbol, forward_graph(symbol, spec)),
        )

    def step(
        self, symbol: Any, tensors: Mapping[str, Tensor], requests: Mapping[str, str], mkldnn: bool
    ) -> Lowered:
        """Return the training step for inputs of these shapes and types.

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
        found = arrays.tensors_of(symbol, made.graph)
        spec = spec_of(found[0])
        self._made.put(_key(symbol, spec.shapes, spec.types), found)
        self._made.put(_key(symbol, found[0], requests, mkldnn), write(made))


def _key(symbol: Any, *given: Any) -> Any:
    """A key of these and of the network as it is now (attributes can be set at any time)."""
    network = hashlib.sha256(symbol.tojson(remove_amp_cast=False).encode()).digest()
    return network, *(tuple(sorted(g.items())) if isinstance(g, Mapping) else g for g in given)


def spec_of(tensors: Mapping[str, Tensor]) -> InputSpec:
    """The shapes and types of these inputs, as a user gives them."""
    return InputSpec(
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: tensor.dtype for name, tensor in tensors.items()},
    )


def make_step(
    symbol: Any,
    schedule: Schedule,
    tensors: Mapping[str, Tensor],
    requests: Mapping[str, str],
    mkldnn: bool,
) -> Lowered:
    """Write out a training step; parameters as those of `Recipe.step`."""
    graph = forward_graph(symbol, spec_of(tensors))
    asked = {a: requests[graph.nodes[a].name] for a in graph.arguments}
    work = workload(training_graph(graph, [a for a in asked if asked[a] != "null"]))
    fitting = adapt(work, schedule)
    check(work, fitting)
    added = [a for a in asked if asked[a] == "add"]
    return write(unroll(parts(work), fitting, mkldnn, added))
