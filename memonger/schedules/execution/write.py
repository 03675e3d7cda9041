"""The symbol of a training step: a network for MXNet that runs what the schedule says, in order.

It is written when a network with a schedule is bound, and remembered. MXNet's own executor of it is
run in parts.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from memonger.graph.forward import ForwardGraph, no_collection
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import training_graph
from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.expand import parts, unroll
from memonger.schedules.schedule import Schedule, adapt, check, workload
from memonger.schedules.training_step import BIND, OURS, TrainingStep, nodes_of
from memonger.support.cache import Latest
from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import environment, mx, without_line
from memonger.support.symbols import load_nodes

REMEMBERED = 16  # training steps of one symbol: shapes, gradients

#: What MXNet logs at each bind (the constructor of ``GraphExecutor``).
_DETECTED = b"MXNET_SUBGRAPH_BACKEND=NONE is detected"

#: ``GraphExecutor::RunOps(bool is_train, size_t first, size_t end)``: the nodes first to end - 1 of
#: the graph run (``src/executor/graph_executor.cc``). ``MXExecutorForward`` calls it for all nodes;
#: there is no C function for some of them, but the libraries of 1.9.1 export the method itself.
_RUN_OPS = "_ZN5mxnet4exec13GraphExecutor6RunOpsEbmm"


@dataclass(frozen=True, eq=False)
class Lowered:
    """A training step as a symbol; its outputs are those of the network, then the gradients."""

    symbol: Any
    outputs: int  # of the network
    gradients: Mapping[str, int | None]  # of arguments: which output that is; or zeros
    #: Of arguments whose gradient is added to a total: the argument that this is given in. The
    #: output is the new total.
    totals: Mapping[str, str]
    #: Of the network's outputs that are no losses: the argument that their gradient is given in.
    heads: Mapping[int, str]
    extra: Mapping[str, Tensor]  # all arguments and auxiliary states that only the symbol has
    forward: int  # nodes that run before the outputs are there, variables counted
    nodes: int
    operators: int  # nodes that are no variables

    def bind(self, ctx: Any, args: Arrays, aux: Arrays, shared_exec: Any) -> Any:
        """Bind it with these arrays (there may be others among them); see `run`."""
        args = {name: args[name] for name in self.symbol.list_arguments()}
        aux = {name: aux[name] for name in self.symbol.list_auxiliary_states()}
        try:
            with environment(**BIND), without_line(_DETECTED):
                made = self.symbol.bind(ctx, args, None, "null", aux, shared_exec=shared_exec)
        except mx.MXNetError as error:
            raise MemongerError(
                f"MXNet cannot bind the schedule of this network on {ctx}: {said_by_mxnet(error)}"
            ) from None
        if not hasattr(mx.base._LIB, _RUN_OPS):
            raise MemongerError("this build of MXNet cannot run a schedule: it exports no RunOps")
        found = made.debug_str().count("\nOp:")
        if found != self.operators:
            raise MemongerError(
                f"MXNet has made {found} operators of the {self.operators} of a training step; "
                "please report this network"
            )
        return made


def run(executor: Any, first: int, end: int, is_train: bool = True) -> None:
    """Run some of the nodes, in training or in inference.

    Operators run in MXNet's engine, and their errors are told when something waits for them. Only
    the engine for debugging runs them at once, and no C function is there to catch what they throw.
    """
    function = getattr(mx.base._LIB, _RUN_OPS)
    function.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = None
    function(executor.handle, is_train, first, end)


@no_collection()
def write(step: TrainingStep) -> Lowered:
    """Make the symbol of a training step."""
    rows, graph, names, t = nodes_of(step.rows), step.graph, step.names, step.tables
    forward, order, made = len(graph.nodes), t.first, step.parts
    used = ~t.variable  # variables that nothing reads are left out
    used[step.rows.read_row] = True
    used[t.head_row] = True
    place = (np.cumsum(used) - 1).tolist()
    named = [each for each, is_used in zip(zip(names, rows, step.kinds), used) if is_used]
    recomputed = {row.source for row in rows if row.time > 0}
    nodes: list[dict[str, Any]] = []
    for name, row, kind in named:
        inputs = [[place[source], output, 0] for source, output in row.reads]
        node: dict[str, Any] = {"op": kind.op, "name": name, "inputs": inputs}
        attrs = dict(kind.attrs)
        if kind.op == "null" and 0 <= row.source < forward:
            attrs = dict(graph.nodes[row.source].hidden)
        elif kind.op == "Dropout" and row.source in recomputed:
            # cuDNN's mask is one of bits, no factors (src/operator/nn/dropout-inl.h)
            attrs["cudnn_off"] = "True"
        elif kind.op == "_zeros_without_dtype":  # its shape is inferred from nothing
            attrs["shape"] = str(tuple(kind.tensors[0].shape))
        if attrs:
            node["attrs"] = attrs
        if row.waits:
            node["control_deps"] = list(dict.fromkeys(place[before] for before in row.waits))
        nodes.append(node)
    variables = [(name, row, kind) for name, row, kind in named if kind.op == "null"]
    gradients = zip(step.training.wanted, step.gradients)
    totals = [(graph.nodes[a].name, step.rows.latest[total]) for a, total in made.totals.items()]
    return Lowered(
        symbol=load_nodes(nodes, [[place[row], k, 0] for row, k in step.heads]),
        outputs=len(graph.heads),
        gradients={graph.nodes[a].name: k for a, k in gradients if a not in made.left_out},
        totals={name: names[row] for name, row in totals},
        heads={  # their gradients are what MXNet calls _head_grad_k
            int(n.rsplit("_", 1)[1]): n for n, row, _ in variables if row.source >= forward
        },
        extra={n: kind.tensors[0] for n, _, kind in variables if n.startswith(OURS)},
        forward=int(np.flatnonzero(step.rows.time[order] == 0).max(initial=-1)) + 1,
        nodes=len(order),
        operators=int((~t.variable[order]).sum()),
    )


def step_for(
    graph: ForwardGraph, schedule: Schedule, grad_req: Mapping[str, str], mkldnn: bool
) -> TrainingStep:
    """Build the training step of a network for these gradients, by what fits of a schedule."""
    asked = {a: grad_req[graph.nodes[a].name] for a in graph.arguments}
    work = workload(training_graph(graph, [a for a in asked if asked[a] != "null"]))
    fitting = adapt(work, schedule)
    check(work, fitting)
    return unroll(parts(work, [a for a in asked if asked[a] == "add"], mkldnn), fitting)


class Recipe:
    """A schedule, and the latest that was made of it; shared by copies of a symbol."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.told: set[str] = set()  # the places where its loss has been told
        self._made: Latest[Lowered] = Latest(REMEMBERED)

    def step(
        self,
        symbol: Any,
        graph: ForwardGraph,
        requests: Mapping[str, str],
        mkldnn: bool,
        known: TrainingStep | None = None,
    ) -> Lowered:
        """Return the training step of the symbol's graph, computed with MKLDNN or not.

        It is made, or written out as it is ``known``, where it is not remembered.
        """
        # The network as it is now: attributes can be set at any time.
        network = hashlib.sha256(symbol.tojson(remove_amp_cast=False).encode()).digest()
        tensors = tuple(graph.tensors[a] for a in graph.arguments)
        key = network, tensors, tuple(sorted(requests.items())), mkldnn

        def make() -> Lowered:
            return write(known or step_for(graph, self.schedule, requests, mkldnn))

        return self._made.get_or_make(key, make)
