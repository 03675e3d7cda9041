"""What a script does to a planned net between steps does not change a bit."""

from __future__ import annotations

from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

from blocks import HOWS, LOSS, Arrays, Prepare
from blocks import batch, left_in, mlp, step, trainer
from scenarios import Scenarios, unlike_plain

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
def an_estimator(prepare: Prepare) -> Arrays:
    from mxnet.gluon.contrib.estimator import Estimator

    net = prepare(mlp())
    net(batch(0)[0])
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(*batch(0, 64)), 16)
    estimator = Estimator(net, LOSS, trainer=trainer(net), context=mx.cpu())
    estimator.logger.setLevel("ERROR")
    estimator.fit(data, epochs=2)
    return left_in(net)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what it saves
    assert unlike_plain(SCENARIOS[name], how) == []
