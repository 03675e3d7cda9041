"""Find how an array is marked on autograd's tape: its variable and its gradient request.

MXNet passes the request of a variable only to the operators that compute its gradient (``AGInfo``
in ``include/mxnet/imperative.h``), and has no function that returns it. So when this module is
imported, it replaces the function of MXNet that marks variables by one that also notes requests.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

from memonger.support.mxnet import mx
from memonger.support.types import NDArray, Symbol

if TYPE_CHECKING:
    from _ctypes import CFuncPtr

LIB = mx.base._LIB

NULL, WRITE, ADD = REQUESTS = "null", "write", "add"
_NUMBER: Mapping[str, int] = mx.autograd._GRAD_REQ_MAP
_REQUEST_OF_NUMBER = {_NUMBER[request]: request for request in REQUESTS}


class Mark(NamedTuple):
    """The variable that autograd's tape has for an array."""

    name: str  # of the variable, unique
    request: str  # for its gradient: 'null', 'write' or 'add'


_marks: dict[int, Mark] = {}  # handle of an array (which may be freed) -> its latest mark


def symbol_of(handle: object) -> Symbol:
    """Return the recorded computation of an array as a symbol; None if it is not on the tape."""
    symbol = mx.base.SymbolHandle()
    if LIB.MXAutogradGetSymbol(handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)


def is_noted(array: NDArray) -> bool:
    """Return whether the mark of an array is known: it has none, or was marked after the import."""
    symbol = symbol_of(array.handle)
    return symbol is None or _noted_mark(array, symbol) is not None


def mark_of(array: NDArray, unseen: str = WRITE) -> Mark:
    """Return the mark of an array.

    An array that autograd computed has the request 'write', one that is not on the tape 'null'.
    ``unseen`` is the request of a variable that was marked before memonger was imported.
    """
    symbol = symbol_of(array.handle)
    if symbol is None:
        return Mark("", NULL)
    mark = _noted_mark(array, symbol)
    if mark is not None:
        return mark
    names = symbol.list_inputs()
    # ``MarkVariables`` names variables 'var...'; ``RecordOp`` names other inputs in another way.
    is_marked = any(name.startswith("var") for name in names)
    request = unseen if names == [symbol.name] else WRITE
    return Mark(symbol.name, request if is_marked else NULL)


def note_computed(array: NDArray) -> None:
    """Note that autograd computed an array from variables that get gradients.

    `mark_of` then need not list all variables from which it was computed.
    """
    _marks[array.handle.value] = Mark(symbol_of(array.handle).name, WRITE)


def _noted_mark(array: NDArray, symbol: Symbol) -> Mark | None:
    """Return the mark that was noted of an array, if its handle still has the same variable."""
    mark = _marks.get(array.handle.value)
    return mark if mark is not None and mark.name == symbol.name else None


def _mark(  # type: ignore[misc]  # arrays of ctypes
    usual: CFuncPtr, count: int, variables: Any, requests: Any, gradients: Any
) -> int:
    """Call ``MXAutogradMarkVariables``, and note the requests."""
    status = int(usual(count, variables, requests, gradients))
    if status == 0:
        for k in range(count):
            name = symbol_of(ctypes.c_void_p(variables[k])).name
            _marks[variables[k]] = Mark(name, _REQUEST_OF_NUMBER[requests[k]])
    return status


def mark_unnoted(variables: Sequence[NDArray], gradients: Sequence[NDArray], request: str) -> None:
    """Mark arrays as variables, as ``mx.autograd.mark_variables``, for which no mark is asked."""
    numbers = (ctypes.c_uint * len(variables))(*[_NUMBER[request]] * len(variables))
    handles = [mx.base.c_handle_array(arrays) for arrays in (variables, gradients)]
    mx.base.check_call(_usual(len(variables), handles[0], numbers, handles[1]))


_usual = LIB.MXAutogradMarkVariables
LIB.MXAutogradMarkVariables = functools.partial(_mark, _usual)
