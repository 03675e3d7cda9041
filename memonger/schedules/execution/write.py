"""The symbol of a training step: a network for MXNet that runs what the schedule says, in order."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from memonger.graph.arrays import RowKind
from memonger.graph.forward import no_collection
from memonger.graph.operators.gradients import MXNET_VERSION
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.nodes import ITSELF, MASKED, SCRATCH
from memonger.schedules.training_step import TrainingStep, nodes_of
from memonger.support.mxnet import mx
from memonger.support.symbols import as_json


class Written(NamedTuple):
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
    scratch : dict of Tensor
        Auxiliary states that only the symbol has.
    """

    symbol: Any
    outputs: int
    gradients: dict[str, int | None]
    left_out: frozenset[str]
    unwritten: tuple[str, ...]
    totals: dict[str, str]
    heads: dict[int, str]
    scratch: dict[str, Tensor]


@no_collection()
def write(step: TrainingStep) -> Written:
    """Make the symbol of a training step."""
    rows, graph, names, kinds = step.rows, step.graph, step.names, step.kinds
    used = ~step.tables.variable  # variables that nothing reads are left out
    used[rows.read_row] = True
    used[step.tables.head_row] = True
    listed = nodes_of(rows)
    multiplied = set(rows.source[rows.what == MASKED].tolist())
    nodes: list[dict[str, Any]] = []
    place: list[int] = []
    heads: dict[int, str] = {}
    scratch: dict[str, Tensor] = {}
    for k, (name, kind, source, what) in enumerate(zip(names, kinds, rows.source, rows.what)):
        place.append(len(nodes))
        if not used[k]:
            continue
        attrs = _attributes(kind)
        if what == SCRATCH:
            scratch[name] = kind.tensors[0]
        elif what == ITSELF and kind.op == "null":
            if source < len(graph.nodes):
                attrs = graph.nodes[source].hidden
            else:  # named _head_grad_k
                heads[int(step.training.names[source].rsplit("_", 1)[1])] = name
        elif what == ITSELF and source in multiplied:
            # cuDNN's mask is one of bits, no factors (src/operator/nn/dropout-inl.h)
            attrs = {**attrs, "cudnn_off": "True"}
        inputs = [[place[row], output, 0] for row, output in listed[k].reads]
        node: dict[str, Any] = {"op": kind.op, "name": name, "inputs": inputs}
        if attrs:
            node["attrs"] = dict(attrs)
        if listed[k].waits:
            node["control_deps"] = list(dict.fromkeys(place[row] for row in listed[k].waits))
        nodes.append(node)
    text = as_json(
        {
            "nodes": nodes,
            "arg_nodes": [i for i, node in enumerate(nodes) if node["op"] == "null"],
            "heads": [[place[row], k, 0] for row, k in step.heads],
            "attrs": {"mxnet_version": MXNET_VERSION},
        },
    )
    arguments = [graph.nodes[a].name for a in step.training.wanted]
    return Written(
        mx.sym.load_json(text),
        len(graph.heads),
        dict(zip(arguments, step.gradients)),
        frozenset([graph.nodes[a].name for a in step.parts.left_out]),
        step.parts.unwritten,
        {graph.nodes[a].name: names[variable] for a, (variable, _) in step.totals.items()},
        heads,
        scratch,
    )


def _attributes(kind: RowKind) -> Mapping[str, str]:
    if kind.op == "_zeros_without_dtype":  # its shape is inferred from nothing
        return {**kind.attrs, "shape": str(tuple(kind.tensors[0].shape))}
    return kind.attrs
