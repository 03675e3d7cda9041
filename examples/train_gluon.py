"""Handwritten digits, learnt twice by a Gluon loop: after ``hybridize()``, and by a plan.

The digits are those that come with scikit-learn. Each training runs in a process of its own, from
the same seed, and its peak resident memory is measured. At the end accuracies are printed, and
whether all parameters and running statistics are equal bit for bit; the exit status is 1 if not.
"""

import os

# MXNet on the CPU is not repeatable with more threads, planned or not. Read when it is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Optional, Sequence

import memonger
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from train_digits import TRAINING_IMAGES, digits, peak_mb

LEARNING_RATE = 0.01


class Residual(nn.HybridBlock):
    """Two convolutions with BatchNorm, whose result is added to their input."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            for _ in range(2):
                self.body.add(nn.Conv2D(filters, 3, padding=1, use_bias=False))
                self.body.add(nn.BatchNorm(momentum=0.7), nn.Activation("relu"))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return x + self.body(x)


def network(blocks: int, filters: int) -> Any:
    """Build a residual network."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(filters, 3, padding=1))
        for _ in range(blocks):
            net.add(Residual(filters))
        net.add(nn.Flatten(), nn.Dropout(0.2), nn.Dense(10))
    return net


def train(options: argparse.Namespace) -> Dict[str, Any]:
    """Train in this process; return what it ends with."""
    images, labels = digits()
    mx.random.seed(7)
    np.random.seed(7)
    net = network(options.blocks, options.filters)
    net.initialize(mx.init.Xavier())
    if options.plan == "none":
        net.hybridize()
    else:
        memonger.gluon.plan(net, how=options.plan, budget=options.budget)

    n, batch = TRAINING_IMAGES, options.batch
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(images[:n], labels[:n]), batch)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": LEARNING_RATE})
    before, start = peak_mb(), time.perf_counter()
    for _ in range(options.epochs):
        for x, y in data:
            with autograd.record():
                loss = loss_fn(net(x), y)
            loss.backward()
            trainer.step(x.shape[0])
    mx.nd.waitall()
    seconds, peak = time.perf_counter() - start, peak_mb()

    scores = net(mx.nd.array(images[n:])).asnumpy()
    parameters = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
    if options.plan != "none":
        print(memonger.gluon.plan_of(net), flush=True)
    accuracy = (scores.argmax(axis=1) == labels[n:]).mean()
    print(
        f"{options.plan:<9} accuracy={accuracy:.4f}  peak resident memory={peak} MB ({before} MB "
        f"before the first step)  {seconds:.1f} s of training",
        flush=True,
    )
    return parameters


def elsewhere(arguments: Sequence[str]) -> Dict[str, Any]:
    """Train in a process of its own; return its parameters."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "parameters")
        command = [sys.executable, os.path.abspath(__file__), *arguments, "--write", file]
        subprocess.run(command, check=True)
        with open(file, "rb") as f:
            found: Dict[str, Any] = pickle.load(f)
    return found


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the example; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, what in (
        ("--blocks", 16, "residual blocks"),
        ("--filters", 16, "filters of every convolution"),
        ("--batch", 300, "images in a batch"),
        ("--epochs", 4, "times that all images are shown"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=what + " (default: %(default)s)"
        )
    ways = ("marks", "schedule", "auto", "none")
    parser.add_argument("--plan", choices=ways, help="how to plan (default: marks)")
    parser.add_argument("--budget", help="the memory that may be taken, such as 60%%")
    parser.add_argument("--write", help=argparse.SUPPRESS)  # how `elsewhere` calls this script
    options = parser.parse_args(given)
    if options.write:
        with open(options.write, "wb") as f:
            pickle.dump(train(options), f)
        return 0

    compared = ("none", options.plan or "marks")
    one, other = (elsewhere([*given, "--plan", way]) for way in compared)
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    if different:
        print(f"NOT EQUAL: {len(different)} of {len(one)} parameters", ", ".join(different))
        return 1
    print(f"All {len(one)} parameters and running statistics are equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
