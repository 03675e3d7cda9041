"""The original's examples and unmarked networks: cost before and after, and the time of a search.

    python benchmarks/original.py            # both tables
    python benchmarks/original.py --no-lstm  # without the LSTM of 1000 steps, which takes longest

The original's own search is timed in the same run: its trials, each costed as it does, by binding.
Costs are MB (2**20 bytes) as MXNet reports them.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import memonger
import mxnet as mx
import numpy as np
from memonger import marks
from memonger.executor import planned_mb
from memonger.forward import forward_graph
from memonger.inputs import read_shapes
from memonger.planners import chen2016

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks

ZOO = ("alexnet", "vgg16", "googlenet", "inceptionv3", "mobilenetv2_1.0", "densenet121")


def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Tuple[Any, float]:
    start = time.time()
    result = call(*args, **kwargs)
    return result, time.time() - start


def original_search(symbol: Any, shapes: Dict[str, Any]) -> int:
    """The original's search as it is: every trial bound by simple_bind, which allocates."""
    graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))

    def cost(mask: np.ndarray) -> int:
        return planned_mb(marks.apply(symbol, mask).simple_bind(mx.cpu(), **shapes))

    return chen2016.best(chen2016.search(graph, marks.stages(graph), cost)).cost


def unmarked(name: str, batch: int) -> Tuple[Any, Dict[str, Any]]:
    if name == "googlenet":
        return networks.googlenet(batch=batch)
    return networks.model_zoo(name, batch, 299 if name == "inceptionv3" else 224)


def main(arguments: List[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-lstm", action="store_true")
    parser.add_argument("--batch", type=int, default=8, help="of the unmarked networks")
    options = parser.parse_args(arguments)
    print(
        "%s, %d cores, Python %s, MXNet %s"
        % (platform.machine(), os.cpu_count() or 1, platform.python_version(), mx.__version__)
    )
    examples = {"example_resnet [3,24,36,3]": networks.resnet()}
    if not options.no_lstm:
        examples["example_lstm 4x1000"] = networks.lstm()
    print("| network | no plan | original | original, ruled | ours | original s | ours s |")
    print("|---|---|---|---|---|---|---|")
    for name, (symbol, shapes) in examples.items():
        bare, seconds = timed(original_search, symbol, shapes)
        ruled = memonger.search_plan(symbol, planner="chen2016", shapes=shapes)
        planned, ours = timed(memonger.search_plan, symbol, shapes=shapes)
        costs = [memonger.get_cost(s, shapes=shapes) for s in (symbol, ruled, planned)]
        print(
            "| %s | %d | %d | %d | %d | %.1f | %.1f |"
            % (name, costs[0], bare, costs[1], costs[2], seconds, ours)
        )
    print("\n| unmarked, batch %d | no plan | ours | s |\n|---|---|---|---|" % options.batch)
    for name in ZOO:
        symbol, shapes = unmarked(name, options.batch)
        planned, ours = timed(memonger.search_plan, symbol, shapes=shapes)
        costs = [memonger.get_cost(s, shapes=shapes) for s in (symbol, planned)]
        print("| %s | %d | %d | %.1f |" % (name, costs[0], costs[1], ours))


if __name__ == "__main__":
    main(sys.argv[1:])
