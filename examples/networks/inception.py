"""Networks of inception modules: convolutions of several sizes side by side."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from .common import Network, classify, freshly_named, images
import mxnet as mx


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
    return classify(x, classes), images(batch, image)


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
    return mx.sym.SoftmaxOutput(x, name="softmax"), images(batch, image)
