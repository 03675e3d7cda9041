"""Binds of MXNet's Symbol for training, by plans: what Module, FeedForward and scripts call."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Callable, Mapping, Optional, Protocol

import numpy as np

from memonger.graph.marks import is_planned
from memonger.schedules.execution.symbol import ScheduledSymbol, by_name, requests_of
from memonger.scripts.executor import marked
from memonger.support.errors import BudgetError, MemongerError, said_by_mxnet
from memonger.support.mxnet import binds_for_itself, mx
from memonger.support.versions import MXNET_ERRORS

Keywords = Mapping[str, Any]
Asked = Optional[Keywords]  # of ``memonger.plan``; None where nothing is trained


class Planner(Protocol):
    """What plans the networks that a script binds."""

    def planned(self, symbol: Any, ctx: Any, asked: Keywords) -> Any:
        """Make the symbol to bind in place of this one; this one if it is best as it is."""

    def refuse(self, symbol: Any, reason: str) -> None:
        """Tell why a network is bound without a plan."""


_planner: Planner | None = None


def plan_binds(planner: Planner | None) -> None:
    """Have this one plan what is bound for training; None: nothing is planned from now on."""
    global _planner
    _planner = planner
    _install()


@functools.lru_cache(None)
def _install() -> None:
    for name, read in (("simple_bind", _read_simple_bind), ("bind", _read_bind)):
        setattr(mx.sym.Symbol, name, _replacement(getattr(mx.sym.Symbol, name), read))


def _replacement(usual: Any, read: Callable[[Any, Keywords], Asked]) -> Any:
    """Make what stands in the place of a method of Symbol that binds."""
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def bind(self: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        planner, caller = _planner, sys._getframe(1).f_globals
        if planner is None or binds_for_itself() or _is_a_copy(caller):
            return usual(self, ctx, *args, **kwargs)
        try:
            asked = read(self, signature.bind(self, ctx, *args, **kwargs).arguments)
            symbol = self if asked is None else planner.planned(self, ctx, asked)
            if isinstance(symbol, ScheduledSymbol):
                return getattr(symbol, usual.__name__)(ctx, *args, **kwargs)
            if symbol is not self:
                return marked(usual(symbol, ctx, *args, **kwargs), symbol)
            reason = ""
        except BudgetError:
            raise
        except MemongerError as error:
            reason = str(error)
        except (*MXNET_ERRORS, TypeError) as error:  # MXNet's, of the plan or of the call
            reason = said_by_mxnet(error)
        made = usual(self, ctx, *args, **kwargs)  # raises as without a plan if the call is at fault
        if reason:
            planner.refuse(self, reason)
        return made

    return bind


def _is_a_copy(caller: Keywords) -> bool:
    """Tell whether this is a copy of the original memonger, which binds to see what plans take."""
    defined = (caller.get(name) for name in ("make_mirror_plan", "search_plan"))
    return all(getattr(each, "__module__", "") == caller.get("__name__") for each in defined)


def _read_simple_bind(symbol: Any, given: Keywords) -> Asked:
    known = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    for name, kind in (given.get("stype_dict") or {}).items():
        if kind not in ("default", "undefined"):
            raise MemongerError(f"{name!r} is stored as {kind}, and a plan needs dense arrays")
    shapes = {n: tuple(s) for n, s in given.get("kwargs", {}).items() if n in known}
    types = {n: t for n, t in (given.get("type_dict") or {}).items() if n in known}
    return _training(symbol, given.get("grad_req", "write"), shapes, types)


def _read_bind(symbol: Any, given: Keywords) -> Asked:
    names = symbol.list_arguments()
    gradients = by_name(given.get("args_grad"), names)
    requests = requests_of(names, given.get("grad_req", "write"))
    arrays = by_name(given["args"], names, "argument")
    arrays.update(by_name(given.get("aux_states"), symbol.list_auxiliary_states()))
    for name, array in [*arrays.items(), *gradients.items()]:
        if array.stype != "default":
            raise MemongerError(f"{name!r} is {array.stype}, and a plan needs dense arrays")
    return _training(
        symbol,
        {name: requests[name] if name in gradients else "null" for name in names},
        {name: array.shape for name, array in arrays.items()},
        {name: np.dtype(array.dtype).name for name, array in arrays.items()},
    )


def _training(symbol: Any, grad_req: Any, shapes: Keywords, types: Keywords) -> Asked:
    """Tell what is asked where a network is bound for gradients; None where it is for none."""
    requests = requests_of(symbol.list_arguments(), grad_req)
    if set(requests.values()) <= {"null"}:
        return None
    if is_planned(symbol):
        raise MemongerError("it has a plan, or marks (force_mirroring), of its own")
    return {"shapes": shapes, "type_dict": types, "grad_req": requests}
