"""Networks that find objects train to the same bits, and what is written in Python runs once."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable

import memonger
import numpy as np
import pytest

import networks
from planned import HOWS, marked, module_plan
from zoo import Builders

STEPS = 3

NETWORKS: Builders = {
    "rcnn": lambda: networks.rcnn(
        image=256, classes=3, objects=16, filters=16, blocks=3, regions=32, hidden=32
    ),
    "ssd": lambda: networks.detection(batch=1, image=256, classes=3, objects=16, filters=16),
}


def objects(count: int = 16) -> np.ndarray:
    """Return the labels of an image with objects of three classes."""
    corners = np.random.RandomState(0).uniform(0, 0.8, (count, 2))
    return np.concatenate([np.arange(count)[:, None] % 3, corners, corners + 0.2], axis=1)[None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the operators in Python, and those that have found an object."""
    counts: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def count(self: Any, *arguments: Any, **keywords: Any) -> None:
            call(self, *arguments, **keywords)
            counts[name] += 1
            is_target = isinstance(self, networks.ProposalTarget) and name == "forward"
            counts["found"] += is_target and bool(keywords["out_data"][0].asnumpy().any())

        return count

    for operator in (networks.ProposalTarget, networks.HardSwish):
        for name in ("forward", "backward"):
            monkeypatch.setattr(operator, name, counting(name, getattr(operator, name)))
    return counts


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("how", HOWS)
def test_what_finds_objects_trains_to_the_same_bits(
    name: str, how: str, calls: Counter[str]
) -> None:
    symbol, shapes = NETWORKS[name]()
    if how == "marks":
        planned = memonger.make_mirror_plan(symbol, 0, shapes=shapes)  # all that it may
        assert {"rcnn": "pooled", "ssd": "detection"}[name] in marked(planned)
    else:
        plan = module_plan(symbol, shapes, patience=0.02, **HOWS[how])
        assert plan.recomputed and plan.exact and plan.pool_bytes < 0.6 * plan.unplanned_bytes
        planned = plan.symbol
    report = memonger.check(symbol, planned, shapes, STEPS, values={"label": objects()})
    assert report, str(report)
    assert calls["forward"] == 2 * STEPS  # of the network and of its plan
    # No gradient goes through regions, so that MXNet has none of their targets.
    assert (calls["found"], calls["backward"]) == {
        "rcnn": (2 * STEPS, 0),
        "ssd": (0, 2 * STEPS),
    }[name]
