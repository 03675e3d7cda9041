"""Scenarios: networks of many kinds."""

from __future__ import annotations

from typing import Any

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from blocks import LOSS, Arrays, Prepare
from blocks import batch, initialized, layers
import opaque_networks  # noqa: F401  which registers an operator
from scenarios import scenario, train


def within(outer: Any, prepare_it: Prepare, prepare_its_part: Prepare) -> Arrays:
    inner = layers("inner_", 32)
    with outer.name_scope():
        outer.add(inner, nn.Dense(10))
    prepare_it(initialized(outer))
    prepare_its_part(inner)
    return train(outer)


def leave(net: Any) -> Any:
    return net


@scenario
def a_block_within_a_planned_one(prepare: Prepare) -> Arrays:
    return within(nn.HybridSequential(prefix="outer_"), prepare, leave)


@scenario
def a_planned_block_within_one_that_is_not_hybridized(prepare: Prepare) -> Arrays:
    return within(nn.Sequential(prefix="outer_"), leave, prepare)


class Outputs(nn.HybridBlock):
    """Returns a result, its input and a parameter more than once; MXNet merges the twins."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.first, self.last = layers("first_", 32), layers("last_", 32)
            self.scale = self.params.get("scale", shape=(1, 32))

    def hybrid_forward(self, F: Any, x: Any, scale: Any) -> Any:
        h = F.broadcast_mul(self.first(x), scale)
        twins = [F.sin(h), F.sin(h), F.sin(h)]
        out = self.last(h + twins[0])
        return out, [h, out, x, F.identity(out), scale], twins, out, h, x, scale


@scenario
def outputs_that_are_one_or_inputs(prepare: Prepare) -> Arrays:
    """An input that is returned is the same memory: what is written to one is in the other."""
    net = prepare(initialized(Outputs(prefix="net_")))
    last: list[Any] = []
    kept: Arrays = {}

    def loss(x: Any, y: Any, k: int) -> Any:
        out, some, twins, *others = net(x)
        chosen = [out, *some, *twins, *others][k % 3 :: 1 + k % 2]
        kept.update({f"{k} {i}": one.copy() for i, one in enumerate(chosen)})
        last[:] = x, some[2], some[4]
        return sum(((i + 1) * (one**2).mean() for i, one in enumerate(chosen)), LOSS(out, y))

    def before(k: int) -> None:
        if k:
            x, same, scale = last
            kept[f"scale after step {k}"] = scale.asnumpy()
            scale *= 0.5
            x += k
            kept[f"x after step {k}"] = same.asnumpy()

    return {**train(net, loss, 5, before=before, input_gradient="write"), **kept}


def sentences(number: int) -> Any:
    """Return words, the lengths of sentences, and labels."""
    random = np.random.RandomState(number)
    words, lengths = random.randint(0, 50, (4, 12)), random.randint(3, 13, 4)
    return [mx.nd.array(words), mx.nd.array(lengths)], mx.nd.array(random.randint(0, 10, 4))


class Tagger(nn.HybridBlock):
    """Looks words up, thrice, with gradients in rows; returns what it found too."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.words, self.layers = nn.Embedding(50, 8, sparse_grad=True), layers("layers_")

    def hybrid_forward(self, F: Any, words: Any) -> Any:
        words = F.cast(words, "int32")
        first, *others = (self.words(x) for x in (words, F.reverse(words, axis=1), words))
        return self.layers(F.tanh(first + others[0] * others[1])), first


def looked_up(prepare: Prepare, ctxs: Any = None, **options: Any) -> Arrays:
    """Train a net that is called once and twice in turn, on these devices."""
    net = Tagger(prefix="net_")
    net.initialize(mx.init.Xavier(), ctx=ctxs)
    prepare(net)

    def loss(x: Any, y: Any, k: int) -> Any:
        losses = []
        for part, label in zip(
            *(gluon.utils.split_and_load(a, ctxs or [mx.cpu()]) for a in (x, y))
        ):
            for words in [part, 49 - part][: 1 + k % 2]:
                out, found = net(words)
                losses.append(LOSS(out, label).sum() + (found**2).sum())
        return losses

    def batches(k: int) -> Any:
        (x, _), y = sentences(k)
        return x[:, :4], y

    def backward(losses: Any) -> None:
        autograd.backward(losses)
        mx.nd.waitall()  # the trainer's first step copies the statistics to all devices

    return train(net, loss, batches=batches, backward=backward, wd=0.01, **options)


@scenario
def sparse_gradients(prepare: Prepare) -> Arrays:
    left = looked_up(prepare)
    assert 0 < len(left["net_embedding0_weight cpu(0) rows"]) < 50
    return left


class Tied(nn.HybridBlock):
    """Looks words up in a weight that its last layer has too, with a dense gradient."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.words, self.layers = nn.Embedding(50, 8, sparse_grad=True), layers("layers_", 8)
            self.top = nn.Dense(50, use_bias=False, params=self.words.params)

    def hybrid_forward(self, F: Any, words: Any) -> Any:
        return self.top(F.tanh(self.layers(self.words(words))))


@scenario
def a_tied_weight_of_sparse_gradients(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Tied(prefix="net_")))
    return train(net, batches=lambda k: (sentences(k)[0][0][:, :4], sentences(k)[1]))


class Rows(nn.HybridBlock):
    """Takes rows of zeros and ones that are stored as csr."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(20, 16), grad_stype="row_sparse")
            self.layers = layers("layers_", drop=0)

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:
        return self.layers(F.tanh(F.dot(x, weight)))


@scenario
def sparse_inputs(prepare: Prepare) -> Arrays:
    """Also gradients of a few variables, and with a second backward pass."""
    net = prepare(initialized(Rows(prefix="net_")))
    found = {}

    def loss(x: Any, y: Any, k: int) -> Any:
        value = LOSS(net(x), y).sum()
        arrays = [net.weight.data(), *(p.data() for p in net.layers[0].params.values())]
        gradients = autograd.grad(value, arrays, retain_graph=True)
        found.update({f"{k} {n}": gradient for n, gradient in enumerate(gradients)})
        return value

    def batches(k: int) -> Any:
        x, y = batch(k)
        return (x > 1).tostype("csr"), y

    return {**train(net, loss, batches=batches), **found}


class Customs(nn.HybridBlock):
    """Layers around an operator that is written in Python."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.first, self.last = layers("first_", 32, drop=0), layers("last_", drop=0)
            self.scale = self.params.get("scale", shape=(1, 32))
            self.mean = self.params.get("mean", shape=(32,), grad_req="null", init="zeros")

    def hybrid_forward(self, F: Any, x: Any, scale: Any, mean: Any) -> Any:
        a, b = F.Custom(self.first(x), scale, mean, op_type="tests_scaled", name="a")
        return self.last(F.broadcast_add(a, F.tanh(b)))


@scenario
def operators_written_in_python(prepare: Prepare) -> Arrays:
    """Also where the net is called twice, and with gradients that are added."""
    net = prepare(initialized(Customs(prefix="net_")))

    def before(k: int) -> None:
        if k == 2:
            net.collect_params(".*(weight|scale)").setattr("grad_req", "add")

    def loss(x: Any, y: Any, k: int) -> Any:
        return LOSS(net(x) + net(x * 2) if k % 2 else net(x), y)

    return train(net, loss, 4, before=before)


class Dropped(gluon.Parameter):
    """A parameter whose ``data`` is computed, as gluonnlp's ``WeightDropParameter`` computes it."""

    def __init__(self, of: Any) -> None:
        super().__init__(of.name, grad_req=of.grad_req, shape=of.shape, init=of.init)
        for name in "_var _data _grad _ctx_list _ctx_map _trainer _deferred_init".split():
            setattr(self, name, getattr(of, name))

    def data(self, ctx: Any = None) -> Any:
        return mx.nd.Dropout(super().data(ctx), 0.5)


@scenario
def parameters_that_are_computed(prepare: Prepare) -> Arrays:
    """The weights of a Dense and of a recurrent layer."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        recurrent = gluon.rnn.LSTM(8, layout="NTC", input_size=4)
        net.add(nn.HybridLambda(lambda F, x: F.reshape(x, (0, 5, 4))), recurrent)
        net.add(layers("layers_"))
    net[2].add(nn.Dense(10, in_units=10))
    initialized(net)
    for block, name in ((recurrent, "l0_h2h_weight"), (net[2][-1], "weight")):
        computed = Dropped(block._reg_params[name])
        block._reg_params[name] = block.params._params[computed.name] = computed
        object.__setattr__(block, name, computed)
    prepare(net)
    return train(net)


class Normed(nn.HybridBlock):
    """A Dense whose weight is divided by its largest singular value (Miyato et al. 2018)."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(units, units))
            self.u = self.params.get("u", shape=(1, units), grad_req="null")

    def hybrid_forward(self, F: Any, x: Any, weight: Any, u: Any) -> Any:
        v = F.L2Normalization(F.dot(u, weight))
        new = F.L2Normalization(F.dot(v, weight, transpose_b=True))
        sigma = F.sum(F.dot(F.BlockGrad(new), weight) * F.BlockGrad(v))
        y = F.FullyConnected(x, F.broadcast_div(weight, sigma), no_bias=True, num_hidden=20)
        return F.tanh(y), F.BlockGrad(new)


@scenario
def spectral_normalization(prepare: Prepare) -> Arrays:
    """The singular vectors are written to a parameter between steps."""

    class Net(nn.HybridBlock):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            with self.name_scope():
                self.layers = nn.HybridSequential()
                self.layers.add(*[Normed(20) for _ in range(5)])

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            vectors = []
            for layer in self.layers:
                x, u = layer(x)
                vectors.append(u)
            return x, vectors

    net = prepare(initialized(Net(prefix="net_")))
    vectors: list[Any] = []

    def before(k: int) -> None:
        for layer, u in zip(net.layers, vectors):
            layer.u.set_data(u)

    def loss(x: Any, y: Any, k: int) -> Any:
        out, vectors[:] = net(x)
        return LOSS(out, y)

    return train(net, loss, 4, before=before)
