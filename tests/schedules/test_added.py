"""grad_req 'add': a schedule adds to the user's arrays as MXNet does, bit for bit."""

from __future__ import annotations

import functools
from typing import Any, Dict, Tuple

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.execution.symbol import scheduled

import networks
from drawn_schedules import LEVELS, work_of
from modules import SHAPES, net
from zoo import unrolled
from planned import assert_alike, run_code

S = mx.sym
Network = Tuple[Any, Dict[str, Any]]


def cells(steps: int) -> Network:
    """Build cells whose weights are read in each step: gradients have so many terms."""
    return unrolled(steps), dict.fromkeys(("data", "softmax_label"), (8, steps))


@networks.freshly_named
def embedded_twice() -> Network:
    """Let two inputs read the rows of one Embedding, each many times."""
    weight = S.Variable("weight")
    rows = {"input_dim": 3, "output_dim": 16}
    x, y = (S.Embedding(S.Variable(name), weight, **rows) for name in ("data", "other"))
    x = S.FullyConnected(x * S.tanh(y), num_hidden=8, flatten=False)
    x = S.FullyConnected(S.tanh(x), num_hidden=4, name="fc")
    shapes = {"data": (16, 9), "other": (16, 9), "softmax_label": (16,)}
    return S.SoftmaxOutput(x, name="softmax"), shapes


@networks.freshly_named
def layers(batch: int = 1500) -> Network:
    """Build layers with gradients that are sums over the batch, and one over 1200 units."""
    x = S.Variable("data")
    for width in (40, 1200, 40, 40, 40):
        x = S.Activation(S.FullyConnected(x, num_hidden=width), act_type="tanh")
    x = S.FullyConnected(x, num_hidden=10, name="fc")
    return S.SoftmaxOutput(x, name="softmax"), {"data": (batch, 40), "softmax_label": (batch,)}


@networks.freshly_named
def products() -> Network:
    """Build products of matrices by MXNet's own operators, with float64."""
    x = S.Variable("data")
    for k in range(4):
        x = S.tanh(S.dot(x, S.Variable(f"w{k}", shape=(32, 32))))
        x = S.broadcast_add(x, S.Variable(f"b{k}", shape=(1, 32)))
    return S.MakeLoss(S.sum(x * x)), {"data": (1100, 32)}


@networks.freshly_named
def six_readers() -> Network:
    """Let a convolution and five other operators read a parameter."""
    x = S.Variable("image", shape=(2, 6, 8, 8))
    parts = [S.Convolution(x, kernel=(3, 3), num_filter=6, no_bias=True)]
    parts += [S.sin(x * (k + 1.3)) for k in range(5)]
    return S.Group([S.MakeLoss(S.mean(S.square(S.tanh(part)))) for part in parts]), {}


@networks.freshly_named
def heads(levels: int) -> Network:
    """Let convolutions of several images share their weight."""
    weight, bias = S.Variable("weight"), S.Variable("bias")
    layer = {"kernel": (3, 3), "num_filter": 8}
    parts = [S.Convolution(S.Variable(f"x{k}"), weight, bias, **layer) for k in range(levels)]
    losses = [S.MakeLoss(S.mean(S.square(S.tanh(part)))) for part in parts]
    return S.Group(losses), {f"x{k}": (2, 8, 6, 6 + k) for k in range(levels)}


NETWORKS: dict[str, Any] = {
    **{f"cells of {n} steps": functools.partial(cells, n) for n in (5, 7, 9)},
    "embedded twice": embedded_twice,
    "layers": layers,
    "products": products,
    "convolutions": lambda: (net(), SHAPES),
    "six readers": six_readers,
    "four heads": functools.partial(heads, 4),
}


WITH_DATA = ("layers", "products", "convolutions")  # of which the data has a gradient


def compare(network: Network, requests: Any, level: str, **more: Any) -> None:
    symbol, shapes = network
    schedule = LEVELS[level](work_of(symbol, shapes, more.pop("wanted", None)), 1)
    assert_alike(symbol, scheduled(symbol, schedule), shapes, grad_req=requests, **more)


def parameters(network: Network) -> list[str]:
    return [name for name in network[0].list_arguments() if name not in network[1]]


@pytest.mark.parametrize("level", ["plain", "one level", "three levels"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_added_as_mxnet_adds_them(name: str, level: str) -> None:
    """All gradients are added, those of inputs too; or every other is written."""
    network = NETWORKS[name]()
    names = parameters(network)
    inputs = ["data"] if level == "three levels" and name in WITH_DATA else []
    compare(network, dict.fromkeys([*names, *inputs], "add"), level)
    if level == "one level":
        compare(network, {n: ("add", "write")[k % 2] for k, n in enumerate(names)}, level)


OF_NP: dict[str, Any] = {
    "np.dot": S.np.dot,
    "np.tensordot": lambda x, weight: S.np.tensordot(x, weight, 1),
}


@networks.freshly_named
def shared(product: str, times: int = 9) -> Network:
    """Return a product whose weight is read so often that MXNet adds its gradients in a chain."""
    x, weight = S.Variable("data"), S.Variable("weight", shape=(40, 40))
    for _ in range(times):
        if product == "dot":
            x = S.tanh(S.dot(x, weight))
        elif product == "embedding":
            rows = S.floor(S.abs(S.slice_axis(x, axis=1, begin=0, end=9)) * 4)
            rows = S.Embedding(S.BlockGrad(rows), weight, input_dim=40, output_dim=40)
            x = x + S.tanh(S.sum(rows, axis=1))
        elif product in OF_NP:
            arrays = x.as_np_ndarray(), weight.as_np_ndarray()
            x = S.tanh(OF_NP[product](*arrays).as_nd_ndarray())
        else:
            x = S.tanh(S.FullyConnected(x, weight, num_hidden=40, no_bias=True))
    batch = 60 if product == "embedding" else 1500
    return S.MakeLoss(S.sum(S.square(x))), {"data": (batch, 40)}


@pytest.mark.parametrize("product", ["dot", "fully connected", "embedding", *OF_NP])
def test_chains_of_sums_round_as_mxnet_rounds_them(product: str) -> None:
    """Products of matrices then begin with the sum so far, which rounds otherwise."""
    for request, level in (("write", "plain"), ("add", "everything"), ("write", "everything")):
        compare(shared(product), {"data": "null", "weight": request}, level, steps=2)


Arrays = Dict[str, Any]


def in_one_array(arrays: Arrays) -> Arrays:
    """Put arrays one after the other into slices of one."""
    joined = mx.nd.concat(*[array.reshape((-1,)) for array in arrays.values()], dim=0)
    slices, start = {}, 0
    for name, array in arrays.items():
        slices[name] = joined[start : start + array.size].reshape(array.shape)
        start += array.size
    return slices


def filled(network: Network) -> tuple[Arrays, Arrays]:
    """Return arrays for all arguments, and for the gradients of the parameters."""
    random = np.random.RandomState(0)
    shape_of = dict(zip(network[0].list_arguments(), network[0].infer_shape(**network[1])[0]))
    args, grads = (
        {name: mx.nd.array(random.uniform(-1, 1, shape)) for name, shape in shape_of.items()}
        for _ in range(2)
    )
    return args, {name: grads[name] for name in parameters(network)}


@pytest.mark.parametrize("request_", ["write", "add"])
def test_gradients_may_be_slices_of_one_array(request_: str) -> None:
    """They share a variable of MXNet's engine, and the parameters another one."""
    network = layers(4)
    results = []
    for symbol in network[0], scheduled(network[0], LEVELS["everything"](work_of(*network), 1)):
        args, grads = filled(network)
        args.update(in_one_array({name: args[name] for name in grads}))
        grads = in_one_array(grads)
        requests = {name: request_ if name in grads else "null" for name in args}
        executor = symbol.bind(mx.cpu(), args, grads, requests)
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward()
        results.append([array.asnumpy() for array in grads.values()])
    assert all(map(np.array_equal, *results))


def test_the_forward_pass_leaves_gradients_alone() -> None:
    """That of the data is made in place, over a result of the forward pass."""
    network: Network = (
        S.MakeLoss(S.sum(S.SoftmaxOutput(S.var("data"), S.var("label")))),
        {"data": (4, 5), "label": (4,)},
    )
    symbol = scheduled(network[0], LEVELS["plain"](work_of(*network, ["data"]), 1))
    executor = symbol.simple_bind(mx.cpu(), {"data": "write", "label": "null"}, **network[1])
    gradient = executor.grad_dict["data"]
    gradient[:] = 7
    executor.forward(is_train=True)
    assert (gradient.asnumpy() == 7).all()
    executor.backward()
    assert (gradient.asnumpy() != 7).all()


def test_arrays_that_overlap_are_refused() -> None:
    network = layers(4)
    planned = scheduled(network[0], LEVELS["plain"](work_of(*network), 1))
    args, grads = filled(network)
    one, other = [name for name, array in grads.items() if array.shape == (40,)][:2]
    two = mx.nd.zeros((79,))
    wrong: list[tuple[str, dict[str, Any]]] = [
        (f"of {one!r} and the gradient of {other!r}", dict.fromkeys((one, other), grads[one])),
        (f"of {one!r} and the gradient of {other!r}", {one: two[:40], other: two[39:]}),
        (f"of {one!r} and the input {one!r}", {one: args[one].reshape((40,))}),
        (f"of {one!r} and the input {other!r}", {one: args[other].reshape((40,))}),
    ]
    for words, instead in wrong:
        for request in "write", "add":
            requests = {name: request if name in grads else "null" for name in args}
            with pytest.raises(memonger.MemongerError, match=words):
                planned.bind(mx.cpu(), args, {**grads, **instead}, requests)


def test_head_gradients_alone_are_added_up() -> None:
    """Of head gradients alone: no operator of the forward pass comes before them."""
    a, b = S.Variable("a"), S.Variable("b")
    network = S.add_n(*[a] * 3, *[b] * 6), {"a": (3, 4), "b": (3, 4)}
    compare(network, "add", "plain", wanted="ab")


def test_what_mxnet_adds_to_and_reads_is_right() -> None:
    """The gradient of ``a``, of which that of the weight is computed: MXNet reads the sum there."""
    a = S.Variable("a")
    x = a + S.tanh(S.FullyConnected(S.Variable("data"), num_hidden=4, name="fc"))
    network = S.MakeLoss(S.sum(S.square(x))), {"data": (3, 5), "a": (3, 4)}
    wanted = ["a", "fc_weight", "fc_bias"]

    def gradient(symbol: Any, before: float) -> Any:
        sizes = dict(zip(symbol.list_arguments(), symbol.infer_shape(**network[1])[0]))
        grads = {name: mx.nd.full(sizes[name], before) for name in wanted}
        args = {name: mx.nd.ones(size) * 0.1 for name, size in sizes.items()}
        requests = {**dict.fromkeys(sizes, "null"), **dict.fromkeys(wanted, "write"), "a": "add"}
        executor = symbol.bind(mx.cpu(), args, grads, requests)
        executor.forward(is_train=True)
        executor.backward()
        return grads["fc_weight"].asnumpy()

    expected = gradient(network[0], 0)
    assert not np.allclose(expected, gradient(network[0], 7))
    planned = scheduled(network[0], LEVELS["plain"](work_of(*network, wanted), 0))
    for before in (0, 7):
        assert np.array_equal(gradient(planned, before), expected)


@pytest.mark.late
def test_without_mkldnn_gradients_are_added_as_mxnet_adds_them() -> None:
    """Products of matrices then add to the array within their sums."""
    calls = [
        f"t.test_gradients_are_added_as_mxnet_adds_them({name!r}, 'three levels')"
        for name in ("layers", "convolutions", "cells of 7 steps")
    ]
    calls.append("t.test_chains_of_sums_round_as_mxnet_rounds_them('fully connected')")
    run_code("; ".join(["import test_added as t", *calls]), MXNET_MKLDNN_ENABLED="0")


def test_the_gradient_of_an_output_is_added_to_that_of_a_parameter() -> None:
    """They are one. (MXNet's executor then hands the sum on to the operators before.)"""
    x = S.FullyConnected(S.tanh(S.Variable("data")), num_hidden=4, name="fc")
    symbol = S.elemwise_add(S.tanh(x), S.Variable("shift", shape=(8, 4)))
    planned = scheduled(symbol, LEVELS["plain"](work_of(symbol, {"data": (8, 3)}), 1))
    gradients: dict[str, list[np.ndarray]] = {}
    for request, steps in (("write", 1), ("add", 2)):
        executor = planned.simple_bind(mx.cpu(), request, data=(8, 3))
        for array in executor.arg_arrays:
            array[:] = mx.nd.arange(array.size).reshape(array.shape) / 9 - 1
        for _ in range(steps):
            executor.forward(is_train=True)
            executor.backward([mx.nd.full((8, 4), 0.7)])
        gradients[request] = [gradient.asnumpy() for gradient in executor.grad_arrays]
    for written, added in zip(gradients["write"], gradients["add"]):
        assert np.array_equal(added, written + written)


def test_sums_of_many_blocked_terms_are_refused() -> None:
    """MXNet adds them in an order that depends on layouts of MKLDNN."""
    network = heads(5)
    compare(network, "write", "plain")
    with pytest.raises(memonger.MemongerError, match="'weight' .*has 5 terms.*how='marks'"):
        compare(network, dict.fromkeys(["weight", "bias"], "add"), "plain")
    compare(network, {"bias": "add", "weight": "write"}, "plain")


LOSSES: dict[str, Any] = {
    "SoftmaxOutput": lambda x: S.SoftmaxOutput(x, S.Variable("label"), name="softmax"),
    "MAERegressionOutput": lambda x: S.MAERegressionOutput(x, S.Variable("label"), name="mae"),
    "BatchNorm": lambda x: S.MakeLoss(S.sin(S.BatchNorm(x, name="norm"))),
    "BatchNormWithReLU": lambda x: S.MakeLoss(S.sin(S.contrib.BatchNormWithReLU(x, name="norm"))),
}


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_that_mxnet_leaves_or_sets_to_zero_are_the_same(loss: str, request_: str) -> None:
    """Of labels, and of gamma with ``fix_gamma``; arrays of gradients are not zero before."""
    with mx.name.NameManager():
        x = S.FullyConnected(S.tanh(S.Variable("data")), num_hidden=24, name="fc")
        network = LOSSES[loss](S.reshape(x, (0, 6, 2, 2)) if "Norm" in loss else x)
    given = {"data": (4, 3)}
    for level in ("plain", "everything"):
        compare((network, given), request_, level, wanted=network.list_arguments())
