"""Planned Gluon blocks on the GPU build: they step, in less memory, with fusion on and off."""

from __future__ import annotations

import re
from typing import Any

import memonger
import mxnet as mx
import pytest
from mxnet import autograd, gluon

from planned import HOWS

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

FUSED = re.compile("kernel FusedKernel.*_backward_")
SHAPE = (32, 3, 128, 128)


def trained(dry: DryRun, options: dict[str, Any] | None) -> tuple[int, int]:
    """Return the bytes that three steps take, and those that the plan saves of the pool."""
    net = gluon.model_zoo.vision.resnet18_v1(classes=10, prefix="net_")
    net.initialize(ctx=mx.gpu())
    net.hybridize()
    x, y = mx.nd.ones(SHAPE, mx.gpu()), mx.nd.zeros(SHAPE[:1], mx.gpu())
    net(x[:1])
    if options is not None:
        memonger.gluon.plan(net, patience=0.02, **options)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    mx.nd.waitall()
    before = dry.used_bytes()
    dry.reset_peak()
    for _ in range(3):
        with autograd.record():
            loss = loss_fn(net(x), y)
        loss.backward()
        trainer.step(SHAPE[0])
    mx.nd.waitall()
    peak, saved = dry.peak_bytes() - before, 0
    if options is not None:
        plan = memonger.gluon.plan_of(net)
        assert plan.recomputed
        saved = plan.unplanned_bytes - plan.pool_bytes
    return peak, saved


@pytest.mark.parametrize(("how", "fusion"), [("marks", "1"), ("schedule", "0")])
def test_planned_blocks_step_in_less_memory(gpu_dry_run: GpuDryRun, how: str, fusion: str) -> None:
    env = {"MXNET_USE_FUSION": fusion}
    plain, planned = (gpu_dry_run.run(trained, o, env=env) for o in (None, HOWS[how]))
    (peak, _), (planned_peak, saved) = plain.value, planned.value
    assert planned_peak < peak - 0.8 * saved  # a schedule's pool has the gradients too
    gradients = [sum("ConvolutionBackward" in c for c in run.trace) for run in (plain, planned)]
    # What is invoked computes the gradient of the first convolution's data, once a step. Recorded
    # it would not, but autograd allocates it all the same, beside the arena.
    assert gradients[0] > 0 and gradients[1] == gradients[0] + (3 if how == "schedule" else 0)
    # Kernels that compute gradients, to tell them from those of inference. Schedules fuse nothing.
    fused = [any(FUSED.match(c) for c in run.trace) for run in (plain, planned)]
    assert fused == [fusion == "1", fusion == "1" and how == "marks"]
