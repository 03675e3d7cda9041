"""The unrolled LSTM of the original memonger's example: its memory, planned and not.

Run as it is, it prints the original's figures for 4 layers of 1000 steps; nothing is allocated for
them. With ``--train N`` it trains the planned network on the CPU, on one batch of random sequences
that it shows N times: choose fewer steps for that, and a smaller width.
"""

import argparse
import logging
from typing import Any, Optional, Sequence

import memonger  # noqa: F401  before mxnet: it makes MXNet importable
import mxnet as mx
import networks
import numpy as np
from example_resnet import add_options, planned_and_told, train

LABELS = 5000


def with_losses(net: Any) -> Any:
    """Make losses of the heads that are a cross entropy.

    ``softmax_cross_entropy`` waits for a gradient from outside, which Module.fit has none of.
    """
    return mx.sym.Group([mx.sym.MakeLoss(h) if h.name.endswith("_sm") else h for h in net])


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, what in (
        ("--layers", 4, "LSTM layers"),
        ("--steps", 1000, "time steps"),
        ("--hidden", 1024, "width of a layer"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=what + " (default: %(default)s)"
        )
    add_options(parser, batch=64)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)

    net, shapes = networks.lstm(
        options.layers, options.steps, options.batch, options.hidden, labels=LABELS
    )
    if options.train:
        net = with_losses(net)
    planned = planned_and_told(net, shapes, options.planner)
    if options.train:
        random = np.random.RandomState(0)
        mx.random.seed(0)
        data, labels = {}, {}
        for name, shape in shapes.items():
            if name.endswith("label"):
                labels[name] = random.randint(0, LABELS, shape).astype("float32")
            elif name.endswith(("init_c", "init_h")):
                data[name] = np.zeros(shape, "float32")
            else:
                data[name] = random.uniform(-1, 1, shape).astype("float32")
        heads = [name for name in planned.list_outputs() if name.startswith("makeloss")]
        # A head is the sum over the batch, and the metric the mean over the heads, one a step.
        loss = mx.metric.CustomMetric(
            lambda label, head: head.sum() / options.batch,
            name="loss",
            output_names=heads,
            allow_extra_outputs=True,
        )
        train(planned, data, labels, options.train, loss, rate=0.005)


if __name__ == "__main__":
    main()
