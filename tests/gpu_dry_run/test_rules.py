"""The rules: what they leave of a plan binds and steps, fusion off and on; ``-s`` shows figures."""

from __future__ import annotations

import collections
import os
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from memonger.costs.bind import bind
from memonger.graph import marks
from memonger.graph.operators.recompute import targets_of
from memonger.planners.candidates import MarkPlan
from memonger.planners.marks.identities import list_identities, drop_unused_identities

import operator_cases as cases
from generated import build, recipes
from planned import rules_of

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import step

pytestmark = pytest.mark.gpu_dry_run


def every_operator(dry: DryRun, names: list[str]) -> None:
    """Train each case alone and with its neighbours, unmarked first; emit (case, stage)."""

    def train(symbol: Any) -> None:
        step(symbol.simple_bind(mx.gpu(0), grad_req="write", **cases.SMALL_SHAPES))

    for name in names:
        symbol = cases.small_net(cases.ALL_CASES[name])
        dry.emit((name, "unmarked"))
        try:
            train(symbol)
        except RuntimeError:
            continue
        rules = rules_of(symbol, cases.SMALL_SHAPES)
        for extra in ([], [cases.BEFORE, cases.AFTER]):
            wanted = set(cases.inner(symbol) + extra)
            mask = rules.apply(np.array([n.name in wanted for n in rules.graph.nodes]))
            dry.emit((name, "marked"))
            train(marks.write(symbol, mask, rules.native(mask)))
            dry.emit((name, "stepped"))


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_every_operator_steps_through_the_rules(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    left, stepped = list(cases.ALL_CASES), set()
    while left:
        env = {"MXNET_USE_FUSION": fusion}
        result = gpu_dry_run.run(every_operator, left, env=env, crashes=None)
        stepped |= {name for name, stage in result.emitted if stage == "stepped"}
        name, stage = result.value
        assert result.returncode == 0 or stage == "unmarked", f"{name}: {result.message}"
        left = left[left.index(name) + 1 :]  # an unmarked network may kill the process
    not_run = sorted(set(cases.ALL_CASES) - stepped)  # they fail without a mark
    print(len(stepped), "stepped; fail unmarked:", ", ".join(not_run))
    assert len(not_run) < 30, not_run


NETWORKS = 120


def random_plans(dry: DryRun, networks: int, device: str) -> Any:
    """Count what random marks and copies show that are bound through the rules and without them."""
    count: dict[str, int] = collections.Counter()

    def binds(symbol: Any, graph: Any) -> Any:
        executor = None
        for fusion in ("1",) if device == "gpu" else ("0", "1"):
            os.environ["MXNET_USE_FUSION"] = fusion
            try:
                executor = bind(symbol, graph, mx.gpu(0))
            except memonger.MemongerError:
                return None
        return executor

    @seed(1)
    @settings(
        max_examples=10 * networks,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(), st.integers(0, 2**16), st.sampled_from([0.5, 0.9, 1.0]))
    def try_one(recipe: Any, draw: int, share: float) -> None:
        if count["networks"] == networks:
            return
        symbol, shapes = build(recipe)
        rules = rules_of(symbol, shapes, targets_of(device))
        graph, random = rules.graph, np.random.RandomState(draw)
        if binds(symbol, graph) is None:
            return  # MXNet cannot bind it unmarked
        drawn = random.uniform(size=len(graph.nodes)) < share
        kept = tuple(c for c in list_identities(rules) if drawn[c.node] and random.uniform() < 0.3)
        bare = marks.write(symbol, drawn, (), marks.make_inferable(symbol, kept, shapes))
        (mask, settled_copies), *_ = drop_unused_identities(
            rules, MarkPlan(drawn & rules.recomputable, kept)
        )
        copies = marks.make_inferable(symbol, settled_copies, shapes)
        bound = binds(marks.write(symbol, mask, rules.native(mask), copies), graph)
        which = f"{recipe!r} {draw} {share}"
        assert bound is not None, which
        counted = {
            "networks": True,
            "recomputed": mask.any(),
            "copies": settled_copies,
            "unfused": any(copy.unfused for copy in settled_copies),
            "unbound without rules": binds(bare, graph) is None,
        }
        counted["fused"] = "_FusedOp" in bound.debug_str()
        count.update({name: int(bool(value)) for name, value in counted.items()})

    try_one()
    return count


@pytest.mark.parametrize("device", ["any", "gpu"])
def test_random_plans_bind(gpu_dry_run: GpuDryRun, device: str) -> None:
    """With fusion and without. For a GPU alone copies are unfused."""
    count = gpu_dry_run.run(random_plans, NETWORKS, device).value
    print("\n", dict(count))
    assert count["networks"] == NETWORKS
    assert count["recomputed"] > 60 and count["copies"] > 20
    assert count["unfused"] == (count["copies"] if device == "gpu" else 0)
    assert count["unbound without rules"] > 8
    assert count["fused"] > 40
