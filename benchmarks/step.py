"""Training steps for real: their time, and the peak resident memory of a process that runs them.

    OMP_NUM_THREADS=1 python benchmarks/step.py                    # a chain, and three CNNs
    OMP_NUM_THREADS=1 python benchmarks/step.py resnet50-v1 --work 2 3 --rounds 5

Each network is trained without a plan, with marks, and with a schedule for each limit of forward
work (inf: none). Time: the plans take turns in one process, and the figure is the median of the
ratios to the unplanned step of the same round. Memory: each plan in a process of its own, MB (2**20
bytes) by which its resident memory grows from before the network is bound to its peak; beside it
what was predicted, with the parameters' gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import as_module_does, as_plan_takes_it, check_names, in_turns, limit_of_work, machine

MB = 2**20
STEPS = 2  # in a process that measures memory

NETWORKS: dict[str, Callable[[], networks.Network]] = {
    "chain-1024": functools.partial(networks.chain, 1024, hidden=32, batch=8192),
    "resnet50-v1": functools.partial(networks.model_zoo, "resnet50_v1", batch=8),
    "example-resnet-3-4-6-3": functools.partial(networks.resnet, (3, 4, 6, 3), batch=4),
    "mobilenetv2": functools.partial(networks.mobilenet_v2, batch=8),
}


def module_of(symbol: Any, shapes: Any, shared: Any = None) -> Any:
    """A network bound with Module, ready to train.

    With ``shared`` it has the arrays, the optimizer and the memory of another module, for the two
    to take turns.
    """
    labels = {name: shape for name, shape in shapes.items() if "label" in name}
    module = mx.mod.Module(
        symbol,
        data_names=[name for name in shapes if name not in labels],
        label_names=list(labels) or None,
    )
    data = [(name, shape) for name, shape in shapes.items() if name not in labels]
    module.bind(data, list(labels.items()) or None, shared_module=shared)
    if shared is not None:
        module.borrow_optimizer(shared)
        return module
    mx.random.seed(0)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 1e-4})
    return module


def step_of(module: Any, shapes: Any) -> Callable[[], None]:
    """What runs one training step of a module, to the end."""
    batch = mx.io.DataBatch(
        [mx.nd.random.uniform(shape=s) for n, s in shapes.items() if "label" not in n],
        [mx.nd.zeros(shape) for n, shape in shapes.items() if "label" in n],
    )

    def step() -> None:
        module.forward_backward(batch)
        module.update()
        mx.nd.waitall()

    return step


def trained(symbol: Any, shapes: Any) -> Callable[[], None]:
    """Bind a network with Module; return what runs one training step of it, to the end."""
    return step_of(module_of(symbol, shapes), shapes)


def resident_mb(what: str) -> float:
    """VmRSS: now; VmHWM: at most so far."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(what + r":\s*(\d+) kB", status)[0]) / 2**10


def growth(file: str) -> None:
    """Run some steps of a pickled network; print by how many MB the resident memory grew."""
    symbol, shapes = pickle.loads(Path(file).read_bytes())
    small, its_shapes = networks.chain(24, 32, 512)  # for what is set up once, by MXNet and by us
    planned = memonger.plan(small, its_shapes, how="schedule", patience=0.001)
    trained(planned.symbol, its_shapes)()
    before = resident_mb("VmRSS")
    step = trained(symbol, shapes)
    for _ in range(STEPS):
        step()
    print(resident_mb("VmHWM") - before)


def measured_growth(symbol: Any, shapes: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network"
        file.write_bytes(pickle.dumps((symbol, shapes)))
        command = [sys.executable, __file__, "--growth", str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return float(done.stdout.split()[-1])


def plans(
    symbol: Any, shapes: Any, limits: list[float], patience: float
) -> dict[str, memonger.Plan]:
    """Plans by name, as Module binds: without gradients of inputs."""
    asked: dict[str, Any] = {"grad_req": as_module_does(symbol, shapes), "patience": patience}
    found = {"marks": memonger.plan(symbol, shapes, how="marks", **asked)}
    for limit in limits:
        found[f"R = {limit:g}"] = memonger.plan(
            symbol, shapes, how="schedule", work=as_plan_takes_it(limit), **asked
        )
    return found


def compare(name: str, network: networks.Network, options: argparse.Namespace) -> dict[str, Any]:
    symbol, shapes = network
    found = plans(symbol, shapes, options.work, options.patience)
    symbols = {"none": symbol, **{key: plan.symbol for key, plan in found.items()}}
    arguments = zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])
    gradients = sum(4 * int(np.prod(shape)) for key, shape in arguments if key not in shapes)
    predicted = {key: (plan.pool_bytes + gradients) / MB for key, plan in found.items()}
    predicted["none"] = (found["marks"].unplanned_bytes + gradients) / MB
    peak = {key: measured_growth(s, shapes) for key, s in symbols.items()}
    steps = {key: trained(s, shapes) for key, s in symbols.items()}
    seconds = in_turns(steps, options.rounds)
    return {
        "name": name,
        "rows": [
            {
                "plan": key,
                "predicted_mb": predicted[key],
                "peak_mb": peak[key],
                "work": 1 + found[key].recompute_overhead if key in found else 1.0,
                "seconds": float(np.median(seconds[key])),
                "ratio": float(np.median(seconds[key] / seconds["none"])),
            }
            for key in symbols
        ],
    }


HEADER = """
| network | plan | predicted MB | peak MB | of none | forward work | s a step | time of none |
|---|---|---|---|---|---|---|---|"""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--growth"]:
        growth(arguments[1])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"by default all: {list(NETWORKS)}")
    parser.add_argument(
        "--work", nargs="+", type=limit_of_work, default=[2.0, math.inf], metavar="R"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    check_names(parser, options.nets, NETWORKS)
    print(machine())
    print(HEADER, flush=True)
    found = []
    for name in options.nets or NETWORKS:
        found.append(compare(name, NETWORKS[name](), options))
        rows = found[-1]["rows"]
        for row in rows:
            share = row["peak_mb"] / rows[0]["peak_mb"]
            print(
                f"| {name} | {row['plan']} | {row['predicted_mb']:.0f} | {row['peak_mb']:.0f} | "
                f"{share:.3f} | {row['work']:.2f} | {row['seconds']:.2f} | {row['ratio']:.2f} |",
                flush=True,
            )
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
