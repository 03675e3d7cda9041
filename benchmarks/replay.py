"""How many plans can be replayed in the time that MXNet takes to bind one.

    python benchmarks/replay.py              # all networks
    python benchmarks/replay.py resnet50_v2  # one of them

In one run and in turns: a bind as the original makes it (``simple_bind``, which allocates), a bind
with arrays that are never allocated, each with the reading of its total, and replays of random
plans, each another. Medians. The largest network takes 3 GB of memory (its parameters); with
``--no-simple-bind`` next to nothing. The time to build the training graph is told once: the first
time in a process, operators are bound one by one to see their gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
from memonger.costs.pool import pool
from memonger.costs.bind import bind, read_planned_mb
from memonger.graph.forward import ForwardGraph
from memonger.graph.read import forward_graph
from memonger.graph.inputs import read_shapes
from memonger.graph.training import training_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import check_names, machine

NETS: dict[str, Callable[[], Any]] = {
    "resnet50_v2": lambda: networks.model_zoo("resnet50_v2"),
    "example_resnet [3,24,36,3]": lambda: networks.resnet((3, 24, 36, 3)),
    "example_resnet [10,100,213,10]": lambda: networks.resnet((10, 100, 213, 10)),
}


def timed(call: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def simple_bind(symbol: Any, shapes: dict[str, Any]) -> None:
    """As the original does for each trial, until all of it is done."""
    read_planned_mb(symbol.simple_bind(mx.cpu(), grad_req="write", **shapes))
    mx.nd.waitall()


def plain_bind(symbol: Any, graph: ForwardGraph) -> None:
    """With arrays that are never allocated."""
    read_planned_mb(bind(symbol, graph, mx.cpu()))


def plans(graph: ForwardGraph, count: int) -> list[np.ndarray]:
    random = np.random.RandomState(0)
    movable = np.array([node.op not in ("null", "Dropout") for node in graph.nodes])
    shares = random.uniform(0.3, 0.95, size=count)
    return [movable & (random.uniform(size=len(movable)) < share) for share in shares]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NETS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replays", type=int, default=50, help="in each round")
    parser.add_argument("--no-simple-bind", action="store_true")
    options = parser.parse_args(arguments)
    check_names(parser, options.networks, NETS)
    print(machine())
    print("| network | nodes | graphs s | simple_bind s | bind s | replay ms | replays in a bind |")
    print("|---|---|---|---|---|---|---|")
    for name in options.networks or NETS:
        symbol, shapes = NETS[name]()
        start = time.perf_counter()
        graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))
        training = training_graph(graph)
        built = time.perf_counter() - start
        masks = plans(graph, options.replays)
        pool(training, masks[0])  # the library is loaded
        allocating: list[float] = []
        binding: list[float] = []
        replaying: list[float] = []
        for _ in range(options.rounds):
            if not options.no_simple_bind:
                allocating.append(timed(simple_bind, symbol, shapes))
            binding.append(timed(plain_bind, symbol, graph))
            replaying += [timed(pool, training, mask) for mask in masks]
        one, plain = statistics.median(replaying), statistics.median(binding)
        allocated = f"{statistics.median(allocating):.3f}" if allocating else ""
        times = f"{allocated} | {plain:.3f} | {1000 * one:.3f} | {plain / one:.0f}"
        print(f"| {name} | {len(graph.nodes)} | {built:.2f} | {times} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
