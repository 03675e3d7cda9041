"""The ways in which MXNet networks are trained: each with a plan, equal bit for bit to without."""

from __future__ import annotations

import functools
from typing import Any, Callable

import pytest

import memonger
import mxnet as mx
import networks
import numpy as np
from more_networks import unrolled
from planned import marked, nodes

BATCH = 16
SHAPES = {"data": (BATCH, 3, 16, 16), "softmax_label": (BATCH,)}
HALF, DOUBLE = ({n: (size, *rest) for n, (_, *rest) in SHAPES.items()} for size in (8, 32))

pytestmark = pytest.mark.filterwarnings("ignore")  # FeedForward is deprecated, and says so


def residual(stage: str = "") -> Any:
    """``stage``: which mirror_stage the sums get: none, 'one', or 'two', a label for each two."""

    def unit(x: Any, name: str) -> Any:
        x = mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), pad=(1, 1), name=name + "_c")
        x = mx.sym.BatchNorm(x, fix_gamma=False, name=name + "_n")
        return mx.sym.Activation(x, act_type="relu", name=name + "_r")

    x = unit(mx.sym.Variable("data"), "first")
    for i in range(6):
        y = unit(unit(x, f"a{i}"), f"b{i}")
        if i % 3 == 1:
            y = mx.sym.Dropout(y, p=0.3, name=f"dropout{i}")
        x = mx.sym.broadcast_add(x, y, name=f"sum{i}")
        if stage:
            x._set_attr(mirror_stage="True" if stage == "one" else str(i // 2))
    x = mx.sym.Pooling(x, kernel=(4, 4), stride=(4, 4), pool_type="max", name="pool")
    x = mx.sym.FullyConnected(x, num_hidden=10, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def plan(symbol: Any, **options: Any) -> Any:
    planned = memonger.search_plan(symbol, **options)
    assert marked(planned)
    shapes = {k: v for k, v in options.items() if k != "planner"}
    assert memonger.get_cost(planned, **shapes) < memonger.get_cost(symbol, **shapes)
    return planned


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """The residual network and its plan."""
    net = residual()
    return net, plan(net, shapes=SHAPES)


def inputs(shapes: dict[str, Any]) -> mx.io.NDArrayIter:
    """Three batches; labels are classes, except those of a regression (``value``)."""
    random, batch = np.random.RandomState(11), next(iter(shapes.values()))[0]
    arrays: tuple[dict[str, Any], ...] = {}, {}
    for name, (_, *rest) in shapes.items():
        value: Any = random.uniform(-1, 1, (3 * batch, *rest))
        if name.endswith("label") and not name.startswith("value"):
            value = random.randint(0, 10, value.shape)
        arrays[name.endswith("label")][name] = value.astype("f")
    return mx.io.NDArrayIter(*arrays, batch)


def after_batch(param: Any) -> None:
    """Wait, and seed the next batch.

    Module.fit reads BatchNorm's statistics before the backward pass has written them, planned or
    not. With a seed of its own a batch has the same Dropout in a training that was resumed.
    """
    mx.nd.waitall()
    mx.random.seed(100 * param.epoch + param.nbatch)


def module_of(symbol: Any, **options: Any) -> mx.mod.Module:
    labels = [name for name in symbol.list_arguments() if name.endswith("label")]
    return mx.mod.Module(symbol, label_names=labels, **options)


FIT: dict[str, Any] = {
    "optimizer_params": {"learning_rate": 0.05, "momentum": 0.9},
    "batch_end_callback": after_batch,
}


def fit(module: Any, shapes: dict[str, Any] = SHAPES, **options: Any) -> Any:
    """Fit, always from the same seed."""
    mx.random.seed(5)
    chosen = {"num_epoch": 2, "initializer": mx.init.Xavier(), "eval_metric": mx.metric.Loss()}
    module.fit(inputs(shapes), **{**FIT, **chosen, **options})
    mx.nd.waitall()
    return module


def parameters(module: Any) -> dict[str, np.ndarray]:
    return {k: v.asnumpy() for held in module.get_params() for k, v in held.items()}


def everything(module: mx.mod.Module) -> dict[str, np.ndarray]:
    """Parameters, auxiliary states, gradients (on the first device), outputs of the last batch."""
    gradients = module._exec_group.execs[0].grad_dict.items()
    outputs = zip(module.output_names, module.get_outputs())
    held = {f"{k}: {n}": v for k, kind in enumerate((gradients, outputs)) for n, v in kind}
    return {**parameters(module), **{k: v.asnumpy() for k, v in held.items() if v is not None}}


def assert_equal(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Compare bit for bit."""
    assert expected and expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.all(np.isfinite(value)), name
        assert np.array_equal(value, found[name]), name


def assert_same_training(net: Any, planned: Any, shapes: dict[str, Any] = SHAPES) -> None:
    """Fit a Module of each, and compare all it holds."""
    assert_equal(*(everything(fit(module_of(s), shapes)) for s in (net, planned)))


def ready(symbol: Any, shapes: dict[str, Any] = SHAPES, **options: Any) -> mx.mod.Module:
    """A Module that is ready for ``step``."""
    mx.random.seed(5)
    module, data = module_of(symbol), inputs(shapes)
    module.bind(data.provide_data, data.provide_label, **options)
    if not module.params_initialized:
        module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params=FIT["optimizer_params"])
    return module


def step(module: Any, batch: Any) -> None:
    module.forward_backward(batch)
    module.update()
    mx.nd.waitall()


def on_two_devices(symbol: Any) -> Any:
    """What one device binds is its share of the batch, for which it was planned."""
    return everything(fit(module_of(symbol, context=[mx.cpu(0), mx.cpu(1)]), DOUBLE))


def by_feed_forward(symbol: Any) -> Any:
    mx.random.seed(5)
    optimizer = {"num_epoch": 2, "learning_rate": 0.05, "momentum": 0.9}
    model = mx.model.FeedForward(symbol, ctx=mx.cpu(), initializer=mx.init.Xavier(), **optimizer)
    model.fit(inputs(SHAPES), batch_end_callback=after_batch)
    found = {**model.arg_params, **model.aux_params}
    found = {name: value.asnumpy() for name, value in found.items()}
    return {**found, "predicted": model.predict(inputs(SHAPES))}


def added_up(symbol: Any) -> Any:
    module = ready(symbol, grad_req="add")
    for batch in inputs(SHAPES):
        module.forward_backward(batch)
        mx.nd.waitall()
        step(module, batch)
    return everything(module)


def shared(symbol: Any) -> Any:
    """A second Module takes the memory and the parameters of the first; they train in turn."""
    whole = ready(symbol)
    smaller = ready(symbol, HALF, shared_module=whole)
    for one, other in zip(inputs(SHAPES), inputs(HALF)):
        step(whole, one)
        step(smaller, other)
    return everything(smaller)


def frozen(symbol: Any) -> Any:
    """Planned as if all were trained; what is frozen has grad_req 'null' and stays as it was."""
    fixed = [n for n in symbol.list_arguments() if n not in SHAPES][::2]
    module = fit(module_of(symbol, fixed_param_names=fixed))
    assert not any(module._exec_group.execs[0].grad_dict[name] for name in fixed)
    return everything(module)


WAYS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda symbol: everything(fit(module_of(symbol))),
    "two devices": on_two_devices,
    "FeedForward": by_feed_forward,
    "gradients added up": added_up,
    "shared Module": shared,
    "frozen parameters": frozen,
}


@pytest.mark.parametrize("way", WAYS)
def test_training(pair: Any, way: str) -> None:
    assert_equal(*map(WAYS[way], pair))


def test_bucketing_module(caplog: pytest.LogCaptureFixture) -> None:
    """Each bucket is planned once, however often MXNet asks for its network."""
    caplog.set_level("INFO", "memonger")
    batch, lengths, calls, ends = 64, (14, 8, 8, 14), [], []

    def planned(length: int) -> Any:
        calls.append(length)
        shapes = dict.fromkeys(("data", "softmax_label"), (batch, length))
        return memonger.search_plan(unrolled(length, 256), shapes=shapes)

    for network in (functools.partial(unrolled, hidden=256), planned):
        module = mx.mod.BucketingModule(
            lambda length, network=network: (network(length), ("data",), ("softmax_label",)), 14
        )
        mx.random.seed(5)
        for k, length in enumerate(lengths):
            words = mx.nd.array(np.random.RandomState(k).randint(0, 20, (batch, length)))
            data, label = ([mx.io.DataDesc(n, words.shape)] for n in ("data", "softmax_label"))
            if not k:
                module.bind(data, label)
                module.init_params(mx.init.Xavier())
                module.init_optimizer(optimizer_params=FIT["optimizer_params"])
            described = {"provide_data": data, "provide_label": label}
            step(module, mx.io.DataBatch([words], [words], bucket_key=length, **described))
        ends.append(parameters(module))
    assert_equal(*ends)
    assert all(marked(bucket.symbol) for bucket in module._buckets.values())
    known = [r for r in caplog.records if "planned before" in r.getMessage()]
    assert set(calls) == set(lengths) and len(known) == len(calls) - len(set(lengths)) > 0


def test_checkpoint_and_resume(pair: Any, tmp_path: Any) -> None:
    """Two epochs, or one, a checkpoint and one more: planned and not, all the same."""
    net, planned = pair
    uninterrupted = fit(module_of(net))
    for name, symbol in (("net", net), ("planned", planned)):
        prefix = str(tmp_path / name)
        first = fit(module_of(symbol), num_epoch=1)
        first.save_checkpoint(prefix, 1, save_optimizer_states=True)
        loaded, arguments, auxiliary = mx.model.load_checkpoint(prefix, 1)
        assert marked(loaded) == marked(symbol)
        assert memonger.unplan(loaded).tojson() == net.tojson()
        resumed = mx.mod.Module.load(prefix, 1, load_optimizer_states=True)
        assert marked(resumed.symbol) == marked(symbol)
        mx.random.seed(2)  # what the last batch of the first epoch left
        given = {"arg_params": arguments, "aux_params": auxiliary}
        resumed.fit(inputs(SHAPES), **FIT, **given, begin_epoch=1, num_epoch=2)
        assert_equal(parameters(uninterrupted), parameters(resumed))


def test_monitor(pair: Any) -> None:
    """A Monitor also sees what is recomputed (``_mirror``), and kept copies (``_keep``)."""
    seen: list[dict[tuple[int, str], np.ndarray]] = []
    for symbol in pair:
        module = ready(symbol)
        monitor = mx.mon.Monitor(1, stat_func=lambda x: x.copy())
        # Without ``monitor_all``, with which MXNet never ends on networks with MakeLoss.
        module.install_monitor(monitor)
        found = {}
        for n, batch in enumerate(inputs(SHAPES)):
            monitor.tic()
            step(module, batch)
            # `toc` would make strings of the values.
            monitor.activated = False
            found.update({(n, name): value.asnumpy() for _, name, value in monitor.queue})
        seen.append(found)
    unplanned, planned = seen
    copies = {key: planned.pop(key) for key in list(planned) if "_keep_" in key[1]}
    for (n, name), value in copies.items():
        if name.endswith("_keep_output"):
            assert np.array_equal(value, unplanned[n, name.replace("_keep", "")]), (n, name)
    again = {key for key in planned if "_mirror" in key[1]}
    assert {name.split("_mirror")[0] for _, name in again} == set(marked(pair[1]))
    assert {(n, name.replace("_mirror", "")) for n, name in planned} == set(unplanned)
    assert {(0, "a2_c_mirror_output"), (0, "a2_c_mirror_backward_output0")} <= again
    # Not filled in, planned or not: the gradients of the data and of the label, which Module does
    # not ask for, and what MKLDNN's max pooling notes for itself: bytes in the order of the layout
    # that it chose, in the first quarter of an array. What is recomputed need not be read at all.
    unwritten = {"first_c_backward_output0", "softmax_backward_output1", "pool_workspace"}
    for (n, name), value in planned.items():
        original = name.replace("_mirror", "")
        if original not in unwritten and not name.endswith("_mirror_output"):
            assert np.array_equal(value, unplanned[n, original]), (n, name)


def features(blocked: bool) -> Any:
    """With results of the middle as outputs; with a gradient of their own, or without."""
    net = residual()
    found = [net.get_internals()[name + "_output"] for name in ("sum1", "b3_r", "sum4")]
    return mx.sym.Group([net, *(mx.sym.BlockGrad(f) if blocked else f for f in found)])


def test_features_with_gradient() -> None:
    group = features(False)  # of which Module.fit has no gradient to give
    report = memonger.check(group, plan(group, shapes=SHAPES), SHAPES)
    assert report, report


@pytest.mark.parametrize(
    "network, options",
    [
        (networks.two_heads(blocks=4, filters=16, batch=BATCH, image=16), {}),
        ((features(True), SHAPES), {}),
        ((residual("one"), SHAPES), {"planner": "chen2016"}),
    ],
    ids=["two losses", "features", "the original planner"],
)
def test_network(network: Any, options: Any) -> None:
    net, shapes = network
    assert_same_training(net, plan(net, shapes=shapes, **options), shapes)


def test_float64() -> None:
    """A convolution in float64 is not MKLDNN's: recomputed, its output must be read."""
    net, types = residual(), dict.fromkeys(SHAPES, "float64")
    planned = plan(net, shapes=SHAPES, type_dict=types)
    report = memonger.check(net, planned, SHAPES, type_dict=types)
    assert report, report
    executor = planned.simple_bind(mx.cpu(), grad_req="write", type_dict=types, **SHAPES)
    assert {array.dtype for array in executor.arg_arrays} == {np.float64}


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_gluon_block_that_was_cast(how: str) -> None:
    """Its variables keep the type of before, by which MXNet refuses the one that is given."""
    block = mx.gluon.nn.HybridSequential()
    for _ in range(6):
        block.add(mx.gluon.nn.Dense(64, activation="tanh", in_units=64))
    block(mx.sym.var("data"))
    block.cast("float64")
    net, shapes, types = block(mx.sym.var("data")), {"data": (512, 64)}, {"data": "float64"}
    with pytest.raises(RuntimeError, match="expected float64, got float32"):
        net.simple_bind(mx.cpu(), type_dict=types, **shapes)
    found = memonger.plan(net, shapes, type_dict=types, how=how, patience=0.02)
    all_types = dict.fromkeys(net.list_arguments(), "float64")
    same = memonger.plan(net, shapes, type_dict=all_types, how=how, patience=0.02)
    assert found.recomputed and found.pool_bytes == same.pool_bytes < found.unplanned_bytes
    assert memonger.check(net, found.symbol, shapes, type_dict=types)
    module = mx.mod.Module(found.symbol, label_names=None)
    module.bind([mx.io.DataDesc("data", shapes["data"], "float64")])
    module.init_params(mx.init.Xavier())
    weights, _ = module.get_params()
    assert {array.dtype for array in weights.values()} == {np.float64}
    types[net.list_arguments()[1]] = "float32"
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(net, shapes, type_dict=types)


def test_types_of_variables_that_nothing_contradicts() -> None:
    """They stay; also where another's gives way."""
    x = mx.sym.Cast(mx.sym.Variable("free", dtype="float64"), dtype="float32")
    for k in range(6):
        old = mx.sym.Variable(f"old{k}", dtype="float16")
        x = mx.sym.Activation(mx.sym.FullyConnected(x, old, num_hidden=16, no_bias=True), "tanh")
    shapes = {"free": (512, 16)}
    plan = memonger.plan(x, shapes, type_dict={"old0": "float32"}, patience=0.02)
    kept = {name: a.get("__dtype__") for name, a in plan.symbol.attr_dict().items()}
    assert [kept["free"], kept.get("old0"), kept.get("old5")] == ["1", None, None]
    contradicted = dict.fromkeys(("old0", "old5"), "float16")
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(x, shapes, type_dict=contradicted, patience=0.02)


@pytest.mark.parametrize("stage", ["one", "two"])
def test_mirror_stage(stage: str) -> None:
    """Sums that are marked are kept if enough has gathered, all else is recomputed."""
    net = residual(stage)
    planned = memonger.make_mirror_plan(net, 0, shapes=SHAPES)
    never = {n["name"] for n in nodes(net) if n["op"] in ("Dropout", "SoftmaxOutput")}
    assert set(marked(planned, "False")) - never == {f"sum{i}" for i in range(6)}
    if stage == "two":
        assert "sum1" not in marked(planned)  # the second of a label is kept with the first
    assert_same_training(net, planned)
    assert_same_training(net, plan(net, shapes=SHAPES))
