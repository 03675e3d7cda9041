"""A scheduled symbol in hand: bound by hand, copied, made into something else, refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import re
import weakref
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.execution.symbol import ScheduledSymbol, scheduled
from mxnet.contrib import amp

from drawn_schedules import everything, nested, work_of
from modules import BATCH, IMAGES, SHAPES, batch_arrays, bound, filled, net, planned, same, stepped
from planned import elsewhere

pytestmark = pytest.mark.python_differs

S = mx.sym
SMALL: dict[str, Any] = {"data": (4, 3), "softmax_label": (4,)}
Error = memonger.MemongerError


# ---------------------------------------------------------------------- bound by hand


@pytest.mark.parametrize(
    "request_",
    ["write", "add", {"fc_weight": "add", "convolution0_bias": "write"}, ["write"] * 22],
    ids=["write", "add", "dict", "list"],
)
def test_bind_and_simple_bind_train_to_the_bits_of_the_network(request_: Any) -> None:
    assert len(net().list_arguments()) == 22
    usual = stepped(filled(bound(net(), request_)))
    ours = bound(planned(), request_)
    arrays = list(ours.grad_arrays)
    same(usual, stepped(filled(ours)))
    assert all(one is other for one, other in zip(arrays, ours.grad_arrays))
    executor = filled(planned().simple_bind(mx.cpu(), grad_req=request_, **SHAPES))
    arrays_of_simple_bind = stepped(executor)  # without arrays for what is not asked for
    same(
        {k: usual[k] for k in arrays_of_simple_bind if k in usual},
        {k: arrays_of_simple_bind[k] for k in arrays_of_simple_bind if k in usual},
    )
    assert len(arrays_of_simple_bind) >= 3 * (1 + 2 + 8)


def test_head_gradients_may_be_an_array_a_list_or_a_dict() -> None:
    """As an array, a list or a dict; of two outputs, one of which is a loss."""
    with mx.name.NameManager():
        x = S.Variable("data")
        for _ in range(4):
            x = S.Activation(S.FullyConnected(x, num_hidden=8), act_type="tanh")
        loss = S.MakeLoss(S.sum(x * x), name="loss")
        symbol = S.Group([loss, S.FullyConnected(x, num_hidden=3, name="scores")])
    work = work_of(symbol, {"data": (5, 7)}, symbol.list_arguments())
    random, results = np.random.RandomState, []
    heads = [mx.nd.ones((1,)), mx.nd.array(random(0).normal(size=(5, 3)))]
    by_name = dict(zip(("loss_output", "scores_output"), heads))
    ways: list[Any] = [symbol, scheduled(symbol, nested(work, 2, 1, 0.9))]
    for one in ways:
        executor = one.simple_bind(mx.cpu(), data=(5, 7))
        for k, array in enumerate(executor.arg_arrays):
            array[:] = mx.nd.array(random(k).normal(size=array.shape))
        results += [stepped(executor, heads), stepped(executor, by_name)]
    for other in results[1:]:
        same(results[0], other)
    with pytest.raises(Error, match="'scores_output' is no loss"):
        executor.forward(is_train=True)
        executor.backward(heads[:1])


@pytest.mark.parametrize("request_", ["write", "add"])
def test_reshaped_it_trains_alike(request_: str) -> None:
    """With the parameters and the states of the one that was reshaped."""
    # Nobody writes the gradient of a label, not even zeros.
    requests = {n: request_ for n in net().list_arguments() if n != "softmax_label"}
    executors = [filled(s.simple_bind(mx.cpu(), requests, **SHAPES)) for s in (net(), planned())]
    same(*map(stepped, executors))
    for size in (8, BATCH, 48):
        shapes = {"data": (size, 3, 8, 8), "softmax_label": (size,)}
        others = [executor.reshape(allow_up_sizing=True, **shapes) for executor in executors]
        for executor in others:
            executor.copy_params_from(batch_arrays(size))
            if size == 48:  # MXNet takes new arrays as they come
                executor.grad_dict["data"][:] = 0
        same(*map(stepped, others))


def test_reshape_gives_an_executor_of_the_shapes_that_are_allowed() -> None:
    executor = planned().simple_bind(mx.cpu(), **SHAPES)
    assert executor.reshape(**SHAPES) is executor
    larger = executor.reshape(data=(48, 3, 8, 8), softmax_label=(48,))  # MXNet wants it allowed
    assert larger.arg_dict["data"].shape == (48, 3, 8, 8)
    with pytest.raises(Error, match="changes the shape of 'softmax_label'"):
        executor.reshape(data=(8, 3, 8, 8))
    partial = executor.reshape(partial_shaping=True, data=(8, 3, 8, 8))
    assert partial.arg_dict["softmax_label"].shape == (8,)


def test_outputs_stay_where_they_are() -> None:
    """Whoever holds the output arrays sees what was computed last, in training and inference."""
    executor = filled(planned().simple_bind(mx.cpu(), **SHAPES))
    usual = filled(net().simple_bind(mx.cpu(), **SHAPES))
    held = executor.outputs[0]
    assert executor.output_dict == {"softmax_output": held}
    for k, training in enumerate((True, False, False, True)):
        for one in (executor, usual):
            mx.random.seed(k)
            returned = one.forward(is_train=training, data=IMAGES[k : k + BATCH])
        assert np.array_equal(held.asnumpy(), returned[0].asnumpy())
        assert executor.outputs[0] is held


def test_gradients_are_arrays_of_their_own() -> None:
    """Where MXNet computes one for several, or hands on that of the output."""
    x, y, z = (S.Variable(name) for name in "xyz")
    symbol = S.Group([x + y, z])
    plan: Any = scheduled(symbol, everything(work_of(symbol, {"x": (3,), "z": (3,)}, "xyz")))
    heads = [mx.nd.array([1, 2, 3]), mx.nd.array([4, 5, 6])]
    executor = plan.simple_bind(mx.cpu(), x=(3,), z=(3,))
    executor.forward(is_train=True, x=heads[0], y=heads[0], z=heads[1])
    executor.backward(heads)
    for name in "xyz":
        array = executor.grad_dict[name]
        assert np.array_equal(array.asnumpy(), heads[name == "z"].asnumpy())
        array[:] = 0
    assert np.array_equal(executor.outputs[0].asnumpy(), [2, 4, 6])
    assert np.array_equal(executor.outputs[1].asnumpy(), executor.arg_dict["z"].asnumpy())


def test_an_executor_is_freed_when_it_is_let_go() -> None:
    def let_go() -> list[Any]:
        executor = filled(planned().simple_bind(mx.cpu(), **SHAPES))
        executor.set_monitor_callback(lambda name, array: None)  # a monitor holds none
        executor.forward(is_train=True)
        executor.backward()
        smaller = executor.reshape(data=(5, 3, 8, 8), softmax_label=(5,))
        smaller.forward(is_train=True)
        smaller.backward()
        mx.nd.waitall()
        return [weakref.ref(executor), weakref.ref(smaller)]

    let_go()  # what is set up once holds the first one until it is collected
    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in let_go()] == [None, None]
    finally:
        gc.enable()


def test_an_attribute_set_later_counts() -> None:
    symbol = planned()
    first = stepped(filled(symbol.simple_bind(mx.cpu(), **SHAPES)))
    symbol.get_internals()["pooling0_output"]._set_attr(pool_type="max")
    usual = mx.sym.load_json(symbol.tojson())
    later = stepped(filled(symbol.simple_bind(mx.cpu(), **SHAPES)))
    same(stepped(filled(usual.simple_bind(mx.cpu(), **SHAPES))), later)
    assert not np.array_equal(first["output softmax_output 0"], later["output softmax_output 0"])


# ---------------------------------------------------------------------- kept and lost


def names_once() -> Any:
    with mx.name.NameManager():
        x = S.FullyConnected(S.Variable("data"), num_hidden=4, name="fc")
        x = S.Activation(S.FullyConnected(x, num_hidden=4, name="last"), act_type="tanh", name="a")
        symbol = S.Group([S.SoftmaxOutput(x, name="softmax"), S.BlockGrad(x, name="seen")])
    return scheduled(symbol, nested(work_of(symbol, SMALL), 1, 1, 0.9))


KEPT: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "index": lambda s: s[0],
    "name": lambda s: s["softmax_output"],
    "slice": lambda s: s[:],
    "loop": lambda s: next(iter(s)),
    "as_nd_ndarray": lambda s: s.as_nd_ndarray(),
}


@pytest.mark.parametrize("way", KEPT)
def test_copies_and_single_outputs_keep_their_schedule(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    symbol = planned()
    other = KEPT[way](symbol)
    assert isinstance(other, ScheduledSymbol)
    assert other.schedule.operations.tolist() == symbol.schedule.operations.tolist()  # type: ignore[union-attr]
    assert other.tojson() == symbol.tojson()
    assert "_again" in other.simple_bind(mx.cpu(), **SHAPES).debug_str()
    assert not caplog.records


def as_bound(symbol: Any) -> str:
    return symbol.simple_bind(mx.cpu(), **SHAPES).debug_str()


def test_a_pickle_is_trained_by_its_schedule_in_another_process() -> None:
    symbol = planned()
    assert "_again" in as_bound(symbol)
    assert elsewhere(as_bound, symbol)[0] == as_bound(symbol)


#: What is made of a network with two outputs, and what is said when that is bound for training.
TAKEN: dict[str, Any] = {
    "index": (lambda s: s[0], "an output was taken"),
    "name": (lambda s: s["softmax_output"], "an output was taken"),
    "slice": (lambda s: s[:1], "an output was taken"),
    "order": (lambda s: s[::-1], "an output was taken"),
    "loop": (lambda s: next(iter(s)), "an output was taken"),
    "internals": (lambda s: s.get_internals()["a_output"], r"get_internals\(\)"),
    "children's children": (lambda s: s.get_children().get_children()[0], r"get_children\(\)"),
    "composed": (lambda s: s(data=S.Variable("data")), "composed"),
    "composed in place": (lambda s: (s._compose(data=S.Variable("data")), s)[1], "composed"),
    "copied": (lambda s: copy.copy(s.get_internals())["a_output"], r"get_internals\(\)"),
    "pickled": (lambda s: pickle.loads(pickle.dumps(s[0])), "an output was taken"),
    "optimize_for": (lambda s: s.optimize_for("MKLDNN"), "optimize_for"),
    "get_backend_symbol": (lambda s: s.get_backend_symbol("MKLDNN"), "get_backend_symbol"),
}


def the_warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert record.name == "memonger" and record.levelno == logging.WARNING
    return record.getMessage()


@pytest.mark.parametrize("way", TAKEN)
def test_what_lost_its_schedule_warns_when_it_is_bound_for_training(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = TAKEN[way]
    other = make(names_once())
    assert other.schedule is None
    shapes = {n: s for n, s in SMALL.items() if n in other.list_arguments()}
    other.simple_bind(mx.cpu(), grad_req="null", **shapes)
    assert not caplog.records
    for _ in range(2):
        executor = other.simple_bind(mx.cpu(), **shapes)
        assert "_again" not in executor.debug_str()
    message = the_warning(caplog)
    assert re.search(said, message) and "plan it" in message


def gluon(symbol: Any) -> Any:
    names = ("data", "softmax_label")
    block = mx.gluon.SymbolBlock(symbol, [S.Variable(name) for name in names])
    block.initialize()
    return block(mx.nd.ones((4, 3)), mx.nd.ones((4,)))


#: What it becomes part of, and what is said at once.
PART_OF: dict[str, Any] = {
    "operator": (lambda s: S.FullyConnected(s[0], num_hidden=2), "part of another symbol"),
    "group": (lambda s: S.Group([s, S.Variable("x")]), "part of another symbol"),
    "input": (lambda s: S.tanh(name="f")(f_data=s[0]), "part of another symbol"),
    "numpy": (lambda s: s.as_np_ndarray(), "as_np_ndarray"),
    "amp": (lambda s: amp.convert_symbol(s), "mx.contrib.amp"),
    "gluon": (gluon, "Gluon"),
}


@pytest.mark.parametrize("way", PART_OF)
def test_what_becomes_part_of_another_network_warns_at_once(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = PART_OF[way]
    symbol = names_once()
    for _ in range(2):
        assert not isinstance(make(symbol), ScheduledSymbol)
    assert said in the_warning(caplog)


def test_nothing_is_told_of_looking_at_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    symbol = names_once()
    mx.viz.print_summary(symbol[0], shape=SMALL)
    with contextlib.suppress(ImportError):  # without graphviz; it looks at the symbol before
        mx.viz.plot_network(symbol[0], shape=SMALL)
    symbol.save(str(tmp_path / "net.json"))
    list(symbol), list(symbol.get_internals()), repr(symbol), symbol.debug_str()
    symbol.infer_shape(**SMALL), symbol.infer_type(data="float32"), symbol.attr_dict()
    symbol[0]._set_attr(grad_scale="2")
    module = mx.mod.Module(symbol)
    module.bind(*([item] for item in SMALL.items()))
    module.init_params()
    module.init_optimizer()
    module.install_monitor(mx.mon.Monitor(1))
    module.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 3))], [mx.nd.ones((4,))]))
    module.get_outputs(), module.update()
    feature = symbol.get_internals()["a_output"]
    feature.simple_bind(mx.cpu(), grad_req="null", data=(4, 3))
    assert not caplog.records


# ---------------------------------------------------------------------- refused


def embedding(**more: Any) -> Any:
    words = S.Variable("words", **more.pop("variable", {}))
    x = S.Embedding(S.Variable("data"), words, input_dim=9, output_dim=4, name="e", **more)
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="fc"), name="softmax")


TOKENS: dict[str, Any] = {"data": (4,), "softmax_label": (4,)}
GROUPS: dict[str, Any] = {"group2ctx": {"a": mx.cpu(1)}}
ROW_SPARSE = "input 'words' is stored as row_sparse"


def test_what_no_schedule_can_do_is_refused_by_name() -> None:
    plan = nested(work_of(embedding(), TOKENS), 1, 1, 0.9)
    symbol, stored, sparse = (
        scheduled(embedding(**more), plan)
        for more in ({}, {"variable": {"stype": "row_sparse"}}, {"sparse_grad": True})
    )
    executor = symbol.simple_bind(mx.cpu(), **TOKENS)
    args, grads = executor.arg_dict, {n: a.copy() for n, a in executor.grad_dict.items()}
    by_row = {**grads, "words": mx.nd.sparse.zeros("row_sparse", (9, 4))}
    missing = {name: array for name, array in args.items() if name != "words"}
    twice = {**grads, "words": grads["fc_weight"]}
    simple: list[tuple[str, Any, dict[str, Any]]] = [
        ("group2ctx", symbol, GROUPS),
        (ROW_SPARSE, symbol, {"stype_dict": {"words": "row_sparse"}}),
        (ROW_SPARSE, stored, {}),
        ("gradient of 'words' is stored row by row", sparse, {}),
        ("grad_req of 'data' is 'writ'", symbol, {"grad_req": "writ"}),
        (r"grad_req has 1 entries", symbol, {"grad_req": ["write"]}),
    ]
    for words, one, more in simple:
        with pytest.raises(Error, match=words):
            one.simple_bind(mx.cpu(), **more, **TOKENS)
    wrong: list[tuple[str, Any, Any, dict[str, Any]]] = [
        (ROW_SPARSE, args, by_row, {}),
        ("argument 'words' is missing", missing, grads, {}),
        (r"\d arrays were given", executor.arg_arrays, executor.arg_arrays[:-1], {}),
        (r"\d arrays were given", [*executor.arg_arrays, args["data"]], grads, {}),
        ("bind: group2ctx|split with group2ctx", args, grads, GROUPS),
        ("of 'fc_weight' and the gradient of 'words' overlap", args, twice, {}),
    ]
    for words, arrays, gradients, more in wrong:
        with pytest.raises(Error, match=words):
            symbol.bind(mx.cpu(), arrays, gradients, **more)
    module = mx.mod.Module(symbol, group2ctxs={"a": mx.cpu(1)})
    with pytest.raises(Error, match="group2ctx"):
        module.bind([("data", (4,))], [("softmax_label", (4,))])
    # Inference takes all of it, as MXNet does.
    symbol.simple_bind(mx.cpu(), grad_req="null", **GROUPS, **TOKENS)


def test_backward_needs_its_forward() -> None:
    executor = planned(loss=False).simple_bind(mx.cpu(), data=(2, 3, 8, 8))
    heads = mx.nd.ones((2, 4))

    def refused(**more: Any) -> None:
        with pytest.raises(Error, match="call that first"):
            executor.backward(heads, **more)

    refused()
    executor.forward(is_train=True)
    with pytest.raises(Error, match="'fc_output' is no loss"):
        executor.backward()
    with pytest.raises(Error, match="NDArray"):
        executor.backward([1.0])
    refused(is_train=False)
    executor.backward(heads)
    refused()


def test_an_argument_changed_before_the_backward_pass_is_named() -> None:
    executor = filled(bound(planned(), "write"))
    executor.forward(is_train=True)
    name = "convolution0_weight"
    executor.arg_dict[name][:] *= 1.01
    with pytest.raises(Error, match=f"'{name}' was changed between a forward pass and its backw"):
        executor.backward()
    executor.forward(is_train=True)
    executor.backward()


@pytest.mark.parametrize("watched", [0, 2])
def test_so_many_passes_are_watched(watched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMONGER_WATCH", str(watched))
    executor = filled(bound(planned(), "write"))
    for k in range(4):
        executor.forward(is_train=True)
        executor.arg_dict["convolution0_weight"][:] *= 1.01
        with pytest.raises(Error) if k < watched else contextlib.nullcontext():
            executor.backward()
    monkeypatch.setenv("MEMONGER_WATCH", "-1")
    with pytest.raises(Error, match="^MEMONGER_WATCH is '-1'; give a number of backward passes, "):
        bound(planned(), "write")


def test_forward_checks_what_it_is_given() -> None:
    executor = planned().simple_bind(mx.cpu(), **SHAPES)
    with pytest.raises(TypeError, match="Unknown argument"):
        executor.forward(is_train=True, dat=mx.nd.ones((2, 2)))
    with pytest.raises(ValueError, match=r"'data' takes an array of shape \(32"):
        executor.forward(is_train=True, data=mx.nd.ones((2, 2)))
    with pytest.raises(ValueError, match="'data' takes an array"):
        executor.forward(is_train=True, data=3.0)
