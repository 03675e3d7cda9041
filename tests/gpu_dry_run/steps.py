"""What tests of whole networks share: networks are planned, bound and stepped on the stand-ins."""

from __future__ import annotations

import collections
import gc
import logging
import os
import re
from types import SimpleNamespace
from typing import Any, Sequence

import memonger
import mxnet as mx
from memonger.schedules.execution.arrays import address

from planned import as_module

from .child import DryRun
from .dry_run import GpuDryRun

MB = 2**20
LARGE = 2**17  # MB of a device on which everything fits
STEPS = 2


def step(executor: Any) -> None:
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def empty() -> None:
    """Give back what nobody holds."""
    gc.collect()
    mx.nd.waitall()
    mx.gpu(0).empty_cache()


def pool_mb(executor: Any) -> int:
    return int(re.findall(r"Total (\d+) MB allocated", executor.debug_str()[-200:])[0])


def steps(dry: DryRun, ways: Any, shapes: Any, types: Any, inference: bool) -> None:
    """Bind each (name, symbol, fusion) and take steps, of inference too; emit what it takes."""
    for name, symbol, fusion in ways:
        os.environ["MXNET_USE_FUSION"] = fusion  # read at each bind
        requests = as_module(symbol, shapes)
        before = dry.used_bytes()
        dry.reset_peak()
        executor = symbol.simple_bind(mx.gpu(0), grad_req=requests, type_dict=types, **shapes)
        mx.nd.waitall()
        dry.note(f"run {name} {fusion}")
        for _ in range(STEPS):
            step(executor)
        dry.note(f"ran {name} {fusion}")
        found = {
            "way": [name, fusion],
            "pool": pool_mb(executor),
            "fused": executor.debug_str().count("FusedOp"),
            "setting": os.environ["MXNET_USE_FUSION"],
            "states": {n: f"0x{address(a):x}" for n, a in executor.aux_dict.items()},
            "peak": dry.peak_bytes(),
            "trained": dry.used_bytes() - before,
        }
        if inference:
            dry.reset_peak()
            executor.forward(is_train=False)
            mx.nd.waitall()
            found["inferred"] = dry.peak_bytes() - before
            step(executor)
            found["in_all"] = dry.peak_bytes() - before
        dry.emit(found)
        del executor
        empty()


def run_steps(
    dry_run: GpuDryRun,
    symbols: dict[str, Any],
    shapes: dict[str, Any],
    fusions: Sequence[str] = ("0", "1"),
    types: Any = None,
    inference: bool = False,
    **options: Any,
) -> dict[tuple[str, str], Any]:
    """What `steps` emits of each symbol with each fusion, and the calls that the steps made."""
    ways = [(name, symbol, fusion) for name, symbol in symbols.items() for fusion in fusions]
    options = {"memory_mb": LARGE, "trace": True, **options}
    result = dry_run.run(steps, ways, shapes, types, inference, **options)
    assert result.ok, (result.message, result.emitted)
    assert "MXNET_SUBGRAPH_BACKEND" not in result.stderr  # nothing is logged at each bind
    assert not [line for line in result.trace if "no stub" in line]
    found = {}
    for each in result.emitted[:-1]:
        way = "{} {}".format(*each["way"])
        calls = result.trace[result.trace.index("run " + way) : result.trace.index("ran " + way)]
        found[tuple(each["way"])] = SimpleNamespace(calls=calls, **each)
    return found


def moves(calls: list[str]) -> dict[str, int]:
    """How often running statistics moved.

    cuDNN's kernel moves them in the forward pass, and the trace has the address of each mean;
    MXNet's own does in the backward pass: those calls are counted together, under 'own'.
    """
    found: dict[str, int] = collections.Counter()
    for line in calls:
        if line.startswith("cudnnBatchNormalizationForwardTraining"):
            fields = dict(part.split("=") for part in line.split()[1:])
            if float(fields["factor"]):
                found[fields["mean"]] += 1
        elif "BatchNormalizationBackwardKernel" in line:
            found["own"] += 1
    return found


def plans(dry: DryRun, symbol: Any, shapes: Any, settings: Any) -> None:
    """Plan for the GPU with each (fusion, options); emit the plan and what is said, or an error."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memonger").addHandler(handler)
    for fusion, options in settings:
        os.environ["MXNET_USE_FUSION"] = fusion
        del said[:]
        options = {"grad_req": as_module(symbol, shapes), "ctx": mx.gpu(0), **options}
        try:
            plan = memonger.plan(symbol, shapes, **options)
        except memonger.MemongerError as error:
            dry.emit({"error": str(error)})
        else:
            fields = ("exact", "counted_bytes", "device_bytes")
            figures = {name: getattr(plan, name) for name in fields}
            text = plan.symbol.tojson(remove_amp_cast=False)
            dry.emit({"symbol": text, "said": said, "error": "", **figures})


def planned_for_gpu(
    dry_run: GpuDryRun, symbol: Any, shapes: Any, *settings: tuple[str, dict[str, Any]]
) -> list[Any]:
    """Plans with ``ctx=mx.gpu(0)``, made on a device that is too small to train on."""
    result = dry_run.run(plans, symbol, shapes, settings, memory_mb=1)
    assert result.ok, result.message
    found = [SimpleNamespace(**each) for each in result.emitted[:-1]]
    for each in found:
        each.symbol = None if each.error else mx.sym.load_json(each.symbol)
    return found
