"""``mx.autograd`` with planned blocks: gradients of a few variables, and its errors."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from memonger import MemongerError
from memonger.support.numpy1 import IS_NUMPY_2
from mxnet import autograd

from blocks import LOSS, batch, different, mlp, planned, step, taught, trainer
from interrupting import interrupted
from planned import HOWS, run_code


def test_second_derivatives_of_a_planned_block_are_refused() -> None:
    net = planned(mlp())
    x, y = batch(0)
    x.attach_grad()
    with autograd.record():
        loss = LOSS(net(x), y)
        with pytest.raises(MemongerError, match="second derivatives.*unplan"):
            autograd.grad(loss, [x], create_graph=True)


def test_second_derivatives_of_other_graphs_are_made() -> None:
    taught(planned(mlp()))
    x = mx.nd.array([2.0])
    x.attach_grad()
    with autograd.record():
        first = autograd.grad(mx.nd.sin(x), [x], create_graph=True)[0]
    first.backward()
    assert x.grad.asscalar() == -mx.nd.sin(x).asscalar()


def after_another_call(net: Any, x: Any, differentiate: Any) -> None:
    differentiate(retain_graph=True)
    with autograd.record():
        net(x)
    differentiate()


def twice(net: Any, x: Any, differentiate: Any) -> None:
    differentiate(retain_graph=True)
    differentiate()


def in_another_mode(net: Any, x: Any, differentiate: Any) -> None:
    differentiate(train_mode=False)


@pytest.mark.parametrize(
    ("how", "by"), [("marks", "backward"), ("schedule", "backward"), ("marks", "grad")]
)
@pytest.mark.parametrize(
    ("mistake", "drop", "message"),
    [
        (after_another_call, 0, "called again and has reused"),
        (twice, 0.2, "draws random numbers"),
        (in_another_mode, 0.2, "train_mode=False"),
    ],
)
def test_what_begins_a_backward_pass_raises_its_error(
    mistake: Any, drop: float, message: str, how: str, by: str
) -> None:
    """No gradients are left behind that look right, and no error for the next pass."""
    net, (x, y) = planned(mlp(drop=drop), **HOWS[how]), batch(0)
    x.attach_grad()
    with autograd.record():
        loss = LOSS(net(x), y)
    differentiate = loss.backward if by == "backward" else partial(autograd.grad, loss, [x])
    with pytest.raises(MemongerError, match=message):
        mistake(net, x, differentiate)
    gradient = net.collect_params()["net_dense0_weight"].grad().asnumpy()
    assert by == "grad" or np.isnan(gradient).all()
    taught(net)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_readers_of_statistics_after_backward_wait_until_they_have_moved(how: str) -> None:
    net = planned(mlp(), **HOWS[how])
    training = trainer(net)
    for k in range(5):
        step(net, training, *batch(k, 256))
        statistics = net.collect_params(".*running.*").values()
        read = [statistic.data().asnumpy() for statistic in statistics]
        mx.nd.waitall()
        assert all(
            (a == statistic.data().asnumpy()).all() for a, statistic in zip(read, statistics)
        )


def test_functions_imported_before_the_plan_differentiate_by_it() -> None:
    """Of ``mx.autograd``, and those of ``mx.contrib``."""
    printed = run_code(
        """
import memonger
import mxnet as mx
from mxnet import autograd, nd
from mxnet.autograd import backward, grad
from mxnet.contrib import autograd as older
from mxnet.gluon import nn
net = nn.HybridSequential()
for _ in range(6):
    net.add(nn.Dense(8), nn.BatchNorm(), nn.Activation('tanh'))
net.initialize()
x = nd.random.normal(shape=(16, 8))
x.attach_grad()
def found(number):
    with autograd.record():
        out = net(x).sum() * (1 + number)
    if number < 2:
        weight = net[0].weight.data()
        made = grad(out, [x, weight] if number else [weight], create_graph=wrong)
        return b''.join(each.asnumpy().tobytes() for each in made)
    backward(out, retain_graph=wrong) if number == 2 else older.backward([out], retain_graph=wrong)
    if wrong:
        with autograd.record():
            net(x)
        backward(out)
    return x.grad.asnumpy().tobytes()
wrong = False
usual = [found(number) for number in range(4)]
memonger.gluon.plan(net, how="marks", patience=0.05)
print([found(number) for number in range(4)] == usual, len(set(usual)))
wrong = True
for number in range(4):
    try:
        found(number)
    except memonger.MemongerError as error:
        print(error)
"""
    )
    words = "autograd.grad", "autograd.grad", "this graph was retained", "this graph was retained"
    for line, expected in zip(printed.splitlines(), ("True 4", *words)):
        assert line.startswith(expected)
    assert len(printed.splitlines()) == 5


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_an_interrupt_is_raised_and_leaves_all_gradients_or_none(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At entries of functions of memonger's in a step, also where MXNet calls it."""
    net = planned(mlp(drop=0))
    taught(net, 1)
    weights = [
        parameter for parameter in net.collect_params().values() if parameter.grad_req != "null"
    ]
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda parameter: lost.append(parameter.exc_type))

    def work(number: int) -> None:
        x, y = batch(number)
        with autograd.record():
            loss = LOSS(net(x), y)
        if way == "backward":
            loss.backward()
        else:
            made_by_grad = autograd.grad(loss, [weight.data() for weight in weights])
            for weight, gradient in zip(weights, made_by_grad):
                gradient.copyto(weight.grad())

    def gradients() -> Any:
        return {weight.name: weight.grad().asnumpy() for weight in weights}

    expected = {}
    for number in (0, 1) * 6:  # the first steps call more, because they watch the parameters
        work(number)
        expected[number] = gradients()
    _, entered = interrupted(partial(work, 1))
    for moment in range(1, entered + 1, 3 if way == "backward" else 9):
        number = moment % 2
        raised, _ = interrupted(partial(work, number), moment)
        autograd.set_recording(False)  # for ``record`` forgets to at an interrupt
        autograd.set_training(False)
        assert raised and KeyboardInterrupt not in lost, moment
        if way == "backward":  # all of them or none
            left = gradients()
            assert not different(left, expected[0]) or not different(left, expected[1]), moment
        work(number)
        assert not different(gradients(), expected[number]), moment


@pytest.mark.skipif(IS_NUMPY_2, reason="MXNet alone cannot be imported")
def test_a_request_of_before_the_import_is_not_guessed() -> None:
    """MXNet does not tell it; a block that a script has marked before trains without a plan."""
    code = """
import mxnet as mx
net = mx.gluon.nn.HybridSequential()
for _ in range(4):
    net.add(mx.gluon.nn.Dense(64, activation="tanh"))
net.initialize()
x = mx.nd.ones((64, 64))
net(x)
net[0].weight.data().attach_grad('add')
import memonger
memonger.gluon.plan(net, how="schedule", patience=0.1)
for _ in range(2):
    with mx.autograd.record():
        net(x).backward()
weight = net[0].weight
memonger.gluon.unplan(net)
total = weight.data().grad.copy()
net[0].weight.data().attach_grad('add')
with mx.autograd.record():
    net(x).backward()
print(bool((total == 2 * weight.data().grad).asnumpy().all()))
"""
    assert run_code(code).strip().endswith("True")


def by_set_data(net: Any, loss: Any) -> None:
    net[0].weight.set_data(net[0].weight.data() * 1.01)


def by_hand(net: Any, loss: Any) -> None:
    net[0].weight.data()[3, 2] += 1e-3


def between_two_passes(net: Any, loss: Any) -> None:
    loss.backward(retain_graph=True)
    trainer(net).step(16)


@pytest.mark.parametrize("how", ["marks", "schedule"])
@pytest.mark.parametrize("change", [by_set_data, by_hand, between_two_passes])
def test_a_parameter_changed_before_the_backward_pass_is_named(change: Any, how: str) -> None:
    """Results would be computed again from its new value, where MXNet has the old results."""
    net, (x, y) = planned(mlp(drop=0), **HOWS[how]), batch(0)
    taught(net)
    with autograd.record():
        loss = LOSS(net(x), y)
    net(x)  # an inference changes nothing
    change(net, loss)
    with pytest.raises(MemongerError, match="'net_.*changed between a forward pass and its back"):
        loss.backward()
    assert np.isnan(net[0].weight.grad().asnumpy()).all()
    taught(net)
