"""Networks as symbols, for the examples, the tests and the benchmarks.

Every builder returns ``(symbol, shapes)``: the network with its loss, and the shape of every data
and label input by name, so that ``symbol.simple_bind(ctx, **shapes)`` works. All sizes are
parameters: the defaults are of a size that is trained, and a test can make them tiny. Bind data
and labels with grad_req 'null', as Module does: not every loss has a gradient for its label.

A builder names its nodes in a counter of its own, so the same call gives the same symbol however
many were built before. Its ``__wrapped__`` is the builder that counts on in the caller's
``mx.name.NameManager``.

`resnet` and `lstm` are the networks of the original memonger's ``example_resnet.py`` and
``example_lstm.py``, node for node.
"""

import functools
from collections import namedtuple
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar, cast

import memonger  # noqa: F401  makes MXNet importable on newer NumPy
import mxnet as mx
import numpy as np

Shape = Tuple[int, ...]
Network = Tuple[Any, Dict[str, Shape]]
Builder = TypeVar("Builder", bound=Callable[..., Network])

State = namedtuple("State", ["c", "h"])
Gates = namedtuple("Gates", ["i2h_weight", "i2h_bias", "h2h_weight", "h2h_bias"])


def freshly_named(builder: Builder) -> Builder:
    """Let a builder count its nodes from zero, whatever was built before."""

    @functools.wraps(builder)
    def build(*args: Any, **kwargs: Any) -> Network:
        with mx.name.NameManager():
            return builder(*args, **kwargs)

    return cast(Builder, build)


# -- what several networks share -------------------------------------------------------------


def _images(batch: int, image: int, channels: int = 3) -> Dict[str, Shape]:
    return {"data": (batch, channels, image, image), "softmax_label": (batch,)}


def _classify(x: Any, classes: int) -> Any:
    """Flatten, fully connect to `classes` scores, softmax with label ``softmax_label``."""
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def _conv_bn_relu(x: Any, filters: int, stride: int = 1) -> Any:
    x = mx.sym.Convolution(
        x, num_filter=filters, kernel=(3, 3), pad=(1, 1), stride=(stride, stride), no_bias=True
    )
    return mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False), act_type="relu")


def _dropout(x: Any, p: float) -> Any:
    return mx.sym.Dropout(x, p=p) if p > 0 else x


# -- the original's examples -----------------------------------------------------------------


def _leaky_conv(
    x: Any, filters: int, kernel: int, pad: int = 0, stride: int = 1, fix_gamma: bool = True
) -> Any:
    x = mx.sym.Convolution(
        x, kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad), num_filter=filters
    )
    return mx.sym.LeakyReLU(mx.sym.BatchNorm(x, fix_gamma=fix_gamma), act_type="leaky")


def _bottleneck(x: Any, filters: int, stride: int, project: bool) -> Any:
    y = _leaky_conv(x, filters, 1)
    y = _leaky_conv(y, filters, 3, pad=1, stride=stride)
    y = _leaky_conv(y, 4 * filters, 1)
    if project:
        x = _leaky_conv(x, 4 * filters, 1, stride=stride)
    total = x + y
    # Where the original marks: the block's shortcut, not its sum.
    x._set_attr(mirror_stage="True")
    return total


def _halved(size: int) -> int:
    """Compute the side after a padded convolution of stride 2."""
    return (size - 1) // 2 + 1


@freshly_named
def resnet(
    layers: Sequence[int] = (3, 24, 36, 3),
    batch: int = 32,
    image: int = 224,
    classes: int = 1000,
    filters: int = 64,
) -> Network:
    """Bottleneck ResNet of the original's ``example_resnet.py``, with its ``mirror_stage`` marks.

    `layers` are the blocks of each stage; a stage has twice the filters of the one before it. The
    smallest image is 5 pixels wide.
    """
    x = _leaky_conv(mx.sym.Variable("data"), filters, 7, pad=3, stride=2)
    x = mx.sym.Pooling(x, pool_type="max", kernel=(3, 3), stride=(2, 2))
    side = (_halved(image) - 3) // 2 + 1
    for stage, blocks in enumerate(layers):
        for block in range(blocks):
            first = block == 0
            stride = 2 if stage > 0 and first else 1
            side = side if stride == 1 else _halved(side)
            x = _bottleneck(x, filters << stage, stride, project=first)
    kernel = min(7, side)
    x = mx.sym.Pooling(
        x, kernel=(kernel, kernel), stride=(1, 1), name="global_pool", pool_type="avg"
    )
    x = mx.sym.FullyConnected(mx.sym.Flatten(x, name="flatten"), num_hidden=classes, name="fc1")
    return mx.sym.SoftmaxOutput(x, name="softmax"), _images(batch, image)


def _lstm_cell(
    x: Any, before: State, gates: Gates, hidden: int, step: int, layer: int, dropout: float
) -> State:
    name = f"t{step}_l{layer}_"
    i2h = mx.sym.FullyConnected(
        _dropout(x, dropout),
        weight=gates.i2h_weight,
        bias=gates.i2h_bias,
        num_hidden=hidden * 4,
        name=name + "i2h",
    )
    h2h = mx.sym.FullyConnected(
        before.h,
        weight=gates.h2h_weight,
        bias=gates.h2h_bias,
        num_hidden=hidden * 4,
        name=name + "h2h",
    )
    parts = mx.sym.SliceChannel(i2h + h2h, num_outputs=4, name=name + "slice")
    in_gate, in_transform, forget_gate, out_gate = (
        mx.sym.Activation(parts[i], act_type=act_type)
        for i, act_type in enumerate(("sigmoid", "tanh", "sigmoid", "sigmoid"))
    )
    c = (forget_gate * before.c) + (in_gate * in_transform)
    h = out_gate * mx.sym.Activation(c, act_type="tanh")
    # All layers of a time step make one cut, hence one label.
    c._set_attr(mirror_stage=str(step))
    h._set_attr(mirror_stage=str(step))
    return State(c=c, h=h)


def _decode(x: Any, label: str, loss: str, use_loss: bool, **fully_connected: Any) -> Any:
    scores = mx.sym.FullyConnected(x, **fully_connected)
    wanted = mx.sym.Variable(label)
    if use_loss:
        return mx.sym.softmax_cross_entropy(scores, wanted, name=loss)
    return mx.sym.SoftmaxOutput(scores, label=wanted, name=loss)


@freshly_named
def lstm(
    layers: int = 4,
    steps: int = 1000,
    batch: int = 64,
    hidden: int = 1024,
    embed: Optional[int] = None,
    labels: int = 5000,
    input: int = 50,
    concat_decode: bool = False,
    use_loss: bool = True,
    dropout: float = 0.0,
) -> Network:
    """Unrolled LSTM of the original's ``example_lstm.py``, ``mirror_stage`` labelled by time step.

    `embed` defaults to `hidden`. With `concat_decode` one decoder reads all steps at once; with
    `use_loss` the heads are scalars of ``softmax_cross_entropy``, else ``SoftmaxOutput``.
    """
    embed_weight = mx.sym.Variable("embed_weight")
    decoder = {
        "weight": mx.sym.Variable("cls_weight"),
        "bias": mx.sym.Variable("cls_bias"),
        "num_hidden": labels,
    }
    gates: List[Gates] = []
    states: List[State] = []
    shapes: Dict[str, Shape] = {}
    for i in range(layers):
        gates.append(Gates(*(mx.sym.Variable(f"l{i}_{field}") for field in Gates._fields)))
        states.append(State(*(mx.sym.Variable(f"l{i}_init_{f}") for f in State._fields)))
        shapes.update({f"l{i}_init_{field}": (batch, hidden) for field in State._fields})

    last_hidden = []
    for step in range(steps):
        shapes[f"t{step}_data"] = (batch, input)
        with mx.AttrScope(ctx_group="embed"):
            x = mx.sym.FullyConnected(
                mx.sym.Variable(f"t{step}_data"),
                weight=embed_weight,
                no_bias=True,
                num_hidden=hidden if embed is None else embed,
                name=f"t{step}_embed",
            )
        for i in range(layers):
            with mx.AttrScope(ctx_group=f"layer{i}"):
                drop = dropout if i > 0 else 0.0
                states[i] = _lstm_cell(x, states[i], gates[i], hidden, step, i, drop)
                x = states[i].h
        last_hidden.append(_dropout(x, dropout))

    with mx.AttrScope(ctx_group="decode"):
        if concat_decode:
            x = mx.sym.Concat(*last_hidden, dim=0)
            heads = [_decode(x, "label", "sm", use_loss, **decoder)]
            shapes["label"] = (batch * steps,)
        else:
            heads = []
            for step, x in enumerate(last_hidden):
                t = f"t{step}_"
                heads.append(_decode(x, t + "label", t + "sm", use_loss, name=t + "cls", **decoder))
                shapes[t + "label"] = (batch,)
    for field in State._fields:
        for i, state in enumerate(states):
            last = mx.sym.BlockGrad(getattr(state, field), name=f"l{i}_last_{field}")
            heads.append(last)
    return mx.sym.Group(heads), shapes


# -- networks of the field -------------------------------------------------------------------


@freshly_named
def model_zoo(
    name: str = "resnet50_v1", batch: int = 32, image: int = 224, classes: int = 1000
) -> Network:
    """Make a symbol of a network of Gluon's model zoo, with a SoftmaxOutput named ``softmax``.

    ``inceptionv3`` is made for images of 299, and DenseNets need at least 193.
    """
    net = mx.gluon.model_zoo.vision.get_model(name, classes=classes, prefix="net_")
    return mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax"), _images(batch, image)


def _preactivated(x: Any, name: str, number: int) -> Any:
    x = mx.sym.BatchNorm(x, fix_gamma=False, eps=2e-5, name=f"{name}_bn{number}")
    return mx.sym.Activation(x, act_type="relu", name=f"{name}_relu{number}")


def _bottleneck_v2(x: Any, name: str, filters: int, stride: int, project: bool) -> Any:
    def conv(x: Any, part: str, filters: int, kernel: int, stride: int = 1) -> Any:
        return mx.sym.Convolution(
            x,
            num_filter=filters,
            kernel=(kernel, kernel),
            stride=(stride, stride),
            pad=(kernel // 2, kernel // 2),
            no_bias=True,
            name=name + part,
        )

    first = _preactivated(x, name, 1)
    y = _preactivated(conv(first, "_conv1", filters // 4, 1), name, 2)
    y = _preactivated(conv(y, "_conv2", filters // 4, 3, stride), name, 3)
    y = conv(y, "_conv3", filters, 1)
    if project:
        x = conv(first, "_sc", filters, 1, stride)
    x._set_attr(mirror_stage="True")
    return y + x


@freshly_named
def resnet_v2(
    layers: Sequence[int] = (3, 4, 6, 3),
    batch: int = 32,
    image: int = 224,
    classes: int = 1000,
    filters: int = 64,
) -> Network:
    """ResNet v2 (He et al. 2016, arXiv 1603.05027), node for node MXNet's example symbol.

    `layers` are the bottlenecks of each stage: (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) ResNet-152.
    Its ``mirror_stage`` marks are those that the example makes with ``memonger=True``.
    """
    x = mx.sym.identity(mx.sym.Variable("data"), name="id")
    x = mx.sym.BatchNorm(x, fix_gamma=True, eps=2e-5, name="bn_data")
    x = mx.sym.Convolution(
        x, num_filter=filters, kernel=(7, 7), stride=(2, 2), pad=(3, 3), no_bias=True, name="conv0"
    )
    x = mx.sym.BatchNorm(x, fix_gamma=False, eps=2e-5, name="bn0")
    x = mx.sym.Activation(x, act_type="relu", name="relu0")
    x = mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
    for stage, blocks in enumerate(layers):
        for block in range(blocks):
            name = f"stage{stage + 1}_unit{block + 1}"
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck_v2(x, name, 4 * filters << stage, stride, project=block == 0)
    x = mx.sym.BatchNorm(x, fix_gamma=False, eps=2e-5, name="bn1")
    x = mx.sym.Activation(x, act_type="relu", name="relu1")
    x = mx.sym.Pooling(x, global_pool=True, kernel=(7, 7), pool_type="avg", name="pool1")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc1")
    return mx.sym.SoftmaxOutput(x, name="softmax"), _images(batch, image)


def _named_conv(x: Any, name: str, filters: int, kernel: int, pad: int = 0, stride: int = 1) -> Any:
    x = mx.sym.Convolution(
        x,
        num_filter=filters,
        kernel=(kernel, kernel),
        stride=(stride, stride),
        pad=(pad, pad),
        name="conv_" + name,
    )
    return mx.sym.Activation(x, act_type="relu", name="relu_" + name)


def _inception(x: Any, name: str, filters: Sequence[int]) -> Any:
    """Build an inception module; `filters` are a row of Table 1, from "#1x1" to "pool proj"."""
    one, reduce3, three, reduce5, five, project = filters
    branch1 = _named_conv(x, name + "_1x1", one, 1)
    branch3 = _named_conv(x, name + "_3x3_reduce", reduce3, 1)
    branch3 = _named_conv(branch3, name + "_3x3", three, 3, pad=1)
    branch5 = _named_conv(x, name + "_5x5_reduce", reduce5, 1)
    branch5 = _named_conv(branch5, name + "_5x5", five, 5, pad=2)
    pooled = mx.sym.Pooling(
        x,
        kernel=(3, 3),
        stride=(1, 1),
        pad=(1, 1),
        pool_type="max",
        name=f"max_pool_{name}_pool",
    )
    pooled = _named_conv(pooled, name + "_proj", project, 1)
    return mx.sym.Concat(branch1, branch3, branch5, pooled, name=f"ch_concat_{name}_chconcat")


# Table 1 of the paper, grouped by what stands between two poolings.
GOOGLENET = (
    (
        ("in3a", (64, 96, 128, 16, 32, 32)),
        ("in3b", (128, 128, 192, 32, 96, 64)),
    ),
    (
        ("in4a", (192, 96, 208, 16, 48, 64)),
        ("in4b", (160, 112, 224, 24, 64, 64)),
        ("in4c", (128, 128, 256, 24, 64, 64)),
        ("in4d", (112, 144, 288, 32, 64, 64)),
        ("in4e", (256, 160, 320, 32, 128, 128)),
    ),
    (
        ("in5a", (256, 160, 320, 32, 128, 128)),
        ("in5b", (384, 192, 384, 48, 128, 128)),
    ),
)


@freshly_named
def googlenet(batch: int = 32, image: int = 224, classes: int = 1000, divide: int = 1) -> Network:
    """GoogLeNet (Szegedy et al. 2014, arXiv 1409.4842), node for node MXNet's example symbol.

    `divide` divides all filters. The smallest image is 61 pixels wide.
    """

    def pooled(x: Any) -> Any:
        return mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="max")

    x = _named_conv(mx.sym.Variable("data"), "conv1", 64 // divide, 7, pad=3, stride=2)
    x = pooled(x)
    x = _named_conv(x, "conv2", 64 // divide, 1)
    x = _named_conv(x, "conv3", 192 // divide, 3, pad=1)
    for group in GOOGLENET:
        x = pooled(x)
        for name, filters in group:
            x = _inception(x, name, [n // divide for n in filters])
    x = mx.sym.Pooling(x, kernel=(7, 7), stride=(1, 1), global_pool=True, pool_type="avg")
    return _classify(x, classes), _images(batch, image)


def _bn_conv(
    x: Any,
    name: str,
    filters: int,
    height: int = 1,
    width: int = 1,
    stride: int = 1,
    pad: Optional[int] = None,
) -> Any:
    """Convolution, BatchNorm and ReLU; as large as its input unless it strides."""
    same = (height // 2, width // 2) if stride == 1 else (0, 0)
    x = mx.sym.Convolution(
        x,
        num_filter=filters,
        kernel=(height, width),
        stride=(stride, stride),
        pad=same if pad is None else (pad, pad),
        no_bias=True,
        name=name + "_conv2d",
    )
    x = mx.sym.BatchNorm(x, fix_gamma=True, name=name + "_batchnorm")
    return mx.sym.Activation(x, act_type="relu", name=name + "_relu")


Conv = Tuple[int, int, int]  # filters, height and width
Towers = Tuple[Tuple[Conv, ...], ...]


def _inception_v3_module(
    x: Any,
    name: str,
    divide: int,
    towers: Towers,
    pool: str,
    project: int = 0,
    stride: int = 1,
    fork: Optional[Tuple[Conv, Conv]] = None,
) -> Any:
    """Build towers of convolutions and a pooling, side by side; the last of each strides.

    With `fork` all towers but the first end in these two convolutions, side by side.
    """
    branches, numbered = [], 0
    for index, tower in enumerate(towers):
        last = len(tower) - 1
        alone = index == 0 and last == 0
        if alone:
            prefix = name + "_conv"
        else:
            prefix = name + (f"_tower_{numbered}_conv" if numbered else "_tower_conv")
            numbered += 1
        y = x
        for i, (filters, height, width) in enumerate(tower):
            part = prefix + (f"_{i}" if i > 0 else "")
            y = _bn_conv(y, part, filters // divide, height, width, stride if i == last else 1)
        if fork is None or alone:
            branches.append(y)
            continue
        for i, (filters, height, width) in enumerate(fork):
            part = prefix[: -len("conv")] + (f"mixed_conv_{i}" if i > 0 else "mixed_conv")
            branches.append(_bn_conv(y, part, filters // divide, height, width))
    y = mx.sym.Pooling(
        x,
        kernel=(3, 3),
        stride=(stride, stride),
        pad=(2 - stride, 2 - stride),
        pool_type=pool,
        name=f"{pool}_pool_{name}_pool",
    )
    if project:
        y = _bn_conv(y, name + "_tower_2_conv", project // divide)
    return mx.sym.Concat(*branches, y, name=f"ch_concat_{name}_chconcat")


def _inception_v3_modules() -> List[Dict[str, Any]]:
    """Arguments of the eleven modules of ``_inception_v3_module``, in order."""

    def a(project: int) -> Dict[str, Any]:
        three = ((64, 1, 1), (96, 3, 3), (96, 3, 3))
        towers = (((64, 1, 1),), ((48, 1, 1), (64, 5, 5)), three)
        return {"towers": towers, "pool": "avg", "project": project}

    def c(n: int) -> Dict[str, Any]:
        once = ((n, 1, 1), (n, 1, 7), (192, 7, 1))
        twice = ((n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7))
        return {"towers": (((192, 1, 1),), once, twice), "pool": "avg", "project": 192}

    def e(pool: str) -> Dict[str, Any]:
        towers = (((320, 1, 1),), ((384, 1, 1),), ((448, 1, 1), (384, 3, 3)))
        fork = ((384, 1, 3), (384, 3, 1))
        return {"towers": towers, "pool": pool, "project": 192, "fork": fork}

    b = (((384, 3, 3),), ((64, 1, 1), (96, 3, 3), (96, 3, 3)))
    d = (((192, 1, 1), (320, 3, 3)), ((192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)))
    return [
        *(a(32), a(64), a(64)),
        {"towers": b, "pool": "max", "stride": 2},
        *(c(128), c(160), c(160), c(192)),
        {"towers": d, "pool": "max", "stride": 2},
        *(e("avg"), e("max")),
    ]


@freshly_named
def inception_v3(
    batch: int = 32, image: int = 299, classes: int = 1000, divide: int = 1
) -> Network:
    """Inception-v3 (Szegedy et al. 2015, arXiv 1512.00567), node for node MXNet's example symbol.

    `divide` divides all filters. The smallest image is 75 pixels wide.
    """

    def pooled(x: Any, name: str) -> Any:
        return mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="max", name=name)

    x = mx.sym.identity(mx.sym.Variable("data"), name="id")
    x = _bn_conv(x, "conv", 32 // divide, 3, 3, stride=2)
    x = _bn_conv(x, "conv_1", 32 // divide, 3, 3, pad=0)
    x = pooled(_bn_conv(x, "conv_2", 64 // divide, 3, 3), "pool")
    x = _bn_conv(x, "conv_3", 80 // divide)
    x = pooled(_bn_conv(x, "conv_4", 192 // divide, 3, 3, pad=0), "pool1")
    for i, module in enumerate(_inception_v3_modules()):
        x = _inception_v3_module(x, f"mixed_{i}" if i > 0 else "mixed", divide, **module)
    x = mx.sym.Pooling(x, global_pool=True, kernel=(8, 8), pool_type="avg", name="global_pool")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x, name="flatten"), num_hidden=classes, name="fc1")
    return mx.sym.SoftmaxOutput(x, name="softmax"), _images(batch, image)


def _relu6_conv(
    x: Any,
    name: str,
    filters: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    linear: bool = False,
) -> Any:
    x = mx.sym.Convolution(
        x,
        num_filter=filters,
        kernel=(kernel, kernel),
        num_group=groups,
        stride=(stride, stride),
        pad=(kernel // 2, kernel // 2),
        no_bias=True,
        name=name + "-conv2d",
    )
    x = mx.sym.BatchNorm(x, fix_gamma=False, eps=1e-5, name=name + "-batchnorm")
    return x if linear else mx.sym.clip(x, 0, 6, name=name + "-relu6")


# Table 2 of the paper: expansion, filters, blocks, stride of the first.
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


@freshly_named
def mobilenet_v2(
    batch: int = 32, image: int = 224, classes: int = 1000, divide: int = 1
) -> Network:
    """MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381), node for node MXNet's example symbol.

    Gluon's adds the two sides of a block in the other order, which plans differently. `divide`
    divides all filters.
    """
    width = 32 // divide
    x = _relu6_conv(mx.sym.Variable("data"), "first-3x3-conv", width, kernel=3, stride=2)
    for i, (expansion, filters, blocks, stride) in enumerate(MOBILENET_V2):
        for block in range(blocks):
            name = f"seq-{i}-block{block}"
            wide = width * expansion
            y = _relu6_conv(x, name + "-exp", wide)
            first_stride = stride if block == 0 else 1
            y = _relu6_conv(y, name + "-depthwise", wide, 3, first_stride, groups=wide)
            width = filters // divide
            y = _relu6_conv(y, name + "-linear", width, linear=True)
            x = mx.sym.elemwise_add(x, y, name=name + "-shortcut") if block > 0 else y
    x = _relu6_conv(x, "last-1x1-conv", 1280 // divide)
    x = mx.sym.Pooling(x, global_pool=True, kernel=(7, 7), pool_type="avg", name="global_pool")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x, name="flatten"), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, name="softmax"), _images(batch, image)


@freshly_named
def unet(
    batch: int = 4, image: int = 512, base: int = 64, depth: int = 4, classes: int = 2
) -> Network:
    """U-Net with BatchNorm (Ronneberger et al. 2015, arXiv 1505.04597); one class per pixel.

    `image` is a multiple of ``2 ** depth``.
    """

    def double(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = mx.sym.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1))
            x = mx.sym.Activation(mx.sym.BatchNorm(x), act_type="relu")
        return x

    x = mx.sym.Variable("data")
    skips = []
    for level in range(depth):
        x = double(x, base << level)
        skips.append(x)
        x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = double(x, base << depth)
    for level in reversed(range(depth)):
        x = mx.sym.Deconvolution(x, num_filter=base << level, kernel=(2, 2), stride=(2, 2))
        x = double(mx.sym.Concat(x, skips[level], dim=1), base << level)
    x = mx.sym.Convolution(x, num_filter=classes, kernel=(1, 1))
    x = mx.sym.SoftmaxOutput(x, multi_output=True, name="softmax")
    return x, {"data": (batch, 3, image, image), "softmax_label": (batch, image, image)}


def _attention(x: Any, name: str, hidden: int, heads: int, dropout: float) -> Any:
    def project(x: Any, part: str) -> Any:
        return mx.sym.FullyConnected(x, num_hidden=hidden, flatten=False, name=name + part)

    def split(x: Any) -> Any:
        """(batch, steps, hidden) -> (batch * heads, steps, hidden / heads)."""
        x = mx.sym.reshape(x, (0, 0, -4, heads, -1))
        return mx.sym.reshape(mx.sym.transpose(x, (0, 2, 1, 3)), (-3, 0, 0))

    query, key, value = (split(project(x, part)) for part in ("_query", "_key", "_value"))
    scores = mx.sym.batch_dot(query, key, transpose_b=True) / (hidden // heads) ** 0.5
    x = mx.sym.batch_dot(_dropout(mx.sym.softmax(scores), dropout), value)
    x = mx.sym.transpose(mx.sym.reshape(x, (-4, -1, heads, 0, 0)), (0, 2, 1, 3))
    return project(mx.sym.reshape(x, (0, 0, -3)), "_output")


@freshly_named
def transformer(
    layers: int = 12,
    batch: int = 8,
    steps: int = 512,
    hidden: int = 768,
    heads: int = 12,
    inner: Optional[int] = None,
    vocabulary: int = 30522,
    dropout: float = 0.0,
) -> Network:
    """Build a transformer encoder over tokens, LayerNorm first, one softmax per token.

    `inner` is the width of the feed-forward layers, 4 times `hidden` by default.
    """
    x = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=vocabulary, output_dim=hidden, name="token"
    )
    x = mx.sym.broadcast_add(x, mx.sym.Variable("position_weight", shape=(1, steps, hidden)))
    x = _dropout(x, dropout)
    for i in range(layers):
        name = f"layer{i}"
        y = mx.sym.LayerNorm(x, name=name + "_norm1")
        x = x + _dropout(_attention(y, name, hidden, heads, dropout), dropout)
        y = mx.sym.LayerNorm(x, name=name + "_norm2")
        y = mx.sym.FullyConnected(
            y, num_hidden=inner or 4 * hidden, flatten=False, name=name + "_inner"
        )
        y = mx.sym.LeakyReLU(y, act_type="gelu")
        y = mx.sym.FullyConnected(y, num_hidden=hidden, flatten=False, name=name + "_outer")
        x = x + _dropout(y, dropout)
    x = mx.sym.reshape(mx.sym.LayerNorm(x, name="norm"), (-3, 0))
    x = mx.sym.FullyConnected(x, num_hidden=vocabulary, name="decoder")
    label = mx.sym.reshape(mx.sym.Variable("softmax_label"), (-1,))
    x = mx.sym.SoftmaxOutput(x, label, name="softmax")
    return x, {"data": (batch, steps), "softmax_label": (batch, steps)}


@freshly_named
def highway(
    layers: int = 50, hidden: int = 1024, batch: int = 128, input: int = 784, classes: int = 10
) -> Network:
    """Highway network (Srivastava et al. 2015, arXiv 1505.00387): gates that let inputs pass."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden, name="input")
    for i in range(layers):
        gate = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"gate{i}")
        gate = mx.sym.Activation(gate, act_type="sigmoid")
        y = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"transform{i}")
        y = mx.sym.Activation(y, act_type="relu")
        x = gate * y + (1 - gate) * x
    return _classify(x, classes), {"data": (batch, input), "softmax_label": (batch,)}


@freshly_named
def two_heads(
    blocks: int = 8, filters: int = 64, batch: int = 32, image: int = 32, classes: int = 10
) -> Network:
    """Residual trunk with two losses in a Group: a class (``policy``) and a number (``value``)."""
    x = _conv_bn_relu(mx.sym.Variable("data"), filters)
    for _ in range(blocks):
        x = x + _conv_bn_relu(_conv_bn_relu(x, filters), filters)
    policy = mx.sym.FullyConnected(_conv_bn_relu(x, 2), num_hidden=classes)
    value = mx.sym.FullyConnected(_conv_bn_relu(x, 1), num_hidden=1)
    heads = [
        mx.sym.SoftmaxOutput(policy, name="policy"),
        mx.sym.LinearRegressionOutput(mx.sym.tanh(value), name="value"),
    ]
    data = _images(batch, image)["data"]
    return mx.sym.Group(heads), {"data": data, "policy_label": (batch,), "value_label": (batch, 1)}


@freshly_named
def embedding_net(
    batch: int = 64,
    steps: int = 50,
    vocabulary: int = 20000,
    embed: int = 300,
    filters: int = 100,
    widths: Sequence[int] = (3, 4, 5),
    classes: int = 2,
    dropout: float = 0.5,
) -> Network:
    """Convolutions over embedded words, for sentences (Kim 2014, arXiv 1408.5882)."""
    x = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=vocabulary, output_dim=embed, name="embed"
    )
    x = mx.sym.expand_dims(x, axis=1)
    pooled = []
    for width in widths:
        y = mx.sym.Convolution(x, num_filter=filters, kernel=(width, embed), name=f"width{width}")
        y = mx.sym.Activation(y, act_type="relu")
        pooled.append(mx.sym.max(y, axis=(2, 3)))
    x = _dropout(mx.sym.Concat(*pooled, dim=1), dropout)
    return _classify(x, classes), {"data": (batch, steps), "softmax_label": (batch,)}


@freshly_named
def normalised_input(
    batch: int = 32, image: int = 224, blocks: int = 4, filters: int = 32, classes: int = 10
) -> Network:
    """Plain convolutions on pixels that the symbol itself scales and whitens, image by image.

    What is computed of the input alone has no gradient to compute. Each block halves the image.
    """
    x = mx.sym.Variable("data") / 255
    x = mx.sym.broadcast_sub(x, mx.sym.mean(x, axis=(2, 3), keepdims=True))
    variance = mx.sym.mean(mx.sym.square(x), axis=(2, 3), keepdims=True)
    x = mx.sym.broadcast_div(x, mx.sym.sqrt(variance + 1e-5))
    for _ in range(blocks):
        x = _conv_bn_relu(x, filters, stride=2)
    return _classify(x, classes), _images(batch, image)


@freshly_named
def chain(depth: int = 64, hidden: int = 1024, batch: int = 256) -> Network:
    """`depth` layers of FullyConnected and tanh, all alike: by default every tensor is 1 MiB."""
    x = mx.sym.Variable("data")
    for i in range(depth):
        x = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"fc{i}")
        x = mx.sym.Activation(x, act_type="tanh", name=f"tanh{i}")
    x = mx.sym.LinearRegressionOutput(x, mx.sym.Variable("label"), name="out")
    return x, {"data": (batch, hidden), "label": (batch, hidden)}


# -- detection, with an operator written in Python -------------------------------------------


class HardSwish(mx.operator.CustomOp):
    """x * clip(x / 6 + 1/2, 0, 1), on NDArrays."""

    def forward(
        self,
        is_train: bool,
        req: List[str],
        in_data: List[Any],
        out_data: List[Any],
        aux: List[Any],
    ) -> None:
        x = in_data[0]
        self.assign(out_data[0], req[0], x * mx.nd.clip(x / 6 + 0.5, 0, 1))

    def backward(
        self,
        req: List[str],
        out_grad: List[Any],
        in_data: List[Any],
        out_data: List[Any],
        in_grad: List[Any],
        aux: List[Any],
    ) -> None:
        x = in_data[0]
        inside = (x > -3) * (x < 3)
        slope = inside * (x / 3 + 0.5) + (x >= 3)
        self.assign(in_grad[0], req[0], out_grad[0] * slope)


@mx.operator.register("hard_swish")
class HardSwishProp(mx.operator.CustomOpProp):
    """What MXNet asks of ``Custom(op_type='hard_swish')``; shapes and types are the defaults'.

    It takes no keywords, as most custom operators: a foreign attribute on the node is an error.
    """

    def __init__(self) -> None:
        super().__init__(need_top_grad=True)

    def create_operator(
        self, ctx: Any, in_shapes: Sequence[Shape], in_dtypes: Sequence[Any]
    ) -> HardSwish:
        return HardSwish()


def _predict(x: Any, values: int) -> Any:
    """Predict `values` numbers for every pixel, flattened with the pixels outermost."""
    x = mx.sym.Convolution(x, num_filter=values, kernel=(3, 3), pad=(1, 1))
    return mx.sym.Flatten(mx.sym.transpose(x, (0, 2, 3, 1)))


@freshly_named
def detection(
    batch: int = 8,
    image: int = 256,
    classes: int = 20,
    objects: int = 8,
    filters: int = 32,
    blocks: int = 3,
    scales: int = 3,
    custom: bool = True,
) -> Network:
    """Small SSD (Liu et al. 2015, arXiv 1512.02325): classes and boxes at several scales.

    Heads: class probabilities, the box loss, and without gradient the classes wanted and the
    objects that are found. The label has rows (class, left, top, right, bottom), in shares of the
    image; class -1 is no object. Each block and each scale halves the image. With `custom` a Python
    operator stands in the trunk.
    """
    ratios = (1, 2, 0.5)
    x = mx.sym.Variable("data")
    for block in range(blocks):
        x = _conv_bn_relu(x, filters << block, stride=2)
    if custom:
        x = mx.sym.Custom(x, op_type="hard_swish", name="hard_swish")

    scores, boxes, anchors = [], [], []
    for scale in range(scales):
        if scale > 0:
            x = _conv_bn_relu(x, filters << blocks, stride=2)
        sizes = tuple((scale + extra) / scales * 0.7 + 0.2 for extra in (0, 0.5))
        per_pixel = len(sizes) + len(ratios) - 1
        scores.append(_predict(x, (classes + 1) * per_pixel))
        boxes.append(_predict(x, 4 * per_pixel))
        prior = mx.sym.contrib.MultiBoxPrior(x, sizes=sizes, ratios=ratios)
        anchors.append(mx.sym.Flatten(prior))
    score = mx.sym.reshape(mx.sym.Concat(*scores, dim=1), (0, -1, classes + 1))
    score = mx.sym.transpose(score, (0, 2, 1))
    box = mx.sym.Concat(*boxes, dim=1)
    anchor = mx.sym.reshape(mx.sym.Concat(*anchors, dim=1), (0, -1, 4))

    box_wanted, box_mask, class_wanted = mx.sym.contrib.MultiBoxTarget(
        anchor,
        mx.sym.Variable("label"),
        score,
        overlap_threshold=0.5,
        ignore_label=-1,
        negative_mining_ratio=3,
        negative_mining_thresh=0.5,
        name="target",
    )
    class_loss = mx.sym.SoftmaxOutput(
        score,
        class_wanted,
        ignore_label=-1,
        use_ignore=True,
        multi_output=True,
        normalization="valid",
        name="class_prob",
    )
    distance = mx.sym.smooth_l1(box_mask * (box - box_wanted), scalar=1.0)
    seen = mx.sym.contrib.MultiBoxDetection(class_loss, box, anchor, name="detection")
    heads = [
        class_loss,
        mx.sym.MakeLoss(distance, normalization="valid", name="box_loss"),
        mx.sym.BlockGrad(class_wanted, name="class_label"),
        mx.sym.MakeLoss(seen, grad_scale=0, name="objects"),
    ]
    shapes = {"data": (batch, 3, image, image), "label": (batch, objects, 5)}
    return mx.sym.Group(heads), shapes


class ProposalTarget(mx.operator.CustomOp):
    """What each region is to become, in NumPy: its class, its box, and whether that counts."""

    def __init__(self, image: int) -> None:
        super().__init__()
        self.image = image

    def forward(
        self,
        is_train: bool,
        req: List[str],
        in_data: List[Any],
        out_data: List[Any],
        aux: List[Any],
    ) -> None:
        rois, objects = (array.asnumpy() for array in in_data)
        classes = np.zeros(len(rois), np.float32)  # 0 is the background
        boxes, weights = np.zeros((2, len(rois), 4), np.float32)
        for k, (number, *corners) in enumerate(rois):
            there = objects[int(number)]
            there = there[there[:, 0] >= 0]
            if not len(there):
                continue
            wanted, region = there[:, 1:] * self.image, np.array(corners)
            shared = np.minimum(wanted[:, 2:], region[2:]) - np.maximum(wanted[:, :2], region[:2])
            overlap = np.prod(np.maximum(shared, 0), axis=1)
            area = np.prod(wanted[:, 2:] - wanted[:, :2], axis=1)
            share = overlap / np.maximum(area + np.prod(region[2:] - region[:2]) - overlap, 1)
            best = int(np.argmax(share))
            if share[best] >= 0.3:
                classes[k], weights[k] = 1 + there[best, 0], 1
                boxes[k] = (wanted[best] - region) / self.image
        for k, values in enumerate((classes, boxes, weights)):
            self.assign(out_data[k], req[k], mx.nd.array(values))

    def backward(
        self,
        req: List[str],
        out_grad: List[Any],
        in_data: List[Any],
        out_data: List[Any],
        in_grad: List[Any],
        aux: List[Any],
    ) -> None:
        for k, gradient in enumerate(in_grad):
            self.assign(gradient, req[k], 0)


@mx.operator.register("proposal_target")
class ProposalTargetProp(mx.operator.CustomOpProp):
    """Regions and objects go in; a class, a box and its weight of each region come out."""

    def __init__(self, image: str) -> None:
        super().__init__(need_top_grad=False)
        self.image = int(image)

    def list_arguments(self) -> List[str]:
        return ["rois", "label"]

    def list_outputs(self) -> List[str]:
        return ["class", "box", "weight"]

    def infer_shape(self, in_shape: List[List[int]]) -> Tuple[Any, Any, Any]:
        regions = in_shape[0][0]
        return in_shape, [[regions], [regions, 4], [regions, 4]], []

    def create_operator(
        self, ctx: Any, in_shapes: Sequence[Shape], in_dtypes: Sequence[Any]
    ) -> ProposalTarget:
        return ProposalTarget(self.image)


@freshly_named
def rcnn(
    batch: int = 1,
    image: int = 512,
    classes: int = 20,
    objects: int = 8,
    filters: int = 32,
    blocks: int = 4,
    regions: int = 128,
    hidden: int = 512,
) -> Network:
    """Small Faster R-CNN (Ren et al. 2015, arXiv 1506.01497): proposes regions, classifies them.

    Heads: whether there is something in each anchor, the loss of its box, the class of each region,
    the loss of its box, and the classes wanted (without gradient). The label is as `detection` has
    it. With a batch of one the regions come from `Proposal`, otherwise from `MultiProposal`.
    """
    x = mx.sym.Variable("data")
    for block in range(blocks):
        x = _conv_bn_relu(_conv_bn_relu(x, filters << block, stride=2), filters << block)
    stride, side = 2**blocks, image // 2**blocks
    scales, ratios = (2, 4, 8), (0.5, 1, 2)
    anchors = len(scales) * len(ratios)

    y = mx.sym.Convolution(x, num_filter=4 * filters, kernel=(3, 3), pad=(1, 1))
    y = mx.sym.Activation(y, act_type="relu")
    score = mx.sym.Convolution(y, num_filter=2 * anchors, kernel=(1, 1))
    score = mx.sym.reshape(score, (0, 2, -1, 0))
    box = mx.sym.Convolution(y, num_filter=4 * anchors, kernel=(1, 1))
    anchor_loss = mx.sym.SoftmaxOutput(
        score, multi_output=True, use_ignore=True, normalization="valid", name="anchor"
    )
    distance = mx.sym.smooth_l1(box - mx.sym.Variable("anchor_box"), scalar=3.0)
    anchor_box_loss = mx.sym.MakeLoss(distance, normalization="batch", name="anchor_box_loss")

    propose = mx.sym.contrib.Proposal if batch == 1 else mx.sym.contrib.MultiProposal
    probability = mx.sym.reshape(mx.sym.softmax(score, axis=1), (0, 2 * anchors, -1, side))
    size = mx.sym.Concat(mx.sym.full((batch, 2), image), mx.sym.ones((batch, 1)), dim=1)
    rois = propose(
        probability,
        box,
        size,
        feature_stride=stride,
        scales=scales,
        ratios=ratios,
        rpn_pre_nms_top_n=8 * regions,
        rpn_post_nms_top_n=regions,
        rpn_min_size=stride,
        name="proposal",
    )
    target = mx.sym.Custom(
        rois, mx.sym.Variable("label"), image=image, op_type="proposal_target", name="target"
    )
    class_wanted, box_wanted, box_weight = target
    y = mx.sym.ROIPooling(x, rois, pooled_size=(4, 4), spatial_scale=1 / stride, name="pooled")
    y = mx.sym.FullyConnected(mx.sym.Flatten(y), num_hidden=hidden)
    y = mx.sym.Activation(y, act_type="relu")
    region_loss = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(y, num_hidden=classes + 1),
        class_wanted,
        normalization="batch",
        name="region",
    )
    distance = box_weight * (mx.sym.FullyConnected(y, num_hidden=4) - box_wanted)
    distance = mx.sym.smooth_l1(distance, scalar=1.0)
    heads = [
        anchor_loss,
        anchor_box_loss,
        region_loss,
        mx.sym.MakeLoss(distance, grad_scale=1 / regions, name="region_box_loss"),
        mx.sym.BlockGrad(class_wanted, name="class_label"),
    ]
    shapes = {
        "data": (batch, 3, image, image),
        "label": (batch, objects, 5),
        "anchor_label": (batch, anchors * side, side),
        "anchor_box": (batch, 4 * anchors, side, side),
    }
    return mx.sym.Group(heads), shapes
