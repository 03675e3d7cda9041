"""Handwritten digits, learnt twice: by a residual network as it is, and by its plan.

The digits are those that come with scikit-learn. Both trainings start from the same seed; at the
end their accuracy is printed, whether their parameters are equal bit for bit, the memory that MXNet
plans for each, and the peak resident memory of a few training steps of each, measured in a process
of its own. The exit status is 1 if any parameter differs.
"""

import os

# MXNet on the CPU is not repeatable with more threads, planned or not. Read when it is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import logging
import re
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import memonger
import mxnet as mx
import numpy as np

TRAINING_IMAGES = 1500  # of 1797
LEARNING_RATE = 0.01
MEASURED_STEPS = 3

Arrays = Dict[str, np.ndarray]


class Trained(NamedTuple):
    """What a training ends with."""

    accuracy: float  # on images that it was not shown
    parameters: Arrays  # auxiliary states too
    seconds: float


def digits() -> Tuple[np.ndarray, np.ndarray]:
    """Return the images, (1797, 1, 8, 8) from 0 to 1, and what they show."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit(
            "this example needs the digits of scikit-learn, which memonger itself does not: "
            "pip install scikit-learn"
        )
    found = load_digits()
    images = found.images[:, np.newaxis].astype("float32") / 16
    return images, found.target.astype("float32")


def network(blocks: int, filters: int) -> Any:
    """Build a residual network with BatchNorm and Dropout, without any mark."""

    def normalised(x: Any, name: str) -> Any:
        x = mx.sym.Convolution(
            x, num_filter=filters, kernel=(3, 3), pad=(1, 1), no_bias=True, name=name + "_conv"
        )
        return mx.sym.BatchNorm(x, fix_gamma=False, momentum=0.7, name=name + "_norm")

    def relu(x: Any, name: str) -> Any:
        return mx.sym.Activation(x, act_type="relu", name=name + "_relu")

    x = relu(normalised(mx.sym.Variable("data"), "first"), "first")
    for i in range(blocks):
        name = f"block{i}"
        y = relu(normalised(x, name + "_a"), name + "_a")
        if i % 4 == 3:
            y = mx.sym.Dropout(y, p=0.2, name=name + "_dropout")
        x = relu(x + normalised(y, name + "_b"), name)
    x = mx.sym.Dropout(mx.sym.Flatten(x, name="flat"), p=0.2, name="dropout")
    x = mx.sym.FullyConnected(x, num_hidden=10, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def train(symbol: Any, images: np.ndarray, labels: np.ndarray, batch: int, epochs: int) -> Trained:
    """Train with Module.fit, always from the same seed."""

    def finish(_: Any) -> None:
        # fit reads BatchNorm's statistics when an epoch ends, and does not wait for the backward
        # pass to have written them.
        mx.nd.waitall()

    mx.random.seed(7)
    n = TRAINING_IMAGES
    module = mx.mod.Module(symbol)
    start = time.perf_counter()
    module.fit(
        mx.io.NDArrayIter(images[:n], labels[:n], batch, last_batch_handle="discard"),
        num_epoch=epochs,
        optimizer="adam",
        optimizer_params={"learning_rate": LEARNING_RATE},
        initializer=mx.init.Xavier(),
        batch_end_callback=finish,
    )
    mx.nd.waitall()
    seconds = time.perf_counter() - start
    rest = mx.io.NDArrayIter(images[n:], labels[n:], batch)
    accuracy = module.score(rest, "acc")[0][1]
    arguments, auxiliary = module.get_params()
    parameters = {k: v.asnumpy() for k, v in [*arguments.items(), *auxiliary.items()]}
    return Trained(accuracy, parameters, seconds)


def peak_mb() -> int:
    """Tell the peak resident memory of this process, in MB."""
    try:
        # getrusage's peak is inherited from the process that started this one; this one is not.
        with open("/proc/self/status") as status:
            return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read())[0]) // 2**10
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak // 2 ** (20 if sys.platform == "darwin" else 10)


def step(file: str, batch: int) -> None:
    """Train a saved symbol for a few steps; print the peak memory before and after them."""
    shape = (batch, 1, 8, 8)
    before = peak_mb()
    module = mx.mod.Module(mx.sym.load(file))
    module.bind([("data", shape)], [("softmax_label", (batch,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    inputs = mx.io.DataBatch([mx.nd.random.uniform(shape=shape)], [mx.nd.zeros((batch,))])
    for _ in range(MEASURED_STEPS):
        module.forward_backward(inputs)
        module.update()
        mx.nd.waitall()
    print(before, peak_mb())


def measured(symbol: Any, batch: int) -> Tuple[int, int]:
    """Tell the peak MB of a process that trains this symbol: before its first step, and after."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "net-symbol.json")
        symbol.save(file)
        command = [sys.executable, os.path.abspath(__file__), "--step", file, "--batch", str(batch)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()
    return int(printed[-2]), int(printed[-1])


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the example; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, what in (
        ("--blocks", 16, "residual blocks"),
        ("--filters", 16, "filters of every convolution"),
        ("--batch", 300, "images in a batch"),
        ("--epochs", 10, "times that all images are shown"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=what + " (default: %(default)s)"
        )
    parser.add_argument("--step", help=argparse.SUPPRESS)  # how `measured` calls this script
    options = parser.parse_args(arguments)
    if options.step:
        step(options.step, options.batch)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    images, labels = digits()
    net = network(options.blocks, options.filters)
    shapes = {"data": (options.batch, 1, 8, 8)}
    planned = memonger.search_plan(net, shapes=shapes)
    results = []
    for name, symbol in (("unplanned", net), ("planned", planned)):
        cost = memonger.get_cost(symbol, shapes=shapes)
        before, peak = measured(symbol, options.batch)
        result = train(symbol, images, labels, options.batch, options.epochs)
        results.append(result.parameters)
        print(
            f"{name:<10} accuracy={result.accuracy:.4f}  feature map cost={cost} MB  "
            f"peak resident memory={peak} MB ({before} MB before the first step)  "
            f"{result.seconds:.1f} s of training",
            flush=True,
        )

    one, other = results
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    if different:
        print(f"NOT EQUAL: {len(different)} of {len(one)} parameters", ", ".join(different))
        return 1
    print(f"All {len(one)} parameters and auxiliary states are equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
