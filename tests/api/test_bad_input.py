"""Every mistake gets a MemongerError that names the thing and the remedy."""

from __future__ import annotations

import logging
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
import pytest
from mxnet.contrib import amp

from operator_cases import DYNAMIC_CASES, SMALL_SHAPES, small_net
from planned import marked

S = mx.sym


def net(batch_norm: bool = True) -> Any:
    x = S.Variable("data")
    for i in range(4):
        x = S.Convolution(x, kernel=(3, 3), num_filter=4, pad=(1, 1), name="conv%d" % i)
        x = S.BatchNorm(x, name="bn%d" % i) if batch_norm else x
        x = S.Activation(x, act_type="relu", name="relu%d" % i)
    x = S.FullyConnected(x, num_hidden=3, name="fc")
    return S.SoftmaxOutput(x, name="softmax")


SHAPES: Any = {"data": (2, 3, 8, 8)}


def block() -> Any:
    return mx.gluon.nn.Dense(3)


CASES: dict[str, Any] = {
    "no shapes": (lambda f: f(net()), ["'data'", "data=(...)", "shapes={"]),
    "unknown input": (lambda f: f(net(), dat=(2, 3, 8, 8)), ["'dat'", "did you mean 'data'"]),
    "unknown, nothing near": (lambda f: f(net(), zzz=(2, 3)), ["'zzz'", "data, softmax_label"]),
    "does not fit an operator": (
        lambda f: f(net(), data=(2, 3, 8, 8), conv1_weight=(4, 9, 3, 3)),
        ["'conv1'", "Convolution", "(4, 9, 3, 3)", "[4,9,3,3]", "(4,4,3,3)"],
    ),
    "does not fit a sum": (
        lambda f: f(S.Variable("a") + S.exp(S.Variable("b")), a=(2, 3), b=(4, 3)),
        ["'_plus", "(2, 3)", "(4, 3)"],
    ),
    "batch 0": (lambda f: f(net(), data=(0, 3, 8, 8)), ["'data'", "holds 0", "at least 1"]),
    "negative size": (lambda f: f(net(), data=(2, 3, -8, 8)), ["'data'", "holds -8"]),
    "not an integer": (lambda f: f(net(), data=(2, 3, 8.5, 8)), ["'data'", "8.5"]),
    "a boolean": (lambda f: f(net(), data=(True, 3, 8, 8)), ["'data'", "True"]),
    "not a shape": (lambda f: f(net(), data="2,3,8,8"), ["'data'", "tuple of integers"]),
    "shapes no dict": (lambda f: f(net(), shapes=7), ["shapes must be a dict"]),
    "two shapes for one": (
        lambda f: f(net(), shapes={"data": (2, 3, 8, 8)}, data=(3, 3, 8, 8)),
        ["'data'", "two shapes"],
    ),
    "unknown type": (lambda f: f(net(), type_dict={"data": "flaot"}, **SHAPES), ["'flaot'"]),
    "bfloat16": (
        lambda f: f(amp.convert_symbol(net(), target_dtype="bfloat16"), **SHAPES),
        ["bfloat16", "cast to float16 or float32"],
    ),
    "types in no dict": (
        lambda f: f(net(), type_dict=("data", "float32"), **SHAPES),
        ["type_dict must be a dict", "('data', 'float32')"],
    ),
    "no type at all": (
        lambda f: f(net(), type_dict={"data": "f4,,"}, **SHAPES),
        ["'data'", "knows no type 'f4,,'"],
    ),
    "type that MXNet has not": (
        lambda f: f(net(), type_dict={"data": "complex64"}, **SHAPES),
        ["'data'", "MXNet has no type complex64"],
    ),
    "type of no input": (
        lambda f: f(net(), type_dict={"daat": "float32"}, **SHAPES),
        ["'daat'", "did you mean 'data'"],
    ),
    "Gluon block": (lambda f: f(block(), data=(2, 3)), ["Gluon", "mx.sym.var('data')"]),
    "Module": (lambda f: f(mx.mod.Module(net()), **SHAPES), ["Module", "its symbol"]),
    "no Symbol": (lambda f: f("resnet", **SHAPES), ["mx.sym.Symbol", "'resnet'"]),
    "list of symbols": (lambda f: f([net(), net()], **SHAPES), ["2 symbols", "mx.sym.Group"]),
    "a Group of nothing": (lambda f: f([], **SHAPES), ["nothing to plan"]),
    "a GPU on the CPU build": (
        lambda f: f(net(), ctx=mx.gpu(0), **SHAPES),
        ["gpu(0)", "not there"],
    ),
    "no device": (lambda f: f(net(), ctx="gpu", **SHAPES), ["ctx must be", "'gpu'"]),
}


@pytest.mark.parametrize(
    "call", [memonger.search_plan, memonger.plan, memonger.get_cost, memonger.pool_bytes]
)
@pytest.mark.parametrize("case", CASES)
def test_is_named_with_its_remedy(case: str, call: Callable[..., Any]) -> None:
    mistake, words = CASES[case]
    with pytest.raises(memonger.MemongerError) as caught:
        mistake(call)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "Traceback" not in message and "Stack trace" not in message
    assert "src/operator" not in message, message


@pytest.mark.parametrize("ntrial", [0, -1, 1.5, "6", True])
def test_ntrial(ntrial: Any) -> None:
    with pytest.raises(memonger.MemongerError, match="ntrial must be"):
        memonger.search_plan(net(), ntrial, **SHAPES)


@pytest.mark.parametrize("threshold", [-1, 1.5, "576", None, False])
def test_threshold(threshold: Any) -> None:
    with pytest.raises(memonger.MemongerError, match="threshold must be"):
        memonger.make_mirror_plan(net(), threshold, **SHAPES)


def test_unknown_planner_lists_them() -> None:
    with pytest.raises(memonger.MemongerError, match="'smallest', 'chen2016'"):
        memonger.search_plan(net(), planner="fastest", **SHAPES)


def test_operator_without_a_gradient() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=4)
    symbol = S.MakeLoss(S.batch_take(x, S.zeros((2,), dtype="int32"), name="taken"))
    with pytest.raises(memonger.MemongerError, match="'taken'.*batch_take.*BlockGrad"):
        memonger.search_plan(symbol, data=(2, 3))
    with pytest.raises(memonger.MemongerError, match="batch_take"):
        memonger.get_cost(symbol, data=(2, 3))


@pytest.mark.parametrize("name", DYNAMIC_CASES)
def test_shapes_that_are_known_only_when_it_runs(name: str) -> None:
    with pytest.raises(memonger.MemongerError, match="known only when it runs"):
        memonger.search_plan(small_net(DYNAMIC_CASES[name]), shapes=SMALL_SHAPES)


def test_global_mirroring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    with pytest.raises(memonger.MemongerError, match="MXNET_BACKWARD_DO_MIRROR.*unset it"):
        memonger.search_plan(net(), **SHAPES)
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "0")
    memonger.search_plan(net(), **SHAPES)


def test_a_symbol_fused_for_inference_is_refused() -> None:
    fused = net(batch_norm=False).optimize_for("MKLDNN")
    with pytest.raises(memonger.MemongerError, match="_sg_mkldnn.*inference"):
        memonger.search_plan(fused, **SHAPES)


def test_softmax_output_with_out_grad_is_refused() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=4)
    symbol = S.SoftmaxOutput(x, out_grad=True, name="softmax")
    with pytest.raises(memonger.MemongerError, match="'softmax'.*out_grad"):
        memonger.search_plan(symbol, data=(2, 3))


def test_arguments_of_one_name_are_refused() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=4, name="fc")
    symbol = S.FullyConnected(x, num_hidden=4, name="fc")
    with pytest.raises(memonger.MemongerError, match="same name, 'fc_weight'.*share one"):
        memonger.search_plan(symbol, data=(2, 4))


def test_operators_of_one_name_are_planned() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=512)
    for _ in range(12):
        x = S.tanh(S.sigmoid(x * 2.0, name="twice"), name="twice")
    symbol = S.LinearRegressionOutput(x, name="out")
    shapes = {"data": (512, 16)}
    planned = memonger.search_plan(symbol, shapes=shapes)
    assert memonger.get_cost(planned, shapes=shapes) < memonger.get_cost(symbol, shapes=shapes)
    report = memonger.check(symbol, planned, shapes)
    assert report, str(report)


def test_nothing_helps_is_said_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    x = S.Dropout(S.Variable("data"), p=0.5, name="only")
    symbol = S.MakeLoss(S.Dropout(x, p=0.5), name="loss")
    with caplog.at_level(logging.WARNING, "memonger"):
        planned = memonger.search_plan(symbol, data=(64, 4096))
    assert not marked(planned)
    assert planned.tojson() == symbol.tojson()
    assert "no plan costs less" in caplog.text and "returned unmarked" in caplog.text


def test_bare_plan_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memonger"):
        memonger.make_mirror_plan(net(), 0, rules=False, **SHAPES)
    assert "rules=False" in caplog.text


def test_check_names_what_differs() -> None:
    symbol = net()
    other = S.SoftmaxOutput(S.FullyConnected(S.Variable("data"), num_hidden=3), name="softmax")
    with pytest.raises(memonger.MemongerError, match="not the same network"):
        memonger.check(symbol, other, SHAPES)
    leaky = mx.sym.load_json(symbol.tojson().replace('"relu"', '"softsign"'))
    report = memonger.check(symbol, leaky, SHAPES)
    assert not report
    assert report.differences[0].step == 0 and "differ, first output" in str(report)
    assert report.repeatable


def test_check_wants_finite_numbers() -> None:
    symbol = S.MakeLoss(S.log(S.FullyConnected(S.Variable("data"), num_hidden=3) - 100))
    report = memonger.check(symbol, symbol, {"data": (2, 3)})
    assert not report and "not finite" in str(report)


def test_numpy_integers_are_integers() -> None:
    shape = tuple(np.array([2, 3, 8, 8]))
    assert memonger.get_cost(net(), data=shape) == memonger.get_cost(net(), **SHAPES)


NUMBERS: dict[str, Any] = {
    "at most 1e.09": {"patience": 1e300},
    "work is larger": {"work": 10**400, "how": "schedule"},
    "no memory of more": {"budget": 10**400},
    "2\\*\\*63 bytes": {"budget": "9" * 400 + "GB"},
    "cannot be made": {"budget": "1GB", "budget_of": "device", "optimizer": (5, {})},
    "no way": {"how": np.array(["marks", "schedule"])},
}


@pytest.mark.parametrize("match", sorted(NUMBERS))
def test_what_no_search_can_do(match: str) -> None:
    with pytest.raises(memonger.MemongerError, match=match):
        memonger.plan(net(), SHAPES, **NUMBERS[match])


def test_more_elements_than_mxnet_counts() -> None:
    """Told in words, and no batch that fits."""
    shapes = {"data": (2**17, 3, 64, 64)}
    with pytest.raises(memonger.MemongerError, match="batch smaller"):
        memonger.plan(net(), shapes)
    found = memonger.largest_batch(net(), {"data": (None, 3, 64, 64)}, "100TB", patience=0.01)
    assert found.batch == (2**31 - 1) // (4 * 64 * 64)
