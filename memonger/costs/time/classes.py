"""Classes of operators: those of a class take about as many times as long as by the roofline.

How near an operator comes to it is a matter of its kernel: on a CPU MXNet's max pooling takes four
times as long, the gradient of a convolution a quarter longer than its two products. So one operator
of each class that a network has is run on the device, of some million elements, and what it takes
beyond the roofline counts for all of its class.

MKLDNN hands on images in layouts of its own. BatchNorm and pooling are several times faster on
these, and operators that do not know them have them put back into order first. So operators on
images are measured behind a convolution.
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

    @property
    def behind(self) -> bool:
        """Whether it is measured behind a convolution; and before one, if its result is `IMAGES`"""
        return IMAGES in self.shapes

    def alone(self) -> tuple[Any, dict[str, Shape]]:
        """Build it between variables, and name their shapes."""
        symbol = load_nodes(*alone(self.op, dict(self.attrs), len(self.shapes)))
        return symbol, {f"x{k}": shape for k, shape in enumerate(self.shapes)}


def example_of(graph: ForwardGraph, i: int) -> Example | None:
    """Choose the operator that stands for the class of an operator, if there is one."""
    node = graph.nodes[i]
    inputs = [graph.tensors[a][b] for a, b in node.inputs]
    if not inputs or node.subgraphs or why_kept(node.op, node.attrs) is not None:
        return None
    if node.op in _EXAMPLES:
        chosen = _EXAMPLES[node.op](node.attrs, [tensor.shape for tensor in inputs])
        return None if chosen is None else _example(node.op, *chosen)
    constant = [
        tensor.shape == ONE and not graph.nodes[a].is_variable and not graph.nodes[a].inputs
        for (a, _), tensor in zip(node.inputs, inputs)
    ]
    same = {tensor.shape for tensor in graph.shown(i)}
    same |= {tensor.shape for tensor, is_one in zip(inputs, constant) if not is_one}
    if len(same) > 1 or any(tensor.dtype != "float32" for tensor in inputs):
        return None
    whole = IMAGES if len(same.pop()) == 4 else ROWS
    return _example(node.op, node.attrs, *[ONE if is_one else whole for is_one in constant])


def _example(op: str, attrs: Mapping[str, Any], *shapes: Shape) -> Example:
    return Example(op, tuple(sorted((k, str(v)) for k, v in attrs.items())), shapes)


def graph_of(example: Example) -> ForwardGraph:
    """Read the graph of an example, whose one operator is the last node."""
    symbol, shapes = example.alone()
    return forward_graph(symbol, InputSpec(shapes, {}))


def symbols_of(example: Example) -> list[Any]:
    """Build what is run to measure an example: without it, if it is ``behind``, and with it."""
    symbol, shapes = example.alone()
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


def _in_order(attrs: Attrs, shapes: Shapes) -> bool:
    return len(shapes[0]) == 4 and attrs.get("layout", "None") in ("None", "NCHW")


def _convolution(attrs: Attrs, shapes: Shapes) -> Any:
    if not _in_order(attrs, shapes):
        return None
    kernel, channels, groups = shapes[1][2:], shapes[0][1], int(attrs.get("num_group", 1))
    filters, data, stride = 128, (8, 256, 28, 28), "(1, 1)"
    if groups > 1:
        filters, data = 192, (8, 192, 28, 28)
        groups = filters if groups == channels else min(groups, 32)
        if filters % groups:
            return None
    elif channels < FEW:
        filters, data, stride = 64, (4, channels, 112, 112), attrs.get("stride", stride)
    elif kernel != (1, 1):
        kernel, data = (3, 3), (4, 128, 28, 28)
    made: dict[str, Any] = {"num_filter": filters, "num_group": groups, "no_bias": True}
    made.update(kernel=kernel, stride=stride, pad=tuple(k // 2 for k in kernel))
    return made, data, (filters, data[1] // groups, *kernel)


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
    "Pooling": lambda attrs, shapes: (attrs, IMAGES) if _in_order(attrs, shapes) else None,
    "SliceChannel": lambda attrs, shapes: (
        ({"num_outputs": 4, "axis": 1}, ROWS) if len(shapes[0]) == 2 else None
    ),
}
