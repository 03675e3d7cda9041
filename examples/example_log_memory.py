"""Train 1000 layers in a memory that marks cannot reach.

    python examples/example_log_memory.py

A residual network of 1000 fully connected layers tells the arms of a spiral apart. Its training
keeps two results a layer. Marks let MXNet recompute each result once, so that memory grows as the
square root of the depth; a schedule recomputes as often as it pays, and memory grows with the
logarithm (Chen et al. 2016, section 4.4). The plan here is the one of least work within a budget.
"""

import argparse
import math
from typing import Any, Tuple

import memonger  # before mxnet: it makes MXNet importable on newer NumPy
import mxnet as mx
import numpy as np

MB = 2**20
ARMS = 3


def network(layers: int, hidden: int) -> Any:
    """Make a residual network: each layer adds to what comes before it."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden, name="first")
    for i in range(layers):
        y = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"layer{i}")
        x = x + mx.sym.Activation(y, act_type="tanh", name=f"tanh{i}")
    x = mx.sym.FullyConnected(x, num_hidden=ARMS, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def spiral(points: int, seed: int = 0) -> Tuple[np.ndarray, np.ndarray]:
    """Draw points on the arms of a spiral, and which arm each is on."""
    random = np.random.RandomState(seed)
    arm = random.randint(ARMS, size=points)
    radius = np.sqrt(random.uniform(0.02, 1, size=points))
    angle = 2 * math.pi * (radius / 2 + arm / ARMS) + random.normal(0, 0.1, size=points)
    where = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return where.astype(np.float32), arm.astype(np.float32)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=32, help="results of a layer for each point")
    parser.add_argument("--batch", type=int, default=2048, help="points in a batch")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--budget", type=float, default=6, help="MB to train in")
    options = parser.parse_args()

    symbol = network(options.layers, options.hidden)
    shapes = {"data": (options.batch, 2), "softmax_label": (options.batch,)}
    # As Module binds: without gradients of the inputs.
    requests = {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}
    marks = memonger.plan(symbol, shapes, grad_req=requests, how="marks")
    print(f"no plan         {marks.unplanned_bytes / MB:8.1f} MB")
    print(f"smallest marks  {marks.pool_bytes / MB:8.1f} MB", flush=True)
    budget = int(options.budget * MB)
    plan = memonger.plan(symbol, shapes, grad_req=requests, how="schedule", budget=budget)
    work = 1 + plan.recompute_overhead
    print(f"schedule        {plan.pool_bytes / MB:8.1f} MB, {work:.2f} times the forward work")

    mx.random.seed(0)
    module = mx.mod.Module(plan.symbol)
    module.fit(
        mx.io.NDArrayIter(*spiral(options.batch * options.steps), options.batch),
        num_epoch=1,
        optimizer="adam",
        optimizer_params={"learning_rate": 0.0005},
        # Each layer adds little, so that the sum of all is of the size of one.
        initializer=mx.init.Mixed(
            ["(first|scores).*", ".*"],
            [mx.init.Xavier(), mx.init.Xavier(magnitude=3 / options.layers)],
        ),
    )
    [(_, accuracy)] = module.score(
        mx.io.NDArrayIter(*spiral(options.batch, seed=1), options.batch), "acc"
    )
    print(f"accuracy after {options.steps} steps: {accuracy:.3f}")


if __name__ == "__main__":
    main()
