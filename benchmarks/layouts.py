"""What plans take by the devices that they are for.

    python benchmarks/layouts.py [--patience 1] [name ...]

Plans networks of the kinds that mix convolutions with operators that know no blocks. A plan for any
device, or for the CPU, leaves every tensor in the layout that MKLDNN gives it without a plan; one
for a GPU need not. Prints MB of the pool, and the CPU seconds of the plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Callable

import memonger
from common import check_names, machine
from memonger.support.cache import forget

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from networks import mixed

MB = 2**20
NETWORKS: dict[str, Callable[[], mixed.Network]] = {
    "SE-ResNet-50": lambda: mixed.se_resnet(64, 224, (3, 4, 6, 3)),
    "MobileNetV3": lambda: mixed.mobilenet_v3(40, 224, 15),
    "ShuffleNet": lambda: mixed.shufflenet(240, 112, 16),
    "ShuffleNetV2": lambda: mixed.shufflenet_v2(240, 112, 16),
    "EfficientNet": lambda: mixed.efficientnet(32, 224, 16),
    "hourglass": lambda: mixed.hourglass(256, 128, 4),
    "DeepLab": lambda: mixed.deeplab(64, 256),
}


DEVICES = ("any", "cpu", "gpu")


def planned(name: str, patience: float, ctx: str) -> tuple[memonger.Plan, float]:
    """A plan, and the CPU seconds that it took."""
    symbol, shapes = NETWORKS[name]()
    forget()
    start = time.process_time()
    plan = memonger.plan(symbol, shapes, how="marks", patience=patience, ctx=ctx)
    return plan, time.process_time() - start


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What plans take by the devices they are for.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NETWORKS))
    parser.add_argument("--patience", type=float, default=1.0)
    options = parser.parse_args(arguments)
    names = options.names or list(NETWORKS)
    check_names(parser, names, NETWORKS)
    print(machine(), "", sep="\n")
    print("| net | no plan | any | cpu | gpu | CPU s, any | CPU s, cpu | CPU s, gpu |")
    print("|---|---|---|---|---|---|---|---|")
    planned(names[0], 0.01, "any")  # observes operators, once in a process
    for name in names:
        plans, seconds = zip(*(planned(name, options.patience, ctx) for ctx in DEVICES))
        sizes = (plans[0].unplanned_bytes, *(plan.pool_bytes for plan in plans))
        figures = [f"{size / MB:.0f}" for size in sizes] + [f"{each:.0f}" for each in seconds]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
