"""The rules on MXNet's GPU build: what they leave of a plan binds and steps, fusion off and on.

Runs on stand-ins for CUDA (see the package's docstring): an abort or a bind that fails shows,
numbers do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

TESTS = Path(__file__).resolve().parents[1]
PATHS = [str(TESTS / "helpers"), str(TESTS.parent / "examples")]


def every_operator(dry: DryRun) -> Any:
    """Each case alone and with its neighbours, unmarked first; emits (case, stage) as it goes."""
    import sys

    sys.path[:0] = dry.args[0]
    import memonger  # noqa: F401
    import mxnet as mx
    import numpy as np
    from memonger.graph import marks
    from memonger.graph.operators.recompute import ANYWHERE
    from operator_cases import AFTER, BEFORE, CASES, SMALL_SHAPES, inner, small_net
    from planned import rules_of

    def step(symbol: Any) -> None:
        executor = symbol.simple_bind(mx.gpu(0), grad_req="write", **SMALL_SHAPES)
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()

    for name in dry.args[1]:
        symbol = small_net(CASES[name])
        dry.emit([name, "unmarked"])
        try:
            step(symbol)
        except RuntimeError:
            continue
        rules = rules_of(symbol, SMALL_SHAPES, ANYWHERE)
        for extra in ([], [BEFORE], [AFTER], [BEFORE, AFTER]):
            wanted = set(inner(symbol) + extra)
            mask = rules.apply(np.array([n.name in wanted for n in rules.graph.nodes]))
            dry.emit([name, "marked"])
            step(marks.apply(symbol, mask, rules.native(mask)))
            dry.emit([name, "stepped"])
    return "done"


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_every_operator_steps_through_the_rules(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    from operator_cases import CASES

    left: list[str] = list(CASES)
    stepped = set()
    while left:
        result = gpu_dry_run.run(
            every_operator, args=[PATHS, left], env={"MXNET_USE_FUSION": fusion}
        )
        reached = [said for said in result.emitted if isinstance(said, list)]
        stepped |= {name for name, stage in reached if stage == "stepped"}
        if result.ok:
            break
        name, stage = reached[-1]
        assert stage == "unmarked", f"{name}: {result.message}"
        left = left[left.index(name) + 1 :]  # its unmarked network kills the process
    not_run = sorted(set(CASES) - stepped)  # they fail without a mark
    print(len(stepped), "stepped; fail unmarked:", ", ".join(not_run))
    assert len(not_run) < 30, not_run


def plans(dry: DryRun) -> Any:
    import sys

    sys.path[:0] = dry.args[0]
    import memonger
    import mxnet as mx
    import networks

    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=2, image=64, classes=10, filters=8)
    rules = dry.args[1]
    planned = memonger.make_mirror_plan(symbol, 0, rules=rules, shapes=shapes)
    executor = planned.simple_bind(mx.gpu(0), **shapes)
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
    return len(planned.list_auxiliary_states())


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_the_originals_plan_steps_with_the_rules_alone(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    environment = {"MXNET_USE_FUSION": fusion}
    bare = gpu_dry_run.run(plans, args=[PATHS, False], env=environment)
    assert not bare.ok and "kWriteTo" in bare.message + bare.stderr
    ruled = gpu_dry_run.run(plans, args=[PATHS, True], env=environment)
    assert ruled.ok, ruled.message
