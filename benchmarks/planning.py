"""What a plan takes to find, beside the nine binds of the original's search.

    python benchmarks/planning.py                    # the networks of the README
    python benchmarks/planning.py densenet121 unet   # some of them

Every figure is the CPU seconds of a whole process on all cores, imports and children included, the
median of the rounds: the import of MXNet, that of memonger (and MXNet), nine ``simple_bind`` of the
network, our marks, and our schedule for as much work as two forward passes. What is compared runs
in turns. Then the MB (2**20 bytes) of the pool without a plan, with the marks and with the
schedule. All are bound with gradients of all arguments, as ``simple_bind`` does by default.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import check_names, in_turns, machine

MB = 2**20
BINDS = 9  # trials of the original's ``search_plan``
NETWORKS: dict[str, Callable[[], networks.Network]] = {
    "example_resnet": networks.resnet,
    "resnet50-v1": functools.partial(networks.model_zoo, "resnet50_v1"),
    "densenet121": functools.partial(networks.model_zoo, "densenet121"),
    "mobilenetv2": networks.mobilenet_v2,
    "inception-v3": networks.inception_v3,
    "unet": networks.unet,
    "lstm-4x100": functools.partial(networks.lstm, steps=100),
    "lstm-4x1000": networks.lstm,
    "resnet-10-100-213-10": functools.partial(networks.resnet, (10, 100, 213, 10)),
}
IMPORTS = {"import mxnet": "mxnet", "import memonger": "memonger, mxnet"}


def bind(symbol: Any, shapes: Any, patience: float) -> None:
    """As the original does for each trial; it knows no patience."""
    for _ in range(BINDS):
        symbol.simple_bind(mx.cpu(), grad_req="write", **shapes)


def plan(symbol: Any, shapes: Any, **options: Any) -> dict[str, int]:
    """Plan, and return the MB without the plan and with it."""
    found = memonger.plan(symbol, shapes, **options)
    return {"none": found.unplanned_bytes // MB, "mb": found.pool_bytes // MB}


STEPS: dict[str, Callable[..., Any]] = {
    "nine binds": bind,
    "marks": functools.partial(plan, how="marks"),
    "schedule": functools.partial(plan, how="schedule", work=2.0),
}


def cpu_seconds() -> float:
    """Return what the children that ended have taken."""
    taken = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken.ru_utime + taken.ru_stime


def python(*arguments: str) -> str:
    """Run Python in a fresh process; return what it prints."""
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def measured(name: str, rounds: int, patience: float) -> dict[str, Any]:
    """Return the figures of a network, by column."""
    found: dict[str, Any] = {}

    def step(each: str) -> None:
        said = python(__file__, name, "--step", each, "--patience", str(patience))
        found[each] = json.loads(said)

    steps: dict[str, Callable[[], Any]] = {}
    for title, modules in IMPORTS.items():
        steps[title] = functools.partial(python, "-c", f"import {modules}")
    for title in STEPS:
        steps[title] = functools.partial(step, title)
    seconds = in_turns(steps, rounds, cpu_seconds)
    figures = {title: round(float(np.median(each)), 2) for title, each in seconds.items()}
    sizes = {f"{title} MB": found[title]["mb"] for title in ("marks", "schedule")}
    return {"network": name, **figures, "no plan MB": found["marks"]["none"], **sizes}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=3, help="and one before, not counted")
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    check_names(parser, options.networks, NETWORKS)
    if options.step:
        network = NETWORKS[options.networks[0]]()
        print(json.dumps(STEPS[options.step](*network, patience=options.patience)))
        return
    print(machine())
    rows: list[dict[str, Any]] = []
    for name in options.networks or NETWORKS:
        rows.append(measured(name, options.rounds, options.patience))
        if len(rows) == 1:
            print(f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
        print(f"| {' | '.join(map(str, rows[-1].values()))} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "networks": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
