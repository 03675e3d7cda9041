"""What a report holds, read back from its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import memonger
import numpy as np

import networks


def data_of(page: Path) -> Any:
    """The JSON in a page."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(found)
    for plan in data["plans"]:
        plan.update({name: column(plan[name]) for name in ("times", "why", "reason")})
    for line in (data["unplanned"], *(plan["timeline"] for plan in data["plans"])):
        line.update({name: column(line[name]) for name in ("runs", "phase", "drawn")})
        tensors = {name: column(written) for name, written in line["tensors"].items()}
        tensors["stop"] = [a + b for a, b in zip(tensors["start"], tensors["stop"])]
        if line["drawn"] is None:
            line["drawn"] = list(range(line["steps"]))
            tensors.update(first=tensors["start"], last=tensors["stop"])
        line["tensors"] = tensors
    return data


def column(written: Any) -> Any:
    """A column of numbers, as the page reads it."""
    if not isinstance(written, dict):
        return written
    if "steps" in written:
        return np.cumsum(written["steps"]).tolist()
    if "values" in written:
        return [written["values"][place] for place in written["places"]]
    runs = written["runs"]
    return np.repeat(runs[::2], runs[1::2]).tolist()


def live_of(timeline: Any) -> np.ndarray:
    """The bytes alive in each drawn step, added up from tensors."""
    tensors = {name: np.array(column) for name, column in timeline["tensors"].items()}
    live = np.zeros(len(timeline["drawn"]) + 1, dtype=np.int64)
    np.add.at(live, tensors["first"], tensors["bytes"])
    np.subtract.at(live, tensors["last"] + 1, tensors["bytes"])
    return np.cumsum(live)[:-1]


def chain_plans() -> tuple[Any, Any, memonger.Frontier, memonger.Plan]:
    """A network, its shapes, its frontier, and the smallest schedule."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    plans = memonger.frontier(symbol, shapes, points=5)
    return symbol, shapes, plans, memonger.plan(symbol, shapes, how="schedule")
