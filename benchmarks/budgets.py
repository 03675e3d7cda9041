"""The time of a training step within a budget of memory, predicted and measured.

    OMP_NUM_THREADS=1 python benchmarks/budgets.py                      # six networks
    OMP_NUM_THREADS=1 python benchmarks/budgets.py vgg16 --how marks    # one of them, marks alone
    OMP_NUM_THREADS=1 python benchmarks/budgets.py --budgets 0.5 0.7 --measure --json out.json
    python benchmarks/budgets.py --gpu V100                             # predict only, for this GPU

Each network is trained without a plan, with the plan of the original's algorithm on its
mirror_stage marks, and with the fastest plan that is found within several shares of the memory that
it needs without one, and within the memory of the original's plan, if that saves any. All are bound
to the same parameters, gradients and memory, and take turns; a figure is the median of the ratios
to the unplanned step of the same round. Time that is added is a share of that step: predicted, from
FLOPs and bytes or with --measure from the time of each operator alone, and measured. Where plans
for different budgets are the same, they are measured once. Use one thread, and a core that nothing
else runs on (taskset), for figures that can be compared; or one thread and --processor-time.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import memonger
import numpy as np
from memonger.solve.facts import measure as pool_of
from memonger.solve.network import read_network

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import as_module_does, check_names, in_turns, machine, plan_as_original
from step import module_of, step_of

MB = 2**20
BUDGETS = [1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]

NETWORKS = {
    "example-resnet-3-4-6-3": functools.partial(networks.resnet, (3, 4, 6, 3), batch=4),
    "resnet50-v2": functools.partial(networks.resnet_v2, batch=4),
    "vgg16": functools.partial(networks.model_zoo, "vgg16", batch=2),
    "densenet121": functools.partial(networks.model_zoo, "densenet121", batch=4),
    "mobilenetv2": functools.partial(networks.mobilenet_v2, batch=8),
    "lstm-2x20": functools.partial(
        networks.lstm, 2, steps=20, batch=32, hidden=512, labels=1000, use_loss=False
    ),
    "tiny": functools.partial(networks.resnet, (1, 1), batch=4, image=32, classes=10, filters=8),
}
USUAL = [name for name in NETWORKS if name != "tiny"]


def plans(symbol: Any, shapes: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each plan, as Module binds: without gradients of inputs."""
    requests = as_module_does(symbol, shapes)
    common = {"grad_req": requests, "patience": options.patience}
    if options.gpu is not None:
        common.update(ctx="gpu", gpu=options.gpu)
    none = memonger.plan(symbol, shapes, budget=1.0, grad_req=requests)
    original = plan_as_original(symbol, shapes, requests)
    memory = pool_of(read_network(original, shapes, grad_req=requests))
    rows = [
        row("none", "", 1.0, none),
        {
            "plan": "original",
            "budget": "",
            "bytes": memory.pool_bytes,
            "predicted": None,
            "recompute_overhead": memory.recomputed_flops,
            "symbol": original,
            "key": original.tojson(),
        },
    ]
    budgets: list[Any] = list(options.budgets)
    if memory.pool_bytes < none.pool_bytes:
        budgets.append(memory.pool_bytes)
    for how in options.how:
        for budget in budgets:
            told = "as original" if isinstance(budget, int) else "%.0f %%" % (100 * budget)
            start = time.perf_counter()
            try:
                plan = memonger.plan(
                    symbol, shapes, how=how, budget=budget, measure=options.measure, **common
                )
            except memonger.BudgetError as error:
                least = error.least_bytes / none.pool_bytes
                rows.append({"plan": how, "budget": told, "least": least})
                continue
            rows.append(row(how, told, plan.time_overhead, plan))
            rows[-1]["seconds_to_plan"] = time.perf_counter() - start
    for found in rows:
        if "bytes" in found:
            found["memory"] = found["bytes"] / none.pool_bytes
    rows[0]["predicted"] = 0.0
    return rows


def row(name: str, budget: str, predicted: Any, plan: Any) -> dict[str, Any]:
    """A plan and what is predicted of it; measured is added."""
    operations = None if plan.schedule is None else plan.schedule.operations.tolist()
    return {
        "plan": name,
        "budget": budget,
        "bytes": plan.pool_bytes,
        "predicted": predicted,
        "recompute_overhead": plan.recompute_overhead,
        "symbol": plan.symbol,
        "key": json.dumps([plan.symbol.tojson(remove_amp_cast=False), operations]),
    }


def measure(rows: list[dict[str, Any]], shapes: Any, rounds: int, clock: Any) -> None:
    """Train all plans in turns, and add the measured times to the rows."""
    steps: dict[str, Any] = {}
    first = None
    for found in rows:
        if "symbol" not in found:
            continue
        key = found["key"]
        if key not in steps:
            module = module_of(found["symbol"], shapes, first)
            first = first or module
            steps[key] = step_of(module, shapes)
    seconds = in_turns(steps, rounds, clock)
    none = seconds[rows[0]["key"]]
    for found in rows:
        key = found.get("key")
        if key is not None:
            found["seconds"] = float(np.median(seconds[key]))
            found["measured"] = float(np.median(seconds[key] / none)) - 1


HEADER = """
| network | plan | budget | memory | predicted time | measured time | s a step |
|---|---|---|---|---|---|---|"""


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    if "least" in found:
        at_least = "at least %.0f %%" % (100 * found["least"])
        return "| {} | {} | {} | {} | - | - | - |".format(
            name,
            found["plan"],
            found["budget"],
            at_least,
        )
    predicted = found["predicted"]
    return "| {} | {} | {} | {:.0f} % | {} | {} | {} |".format(
        name,
        found["plan"],
        found["budget"],
        100 * found["memory"],
        "-" if predicted is None else "%+.1f %%" % (100 * predicted),
        "%+.1f %%" % (100 * found["measured"]) if "measured" in found else "-",
        "{:.3f}".format(found["seconds"]) if "seconds" in found else "-",
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {list(NETWORKS)}; all but tiny")
    parser.add_argument("--how", nargs="+", choices=["marks", "schedule"])
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="SHARE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", metavar="NAME", help="predict for this GPU; train nothing")
    parser.add_argument("--measure", action="store_true", help="predict by operators measured")
    parser.add_argument(
        "--processor-time", action="store_true", help="do not count what other processes take"
    )
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    options.how = options.how or ["marks", "schedule"]
    check_names(parser, options.nets, NETWORKS)
    print(machine())
    print(HEADER, flush=True)
    figures = []
    for name in options.nets or USUAL:
        symbol, shapes = NETWORKS[name]()
        rows = plans(symbol, shapes, options)
        clock = time.process_time if options.processor_time else time.perf_counter
        if options.gpu is None:
            measure(rows, shapes, options.rounds, clock)
        rows = [{k: v for k, v in found.items() if k not in ("symbol", "key")} for found in rows]
        figures.append({"name": name, "rows": rows})
        for found in rows:
            print(line(name, found), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
