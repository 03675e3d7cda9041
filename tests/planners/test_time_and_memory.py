"""More memory never makes a slower plan, and all of it none at all: over generated networks."""

from __future__ import annotations

from typing import Any

import memonger
from memonger.support.cache import forget
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from generated import networks
from test_fastest import a_device  # noqa: F401

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
SHARES = [0.3, 0.5, 0.7, 0.85, 0.95]


@pytest.mark.parametrize("how", ["marks", "schedule", "auto"])
@settings(max_examples=15, deadline=None, suppress_health_check=QUIET)
@given(networks(), st.randoms(use_true_random=False))
def test_more_memory_is_never_slower(how: str, drawn: Any, random: Any) -> None:
    """Whatever is asked for first."""
    symbol, shapes = drawn
    forget()

    def planned(share: float) -> Any:
        return memonger.plan(symbol, shapes, how=how, budget=share, patience=0.01)

    whole = planned(1.0)
    assert whole.added_time == 0 and not whole.recomputed and whole.recomputed_flops == 0
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
        assert plan.added_time is not None and plan.added_time >= 0
        assert (plan.added_time > 0) == bool(plan.recomputed) or how != "marks"
        added[share] = plan.added_time
    found: list[float] = [added[share] for share in SHARES]
    assert found == sorted(found, reverse=True)
    for share, time in zip(SHARES, found):  # and nothing is remembered otherwise
        if time < float("inf"):
            assert planned(share).added_time == time
