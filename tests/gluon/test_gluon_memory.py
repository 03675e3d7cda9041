"""Planned Gluon blocks: who frees what they have bound, and the memory of a process."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
from memonger.gluon import unplan
from memonger.schedules.execution.arena import Arena
from mxnet import autograd
from mxnet.gluon import nn

from blocks import LOSS, batch, mlp, planned, taught
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


def test_calls_that_are_never_differentiated_share_two_pools(
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


def test_one_arena_for_all_shapes_of_a_block_is_freed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block has its own: what another has computed is read after it has run."""
    arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
    begin = Arena.__init__

    def noted(self: Arena, ctx: Any) -> None:
        begin(self, ctx)
        arenas.add(self)

    monkeypatch.setattr(Arena, "__init__", noted)
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
