"""What the gradient of an operator reads and makes, observed by binding that operator alone.

MXNet's ``FGradient`` functions (``src/nnvm/gradient.cc`` calls them) cannot be called from Python,
but an executor prints the whole training graph. That of a network is ambiguous, for many of its
nodes have the same name; that of one operator between variables is not. Arrays that are never
allocated make the bind cheap at any size, and an operator is bound once for each signature.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.tensors import Tensor, check_elements
from memonger.support.errors import said_by_mxnet
from memonger.support.mxnet import environment as environment
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes, read

#: How the gradient nodes of an operator refer to what they read.
#: ('head', k): gradient of output k; ('in', k), ('out', k): its inputs and outputs;
#: ('node', j, k): output k of gradient node j.
Reference = Tuple[Any, ...]


class BackwardNode(NamedTuple):
    """One node that the gradient of an operator adds to the training graph."""

    op: str
    attrs: Mapping[str, str]
    inputs: tuple[Reference, ...]
    deps: tuple[int | None, ...]  # gradient nodes; None: the forward node itself
    tensors: tuple[Tensor, ...]


class OperatorGradient(NamedTuple):
    """The gradient nodes of one operator, and the gradient of each of its inputs (or None)."""

    nodes: tuple[BackwardNode, ...]
    gradients: tuple[Reference | None, ...]


class NotObservable(Exception):
    """The gradient of this operator cannot be read off a bind; the reason is the message."""


class NotDifferentiable(Exception):
    """MXNet has no gradient for this operator."""


def gradient_of(
    op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor], zero_heads: bool = False
) -> OperatorGradient:
    """Return the gradient of an operator with inputs of these shapes and types.

    Parameters
    ----------
    op : str
        The name that nnvm knows the operator by.
    attrs : dict of str
        Its parameters.
    inputs : sequence of Tensor
    zero_heads : bool
        What it is where the gradients of all its outputs are known to be zero
        (``CheckGradAllZero`` in ``src/operator/operator_common.h``).

    Raises
    ------
    NotDifferentiable, NotObservable
    """
    return _observed(op, tuple(sorted(attrs.items())), tuple(inputs), zero_heads)


def unallocated(shape: Sequence[int], dtype: str, ctx: Any) -> Any:
    """Return an NDArray of which MXNet knows shape and type, and which takes no memory.

    Raises
    ------
    TooLargeError
        If MXNet cannot count its elements.
    """
    checked, kind = check_elements(tuple(shape)), np.dtype(dtype).type
    return mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(checked, ctx, True, kind))


FORWARD = "f"


def alone(
    op: str, attrs: Mapping[str, str], count: int
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return JSON nodes (`symbols.load_nodes`) of an operator between variables, and its outputs.

    Parameters
    ----------
    count : int
        Of its inputs, which are the variables x0, x1, ...; the operator is the node after them.
    """
    nodes: list[dict[str, Any]] = [
        {"op": "null", "name": f"x{k}", "inputs": []} for k in range(count)
    ]
    into = [[k, 0, 0] for k in range(count)]
    nodes.append({"op": op, "name": FORWARD, "attrs": dict(attrs), "inputs": into})
    outputs = load_nodes(nodes, [[count, 0, 0]]).get_internals().list_outputs()
    return nodes, [[count, k, 0] for k in range(len(outputs) - count)]


# ---------------------------------------------------------------- observed


@functools.lru_cache(maxsize=None)
def _observed(
    op: str, attrs: tuple[tuple[str, str], ...], inputs: tuple[Tensor, ...], zero_heads: bool
) -> OperatorGradient:
    count = len(inputs)
    if count == 0:
        return OperatorGradient((), ())
    try:
        nodes, shown = alone(op, dict(attrs), count)
        heads = shown
        if zero_heads:
            heads = [[count + 1 + k, 0, 0] for k in range(len(shown))]
            nodes += [
                {"op": "BlockGrad", "name": f"stop{k}", "inputs": [head]}
                for k, head in enumerate(shown)
            ]
        symbol = load_nodes(nodes, heads)
        outputs, found = read_debug_str(_bound(symbol, inputs, merging="0"))
    except mx.MXNetError as error:
        if "non-differentiable" in str(error):
            raise NotDifferentiable(op) from None
        raise NotObservable(f"{op} cannot be bound alone") from None
    made, of_outputs = _referred(op, outputs[len(shown) :], found)
    given = dict(zip(symbol.list_arguments(), of_outputs))
    gradients = tuple([given.get(f"x{k}") for k in range(count)])
    return OperatorGradient(_with_tensors(op, attrs, inputs, made), gradients)


def _bound(symbol: Any, inputs: Sequence[Tensor], merging: str) -> str:
    """``debug_str`` of a symbol of x0, x1, ..., bound for training without memory."""
    cpu = mx.cpu()
    arrays = {f"x{k}": unallocated(t.shape, t.dtype, cpu) for k, t in enumerate(inputs)}
    arguments = {name: arrays[name] for name in symbol.list_arguments()}
    auxiliary = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    with environment(MXNET_ELIMINATE_COMMON_EXPR=merging):
        # With gradients: without any MKLDNN would replace the operators by its own.
        return symbol.bind(cpu, arguments, arguments, "write", auxiliary).debug_str()


def read_debug_str(text: str) -> tuple[list[tuple[str, int]], list[dict[str, Any]]]:
    """Parse ``Executor.debug_str()``: the outputs, and the operators in the order they run."""

    def entry(text: str) -> tuple[str, int]:
        found = re.match(r"^(.*)\((\d+)\)(?: version=\d+)?$", text)
        assert found is not None, text
        return found.group(1), int(found.group(2))

    outputs: list[tuple[str, int]] = []
    nodes: list[dict[str, Any]] = []
    part = ""
    for line in text.split("\n"):
        if line.startswith("\toutput["):
            outputs.append(entry(line.split("=", 1)[1]))
        elif line.startswith("Op:"):
            op, name = line[3:].split(", Name=", 1)
            nodes.append({"op": op, "name": name, "inputs": [], "attrs": {}, "deps": []})
        elif line in ("Inputs:", "Attrs:", "Control deps:"):
            part = line
        elif line.startswith("\t") and nodes:
            key, value = line[1:].split("=", 1)
            if part == "Inputs:":
                nodes[-1]["inputs"].append(entry(value))
            elif part == "Attrs:":
                nodes[-1]["attrs"][key] = value
            else:
                nodes[-1]["deps"].append(value)
    return outputs, nodes


def _referred(
    op: str, outputs: Sequence[tuple[str, int]], found: Sequence[dict[str, Any]]
) -> tuple[list[BackwardNode], list[Reference]]:
    """The gradient nodes of one operator's ``debug_str``, and what its outputs refer to."""
    made: list[BackwardNode] = []
    where: dict[str, list[int]] = {}  # name -> gradient nodes so named, oldest first
    copies: dict[str, Reference] = {}

    def reference(entry: tuple[str, int], as_gradient: bool = False) -> Reference:
        name, index = entry
        if name == FORWARD and not (as_gradient and name in where):
            return ("out", index)
        variable = re.match(r"x(\d+)$", name)
        if variable:
            return ("in", int(variable.group(1)))
        if name in copies:
            return copies[name]
        head = re.match(r"(?:_head_grad_|stop)(\d+)(?:_id|_backward)?$", name)
        if head:
            return ("head", int(head.group(1)))
        at = where.get(name)
        if not at:
            raise NotObservable(f"{op}: its gradient reads {name!r}, which is not shown")
        if len(at) > 1:
            if any(made[j] != made[at[0]] for j in at):
                raise NotObservable(f"{op}: its gradient has several nodes {name!r}")
            return ("node", at.pop(0), index)  # equal nodes, read one after the other
        return ("node", at[0], index)

    forward = next((node for node in found if node["name"] == FORWARD), None)
    for node in found:
        name = node["name"]
        if node is forward or re.match(r"_head_grad_\d+_id$|stop\d+(_backward)?$", name):
            continue
        if node["op"] == "_copy" and re.search(r"_\d+_copy$", name):
            # made so that no two gradients are the same array (MXGradient, copy_op)
            copies[name] = reference(node["inputs"][0])
            continue
        inputs = tuple([reference(entry) for entry in node["inputs"]])
        deps = tuple([None if d == FORWARD else where[d][-1] for d in node["deps"]])
        where.setdefault(name, []).append(len(made))
        made.append(BackwardNode(node["op"], node["attrs"], inputs, deps, ()))
    return made, [reference(entry, as_gradient=True) for entry in outputs]


def _with_tensors(
    op: str,
    attrs: tuple[tuple[str, str], ...],
    inputs: Sequence[Tensor],
    made: Sequence[BackwardNode],
) -> tuple[BackwardNode, ...]:
    """Give every gradient node its outputs' shapes and types, inferred by MXNet."""
    if not made:
        return ()
    forward = len(inputs)
    nodes, shown = alone(op, dict(attrs), forward)
    start = len(nodes) + len(shown)  # after the gradients of the outputs, which are like them
    nodes += [
        {"op": "ones_like", "name": f"g{k}", "inputs": [head]} for k, head in enumerate(shown)
    ]

    def place(reference: Reference) -> list[int]:
        kind, k = reference[0], reference[1]
        if kind == "node":
            return [start + k, reference[2], 0]
        return {"head": [forward + 1 + k, 0, 0], "in": [k, 0, 0], "out": [forward, k, 0]}[kind]

    nodes += [
        {
            "op": node.op,
            "name": f"b{j}",
            "attrs": dict(node.attrs),
            "inputs": [place(r) for r in node.inputs],
            "control_deps": [forward if d is None else start + d for d in node.deps],
        }
        for j, node in enumerate(made)
    ]
    try:
        internals = load_nodes(
            nodes, [[start + j, 0, 0] for j in range(len(made))] + [[forward, 0, 0]]
        ).get_internals()
        known = {f"x{k}": tensor for k, tensor in enumerate(inputs)}
        _, shapes, _ = internals.infer_shape(**{name: t.shape for name, t in known.items()})
        _, types, _ = internals.infer_type(**{name: t.dtype for name, t in known.items()})
        entries = read(internals)
        tensors: dict[str, list[Tensor]] = {}
        for head, shape, dtype in zip(entries["heads"], shapes, types):
            name = entries["nodes"][head[0]]["name"]
            tensors.setdefault(name, []).append(Tensor(tuple(shape), np.dtype(dtype).name))
    except (mx.MXNetError, TypeError) as error:
        raise NotObservable(f"{op}: shapes of its gradient: {said_by_mxnet(error)}") from None
    return tuple([n._replace(tensors=tuple(tensors[f"b{j}"])) for j, n in enumerate(made)])


_merging: dict[Any, bool] = {}


def merges(op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor]) -> bool:
    """Return whether MXNet makes one of two operators that are the same and read the same.

    It does not where they keep state, draw numbers or change their inputs (``NodeEqual`` in
    ``src/executor/eliminate_common_expr_pass.cc``); which those are is observed.
    """
    key = (op, tuple(sorted(attrs.items())))
    if key not in _merging:
        _merging[key] = _merged(op, attrs, inputs)
    return _merging[key]


def _merged(op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor]) -> bool:
    count = len(inputs)
    try:
        nodes, _ = alone(op, attrs, count)
        nodes.append({**nodes[-1], "name": "g"})
        # Read by different operators: heads of the network are never quite merged.
        nodes += [
            {"op": reader, "name": reader, "inputs": [[count + k, 0, 0]]}
            for k, reader in enumerate(("identity", "negative"))
        ]
        symbol = load_nodes(nodes, [[count + 2, 0, 0], [count + 3, 0, 0]])
        _, found = read_debug_str(_bound(symbol, inputs, merging="1"))
        return sum(node["name"] in (FORWARD, "g") for node in found) == 1
    except mx.MXNetError:  # a subgraph, a Custom operator, or one without a gradient
        return False
