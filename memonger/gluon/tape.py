"""Keep a call of a planned block alive as long as autograd's tape has it.

MXNet calls back when it deletes a custom function (``CustomFunctionParam`` in
``src/c_api/c_api_function.cc``), often on a thread of its engine. The callback only posts a
semaphore: Python code there might free an executor, and the engine might deadlock (see
``_defer_free`` in ``runner.py``).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from memonger.support.mxnet import mx
from memonger.support.types import Context, NDArray
from memonger.support.variables import NULL, mark_unnoted

if TYPE_CHECKING:
    from memonger.gluon.runner import RecordedCall

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)  # the type to which MXNet casts the deleter
_NEVER = _CALLBACK(lambda: 0)  # the function is not differentiated

_libc = ctypes.CDLL(None)


class _Held:
    """A custom function on the tape, and the call that it keeps alive."""

    def __init__(self, call: RecordedCall) -> None:
        self.call = call
        self.semaphore = (ctypes.c_long * 4)()  # C's ``sem_t``, initialized by zeros
        functions = [_NEVER, ctypes.cast(_libc.sem_post, _CALLBACK)]
        states = [None, ctypes.cast(self.semaphore, ctypes.c_void_p)]
        self.record = mx.base.MXCallbackList(
            ctypes.c_int(2),
            ctypes.cast(mx.base.c_array(_CALLBACK, functions), ctypes.POINTER(_CALLBACK)),
            ctypes.cast(mx.base.c_array(ctypes.c_void_p, states), ctypes.POINTER(ctypes.c_void_p)),
        )


_held: list[_Held] = []


def hold(ctx: Context, call: RecordedCall) -> NDArray:
    """Make an array that keeps a call alive while it is on the tape, and until `release`.

    The array is an output of a custom function that is never differentiated.
    """
    with mx.autograd.pause():
        source, lease, unused = (mx.nd.empty((1,), ctx) for _ in range(3))
    mark_unnoted([source], [unused], NULL)
    held = _Held(call)
    _held.append(held)
    # MXNet reads the record when it deletes the function, which may be after Python has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    handles, record = mx.base.c_handle_array, ctypes.byref(held.record)
    mx.base.check_call(
        mx.base._LIB.MXCustomFunctionRecord(1, handles([source]), 1, handles([lease]), record)
    )
    return lease


def release() -> list[RecordedCall]:
    """Drop the calls that are no longer on the tape; return the others."""
    for held in list(_held):
        if _libc.sem_trywait(held.semaphore) == 0:  # the tape has dropped the call
            _held.remove(held)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))
    return [held.call for held in list(_held)]
