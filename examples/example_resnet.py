"""The residual network of the original memonger's example: its memory, planned and not.

Run as it is, it prints the original's figures; nothing is allocated for them. With ``--train N`` it
trains the planned network on the CPU, on one batch of random images that it shows N times.
"""

import argparse
import logging
import resource
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

import memonger
import mxnet as mx
import networks
import numpy as np


def add_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """Add the options that all examples of this kind have."""
    parser.add_argument(
        "--batch", type=int, default=batch, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--planner",
        choices=("smallest", "chen2016"),
        default="smallest",
        help="chen2016 is the original's (default: %(default)s)",
    )
    parser.add_argument(
        "--train",
        type=int,
        default=0,
        metavar="N",
        help="train N batches with Module.fit in the planned network, on the CPU",
    )


def planned_and_told(net: Any, shapes: Dict[str, Any], planner: str) -> Any:
    """Plan a network, and print what it costs with the plan and without."""
    start = time.perf_counter()
    planned = memonger.search_plan(net, planner=planner, shapes=shapes)
    seconds = time.perf_counter() - start
    print(f"Old feature map cost={memonger.get_cost(net, shapes=shapes)} MB")
    print(f"New feature map cost={memonger.get_cost(planned, shapes=shapes)} MB")
    print(f"Search took {seconds:.1f} s", flush=True)
    return planned


def train(
    symbol: Any,
    data: Dict[str, np.ndarray],
    labels: Dict[str, np.ndarray],
    batches: int,
    loss: Any,
    rate: float,
) -> List[float]:
    """Train one batch ``batches`` times with Module.fit on the CPU; print the loss and the speed.

    Parameters
    ----------
    symbol : mx.sym.Symbol
    data, labels : dict of np.ndarray
        One batch of every input.
    batches : int
    loss : mx.metric.EvalMetric
    rate : float
        The learning rate, of Adam.

    Returns
    -------
    list of float
        The loss in each batch.
    """
    size = len(next(iter(data.values())))
    module = mx.mod.Module(symbol, data_names=list(data), label_names=list(labels))
    losses: List[float] = []
    start = time.perf_counter()

    def tell(param: Any) -> None:
        nonlocal start
        mx.nd.waitall()  # else the time would be that of queueing the work
        seconds = time.perf_counter() - start
        losses.append(param.eval_metric.get()[1])
        param.eval_metric.reset()
        print(
            f"Batch {param.nbatch + 1}: loss={losses[-1]:.4f}, {size / seconds:.2f} samples/s",
            flush=True,
        )
        start = time.perf_counter()

    module.fit(
        mx.io.ResizeIter(mx.io.NDArrayIter(data, labels, batch_size=size), batches),
        eval_metric=loss,
        optimizer="adam",
        optimizer_params={"learning_rate": rate},
        initializer=mx.init.Xavier(),
        num_epoch=1,
        batch_end_callback=tell,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KB, macOS in bytes.
    print(f"Peak resident memory={peak // 2 ** (20 if sys.platform == 'darwin' else 10)} MB")
    return losses


def layers(text: str) -> List[int]:
    """Read the option ``--layers``; its name is what argparse complains with."""
    blocks = [int(n) for n in text.split(",")]
    if min(blocks) < 1:
        raise ValueError(text)
    return blocks


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers",
        type=layers,
        default=[3, 24, 36, 3],
        metavar="N,N,...",
        help="residual blocks in each stage (default: 3,24,36,3)",
    )
    parser.add_argument("--image", type=int, default=224, metavar="N", help="default: %(default)s")
    add_options(parser, batch=32)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)

    net, shapes = networks.resnet(options.layers, batch=options.batch, image=options.image)
    planned = planned_and_told(net, shapes, options.planner)
    if options.train:
        random = np.random.RandomState(0)
        mx.random.seed(0)
        data = {"data": random.uniform(-1, 1, shapes["data"]).astype("float32")}
        labels = {"softmax_label": random.randint(0, 1000, options.batch).astype("float32")}
        train(planned, data, labels, options.train, mx.metric.CrossEntropy(), rate=2e-5)


if __name__ == "__main__":
    main()
