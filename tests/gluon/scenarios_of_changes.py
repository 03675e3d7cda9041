"""Scenarios: what a script changes, saves, watches or hands over between its steps."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable


import memonger  # noqa: F401  before mxnet
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

from blocks import Arrays, Prepare, batch, left_in, mlp, step, trainer
from scenarios import SCENARIOS, scenario, train


def add_a_layer(net: Any) -> None:
    with net.name_scope():
        net.add(nn.Dense(10))
    net[-1].initialize(mx.init.Xavier())


def freeze(net: Any, pattern: str, is_frozen: bool) -> None:
    net.collect_params(pattern).setattr("grad_req", "null" if is_frozen else "write")


def initialize_again(net: Any, k: int) -> None:
    freeze(net, ".*dense0_.*", True)
    if k == 2:
        net[0].initialize(mx.init.Constant(0.01), force_reinit=True)


def cast(net: Any, k: int) -> None:
    if k == 2:
        net.cast("float64")
    if k == 4:
        net.hybridize(static_alloc=True)


#: What is done to a net before step k.
CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "layers frozen midway": lambda net, k: freeze(net, ".*dense[01]_.*", k in (2, 3)),
    "the last layers before the rest": lambda net, k: freeze(net, ".*(dense|norm)[0-2]_.*", k < 2),
    "a frozen layer initialized again": initialize_again,
    "a layer added": lambda net, k: add_a_layer(net) if k == 2 else None,
    "cast and hybridized again": cast,
    "moved to another device": lambda net, k: net.collect_params().reset_ctx(mx.cpu(k // 2 % 2)),
}


def with_changes(change: Callable[[Any, int], Any], prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    for k in range(5):
        change(net, k)
        first = next(iter(net.collect_params().values()))
        x, y = (array.as_in_context(first.list_ctx()[0]) for array in batch(k))
        step(net, trainer(net), x.astype(first.dtype), y)
    return left_in(net)


SCENARIOS.update((name, partial(with_changes, change)) for name, change in CHANGES.items())


def a_weight_frozen_midway(prepare: Prepare) -> Arrays:
    """MKLDNN then makes no gradient of its bias, so that its bits are others."""
    return with_changes(lambda net, k: freeze(net, "net_dense5_weight", k >= 2), prepare)


@scenario
def gradients_in_new_arrays(prepare: Prepare) -> Arrays:
    """The old ones, which the user may have, stay as they are."""
    net, old = prepare(mlp()), {}

    def renew() -> None:
        old.update({name: array.grad() for name, array in net.collect_params(".*dense.*").items()})
        for request in ("add", "write"):
            net.collect_params().setattr("grad_req", request)

    left = train(net, steps=4, before=lambda k: renew() if k == 2 else None)
    return {**left, **{f"old {name}": array for name, array in old.items()}}


@scenario
def saved_loaded_and_exported(prepare: Prepare) -> Arrays:
    net = prepare(mlp())

    def before(k: int) -> None:
        if k:
            mx.nd.waitall()  # without a plan statistics may be read before they are there
            net.save_parameters("net.params")
            net.load_parameters("net.params")

    left = train(net, before=before)
    net.export("net")
    again = prepare(gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params"))
    return {**left, **{f"again {name}": array for name, array in train(again).items()}}


@scenario
def hooks_of_blocks(prepare: Prepare) -> Arrays:
    net = mlp()
    kept: Arrays = {}
    net(batch(0)[0])

    def hook(_: Any, inputs: Any, output: Any) -> None:
        kept[f"output {len(kept)}"] = output.copy()

    net.register_forward_hook(hook)
    left = train(prepare(net))
    assert len(kept) == 3
    return {**left, **kept}
