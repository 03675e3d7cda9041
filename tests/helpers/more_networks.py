"""Networks beside those of the examples, each of what makes a memory plan hard."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Tuple

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
from memonger.graph import marks
from memonger.graph.forward import KeptCopy
from memonger.support.versions import json_of

import networks
from planned import forward

S = mx.sym
FOLDER = Path(__file__).parents[1] / "golden"
#: Recorded with the original.
GOLDEN = ["resnet-2-2-2-2", "resnet-3-4-6-3", "resnet-3-24-36-3", "lstm-4x16", "lstm-4x64"]

Network = Tuple[Any, Dict[str, Tuple[int, ...]]]


def load(name: str) -> tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]:
    record = json.loads((FOLDER / (name + ".json")).read_text())
    with gzip.open(str(FOLDER / (name + "-symbol.json.gz")), "rt") as f:
        symbol = mx.sym.load_json(f.read())
    return symbol, {k: tuple(v) for k, v in record["shapes"].items()}, record


def many_uses(uses: int = 10, hidden: int = 1024) -> Network:
    """Tensors that so many operators read that their gradients are summed in a chain."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=hidden, name="first")
    for k in range(3):
        parts = [
            S.Activation(S.FullyConnected(x, num_hidden=hidden, name=f"part{k}_{i}"), "tanh")
            for i in range(uses)
        ]
        x = S.Activation(S.add_n(*parts), act_type="relu") + x
    return S.LinearRegressionOutput(x, name="out"), {"data": (512, hidden)}


def equal_gradients(layers: int = 8, hidden: int = 1024) -> Network:
    """Parameters whose gradients would be one array."""
    x = S.Variable("data")
    for i in range(layers):
        x = S.FullyConnected(x, num_hidden=hidden, name=f"fc{i}") + S.Variable(f"one{i}")
        x = S.Activation(x + S.Variable(f"other{i}"), act_type="sigmoid")
    return S.LinearRegressionOutput(x, name="out"), {"data": (512, hidden)}


def shared_weights(times: int = 12, hidden: int = 512) -> Network:
    """The same weight and bias in every layer."""
    x, weight, bias = S.Variable("data"), S.Variable("weight"), S.Variable("bias")
    for i in range(times):
        x = S.FullyConnected(x, weight, bias, num_hidden=hidden, name=f"fc{i}")
        x = S.Activation(x, act_type="sigmoid", name=f"sigmoid{i}") + x
    return S.LinearRegressionOutput(x, name="out"), {"data": (1024, hidden)}


def casts(hidden: int = 1024) -> Network:
    """Casts to a type of the same size and back: in place only if nobody else reads the input."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=hidden, name="first")
    for i in range(4):
        whole = S.cast(S.cast(x, dtype="int32"), dtype="float32")
        x = S.Activation(S.FullyConnected(x, num_hidden=hidden, name=f"fc{i}"), "tanh") + whole
    return S.LinearRegressionOutput(x, name="out"), {"data": (512, hidden)}


def head_gradients(filters: int = 32) -> Network:
    """Outputs that are no losses: their gradients are given to ``backward``."""
    x = S.Convolution(S.Variable("data"), num_filter=filters, kernel=(3, 3), pad=(1, 1))
    heads = []
    for _ in range(4):
        x = S.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1))
        x = S.Activation(S.BatchNorm(x), act_type="relu")
        heads.append(S.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max"))
    return S.Group([*heads, x]), {"data": (8, 3, 64, 64)}


def several_outputs(outputs: str) -> Network:
    """What ``outputs`` says: of one result ``h``, its input ``x``, a weight ``w``, and twins."""
    with mx.name.NameManager():
        data = x = S.Variable("data")
        weight = S.Variable("weight", shape=(6, 6))
        for _ in range(4):
            x = S.Activation(S.FullyConnected(x, weight, num_hidden=6), act_type="tanh")
        a, b = S.sin(x), S.sin(x)  # MXNet merges them, but for where gradients start
        known = {"h": x, "x": data, "w": weight, "a": a, "b": b, "ab": a * b}
        return S.Group([known[name] for name in outputs.split()]), {"data": (4, 6)}


def unrolled(steps: int, hidden: int = 16, fused: bool = False) -> Any:
    """Cells of so many steps, which share their weights with those of other lengths."""
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


def kept_copies(network: Network, every: int) -> Network:
    """An identity after every so many operators, of which it alone is read."""
    symbol, shapes = network
    graph = forward(symbol, shapes)
    heads = {a for a, _ in graph.heads}
    operators = [i for i in graph.operators if len(graph.output_names[i]) == 1 and i not in heads]
    copied = marks.apply(
        symbol, np.zeros(len(graph.nodes), np.bool_), (), map(KeptCopy, operators[::every])
    )
    # As if the user had written it: without marks and the record of a plan.
    text = json_of(copied)
    for attribute in (marks.RECORD, marks.FORCE):
        text = text.replace(attribute, "__ours__")
    return mx.sym.load_json(text), shapes


#: Bound so small that a step runs in no time, with tensors of many sizes.
TINY: dict[str, Callable[[], Network]] = {
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
    "unet, kept copies": lambda: kept_copies(networks.unet(batch=1, image=32, base=2, depth=2), 2),
    "many uses, kept copies": lambda: kept_copies(many_uses(hidden=6), 2),
}

#: Outputs that are one, are merged, are read within the network, or are variables.
OUTPUTS: dict[str, Callable[[], Network]] = {
    outputs: functools.partial(several_outputs, outputs)
    for outputs in ("h h", "h h ab", "a b", "b ab a", "ab b h", "x h x", "w h w")
}
