"""Scenarios by plans leave the same bits as after ``hybridize()``: all ways, and all engines."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

import scenarios_of_changes as changes
import scenarios_of_devices as devices
import scenarios_of_functions as functions
import scenarios_of_loops  # noqa: F401  which fill SCENARIOS
import scenarios_of_marks  # noqa: F401
import scenarios_of_networks as networks
import scenarios_of_np as of_np
from blocks import HOWS, LOSS, Arrays, Prepare, Residual, Transformer
from blocks import batch, different, images, initialized, left_in, mlp, planned, seed, trainer
from planned import elsewhere
from scenarios import SCENARIOS, Scenario, run, unlike_plain

MARKS, BOTH = ("marks",), ("marks", "schedule")
#: A budget takes a plan of either kind. It plans networks of all kinds, and their loops are few.
OF_NETWORKS = {name for name, scenario in SCENARIOS.items() if scenario in vars(networks).values()}


#: Scenarios that take longest.
LONG = {
    *("layers_called_on_inputs_that_want_gradients", "operators_written_in_python"),
    *("thirty_steps_without_a_wait", "a_perceptual_loss", "a_thread_for_each_device"),
    *(
        "and beside as inputs, write",
        "twice, computed as inputs, write",
        "one array as inputs, add",
    ),
    *("sparse_gradients_on_two_devices", "an_estimator"),
}


@pytest.mark.one_plan
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in SCENARIOS]
)
def test_a_plan_changes_no_bit(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what it saves
    assert unlike_plain(SCENARIOS[name], HOWS if name in OF_NETWORKS else BOTH) == {}


# In processes of their own, for what holds in a whole process


BIAS = "net_dense5_bias cpu(0) grad"  # of that weight


def test_mkldnn_makes_no_gradient_of_a_bias_whose_weight_is_frozen() -> None:
    assert not run(changes.a_weight_frozen_midway, "marks")[BIAS].any()


def a_weight_frozen_without_mkldnn(prepare: Prepare) -> Arrays:
    left = changes.a_weight_frozen_midway(prepare)
    assert left[BIAS].any()
    return left


# What MXNet's CPU build computes in float16. It has no products of matrices there, nor Dropout.
IN_FLOAT16 = ["Activation", "tanh", "relu", "sigmoid", "elemwise_mul"]


def begin_float16() -> None:
    others = set(amp.list_fp32_ops("float16")) | set(amp.list_lp16_ops("float16"))
    in_float32 = sorted(others - {"RNN", *IN_FLOAT16})
    amp.init("float16", target_precision_ops=IN_FLOAT16, fp32_ops=in_float32)


def scaled(net: Any, batches: Callable[[int], Any], clip: bool = False, **options: Any) -> Arrays:
    """Train with the loss scaled as MXNet finds fit."""
    training, scales = trainer(net, **options), []
    amp.init_trainer(training)
    for k in range(5):
        x, y = batches(k)
        with autograd.record():
            loss = LOSS(net(*x) if isinstance(x, list) else net(x), y)
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


def attention_in_float16(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Transformer(prefix="net_")))
    return scaled(net, networks.sentences, optimizer="adam", learning_rate=1e-3)


class Process(NamedTuple):
    """What holds in a process, and what is trained there by which ways."""

    scenarios: list[tuple[Scenario, Iterable[str]]]
    environment: dict[str, str] = {}
    begin: Callable[[], Any] = lambda: None


PROCESSES = {
    "an engine that waits": Process(
        [(SCENARIOS["two calls"], BOTH), (SCENARIOS["batches of other sizes"], BOTH)],
        {"MXNET_ENGINE_TYPE": "NaiveEngine"},
    ),
    "no MKLDNN": Process([(a_weight_frozen_without_mkldnn, MARKS)], {"MXNET_MKLDNN_ENABLED": "0"}),
    "custom functions": Process(
        [(functions.checkpointed_by_hand, BOTH), (functions.perceptual_loss, BOTH)]
    ),
    "forks": Process([(devices.workers_forked_in_mid_step, MARKS)]),
    "mx.np": Process(
        [(of_np.residual_network, BOTH), (of_np.scalars, BOTH)],
        begin=mx.npx.set_np,
    ),
    "more of mx.np": Process(
        [
            (of_np.densely_connected_network, BOTH),
            (of_np.detector, BOTH),
            (of_np.translator, BOTH),
            (of_np.encoder, HOWS),
        ],
        begin=mx.npx.set_np,
    ),
    "float16": Process(
        [
            (dense_in_float16, HOWS),
            (convolutions_in_float16, MARKS),  # a schedule is refused: MKLDNN would round otherwise
            (attention_in_float16, HOWS),
        ],
        begin=begin_float16,
    ),
}


SLOW = ("more of mx.np", "float16", "forks", "custom functions", "no MKLDNN")


def unlike_in(name: str) -> list[Any]:
    """Return what differs in this process."""
    PROCESSES[name].begin()
    return [unlike_plain(scenario, hows) for scenario, hows in PROCESSES[name].scenarios]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PROCESSES]
)
def test_a_plan_changes_no_bit_in_a_process_with(name: str) -> None:
    unlike, _ = elsewhere(unlike_in, name, **PROCESSES[name].environment)
    assert unlike == [{}] * len(PROCESSES[name].scenarios)


def in_bfloat16() -> str | list[str]:
    """Return what differs, or the error of plain MXNet where this CPU cannot do it."""
    amp.init("bfloat16")
    left = []
    for prepare in (lambda net: net.hybridize(), planned):
        seed()
        net = mlp()
        prepare(net)
        try:
            left.append(scaled(net, batch))
        except mx.MXNetError as error:
            if left:
                raise
            return str(error).strip().splitlines()[-1]
    return different(*left)


@pytest.mark.slow
def test_a_network_in_bfloat16_trains_without_a_plan() -> None:
    unlike, log = elsewhere(in_bfloat16)
    if isinstance(unlike, str):
        pytest.skip(f"plain MXNet cannot train in bfloat16 on this CPU: {unlike}")
    assert unlike == []
    assert log.count("trains without a plan: the network computes in bfloat16") == 1
