"""``memonger.enable``: whatever is trained is planned, and nothing else changes."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import logging.handlers
import os
import re
import shutil
import types
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.scripts import log as log_module
from memonger.scripts import session as session_module
from memonger.support import cache

import blocks
import networks
import modules
from modules import BATCH, IMAGES, LABELS, LEARNING, SHAPES, net, parameters
from zoo import unrolled
from planned import marked


def batches() -> Any:
    return mx.io.NDArrayIter(IMAGES[:64], LABELS[:64], BATCH)


def values(arrays: Any) -> dict[str, np.ndarray]:
    return {name: array.asnumpy() for name, array in arrays.items()}


def by_module(symbol: Any) -> dict[str, np.ndarray]:
    module = mx.mod.Module(symbol, context=[mx.cpu(0), mx.cpu(1)])
    modules.fit(module, batches())
    assert module.symbol is symbol
    return modules.trained(module)


def by_feed_forward(symbol: Any) -> dict[str, np.ndarray]:
    model = mx.model.FeedForward(symbol, num_epoch=2, arg_params=parameters(symbol), **LEARNING)
    model.fit(batches(), batch_end_callback=modules.after_batch)
    return values({**model.arg_params, **model.aux_params})


def by_gluon(_: Any) -> dict[str, np.ndarray]:
    block = blocks.mlp()
    block.hybridize(static_alloc=True)
    return blocks.taught(block)


WAYS: dict[str, Callable[[Any], dict[str, np.ndarray]]] = {
    "Module": by_module,
    "FeedForward": by_feed_forward,
    "BucketingModule": lambda _: modules.fitted_buckets(unrolled, "write"),
    "bind": lambda symbol: modules.stepped(modules.filled(modules.bound(symbol, "write"))),
    "Gluon": by_gluon,
}


def trained(way: str, symbol: Any = None) -> dict[str, np.ndarray]:
    mx.random.seed(0)
    np.random.seed(0)
    return WAYS[way](net() if symbol is None else symbol)


@pytest.mark.parametrize("options", [{"how": "marks"}, {"how": "schedule"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_trained_under_enable_has_the_same_bits_in_less_memory(
    way: str, options: dict[str, Any], capfd: Any
) -> None:
    """What is trained is the same, in less memory, and one line tells of each bind."""
    expected = trained(way)
    with memonger.enable(**options, cache=False) as session:
        planned = trained(way)
    assert expected.keys() == planned.keys()
    assert all(np.array_equal(array, planned[name]) for name, array in expected.items())
    saved = [plan for plan in session.plans if plan.pool_bytes < plan.unplanned_bytes]
    assert len(saved) == (3 if way == "BucketingModule" else 1)
    lines = [line for line in capfd.readouterr().err.splitlines() if " -> " in line]
    assert len(lines) == len(saved) + 1 and all(line.startswith("memonger: ") for line in lines)


@pytest.mark.parametrize("way", ["Module", "FeedForward", "Gluon"])
def test_a_budget_of_the_device_counts_the_optimizer_of_the_script(way: str) -> None:
    """The network fits as it is, but not with the optimizer's state, 4 bytes for each parameter."""

    def plan_in(budget: int, **options: Any) -> Any:
        options = {"budget_of": "device", "cache": False, "patience": 0.02, **options}
        with memonger.enable(budget=budget, **options) as session:
            (wide if way == "Gluon" else trained)(way)
        return session.plans[0]

    def wide(_: str) -> None:
        block, x = blocks.mlp(), mx.nd.ones((2048, 20))
        block.hybridize()
        blocks.step(block, blocks.trainer(block), x, mx.nd.zeros((2048,)))

    whole = plan_in(2**40).unplanned_device_bytes
    assert not plan_in(whole, optimizer="sgd").is_used  # which has no state
    plan = plan_in(whole)
    assert plan.is_used and plan.device_bytes < whole - 4 * 1000


def test_a_small_network_is_left_alone_unless_a_plan_is_asked_for(capfd: Any) -> None:
    chain = networks.chain(6, hidden=64, batch=512)
    asking: list[dict[str, Any]] = [{"how": "auto"}, {"budget": "70%"}, {"recompute": "*"}]
    for options in ({}, {"patience": 0.02}, *asking):
        with memonger.enable(cache=False, **options) as session:
            chain[0].simple_bind(mx.cpu(), **chain[1])
        assert session.plans[0].is_used or options not in asking[:2]
        line = capfd.readouterr().err.splitlines()[0]
        assert ("as it is: less than 64.0 MiB, left alone" in line) == (options not in asking)
    large = networks.chain(6, hidden=64, batch=60000)
    with memonger.enable(cache=False) as session:
        large[0].simple_bind(mx.cpu(), **large[1])
    assert session.plans[0].is_used and session.plans[0].unplanned_bytes > 2**26
    assert memonger.plan(*chain).is_used


def test_inference_stays_as_it_is(capfd: Any) -> None:
    with memonger.enable(cache=False) as session:
        module = mx.mod.Module(net())
        module.bind(batches().provide_data, for_training=False)
        executor = net().simple_bind(mx.cpu(), grad_req="null", **SHAPES)
        block = mx.gluon.nn.Dense(4)
        block.initialize()
        block.hybridize()
        block(mx.nd.ones((2, 3)))
    assert session.plans == [] and "_mirror" not in executor.debug_str()
    assert "memonger" not in capfd.readouterr().err


def original() -> types.ModuleType:
    """Return a copy of the original: a module that binds to see what its marks take."""
    copy = types.ModuleType("memonger_of_another")
    exec(
        "def make_mirror_plan(symbol, mx, shapes):\n"
        "    return symbol.simple_bind(mx.cpu(), **shapes).debug_str()\n"
        "def search_plan(symbol, mx, shapes):\n"
        "    return make_mirror_plan(symbol, mx, shapes)\n",
        vars(copy),
    )
    return copy


def test_what_has_a_plan_is_planned_once(capfd: Any) -> None:
    """By a copy of the original, by our own calls, by hand."""
    symbol = net()
    planned = memonger.search_plan(symbol, data=SHAPES["data"])
    with memonger.enable(cache=False) as session:
        assert "_mirror" not in original().search_plan(symbol, mx, SHAPES)
        again = memonger.search_plan(symbol, data=SHAPES["data"])
        for _ in range(2):
            again.simple_bind(mx.cpu(), **SHAPES)
        assert memonger.check(symbol, again, SHAPES, steps=1)
        scheduled = memonger.search_plan(symbol, data=SHAPES["data"], how="schedule", work=2.0)
        scheduled.simple_bind(mx.cpu(), **SHAPES)
    assert session.plans == [] and marked(again) == marked(planned)
    assert capfd.readouterr().err.count("is left as it is: already planned") == 1


@pytest.mark.parametrize("saves", [False, True])
def test_marks_of_the_user_are_kept_if_they_save_memory(saves: bool, capfd: Any) -> None:
    x = mx.sym.Variable("data")
    for k in range(8):
        x = mx.sym.FullyConnected(x, num_hidden=64, name=f"fc{k}")
        x = mx.sym.Activation(x, act_type="tanh", name=f"act{k}")
        if saves and k % 4 or k == 7:
            x._set_attr(force_mirroring="True")
            x.get_children()[0]._set_attr(force_mirroring=str(saves))
    symbol = mx.sym.SoftmaxOutput(x, name="softmax")
    with memonger.enable(cache=False) as session:
        for _ in range(2):
            symbol.simple_bind(mx.cpu(), data=(512, 64))
    lines = [line for line in capfd.readouterr().err.splitlines() if "softmax" in line]
    assert len(session.plans) == (not saves) and len(lines) == 1
    assert ("trains by its own marks (force_mirroring), in " in lines[0]) == saves
    assert ("to have it planned, remove them" in lines[0]) == saves


def test_what_is_bound_again_is_planned_once(capfd: Any) -> None:
    with memonger.enable(cache=False) as session:
        for size in (8, 16, 8, 16):
            net().simple_bind(mx.cpu(), data=(size, 3, 8, 8), softmax_label=(size,))
    lines = [line for line in capfd.readouterr().err.splitlines() if "planned in" in line]
    assert len(lines) == len(session.plans) == 2


def test_one_line_tells_of_each_bind(capfd: Any) -> None:
    """Of what no plan helps; of a sixth network only what was not said before."""
    s = mx.sym
    dense = s.SoftmaxOutput(
        s.FullyConnected(s.var("data"), num_hidden=10, name="fc"), name="softmax"
    )
    x = s.tanh(s.FullyConnected(s.var("x"), num_hidden=64, name="fc"))
    rows = [s.sin(s.FullyConnected(x, num_hidden=64, name=f"fc{k}")) for k in range(8)]
    wrong = s.MakeLoss(s.add_n(s.clip(x, -0.5, 0.5, name="limit"), *rows), name="sum")
    with memonger.enable(how="schedule", cache=False):
        for batch in range(4, 11):
            dense.simple_bind(mx.cpu(), softmax_label=(batch,), data=(batch, 20))
        wrong.simple_bind(mx.cpu(), x=(4, 20))
    log = re.sub(r"planned in .*", "planned in T", capfd.readouterr().err)
    first, *_, more, told, _ = log.splitlines()
    assert first == (
        "memonger: softmax on cpu(0): 0.3 KiB, as it is; no plan saves memory (0.3 KiB without a "
        "plan), so the network stays as it is: the peak is 0.3 KiB; the gradient of 'fc' "
        "(FullyConnected) alone needs 0.2 KiB at once; planned in T"
    )
    assert log.count("\n") == 5 + 3 and "more networks are planned" in more
    assert re.fullmatch(
        r"memonger: sum on cpu\(0\): 18.0 KiB -> 11.5 KiB, \d+ % of a step's time added; MXNet "
        r"computes wrong gradients, with or without a plan: it adds those of 'limit' \(clip\) to "
        r"sums in place, .*; planned in T",
        told,
    )


def test_a_plan_that_gluons_arrays_make_useless_is_told_as_none(capfd: Any) -> None:
    """Marks copy an output that is larger than all else; it is counted by no line as planned."""
    block = mx.gluon.nn.HybridSequential(prefix="wide_")
    for _ in range(6):
        block.add(mx.gluon.nn.Dense(16, activation="tanh", in_units=16))
    block.add(mx.gluon.nn.Dense(500, in_units=16))
    block.initialize()
    block.hybridize()
    with memonger.enable(how="marks", cache=False) as session, mx.autograd.record():
        block(mx.nd.ones((256, 16)))
    said = "by its plan it would take 1.6 MiB in Gluon, and without it 0.7 MiB"
    assert capfd.readouterr().err == f"memonger: wide trains without a plan: {said}\n"
    assert session.plans == []


def test_planning_that_takes_long_is_announced(monkeypatch: Any, capfd: Any) -> None:
    for seconds in (1000.0, 0.0):
        monkeypatch.setattr(log_module, "SILENCE", seconds)
        with memonger.enable(cache=False):
            net().simple_bind(mx.cpu(), **SHAPES)
        log = capfd.readouterr().err
        assert ("planning softmax on cpu(0)" in log) == (seconds == 0)


@pytest.mark.parametrize("how", ["auto", "marks"])
def test_buckets_fit_into_the_memory_of_the_largest(how: str) -> None:
    """What already fits recomputes nothing; nothing takes more than the largest has."""
    names, steps = ["data", "softmax_label"], (24, 22, 12, 2)

    def bound() -> list[Any]:
        module = mx.mod.BucketingModule(lambda key: (unrolled(key), *([n] for n in names)), 24)
        for key in steps:
            shapes = [[(name, (BATCH, key))] for name in names]
            if key == 24:
                module.bind(*shapes)
                module.init_params(mx.init.One())
            else:
                module.switch_bucket(key, *shapes)
        return [module._buckets[key]._exec_group.execs[0] for key in steps]

    with memonger.enable(how=how, cache=False) as session:
        executors = bound()
    first, *others = session.plans
    assert first.is_used and not others[-1].recomputed
    if how == "auto":
        assert all(plan.time_overhead <= first.time_overhead for plan in others)
        assert {executor.arena for executor in executors} == {executors[0].arena}
        assert executors[0].arena.nbytes == executors[0].step.arena_bytes
        assert others[0].recomputed and others[-1].is_used
    else:
        fits = [plan.unplanned_bytes <= first.pool_bytes for plan in others]
        assert fits[-1] and not fits[0]
        assert [plan.is_used for plan in others] == [not fitting for fitting in fits]


def test_a_network_that_cannot_be_planned_is_bound_as_without(capfd: Any) -> None:
    """It is bound as without, and why is told once; mistakes are MXNet's to tell."""
    symbol = mx.sym.SoftmaxOutput(mx.sym.var("x"), out_grad=True, name="softmax")
    with memonger.enable(cache=False) as session:
        for _ in range(2):
            symbol.simple_bind(mx.cpu(), x=(4, 8))
        with pytest.raises(RuntimeError, match="simple_bind"):
            net().simple_bind(mx.cpu(), data=(1, 2))
        with pytest.raises(ValueError, match="key `data` is missing"):
            net().bind(mx.cpu(), {}, {})
    log = capfd.readouterr().err
    assert (
        session.plans == []
        and log.count("\n") == log.count("'softmax' (SoftmaxOutput) cannot be") == 1
    )


@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("Module", "scripts.session.choose"),
        ("bind", "scripts.session.read_call"),
        ("Gluon", "scripts.session.choose"),
        ("Gluon", "gluon.cached_op.with_copied_outputs"),
        ("Gluon", "gluon.planning.split"),
    ],
)
def test_a_mistake_in_planning_leaves_no_plan_and_tells_what_to_report(
    way: str, place: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("too many\n indices")

    expected = trained(way)
    monkeypatch.setattr(f"memonger.{place}", fail)
    with memonger.enable(cache=False) as session:
        plain = trained(way)
    assert session.plans == []
    lines = [line for line in capfd.readouterr().err.splitlines() if "without a plan" in line]
    assert len(lines) == 1 and "IndexError: too many indices; " in lines[0]
    assert "please report" in lines[0]
    assert all(np.array_equal(array, plain[name]) for name, array in expected.items())


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_an_array_on_another_device_raises_what_mxnet_raises(how: str) -> None:
    """As an argument, as a gradient."""
    symbol = net()
    shapes, _, states = symbol.infer_shape(**SHAPES)

    def bind(of_arguments: int, of_gradients: int) -> None:
        args = [mx.nd.zeros(shape, mx.cpu(of_arguments)) for shape in shapes]
        grads = [mx.nd.zeros(shape, mx.cpu(of_gradients)) for shape in shapes]
        symbol.bind(mx.cpu(), args, grads, "write", [mx.nd.zeros(shape) for shape in states])

    with memonger.enable(how=how, cache=False) as session:
        bind(0, 0)
        for devices in ((1, 0), (0, 1)):
            with pytest.raises(mx.MXNetError, match="global context"):
                bind(*devices)
    assert session.plans[0].pool_bytes < session.plans[0].unplanned_bytes


@pytest.mark.parametrize("way", ["bind", "Gluon"])
def test_a_budget_that_nothing_meets_is_an_error_or_leaves_no_plan(way: str, capfd: Any) -> None:
    expected = trained(way)
    with memonger.enable(budget=1000, cache=False), pytest.raises(memonger.BudgetError):
        trained(way)
    capfd.readouterr()
    with memonger.enable(budget=1000, cache=False, or_plain=True) as session:
        plain = trained(way)
    assert session.plans == [] and "trains without a plan: " in capfd.readouterr().err
    assert all(np.array_equal(array, plain[name]) for name, array in expected.items())


def chain() -> Any:
    """Build a network of which a plan keeps copies."""
    x = mx.sym.Variable("data")
    for k in range(6):
        x = mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), pad=(1, 1), name=f"conv{k}")
        x = mx.sym.Activation(
            mx.sym.BatchNorm(x, name=f"batch{k}"), act_type="relu", name=f"act{k}"
        )
    return mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=4, name="fc"), name="softmax"
    )


def test_a_monitor_is_told_the_names_of_mxnet() -> None:
    """Also of gradients of several nodes, and of zeros that stand for one."""
    s = mx.sym
    x = s.Convolution(s.var("data"), num_filter=4, kernel=(3, 3), pad=(1, 1), name="conv")
    x = s.Pooling(s.Activation(x, act_type="tanh"), kernel=(2, 2), pool_type="max", name="pool")
    x = s.where(x > 0, x, s.sin(x), name="chosen")
    x = s.batch_dot(s.reshape(x, shape=(0, 4, -1)), s.reshape(x, shape=(0, -1, 4)), name="product")
    network = s.SoftmaxOutput(s.FullyConnected(x, num_hidden=4, name="fc"), name="softmax")

    def seen() -> list[str]:
        names: list[str] = []

        def tell(name: bytes, array: Any) -> None:
            names.append(mx.base.py_str(name))
            mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # which frees it

        executor = network.simple_bind(mx.cpu(), data=(2, 3, 8, 8), softmax_label=(2,))
        executor.set_monitor_callback(tell)
        executor.forward(is_train=True)
        executor.backward()
        return sorted(names)

    expected = seen()
    for how in ("marks", "schedule"):
        with memonger.enable(how=how, cache=False) as session:
            assert seen() == expected
        assert session.plans[0].pool_bytes < session.plans[0].unplanned_bytes
    assert "product_backward_rhs_output" in expected and "zeros_without_dtype_output" in expected


def test_statistics_are_read_when_they_have_moved() -> None:
    """What runs again has them move last; MXNet's own executor does not wait for them."""
    with memonger.enable(how="auto", cache=False) as session:
        executor = net().simple_bind(mx.cpu(), **SHAPES)
    assert session.plans[0].recomputed
    for array in executor.arg_arrays:
        array[:] = mx.nd.random.normal(shape=array.shape)
    for _ in range(10):
        executor.forward(is_train=True)
        executor.backward()
        read = values(executor.aux_dict)
        mx.nd.waitall()
        assert all(
            np.array_equal(statistic, read[n]) for n, statistic in values(executor.aux_dict).items()
        )


@pytest.mark.parametrize("how", ["marks", "schedule"])
@pytest.mark.parametrize("is_train", [False, True])
def test_a_forward_pass_alone_sets_a_fixed_gamma_to_one(how: str, is_train: bool) -> None:
    with mx.name.NameManager():
        x = mx.sym.Variable("data")
        for _ in range(6):
            x = mx.sym.tanh(mx.sym.BatchNorm(mx.sym.FullyConnected(x, num_hidden=32)))
        network = mx.sym.SoftmaxOutput(x, name="softmax")

    def scored() -> dict[str, np.ndarray]:
        executor = network.simple_bind(mx.cpu(), data=(64, 8))
        for array in executor.arg_arrays:
            array[:] = 0.5
        executor.forward(is_train=is_train)
        mx.nd.waitall()  # MXNet's engine does not know that BatchNorm writes gamma
        return values(executor.arg_dict)

    expected = scored()
    with memonger.enable(how=how, cache=False) as session:
        left = scored()
    assert any("batchnorm" in name for name in session.plans[0].recomputed)
    assert all(np.array_equal(expected[name], left[name]) for name in expected)
    assert (expected["batchnorm0_gamma"] == 1).all()


def steps_after_inference(tell: Any, request: str) -> list[bytes]:
    """Train and infer in turns, with backward passes after both, and with larger batches too."""
    seen: list[bytes] = []
    first = net().simple_bind(mx.cpu(), request, **SHAPES)
    larger = {name: (BATCH + 2, *shape[1:]) for name, shape in SHAPES.items()}
    for executor in (first, first.reshape(allow_up_sizing=True, **larger)):
        random = np.random.RandomState(0)
        for array in (*executor.arg_arrays, *executor.aux_arrays):
            array[:] = mx.nd.array(random.uniform(0, 0.5, array.shape))
        for array in executor.grad_dict.values():
            array[:] = 1
        executor.set_monitor_callback(tell)
        for training in (True, False, False, True, False):
            mx.random.seed(1)
            executor.forward(training)
            executor.backward()
            mx.nd.waitall()
            arrays = [*executor.outputs, *executor.grad_dict.values(), *executor.aux_arrays]
            seen += [array.asnumpy().tobytes() for array in arrays]
    return seen


@pytest.mark.parametrize(
    ("how", "request_"), [("marks", "write"), ("schedule", "write"), ("schedule", "add")]
)
def test_gradients_of_inferences_are_those_without_a_plan(
    how: str, request_: str, capfd: Any
) -> None:
    names: list[str] = []

    def tell(name: bytes, array: Any) -> None:
        names.append(mx.base.py_str(name))
        mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # which frees it

    expected = steps_after_inference(tell, request_)
    usual, names[:] = names.count("softmax_output"), []
    with memonger.enable(how=how, cache=False) as session:
        are_equal = steps_after_inference(tell, request_) == expected
        assert are_equal  # and no diff of a MB is shown
        assert session.plans[0].recomputed
    assert names.count("softmax_output") == usual == 10
    assert capfd.readouterr().err.count("after forward(is_train=False)") == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """Return a cache folder with what is known of the machine, and the one of its plans."""
    with memonger.enable(cache=False):
        net().simple_bind(mx.cpu(), **SHAPES)
    for file in Path(os.environ["MEMONGER_CACHE"]).glob("*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setenv("MEMONGER_CACHE", str(tmp_path))
    return tmp_path / "plans"


def test_plans_are_kept_for_the_next_process(folder: Path, monkeypatch: Any) -> None:
    """The next process takes the plan, unless it asks for something else or it may be another's."""

    def start(**options: Any) -> Any:
        cache.forget()
        with memonger.enable(**options) as session:
            net().simple_bind(mx.cpu(), **SHAPES)
        return session.plans[0]

    first = start()
    (file,) = folder.glob("*.json")
    assert folder.stat().st_mode & 0o777 == 0o700

    def is_taken(**options: Any) -> bool:
        os.utime(file, (0, 0))
        plan = start(**options)
        assert (plan.recomputed, plan.pool_bytes) == (first.recomputed, first.pool_bytes)
        return file.stat().st_mtime > 0

    assert is_taken() and not is_taken(cache=False) and len(list(folder.iterdir())) == 1
    start(budget="70%", gpu="T4")
    monkeypatch.setenv("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "2")
    start()
    assert len(list(folder.iterdir())) == 3
    assert start(budget="70%", gpu="L4").options["gpu"] == "L4" and len(list(folder.iterdir())) == 4
    monkeypatch.delenv("MXNET_EXEC_INPLACE_GRAD_SUM_CAP")
    for mode, is_safe in ((0o2755, True), (0o720, False), (0o702, False), (0o700, True)):
        folder.chmod(mode)
        assert is_taken() == is_safe
    file.write_text(file.read_text()[:-9])
    assert start().recomputed == first.recomputed and is_taken()


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_the_same_network_made_anew_has_the_plan_that_is_kept(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever MXNet names it; all names of the plan are those of the network that is bound."""

    def start() -> tuple[Any, list[np.ndarray], Any]:
        symbol = mx.sym.var("data")
        for _ in range(6):
            symbol = mx.sym.tanh(mx.sym.BatchNorm(mx.sym.FullyConnected(symbol, num_hidden=16)))
        symbol = mx.sym.SoftmaxOutput(symbol, name="softmax")
        with memonger.enable(how=how) as session:
            executor = symbol.simple_bind(mx.cpu(), data=(64, 8))
        for k, array in enumerate([*executor.arg_arrays, *executor.aux_arrays]):
            array[:] = mx.nd.array(np.random.RandomState(k).uniform(0, 0.5, array.shape))
        return symbol, [*modules.stepped(executor).values()], session.plans[0]

    _, expected, first = start()
    monkeypatch.setattr(session_module, "search", None)
    cache.forget()
    symbol, arrays, plan = start()
    assert len([*folder.glob("*.json")]) == 1 and plan.is_used
    assert all(np.array_equal(a, b) for a, b in zip(expected, arrays))
    assert (plan.pool_bytes, plan.candidates) == (first.pool_bytes, first.candidates)
    operators = [name[: -len("_output")] for name in symbol.get_internals().list_outputs()]
    assert {*plan.kept, *plan.recomputed} <= {*operators, "softmax"}
    assert not {*plan.recomputed} & {*first.recomputed} and plan.recomputed
    assert plan.symbol.list_arguments() == symbol.list_arguments() != first.symbol.list_arguments()
    assert all(name in plan.symbol.tojson() for name in plan.copies)
    named = re.findall(r"'(\w+\d+)'", f"{plan.slowest} {plan.floor}")
    assert named and {*named} <= {*operators}
    assert (plan.slowest, plan.floor) != (first.slowest, first.floor)


def test_a_plan_of_another_network_under_the_name_of_a_file_is_not_used(
    folder: Path, capfd: Any
) -> None:
    networks_ = [chain(), net()]

    def start(network: Any) -> Any:
        cache.forget()
        with memonger.enable(how="marks") as session:
            network.simple_bind(mx.cpu(), **SHAPES)
        return session.plans[0]

    plans, files = [], []
    for network in networks_:
        plans.append(start(network))
        files.append(next(file for file in folder.glob("*.json") if file not in files))
    shutil.copy(files[0], files[1])
    capfd.readouterr()
    for is_told in (True, False):
        again = start(networks_[1])
        assert again.recomputed == plans[1].recomputed
        said = f"memonger: {str(files[1])!r} has a plan of another network, and is written anew\n"
        assert (said in capfd.readouterr().err) == is_told


#: What is in the way, and how it is told.
OBSTACLES = {
    "a file": "cannot be made",
    "others write": "others can write to the folder",
    "another user": "is another user's",
    "no home": "this user has no home folder; MEMONGER_CACHE names the folder",
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_plans_cannot_be_kept_a_line_says_so_once(
    obstacle: str, folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if obstacle == "a file":
        folder.touch()
    elif obstacle == "no home":
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("MEMONGER_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "~")
    else:
        folder.mkdir(mode=0o700)
        if obstacle == "others write":
            folder.chmod(0o777)
        else:
            monkeypatch.setattr(os, "getuid", lambda: 12345)
    with memonger.enable() as session:
        for batch in (16, 32):
            net().simple_bind(mx.cpu(), data=(batch, *SHAPES["data"][1:]))
    log = capfd.readouterr().err
    assert len(session.plans) == 2 and log.count("plans are not kept for the next start: ") == 1
    assert OBSTACLES[obstacle] in log and not (tmp_path / "~").exists()
    if obstacle != "no home":
        assert repr(str(folder)) in log and (folder.is_file() or not list(folder.iterdir()))


def test_kept_plans_have_bounds(folder: Path) -> None:
    """Of more than a quarter of a GB those go that were used least lately."""
    folder.mkdir(mode=0o700)
    for k in range(3):
        with open(folder / f"{k}.json", "wb") as file:
            file.truncate(2**27)  # takes no room
        os.utime(folder / f"{k}.json", (k, k))
    with memonger.enable():
        net().simple_bind(mx.cpu(), **SHAPES)
    left = {path.name for path in folder.iterdir()}
    assert "2.json" in left and not {"0.json", "1.json"} & left and len(left) == 2


@pytest.mark.late
def test_a_plan_is_checked_before_it_is_used(folder: Path, capfd: Any) -> None:
    def start() -> str:
        with memonger.enable(check=True, how="marks") as session, mx.name.NameManager():
            chain().simple_bind(mx.cpu(), **SHAPES)
        log: str = capfd.readouterr().err
        assert len(session.plans) == ("checked: equal" in log)
        return log

    assert "arrays in 3 steps, bit for bit" in start()
    (file,) = folder.iterdir()
    whole = json.loads(file.read_text())
    request = whole["plan"]["request"]
    graph = json.loads(request["symbol"])
    copies = [node for node in graph["nodes"] if node["name"] in whole["plan"]["figures"]["copies"]]
    copies[0]["op"] = "negative"
    request["symbol"] = json.dumps(graph)
    text = json.dumps(whole["plan"], sort_keys=True)
    whole["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(whole))
    assert "its plan computes something else" in start()


def test_a_plan_that_cannot_be_checked_is_used_with_a_warning(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with memonger.enable(check=True, how="marks", cache=False) as session:
        chain().simple_bind(mx.cpu(), **SHAPES)
    assert session.plans[0].is_used
    assert re.search("softmax cannot be checked: .*/nowhere/python", capfd.readouterr().err)


class Scaled(mx.gluon.HybridBlock):
    """Takes an array without axes, and one without elements."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.layers = blocks.layers("layers_", 16)

    def hybrid_forward(self, F: Any, x: Any, scale: Any, none: Any) -> Any:
        return F.np.concatenate([self.layers(x) * scale, none], axis=1)


@pytest.mark.slow
def test_plans_of_mx_np_are_kept_and_checked(folder: Path, capfd: Any) -> None:
    """Shapes mean as much in the process that checks, and a kept plan is for what they mean."""

    def start() -> int:
        block = blocks.initialized(Scaled(prefix="net_"))
        block.hybridize()
        with memonger.enable(check=True), mx.autograd.record():
            block(mx.np.ones((4, 20)), mx.np.array(0.5, dtype="float32"), mx.np.zeros((4, 0)))
        assert "checked: equal" in capfd.readouterr().err
        return len(list(folder.iterdir()))

    with mx.name.NameManager(), mx.util.np_shape(), mx.util.np_array():
        assert start() == 1
    with mx.name.NameManager(), mx.util.np_shape(), mx.util.np_array():
        assert start() == 1


def test_the_log_of_a_script_is_its_own() -> None:
    """Though it logs all to its root; and it is as it was afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("memonger")
    handler = logging.handlers.BufferingHandler(10**6)
    level, before = root.level, (ours.level, ours.propagate)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with memonger.enable(cache=False) as session:
            net().simple_bind(mx.cpu(), **SHAPES)
        assert session.plans and not [
            record for record in handler.buffer if "memonger" in record.name
        ]
        assert (ours.level, ours.propagate) == before and ours.isEnabledFor(logging.DEBUG)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_a_wrong_option_changes_nothing() -> None:
    with memonger.enable(cache=False) as session:
        for options in ({"budget": "1x"}, {"how": "both"}, {"work": 0.5}, {"report": "no/folder"}):
            with pytest.raises(memonger.MemongerError):
                memonger.enable(**options)
        net().simple_bind(mx.cpu(), **SHAPES)
        memonger.disable()
        net().simple_bind(mx.cpu(), **SHAPES)
    assert len(session.plans) == 1
