"""What operators hold beside the pool, on the CPU; ``gpu_dry_run/test_held.py`` has it on a GPU."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from typing import Any, Callable, NamedTuple, Sequence

import memonger
import mxnet as mx
import pytest
from memonger.schedules.execution.executor import ScheduledExecutor

from zoo import Recurrent
from planned import HOWS, as_module, elsewhere, module_plan, plan_of, process_mb

PATIENCE = 0.02


#: Few units: products of matrices take time, and hold nothing.
NARROW: Any = {"units": 64, "inputs": 64, "batch": 100, "steps": 80}
NETWORKS: dict[str, Recurrent] = {
    "residual LSTM with Dropout": Recurrent(
        "lstm", residual=True, dropout=True, blocks=5, **NARROW
    ),
    "bidirectional LSTM": Recurrent("lstm", True, 2, **{**NARROW, "inputs": 40}),
    "bidirectional GRU": Recurrent("gru", True, residual=True, **NARROW, blocks=3),
    "tanh, large batch": Recurrent(
        "rnn_tanh", stacked=4, blocks=3, **{**NARROW, "batch": 450, "steps": 40}
    ),
    "bidirectional relu": Recurrent("rnn_relu", True, 2, residual=True, **NARROW),
}


class Convolutions(NamedTuple):
    """Convolutions with operators between them that know no layouts of MKLDNN."""

    between: str
    blocks: int
    channels: int = 16
    image: int = 64
    batch: int = 24

    def build(self) -> tuple[Any, dict[str, tuple[int, ...]]]:
        x = mx.sym.Variable("data")
        for _ in range(self.blocks):
            y = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=self.channels)
            if self.between == "clip":  # as MobileNetV2
                y = mx.sym.clip(mx.sym.BatchNorm(y), a_min=0, a_max=6)
                depthwise = {"num_filter": self.channels, "num_group": self.channels}
                y = mx.sym.Convolution(y, kernel=(3, 3), pad=(1, 1), **depthwise)
                y = mx.sym.clip(mx.sym.BatchNorm(y), a_min=0, a_max=6)
                x = mx.sym.BatchNorm(mx.sym.Convolution(y, kernel=(1, 1), num_filter=8)) + x
            elif self.between == "softsign":
                x = mx.sym.softsign(y)
            elif self.between == "norm":
                x = mx.sym.tanh(mx.sym.BatchNorm(y, fix_gamma=False))
            else:
                gate = mx.sym.Pooling(y, global_pool=True, kernel=(1, 1), pool_type="avg")
                gate = mx.sym.Activation(gate, act_type="sigmoid")
                x = mx.sym.Activation(mx.sym.broadcast_mul(y, gate) + x, act_type="relu")
        channels = 8 if self.between == "clip" else self.channels
        shape = (self.batch, channels, self.image, self.image)
        return mx.sym.MakeLoss(x), {"data": shape}

    def small(self) -> Convolutions:
        return self._replace(batch=1, image=8, blocks=1)


SLOW = ("bidirectional LSTM", "bidirectional relu")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NETWORKS]
)
def test_resident_memory_is_what_is_told(name: str) -> None:
    network = NETWORKS[name]
    ways: dict[str, Any] = {"no plan": {"budget": 1.0}, **HOWS}
    sizes = dict(zip(ways, measured([(network, options) for options in ways.values()])))
    for how, (predicted, grown) in sizes.items():
        assert 0.99 * predicted < grown < 1.02 * predicted, how
    plain = sizes["no plan"]
    for how in HOWS:
        assert sizes[how][0] < plain[0] and sizes[how][1] < plain[1], sizes


def test_kernels_that_are_not_of_mkldnn_hold_no_more_than_is_told() -> None:
    """They write only a part of what they ask for; MXNET_USE_MKLDNN_RNN is read by MXNet.

    The buffer of OpenBLAS, which is not told, is as large as the kernels for a CPU want it.
    """
    network = Recurrent("lstm", stacked=2, residual=True, steps=60)
    jobs = [(network, options) for options in HOWS.values()]
    kernels = {"MXNET_USE_MKLDNN_RNN": "0", "OPENBLAS_CORETYPE": "Sandybridge"}
    for predicted, grown in measured(jobs, **kernels):
        assert 0.98 * predicted < grown < 1.02 * predicted


@pytest.mark.parametrize("between", ["softsign", "gate", "norm"])
def test_copies_for_mkldnn_are_told(between: str) -> None:
    """What operators hold, and the temporary space: to 1 %, one tensor being 2 to 4 %."""
    jobs = [(Convolutions(between, n), {"budget": share}) for n, share in ((4, 1.0), (8, 0.7))]
    for predicted, grown in measured(jobs):
        assert abs(grown - predicted) < 0.01 * predicted


def test_a_plan_that_takes_more_of_the_cpu_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Copies that the recomputed operators hold are more than what the pool saves."""
    symbol, shapes = Convolutions("softsign", 8).build()
    plan = memonger.plan(symbol, shapes, ctx=mx.cpu(), patience=PATIENCE)
    assert not plan.recomputed and plan.held_bytes == plan.unplanned_held_bytes > plan.pool_bytes
    assert "MXNET_MKLDNN_ENABLED=0" in caplog.text
    anywhere = memonger.plan(symbol, shapes, patience=PATIENCE)
    assert anywhere.recomputed and anywhere.held_bytes == 0


@pytest.mark.parametrize("between", ["softsign", "gate", "clip"])
def test_more_work_never_takes_more_of_the_cpu(between: str) -> None:
    """With more work the least pool has copies that outweigh it; other plans were found as well."""
    symbol, shapes = Convolutions(between, 8).build()
    options: Any = {"ctx": mx.cpu(), "how": "schedule", "patience": PATIENCE}
    works = 1.2, 1.5, 2.0, 3.0, None
    plans = [memonger.plan(symbol, shapes, work=work, **options) for work in works]
    taken = [plan.unplanned_device_bytes for plan in plans[:1]]
    taken += [plan.device_bytes for plan in plans]
    assert taken == sorted(taken, reverse=True) and taken[-1] < taken[0]
    for work, plan in zip(works, plans):
        assert work is None or 1 + plan.recomputed_flops < work + 1e-6


def test_a_budget_of_the_device_bounds_what_operators_hold_too() -> None:
    network = Recurrent("lstm", residual=True, dropout=True, steps=20, units=128, inputs=128)
    plain = plan_of(network, "marks", budget=1.0)
    assert plain.held_bytes == 2 * 20 * 32 * 128 * (6 - 1) * 4  # as cuDNN is said to hold
    for how in HOWS:
        with pytest.raises(memonger.BudgetError, match="what operators hold") as raised:
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
    largest = memonger.largest_batch(symbol, sized(None), **options)
    assert 8 < largest.unplanned_batch <= largest.batch < 32
    assert largest.plan.held_bytes == largest.batch * of_a_row
    assert largest.plan.device_bytes <= budget


def measured(jobs: Sequence[tuple[Any, Any]], **environment: str) -> list[tuple[int, int]]:
    """Plan networks with these options; what is told, and by what the memory of a process grows."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}  # arrays go back at once
    return elsewhere(_measured, jobs, **settings, **environment)[0]


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


def _measured(jobs: Sequence[tuple[Any, dict[str, Any]]]) -> list[tuple[int, int]]:
    """Plan each network, and take steps in a process of its own."""
    sizes = []
    for network, options in jobs:
        arguments = *network.build(), options
        if isinstance(network, Convolutions):
            # MXNet keeps the temporary space in which times were taken.
            symbol, predicted = _in_a_process(_plan, *arguments)
        else:
            symbol, predicted = _plan(*arguments)
        sizes.append((predicted, _in_a_process(_grown, network, symbol, options)))
    return sizes


def _plan(symbol: Any, shapes: Any, options: dict[str, Any]) -> tuple[Any, int]:
    plan = module_plan(symbol, shapes, ctx=mx.cpu(), patience=PATIENCE, **options)
    return plan.symbol, plan.device_bytes


def _grown(network: Any, symbol: Any, options: dict[str, Any]) -> int:
    small, shapes = network.small().build()
    if "how" in options:  # what runs a schedule is loaded before, and not counted
        small, _ = _plan(small, shapes, options)
    _step(small, shapes)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or arrays would lie in what was let go of
    before = process_mb()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    executor = _step(symbol, network.build()[1])
    # What operators of a schedule hold is gone when their gradients have run.
    by_schedule = isinstance(executor, ScheduledExecutor)
    grown = process_mb("VmHWM" if by_schedule else "VmRSS") - before
    del executor
    return int(2**20 * grown)


def _in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: theirs.send(work(*arguments)))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result
