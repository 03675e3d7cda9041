"""All networks of the tests by name, beside the builders in ``examples/networks``."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Sequence

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
from memonger.graph import marks
from memonger.graph.forward import SavedIdentity
from memonger.support.symbols import json_of

import networks
import opaque_networks
from networks.mixed import Network, classified, fully_gate, squeezed
from opaque_networks import OPERATORS
from planned import forward

S = mx.sym
FOLDER = Path(__file__).parents[1] / "golden"
#: Recorded with the original.
GOLDEN = ["resnet-2-2-2-2", "resnet-3-4-6-3", "resnet-3-24-36-3", "lstm-4x16", "lstm-4x64"]

Builders = Dict[str, Callable[[], Network]]


def load(name: str) -> tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]:
    record = json.loads((FOLDER / (name + ".json")).read_text())
    with gzip.open(str(FOLDER / (name + "-symbol.json.gz")), "rt") as f:
        symbol = mx.sym.load_json(f.read())
    return symbol, {k: tuple(v) for k, v in record["shapes"].items()}, record


def load_network(name: str) -> Network:
    """Load a recorded network without its record."""
    return load(name)[:2]


def many_uses(uses: int = 10, hidden: int = 1024) -> Network:
    """Build tensors that so many operators read that their gradients are summed in a chain."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=hidden, name="first")
    for k in range(3):
        parts = [
            S.Activation(S.FullyConnected(x, num_hidden=hidden, name=f"part{k}_{i}"), "tanh")
            for i in range(uses)
        ]
        x = S.Activation(S.add_n(*parts), act_type="relu") + x
    return S.LinearRegressionOutput(x, name="out"), {"data": (512, hidden)}


def equal_gradients(layers: int = 8, hidden: int = 1024) -> Network:
    """Build parameters whose gradients would be one array."""
    x = S.Variable("data")
    for i in range(layers):
        x = S.FullyConnected(x, num_hidden=hidden, name=f"fc{i}") + S.Variable(f"one{i}")
        x = S.Activation(x + S.Variable(f"other{i}"), act_type="sigmoid")
    return S.LinearRegressionOutput(x, name="out"), {"data": (512, hidden)}


def shared_weights(times: int = 12, hidden: int = 512) -> Network:
    """Build layers with the same weight and bias."""
    x, weight, bias = S.Variable("data"), S.Variable("weight"), S.Variable("bias")
    for i in range(times):
        x = S.FullyConnected(x, weight, bias, num_hidden=hidden, name=f"fc{i}")
        x = S.Activation(x, act_type="sigmoid", name=f"sigmoid{i}") + x
    return S.LinearRegressionOutput(x, name="out"), {"data": (1024, hidden)}


def casts(hidden: int = 1024) -> Network:
    """Build casts there and back, in place only if nobody else reads the input."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=hidden, name="first")
    for i in range(4):
        whole = S.cast(S.cast(x, dtype="int32"), dtype="float32")
        x = S.Activation(S.FullyConnected(x, num_hidden=hidden, name=f"fc{i}"), "tanh") + whole
    return S.LinearRegressionOutput(x, name="out"), {"data": (512, hidden)}


def convolutions(depth: int, filters: int = 4, norm: bool = True, classes: int = 3) -> Any:
    """Build a chain of convolutions with BatchNorms or without: conv0, bn0, relu0, ... fc."""
    x = S.Variable("data")
    for k in range(depth):
        x = S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=filters, name=f"conv{k}")
        x = S.BatchNorm(x, name=f"bn{k}") if norm else x
        x = S.Activation(x, act_type="relu", name=f"relu{k}")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=classes, name="fc"), name="softmax")


def head_gradients(filters: int = 32) -> Network:
    """Build outputs that are no losses: their gradients are given to ``backward``."""
    x = S.Convolution(S.Variable("data"), num_filter=filters, kernel=(3, 3), pad=(1, 1))
    heads = []
    for _ in range(4):
        x = S.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1))
        x = S.Activation(S.BatchNorm(x), act_type="relu")
        heads.append(S.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max"))
    return S.Group([*heads, x]), {"data": (8, 3, 64, 64)}


def several_outputs(outputs: str) -> Network:
    """Build these outputs: a result ``h``, its input ``x``, a weight ``w``, and twins."""
    with mx.name.NameManager():
        data = x = S.Variable("data")
        weight = S.Variable("weight", shape=(6, 6))
        for _ in range(4):
            x = S.Activation(S.FullyConnected(x, weight, num_hidden=6), act_type="tanh")
        a, b = S.sin(x), S.sin(x)  # MXNet merges them, but for where gradients start
        symbols = {"h": x, "x": data, "w": weight, "a": a, "b": b, "ab": a * b}
        return S.Group([symbols[name] for name in outputs.split()]), {"data": (4, 6)}


def unrolled(steps: int, hidden: int = 16, fused: bool = False) -> Any:
    """Build cells of so many steps, which share their weights with those of other lengths."""
    with mx.name.NameManager():
        x = S.Embedding(S.Variable("data"), input_dim=20, output_dim=hidden, name="embed")
        if fused:
            cell = mx.rnn.FusedRNNCell(hidden, 2, "gru", prefix="fused_", get_next_state=True)
        else:
            cell = mx.rnn.SequentialRNNCell()
            cell.add(mx.rnn.LSTMCell(hidden, prefix="lstm_"))
            cell.add(mx.rnn.DropoutCell(0.1))
            cell.add(mx.rnn.GRUCell(hidden, prefix="gru_"))
        x, _ = cell.unroll(steps, inputs=x, merge_outputs=True)
        x = S.Reshape(x, shape=(-1, hidden))
        for i in range(3 if fused else 0):  # it is kept, so more must be there to choose among
            x = S.Activation(S.FullyConnected(x, num_hidden=hidden, name=f"fc{i}"), "tanh")
        x = S.FullyConnected(x, num_hidden=20, name="decode")
        label = S.Reshape(S.Variable("softmax_label"), shape=(-1,))
        return S.SoftmaxOutput(x, label, name="softmax")


def rnn_cells(fused: bool, steps: int = 12, hidden: int = 256) -> Network:
    return unrolled(steps, hidden, fused), {"data": (64, steps), "softmax_label": (64, steps)}


class Recurrent(NamedTuple):
    """A network with fused recurrent layers, between what can be recomputed."""

    mode: str
    bidirectional: bool = False
    stacked: int = 1  # layers of each RNN
    residual: bool = False
    dropout: bool = False
    inputs: int = 200
    steps: int = 120
    batch: int = 32
    units: int = 200
    blocks: int = 2

    def build(self) -> Network:
        x = S.Variable("data")
        names = ("state", "cell") if self.mode == "lstm" else ("state",)
        for k in range(self.blocks):
            y = S.RNN(
                x,
                S.Variable(f"parameters{k}"),
                *(self._state(f"{name}{k}") for name in names),
                mode=self.mode,
                state_size=self.units,
                num_layers=self.stacked,
                bidirectional=self.bidirectional,
                name=f"rnn{k}",
            )
            for kind in ("sigmoid", "tanh", "softrelu"):
                y = S.Activation(S.FullyConnected(y, num_hidden=self.units, flatten=False), kind)
            if self.residual and (k or self.inputs == self.units):
                y = y + x
            x = S.Dropout(y, p=0.2) if self.dropout else y
        x = S.FullyConnected(S.reshape(x, shape=(-1, self.units)), num_hidden=10)
        label = S.reshape(S.Variable("softmax_label"), shape=(-1,))
        rows = (self.steps, self.batch)
        shapes = {"data": (*rows, self.inputs), "softmax_label": rows}
        return S.SoftmaxOutput(x, label, name="softmax"), shapes

    def small(self) -> Recurrent:
        return self._replace(steps=2, batch=2, units=16, inputs=16)

    def _state(self, name: str) -> Any:
        layers = self.stacked * (2 if self.bidirectional else 1)
        return S.Variable(name, shape=(layers, self.batch, self.units))


def save_identities(network: Network, every: int) -> Network:
    """Put an identity after every so many operators, of which it alone is read."""
    symbol, shapes = network
    graph = forward(symbol, shapes)
    heads = {a for a, _ in graph.heads}
    operators = [i for i in graph.operators if len(graph.output_names[i]) == 1 and i not in heads]
    copied = marks.write(
        symbol, np.zeros(len(graph.nodes), np.bool_), (), map(SavedIdentity, operators[::every])
    )
    # As if the user had written it: without marks and the record of a plan.
    text = json_of(copied)
    for attribute in (marks.RECORD, marks.FORCE):
        text = text.replace(attribute, "__ours__")
    return mx.sym.load_json(text), shapes


#: Bound so small that a step runs in no time, with tensors of many sizes.
TINY: Builders = {
    "resnet": lambda: networks.resnet((1, 2, 1), batch=2, image=32, filters=4, classes=7),
    "lstm": lambda: networks.lstm(layers=2, steps=9, batch=3, hidden=8, labels=11, input=5),
    "lstm, one softmax": lambda: networks.lstm(
        layers=2, steps=5, batch=3, hidden=8, labels=11, concat_decode=True, dropout=0.3
    ),
    "unet": lambda: networks.unet(batch=1, image=32, base=2, depth=3),
    "transformer": lambda: networks.transformer(
        layers=2, batch=2, steps=6, hidden=8, heads=2, vocabulary=31, dropout=0.1
    ),
    "googlenet": lambda: networks.googlenet(batch=1, image=64, classes=5, divide=16),
    "two heads": lambda: networks.two_heads(blocks=2, filters=4, batch=2, image=8),
    "embedding": lambda: networks.embedding_net(batch=3, steps=9, vocabulary=50, embed=6),
    "highway": lambda: networks.highway(layers=3, hidden=6, batch=4, input=9),
    "many uses": lambda: many_uses(hidden=6),
    "shared weights": lambda: shared_weights(hidden=6),
    "casts": lambda: casts(hidden=6),
    "head gradients": lambda: head_gradients(filters=3),
    "unet, identities": lambda: save_identities(
        networks.unet(batch=1, image=32, base=2, depth=2), 2
    ),
    "many uses, identities": lambda: save_identities(many_uses(hidden=6), 2),
    "cells": lambda: rnn_cells(False, steps=5, hidden=8),
    "fused cells": lambda: rnn_cells(True, steps=5, hidden=8),
}

#: What finds objects: operators whose gradient autograd computes, one of them written in Python.
DETECTION: Builders = {
    "rcnn": lambda: networks.rcnn(
        image=64, classes=3, objects=4, filters=4, blocks=3, regions=8, hidden=16
    ),
    "ssd": lambda: networks.detection(batch=1, image=64, classes=3, objects=2),
}

#: Operators written in Python, or with a loop inside.
OPAQUE: dict[str, Callable[..., Network]] = {
    **{name: functools.partial(opaque_networks.within, op) for name, op in OPERATORS.items()},
    "Custom loss": opaque_networks.own_loss,
}

#: Outputs that are one, are merged, are read within the network, or are variables.
OUTPUTS: Builders = {
    outputs: functools.partial(several_outputs, outputs)
    for outputs in ("h h", "h h ab", "a b", "b ab a", "ab b h", "x h x", "w h w")
}

#: Of the sizes at which they are trained.
LARGE: Builders = {
    **{name: functools.partial(load_network, name) for name in GOLDEN},
    **{
        name: functools.partial(networks.model_zoo, name)
        for name in ("resnet50_v1", "vgg19", "squeezenet1.1", "densenet121")
    },
    **{
        name: getattr(networks, name)
        for name in (
            *("resnet_v2", "mobilenet_v2", "inception_v3", "googlenet", "unet", "highway"),
            *("two_heads", "embedding_net", "normalised_input", "chain"),
        )
    },
    "alexnet": lambda: networks.model_zoo("alexnet", 256),
    "lstm": lambda: networks.lstm(layers=2, steps=40, use_loss=False),
    "lstm, one softmax": lambda: networks.lstm(
        steps=20, concat_decode=True, use_loss=False, dropout=0.3
    ),
    "transformer": lambda: networks.transformer(dropout=0.1),
    "detection": lambda: networks.detection(custom=False),
    "mx.rnn": lambda: rnn_cells(False),
    "RNN": lambda: rnn_cells(True),
    "many uses": many_uses,
    "just enough uses": lambda: many_uses(7),  # for a chain: the sum, and 7 more
    "equal gradients": equal_gradients,
    "shared weights": shared_weights,
    "casts": casts,
    "head gradients": head_gradients,
    **{
        f"{name}, identities": lambda name=name, every=every: save_identities(LARGE[name](), every)  # type: ignore[misc]
        for name, every in (("mobilenet_v2", 3), ("densenet121", 4), ("lstm", 2), ("unet", 1))
    },
}


# -- drawn networks: convolutions mixed with operators that know no blocks of MKLDNN ------------
# (``networks.mixed`` of the examples has the kinds that people train)

#: Families of blocks: what is made of an image x with n channels, an even number; after the bar
#: that is y. The names are those of mx.sym and of `_Drawing`.
_FAMILIES = """
gated: conv(x, n) | broadcast_mul(y, gate(conv(squeezed(y), n)))
gated_fully: conv(x, n) | broadcast_mul(y, fully_gate(Flatten(squeezed(y)), n))
shifted: conv(x, n, 3) | broadcast_add(y, conv(squeezed(y), n))
split: SliceChannel(conv(x, n), num_outputs=2, axis=1)
    | Concat(activation(conv(y[0], n // 2, 3)), y[1], dim=1)
divided: conv(x, n, 3) | broadcast_div(y, sqrt(sum(square(y), axis=1, keepdims=True) + 1e-3))
shuffled: turned(reshape(conv(x, n), shape=(0, -4, 2, -1, -2)))
    | conv(activation(reshape(y, shape=(0, -3, -2))), n, 3)
padded: Pad(conv(x, n, 3), mode='constant', pad_width=(0, 0, 0, 0, 1, 1, 1, 1), constant_value=0)
    | slice_axis(slice_axis(y, axis=2, begin=1, end=-1), axis=3, begin=1, end=-1)
hard_swish: norm(conv(x, n, 3)) | y * clip(y + 3, 0, 6) / 6
product: tanh(conv(x, n, 3)) | y * sigmoid(conv(x, n))
instance_norm: conv(x, n, 3) | InstanceNorm(y)
up: Pooling(conv(x, n, 3), kernel=(2, 2), stride=(2, 2), pool_type='max')
    | UpSampling(activation(y), scale=2, sample_type='nearest')
plain: x | conv(y, n, 3)
joined: activation(norm(conv(x, n))) | conv(Concat(x, y, dim=1), n)
pooled: x | Pooling(y, kernel=(3, 3), pad=(1, 1), pool_type='max' if one_in(2) else 'avg')
dropped: activation(x) | Dropout(y, p=0.2)
transposed: activation(x) | Deconvolution(y, num_filter=n, kernel=(3, 3), pad=(1, 1))
grouped: x | conv(y, n, 3, num_group=2)
"""
_TEXTS = dict(t.split(": ", 1) for t in _FAMILIES.replace("\n   ", "").strip().splitlines())
FAMILIES = list(_TEXTS)[:11]
#: Those for images of any size, in which MXNet trains and scores in turns.
ANY_SIZE = (
    "gated gated_fully shifted hard_swish product plain joined pooled dropped transposed grouped"
).split()


class _Drawing:
    """Draws parts of a residual network."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def one_in(self, n: int) -> bool:
        return self.random.randint(n) == 0

    def conv(self, x: Any, filters: int, kernel: int = 1, **more: Any) -> Any:
        size = {"kernel": (kernel, kernel), "pad": (kernel // 2, kernel // 2)}
        return S.Convolution(x, num_filter=filters, no_bias=self.one_in(2), **size, **more)

    def activation(self, x: Any) -> Any:
        kind = self.random.randint(5)
        if kind == 0:
            return S.LeakyReLU(x, act_type="leaky", slope=0.1)
        if kind == 3:
            return S.LeakyReLU(x, act_type="prelu")
        return S.clip(x, 0, 6) if kind == 1 else S.Activation(x, "tanh" if kind == 2 else "relu")

    def norm(self, x: Any) -> Any:
        return x if self.one_in(4) else S.BatchNorm(x, fix_gamma=False)

    def gate(self, x: Any) -> Any:
        return S.Activation(x, "sigmoid") if self.one_in(2) else S.clip(x + 0.5, 0, 1)

    def turned(self, x: Any) -> Any:
        return S.swapaxes(x, 1, 2) if self.one_in(2) else S.transpose(x, axes=(0, 2, 1, 3, 4))

    def block(self, family: str, x: Any, n: int) -> Any:
        own = {name: getattr(self, name) for name in vars(_Drawing)}
        names = {**vars(S), **own, "squeezed": squeezed, "fully_gate": fully_gate, "x": x, "n": n}
        first, last = _TEXTS[family].split(" | ")
        return eval(last, {**names, "y": eval(first, names)})

    def network(self, names: Sequence[str]) -> Network:
        random = self.random
        filters = int(random.choice([6, 8, 16, 24, 32, 48, 64]))
        batch, side = int(random.choice([2, 3, 4])), int(random.choice([6, 8, 12]))
        blocks = random.randint(2, 6)
        chosen = [names[k] for k in random.choice(len(names), random.randint(1, 3), False)]
        x = self.conv(S.var("data"), filters, 3)
        for _ in range(blocks):
            y = self.norm(x)
            if self.one_in(2):
                y = self.activation(y)
            y = self.block(chosen[random.randint(len(chosen))], y, filters)
            if self.one_in(3):
                y = self.activation(self.norm(y))
            joined = random.randint(8)
            x = y if joined == 0 else S.broadcast_add(x, y) if joined == 1 else x + y
        return classified(self.activation(self.norm(x))), {"data": (batch, 3, side, side)}


def drawn(seed: int, families: Sequence[str] = FAMILIES) -> Network:
    """Build a residual network of one or two of these families of blocks."""
    with mx.name.NameManager():
        return _Drawing(seed).network(families)
