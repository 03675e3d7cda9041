"""Pictures of a plan (with matplotlib, the extra ``plot``)."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from typing import TYPE_CHECKING, Iterator, Mapping, Sequence

import numpy as np

from memonger.costs.usage import Usage
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED
from memonger.show.record import PlanRecord
from memonger.support import files
from memonger.support.errors import MB, MemongerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Safe for colour-blind readers (Wong 2011, Nature Methods 8:441), and different in print.
COLOURS = {
    FORWARD: ("results of the forward pass", "#0072B2"),
    RECOMPUTED: ("recomputed", "#E69F00"),
    BACKWARD: ("gradients", "#56B4E9"),
}
STYLE: dict[str, object] = {"font.size": 12, "axes.titlesize": 14, "axes.titlelocation": "left"}
STYLE.update({"axes.spines.right": False, "axes.spines.top": False, "legend.frameon": False})


def plot_memory(file: files.Path | None, panels: Mapping[str, Usage]) -> Figure:
    """Draw memory over the training step, a panel for each title."""
    with _picture(file) as figure:
        rows = np.atleast_1d(figure.subplots(len(panels), 1, sharey=True))
        for axes, (title, memory) in zip(rows, panels.items()):
            axes.set_title(title)
            _panel(axes, memory)
        highest = max(int(memory.live.max(initial=1)) for memory in panels.values()) / MB
        rows[0].set_ylim(0, 1.28 * highest)  # room for the text at the peak
        rows[-1].set_xlabel("operators of one training step, in the order in which they run")
        figure.legend(*rows[0].get_legend_handles_labels(), loc="upper center", ncol=len(COLOURS))
        figure.tight_layout(rect=(0, 0, 1, 0.96))
    return figure


def _panel(axes: Axes, memory: Usage) -> None:
    peak, order = memory.peak, memory.ran.order
    runs = ~memory.step.arrays.variable[order]  # variables take no time
    places = np.arange(int(runs.sum()) + 1)  # the last one has an end too
    names, colours = zip(*COLOURS.values())
    lives = [memory.count_live(kind)[runs] for kind in COLOURS]
    stacks = [np.append(live, live[-1:]) / MB for live in lives]
    axes.stackplot(places, *stacks, colors=colours, labels=names, step="post", linewidth=0)
    x, y = runs[:peak].sum() + 0.5, memory.live[peak] / MB
    axes.plot([x], [y], marker="v", color="black", markersize=9)
    lines = [f"peak {y:.1f} MiB alive at once", *textwrap.wrap("in " + memory.running, 64)]
    text = "\n".join(f"  {line}  " for line in lines)
    axes.text(x, y, text, ha="right" if x > 0.55 * len(places) else "left", va="bottom")
    phases = memory.step.phases[order][runs]
    border = np.flatnonzero(phases == FORWARD).max(initial=-1) + 1
    axes.axvline(border, color="black", linewidth=1, linestyle=":")
    axes.text(border, 1, " backward pass", va="top", transform=axes.get_xaxis_transform())
    axes.set_ylabel("memory alive in MiB")
    axes.set_xlim(0, max(1, len(places) - 1))


def plot_frontier(file: files.Path | None, plans: Sequence[PlanRecord]) -> Figure:
    """Draw Pareto-optimal plans: the memory of their pools against the time that each adds."""
    x = np.array([plan.pool_bytes for plan in plans]) / MB
    y = np.array([100 * plan.time_overhead for plan in plans])
    unplanned, colour = plans[0].unplanned_bytes / MB, COLOURS[FORWARD][1]
    with _picture(file) as figure:
        axes = figure.subplots()
        axes.step(x, y, "o-", where="pre", color=colour, linewidth=2, markersize=8)
        highest = max(1.0, float(y.max(initial=0)))
        axes.set_xlim(0, 1.15 * max(unplanned, float(x.max(initial=0))))  # room for a label
        axes.set_ylim(-0.06 * highest, 1.2 * highest)
        ends = {len(x) - 1: ("smallest", "bottom")}
        if plans[0].kind == "none":
            ends[0] = ("no plan", "center")  # beside it, for the others are left of it
        for k, (name, side) in ends.items():
            text = f"   {name}\n   {x[k]:.1f} MiB" + (f"\n   +{y[k]:.1f} % time" if y[k] else "")
            axes.text(x[k], y[k], text, va=side)
        axes.set_xlabel("memory of the pool in MiB")
        axes.set_ylabel("predicted time added to a training step (%)")
        share = 100 / unplanned  # % of a MiB
        shares = axes.secondary_xaxis(
            "top", functions=(lambda x: np.multiply(x, share), lambda x: np.divide(x, share))
        )
        shares.set_xlabel("of the memory without a plan (%)")
        axes.grid(color="0.9")
        figure.tight_layout()
    return figure


def _check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MemongerError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from None


def check_picture(file: files.Path) -> str:
    """Check that a picture can be written, before a long search; return its kind, such as 'png'."""
    _check_matplotlib()
    name = os.fsdecode(file)
    kind = os.path.splitext(name)[1][1:].lower()
    if kind not in ("png", "svg", "pdf"):
        raise MemongerError(f"{name} cannot be written: it must end in .png, .svg or .pdf")
    files.check_writable(file)
    return kind


@contextlib.contextmanager
def _picture(file: files.Path | None) -> Iterator[Figure]:
    """Yield an empty picture, and write it to a file, if there is one, when it is drawn."""
    _check_matplotlib()
    content, kind = io.BytesIO(), check_picture(file) if file is not None else ""
    import matplotlib.figure

    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(12, 8), dpi=100)  # 1200 x 800 pixels
        yield figure
        if file is not None:
            figure.savefig(content, format=kind)
    if file is not None:
        files.write(file, content.getvalue())
