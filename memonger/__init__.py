"""Train MXNet networks in a fraction of the memory, without changing what they learn."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

from memonger.support import mxnet as _mxnet  # first: it makes MXNet importable
from memonger.support.errors import BudgetError as BudgetError
from memonger.support.errors import MemongerError as MemongerError

if TYPE_CHECKING:
    from memonger.public import *  # noqa: F403

__version__ = "1.0.0.dev0"
__all__ = (
    "BudgetError CheckReport Explanation Frontier LargestBatch MemongerError Plan PlanExplanation "
    "Session check disable enable explain frontier get_cost largest_batch load load_plan "
    "make_mirror_plan plan pool_bytes search_plan search_plan_to_layer unplan"
).split()


def _note_marks() -> None:
    """Note from now on how variables are marked on autograd's tape, which planned blocks read."""
    with contextlib.suppress(MemongerError, ImportError):  # told when memonger is first used
        importlib.import_module("memonger.support.variables")


_mxnet.when_imported(_note_marks)


if not TYPE_CHECKING:  # a type checker would take any name then

    def __getattr__(name: str) -> object:
        if name not in __all__ and name != "gluon":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _mxnet.mx  # noqa: B018  says what is wrong with it or NumPy before anything else can
        return getattr(importlib.import_module("memonger.public"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "gluon"})
