"""For which devices a plan is, where MXNet is built with CUDA: with a GPU, and without one."""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.bind import read_planned_mb
from memonger.solve.limits import ROOM

import networks
from networks.mixed import KINDS
from planned import as_module

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import check_told, run_steps

pytestmark = pytest.mark.gpu_dry_run

SEARCH: dict[str, Any] = {"how": "marks", "patience": 0.02}
#: Networks that MKLDNN's layouts make plans for any device larger.
GATED = KINDS["SE-ResNet"](width=32, side=64, blocks=(2, 2))


def without_ctx(dry: DryRun, symbol: Any, shapes: Any, options: Any) -> None:
    dry.note("planning")
    dry.emit(memonger.plan(symbol, shapes, **options))
    dry.note("planned")
    dry.emit(memonger.get_cost(symbol, shapes=shapes))
    dry.emit(memonger.plan(symbol, shapes, budget="80%", **options).options)
    try:
        memonger.plan(symbol, shapes, budget="device", **options)
        dry.emit("")
    except memonger.MemongerError as error:
        dry.emit(str(error))


@pytest.mark.parametrize(("gpus", "fusion"), [(0, "1"), (1, "0")])
def test_a_plan_is_for_gpus(
    gpu_dry_run: GpuDryRun, gpus: int, fusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbol, shapes = GATED
    env = {"CUDASTUB_DEVICES": str(gpus), "MXNET_USE_FUSION": fusion}
    result = gpu_dry_run.run(without_ctx, symbol, shapes, SEARCH, env=env)
    plan, cost, budgeted, said = result.emitted
    assert plan.request.ctx == "gpu" and "any GPU; on a CPU it may round" in str(plan)
    begin, end = result.trace.index("planning"), result.trace.index("planned")
    assert not result.trace[begin + 1 : end]  # no CUDA context is made
    monkeypatch.setenv("MXNET_USE_FUSION", fusion)
    here = memonger.plan(symbol, shapes, ctx="gpu", **SEARCH)  # by a build without CUDA
    assert plan.symbol.tojson() == here.symbol.tojson() and plan.pool_bytes == here.pool_bytes
    assert plan.exact and plan.pool_bytes < memonger.plan(symbol, shapes, **SEARCH).pool_bytes
    assert cost == plan.candidates["no plan"] // 2**20
    assert budgeted["gpu"] == "V100"  # of no GPU, and of one whose name has no data sheet
    assert bool(said) == (not gpus) and (gpus or "gpu(0) does not exist" in said)
    if gpus:
        check_told(run_steps(gpu_dry_run, {"gpu": plan.symbol}, shapes), {"gpu": plan}, fusion)


def by_a_script(dry: DryRun, symbol: Any, shapes: Any, options: Any) -> None:
    with memonger.enable(cache=False, patience=0.02, **options) as session:
        module = mx.mod.Module(symbol, context=[mx.gpu(0), mx.gpu(1)])
        module.bind([("data", shapes["data"])], [("softmax_label", shapes["softmax_label"])])
    plans = [(str(plan.request.ctx), plan.pool_bytes // 2**20) for plan in session.plans]
    dry.emit((plans, [read_planned_mb(executor) for executor in module._exec_group.execs]))
    dry.emit(session.plans[0].unplanned_bytes // 2**20)


@pytest.mark.parametrize(
    ("options", "ctx"), [({}, ["gpu", "gpu"]), ({"budget": "device"}, ["gpu(0)", "gpu(1)"])]
)
def test_what_a_script_binds_is_planned_for_its_gpus(
    gpu_dry_run: GpuDryRun, options: dict[str, Any], ctx: list[str]
) -> None:
    """Once for all GPUs; for a budget of what is free, once for each."""
    symbol, shapes = networks.resnet((1, 1, 1, 1), image=64)
    result = gpu_dry_run.run(by_a_script, symbol, shapes, options, env={"CUDASTUB_DEVICES": "2"})
    (plans, taken), unplanned = result.emitted
    assert [tuple(plan) for plan in plans] == [*dict.fromkeys(zip(ctx, taken))] and (
        taken[0] < unplanned
    ) == (not options)


def within_budgets(dry: DryRun, symbol: Any, shapes: Any, budget: int) -> None:
    """Fit by a script, and find the largest batch, in the same memory of a GPU."""
    data, label = (mx.nd.zeros(shapes[name]) for name in ("data", "softmax_label"))
    with memonger.enable(cache=False, patience=0.02, budget=budget) as session:
        module = mx.mod.Module(symbol, context=mx.gpu(0))
        batches = mx.io.NDArrayIter(data, label, len(label))
        module.fit(batches, num_epoch=1, optimizer="adam", optimizer_params={})
    dry.emit(session.plans[0])
    open_shapes = {"data": (None, *shapes["data"][1:])}
    for of in (None, "pool"):
        dry.emit(memonger.largest_batch(symbol, open_shapes, budget, budget_of=of, patience=0.02))


def test_a_budget_bounds_the_whole_gpu_beside_cuda_and_the_optimizer(
    gpu_dry_run: GpuDryRun,
) -> None:
    """By default, for scripts and for the largest batch."""
    symbol, shapes = networks.resnet((1, 1, 1, 1), image=64)
    requests = as_module(symbol, shapes)
    plain = memonger.plan(symbol, shapes, ctx="gpu", budget=1.0, grad_req=requests)
    sizes = zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])
    state = sum(8 * int(np.prod(size)) for name, size in sizes if name not in shapes)
    fits = plain.unplanned_device_bytes + state
    result = gpu_dry_run.run(within_budgets, symbol, shapes, ROOM + fits - 1)
    plan, whole, pool = result.emitted
    assert plan.is_used and plan.device_bytes + state < fits
    left = "1024.0 MiB of a GPU are left to CUDA and cuDNN, and "
    assert f"{left}8 bytes a parameter" in result.stderr and f"{left}none to" in str(whole)
    assert whole.plan.device_bytes < fits < pool.plan.device_bytes and "left to" not in str(pool)
