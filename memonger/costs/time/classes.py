"""Classes of operators: those of a class take about as many times as long as by the roofline.

How near an operator comes to it is a matter of its kernel: on a CPU MXNet's max pooling takes four
times as long, the gradient of a convolution a quarter longer than its two products. So one operator
of each class that a network has is run on the device, and counts for all of its class.

MKLDNN hands on images in layouts of its own. BatchNorm and pooling are several times faster on
these, and operators that do not know them have them put back into order first. So operators on
images are measured behind a convolution.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.gradients import alone
from memonger.graph.operators.recompute import why_kept
from memonger.graph.operators.tensors import Shape
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes

IMAGES: Shape = (8, 64, 56, 56)  # for operators that take images of any shape
ONE: Shape = (1,)  # of what is taken to be a constant, which gets no gradient
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

    def alone(self) -> Any:
        """Build it between variables."""
        return load_nodes(*alone(self.op, dict(self.attrs), len(self.shapes)))


def example_of(graph: ForwardGraph, i: int) -> Example | None:
    """Choose the operator that stands for the class of an operator, if there is one."""
    node = graph.nodes[i]
    inputs = [graph.tensors[a][b] for a, b in node.inputs]
    chosen: Any = None
    if not inputs or node.subgraphs or why_kept(node.op, node.attrs) is not None:
        return None
    if node.op in _OWN:
        chosen = _own(node.op, node.attrs, [tensor.shape for tensor in inputs])
    else:
        same = {tensor.shape for tensor in graph.shown(i)}
        others = {tensor.shape for tensor in inputs} - same - {ONE}
        if len(same) == 1 and not others and {tensor.dtype for tensor in inputs} == {"float32"}:
            whole = IMAGES if len(min(same)) == 4 else ROWS
            chosen = node.attrs, *[whole if tensor.shape in same else ONE for tensor in inputs]
    if chosen is None:
        return None
    attrs, *shapes = chosen
    return Example(node.op, tuple(sorted((k, str(v)) for k, v in attrs.items())), tuple(shapes))


def symbols_of(example: Example) -> list[Any]:
    """Build what is run to measure an example: without it, if it is ``behind``, and with it."""
    x = _pointwise(mx.sym.Variable("data"), "before")
    given = {IMAGES: x, ONE: mx.sym.ones(ONE)}
    inputs = {f"x{k}": given[shape] for k, shape in enumerate(example.shapes) if shape in given}
    made = example.alone()(**inputs)
    if not example.behind:
        return [made]
    if made[0].infer_shape(data=IMAGES)[1] == [IMAGES]:
        return [_pointwise(x, "behind"), _pointwise(made[0], "behind")]
    return [x, made[0]]


def _pointwise(x: Any, name: str) -> Any:
    return mx.sym.Convolution(x, num_filter=IMAGES[1], kernel=(1, 1), no_bias=True, name=name)


#: Operators whose classes have parameters and shapes of their own.
_OWN = ("Convolution", "FullyConnected", "BatchNorm", "Pooling", "SliceChannel")


def _own(op: str, attrs: Mapping[str, Any], shapes: Sequence[Shape]) -> Any:
    """Choose parameters, and then shapes; None where there is no class."""
    data = shapes[0]
    images = len(data) == 4 and attrs.get("layout", "None") in ("None", "NCHW")
    if op == "FullyConnected":
        batch = 32 if data[0] < 128 else 256
        return {"num_hidden": 1024, "no_bias": True}, (batch, 1024), (1024, 1024)
    if op == "SliceChannel" and len(data) == 2:
        return {"num_outputs": 4, "axis": 1}, ROWS
    if op == "Pooling" and images:
        return attrs, IMAGES
    if op == "BatchNorm" and images and attrs.get("axis", "1") == "1":
        counts = {"fix_gamma": False, "use_global_stats": attrs.get("use_global_stats", False)}
        return (counts, IMAGES, *[(IMAGES[1],)] * 4)
    return _convolution(attrs, data[1], shapes[1][2:]) if op == "Convolution" and images else None


def _convolution(attrs: Mapping[str, Any], channels: int, kernel: Shape) -> Any:
    groups = int(attrs.get("num_group", 1))
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
    made = {"num_filter": filters, "num_group": groups, "no_bias": True, "kernel": kernel}
    made.update(stride=stride, pad=tuple(k // 2 for k in kernel))
    return made, data, (filters, data[1] // groups, *kernel)
