"""What a script does to a planned net between steps does not change a bit."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

from blocks import HOWS, LOSS, Arrays, Prepare
from blocks import batch, different, left_in, mlp, step, trainer
from planned import elsewhere
from scenarios import Scenarios, run, unlike_plain

SCENARIOS = Scenarios()


@SCENARIOS.add
def layers_frozen_midway(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(6):
        if k in (2, 4):
            request = "null" if k == 2 else "write"
            net.collect_params(".*dense[01]_.*").setattr("grad_req", request)
        step(net, training, *batch(k))
    return left_in(net)


@SCENARIOS.add
def the_last_layers_before_the_rest(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training, parameters = trainer(net), net.collect_params(".*(dense|norm)[0-3]_.*")
    for k in range(4):
        parameters.setattr("grad_req", "null" if k < 2 else "write")
        step(net, training, *batch(k))
    return left_in(net)


@SCENARIOS.add
def a_frozen_layer_initialized_again(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    net.collect_params(".*dense0_.*").setattr("grad_req", "null")
    training = trainer(net)
    for k in range(4):
        if k == 2:
            net[0].initialize(mx.init.Constant(0.01), force_reinit=True)
        step(net, training, *batch(k))
    return left_in(net)


@SCENARIOS.add
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


@SCENARIOS.add
def a_layer_added(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    for k in range(4):
        if k == 2:
            with net.name_scope():
                net.add(nn.Dense(10))
            net[-1].initialize(mx.init.Xavier())
        step(net, trainer(net), *batch(k))
    return left_in(net)


@SCENARIOS.add
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


@SCENARIOS.add
def moved_to_another_device(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    for k in range(4):
        ctx = mx.cpu(k // 2)
        net.collect_params().reset_ctx(ctx)
        step(net, trainer(net), *(each.as_in_context(ctx) for each in batch(k)))
    return left_in(net)


@SCENARIOS.add
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


@SCENARIOS.add
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


@SCENARIOS.add
def hooks_of_operators(prepare: Prepare) -> Arrays:
    """They are told all in inference, and what `Monitor` makes of it is as without a plan."""
    net = prepare(mlp())
    training, told = trainer(net), []
    monitor = mx.mon.Monitor(1, pattern=".*dense.*")

    def op_hook(name: bytes, op: bytes, array: Any) -> None:
        if monitor.activated:
            told.append((name, op))
            monitor.stat_helper(name, array)

    net.register_op_hook(op_hook)
    found: Arrays = {}
    for k in range(5):
        step(net, training, *batch(k))
        monitor.tic()
        net(batch(k + 9)[0])
        found[f"monitored {k}"] = repr(monitor.toc()).encode()
    assert len(told) == 5 * 33 and b"dense8_fwd_output" in found["monitored 4"]
    return {**left_in(net), **found, "told": repr(told).encode()}


@SCENARIOS.add
def summaries(prepare: Prepare) -> Arrays:
    """They are refused in MXNet's words while a net is hybridized, and its plan is made anew."""
    net, found = mlp(), {}

    def summary() -> bytes:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            net.summary(batch(0)[0])
        assert "Unique parameters in model: 9418" in printed.getvalue()
        return printed.getvalue().encode()

    found["before"] = summary()
    prepare(net)
    training = trainer(net)
    for k in range(5):
        if k == 2:
            with pytest.raises(AssertionError, match="must not be hybridized to print summary"):
                net.summary(batch(0)[0])
        if k == 3:
            net.hybridize(False)
            found["between"] = summary()
            net.hybridize()
        step(net, training, *batch(k))
    return {**left_in(net), **found}


@SCENARIOS.add
def an_estimator(prepare: Prepare) -> Arrays:
    from mxnet.gluon.contrib.estimator import Estimator

    net = prepare(mlp())
    net(batch(0)[0])
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(*batch(0, 64)), 16)
    estimator = Estimator(net, LOSS, trainer=trainer(net), context=mx.cpu())
    estimator.logger.setLevel("ERROR")
    estimator.fit(data, val_data=data, epochs=2)
    metrics = [*estimator.train_metrics, *estimator.val_metrics]
    assert len(metrics) == 4
    return {**left_in(net), "metrics": np.array([metric.get()[1] for metric in metrics])}


@pytest.mark.one_plan
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what it saves
    assert unlike_plain(SCENARIOS[name], how) == []


def a_weight_frozen_midway(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    training = trainer(net)
    for k in range(5):
        if k == 2:
            net.collect_params()["net_dense8_weight"].grad_req = "null"
        step(net, training, *batch(k))
    return left_in(net)


def frozen(how: str) -> Arrays:
    """For a process of its own."""
    return run(a_weight_frozen_midway, how)


def test_a_bias_whose_weight_is_frozen() -> None:
    """MKLDNN makes no gradient of it, and it is zero then; else it is as without a plan."""
    bias = "net_dense8_bias cpu(0) grad"
    assert not frozen("marks")[bias].any()
    found = [elsewhere(frozen, how, MXNET_MKLDNN_ENABLED="0")[0] for how in ("", "marks")]
    assert different(*found) == [] and found[1][bias].any()
