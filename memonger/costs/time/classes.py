"""Classes of operators: those of a class take about as many times as long as by the roofline.

The arithmetic and the bytes of an operator bound its time from below. How near to that it comes is
a matter of its kernel: on a CPU MXNet's max pooling takes four times as long, the gradient of a
convolution a quarter longer than its two products. So one operator of each class that a network has
is run on the device, of some million elements, and what it takes beyond the roofline counts for all
of its class.

MKLDNN hands on images in layouts of its own. BatchNorm and pooling are several times faster on
these, and operators that do not know them have them put back into order first (``clip`` takes five
times as long for it). So operators on images are measured behind a convolution.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.gradients import alone
from memonger.graph.operators.recompute import why_kept
from memonger.graph.operators.tensors import Shape
from memonger.graph.read import forward_graph
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes

IMAGES: Shape = (8, 64, 56, 56)  # for operators that take images of any shape
ONE: Shape = (1,)  # of a constant, which gets no gradient
ROWS: Shape = (256, 2048)  # for operators that take anything
FEW = 16  # channels: a convolution of fewer is of another class


class Example(NamedTuple):
    """An operator that stands for its class."""

    op: str
    attrs: tuple[tuple[str, str], ...]  # its parameters, sorted
    shapes: tuple[Shape, ...]  # of its inputs, float32; those of the shape `ONE` are constants
    #: Whether it is measured behind a convolution of its inputs that are `IMAGES`, and if its
    #: result is too, before another.
    behind: bool


def example_of(graph: ForwardGraph, i: int) -> Example | None:
    """Choose the operator that stands for the class of an operator, if there is one."""
    node = graph.nodes[i]
    inputs = [graph.tensors[a][b] for a, b in node.inputs]
    if not inputs or node.subgraphs or why_kept(node.op, node.attrs) is not None:
        return None
    if node.op in _EXAMPLES:
        chosen = _EXAMPLES[node.op](node.attrs, [tensor.shape for tensor in inputs])
        return None if chosen is None else _example(node.op, *chosen)
    outputs = graph.shown(i)
    constant = [
        tensor.shape == ONE and not graph.nodes[a].is_variable and not graph.nodes[a].inputs
        for (a, _), tensor in zip(node.inputs, inputs)
    ]
    same = {tensor.shape for tensor in outputs}
    same |= {tensor.shape for tensor, is_one in zip(inputs, constant) if not is_one}
    if len(same) == 1 and all(tensor.dtype == "float32" for tensor in inputs):
        whole = IMAGES if len(outputs[0].shape) == 4 else ROWS
        return _example(node.op, node.attrs, *[ONE if is_one else whole for is_one in constant])
    return None


def _example(op: str, attrs: Mapping[str, Any], *shapes: Shape) -> Example:
    given = tuple(sorted((k, str(v)) for k, v in attrs.items()))
    return Example(op, given, shapes, IMAGES in shapes)


def graph_of(example: Example) -> ForwardGraph:
    """Read the graph of an example, whose one operator is the last node."""
    return forward_graph(_symbol_of(example), InputSpec(_shapes_of(example), {}))


def _symbol_of(example: Example) -> Any:
    return load_nodes(*alone(example.op, dict(example.attrs), len(example.shapes)))


def _shapes_of(example: Example) -> dict[str, Shape]:
    return {f"x{k}": shape for k, shape in enumerate(example.shapes)}


def symbols_of(example: Example) -> list[Any]:
    """Build what is run to measure an example: without it, if it is ``behind``, and with it."""
    symbol, shapes = _symbol_of(example), _shapes_of(example)
    constants = {name: mx.sym.ones(ONE) for name, shape in shapes.items() if shape == ONE}
    if constants:
        symbol = symbol(**constants)
    if not example.behind:
        return [symbol]
    x = _pointwise(mx.sym.Variable("data"), "before")
    made = symbol(**{name: x for name, shape in shapes.items() if shape == IMAGES})[0]
    others = {name: shape for name, shape in shapes.items() if shape not in (IMAGES, ONE)}
    if made.infer_shape(data=IMAGES, **others)[1] == [IMAGES]:
        return [_pointwise(x, "behind"), _pointwise(made, "behind")]
    return [x, made]


def _pointwise(x: Any, name: str) -> Any:
    return mx.sym.Convolution(x, num_filter=IMAGES[1], kernel=(1, 1), no_bias=True, name=name)


# ---------------------------------------------------------------- parameters and shapes

Attrs = Mapping[str, Any]
Shapes = Sequence[Shape]


def _in_order(attrs: Attrs) -> bool:
    return attrs.get("layout", "None") in ("None", "NCHW")


def _convolution(attrs: Attrs, shapes: Shapes) -> Any:
    data, weight = shapes[:2]
    if len(data) != 4 or not _in_order(attrs):
        return None
    kernel, channels, groups = weight[2:], data[1], int(attrs.get("num_group", 1))
    pad = tuple(k // 2 for k in kernel)
    made: dict[str, Any] = {"kernel": kernel, "no_bias": True}
    if groups > 1:
        filters = 192
        groups = filters if groups == channels else min(groups, 32)
        if filters % groups:
            return None
        made.update(num_filter=filters, num_group=groups, pad=pad)
        return made, (8, filters, 28, 28), (filters, filters // groups, *kernel)
    if channels < FEW:
        made.update(num_filter=64, stride=attrs.get("stride", "(1, 1)"), pad=pad)
        return made, (4, channels, 112, 112), (64, channels, *kernel)
    if kernel == (1, 1):
        return {**made, "num_filter": 128}, (8, 256, 28, 28), (128, 256, 1, 1)
    made.update(kernel=(3, 3), num_filter=128, pad=(1, 1))
    return made, (4, 128, 28, 28), (128, 128, 3, 3)


def _fully_connected(attrs: Attrs, shapes: Shapes) -> Any:
    batch = 32 if shapes[0][0] < 128 else 256
    return {"num_hidden": 1024, "no_bias": True}, (batch, 1024), (1024, 1024)


def _batch_norm(attrs: Attrs, shapes: Shapes) -> Any:
    if attrs.get("axis", "1") != "1" or len(shapes[0]) != 4:
        return None
    counts = {"fix_gamma": False, "use_global_stats": attrs.get("use_global_stats", False)}
    return (counts, IMAGES, *[(IMAGES[1],)] * 4)


_EXAMPLES: dict[str, Callable[[Attrs, Shapes], Any]] = {
    "Convolution": _convolution,
    "FullyConnected": _fully_connected,
    "BatchNorm": _batch_norm,
    "Pooling": lambda attrs, shapes: (
        (attrs, IMAGES) if len(shapes[0]) == 4 and _in_order(attrs) else None
    ),
    "SliceChannel": lambda attrs, shapes: (
        ({"num_outputs": 4, "axis": 1}, ROWS) if len(shapes[0]) == 2 else None
    ),
}
