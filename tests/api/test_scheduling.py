"""``memonger.plan(how='schedule')``: limits of work and memory, and what the plan tells."""

from __future__ import annotations

import json
from typing import Any, Dict, Tuple

import memonger
import numpy as np
import pytest
from memonger.costs.held import rounded
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.support.errors import BudgetError

import networks
from interrupting import press_ctrl_c
from planned import as_module

MB = 2**20
Network = Tuple[Any, Dict[str, Any]]


def layers(depth: int = 24) -> Network:
    """Each tensor 64 KB, a weight 4 KB."""
    return networks.chain(depth, hidden=32, batch=512)


def planned(network: Network, **options: Any) -> memonger.Plan:
    symbol, shapes = network
    options.setdefault("grad_req", as_module(symbol, shapes))
    return memonger.plan(symbol, shapes, how="schedule", **options)


def test_less_memory_for_more_work() -> None:
    network = layers(48)
    marks = memonger.plan(*network, grad_req=as_module(*network))
    plans = [planned(network, work=work) for work in (1.5, 2.0, 3.0, None)]
    assert all(p.exact and isinstance(p.symbol, ScheduledSymbol) for p in plans)
    assert all(p.recomputed_flops <= w - 1 for p, w in zip(plans, (1.5, 2.0, 3.0)))
    pools = [p.pool_bytes for p in plans]
    assert pools == sorted(pools, reverse=True) and pools[-1] < pools[1] < marks.pool_bytes
    times = np.bincount(plans[-1].schedule.forwards)  # type: ignore[union-attr]
    assert times.max() > 2  # no marks can do that
    with pytest.raises(memonger.MemongerError, match="give more memory or more work"):
        planned(network, budget=pools[-1], work=1.1)


def test_memory_is_told_as_mxnet_allocates_it() -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=4, image=64)
    plan = memonger.plan(symbol, shapes, how="schedule", work=2.0)
    assert plan.exact and not plan.copies
    # Both tell the pool without the gradients in it, to be compared with those of no plan.
    assert plan.pool_bytes == memonger.pool_bytes(plan.symbol, shapes=shapes)
    assert plan.pool_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)
    assert plan.unplanned_bytes // MB == memonger.get_cost(symbol, shapes=shapes)
    assert plan.counted_bytes == plan.pool_bytes + plan.gradient_bytes
    found = zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])
    parameters = (int(np.prod(shape)) for name, shape in found if name != "softmax_label")
    assert plan.gradient_bytes == 4 * sum(parameters)  # that of the label is never written
    assert plan.peak_bytes <= plan.pool_bytes < plan.unplanned_bytes
    assert set(plan.kept) | set(plan.recomputed) == {
        node["name"] for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"
    }


def test_gradients_that_are_added_are_no_part_of_the_pool() -> None:
    network = networks.chain(24, hidden=512, batch=128)
    written, added = (
        planned(network, work=3.0, grad_req=dict(as_module(*network), **change))
        for change in ({}, {"fc0_weight": "add"})
    )
    assert written.exact and added.exact
    assert written.gradient_bytes - added.gradient_bytes == 4 * 512 * 512
    one = planned(network, work=3.0, grad_req={"fc0_weight": "add"})
    assert one.exact and one.gradient_bytes == 0


def test_the_memory_of_a_device() -> None:
    """The pool's blocks, what it is bound to, and the gradients that are not in the pool."""
    hidden = 512
    symbol, shapes = networks.chain(8, hidden, batch=512)
    requests = dict(as_module(symbol, shapes), fc0_weight="add")
    plan = planned((symbol, shapes), work=3.0, grad_req=requests)
    found = symbol.infer_shape(**shapes)[0]
    arguments = sum(int(rounded(Tensor(s, "float32").nbytes)) for s in found)
    blocks = plan.device_bytes - arguments - 4 * hidden**2
    assert 0 <= blocks - plan.counted_bytes < 4096 * 200


@pytest.mark.parametrize(
    "network",
    [
        layers(48),
        networks.resnet((1, 1, 1, 1), batch=1, image=32),  # gradients 100 times its activations
        networks.lstm(layers=1, steps=8, hidden=64, batch=2, labels=20),  # sums in place
    ],
    ids=["chain", "resnet", "lstm"],
)
def test_a_budget_that_can_be_met_is_met(network: Network) -> None:
    """With the less work the larger it is."""
    smallest = planned(network)
    least, more = smallest.pool_bytes, smallest.unplanned_bytes - smallest.pool_bytes
    budgets = (least, least + more // 50, least + more // 10)
    plans = [planned(network, budget=budget) for budget in budgets]
    assert all(p.pool_bytes <= budget for p, budget in zip(plans, budgets))
    assert plans[0].recomputed_flops > plans[-1].recomputed_flops
    with pytest.raises(BudgetError, match="no schedule was found that needs at most") as caught:
        planned(network, budget=least // 4)
    enough = caught.value.least_bytes
    # A search for the least that fits may find a little more or less than one for the least.
    assert enough == pytest.approx(least, rel=0.25)
    assert planned(network, budget=enough).pool_bytes <= enough


def test_what_comes_after_a_layer_is_kept() -> None:
    plan = planned(layers(), work=3.0, until="fc12")
    assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    assert all(int(name[4 if name[0] == "t" else 2 :]) < 12 for name in plan.recomputed)


def test_an_interrupted_search(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    press_ctrl_c(monkeypatch, 0.3)
    plan = planned(layers(), work=2.0)
    assert plan.interrupted and plan.exact and "interrupted" in caplog.text
    assert plan.pool_bytes < plan.unplanned_bytes and plan.recomputed_flops <= 1


@pytest.mark.parametrize("limits", [{}, {"work": 2.0}, {"budget": 0.5}])
def test_interrupted_before_it_has_begun(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    press_ctrl_c(monkeypatch, 0.0)
    with pytest.raises(KeyboardInterrupt):
        planned(layers(48), **limits)


def test_planned_anew() -> None:
    symbol, shapes = layers()
    first = planned((symbol, shapes), work=2.0)
    assert not isinstance(memonger.unplan(first.symbol), ScheduledSymbol)
    marks = memonger.plan(first.symbol, shapes)
    assert marks.pool_bytes == memonger.plan(symbol, shapes).pool_bytes
    assert not isinstance(marks.symbol, ScheduledSymbol)


def test_what_no_plan_can_do_without_is_no_more_than_what_was_found() -> None:
    """A schedule's results may lie where a gradient will be."""
    network = networks.chain(24, hidden=256, batch=16)  # more bytes of gradients than are alive
    with pytest.raises(BudgetError, match=r"the smallest needs \d+ bytes \(\d+\.\d KB\)\.$"):
        planned(network, budget=1000, patience=0.05)
    with pytest.raises(BudgetError, match=r"No plan can do with less .*'tanh3'.* needs them\.$"):
        planned(layers(4), budget=1000, patience=0.05)
