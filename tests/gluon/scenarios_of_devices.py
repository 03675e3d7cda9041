"""Scenarios: several devices, threads, and workers that load data."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import memonger  # noqa: F401  before mxnet
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import LOSS, Arrays, Prepare, batch, initialized, left_in, mlp, step, trainer
from scenarios import SCENARIOS, scenario, train
from scenarios_of_networks import looked_up

DEVICES = [mx.cpu(0), mx.cpu(1)]


def parts_of(k: int) -> Any:
    """Return a batch, for each device its part."""
    return [*zip(*(gluon.utils.split_and_load(array, DEVICES) for array in batch(k, 32)))]


def on_two_devices(store: dict[str, Any], prepare: Prepare, calls: int = 1) -> Arrays:
    net = mlp(drop=0)
    net.collect_params().reset_ctx(DEVICES)
    training = trainer(prepare(net), store=store)
    for k in range(4):
        with autograd.record():
            losses = [LOSS(sum(net(x + n) for n in range(calls)), y) for x, y in parts_of(k)]
        if k % 2:
            autograd.backward(losses)
        else:
            for loss in losses:
                loss.backward()
        mx.nd.waitall()  # the trainer's first step copies the statistics to all devices
        training.step(32)
    left = left_in(net)
    assert not store or (left["net_dense0_weight cpu(0)"] == left["net_dense0_weight cpu(1)"]).all()
    return left


STORES: dict[str, dict[str, Any]] = {
    "two devices": {},
    "two devices by a kvstore": {"kvstore": "device", "update_on_kvstore": False},
    "two devices by a kvstore that updates": {"kvstore": "device", "update_on_kvstore": True},
}
SCENARIOS.update((name, partial(on_two_devices, store)) for name, store in STORES.items())
SCENARIOS.update(
    (f"a block that is called twice on {name}", partial(on_two_devices, STORES[name], calls=2))
    for name in STORES
    if "kvstore" in name  # the gradient that it gets is whole
)


@scenario
def a_thread_for_each_device(prepare: Prepare) -> Arrays:
    net = mlp(drop=0)
    net.collect_params().reset_ctx(DEVICES)
    training = trainer(prepare(net))
    with autograd.record():  # what is made at first is made here
        losses = [LOSS(net(x), y) for x, y in parts_of(9)]
    autograd.backward(losses)

    def work(x: Any, y: Any) -> None:
        for _ in range(3):
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()

    for k in range(3):
        threads = [threading.Thread(target=work, args=part) for part in parts_of(k)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mx.nd.waitall()
        training.step(16)
    return left_in(net)


@scenario
def threads_for_the_backward_passes_of_one_thread(prepare: Prepare) -> Arrays:
    """The gradients of parameters are those of the thread that comes last, so they are left out."""
    net, kept = nn.HybridSequential(prefix="net_"), {}
    for _ in range(8):  # no statistics: MXNet refuses a second backward pass through these
        net.add(nn.Dense(20, activation="tanh", in_units=20))
    prepare(initialized(net))
    for k in range(30):
        inputs = [batch(4 * k + n)[0] for n in range(4)]
        for x in inputs:
            x.attach_grad()
        with autograd.record():
            losses = [(net(x) * (n + 1)).sum() for n, x in enumerate(inputs)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mx.nd.waitall()
        kept.update({f"x{n} {k}": x.grad.asnumpy() for n, x in enumerate(inputs)})
    return kept


class SummingTrainer(gluon.Trainer):
    """A trainer as Horovod's ``DistributedTrainer``, which sums the gradients by itself."""

    def __init__(self, params: Any, store: Any) -> None:
        super().__init__(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None)
        self.store = store
        for k, parameter in enumerate(self._params):
            store.init(k, mx.nd.zeros(parameter.shape))

    def _allreduce_grads(self) -> None:
        for k, parameter in enumerate(self._params):
            if parameter.grad_req != "null":
                self.store.pushpull(k, parameter.list_grad()[0], priority=-k)


@scenario
def sparse_gradients_on_two_devices(prepare: Prepare) -> Arrays:
    return looked_up(prepare, DEVICES, optimizer="adam", learning_rate=1e-2)


@scenario
def a_trainer_that_sums_gradients_by_itself(prepare: Prepare) -> Arrays:
    net = prepare(mlp())
    net(batch(0)[0])  # which makes its parameters
    training = SummingTrainer(net.collect_params(), mx.kv.create("local"))
    return train(net, training=training, steps=4)


def workers_forked_in_mid_step(prepare: Prepare) -> Arrays:
    """Run in a process of its own, for it forks."""
    net = prepare(mlp())
    training = trainer(net)
    for k in range(2):
        x, y = batch(k)
        with autograd.record():
            loss = LOSS(net(x), y)
        data = gluon.data.ArrayDataset(*(array.asnumpy() for array in batch(k, 8)))
        loaded = list(gluon.data.DataLoader(data, 4, num_workers=2, timeout=60))
        loss.backward()
        training.step(16)
        for x, y in loaded:
            step(net, training, *(array.as_in_context(mx.cpu()) for array in (x, y)))
    return left_in(net)
