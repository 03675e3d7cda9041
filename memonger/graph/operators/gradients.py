"""Find the gradient nodes of an operator, by binding that operator alone.

Python cannot call MXNet's ``FGradient`` functions (``src/nnvm/gradient.cc`` does), but an executor
prints its training graph. The print is ambiguous for a network, where many nodes share a name, but
not for one operator of variables. The arrays of the bind are never allocated, so it is cheap at any
size. One bind of an operator is valid for all shapes and types, because MXNet makes gradients
before it infers shapes (``GraphExecutor::InitFullGraph``).
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.recompute import truth
from memonger.graph.operators.tensors import (
    DENSE,
    DENSE_NUMBERS,
    STORAGE,
    Attributes,
    Tensor,
    Tensors,
    check_elements,
)
from memonger.support.errors import mxnet_message
from memonger.support.mxnet import environment, mx, without_notices
from memonger.support.symbols import all_outputs, load_nodes, read
from memonger.support.types import Context, Executor, Json, NDArray, Symbol

#: An input of a gradient node: ('head', k, 0) is the gradient of output k, ('in', k, 0) input k,
#: ('out', 0, k) output k, and ('node', j, k) output k of gradient node j.
Reference = Tuple[str, int, int]

Attrs = Tuple[Tuple[str, str], ...]  # names and values, sorted
DebugStr = Tuple[List[Tuple[str, int]], List[Json]]  # outputs, operators
FORWARD = "f"  # the name of the bound operator
ZEROS = ("zeros_like", "_zeros")  # AggregateGradient leaves these out of a sum
#: Gradients that lack the attribute ``shape``, the shape of the first input, which they do not
#: read. A symbol needs the attribute (``src/operator/tensor/indexing_op.cc``).
LACKS_SHAPE = frozenset(("_backward_gather_nd",))
#: Operator whose gradient MXNet can make only if an attribute is written -> the attribute, and its
#: default (``src/operator/tensor/ordering_op.cc``).
UNWRITTEN = {"sort": ("axis", "-1")}


class BackwardNode(NamedTuple):
    """A node that the gradient of an operator adds to the training graph."""

    op: str
    name: str  # if the operator is named FORWARD
    attrs: Attributes
    inputs: tuple[Reference, ...]
    deps: tuple[int | None, ...]  # gradient nodes; None: the forward node itself
    tensors: Tensors

    def name_of(self, operator: str) -> str:
        """Return MXNet's name of this node if the operator is named ``operator``."""
        return re.sub(f"^{FORWARD}(?=_|$)", lambda _: operator, self.name)


class GradientFacts(NamedTuple):
    """Facts about the gradient of one operator."""

    own_output: bool = False  # whether it reads the operator's first output
    inputs: frozenset[int] = frozenset()  # inputs that it reads, not only their shape
    passes: frozenset[int] = frozenset()  # inputs whose gradient is not always zero
    follows: bool = False  # whether it depends on the operator, so that even an unread one runs
    summed: int = 0  # the most terms of the gradient of an output of the operator


@dataclass(frozen=True)
class OperatorGradient:
    """The gradient nodes of one operator, and the gradient of each of its inputs (or None)."""

    nodes: tuple[BackwardNode, ...]
    gradients: tuple[Reference | None, ...]

    @functools.cached_property
    def facts(self) -> GradientFacts:
        """The facts about this gradient, without ``summed``, which depends on the network."""
        read = {r for node in self.nodes if node.op not in ZEROS for r in node.inputs}
        zeros = [("node", j, 0) for j, node in enumerate(self.nodes) if node.op in ZEROS]
        return GradientFacts(
            own_output=("out", 0, 0) in read,
            inputs=frozenset(r[1] for r in read if r[0] == "in"),
            passes=frozenset(k for k, r in enumerate(self.gradients) if r not in (None, *zeros)),
            follows=any(None in node.deps for node in self.nodes),
        )


class _Observed(NamedTuple):
    """The gradient of an operator for inputs of any shapes and types."""

    forward: list[Json]  # the variables and the operator
    outputs: list[list[int]]  # entries of the operator
    nodes: list[BackwardNode]  # without tensors
    gradients: tuple[Reference | None, ...]
    stypes: dict[Reference, str]  # how MXNet stores the gradients that are not dense


class NotObservable(Exception):
    """Raised if the gradient of an operator cannot be found by a bind; the message says why."""


class NotDifferentiable(Exception):
    """Raised if MXNet has no gradient for an operator."""


def unallocated(shape: Sequence[int], dtype: str, ctx: Context) -> NDArray:
    """Make an NDArray without memory."""
    checked, kind = check_elements(tuple(shape)), np.dtype(dtype).type
    return mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(checked, ctx, True, kind))


def bind_inferred(
    symbol: Symbol, ctx: Context, inputs: Mapping[str, Tensor], requests: Mapping[str, str]
) -> Executor:
    """Bind a symbol without memory; MXNet infers how gradients are stored.

    ``inputs`` are the tensors of its variables. Variables that ``requests`` does not name get no
    gradient.
    """
    arrays = {n: unallocated(t.shape, t.dtype, ctx) for n, t in inputs.items()}
    # MXNet takes dense arrays from the buffer. Sparse arrays have no memory until they have rows.
    stored = symbol.attr_dict()
    buffer = {f"grad of {name}": array for name, array in arrays.items()}
    for name, array in arrays.items():
        if stored.get(name, {}).get(STORAGE, "0") in DENSE_NUMBERS:
            buffer[name] = array
    names = symbol.list_arguments()
    try:
        return symbol.simple_bind(
            ctx,
            {name: requests.get(name, "null") for name in names},
            {name: inputs[name].dtype for name in names},
            shared_arg_names=[],
            shared_buffer=buffer,
            **{name: inputs[name].shape for name in names},
        )
    except RuntimeError as error:
        raise mx.MXNetError(mxnet_message(error)) from None


def makes_rows(op: str, attrs: Attributes) -> bool:
    """Return whether MXNet stores the gradient of an operator's second input as rows."""
    return op == "_contrib_SparseEmbedding" or truth(attrs.get("sparse_grad"))


def alone(
    op: str, attrs: Attributes, count: int, subgraphs: str = ""
) -> tuple[list[Json], list[list[int]]]:
    """Return the JSON nodes of an operator of variables x0, x1, ..., and its outputs as entries.

    ``count`` is the number of inputs, ``subgraphs`` the JSON of the graphs of control flow.
    """
    nodes = [_node("null", f"x{k}") for k in range(count)]
    nodes.append(_node(op, FORWARD, *[[k, 0, 0] for k in range(count)], attrs=dict(attrs)))
    if subgraphs:
        nodes[-1]["subgraphs"] = json.loads(subgraphs)
    outputs = load_nodes(nodes, [[count, 0, 0]]).get_internals().list_outputs()
    return nodes, [[count, k, 0] for k in range(len(outputs) - count)]


def _node(op: str, name: str, *inputs: list[int], **fields: object) -> Json:
    return {"op": op, "name": name, "inputs": list(inputs), **fields}


def gradient_of(
    op: str, attrs: Attrs, inputs: Tensors, zero: bool, subgraphs: str = ""
) -> OperatorGradient:
    """Return the gradient of an operator.

    Parameters
    ----------
    op : str
        The operator's kind.
    attrs : tuple
        Its attributes, sorted.
    inputs : tuple of Tensor
        Its inputs.
    zero : bool
        Whether the gradients of its outputs are zero (``CheckGradAllZero`` in
        ``src/operator/operator_common.h``).
    subgraphs : str
        The JSON of the graphs of control flow.

    Returns
    -------
    OperatorGradient
        Its tensors are sparse as they are if the gradients of sparse outputs are sparse.

    Raises
    ------
    NotDifferentiable
        If MXNet has no gradient for the operator.
    NotObservable
        If a bind does not show it.
    """
    if op == "Custom":  # not cached, because it may be registered anew
        observed = _observe(op, attrs, inputs, zero, subgraphs)
        return OperatorGradient(_like_inputs(observed, inputs), observed.gradients)
    return _gradient_of(op, attrs, inputs, zero, subgraphs, mx.util.is_np_shape())


@functools.lru_cache(maxsize=4096)
def _gradient_of(
    op: str, attrs: Attrs, inputs: Tensors, zero: bool, subgraphs: str, np_shape: bool
) -> OperatorGradient:
    """Do what `gradient_of` does; ``np_shape`` is part of the key, because it changes shapes."""
    for tensor in inputs:
        check_elements(tensor.shape)
    key = op, attrs, tuple([tensor.stype for tensor in inputs]), zero, subgraphs
    if key not in _observed:
        _observed[key] = _observe(op, attrs, inputs, zero, subgraphs)
    observed = _observed[key]
    is_opaque = subgraphs or op == "_CachedOp"
    nodes = _like_inputs(observed, inputs) if is_opaque else _with_tensors(op, observed, inputs)
    return OperatorGradient(nodes, observed.gradients)


_observed: dict[tuple[str, Attrs, tuple[str, ...], bool, str], _Observed] = {}


def _observe(op: str, attrs: Attrs, inputs: Tensors, zero: bool, subgraphs: str) -> _Observed:
    """Find the gradient of an operator by a bind with these inputs."""
    count = len(inputs)
    try:
        nodes, entries = alone(op, dict(attrs), count, subgraphs)
        stops = [_node("BlockGrad", f"stop{k}", entry) for k, entry in enumerate(entries)]
        heads = [[count + 1 + k, 0, 0] for k in range(len(entries))] if zero else entries
        symbol = load_nodes([*nodes, *stops] if zero else nodes, heads)
        executor = _bind(op, attrs, symbol, inputs, merging="0")
        outputs, operators = read_debug_str(executor.debug_str())
    except mx.MXNetError as error:
        if "non-differentiable" in str(error):
            raise NotDifferentiable(op) from None
        reason = mxnet_message(error)
        raise NotObservable(f"MXNet cannot bind it alone on a CPU ({reason})") from None
    references: dict[str, Reference] = {f"x{k}": ("in", k, 0) for k in range(count)}
    for k in range(len(entries)):
        names = f"_head_grad_{k}", f"_head_grad_{k}_id", f"stop{k}", f"stop{k}_backward"
        references.update(dict.fromkeys(names, ("head", k, 0)))
    backward, results = _read_gradient(op, references, (outputs[len(entries) :], operators))
    result_of = dict(zip(symbol.list_arguments(), results))
    gradients = tuple([result_of.get(f"x{k}") for k in range(count)])
    arrays = {n: array for n, array in executor.grad_dict.items() if array.stype != DENSE}
    stypes = {result_of[name]: array.stype for name, array in arrays.items()}
    return _Observed(nodes, entries, backward, gradients, stypes)


@functools.lru_cache(maxsize=4096)
def merges(op: str, attrs: Attrs, inputs: Tensors) -> bool:
    """Return whether MXNet merges two equal operators with the same inputs, by a bind of them.

    It does not if they have a state, draw random numbers or change their inputs (``NodeEqual`` in
    ``src/executor/eliminate_common_expr_pass.cc``).
    """
    count = len(inputs)
    try:
        nodes, _ = alone(op, dict(attrs), count)
        nodes.append({**nodes[-1], "name": "g"})
        # Other operators read them, because outputs of a network are never merged completely.
        nodes.append(_node("identity", "to f", [count, 0, 0]))
        nodes.append(_node("negative", "to g", [count + 1, 0, 0]))
        symbol = load_nodes(nodes, [[count + 2, 0, 0], [count + 3, 0, 0]])
        executor = _bind(op, attrs, symbol, inputs, merging="1")
    except mx.MXNetError:  # a subgraph, a Custom operator, or one without a gradient
        return False
    _, operators = read_debug_str(executor.debug_str())
    return sum(node["name"] in (FORWARD, "g") for node in operators) == 1


def _bind(op: str, attrs: Attrs, symbol: Symbol, inputs: Tensors, merging: str) -> Executor:
    """Bind a symbol with this operator of x0, x1, ... for training, without memory."""
    cpu, named = mx.cpu(), {f"x{k}": tensor for k, tensor in enumerate(inputs)}
    with environment(MXNET_ELIMINATE_COMMON_EXPR=merging), without_notices():
        # Gradients are requested, because without them MKLDNN would replace the operators.
        if makes_rows(op, dict(attrs)) or any(tensor.stype != DENSE for tensor in inputs):
            graph, ids = read(symbol), mx.nd.ndarray._STORAGE_TYPE_STR_TO_ID
            for node in graph["nodes"]:
                if node["op"] == "null":
                    node["attrs"] = {STORAGE: str(ids[named[node["name"]].stype])}
            symbol = load_nodes(graph["nodes"], graph["heads"])
            return bind_inferred(symbol, cpu, named, dict.fromkeys(named, "write"))
        arrays = {name: unallocated(t.shape, t.dtype, cpu) for name, t in named.items()}
        return symbol.bind(cpu, arrays, arrays, "write", arrays)


def read_debug_str(text: str) -> DebugStr:
    """Parse ``Executor.debug_str()``: the outputs, and the operators in execution order."""

    def entries(lines: str) -> list[tuple[str, int]]:
        pairs = re.findall(r"^\t\w+\[\d+\]=(.*)\((\d+)\)(?: version=\d+)?$", lines, re.M)
        return [(name, int(output)) for name, output in pairs]

    head, *sections = re.split(r"^Op:", text, flags=re.M)
    nodes: list[Json] = []
    for section in sections:
        op, name = section.partition("\n")[0].split(", Name=", 1)
        lists = dict(re.findall(r"^(Inputs|Attrs|Control deps):\n((?:\t.*\n?)*)", section, re.M))
        attrs = dict(re.findall(r"^\t(.*?)=(.*)$", lists.get("Attrs", ""), re.M))
        deps = re.findall(r"^\t.*?=(.*)$", lists.get("Control deps", ""), re.M)
        inputs = entries(lists.get("Inputs", ""))
        nodes.append({"op": op, "name": name, "inputs": inputs, "attrs": attrs, "deps": deps})
    return entries(head), nodes


def _read_gradient(
    op: str, references: dict[str, Reference], debug_str: DebugStr
) -> tuple[list[BackwardNode], list[Reference]]:
    """Find the gradient nodes and what the outputs refer to.

    ``references`` maps the names of all other nodes to what they refer to.
    """
    outputs, operators = debug_str
    backward: list[BackwardNode] = []
    named: dict[str, list[int]] = {}  # name -> the gradient nodes with it, oldest first

    def reference(entry: tuple[str, int], as_gradient: bool = False) -> Reference:
        name, output = entry
        if name in references:
            return references[name]
        namesakes = named.get(name)
        if name == FORWARD and not (as_gradient and namesakes is not None):
            return ("out", 0, output)
        if not namesakes:
            raise NotObservable(f"{op}: its gradient reads {name!r}, which debug_str does not show")
        if any(backward[j] != backward[namesakes[0]] for j in namesakes):
            raise NotObservable(f"{op}: its gradient has several nodes {name!r}")
        # Nodes that are equal are read in turn.
        return ("node", namesakes.pop(0) if len(namesakes) > 1 else namesakes[0], output)

    forward = next((node for node in operators if node["name"] == FORWARD), None)
    for node in operators:
        name = node["name"]
        if node["op"] == "_copy" and re.search(r"_\d+_copy$", name):
            # MXNet copies a gradient of two arguments (MXGradient, copy_op).
            references[name] = reference(node["inputs"][0])
        elif node is not forward and name not in references:
            inputs = tuple(map(reference, node["inputs"]))
            deps = tuple([None if d == FORWARD else named[d][-1] for d in node["deps"]])
            named.setdefault(name, []).append(len(backward))
            backward.append(BackwardNode(node["op"], name, node["attrs"], inputs, deps, ()))
    return backward, [reference(entry, as_gradient=True) for entry in outputs]


def _like_inputs(observed: _Observed, inputs: Tensors) -> tuple[BackwardNode, ...]:
    """Return the gradient nodes of an operator with code or graphs of its own.

    The JSON of a gradient node has neither the code of a Custom operator nor the graphs of control
    flow or a ``_CachedOp``, so MXNet cannot infer its shapes. All outputs of such a node are
    gradients of inputs, and have their shapes and types (``GetAttrFromForwardNode`` in
    ``src/executor/infer_graph_attr_pass.cc``).
    """
    tensors: list[dict[int, Tensor]] = [{} for _ in observed.nodes]
    for tensor, result in zip(inputs, observed.gradients):
        if result is not None and result[0] == "node":
            stype = observed.stypes.get(result, DENSE)
            tensors[result[1]][result[2]] = tensor._replace(stype=stype)
    pairs = zip(observed.nodes, tensors)
    return tuple([node._replace(tensors=tuple([t[k] for k in sorted(t)])) for node, t in pairs])


def _with_tensors(op: str, observed: _Observed, inputs: Tensors) -> tuple[BackwardNode, ...]:
    """Return the gradient nodes with the shapes and types of their outputs, which MXNet infers."""
    forward = len(inputs)
    # The gradients of outputs have the shapes and types of the outputs.
    heads = [_node("ones_like", f"g{k}", entry) for k, entry in enumerate(observed.outputs)]
    all_nodes = [*observed.forward, *heads]
    shape = {"shape": str(tuple(inputs[0].shape))} if inputs else {}
    nodes = [
        node._replace(attrs={**shape, **node.attrs}) if node.op in LACKS_SHAPE else node
        for node in observed.nodes
    ]
    start = {"in": 0, "out": forward, "head": forward + 1, "node": len(all_nodes)}
    for node in nodes:
        entries = [[start[kind] + k, output, 0] for kind, k, output in node.inputs]
        deps = [forward if d is None else start["node"] + d for d in node.deps]
        all_nodes.append(_node(node.op, "b", *entries, attrs=dict(node.attrs), control_deps=deps))
    try:
        # All nodes are outputs, so that MXNet keeps their order.
        graph = read(load_nodes(all_nodes, [[i, 0, 0] for i in range(len(all_nodes))]))
        outputs, first = all_outputs(graph), graph["node_row_ptr"][start["node"] :]
        _, shapes, _ = outputs.infer_shape(**{f"x{k}": t.shape for k, t in enumerate(inputs)})
        _, types, _ = outputs.infer_type(**{f"x{k}": t.dtype for k, t in enumerate(inputs)})
        tensors = [Tensor(tuple(s), np.dtype(t).name) for s, t in zip(shapes, types)]
    except (mx.MXNetError, TypeError) as error:
        raise NotObservable(f"{op}: shapes of its gradient: {mxnet_message(error)}") from None
    for (kind, j, output), stype in observed.stypes.items():
        if kind == "node":
            tensors[first[j] + output] = tensors[first[j] + output]._replace(stype=stype)
    ranges = zip(nodes, first, first[1:])
    return tuple([node._replace(tensors=tuple(tensors[i:k])) for node, i, k in ranges])
