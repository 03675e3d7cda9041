"""Automatic mixed precision: ``amp.init`` replaces MXNet's operators, so it has a process."""

from __future__ import annotations

from typing import Any

import pytest

import memonger
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

from blocks import LOSS, PATIENCE, Arrays, Prepare, Residual, Transformer
from blocks import batch, different, images, initialized, left_in, mlp, seed, trainer
from planned import elsewhere
from scenarios import Scenarios, run

SCENARIOS = Scenarios()

# What MXNet's CPU build computes in float16. It has no products of matrices there, nor Dropout.
IN_FLOAT16 = ["Activation", "tanh", "relu", "sigmoid", "elemwise_mul"]


def scaled_step(net: Any, training: Any, inputs: Any, y: Any, clip: bool = False) -> float:
    """With the loss scaled as MXNet finds fit; returns the scale."""
    with autograd.record():
        loss = LOSS(net(*inputs), y)
        with amp.scale_loss(loss, training) as scaled:
            autograd.backward(scaled)
    if clip:
        amp.unscale(training)
        gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
        gluon.utils.clip_global_norm(gradients, 10)
    scale: float = training._amp_loss_scaler.loss_scale
    training.step(y.shape[0])
    return scale


@SCENARIOS.add
def dense(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    amp.init_trainer(training)
    scales = []
    for k in range(6):
        x, y = batch(k)
        scales.append(scaled_step(net, training, [x], y))
    assert scales[0] > scales[-1]  # gradients have overflowed, and steps were left out
    return {**left_in(net), "scales": np.array(scales)}


@SCENARIOS.add
def convolutions(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Residual(prefix="net_")))
    training = trainer(net)
    amp.init_trainer(training)
    for k in range(5):
        x, y = images(k)
        scaled_step(net, training, [x], y, clip=True)
    return left_in(net)


@SCENARIOS.add
def attention(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Transformer(prefix="net_")))
    training = trainer(net, optimizer="adam", learning_rate=1e-3)
    amp.init_trainer(training)
    random = np.random.RandomState(0)
    for _ in range(5):
        words = mx.nd.array(random.randint(0, 50, (4, 12)))
        lengths = mx.nd.array(random.randint(3, 13, 4))
        scaled_step(net, training, [words, lengths], mx.nd.array(random.randint(0, 10, 4)))
    return left_in(net)


def in_float16(name: str, hows: list[str]) -> dict[str, Arrays]:
    """For a process of its own."""
    others = set(amp.list_fp32_ops("float16")) | set(amp.list_lp16_ops("float16"))
    in_float32 = sorted(others - {"RNN", *IN_FLOAT16})
    amp.init("float16", target_precision_ops=IN_FLOAT16, fp32_ops=in_float32)
    return {how: run(SCENARIOS[name], how) for how in ("", *hows)}


@pytest.mark.parametrize(
    ("name", "hows"),
    [
        ("dense", ["marks", "schedule", "budget"]),
        ("convolutions", ["marks"]),  # a schedule is refused, for MKLDNN would round otherwise
        ("attention", ["marks", "schedule", "budget"]),
    ],
)
def test_float16(name: str, hows: list[str]) -> None:
    found = elsewhere(in_float16, name, hows)[0]
    plain = found.pop("")
    assert {how: different(plain, each) for how, each in found.items()} == dict.fromkeys(hows, [])


def in_bfloat16() -> list[Arrays] | str:
    """For a process of its own; the error of plain MXNet where this CPU cannot do it."""
    amp.init("bfloat16")
    found = []
    for plans in (False, True):
        seed()
        net = mlp()
        net.hybridize()
        if plans:
            memonger.gluon.plan(net, patience=PATIENCE)
        training = trainer(net)
        amp.init_trainer(training)
        try:
            for k in range(5):
                x, y = batch(k)
                scaled_step(net, training, [x], y)
            found.append(left_in(net))
        except mx.MXNetError as error:
            if plans:
                raise
            return str(error).strip().splitlines()[-1]
    return found


def test_bfloat16_trains_without_a_plan() -> None:
    found, told = elsewhere(in_bfloat16)
    if isinstance(found, str):
        pytest.skip(f"plain MXNet cannot train in bfloat16 on this CPU: {found}")
    assert different(*found) == []
    assert told.count("trains without a plan: the network computes in bfloat16") == 1
