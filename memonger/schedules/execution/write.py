"""The symbol of a training step: a network that runs what the schedule says, in order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Dict, Mapping

import numpy as np

from memonger.graph.forward import ForwardGraph, no_collection
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import training_graph
from memonger.schedules.expand import parts, unroll
from memonger.schedules.schedule import Schedule, adapt, check, workload
from memonger.schedules.training_step import BIND, OURS, TrainingStep, nodes_of
from memonger.support.cache import Latest
from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import environment, mx, without_line
from memonger.support.symbols import load_nodes

Arrays = Dict[str, Any]  # by the names of arguments or auxiliary states
Requests = Mapping[str, str]  # grad_req of each argument

#: ``GraphExecutor::RunOps(bool is_train, size_t first, size_t end)``: the nodes first to end - 1 of
#: the graph run (``src/executor/graph_executor.cc``). ``MXExecutorForward`` calls it for all nodes;
#: there is no C function for some of them, but the libraries of 1.9.1 export the method itself.
RUN_OPS = "_ZN5mxnet4exec13GraphExecutor6RunOpsEbmm"


@dataclass(frozen=True, eq=False)
class Lowered:
    """A training step as a symbol; its outputs are those of the network, then the gradients."""

    symbol: Any
    outputs: int  # of the network
    gradients: Mapping[str, int | None]  # of arguments: which output that is; or zeros
    totals: Mapping[str, str]  # of arguments with 'add': the argument of the total so far
    heads: Mapping[int, str]  # of outputs that are no losses: the argument of their gradient
    extra: Mapping[str, Tensor]  # all arguments and auxiliary states that only the symbol has
    forward: int  # nodes that run before the outputs are there, variables counted
    nodes: int
    operators: int  # nodes that are no variables

    def bind(self, ctx: Any, args: Arrays, aux: Arrays, shared_exec: Any) -> Any:
        """Bind it with these arrays (there may be others among them)."""
        args = {name: args[name] for name in self.symbol.list_arguments()}
        aux = {name: aux[name] for name in self.symbol.list_auxiliary_states()}
        try:
            with environment(**BIND), without_line(b"MXNET_SUBGRAPH_BACKEND=NONE is detected"):
                made = self.symbol.bind(ctx, args, None, "null", aux, shared_exec=shared_exec)
        except mx.MXNetError as error:
            raise MemongerError(
                f"MXNet cannot bind the schedule of this network on {ctx}: {said_by_mxnet(error)}"
            ) from None
        if not hasattr(mx.base._LIB, RUN_OPS):
            raise MemongerError("this build of MXNet cannot run a schedule: it exports no RunOps")
        found = made.debug_str().count("\nOp:")
        if found != self.operators:  # parts of the step would run at the wrong time
            raise MemongerError(
                f"MXNet has made {found} operators of the {self.operators} of a training step; "
                "please report this network"
            )
        return made


@no_collection()
def write(step: TrainingStep) -> Lowered:
    """Make the symbol of a training step."""
    rows, graph, names, t = nodes_of(step.rows), step.training.graph, step.names, step.arrays
    forward, order = len(graph.nodes), t.first
    used = {*step.rows.read_row.tolist(), *t.head_row.tolist()}
    recomputed = {row.source for row in rows if row.time > 0}
    nodes: list[dict[str, Any]] = []
    heads: dict[int, str] = {}
    extra: dict[str, Tensor] = {}
    for number, (name, row, signature) in enumerate(zip(names, rows, step.signatures)):
        attrs = dict(signature.attrs)
        if signature.op == "null" and name.startswith(OURS):
            if number in used:
                extra[name] = signature.tensors[0]
                if row.source >= forward:  # what MXNet calls _head_grad_k
                    heads[int(name.rsplit("_", 1)[1])] = name
        elif signature.op == "null":
            attrs = dict(graph.nodes[row.source].hidden)
        elif signature.op == "Dropout" and row.source in recomputed:
            # cuDNN's mask is one of bits, no factors (src/operator/nn/dropout-inl.h)
            attrs["cudnn_off"] = "True"
        elif signature.op == "_zeros_without_dtype":  # its shape is inferred from nothing
            attrs["shape"] = str(tuple(signature.tensors[0].shape))
        inputs, deps = [[x, k, 0] for x, k in row.reads], list(dict.fromkeys(row.waits))
        node = {"op": signature.op, "name": name, "inputs": inputs, "attrs": attrs}
        nodes.append({**node, "control_deps": deps})
    totals = step.parts.totals.items()
    gradients = zip(step.training.wanted, step.gradients)
    return Lowered(
        symbol=load_nodes(nodes, [[row, k, 0] for row, k in step.heads]),
        outputs=len(graph.heads),
        gradients={graph.nodes[a].name: k for a, k in gradients if a not in step.parts.left_out},
        totals={graph.nodes[a].name: names[step.rows.latest[total]] for a, total in totals},
        heads=heads,
        extra=extra,
        forward=int(np.flatnonzero(step.rows.time[order] == 0).max(initial=-1)) + 1,
        nodes=len(order),
        operators=sum(nodes[row]["op"] != "null" for row in order),
    )


def step_for(
    graph: ForwardGraph, schedule: Schedule, requests: Requests, mkldnn: bool
) -> TrainingStep:
    """Build the training step of a network for these gradients, by what fits of a schedule."""
    asked = {a: requests[graph.nodes[a].name] for a in graph.arguments}
    work = workload(training_graph(graph, [a for a in asked if asked[a] != "null"]))
    fitting = adapt(work, schedule)
    check(work, fitting)
    return unroll(parts(work, [a for a in asked if asked[a] == "add"], mkldnn), fitting)


class Recipe:
    """A schedule, and the latest steps that were made of it; shared by copies of a symbol."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.told: set[str] = set()  # the places where its loss has been told
        self._made: Latest[Lowered] = Latest(16)  # for shapes, gradients, devices

    def step(
        self, symbol: Any, graph: ForwardGraph, requests: Requests, mkldnn: bool, known: Any = None
    ) -> Lowered:
        """Return the lowered step of the symbol's graph: remembered, or of ``known``, or made."""
        # The network as it is now: attributes can be set at any time.
        network = hashlib.sha256(symbol.tojson(remove_amp_cast=False).encode()).digest()
        tensors = tuple(graph.tensors[a] for a in graph.arguments)
        key = network, tensors, frozenset(requests.items()), mkldnn
        about = graph, self.schedule, requests, mkldnn
        return self._made.get_or_make(key, lambda: write(known or step_for(*about)))
