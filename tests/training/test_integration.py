"""Whole networks with marks, equal bit for bit to without: outputs, types and mirror_stage."""

from __future__ import annotations

from typing import Any

import pytest

import memonger
import mxnet as mx
import numpy as np
from modules import SHAPES, net
from planned import assert_alike, marked, nodes


def checked(symbol: Any, shapes: Any, types: Any = None, **options: Any) -> memonger.Plan:
    plan = memonger.plan(symbol, shapes, type_dict=types, **{"how": "marks", **options})
    assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    assert_alike(symbol, plan.symbol, shapes, type_dict=types)
    return plan


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_gluon_block_that_was_cast_is_planned_in_its_type(how: str) -> None:
    """Its variables keep the type of before, by which MXNet refuses the one that is given."""
    block = mx.gluon.nn.HybridSequential()
    for _ in range(6):
        block.add(mx.gluon.nn.Dense(64, activation="tanh", in_units=64))
    block(mx.sym.var("data"))
    block.cast("float64")
    net, shapes, types = block(mx.sym.var("data")), {"data": (512, 64)}, {"data": "float64"}
    with pytest.raises(RuntimeError, match="expected float64, got float32"):
        net.simple_bind(mx.cpu(), type_dict=types, **shapes)
    plan = memonger.plan(net, shapes, type_dict=types, how=how, patience=0.02)
    all_types = dict.fromkeys(net.list_arguments(), "float64")
    same = memonger.plan(net, shapes, type_dict=all_types, how=how, patience=0.02)
    assert plan.recomputed and plan.pool_bytes == same.pool_bytes < plan.unplanned_bytes
    assert memonger.check(net, plan.symbol, shapes, type_dict=types)
    module = mx.mod.Module(plan.symbol, label_names=None)
    module.bind([mx.io.DataDesc("data", shapes["data"], "float64")])
    module.init_params(mx.init.Xavier())
    weights, _ = module.get_params()
    assert {array.dtype for array in weights.values()} == {np.float64}
    types[net.list_arguments()[1]] = "float32"
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(net, shapes, type_dict=types, how="marks")


def test_types_of_variables_stay_where_nothing_contradicts() -> None:
    x = mx.sym.Cast(mx.sym.Variable("free", dtype="float64"), dtype="float32")
    for k in range(6):
        old = mx.sym.Variable(f"old{k}", dtype="float16")
        x = mx.sym.Activation(mx.sym.FullyConnected(x, old, num_hidden=16, no_bias=True), "tanh")
    shapes = {"free": (512, 16)}
    plan = memonger.plan(x, shapes, type_dict={"old0": "float32"}, patience=0.02, how="marks")
    kept = {name: a.get("__dtype__") for name, a in plan.symbol.attr_dict().items()}
    assert [kept["free"], kept.get("old0"), kept.get("old5")] == ["1", None, None]
    contradicted = dict.fromkeys(("old0", "old5"), "float16")
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(x, shapes, type_dict=contradicted, patience=0.02, how="marks")


@pytest.mark.parametrize("stage", ["one", "two"])
def test_sums_marked_by_mirror_stage_are_kept(stage: str) -> None:
    symbol = net(stage=stage)
    planned = memonger.make_mirror_plan(symbol, 0, shapes=SHAPES)
    never = {n["name"] for n in nodes(symbol) if n["op"] in ("Dropout", "SoftmaxOutput")}
    assert set(marked(planned, "False")) - never == {f"sum{i}" for i in range(4)}
    if stage == "two":
        assert "sum1" not in marked(planned)  # the second of a label is kept with the first
    assert_alike(symbol, planned, SHAPES)
    checked(symbol, SHAPES)
