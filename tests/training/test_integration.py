"""The ways in which MXNet networks are trained: each with a plan, equal bit for bit to without."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Sequence

import pytest

import memonger
import mxnet as mx
import networks
import numpy as np
from planned import marked, nodes

BATCH = 16
SHAPES = {"data": (BATCH, 3, 16, 16), "softmax_label": (BATCH,)}

pytestmark = pytest.mark.filterwarnings("ignore")  # FeedForward is deprecated, and says so

# -- networks, planned ------------------------------------------------------------------------


def residual(blocks: int = 6, filters: int = 16, stage: str = "") -> Any:
    """Build a residual network with BatchNorm and Dropout.

    ``stage`` says how the sums get their mirror_stage: not at all, by '_set_attr', by 'AttrScope',
    by 'attr', or 'staged': with labels that make one cut of two sums.
    """

    def unit(x: Any, name: str) -> Any:
        x = mx.sym.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1), name=name + "_c")
        x = mx.sym.BatchNorm(x, fix_gamma=False, name=name + "_n")
        return mx.sym.Activation(x, act_type="relu", name=name + "_r")

    def added(x: Any, y: Any, i: int) -> Any:
        name = "sum%d" % i
        if stage == "AttrScope":
            with mx.AttrScope(mirror_stage="True"):
                return mx.sym.elemwise_add(x, y, name=name)
        if stage == "attr":
            return mx.sym.broadcast_add(x, y, name=name, attr={"mirror_stage": "True"})
        total = mx.sym.broadcast_add(x, y, name=name)
        if stage:
            total._set_attr(mirror_stage=str(i // 2) if stage == "staged" else "True")
        return total

    x = unit(mx.sym.Variable("data"), "first")
    for i in range(blocks):
        y = unit(unit(x, "a%d" % i), "b%d" % i)
        if i % 3 == 1:
            y = mx.sym.Dropout(y, p=0.3, name="dropout%d" % i)
        x = added(x, y, i)
    x = mx.sym.Pooling(x, kernel=(4, 4), stride=(4, 4), pool_type="max", name="pool")
    x = mx.sym.FullyConnected(x, num_hidden=10, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def plan(symbol: Any, **options: Any) -> Any:
    """Plan with ``search_plan``, and see that the plan recomputes something, for less memory."""
    planned = memonger.search_plan(symbol, **options)
    assert marked(planned)
    shapes = {k: v for k, v in options.items() if k != "planner"}
    assert memonger.get_cost(planned, **shapes) < memonger.get_cost(symbol, **shapes)
    return planned


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Make the residual network and its plan."""
    net = residual()
    return net, plan(net, shapes=SHAPES)


# -- training, and comparing ------------------------------------------------------------------


def inputs(shapes: dict[str, Any], count: int = 3) -> mx.io.NDArrayIter:
    """Draw ``count`` batches; labels are classes, except those of a regression (``value``)."""
    random = np.random.RandomState(11)
    data, labels = {}, {}
    for name, (batch, *rest) in shapes.items():
        shape = (count * batch, *rest)
        if not name.endswith("label"):
            data[name] = random.uniform(-1, 1, shape).astype("f")
        elif name.startswith("value"):
            labels[name] = random.uniform(-1, 1, shape).astype("f")
        else:
            labels[name] = random.randint(0, 10, shape).astype("f")
    batch = next(iter(shapes.values()))[0]
    return mx.io.NDArrayIter(data, labels, batch)


def after_batch(param: Any) -> None:
    """Wait, and seed the next batch.

    Module.fit reads BatchNorm's statistics before the backward pass has written them, planned or
    not. With a seed of its own a batch has the same Dropout in a training that was resumed.
    """
    mx.nd.waitall()
    mx.random.seed(100 * param.epoch + param.nbatch)


def module_of(symbol: Any, **options: Any) -> mx.mod.Module:
    """Make a Module of a symbol; what ends in 'label' is a label."""
    arguments = symbol.list_arguments()
    labels = [name for name in arguments if name.endswith("label")]
    return mx.mod.Module(symbol, label_names=labels, **options)


FIT: dict[str, Any] = {
    "optimizer_params": {"learning_rate": 0.05, "momentum": 0.9},
    "batch_end_callback": after_batch,
}


def fit(module: Any, data: Any, **options: Any) -> Any:
    """Fit, always from the same seed."""
    mx.random.seed(5)
    chosen: dict[str, Any] = dict(FIT, num_epoch=2, initializer=mx.init.Xavier())
    chosen.setdefault("eval_metric", mx.metric.Loss())
    chosen.update(options)
    module.fit(data, **chosen)
    mx.nd.waitall()
    return module


def parameters(module: Any) -> dict[str, np.ndarray]:
    """Read all parameters and auxiliary states."""
    arguments, auxiliary = module.get_params()
    return {k: v.asnumpy() for k, v in [*arguments.items(), *auxiliary.items()]}


def gradients(module: mx.mod.Module) -> dict[str, np.ndarray]:
    """Read the gradients that a Module on one device holds."""
    held = module._exec_group.execs[0].grad_dict
    return {k: v.asnumpy() for k, v in held.items() if v is not None}


def outputs(module: mx.mod.Module) -> dict[str, np.ndarray]:
    """Read the outputs of the last batch."""
    return {n: v.asnumpy() for n, v in zip(module.output_names, module.get_outputs())}


def everything(module: mx.mod.Module) -> dict[str, np.ndarray]:
    """Read parameters, auxiliary states, gradients and outputs of a Module on one device."""
    kinds = (parameters(module), gradients(module), outputs(module))
    return {"%d %s" % (k, n): v for k, arrays in enumerate(kinds) for n, v in arrays.items()}


def assert_equal(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Compare bit for bit."""
    assert expected
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.all(np.isfinite(value)), name
        assert np.array_equal(value, found[name]), name


def assert_same_training(pair: Sequence[Any], shapes: dict[str, Any], **options: Any) -> None:
    """Fit a Module of each of a pair, and compare all it holds."""
    one, other = (everything(fit(module_of(s, **options), inputs(shapes))) for s in pair)
    assert_equal(one, other)


def step(module: Any, batch: Any, update: bool = True) -> None:
    """Train one batch, by hand."""
    module.forward_backward(batch)
    if update:
        module.update()
    mx.nd.waitall()


def ready(symbol: Any, shapes: dict[str, Any], **options: Any) -> mx.mod.Module:
    """Make a Module that is ready for ``step``."""
    mx.random.seed(5)
    module = module_of(symbol)
    data = inputs(shapes)
    module.bind(data.provide_data, data.provide_label, **options)
    if not module.params_initialized:
        module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params=FIT["optimizer_params"])
    return module


# -- the ways to train ------------------------------------------------------------------------


def test_comparison_sees_a_difference(pair: Any) -> None:
    """One step more with the planned network is not the same: these tests can fail."""
    one, other = (fit(module_of(s), inputs(SHAPES), num_epoch=n) for s, n in zip(pair, (1, 2)))
    with pytest.raises(AssertionError):
        assert_equal(parameters(one), parameters(other))


def test_module_fit(pair: Any) -> None:
    assert_same_training(pair, SHAPES)


def test_original_planner() -> None:
    net = residual(stage="_set_attr")
    assert_same_training((net, plan(net, shapes=SHAPES, planner="chen2016")), SHAPES)


def test_two_contexts() -> None:
    net = residual()
    # What one device binds is its share of the batch.
    planned = plan(net, shapes=SHAPES)
    whole = {name: (2 * BATCH, *rest) for name, (_, *rest) in SHAPES.items()}
    devices = [mx.cpu(0), mx.cpu(1)]
    one, other = (fit(module_of(s, context=devices), inputs(whole)) for s in (net, planned))
    assert_equal({**parameters(one), **outputs(one)}, {**parameters(other), **outputs(other)})


def test_feed_forward(pair: Any) -> None:
    ends = []
    for symbol in pair:
        mx.random.seed(5)
        model = mx.model.FeedForward(
            symbol,
            ctx=mx.cpu(),
            num_epoch=2,
            initializer=mx.init.Xavier(),
            learning_rate=0.05,
            momentum=0.9,
        )
        model.fit(inputs(SHAPES), batch_end_callback=after_batch)
        found = {**model.arg_params, **model.aux_params}
        ends.append({name: value.asnumpy() for name, value in found.items()})
        ends[-1]["predicted"] = model.predict(inputs(SHAPES))
    assert_equal(*ends)


class Sentences(mx.io.DataIter):
    """Batches of sentences of two lengths, in turn."""

    def __init__(self, lengths: Sequence[int], batch: int) -> None:
        super().__init__(batch)
        random = np.random.RandomState(2)
        self.batches: list[Any] = []
        self.default_bucket_key = max(lengths)
        for length in (*lengths, *lengths):
            data = mx.nd.array(random.randint(0, 50, (batch, length)))
            label = mx.nd.array(random.randint(0, 5, batch))
            self.batches.append(
                mx.io.DataBatch(
                    [data],
                    [label],
                    pad=0,
                    bucket_key=length,
                    provide_data=[("data", data.shape)],
                    provide_label=[("softmax_label", label.shape)],
                )
            )
        longest = max(self.batches, key=lambda b: b.bucket_key)
        self.provide_data, self.provide_label = longest.provide_data, longest.provide_label
        self.position = 0

    def reset(self) -> None:
        self.position = 0

    def next(self) -> Any:
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]


def sentence_network(length: int, hidden: int = 256) -> Any:
    """Build a recurrent network with shared weights and Dropout; a cell's states are one stage."""
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=50, output_dim=64, name="embed")
    words = mx.sym.SliceChannel(words, num_outputs=length, squeeze_axis=True, name="words")
    shared = {name: mx.sym.Variable(name) for name in ("in_weight", "on_weight", "gate_weight")}
    state = mx.sym.FullyConnected(words[0], shared["in_weight"], no_bias=True, num_hidden=hidden)
    for i in range(1, length):
        x = mx.sym.FullyConnected(words[i], shared["in_weight"], no_bias=True, num_hidden=hidden)
        y = mx.sym.FullyConnected(state, shared["on_weight"], no_bias=True, num_hidden=hidden)
        g = mx.sym.FullyConnected(state, shared["gate_weight"], no_bias=True, num_hidden=hidden)
        gate = mx.sym.Activation(g, act_type="sigmoid")
        state = gate * state + (1 - gate) * mx.sym.Activation(x + y, act_type="tanh")
        state._set_attr(mirror_stage=str(i))
    state = mx.sym.Dropout(state, p=0.2)
    return mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(state, num_hidden=5, name="fc"), name="softmax"
    )


def test_bucketing_module() -> None:
    lengths, batch = (8, 14), 256
    planned_lengths = set()

    def unplanned(length: int) -> Any:
        with mx.name.NameManager():
            return sentence_network(length), ("data",), ("softmax_label",)

    def planned(length: int) -> Any:
        net, data, label = unplanned(length)
        planned_lengths.add(length)
        return plan(net, data=(batch, length), softmax_label=(batch,)), data, label

    ends = []
    for generate in (unplanned, planned):
        module = mx.mod.BucketingModule(generate, default_bucket_key=max(lengths))
        ends.append(parameters(fit(module, Sentences(lengths, batch))))
    assert planned_lengths == set(lengths)
    assert_equal(*ends)


def test_checkpoint_and_resume(pair: Any, tmp_path: Any) -> None:
    """Two epochs, or one, a checkpoint and one more: planned and not, all the same."""
    net, planned = pair
    uninterrupted = fit(module_of(net), inputs(SHAPES), num_epoch=2)
    for name, symbol in (("net", net), ("planned", planned)):
        prefix = str(tmp_path / name)
        first = fit(module_of(symbol), inputs(SHAPES), num_epoch=1)
        first.save_checkpoint(prefix, 1, save_optimizer_states=True)
        loaded, arguments, auxiliary = mx.model.load_checkpoint(prefix, 1)
        assert marked(loaded) == marked(symbol)
        assert memonger.unplan(loaded).tojson() == net.tojson()
        resumed = mx.mod.Module.load(prefix, 1, load_optimizer_states=True)
        assert marked(resumed.symbol) == marked(symbol)
        mx.random.seed(2)  # what the last batch of the first epoch left
        resumed.fit(
            inputs(SHAPES),
            **FIT,
            arg_params=arguments,
            aux_params=auxiliary,
            begin_epoch=1,
            num_epoch=2,
        )
        assert_equal(parameters(uninterrupted), parameters(resumed))


def test_gradients_added_up(pair: Any) -> None:
    ends = []
    for symbol in pair:
        module = ready(symbol, SHAPES, grad_req="add")
        for batch in inputs(SHAPES):
            step(module, batch, update=False)
            step(module, batch)
        ends.append(everything(module))
    assert_equal(*ends)
    report = memonger.check(pair[0], pair[1], SHAPES, steps=2, grad_req="add")
    assert report, report


@pytest.mark.parametrize("frozen", ["body", "first half", "normalisation", "last", "every other"])
def test_frozen_parameters(pair: Any, frozen: str) -> None:
    """Planned as if all were trained; what is frozen has grad_req 'null' and stays as it was."""
    names = [n for n in pair[0].list_arguments() if n not in SHAPES]
    fixed = {
        "body": [n for n in names if not n.startswith("scores")],
        "first half": names[: len(names) // 2],
        "normalisation": [n for n in names if n.endswith(("gamma", "beta"))],
        "last": [n for n in names if n.startswith("scores")],
        "every other": names[::2],
    }[frozen]
    ends = []
    for symbol in pair:
        module = fit(module_of(symbol, fixed_param_names=fixed), inputs(SHAPES))
        assert not set(gradients(module)) & set(fixed)
        ends.append(everything(module))
    assert_equal(*ends)


def test_shared_module(pair: Any) -> None:
    """A second Module takes the memory and the parameters of the first; they train in turn."""
    half = {name: (BATCH // 2, *rest) for name, (_, *rest) in SHAPES.items()}
    ends = []
    for symbol in pair:
        whole = ready(symbol, SHAPES)
        data = inputs(half)
        smaller = module_of(symbol)
        smaller.bind(data.provide_data, data.provide_label, shared_module=whole)
        smaller.init_optimizer(optimizer_params=FIT["optimizer_params"])
        for one, other in zip(inputs(SHAPES), data):
            step(whole, one)
            step(smaller, other)
        ends.append({**parameters(smaller), **gradients(smaller), **outputs(smaller)})
    assert_equal(*ends)


def test_monitor(pair: Any) -> None:
    """A Monitor also sees what is computed again, under the node's name and ``_mirror``.

    It sees the kept copies too, under the node's name and ``_keep``. The gradients of a recomputed
    node are named after its copy. The values are those of the unplanned network. The Monitor is
    installed without ``monitor_all``, with which MXNet never ends on networks with MakeLoss.
    """
    seen: list[dict[tuple[int, str], np.ndarray]] = []
    for symbol in pair:
        module = ready(symbol, SHAPES)
        monitor = mx.mon.Monitor(1, stat_func=lambda x: x.copy())
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
    assert (0, "a2_c_mirror_output") in again
    assert (0, "a2_c_mirror_backward_output0") in again
    assert not any("_mirror" in name for _, name in unplanned)
    assert {name.split("_mirror")[0] for _, name in again} == set(marked(pair[1]))
    assert {(n, name.replace("_mirror", "")) for n, name in planned} == set(unplanned)
    # Not filled in, planned or not: the gradients of the data and of the label, which Module does
    # not ask for, and what MKLDNN's max pooling notes for itself: bytes in the order of the layout
    # that it chose, in the first quarter of an array.
    unwritten = {"first_c_backward_output0", "softmax_backward_output1", "pool_workspace"}
    # Nor is what is computed again although a kept copy holds it, for nobody reads it.
    unwritten |= {name.replace("_keep", "_mirror") for _, name in copies}
    for (n, name), value in planned.items():
        original = name.replace("_mirror", "")
        if original not in unwritten and name not in unwritten:
            assert np.array_equal(value, unplanned[n, original]), (n, name)


def test_monitor_in_fit(pair: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    ends = []
    for symbol in pair:
        caplog.clear()
        module = fit(module_of(symbol), inputs(SHAPES), monitor=mx.mon.Monitor(1), num_epoch=1)
        ends.append(everything(module))
        assert ("_mirror" in caplog.text) == (symbol is pair[1])
    assert_equal(*ends)


# -- what networks may hold -------------------------------------------------------------------


def test_two_losses() -> None:
    net, shapes = networks.two_heads(blocks=4, filters=16, batch=BATCH, image=16)
    assert_same_training((net, plan(net, shapes=shapes)), shapes)


@pytest.mark.parametrize(
    "blocked", [True, False], ids=["features blocked", "features with gradient"]
)
def test_group_outputs(blocked: bool) -> None:
    """Results of the middle are outputs too; with a gradient of their own, or without."""
    net = residual()
    features = [net.get_internals()[name + "_output"] for name in ("sum1", "b3_r", "sum4")]
    if blocked:
        features = [mx.sym.BlockGrad(f) for f in features]
    group = mx.sym.Group([net, *features])
    pair = group, plan(group, shapes=SHAPES)
    report = memonger.check(pair[0], pair[1], SHAPES)
    assert report, report
    if blocked:  # else Module.fit has no gradient to give
        assert_same_training(pair, SHAPES)


def test_block_grad_in_the_middle() -> None:
    """No gradient goes back beyond the middle, but on the one way around it."""
    x = mx.sym.Variable("data")
    for i in range(10):
        y = mx.sym.FullyConnected(x, num_hidden=256, name="fc%d" % i)
        y = mx.sym.BatchNorm(mx.sym.Activation(y, act_type="tanh"), name="norm%d" % i)
        if i == 5:
            way_around = mx.sym.FullyConnected(x, num_hidden=256, name="around")
            y = mx.sym.BlockGrad(y) + mx.sym.Dropout(way_around, p=0.3)
        x = y
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10), name="softmax")
    shapes = {"data": (256, 256), "softmax_label": (256,)}
    assert_same_training((net, plan(net, shapes=shapes)), shapes)


@pytest.mark.parametrize("kind", ["fully connected", "convolution"])
def test_float64(kind: str) -> None:
    """A convolution in float64 is not MKLDNN's: recomputed, its output must be read."""
    if kind == "convolution":
        net, shapes = residual(), dict(SHAPES)
    else:
        net, shapes = networks.highway(layers=8, hidden=256, batch=256, input=32)
    types = dict.fromkeys(shapes, "float64")
    planned = plan(net, shapes=shapes, type_dict=types)
    report = memonger.check(net, planned, shapes, type_dict=types)
    assert report, report
    ends = []
    for symbol in (net, planned):
        executor = symbol.simple_bind(mx.cpu(), grad_req="write", type_dict=types, **shapes)
        assert {str(np.dtype(a.dtype)) for a in executor.arg_arrays} == {"float64"}
        random = np.random.RandomState(1)
        for name, array in executor.arg_dict.items():
            array[:] = (
                random.randint(0, 10, array.shape)
                if name.endswith("label")
                else random.uniform(-0.2, 0.2, array.shape)
            )
        for _ in range(3):
            mx.random.seed(3)
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()
        held = (executor.output_dict, executor.grad_dict, executor.aux_dict)
        ends.append({n: v.asnumpy() for arrays in held for n, v in arrays.items()})
    assert_equal(*ends)


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
        old = mx.sym.Variable("old%d" % k, dtype="float16")
        x = mx.sym.Activation(mx.sym.FullyConnected(x, old, num_hidden=16, no_bias=True), "tanh")
    shapes = {"free": (512, 16)}
    plan = memonger.plan(x, shapes, type_dict={"old0": "float32"}, patience=0.02)
    kept = {name: a.get("__dtype__") for name, a in plan.symbol.attr_dict().items()}
    assert [kept["free"], kept.get("old0"), kept.get("old5")] == ["1", None, None]
    contradicted = dict.fromkeys(("old0", "old5"), "float16")
    with pytest.raises(memonger.MemongerError, match="the types do not fit"):
        memonger.plan(x, shapes, type_dict=contradicted, patience=0.02)


# -- marks and shapes, however they are given -------------------------------------------------


@pytest.mark.parametrize("stage", ["_set_attr", "AttrScope", "attr", "staged"])
def test_mirror_stage(stage: str) -> None:
    """Sums that are marked are kept if enough has gathered, all else is recomputed."""
    net = residual(stage=stage)
    planned = memonger.make_mirror_plan(net, 0, shapes=SHAPES)
    never = {n["name"] for n in nodes(net) if n["op"] in ("Dropout", "SoftmaxOutput")}
    assert set(marked(planned, "False")) - never == {"sum%d" % i for i in range(6)}
    assert_same_training((net, planned), SHAPES)
    assert_same_training((net, plan(net, shapes=SHAPES)), SHAPES)


def test_mirror_stage_is_the_same_however_it_is_set() -> None:
    plans = [
        memonger.make_mirror_plan(residual(stage=stage), 0, shapes=SHAPES)
        for stage in ("_set_attr", "AttrScope", "attr")
    ]
    assert len({tuple(marked(p)) for p in plans}) == 1
    staged = memonger.make_mirror_plan(residual(stage="staged"), 0, shapes=SHAPES)
    assert "sum1" not in marked(staged)  # the second of a label is kept with the first


class Given(NamedTuple):
    """A way of giving shapes, as arguments of ``search_plan`` and ``get_cost``."""

    options: dict[str, Any]
    data_shape: tuple[int, ...] | None = None  # of the variable itself


@pytest.mark.parametrize(
    "given",
    [
        Given({"shapes": SHAPES}),
        Given(dict(SHAPES)),
        Given({"data": SHAPES["data"]}),
        Given({"shapes": inputs(SHAPES).provide_data}),
        Given({"shapes": inputs(SHAPES).provide_data + inputs(SHAPES).provide_label}),
        Given({"shapes": (inputs(SHAPES).provide_data, inputs(SHAPES).provide_label)}),
        Given({}, SHAPES["data"]),
    ],
    ids=["dict", "keywords", "data", "DataDesc", "two lists in one", "two lists", "variable"],
)
def test_shapes(pair: Any, given: Given) -> None:
    """However the shapes are given, the plan is the same."""
    net, planned = pair
    if given.data_shape is None:
        assert plan(net, **given.options).tojson() == planned.tojson()
    else:
        net = net(data=mx.sym.Variable("data", shape=given.data_shape))
        found = plan(net)
        assert marked(found) == marked(planned)
        assert_same_training((net, found), SHAPES)


def test_shapes_of_a_bound_module(pair: Any) -> None:
    """What a Module was bound with serves to plan its symbol."""
    net, planned = pair
    module = ready(net, SHAPES)
    found = plan(module.symbol, shapes=[module.data_shapes, module.label_shapes])
    assert found.tojson() == planned.tojson()
