"""Blocks that are differentiated within ``autograd.Function`` and Custom operators.

These run on threads of MXNet's. What waits for the engine there never ends.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import autograd

from blocks import Arrays, Prepare, batch, left_in, mlp


class Checkpointed(autograd.Function):
    """Run a block forward again and backward within its backward pass."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        self.save_for_backward(x)
        with autograd.pause(train_mode=True):
            return self.net(x)

    def backward(self, gradient: Any) -> Any:
        x = self.saved_tensors[0].copy()
        x.attach_grad()
        with autograd.record():
            y = self.net(x)
        y.backward(gradient)
        return x.grad


def checkpointed_by_hand(prepare: Prepare) -> Arrays:
    """The first recorded call of the block is on a thread of MXNet's."""
    net, x = mlp(drop=0), batch(0, 192)[0]
    net(x)
    prepare(net)
    x.attach_grad()
    for _ in range(2):
        with autograd.record():
            loss = (Checkpointed(net)(x) ** 2).mean()
        loss.backward()
        mx.nd.waitall()
    return {**left_in(net), "x": x.grad}


class Perceptual(mx.operator.CustomOp):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        with autograd.pause():
            self.assign(out_data[0], req[0], self.net(in_data[0]))

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        x = in_data[0].copy()
        x.attach_grad()
        with autograd.record():
            y = self.net(x)
        y.backward(out_grad[0])
        self.assign(in_grad[0], req[0], x.grad)


class PerceptualProp(mx.operator.CustomOpProp):
    net: Any = None

    def create_operator(self, *_: Any) -> Any:
        return Perceptual(self.net)


mx.operator.register("scenarios_perceptual")(PerceptualProp)


def perceptual_loss(prepare: Prepare) -> Arrays:
    """A frozen block, which was called on this thread before, is differentiated by an operator."""
    inner, outer, x = mlp("inner_", 20, 0), mlp("outer_", 20, 0), batch(0, 192)[0]
    inner(x)
    outer(x)
    inner.collect_params().setattr("grad_req", "null")
    PerceptualProp.net = prepare(inner)
    prepare(outer)
    z = x.copy()
    z.attach_grad()
    with autograd.record():
        loss = inner(z)
    loss.backward()
    for _ in range(3):
        with autograd.record():
            judged = mx.nd.Custom(outer(x), op_type="scenarios_perceptual")
            loss = ((judged - x) ** 2).mean(axis=1)
        loss.backward()
        mx.nd.waitall()
    return left_in(inner, outer)
