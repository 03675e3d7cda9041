"""Autograd's tape: what is wanted of an array's gradient there, and what keeps a call alive.

Only the operators that compute the gradient of a variable get the request for it (``AGInfo`` in
``include/mxnet/imperative.h``). So the function that marks variables is replaced by one that also
notes the requests. Those of variables that were marked before, a custom function gets.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Sequence

from memonger.support.mxnet import may_wait, mx
from memonger.support.types import Context, NDArray, Symbol

if TYPE_CHECKING:
    from _ctypes import CFuncPtr

    from memonger.gluon.runner import Call

LIB, check_call = mx.base._LIB, mx.base.check_call

# As ``src/c_api/c_api_function.cc`` casts them.
_BACKWARD = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.c_void_p,
)
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)

_libc = ctypes.CDLL(None)

NULL, WRITE, ADD = REQUESTS = "null", "write", "add"
_REQUEST_OF_NUMBER = {mx.autograd._GRAD_REQ_MAP[request]: request for request in REQUESTS}


class Mark(NamedTuple):
    """What an array was marked as by ``autograd.mark_variables`` or ``attach_grad``."""

    name: str  # of the variable; no other one has it
    request: str


_marks: dict[int, Mark] = {}  # the latest of each handle of an array, which may have been freed


def symbol_of(handle: object) -> Symbol:
    """Return the symbol of what an array was computed from, or None if it is not on the tape."""
    symbol = mx.base.SymbolHandle()
    if LIB.MXAutogradGetSymbol(handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)


def mark_of(array: NDArray) -> Mark | None:
    """Return the latest mark that was noted of an array; the tape may not have it any more."""
    return _marks.get(array.handle.value)


def request_of(array: NDArray) -> str | None:
    """Return the request for an array's gradient; None if it was marked unseen.

    The gradient of what was computed from a variable is written.
    """
    symbol = symbol_of(array.handle)
    if symbol is None:
        return NULL
    names = symbol.list_inputs()
    if names != [symbol.name]:
        return WRITE if any(map(_is_marked, names)) else NULL
    mark = mark_of(array)
    if mark is not None and mark.name == symbol.name:
        return mark.request
    return None if _is_marked(symbol.name) else NULL


def _is_marked(name: str) -> bool:
    """Tell variables that were marked from those that MXNet has made of other arrays."""
    return name.startswith("var")  # ``MarkVariables``; ``RecordOp`` has others


def learn_requests(arrays: Iterable[NDArray]) -> None:
    """Learn the requests for the gradients of arrays that were marked unseen, if it may wait.

    A custom function has dense gradients alone, so those of sparse gradients are not learned.
    """
    unseen = [array for array in arrays if request_of(array) is None] if may_wait() else []
    unseen = [array for array in unseen if getattr(array.grad, "stype", "default") == "default"]
    for _, group in itertools.groupby(unseen, lambda array: array.context):
        _learn(list(group))


def _learn(arrays: Sequence[NDArray]) -> None:
    """Learn the requests for the gradients of arrays on one device; their gradients stay."""
    requests: list[int] = []

    def note(  # type: ignore[misc]  # pointers of ctypes
        outputs: int, inputs: int, handles: Any, numbers: Any, is_train: int, state: object
    ) -> int:
        requests.extend(numbers[:inputs])
        for k in range(outputs + inputs):
            LIB.MXNDArrayFree(ctypes.c_void_p(handles[k]))
        return 1

    fresh = [array._fresh_grad for array in arrays]
    with mx.autograd.pause():
        source, gradient, output = (mx.nd.zeros((1,), arrays[0].context) for _ in range(3))
    mx.autograd.mark_variables([source], [gradient], WRITE)  # or there might be none to be made
    with mx.autograd.record():
        _record(_Held(None, _BACKWARD(note)), [*arrays, source], output)
    output.backward(retain_graph=True)  # or variables with the request 'null' were none any more
    mx.nd.waitall()
    for array, is_fresh, number in zip(arrays, fresh, requests):
        array._fresh_grad = is_fresh
        name = symbol_of(array.handle).name
        _marks[array.handle.value] = Mark(name, _REQUEST_OF_NUMBER[number])


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


@functools.lru_cache(None)
def install() -> None:
    """Replace the function of MXNet that marks variables; once for a process."""
    LIB.MXAutogradMarkVariables = functools.partial(_mark, LIB.MXAutogradMarkVariables)


# ---------------------------------------------------------------- custom functions


class _Held:
    """A custom function on the tape, and the call that the tape holds by it.

    MXNet calls back when it deletes a custom function (``CustomFunctionParam`` in
    ``src/c_api/c_api_function.cc``), often on a thread of its engine. This only posts a semaphore.
    Python might free an executor there, and the engine might wait for ever (see ``_leave`` in
    ``runner.py``).
    """

    never = _BACKWARD(lambda *_: 0)  # it is not differentiated

    def __init__(self, call: Call | None, backward: CFuncPtr = never) -> None:
        self.call = call
        self.semaphore = (ctypes.c_long * 4)()  # C's ``sem_t``; zeros are a new one
        functions = [ctypes.cast(each, _CALLBACK) for each in (backward, _libc.sem_post)]
        states = [None, ctypes.cast(self.semaphore, ctypes.c_void_p)]
        self.record = mx.base.MXCallbackList(
            ctypes.c_int(2),
            ctypes.cast(mx.base.c_array(_CALLBACK, functions), ctypes.POINTER(_CALLBACK)),
            ctypes.cast(mx.base.c_array(ctypes.c_void_p, states), ctypes.POINTER(ctypes.c_void_p)),
        )
        self.backward = backward


_held: list[_Held] = []


def _record(held: _Held, inputs: Sequence[NDArray], output: NDArray) -> None:
    """Put a custom function on the tape."""
    handles = mx.base.c_handle_array
    _held.append(held)
    # MXNet reads the record when it deletes the function, maybe after Python has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    record = ctypes.byref(held.record)
    check_call(
        LIB.MXCustomFunctionRecord(len(inputs), handles(inputs), 1, handles([output]), record)
    )


def hold(ctx: Context, call: Call) -> NDArray:
    """Make an array that keeps a call alive for as long as it is on the tape, until `release`.

    It is an output of a custom function that is never differentiated.
    """
    with mx.autograd.pause():
        source, lease, unused = (mx.nd.zeros((1,), ctx) for _ in range(3))
    mx.autograd.mark_variables([source], [unused], NULL)
    _record(_Held(call), [source], lease)
    return lease


def release() -> list[Call]:
    """Forget the calls that the tape has let go of; return those that it holds."""
    for held in list(_held):
        if _libc.sem_trywait(held.semaphore) == 0:  # once, when the tape has let go of it
            _held.remove(held)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))
    return [held.call for held in list(_held) if held.call is not None]
