"""What the gradient of an operator reads and makes, observed by binding that operator alone.

MXNet's ``FGradient`` functions (``src/nnvm/gradient.cc`` calls them) cannot be called from Python,
but an executor prints the whole training graph. That of a network is ambiguous, for many of its
nodes have the same name; that of one operator between variables is not. Arrays that are never
allocated make the bind cheap at any size, and an operator is bound once for each signature.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.tensors import Tensor, check_elements
from memonger.support.mxnet import environment as environment
from memonger.support.mxnet import mx
from memonger.support.symbols import as_json, read

MXNET_VERSION = ["int", 10901]

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


_ENTRY = re.compile(r"^(.*)\((\d+)\)(?: version=\d+)?$")
_known: dict[Any, Any] = {}


def gradient_of(
    op: str,
    attrs: Mapping[str, str],
    inputs: Sequence[Tensor],
    zero_heads: bool = False,
) -> OperatorGradient:
    """The gradient of an operator with inputs of these shapes and types.

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
    key = (op, tuple(sorted(attrs.items())), tuple(inputs), zero_heads)
    if key not in _known:
        try:
            _known[key] = _observe(op, attrs, inputs, zero_heads)
        except (NotObservable, NotDifferentiable) as error:
            _known[key] = error
    found = _known[key]
    if isinstance(found, Exception):
        raise found
    return found


def unallocated(shape: Sequence[int], dtype: str, ctx: Any) -> Any:
    """An NDArray of which MXNet knows shape and type, and for which no memory is taken.

    Raises
    ------
    TooLargeError
        If MXNet cannot count its elements.
    """
    handle = mx.nd.ndarray._new_alloc_handle(
        check_elements(tuple(shape)), ctx, True, np.dtype(dtype).type
    )
    return mx.nd.NDArray(handle)


def read_debug_str(text: str) -> tuple[list[tuple[str, int]], list[dict[str, Any]]]:
    """Parse ``Executor.debug_str()``: the outputs, and the operators in the order they run."""
    outputs: list[tuple[str, int]] = []
    nodes: list[dict[str, Any]] = []
    part = ""
    for line in text.split("\n"):
        if line.startswith("\toutput["):
            outputs.append(_entry(line.split("=", 1)[1]))
        elif line.startswith("Op:"):
            op, name = line[3:].split(", Name=", 1)
            nodes.append({"op": op, "name": name, "inputs": [], "attrs": {}, "deps": []})
        elif line in ("Inputs:", "Attrs:", "Control deps:"):
            part = line
        elif line.startswith("\t") and nodes:
            key, value = line[1:].split("=", 1)
            if part == "Inputs:":
                nodes[-1]["inputs"].append(_entry(value))
            elif part == "Attrs:":
                nodes[-1]["attrs"][key] = value
            else:
                nodes[-1]["deps"].append(value)
    return outputs, nodes


def _entry(text: str) -> tuple[str, int]:
    found = _ENTRY.match(text)
    assert found is not None, text
    return found.group(1), int(found.group(2))


FORWARD = "f"


def alone(
    op: str, attrs: Mapping[str, str], count: int, zero_heads: bool
) -> tuple[list[dict[str, Any]], int]:
    """JSON nodes of the operator between variables x0, x1, ...; how many outputs it shows."""
    nodes: list[dict[str, Any]] = [
        {"op": "null", "name": "x%d" % k, "inputs": []} for k in range(count)
    ]
    nodes.append(
        {
            "op": op,
            "name": FORWARD,
            "attrs": dict(attrs),
            "inputs": [[k, 0, 0] for k in range(count)],
        }
    )
    shown = len(load_nodes(nodes, [[count, 0, 0]]).get_internals().list_outputs()) - count
    if zero_heads:
        for k in range(shown):
            nodes.append({"op": "BlockGrad", "name": "stop%d" % k, "inputs": [[count, k, 0]]})
    return nodes, shown


def load_nodes(nodes: list[dict[str, Any]], heads: list[list[int]]) -> Any:
    graph = {
        "nodes": nodes,
        "arg_nodes": [i for i, n in enumerate(nodes) if n["op"] == "null"],
        "heads": heads,
        "attrs": {"mxnet_version": MXNET_VERSION},
    }
    return mx.sym.load_json(as_json(graph))


def _observe(
    op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor], zero_heads: bool
) -> OperatorGradient:
    count = len(inputs)
    if count == 0:
        return OperatorGradient((), ())
    try:
        nodes, shown = alone(op, attrs, count, zero_heads)
        heads = [[count + 1 + k, 0, 0] if zero_heads else [count, k, 0] for k in range(shown)]
        symbol = load_nodes(nodes, heads)
        arguments = symbol.list_arguments()
        cpu = mx.cpu()

        def arrays(names: Sequence[str]) -> dict[str, Any]:
            of = [inputs[int(n[1:])] for n in names]
            return {n: unallocated(t.shape, t.dtype, cpu) for n, t in zip(names, of)}

        with environment(MXNET_ELIMINATE_COMMON_EXPR="0"):
            text = symbol.bind(
                cpu,
                arrays(arguments),
                arrays(arguments),
                "write",
                arrays(symbol.list_auxiliary_states()),
            ).debug_str()
    except mx.MXNetError as error:
        if "non-differentiable" in str(error):
            raise NotDifferentiable(op) from None
        raise NotObservable(f"{op} cannot be bound alone") from None
    outputs, found = read_debug_str(text)
    made, gradients = _Reader(op, count, zero_heads).read(outputs[shown:], found, arguments)
    return OperatorGradient(_with_tensors(op, attrs, inputs, made), gradients)


class _Reader:
    """Turns the names in one operator's ``debug_str`` into references."""

    def __init__(self, op: str, count: int, zero_heads: bool) -> None:
        self.op = op
        self.count = count
        self.zero_heads = zero_heads
        self.made: list[dict[str, Any]] = []
        self.where: dict[str, list[int]] = {}  # name -> gradient nodes so named, oldest first
        self.copies: dict[str, Reference] = {}

    def read(
        self, outputs: list[tuple[str, int]], found: list[dict[str, Any]], arguments: list[str]
    ) -> tuple[list[dict[str, Any]], tuple[Reference | None, ...]]:
        forward_seen = False
        for node in found:
            name = node["name"]
            if name == FORWARD and not forward_seen:
                forward_seen = True
                continue
            if re.match(r"_head_grad_\d+_id$|stop\d+(_backward)?$", name):
                continue
            if node["op"] == "_copy" and re.search(r"_\d+_copy$", name):
                # made so that no two gradients are the same array (MXGradient, copy_op)
                self.copies[name] = self.reference(node["inputs"][0])
                continue
            self.made.append(
                {
                    "op": node["op"],
                    "attrs": node["attrs"],
                    "inputs": tuple(self.reference(e) for e in node["inputs"]),
                    "deps": tuple(self.dependency(d) for d in node["deps"]),
                }
            )
            self.where.setdefault(name, []).append(len(self.made) - 1)
        gradients: list[Reference | None] = [None] * self.count
        for name, entry in zip(arguments, outputs):
            gradients[int(name[1:])] = self.reference(entry, as_gradient=True)
        return self.made, tuple(gradients)

    def dependency(self, name: str) -> int | None:
        return None if name == FORWARD else self.where[name][-1]

    def reference(self, entry: tuple[str, int], as_gradient: bool = False) -> Reference:
        name, index = entry
        if name == FORWARD and not (as_gradient and name in self.where):
            return ("out", index)
        variable = re.match(r"x(\d+)$", name)
        if variable:
            return ("in", int(variable.group(1)))
        if name in self.copies:
            return self.copies[name]
        head = re.match(r"_head_grad_(\d+)(_id)?$|stop(\d+)_backward$", name)
        if head:
            return ("head", int(head.group(1) if head.group(3) is None else head.group(3)))
        at = self.where.get(name)
        if not at:
            raise NotObservable(f"{self.op}: its gradient reads {name!r}, which is not shown")
        if len(at) > 1:
            if any(self.made[j] != self.made[at[0]] for j in at):
                raise NotObservable(f"{self.op}: its gradient has several nodes {name!r}")
            return ("node", at.pop(0), index)  # equal nodes, read one after the other
        return ("node", at[0], index)


def _with_tensors(
    op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor], made: list[dict[str, Any]]
) -> tuple[BackwardNode, ...]:
    """Give every gradient node its outputs' shapes and types, inferred by MXNet."""
    if not made:
        return ()
    nodes, shown = alone(op, attrs, len(inputs), False)
    forward = len(inputs)
    heads = {}
    for k in range(shown):
        heads[k] = len(nodes)
        nodes.append({"op": "null", "name": "g%d" % k, "inputs": []})
    start = len(nodes)

    def place(reference: Reference) -> list[int]:
        kind, k = reference[0], reference[1]
        if kind == "head":
            return [heads[k], 0, 0]
        if kind == "in":
            return [k, 0, 0]
        if kind == "out":
            return [forward, k, 0]
        return [start + k, reference[2], 0]

    for j, node in enumerate(made):
        nodes.append(
            {
                "op": node["op"],
                "name": "b%d" % j,
                "attrs": dict(node["attrs"]),
                "inputs": [place(r) for r in node["inputs"]],
                "control_deps": [forward if d is None else start + d for d in node["deps"]],
            }
        )
    try:
        symbol = load_nodes(
            nodes, [[start + j, 0, 0] for j in range(len(made))] + [[forward, 0, 0]]
        )
        internals = symbol.get_internals()
        outs = [
            Tensor(tuple(int(n) for n in shape), np.dtype(kind).name)
            for shape, kind in zip(*_infer(internals, inputs, _head_tensors(op, attrs, inputs)))
        ]
        entries = read(internals)
    except (mx.MXNetError, TypeError) as error:
        raise NotObservable(
            "{}: shapes of its gradient: {}".format(op, str(error).strip().split("\n")[0])
        ) from None
    tensors: dict[str, list[Tensor]] = {}
    for head, tensor in zip(entries["heads"], outs):
        tensors.setdefault(entries["nodes"][head[0]]["name"], []).append(tensor)
    return tuple(
        BackwardNode(n["op"], n["attrs"], n["inputs"], n["deps"], tuple(tensors["b%d" % j]))
        for j, n in enumerate(made)
    )


def _infer(internals: Any, inputs: Sequence[Tensor], heads: Sequence[Tensor]) -> tuple[Any, Any]:
    shown = internals.list_inputs()
    known = {"x%d" % k: t for k, t in enumerate(inputs)}
    known.update({"g%d" % k: t for k, t in enumerate(heads)})
    known = {name: t for name, t in known.items() if name in shown}
    _, shapes, _ = internals.infer_shape(**{n: t.shape for n, t in known.items()})
    _, types, _ = internals.infer_type(**{n: t.dtype for n, t in known.items()})
    return shapes, types


def _head_tensors(op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Shapes and types of the outputs of an operator that ``list_outputs`` shows."""
    nodes, shown = alone(op, attrs, len(inputs), False)
    symbol = load_nodes(nodes, [[len(inputs), k, 0] for k in range(shown)])
    names = ["x%d" % k for k in range(len(inputs))]
    _, shapes, _ = symbol.infer_shape(**{n: t.shape for n, t in zip(names, inputs)})
    _, types, _ = symbol.infer_type(**{n: t.dtype for n, t in zip(names, inputs)})
    return [Tensor(tuple(int(n) for n in s), np.dtype(t).name) for s, t in zip(shapes, types)]


_merging: dict[Any, bool] = {}


def merges(op: str, attrs: Mapping[str, str], inputs: Sequence[Tensor]) -> bool:
    """Whether MXNet makes one of two operators that are the same and read the same.

    It does not where they keep state, draw numbers or change their inputs (``NodeEqual`` in
    ``src/executor/eliminate_common_expr_pass.cc``); which those are is observed.
    """
    key = (op, tuple(sorted(attrs.items())))
    if key not in _merging:
        names = ["x%d" % k for k in range(len(inputs))]
        nodes: list[dict[str, Any]] = [{"op": "null", "name": n, "inputs": []} for n in names]
        into = [[k, 0, 0] for k in range(len(inputs))]
        nodes += [{"op": op, "name": n, "attrs": dict(attrs), "inputs": into} for n in ("f", "g")]
        # Read by different operators: heads of the network are never quite merged.
        nodes += [
            {"op": reader, "name": reader, "inputs": [[len(inputs) + k, 0, 0]]}
            for k, reader in enumerate(("identity", "negative"))
        ]
        cpu = mx.cpu()
        arrays = {n: unallocated(t.shape, t.dtype, cpu) for n, t in zip(names, inputs)}
        try:
            symbol = load_nodes(nodes, [[len(inputs) + 2, 0, 0], [len(inputs) + 3, 0, 0]])
            auxiliary = {n: arrays[n] for n in symbol.list_auxiliary_states()}
            arguments = {n: arrays[n] for n in symbol.list_arguments()}
            request = "write"  # without gradients MKLDNN would replace the operators by its own
            with environment(MXNET_ELIMINATE_COMMON_EXPR="1"):
                text = symbol.bind(cpu, arguments, arguments, request, auxiliary).debug_str()
            _merging[key] = sum(node["name"] in ("f", "g") for node in read_debug_str(text)[1]) == 1
        except mx.MXNetError:
            _merging[key] = False  # a subgraph, a Custom operator, or one without a gradient
    return _merging[key]
