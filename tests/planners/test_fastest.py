"""Budgets: the fastest plan that fits; the frontier; the largest batch."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from memonger import BudgetError
from memonger.schedules.layouts import LayoutMismatch
from memonger.support.cache import forget

import networks
from networks.mixed import mobilenet_v3
from generated import networks as generated
from interrupting import press_ctrl_c
from planned import marked

SHAPES = {"data": (4, 3, 64, 64)}
BATCHES: dict[str, Any] = {"data": (None, 3, 64, 64)}


def net() -> Any:
    return networks.resnet((1, 1, 1, 1), batch=4, image=64)[0]


@pytest.mark.parametrize("how", ["marks", "schedule", "auto"])
def test_all_of_it_recomputes_nothing(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = press_ctrl_c(monkeypatch)
    for budget in ("100%", 1.0, 10**12):
        plan = memonger.plan(net(), SHAPES, how=how, budget=budget)
        assert plan.planner == "no plan" and not plan.recomputed and not marked(plan.symbol)
        assert plan.pool_bytes == plan.unplanned_bytes and plan.time_overhead == 0
        assert plan.schedule is None and plan.recompute_overhead == 0
    assert not begun and not [r for r in caplog.records if r.levelno >= logging.WARNING]
    kept = {t.why for t in plan.explain().tensors if t.choice == "kept"}
    assert "budget" in kept <= {"budget", "cheap", "output"}


def test_a_budget_that_cannot_be_met() -> None:
    with pytest.raises(BudgetError) as caught:
        memonger.plan(net(), SHAPES, budget="1%", how="marks")
    message, least = str(caught.value), caught.value.least_bytes
    assert str(least) in message and "Its peak of " in message
    assert "Every plan needs at least " in message and ", for the gradient of " in message
    fitting = memonger.plan(net(), SHAPES, budget=least, how="marks")
    assert fitting.pool_bytes == least
    with pytest.raises(BudgetError):
        memonger.plan(net(), SHAPES, budget=least - 1, how="marks")


@pytest.mark.full_search
def test_the_least_does_not_depend_on_the_budget() -> None:
    """Nor on which plans are near it: one that was found may take less than the search thought."""
    symbol, shapes = mobilenet_v3()
    least: list[int] = []
    for share in (0.01, 0.85, 0.93, 0.999):
        with pytest.raises(BudgetError) as caught:
            budget = int(share * least[0]) if least else 1000
            memonger.plan(symbol, shapes, budget=budget, patience=0.05, how="marks")
        least.append(caught.value.least_bytes)
    assert len({*least}) == 1


def test_a_budget_of_the_device_counts_the_optimizer() -> None:
    symbol = net()
    planned = functools.partial(memonger.plan, symbol, SHAPES, budget_of="device", how="marks")
    plain = planned(budget=1.0)
    sizes = zip(symbol.list_arguments(), symbol.infer_shape(**SHAPES)[0])
    learned = sum(int(np.prod(s)) for name, s in sizes if name not in SHAPES)
    budget = plain.device_bytes + 8 * learned - plain.unplanned_bytes // 2
    plan = planned(budget=budget, optimizer="adam")
    assert plan.device_bytes + 8 * learned <= budget and plan.recomputed
    assert not planned(budget=budget).recomputed  # without the state it fits as it is
    with pytest.raises(BudgetError, match="parameters, gradients, inputs, the optimizer's state"):
        planned(budget=8 * learned, optimizer="adam")


def test_one_search_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = press_ctrl_c(monkeypatch)
    for budget in (0.9, 0.7, 0.5):
        memonger.plan(net(), SHAPES, budget=budget, how="marks")
    memonger.frontier(net(), SHAPES, points=3, how="marks")
    assert len(begun) == 1
    memonger.plan(net(), {"data": (5, 3, 64, 64)}, budget=0.7, how="marks")
    assert len(begun) == 2


@pytest.mark.parametrize("how", ["marks", "schedule", "auto"])
def test_a_frontier_has_plans_that_nothing_beats(how: str) -> None:
    plans = memonger.frontier(net(), SHAPES, how=how, points=40)
    pools, added = [p.pool_bytes for p in plans], [p.time_overhead for p in plans]
    assert isinstance(plans, tuple) and pools == sorted(set(pools), reverse=True)
    kinds = [plan.kind for plan in plans]
    assert kinds[0] == "none" and added[0] == 0 and pools[0] == plans[0].unplanned_bytes
    if how == "marks":
        assert {*kinds[1:]} == {"marks"} and added == sorted(set(added))
    else:  # what is only placed is as fast as no plan, and smaller
        assert {*kinds[2:]} == {"schedule"} and added[1:] == sorted(set(added))
        assert kinds[1] == "placed" and added[1] == 0 and not plans[1].recomputed
    assert all(p.exact and p.planner for p in plans) and not plans.interrupted
    assert any(p.schedule is not None for p in plans) == (how != "marks")
    assert 4 < len(plans) <= 40
    few = memonger.frontier(net(), SHAPES, how=how, points=6)
    assert 3 <= len(few) <= 6 and few[-1].pool_bytes == pools[-1]
    lines = str(few).split("\n")
    assert lines[0] == "      memory    share   added time recomputed   copies  plan"
    sizes = [re.match(r" *\d+\.\d MiB ", line) for line in lines[1 : len(few) + 1]]
    assert all(sizes)
    assert lines[1].endswith("   100 %        0.0 %          0        0  no plan")
    assert all(line.endswith(f"  {how}") for line in lines[2:]) == (how == "marks")
    if how != "marks":
        assert lines[2].endswith(" 0        0  nothing recomputed, placed by memonger")
        assert lines.pop() == (
            "where nothing is recomputed, placing alone saves memory, because memonger puts each "
            "tensor anywhere in one arena, and MXNet does not split the blocks that it reuses"
        )
    assert len(lines) == 1 + len(few)
    two = memonger.frontier(net(), SHAPES, how=how, points=2)
    assert [p.pool_bytes for p in two] == [pools[0], pools[-1]]
    for p in plans[1::5]:
        again = memonger.plan(net(), SHAPES, how=how, budget=p.pool_bytes)
        assert again.pool_bytes <= p.pool_bytes
        assert again.time_overhead <= p.time_overhead * (1 + 1e-9)
    if how == "marks":
        assert pools[-1] <= memonger.plan(net(), SHAPES, how="marks").pool_bytes


def test_auto_takes_marks_where_there_is_no_schedule(caplog: pytest.LogCaptureFixture) -> None:
    x = mx.sym.Variable("data")
    for k in range(6):
        x = mx.sym.FullyConnected(mx.sym.Activation(x, "tanh"), num_hidden=64, name=f"f{k}")
    x = mx.sym.contrib.foreach(lambda row, state: (row, state), x, [])[0]
    symbol, shapes = mx.sym.LinearRegressionOutput(x, name="out"), {"data": (512, 64)}
    caplog.set_level("INFO")
    marks: Any = memonger.plan(symbol, shapes, budget=0.8, how="marks")
    auto: Any = memonger.plan(symbol, shapes, how="auto", budget=0.8)
    assert auto.symbol.tojson() == marks.symbol.tojson() and auto.recomputed
    plans = memonger.frontier(symbol, shapes, how="auto")
    assert plans[0].planner == "no plan" and "planning by marks, because no schedule" in caplog.text
    with pytest.raises(memonger.MemongerError, match="foreach"):
        memonger.plan(symbol, shapes, how="schedule", budget=0.8)
    for how, words in (("schedule", "foreach"), ("both", "how='both' is unknown")):
        with pytest.raises(memonger.MemongerError, match=words):
            memonger.frontier(symbol, shapes, how=how)


def refused_by_layouts() -> tuple[Any, Any]:
    """Build a network in which each schedule would change the layout of a gradient."""
    x = mx.sym.softmax(mx.sym.Variable("data"), axis=1)
    x = mx.sym.L2Normalization(x, mode="spatial")
    x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=24)
    for _ in range(4):
        x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=64))
    return mx.sym.MakeLoss(x), {"data": (2, 3, 12, 12)}


def test_auto_takes_marks_where_layouts_refuse_all_schedules() -> None:
    symbol, shapes = refused_by_layouts()
    marks: Any = memonger.plan(symbol, shapes, how="marks")
    assert marks.is_used
    for limits in ({"budget": marks.pool_bytes}, {"slower_than": 1 + marks.time_overhead}):
        auto: Any = memonger.plan(symbol, shapes, **limits)
        assert auto.symbol.tojson() == marks.symbol.tojson()
        with pytest.raises(LayoutMismatch, match="how='marks' can plan this network"):
            memonger.plan(symbol, shapes, how="schedule", **limits)


def test_auto_takes_marks_within_a_budget_that_no_schedule_meets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An arena takes a little more than what is alive in it."""
    x = mx.sym.Variable("data")
    for _ in range(3):
        x = mx.sym.Convolution(x, kernel=(3, 3, 3), pad=(1, 1, 1), num_filter=16)
        x = mx.sym.softmax(x, axis=1)
    planned = functools.partial(memonger.plan, mx.sym.MakeLoss(x), {"data": (2, 16, 4, 8, 8)})
    marks: Any = planned(how="marks")
    with pytest.raises(BudgetError):
        planned(how="schedule", budget=marks.pool_bytes)
    auto: Any = planned(budget=marks.pool_bytes)
    assert auto.is_used and auto.symbol.tojson() == marks.symbol.tojson()
    assert "planning by marks, because no schedule is within the limits" in caplog.text
    with pytest.raises(BudgetError) as raised:
        planned(budget=marks.pool_bytes - 1)
    assert raised.value.least_bytes == marks.pool_bytes


@pytest.mark.parametrize("helps", [True, False])
def test_the_largest_batch_fits_and_one_more_does_not(helps: bool) -> None:
    """Where no plan saves anything, it is the batch that fits without."""
    small = networks.chain(1, hidden=4, batch=8)[0]
    symbol, budget, *shape = (net(), 60_000_000, 3, 64, 64) if helps else (small, 3000, 4)
    largest = memonger.largest_batch(symbol, {"data": (None, *shape)}, budget, how="marks")
    assert largest.plan.pool_bytes <= budget and bool(largest.plan.recomputed) == helps
    assert (largest.batch > largest.unplanned_batch > 0) == helps
    assert (
        (largest.batch == largest.unplanned_batch) == (largest.plan.planner == "no plan") != helps
    )
    for batch, fits in ((largest.unplanned_batch, True), (largest.unplanned_batch + 1, False)):
        assert (memonger.pool_bytes(symbol, data=(batch, *shape)) <= budget) == fits
    assert str(largest).startswith(f"a batch of {largest.batch} fits with a plan, of ")


def test_a_wrong_call_of_largest_batch_is_refused() -> None:
    none = "has None for the batch"
    calls: list[Any] = [
        (BATCHES, "1kB", "not even a batch of 1"),
        *((BATCHES, budget, "budget in bytes") for budget in ("50%", None)),
        *((sizes, "1GB", none) for sizes in (SHAPES, [*SHAPES.items()])),
        ({"data": 4}, "1GB", "a shape is a tuple"),
    ]
    for shapes, budget, words in calls:
        with pytest.raises(memonger.MemongerError, match=words):
            memonger.largest_batch(net(), shapes, budget, how="marks")


def test_the_largest_batch_reads_an_iterators_layouts() -> None:
    """Its layouts tell where the batch goes; how large it was does not count."""
    described = [mx.io.DataDesc("data", (2, 3, 64, 64)), mx.io.DataDesc("softmax_label", (2,))]
    largest = memonger.largest_batch(net(), described, "60MB", how="marks")
    told = memonger.largest_batch(net(), BATCHES, "60MB", how="marks")
    assert (largest.batch, largest.unplanned_batch) == (told.batch, told.unplanned_batch)
    half = [mx.io.DataDesc("data", (None, 3, 64, 64), "float16")]
    assert (
        memonger.largest_batch(net(), half, "60MB", how="marks").unplanned_batch
        > largest.unplanned_batch
    )


def test_auto_takes_the_faster_way() -> None:
    plans: list[Any] = []
    least: list[int] = []
    for how in ("marks", "schedule", "auto"):
        plans.append(memonger.plan(net(), SHAPES, how=how, budget=0.6, patience=0.05))
        with pytest.raises(BudgetError) as caught:
            memonger.plan(net(), SHAPES, how=how, budget="1%", patience=0.05)
        least.append(caught.value.least_bytes)
    marks, schedule, auto = plans
    assert auto.schedule is not None and auto.pool_bytes <= 0.6 * auto.unplanned_bytes
    # A kept convolution costs a schedule nothing, and marks one more run of it.
    assert auto.time_overhead == schedule.time_overhead < marks.time_overhead
    assert least[2] == min(least)


def test_a_budget_and_a_limit_of_work_that_a_plan_keeps() -> None:
    """The schedules that are fastest for their memory may all take more work than one that fits."""
    planned = functools.partial(memonger.plan, *networks.chain(16), how="schedule", patience=0.1)
    least = planned(work=2.0)
    both = planned(work=2.0, budget=least.pool_bytes)
    assert both.pool_bytes <= least.pool_bytes and both.recompute_overhead <= 1 + 1e-9
    with pytest.raises(memonger.BudgetError, match="with work=1 was found"):
        planned(work=1.0, budget=0.3)


@pytest.mark.slow
def test_the_smallest_schedule_is_one_of_those_within_a_budget() -> None:
    """An arena is little larger than what is alive."""
    network = networks.mobilenet_v2()
    planned = functools.partial(memonger.plan, *network, how="schedule", ctx=mx.cpu())
    plan = planned(work=2)
    assert plan.peak_bytes <= plan.pool_bytes < 1.03 * plan.peak_bytes
    fastest = planned(budget=plan.pool_bytes, work=2)
    assert fastest.pool_bytes <= plan.pool_bytes
    assert fastest.predict_time() <= plan.predict_time() * (1 + 1e-9)  # sums are rounded


# -- over generated networks ------------------------------------------------------------------

SHARES = [0.3, 0.5, 0.7, 0.85, 0.95]


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.late) for how in ("marks", "auto")), "schedule"]
)
@settings(max_examples=8)
@given(generated(), st.randoms(use_true_random=False))
def test_more_memory_is_never_slower(how: str, drawn: Any, random: Any) -> None:
    symbol, shapes = drawn
    forget()

    def planned(share: float) -> Any:
        return memonger.plan(symbol, shapes, how=how, budget=share, patience=0.01)

    whole = planned(1.0)
    assert whole.time_overhead == 0 and not whole.recomputed and whole.recompute_overhead == 0
    limit = whole.unplanned_bytes
    order = list(SHARES)
    random.shuffle(order)
    added = {}
    for share in order:
        try:
            plan = planned(share)
        except memonger.BudgetError as error:
            assert error.least_bytes > share * limit - 1
            added[share] = float("inf")
            continue
        assert plan.pool_bytes <= share * limit
        assert plan.time_overhead >= 0
        assert (plan.time_overhead > 0) == bool(plan.recomputed) or how != "marks"
        added[share] = plan.time_overhead
    times: list[float] = [added[share] for share in SHARES]
    assert times == sorted(times, reverse=True)
    for share, time in zip(SHARES, times):  # and nothing is remembered otherwise
        if time < float("inf"):
            assert planned(share).time_overhead == time
