"""Variables that are marked by hand: autograd's tape decides, not ``Parameter.grad_req``."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd

from blocks import LOSS, Arrays, Prepare, batch, layers, left_in, mlp
from scenarios import SCENARIOS, scenario

CPUS = mx.cpu(0), mx.cpu(1)


def added(data: list[Any], grads: list[Any]) -> None:
    for array in data:
        array.attach_grad("add")


def added_in_place(data: list[Any], grads: list[Any]) -> None:
    autograd.mark_variables(data, grads, "add")


def frozen(data: list[Any], grads: list[Any]) -> None:
    autograd.mark_variables(data[:4], grads[:4], "null")


def elsewhere(data: list[Any], grads: list[Any]) -> None:
    autograd.mark_variables(data, [mx.nd.zeros_like(array) for array in data])


def in_one_array(data: list[Any], grads: list[Any]) -> None:
    start, flat = 0, mx.nd.zeros((sum(array.size for array in data),), data[0].context)
    for array in data:
        part = flat[start : start + array.size].reshape(array.shape)
        autograd.mark_variables([array], [part], "write")
        start += array.size


def each_in_its_way(data: list[Any], grads: list[Any]) -> None:
    frozen(data, grads)
    elsewhere(data[4:9], grads[4:9])
    added_in_place(data[9:14], grads[9:14])


def train_marked(
    mark: Callable[[list[Any], list[Any]], None], when: str, prepare: Prepare, ctxs: Any = CPUS[:1]
) -> Arrays:
    """Train a net whose variables are marked before it is planned, after that, or midway."""
    net = layers("net_")
    net.initialize(mx.init.Xavier(), ctx=list(ctxs))
    for ctx in ctxs:
        net(batch(0)[0].as_in_context(ctx))
    parameters = [each for each in net.collect_params().values() if each.grad_req != "null"]

    gradients = {}

    def mark_all() -> None:
        for ctx in ctxs:
            grads = [parameter.grad(ctx) for parameter in parameters]
            mark([parameter.data(ctx) for parameter in parameters], grads)
            for parameter in parameters:  # a backward pass forgets marks of the request 'null'
                gradients[f"{parameter.name} {ctx}"] = parameter.data(ctx).grad

    moments = {"before": mark_all, "after": lambda: None, "midway": lambda: None}
    moments[when]()
    prepare(net)
    kept: Arrays = {}
    for k in range(3):
        if (k, when) in ((0, "after"), (2, "midway")):
            mark_all()
        losses = []
        with autograd.record():
            for ctx in ctxs:
                x, y = (array.as_in_context(ctx) for array in batch(k))
                losses.append(LOSS(net(x), y))
        autograd.backward(losses)
        kept.update((f"{name} of step {k}", array.copy()) for name, array in gradients.items())
    return {**left_in(net), **kept}


for _mark, _when in (
    (added, "after"),
    (in_one_array, "after"),
    (each_in_its_way, "before"),
    (each_in_its_way, "after"),
    (each_in_its_way, "midway"),
):
    SCENARIOS[f"{_mark.__name__} marked {_when}"] = partial(train_marked, _mark, _when)
SCENARIOS["marked on two devices"] = partial(train_marked, each_in_its_way, "after", ctxs=CPUS)


@scenario
def marks_of_inputs_and_of_what_is_computed_of_them(prepare: Prepare) -> Arrays:
    """A frozen block has no gradients, so its statistics do not move in a backward pass."""
    first, second, top = mlp("first_"), mlp("second_"), prepare(mlp("top_"))
    for net in first, second:
        net(batch(0)[0])
        net.collect_params().setattr("grad_req", "null")
        net.hybridize()
    kept = {}
    for k in range(3):
        x, y = batch(k)
        x.attach_grad("null" if k < 2 else "add")
        with autograd.record():
            value = LOSS(top(first(x) * second(x * 2)), y)
        value.backward()
        if k == 2:
            kept["x"] = x.grad.asnumpy()
    return {**left_in(first, second, top), **kept}


@scenario
def parameters_that_two_blocks_share_marked_elsewhere(prepare: Prepare) -> Arrays:
    one = mlp("one_", drop=0)
    one(batch(0)[0])
    other = layers("one_", drop=0)
    other = type(other)(prefix="one_", params=one.collect_params())
    other.add(*one)
    weight = one.collect_params()["one_dense1_weight"].data()
    weight.attach_grad("add")
    prepare(one)
    prepare(other)
    for k in range(3):
        x, y = batch(k)
        with autograd.record():
            value = LOSS(one(x), y) + LOSS(other(x * 2), y)
        value.backward()
    return {**left_in(one), "weight": weight.grad}
