"""What tests of whole networks share: networks are planned, bound and stepped on the stand-ins."""

from __future__ import annotations

import collections
import gc
import os
from types import SimpleNamespace
from typing import Any, Mapping, Sequence

import memonger
import mxnet as mx
from memonger.costs.bind import read_planned_mb
from memonger.schedules.execution.arena import address

from networks import Network
from planned import as_module, module_plan, nodes

from .child import DryRun
from .dry_run import GpuDryRun

MB = 2**20
STEPS = 2


# -- in the child -----------------------------------------------------------------------------


def step(executor: Any) -> None:
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def empty(devices: int = 1) -> None:
    gc.collect()
    mx.nd.waitall()
    for k in range(devices):
        mx.gpu(k).empty_cache()


def bound(symbol: Any, shapes: Any, fusion: str, types: Any = None) -> Any:
    os.environ["MXNET_USE_FUSION"] = fusion  # read at each bind
    requests = as_module(symbol, shapes)
    executor = symbol.simple_bind(mx.gpu(0), grad_req=requests, type_dict=types, **shapes)
    mx.nd.waitall()
    return executor


def steps(dry: DryRun, ways: Any, shapes: Any, types: Any) -> None:
    """Take steps with each (name, symbol, fusion), of inference too; emit what that takes."""
    for name, symbol, fusion in ways:
        before = dry.used_bytes()
        dry.reset_peak()
        executor = bound(symbol, shapes, fusion, types)
        dry.note(f"run {name} {fusion}")
        for _ in range(STEPS):
            step(executor)
        dry.note(f"ran {name} {fusion}")
        result = SimpleNamespace(
            way=(name, fusion),
            pool=read_planned_mb(executor),
            fused=executor.debug_str().count("FusedOp"),
            setting=os.environ["MXNET_USE_FUSION"],
            states={n: f"0x{address(a):x}" for n, a in executor.aux_dict.items()},
            peak=dry.peak_bytes(),
            trained=dry.used_bytes() - before,
        )
        dry.reset_peak()
        executor.forward(is_train=False)
        mx.nd.waitall()
        result.inferred = dry.peak_bytes() - before
        step(executor)
        result.in_all = dry.peak_bytes() - before
        dry.emit(result)
        del executor
        empty()


def fitting(dry: DryRun, ways: Any, shapes: Any) -> None:
    for symbol, fusion, mb in ways:
        dry.resize(mb)
        step(bound(symbol, shapes, fusion))
        dry.emit(mb)
        empty()


def plans(dry: DryRun, symbol: Any, shapes: Any, settings: Any) -> None:
    for fusion, options in settings:
        os.environ["MXNET_USE_FUSION"] = fusion
        requests = as_module(symbol, shapes)
        dry.emit(
            memonger.plan(
                symbol, shapes, grad_req=requests, ctx=mx.gpu(0), **{"how": "marks", **options}
            )
        )


# -- what is seen -----------------------------------------------------------------------------


def run_steps(
    dry_run: GpuDryRun,
    symbols: Mapping[str, Any],
    shapes: Mapping[str, Any],
    fusions: Sequence[str] = ("0", "1"),
    types: Any = None,
    **options: Any,
) -> dict[tuple[str, str], Any]:
    """Return what `steps` emits of each symbol and fusion, and the calls that the steps made."""
    ways = [(name, symbol, fusion) for name, symbol in symbols.items() for fusion in fusions]
    result = dry_run.run(steps, ways, shapes, types, **options)
    assert "MXNET_SUBGRAPH_BACKEND" not in result.stderr  # nothing is logged at each bind
    assert not [line for line in result.trace if "no stub" in line]
    for taken in result.emitted:
        begin, end = (result.trace.index(f"{ran} {' '.join(taken.way)}") for ran in ("run", "ran"))
        taken.calls = result.trace[begin:end]
    return {taken.way: taken for taken in result.emitted}


def check_told(
    steps_of: Mapping[tuple[str, str], Any], plans: Mapping[str, Any], fusion: str
) -> None:
    """Check that what plans tell of the pool is exact, and what of the device to 3 %.

    With fusion on that is what their bind on the GPU has told, whatever was predicted. A bind tells
    the pool alone: how MXNet rounds its blocks is then not known, and the device to 10 %.
    """
    for name, plan in plans.items():
        taken, predicted = steps_of[name, fusion], plan.device_bytes
        print(
            f"\n{name:9} {fusion} told {predicted / MB:.1f} MB, {taken.peak / MB:.1f} seen", end=""
        )
        assert plan.exact or fusion == "1", name
        assert taken.pool == plan.counted_bytes // MB, (name, fusion)
        most = (0.03 if plan.exact else 0.1) * predicted
        assert abs(taken.peak - predicted) < most, (name, fusion, predicted, taken.peak)


def check_plans(
    dry_run: GpuDryRun, net: Network, hows: Any, fusions: Sequence[str] = ("0",)
) -> tuple[dict[str, memonger.Plan], dict[tuple[str, str], Any]]:
    """Plan a network with these options, and not at all; what they tell, and what is seen."""
    hows = {"no plan": {"budget": 1.0}, **hows}
    plans = {how: module_plan(*net, **options) for how, options in hows.items()}
    steps_of = run_steps(
        dry_run, {how: plan.symbol for how, plan in plans.items()}, net[1], fusions
    )
    check_told(steps_of, plans, "0")
    return plans, steps_of


def moves(calls: list[str]) -> dict[str, int]:
    """Count how often running statistics moved: each mean by cuDNN, all in one by MXNet."""
    counts: dict[str, int] = collections.Counter()
    for line in calls:
        if line.startswith("cudnnBatchNormalizationForwardTraining"):
            fields = dict(part.split("=") for part in line.split()[1:])
            if float(fields["factor"]):
                counts[fields["mean"]] += 1
        elif "BatchNormalizationBackwardKernel" in line:
            counts["own"] += 1
    return counts


def batch_norms(symbol: Any) -> tuple[int, int]:
    """Return how many BatchNorm a symbol has, and how many of them run MXNet's own kernel."""
    norms = [n.get("attrs", {}) for n in nodes(symbol) if n["op"] == "BatchNorm"]
    return len(norms), sum(a.get("cudnn_off") == "True" for a in norms)


def assert_moved_once(symbol: Any, calls: list[str]) -> None:
    norms, own = batch_norms(symbol)
    expected = [STEPS] * (norms - own) + [STEPS * own] * (own > 0)
    assert sorted(moves(calls).values()) == sorted(expected)
