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
from mxnet import autograd

from blocks import HOWS, LOSS, batch, different
from blocks import left_in, mlp, planned, seed, step, taught, trainer
from interrupting import interrupted
from planned import run_code


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


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_statistics_are_there_when_backward_has_returned(how: str) -> None:
    net = planned(mlp(), **HOWS[how])
    training = trainer(net)
    for k in range(5):
        step(net, training, *batch(k, 256))
        statistics = net.collect_params(".*running.*").values()
        read = [each.data().asnumpy() for each in statistics]
        mx.nd.waitall()
        assert all((a == each.data().asnumpy()).all() for a, each in zip(read, statistics))


def test_functions_that_were_imported_before_the_plan() -> None:
    """By name; and those of ``mx.contrib``."""
    found = run_code(
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
memonger.gluon.plan(net, patience=0.05)
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
    for line, expected in zip(found.splitlines(), ("True 4", *words)):
        assert line.startswith(expected)
    assert len(found.splitlines()) == 5


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_no_interrupt_is_lost_and_no_gradient_either(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each entry of a function of memonger's in a step, also where MXNet calls it."""
    net = planned(mlp(drop=0))
    taught(net, 1)
    weights = [each for each in net.collect_params().values() if each.grad_req != "null"]
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: lost.append(each.exc_type))

    def work(number: int) -> None:
        x, y = batch(number)
        with autograd.record():
            loss = LOSS(net(x), y)
        if way == "backward":
            loss.backward()
        else:
            found = autograd.grad(loss, [each.data() for each in weights])
            for each, gradient in zip(weights, found):
                gradient.copyto(each.grad())

    def gradients() -> Any:
        return {each.name: each.grad().asnumpy() for each in weights}

    expected = []
    for number in (0, 1):
        work(number)
        expected.append(gradients())
    _, entered = interrupted(partial(work, 1))
    for moment in range(1, entered + 1, 1 if way == "backward" else 5):
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
