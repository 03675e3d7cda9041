"""The forward graph of a symbol: its operators in execution order, with shapes and types.

The nodes are those of the symbol's JSON, which nnvm writes in the order in which they run (depth
first from the outputs, ``nnvm::DFSVisit``); a node's index is its identity, for names may repeat.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import sys
import warnings
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

import numpy as np

from memonger.graph.inputs import TYPE, InputSpec, missing_inputs, without_old_types
from memonger.graph.operators.hidden_outputs import hidden_outputs
from memonger.graph.operators.tensors import Shape, Tensor
from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.symbols import read

Entry = Tuple[int, int]  # a node's index and which of its outputs

FLOAT = "float32"
COPY = "_copy"  # the identity: takes its input's memory, and its gradient reads nothing
# The same, of a tensor and itself. Pointwise fusion knows neither it nor its gradient
# (`_backward_copy`; ``ops_desc`` in ``src/operator/fusion/fused_op-inl.h``), while `_copy`, whose
# gradient is `_copy` too, becomes one more output of a fused operator, with memory of its own.
# But it fails where its input's shape is inferred from what reads it, and MKLDNN's inference, which
# sees through `_copy`, does not fuse a convolution with what is behind it.
UNFUSED_COPY = "reshape_like"
# What a tied copy has before it: a product with one, which pointwise fusion leaves alone and whose
# gradient reads its input.
ONE, PRODUCT = "_ones", "broadcast_mul"


class Node(NamedTuple):
    """One node of the graph; ``op`` is 'null' for a variable."""

    name: str
    op: str
    attrs: Mapping[str, str]  # the operator's own parameters
    hidden: Mapping[str, str]  # what executors and planners read: __force_mirroring__ and the like
    inputs: tuple[Entry, ...]
    deps: tuple[int, ...]  # nodes that must have run before
    subgraphs: bool  # a control-flow operator

    @property
    def is_variable(self) -> bool:
        return self.op == "null"


class ForwardGraph(NamedTuple):
    """Everything a planner may know of a network, as plain data.

    Attributes
    ----------
    nodes : tuple of Node
        In execution order.
    tensors : tuple of tuple of Tensor
        The outputs of each node, those that ``list_outputs`` shows first, then the hidden ones.
    visible : tuple of int
        How many of a node's outputs ``list_outputs`` shows.
    output_names : tuple of tuple of str
        Their names, as ``get_internals().list_outputs()`` gives them.
    heads : tuple of Entry
        The outputs of the network.
    arguments : tuple of int
        The variables that can have a gradient, in the order of ``list_arguments``.
    auxiliary : frozenset of int
        The variables that are auxiliary states.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[tuple[Tensor, ...], ...]
    visible: tuple[int, ...]
    output_names: tuple[tuple[str, ...], ...]
    heads: tuple[Entry, ...]
    arguments: tuple[int, ...]
    auxiliary: frozenset[int]

    @property
    def operators(self) -> list[int]:
        """Indices of the nodes that are not variables."""
        return [i for i, node in enumerate(self.nodes) if not node.is_variable]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave the garbage collector off: a large graph makes no garbage but is walked by it often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@no_collection()
def forward_graph(symbol: Any, spec: InputSpec) -> ForwardGraph:
    """Read the forward graph of a symbol whose inputs have the shapes and types of ``spec``.

    Raises
    ------
    MemongerError
        If a shape is missing, or does not fit; the message names the input or the node.
    """
    symbol = without_old_types(symbol, spec)
    internals = symbol.get_internals()
    inner = read(internals)
    nodes = tuple(_node(item) for item in inner["nodes"])
    heads = _heads(symbol)
    arguments, auxiliary = symbol.list_arguments(), set(symbol.list_auxiliary_states())
    shapes = _infer_shapes(symbol, internals, spec, nodes)
    types = _infer_types(symbol, internals, spec, nodes)
    visible: list[list[Tensor]] = [[] for _ in nodes]
    names: list[list[str]] = [[] for _ in nodes]
    for head, name, shape, dtype in zip(inner["heads"], internals.list_outputs(), shapes, types):
        visible[head[0]].append(Tensor(shape, dtype))
        names[head[0]].append(name)
    tensors: list[tuple[Tensor, ...]] = []
    for i, node in enumerate(nodes):
        into = [tensors[a][b] for a, b in node.inputs]
        hidden = hidden_outputs(node.op, node.attrs, into, visible[i])
        tensors.append((*visible[i], *hidden))
    variables = {node.name: i for i, node in enumerate(nodes) if node.is_variable}
    return ForwardGraph(
        nodes,
        tuple(tensors),
        tuple(len(v) for v in visible),
        tuple(tuple(n) for n in names),
        tuple((head[0], head[1]) for head in heads),
        tuple(variables[name] for name in arguments),
        frozenset(variables[name] for name in auxiliary),
    )


class KeptCopy(NamedTuple):
    """An identity behind the first output of a recomputed node: the result that is kept.

    Attributes
    ----------
    node : int
    tie : str
        Where the recomputed copy of the node must have a reader (``rules``), the NumPy type of the
        output: a product with one then stands between the two and is recomputed. Otherwise ''.
    unfused : bool
        Whether it is an identity that pointwise fusion leaves alone: for training on a GPU alone.
    apart : bool
        Whether it stands there for that alone, so that what is before it is not fused with what is
        behind it, though the node may be kept.
    """

    node: int
    tie: str = ""
    unfused: bool = False
    apart: bool = False

    @property
    def offset(self) -> int:
        """How far behind the node it stands."""
        return 3 if self.tie else 1

    def nodes(self) -> list[Inserted]:
        """What stands behind the node, the kept copy last."""
        source = 2 if self.tie else 0
        if self.unfused:
            copy = Inserted(UNFUSED_COPY, {}, "", (source, source), False)
        else:
            copy = Inserted(COPY, {}, "", (source,), False)
        if not self.tie:
            return [copy]
        one = {"shape": "(1,)", "dtype": self.tie}
        return [
            Inserted(ONE, one, "_one", (), False),
            Inserted(PRODUCT, {}, "_tie", (0, 1), True),
            copy,
        ]


class Inserted(NamedTuple):
    """A node of a kept copy."""

    op: str
    attrs: dict[str, str]
    stem: str  # of its name, after that of the node
    inputs: tuple[int, ...]  # 0: the node, k: the k-th that is inserted
    recomputed: bool


def with_copies(graph: ForwardGraph, copies: Iterable[KeptCopy]) -> tuple[ForwardGraph, np.ndarray]:
    """The graph with identities (named ``*_keep``) behind the first output of some nodes.

    All that read such an output read the kept copy instead; outputs of the network stay what they
    were. ``marks.apply`` makes the same of a symbol.

    Parameters
    ----------
    graph : ForwardGraph
    copies : iterable of KeptCopy
        Of operators of whose outputs the first alone is read, and is no output of the network.

    Returns
    -------
    ForwardGraph
    np.ndarray of int
        The new index of each node of ``graph``; what is put in comes right after its node.
    """
    at = {copy.node: copy for copy in copies}
    names = copy_names([node.name for node in graph.nodes], at.values())
    moved = np.zeros(len(graph.nodes), dtype=np.int64)
    nodes: list[Node] = []
    tensors: list[tuple[Tensor, ...]] = []
    visible: list[int] = []
    output_names: list[tuple[str, ...]] = []

    def entry(a: int, b: int) -> Entry:
        return (int(moved[a]) + (at[a].offset if b == 0 and a in at else 0), b)

    for i, node in enumerate(graph.nodes):
        moved[i] = len(nodes)
        inputs = tuple([entry(a, b) for a, b in node.inputs])
        nodes.append(node._replace(inputs=inputs, deps=tuple([int(moved[d]) for d in node.deps])))
        tensors.append(graph.tensors[i])
        visible.append(graph.visible[i])
        output_names.append(graph.output_names[i])
        if i in at:
            for new, name in zip(at[i].nodes(), names[i]):
                inputs = tuple([(int(moved[i]) + k, 0) for k in new.inputs])
                nodes.append(Node(name, new.op, new.attrs, {}, inputs, (), False))
                result = graph.tensors[i][0] if new.inputs else Tensor((1,), at[i].tie)
                tensors.append((result,))
                visible.append(1)
                output_names.append((name + "_output",))
    made = ForwardGraph(
        tuple(nodes),
        tuple(tensors),
        tuple(visible),
        tuple(output_names),
        tuple((int(moved[a]), b) for a, b in graph.heads),
        tuple(int(moved[a]) for a in graph.arguments),
        frozenset(int(moved[a]) for a in graph.auxiliary),
    )
    return made, moved


def mask_with_copies(
    mask: np.ndarray, moved: np.ndarray, copies: Iterable[KeptCopy], count: int
) -> np.ndarray:
    """What a plan recomputes of the ``count`` nodes of ``with_copies``: not the kept copies."""
    full = np.zeros(count, dtype=np.bool_)
    full[moved] = mask
    for copy in copies:
        for k, new in enumerate(copy.nodes(), 1):
            full[moved[copy.node] + k] = new.recomputed
    return full


def copy_names(names: Sequence[str], copies: Iterable[KeptCopy]) -> dict[int, list[str]]:
    """The names of the nodes that stand for copies (``KeptCopy.nodes``), by the node they are of.

    Parameters
    ----------
    names : sequence of str
        Of all nodes; no name is given twice.
    copies : iterable of KeptCopy
    """
    taken = set(names)

    def unique(stem: str) -> str:
        name, number = stem + "_keep", 1
        while name in taken:
            name, number = "%s_%d_keep" % (stem, number), number + 1
        taken.add(name)
        return name

    return {
        copy.node: [unique(names[copy.node] + new.stem) for new in copy.nodes()]
        for copy in sorted(copies)
    }


def _heads(symbol: Any) -> list[list[int]]:
    """The outputs of a symbol, from the end of its JSON: [node, output, version] each."""
    text = symbol.tojson(remove_amp_cast=False)
    start = text.index("[", text.rindex('"heads"'))
    return json.JSONDecoder().raw_decode(text, start)[0]


def _node(item: dict[str, Any]) -> Node:
    attrs = item.get("attrs", {})
    return Node(
        item["name"],
        item["op"],
        {k: v for k, v in attrs.items() if not k.startswith("__")},
        {k: v for k, v in attrs.items() if k.startswith("__")},
        tuple([(entry[0], entry[1]) for entry in item["inputs"]]),
        tuple(item.get("control_deps", ())),
        bool(item.get("subgraphs")),
    )


def _infer_shapes(
    symbol: Any, internals: Any, spec: InputSpec, nodes: tuple[Node, ...]
) -> list[Shape]:
    try:
        # What infer_shape calls, without what it prints: all that is wrong is said below.
        _, shapes, _ = _asked(nodes, internals._infer_shape_impl, False, **spec.shapes)
        if shapes is None:
            partial, _, _ = symbol.infer_shape_partial(**spec.shapes)
    except mx.MXNetError as error:
        raise MemongerError(_shape_complaint(internals, spec, nodes, str(error))) from None
    if shapes is None:
        missing = missing_inputs(symbol.list_arguments(), partial)
        if not missing:
            raise MemongerError(
                "some shapes of this network are known only when it runs (%s), so its memory "
                "cannot be planned"
                % (", ".join(sorted({n.op for n in nodes if n.subgraphs})) or "dynamic operators")
            )
        raise MemongerError(
            f"the shapes of these inputs are needed: {', '.join(map(repr, missing))}; give them "
            f"as {missing[0] if missing else 'data'}=(...) or in shapes={{...}}"
        )
    return [tuple(shape) for shape in shapes]


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


def _shape_complaint(internals: Any, spec: InputSpec, nodes: tuple[Node, ...], message: str) -> str:
    """MXNet's own words without its stack trace, with the node and the shapes that it was given."""
    found = re.search(r"Error in operator ([^:]+): (?:\[[^\]]*\] [^ ]+: )?(.*)", message, re.S)
    if not found:
        return f"the shapes do not fit the network: {said_by_mxnet(message)}"
    name, reason = found.group(1), found.group(2).strip().split("\n")[0]
    if "Traceback" in reason:
        reason = said_by_mxnet(found.group(2))
    node = next((n for n in nodes if n.name == name and not n.is_variable), None)
    if node is None:
        return f"the shapes do not fit at node {name!r}: {reason}"
    inputs = ", ".join(f"{a} {b}" for a, b in _input_shapes(internals, spec, nodes, node))
    return f"the shapes do not fit at node {name!r} ({node.op}, inputs {inputs}): {reason}"


def _input_shapes(
    internals: Any, spec: InputSpec, nodes: tuple[Node, ...], node: Node
) -> list[tuple[str, str]]:
    """Name and shape of each input of a node where inference failed, as far as it came."""
    outputs = internals.list_outputs()
    result = []
    for a, b in node.inputs:
        source = nodes[a]
        if source.is_variable:
            shape = spec.shapes.get(source.name)
            result.append((source.name, str(shape) if shape else "(to be inferred)"))
            continue
        names = [source.name + "_output", source.name + "_output%d" % b]
        part = internals[next((n for n in names if n in outputs), outputs[-1])]
        wanted = set(part.list_inputs())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {k: v for k, v in spec.shapes.items() if k in wanted}
            try:
                _, shapes, _ = part.infer_shape_partial(**given)
            except mx.MXNetError:
                shapes = None
        result.append((source.name, str(tuple(shapes[0])) if shapes else "(unknown)"))
    return result


def _infer_types(
    symbol: Any, internals: Any, spec: InputSpec, nodes: tuple[Node, ...]
) -> list[str]:
    """Types of all tensors; as in ``simple_bind`` every input is float32 where none is told."""
    types = dict(spec.types)
    if not types:
        own = {node.name for node in nodes if node.is_variable and TYPE in node.hidden}
        types = {name: FLOAT for name in symbol.list_arguments() if name not in own}
    try:
        try:
            _, found, _ = _asked(nodes, internals.infer_type_partial, **types)
        except mx.MXNetError:  # an operator that must know its first input: the data is float32
            types = {**dict.fromkeys(spec.shapes, FLOAT), **types}
            _, found, _ = _asked(nodes, internals.infer_type_partial, **types)
        if found is None or any(t is None for t in found):
            # simple_bind would refuse here; whatever nothing decides is float32 in training
            known, _, _ = symbol.infer_type_partial(**types)
            for name, kind in zip(symbol.list_arguments(), known):
                if kind is None:
                    types[name] = FLOAT
            _, found, _ = internals.infer_type_partial(**types)
    except mx.MXNetError as error:
        raise MemongerError("the types do not fit: " + said_by_mxnet(error)) from None
    names = {t: _type_name(t) for t in set(found)}
    return [names[t] for t in found]


def _type_name(kind: Any | None) -> str:
    if kind is None:
        return FLOAT
    found = np.dtype(kind)
    if found.kind == "V":
        raise MemongerError(
            "the network computes in bfloat16, which NumPy does not know, and MXNet cannot train; "
            "cast to float16 or float32"
        )
    return found.name
