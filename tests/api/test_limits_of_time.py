"""Limits of time (``slower_than=``), the knee of the front, and plans that are worth it."""

from __future__ import annotations

import logging
from typing import Any

import memonger
import mxnet as mx
import networks
import numpy as np
import pytest

from planned import assert_alike


WAYS = ("marks", "schedule", "auto")
NETWORK = networks.resnet_v2((1, 1, 1, 1), batch=2, image=64, filters=16)


def points(how: str) -> list[tuple[int, float]]:
    """Return memory and time of all plans that no other beats, the fastest first."""
    plans = memonger.frontier(*NETWORK, how=how, points=1000)
    beaten = 1 if plans[1].kind == "placed" else 0  # the network without a plan
    return [(plan.pool_bytes, plan.time_overhead) for plan in plans[beaten:]]


def point(**options: Any) -> tuple[int, float]:
    plan = memonger.plan(*NETWORK, **{"how": "marks", **options})
    return plan.pool_bytes, plan.time_overhead


@pytest.mark.one_plan
@pytest.mark.parametrize("how", WAYS)
def test_the_knee_is_nearest_to_the_least_of_both(how: str) -> None:
    front = np.array(points(how))
    scaled = (front - front.min(axis=0)) / np.ptp(front, axis=0)
    nearest = front[np.argmin(np.hypot(*scaled.T))].tolist()
    # The search counts bytes a little otherwise than what is bound.
    assert list(point(how=how, budget="knee")) == pytest.approx(nearest, rel=0.1)
    assert 0 < nearest[1] and nearest[0] < front[0][0]


@pytest.mark.one_plan
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("slower_than", [1, 1.1])
def test_the_smallest_plan_within_a_time_is_taken(how: str, slower_than: float) -> None:
    within = [pair for pair in points(how) if 1 + pair[1] <= slower_than + 1e-9]
    pool_bytes, time = point(how=how, slower_than=slower_than)
    assert 1 + time <= slower_than + 1e-9
    assert pool_bytes <= min(within)[0] * 1.01
    knee = point(how=how, slower_than=slower_than, budget="knee")
    assert knee[0] >= pool_bytes and 1 + knee[1] <= slower_than + 1e-9


@pytest.mark.one_plan
@pytest.mark.parametrize("how", WAYS)
def test_a_budget_and_a_time_hold_both_or_name_both(how: str) -> None:
    by_budget = point(how=how, budget="60%")
    assert point(how=how, budget="60%", slower_than=1 + by_budget[1]) == by_budget
    with pytest.raises(memonger.BudgetError) as raised:
        memonger.plan(*NETWORK, how=how, budget="60%", slower_than=1 + by_budget[1] / 2)
    within = point(how=how, slower_than=1 + by_budget[1] / 2)
    for nbytes, time in (by_budget, within):
        assert f"{nbytes} bytes" in str(raised.value)
        assert f"{1 + time:.3f} times" in str(raised.value)
    assert raised.value.least_bytes == by_budget[0]


def test_forced_recomputation_takes_its_time() -> None:
    with pytest.raises(memonger.BudgetError, match="for slower_than=1.001; the fastest takes 1\\."):
        memonger.plan(*NETWORK, recompute="::Convolution", slower_than=1.001, how="marks")


@pytest.mark.one_plan
def test_auto_is_the_smallest_schedule_of_one_more_pass() -> None:
    symbol, shapes = NETWORK
    plan = memonger.plan(symbol, shapes)  # by default
    smallest = memonger.plan(symbol, shapes, how="schedule", work=2.0)
    assert plan.schedule is not None and smallest.schedule is not None and not plan.declined
    assert np.array_equal(plan.schedule.operations, smallest.schedule.operations)
    assert plan.recompute_overhead <= 1 + 1e-9
    assert_alike(symbol, plan.symbol, {"data": (2, 3, 32, 32)})


def costly() -> tuple[Any, Any]:
    """Build a network whose recomputation costs a larger share of time than it saves of memory."""
    x = mx.sym.Variable("data")
    for k in range(24):
        x = mx.sym.FullyConnected(x, num_hidden=1024, no_bias=True, name=f"fc{k}")
    x = mx.sym.broadcast_axis(mx.sym.reshape(x, shape=(64, 1024, 1)), axis=2, size=48)
    return mx.sym.MakeLoss(mx.sym.tanh(x)), {"data": (64, 1024)}


def test_auto_takes_no_plan_that_is_not_worth_its_time() -> None:
    symbol, shapes = costly()
    smallest = memonger.plan(symbol, shapes, how="schedule", work=2.0)
    saved = 1 - smallest.pool_bytes / smallest.unplanned_bytes
    assert smallest.recomputed and 0.05 < saved < smallest.time_overhead
    plan = memonger.plan(symbol, shapes, how="auto")
    assert not plan.recomputed and plan.time_overhead == 0
    assert f"save {100 * saved:.0f} %" in plan.declined and plan.declined in str(plan)
    assert plan.declined.endswith("; 10 %, and as large a share of memory as of time, is required")
    assert plan.is_used == (plan.pool_bytes <= 0.9 * plan.unplanned_bytes)


@pytest.mark.full_search
def test_auto_takes_marks_where_the_smallest_schedule_takes_more() -> None:
    """Tensors of 128 bytes, which an arena aligns to 256."""
    cell = mx.gluon.rnn.ZoneoutCell(mx.gluon.rnn.RNNCell(16, input_size=16), 0.1)
    states = cell.begin_state(batch_size=2, func=mx.sym.zeros)
    x, _ = cell.unroll(8, mx.sym.Variable("data"), begin_state=states, merge_outputs=True)
    symbol, shapes = mx.sym.FullyConnected(x, num_hidden=10, flatten=False), {"data": (2, 8, 16)}
    auto, marks, smallest = (
        memonger.plan(symbol, shapes, patience=1.0, **limits)
        for limits in ({}, {"how": "marks"}, {"how": "schedule", "work": 2.0})
    )
    assert auto.is_used and auto.symbol.tojson() == marks.symbol.tojson()
    assert auto.pool_bytes < smallest.pool_bytes
    assert auto.time_overhead <= 1 - auto.pool_bytes / auto.unplanned_bytes


def test_auto_takes_the_smallest_schedule_that_is_worth_its_time() -> None:
    """In this network the smallest of all is not, but others that the search finds are."""
    x = mx.sym.Variable("data")
    for _ in range(8):
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=32), act_type="tanh")
        x = mx.sym.Dropout(mx.sym.BatchNorm(x, fix_gamma=False), p=0.2)
    symbol, shapes = mx.sym.FullyConnected(x, num_hidden=10), {"data": (8, 20)}
    smallest = memonger.plan(symbol, shapes, how="schedule", work=2.0)
    assert smallest.time_overhead > 1 - smallest.pool_bytes / smallest.unplanned_bytes
    auto = memonger.plan(symbol, shapes)
    assert auto.schedule is not None and auto.recomputed
    assert auto.time_overhead <= 1 - auto.pool_bytes / auto.unplanned_bytes


def test_a_schedule_that_saves_much_more_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memonger")
    symbol, shapes = NETWORK
    memonger.search_plan(symbol, shapes=shapes)
    assert "a schedule would take about" in caplog.text
    caplog.clear()
    memonger.search_plan(symbol, how="schedule", shapes=shapes)
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    memonger.search_plan(mx.sym.SoftmaxOutput(x), data=(4, 4))
    assert "would take about" not in caplog.text
