"""Random small networks for hypothesis: ``networks()`` draws ``(symbol, shapes)``.

What is drawn is a `Recipe`, plain data; `build` carries it out, always to the same symbol. Examples
shrink to few steps, each reading the one before it. Every head is a loss or has no gradient, so
that ``executor.backward()`` needs no arguments; arguments of at most 1 keep all numbers finite.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Tuple

import memonger  # noqa: F401  makes MXNet importable on newer NumPy
import mxnet as mx
import numpy as np
from hypothesis import strategies as st

S = mx.sym
Shape = Tuple[int, ...]

LARGEST = 64  # tensors with more numbers an example are brought back to `Recipe.width`

# Every operation and head reads an operand at most twice, so a tensor has at most 6 gradients. From
# 8 on MXNet adds them one by one, with control dependencies that are cyclic for some networks, for
# instance x with 6 more readers in (x + u) * sigmoid(x): bind fails with a check on node2index_.
# `_many_uses` has 8 and more where it cannot happen.
READERS = 3


class Step(NamedTuple):
    """Apply `operation`, in one of its variants, to the tensors made `source` and `other` ago."""

    operation: str
    source: int
    other: int
    variant: int
    mark: str | None  # the result's mirror_stage


@dataclass(frozen=True)
class Recipe:
    data: str  # the kind of its input: rows, images or tokens
    batch: int
    width: int
    steps: tuple[Step, ...]
    heads: tuple[tuple[str, int], ...]  # a loss each, on the tensor made so many steps ago


class Network:
    """What the operations share: the recipe's sizes, and variables that are used more than once."""

    def __init__(self, recipe: Recipe) -> None:
        self.rows = (recipe.batch, recipe.width)
        self.shapes: dict[str, Shape] = {}
        self._variables: dict[str, Any] = {}
        self._tensors: list[list[Any]] = []  # each with the count of its readers

    def add(self, tensor: Any) -> None:
        """Let later steps read the tensor, a symbol of one output."""
        self._tensors.append([tensor, 0])

    def pick(self, ago: int, first: int = 1) -> Any:
        """Return the tensor made that many steps ago, of those not yet read `READERS` times.

        By default not the input itself: of that alone nothing is trained.
        """
        free = [entry for entry in self._tensors[first:] if entry[1] < READERS]
        chosen = free[-1 - ago % len(free)]
        chosen[1] += 1
        return chosen[0]

    def variable(self, name: str, shape: Shape | None = None) -> Any:
        """Return the variable of that name, always the same; data and labels tell their shape."""
        if shape is not None:
            self.shapes[name] = shape
        return self._variables.setdefault(name, S.Variable(name))

    def shape(self, tensor: Any) -> Shape:
        """Infer its shape, the batch first."""
        shapes = {name: self.shapes[name] for name in tensor.list_inputs() if name in self.shapes}
        return tensor.infer_shape(**shapes)[1][0]

    def fitted(self, tensor: Any, shape: Shape) -> Any:
        """Return the tensor where it has the shape, else fully connected to that."""
        if self.shape(tensor) == shape:
            return tensor
        y = S.FullyConnected(tensor, num_hidden=int(np.prod(shape[1:])))
        return y if len(shape) == 2 else S.reshape(y, shape)

    def image(self, tensor: Any) -> Any:
        """Give the tensor four axes."""
        shape = self.shape(tensor)
        return tensor if len(shape) == 4 else S.reshape(tensor, (*shape, 1, 1)[:4])

    def like(self, tensor: Any, other: Any) -> Any:
        return self.fitted(tensor, self.shape(other))

    def shared(self, tensor: Any, times: int = 1) -> Any:
        """Fully connect with the one weight that all such steps share."""
        weight, bias = self.variable("shared_weight"), self.variable("shared_bias")
        for _ in range(times):
            x = self.fitted(tensor, self.rows)
            tensor = S.tanh(S.FullyConnected(x, weight, bias, num_hidden=self.rows[1]))
        return tensor

    def connected(self, tensor: Any) -> Any:
        return S.FullyConnected(tensor, num_hidden=self.rows[1])

    def convolved(self, tensor: Any, stride: int = 1, filters: int = 2) -> Any:
        size = {"kernel": (3, 3), "pad": (1, 1), "stride": (stride, stride)}
        return S.Convolution(self.image(tensor), num_filter=filters, **size)

    def pooled(self, tensor: Any, **more: Any) -> Any:
        x = self.image(tensor)
        kernel = tuple(min(2, size) for size in self.shape(x)[2:])
        return S.Pooling(x, kernel=kernel, stride=kernel, **more)

    def grouped(self, tensor: Any) -> Any:
        x = self.image(tensor)
        return S.GroupNorm(x, num_groups=1 + (self.shape(x)[1] + 1) % 2)

    def halves(self, tensor: Any) -> Any:
        batch, channels, *others = self.shape(tensor)
        x = self.fitted(tensor, (batch, channels + channels % 2, *others))
        return S.SliceChannel(x, num_outputs=2, axis=1)

    def attended(self, tensor: Any) -> Any:
        x = self.image(tensor)
        batch, channels, height, width = shape = self.shape(x)
        x = S.reshape(S.tanh(x), (batch, channels, height * width))
        scores = S.softmax(S.batch_dot(x, x, transpose_b=True) / (height * width) ** 0.5)
        return S.reshape(S.batch_dot(scores, x), shape)

    def unrolled(self, tensor: Any, kind: str, steps: int) -> Any:
        (batch, width), prefix = self.rows, mx.name.NameManager.current.get(None, "cell") + "_"
        x = self.fitted(tensor, (batch, steps, width))
        cell = getattr(mx.rnn, kind + "Cell")(width, prefix=prefix)
        return cell.unroll(steps, inputs=x, merge_outputs=True)[0]


def many_uses(x: Any, uses: int) -> Any:
    """Read a tensor often: MXNet adds up to 7 gradients at once, and 8 or more one by one."""
    x = x * 0.5
    return S.add_n(*(S.tanh(x * (i + 0.5)) for i in range(uses)))


def gate(first: Any, second: Any) -> Any:
    return S.sigmoid(first) * second


#: Name and variants: a tensor made of two, a and b of its shape, in the names of mx.sym. The first
#: are the simplest: examples shrink to them. Twins are the same expression, written twice, for
#: MXNet's common sub-expression elimination; and random operators, which must not be merged.
_OPERATIONS = """
activation: tanh(a) | Activation(a, 'relu') | sigmoid(a) | LeakyReLU(a, act_type='leaky')
fully_connected: net.connected(a)
slope: LeakyReLU(a, act_type='prelu')
scalar: a * 0.5 | a + 0.1 | 1 - a | (tanh(a) + 2) ** 1.5
arithmetic: a + b | a - b | a * tanh(b) | a / (abs(b) + 1)
function: softsign(a) | exp(tanh(a)) | clip(a, -1, 1) | softmax(a)
choice: maximum(a, b) | minimum(a, b) | where(a > b, a, b * 0.5) | add_n(a, b)
convolution: net.convolved(a) | net.convolved(a, 2) | net.convolved(a, 1, 4)
    | net.convolved(a, 2, 4)
pooling: net.pooled(a, pool_type='max') | net.pooled(a, pool_type='avg')
    | net.pooled(a, pool_type='max', global_pool=True)
    | net.pooled(a, pool_type='avg', global_pool=True)
normalisation: BatchNorm(a, fix_gamma=False) | LayerNorm(a) | net.grouped(a)
    | BatchNorm(net.image(a))
residual: a + net.like(net.convolved(Activation(BatchNorm(a, fix_gamma=False), 'relu')), a)
    | a + net.like(net.connected(Activation(BatchNorm(a, fix_gamma=False), 'relu')), a)
concat: Concat(a, b, dim=1)
slices: net.halves(a)[1] | net.halves(a)[0] | added(*net.halves(a)) | gate(*net.halves(a))
shared_weights: net.shared(a) | net.shared(a, 2) | net.shared(a, 3)
many_uses: many_uses(a, 2) | many_uses(a, 7) | many_uses(a, 8) | many_uses(a, 10)
twins: gate(tanh(a), tanh(a)) | gate(net.shared(a), net.shared(a))
    | gate(sigmoid(square(tanh(a) * 1.5) + 0.1), sigmoid(square(tanh(a) * 1.5) + 0.1))
    | slice_axis(gate(Concat(tanh(a), sigmoid(b), dim=0), Concat(tanh(a), sigmoid(b), dim=0)),
        axis=0, begin=0, end=net.rows[0])
block_grad: a * BlockGrad(tanh(b)) | BlockGrad(a) + b | BlockGrad(a) | identity(a)
cast: Cast(Cast(a, 'float64') * 2, 'float32')
transpose: transpose(net.image(a), (0, 2, 3, 1)) | SwapAxis(net.image(a), dim1=1, dim2=2)
reduction: mean(net.image(a), axis=(2, 3)) | sum(net.image(a), axis=(2, 3))
    | max(net.image(a), axis=(2, 3)) | norm(square(tanh(net.image(a))) + 0.1, axis=(2, 3))
attention: net.attended(a)
recurrent: net.unrolled(a, 'RNN', 2) | net.unrolled(a, 'LSTM', 2) | net.unrolled(a, 'GRU', 2)
    | net.unrolled(a, 'LSTM', 3)
second_input: a + net.like(net.variable('extra', net.rows), a)
dropout: Dropout(a, p=0.3) | Dropout(a, p=0.5) | Dropout(a, p=0.3) + Dropout(a, p=0.3)
    | Dropout(a, p=0.5) + Dropout(a, p=0.5)
"""


OPERATIONS: dict[str, list[Callable[[Network, Any, Any], Any]]] = {}
for _line in re.sub(r"\n +", " ", _OPERATIONS).strip().splitlines():
    _name, _variants = _line.split(": ", 1)
    _names = {**vars(mx.sym), "many_uses": many_uses, "gate": gate, "added": operator.add}
    OPERATIONS[_name] = [
        eval(f"lambda net, a, b: {text}", _names) for text in _variants.split(" | ")
    ]
VARIANTS = 4

LOSSES: dict[str, Callable[[Network, Any, str], Any]] = {
    "softmax": lambda net, a, name: S.SoftmaxOutput(
        S.FullyConnected(a, num_hidden=3), net.variable(name + "_label", net.rows[:1]), name=name
    ),
    "regression": lambda net, a, name: S.LinearRegressionOutput(
        a, net.variable(name + "_label", net.shape(a)), name=name
    ),
    "make_loss": lambda net, a, name: S.MakeLoss(S.mean(S.square(a)), name=name),
    "monitor": lambda net, a, name: S.BlockGrad(a, name=name),
}


def _inputs(net: Network, kind: str) -> list[Any]:
    """Make the input and a first layer with weights, so that gradients go all the way."""
    batch, width = net.rows
    shapes = {"tokens": (batch, 2), "rows": net.rows, "images": (batch, 2, width, width)}
    data = net.variable("data", shapes[kind])
    if kind == "tokens":
        return [data, S.Embedding(data, input_dim=5, output_dim=width, name="embed")]
    return [data, net.connected(data) if kind == "rows" else net.convolved(data)]


def build(recipe: Recipe) -> tuple[Any, dict[str, Shape]]:
    """Carry out a recipe: its symbol, and the shapes of the data and labels that it reads."""
    net = Network(recipe)
    with mx.name.NameManager():
        for tensor in _inputs(net, recipe.data):
            net.add(tensor)
        for step in recipe.steps:
            a, b = net.pick(step.source), net.pick(step.other, first=0)
            variants = OPERATIONS[step.operation]
            result = variants[step.variant % len(variants)](net, a, net.like(b, a))
            if step.mark is not None:
                result._set_attr(mirror_stage=step.mark)
            large = np.prod(net.shape(result)[1:]) > LARGEST
            net.add(net.fitted(result, net.rows) if large else result)
        heads = [
            LOSSES[loss](net, net.pick(source), f"head{i}")
            for i, (loss, source) in enumerate(recipe.heads)
        ]
    symbol = S.Group(heads) if len(heads) > 1 else heads[0]
    read = set(symbol.list_arguments())
    return symbol, {name: shape for name, shape in net.shapes.items() if name in read}


def recipes() -> st.SearchStrategy[Recipe]:
    """Draw recipes of 1 to 12 steps."""
    uses = [(name, variant) for name in OPERATIONS for variant in range(VARIANTS)]
    # Hypothesis deletes up to five choices at once: one more in a step, and lists do not shrink.
    step = st.builds(
        lambda use, source, other, mark: Step(use[0], source, other, use[1], mark),
        st.sampled_from(uses),
        st.integers(0, 4),
        st.integers(0, 4),
        st.sampled_from([None, None, "True", "0", "1"]),
    )
    # The first head has a gradient, or there would be nothing to train.
    trained = st.sampled_from([(loss, 0) for loss in LOSSES if loss != "monitor"])
    more = st.lists(st.tuples(st.sampled_from(sorted(LOSSES)), st.integers(0, 6)), max_size=2)
    return st.builds(
        Recipe,
        data=st.sampled_from(["rows", "images", "tokens"]),
        batch=st.integers(1, 3),
        width=st.sampled_from([2, 4]),
        heads=st.tuples(trained, more).map(lambda heads: (heads[0], *heads[1])),
        steps=st.lists(step, min_size=1, max_size=12).map(tuple),
    )


def networks() -> st.SearchStrategy[tuple[Any, dict[str, Shape]]]:
    """Draw networks, ``(symbol, shapes)``, of `recipes`."""
    return recipes().map(build)
