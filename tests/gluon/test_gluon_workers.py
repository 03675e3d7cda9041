"""Planned nets of two workers with a kvstore, and with a trainer that sums by itself."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
from mxnet import gluon

from blocks import Arrays, Prepare, batch, different, mlp, trainer
from distributed import on_workers
from scenarios import run, train

pytestmark = pytest.mark.slow


def batches_of(store: Any) -> Callable[[int], Any]:
    """Each worker has its own."""
    return lambda k: batch(2 * k + store.rank)


def waited(loss: Any) -> None:
    loss.backward()
    mx.nd.waitall()  # the trainer's first step gives both workers the statistics of one


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
        return train(net, training=training, batches=batches_of(store), backward=waited, steps=5)

    return store.rank, run(scenario, how)


@functools.lru_cache(None)
def by_rank(how: str, updates: bool) -> dict[int, Arrays]:
    return dict(on_workers(at_a_worker, how, updates))


@pytest.mark.parametrize(
    ("how", "updates"), [("marks", False), ("marks", True), ("schedule", False)]
)
def test_two_workers_with_a_kvstore_train_to_the_same_bits(how: str, updates: bool) -> None:
    """Of ``dist_sync``: each has its own batches and statistics, and the weights are common."""
    plain, planned = by_rank("", updates), by_rank(how, updates)
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
            return train(net, training=training, batches=batches_of(store), steps=4)

        left.append(run(scenario, how))
    return left


def test_a_trainer_that_sums_gradients_by_itself_trains_to_the_same_bits() -> None:
    """As with ``hvd.DistributedTrainer``: equal bits, and the weights are common."""
    workers = on_workers(with_a_trainer_of_ones_own)
    for plain, marks, schedule in workers:
        assert different(plain, marks) == different(plain, schedule) == []
    plains = [each[0] for each in workers]
    assert all("running" in name for name in different(*plains)) and different(*plains)
