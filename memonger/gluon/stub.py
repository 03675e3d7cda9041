"""The stand-in of a planned block on autograd's tape, which reports its gradients.

A *stub* is a tiny CachedOp. Its inputs are those of the block's own CachedOp that want a gradient,
and the results of the planned executor. It copies the results; of all else it makes a few bytes.
Its gradient, as MXNet makes it, is ``_copy`` for the results and zeros for the rest.

CachedOp calls a monitor hook right after it has pushed each of these nodes to the engine, on the
thread that has called ``backward``. It hands over the very array in which the tape wants the
gradient (``CachedOp::DynamicBackward`` in ``src/imperative/cached_op.cc``, ``imperative::RunGraph``
in ``imperative_utils.cc``). So the executor's gradients are pushed in program order, with the real
variables of the engine: nothing waits for anything, and no dependency is hidden.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any, Callable, Sequence

from memonger.support.mxnet import environment, mx
from memonger.support.symbols import load_nodes

LIB, check_call = mx.base._LIB, mx.base.check_call

#: Called in the backward pass with the kind of an input of the stub, its number among these, and
#: the array of its gradient.
Listener = Callable[[str, int, Any], None]

_HOOK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, mx.base.NDArrayHandle, ctypes.c_void_p
)
#: As ``src/c_api/c_api_function.cc`` calls them.
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
_Semaphore = ctypes.c_long * 4  # C's ``sem_t``; zeros are a new one
_held: list[_Held] = []


def symbol_of(handle: Any) -> Any:
    """Return the symbol of what an array was computed from, or None if it is not on the tape."""
    symbol = mx.base.SymbolHandle()
    if LIB.MXAutogradGetSymbol(handle, ctypes.byref(symbol)) != 0:
        return None
    return mx.sym.Symbol(symbol)


def on_tape(array: Any) -> bool:
    """Tell whether a gradient may be asked for this array."""
    return symbol_of(array.handle) is not None


def address(array: Any) -> int:
    """Return where an array lies, as rows; it must be new or allocated, and no part of another."""
    pointer = ctypes.c_void_p()
    check_call(LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def variable(ctx: Any) -> tuple[Any, Any]:
    """Make a variable of one element, and the array of its gradient."""
    array, gradient = mx.nd.zeros((1,), ctx), mx.nd.empty((1,), ctx)
    address(gradient)  # takes its memory here, not on a thread of the engine
    mx.autograd.mark_variables([array], [gradient], "write")
    return array, gradient


class _Held:
    """A value that the tape holds, and the custom function by which it does so.

    MXNet calls back when it deletes a custom function (``CustomFunctionParam`` in
    ``src/c_api/c_api_function.cc``), often on a thread of its engine. This only posts a semaphore.
    Python might free an executor there, and the engine might wait for ever (see ``_leave`` in
    ``runner.py``).
    """

    never = _BACKWARD(lambda *_: 0)  # the function is not differentiated

    def __init__(self, value: Any) -> None:
        self.value = value
        self._semaphore = _Semaphore()
        calls = [ctypes.cast(call, _CALLBACK) for call in (self.never, _libc.sem_post)]
        states = [None, ctypes.cast(ctypes.byref(self._semaphore), ctypes.c_void_p)]
        self.record = mx.base.MXCallbackList(
            ctypes.c_int(2),
            ctypes.cast(mx.base.c_array(_CALLBACK, calls), ctypes.POINTER(_CALLBACK)),
            ctypes.cast(mx.base.c_array(ctypes.c_void_p, states), ctypes.POINTER(ctypes.c_void_p)),
        )

    def is_gone(self) -> bool:
        """Tell, once, whether the tape has let go of the value."""
        return bool(_libc.sem_trywait(ctypes.byref(self._semaphore)) == 0)


def hold(ctx: Any, value: Any) -> Any:
    """Make an array that keeps a value alive for as long as it is on the tape, until `release`.

    It is an output of a custom function that is never differentiated.
    """
    with mx.autograd.pause():
        source, lease, unused = (mx.nd.zeros((1,), ctx) for _ in range(3))
    mx.autograd.mark_variables([source], [unused], "null")
    held = _Held(value)
    handles, record = mx.base.c_handle_array, ctypes.byref(held.record)
    _held.append(held)
    # MXNet reads the record when it deletes the function, maybe after Python has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    check_call(LIB.MXCustomFunctionRecord(1, handles([source]), 1, handles([lease]), record))
    return lease


def release() -> list[Any]:
    """Forget the values that the tape has let go of; return those that it holds."""
    for held in list(_held):
        if held.is_gone():
            _held.remove(held)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))
    return [held.value for held in list(_held)]


class Stub:
    """The stub of a planned executor, which is called as a function of arrays on the tape.

    ``on_gradient`` is called in the backward pass, in the order of the inputs, with the gradient of
    each ``'other'`` input that wants one, of each ``'head'``, and of ``'last'``.
    """

    def __init__(
        self, ctx: Any, others: Sequence[bool], outputs: int, on_gradient: Listener
    ) -> None:
        self._fusion = {"MXNET_USE_FUSION": "0"} if ctx.device_type == "gpu" else {}
        self._outputs = outputs
        flags = [("inline_limit", 0), ("forward_bulk_size", 0)]
        with environment(**self._fusion):
            self._op = mx.nd.CachedOp(stub_symbol(others, outputs), flags)
        # A strong reference would leave the memory of a plan to Python's gc.
        listener: weakref.WeakMethod[Listener] = weakref.WeakMethod(on_gradient)

        def hook(name: bytes, _: Any, handle: Any, __: Any) -> None:
            array = mx.nd.NDArray(ctypes.cast(handle, mx.base.NDArrayHandle))  # ours to free
            call = listener()
            if b":" in name and b"backward" in name and call is not None:  # not the forward pass
                kind, number, *_ = name.decode().split(":")
                call(kind, int(number), array)

        self._hook = _HOOK(hook)
        check_call(LIB.MXCachedOpRegisterOpHook(self._op.handle, self._hook, ctypes.c_int(0)))

    def __call__(self, others: list[Any], lease: Any, results: Any, last: Any) -> Any:
        """Record a call; return copies of the results."""
        inputs = [*others, lease, *results, last]
        # The first call would fuse operators, whose names the hook needs.
        with environment(**self._fusion) if self._fusion else contextlib.nullcontext():
            outputs = self._op(*inputs)
        return outputs[-1 - self._outputs : -1]


def stub_symbol(others: Sequence[bool], outputs: int) -> Any:
    """Make the symbol of a stub; the names of its nodes say what their gradients are for.

    ``others`` is true for inputs whose gradient is added to what the stub has made: the tape may
    have written that or added it. It is -0.0, which changes no bit.

    The order of the inputs is that of the block's own CachedOp, and new ones come last. It decides
    in which order MXNet runs the backward pass (by depth-first search, ``Imperative::Backward``),
    and so the running statistics of a BatchNorm that is called twice.
    """
    kinds = [("other", k, "sum" if adds else "shape_array") for k, adds in enumerate(others)]
    kinds.append(("lease", 0, "shape_array"))
    kinds += [("head", k, "_copy") for k in range(outputs)]
    kinds.append(("last", 0, "shape_array"))
    nodes: list[dict[str, Any]] = []
    heads: list[list[int]] = []
    for kind, number, op in kinds:
        nodes.append({"op": "null", "name": f"{kind}{number}", "inputs": []})
        source = [[len(nodes) - 1, 0, 0]]
        nodes.append({"op": op, "name": f"{kind}:{number}:", "inputs": source})
        heads.append([len(nodes) - 1, 0, 0])
        if op == "sum":  # its gradient is that of the output, zero
            nodes.append({"op": "negative", "name": "minus", "inputs": heads[-1:]})
            heads[-1] = [len(nodes) - 1, 0, 0]
    return load_nodes(nodes, heads)
