"""How long operators take on this CPU in training, beside the roofline: for `costs/time/cpu.py`.

    OMP_NUM_THREADS=1 python benchmarks/operators.py                 # all networks
    OMP_NUM_THREADS=1 python benchmarks/operators.py mobilenetv2 lstm --rounds 5

MXNet's profiler times each operator of a training step where it stands in the network, in MXNet's
order and in MKLDNN's layouts. Rows are summed by class, of all networks together: their share of
all time, how often the class takes the time of the nominal CPU's roofline, with its gradient after
it, and how often it takes the time that is predicted of it. Use one thread, and an idle core.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

# Events in the order of the step, each of one operator. Read when MXNet is imported.
os.environ.update(MXNET_ENGINE_TYPE="NaiveEngine", MXNET_EXEC_BULK_EXEC_TRAIN="0")

import memonger  # noqa: E402, F401
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from memonger.costs.pool import pool  # noqa: E402
from memonger.costs.time.cpu import CPU_RATES, find_class, find_factors  # noqa: E402
from memonger.costs.time.roofline import (  # noqa: E402
    count_moved_bytes,
    count_row_flops,
    find_free_rows,
)
from memonger.graph.arrays import BACKWARD  # noqa: E402
from memonger.graph.inputs import read_shapes  # noqa: E402
from memonger.graph.read import forward_graph  # noqa: E402
from memonger.graph.training import TrainingGraph, training_graph  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks  # noqa: E402
from common import check_names, machine  # noqa: E402
from step import trained  # noqa: E402

NETWORKS: dict[str, Any] = {
    "resnet50": functools.partial(networks.model_zoo, "resnet50_v1", batch=4),
    "resnet50-v2": functools.partial(networks.resnet_v2, batch=4),
    "mobilenetv2": functools.partial(networks.mobilenet_v2, batch=8),
    "densenet121": functools.partial(networks.model_zoo, "densenet121", batch=4),
    "googlenet": functools.partial(networks.googlenet, batch=4),
    "vgg16": functools.partial(networks.model_zoo, "vgg16", batch=2),
    "unet": functools.partial(networks.unet, batch=1, image=256),
    "lstm": functools.partial(
        networks.lstm, 2, steps=20, batch=32, hidden=512, labels=1000, use_loss=False
    ),
    "lstm-wide": functools.partial(
        networks.lstm, 2, steps=20, batch=256, hidden=256, labels=100, use_loss=False
    ),
    "transformer": functools.partial(networks.transformer, 2, batch=8, steps=128, vocabulary=1000),
}


def time_rows(symbol: Any, shapes: Any, training: TrainingGraph, rounds: int) -> Any:
    """Time the rows of a training step: the least seconds of each, over so many steps."""
    step = trained(symbol, shapes)
    step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        mx.profiler.set_config(profile_symbolic=True, filename=str(file))
        mx.profiler.set_state("run")
        for _ in range(rounds):
            step()
        mx.profiler.set_state("stop")
        mx.profiler.dump()
        return read_rows(json.loads(file.read_text()), training, rounds)


def read_rows(profile: Any, training: TrainingGraph, rounds: int) -> Any:
    """Read the seconds of each row: the k-th event of an operator is the k-th row of it."""
    order = pool(training, np.zeros(training.arrays.forward_nodes, dtype=np.bool_)).ran.order
    rows = defaultdict(list)
    for row in order.tolist():
        rows[training.ops[row]].append(row)
    events = defaultdict(list)
    for event in profile["traceEvents"]:
        if event.get("ph") in "BE" and event.get("cat") == "operator":
            events[event["name"], event["ph"]].append(event["ts"])  # twice with this engine
    seconds = np.zeros(len(training.ops))
    for op, listed in rows.items():
        begun, ended = events[op, "B"][::2], events[op, "E"][::2]
        if len(begun) == rounds * len(listed):
            took = (np.array(ended) - begun).reshape(rounds, -1)
            seconds[listed] = took.min(axis=0) / 1e6
    return seconds


def rows_of(name: str, rounds: int) -> dict[tuple[str, str], Any]:
    """Sum over a network by class, of rows that run forward and of gradients: rows, and seconds.

    The seconds are those measured, those of the roofline, and those predicted.
    """
    symbol, shapes = NETWORKS[name]()
    graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))
    learned = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    training = training_graph(graph, learned)
    measured = time_rows(symbol, shapes, training, rounds)
    roofline = np.maximum(
        count_row_flops(training) / CPU_RATES.flops, count_moved_bytes(training) / CPU_RATES.nbytes
    )
    factors = np.vstack([find_factors(graph), [1, 1]])
    backward = (training.phases == BACKWARD).astype(int)
    predicted = roofline * factors[training.origin, backward] + CPU_RATES.call
    predicted[find_free_rows(training)] = 0
    sums: dict[tuple[str, str], Any] = defaultdict(lambda: np.zeros(4))
    for row in np.flatnonzero(measured).tolist():
        x = training.origin[row]
        kind = find_class(graph, x) if x >= 0 else training.ops[row]
        phase = "gradient" if backward[row] else "forward"
        sums[kind, phase] += (1, measured[row], roofline[row], predicted[row])
    return dict(sums)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {list(NETWORKS)}; default all")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    check_names(parser, options.nets, NETWORKS)
    print(machine())
    sums: dict[tuple[str, str], Any] = defaultdict(lambda: np.zeros(4))
    names = options.nets or list(NETWORKS)
    # MXNet's profiler writes one whole profile in a process.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        calls = [(name, options.rounds) for name in names]
        for each in pool.starmap(rows_of, calls, chunksize=1):
            for key, values in each.items():
                sums[key] += values
    total = sum(values[1] for values in sums.values())
    print("\n| class | | rows | share | of the roofline | of the prediction |")
    print("|---|---|---|---|---|---|")
    for (kind, phase), (rows, seconds, roofline, predicted) in sorted(
        sums.items(), key=lambda item: -item[1][1]
    ):
        of = [seconds / max(1e-9, other) for other in (roofline, predicted)]
        share = 100 * seconds / total
        print(f"| {kind} | {phase} | {rows:.0f} | {share:.1f} % | {of[0]:.2f} | {of[1]:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
