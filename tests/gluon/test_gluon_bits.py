"""Gluon blocks train by plans to the bits that they train to after ``hybridize()``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

from blocks import HOWS, LOSS, Arrays, Prepare, Residual, Transformer, TwoInputs
from blocks import batch, different, images, initialized, layers, left_in, mlp, run, step, trainer
from planned import elsewhere

SCENARIOS: dict[str, Any] = {}


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def convolutions(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Residual(prefix="net_")))
    training = trainer(net)
    for k in range(4):
        step(net, training, *images(k))
    return left_in(net)


@scenario
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


@scenario
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


@scenario
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


@scenario
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


@scenario
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


@scenario
def nested(prepare: Prepare) -> Arrays:
    outer, inner = nn.HybridSequential(prefix="outer_"), layers("inner_", 32)
    with outer.name_scope():
        outer.add(inner, nn.Dense(10))
    outer.initialize(mx.init.Xavier())
    prepare(outer)
    training = trainer(outer)
    for k in range(3):
        step(outer, training, *batch(k))
    return left_in(outer)


@scenario
def within_a_block_that_is_not_hybridized(prepare: Prepare) -> Arrays:
    outer, inner = nn.Sequential(prefix="outer_"), layers("inner_", 32)
    with outer.name_scope():
        outer.add(inner)
        outer.add(nn.Dense(10))
    outer.initialize(mx.init.Xavier())
    prepare(inner)
    training = trainer(outer)
    for k in range(3):
        step(outer, training, *batch(k))
    return left_in(outer)


@scenario
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


@scenario
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


@scenario
def batches_of_other_sizes(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k, size in enumerate([16, 16, 5, 16, 5, 32, 7, 16, 32]):
        step(net, training, *batch(k, size))
    return left_in(net)


@scenario
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


@scenario
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


@scenario
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


@scenario
def layers_frozen_midway(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(6):
        if k in (2, 4):
            request = "null" if k == 2 else "write"
            net.collect_params(".*dense[01]_.*").setattr("grad_req", request)
        step(net, training, *batch(k))
    return left_in(net)


@scenario
def a_frozen_layer_initialized_again(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    net.collect_params(".*dense0_.*").setattr("grad_req", "null")
    training = trainer(net)
    for k in range(4):
        if k == 2:
            net[0].initialize(mx.init.Constant(0.01), force_reinit=True)
        step(net, training, *batch(k))
    return left_in(net)


@scenario
def gradients_in_new_arrays(prepare: Prepare) -> Arrays:
    """The old ones, which the user may have, stay as they are."""
    net, old = prepare(mlp()), {}
    training = trainer(net)
    for k in range(4):
        if k == 2:
            old = {name: each.grad() for name, each in net.collect_params(".*dense.*").items()}
            for request in ("add", "write"):
                net.collect_params().setattr("grad_req", request)
        step(net, training, *batch(k))
    return {**left_in(net), **{f"old {name}": each.asnumpy() for name, each in old.items()}}


@scenario
def several_inputs_and_outputs(prepare: Prepare) -> Arrays:
    net = prepare(initialized(TwoInputs(prefix="two_")))
    training = trainer(net)
    for k in range(4):
        (x, y), (other, _) = batch(k), batch(k + 9)
        with autograd.record():
            out, (left, _, same) = net(x, other)
            loss = LOSS(out, y)
            if k % 2:
                loss = loss + left.mean(axis=1) + same.mean(axis=1)
        loss.backward()
        training.step(16)
    return left_in(net)


def on_two_devices(prepare: Prepare) -> Any:
    devices = [mx.cpu(0), mx.cpu(1)]
    net = mlp(drop=0)
    net.collect_params().reset_ctx(devices)
    return prepare(net), devices


@scenario
def two_devices(prepare: Prepare) -> Arrays:
    net, devices = on_two_devices(prepare)
    training = trainer(net)
    for k in range(4):
        parts = [gluon.utils.split_and_load(each, devices) for each in batch(k, 32)]
        with autograd.record():
            losses = [LOSS(net(x), y) for x, y in zip(*parts)]
        if k % 2:
            autograd.backward(losses)
        else:
            for loss in losses:
                loss.backward()
        mx.nd.waitall()  # the trainer's first step copies the statistics to all devices
        training.step(16)
    return left_in(net)


@scenario
def a_thread_for_each_device(prepare: Prepare) -> Arrays:
    net, devices = on_two_devices(prepare)
    training = trainer(net)
    step_on = gluon.utils.split_and_load
    with autograd.record():  # what is made at first is made here
        losses = [
            LOSS(net(x), y) for x, y in zip(*(step_on(each, devices) for each in batch(9, 32)))
        ]
    autograd.backward(losses)

    def work(x: Any, y: Any) -> None:
        for _ in range(3):
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()

    for k in range(3):
        parts = [step_on(each, devices) for each in batch(k, 32)]
        threads = [threading.Thread(target=work, args=part) for part in zip(*parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mx.nd.waitall()  # the trainer's first step copies the statistics to all devices
        training.step(16)
    return left_in(net)


@scenario
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


@scenario
def saved_loaded_and_exported(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(4):
        step(net, training, *batch(k))
        mx.nd.waitall()  # without a plan statistics may be read before they are there
        net.save_parameters("net.params")
        net.load_parameters("net.params")
    net.export("net")
    files = "net-symbol.json", ["data"], "net-0000.params"
    again = prepare(gluon.SymbolBlock.imports(*files))
    for k in range(2):
        step(again, trainer(again), *batch(k))
    return {**left_in(net), **{f"again {k}": v for k, v in left_in(again).items()}}


@scenario
def a_layer_added(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    for k in range(4):
        if k == 2:
            with net.name_scope():
                net.add(nn.Dense(10))
            net[-1].initialize(mx.init.Xavier())
        step(net, trainer(net), *batch(k))
    return left_in(net)


@scenario
def cast_and_hybridized_again(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(6):
        x, y = batch(k)
        if k == 2:
            net.cast("float64")
            training = trainer(net)
        if k == 4:
            net.hybridize(static_alloc=True)
        step(net, training, x.astype("float64") if k >= 2 else x, y)
    return left_in(net)


@scenario
def moved_to_another_device(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    for k in range(4):
        ctx = mx.cpu(k // 2)
        net.collect_params().reset_ctx(ctx)
        step(net, trainer(net), *(each.as_in_context(ctx) for each in batch(k)))
    return left_in(net)


@scenario
def thirty_steps_without_a_wait(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(30):
        x, y = batch(k)
        step(net, training, x, y)
        x[:] = 0
    return left_in(net)


@scenario
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


@scenario
def recurrent(prepare: Prepare) -> Arrays:
    """A fused LSTM, whose states are inputs and outputs, and cells that are unrolled."""

    class Cells(nn.HybridBlock):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            with self.name_scope():
                self.cell, self.fused, self.top = rnn.LSTMCell(16), rnn.LSTM(16), nn.Dense(10)

        def hybrid_forward(self, F: Any, x: Any, states: Any) -> Any:
            x, states = self.fused(x, states)
            x, _ = self.cell.unroll(6, x, layout="TNC", merge_outputs=True)
            return self.top(F.tanh(F.mean(x, axis=0))), states

    net = prepare(initialized(Cells(prefix="cells_")))
    training = trainer(net)
    states = net.fused.begin_state(16)
    for k in range(3):
        x, y = batch(k, 16, 6 * 8)
        with autograd.record():
            out, states = net(x.reshape((16, 6, 8)).swapaxes(0, 1), states)
            loss = LOSS(out, y)
        loss.backward()
        training.step(16)
        states = [state.detach() for state in states]
    return left_in(net)


@scenario
def attention(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Transformer(prefix="net_")))
    training = trainer(net, optimizer="adam", learning_rate=1e-3)
    random = np.random.RandomState(0)
    for _ in range(5):
        words = mx.nd.array(random.randint(0, 50, (4, 12)))
        lengths = mx.nd.array(random.randint(3, 13, 4))
        with autograd.record():
            loss = LOSS(net(words, lengths), mx.nd.array(random.randint(0, 10, 4)))
        loss.backward()
        training.step(4)
    return left_in(net)


@scenario
def a_symbol_block(prepare: Prepare) -> Arrays:
    x = mx.sym.var("image")
    net = gluon.SymbolBlock(layers("net_")(x), [x])
    net.initialize()
    training = trainer(prepare(net))
    for k in range(3):
        step(net, training, *batch(k))
    return left_in(net)


@scenario
def hooks(prepare: Prepare) -> Arrays:
    net = mlp()
    found: Arrays = {}
    net(batch(0)[0])

    def forward_hook(_: Any, inputs: Any, output: Any) -> None:
        found[f"output {len(found)}"] = output.asnumpy()

    net.register_forward_hook(forward_hook)
    prepare(net)
    training = trainer(net)
    for k in range(3):
        step(net, training, *batch(k))
    return {**left_in(net), **found}


@scenario
def an_estimator(prepare: Prepare) -> Arrays:
    from mxnet.gluon.contrib.estimator import Estimator

    net = prepare(mlp())
    net(batch(0)[0])
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(*batch(0, 64)), 16)
    estimator = Estimator(net, LOSS, trainer=trainer(net), context=mx.cpu())
    estimator.logger.setLevel("ERROR")
    estimator.fit(data, epochs=2)
    return left_in(net)


def workers_forked_in_mid_step(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(3):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x), y)
        data = gluon.data.ArrayDataset(*(each.asnumpy() for each in batch(k, 8)))
        read = list(gluon.data.DataLoader(data, 4, num_workers=2, timeout=60))
        loss.backward()
        training.step(16)
        for x, y in read:
            step(net, training, *(each.as_in_context(mx.cpu()) for each in (x, y)))
    return left_in(net)


@functools.lru_cache(None)
def plain(name: str) -> Arrays:
    return run(SCENARIOS[name], "")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert different(plain(name), run(SCENARIOS[name], how)) == []


def several(how: str) -> list[Arrays]:
    """For a process of its own."""
    return [run(each, how) for each in (two_calls_in_one_record, batches_of_other_sizes)]


@pytest.mark.parametrize("how", ("marks", "schedule"))
def test_naive_engine(how: str) -> None:
    found, _ = elsewhere(several, how, MXNET_ENGINE_TYPE="NaiveEngine")
    usual = plain("two_calls_in_one_record"), plain("batches_of_other_sizes")
    assert [different(*pair) for pair in zip(usual, found)] == [[], []]


def forked(how: str) -> Arrays:
    return run(workers_forked_in_mid_step, how)


def test_workers_forked_in_mid_step() -> None:
    found = [elsewhere(forked, how)[0] for how in ("", "marks")]
    assert different(*found) == []
