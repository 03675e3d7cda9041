"""Operators with buffers of their own: a GPU is asked for what is told.

Hidden outputs are in the pool; temporary space is the device's.
"""

from typing import Any, Callable, Dict, Tuple

import memonger
import mxnet as mx
import pytest

from planned import as_module

from .dry_run import GpuDryRun
from .test_held import check_told

pytestmark = pytest.mark.gpu_dry_run

Shapes = Dict[str, Tuple[int, ...]]
IMAGES = (16, 16, 64, 64)


def features(x: Any, name: str, blocks: int = 3) -> Any:
    """Convolutions, whose results can be recomputed."""
    for k in range(blocks):
        x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=16, name="%s%d" % (name, k))
        x = mx.sym.Activation(x, act_type="tanh")
    return x


def ctc() -> Tuple[Any, Shapes]:
    """Of so many characters its probabilities are as large as its data."""
    x = mx.sym.Variable("data")
    for k, units in enumerate((64, 64, 512)):
        x = mx.sym.FullyConnected(x, num_hidden=units, flatten=False, name="fc%d" % k)
        x = mx.sym.Activation(x, act_type="tanh")
    # Labels are zero in a dry run, which pads where the blank is the first.
    loss = mx.sym.CTCLoss(x, mx.sym.Variable("label"), blank_label="last", name="ctc")
    return mx.sym.MakeLoss(loss), {"data": (100, 32, 64), "label": (32, 50)}


def norm() -> Tuple[Any, Shapes]:
    x = mx.sym.Variable("data")
    for k in range(3):
        x = features(x, "conv%d_" % k, 1)
        x = mx.sym.GroupNorm(
            x, mx.sym.Variable("gamma%d" % k), mx.sym.Variable("beta%d" % k), num_groups=4
        )
    return mx.sym.MakeLoss(x), {"data": IMAGES}


def cross_entropy() -> Tuple[Any, Shapes]:
    x = mx.sym.Variable("data")
    for k, units in enumerate((64, 64, 1024)):
        x = mx.sym.FullyConnected(x, num_hidden=units, name="fc%d" % k)
        x = mx.sym.Activation(x, act_type="tanh")
    loss = mx.sym.softmax_cross_entropy(x, mx.sym.Variable("label"))
    return mx.sym.MakeLoss(loss), {"data": (4096, 64), "label": (4096,)}


def samplers() -> Tuple[Any, Shapes]:
    """Correlation, BilinearSampler, GridGenerator, SpatialTransformer, and moments of it."""
    x = features(mx.sym.Variable("data"), "conv")
    turned = mx.sym.FullyConnected(x, num_hidden=6, name="affine")
    size = IMAGES[2:]
    grid = mx.sym.GridGenerator(turned, transform_type="affine", target_shape=size)
    y = mx.sym.BilinearSampler(x, grid)
    z = mx.sym.SpatialTransformer(
        features(y, "more", 1), turned, size, "affine", "bilinear", name="transformer"
    )
    found = mx.sym.Correlation(x, z, kernel_size=1, max_displacement=4, stride1=1, stride2=2)
    mean, variance = mx.sym.moments(found, axes=(2, 3))
    return mx.sym.MakeLoss(mean + variance), {"data": IMAGES}


NETWORKS: Dict[str, Callable[[], Tuple[Any, Shapes]]] = {
    "CTCLoss": ctc,
    "GroupNorm": norm,
    "softmax_cross_entropy": cross_entropy,
    "samplers, moments": samplers,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_take_what_is_told(gpu_dry_run: GpuDryRun, name: str) -> None:
    symbol, shapes = NETWORKS[name]()
    plan = memonger.plan(symbol, shapes, grad_req=as_module(symbol, shapes), patience=0.02)
    assert plan.held_bytes == 0
    check_told(gpu_dry_run, symbol, shapes, {"marks": plan})
