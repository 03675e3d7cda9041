"""Scenarios by plans leave the same bits as after ``hybridize()``: all ways, and all engines."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from memonger.gluon import plan_of
from mxnet import autograd, gluon
from mxnet.contrib import amp

import scenarios_of_changes as changes
import scenarios_of_devices as devices
import scenarios_of_loops  # noqa: F401  which fill SCENARIOS
import scenarios_of_marks  # noqa: F401
import scenarios_of_np as of_np
from blocks import LOSS, Arrays, Prepare, Residual
from blocks import batch, images, initialized, left_in, mlp, planned, trainer
from planned import HOWS, elsewhere
from scenarios import SCENARIOS, Scenario, run, unlike_plain

#: Scenarios that take longest.
LONG = {
    *("operators_written_in_python", "sparse_gradients_on_two_devices"),
    *("thirty_steps_without_a_wait", "a_perceptual_loss", "a_thread_for_each_device"),
}


@pytest.mark.one_plan
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in SCENARIOS]
)
def test_a_plan_changes_no_bit(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what it saves
    assert unlike_plain(SCENARIOS[name]) == {}


# In processes of their own, for what holds in a whole process


BIAS = "net_dense5_bias cpu(0) grad"  # of that weight


def test_mkldnn_makes_no_gradient_of_a_bias_whose_weight_is_frozen() -> None:
    assert not run(changes.a_weight_frozen_midway, "marks")[BIAS].any()


def a_weight_frozen_without_mkldnn(prepare: Prepare) -> Arrays:
    left = changes.a_weight_frozen_midway(prepare)
    assert left[BIAS].any()
    return left


class Checkpointed(autograd.Function):
    """Run a block forward again and backward within its backward pass."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        self.save_for_backward(x)
        with autograd.pause(train_mode=True):
            return self.net(x)

    def backward(self, gradient: Any) -> Any:
        x = self.saved_tensors[0].copy()
        x.attach_grad()
        with autograd.record():
            y = self.net(x)
        y.backward(gradient)
        return x.grad


def checkpointed_by_hand(prepare: Prepare) -> Arrays:
    """The first recorded call is on a thread of MXNet's; what waits for the engine there hangs."""
    net, x = mlp(drop=0), batch(0, 192)[0]
    net(x)
    prepare(net)
    x.attach_grad()
    for _ in range(2):
        with autograd.record():
            loss = (Checkpointed(net)(x) ** 2).mean()
        loss.backward()
        mx.nd.waitall()
    return {**left_in(net), "x": x.grad}


# What MXNet's CPU build computes in float16. It has no products of matrices there, nor Dropout.
IN_FLOAT16 = ["Activation", "tanh", "relu", "sigmoid", "elemwise_mul"]


def begin_float16() -> None:
    others = set(amp.list_fp32_ops("float16")) | set(amp.list_lp16_ops("float16"))
    in_float32 = sorted(others - {"RNN", *IN_FLOAT16})
    amp.init("float16", target_precision_ops=IN_FLOAT16, fp32_ops=in_float32)


def scaled(net: Any, batches: Callable[[int], Any], clip: bool = False) -> Arrays:
    """Train with the loss scaled as MXNet finds fit."""
    training, scales = trainer(net), []
    amp.init_trainer(training)
    for k in range(5):
        x, y = batches(k)
        with autograd.record():
            loss = LOSS(net(x), y)
            with amp.scale_loss(loss, training) as scaled_loss:
                autograd.backward(scaled_loss)
        if clip:
            amp.unscale(training)
            parameters = net.collect_params().values()
            gradients = [p.grad() for p in parameters if p.grad_req != "null"]
            gluon.utils.clip_global_norm(gradients, 10)
        scales.append(training._amp_loss_scaler.loss_scale)
        training.step(y.shape[0])
    return {**left_in(net), "scales": np.array(scales)}


def dense_in_float16(prepare: Prepare) -> Arrays:
    left = scaled(prepare(mlp()), batch)
    assert left["scales"][0] > left["scales"][-1]  # gradients overflowed; steps were left out
    return left


def convolutions_in_float16(prepare: Prepare) -> Arrays:
    return scaled(prepare(initialized(Residual(prefix="net_"))), images, clip=True)


class Process(NamedTuple):
    """What holds in a process, and what is trained there."""

    scenarios: list[Scenario]
    environment: dict[str, str] = {}
    begin: Callable[[], Any] = lambda: None
    hows: Iterable[str] = tuple(HOWS)


PROCESSES = {
    "an engine that waits": Process(
        [SCENARIOS["three calls then added"], SCENARIOS["batches of other sizes"]],
        {"MXNET_ENGINE_TYPE": "NaiveEngine"},
    ),
    "no MKLDNN": Process([a_weight_frozen_without_mkldnn], {"MXNET_MKLDNN_ENABLED": "0"}),
    "custom functions": Process([checkpointed_by_hand]),
    "forks": Process([devices.workers_forked_in_mid_step]),
    "mx.np": Process([of_np.encoder, of_np.scalars], begin=mx.npx.set_np),
    "float16": Process([dense_in_float16], begin=begin_float16),
    # A schedule is refused: MKLDNN would round otherwise.
    "convolutions in float16": Process(
        [convolutions_in_float16], begin=begin_float16, hows=("marks",)
    ),
}


def unlike_in(name: str) -> list[Any]:
    """Return what differs in this process."""
    PROCESSES[name].begin()
    hows = PROCESSES[name].hows
    return [unlike_plain(scenario, hows) for scenario in PROCESSES[name].scenarios]


QUICK = ("an engine that waits", "mx.np")  # with short searches


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.late if n in QUICK else pytest.mark.slow)
        for n in PROCESSES
    ],
)
def test_a_plan_changes_no_bit_in_a_process_with(name: str) -> None:
    unlike, _ = elsewhere(unlike_in, name, **PROCESSES[name].environment)
    assert unlike == [{}] * len(PROCESSES[name].scenarios)


@pytest.mark.parametrize("how", HOWS)
def test_a_forward_pass_alone_sets_a_fixed_gamma_to_one(how: str) -> None:
    """MXNet's BatchNorm writes a gamma that it does not train, recomputed or not."""
    left = []
    for plans in (False, True):
        net = gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            for _ in range(6):
                net.add(gluon.nn.Dense(32, activation="tanh"), gluon.nn.BatchNorm(scale=False))
        initialized(net)
        x = batch(0, 256)[0]
        net(x)  # which makes the parameters
        for parameter in net.collect_params(".*gamma").values():
            parameter.set_data(mx.nd.full(parameter.shape, 3))
        planned(net, how=how) if plans else net.hybridize()
        with autograd.record():
            net(x)
        mx.nd.waitall()  # MXNet's engine does not know that BatchNorm writes gamma
        gammas = net.collect_params(".*gamma").values()
        left.append([parameter.data().asnumpy() for parameter in gammas])
    assert any("batchnorm" in name for name in plan_of(net).recomputed)
    plain, ours = left
    assert np.array_equal(plain, ours) and (np.array(ours) == 1).all()
