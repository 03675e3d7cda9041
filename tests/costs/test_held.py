"""What operators hold beside the pool; ``gpu_dry_run/test_held.py`` compares it with a GPU."""

from __future__ import annotations

import ctypes
import gc
import math
import re
from typing import Any, Callable, NamedTuple

import memonger
import mxnet as mx
import pytest

from operator_cases import CASES, SHAPE
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
def test_plain_copies_and_workspaces_on_a_cpu_are_not_counted(how: str) -> None:
    """What convolutions lay out anew is: the weight, its gradient, and what they read plain."""
    symbol, shapes = softsigns(8)
    plan = memonger.plan(symbol, shapes, ctx=mx.cpu(), patience=PATIENCE, **HOWS[how])
    assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    # Where a softsign writes in place of blocks, only gradients are plain.
    spaces = 4 if how == "schedule" else 1
    copied = [k * math.prod(shapes["data"]) + 2 * 16 * 16 * 3 * 3 for k in (1, 2)]
    assert plan.held_bytes == 0
    assert plan.temporary_bytes in [spaces * 2 * 4 * elements for elements in copied]
    plan = plan_of(Recurrent("lstm", steps=20), how, ctx=mx.cpu())
    assert plan.recomputed and plan.held_bytes == 0


#: Case of an operator -> its temporary space on a CPU, in arrays of its data.
TEMPORARY = {
    **dict.fromkeys("softmax log_softmax".split(), 1),
    # These request twice what they use.
    **dict.fromkeys("Activation_relu Activation_softrelu FullyConnected".split(), 2),
    **dict.fromkeys("LeakyReLU LeakyReLU_elu LeakyReLU_gelu".split(), 2),
    **dict.fromkeys("tanh softmax_temperature LeakyReLU_selu Activation_softsign".split(), 0),
    **dict.fromkeys("sort topk".split(), 3),
    "LayerNorm": 2 + 1 / SHAPE[-1],  # and the means
    # The gradient of the output, (4, 8, 4, 4) or (4, 8, 8, 8), and the data are laid out in blocks,
    # the weight, (8, 8, 3, 3), too, and its gradient is made in blocks. Twice, as above.
    "Convolution": 2 * (512 + 1152 + 2 * 576) / 1152,
    "Deconvolution": 2 * (2048 + 1152 + 2 * 576) / 1152,
}


@pytest.mark.parametrize("name", TEMPORARY)
def test_what_is_copied_on_a_cpu_is_counted(name: str) -> None:
    """Gradients that MXNet has MKLDNN write in place; ``benchmarks/held.py`` measures them."""
    x = CASES[name].build(mx.sym.Variable("data") * 1.5)
    symbol, shapes = mx.sym.MakeLoss(mx.sym.softsign(x)), {"data": SHAPE}
    plan = memonger.plan(symbol, shapes, ctx=mx.cpu(), how="marks", budget=1.0)
    data = 4 * math.prod(SHAPE)
    assert plan.temporary_bytes == TEMPORARY[name] * data
    for_gpu = memonger.plan(symbol, shapes, ctx="gpu", how="marks", budget=1.0)
    assert for_gpu.temporary_bytes == 0


#: Last layers of a network -> what the network copies at most, in elements.
IMAGE, WEIGHT = 8 * 16 * 16 * 16, 16 * 3 * 3 * 3
LAST_LAYERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    # Of the first convolution: its two gradients read that of the output in two layouts.
    "none": (lambda x: x, IMAGE + WEIGHT),
    # A plain gradient in the blocks of its data, and the result in place.
    "relu": (lambda x: mx.sym.Activation(x, act_type="relu"), 2 * IMAGE),
    # The same: gradients of products of matrices are plain.
    "relu, FullyConnected": (
        lambda x: mx.sym.FullyConnected(mx.sym.Activation(x, act_type="relu"), num_hidden=8),
        2 * IMAGE,
    ),
    # Plain data, and the result in place of it.
    "FullyConnected": (
        lambda x: mx.sym.FullyConnected(mx.sym.BatchNorm(x), num_hidden=8),
        2 * IMAGE,
    ),
    # The weight, and its gradient; data and the gradient of the output are in blocks.
    "wide": (
        lambda x: mx.sym.Pooling(convolved(mx.sym.BatchNorm(x), 512), kernel=(16, 16)),
        2 * 512 * 16 * 3 * 3,
    ),
    # The sum of nine gradients of one weight, to which MXNet has MKLDNN add each, of one bias, and
    # a gradient of data in place.
    "shared": (
        lambda x: mx.sym.add_n(*nine_layers(mx.sym.Flatten(x))),
        512 * 16 * 256 + 512 + IMAGE,
    ),
}


def convolved(x: Any, filters: int) -> Any:
    return mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=filters)


def nine_layers(x: Any) -> list[Any]:
    weight, bias = mx.sym.Variable("weight"), mx.sym.Variable("bias")
    return [mx.sym.FullyConnected(x * k, weight, bias, num_hidden=512) for k in range(9)]


@pytest.mark.parametrize("name", LAST_LAYERS)
def test_what_is_laid_out_anew_on_a_cpu_is_counted(name: str) -> None:
    """As MXNet requested it: a library before MXNet's logged each ``TmpMemMgr::Alloc``."""
    layers, most = LAST_LAYERS[name]
    x = layers(convolved(mx.sym.Variable("data"), 16))
    symbol, shapes = mx.sym.MakeLoss(mx.sym.softsign(x)), {"data": (8, 3, 16, 16)}
    asked: Any = {"how": "marks", "budget": 1.0, "grad_req": as_module(symbol, shapes)}
    assert memonger.plan(symbol, shapes, ctx=mx.cpu(), **asked).temporary_bytes == 2 * 4 * most
    assert memonger.plan(symbol, shapes, ctx="gpu", **asked).temporary_bytes == 0


def rectified(depth: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Build convolutions of which each relu's gradient is copied: 128 KiB, the first one twice."""
    x = mx.sym.Variable("data")
    for _ in range(depth):
        x = mx.sym.relu(mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=16))
        x = mx.sym.Activation(x, act_type="relu")
    return mx.sym.MakeLoss(x), {"data": (8, 16, 16, 16)}


@pytest.mark.parametrize(("spaces", "is_schedule"), [("1", True), ("4", False)])
def test_temporary_spaces_at_which_a_schedule_takes_turns_are_judged(
    spaces: str, is_schedule: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", spaces)
    symbol, shapes = rectified(12)
    asked = {"ctx": mx.cpu(), "patience": PATIENCE}
    by_how = {how: memonger.plan(symbol, shapes, **asked, how=how) for how in ("marks", "schedule")}
    of_marks, of_schedule = (by_how[how].temporary_bytes for how in ("marks", "schedule"))
    assert of_marks == 4 * 4 * math.prod(shapes["data"]) and of_schedule == int(spaces) * of_marks
    assert (memonger.plan(symbol, shapes, **asked).schedule is not None) == is_schedule


@pytest.mark.parametrize(("spaces", "depth"), [("1", 4), ("4", 12), ("4", 4)])
def test_a_schedule_that_takes_more_with_its_temporary_spaces_says_so(
    spaces: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", spaces)
    symbol, shapes = rectified(depth)
    asked = {"ctx": mx.cpu(), "patience": PATIENCE, "how": "schedule"}
    plan = memonger.plan(symbol, shapes, **asked)
    assert plan.recomputed
    assert len(plan.warnings) == ((spaces, depth) == ("4", 4))
    for warning in plan.warnings:
        assert re.fullmatch(
            r"this schedule takes turns at 4 temporary spaces on a CPU, and with them \d+\.\d KiB "
            "more than no plan; put MXNET_CPU_TEMP_COPY=1 before the command, or use marks",
            warning,
        )


class Classifier(NamedTuple):
    """A network whose largest gradient is that of log_softmax."""

    rows: int = 8192

    def build(self) -> Any:
        x = mx.sym.Variable("data")
        for _ in range(6):
            x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=32))
        x = mx.sym.log_softmax(mx.sym.FullyConnected(x, num_hidden=2000))
        return mx.sym.MakeLoss(mx.sym.pick(x, mx.sym.zeros((self.rows,)))), {
            "data": (self.rows, 64)
        }

    def small(self) -> Classifier:
        return Classifier(16)


class Wide(NamedTuple):
    """A network of convolutions whose largest weight takes more than any image: 4.5 MiB."""

    filters: tuple[int, ...] = (64, 256, 512, 16)

    def build(self) -> Any:
        x = mx.sym.Variable("data")
        for filters in self.filters:
            x = mx.sym.Activation(mx.sym.BatchNorm(convolved(x, filters)), act_type="relu")
        return mx.sym.MakeLoss(x), {"data": (8, 3, 16, 16)}

    def small(self) -> Wide:
        return Wide((16, 16))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_gradient_that_is_copied_takes_what_is_told(how: str) -> None:
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    predicted, _, grown = elsewhere(measured, Classifier(), how, **settings)[0]
    assert 0.98 * predicted < grown < 1.02 * predicted


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_weight_that_is_laid_out_anew_takes_what_is_told(how: str) -> None:
    settings = {
        "MALLOC_MMAP_THRESHOLD_": "65536",  # arrays go back at once
        "MALLOC_PERTURB_": "1",  # all that is requested is written
        "MXNET_CPU_TEMP_COPY": "1",  # several spaces would grow in later steps
        "OMP_NUM_THREADS": "1",
    }
    predicted, _, grown = elsewhere(measured, Wide(), how, **settings)[0]
    assert 0.98 * predicted < grown < 1.02 * predicted


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
        # MKLDNN copies a gradient as large as an output. It asks for twice of it, in each of four
        # spaces of a schedule, and they do not write it.
        asked_for = 2 * output * (4 if how == "schedule" else 1)
        assert 0.98 * (predicted - asked_for) < grown < 1.02 * predicted, how


def measured(network: Any, how: str) -> tuple[int, int, int]:
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
