"""The rules on MXNet's GPU build: what they leave of a plan binds and steps, fusion off and on.

Runs on stand-ins for CUDA (see the package's docstring): an abort or a bind that fails shows,
numbers do not.
"""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.graph import marks

import networks
import operator_cases as cases
from planned import rules_of

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import step, steps

pytestmark = [
    pytest.mark.gpu_dry_run,
    pytest.mark.parametrize("fusion", ["0", "1"]),
]


def every_operator(dry: DryRun, names: list[str]) -> None:
    """Each case alone and with its neighbours, unmarked first; emits (case, stage) as it goes."""

    def train(symbol: Any) -> None:
        step(symbol.simple_bind(mx.gpu(0), grad_req="write", **cases.SMALL_SHAPES))

    for name in names:
        symbol = cases.small_net(cases.CASES[name])
        dry.emit([name, "unmarked"])
        try:
            train(symbol)
        except RuntimeError:
            continue
        rules = rules_of(symbol, cases.SMALL_SHAPES)
        for extra in ([], [cases.BEFORE], [cases.AFTER], [cases.BEFORE, cases.AFTER]):
            wanted = set(cases.inner(symbol) + extra)
            mask = rules.apply(np.array([n.name in wanted for n in rules.graph.nodes]))
            dry.emit([name, "marked"])
            train(marks.apply(symbol, mask, rules.native(mask)))
            dry.emit([name, "stepped"])


def test_every_operator_steps_through_the_rules(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    left, stepped = list(cases.CASES), set()
    while left:
        result = gpu_dry_run.run(every_operator, left, env={"MXNET_USE_FUSION": fusion})
        reached = [said for said in result.emitted if said]
        stepped |= {name for name, stage in reached if stage == "stepped"}
        if result.ok:
            break
        name, stage = reached[-1]
        assert stage == "unmarked", f"{name}: {result.message}"
        left = left[left.index(name) + 1 :]  # its unmarked network kills the process
    not_run = sorted(set(cases.CASES) - stepped)  # they fail without a mark
    print(len(stepped), "stepped; fail unmarked:", ", ".join(not_run))
    assert len(not_run) < 30, not_run


def test_the_originals_plan_steps_with_the_rules_alone(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=2, image=64, classes=10, filters=8)
    for rules in (False, True):
        planned = memonger.make_mirror_plan(symbol, 0, rules=rules, shapes=shapes)
        result = gpu_dry_run.run(steps, [("it", planned, fusion)], shapes, None, False)
        assert result.ok == rules, result.message
        assert rules or "kWriteTo" in result.message + result.stderr
