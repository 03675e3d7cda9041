"""The forward graph of a symbol: MXNet is asked for the shape and type of every tensor."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import Any, Callable

import numpy as np

from memonger.graph.forward import FLOAT, ForwardGraph, Node, no_collection
from memonger.graph.inputs import PARAMETER_ENDINGS, TYPE, InputSpec, without_old_types
from memonger.graph.operators.tensors import Shape, Tensor
from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.symbols import all_outputs, load_nodes, read


@no_collection()
def forward_graph(symbol: Any, spec: InputSpec) -> ForwardGraph:
    """Read the forward graph of a symbol whose inputs have the shapes and types of ``spec``.

    Where a shape is missing, or does not fit, the MemongerError names the input or the node.
    """
    symbol = without_old_types(symbol, spec)
    internals = symbol.get_internals()
    graph = read(internals)
    nodes = tuple(map(_node, graph["nodes"]))
    every, start = all_outputs(graph), graph["node_row_ptr"]
    shapes = _infer_shapes(symbol, graph, every, spec, nodes)
    tensors = tuple(map(Tensor, shapes, _infer_types(symbol, every, spec, nodes)))
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


def _node(item: dict[str, Any]) -> Node:
    attrs = item.get("attrs", {})
    return Node(
        name=item["name"],
        op=item["op"],
        attrs={k: v for k, v in attrs.items() if not k.startswith("__")},
        hidden={k: v for k, v in attrs.items() if k.startswith("__")},
        inputs=tuple([(entry[0], entry[1]) for entry in item["inputs"]]),
        deps=tuple(item.get("control_deps", ())),
        subgraphs=bool(item.get("subgraphs")),
    )


def _asked(nodes: tuple[Node, ...], call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Ask MXNet. What a CustomOpProp says where it fails goes into the error, not to stdout."""
    if not any(node.op == "Custom" for node in nodes):
        return call(*args, **keywords)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            found = call(*args, **keywords)
    except mx.MXNetError as error:
        said = re.findall(r"^[\w.]+: .*", printed.getvalue(), re.M)
        where = str(error).partition("Check failed")[0]
        raise mx.MXNetError(where + said[-1] if said else error) from None
    sys.stdout.write(printed.getvalue())
    return found


def _infer_shapes(
    symbol: Any, graph: dict[str, Any], every: Any, spec: InputSpec, nodes: tuple[Node, ...]
) -> list[Shape]:
    """Infer the shapes of all outputs."""
    try:
        # What infer_shape calls, without what it prints: all that is wrong is said below.
        _, shapes, _ = _asked(nodes, every._infer_shape_impl, False, **spec.shapes)
        if shapes is not None:
            return [tuple(shape) for shape in shapes]
        partial, _, _ = symbol.infer_shape_partial(**spec.shapes)
    except mx.MXNetError as error:
        raise MemongerError(_shape_complaint(graph, spec, str(error))) from None
    unknown = [n for n, s in zip(symbol.list_arguments(), partial) if not s or min(s) <= 0]
    if not unknown:
        dynamic = sorted({node.op for node in nodes if node.subgraphs}) or ["dynamic operators"]
        raise MemongerError(
            f"some shapes of this network are known only when it runs ({', '.join(dynamic)}), so "
            "its memory cannot be planned"
        )
    missing = [name for name in unknown if not name.endswith(PARAMETER_ENDINGS)] or unknown
    raise MemongerError(
        f"the shapes of these inputs are needed: {', '.join(map(repr, missing))}; give them "
        f"as {missing[0]}=(...) or in shapes={{...}}"
    )


def _shape_complaint(graph: dict[str, Any], spec: InputSpec, message: str) -> str:
    """Say MXNet's own words without its stack trace, with the node and the shapes of its inputs."""
    found = re.search(r"Error in operator ([^:]+): (?:\[[^\]]*\] [^ ]+: )?(.*)", message, re.S)
    if not found:
        return f"the shapes do not fit the network: {said_by_mxnet(message)}"
    name, said = found.groups()
    reason = said_by_mxnet(said) if "Traceback" in said else said.strip().split("\n")[0]
    where, nodes = repr(name), graph["nodes"]
    with contextlib.suppress(mx.MXNetError, StopIteration):
        node = next(n for n in nodes if n["name"] == name and n["op"] != "null")
        part = load_nodes(nodes, node["inputs"])
        given = {n: spec.shapes[n] for n in part.list_inputs() if n in spec.shapes}
        shapes = part.infer_shape_partial(**given)[1] or ()
        known = [f"{nodes[a]['name']} {s or '?'}" for (a, *_), s in zip(node["inputs"], shapes)]
        where += f" ({node['op']}, inputs {', '.join(known)})"
    return f"the shapes do not fit at node {where}: {reason}"


def _infer_types(symbol: Any, every: Any, spec: InputSpec, nodes: tuple[Node, ...]) -> list[str]:
    """Infer the types of all outputs; what nothing tells is float32, as in ``simple_bind``."""
    types = dict(spec.types)
    if not types:
        own = {node.name for node in nodes if node.is_variable and TYPE in node.hidden}
        types = {name: FLOAT for name in symbol.list_arguments() if name not in own}
    try:
        try:
            _, found, _ = _asked(nodes, every.infer_type_partial, **types)
        except mx.MXNetError:
            # The weights are of another type, or an operator must know its first input: as Module
            # does, the types of the data are told alone.
            types = {**dict.fromkeys(spec.shapes, FLOAT), **spec.types}
            _, found, _ = _asked(nodes, every.infer_type_partial, **types)
        if found is None or None in found:
            # simple_bind would refuse here; whatever nothing decides is float32 in training
            known, _, _ = symbol.infer_type_partial(**types)
            undecided = [n for n, kind in zip(symbol.list_arguments(), known) if kind is None]
            _, found, _ = every.infer_type_partial(**types, **dict.fromkeys(undecided, FLOAT))
    except mx.MXNetError as error:
        said = f"the types do not fit: {said_by_mxnet(error)}"
        raise MemongerError(f"{said}; give those of the inputs as type_dict={{...}}") from None
    names = {kind: FLOAT if kind is None else np.dtype(kind).name for kind in set(found)}
    if any(kind is not None and np.dtype(kind).kind == "V" for kind in names):
        raise MemongerError(
            "the network computes in bfloat16, which neither NumPy nor a plan knows; cast to "
            "float16 or float32"
        )
    return [names[kind] for kind in found]
