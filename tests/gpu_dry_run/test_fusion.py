"""Pointwise fusion on MXNet's GPU build: what is told of it is what MXNet makes of a network.

Runs on stand-ins for CUDA (see the package's docstring). Run with ``-s`` to see the figures.
"""

from pathlib import Path
from typing import Any

import pytest

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

TESTS = str(Path(__file__).resolve().parents[1])
NETWORKS = 150
FUSION = {"MXNET_USE_FUSION": "1"}


def fused_networks(dry: DryRun) -> Any:
    """Random marks and copies on random networks: their fused graphs, replayed and bound.

    Counts the networks, those in which something is recomputed, those with copies, those in which
    anything is fused, those whose memory is another with fusion, and fused operators.
    """
    import dataclasses
    import re
    import sys

    paths, networks = dry.args
    sys.path[:0] = paths
    import memonger  # noqa: F401
    import mxnet as mx
    import numpy as np
    from generated import build, recipes
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from memonger import marks
    from memonger.allocator import replay
    from memonger.executor import bind, planned_mb
    from memonger.fusion import replay_fused
    from memonger.operators import targets_of
    from memonger.planners.smallest import copyable, settle
    from planned import rules_of

    counted = ("networks", "recomputed", "copies", "fused", "other memory", "operators")
    count = dict.fromkeys(counted, 0)

    def of_mxnet(text: str) -> Any:
        """The operators of a bound graph, in order, and which outputs of theirs each reads."""
        found = []
        for block in re.split(r"^-{20}$", text, flags=re.M):
            op = re.search(r"^Op:(\w+), Name=", block, re.M)
            if op is not None and "Helper" not in op.group(1):
                found.append([op.group(1), re.findall(r"arg\[\d+\]=.*\((\d+)\)", block)])
        return found

    def of_replay(found: Any) -> Any:
        tables, ops = found.training.tables, found.training.ops
        return [
            [ops[row], list(map(str, tables.read_output[start:stop]))]
            for row, start, stop in zip(
                found.order, tables.read_start[found.order], tables.read_start[found.order + 1]
            )
            if ops[row] != "null"
        ]

    @settings(
        max_examples=10 * networks,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def try_one(recipe: Any, seed: int, share: float) -> None:
        if count["networks"] == networks:
            return
        recipe = dataclasses.replace(recipe, batch=recipe.batch * 65537)  # MXNet tells whole MB
        symbol, shapes = build(recipe)
        rules = rules_of(symbol, shapes, targets_of("gpu"))
        random = np.random.RandomState(seed)
        drawn = random.uniform(size=len(rules.graph.nodes)) < share
        kept = tuple(c for c in copyable(rules) if drawn[c.node] and random.uniform() < 0.3)
        settled, full, mask, copies = settle(rules, drawn & rules.allowed, kept)
        if marks.inferable(symbol, copies, shapes) != copies:
            return
        training = settled.trainings[0]
        if training.inexact:
            return
        planned = marks.apply(symbol, mask, rules.native(mask), copies)
        try:
            bound = bind(planned, rules.graph, mx.gpu(0))
        except memonger.MemongerError:
            return
        found, plain = replay_fused(training, full), replay(training, full)
        text = bound.debug_str()
        assert of_replay(found) == of_mxnet(text), "%r %d %s" % (recipe, seed, share)
        told = found.pool_bytes // 2**20
        assert told == planned_mb(bound), "%r %d %s %d" % (recipe, seed, share, told)
        count["networks"] += 1
        count["recomputed"] += bool(full.any())
        count["copies"] += bool(copies)
        count["fused"] += "_FusedOp" in found.training.ops
        count["other memory"] += found.pool_bytes != plain.pool_bytes
        count["operators"] += found.training.ops.count("_FusedOp")

    try_one()
    return count


def test_generated_networks_are_fused_as_mxnet_fuses_them(gpu_dry_run: GpuDryRun) -> None:
    """Operator by operator and to the MB, with marks and copies and without."""
    result = gpu_dry_run.run(fused_networks, args=[[TESTS], NETWORKS], env=FUSION)
    assert result.ok, result.message
    print("\n", result.value)
    count = result.value
    assert count["networks"] == NETWORKS
    assert count["recomputed"] > NETWORKS / 2 and count["copies"] > 20
    assert count["fused"] > NETWORKS / 2 and count["other memory"] > NETWORKS / 5
