"""Draw the pictures of the documentation: memory over a training step, and the frontier.

    python benchmarks/pictures.py docs       # needs matplotlib: pip install '.[plot]'

The network is ResNet-50 v1 of Gluon's model zoo. Memory is the same on every machine; the times of
the frontier are predicted from the rates of the device that it is drawn on.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import memonger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks


def draw(symbol: Any, shapes: Any, folder: Path) -> None:
    """Write the three pictures of a network into a folder.

    Parameters
    ----------
    symbol : mx.sym.Symbol
    shapes : dict
        Shapes of its inputs.
    folder : Path
    """
    for how in ("marks", "schedule"):
        plan = memonger.plan(symbol, shapes, how=how)
        plan.plot(folder / (f"memory-{how}.png"))
        print(plan, end="\n\n")
    plans = memonger.frontier(symbol, shapes)
    plans.plot(folder / "frontier.png")
    print(plans)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--net", default="resnet50_v1", help="any of Gluon's model zoo")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    draw(*networks.model_zoo(options.net, options.batch), options.folder)


if __name__ == "__main__":
    main()
