"""Scenarios: what a training loop records, differentiates, and changes between its steps."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import LOSS, Arrays, Prepare, Residual
from blocks import batch, images, initialized, layers, left_in, mlp, step, trainer
from scenarios import SCENARIOS, scenario, train


def other(k: int) -> Any:
    """Return the input of another batch."""
    return batch(k + 100)[0]


def twice(loss: Any) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def decoded(net: Any, x: Any, y: Any, k: int) -> Any:
    """Call a net of 20 inputs and 10 outputs for what it returned before."""
    outputs = [net(x)]
    for _ in range(4 + k % 2):
        outputs.append(net(mx.nd.concat(outputs[-1], outputs[-1], dim=1)))
    return sum(LOSS(output, y) for output in outputs)


SIZES = [16, 5, 16, 32, 7, 5, 32]
#: Of a net, a batch and the number of a step: what is recorded, and options of `train`.
LOSSES: dict[str, tuple[Callable[[Any, Any, Any, int], Any], dict[str, Any]]] = {
    "two calls, gradients of the input": (
        lambda net, x, y, k: LOSS(net(x) + net(x * 2), y),
        {"input_gradient": "write"},
    ),
    "three calls then added": (
        lambda net, x, y, k: sum(LOSS(out, y) for out in [net(x), net(other(k)), net(x)]),
        {},
    ),
    "gradients added over calls": (
        lambda net, x, y, k: LOSS(net(x) + net(x * 2) if k == 1 else net(x), y),
        {"request": "add", "steps": 4},
    ),
    "two backward passes": (lambda net, x, y, k: LOSS(net(x), y), {"backward": twice, "drop": 0}),
    "calls that read what earlier ones return": (decoded, {}),
    "two backward passes through many calls": (decoded, {"backward": twice, "drop": 0}),
    "gradients added over many calls": (decoded, {"request": "add", "input_gradient": "add"}),
    "calls of other sizes": (
        lambda net, x, y, k: sum(LOSS(net(x[:n]), y[:n]).sum() for n in (5, 16, 9, 16, 3)),
        {},
    ),
    "batches of other sizes": (
        lambda net, x, y, k: LOSS(net(x), y),
        {"steps": len(SIZES), "batches": lambda k: batch(k, SIZES[k])},
    ),
}


def of_loss(name: str, prepare: Prepare) -> Arrays:
    loss, options = LOSSES[name]
    options = dict(options)
    net = mlp(drop=options.pop("drop", 0.2))
    net.collect_params("(?!.*running).*").setattr("grad_req", options.pop("request", "write"))
    prepare(net)
    return train(net, lambda x, y, k: loss(net, x, y, k), **options)


SCENARIOS.update((name, partial(of_loss, name)) for name in LOSSES)


# Calls of several blocks, and of several kinds


@scenario
def planned_and_plain_blocks_mixed(prepare: Prepare) -> Arrays:
    first, middle, last = prepare(mlp("first_", 32)), mlp("middle_", 32), prepare(mlp("last_"))
    middle.hybridize()

    def loss(x: Any, y: Any, k: int) -> Any:
        h = first(x)
        between = middle(h) * mx.nd.sigmoid(h)
        return LOSS(last(between) + 0 * between[:, :10], y)

    return train((first, middle, last), loss)


def together(*calls: Any) -> None:
    """Train blocks, some of them within functions, by the sum of what they return."""

    def loss(x: Any, y: Any, k: int) -> Any:
        return sum((call(x * (1 + place)) ** 2).mean() for place, call in enumerate(calls))

    train(tuple(call for call in calls if isinstance(call, gluon.Block)), loss)


@scenario
def one_net_in_two_blocks(prepare: Prepare) -> Arrays:
    """The running statistics move in the order of the tape, which is to be plain Gluon's."""
    body, one, two = mlp("body_", 20), nn.HybridSequential(), nn.HybridSequential()
    one.add(initialized(nn.Dense(20, prefix="below_")), body)
    two.add(body, initialized(nn.Dense(5, prefix="above_")))
    together(prepare(two), prepare(one), two)
    return left_in(one, two)


@scenario
def a_part_that_another_block_trains_without_a_plan(prepare: Prepare) -> Arrays:
    body, net, plain = mlp("body_", 20), nn.HybridSequential(), nn.HybridSequential()
    net.add(body, initialized(nn.Dense(20, prefix="above_")))
    plain.add(body, initialized(nn.Dense(5, prefix="plain_")))
    plain.hybridize()
    together(prepare(net), plain, net)
    return left_in(net, plain)


@scenario
def inference_recorded_beside_training(prepare: Prepare) -> Arrays:
    net = prepare(mlp())

    def inferred(x: Any) -> Any:
        with autograd.predict_mode():
            return net(x)

    together(inferred, net)
    together(net, inferred, net)
    return left_in(net)


@scenario
def inference_between_calls_and_backward_passes(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    kept: Arrays = {}

    def inferred() -> None:
        kept[f"inference {len(kept)}"] = net(other(0))

    def loss(x: Any, y: Any, k: int) -> Any:
        with autograd.predict_mode() if k % 2 else contextlib.nullcontext():
            return LOSS(net(x), y)

    def backward(value: Any) -> None:
        inferred()
        value.backward()
        inferred()

    return {**train(net, loss, 5, backward=backward), **kept}


@scenario
def convolutions_called_three_times(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Residual(prefix="net_")))
    return train(net, lambda x, y, k: LOSS(net(x) + net(x * 2) + net(x * 3), y), batches=images)


def two_blocks_that_end_in_activations(prepare: Prepare, make_layers: Any) -> Arrays:
    """MKLDNN lays out in blocks what the second block reads."""
    nets = [initialized(nn.HybridSequential(prefix=name)) for name in ("first_", "second_")]
    for net in nets:
        for _ in range(4):
            net.add(*make_layers(), nn.Activation("relu"))
        prepare(initialized(net))
    first, second = nets
    return train((first, second), lambda x, y, k: (second(first(x)) ** 2).mean(), batches=images)


@scenario
def convolutions_of_what_others_return(prepare: Prepare) -> Arrays:
    return two_blocks_that_end_in_activations(
        prepare, lambda: (nn.Conv2D(16, 3, padding=1), nn.BatchNorm())
    )


@scenario
def statistics_of_what_others_return(prepare: Prepare) -> Arrays:
    return two_blocks_that_end_in_activations(
        prepare, lambda: (nn.BatchNorm(), nn.Conv2D(16, 3, padding=1))
    )


@scenario
def outputs_that_are_kept_and_written(prepare: Prepare) -> Arrays:
    net, outputs = prepare(mlp()), []
    kept: Arrays = {}

    def loss(x: Any, y: Any, k: int) -> Any:
        outputs.append(net(x))
        return LOSS(outputs[-1], y)

    def before(k: int) -> None:
        kept.update({f"{k} {i}": output.copy() for i, output in enumerate(outputs)})
        for output in outputs[-1:]:
            output *= 2

    return {**train(net, loss, 4, before=before), **kept}


@scenario
def calls_that_are_never_differentiated(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(4):
        x, y = batch(k)
        with autograd.record():
            net(x)
            loss = LOSS(net(x), y)
            net(x)
        if k != 2:
            loss.backward()
            training.step(16)
    return left_in(net)


# Gradients


@scenario
def a_perceptual_loss(prepare: Prepare) -> Arrays:
    """Nothing of the planned net is trained, or its last layer alone is."""
    maker, left = mlp("maker_", 20), {}
    maker.hybridize()
    for name in ("all", "rest"):
        net = mlp(f"{name}_", drop=0)
        net.collect_params("(?!rest_dense5).*").setattr("grad_req", "null")
        prepare(net)

        def loss(x: Any, y: Any, k: int, net: Any = net) -> Any:
            return ((net(maker(x)) - net(other(k))) ** 2).mean(axis=1)

        left.update({**train(maker, loss), **left_in(net)})
    return left


class WithoutParameters(nn.HybridBlock):
    def hybrid_forward(self, F: Any, x: Any) -> Any:
        for _ in range(16):
            x = F.softmax(F.dot(x, 3 * F.eye(20)))
        return x


@scenario
def a_block_without_parameters(prepare: Prepare) -> Arrays:
    net = prepare(WithoutParameters())
    kept: Arrays = {}
    for k in range(4):
        x = batch(k)[0].as_in_context(mx.cpu(k % 2))
        x.attach_grad()
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        kept[f"x {k}"] = x.grad
    return kept


@scenario
def gradients_that_are_stale(prepare: Prepare) -> Arrays:
    """Of a net that took no part: the trainer's step refuses them, or leaves them out."""
    net, rest = prepare(mlp(drop=0)), prepare(mlp("other_", drop=0))
    training = trainer(net, rest)
    for k in range(4):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x) if k % 2 else net(x) + rest(x), y)
        loss.backward()
        if k % 2:
            with pytest.raises(UserWarning, match="`other_.*has not been updated"):
                training.step(16)
        training.step(16, ignore_stale_grad=True)
    return left_in(net, rest)


@scenario
def thirty_steps_without_a_wait(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(30):
        x, y = batch(k)
        step(net, training, x, y)
        x[:] = 0
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


def one_array_as_inputs(call: Callable[[Any, Any], Any], request: str, prepare: Prepare) -> Arrays:
    net, (x, y) = prepare(initialized(ThreeInputs(prefix="net_"))), batch(0)

    def loss(x: Any, y: Any, k: int) -> Any:
        return LOSS(call(net, x), y)

    left = train(net, loss, batches=lambda k: (x, y), input_gradient=request)
    if request == "write" and call is CALLS["one array"]:
        assert (np.signbit(left["x 0"]) & (left["x 0"] == 0)).any()
    with autograd.record():
        alone = loss(x, y, 0)
    return {**left, "x alone": autograd.grad(alone, [x])[0], **left_in(net)}


SCENARIOS.update(
    (f"{name} as inputs, {request}", partial(one_array_as_inputs, CALLS[name], request))
    for name, request in zip(CALLS, ("write", "add", "write", "add"))
)


#: Of an input and the weights: the variables whose gradients ``autograd.grad`` makes.
VARIABLES: dict[str, Callable[[Any, Any], Any]] = {
    "input": lambda x, weights: x,
    "both": lambda x, weights: [weights[2], x],
    "last weight": lambda x, weights: weights[-1],
}


def gradients_of_variables(variables: Callable[[Any, Any], Any], prepare: Prepare) -> Arrays:
    """Those of all other parameters, and the statistics, stay as they are."""
    net = prepare(mlp(drop=0))
    train(net, steps=2)
    x, y = batch(5)
    x.attach_grad()
    chosen = variables(x, [p.data() for p in net.collect_params(".*weight").values()])
    with autograd.record():
        loss = LOSS(net(x * 2) + net(x) + net(x * 3), y)
    gradients = [*autograd.grad(loss, chosen, retain_graph=True), *autograd.grad(loss, chosen)]
    left = {**left_in(net), **{f"made {k}": array for k, array in enumerate(gradients)}}
    return {**left, **{f"then {name}": array for name, array in train(net, steps=1).items()}}


SCENARIOS.update(
    (f"gradients of {name}", partial(gradients_of_variables, variables))
    for name, variables in VARIABLES.items()
)


@scenario
def forward_passes_without_a_backward_pass(prepare: Prepare) -> Arrays:
    """Of every other step, and in training mode without a record; statistics may move or not."""
    net = prepare(mlp(drop=0))
    training = trainer(net)
    for k in range(4):
        x, y = batch(k)
        with autograd.train_mode():
            net(x)
        with autograd.record():
            loss = LOSS(net(x), y)
        if k % 2 == 0:
            loss.backward()
            training.step(16)
    mx.nd.waitall()
    return left_in(net)


class Noisy(nn.HybridBlock):
    """Layers between operators that draw: of a fixed range, of what was computed, and dropped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self.layers = layers("layers_", drop=0.3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        x = x + 0.1 * F.random.uniform(shape=(16, 20))
        mean = F.BlockGrad(x.mean(axis=1))
        noise = F.sample_normal(mean, F.BlockGrad(F.abs(mean) + 1), shape=20)
        return self.layers(F.Dropout(x * (1 + 0.1 * noise), p=0.2))


@scenario
def operators_that_draw_by_seeds_of_the_script(prepare: Prepare) -> Arrays:
    """The script seeds before a call and between the two passes, and draws itself in between."""
    net = prepare(initialized(Noisy(prefix="net_")))
    drawn: Arrays = {}

    def backward(loss: Any) -> None:
        drawn[f"before {len(drawn)}"] = mx.nd.random.uniform(shape=4)
        mx.random.seed(len(drawn))
        loss.backward()
        drawn[f"after {len(drawn)}"] = mx.nd.random.uniform(shape=4)

    left = train(net, steps=5, before=lambda k: mx.random.seed(k // 2), backward=backward)
    return {**left, **drawn}
