"""Random marks and kept copies on generated networks, on MXNet's GPU build, through the rules.

Runs on stand-ins for CUDA (see the package's docstring). Run with ``-s`` to see the figures.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from memonger.costs.bind import bind, planned_mb
from memonger.costs.fusion import replay_fused
from memonger.costs.replay import replay
from memonger.graph import marks
from memonger.graph.forward import KeptCopy
from memonger.graph.operators.recompute import targets_of
from memonger.planners.marks.copies import copyable, settle

from generated import build, recipes
from planned import rules_of

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

NETWORKS = 200


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
    starts = tables.read_start
    reads = {row: tables.read_output[starts[row] : starts[row + 1]] for row in found.order}
    return [[ops[row], list(map(str, reads[row]))] for row in found.order if ops[row] != "null"]


def random_plans(dry: DryRun, networks: int, device: Any) -> Any:
    """Random marks and copies on random networks, bound through the rules and without them.

    What is made for a GPU alone is replayed too, as MXNet fuses it. Counts the networks, those in
    which something is recomputed, with copies, with unfused ones, with sums that are kept apart
    from fusion, that do not bind without the rules, in which anything is fused, whose memory is
    another with fusion.
    """
    count: dict[str, int] = collections.Counter()

    def binds(symbol: Any, graph: Any) -> Any:
        try:
            return bind(symbol, graph, mx.gpu(0))
        except memonger.MemongerError:
            return None

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
        if device:
            recipe = dataclasses.replace(recipe, batch=recipe.batch * 65537)  # MXNet tells whole MB
        symbol, shapes = build(recipe)
        rules = rules_of(symbol, shapes, targets_of(device))
        graph, random = rules.graph, np.random.RandomState(seed)
        if binds(symbol, graph) is None:
            return  # MXNet cannot bind it unmarked
        drawn = random.uniform(size=len(graph.nodes)) < share
        kept = tuple(c for c in copyable(rules) if drawn[c.node] and random.uniform() < 0.3)
        if device:
            same = rules.trainings[0].same
            read = {a for node in graph.nodes for a, _ in node.inputs}
            kept += tuple(
                KeptCopy(i, unfused=True, apart=True)
                for i in sorted(read - {a for a, _ in graph.heads})
                if graph.nodes[i].op == "elemwise_add" and same.count(i) == 1 and drawn[-i]
            )
            kept = tuple(sorted({copy.node: copy for copy in kept}.values()))
        bare = marks.apply(symbol, drawn, (), marks.inferable(symbol, kept, shapes))
        settled, full, mask, settled_copies = settle(rules, drawn & rules.allowed, kept)
        copies = marks.inferable(symbol, settled_copies, shapes)
        bound = binds(marks.apply(symbol, mask, rules.native(mask), copies), graph)
        which = f"{recipe!r} {seed} {share}"
        assert bound is not None, which
        counted = {
            "networks": True,
            "recomputed": mask.any(),
            "copies": copies,
            "unfused": any(copy.unfused for copy in copies),
            "apart": any(copy.apart for copy in copies),
            "unbound without rules": binds(bare, graph) is None,
        }
        training = settled.trainings[0]
        if device and copies == settled_copies and not training.inexact:
            found, plain = replay_fused(training, full), replay(training, full)
            assert of_replay(found) == of_mxnet(bound.debug_str()), which
            assert found.pool_bytes // 2**20 == planned_mb(bound), which
            counted["replayed"] = True
            counted["fused"] = "_FusedOp" in found.training.ops
            counted["other memory"] = found.pool_bytes != plain.pool_bytes
        count.update({name: int(bool(value)) for name, value in counted.items()})

    try_one()
    return count


@pytest.mark.parametrize("fusion, device", [("0", None), ("1", None), ("1", "gpu")])
def test_random_plans_bind(gpu_dry_run: GpuDryRun, fusion: str, device: str | None) -> None:
    """For a GPU alone copies are unfused, and the replay is MXNet's, by operators and to the MB."""
    result = gpu_dry_run.run(random_plans, NETWORKS, device, env={"MXNET_USE_FUSION": fusion})
    assert result.ok, result.message
    count: dict[str, int] = collections.Counter(result.value)
    print("\n", dict(count))
    assert count["networks"] == NETWORKS
    assert count["recomputed"] > 150 and count["copies"] > 50
    assert count["unfused"] == (count["copies"] if device else 0)
    assert count["unbound without rules"] > 20 or fusion == "0"
    if device:
        assert count["replayed"] > 150 and count["apart"] > 10
        assert count["fused"] > NETWORKS / 2 and count["other memory"] > NETWORKS / 5
