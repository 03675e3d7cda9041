"""What a report holds, read back from its page."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import memonger
import numpy as np

import networks


def data_of(page: Path) -> Any:
    """Return the JSON in a page."""
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', text)
    return json.loads(gzip.decompress(b64decode(data)))


def live_of(timeline: Any) -> np.ndarray:
    """Return the bytes alive in each drawn step, added up from tensors."""
    tensors = {name: np.array(column) for name, column in timeline["tensors"].items()}
    live = np.zeros(len(timeline["drawn"]) + 1, dtype=np.int64)
    np.add.at(live, tensors["first"], tensors["bytes"])
    np.subtract.at(live, tensors["last"] + 1, tensors["bytes"])
    return np.cumsum(live)[:-1]


def chain_plans() -> tuple[Any, Any, memonger.Frontier, memonger.Plan]:
    """Return a network, its shapes, its frontier of marks, and the smallest schedule."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    plans = memonger.frontier(symbol, shapes, points=5, how="marks")
    return symbol, shapes, plans, memonger.plan(symbol, shapes, how="schedule")
