"""Random marks and kept copies on generated networks bind on MXNet's GPU build, through the rules.

Runs on stand-ins for CUDA (see the package's docstring). Run with ``-s`` to see the figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

TESTS = Path(__file__).resolve().parents[1]
NETWORKS = 200


def random_plans(dry: DryRun) -> Any:
    """Random marks and copies on random networks, through the rules and without them.

    Counts the networks, those in which something is recomputed, those with copies and with unfused
    ones, and those that do not bind with the same marks and copies without the rules.
    """
    import sys

    paths, networks, device = dry.args
    sys.path[:0] = paths
    import memonger  # noqa: F401
    import mxnet as mx
    import numpy as np
    from generated import build, recipes
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from memonger.graph import marks
    from memonger.graph.operators.recompute import targets_of
    from memonger.planners.marks.copies import copyable, settle
    from planned import rules_of

    counted = ("networks", "recomputed", "copies", "unfused", "unbound without rules")
    count = dict.fromkeys(counted, 0)

    def binds(symbol: Any, shapes: Any) -> str:
        request = {n: "null" if n in shapes else "write" for n in symbol.list_arguments()}
        try:
            symbol.simple_bind(mx.gpu(0), grad_req=request, **shapes)
        except RuntimeError as error:
            return str(error)
        return ""

    @settings(
        max_examples=10 * networks,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(), st.integers(0, 2**16), st.sampled_from([0.5, 0.9, 1.0]))
    def try_one(recipe: Any, seed: int, share: float) -> None:
        if count["networks"] == networks:
            return
        symbol, shapes = build(recipe)
        if binds(symbol, shapes):
            return  # MXNet cannot bind it unmarked
        rules = rules_of(symbol, shapes, targets_of(device))
        random = np.random.RandomState(seed)
        drawn = random.uniform(size=len(rules.graph.nodes)) < share
        kept = tuple(c for c in copyable(rules) if drawn[c.node] and random.uniform() < 0.3)
        bare = marks.apply(symbol, drawn, (), marks.inferable(symbol, kept, shapes))
        _, _, left, copies = settle(rules, drawn & rules.allowed, kept)
        copies = marks.inferable(symbol, copies, shapes)
        planned = marks.apply(symbol, left, rules.native(left), copies)
        failure = binds(planned, shapes)
        assert not failure, "%r %d %s %s" % (recipe, seed, share, failure)
        count["networks"] += 1
        count["recomputed"] += bool(left.any())
        count["copies"] += bool(copies)
        count["unfused"] += any(copy.unfused for copy in copies)
        count["unbound without rules"] += bool(binds(bare, shapes))

    try_one()
    return count


@pytest.mark.parametrize("fusion, device", [("0", None), ("1", None), ("1", "gpu")])
def test_random_plans_bind(gpu_dry_run: GpuDryRun, fusion: str, device: str | None) -> None:
    """``device``: what the plans are made for; for a GPU alone their copies are unfused."""
    result = gpu_dry_run.run(
        random_plans,
        args=[[str(TESTS / "helpers")], NETWORKS, device],
        env={"MXNET_USE_FUSION": fusion},
    )
    assert result.ok, result.message
    print("\n", result.value)
    count = result.value
    assert count["networks"] == NETWORKS
    assert count["recomputed"] > 150 and count["copies"] > 50
    assert count["unfused"] == (count["copies"] if device else 0)
    assert count["unbound without rules"] > 20 or fusion == "0"
