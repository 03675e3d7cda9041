"""Convolutional networks that classify images."""

from typing import Any, Sequence

from .common import Network, classify, conv_bn_relu, freshly_named, images
import mxnet as mx


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
    return mx.sym.SoftmaxOutput(x, name="softmax"), images(batch, image)


@freshly_named
def model_zoo(
    name: str = "resnet50_v1", batch: int = 32, image: int = 224, classes: int = 1000
) -> Network:
    """Make a symbol of a network of Gluon's model zoo, with a SoftmaxOutput named ``softmax``.

    ``inceptionv3`` is made for images of 299, and DenseNets need at least 221.
    """
    net = mx.gluon.model_zoo.vision.get_model(name, classes=classes, prefix="net_")
    return mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax"), images(batch, image)


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
    return mx.sym.SoftmaxOutput(x, name="softmax"), images(batch, image)


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
    return mx.sym.SoftmaxOutput(x, name="softmax"), images(batch, image)


@freshly_named
def two_heads(
    blocks: int = 8, filters: int = 64, batch: int = 32, image: int = 32, classes: int = 10
) -> Network:
    """Residual trunk with two losses in a Group: a class (``policy``) and a number (``value``)."""
    x = conv_bn_relu(mx.sym.Variable("data"), filters)
    for _ in range(blocks):
        x = x + conv_bn_relu(conv_bn_relu(x, filters), filters)
    policy = mx.sym.FullyConnected(conv_bn_relu(x, 2), num_hidden=classes)
    value = mx.sym.FullyConnected(conv_bn_relu(x, 1), num_hidden=1)
    heads = [
        mx.sym.SoftmaxOutput(policy, name="policy"),
        mx.sym.LinearRegressionOutput(mx.sym.tanh(value), name="value"),
    ]
    data = images(batch, image)["data"]
    return mx.sym.Group(heads), {"data": data, "policy_label": (batch,), "value_label": (batch, 1)}


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
        x = conv_bn_relu(x, filters, stride=2)
    return classify(x, classes), images(batch, image)
