"""Random small networks for hypothesis: ``networks()`` draws ``(symbol, shapes)``.

What is drawn is a `Recipe`: plain data, a list of steps each of which makes a tensor of earlier
ones. `build` carries it out, always to the same symbol. Examples shrink to few steps, each reading
the one before it. Where hypothesis prints a failing example as mere symbols, draw ``recipes()``.

The networks run on the CPU in an instant, and every head is a loss or has no gradient, so that
``executor.backward()`` needs no arguments. Arguments of at most 1 keep all numbers finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Tuple

import memonger  # noqa: F401  makes MXNet importable on newer NumPy
import mxnet as mx
import numpy as np
from hypothesis import strategies as st

S = mx.sym
Shape = Tuple[int, ...]

# Tensors with more numbers an example are brought back to `Recipe.width`.
LARGEST = 64
VOCABULARY = 5

# Every operation and head reads an operand at most twice, so a tensor has at most 6 gradients. From
# 8 on MXNet adds them one by one, with control dependencies that are cyclic for some networks, for
# instance x with 6 more readers in (x + u) * sigmoid(x): bind fails with a check on node2index_.
# `_many_uses` has 8 and more where it cannot happen.
READERS = 3


class Step(NamedTuple):
    """Apply `operation` to the tensors made `source` and `other` steps ago.

    `variant` chooses among the operation's uses, `mark` is the result's ``mirror_stage``.
    """

    operation: str
    source: int = 0
    other: int = 0
    variant: int = 0
    mark: str | None = None


class Head(NamedTuple):
    """A loss on the tensor made `source` steps ago."""

    loss: str
    source: int = 0


@dataclass(frozen=True)
class Recipe:
    """A network as data. `data` is the kind of its input: rows, images or tokens."""

    data: str
    batch: int
    width: int
    steps: tuple[Step, ...]
    heads: tuple[Head, ...]


class Tensor(NamedTuple):
    """A symbol of one output and its shape, the batch first."""

    symbol: Any
    shape: Shape


class Network:
    """What the operations share: the recipe's sizes, and variables that are used more than once."""

    def __init__(self, recipe: Recipe) -> None:
        self.rows = (recipe.batch, recipe.width)
        self.shapes: dict[str, Shape] = {}
        self._variables: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        self._readers: list[int] = []

    def add(self, tensor: Tensor) -> None:
        """Let later steps read the tensor."""
        self._tensors.append(tensor)
        self._readers.append(0)

    def pick(self, ago: int, trained: bool = True) -> Tensor:
        """Return the tensor made that many steps ago, among those not yet read `READERS` times.

        If `trained`, it is not the input itself: of that alone nothing is trained.
        """
        first = 1 if trained else 0
        free = [i for i in range(first, len(self._readers)) if self._readers[i] < READERS]
        chosen = free[-1 - ago % len(free)]
        self._readers[chosen] += 1
        return self._tensors[chosen]

    def variable(self, name: str, shape: Shape | None = None) -> Any:
        """Return the variable of that name, always the same; data and labels tell their shape."""
        if shape is not None:
            self.shapes[name] = shape
        return self._variables.setdefault(name, S.Variable(name))


Operation = Callable[[Network, Tensor, Tensor, int], Tensor]

# -- shapes --------------------------------------------------------------------------------------


def _numbers(shape: Shape) -> int:
    """Count the numbers of one example."""
    return int(np.prod(shape[1:]))


def _reshaped(a: Tensor, shape: Shape) -> Tensor:
    return a if a.shape == shape else Tensor(S.reshape(a.symbol, shape), shape)


def _fitted(a: Tensor, shape: Shape) -> Tensor:
    """Return `a` where it has the shape, else fully connect it to that."""
    if a.shape == shape:
        return a
    count = _numbers(shape)
    y = S.FullyConnected(a.symbol, num_hidden=count)
    return _reshaped(Tensor(y, (shape[0], count)), shape)


def _image(a: Tensor) -> Tensor:
    """Give `a` four axes."""
    return _reshaped(a, (*a.shape, 1, 1)[:4])


def _even(a: Tensor) -> Tensor:
    """Give `a` an even second axis."""
    return _fitted(a, (a.shape[0], a.shape[1] + a.shape[1] % 2, *a.shape[2:]))


# -- operations ----------------------------------------------------------------------------------


def _unary(*functions: Callable[[Any], Any]) -> Operation:
    """Make an operation of elementwise functions, chosen by the variant."""

    def operation(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
        return Tensor(functions[variant % len(functions)](a.symbol), a.shape)

    return operation


def _binary(*functions: Callable[[Any, Any], Any]) -> Operation:
    """Make an operation of elementwise functions of two tensors; the second is made to fit."""

    def operation(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
        function = functions[variant % len(functions)]
        return Tensor(function(a.symbol, _fitted(b, a.shape).symbol), a.shape)

    return operation


def _fully_connected(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    return Tensor(S.FullyConnected(a.symbol, num_hidden=net.rows[1]), net.rows)


def _shared(net: Network, a: Tensor) -> Tensor:
    """Fully connect with the one weight that all such steps share."""
    y = S.FullyConnected(
        _fitted(a, net.rows).symbol,
        weight=net.variable("shared_weight"),
        bias=net.variable("shared_bias"),
        num_hidden=net.rows[1],
    )
    return Tensor(y, net.rows)


def _shared_weights(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    for _ in range(1 + variant % 3):
        a = _unary(S.tanh)(net, _shared(net, a), a, 0)
    return a


def _convolution(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    a = _image(a)
    batch, _, height, width = a.shape
    stride = 1 + variant % 2
    filters = 2 + 2 * (variant // 2 % 2)
    y = S.Convolution(
        a.symbol, kernel=(3, 3), pad=(1, 1), stride=(stride, stride), num_filter=filters
    )
    return Tensor(y, (batch, filters, (height - 1) // stride + 1, (width - 1) // stride + 1))


def _pooling(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    a = _image(a)
    batch, channels, height, width = a.shape
    kernel = (min(2, height), min(2, width))
    pool_type = ("max", "avg")[variant % 2]
    if variant // 2 % 2:
        y = S.Pooling(a.symbol, kernel=kernel, global_pool=True, pool_type=pool_type)
        return Tensor(y, (batch, channels, 1, 1))
    y = S.Pooling(a.symbol, kernel=kernel, stride=kernel, pool_type=pool_type)
    return Tensor(y, (batch, channels, height // kernel[0], width // kernel[1]))


def _normalisation(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    a = _image(a) if variant > 1 else a
    y = (
        lambda x: S.BatchNorm(x, fix_gamma=False),
        lambda x: S.LayerNorm(x),
        lambda x: S.GroupNorm(x, num_groups=1 + (a.shape[1] + 1) % 2),
        lambda x: S.BatchNorm(x),
    )[variant](a.symbol)
    return Tensor(y, a.shape)


def _residual(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    y = _normalisation(net, a, b, 0)
    y = Tensor(S.Activation(y.symbol, act_type="relu"), y.shape)
    y = (_convolution, _fully_connected)[variant % 2](net, y, b, 0)
    return Tensor(a.symbol + _fitted(y, a.shape).symbol, a.shape)


def _concat(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    b = _fitted(b, a.shape)
    shape = (a.shape[0], 2 * a.shape[1], *a.shape[2:])
    return Tensor(S.Concat(a.symbol, b.symbol, dim=1), shape)


def _slices(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    """Halve the second axis; read one half, the other, or both."""
    a = _even(a)
    first, second = S.SliceChannel(a.symbol, num_outputs=2, axis=1)
    y = (second, first, first + second, S.sigmoid(first) * second)[variant]
    return Tensor(y, (a.shape[0], a.shape[1] // 2, *a.shape[2:]))


def _many_uses(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    """Read a tensor often: MXNet adds up to 7 gradients at once, and 8 or more one by one."""
    x = a.symbol * 0.5
    y = S.add_n(*(S.tanh(x * (i + 0.5)) for i in range((2, 7, 8, 10)[variant])))
    return Tensor(y, a.shape)


def _twins(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    """Build the same expression twice, for MXNet's common sub-expression elimination."""
    other = _fitted(b, a.shape).symbol if variant == 3 else None
    first, second = (
        (
            lambda: Tensor(S.tanh(a.symbol), a.shape),
            lambda: Tensor(S.sigmoid(S.square(S.tanh(a.symbol) * 1.5) + 0.1), a.shape),
            lambda: _shared(net, a),
            lambda: Tensor(S.Concat(S.tanh(a.symbol), S.sigmoid(other), dim=0), a.shape),
        )[variant]()
        for _ in range(2)
    )
    y = first.symbol * S.sigmoid(second.symbol)
    if variant == 3:
        y = S.slice_axis(y, axis=0, begin=0, end=a.shape[0])
    return Tensor(y, first.shape)


def _dropout(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    """Drop out; twice the same way, which must not be merged, in the second half of variants."""
    y = S.Dropout(a.symbol, p=0.3 + 0.2 * (variant % 2))
    if variant > 1:
        y = y + S.Dropout(a.symbol, p=0.3 + 0.2 * (variant % 2))
    return Tensor(y, a.shape)


def _transpose(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    a = _image(a)
    batch, channels, height, width = a.shape
    if variant % 2:
        return Tensor(S.SwapAxis(a.symbol, dim1=1, dim2=2), (batch, height, channels, width))
    return Tensor(S.transpose(a.symbol, (0, 2, 3, 1)), (batch, height, width, channels))


def _reduction(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    a = _image(a)
    reduce = (S.mean, S.sum, S.max, S.norm)[variant]
    # The norm has no gradient at 0.
    x = a.symbol if variant < 3 else S.square(S.tanh(a.symbol)) + 0.1
    return Tensor(reduce(x, axis=(2, 3)), a.shape[:2])


def _attention(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    a = _image(a)
    batch, channels, height, width = a.shape
    x = S.reshape(S.tanh(a.symbol), (batch, channels, height * width))
    scores = S.softmax(S.batch_dot(x, x, transpose_b=True) / (height * width) ** 0.5)
    return _reshaped(Tensor(S.batch_dot(scores, x), (batch, channels, height * width)), a.shape)


def _recurrent(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    """Unroll a cell of mx.rnn over a few time steps."""
    kind = (mx.rnn.RNNCell, mx.rnn.LSTMCell, mx.rnn.GRUCell, mx.rnn.LSTMCell)[variant]
    steps = 2 + variant // 3
    batch, width = net.rows
    x = _fitted(a, (batch, steps, width)).symbol
    cell = kind(width, prefix=mx.name.NameManager.current.get(None, "cell") + "_")
    outputs, _ = cell.unroll(steps, inputs=x, merge_outputs=True)
    return Tensor(outputs, (batch, steps, width))


def _second_input(net: Network, a: Tensor, b: Tensor, variant: int) -> Tensor:
    extra = _fitted(Tensor(net.variable("extra", net.rows), net.rows), a.shape)
    return Tensor(a.symbol + extra.symbol, a.shape)


# The first ones are the simplest: examples shrink to them.
OPERATIONS: dict[str, Operation] = {
    "activation": _unary(
        S.tanh,
        lambda x: S.Activation(x, act_type="relu"),
        S.sigmoid,
        lambda x: S.LeakyReLU(x, act_type="leaky"),
    ),
    "fully_connected": _fully_connected,
    "scalar": _unary(
        lambda x: x * 0.5, lambda x: x + 0.1, lambda x: 1 - x, lambda x: (S.tanh(x) + 2) ** 1.5
    ),
    "arithmetic": _binary(
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * S.tanh(b),
        lambda a, b: a / (S.abs(b) + 1),
    ),
    "function": _unary(
        S.softsign, lambda x: S.exp(S.tanh(x)), lambda x: S.clip(x, -1, 1), S.softmax
    ),
    "choice": _binary(
        S.maximum,
        S.minimum,
        lambda a, b: S.where(a > b, a, b * 0.5),
        lambda a, b: S.add_n(a, b),
    ),
    "convolution": _convolution,
    "pooling": _pooling,
    "normalisation": _normalisation,
    "residual": _residual,
    "concat": _concat,
    "slices": _slices,
    "shared_weights": _shared_weights,
    "many_uses": _many_uses,
    "twins": _twins,
    "block_grad": _binary(
        lambda a, b: a * S.BlockGrad(S.tanh(b)),
        lambda a, b: S.BlockGrad(a) + b,
        lambda a, b: S.BlockGrad(a),
        lambda a, b: S.identity(a),
    ),
    "cast": _unary(lambda x: S.Cast(S.Cast(x, "float64") * 2, "float32")),
    "transpose": _transpose,
    "reduction": _reduction,
    "attention": _attention,
    "recurrent": _recurrent,
    "second_input": _second_input,
    "dropout": _dropout,
}
VARIANTS = 4

# -- losses --------------------------------------------------------------------------------------


LOSSES: dict[str, Callable[[Network, Tensor, str], Any]] = {
    "softmax": lambda net, a, name: S.SoftmaxOutput(
        S.FullyConnected(a.symbol, num_hidden=3),
        net.variable(name + "_label", a.shape[:1]),
        name=name,
    ),
    "regression": lambda net, a, name: S.LinearRegressionOutput(
        a.symbol, net.variable(name + "_label", a.shape), name=name
    ),
    "make_loss": lambda net, a, name: S.MakeLoss(S.mean(S.square(a.symbol)), name=name),
    "monitor": lambda net, a, name: S.BlockGrad(a.symbol, name=name),
}

# -- from recipe to network ----------------------------------------------------------------------


def _inputs(net: Network, kind: str) -> list[Tensor]:
    """Make the input and a first layer with weights, so that gradients go all the way."""
    batch, width = net.rows
    if kind == "tokens":
        tokens = Tensor(net.variable("data", (batch, 2)), (batch, 2))
        x = S.Embedding(tokens.symbol, input_dim=VOCABULARY, output_dim=width, name="embed")
        return [tokens, Tensor(x, (batch, 2, width))]
    if kind == "rows":
        rows = Tensor(net.variable("data", net.rows), net.rows)
        return [rows, _fully_connected(net, rows, rows, 0)]
    shape = (batch, 2, width, width)
    images = Tensor(net.variable("data", shape), shape)
    return [images, _convolution(net, images, images, 0)]


def build(recipe: Recipe) -> tuple[Any, dict[str, Shape]]:
    """Carry out a recipe: its symbol, and the shapes of the data and labels that it reads."""
    net = Network(recipe)
    with mx.name.NameManager():
        for tensor in _inputs(net, recipe.data):
            net.add(tensor)
        for step in recipe.steps:
            a, b = net.pick(step.source), net.pick(step.other, trained=False)
            made = OPERATIONS[step.operation](net, a, b, step.variant)
            if step.mark is not None:
                made.symbol._set_attr(mirror_stage=step.mark)
            net.add(_fitted(made, net.rows) if _numbers(made.shape) > LARGEST else made)
        heads = [
            LOSSES[head.loss](net, net.pick(head.source), f"head{i}")
            for i, head in enumerate(recipe.heads)
        ]
    symbol = S.Group(heads) if len(heads) > 1 else heads[0]
    read = set(symbol.list_arguments())
    return symbol, {name: shape for name, shape in net.shapes.items() if name in read}


def recipes(
    max_steps: int = 12, marks: bool = True, draws: bool = True
) -> st.SearchStrategy[Recipe]:
    """Draw recipes of 1 to `max_steps` steps, with marks and random operators or without."""
    uses = [
        (name, variant)
        for name in OPERATIONS
        if draws or name != "dropout"
        for variant in range(VARIANTS)
    ]
    # Hypothesis deletes up to five choices at once: one more in a step, and lists do not shrink.
    step = st.builds(
        lambda use, source, other, mark: Step(use[0], source, other, use[1], mark),
        st.sampled_from(uses),
        st.integers(0, 4),
        st.integers(0, 4),
        st.sampled_from([None, None, "True", "0", "1"]) if marks else st.none(),
    )
    # The first head has a gradient, or there would be nothing to train.
    trained = st.builds(Head, st.sampled_from([loss for loss in LOSSES if loss != "monitor"]))
    more = st.lists(st.builds(Head, st.sampled_from(sorted(LOSSES)), st.integers(0, 6)), max_size=2)
    return st.builds(
        Recipe,
        data=st.sampled_from(["rows", "images", "tokens"]),
        batch=st.integers(1, 3),
        width=st.sampled_from([2, 4]),
        heads=st.tuples(trained, more).map(lambda heads: (heads[0], *heads[1])),
        steps=st.lists(step, min_size=1, max_size=max_steps).map(tuple),
    )


def networks(
    max_steps: int = 12, marks: bool = True, draws: bool = True
) -> st.SearchStrategy[tuple[Any, dict[str, Shape]]]:
    """Draw networks, ``(symbol, shapes)``; the parameters are those of `recipes`."""
    return recipes(max_steps, marks, draws).map(build)
