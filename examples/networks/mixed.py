"""Networks that people train, which mix convolutions with operators that know no blocks.

MKLDNN lays out what a convolution makes in blocks of channels; gates, shuffles and slices compute
in rows. By default the networks are tiny.
"""

from __future__ import annotations

from typing import Any, Callable

from .common import Network
import mxnet as mx

S = mx.sym


def squeezed(x: Any) -> Any:
    """The average of each channel."""
    return S.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg")


def classified(x: Any) -> Any:
    x = S.FullyConnected(S.Flatten(squeezed(x)), num_hidden=10, name="fc")
    return S.SoftmaxOutput(x, name="softmax")


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


def fully_gate(x: Any, channels: int) -> Any:
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
            y = S.broadcast_mul(y, fully_gate(_relu(gate), filters))
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
