"""Find the gradient nodes of operators, by binding each of them apart from the network.

Python cannot call MXNet's ``FGradient`` functions (``src/nnvm/gradient.cc`` does), but an executor
prints its training graph. The print is ambiguous for a network, where many nodes share a name, but
not for operators of variables of their own. So one bind shows the gradients of all operators of a
network. Its arrays are never allocated, so it is cheap at any size. What it shows of an operator is
valid for all shapes and types, because MXNet makes gradients before it infers shapes
(``GraphExecutor::InitFullGraph``).
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from itertools import chain
from typing import Collection, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

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
from memonger.support.cache import Latest
from memonger.support.errors import MemongerError, mxnet_message
from memonger.support.mxnet import environment, mx, without_notices
from memonger.support.symbols import all_outputs, load_nodes, read
from memonger.support.types import Context, Executor, Json, NDArray, Symbol

#: An input of a gradient node: ('head', k, 0) is the gradient of output k, ('in', k, 0) input k,
#: ('out', 0, k) output k, and ('node', j, k) output k of gradient node j.
Reference = Tuple[str, int, int]

Attrs = Tuple[Tuple[str, str], ...]  # names and values, sorted
DebugStr = Tuple[List[Tuple[str, int]], List[Json]]  # outputs, operators
FORWARD = "f"  # the name of a bound operator, before its number
_NUMBER = re.compile("@([0-9]+)")  # in the names of an operator and of all that belongs to it
_HEAD = re.compile("_head_grad_([0-9]+)")  # begins the names of MXNet's gradients of outputs
ZEROS = ("zeros_like", "_zeros")  # AggregateGradient leaves these out of a sum
#: Gradients that lack the attribute ``shape``, the shape of the first input, which they do not
#: read. A symbol needs the attribute (``src/operator/tensor/indexing_op.cc``).
LACKS_SHAPE = frozenset(("_backward_gather_nd",))
#: Operator whose gradient MXNet can make only if an attribute is written -> the attribute, and its
#: default (``src/operator/tensor/ordering_op.cc``).
UNWRITTEN = {"sort": ("axis", "-1")}


class Operator(NamedTuple):
    """An operator apart from a network."""

    op: str
    attrs: Attrs
    inputs: Tensors
    outputs: int  # how many ``list_outputs`` shows
    subgraphs: str = ""  # the JSON of the graphs of control flow

    @property
    def is_opaque(self) -> bool:
        """Whether it runs code or graphs of its own, which the JSON of its gradient lacks."""
        return bool(self.subgraphs) or self.op in ("Custom", "_CachedOp")

    @property
    def is_sparse(self) -> bool:
        """Whether MXNet stores an input or its gradient as csr or row_sparse."""
        of_rows = makes_rows(self.op, dict(self.attrs))
        return of_rows or any(tensor.stype != DENSE for tensor in self.inputs)


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
        first, *rest = self.name.split("_", 1)
        return "_".join([operator, *rest]) if first == FORWARD else self.name


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

    nodes: list[BackwardNode]  # without tensors
    gradients: tuple[Reference | None, ...]
    stypes: dict[Reference, str]  # how MXNet stores the gradients that are not dense


class NotObservable(Exception):
    """Raised if the gradient of an operator cannot be found by a bind; the message says why."""


class NotDifferentiable(Exception):
    """Raised if MXNet has no gradient for an operator."""


def unallocated(tensor: Tensor, ctx: Context) -> NDArray:
    """Make an array whose memory is allocated when the engine first writes to it."""
    shape, kind = check_elements(tuple(tensor.shape)), np.dtype(tensor.dtype).type
    return mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(shape, ctx, True, kind))


def bind_inferred(
    symbol: Symbol, ctx: Context, inputs: Mapping[str, Tensor], requests: Mapping[str, str]
) -> Executor:
    """Bind a symbol without memory; MXNet infers how gradients are stored.

    ``inputs`` are the tensors of its variables. Variables that ``requests`` does not name get no
    gradient.
    """
    arrays = {n: unallocated(t, ctx) for n, t in inputs.items()}
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
    op: str, attrs: Attributes, count: int, subgraphs: str = "", number: int = 0, start: int = 0
) -> list[Json]:
    """Return the JSON nodes of ``count`` variables, and of an operator that reads them.

    Their names have a ``number``, and the first of them has the index ``start``. ``subgraphs`` is
    the JSON of the graphs of control flow.
    """
    nodes = [_node("null", f"x{k}@{number}") for k in range(count)]
    inputs = [[start + k, 0, 0] for k in range(count)]
    nodes.append(_node(op, f"{FORWARD}@{number}", *inputs, attrs=dict(attrs)))
    if subgraphs:
        nodes[-1]["subgraphs"] = json.loads(subgraphs)
    return nodes


def _nodes_of(operator: Operator, number: int = 0, start: int = 0) -> list[Json]:
    op, attrs, inputs, _, subgraphs = operator
    return alone(op, dict(attrs), len(inputs), subgraphs, number, start)


def _name_inputs(operators: Iterable[Operator]) -> dict[str, Tensor]:
    """Return the variables of operators that `alone` has numbered."""
    numbered = enumerate(operators)
    return {f"x{k}@{number}": t for number, o in numbered for k, t in enumerate(o.inputs)}


def _node(op: str, name: str, *inputs: list[int], **fields: object) -> Json:
    return {"op": op, "name": name, "inputs": list(inputs), **fields}


def gradient_of(operator: Operator, zero: bool) -> OperatorGradient:
    """Return the gradient of an operator.

    Parameters
    ----------
    operator : Operator
        The operator.
    zero : bool
        Whether the gradients of its outputs are zero (``CheckGradAllZero`` in
        ``src/operator/operator_common.h``).

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
    found = _gradients.get((operator, zero, mx.util.is_np_shape()))
    return _find([operator], zero)[0] if found is None else found


def find_gradients(operators: Collection[Operator]) -> None:
    """Find the gradients of many operators by one bind, for `gradient_of` with ``zero`` off.

    If one of them has no gradient, each half of them is bound. What is opaque or sparse,
    `gradient_of` binds alone.
    """
    together = [operator for operator in operators if not operator.is_opaque | operator.is_sparse]
    is_np = mx.util.is_np_shape()
    new = [k for k in together if _gradients.get((k, False, is_np)) is None]
    if not new:
        return
    try:
        _find(new, False)
    except (NotDifferentiable, NotObservable, MemongerError):
        if len(new) > 1:
            find_gradients(new[: len(new) // 2])
            find_gradients(new[len(new) // 2 :])


_gradients: Latest[OperatorGradient] = Latest(4096)
_observed: dict[tuple[object, ...], _Observed] = {}


def _find(operators: Sequence[Operator], zero: bool) -> list[OperatorGradient]:
    """Find the gradients of operators, and cache them but for Custom ones: they may change."""
    for tensor in chain.from_iterable(operator.inputs for operator in operators):
        check_elements(tensor.shape)
    keys = [
        (operator._replace(inputs=()), tuple([tensor.stype for tensor in operator.inputs]), zero)
        for operator in operators
    ]
    new = {key: operator for key, operator in zip(keys, operators) if key not in _observed}
    seen = dict(zip(new, _observe([*new.values()], zero)))
    observed = [seen[key] if key in seen else _observed[key] for key in keys]
    _observed.update((key, found) for key, found in seen.items() if new[key].op != "Custom")
    if any(operator.is_opaque for operator in operators):
        nodes = [*map(_like_inputs, operators, observed)]
    else:
        nodes = _infer_tensors(operators, observed)
    found = [OperatorGradient(tuple(n), o.gradients) for n, o in zip(nodes, observed)]
    for operator, gradient in zip(operators, found):
        if operator.op != "Custom":
            _gradients.put((operator, zero, mx.util.is_np_shape()), gradient)
    return found


def _observe(operators: Sequence[Operator], zero: bool) -> list[_Observed]:
    """Find the gradients of operators by one bind with these inputs."""
    if not operators:
        return []
    nodes: list[Json] = []
    heads: list[list[int]] = []
    owners: list[int] = []  # of each head
    references: list[dict[str, Reference]] = []  # of each operator
    for number, operator in enumerate(operators):
        nodes += _nodes_of(operator, number, len(nodes))
        own = {f"x{k}": ("in", k, 0) for k in range(len(operator.inputs))}
        entries = [[len(nodes) - 1, k, 0] for k in range(operator.outputs)]
        for k in range(operator.outputs):
            head = f"_head_grad_{len(heads) + k}"
            names = head, f"{head}_id", f"stop{k}", f"stop{k}_backward"
            own.update(dict.fromkeys(names, ("head", k, 0)))
        if zero:
            stops = [_node("BlockGrad", f"stop{k}@{number}", e) for k, e in enumerate(entries)]
            entries = [[len(nodes) + k, 0, 0] for k in range(len(stops))]
            nodes += stops
        references.append(own)
        heads += entries
        owners += [number] * len(entries)
    try:
        symbol = load_nodes(nodes, heads)
        executor = _bind(operators, symbol, merging="0")
        outputs, printed = read_debug_str(executor.debug_str())
    except mx.MXNetError as error:
        if "non-differentiable" in str(error):
            raise NotDifferentiable(operators[0].op) from None
        reason = mxnet_message(error)
        raise NotObservable(f"MXNet cannot bind it alone on a CPU ({reason})") from None
    result_of = dict(zip(symbol.list_arguments(), outputs[len(heads) :]))
    stored = {n: array.stype for n, array in executor.grad_dict.items() if array.stype != DENSE}
    observed: list[_Observed] = []
    parts = _split(printed, owners, len(operators))
    for number, (operator, rows) in enumerate(zip(operators, parts)):
        variables = [f"x{k}@{number}" for k in range(len(operator.inputs))]
        results = [
            (_NUMBER.sub("", result_of[n][0]), result_of[n][1]) for n in variables if n in result_of
        ]
        backward, found = _read_gradient(operator.op, references[number], (results, rows))
        by_name = dict(zip((n for n in variables if n in result_of), found))
        stypes = {by_name[n]: stored[n] for n in variables if n in stored}
        observed.append(_Observed(backward, tuple(map(by_name.get, variables)), stypes))
    return observed


def _split(printed: Sequence[Json], owners: Sequence[int], count: int) -> list[list[Json]]:
    """Return the nodes that belong to each of ``count`` bound operators, without its number.

    ``owners`` are the operators of the heads.
    """
    parts: list[list[Json]] = [[] for _ in range(count)]
    for node in printed:
        number, head = _NUMBER.search(node["name"]), _HEAD.match(node["name"])
        if number is None and head is None and count > 1:
            raise NotObservable(f"{node['op']}: no operator is known for {node['name']!r}")
        owner = int(number[1]) if number else owners[int(head[1])] if head else 0
        inputs = [(_NUMBER.sub("", name), k) for name, k in node["inputs"]]
        deps = [_NUMBER.sub("", name) for name in node["deps"]]
        new = {**node, "name": _NUMBER.sub("", node["name"]), "inputs": inputs, "deps": deps}
        parts[owner].append(new)
    return parts


@functools.lru_cache(maxsize=4096)
def merges(operator: Operator) -> bool:
    """Return whether MXNet merges two equal operators with the same inputs, by a bind of them.

    It does not if they have a state, draw random numbers or change their inputs (``NodeEqual`` in
    ``src/executor/eliminate_common_expr_pass.cc``).
    """
    nodes = _nodes_of(operator._replace(subgraphs=""))
    first = len(nodes) - 1
    nodes.append({**nodes[first], "name": "g@0"})
    # Other operators read them, because outputs of a network are never merged completely.
    nodes.append(_node("identity", "to f", [first, 0, 0]))
    nodes.append(_node("negative", "to g", [first + 1, 0, 0]))
    try:
        symbol = load_nodes(nodes, [[first + 2, 0, 0], [first + 3, 0, 0]])
        executor = _bind([operator], symbol, merging="1")
    except mx.MXNetError:  # a subgraph, a Custom operator, or one without a gradient
        return False
    _, operators = read_debug_str(executor.debug_str())
    return sum(node["name"] in (nodes[first]["name"], "g@0") for node in operators) == 1


def _bind(operators: Iterable[Operator], symbol: Symbol, merging: str) -> Executor:
    """Bind a symbol of the nodes that `alone` returns for training, without memory."""
    cpu, named = mx.cpu(), _name_inputs(operators)
    with environment(MXNET_ELIMINATE_COMMON_EXPR=merging), without_notices():
        # Gradients are requested, because without them MKLDNN would replace the operators.
        if any(operator.is_sparse for operator in operators):
            graph, ids = read(symbol), mx.nd.ndarray._STORAGE_TYPE_STR_TO_ID
            for node in graph["nodes"]:
                if node["op"] == "null":
                    node["attrs"] = {STORAGE: str(ids[named[node["name"]].stype])}
            symbol = load_nodes(graph["nodes"], graph["heads"])
            return bind_inferred(symbol, cpu, named, dict.fromkeys(named, "write"))
        arrays = {name: unallocated(t, cpu) for name, t in named.items()}
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


def _like_inputs(operator: Operator, observed: _Observed) -> list[BackwardNode]:
    """Return the gradient nodes of an opaque operator.

    MXNet cannot infer their shapes from JSON. All outputs of such a node are gradients of inputs,
    and have their shapes and types (``GetAttrFromForwardNode`` in
    ``src/executor/infer_graph_attr_pass.cc``).
    """
    tensors: list[dict[int, Tensor]] = [{} for _ in observed.nodes]
    for tensor, result in zip(operator.inputs, observed.gradients):
        if result is not None and result[0] == "node":
            stype = observed.stypes.get(result, DENSE)
            tensors[result[1]][result[2]] = tensor._replace(stype=stype)
    pairs = zip(observed.nodes, tensors)
    return [node._replace(tensors=tuple([t[k] for k in sorted(t)])) for node, t in pairs]


def _infer_tensors(
    operators: Sequence[Operator], observed: Sequence[_Observed]
) -> list[list[BackwardNode]]:
    """Return the gradient nodes with the shapes and types of their outputs, which MXNet infers."""
    all_nodes: list[Json] = []
    backward: list[list[BackwardNode]] = []  # of each operator
    starts: list[int] = []  # the index of its first gradient node
    for number, (operator, seen) in enumerate(zip(operators, observed)):
        start = {"in": len(all_nodes)}
        all_nodes += _nodes_of(operator, number, len(all_nodes))
        forward = start["out"] = len(all_nodes) - 1
        start["head"], start["node"] = len(all_nodes), len(all_nodes) + operator.outputs
        # The gradients of outputs have the shapes and types of the outputs.
        all_nodes += [_node("ones_like", "g", [forward, k, 0]) for k in range(operator.outputs)]
        shape = {"shape": str(operator.inputs[0].shape)} if operator.inputs else {}
        nodes = [
            node._replace(attrs={**shape, **node.attrs}) if node.op in LACKS_SHAPE else node
            for node in seen.nodes
        ]
        for node in nodes:
            attrs = dict(node.attrs)
            entries = [[start[kind] + k, output, 0] for kind, k, output in node.inputs]
            deps = [forward if d is None else start["node"] + d for d in node.deps]
            all_nodes.append(_node(node.op, "b", *entries, attrs=attrs, control_deps=deps))
        backward.append(nodes)
        starts.append(start["node"])
    inputs = _name_inputs(operators)
    try:
        # All nodes are outputs, so that MXNet keeps their order.
        graph = read(load_nodes(all_nodes, [[i, 0, 0] for i in range(len(all_nodes))]))
        outputs, first = all_outputs(graph), graph["node_row_ptr"]
        _, shapes, _ = outputs._infer_shape_impl(
            False, **{name: t.shape for name, t in inputs.items()}
        )
        _, types, _ = outputs.infer_type(**{name: t.dtype for name, t in inputs.items()})
        tensors = [Tensor(tuple(s), np.dtype(t).name) for s, t in zip(shapes, types)]
    except (mx.MXNetError, TypeError) as error:
        why = f"shapes of its gradient: {mxnet_message(error)}"
        raise NotObservable(f"{operators[0].op}: {why}") from None
    for nodes, start_of, seen in zip(backward, starts, observed):
        for (kind, j, output), stype in seen.stypes.items():
            if kind == "node":
                place = first[start_of + j] + output
                tensors[place] = tensors[place]._replace(stype=stype)
        for j, node in enumerate(nodes):
            outputs_of = tensors[first[start_of + j] : first[start_of + j + 1]]
            nodes[j] = node._replace(tensors=tuple(outputs_of))
    return backward
