"""Gluon blocks for tests, batches for them, and all that a training has left in them."""

from __future__ import annotations

from typing import Any, Callable, Dict

import memonger
import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from modules import seed

PATIENCE = 0.05
LAYERS = 5  # of `layers`, and one more
OPERATORS = 4 * LAYERS + 1

Arrays = Dict[str, Any]
Prepare = Callable[[Any], Any]
LOSS = mx.gluon.loss.SoftmaxCrossEntropyLoss()


def layers(prefix: str, out: int = 10, drop: float = 0.2) -> Any:
    """Build layers that are not initialized, to be a part of a block."""
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        for _ in range(LAYERS):
            net.add(nn.Dense(32), nn.BatchNorm(), nn.Activation("tanh"), nn.Dropout(drop))
        net.add(nn.Dense(out))
    return net


def initialized(net: Any) -> Any:
    net.initialize(mx.init.Xavier())
    return net


def mlp(prefix: str = "net_", out: int = 10, drop: float = 0.2) -> Any:
    return initialized(layers(prefix, out, drop))


class Residual(nn.HybridBlock):
    """Convolutions, whose weights MKLDNN lays out in blocks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Conv2D(16, 3, padding=1)
            self.blocks = nn.HybridSequential()
            for _ in range(4):
                block = nn.HybridSequential()
                block.add(nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(16, 3, padding=1))
                self.blocks.add(block)
            self.last = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(F.mean(x, axis=(2, 3)))


class TwoInputs(nn.HybridBlock):
    """Two inputs, and outputs within a list."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.one, self.other = layers("one_", 16), layers("other_", 16)
            self.top = layers("top_")

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:
        left, right = self.one(x), self.other(y)
        return self.top(left + right), [left * 2, right, F.identity(x)]


def batch(number: int, size: int = 16, features: int = 20) -> tuple[Any, Any]:
    random = np.random.RandomState(number)
    return mx.nd.array(random.randn(size, features)), mx.nd.array(random.randint(0, 10, size))


def images(number: int, size: int = 8) -> tuple[Any, Any]:
    random = np.random.RandomState(number)
    x = mx.nd.array(random.randn(size, 3, 12, 12))
    return x, mx.nd.array(random.randint(0, 10, size))


def trainer(
    *nets: Any, optimizer: str = "sgd", store: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Make a trainer with the options of the optimizer, and those of its kvstore."""
    parameters = mx.gluon.ParameterDict()
    for net in nets:
        parameters.update(net.collect_params())
    usual = {"learning_rate": 0.1, "momentum": 0.9} if optimizer == "sgd" else {}
    return mx.gluon.Trainer(parameters, optimizer, {**usual, **options}, **(store or {}))


def step(net: Any, training: Any, x: Any, y: Any) -> Any:
    with mx.autograd.record():
        loss = LOSS(net(x), y)
    loss.backward()
    training.step(x.shape[0])
    return loss


def left_in(*nets: Any) -> Arrays:
    """Return parameters, gradients and running statistics on all devices."""
    mx.nd.waitall()
    arrays = {}
    for net in nets:
        for name, parameter in net.collect_params().items():
            for ctx in parameter.list_ctx():
                arrays[f"{name} {ctx}"] = parameter.data(ctx).asnumpy()
                if parameter.grad_req != "null":
                    gradient = parameter.grad(ctx)
                    arrays[f"{name} {ctx} grad"] = gradient.asnumpy()
                    if gradient.stype == "row_sparse":
                        arrays[f"{name} {ctx} rows"] = gradient.indices.asnumpy()
    return arrays


def different(one: Arrays, other: Arrays) -> list[str]:
    """Return names of the arrays that differ in a bit."""
    assert one and one.keys() == other.keys()
    return [n for n in one if np.asarray(one[n]).tobytes() != np.asarray(other[n]).tobytes()]


def planned(net: Any, *shapes: Any, **options: Any) -> Any:
    """Return a block with a plan from a short search: marks, where no options say otherwise.

    The plan is made at the first call, which is here where shapes of the inputs are given.
    """
    if not options.keys() & {"how", "budget"}:
        options["how"] = "marks"
    memonger.gluon.plan(net, patience=PATIENCE, **options)
    if shapes:
        types = [parameter.dtype for parameter in net.collect_params().values()]
        with mx.autograd.record():
            net(*[mx.nd.ones(shape, dtype=types[0]) for shape in shapes])
    return net


def taught(net: Any, steps: int = 3) -> Any:
    """Train some steps from the same seed; return what is left."""
    seed()
    training = trainer(net)
    for k in range(steps):
        step(net, training, *batch(k))
    return left_in(net)
