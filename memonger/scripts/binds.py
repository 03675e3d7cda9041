"""Binds of MXNet's Symbol for training, by plans: what Module, FeedForward and scripts call."""

from __future__ import annotations

import functools
import inspect
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Callable, Mapping, MutableMapping, Optional, Tuple

import numpy as np

from memonger.graph.operators.tensors import DENSE_NUMBERS, STORAGE
from memonger.schedules.execution.plain import PlainNetwork
from memonger.schedules.execution.symbol import ScheduledSymbol, by_name, requests_of
from memonger.scripts.executor import marked
from memonger.support.errors import BudgetError, why_unplanned
from memonger.support.mxnet import is_internal_bind, mx
from memonger.support.symbols import attributes, load_nodes, read
from memonger.support.types import Context, Executor, Keywords, Symbol

if TYPE_CHECKING:
    from typing_extensions import Protocol

    from memonger.api.plan import Plan

    class Planner(Protocol):
        """What plans binds: a `Session`."""

        pools: MutableMapping[Executor, int]

        def plan(self, symbol: Symbol, bind: Keywords, ctx: Context, shared: object) -> Plan | None:
            """Plan what is bound for training; None where it is not planned."""

        def refuse(self, symbol: Symbol, reason: str) -> None:
            """Warn that a network is trained without a plan."""

    #: A bind as arguments of `memonger.plan`, the symbol first; None without gradients.
    Training = Optional[Tuple[Symbol, Keywords]]

_planner: Planner | None = None


def plan_binds(planner: Planner | None) -> None:
    """Set what plans that which is bound for training; with None nothing is planned."""
    global _planner
    _planner = planner
    _install()


@functools.lru_cache(None)
def _install() -> None:
    for name, reader in (("simple_bind", _read_simple_bind), ("bind", _read_bind)):
        setattr(mx.sym.Symbol, name, _replacement(getattr(mx.sym.Symbol, name), reader))


def _replacement(usual: FunctionType, reader: Callable[[Symbol, Keywords], Training]) -> object:
    """Make the function in the place of a method of Symbol that binds."""
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def bind(self: Symbol, ctx: Context, *args: object, **kwargs: object) -> Executor:
        planner, caller = _planner, sys._getframe(1).f_globals
        if planner is None or is_internal_bind() or _is_a_copy(caller):
            return usual(self, ctx, *args, **kwargs)
        reason = ""
        try:
            arguments = signature.bind(self, ctx, *args, **kwargs).arguments
            training = reader(self, arguments)
            if training is not None:
                plan = planner.plan(*training, ctx, arguments.get("shared_exec"))
                symbol = self if plan is None or not plan.is_used else plan.symbol
                if isinstance(symbol, ScheduledSymbol):
                    return getattr(symbol, usual.__name__)(ctx, *args, **kwargs)
                executor = usual(symbol, ctx, *args, **kwargs)
                if symbol is not self:
                    plain = PlainNetwork(self, functools.partial(planner.refuse, self))
                    executor = marked(executor, symbol, plain)
                if plan is not None:
                    planner.pools[executor] = plan.pool_bytes
                return executor
        except BudgetError:
            raise
        except Exception as error:  # also a mistake of the call
            reason = why_unplanned(error)
        executor = usual(self, ctx, *args, **kwargs)  # raises for mistakes of the call
        if reason:
            planner.refuse(self, reason)
        return executor

    return bind


def _is_a_copy(caller: Keywords) -> bool:
    """Return whether a caller is a copy of the original memonger, which binds to measure plans."""
    functions = (caller.get(name) for name in ("make_mirror_plan", "search_plan"))
    return all(getattr(f, "__module__", "") == caller.get("__name__") for f in functions)


def _read_simple_bind(symbol: Symbol, arguments: Keywords) -> Training:
    names = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    shapes = {n: tuple(s) for n, s in arguments.get("kwargs", {}).items() if n in names}
    types = {n: t for n, t in (arguments.get("type_dict") or {}).items() if n in names}
    kinds = arguments.get("stype_dict") or {}
    return _training(symbol, arguments.get("grad_req", "write"), shapes, types, kinds)


def _read_bind(symbol: Symbol, arguments: Keywords) -> Training:
    names = symbol.list_arguments()
    gradients = by_name(arguments.get("args_grad"), names)
    requests = requests_of(names, arguments.get("grad_req", "write"))
    arrays = by_name(arguments["args"], names, "argument")
    arrays.update(by_name(arguments.get("aux_states"), symbol.list_auxiliary_states()))
    return _training(
        symbol,
        {name: requests[name] if name in gradients else "null" for name in names},
        {name: array.shape for name, array in arrays.items()},
        {name: np.dtype(array.dtype).name for name, array in arrays.items()},
        {name: array.stype for name, array in arrays.items()},
    )


def _training(
    symbol: Symbol, grad_req: object, shapes: Keywords, types: Keywords, kinds: Mapping[str, str]
) -> Training:
    requests = requests_of(symbol.list_arguments(), grad_req)
    if set(requests.values()) <= {"null"}:
        return None
    network = _stored(symbol, kinds)
    return network, {"shapes": shapes, "type_dict": types, "grad_req": requests}


def _stored(symbol: Symbol, kinds: Mapping[str, str]) -> Symbol:
    """Return a symbol whose variables are stored as this bind has it, by their attributes."""
    ids, attrs = mx.nd.ndarray._STORAGE_TYPE_STR_TO_ID, symbol.attr_dict()
    numbers = {name: str(ids.get(kind, -1)) for name, kind in kinds.items()}
    old = {name: attrs.get(name, {}).get(STORAGE, "0") for name in numbers}
    dense = {*DENSE_NUMBERS}
    new = {n: k for n, k in numbers.items() if k != old[n] and not {k, old[n]} <= dense}
    if not new:
        return symbol
    graph = read(symbol)
    for node in graph["nodes"]:
        if node["op"] == "null" and node["name"] in new:
            node["attrs"] = {**attributes(node), STORAGE: new[node["name"]]}
    return load_nodes(graph["nodes"], graph["heads"])
