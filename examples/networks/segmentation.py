"""A network that classifies each pixel."""

from typing import Any

from .common import Network, freshly_named
import mxnet as mx


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
