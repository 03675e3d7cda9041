"""What is on the tape beside a planned block changes no bit: calls, gradients, other blocks."""

from __future__ import annotations

import functools
from typing import Any, Callable

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import HOWS, LOSS, Arrays, Prepare
from blocks import batch, different, initialized, layers, left_in, mlp, step, trainer
from planned import elsewhere
from scenarios import Scenarios, plain, run, unlike_plain

SCENARIOS = Scenarios()


@SCENARIOS.add
def two_calls_in_one_record(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(4):
        (x, y), (other, _) = batch(k), batch(k + 100)
        with autograd.record():
            a, b = net(x), net(other)
            loss = ((a - b) ** 2).mean(axis=1) + LOSS(a, y)
        loss.backward()
        training.step(16)
    return left_in(net)


@SCENARIOS.add
def two_calls_with_gradients_of_their_inputs(prepare: Prepare) -> Arrays:
    net = prepare(mlp(drop=0))
    training, found = trainer(net), {}
    for k in range(3):
        (x, y), (other, _) = batch(k), batch(k + 100)
        for each in (x, other):
            each.attach_grad()
        with autograd.record():
            loss = LOSS(net(x) + net(other * 2), y)
        loss.backward()
        training.step(16)
        found.update({f"x {k}": x.grad.asnumpy(), f"other {k}": other.grad.asnumpy()})
    return {**left_in(net), **found}


@SCENARIOS.add
def three_calls_then_added(prepare: Prepare) -> Arrays:
    net = prepare(mlp(drop=0))
    training = trainer(net)
    for k in range(4):
        with autograd.record():
            calls = [(net(x), y) for x, y in (batch(10 * k + each) for each in range(3))]
            loss = sum(LOSS(out, y) for out, y in calls)
        loss.backward()
        training.step(16)
    return left_in(net)


@SCENARIOS.add
def adversaries(prepare: Prepare) -> Arrays:
    maker, judge = prepare(mlp("maker_", 20)), prepare(mlp("judge_", 1))
    one, other = trainer(maker, learning_rate=0.01), trainer(judge, learning_rate=0.01)
    loss_of = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    ones, zeros = mx.nd.ones((16,)), mx.nd.zeros((16,))
    for k in range(4):
        x, z = batch(k)[0], batch(k + 50)[0]
        with autograd.record():
            made = maker(z)
            loss = loss_of(judge(x), ones) + loss_of(judge(made.detach()), zeros)
        loss.backward()
        other.step(16)
        with autograd.record():
            loss = loss_of(judge(maker(z)), ones)
        loss.backward()
        one.step(16)
    return left_in(maker, judge)


@SCENARIOS.add
def planned_and_plain_blocks_mixed(prepare: Prepare) -> Arrays:
    first, middle, last = prepare(mlp("first_", 32)), mlp("middle_", 32), prepare(mlp("last_"))
    middle.hybridize()
    training = trainer(first, middle, last)
    for k in range(4):
        x, y = batch(k)
        with autograd.record():
            found = first(x)
            between = middle(found) * mx.nd.sigmoid(found)
            loss = LOSS(last(between) + 0 * between[:, :10], y)
        loss.backward()
        training.step(16)
    return left_in(first, middle, last)


def together(*calls: Any) -> None:
    """Train blocks, some of them within functions, by the sum of what they return."""
    for k in range(3):
        x, _ = batch(k)
        with autograd.record():
            loss = sum((call(x * (1 + place)) ** 2).mean() for place, call in enumerate(calls))
        loss.backward()
        trainer(*(call for call in calls if isinstance(call, gluon.Block))).step(1)


@SCENARIOS.add
def one_net_in_two_blocks(prepare: Prepare) -> Arrays:
    """The running statistics move in the order of the tape, which is to be plain Gluon's."""
    body, one, other = mlp("body_", 20), nn.HybridSequential(), nn.HybridSequential()
    one.add(initialized(nn.Dense(20, prefix="below_")), body)
    other.add(body, initialized(nn.Dense(5, prefix="above_")))
    together(prepare(other), prepare(one), other)
    return left_in(one, other)


@SCENARIOS.add
def two_blocks_with_the_same_parameters(prepare: Prepare) -> Arrays:
    one = mlp("net_", drop=0)
    other = nn.HybridSequential(prefix="other_")
    other.add(*one)
    together(prepare(one), prepare(other), one)
    return left_in(one)


@SCENARIOS.add
def a_part_that_another_block_trains_without_a_plan(prepare: Prepare) -> Arrays:
    body, net, plain = mlp("body_", 20), nn.HybridSequential(), nn.HybridSequential()
    net.add(body, initialized(nn.Dense(20, prefix="above_")))
    plain.add(body, initialized(nn.Dense(5, prefix="plain_")))
    plain.hybridize()
    together(prepare(net), plain, net)
    return left_in(net, plain)


@SCENARIOS.add
def inference_recorded_beside_training(prepare: Prepare) -> Arrays:
    net = prepare(mlp())

    def inferred(x: Any) -> Any:
        with autograd.predict_mode():
            return net(x)

    together(inferred, net)
    together(net, inferred, net)
    return left_in(net)


@SCENARIOS.add
def gradient_of_the_input(prepare: Prepare) -> Arrays:
    net, found = prepare(mlp()), {}
    training = trainer(net)
    for k in range(6):
        x, y = batch(k)
        x.attach_grad()
        with autograd.record():
            loss = LOSS(net(x * 2 if k % 2 else x), y)
        loss.backward()
        training.step(16)
        found[f"x {k}"] = x.grad.asnumpy()
    x.attach_grad("add")
    x.grad[:] = 1
    for k in range(2):
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
        found[f"added {k}"] = x.grad.asnumpy()
    return {**left_in(net), **found}


@SCENARIOS.add
def a_perceptual_loss(prepare: Prepare) -> Arrays:
    """Nothing of the planned net is trained, or its last layer alone is."""
    maker, found = mlp("maker_", 20), {}
    maker.hybridize()
    for name in ("all", "rest"):
        net = mlp(f"{name}_", drop=0)
        net.collect_params("(?!rest_dense8).*").setattr("grad_req", "null")
        prepare(net)
        training = trainer(maker)
        for k in range(3):
            (x, _), (target, _) = batch(k), batch(k + 100)
            with autograd.record():
                loss = ((net(maker(x)) - net(target)) ** 2).mean(axis=1)
            loss.backward()
            training.step(16)
        found.update(left_in(maker, net))
    return found


class WithoutParameters(nn.HybridBlock):
    def hybrid_forward(self, F: Any, x: Any) -> Any:
        for _ in range(16):
            x = F.softmax(F.dot(x, 3 * F.eye(20)))
        return x


@SCENARIOS.add
def a_block_without_parameters(prepare: Prepare) -> Arrays:
    net, found = prepare(WithoutParameters()), {}
    for k in range(6):
        x = batch(k)[0].as_in_context(mx.cpu(k % 2))
        x.attach_grad()
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        found[f"x {k}"] = x.grad.asnumpy()
    return found


class Passing(nn.HybridBlock):
    """Returns its input and a parameter as well."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.part = layers("part_", drop=0)
            self.scale = self.params.get("scale", shape=(20,), init="ones")

    def hybrid_forward(self, F: Any, x: Any, scale: Any) -> Any:
        return self.part(F.broadcast_mul(x, scale)), x, scale


@SCENARIOS.add
def what_is_given_is_returned(prepare: Prepare) -> Arrays:
    """It is the same memory: what is written to one is in the other."""
    net, found = prepare(initialized(Passing(prefix="net_"))), {}
    training = trainer(net)
    for k in range(3):
        x, y = batch(k)
        x.attach_grad()
        with autograd.record():
            out, same, scale = net(x)
            loss = LOSS(out, y) + (same**2).mean() + (scale**2).mean()
        loss.backward()
        training.step(16)
        found[f"gradient {k}"] = x.grad.asnumpy()
        found[f"after a step {k}"] = scale.asnumpy()
        scale *= 0.5
        x += k
        found[f"after a change {k}"] = same.asnumpy()
    return {**left_in(net), **found}


@SCENARIOS.add
def signs_of_zeros(prepare: Prepare) -> Arrays:
    """A gradient of -0.0 stays what it is."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Activation("relu"), layers("top_", drop=0))
    prepare(initialized(net))
    x, y = batch(0)
    x.attach_grad()
    with autograd.record():
        loss = LOSS(net(x), y)
    loss.backward()
    negative = np.signbit(x.grad.asnumpy()) & (x.grad.asnumpy() == 0)
    assert negative.any()
    return {**left_in(net), "x": x.grad.asnumpy()}


@SCENARIOS.add
def gradients_added_over_calls(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    net.collect_params().setattr("grad_req", "add")
    training = trainer(net)
    for k in range(3):
        for part in range(2):
            x, y = batch(2 * k + part)
            with autograd.record():
                loss = LOSS(net(x) + net(x * 2) if k == 1 else net(x), y)
            loss.backward()
        training.step(32)
        net.collect_params().zero_grad()
    return left_in(net)


@SCENARIOS.add
def outputs_that_are_never_differentiated(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(6):
        x, y = batch(k)
        with autograd.record():
            net(x)
            loss = LOSS(net(x), y)
            net(x)
        if k != 2:
            loss.backward()
            training.step(16)
    return left_in(net)


@SCENARIOS.add
def gradients_that_are_stale(prepare: Prepare) -> Arrays:
    """Of a net that took no part: the trainer's step refuses them, or leaves them out."""
    net, other = prepare(mlp(drop=0)), prepare(mlp("other_", drop=0))
    training = trainer(net, other)
    for k in range(5):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x) if k % 2 else net(x) + other(x), y)
        loss.backward()
        if k % 2:
            with pytest.raises(UserWarning, match="`other_.*has not been updated"):
                training.step(16)
        training.step(16, ignore_stale_grad=True)
    return left_in(net, other)


@SCENARIOS.add
def two_backward_passes(prepare: Prepare) -> Arrays:
    net = prepare(mlp(drop=0))
    training = trainer(net)
    for k in range(3):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        training.step(16)
    return left_in(net)


@SCENARIOS.add
def batches_of_other_sizes(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k, size in enumerate([16, 16, 5, 16, 5, 32, 7, 16, 32]):
        step(net, training, *batch(k, size))
    return left_in(net)


@SCENARIOS.add
def inference_between(prepare: Prepare) -> Arrays:
    net, found = prepare(mlp()), {}
    training = trainer(net)
    for k in range(3):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x), y)
        found[f"before {k}"] = net(x).asnumpy()
        loss.backward()
        training.step(16)
        found[f"after {k}"] = net(x).asnumpy()
        with autograd.record(train_mode=False):
            loss = LOSS(net(x), y)
        loss.backward()
        training.step(16)
    return {**left_in(net), **found}


@SCENARIOS.add
def thirty_steps_without_a_wait(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(30):
        x, y = batch(k)
        step(net, training, x, y)
        x[:] = 0
    return left_in(net)


@SCENARIOS.add
def scaled_loss_with_adam(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net, optimizer="adam")
    for k in range(3):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x), y) * 128
        loss.backward()
        training.step(16 * 128)
    return left_in(net)


class ThreeInputs(nn.HybridBlock):
    """Where an input is below zero, its gradient is -0.0 as often as 0.0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.parts = [layers(name, drop=0) for name in ("one_", "two_", "three_")]
            for part in self.parts:
                self.register_child(part)

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:
        return F.add_n(*(part(F.relu(x)) for part, x in zip(self.parts, inputs)))


#: Of a net and its input: one array as several inputs, read before, between and beside the calls.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "one array": lambda net, x: net(x, x, x),
    "and beside": lambda net, x: net(x, x, x) + mx.nd.sum(x * 3),
    "and computed": lambda net, x: net(x, x * 2, mx.nd.sin(x)) + mx.nd.sum(x * 3),
    "twice, computed": lambda net, x: net(*3 * [mx.nd.tanh(x)]) + net(x, mx.nd.tanh(x), x),
}


def of_inputs(call: Callable[[Any, Any], Any], request: str, prepare: Prepare) -> Arrays:
    net, (x, y) = prepare(initialized(ThreeInputs(prefix="net_"))), batch(0)
    x.attach_grad(request)
    training, found = trainer(net), {}
    for k in range(3):
        with autograd.record():
            loss = LOSS(call(net, x), y)
        loss.backward()
        training.step(16)
        found[f"x {k}"] = x.grad.asnumpy()
    with autograd.record():
        loss = LOSS(call(net, x), y)
    return {**found, "x alone": autograd.grad(loss, [x])[0].asnumpy(), **left_in(net)}


SCENARIOS.update(
    (f"{name}, {request}", functools.partial(of_inputs, call, request))
    for name, call in CALLS.items()
    for request in ("write", "add")
)


@pytest.mark.one_plan
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str) -> None:
    assert unlike_plain(SCENARIOS[name], how) == []


def several(how: str) -> list[Arrays]:
    """For a process of its own."""
    return [run(each, how) for each in (two_calls_in_one_record, batches_of_other_sizes)]


@pytest.mark.parametrize("how", ("marks", "schedule"))
def test_naive_engine(how: str) -> None:
    found, _ = elsewhere(several, how, MXNET_ENGINE_TYPE="NaiveEngine")
    usual = plain(two_calls_in_one_record), plain(batches_of_other_sizes)
    assert [different(*pair) for pair in zip(usual, found)] == [[], []]
