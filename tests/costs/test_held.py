"""What operators hold beside the pool; ``gpu_dry_run/test_held.py`` compares it with a GPU."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import memonger
import mxnet as mx
import pytest

from zoo import Recurrent
from planned import HOWS, as_module, elsewhere, module_plan, plan_of, process_mb

PATIENCE = 0.02


def softsigns(blocks: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Build convolutions between operators for which MXNet converts what is in blocks."""
    x = mx.sym.Variable("data")
    for _ in range(blocks):
        x = mx.sym.softsign(mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=16))
    return mx.sym.MakeLoss(x), {"data": (24, 16, 64, 64)}


@pytest.mark.parametrize("how", HOWS)
def test_what_onednn_holds_on_a_cpu_is_not_counted(how: str) -> None:
    symbol, shapes = softsigns(8)
    plan = memonger.plan(symbol, shapes, ctx=mx.cpu(), patience=PATIENCE, **HOWS[how])
    assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    assert plan.held_bytes == plan.temporary_bytes == 0
    plan = plan_of(Recurrent("lstm", steps=20), how, ctx=mx.cpu())
    assert plan.recomputed and plan.held_bytes == 0


@pytest.mark.slow
def test_kernels_that_are_not_of_mkldnn_hold_no_more_than_is_told() -> None:
    """They write only a part of what they ask for; MXNET_USE_MKLDNN_RNN is read by MXNet.

    The buffer of OpenBLAS, which is not counted, is as large as the kernels for a CPU want it.
    """
    network = Recurrent("lstm", stacked=2, residual=True, steps=60)
    output = 60 * 32 * 200 * 4
    settings = {
        "MXNET_USE_MKLDNN_RNN": "0",
        "OPENBLAS_CORETYPE": "Sandybridge",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # arrays go back at once
        "OMP_NUM_THREADS": "1",
    }
    for how in HOWS:
        predicted, held, grown = elsewhere(measured, network, how, **settings)[0]
        assert held == 2 * (2 * 7 - 1 + 5) * output  # reserve and workspace of two operators
        assert 0.98 * predicted < grown < 1.02 * predicted, how


def measured(network: Recurrent, how: str) -> tuple[int, int, int]:
    """Plan a network for a CPU; what is predicted and held, and by what this process grows."""
    plan = plan_of(network, how, ctx=mx.cpu())
    small, shapes = network.small().build()
    small = module_plan(small, shapes, ctx=mx.cpu(), patience=PATIENCE, **HOWS[how]).symbol
    _step(small, shapes)  # loads what runs it
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or arrays would lie in what was let go of
    before = process_mb()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    executor = _step(plan.symbol, network.build()[1])
    # What operators of a schedule hold is gone when their gradients have run.
    grown = process_mb("VmHWM") - before
    del executor
    return plan.device_bytes, plan.held_bytes, int(2**20 * grown)


def _step(symbol: Any, shapes: Any) -> Any:
    """Bind, fill, and take two steps; an executor with all its memory."""
    executor = symbol.simple_bind(mx.cpu(), grad_req=as_module(symbol, shapes), **shapes)
    for array in executor.arg_arrays:
        array[:] = 0.01
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
    return executor


def test_a_budget_of_the_device_bounds_what_operators_hold_too() -> None:
    network = Recurrent("lstm", residual=True, dropout=True, steps=20, units=128, inputs=128)
    plain = plan_of(network, "marks", budget=1.0)
    assert plain.held_bytes == 2 * 20 * 32 * 128 * (6 - 1) * 4  # as cuDNN is said to hold
    for how in HOWS:
        with pytest.raises(memonger.BudgetError, match="arrays that operators hold") as raised:
            plan_of(network, how, budget=plain.held_bytes, budget_of="device")
        least = raised.value.least_bytes
        assert plain.held_bytes < least < plain.device_bytes
        plan = plan_of(network, how, budget=least, budget_of="device")
        assert plan.device_bytes <= least and plan.held_bytes == plain.held_bytes


def test_the_largest_batch_counts_what_operators_hold() -> None:
    network = Recurrent("gru", stacked=2, steps=20, units=128, inputs=128)
    symbol, _ = network._replace(batch=0).build()
    of_a_row = 2 * 20 * 128 * (2 * 7 - 1) * 4  # as cuDNN is said to hold
    budget = 32 * of_a_row

    def sized(batch: Any) -> Any:
        states = {f"state{k}": (network.stacked, batch, 128) for k in range(network.blocks)}
        return {"data": (20, batch, 128), "softmax_label": (20, batch), **states}

    options: Any = {"budget": budget, "budget_of": "device", "patience": PATIENCE}
    largest = memonger.largest_batch(symbol, sized(None), how="marks", **options)
    assert 8 < largest.unplanned_batch <= largest.batch < 32
    assert largest.plan.held_bytes == largest.batch * of_a_row
    assert largest.plan.device_bytes <= budget
