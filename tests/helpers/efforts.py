"""How long searches and measurements are: in tests a small part of a user's.

Few tests depend on how good a plan is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Tuple

from memonger.costs import placement
from memonger.costs.time import measured
from memonger.planners.marks import search as marks
from memonger.planners.trees import search as trees

SETTINGS = (
    *((module, "EFFORT") for module in (marks, trees, placement)),
    (measured, "ROUNDS"),
)
Efforts = Tuple[Any, ...]  # a value for each setting


def efforts() -> Efforts:
    """Return what this process uses."""
    return tuple(getattr(module, name) for module, name in SETTINGS)


def use(chosen: Efforts, change: Callable[..., None] = setattr) -> None:
    """Search and measure so long from now on."""
    for (module, name), value in zip(SETTINGS, chosen):
        change(module, name, value)


USUAL = efforts()


def _short() -> Efforts:
    of_marks, of_trees, places, *_ = USUAL
    named = ("replays", "replays_near", "annealing")
    fewer = {name: getattr(of_trees, name) // 50 for name in named}
    searches = of_marks.times(1 / 20), dataclasses.replace(of_trees, **fewer), places // 50
    return (*searches, 2)


SHORT = _short()
