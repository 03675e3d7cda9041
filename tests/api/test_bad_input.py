"""Every mistake gets a MemongerError that names the thing and the remedy; budgets as written."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.solve.limits import (
    NAMES,
    ROOM,
    Budget,
    Limits,
    bound_gpu,
    measure_state_per_element,
    read_budget,
    read_limits,
)
from mxnet.contrib import amp

from operator_cases import DYNAMIC_CASES, SMALL_SHAPES, small_net
from zoo import convolutions

S = mx.sym
SHAPES: Any = {"data": (2, 3, 8, 8)}


def net() -> Any:
    return convolutions(4)


def typed(types: Any) -> Callable[[Any], Any]:
    return lambda f: f(net(), type_dict=types, **SHAPES)


#: What is done, and what is said of it.
MISTAKES: list[tuple[Callable[[Any], Any], list[str]]] = [
    (lambda f: f(net()), ["needed: 'data'; give", "data=(...)", "shapes={", "--shape"]),
    (lambda f: f(net(), dat=(2, 3, 8, 8)), ["'dat'", "did you mean 'data'"]),
    (
        lambda f: f(net(), zzz=(2, 3)),
        [
            "'zzz'",
            "data, softmax_label, and 18 parameters: conv0_weight, conv0_bias, bn0_gamma, ...",
        ],
    ),
    (  # as near as 'unit6_w2', but it begins so
        lambda f: f(S.dot(S.var("unit2_w1"), S.var("unit6_w2")), unit2=(2, 3)),
        ["did you mean 'unit2_w1'"],
    ),
    (
        lambda f: f(
            S.Cast(S.var("data"), dtype="float16") + S.var("x", dtype="float64"), data=(2,)
        ),
        ["types do not fit", "type_dict={"],
    ),
    (
        lambda f: f(net(), conv1_weight=(4, 9, 3, 3), **SHAPES),
        ["'conv1'", "Convolution", "(4, 9, 3, 3)", "[4,9,3,3]", "(4,4,3,3)"],
    ),
    (lambda f: f(S.var("a") + S.var("b"), a=(2, 3), b=(4, 3)), ["'_plus", "(2, 3)", "(4"]),
    (lambda f: f(net(), data=(0, 3, 8, 8)), ["'data'", "holds 0", "at least 1"]),
    (lambda f: f(net(), data=(2, 3, -8, 8)), ["'data'", "holds -8"]),
    (lambda f: f(net(), data=(2, 3, 8.5, 8)), ["'data'", "8.5"]),
    (lambda f: f(net(), data=(True, 3, 8, 8)), ["'data'", "True"]),
    (lambda f: f(net(), data="2,3,8,8"), ["'data'", "tuple of integers"]),
    (lambda f: f(net(), shapes=7), ["shapes must be a dict"]),
    (
        lambda f: f(net(), shapes=(8, 3, 32, 32)),
        ["(8, 3, 32, 32) is a shape without a name; write {'data': (8, 3, 32, 32)}"],
    ),
    (
        lambda f: f("a.json", shapes=SHAPES),
        ["str 'a.json'; read a file by memonger.load('a.json')"],
    ),
    (lambda f: f(net(), shapes=SHAPES, data=(3, 3, 8, 8)), ["'data'", "two shapes"]),
    (typed({"data": "flaot"}), ["'flaot'"]),
    (
        lambda f: f(amp.convert_symbol(net(), target_dtype="bfloat16"), **SHAPES),
        ["bfloat16", "cast to float16 or float32"],
    ),
    (typed(("data", "float32")), ["type_dict must be a dict", "('data', 'float32')"]),
    (typed({"data": "f4,,"}), ["'data'", "'f4,,' is not a type"]),
    (typed({"data": "complex64"}), ["'data'", "MXNet has no type complex64"]),
    (typed({"daat": "float32"}), ["'daat'", "did you mean 'data'"]),
    (lambda f: f(mx.gluon.nn.Dense(3)), ["is a Gluon block; give the shapes", "data=(32,"]),
    (
        lambda f: f(mx.gluon.nn.Dense(3), a=(2, 3), b=(2, 3)),
        ["(Dense) cannot be called on the symbols a, b", "make it a HybridBlock"],
    ),
    (lambda f: f(mx.mod.Module(net()), **SHAPES), ["Module", "its symbol"]),
    (lambda f: f("resnet", **SHAPES), ["mx.sym.Symbol", "'resnet'"]),
    (lambda f: f([net(), net()], **SHAPES), ["2 symbols", "mx.sym.Group"]),
    (lambda f: f([], **SHAPES), ["0 symbols"]),
    (lambda f: f(net(), ctx=mx.gpu(0), **SHAPES), ["gpu(0)", "does not exist"]),
    (lambda f: f(net(), ctx="tpu", **SHAPES), ["ctx must be", "'tpu'"]),
]
CALLS = [memonger.plan, memonger.pool_bytes]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("mistake", "words"), MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake: Any, words: list[str], call: Any) -> None:
    with pytest.raises(memonger.MemongerError) as caught:
        mistake(call)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "Traceback" not in message and "Stack trace" not in message
    assert "src/operator" not in message, message


OF_DEVICE = {"budget": "60%", "budget_of": "device"}
#: Options of ``plan``, and what is said of them.
MISUSE: list[tuple[dict[str, Any], list[str]]] = [
    ({"how": "luck"}, ["how='luck'", "'schedule'", "'marks'"]),
    ({"how": np.array(["marks", "schedule"])}, ["how=array(", "is unknown"]),
    ({"gpu": "K80"}, ["gpu='K80' is unknown", "'V100'", "'RTX 2080 Ti'"]), ({"gpu": 0}, ["gpu=0"]),
    ({"gpu": "T4", "measure": True}, ["measure=True", "leave out one of them"]),
    ({"gpu": "T4", "ctx": "cpu"}, ["gpu='T4'", "for cpu", "ctx='gpu'"]),
    ({"measure": True, "ctx": "gpu"}, ["measure=True", "'V100'", "plan where the GPU is"]),
    ({"how": "schedule", "work": 0.5}, ["work=0.5", "give 1 or more"]),
    ({"how": "schedule", "work": "2"}, ["work must be a number", "'2'"]),
    ({"how": "schedule", "work": float("nan")}, ["work=nan"]),
    ({"how": "schedule", "work": 10**400}, ["work is too large"]),
    ({"how": "marks", "work": 1.5}, ["work=1.5", "how='schedule'"]),
    ({"planner": "chen2016", "budget": "50%"}, ["planner='chen2016'", "combined with a budget"]),
    ({"patience": 0}, ["patience=0", "more than 0"]), ({"patience": 1e300}, ["at most 1e+09"]),
    ({"how": "schedule", "planner": "chen2016"}, ["'chen2016'", "combined with a schedule"]),
    ({"planner": "fastest"}, ["'fastest'", "'smallest', 'chen2016'"]),
    ({"planner": ["chen2016"]}, ["planner", "'smallest', 'chen2016'"]),
    *[({"ntrial": n}, ["ntrial must be"]) for n in (0, -1, 1.5, "6", True)],
    ({"until": "relu33"}, ["until='relu33'", "did you mean 'relu3'"]),
    ({"until": "conv*9"}, ["until='conv*9'", "no operator"]),
    ({"until": "zzzz"}, ["until='zzzz'", "'conv3'"]),
    ({"until": "conv3_weight"}, ["until='conv3_weight'", "no operator"]),
    ({"until": 3}, ["until=3"]), ({"devices": 0}, ["devices must be at least 1"]),
    ({"devices": 1.5}, ["devices must be an integer"]),
    ({"devices": 3}, ["batch of 2", "devices=3"]),
    ({"devices": 4, "shapes": {"data": (6, 3, 8, 8)}}, ["batch of 6", "multiple of 4"]),
    ({"devices": 2, "shapes": {**SHAPES, "softmax_label": (4,)}}, ["'data' has 2", "label' 4"]),
    ({"grad_req": "wirte"}, ["'wirte'", "'write', 'add', 'null'"]),
    ({"grad_req": {"data": 1}}, ["'data'", "is 1"]),
    ({"grad_req": {"fc_weigth": "write"}}, ["'fc_weigth'", "did you mean 'fc_weight'"]),
    ({"grad_req": ["write"]}, ["1 entries", "20 arguments"]),
    ({"grad_req": "null"}, ["no gradient at all"]), ({"grad_req": None}, ["grad_req must be"]),
    ({"shapes": {"data": (2**17, 3, 64, 64)}}, ["batch smaller"]),
    ({"budget": 0}, ["budget=0", "at least one byte"]),
    ({"budget": 10**400}, ["more than 2**63 bytes"]),
    ({"budget": "9" * 400 + "GB"}, ["2**63 bytes"]),
    ({"budget": "0MB"}, ["'0MB'", "at least one byte"]),
    ({"budget": 1.5}, ["budget=1.5", "bytes as an int"]),
    ({"budget": float("nan")}, ["budget=nan"]), ({"budget": True}, ["budget=True"]),
    ({"budget": "6G"}, ["'6G'", "unknown unit 'G'", "GiB"]), ({"budget": "6"}, ["'6'", "'6GiB'"]),
    ({"budget": "101%"}, ["'101%'", "100 %"]), ({"budget": "-3MB"}, ["'-3MB'"]),
    ({"budget": [1]}, ["[1]"]), ({"budget": "device"}, ["ctx=mx.gpu(0)"]),
    ({"budget": "device", "budget_of": "pool"}, ["budget='device' is of", "leave out budget_of"]),
    ({"budget": "60%", "budget_of": "gpu"}, ["'pool' or 'device', not 'gpu'"]),
    ({"budget_of": "device"}, ["give budget= too"]), ({"optimizer": "adam"}, ["give budget= too"]),
    ({"budget": "60%", "optimizer": "adam", "budget_of": "pool"}, ["optimizer= is of all"]),
    ({**OF_DEVICE, "optimizer": "adaam"}, ["adaam"]),
    ({**OF_DEVICE, "optimizer": ("sgd", {"momentun": 1})}, ["momentun"]),
    ({**OF_DEVICE, "optimizer": (5, {})}, ["cannot be made"]),
    ({**OF_DEVICE, "optimizer": 3}, ["such as 'adam'"]),
    ({"slower_than": 0.9}, ["slower_than=0.9 is less than the time without a plan"]),
    ({"slower_than": "fast"}, ["slower_than"]), ({"slower_than": float("nan")}, ["slower_than"]),
    ({"slower_than": 1.2, "planner": "chen2016"}, ["combined with slower_than"]),
    ({"how": "auto", "planner": "chen2016"}, ["combined with how='auto'"]),
    ({"budget": "knee", "budget_of": "device"}, ["budget='knee' is no number of bytes"]),
    ({"budget": "knees"}, ["or 'knee'"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), MISUSE)
def test_a_wrong_option_is_named_with_its_remedy(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(memonger.MemongerError) as caught:
        memonger.plan(net(), **{"shapes": SHAPES, **options})
    assert all(word in str(caught.value) for word in words), caught.value


#: A call, an option that it does not have, and what is said.
ELSEWHERE: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (memonger.plan, {"bugdet": "60%"}, "plan: unknown option 'bugdet'; did you mean 'budget'?"),
    (memonger.search_plan, {"devcies": 2}, "unknown option 'devcies'; did you mean 'devices'?"),
    (memonger.frontier, {"patienc": 2}, "frontier: unknown option 'patienc'; did you mean"),
    (memonger.frontier, {"budget": "60%"}, "frontier takes no budget=; give it to memonger.plan"),
    (memonger.largest_batch, {"work": 2.0}, "largest_batch takes no work=; give it to"),
    (memonger.largest_batch, {"data": (2, 3)}, "unknown option 'data'"),
    (memonger.largest_batch, {"budget": "knee"}, "needs a budget in bytes"),
]


@pytest.mark.parametrize(("call", "options", "said"), ELSEWHERE)
def test_an_option_that_a_call_does_not_have_is_named(
    call: Any, options: dict[str, Any], said: str
) -> None:
    arguments = {"shapes": SHAPES, **options}
    if call is memonger.largest_batch:
        arguments.setdefault("budget", "1GB")
    with pytest.raises(memonger.MemongerError, match=re.escape(said)):
        call(net(), **arguments)
    with pytest.raises(memonger.MemongerError, match="unknown option 'bugdet'; did you mean 'bud"):
        memonger.enable(bugdet="60%")  # type: ignore[call-arg]
    with pytest.raises(memonger.MemongerError, match="enable takes no devices=; what is bound"):
        memonger.enable(devices=2)  # type: ignore[call-arg]


def test_the_table_of_options_has_all_of_them_with_their_defaults() -> None:
    parameters = inspect.signature(memonger.plan).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {*given} == {*NAMES}
    assert given.pop("how") is None  # 'marks' where an option needs them, or 'auto'
    options = vars(Limits())
    assert {k: v for k, v in given.items() if k in options} == {
        k: v for k, v in options.items() if k in given
    }


@pytest.mark.parametrize("threshold", [-1, 1.5, "576", None, False])
def test_a_wrong_threshold_is_refused(threshold: Any) -> None:
    with pytest.raises(memonger.MemongerError, match="threshold must be"):
        memonger.make_mirror_plan(net(), threshold, **SHAPES)


def fully(x: Any = None, hidden: int = 4) -> Any:
    return S.FullyConnected(S.Variable("data") if x is None else x, num_hidden=hidden, name="fc")


def no_gradient() -> Any:
    return S.MakeLoss(S.batch_take(fully(), S.zeros((2,), dtype="int32"), name="taken"))


def transposed(channels: int = 4, own: bool = False, depth: int = 3) -> Any:
    """Build Deconvolutions of one weight, which MXNet trains; some marks kill the process."""
    size = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels}
    weights = [S.var(f"weight{k}", shape=(channels, channels, 3, 3)) for k in range(depth)]
    x = S.Convolution(S.var("data"), name="conv", **size)
    for k, weight in enumerate(weights):
        x = S.Deconvolution(x, weight if own else weights[0], name=f"transposed{k}", **size)
        x = S.add_n(*[S.tanh(S.tanh(x) * (1 + 0.1 * j)) for j in range(4)])
    return S.MakeLoss(S.mean(S.square(x)), name="loss")


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (no_gradient, {"data": (2, 3)}, "'taken'.*batch_take.*BlockGrad"),
    (lambda: convolutions(4, norm=False).optimize_for("MKLDNN"), SHAPES, "_sg_mkldnn.*inference"),
    (lambda: S.sort(fully(), name="sorted"), {"data": (2, 3)}, "'sorted'.*write axis=-1"),
    (lambda: S.SoftmaxOutput(fully(), out_grad=True, name="s"), {"data": (2, 3)}, "'s'.*out_grad"),
    (transposed, {"data": (2, 3, 8, 8)}, "'transposed0'.*several operators read.*MKLDNN_ENABLED=0"),
    (lambda: fully(fully()), {"data": (2, 4)}, "same name, 'fc_weight'.*share one"),
    *[
        (lambda name=name: small_net(DYNAMIC_CASES[name]), SMALL_SHAPES, "known only when it runs")
        for name in DYNAMIC_CASES
    ],
]


@pytest.mark.parametrize(("build", "shapes", "said"), REFUSED)
def test_networks_that_cannot_be_planned_are_refused_with_the_reason(
    build: Any, shapes: Any, said: str
) -> None:
    with pytest.raises(memonger.MemongerError, match=said):
        memonger.search_plan(build(), shapes=shapes)
    if build is no_gradient:
        with pytest.raises(memonger.MemongerError, match="batch_take"):
            memonger.get_cost(build(), shapes=shapes)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_transposed_convolutions_without_padded_sums_are_planned(
    how: str,
) -> None:
    """Of 16 channels, of their own weights, of a fixed weight, on GPUs."""
    shapes = {"data": (2, 3, 8, 8)}
    for net in (transposed(16), transposed(own=True)):
        plan = memonger.plan(net, shapes, how=how, patience=0.02, ctx=mx.cpu())
        assert plan.recomputed and memonger.check(net, plan.symbol, shapes, 1)
    fixed = dict.fromkeys(("conv_weight", "conv_bias"), "write")
    for options in ({"grad_req": fixed, "ctx": mx.cpu()}, {"ctx": "gpu"}):
        assert memonger.plan(transposed(), shapes, how=how, patience=0.02, **options).recomputed


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MXNET_BACKWARD_DO_MIRROR", "1", "MXNET_BACKWARD_DO_MIRROR.*unset it"),
        ("MXNET_BACKWARD_DO_MIRROR", "0", ""),
        ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "many", "GRAD_SUM_CAP='many'.*unset it"),
    ],
)
def test_settings_of_mxnet_that_break_plans_are_refused(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(memonger.MemongerError, match=said) if said else nullcontext():
        memonger.search_plan(net(), **SHAPES)


def test_operators_of_one_name_are_planned() -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=512)
    for _ in range(12):
        x = S.tanh(S.sigmoid(x * 2.0, name="twice"), name="twice")
    symbol, shapes = S.LinearRegressionOutput(x, name="out"), {"data": (512, 16)}
    planned = memonger.search_plan(symbol, shapes=shapes)
    assert memonger.get_cost(planned, shapes=shapes) < memonger.get_cost(symbol, shapes=shapes)
    assert memonger.check(symbol, planned, shapes)


def test_check_names_what_differs() -> None:
    symbol, other = net(), S.SoftmaxOutput(fully(hidden=3), name="softmax")
    with pytest.raises(memonger.MemongerError, match="not the same network"):
        memonger.check(symbol, other, SHAPES)
    leaky = mx.sym.load_json(symbol.tojson().replace('"relu"', '"softsign"'))
    report = memonger.check(symbol, leaky, SHAPES)
    assert not report and report.repeatable
    assert report.differences[0].step == 0 and "differ, first output" in str(report)
    exact, close = (S.MakeLoss(fully() * factor, name="loss") for factor in (1.0, 1.0 + 2**-22))
    report = memonger.check(exact, close, {"data": (2, 3)})
    assert not report and report.differences[0].largest < 1e-5  # a bit is enough
    symbol = S.MakeLoss(S.log(fully() - 100))
    report = memonger.check(symbol, symbol, {"data": (2, 3)})
    assert not report and "not finite" in str(report)


def test_check_tells_what_to_do_where_mxnet_fails() -> None:
    """Plain training fails too."""
    x = mx.sym.Variable("data")
    for _ in range(2):
        x = S.BatchNorm(S.Convolution(x, kernel=(1, 1, 1), num_filter=16))
    with pytest.raises(memonger.MemongerError, match="is_view.*MXNET_MKLDNN_ENABLED=0"):
        memonger.check(x, x, {"data": (2, 3, 4, 16, 16)})


@pytest.mark.parametrize("ctx, most", [("cpu", 2**31 - 1), ("gpu", 2**31 - 1 - 65535 * 256)])
def test_more_elements_than_mxnet_counts_are_no_batch(ctx: str, most: int) -> None:
    largest = memonger.largest_batch(
        net(), {"data": (None, 3, 64, 64)}, "100TB", patience=0.01, how="marks", ctx=ctx
    )
    assert largest.batch == most // (4 * 64 * 64)


def test_devices_need_shapes() -> None:
    symbol = net()(data=S.Variable("data", shape=SHAPES["data"]))
    with pytest.raises(memonger.MemongerError, match="devices=2: no input was given"):
        memonger.plan(symbol, devices=2, how="marks")


READ: dict[Any, float] = {
    1: 1, 6 * 2**30: 6442450944, "6GB": 6e9, "6GiB": 6442450944, " 6 gib ": 6442450944,
    "800MB": 8e8, "800MiB": 838860800, "1.5kB": 1500, ".5KiB": 512, "2TB": 2e12, "12B": 12,
}  # fmt: skip
SHARES: dict[Any, float] = {"60%": 0.6, "12.5 %": 0.125, 0.6: 0.6, 1.0: 1.0}


def test_a_budget_is_read_as_it_is_written() -> None:
    for written, amount in READ.items():
        budget = read_budget(written, None, None, None)
        assert budget == Budget(amount, False, "pool", 0.0) and budget.limit(10**6) == amount
    for written, share in SHARES.items():
        budget = read_budget(written, None, None, None)
        assert budget == Budget(share, True, "pool", 0.0) and budget.limit(10**6) == share * 10**6


OPTIMIZERS: list[tuple[Any, int]] = [
    (None, 0), ("sgd", 0), (("sgd", {"momentum": 0.9}), 4), (mx.optimizer.SGD(momentum=0.9), 4),
    ("adam", 8), ("adagrad", 4), (("rmsprop", {"centered": True}), 12),
]  # fmt: skip


def test_the_state_of_an_optimizer_is_counted_by_element() -> None:
    for optimizer, nbytes in OPTIMIZERS:
        assert measure_state_per_element(optimizer) == nbytes, optimizer


def test_a_budget_of_the_device_is_what_is_free_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    free = {0: (2**29, 2**33), 1: (2**32, 2**33)}
    monkeypatch.setattr(mx.context, "gpu_memory_info", free.__getitem__)
    budget = read_budget("device", None, "adam", mx.gpu(1))
    assert budget == Budget(2**32, False, "device", 8.0, ROOM) and budget.limit() == 2**32 - ROOM
    with pytest.raises(memonger.MemongerError, match=r"leaves nothing: 1024\.0 MiB of a GPU"):
        read_budget("device", None, None, mx.gpu(0))


def test_a_budget_in_bytes_bounds_the_device_where_it_is_a_gpu() -> None:
    """Of a call that bounds it by default: room for CUDA and cuDNN is taken off, and said."""
    for ctx, of, room in (("any", "pool", 0), (mx.cpu(), "pool", 0), ("gpu", "device", ROOM)):
        options = read_limits(ctx=ctx, budget="8GB", budget_of=bound_gpu("8GB", None, ctx))
        assert options.budget == Budget(8e9, False, of, 0.0, room)
        assert options.budget.limit() == 8 * 10**9 - room
        said = options.budget.describe_beside()
        assert said.startswith("; 1024.0 MiB of a GPU are left to CUDA") == bool(room)
    for budget in ("60%", "knee", 0.5, None):
        assert bound_gpu(budget, None, "gpu") is None
    assert bound_gpu("8GB", "pool", "gpu") == "pool"
