"""Networks with operators whose work MXNet cannot see: written in Python, or with a loop inside."""

from __future__ import annotations

from typing import Any, Callable

import memonger  # noqa: F401
import mxnet as mx
from memonger.support.symbols import load_nodes

from networks import Network

S = mx.sym


class Scaled(mx.operator.CustomOp):
    """Two outputs; keeps something for its gradient, which reads all; moves an auxiliary state."""

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        x, scale = in_data
        self.kept = mx.nd.tanh(x)
        self.assign(out_data[0], req[0], self.kept * scale)
        self.assign(out_data[1], req[1], mx.nd.mean(x, axis=1, keepdims=True))
        if is_train:
            aux[0][:] = 0.9 * aux[0] + 0.1 * mx.nd.mean(x, axis=0)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        (x, scale), slope = in_data, 1 - self.kept**2
        mean = mx.nd.broadcast_div(out_grad[1], mx.nd.full((1, 1), x.shape[1]))
        gradient = mx.nd.broadcast_add(out_grad[0] * scale * slope, mean)
        self.assign(in_grad[0], req[0], gradient)
        product = out_grad[0] * self.kept
        self.assign(in_grad[1], req[1], mx.nd.sum(product, axis=0, keepdims=True))


@mx.operator.register("tests_scaled")
class ScaledProp(mx.operator.CustomOpProp):
    def list_arguments(self) -> list[str]:
        return ["data", "scale"]

    def list_outputs(self) -> list[str]:
        return ["scaled", "mean"]

    def list_auxiliary_states(self) -> list[str]:
        return ["moving"]

    def infer_shape(self, shapes: Any) -> Any:
        rows, columns = shapes[0]
        return [shapes[0], [1, columns]], [shapes[0], [rows, 1]], [[columns]]

    def create_operator(self, *_: Any) -> Any:
        return Scaled()


class Doubled(mx.operator.CustomOp):
    """Its gradient reads the gradient of its output, and nothing of the forward pass."""

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("tests_doubled")
class DoubledProp(mx.operator.CustomOpProp):
    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> Any:
        return out_grad

    def create_operator(self, *_: Any) -> Any:
        return Doubled()


class Loss(mx.operator.CustomOp):
    """A logistic loss, whose gradient reads no gradient."""

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], mx.nd.sigmoid(in_data[0]))

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_data[0] - in_data[1])
        self.assign(in_grad[1], req[1], 0)


@mx.operator.register("tests_loss")
class LossProp(mx.operator.CustomOpProp):
    def __init__(self) -> None:
        super().__init__(need_top_grad=False)

    def list_arguments(self) -> list[str]:
        return ["data", "label"]

    def infer_shape(self, shapes: Any) -> Any:
        return [shapes[0], shapes[0]], [shapes[0]], []

    def create_operator(self, *_: Any) -> Any:
        return Loss()


def _layers(x: Any, hidden: int, count: int, name: str) -> Any:
    for k in range(count):
        x = S.FullyConnected(x, num_hidden=hidden, name=f"{name}{k}")
        x = S.Activation(S.BatchNorm(x, fix_gamma=False, name=f"{name}_bn{k}"), act_type="tanh")
    return x


def _scaled(x: Any) -> Any:
    scaled, mean = S.Custom(x, op_type="tests_scaled", name="scaled")
    return S.broadcast_add(S.sin(scaled), mean)


def _one_output_read(x: Any) -> Any:
    return S.Custom(x, op_type="tests_scaled", name="scaled")[0]


def _doubled(x: Any) -> Any:
    return S.Custom(S.sin(x), op_type="tests_doubled", name="doubled")


def _foreach(x: Any) -> Any:
    """A loop with a state, and a parameter that its body takes from outside."""
    bias = S.Variable("bias", shape=(1, 1))
    outputs, _ = S.contrib.foreach(
        lambda row, state: (S.tanh(S.broadcast_add(row, bias)) + state, row * state),
        S.expand_dims(x, 1),
        S.ones_like(S.slice_axis(x, axis=0, begin=0, end=1)),
    )
    return S.Flatten(outputs)


def _final_state(x: Any) -> Any:
    """A loop of which nothing but the last state is read."""
    rows = S.expand_dims(x, 1)
    _, state = S.contrib.foreach(
        lambda row, state: (row * 2, S.tanh(row + state)),
        rows,
        S.zeros_like(S.slice_axis(x, axis=0, begin=0, end=1)),
    )
    return S.broadcast_add(x, state)


def _cached_op(x: Any) -> Any:
    """What MXNet leaves of a part of a network that a subgraph backend has taken."""
    body = S.tanh(S.sin(S.Variable("inner"))).tojson()
    nodes = [
        {"op": "null", "name": "inner", "inputs": []},
        {"op": "_CachedOp", "name": "part", "inputs": [[0, 0, 0]], "attrs": {"subgraph": body}},
    ]
    return load_nodes(nodes, [[1, 0, 0]])(inner=x)


def within(
    operator: Callable[[Any], Any], hidden: int = 8, batch: int = 6, depth: int = 2
) -> Network:
    """Build layers with this operator between them."""
    with mx.name.NameManager():
        x = operator(_layers(S.Variable("data"), hidden, depth, "a"))
        x = _layers(x, hidden, depth, "b")
        x = S.FullyConnected(x, num_hidden=3, name="last")
        return S.SoftmaxOutput(x, S.Variable("label"), name="out"), {
            "data": (batch, hidden),
            "label": (batch,),
        }


def own_loss(hidden: int = 8, batch: int = 6, depth: int = 4) -> Network:
    """Build layers with a loss that is written in Python."""
    with mx.name.NameManager():
        x = _layers(S.Variable("data"), hidden, depth, "a")
        x = S.FullyConnected(x, num_hidden=1, name="last")
        loss = S.Custom(x, S.Variable("label"), op_type="tests_loss", name="loss")
        return S.MakeLoss(loss), {"data": (batch, hidden), "label": (batch, 1)}


OPERATORS = {
    "Custom of two outputs": _scaled,
    "Custom, one output read": _one_output_read,
    "Custom that reads its gradient": _doubled,
    "foreach": _foreach,
    "foreach, last state read": _final_state,
    "_CachedOp": _cached_op,
}
