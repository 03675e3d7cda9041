"""Networks whose operators wait for other devices: SyncBatchNorm over two devices of the CPU."""

from __future__ import annotations

import faulthandler
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.execution import executor

from planned import elsewhere

SHAPES: dict[str, Any] = {"data": (4, 3, 8, 8), "softmax_label": (4,)}
HALVES: dict[str, Any] = {name: (2, *shape[1:]) for name, shape in SHAPES.items()}
CPUS = [mx.cpu(0), mx.cpu(1)]
#: On a CPU all schedules run in the threads of one device, and may get one temporary space.
APART = {"MXNET_CPU_WORKER_NTHREADS": "2", "MXNET_CPU_TEMP_COPY": "1009"}


def net(depth: int = 5) -> Any:
    x = mx.sym.var("data")
    for k in range(depth):
        x = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{k}")
        kind: Any = mx.sym.contrib.SyncBatchNorm if k % 2 else mx.sym.BatchNorm
        options = {"ndev": 2, "key": f"key{k}"} if k % 2 else {}
        x = kind(x, fix_gamma=False, name=f"norm{k}", **options)
        x = mx.sym.Activation(x, act_type="relu", name=f"relu{k}")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=5), name="softmax")


def trained(symbol: Any) -> list[np.ndarray]:
    """Train by Module on two devices; return outputs, gradients and statistics of all steps."""
    mx.random.seed(1)
    np.random.seed(1)
    module = mx.mod.Module(symbol, context=CPUS)
    module.bind([("data", SHAPES["data"])], [("softmax_label", SHAPES["softmax_label"])])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    left: list[np.ndarray] = []
    for step in range(3):
        random = np.random.RandomState(step)
        data = mx.nd.array(random.normal(size=SHAPES["data"]))
        module.forward_backward(mx.io.DataBatch([data], [mx.nd.array([0, 1, 2, 3])]))
        mx.nd.waitall()
        for each in module._exec_group.execs:
            arrays = [*each.outputs, *each.grad_arrays, *each.aux_arrays]
            left += [array.asnumpy() for array in arrays if array is not None]
        module.update()
    return left


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) > 0 and all(map(np.array_equal, one, other))


def train_by_marks() -> None:
    """Train without a plan and by marks, as an import of memonger leaves MXNet's settings."""
    symbol = net()
    plan = memonger.plan(symbol, HALVES, ctx=mx.cpu(), how="marks", patience=0.02)
    assert plan.schedule is None and plan.recomputed
    faulthandler.dump_traceback_later(60, exit=True)
    assert same(trained(symbol), trained(plan.symbol))


def train_by_a_schedule() -> None:
    """Train without a plan and by the schedule of GPUs, with a thread for each device."""
    executor.why_refused = lambda *_: ""
    symbol = net()
    plan = memonger.plan(symbol, HALVES, ctx="gpu", how="schedule", patience=0.02)
    assert {"norm1", "norm3"} <= set(plan.recomputed)
    faulthandler.dump_traceback_later(60, exit=True)
    assert same(trained(symbol), trained(plan.symbol))


@pytest.mark.parametrize(
    ("train", "environment"),
    [
        (train_by_marks, {}),
        pytest.param(train_by_a_schedule, APART, marks=pytest.mark.slow),
    ],
)
def test_devices_that_wait_for_each_other_train_to_the_same_bits(
    train: Any, environment: dict[str, str]
) -> None:
    """In a process of its own, which ends if the devices wait for ever."""
    elsewhere(train, **environment)


def test_a_plan_that_waits_for_devices_is_checked_on_one() -> None:
    symbol = net()
    for how in ("marks", "schedule"):
        plan = memonger.plan(symbol, HALVES, ctx="gpu", how=how, patience=0.02)
        assert plan.recomputed
        assert memonger.check(symbol, plan.symbol, HALVES, 2)


def test_a_schedule_that_waits_for_devices_is_refused_on_a_cpu() -> None:
    """Its operators would wait in one thread; other plans are by marks."""
    words = r"'norm1' \(_contrib_SyncBatchNorm\) waits for other devices.*how='marks'"
    symbol = net()
    for ctx in (mx.cpu(), "any"):
        with pytest.raises(memonger.MemongerError, match=words):
            memonger.plan(symbol, HALVES, ctx=ctx, how="schedule")
        assert memonger.plan(symbol, HALVES, ctx=ctx, patience=0.02).schedule is None
    plan = memonger.plan(symbol, HALVES, ctx="gpu", how="schedule", patience=0.02)
    with pytest.raises(memonger.MemongerError, match=words):
        trained(plan.symbol)
