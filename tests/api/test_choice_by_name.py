"""Operators that the user names: ``keep=`` is obeyed by every planner, ``recompute=`` if it can."""

from __future__ import annotations

from typing import Any, Sequence

import memonger
import mxnet as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generated import networks as generated_networks
from memonger.support.errors import UnmatchedError
from memonger.support.symbols import read
from planned import HOWS, assert_alike, nodes

SHAPES = {"data": (4, 3, 32, 32)}


def net() -> Any:
    """Build six stages of two units before a loss."""
    x = mx.sym.Variable("data")
    for stage in range(1, 7):
        for unit in (1, 2):
            name = f"stage{stage}_unit{unit}"
            x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=8, name=f"{name}_conv")
            x = mx.sym.BatchNorm(x, name=f"{name}_bn")
            x = mx.sym.Activation(x, act_type="relu", name=f"{name}_relu")
    x = mx.sym.FullyConnected(x, num_hidden=4, name="fc")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def names(plan: memonger.Plan, option: str) -> set[str]:
    """Return the names of the operators that an option has chosen."""
    listed = read(plan.request.symbol)["nodes"]
    return {listed[i]["name"] for i in getattr(plan.request, option).nodes}


CHOICES: dict[str, tuple[Any, int]] = {
    "a name": ("stage2_unit1_bn", 1),
    "names": ("stage2_*", 6),
    "a kind": ("::BatchNorm", 12),
    "both": ("stage?_*::BatchNorm", 12),
    "one of two": ("stage1_*|fc", 7),
    "a list": (["stage1_*", "::FullyConnected"], 7),
    "a function": (lambda operator: operator.nbytes == 4 * 8 * 4 * 32 * 32, 36),
    "of its shape and kind": (lambda o: o.op == "Activation" and o.shapes[0][1] == 8, 12),
    "of its parameters": (lambda o: o.attrs.get("num_hidden") == "4", 1),
    "a list of both": ([lambda o: o.name == "fc", "stage3_unit2_*"], 4),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_operators_are_chosen_by_names_kinds_and_functions(choice: str) -> None:
    selector, count = CHOICES[choice]
    plan = memonger.plan(net(), SHAPES, keep=selector, how="marks")
    assert len(names(plan, "keep")) == count
    assert not names(plan, "keep") & {*plan.recomputed}
    again = memonger.plan(net(), SHAPES, keep=[*plan.request.keep.patterns], how="marks")
    assert again.request.keep.nodes == plan.request.keep.nodes
    assert again.recomputed == plan.recomputed


PLANNERS: dict[str, dict[str, Any]] = {
    **HOWS,
    "original": {"planner": "chen2016"},
    "budget": {"budget": "90%"},
    "either": {"budget": "90%", "how": "auto"},
}


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_keeps_and_recomputes_what_is_named(planner: str) -> None:
    options = PLANNERS[planner]
    free = memonger.plan(net(), SHAPES, **{"how": "marks", **options})
    kept = {name for name in free.recomputed if name.startswith("stage1")}
    forced = ["stage2_*", "stage3_*"]
    plan = memonger.plan(
        net(), SHAPES, keep="stage1_*", recompute=forced, **{"how": "marks", **options}
    )
    assert kept and not kept & {*plan.recomputed}
    assert names(plan, "recompute") == {*plan.recomputed, *plan.unmet} & names(plan, "recompute")
    assert not {*plan.recomputed} & {*plan.unmet} and "stage2_unit2_conv" in plan.recomputed
    if "planner" not in options:
        assert plan.pool_bytes <= plan.unplanned_bytes
    assert_alike(net(), plan.symbol, SHAPES)


@pytest.mark.parametrize("how", HOWS)
@given(network=generated_networks(), data=st.data())
@settings(max_examples=12)
def test_what_is_named_is_obeyed_in_any_network(how: str, network: Any, data: Any) -> None:
    symbol, shapes = network
    listed = sorted({n["name"] for n in nodes(symbol) if n["op"] != "null"})
    chosen = st.lists(st.sampled_from(listed), max_size=6)
    keep, wish = data.draw(chosen), data.draw(chosen)
    plan = memonger.plan(symbol, shapes, keep=keep, recompute=wish, **HOWS[how], patience=0.02)
    assert not {*keep} & {*plan.recomputed}
    assert {*plan.unmet} == {*wish} - {*plan.recomputed} or plan.planner == "no plan"
    assert plan.pool_bytes <= plan.unplanned_bytes
    assert_alike(symbol, plan.symbol, shapes)


def test_what_cannot_be_recomputed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x = mx.sym.Dropout(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=64, name="fc0"), name="drop"
    )
    for k in range(1, 6):
        x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=64, name=f"fc{k}"), name=f"tanh{k}")
    symbol = mx.sym.SoftmaxOutput(x, name="softmax")
    options: dict[str, Any] = {"keep": "tanh2", "until": "fc5", "recompute": "*"}
    plan = memonger.plan(symbol, {"data": (64, 64)}, how="marks", **options)
    reasons = {
        "drop": "its mask is kept",
        "tanh2": "keep= names it",
        "fc5": "does not come before 'fc5'",
        "softmax": "does not come before",
    }
    for name, reason in reasons.items():
        assert reason in plan.unmet[name], plan.unmet[name]
    assert "are not recomputed" in caplog.text
    assert "recompute  '*': " in str(plan) and "not 'tanh2': keep= names it" in str(plan)
    whole = memonger.plan(symbol, {"data": (64, 64)}, recompute="*", how="marks")
    assert "it is an output" in whole.unmet["softmax"]
    choices = {t.name: t for t in plan.explain().tensors}
    assert choices["tanh2"].why == "you" and choices["tanh2"].reason == "keep= names it"


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("stge2_*", "_unit2_bn'"),
        ("::Activatoin", "'Activation'"),
        ("stage2_*::FullyConnected_", "'FullyConnected'"),
        ("stage2_unit1_bm", "'stage2_unit1_bn'"),
        ("stage2_unit1_conv_weight", "'stage2_unit1_conv'"),
    ],
)
@pytest.mark.parametrize("option", ["keep", "recompute"])
def test_a_pattern_that_matches_nothing_names_the_nearest(
    option: str, pattern: str, nearest: str
) -> None:
    options: dict[str, Any] = {option: ["stage1_*", pattern]}
    with pytest.raises(memonger.MemongerError) as raised:
        memonger.plan(net(), SHAPES, how="marks", **options)
    assert f"{option}={pattern!r} matches no operator" in str(raised.value)
    assert nearest in str(raised.value)


@pytest.mark.parametrize("selector", [3, {"a": 1}, [None], b"fc"])
def test_what_is_no_pattern_is_refused(selector: Any) -> None:
    with pytest.raises(memonger.MemongerError, match="cannot be read; give a pattern"):
        memonger.plan(net(), SHAPES, keep=selector, how="marks")


def block() -> Any:
    layers = mx.gluon.nn.HybridSequential(prefix="net_")
    for k in range(8):  # so that a plan saves more than its copies take in Gluon
        stage = mx.gluon.nn.HybridSequential(prefix=f"stage{k}_")
        with stage.name_scope():
            stage.add(mx.gluon.nn.Dense(64, activation="relu"), mx.gluon.nn.Dense(64))
        layers.add(stage)
    layers.initialize(mx.init.Xavier())
    return layers


@pytest.mark.parametrize("how", HOWS)
def test_blocks_within_a_block_are_named(how: str) -> None:
    layers = block()
    inner: Sequence[Any] = [layers[1], layers[2][0]]
    memonger.gluon.plan(layers, keep=inner, **HOWS[how])
    with mx.autograd.record():
        layers(mx.nd.ones((256, 64)))
    plan = memonger.gluon.plan_of(layers)
    chosen = names(plan, "keep")
    assert all(name.startswith(("stage1_", "stage2_dense0")) for name in chosen)
    assert len(chosen) == 5 and not chosen & {*plan.recomputed} and plan.recomputed


def test_a_block_raises_for_a_pattern_that_matches_nothing() -> None:
    layers = block()
    other = mx.gluon.nn.Dense(3, prefix="other_")
    for options, message in (
        ({"recompute": "::Activatoin"}, "nearest are 'Activation'"),
        ({"keep": other}, "matches no operator"),
    ):
        memonger.gluon.plan(layers, **options)
        with mx.autograd.record(), pytest.raises(UnmatchedError, match=message):
            layers(mx.nd.ones((8, 64)))


def test_a_script_trains_a_network_without_the_name_as_it_is(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    other = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4))
    with memonger.enable(keep="stage1_*", cache=False) as session:
        net().simple_bind(mx.cpu(), data=SHAPES["data"])
        other.simple_bind(mx.cpu(), data=SHAPES["data"])
    assert len(session.plans) == 1 and names(session.plans[0], "keep")
    assert "without a plan: keep='stage1_*' matches no operator" in capfd.readouterr().err


def test_the_front_keeps_and_recomputes_what_is_named() -> None:
    plans = memonger.frontier(
        net(), SHAPES, keep="stage1_*", recompute="stage3_*", points=5, how="marks"
    )
    assert len(plans) > 1
    for plan in plans:
        assert not {name for name in plan.recomputed if name.startswith("stage1")}
        assert {"stage3_unit1_conv", "stage3_unit1_bn"} <= {*plan.recomputed}


@pytest.mark.parametrize("options", [{"recompute": "*"}, {"recompute": "*", "how": "marks"}, {}])
def test_no_plan_takes_more_than_the_own_marks_of_the_network(options: dict[str, Any]) -> None:
    x = mx.sym.Variable("data")
    for _ in range(4):
        x = mx.sym.FullyConnected(x, num_hidden=32)
        with mx.AttrScope(force_mirroring="True"):
            x = mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False), act_type="tanh")
    symbol, shapes = mx.sym.SoftmaxOutput(x), {"data": (16, 16)}
    plan = memonger.plan(symbol, shapes, patience=0.05, **options)
    own = memonger.pool_bytes(symbol, shapes=shapes)
    assert 0 < plan.pool_bytes <= own < plan.unplanned_bytes
    assert_alike(memonger.unplan(plan.symbol), plan.symbol, shapes)
