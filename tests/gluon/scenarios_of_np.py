"""Scenarios of networks of ``mx.np``, as "Dive into Deep Learning" builds them, small.

They are for processes of their own, in which ``mx.npx.set_np()`` holds.
"""

from __future__ import annotations

from typing import Any

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn

from blocks import Arrays, Prepare, initialized, layers
from scenarios import train

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def arrays(number: int, *shapes: tuple[int, ...], top: int = 0) -> list[Any]:
    """Draw arrays, of whole numbers below ``top`` if that is given."""
    random = np.random.RandomState(number)
    drawn = (random.randint(0, top, s) if top else random.randn(*s) for s in shapes)
    return [mx.np.array(values, dtype="float32") for values in drawn]


def classes(number: int, *shape: int, top: int = 10) -> Any:
    return arrays(number, shape or (4,), top=top)[0]


def images(number: int, size: int = 4, side: int = 16) -> tuple[Any, Any]:
    return arrays(number, (size, 3, side, side))[0], classes(number, size)


class Residual(nn.HybridBlock):
    def __init__(self, channels: int, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.one = nn.Conv2D(channels, 3, stride, 1)
            self.two = nn.Conv2D(channels, 3, 1, 1)
            self.short = nn.Conv2D(channels, 1, stride) if stride > 1 else None
            self.norms = nn.HybridSequential()
            self.norms.add(nn.BatchNorm(), nn.BatchNorm())

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        y = F.npx.relu(self.norms[0](self.one(x)))
        y = self.norms[1](self.two(y))
        return F.npx.relu(y + (self.short(x) if self.short else x))


def residual_network(prepare: Prepare) -> Arrays:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(Residual(8), Residual(8), Residual(16, 2), Residual(16))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    return train(prepare(initialized(net)), lambda x, y, k: LOSS(net(x), y).mean(), batches=images)


class Dense(nn.HybridBlock):
    def __init__(self, count: int, channels: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.parts = nn.HybridSequential()
            for _ in range(count):
                part = nn.HybridSequential()
                part.add(nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(channels, 3, padding=1))
                self.parts.add(part)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        for part in self.parts:
            x = F.np.concatenate([x, part(x)], axis=1)
        return x


def densely_connected_network(prepare: Prepare) -> Arrays:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1), Dense(3, 8))
        net.add(nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(16, 1), nn.AvgPool2D(2, 2))
        net.add(Dense(3, 8), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D())
        net.add(nn.Dense(10))
    return train(prepare(initialized(net)), lambda x, y, k: LOSS(net(x), y), batches=images)


class Detector(nn.HybridBlock):
    """TinySSD: anchors, and their classes and offsets at three scales."""

    SIZES = ((0.2, 0.272), (0.37, 0.447), (0.54, 0.619))

    def __init__(self, kinds: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kinds = kinds
        with self.name_scope():
            self.scales, self.classes, self.offsets = (nn.HybridSequential() for _ in range(3))
            for channels in (8, 16, 16):
                scale = nn.HybridSequential()
                for _ in range(2):
                    scale.add(nn.Conv2D(channels, 3, padding=1))
                    scale.add(nn.BatchNorm(in_channels=channels), nn.Activation("relu"))
                scale.add(nn.MaxPool2D(2))
                self.scales.add(scale)
                self.classes.add(nn.Conv2D(4 * (kinds + 1), 3, padding=1))
                self.offsets.add(nn.Conv2D(16, 3, padding=1))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        anchors: list[Any] = []
        classes: list[Any] = []
        offsets: list[Any] = []
        for k, sizes in enumerate(self.SIZES):
            x = self.scales[k](x)
            anchors.append(F.npx.multibox_prior(x, sizes=sizes, ratios=(1, 2, 0.5)))
            for flat, layer in ((classes, self.classes[k]), (offsets, self.offsets[k])):
                flat.append(F.npx.batch_flatten(F.np.transpose(layer(x), (0, 2, 3, 1))))
        joined = F.np.concatenate(classes, axis=1)
        return (
            F.np.concatenate(anchors, axis=1),
            F.npx.reshape(joined, (-2, -1, self.kinds + 1)),
            F.np.concatenate(offsets, axis=1),
        )


def detector(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Detector(prefix="net_")))
    distance = gluon.loss.L1Loss()

    def loss(x: Any, boxes: Any, k: int) -> Any:
        anchors, classes, offsets = net(x)
        targets = mx.npx.multibox_target(anchors, boxes, classes.transpose(0, 2, 1))
        wanted, mask, kinds = targets
        return LOSS(classes, kinds) + distance(offsets * mask, wanted * mask)

    def batches(k: int) -> tuple[Any, Any]:
        boxes = np.array([[[0, 0.1, 0.1, 0.6, 0.7]], [[0, 0.3, 0.2, 0.9, 0.8]]])
        return arrays(k, (2, 3, 32, 32))[0], mx.np.array(boxes, dtype="float32")

    return train(net, loss, batches=batches)


def masked_softmax(F: Any, scores: Any, lengths: Any) -> Any:
    """Normalize scores (batch, queries, keys) over as many keys as ``lengths`` (batch) says."""
    turned = F.np.transpose(scores, (0, 2, 1))
    masked = F.npx.sequence_mask(turned, lengths, True, value=-1e6, axis=1)
    return F.npx.softmax(F.np.transpose(masked, (0, 2, 1)), axis=-1)


class Translator(nn.HybridBlock):
    """A sequence to a sequence: GRUs, and additive attention at each step of the decoder."""

    def __init__(self, units: int = 16, steps: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = steps
        with self.name_scope():
            self.source, self.target = nn.Embedding(20, units), nn.Embedding(20, units)
            self.encoder = rnn.GRU(units, 2, dropout=0.1, input_size=units)
            self.decoder = rnn.GRU(units, input_size=2 * units)
            self.query = nn.Dense(units, use_bias=False, flatten=False)
            self.key = nn.Dense(units, use_bias=False, flatten=False)
            self.score = nn.Dense(1, use_bias=False, flatten=False)
            self.drop, self.top = nn.Dropout(0.1), nn.Dense(20, flatten=False)

    def hybrid_forward(self, F: Any, words: Any, lengths: Any, others: Any, state: Any) -> Any:
        encoded, states = self.encoder(F.np.transpose(self.source(words), (1, 0, 2)), [state])
        values = F.np.transpose(encoded, (1, 0, 2))
        keys = self.key(values)
        hidden = [F.npx.slice(states[0], begin=(1,), end=(2,))]
        inputs, outputs = self.target(others), []
        for k in range(self.steps):
            query = self.query(F.np.transpose(hidden[0], (1, 0, 2)))
            scores = F.np.squeeze(self.score(F.np.tanh(query + keys)), axis=-1)
            weights = masked_softmax(F, F.np.expand_dims(scores, axis=1), lengths)
            context = F.npx.batch_dot(self.drop(weights), values)
            word = F.npx.slice(inputs, begin=(None, k), end=(None, k + 1))
            both = F.np.transpose(F.np.concatenate([context, word], axis=-1), (1, 0, 2))
            out, hidden = self.decoder(both, hidden)
            outputs.append(self.top(out))
        return F.np.transpose(F.np.concatenate(outputs, axis=0), (1, 0, 2)), hidden[0]


def translator(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Translator(prefix="net_")))

    def loss(x: list[Any], labels: Any, k: int) -> Any:
        out, _ = net(*x)
        valid = mx.npx.sequence_mask(mx.np.ones_like(labels), x[1], True, axis=1)
        return LOSS(out, labels, mx.np.expand_dims(valid, -1))

    def batches(k: int) -> tuple[list[Any], Any]:
        words, others, labels = (classes(3 * k + i, 4, 5, top=20) for i in range(3))
        lengths = mx.np.array([5, 3, 2, 4], dtype="float32")
        return [words, lengths, others, mx.np.zeros((2, 4, 16))], labels

    return train(net, loss, batches=batches, optimizer="adam", learning_rate=0.01)


class Attention(nn.HybridBlock):
    """Multi-head attention and a network for each position, each added and normalized."""

    def __init__(self, units: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads, self.scale = heads, (units / heads) ** 0.5
        with self.name_scope():
            self.projections = nn.HybridSequential()
            for _ in range(4):
                self.projections.add(nn.Dense(units, flatten=False))
            self.wide = nn.Dense(2 * units, flatten=False, activation="relu")
            self.narrow = nn.Dense(units, flatten=False)
            self.first, self.second, self.drop = nn.LayerNorm(), nn.LayerNorm(), nn.Dropout(0.1)

    def split(self, F: Any, x: Any) -> Any:
        """(batch, words, units) -> (batch x heads, words, units of a head)."""
        x = F.npx.reshape(x, (-2, -2, self.heads, -1))
        return F.npx.reshape(F.np.transpose(x, (0, 2, 1, 3)), (-1, -2, -2), reverse=True)

    def hybrid_forward(self, F: Any, x: Any, lengths: Any) -> Any:
        query, key, value = (self.split(F, self.projections[k](x)) for k in range(3))
        scores = F.npx.batch_dot(query, key, transpose_b=True) / self.scale
        weights = masked_softmax(F, scores, F.np.repeat(lengths, repeats=self.heads, axis=0))
        mixed = F.npx.reshape(
            F.npx.batch_dot(self.drop(weights), value), (-1, self.heads, -2, -2), reverse=True
        )
        mixed = F.npx.reshape(F.np.transpose(mixed, (0, 2, 1, 3)), (-2, -2, -1))
        x = self.first(x + self.drop(self.projections[3](mixed)))
        return self.second(x + self.drop(self.narrow(self.wide(x))))


class Encoder(nn.HybridBlock):
    """BERT's encoder: words, their segments and learned positions."""

    def __init__(self, units: int = 16, count: int = 3, words: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.words, self.segments = nn.Embedding(30, units), nn.Embedding(2, units)
            self.positions = self.params.get("positions", shape=(1, words, units))
            self.layers, self.top = nn.HybridSequential(), nn.Dense(30, flatten=False)
            for _ in range(count):
                self.layers.add(Attention(units, 2))

    def hybrid_forward(
        self, F: Any, words: Any, segments: Any, lengths: Any, positions: Any
    ) -> Any:
        x = self.words(words) + self.segments(segments) + positions
        for layer in self.layers:
            x = layer(x, lengths)
        return self.top(x)


def encoder(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Encoder(prefix="net_")))

    def batches(k: int) -> tuple[list[Any], Any]:
        lengths = mx.np.array([8, 5, 6], dtype="float32")
        words, segments = classes(k, 3, 8, top=30), classes(k, 3, 8, top=2)
        return [words, segments, lengths], classes(k + 9, 3, 8, top=30)

    return train(net, lambda x, y, k: LOSS(net(*x), y).mean(), batches=batches, optimizer="adam")


class One(mx.init.Initializer):
    """Of a parameter without dimensions, which MXNet's own cannot do."""

    def _init_weight(self, _: str, array: Any) -> None:
        array[()] = 1


@mx.util.use_np  # it gives the class methods of its own, before any plan is made
class Scalars(nn.HybridBlock):
    """Inputs, a parameter and results without axes, and without elements.

    MKLDNN fails with the latter, with a plan and without, so that none of its operators is here.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.layers = layers("layers_", 16)
            self.scale = self.params.get("scale", shape=(), init=One())

    def hybrid_forward(self, F: Any, x: Any, bias: Any, none: Any, scale: Any) -> Any:
        none = F.np.tanh(none) * 2
        h = F.np.concatenate([self.layers(x) * scale + bias, none], axis=1)
        size = F.np.sqrt(F.np.mean(h * h) + 1)
        return h / size, F.np.exp(-size), none


def scalars(prepare: Prepare) -> Arrays:
    net = prepare(initialized(Scalars(prefix="net_")))
    bias = mx.np.array(0.5, dtype="float32")
    bias.attach_grad()
    kept: Arrays = {}

    def loss(x: Any, y: Any, k: int) -> Any:
        out, size, none = net(x, bias, mx.np.zeros((4, 0)))
        assert size.shape == () and none.shape == (4, 0)
        return LOSS(out, y).mean() + size * (k + 1) + none.sum()

    def before(k: int) -> None:
        if k:
            kept[f"bias {k}"] = bias.grad.asnumpy()

    def batches(k: int) -> tuple[Any, Any]:
        return arrays(k, (4, 20))[0], classes(k)

    return {**train(net, loss, batches=batches, before=before), **kept, "bias": bias.grad}
