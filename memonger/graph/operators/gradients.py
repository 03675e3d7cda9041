"""What the gradient of an operator reads and makes, observed by binding that operator alone.

MXNet's ``FGradient`` functions (``src/nnvm/gradient.cc`` calls them) cannot be called from Python,
but an executor prints the whole training graph. That of a network is ambiguous, for many of its
nodes have the same name; that of one operator between variables is not. Arrays that are never
allocated make the bind cheap at any size. An operator is bound once for all shapes and types, for
MXNet makes gradients before it infers those (``GraphExecutor::InitFullGraph``).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.tensors import Attributes, Tensor, Tensors, check_elements
from memonger.support.errors import said_by_mxnet
from memonger.support.mxnet import environment, mx, without_fallbacks
from memonger.support.symbols import all_outputs, load_nodes, read

#: How the gradient nodes of an operator refer to what they read.
#: ('head', k, 0): the gradient of output k; ('in', k, 0): input k; ('out', 0, k): output k;
#: ('node', j, k): output k of gradient node j.
Reference = Tuple[str, int, int]

Attrs = Tuple[Tuple[str, str], ...]  # names and values, sorted
JsonNode = Dict[str, Any]
Debugged = Tuple[List[Tuple[str, int]], List[JsonNode]]  # outputs, operators
FORWARD = "f"  # the name of the operator that is bound
ZEROS = ("zeros_like", "_zeros")  # what AggregateGradient leaves out of a sum
#: Gradients that MXNet makes without the shape that a symbol must tell, that of the first input
#: (``src/operator/tensor/indexing_op.cc``); they do not read it.
UNTOLD_SHAPE = frozenset(("_backward_gather_nd",))


class BackwardNode(NamedTuple):
    """One node that the gradient of an operator adds to the training graph."""

    op: str
    name: str  # where the operator is named FORWARD
    attrs: Attributes
    inputs: tuple[Reference, ...]
    deps: tuple[int | None, ...]  # gradient nodes; None: the forward node itself
    tensors: Tensors

    def name_of(self, operator: str) -> str:
        """Return the name that MXNet gives this node where the operator is named so."""
        begin = FORWARD + "_"
        return f"{operator}_{self.name[len(begin) :]}" if self.name.startswith(begin) else self.name


class GradientFacts(NamedTuple):
    """What the gradient of one operator reads."""

    own_output: bool = False  # whether it reads the operator's first output
    inputs: frozenset[int] = frozenset()  # that it reads, other than for their shape
    passes: frozenset[int] = frozenset()  # inputs that it has a gradient for, other than zero
    follows: bool = False  # whether it waits for the operator, so that even an unread copy runs
    summed: int = 0  # the most gradients that meet at one of the operator's outputs


@dataclass(frozen=True)
class OperatorGradient:
    """The gradient nodes of one operator, and the gradient of each of its inputs (or None)."""

    nodes: tuple[BackwardNode, ...]
    gradients: tuple[Reference | None, ...]

    @functools.cached_property
    def facts(self) -> GradientFacts:
        """What it reads, whatever meets at the operator's outputs."""
        read = {r for node in self.nodes if node.op not in ZEROS for r in node.inputs}
        zeros = [("node", j, 0) for j, node in enumerate(self.nodes) if node.op in ZEROS]
        return GradientFacts(
            own_output=("out", 0, 0) in read,
            inputs=frozenset(r[1] for r in read if r[0] == "in"),
            passes=frozenset(k for k, r in enumerate(self.gradients) if r not in (None, *zeros)),
            follows=any(None in node.deps for node in self.nodes),
        )


class _Observed(NamedTuple):
    """The same for inputs of any shapes and types."""

    forward: list[JsonNode]  # the variables and the operator
    outputs: list[list[int]]  # of the operator
    nodes: list[BackwardNode]  # without tensors
    gradients: tuple[Reference | None, ...]


class NotObservable(Exception):
    """The gradient of this operator cannot be read off a bind; the reason is the message."""


class NotDifferentiable(Exception):
    """MXNet has no gradient for this operator."""


def unallocated(shape: Sequence[int], dtype: str, ctx: Any) -> Any:
    """Return an NDArray of which MXNet knows shape and type, and which takes no memory."""
    checked, kind = check_elements(tuple(shape)), np.dtype(dtype).type
    return mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(checked, ctx, True, kind))


def alone(op: str, attrs: Attributes, count: int) -> tuple[list[JsonNode], list[list[int]]]:
    """Return ``count`` variables x0, x1, ... and an operator of them as JSON nodes; its outputs."""
    nodes = [_node("null", f"x{k}") for k in range(count)]
    nodes.append(_node(op, FORWARD, *([k, 0, 0] for k in range(count)), attrs=dict(attrs)))
    outputs = load_nodes(nodes, [[count, 0, 0]]).get_internals().list_outputs()
    return nodes, [[count, k, 0] for k in range(len(outputs) - count)]


def _node(op: str, name: str, *inputs: list[int], **more: Any) -> JsonNode:
    return {"op": op, "name": name, "inputs": list(inputs), **more}


@functools.lru_cache(maxsize=4096)
def gradient_of(op: str, attrs: Attrs, inputs: Tensors, zero: bool) -> OperatorGradient:
    """Return the gradient of an operator with inputs of these shapes and types, or raise.

    With ``zero`` those of its outputs are zero (``CheckGradAllZero`` in ``operator_common.h``).
    """
    for tensor in inputs:
        check_elements(tensor.shape)
    key = op, attrs, len(inputs), zero
    if key not in _observed:
        _observed[key] = _observe(op, attrs, inputs, zero)
    found = _observed[key]
    return OperatorGradient(_with_tensors(op, found, inputs), found.gradients)


_observed: dict[tuple[str, Attrs, int, bool], _Observed] = {}


def _observe(op: str, attrs: Attrs, inputs: Tensors, zero: bool) -> _Observed:
    """Observe the gradient of an operator with any inputs, from a bind with these."""
    count = len(inputs)
    try:
        nodes, shown = alone(op, dict(attrs), count)
        stops = [_node("BlockGrad", f"stop{k}", head) for k, head in enumerate(shown)]
        heads = [[count + 1 + k, 0, 0] for k in range(len(shown))] if zero else shown
        symbol = load_nodes([*nodes, *stops] if zero else nodes, heads)
        outputs, found = _bound(symbol, inputs, merging="0")
    except mx.MXNetError as error:
        if "non-differentiable" in str(error):
            raise NotDifferentiable(op) from None
        said = said_by_mxnet(error)
        raise NotObservable(f"MXNet cannot bind it alone on a CPU ({said})") from None
    known: dict[str, Reference] = {f"x{k}": ("in", k, 0) for k in range(count)}
    for k in range(len(shown)):
        names = f"_head_grad_{k}", f"_head_grad_{k}_id", f"stop{k}", f"stop{k}_backward"
        known.update(dict.fromkeys(names, ("head", k, 0)))
    made, of_outputs = _referred(op, known, (outputs[len(shown) :], found))
    given = dict(zip(symbol.list_arguments(), of_outputs))
    return _Observed(nodes, shown, made, tuple([given.get(f"x{k}") for k in range(count)]))


@functools.lru_cache(maxsize=4096)
def merges(op: str, attrs: Attrs, inputs: Tensors) -> bool:
    """Observe whether MXNet makes one of two operators that are the same and read the same.

    It does not where they keep state, draw numbers or change their inputs (``NodeEqual`` in
    ``src/executor/eliminate_common_expr_pass.cc``).
    """
    count = len(inputs)
    try:
        nodes, _ = alone(op, dict(attrs), count)
        nodes.append({**nodes[-1], "name": "g"})
        # Read by different operators: heads of the network are never quite merged.
        nodes.append(_node("identity", "to f", [count, 0, 0]))
        nodes.append(_node("negative", "to g", [count + 1, 0, 0]))
        symbol = load_nodes(nodes, [[count + 2, 0, 0], [count + 3, 0, 0]])
        _, found = _bound(symbol, inputs, merging="1")
    except mx.MXNetError:  # a subgraph, a Custom operator, or one without a gradient
        return False
    return sum(node["name"] in (FORWARD, "g") for node in found) == 1


def _bound(symbol: Any, inputs: Tensors, merging: str) -> Debugged:
    """Bind a symbol of x0, x1, ... for training, without memory; read its ``debug_str``."""
    cpu = mx.cpu()
    arrays = {f"x{k}": unallocated(t.shape, t.dtype, cpu) for k, t in enumerate(inputs)}
    with environment(MXNET_ELIMINATE_COMMON_EXPR=merging), without_fallbacks():
        # With gradients: without any MKLDNN would replace the operators by its own.
        executor = symbol.bind(cpu, arrays, arrays, "write", arrays)
    return read_debug_str(executor.debug_str())


def read_debug_str(text: str) -> Debugged:
    """Parse ``Executor.debug_str()``: the outputs, and the operators in the order they run."""

    def entries(lines: str) -> list[tuple[str, int]]:
        found = re.findall(r"^\t\w+\[\d+\]=(.*)\((\d+)\)(?: version=\d+)?$", lines, re.M)
        return [(name, int(output)) for name, output in found]

    head, *operators = re.split(r"^Op:", text, flags=re.M)
    nodes: list[JsonNode] = []
    for each in operators:
        op, name = each.partition("\n")[0].split(", Name=", 1)
        lists = dict(re.findall(r"^(Inputs|Attrs|Control deps):\n((?:\t.*\n?)*)", each, re.M))
        attrs = dict(re.findall(r"^\t(.*?)=(.*)$", lists.get("Attrs", ""), re.M))
        deps = re.findall(r"^\t.*?=(.*)$", lists.get("Control deps", ""), re.M)
        inputs = entries(lists.get("Inputs", ""))
        nodes.append({"op": op, "name": name, "inputs": inputs, "attrs": attrs, "deps": deps})
    return entries(head), nodes


def _referred(
    op: str, known: dict[str, Reference], debugged: Debugged
) -> tuple[list[BackwardNode], list[Reference]]:
    """Find gradient nodes, and what outputs refer to; ``known``: what names of other nodes do."""
    outputs, found = debugged
    made: list[BackwardNode] = []
    where: dict[str, list[int]] = {}  # name -> gradient nodes so named, oldest first

    def reference(entry: tuple[str, int], as_gradient: bool = False) -> Reference:
        name, index = entry
        if name in known:
            return known[name]
        at = where.get(name)
        if name == FORWARD and not (as_gradient and at is not None):
            return ("out", 0, index)
        if not at:
            raise NotObservable(f"{op}: its gradient reads {name!r}, which is not shown")
        if any(made[j] != made[at[0]] for j in at):
            raise NotObservable(f"{op}: its gradient has several nodes {name!r}")
        # Equal nodes are read one after the other.
        return ("node", at.pop(0) if len(at) > 1 else at[0], index)

    forward = next((node for node in found if node["name"] == FORWARD), None)
    for node in found:
        name = node["name"]
        if node["op"] == "_copy" and re.search(r"_\d+_copy$", name):
            # made so that no two gradients are the same array (MXGradient, copy_op)
            known[name] = reference(node["inputs"][0])
        elif node is not forward and name not in known:
            inputs = tuple(map(reference, node["inputs"]))
            deps = tuple([None if d == FORWARD else where[d][-1] for d in node["deps"]])
            where.setdefault(name, []).append(len(made))
            made.append(BackwardNode(node["op"], name, node["attrs"], inputs, deps, ()))
    return made, [reference(entry, as_gradient=True) for entry in outputs]


def _with_tensors(op: str, found: _Observed, inputs: Tensors) -> tuple[BackwardNode, ...]:
    """Give every gradient node its outputs' shapes and types, inferred by MXNet."""
    forward = len(inputs)
    # The gradients of the outputs are like them.
    heads = [_node("ones_like", f"g{k}", head) for k, head in enumerate(found.outputs)]
    all_nodes = [*found.forward, *heads]
    shape = {"shape": str(tuple(inputs[0].shape))} if inputs else {}
    nodes = [
        node._replace(attrs={**shape, **node.attrs}) if node.op in UNTOLD_SHAPE else node
        for node in found.nodes
    ]
    start = {"in": 0, "out": forward, "head": forward + 1, "node": len(all_nodes)}
    for node in nodes:
        places = [[start[kind] + k, output, 0] for kind, k, output in node.inputs]
        deps = [forward if d is None else start["node"] + d for d in node.deps]
        more = {"attrs": dict(node.attrs), "control_deps": deps}
        all_nodes.append(_node(node.op, "b", *places, **more))
    try:
        # With all of them as outputs they stay in their order.
        graph = read(load_nodes(all_nodes, [[i, 0, 0] for i in range(len(all_nodes))]))
        every, first = all_outputs(graph), graph["node_row_ptr"][start["node"] :]
        _, shapes, _ = every.infer_shape(**{f"x{k}": t.shape for k, t in enumerate(inputs)})
        _, types, _ = every.infer_type(**{f"x{k}": t.dtype for k, t in enumerate(inputs)})
        tensors = tuple([Tensor(tuple(s), np.dtype(t).name) for s, t in zip(shapes, types)])
    except (mx.MXNetError, TypeError) as error:
        raise NotObservable(f"{op}: shapes of its gradient: {said_by_mxnet(error)}") from None
    made = zip(nodes, first, first[1:])
    return tuple([node._replace(tensors=tensors[i:k]) for node, i, k in made])
