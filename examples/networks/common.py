"""What the networks share."""

import functools
from typing import Any, Callable, Dict, Tuple, TypeVar, cast

import memonger  # noqa: F401  makes MXNet importable on newer NumPy
import mxnet as mx

Shape = Tuple[int, ...]
Network = Tuple[Any, Dict[str, Shape]]
Builder = TypeVar("Builder", bound=Callable[..., Network])


def freshly_named(builder: Builder) -> Builder:
    """Let a builder count its nodes from zero, whatever was built before."""

    @functools.wraps(builder)
    def build(*args: Any, **kwargs: Any) -> Network:
        with mx.name.NameManager():
            return builder(*args, **kwargs)

    return cast(Builder, build)


def images(batch: int, image: int, channels: int = 3) -> Dict[str, Shape]:
    return {"data": (batch, channels, image, image), "softmax_label": (batch,)}


def classify(x: Any, classes: int) -> Any:
    """Flatten, fully connect to `classes` scores, softmax with label ``softmax_label``."""
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def conv_bn_relu(x: Any, filters: int, stride: int = 1) -> Any:
    x = mx.sym.Convolution(
        x, num_filter=filters, kernel=(3, 3), pad=(1, 1), stride=(stride, stride), no_bias=True
    )
    return mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False), act_type="relu")


def dropout_of(x: Any, p: float) -> Any:
    return mx.sym.Dropout(x, p=p) if p > 0 else x
