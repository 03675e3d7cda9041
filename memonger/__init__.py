"""Train MXNet networks in a fraction of the memory, without changing what they learn."""

# ruff: noqa: F401  what is imported for type checkers alone

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memonger.support import mxnet as _mxnet  # first: it makes MXNet importable
from memonger.support.errors import BudgetError, MemongerError

if TYPE_CHECKING:
    from memonger import gluon
    from memonger.api.check import CheckReport, check
    from memonger.api.explain import Explanation, PlanExplanation, explain
    from memonger.api.frontier import Frontier, LargestBatch, frontier, largest_batch
    from memonger.api.plan import Plan, load_plan
    from memonger.api.planning import (
        get_cost,
        make_mirror_plan,
        plan,
        pool_bytes,
        search_plan,
        search_plan_to_layer,
    )
    from memonger.graph.marks import unplan
    from memonger.scripts.session import Session, disable, enable
    from memonger.support.symbols import load

__version__ = "1.0.0.dev0"

#: Where the public names are: imported when they are first asked for, for that takes seconds.
_ROOMS = {
    "api.check": ("CheckReport", "check"),
    "api.explain": ("Explanation", "PlanExplanation", "explain"),
    "api.frontier": ("Frontier", "LargestBatch", "frontier", "largest_batch"),
    "api.plan": ("Plan", "load_plan"),
    "api.planning": (
        "get_cost",
        "make_mirror_plan",
        "plan",
        "pool_bytes",
        "search_plan",
        "search_plan_to_layer",
    ),
    "graph.marks": ("unplan",),
    "scripts.session": ("Session", "disable", "enable"),
    "support.symbols": ("load",),
}
__all__ = ["BudgetError", "MemongerError", *(name for names in _ROOMS.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name == "gluon":  # a wing of its own: memonger.gluon.plan
        _mxnet.mx  # noqa: B018
        return importlib.import_module("memonger.gluon")
    for room, names in _ROOMS.items():
        if name in names:
            _mxnet.mx  # noqa: B018  says what is wrong with it or NumPy before anything else can
            globals()[name] = found = getattr(importlib.import_module("memonger." + room), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "gluon"})
