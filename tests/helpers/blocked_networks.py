"""Networks that mix convolutions, whose outputs MKLDNN lays out in blocks, with operators that know
no blocks: drawn ones (`drawn`), and small ones of the kinds that people train (`KINDS`)."""

from __future__ import annotations

from typing import Any, Callable, Dict, Sequence, Tuple

import memonger  # noqa: F401
import mxnet as mx
import numpy as np

S = mx.sym
Network = Tuple[Any, Dict[str, Tuple[int, ...]]]
FAMILIES = (
    "gated gated_fully shifted split divided shuffled padded hard_swish product instance_norm up"
).split()
#: Those for images of any size, in which MXNet trains and scores in turns.
ANY_SIZE = (
    "gated gated_fully shifted hard_swish product plain joined pooled dropped transposed grouped"
).split()


def squeezed(x: Any) -> Any:
    """The average of each channel."""
    return S.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg")


def classified(x: Any) -> Any:
    x = S.FullyConnected(S.Flatten(squeezed(x)), num_hidden=10, name="fc")
    return S.SoftmaxOutput(x, name="softmax")


class _Drawn:
    """Draws parts of a residual network."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def one_in(self, n: int) -> bool:
        return self.random.randint(n) == 0

    def conv(self, x: Any, filters: int, kernel: int = 1, **more: Any) -> Any:
        size = {"kernel": (kernel, kernel), "pad": (kernel // 2, kernel // 2)}
        return S.Convolution(x, num_filter=filters, no_bias=self.one_in(2), **size, **more)

    def activation(self, x: Any) -> Any:
        kind = self.random.randint(5)
        if kind == 0:
            return S.LeakyReLU(x, act_type="leaky", slope=0.1)
        return S.clip(x, 0, 6) if kind == 1 else S.Activation(x, "tanh" if kind == 2 else "relu")

    def norm(self, x: Any) -> Any:
        return x if self.one_in(4) else S.BatchNorm(x, fix_gamma=False)

    # Families of blocks: each takes an image and its channels, an even number.

    def gated(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters)
        gate = self.conv(squeezed(x), filters)
        gate = S.Activation(gate, "sigmoid") if self.one_in(2) else S.clip(gate + 0.5, 0, 1)
        return S.broadcast_mul(x, gate)

    def gated_fully(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters)
        return S.broadcast_mul(x, _fully_gate(S.Flatten(squeezed(x)), filters))

    def shifted(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters, 3)
        return S.broadcast_add(x, self.conv(squeezed(x), filters))

    def split(self, x: Any, filters: int) -> Any:
        half = S.SliceChannel(self.conv(x, filters), num_outputs=2, axis=1)
        return S.Concat(self.activation(self.conv(half[0], filters // 2, 3)), half[1], dim=1)

    def divided(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters, 3)
        return S.broadcast_div(x, S.sqrt(S.sum(S.square(x), axis=1, keepdims=True) + 1e-3))

    def shuffled(self, x: Any, filters: int) -> Any:
        x = S.reshape(self.conv(x, filters), shape=(0, -4, 2, -1, -2))
        x = S.swapaxes(x, 1, 2) if self.one_in(2) else S.transpose(x, axes=(0, 2, 1, 3, 4))
        return self.conv(self.activation(S.reshape(x, shape=(0, -3, -2))), filters, 3)

    def padded(self, x: Any, filters: int) -> Any:
        border = (0, 0, 0, 0, 1, 1, 1, 1)
        x = S.Pad(self.conv(x, filters, 3), mode="constant", pad_width=border, constant_value=0)
        return S.slice_axis(S.slice_axis(x, axis=2, begin=1, end=-1), axis=3, begin=1, end=-1)

    def hard_swish(self, x: Any, filters: int) -> Any:
        x = self.norm(self.conv(x, filters, 3))
        return x * S.clip(x + 3, 0, 6) / 6

    def product(self, x: Any, filters: int) -> Any:
        return S.tanh(self.conv(x, filters, 3)) * S.sigmoid(self.conv(x, filters))

    def instance_norm(self, x: Any, filters: int) -> Any:
        return S.InstanceNorm(self.conv(x, filters, 3))

    def up(self, x: Any, filters: int) -> Any:
        x = S.Pooling(self.conv(x, filters, 3), kernel=(2, 2), stride=(2, 2), pool_type="max")
        return S.UpSampling(self.activation(x), scale=2, sample_type="nearest")

    def plain(self, x: Any, filters: int) -> Any:
        return self.conv(x, filters, 3)

    def joined(self, x: Any, filters: int) -> Any:
        y = self.activation(self.norm(self.conv(x, filters)))
        return self.conv(S.Concat(x, y, dim=1), filters)

    def pooled(self, x: Any, filters: int) -> Any:
        kind = "max" if self.one_in(2) else "avg"
        return S.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type=kind)

    def dropped(self, x: Any, filters: int) -> Any:
        return S.Dropout(self.activation(x), p=0.2)

    def transposed(self, x: Any, filters: int) -> Any:
        return S.Deconvolution(self.activation(x), num_filter=filters, kernel=(3, 3), pad=(1, 1))

    def grouped(self, x: Any, filters: int) -> Any:
        return self.conv(x, filters, 3, num_group=2)

    def network(self, names: Sequence[str]) -> Network:
        random = self.random
        families: list[Callable[[Any, int], Any]] = [getattr(self, name) for name in names]
        filters = int(random.choice([6, 8, 16, 24, 32, 48, 64]))
        batch, side = int(random.choice([2, 3, 4])), int(random.choice([6, 8, 12]))
        blocks = random.randint(2, 6)
        chosen = [families[k] for k in random.choice(len(families), random.randint(1, 3), False)]
        x = self.conv(S.var("data"), filters, 3)
        for _ in range(blocks):
            y = self.norm(x)
            if self.one_in(2):
                y = self.activation(y)
            y = chosen[random.randint(len(chosen))](y, filters)
            if self.one_in(3):
                y = self.activation(self.norm(y))
            joined = random.randint(8)
            x = y if joined == 0 else S.broadcast_add(x, y) if joined == 1 else x + y
        return classified(self.activation(self.norm(x))), {"data": (batch, 3, side, side)}


def drawn(seed: int, families: Sequence[str] = FAMILIES) -> Network:
    """A residual network of one or two of these families of blocks."""
    with mx.name.NameManager():
        return _Drawn(seed).network(families)


# ---------------------------------------------------------------- kinds that people train


def _conv(x: Any, filters: int, kernel: int = 1, stride: int = 1, **more: Any) -> Any:
    pad = kernel // 2 * max(more.get("dilate", (1, 1)))
    size = {"kernel": (kernel, kernel), "stride": (stride, stride), "pad": (pad, pad)}
    return S.Convolution(x, num_filter=filters, no_bias=True, **size, **more)


def _conv_bn(x: Any, filters: int, kernel: int = 1, stride: int = 1, **more: Any) -> Any:
    return S.BatchNorm(_conv(x, filters, kernel, stride, **more), fix_gamma=False)


def _relu(x: Any) -> Any:
    return S.Activation(x, "relu")


def _hard_sigmoid(x: Any) -> Any:
    return S.clip(x + 3, 0, 6) / 6


def _fully_gate(x: Any, channels: int) -> Any:
    gate = S.Activation(S.FullyConnected(x, num_hidden=channels), "sigmoid")
    return S.reshape(gate, shape=(-1, channels, 1, 1))


def _gate(x: Any, channels: int, inner: int, last: Callable[[Any], Any]) -> Any:
    y = _relu(S.Convolution(squeezed(x), num_filter=inner, kernel=(1, 1)))
    return S.broadcast_mul(x, last(S.Convolution(y, num_filter=channels, kernel=(1, 1))))


def se_resnet(width: int = 16, side: int = 32, blocks: tuple[int, ...] = (2, 2)) -> Network:
    """Pre-activated bottlenecks with squeeze and excitation (Hu et al. 2018)."""
    x = _conv(S.var("data"), width, 3)
    for stage, count in enumerate(blocks):
        filters = 4 * width << stage
        for block in range(count):
            y = shortcut = _relu(S.BatchNorm(x, fix_gamma=False))
            stride = 2 if stage and not block else 1
            y = _relu(_conv_bn(y, filters // 4))
            y = _conv(_relu(_conv_bn(y, filters // 4, 3, stride)), filters)
            gate = S.FullyConnected(S.Flatten(squeezed(y)), num_hidden=max(1, filters // 16))
            y = S.broadcast_mul(y, _fully_gate(_relu(gate), filters))
            x = y + (_conv(shortcut, filters, 1, stride) if not block else x)
    return classified(_relu(S.BatchNorm(x, fix_gamma=False))), {"data": (2, 3, side, side)}


def mobilenet_v3(width: int = 16, side: int = 32, blocks: int = 4) -> Network:
    """Inverted bottlenecks with hard swish and squeeze and excitation (Howard et al. 2019)."""

    def swish(x: Any) -> Any:
        return x * _hard_sigmoid(x)

    x = swish(_conv_bn(S.var("data"), width, 3, 2))
    for block in range(blocks):
        inner, stride = 4 * width, 2 if block == 2 else 1
        y = swish(_conv_bn(x, inner))
        y = _conv_bn(y, inner, 3, stride, num_group=inner)
        y = swish(_gate(y, inner, width, _hard_sigmoid))
        y = _conv_bn(y, width)
        x = x + y if stride == 1 else y
    return classified(swish(_conv_bn(x, 4 * width))), {"data": (2, 3, side, side)}


def shufflenet(width: int = 48, side: int = 32, blocks: int = 4) -> Network:
    """Grouped convolutions and shuffled channels (Zhang et al. 2018)."""
    x, groups = _relu(_conv_bn(S.var("data"), width, 3, 2)), 3
    for _ in range(blocks):
        y = _relu(_conv_bn(x, width // 2, num_group=groups))
        y = S.reshape(S.swapaxes(S.reshape(y, (0, -4, groups, -1, -2)), 1, 2), (0, -3, -2))
        y = _conv_bn(y, width // 2, 3, num_group=width // 2)
        x = _relu(x + _conv_bn(y, width, num_group=groups))
    return classified(x), {"data": (2, 3, side, side)}


def shufflenet_v2(width: int = 48, side: int = 32, blocks: int = 4) -> Network:
    """Split, shuffled and concatenated channels (Ma et al. 2018)."""
    x, half = _relu(_conv_bn(S.var("data"), width, 3, 2)), width // 2
    for _ in range(blocks):
        parts = S.SliceChannel(x, num_outputs=2, axis=1)
        y = _relu(_conv_bn(parts[1], half))
        y = _relu(_conv_bn(_conv_bn(y, half, 3, num_group=half), half))
        x = S.reshape(S.Concat(parts[0], y, dim=1), (0, -4, 2, -1, -2))
        x = S.reshape(S.swapaxes(x, 1, 2), (0, -3, -2))
    return classified(x), {"data": (2, 3, side, side)}


def efficientnet(width: int = 16, side: int = 32, blocks: int = 4) -> Network:
    """Inverted bottlenecks with swish and squeeze and excitation (Tan and Le 2019)."""

    def swish(x: Any) -> Any:
        return x * S.sigmoid(x)

    x = swish(_conv_bn(S.var("data"), width, 3, 2))
    for _ in range(blocks):
        y = swish(_conv_bn(x, 6 * width))
        y = swish(_conv_bn(y, 6 * width, 5, num_group=6 * width))
        x = x + _conv_bn(_gate(y, 6 * width, width // 4, S.sigmoid), width)
    return classified(swish(_conv_bn(x, 4 * width))), {"data": (2, 3, side, side)}


def hourglass(width: int = 32, side: int = 32, depth: int = 3) -> Network:
    """Down by pooling, up by repeating, and joined by sums (Newell et al. 2016)."""

    def residual(x: Any) -> Any:
        y = _conv(_relu(S.BatchNorm(x, fix_gamma=False)), width // 2)
        y = _conv(_relu(S.BatchNorm(y, fix_gamma=False)), width // 2, 3)
        return x + _conv(_relu(S.BatchNorm(y, fix_gamma=False)), width)

    def level(x: Any, depth: int) -> Any:
        low = residual(S.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max"))
        low = level(low, depth - 1) if depth > 1 else residual(low)
        return residual(x) + S.UpSampling(residual(low), scale=2, sample_type="nearest")

    x = level(residual(_conv(S.var("data"), width, 3)), depth)
    heat = S.Convolution(_relu(_conv_bn(x, width)), num_filter=16, kernel=(1, 1))
    out = S.LinearRegressionOutput(heat, S.var("heat_label"), name="heat")
    return out, {"data": (2, 3, side, side), "heat_label": (2, 16, side, side)}


def deeplab(width: int = 16, side: int = 32, classes: int = 5) -> Network:
    """Dilated convolutions of several rates, concatenated and resized (Chen et al. 2018)."""
    x = low = _relu(_conv_bn(S.var("data"), width, 3, 2))
    for dilate in (1, 2, 4):
        y = _relu(_conv_bn(x, width))
        y = _relu(_conv_bn(y, width, 3, dilate=(dilate, dilate)))
        x = _relu(x + _conv_bn(y, width))
    rates = [_relu(_conv_bn(x, width, 3, dilate=(d, d))) for d in (1, 2, 4)]
    image = S.contrib.BilinearResize2D(_conv(squeezed(x), width), height=side // 2, width=side // 2)
    x = _relu(_conv_bn(S.Concat(*rates, image, dim=1), width))
    x = _relu(_conv_bn(S.Concat(x, _conv_bn(low, 8), dim=1), width, 3))
    x = S.contrib.BilinearResize2D(
        S.Convolution(x, num_filter=classes, kernel=(1, 1)), height=side, width=side
    )
    out = S.SoftmaxOutput(x, multi_output=True, name="softmax")
    return out, {"data": (2, 3, side, side), "softmax_label": (2, side, side)}


KINDS: dict[str, Callable[..., Network]] = {
    "SE-ResNet": se_resnet,
    "MobileNetV3": mobilenet_v3,
    "ShuffleNet": shufflenet,
    "ShuffleNetV2": shufflenet_v2,
    "EfficientNet": efficientnet,
    "hourglass": hourglass,
    "DeepLab": deeplab,
}
