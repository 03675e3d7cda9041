"""How arrays are marked on autograd's tape: as which variables, with which requests.

Only the operators that compute the gradient of a variable get the request for it (``AGInfo`` in
``include/mxnet/imperative.h``). So this module, when it is imported, replaces the function of MXNet
that marks variables by one that also notes the requests.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from memonger.support.mxnet import mx
from memonger.support.types import NDArray, Symbol

if TYPE_CHECKING:
    from _ctypes import CFuncPtr

LIB = mx.base._LIB

NULL, WRITE, ADD = REQUESTS = "null", "write", "add"
_REQUEST_OF_NUMBER = {mx.autograd._GRAD_REQ_MAP[request]: request for request in REQUESTS}


class Mark(NamedTuple):
    """What the tape has for an array."""

    name: str  # of the variable; no other one has it
    request: str  # for the gradient


_marks: dict[int, Mark] = {}  # the latest of each handle of an array, which may have been freed


def symbol_of(handle: object) -> Symbol:
    """Return the symbol of what an array was computed from, or None if it is not on the tape."""
    symbol = mx.base.SymbolHandle()
    if LIB.MXAutogradGetSymbol(handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)


def is_noted(array: NDArray) -> bool:
    """Return whether an array was marked since memonger was imported, or is not marked."""
    symbol = symbol_of(array.handle)
    return symbol is None or _noted_mark(array, symbol) is not None


def mark_of(array: NDArray, unseen: str = WRITE) -> Mark:
    """Return what an array is marked as; the gradient of what was computed is written.

    ``unseen`` is the request of a variable that was marked before memonger was imported.
    """
    symbol = symbol_of(array.handle)
    if symbol is None:
        return Mark("", NULL)
    mark = _noted_mark(array, symbol)
    if mark is not None:
        return mark
    names = symbol.list_inputs()
    # ``MarkVariables`` names variables so; ``RecordOp`` names what it makes of other arrays.
    is_marked = any(name.startswith("var") for name in names)
    request = unseen if names == [symbol.name] else WRITE
    return Mark(symbol.name, request if is_marked else NULL)


def _noted_mark(array: NDArray, symbol: Symbol) -> Mark | None:
    """Return the mark that was noted of an array, if it is still that of its symbol."""
    mark = _marks.get(array.handle.value)
    return mark if mark is not None and mark.name == symbol.name else None


def _mark(  # type: ignore[misc]  # arrays of ctypes
    usual: CFuncPtr, count: int, variables: Any, requests: Any, gradients: Any
) -> int:
    """Run ``MXAutogradMarkVariables``, and note the requests."""
    status = int(usual(count, variables, requests, gradients))
    if status == 0:
        for k in range(count):
            name = symbol_of(ctypes.c_void_p(variables[k])).name
            _marks[variables[k]] = Mark(name, _REQUEST_OF_NUMBER[requests[k]])
    return status


LIB.MXAutogradMarkVariables = functools.partial(_mark, LIB.MXAutogradMarkVariables)
