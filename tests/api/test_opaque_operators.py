"""Networks with operators that MXNet cannot see into are planned as others are."""

from __future__ import annotations

import functools
from typing import Any

import memonger
import mxnet as mx
import pytest

from memonger.costs.bind import read_planned_mb

import networks
import opaque_networks
from opaque_networks import OPERATORS
from planned import HOWS, module_plan
from zoo import DETECTION

MB = 2**20
LARGE = {"hidden": 512, "batch": 1024, "depth": 6}
FAST: Any = {"how": "marks", "patience": 0.05}


@functools.lru_cache(maxsize=None)
def pool_with(operator: Any) -> int:
    return memonger.plan(
        *opaque_networks.within(operator, **LARGE), **{"how": "marks", **FAST}
    ).pool_bytes


@pytest.mark.parametrize("name", OPERATORS)
def test_a_network_with_such_an_operator_saves_as_much(name: str) -> None:
    symbol, shapes = opaque_networks.within(OPERATORS[name], **LARGE)
    plan = memonger.plan(symbol, shapes, **{"how": "marks", **FAST})
    assert plan.exact and plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)
    assert plan.pool_bytes < 1.3 * pool_with(mx.sym.sin) < 0.4 * plan.unplanned_bytes


def test_a_loss_in_python_saves_as_much_as_one_of_mxnet() -> None:
    pools = []
    for loss in (opaque_networks.own_loss, opaque_networks.built_in_loss):
        plan = memonger.plan(*loss(**LARGE), **{"how": "marks", **FAST})
        assert plan.exact
        pools.append(plan.pool_bytes)
    assert pools[0] < 1.3 * pools[1]


@pytest.mark.parametrize("how", HOWS)
def test_what_is_written_in_python_runs_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step once forward and once backward, whatever runs again around it."""
    calls: list[str] = []
    usual = {name: getattr(networks.HardSwish, name) for name in ("forward", "backward")}
    for name in usual:

        def counted(*arguments: Any, name: str = name, **keywords: Any) -> None:
            calls.append(name)
            usual[name](*arguments, **keywords)

        monkeypatch.setattr(networks.HardSwish, name, counted)
    symbol, shapes = DETECTION["ssd"]()
    plan = module_plan(symbol, shapes, patience=0.02, **HOWS[how])
    assert plan.recomputed and memonger.check(symbol, plan.symbol, shapes, 2)
    assert sorted(calls) == ["backward"] * 4 + ["forward"] * 4  # of the network and of its plan


def test_an_operator_is_asked_again_what_its_gradient_reads() -> None:
    """Under the same name another class may be registered later."""
    pools = []
    for reads in (False, True):

        @mx.operator.register("tests_registered_again")
        class Prop(opaque_networks.DoubledProp):
            def declare_backward_dependency(self, *arrays: Any, _reads: bool = reads) -> Any:
                return sum(arrays, []) if _reads else arrays[0]

        x = mx.sym.sin(mx.sym.Variable("data"))
        for _ in range(4):
            x = mx.sym.Custom(x, op_type="tests_registered_again")
        pools.append(memonger.pool_bytes(x, data=(512, 512)))  # of what is exact alone
        bound = x.simple_bind(mx.cpu(), data=(512, 512))
        assert pools[-1] // MB == read_planned_mb(bound)
    assert pools == [3 * MB, 7 * MB]
