"""Ctrl-C while plans are searched for: one contract for all calls and all moments.

Once anything was found it is returned, marked as interrupted, with a warning, and it is not
remembered. Before that KeyboardInterrupt is raised.
"""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import pytest

import networks
from interrupting import press_ctrl_c


MB = 2**20
NETWORK: Any = networks.resnet((1, 1, 1, 1), batch=4, image=64)
BATCHES: dict[str, Any] = {"data": (None, 3, 64, 64)}
CHEN: Any = {"planner": "chen2016"}
SCHEDULE: Any = {"how": "schedule", "work": 2.0}
BUDGET: Any = {"budget": "80%", "patience": 0.05}


def plans_by(call: str, **options: Any) -> tuple[list[memonger.Plan], Any]:
    """Return the plans that a call returns, the largest first, and what it returns."""
    options.setdefault("how", "marks")
    if call == "largest_batch":
        largest = memonger.largest_batch(NETWORK[0], BATCHES, **{"budget": "60MB", **options})
        return [largest.plan], largest
    result = getattr(memonger, call)(*NETWORK, **options)
    return [result] if call == "plan" else [*result], result


SMALLEST, FASTEST = "interrupted: returning the smallest ", "returning the fastest plan within"
LARGEST, FRONTIER = "is the largest that was found so far", "interrupted"
#: The call, its options, what share of the so-manieth search is done, and what is warned of.
FOUND: list[tuple[str, dict[str, Any], float, int, str]] = [
    ("plan", {}, 0.05, 1, SMALLEST),
    ("plan", {}, 0.9, 1, SMALLEST),
    ("plan", CHEN, 0.3, 1, SMALLEST),
    ("plan", SCHEDULE, 0.3, 1, SMALLEST),
    ("plan", BUDGET, 0.6, 1, FASTEST),
    ("frontier", {"points": 4}, 0.4, 1, FRONTIER),
    ("frontier", {"points": 4}, 0.6, 1, FRONTIER),
    ("frontier", {"points": 4, "how": "schedule"}, 0.6, 2, FRONTIER),
    ("largest_batch", {}, 0.6, 1, LARGEST),
    ("largest_batch", {}, 0.0, 2, LARGEST),
    ("largest_batch", {}, 0.6, 2, LARGEST),
]


@pytest.mark.parametrize(("call", "options", "share", "search", "warning"), FOUND)
def test_what_was_found_is_returned_with_a_warning_and_not_remembered(
    call: str,
    options: dict[str, Any],
    share: float,
    search: int,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = press_ctrl_c(monkeypatch, share, search)
    plans, result = plans_by(call, **options)
    plan = plans[-1]
    assert len(begun) == search
    assert getattr(result, "interrupted", plan.interrupted) and plan.exact and plan.recomputed
    assert plan.recompute_overhead <= (1 if plan.schedule is None else 4)
    assert plan.pool_bytes < plan.unplanned_bytes
    assert plan.pool_bytes <= (0.8 * plan.unplanned_bytes if "budget" in options else 60e6)
    assert (plan.schedule is None) == (options.get("how") != "schedule")
    shapes = {"data": (getattr(result, "batch", 4), 3, 64, 64)}
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)
    (message,) = [message for message in caplog.messages if warning in message]
    if warning == SMALLEST:
        assert f"{plan.counted_bytes / MB:.1f} MiB" in message and "interrupted" in str(plan)
    if call == "frontier":
        assert plans[0].planner == "no plan" and len(plans) > 1
    if call == "largest_batch":
        assert result.batch > result.unplanned_batch > 0
        assert f"a batch of {result.batch} " in message
    else:
        whole, again = plans_by(call, **options)
        assert not again.interrupted
        assert "budget" in options or whole[-1].pool_bytes <= plan.pool_bytes


@pytest.mark.parametrize(
    ("call", "options", "share"),
    [
        ("plan", {}, -1),
        ("plan", CHEN, -1),
        ("plan", {"how": "schedule"}, 0),
        ("plan", SCHEDULE, 0),
        ("plan", {"how": "schedule", "budget": 0.5}, 0),
        ("frontier", {}, -1),
        ("largest_batch", {"budget": "3MB"}, -1),  # no batch fits without a plan
    ],
)
def test_before_anything_was_found_the_interrupt_is_raised(
    call: str, options: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_ctrl_c(monkeypatch, share)
    with pytest.raises(KeyboardInterrupt):
        plans_by(call, **options)
    if call == "plan":
        assert not memonger.plan(*NETWORK, **{"how": "marks", **options}).interrupted


def test_before_the_first_search_the_largest_batch_is_that_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    press_ctrl_c(monkeypatch, -1)
    (plan,), largest = plans_by("largest_batch")
    assert largest.batch == largest.unplanned_batch > 0
    assert plan.planner == "no plan" and plan.interrupted


def test_a_frontier_that_is_being_confirmed_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    plans_by("frontier", points=4)  # known from now on: nothing is bound but plans
    bind, bound = mx.sym.Symbol.bind, []

    def third(*args: Any, **options: Any) -> Any:
        bound.append(1)
        if len(bound) == 3:
            raise KeyboardInterrupt
        return bind(*args, **options)

    monkeypatch.setattr(mx.sym.Symbol, "bind", third)
    plans, frontier = plans_by("frontier", points=4)
    assert frontier.interrupted and len(plans) == 2
