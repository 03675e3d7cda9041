"""``memonger.plan(how='schedule')``: limits of work and memory, and what the plan tells."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.held import round_for_gpu
from memonger.graph.operators.tensors import Tensor
from memonger.planners.candidates import Candidate
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.schedules.layouts import LayoutMismatch
from memonger.schedules.schedule import Schedule
from memonger.solve.choose import choose_smallest
from memonger.solve.limits import Limits
from memonger.support.errors import BudgetError

import networks
from networks import Network
from planned import as_module
from zoo import drawn

MB = 2**20


def layers(depth: int = 24) -> Network:
    """Build a chain in which each tensor takes 64 KB and a weight 4 KB."""
    return networks.chain(depth, hidden=32, batch=512)


def planned(network: Network, **options: Any) -> memonger.Plan:
    symbol, shapes = network
    options.setdefault("grad_req", as_module(symbol, shapes))
    return memonger.plan(symbol, shapes, how="schedule", **options)


def test_more_work_saves_more_memory() -> None:
    network = layers(48)
    marks = memonger.plan(*network, grad_req=as_module(*network), how="marks")
    plans = [planned(network, work=work) for work in (1.5, 2.0, 3.0, None)]
    assert all(p.exact and isinstance(p.symbol, ScheduledSymbol) for p in plans)
    assert all(p.recompute_overhead <= w - 1 for p, w in zip(plans, (1.5, 2.0, 3.0)))
    pools = [p.pool_bytes for p in plans]
    assert pools == sorted(pools, reverse=True) and pools[-1] < pools[1] < marks.pool_bytes
    times = np.bincount(plans[-1].schedule.forwards)  # type: ignore[union-attr]
    assert times.max() > 2  # no marks can do that
    with pytest.raises(memonger.MemongerError, match="give more memory or more work"):
        planned(network, budget=pools[-1], work=1.1)


def test_a_budget_that_no_plan_fits_comes_with_what_would_fit() -> None:
    network = networks.chain(depth=12)
    schedule = (
        r" A schedule fits, with about 6\.0 MiB: how='schedule', which memonger run and enable "
        r"train; a network's file has marks alone\."
    )
    batch = r" A batch of about (\d+) in place of 256 fits; memonger batch finds the largest\.$"
    for how, budget, text in (("marks", 8_000_000, schedule), ("schedule", 4_500_000, r"\.")):
        options: Any = {"how": how, "budget": budget, "patience": 0.02}
        with pytest.raises(memonger.BudgetError) as raised:
            memonger.plan(*network, **options)
        found = re.search(text + batch, str(raised.value))
        assert found, raised.value
        assert memonger.plan(*networks.chain(depth=12, batch=int(found[1])), **options)


@pytest.mark.parametrize("seed", [5, 9])
def test_another_schedule_stands_in_for_one_that_would_round_otherwise(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "1")  # four spaces take more than such plans save
    symbol, shapes = drawn(seed)
    options: Any = {"ctx": mx.cpu(), "how": "schedule"}
    plans = [memonger.plan(symbol, shapes, work=work, **options) for work in (1.5, 3.0, None)]
    taken = [plans[0].unplanned_device_bytes, *[plan.device_bytes for plan in plans]]
    assert taken == sorted(taken, reverse=True) and taken[-1] < taken[0]
    for plan in memonger.frontier(symbol, shapes, **options):
        assert plan.device_bytes <= taken[0]
    budgeted = memonger.plan(symbol, shapes, budget="85%", **options)
    assert budgeted.device_bytes <= taken[0] and budgeted.pool_bytes < plans[0].unplanned_bytes


def test_placement_alone_saves_memory_where_nothing_is_recomputed() -> None:
    plan = planned(networks.lstm(layers=1, steps=8, hidden=64, batch=8, labels=20), work=1)
    assert isinstance(plan.symbol, ScheduledSymbol) and not plan.recomputed
    assert plan.pool_bytes < plan.unplanned_bytes and plan.recompute_overhead == 0


def test_the_memory_of_a_device_is_blocks_arguments_and_gradients() -> None:
    """Blocks, temporary space, what it is bound to, and gradients that are not in the pool."""
    hidden = 512
    symbol, shapes = networks.chain(8, hidden, batch=512)
    requests = dict(as_module(symbol, shapes), fc0_weight="add")
    plan = planned((symbol, shapes), work=3.0, grad_req=requests)
    argument_shapes = symbol.infer_shape(**shapes)[0]
    arguments = sum(int(round_for_gpu(Tensor(s, "float32").nbytes)) for s in argument_shapes)
    sizes = [s for n, s in zip(symbol.list_arguments(), argument_shapes) if requests[n] != "null"]
    gradients = sum(int(round_for_gpu(Tensor(s, "float32").nbytes)) for s in sizes)
    blocks = plan.device_bytes - plan.temporary_bytes - arguments - gradients
    assert 0 <= blocks - plan.counted_bytes < 2 * MB


@pytest.mark.parametrize(
    "network",
    [
        networks.resnet((1, 1, 1, 1), batch=1, image=32),  # gradients 100 times its activations
        networks.lstm(layers=1, steps=8, hidden=64, batch=2, labels=20),  # sums in place
    ],
    ids=["resnet", "lstm"],
)
def test_a_budget_that_can_be_met_is_met(network: Network) -> None:
    """With the less work the larger it is."""
    smallest = planned(network)
    least, more = smallest.pool_bytes, smallest.unplanned_bytes - smallest.pool_bytes
    budgets = (least, least + more // 50, least + more // 10)
    plans = [planned(network, budget=budget) for budget in budgets]
    assert all(p.pool_bytes <= budget for p, budget in zip(plans, budgets))
    assert plans[0].recompute_overhead > plans[-1].recompute_overhead
    with pytest.raises(BudgetError, match="no plan was found that needs at most") as caught:
        planned(network, budget=least // 4)
    enough = caught.value.least_bytes
    # A search for the least that fits may find a little more or less than one for the least.
    assert enough == pytest.approx(least, rel=0.25)
    assert planned(network, budget=enough).pool_bytes <= enough


def test_an_output_that_is_an_identity_of_another_is_counted_once() -> None:
    """Their schedule fits a budget of all that it takes."""
    cell, (data, *states) = mx.gluon.rnn.LSTMCell(64), map(mx.sym.Variable, ("data", "h", "c"))
    x, (_, memory) = cell(data, states)
    symbol = mx.sym.Group([x, mx.sym.identity(x), memory])
    network: Network = symbol, dict.fromkeys(("data", "h", "c"), (32, 64))
    smallest = planned(network)
    assert smallest.is_used
    assert planned(network, budget=smallest.pool_bytes).is_used


def test_a_scheduled_symbol_is_planned_anew_without_its_schedule() -> None:
    symbol, shapes = layers()
    first = planned((symbol, shapes), work=2.0)
    assert not isinstance(memonger.unplan(first.symbol), ScheduledSymbol)
    marks = memonger.plan(first.symbol, shapes, how="marks")
    assert marks.pool_bytes == memonger.plan(symbol, shapes, how="marks").pool_bytes
    assert not isinstance(marks.symbol, ScheduledSymbol)


def test_the_smallest_is_chosen_by_what_is_taken_and_not_by_what_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot win is not looked at, and what keeps no layouts is left out."""
    taken: dict[int, Any] = {10: None, 11: 15, 12: 13, 13: 12, 20: 11}  # by the bytes alive
    asked: list[int] = []

    def predict_memory(_: Any, plan: Candidate) -> Any:
        asked.append(plan.pool_bytes)
        if taken[plan.pool_bytes] is None:
            raise LayoutMismatch("laid out in another way")
        return SimpleNamespace(pool_bytes=taken[plan.pool_bytes], recomputed_flops=0.0)

    monkeypatch.setattr("memonger.solve.search.predict_memory", predict_memory)
    facts: Any = SimpleNamespace(limits=Limits())
    nothing = Schedule.of([])
    plans = [Candidate(nothing, nbytes, 0.0, "") for nbytes in sorted(taken, reverse=True)]
    plan, memory = choose_smallest(facts, plans)
    assert plan is not None and memory is not None
    assert (plan.pool_bytes, memory.pool_bytes, asked) == (12, 13, [10, 11, 12])
