"""Networks of many kinds train by plans to the bits that they train to after ``hybridize()``."""

from __future__ import annotations

from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

from blocks import HOWS, LOSS, Arrays, Prepare, Residual, Transformer, TwoInputs
from blocks import batch, images, initialized, layers, left_in, step, trainer
from scenarios import Scenarios, unlike_plain

SCENARIOS = Scenarios()


@SCENARIOS.add
def convolutions(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Residual(prefix="net_")))
    training = trainer(net)
    for k in range(4):
        step(net, training, *images(k))
    return left_in(net)


def within(outer: Any, prepare_it: Prepare, prepare_its_part: Prepare) -> Arrays:
    inner = layers("inner_", 32)
    with outer.name_scope():
        outer.add(inner, nn.Dense(10))
    initialized(outer)
    prepare_it(outer)
    prepare_its_part(inner)
    training = trainer(outer)
    for k in range(3):
        step(outer, training, *batch(k))
    return left_in(outer)


def leave(net: Any) -> Any:
    return net


@SCENARIOS.add
def nested(prepare: Prepare) -> Arrays:
    return within(nn.HybridSequential(prefix="outer_"), prepare, leave)


@SCENARIOS.add
def within_a_block_that_is_not_hybridized(prepare: Prepare) -> Arrays:
    return within(nn.Sequential(prefix="outer_"), leave, prepare)


@SCENARIOS.add
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


@SCENARIOS.add
def outputs_that_are_one(prepare: Prepare) -> Arrays:
    """A result, an input and a parameter are outputs more than once; twins are merged."""

    class Outputs(nn.HybridBlock):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            with self.name_scope():
                self.first, self.last = layers("first_", 32), layers("last_", 32)
                self.scale = self.params.get("scale", shape=(1, 32))

        def hybrid_forward(self, F: Any, x: Any, scale: Any) -> Any:
            h = F.broadcast_mul(self.first(x), scale)
            twins = [F.sin(h), F.sin(h), F.sin(h)]
            out = self.last(h + twins[0])
            return out, [h, out, x, F.identity(out), scale], twins, out, h, x, scale

    net, found = prepare(initialized(Outputs(prefix="net_"))), {}
    training = trainer(net)
    for k in range(4):
        x, y = batch(k)
        x.attach_grad()
        with autograd.record():
            out, some, twins, *others = net(x)
            each = [out, *some, *twins, *others][k % 3 :: 1 + k % 2]
            loss = sum(((i + 1) * (one**2).mean() for i, one in enumerate(each)), LOSS(out, y))
        loss.backward()
        found.update({f"{k} {i}": one.asnumpy() for i, one in enumerate(each)})
        found[f"x {k}"] = x.grad.asnumpy()
        training.step(16)
    return {**left_in(net), **found}


@SCENARIOS.add
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


@SCENARIOS.add
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


class Scaling(mx.operator.CustomOp):
    """Keeps something of its forward pass for the backward pass, and moves an auxiliary state."""

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        x, scale = in_data
        self.kept = mx.nd.sigmoid(x)
        self.assign(out_data[0], req[0], x * self.kept * scale)
        self.assign(out_data[1], req[1], x * 3)
        if is_train:
            aux[0][:] = 0.9 * aux[0] + 0.1 * mx.nd.mean(x, axis=0)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        (x, scale), (given, other) = in_data, out_grad
        slope = self.kept + x * self.kept * (1 - self.kept)
        self.assign(in_grad[0], req[0], given * scale * slope + other * 3 + aux[0])
        self.assign(in_grad[1], req[1], mx.nd.sum(given * x * self.kept, axis=0, keepdims=True))


@mx.operator.register("gluon_test_scaling")
class ScalingProp(mx.operator.CustomOpProp):
    def list_arguments(self) -> list[str]:
        return ["data", "scale"]

    def list_outputs(self) -> list[str]:
        return ["scaled", "other"]

    def list_auxiliary_states(self) -> list[str]:
        return ["mean"]

    def infer_shape(self, shapes: Any) -> Any:
        data = shapes[0]
        return [data, [1, data[1]]], [data, data], [[data[1]]]

    def create_operator(self, *_: Any) -> Any:
        return Scaling()


@SCENARIOS.add
def custom_operators(prepare: Prepare) -> Arrays:
    """Written in Python; also where the net is called twice, and with gradients that are added."""

    class Customs(nn.HybridBlock):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            with self.name_scope():
                self.first, self.last = layers("first_", 32, drop=0), layers("last_", drop=0)
                self.scale = self.params.get("scale", shape=(1, 32))
                self.mean = self.params.get("mean", shape=(32,), grad_req="null", init="zeros")

        def hybrid_forward(self, F: Any, x: Any, scale: Any, mean: Any) -> Any:
            a, b = F.Custom(self.first(x), scale, mean, op_type="gluon_test_scaling", name="a")
            return self.last(a + F.tanh(b))

    net = prepare(initialized(Customs(prefix="net_")))
    training = trainer(net)
    for k in range(6):
        x, y = batch(k, 1024)  # bound, its memory is told in MB
        if k == 4:
            net.collect_params(".*(weight|scale)").setattr("grad_req", "add")
            training = trainer(net)
        with autograd.record():
            loss = LOSS(net(x) + net(x * 2) if k % 2 else net(x), y)
        loss.backward()
        training.step(1024)
    return left_in(net)


@SCENARIOS.add
def a_symbol_block(prepare: Prepare) -> Arrays:
    x = mx.sym.var("image")
    net = gluon.SymbolBlock(layers("net_")(x), [x])
    net.initialize()
    training = trainer(prepare(net))
    for k in range(3):
        step(net, training, *batch(k))
    return left_in(net)


@pytest.mark.one_plan
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str) -> None:
    assert unlike_plain(SCENARIOS[name], how) == []
