"""Memory against depth: chains of equal layers without a plan, with marks, and with schedules.

    python benchmarks/depth.py                       # 64 to 1024 layers
    python benchmarks/depth.py 64 4096 --work 3 inf  # these depths, these limits of forward work
    python benchmarks/depth.py 256 --hidden 32 --batch 8192 --json out.json
    python benchmarks/depth.py --plot memory.png     # needs matplotlib

Every figure is MB (2**20 bytes) of the pool as MXNet plans it, with schedules less the bytes of the
parameters' gradients, which their pool holds and that of a marks plan does not. In brackets the
forward work of a whole step, times that of one forward pass, and the seconds of planning. Each
schedule's symbol is bound: what MXNet then reports must be what was predicted. By default every
tensor of the chain is 1 MB and a layer's weight 4 KB, so that depth alone counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import memonger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import as_module_does, as_plan_takes_it, limit_of_work

MB = 2**20


def of_depth(depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a chain of so many layers."""
    symbol, shapes = networks.chain(depth, options.hidden, options.batch)
    requests = as_module_does(symbol, shapes)
    figures: dict[str, Any] = {"depth": depth, "none": memonger.get_cost(symbol, shapes=shapes)}
    if options.marks:
        keywords = {"patience": options.patience, "grad_req": requests}
        marks = memonger.plan(symbol, shapes, how="marks", **keywords)
        figures["marks"] = marks.pool_bytes / MB
    figures["schedules"] = []
    for work in map(as_plan_takes_it, options.work):
        start = time.perf_counter()
        plan = memonger.plan(
            symbol,
            shapes,
            how="schedule",
            work=work,
            patience=options.patience,
            grad_req=requests,
        )
        figures["schedules"].append(
            {
                "limit": work,
                "mb": plan.pool_bytes / MB,
                "work": 1 + plan.recompute_overhead,
                "seconds": time.perf_counter() - start,
                "bound_as_predicted": plan.exact,
            }
        )
    return figures


def line(figures: dict[str, Any]) -> str:
    cells = [f"{figures['depth']}", f"{figures['none']}"]
    cells.append(f"{figures['marks']:.1f}" if "marks" in figures else "-")
    for found in figures["schedules"]:
        cell = "{mb:.1f} ({work:.2f}, {seconds:.1f} s)".format(**found)
        cells.append(cell + ("" if found["bound_as_predicted"] else " NOT AS BOUND"))
    return f"| {' | '.join(cells)} |"


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Draw memory against depth, 1200 by 800 pixels."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    curves = {"no plan": [row["none"] for row in rows]}
    if "marks" in rows[0]:
        curves["marks"] = [row["marks"] for row in rows]
    for k, found in enumerate(rows[0]["schedules"]):
        work = "any work" if found["limit"] is None else f"{found['limit']:g} x forward work"
        curves[f"schedule, {work}"] = [row["schedules"][k]["mb"] for row in rows]
    depths = [row["depth"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(12, 8), dpi=100)
    # Safe for colour-blind readers (Wong 2011, Nature Methods 8:441), and the markers differ.
    colours = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
    for (name, megabytes), colour, marker in zip(curves.items(), colours, "osD^vP"):
        axes.loglog(depths, megabytes, color=colour, marker=marker, linewidth=2, label=name)
        text, end = f"{megabytes[-1]:.0f} MB", (depths[-1], megabytes[-1])
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, end, color=colour, fontsize=13, **place)
    axes.set_xticks(depths)
    axes.set_xticklabels([str(depth) for depth in depths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_xlabel("layers", fontsize=14)
    axes.set_ylabel("memory of a training step (MB)", fontsize=14)
    axes.set_title("Memory against depth: a chain of fully connected layers", fontsize=16)
    axes.tick_params(labelsize=13)
    axes.grid(True, color="#dddddd")
    axes.legend(fontsize=13, loc="upper left")
    figure.tight_layout()
    figure.savefig(file)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("depths", nargs="*", type=int, help="numbers of layers")
    parser.add_argument(
        "--work", nargs="+", type=limit_of_work, default=[2.0, 3.0, 4.0, math.inf], metavar="R"
    )
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual search")
    parser.add_argument("--no-marks", dest="marks", action="store_false", help="to save time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against depth")
    options = parser.parse_args(arguments)
    limits = ["no limit" if math.isinf(limit) else f"R = {limit:g}" for limit in options.work]
    print(f"| layers | none | marks | {' | '.join(limits)} |")
    print(f"|---|---|---|{'---|' * len(limits)}", flush=True)
    rows = []
    for depth in options.depths or [64, 256, 1024]:
        rows.append(of_depth(depth, options))
        print(line(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot is not None:
        draw(options.plot, rows)
    found = [schedule for row in rows for schedule in row["schedules"]]
    return int(not all(schedule["bound_as_predicted"] for schedule in found))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except memonger.MemongerError as error:
        sys.exit(str(error))
