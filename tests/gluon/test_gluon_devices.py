"""Planned nets on several devices, by several threads, workers and processes."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
from mxnet import autograd, gluon

from blocks import HOWS, LOSS, Arrays, Prepare
from blocks import batch, different, left_in, mlp, step, trainer
from distributed import on_workers
from planned import elsewhere
from scenarios import Scenarios, run, unlike_plain

SCENARIOS = Scenarios()


def on_two_devices(prepare: Prepare) -> Any:
    devices = [mx.cpu(0), mx.cpu(1)]
    net = mlp(drop=0)
    net.collect_params().reset_ctx(devices)
    return prepare(net), devices


@SCENARIOS.add
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


def by_a_kvstore(prepare: Prepare, kvstore: str, updates: bool) -> Arrays:
    net, devices = on_two_devices(prepare)
    training = trainer(net, store={"kvstore": kvstore, "update_on_kvstore": updates})
    for k in range(5):
        parts = [gluon.utils.split_and_load(each, devices) for each in batch(k, 32)]
        with autograd.record():
            losses = [LOSS(net(x), y) for x, y in zip(*parts)]
        autograd.backward(losses)
        mx.nd.waitall()  # the trainer's first step copies the statistics to all devices
        training.step(32)
    left = left_in(net)
    weights = [left[f"net_dense0_weight {ctx}"] for ctx in devices]
    assert (weights[0] == weights[1]).all()
    return left


@SCENARIOS.add
def kvstore_device(prepare: Prepare) -> Arrays:
    return by_a_kvstore(prepare, "device", False)


@SCENARIOS.add
def kvstore_device_that_updates(prepare: Prepare) -> Arrays:
    return by_a_kvstore(prepare, "device", True)


@SCENARIOS.add
def kvstore_local(prepare: Prepare) -> Arrays:
    return by_a_kvstore(prepare, "local", True)


@SCENARIOS.add
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


@pytest.mark.one_plan
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str) -> None:
    assert unlike_plain(SCENARIOS[name], how) == []


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


def forked(how: str) -> Arrays:
    return run(workers_forked_in_mid_step, how)


def test_workers_forked_in_mid_step() -> None:
    found = [elsewhere(forked, how)[0] for how in ("", "marks")]
    assert different(*found) == []


def at_a_worker(how: str, updates: bool) -> tuple[int, Arrays]:
    store = mx.kv.create("dist_sync")

    def scenario(prepare: Prepare) -> Arrays:
        net = prepare(mlp())
        training = trainer(net, store={"kvstore": store, "update_on_kvstore": updates})
        if not updates:
            # Without a plan too, a worker may take the first gradients for the weights to begin
            # with. So all take their weights before there are any.
            net(batch(0)[0])
            training.save_states(os.devnull)
            mx.nd.waitall()
            store._barrier()
        for k in range(5):
            x, y = batch(2 * k + store.rank)
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            mx.nd.waitall()  # the trainer's first step gives both the statistics of one
            training.step(32)
        return left_in(net)

    return store.rank, run(scenario, how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "updates"), [("marks", False), ("marks", True), ("schedule", False)]
)
def test_two_workers(how: str, updates: bool) -> None:
    """Of ``dist_sync``: each has its own batches and statistics, and the weights are common."""
    plain, planned = (dict(on_workers(at_a_worker, each, updates)) for each in ("", how))
    assert [different(plain[rank], planned[rank]) for rank in (0, 1)] == [[], []]
    statistics = [name for name in planned[0] if "running" in name]
    assert statistics and different(planned[0], planned[1]) == statistics


class SummingTrainer(gluon.Trainer):
    """A trainer as Horovod's ``DistributedTrainer``, which sums the gradients by itself."""

    def __init__(self, params: Any, optimizer: str, options: Any, store: Any, first: int) -> None:
        super().__init__(params, optimizer, options, kvstore=None)
        self._scale /= store.num_workers
        self.store, self.first = store, first
        for k, each in enumerate(self._params):
            store.init(first + k, mx.nd.zeros(each.shape))

    def _allreduce_grads(self) -> None:
        for k, each in enumerate(self._params):
            if each.grad_req != "null":
                self.store.pushpull(self.first + k, each.list_grad()[0], priority=-k)


def with_a_trainer_of_ones_own() -> list[Arrays]:
    store = mx.kv.create("dist_sync")
    left = []
    for number, how in enumerate(("", "marks", "schedule")):

        def scenario(prepare: Prepare, first: int = 1000 * number) -> Arrays:
            net = prepare(mlp())
            net(batch(0)[0])
            options = {"learning_rate": 0.1, "momentum": 0.9}
            training = SummingTrainer(net.collect_params(), "sgd", options, store, first)
            for k in range(4):
                x, y = batch(2 * k + store.rank)
                with autograd.record():
                    loss = LOSS(net(x), y)
                loss.backward()
                training.step(16)
            return left_in(net)

        left.append(run(scenario, how))
    return left


@pytest.mark.slow
def test_a_trainer_that_sums_gradients_by_itself() -> None:
    """As with ``hvd.DistributedTrainer``: equal bits, and the weights are common."""
    workers = on_workers(with_a_trainer_of_ones_own)
    for plain, marks, schedule in workers:
        assert different(plain, marks) == different(plain, schedule) == []
    plains = [each[0] for each in workers]
    assert all("running" in name for name in different(*plains)) and different(*plains)
