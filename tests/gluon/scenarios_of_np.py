"""Scenarios of networks of ``mx.np``, as "Dive into Deep Learning" builds them, small.

They are for processes of their own, in which ``mx.npx.set_np()`` holds.
"""

from __future__ import annotations

from typing import Any

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

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


def masked_softmax(F: Any, scores: Any, lengths: Any) -> Any:
    """Normalize scores (batch, queries, keys) over as many keys as ``lengths`` (batch) says."""
    turned = F.np.transpose(scores, (0, 2, 1))
    masked = F.npx.sequence_mask(turned, lengths, True, value=-1e6, axis=1)
    return F.npx.softmax(F.np.transpose(masked, (0, 2, 1)), axis=-1)


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
