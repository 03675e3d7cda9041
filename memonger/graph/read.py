"""Read the forward graph of a symbol; MXNet infers the shape and type of every tensor."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from typing import Iterator, Sequence

import numpy as np

from memonger.graph.forward import FLOAT, ForwardGraph, Node, no_collection
from memonger.graph.inputs import PARAMETER_ENDINGS, TYPE, InputSpec, drop_old_types
from memonger.graph.operators.gradients import bind_inferred
from memonger.graph.operators.tensors import DENSE_NUMBERS, STORAGE, Shape, Tensor, Tensors
from memonger.support.errors import MemongerError, mxnet_message
from memonger.support.mxnet import environment, mx, without_notices
from memonger.support.symbols import all_outputs, load_nodes, read
from memonger.support.types import Json, Symbol


@no_collection()
def forward_graph(symbol: Symbol, spec: InputSpec) -> ForwardGraph:
    """Read the forward graph of a symbol whose inputs have the shapes and types of ``spec``.

    Raises
    ------
    MemongerError
        If a shape or a type is missing or does not fit; the message names the input or the node.
    """
    symbol = drop_old_types(symbol, spec)
    internals = symbol.get_internals()
    graph = read(internals)
    nodes = tuple(map(_node, graph["nodes"]))
    outputs, start = all_outputs(graph), graph["node_row_ptr"]
    shapes = _infer_shapes(symbol, graph, outputs, spec, nodes)
    tensors = tuple(map(Tensor, shapes, _infer_types(symbol, outputs, spec, nodes)))
    tensors = _with_stypes(tensors, outputs, nodes, start)
    names: list[list[str]] = [[] for _ in nodes]
    for head, name in zip(graph["heads"], internals.list_outputs()):
        names[head[0]].append(name)
    variables = {node.name: i for i, node in enumerate(nodes) if node.is_variable}
    return ForwardGraph(
        nodes=nodes,
        tensors=tuple([tensors[first:last] for first, last in zip(start, start[1:])]),
        output_names=tuple(map(tuple, names)),
        heads=tuple((head[0], head[1]) for head in read(symbol)["heads"]),
        arguments=tuple(variables[name] for name in symbol.list_arguments()),
        auxiliary=frozenset(variables[name] for name in symbol.list_auxiliary_states()),
    )


def read_nodes(symbol: Symbol) -> tuple[Node, ...]:
    """Read the nodes of a symbol without shapes; they are those of its `forward_graph`."""
    return tuple(map(_node, read(symbol)["nodes"]))


def _node(item: Json) -> Node:
    attrs = item.get("attrs", {})
    return Node(
        name=item["name"],
        op=item["op"],
        attrs={k: v for k, v in attrs.items() if not k.startswith("__")},
        hidden={k: v for k, v in attrs.items() if k.startswith("__")},
        inputs=tuple([(entry[0], entry[1]) for entry in item["inputs"]]),
        deps=tuple(item.get("control_deps", ())),
        subgraphs=json.dumps(item["subgraphs"]) if item.get("subgraphs") else "",
    )


@contextlib.contextmanager
def _prints_in_errors(nodes: tuple[Node, ...]) -> Iterator[None]:
    """Put what a failing CustomOpProp prints into the error instead of on stdout."""
    if not any(node.op == "Custom" for node in nodes):
        yield
        return
    stdout = io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout):
            yield
    except mx.MXNetError as error:
        errors = re.findall(r"^[\w.]+: .*", stdout.getvalue(), re.M)
        where = str(error).partition("Check failed")[0]
        raise mx.MXNetError(where + errors[-1] if errors else error) from None
    sys.stdout.write(stdout.getvalue())


def _infer_shapes(
    symbol: Symbol, graph: Json, outputs: Symbol, spec: InputSpec, nodes: tuple[Node, ...]
) -> list[Shape]:
    try:
        # infer_shape calls this too, but also prints errors, which are raised below.
        with _prints_in_errors(nodes):
            _, shapes, _ = outputs._infer_shape_impl(False, **spec.shapes)
        if shapes is not None:
            return [tuple(shape) for shape in shapes]
        partial, _, _ = symbol.infer_shape_partial(**spec.shapes)
    except mx.MXNetError as error:
        raise MemongerError(_explain_shapes(graph, spec, str(error))) from None
    scalars = mx.util.is_np_shape()  # then an unknown shape is None, and an unknown size is -1
    least = 0 if scalars else 1
    unknown = [
        name
        for name, shape in zip(symbol.list_arguments(), partial)
        if shape is None or not (shape or scalars) or min(shape, default=least) < least
    ]
    if not unknown:
        dynamic = sorted({node.op for node in nodes if node.subgraphs}) or ["dynamic operators"]
        raise MemongerError(
            f"some shapes of this network are known only when it runs ({', '.join(dynamic)}), so "
            "its memory cannot be planned; leave these operators out"
        )
    # Shapes of parameters, and mostly of labels, follow from the others.
    for endings in (PARAMETER_ENDINGS, "label"):
        unknown = [name for name in unknown if not name.endswith(endings)] or unknown
    raise MemongerError(
        f"the shapes of these inputs are needed: {', '.join(map(repr, unknown))}; give them as "
        f"{unknown[0]}=(...) or in shapes={{...}} (in a shell: --shape {unknown[0]}=...)"
    )


def _explain_shapes(graph: Json, spec: InputSpec, message: str) -> str:
    """Return MXNet's message without its stack trace, with the node and its inputs' shapes."""
    match = re.search(r"Error in operator ([^:]+): (?:\[[^\]]*\] [^ ]+: )?(.*)", message, re.S)
    if not match:
        return f"the shapes do not fit the network: {mxnet_message(message)}"
    name, text = match.groups()
    reason = mxnet_message(text) if "Traceback" in text else text.strip().split("\n")[0]
    where, nodes = repr(name), graph["nodes"]
    with contextlib.suppress(mx.MXNetError, StopIteration):
        node = next(n for n in nodes if n["name"] == name and n["op"] != "null")
        part = load_nodes(nodes, node["inputs"])
        part_shapes = {n: spec.shapes[n] for n in part.list_inputs() if n in spec.shapes}
        shapes = part.infer_shape_partial(**part_shapes)[1] or ()
        inputs = [f"{nodes[a]['name']} {s or '?'}" for (a, *_), s in zip(node["inputs"], shapes)]
        where += f" ({node['op']}, inputs {', '.join(inputs)})"
    return f"the shapes do not fit at node {where}: {reason}"


def _infer_types(
    symbol: Symbol, outputs: Symbol, spec: InputSpec, nodes: tuple[Node, ...]
) -> list[str]:
    """Infer the types of all outputs; an unknown one is float32, as in ``simple_bind``."""
    types = dict(spec.types)
    if not types:
        typed = {node.name for node in nodes if node.is_variable and TYPE in node.hidden}
        types = {name: FLOAT for name in symbol.list_arguments() if name not in typed}
    # Weights of another type, or an operator that needs the type of its first input: then only the
    # types of the data are passed, as Module does, or none, if all follow from the weights.
    given = {**dict.fromkeys(spec.shapes, FLOAT), **spec.types}
    errors = []
    try:
        for chosen in (types, given, spec.types):
            try:
                with _prints_in_errors(nodes):
                    _, inferred, _ = outputs.infer_type_partial(**chosen)
                types = dict(chosen)
                break
            except mx.MXNetError as error:
                errors.append(error)
        else:
            raise errors[1]
        if inferred is None or None in inferred:
            # simple_bind raises here, but in training an unknown type is float32.
            kinds, _, _ = symbol.infer_type_partial(**types)
            undecided = [name for name, kind in zip(symbol.list_arguments(), kinds) if kind is None]
            types.update(dict.fromkeys(undecided, FLOAT))
            _, inferred, _ = outputs.infer_type_partial(**types)
    except mx.MXNetError as error:
        raise MemongerError(
            f"the types do not fit: {mxnet_message(error)}; give those of the inputs as "
            "type_dict={...}"
        ) from None
    names = {kind: FLOAT if kind is None else np.dtype(kind).name for kind in set(inferred)}
    if any(kind is not None and np.dtype(kind).kind == "V" for kind in names):
        raise MemongerError(
            "the network computes in bfloat16, which NumPy and memonger do not support; cast to "
            "float16 or float32"
        )
    return [names[kind] for kind in inferred]


def _with_stypes(
    tensors: Tensors, outputs: Symbol, nodes: tuple[Node, ...], start: Sequence[int]
) -> Tensors:
    """Add how MXNet stores each tensor, which a bind without memory shows.

    The outputs of node i begin at ``start[i]``.
    """
    stored = {node.hidden.get(STORAGE, "0") for node in nodes if node.is_variable}
    if stored <= {*DENSE_NUMBERS} and not any(node.op == "cast_storage" for node in nodes):
        return tensors
    inputs = {node.name: tensors[i] for node, i in zip(nodes, start) if node.is_variable}
    with environment(), without_notices():
        arrays = bind_inferred(outputs, mx.cpu(), inputs, {}).outputs
    return tuple([tensor._replace(stype=a.stype) for tensor, a in zip(tensors, arrays)])
