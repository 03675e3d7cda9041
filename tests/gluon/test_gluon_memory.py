"""Planned Gluon blocks: who frees what they have bound, and the memory of a process."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from memonger import MemongerError
from memonger.gluon import plan_of, unplan
from memonger.schedules.execution.arena import Arena, address
from memonger.schedules.execution.unchanged import check_unchanged
from memonger.schedules.training_step import ALIGNMENT
from mxnet import autograd
from mxnet.gluon import nn

from blocks import LOSS, batch, different, left_in, mlp, planned, taught
from modules import seed
from planned import elsewhere, process_mb


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Return the threads on which executors are freed from now on."""
    threads, free = [], mx.executor.Executor.__del__

    def noted(self: Any) -> None:
        threads.append(threading.current_thread())
        free(self)

    for _ in range(2):  # what earlier tests have left, which a call frees
        taught(planned(mlp()), 1)
        gc.collect()
    monkeypatch.setattr(mx.executor.Executor, "__del__", noted)
    return threads


def test_executors_are_freed_by_the_thread_that_bound_them(freed: list[threading.Thread]) -> None:
    """Not by the engine's, nor by one on which Python collects garbage: MXNet would deadlock."""
    net, other = planned(mlp()), planned(mlp("other_"))
    taught(net, 1), taught(other, 1)
    freed.clear()
    for size in (2000, 4000, 6000):  # each takes the place of the one before
        x, y = batch(0, size)
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
    mx.nd.waitall()
    del net, loss
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    taught(other, 1)
    assert len(freed) >= 3 and set(freed) == {threading.current_thread()}


@pytest.mark.parametrize("by", ["unplan", "garbage", "next call"])
def test_executors_are_freed_soon(by: str, freed: list[threading.Thread]) -> None:
    net, other = planned(mlp()), planned(mlp("other_"))
    taught(net, 1), taught(other, 1)
    with autograd.record():
        loss = net(batch(0)[0])
    if by != "next call":
        del loss
    mx.nd.waitall()
    freed.clear()
    if by == "unplan":
        unplan(net)
    else:
        del net
        gc.collect()
    if by == "next call":
        assert not freed  # the tape has the call
        del loss
        mx.nd.waitall()
        taught(other, 1)
    assert len(freed) == 1


def test_plans_stay_bound_for_the_latest_32_shapes(freed: list[threading.Thread]) -> None:
    net = planned(mlp(), (60, 20))
    freed.clear()
    for size in [*range(60, 20, -1), *range(21, 53)]:
        with autograd.record():
            net(batch(0, size)[0])
        mx.nd.waitall()
    assert len(freed) == 8


DENSE: Any = nn.Dense, {"units": 64}, 30, (8192, 64)


def grown(net: Any, sizes: list[int], plans: bool, inference: int) -> float:
    """Return the MB by which this process grows in a training that does not wait."""
    layer, options, depth, shape = net
    block = nn.HybridSequential()
    for _ in range(depth):
        block.add(layer(**options), nn.BatchNorm(), nn.Activation("relu"))
    block.initialize()
    x = mx.nd.random.normal(shape=shape)
    if inference:
        block(x[:inference])
    planned(block) if plans else block.hybridize()
    training = mx.gluon.Trainer(block.collect_params(), "sgd")
    mx.nd.waitall()
    before = process_mb()
    for size in sizes:
        with autograd.record():
            out = block(x[:size])
        out.backward()
        training.step(size)
    mx.nd.waitall()
    return process_mb("VmHWM") - before


def growth(*arguments: Any) -> float:
    return elsewhere(grown, *arguments)[0]


@pytest.mark.slow
def test_a_process_grows_by_one_pool_for_batches_of_all_sizes() -> None:
    plain, marks = (growth(DENSE, [8192] * 3, plans, 2) for plans in (False, True))
    several = growth(DENSE, [7800, 8192, 8000, 7600], True, 2)
    assert marks < 0.5 * plain
    assert several < 2.5 * marks  # MXNet and MKLDNN take some MB for each size beside the pool


def test_calls_that_are_never_differentiated_share_two_runners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a loop that does not wait, where the engine holds the tape of calls that are over."""
    net, (x, y) = planned(mlp()), batch(0, 4000)
    taught(net, 1)
    bound, bind = [], mx.sym.Symbol.bind

    def noted(*arguments: Any, **options: Any) -> Any:
        bound.append(arguments)
        return bind(*arguments, **options)

    monkeypatch.setattr(mx.sym.Symbol, "bind", noted)
    for _ in range(20):
        with autograd.record():
            loss = LOSS(net(x), y)
    assert len(bound) == 2  # one for the loss that is held while the next is computed
    loss.backward()


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Arena]:
    """Return the arenas that are made from now on and are not freed."""
    made: weakref.WeakSet[Arena] = weakref.WeakSet()
    begin = Arena.__init__

    def noted(self: Arena, ctx: Any) -> None:
        begin(self, ctx)
        made.add(self)

    monkeypatch.setattr(Arena, "__init__", noted)
    return made


def arrays() -> dict[int, int]:
    """Return the bytes of the arrays that Python holds, by address."""
    mx.nd.waitall()
    gc.collect()
    held: dict[int, int] = {}
    for array in gc.get_objects():
        if isinstance(array, mx.nd.NDArray) and array.stype == "default":
            nbytes = array.size * np.dtype(array.dtype).itemsize
            held[address(array)] = max(nbytes, held.get(address(array), 0))
    return held


def wide() -> Any:
    """Build a block whose output takes more than all else."""
    net = nn.HybridSequential()
    for _ in range(6):
        net.add(nn.Dense(16, activation="tanh", in_units=16))
    net.add(nn.Dense(500, in_units=16))
    net.initialize()
    net.collect_params().zero_grad()
    return net


@pytest.mark.parametrize("calls", [1, 4])
def test_between_steps_a_block_holds_its_arenas_and_nothing_else(
    calls: int, arenas: weakref.WeakSet[Arena]
) -> None:
    net, x = planned(wide(), how="schedule"), mx.nd.ones((256, 16))
    before = arrays()
    for _ in range(2):
        with autograd.record():
            outputs = [net(x) for _ in range(calls)]
            total = sum(outputs)
        if calls == 1:
            outputs.clear()
        total.backward()
        del outputs, total
    spans = [(arena.start - ALIGNMENT, arena.start + arena.nbytes) for arena in arenas]
    new = {place: nbytes for place, nbytes in arrays().items() if place not in before}
    beside = {p: n for p, n in new.items() if not any(a <= p < b for a, b in spans)}
    assert len(arenas) == min(calls, 2) and new and sum(beside.values()) < 100
    assert sum(arena.nbytes for arena in arenas) < 256 * 500 * 4  # of the output


def test_calls_that_are_alive_together_hold_what_their_backward_passes_read(
    arenas: weakref.WeakSet[Arena],
) -> None:
    """And inputs and outputs; they share the arena, the gradients and the operators."""
    net, x = planned(wide(), how="schedule"), mx.nd.ones((256, 16))
    outputs, held = [], [arrays()]
    for count in (2, 4, 4):
        with autograd.record():
            outputs += [net(x) for _ in range(count)]
        held.append(arrays())
    first, second = (
        sum(nbytes for place, nbytes in after.items() if place not in before)
        for before, after in zip(held[1:], held[2:])
    )
    tensor, tiny = 256 * 16 * 4, 500
    assert len(arenas) == 2 and abs(first - second) < tiny
    # The output, a copy of the input, and less than the results of all layers.
    assert 256 * 500 * 4 <= second / 4 < 256 * 500 * 4 + 6 * tensor
    assert sum(arena.nbytes for arena in arenas) < 256 * 500 * 4


def test_no_array_of_a_call_is_held_while_digests_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the gradients of each, which are in arrays of their own, none is left then."""
    net, x, held = planned(mlp(drop=0), how="schedule"), batch(0)[0], []

    def noted(before: Any, after: Any) -> None:
        held.append(sum(arrays().values()))
        check_unchanged(before, after)

    monkeypatch.setattr("memonger.gluon.autograd.check_unchanged", noted)
    for calls in (1, 1, 4):
        with autograd.record():
            total = sum(net(x).sum() for _ in range(calls))
        total.backward()
    gradients = 4 * sum(parameter.data().size for parameter in net.collect_params().values())
    assert len(held) == 6 and held[-1] - held[1] < 3 * gradients / 2  # of three more calls


def test_a_plan_that_takes_more_with_the_arrays_of_gluon_is_not_used() -> None:
    """Marks save the results of layers, and copy an output that is larger."""
    net = planned(wide(), (256, 16), how="marks")
    with pytest.raises(MemongerError, match="would take 1.6 MiB in Gluon, and without it 0.7 MiB"):
        plan_of(net)
    assert plan_of(planned(wide(), (256, 16), how="schedule")).recomputed


def test_calls_that_would_hold_no_less_by_the_plan_run_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Marks of two layers save memory of gradients, which one call at a time needs."""
    left = []
    for plans in (False, True):
        seed()
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Dense(64, activation="tanh"), nn.Dense(64, activation="tanh"), nn.Dense(2))
        net.initialize()
        planned(net) if plans else net.hybridize()
        with autograd.record():
            total = sum(net(mx.nd.ones((256, 4)) * k) for k in range(3))
        total.backward()
        left.append(left_in(net))
    assert plan_of(net).recomputed and not different(*left)
    said = "while an earlier one waits for its backward pass holds 266.0 KiB by the plan, and 258.0"
    assert caplog.text.count(said) == 1


def test_one_arena_for_all_shapes_of_a_block_is_freed_with_it(
    arenas: weakref.WeakSet[Arena],
) -> None:
    """A block has its own: what another has computed is read after it has run."""
    net, other = planned(mlp(), how="schedule"), planned(mlp("other_"), how="schedule")
    for size in (4, 8, 6, 2, 8):
        x, y = batch(0, size)
        with autograd.record():
            loss = LOSS(net(x), y) + LOSS(other(x), y)
        loss.backward()
        del loss
        mx.nd.waitall()
        gc.collect()
        assert len(arenas) == 2, size
    for block in (net, other):
        unplan(block)
    gc.collect()
    assert not arenas
