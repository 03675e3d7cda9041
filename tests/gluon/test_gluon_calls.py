"""Planned Gluon blocks: what their calls take and refuse, and what becomes of their errors."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest

import memonger
import mxnet as mx
import numpy as np
from memonger import MemongerError
from memonger.gluon import plan, plan_of, unplan
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import HOWS, LOSS, PATIENCE, TwoInputs, batch, different, initialized, layers
from blocks import left_in, mlp, seed, step, trainer
from planned import run_code, run_python


def planned(net: Any, shapes: Any = None, **options: Any) -> Any:
    return plan(net, shapes, patience=PATIENCE, **options)


def taught(net: Any, steps: int = 3) -> Any:
    """After some steps from the same seed."""
    seed()
    training = trainer(net)
    for k in range(steps):
        step(net, training, *batch(k))
    return left_in(net)


# How it is planned


def test_the_plan_is_made_now_where_shapes_are_given() -> None:
    net = mlp()
    assert planned(net, data=(16, 20)) is net
    found = plan_of(net)
    assert found.recomputed and found.request.spec.shapes["data"] == (16, 20)
    seed()
    with autograd.record():
        net(batch(0)[0])
    assert plan_of(net) is found


def test_several_inputs_are_named_as_gluon_names_them() -> None:
    net = initialized(TwoInputs())
    planned(net, {"data0": (16, 20)}, data1=(16, 20))
    assert plan_of(net).recomputed


def test_a_symbol_block_is_planned_by_the_names_of_its_inputs() -> None:
    x = mx.sym.var("image")
    net = gluon.SymbolBlock(layers("net_")(x), [x])
    net.initialize()
    assert plan_of(planned(net, image=(16, 20))).recomputed
    with pytest.raises(MemongerError, match="'imag'.*did you mean 'image'"):
        plan(net, imag=(16, 20))


def test_the_types_are_those_of_a_net_that_was_cast() -> None:
    net = mlp()
    net.cast("float16")
    assert plan_of(planned(net, data=(16, 20))).request.spec.types["data"] == "float16"
    assert plan_of(planned(mlp(), data=(16, 20), type_dict={"data": "float32"})).recomputed


def chain() -> Any:
    """Layers whose results take far more than their parameters."""
    net = nn.HybridSequential(prefix="chain_")
    with net.name_scope():
        for _ in range(40):
            net.add(nn.Dense(8, activation="relu"))
    return initialized(net)


def test_marks_by_default_and_both_ways_with_a_budget() -> None:
    marks = plan_of(planned(chain(), data=(1024, 8)))
    assert marks.schedule is None and marks.added_time is None
    budget = 0.9 * marks.pool_bytes / marks.unplanned_bytes
    with pytest.raises(memonger.BudgetError):
        planned(chain(), data=(1024, 8), budget=budget, how="marks")
    assert plan_of(planned(chain(), data=(1024, 8), budget=budget)).schedule is not None


def test_a_schedule_is_told_with_the_gradients_of_the_block_and_of_its_pool() -> None:
    options: Any = {"data": (1024, 8), "how": "schedule", "work": 2.0}
    net = planned(chain(), **options)
    found = plan_of(net)
    other = memonger.plan(net(mx.sym.var("data")), patience=PATIENCE, **options)
    sizes = [4 * parameter.data().size for parameter in net.collect_params().values()]
    assert other.gradient_bytes >= sum(sizes) > 0
    assert found.pool_bytes == other.pool_bytes + other.gradient_bytes
    assert found.gradient_bytes == 0


def test_a_budget_that_no_plan_fits() -> None:
    with pytest.raises(memonger.BudgetError, match="the smallest needs"):
        planned(mlp(), data=(16, 20), budget=100)
    net = planned(mlp(), budget=100)
    with pytest.raises(memonger.BudgetError, match="the smallest needs"), autograd.record():
        net(batch(0)[0])


def test_a_plan_that_saves_nothing_leaves_the_block_as_it_is() -> None:
    net, other = (initialized(nn.Dense(4, prefix="net_")) for _ in range(2))
    other.hybridize()
    found = plan_of(planned(net, data=(16, 20)))
    assert not found.recomputed
    assert taught(net).keys() == taught(other).keys()


def test_unplanned_it_trains_as_before() -> None:
    net = planned(mlp())
    taught(net)
    assert unplan(net) is net and unplan(net) is net
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(net)
    with autograd.record():
        net(batch(0)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_and_pickles_train_without_a_plan(copied: Any) -> None:
    net = planned(mlp())
    taught(net, 2)
    twins = copied(net), planned(copied(net))
    for twin in twins:
        for parameter in twin.collect_params().values():
            if parameter.grad_req != "null":  # Gluon's copies have gradients that are not on tape
                parameter.grad_req = "null"
                parameter.grad_req = "write"
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(twins[0])
    left = taught(net)
    assert [different(taught(twin), left) for twin in twins] == [[], []]
    assert plan_of(twins[1]).recomputed


def test_a_net_that_is_gone_takes_its_plan_with_it() -> None:
    import weakref

    net = planned(mlp())
    taught(net)
    mx.nd.waitall()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


# What cannot be planned


def sparse() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Embedding(20, 8, sparse_grad=True), nn.Dense(10))
    return net


class Looped(nn.HybridBlock):
    """Control flow."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        made, _ = F.contrib.foreach(lambda a, s: (F.tanh(a) + s, s + a), x, F.sum(x, axis=0) * 0)
        return F.mean(made, axis=0)


class OfPython(mx.operator.CustomOp):
    def forward(self, req: Any, in_data: Any, out_data: Any, **_: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req: Any, out_grad: Any, in_grad: Any, **_: Any) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("gluon_test_of_python")
class OfPythonProp(mx.operator.CustomOpProp):
    def create_operator(self, *_: Any) -> Any:
        return OfPython()


class WithCustom(nn.HybridBlock):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.net = layers("net_")

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return F.Custom(self.net(x), op_type="gluon_test_of_python")


def made(kind: str) -> tuple[Any, dict[str, Any], str]:
    if kind == "sparse":
        return sparse(), {}, "sparse"
    if kind == "custom":
        return WithCustom(prefix="custom_"), HOWS["schedule"], "Custom"
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(layers("one_"), Looped())
    return net, HOWS["schedule"], "_foreach"


@pytest.mark.parametrize("kind", ["sparse", "custom", "loop"])
def test_what_cannot_be_planned_warns_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for plans in (False, True):
        seed()
        net, options, reason = made(kind)
        initialized(net)
        net.hybridize()
        if plans:
            planned(net, **options)
        training = trainer(net)
        for k in range(3):
            x, y = batch(k)
            x = x.abs() if kind == "sparse" else x
            with autograd.record():
                out = net(x)
                loss = (out**2).sum() if kind == "loop" else LOSS(out, y)
            loss.backward()
            training.step(16)
            if k == 1:
                net.hybridize()
        mx.nd.waitall()
        data = {k: v.data().asnumpy() for k, v in net.collect_params().items()}
        results.append(data)
    assert different(*results) == []
    told = [r.getMessage() for r in caplog.records if "trains without a plan" in r.getMessage()]
    assert len(told) == 1 and reason in told[0], caplog.text
    with pytest.raises(MemongerError, match="trains without a plan"):
        plan_of(net)


def test_a_call_at_fault_raises_as_without_a_plan_and_is_forgiven() -> None:
    net = planned(mlp())
    wrong, right = batch(0, features=7)[0], batch(0)[0]
    taught(net, 1)
    with pytest.raises(mx.MXNetError), autograd.record():
        net(wrong)
    with autograd.record():
        net(right)
    assert plan_of(net).recomputed


# Bad input


class Plain(gluon.Block):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(Plain()), r"\(Plain\) is a Block that cannot be hybridized; make it"),
        (lambda: plan(nn.Sequential()), "HybridSequential for Sequential"),
        (lambda: plan(mx.sym.var("x")), "plan it with memonger.plan"),
        (lambda: plan(3), "must be an mx.gluon.HybridBlock, not int 3"),
        (lambda: unplan(3), "must be an mx.gluon.HybridBlock"),
        (lambda: plan_of(mlp()), "has no plan; make one with memonger.gluon.plan"),
        (lambda: plan_of(plan(mlp())), "no plan before its first call"),
        (lambda: plan(layers("net_"), data=(16, 20)), "'net_dense0_weight' is not initialized"),
        (lambda: plan(mlp(), dat=(16, 20)), "'dat', which is no input.*did you mean 'data'"),
        (lambda: plan(mlp(), data=(16, 0)), "at least 1"),
        (lambda: plan(initialized(TwoInputs()), data=(16, 20)), "does not take inputs of shapes"),
        (lambda: plan(mlp(), {"data0": (16, 20), "data1": (16, 20)}), "does not take inputs"),
        (lambda: plan(mlp(), patienc=2), "unknown option 'patienc'; did you mean 'patience'"),
        (lambda: plan(mlp(), patience=0), "patience=0 must be"),
        (lambda: plan(mlp(), how="marx"), "unknown way"),
        (lambda: plan(mlp(), how="auto"), "needs budget="),
        (lambda: plan(mlp(), budget="6 potatoes"), "budget="),
        (lambda: plan(mlp(), grad_req="add"), "set it on the parameters"),
        (lambda: plan(mlp(), devices=2), "each device's part"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(MemongerError, match=message):
        call()


def test_shapes_that_do_not_fit_parameters_that_have_theirs() -> None:
    net = mlp()
    net(batch(0)[0])
    with pytest.raises(MemongerError, match="does not take inputs of shapes"):
        plan(net, data=(16, 21))
    with pytest.raises(MemongerError, match="has no plan"):
        plan_of(net)


# The tape


@pytest.mark.parametrize("how", ["marks", "schedule"])
@pytest.mark.parametrize("wanted", ["input", "weights", "both", "first weight", "last weight"])
def test_gradients_of_a_few_variables(how: str, wanted: str) -> None:
    """As ``autograd.grad`` makes them; gradients of parameters and statistics stay as they are."""
    results = []
    for options in (None, HOWS[how]):
        seed()
        net = mlp(drop=0)
        net.hybridize()
        if options is not None:
            planned(net, **options)
        training = trainer(net)
        for k in range(2):
            step(net, training, *batch(k))
        x, y = batch(5)
        x.attach_grad()
        weights = [p.data() for p in net.collect_params(".*weight").values()]
        variables = {
            "input": x,
            "weights": weights,
            "both": [weights[2], x],
            "first weight": weights[:1],
            "last weight": weights[-1],
        }[wanted]
        with autograd.record():
            loss = LOSS(net(x * 2) + net(x), y)
        found = autograd.grad(loss, variables, retain_graph=True)
        again = autograd.grad(loss, variables)
        left = left_in(net)
        step(net, training, *batch(7))
        left.update({f"then {name}": array for name, array in left_in(net).items()})
        left.update({f"found {k}": array.asnumpy() for k, array in enumerate([*found, *again])})
        results.append(left)
    assert different(*results) == []


def test_second_derivatives_are_refused() -> None:
    net = planned(mlp())
    x, y = batch(0)
    x.attach_grad()
    with autograd.record():
        loss = LOSS(net(x), y)
        with pytest.raises(MemongerError, match="second derivatives.*unplan"):
            autograd.grad(loss, [x], create_graph=True)


def test_other_graphs_are_none_of_its_business() -> None:
    taught(planned(mlp()))
    x = mx.nd.array([2.0])
    x.attach_grad()
    with autograd.record():
        first = autograd.grad(mx.nd.sin(x), [x], create_graph=True)[0]
    first.backward()
    assert x.grad.asscalar() == -mx.nd.sin(x).asscalar()


def retained_too_long(net: Any) -> None:
    x, y = batch(0)
    with autograd.record():
        loss = LOSS(net(x), y)
    loss.backward(retain_graph=True)
    with autograd.record():
        LOSS(net(x), y)
    loss.backward()


def drawn_twice(net: Any) -> None:
    x, y = batch(0)
    with autograd.record():
        loss = LOSS(net(x), y)
    loss.backward(retain_graph=True)
    autograd.backward([loss])


def in_other_mode(net: Any) -> None:
    x, y = batch(0)
    with autograd.record():
        loss = LOSS(net(x), y)
    loss.backward(train_mode=False)


@pytest.mark.parametrize("how", ["marks", "schedule"])
@pytest.mark.parametrize(
    ("mistake", "drop", "message"),
    [
        (retained_too_long, 0, "called again since"),
        (drawn_twice, 0.2, "draws random numbers"),
        (in_other_mode, 0.2, "train_mode=False"),
    ],
)
def test_errors_raise_at_backward(mistake: Any, drop: float, message: str, how: str) -> None:
    net = planned(mlp(drop=drop), **HOWS[how])
    with pytest.raises(MemongerError, match=message):
        mistake(net)
    gradient = net.collect_params()["net_dense0_weight"].grad().asnumpy()
    assert np.isnan(gradient).all()
    taught(net)  # no error is left


def taken_by_another_call(loss: Any, net: Any, x: Any) -> None:
    autograd.grad(loss, [x], retain_graph=True)
    with autograd.record():
        net(x)
    autograd.grad(loss, [x])


def drawn_twice_by_grad(loss: Any, _: Any, x: Any) -> None:
    autograd.grad(loss, [x], retain_graph=True)
    autograd.grad(loss, [x])


def grad_in_other_mode(loss: Any, _: Any, x: Any) -> None:
    autograd.grad(loss, [x], train_mode=False)


@pytest.mark.parametrize(
    ("mistake", "drop", "message"),
    [
        (taken_by_another_call, 0, "called again since"),
        (drawn_twice_by_grad, 0.2, "draws random numbers"),
        (grad_in_other_mode, 0.2, "train_mode=False"),
    ],
)
def test_errors_raise_at_grad(mistake: Any, drop: float, message: str) -> None:
    net = planned(mlp(drop=drop))
    x, y = batch(0)
    x.attach_grad()
    with autograd.record():
        loss = LOSS(net(x), y)
    with pytest.raises(MemongerError, match=message):
        mistake(loss, net, x)
    taught(net)  # no error is left


def test_statistics_are_there_when_backward_has_returned() -> None:
    net = planned(mlp())
    training = trainer(net)
    for k in range(5):
        step(net, training, *batch(k, 256))
        statistics = net.collect_params(".*running.*").values()
        read = [each.data().asnumpy() for each in statistics]
        mx.nd.waitall()
        assert all((a == each.data().asnumpy()).all() for a, each in zip(read, statistics))


def test_who_goes_past_the_functions_that_raise_gets_nan() -> None:
    found = run_code(
        """
import memonger
from mxnet import autograd, nd, gluon
from mxnet.autograd import grad
from mxnet.gluon import nn
net = nn.HybridSequential()
for _ in range(6):
    net.add(nn.Dense(8), nn.BatchNorm(), nn.Activation('tanh'))
net.initialize()
memonger.gluon.plan(net, patience=0.05)
x = nd.random.normal(shape=(16, 8))
x.attach_grad()
weight = net[0].weight
for wanted in ('input', 'weight'):
    with autograd.record():
        out = net(x).sum()
    print(grad(out, [x if wanted == 'input' else weight.data()])[0].asnumpy().mean())
try:
    with autograd.record():
        net(x)
except memonger.MemongerError as error:
    print(error)
with autograd.record():
    out = net(x).sum()
out.backward()
print(abs(weight.grad().asnumpy()).sum() > 0)
"""
    )
    lines = found.splitlines()
    assert lines[:2] == ["nan", "nan"] and "mx.autograd.grad" in lines[2] and lines[3] == "True"


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads on which executors are freed from now on."""
    threads, free = [], mx.executor.Executor.__del__

    def noted(self: Any) -> None:
        threads.append(threading.current_thread())
        free(self)

    for _ in range(2):  # what earlier tests have left, which a call frees
        taught(planned(mlp()), 1)
        gc.collect()
    monkeypatch.setattr(mx.executor.Executor, "__del__", noted)
    return threads


def test_executors_are_freed_by_the_thread_that_bound_them(freed: list[threading.Thread]) -> None:
    """Not by the engine's, nor by one on which Python collects garbage: MXNet would deadlock."""
    net, other = planned(mlp()), planned(mlp("other_"))
    taught(net, 1), taught(other, 1)
    freed.clear()
    for size in (2000, 4000, 6000):  # each takes the place of the one before
        x, y = batch(0, size)
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
    mx.nd.waitall()
    del net, loss
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    taught(other, 1)
    assert len(freed) >= 3 and set(freed) == {threading.current_thread()}


@pytest.mark.parametrize("by", ["unplan", "garbage", "next call"])
def test_executors_are_freed_soon(by: str, freed: list[threading.Thread]) -> None:
    net, other = planned(mlp()), planned(mlp("other_"))
    taught(net, 1), taught(other, 1)
    with autograd.record():
        loss = net(batch(0)[0])
    if by != "next call":
        del loss
    mx.nd.waitall()
    freed.clear()
    if by == "unplan":
        unplan(net)
    else:
        del net
        gc.collect()
    if by == "next call":
        assert not freed  # the tape has the call
        del loss
        mx.nd.waitall()
        taught(other, 1)
    assert len(freed) == 1


def test_the_latest_32_shapes_stay_bound(freed: list[threading.Thread]) -> None:
    net = planned(mlp(), data=(60, 20))
    freed.clear()
    for size in [*range(60, 20, -1), *range(21, 53)]:
        with autograd.record():
            net(batch(0, size)[0])
        mx.nd.waitall()
    assert len(freed) == 8


def test_a_plan_is_made_anew_after_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    net = planned(mlp())
    taught(net)
    found = plan_of(net)
    net.hybridize(False)
    net.summary(batch(0)[0])
    assert "Unique parameters in model: 9418" in capsys.readouterr().out
    taught(net)
    assert plan_of(net) is found
    net.hybridize()
    taught(net)
    assert plan_of(net) is not found and plan_of(net).recomputed == found.recomputed


def test_hooks_of_operators_are_called_in_inference_only() -> None:
    net, told = planned(mlp()), []
    net.register_op_hook(lambda *about: told.append(about))
    taught(net)
    assert plan_of(net).recomputed and not told
    net(batch(0)[0])
    assert len(told) == 33


# Memory

TOLD = """
import sys
import memonger
import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

def told(key):
    with open('/proc/self/status') as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key + ':'))
"""

MEMORY = (
    TOLD
    + """
net = nn.HybridSequential()
for _ in range(40):
    net.add(nn.Dense(64), nn.BatchNorm(), nn.Activation('relu'))
net.initialize()
x = mx.nd.random.normal(shape=(4096, 64))
net(x[:2])
net.hybridize()
if sys.argv[1:]:
    memonger.gluon.plan(net, patience=0.002, **eval(sys.argv[1]))
mx.nd.waitall()
before = told('VmRSS')
sizes = [3800, 4096, 3900, 4000, 4096] if sys.argv[2:] else [4096] * 5
for size in sizes:
    with autograd.record():
        out = net(x[:size])
    out.backward()
mx.nd.waitall()
print((told('VmHWM') - before) // 1024)
"""
)

WEIGHTS = (
    TOLD
    + """
net = nn.HybridSequential()
for _ in range(12):
    net.add(nn.Conv2D(384, 3, padding=1, in_channels=384), nn.BatchNorm(), nn.Activation('relu'))
net.initialize()
x = mx.nd.random.normal(shape=(4, 384, 8, 8))
if sys.argv[1:]:
    net(x)
memonger.gluon.plan(net, patience=0.002)
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd')
mx.nd.waitall()
before = told('VmRSS')
for _ in range(3):
    with autograd.record():
        out = net(x)
    out.backward()
    trainer.step(4)
mx.nd.waitall()
print((told('VmHWM') - before) // 1024)
"""
)


def peak(code: str, *arguments: str) -> int:
    """The MB by which a process grows in training."""
    done = run_python("-W", "ignore", "-c", code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


def test_memory_of_a_process() -> None:
    """A loop that does not wait takes one pool, and so do batches of several sizes."""
    plain, marks, several = peak(MEMORY), peak(MEMORY, "{}"), peak(MEMORY, "{}", "several")
    assert marks < 0.5 * plain
    # What MXNet and MKLDNN take for each size beside a pool was some 5 MB.
    assert several < marks + 0.4 * plain


def test_an_inference_before_the_plan_takes_no_memory_from_it() -> None:
    """MKLDNN lays weights out for inference: 61 MB of them here, that training would copy."""
    assert peak(WEIGHTS, "inference") <= peak(WEIGHTS)
