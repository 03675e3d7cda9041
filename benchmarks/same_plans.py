"""Whether another version of memonger finds the same plans, to the byte.

    python benchmarks/same_plans.py write before.json     # with one version
    python benchmarks/same_plans.py compare before.json   # with another, prints what differs

Of each network the plans by marks, by schedules with the work of two and three forward passes, and
within budgets of 80, 60 and 40 % are made. Of each plan the hash of its symbol and schedule, the
bytes of its pool, of its peak and of the device, and its time are kept. A refactoring changes none
of them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Callable, Mapping

import memonger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks

NETWORKS: dict[str, Callable[[], networks.Network]] = {
    "example_resnet": networks.resnet,
    "resnet50-v1": functools.partial(networks.model_zoo, "resnet50_v1"),
    "densenet121": functools.partial(networks.model_zoo, "densenet121"),
    "mobilenetv2": networks.mobilenet_v2,
    "inception-v3": networks.inception_v3,
    "unet": networks.unet,
    "lstm-4x30": functools.partial(networks.lstm, steps=30),
    "lstm-4x100": functools.partial(networks.lstm, steps=100),
}
CALLS: Mapping[str, Mapping[str, Any]] = {
    "marks": {"how": "marks"},
    "work 2": {"how": "schedule", "work": 2.0},
    "work 3": {"how": "schedule", "work": 3.0},
    **{f"budget {share} %": {"budget": f"{share}%"} for share in (80, 60, 40)},
}


def figures(name: str, patience: float) -> dict[str, list[Any]]:
    """Return the figures of each plan of a network."""
    network = NETWORKS[name]()
    found: dict[str, list[Any]] = {}
    for call, options in CALLS.items():
        try:
            plan = memonger.plan(*network, patience=patience, **options)
        except memonger.BudgetError as error:
            found[call] = [str(error)]
            continue
        schedule = [] if plan.schedule is None else plan.schedule.operations.tolist()
        planned = json.dumps([plan.symbol.tojson(), schedule])
        digest = hashlib.sha256(planned.encode()).hexdigest()
        nbytes = plan.pool_bytes, plan.peak_bytes, plan.device_bytes
        found[call] = [digest[:16], *nbytes, plan.time_overhead]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("do", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("networks", nargs="*", default=[*NETWORKS])
    parser.add_argument("--patience", type=float, default=0.02)
    options = parser.parse_args(arguments)
    known = json.loads(options.file.read_text()) if options.do == "compare" else {}
    found, differ = {}, 0
    for name in options.networks:
        found[name] = figures(name, options.patience)
        for call, now in found[name].items() if known else ():
            before = known[name][call]
            if before != now:
                differ += 1
                print(f"{name}, {call}: {before} -> {now}")
    if not known:
        options.file.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} networks, {sum(map(len, found.values()))} plans, {differ} differ")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
