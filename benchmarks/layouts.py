"""What it costs to leave every tensor in the layout that MKLDNN gives it without a plan.

    python benchmarks/layouts.py [--patience 1] [name ...]

Plans networks of the kinds that mix convolutions with operators that know no blocks, once as for
any device, and once as if no layout had to be followed (without it, training on the CPU may differ
in the last bits). Prints MB of the pool, and the seconds of the plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Callable
from unittest import mock

import memonger
from common import check_names, machine
from memonger.planners.marks.layout_rule import NO_RULE, layout_rule
from memonger.support.cache import forget

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import mixed_networks as mixed

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


def planned(name: str, patience: float, follow: bool) -> tuple[memonger.Plan, float]:
    """A plan, and the CPU seconds that it took."""
    symbol, shapes = NETWORKS[name]()
    forget()
    start = time.process_time()
    rule = layout_rule if follow else lambda training: NO_RULE
    with mock.patch("memonger.planners.marks.rules.layout_rule", rule):
        plan = memonger.plan(symbol, shapes, patience=patience)
    return plan, time.process_time() - start


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The price of layouts that stay as they are.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NETWORKS))
    parser.add_argument("--patience", type=float, default=1.0)
    options = parser.parse_args(arguments)
    names = options.names or list(NETWORKS)
    check_names(parser, names, NETWORKS)
    print(machine(), "", sep="\n")
    print("| net | no plan | layouts followed | not followed | CPU s | CPU s, not followed |")
    print("|---|---|---|---|---|---|")
    planned(names[0], 0.01, True)  # observes operators, once in a process
    for name in names:
        (one, seconds), (other, fewer) = (planned(name, options.patience, f) for f in (True, False))
        sizes = (one.unplanned_bytes, one.pool_bytes, other.pool_bytes)
        figures = " | ".join(f"{size / MB:.0f}" for size in sizes)
        print(f"| {name} | {figures} | {seconds:.0f} | {fewer:.0f} |", flush=True)


if __name__ == "__main__":
    main()
