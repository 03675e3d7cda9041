"""Networks with operators that MXNet cannot see into are planned as others are."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["Custom of two outputs", "foreach"])
def test_a_network_with_such_an_operator_saves_as_much(name: str) -> None:
    with_it, without = (
        memonger.plan(*opaque_networks.within(operator, **LARGE), **FAST)
        for operator in (OPERATORS[name], mx.sym.sin)
    )
    assert with_it.exact
    assert with_it.pool_bytes < 1.3 * without.pool_bytes < 0.4 * with_it.unplanned_bytes


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
