"""Train 1000 layers in a memory that marks cannot reach; draw memory against depth.

    python examples/example_log_memory.py                       # plan, and train for some steps
    python examples/example_log_memory.py --plot memory.png     # the picture too (needs matplotlib)

A residual network of 1000 fully connected layers tells the arms of a spiral apart. Its training
keeps two results a layer. Marks let MXNet recompute each result once, so that memory grows as the
square root of the depth; a schedule recomputes as often as it pays, and memory grows with the
logarithm (Chen et al. 2016, section 4.4). The plan here is the one of least work within a budget.
"""

import argparse
import math
import multiprocessing
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import memonger  # before mxnet: it makes MXNet importable on newer NumPy
import mxnet as mx
import numpy as np

MB = 2**20
ARMS = 3
DEPTHS = (64, 128, 256, 512, 1024)


def network(layers: int, hidden: int) -> Any:
    """Make a residual network: each layer adds to what comes before it."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden, name="first")
    for i in range(layers):
        y = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"layer{i}")
        x = x + mx.sym.Activation(y, act_type="tanh", name=f"tanh{i}")
    x = mx.sym.FullyConnected(x, num_hidden=ARMS, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def spiral(points: int, seed: int = 0) -> Tuple[np.ndarray, np.ndarray]:
    """Points on the arms of a spiral, and which arm each is on."""
    random = np.random.RandomState(seed)
    arm = random.randint(ARMS, size=points)
    radius = np.sqrt(random.uniform(0.02, 1, size=points))
    angle = 2 * math.pi * (radius / 2 + arm / ARMS) + random.normal(0, 0.1, size=points)
    where = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return where.astype(np.float32), arm.astype(np.float32)


def shapes_of(batch: int) -> Dict[str, Tuple[int, ...]]:
    """Shapes of the inputs."""
    return {"data": (batch, 2), "softmax_label": (batch,)}


def planned(symbol: Any, batch: int, **options: Any) -> memonger.Plan:
    """Plan as Module binds: without gradients of the inputs."""
    shapes = shapes_of(batch)
    requests = {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}
    return memonger.plan(symbol, shapes, grad_req=requests, **options)


class Trained(NamedTuple):
    """What came of training: of the process that did, resident MB before and at most."""

    accuracy: float
    step_seconds: float
    before_mb: int
    peak_mb: int


def train(symbol: Any, layers: int, batch: int, steps: int) -> Trained:
    """Train with Module.fit."""
    points, arms = spiral(batch * steps)
    before = resident_mb("VmRSS")
    mx.random.seed(0)
    module = mx.mod.Module(symbol)
    start = time.perf_counter()
    module.fit(
        mx.io.NDArrayIter(points, arms, batch),
        num_epoch=1,
        optimizer="adam",
        optimizer_params={"learning_rate": 0.0005},
        initializer=mx.init.Mixed(
            ["(first|scores).*", ".*"],
            # Each layer adds little, so that the sum of all is of the size of one.
            [mx.init.Xavier(), mx.init.Xavier(magnitude=3 / layers)],
        ),
    )
    mx.nd.waitall()
    seconds = (time.perf_counter() - start) / steps
    accuracy = module.score(mx.io.NDArrayIter(*spiral(batch, seed=1), batch), "acc")[0][1]
    return Trained(accuracy, seconds, before, resident_mb("VmHWM"))


def resident_mb(what: str) -> int:
    """Tell the resident memory of this process in MB: VmRSS now, VmHWM at most."""
    with open("/proc/self/status") as status:
        return int(re.findall(what + r":\s*(\d+) kB", status.read())[0]) // 2**10


# -- the picture ------------------------------------------------------------------------------


def measure(depths: Sequence[int], hidden: int, batch: int) -> Dict[str, List[float]]:
    """MB of the pool for each depth: no plan, marks, and schedules."""
    found: Dict[str, List[float]] = {}
    for depth in depths:
        symbol = network(depth, hidden)
        marks = planned(symbol, batch, how="marks")
        for name, nbytes in (
            ("no plan", marks.unplanned_bytes),
            ("marks", marks.pool_bytes),
            (
                "schedule, 3 x forward work",
                planned(symbol, batch, how="schedule", work=3).pool_bytes,
            ),
            ("schedule, any work", planned(symbol, batch, how="schedule").pool_bytes),
        ):
            found.setdefault(name, []).append(nbytes / MB)
            print(f"{depth:5d} layers  {name:<28} {nbytes / MB:8.1f} MB", flush=True)
    return found


def draw(file: str, depths: Sequence[int], found: Dict[str, List[float]]) -> None:
    """Draw memory against depth, 1200 by 800 pixels."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # Safe for colour-blind readers (Wong 2011, Nature Methods 8:441), and the markers differ.
    styles = zip(("#000000", "#0072B2", "#E69F00", "#009E73"), "osD^")
    figure, axes = pyplot.subplots(figsize=(12, 8), dpi=100)
    for (name, megabytes), (colour, marker) in zip(found.items(), styles):
        axes.loglog(depths, megabytes, color=colour, marker=marker, linewidth=2, label=name)
        axes.annotate(
            f"{megabytes[-1]:.3g} MB",
            (depths[-1], megabytes[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            fontsize=13,
            va="center",
        )
    axes.set_xticks(depths)
    axes.set_xticklabels([str(depth) for depth in depths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_xlabel("layers", fontsize=14)
    axes.set_ylabel("memory of a training step (MB)", fontsize=14)
    axes.set_title("Memory against depth: a residual network, fully connected", fontsize=16)
    axes.tick_params(labelsize=13)
    axes.grid(True, color="#dddddd")
    axes.legend(fontsize=13, loc="upper left")
    figure.tight_layout()
    figure.savefig(file)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the example; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("--layers", 1000, "layers"),
        ("--hidden", 32, "results of a layer for each point"),
        ("--batch", 2048, "points in a batch"),
        ("--steps", 60, "training steps"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=what + " (default: %(default)s)"
        )
    parser.add_argument(
        "--budget", type=float, default=6, metavar="MB", help="memory to train in (default: 6)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw memory against depth, as a PNG")
    options = parser.parse_args(arguments)

    symbol = network(options.layers, options.hidden)
    marks = planned(symbol, options.batch, how="marks")
    print(f"no plan         {marks.unplanned_bytes / MB:8.1f} MB")
    print(f"smallest marks  {marks.pool_bytes / MB:8.1f} MB", flush=True)
    plan = planned(symbol, options.batch, how="schedule", budget=int(options.budget * MB))
    print(
        f"schedule        {plan.pool_bytes / MB:8.1f} MB, {1 + plan.recompute_overhead:.2f} times "
        "the forward work",
        flush=True,
    )
    if options.steps:
        asked = plan.symbol, options.layers, options.batch, options.steps
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            trained = process.submit(train, *asked).result()
        print(
            f"trained for {options.steps} steps of {trained.step_seconds:.1f} s: accuracy "
            f"{trained.accuracy:.3f}, resident memory {trained.peak_mb} MB at most "
            f"({trained.before_mb} MB before)"
        )
    if options.plot:
        draw(options.plot, DEPTHS, measure(DEPTHS, options.hidden, options.batch))
        print(f"drawn to {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
