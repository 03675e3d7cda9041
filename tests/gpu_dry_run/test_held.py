"""What operators hold beside the pool, on a GPU: what is told is what is asked for.

``test_held.py`` of the tests has the same on the CPU.
"""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import pytest

from more_networks import Recurrent
from planned import HOWS, as_module, plan_of

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

MB = 2**20


def steps(dry: DryRun) -> Any:
    """Bind a network by each way, take two steps; emits the most that the GPU held."""
    import gc
    import os

    import mxnet as mx
    import numpy as np
    from memonger.schedules.schedule import Schedule
    from memonger.schedules.execution.symbol import scheduled

    ways, shapes, requests = dry.args
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    os.environ["MXNET_USE_FUSION"] = "0"
    for name, text, events in ways:
        symbol = mx.sym.load_json(text)
        if events is not None:
            symbol = scheduled(symbol, Schedule(np.array(events, dtype=np.int32)))
        dry.reset_peak()
        executor = symbol.simple_bind(mx.gpu(0), grad_req=requests, **shapes)
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()
        dry.emit([name, dry.peak_bytes()])
        del executor
        gc.collect()
        mx.nd.waitall()
        mx.gpu(0).empty_cache()


def taken(dry_run: GpuDryRun, symbol: Any, shapes: Any, plans: dict[str, Any]) -> dict[str, int]:
    """What a GPU held at most without a plan and with each."""
    ways: list[tuple[str, str, Any]] = [("no plan", symbol.tojson(), None)]
    for how, plan in plans.items():
        if plan.schedule is None:
            ways.append((how, plan.symbol.tojson(remove_amp_cast=False), None))
        else:
            ways.append((how, symbol.tojson(), plan.schedule.events.tolist()))
    args = [ways, shapes, as_module(symbol, shapes)]
    result = dry_run.run(steps, args=args, memory_mb=2**16)
    assert result.ok, result.message
    return dict(result.emitted[:-1])


def check_told(dry_run: GpuDryRun, symbol: Any, shapes: Any, plans: dict[str, Any]) -> None:
    requests = as_module(symbol, shapes)
    unplanned = memonger.plan(symbol, shapes, grad_req=requests, budget=1.0)
    found = taken(dry_run, symbol, shapes, plans)
    for how, plan in {"no plan": unplanned, **plans}.items():
        told, seen = plan.device_bytes, found[how]
        print(f"\n{how:9} told {told / MB:.1f} MB, seen {seen / MB:.1f} MB", end="")
        assert abs(seen - told) < 0.03 * told, (how, told / MB, seen / MB)
        assert seen <= found["no plan"]


NETWORKS: dict[str, Recurrent] = {
    "residual LSTM with Dropout": Recurrent(
        "lstm", residual=True, dropout=True, inputs=512, units=512, steps=200, blocks=8
    ),
    "stacked LSTM": Recurrent("lstm", stacked=3, steps=200, units=256),
    "bidirectional GRU": Recurrent("gru", True, stacked=2, residual=True, steps=200, units=256),
    "tanh with Dropout": Recurrent("rnn_tanh", True, dropout=True, steps=400, units=256),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_of_fused_rnn_take_what_is_told(gpu_dry_run: GpuDryRun, name: str) -> None:
    symbol, shapes = NETWORKS[name].build()
    check_told(gpu_dry_run, symbol, shapes, {how: plan_of(NETWORKS[name], how) for how in HOWS})


def detector() -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The head of an SSD: of 16384 anchors and 20 boxes an image MultiBoxTarget sorts all pairs."""
    batch, classes, size = 4, 5, 64
    x = mx.sym.Variable("data")
    for k in range(3):
        x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=64, name="conv%d" % k)
        x = mx.sym.Activation(x, act_type="relu")
    anchors = mx.sym.contrib.MultiBoxPrior(x, sizes=(0.1, 0.2), ratios=(1, 2, 0.5))
    scores = mx.sym.Convolution(x, kernel=(1, 1), num_filter=4 * classes, name="scores")
    scores = mx.sym.reshape(mx.sym.transpose(scores, (0, 2, 3, 1)), (batch, -1, classes))
    scores = mx.sym.transpose(scores, (0, 2, 1))
    label = mx.sym.Variable("label")
    *_, target = mx.sym.contrib.MultiBoxTarget(anchors, label, scores, name="target")
    shapes = {"data": (batch, 3, size, size), "label": (batch, 20, 5)}
    loss = mx.sym.SoftmaxOutput(scores, target, multi_output=True, name="softmax")
    return loss, shapes


def test_temporary_space_is_told(gpu_dry_run: GpuDryRun) -> None:
    symbol, shapes = detector()
    requests = as_module(symbol, shapes)
    plan = memonger.plan(symbol, shapes, grad_req=requests, patience=0.02)
    assert plan.temporary_bytes > 0.3 * plan.device_bytes
    assert plan.held_bytes == 0
    check_told(gpu_dry_run, symbol, shapes, {"marks": plan})
