"""Learn handwritten digits with Module: a plain MXNet script, which knows nothing of memonger.

    OMP_NUM_THREADS=1 memonger run examples/train_digits.py
    OMP_NUM_THREADS=1 python examples/train_digits.py

The first trains in less memory than the second, to the same parameters: both print the same digest.
(With more threads MXNet's CPU build does not repeat itself.) The digits come with scikit-learn.
"""

import argparse
import hashlib
import re
from typing import Any, Dict, Tuple

import mxnet as mx
import numpy as np

TRAINING_IMAGES = 1500  # of 1797


def read_options(what: Any, epochs: int) -> argparse.Namespace:
    """Read the options of the command line."""
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=16, help="residual blocks")
    parser.add_argument("--filters", type=int, default=16, help="filters of every convolution")
    parser.add_argument("--batch", type=int, default=300, help="images in a batch")
    parser.add_argument("--epochs", type=int, default=epochs, help="times that all are shown")
    return parser.parse_args()


def digits() -> Tuple[np.ndarray, np.ndarray]:
    """Return the images, (1797, 1, 8, 8) from 0 to 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images[:, np.newaxis].astype("float32") / 16, found.target.astype("float32")


def report(accuracy: float, parameters: Dict[str, Any]) -> None:
    """Print what the training ends with, and the most memory that this process had."""
    digest = hashlib.sha256()
    for _, array in sorted(parameters.items()):
        digest.update(array.asnumpy().tobytes())
    with open("/proc/self/status") as status:
        (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read())
    print(f"accuracy {accuracy:.4f}, parameters {digest.hexdigest()[:16]}")
    print(f"peak resident memory {int(peak) // 2**10} MB")


def network(blocks: int, filters: int) -> Any:
    """Build a residual network with BatchNorm and Dropout."""

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


def main() -> None:
    """Train."""
    options, (images, labels), n = read_options(__doc__, epochs=10), digits(), TRAINING_IMAGES
    mx.random.seed(7)
    module = mx.mod.Module(network(options.blocks, options.filters))
    module.fit(
        mx.io.NDArrayIter(images[:n], labels[:n], options.batch, last_batch_handle="discard"),
        num_epoch=options.epochs,
        optimizer="adam",
        optimizer_params={"learning_rate": 0.01},
        initializer=mx.init.Xavier(),
        # When an epoch ends, fit reads BatchNorm's statistics; it does not wait for them itself.
        batch_end_callback=lambda _: mx.nd.waitall(),
    )
    [(_, accuracy)] = module.score(mx.io.NDArrayIter(images[n:], labels[n:], options.batch), "acc")
    arguments, statistics = module.get_params()
    report(accuracy, {**arguments, **statistics})


if __name__ == "__main__":
    main()
