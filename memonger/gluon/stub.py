"""What stands for a planned block on autograd's tape, and who is told of its gradients.

A *stub* is a tiny CachedOp. Its inputs are those of the block's own CachedOp that want a gradient,
and the results of the planned executor. It copies the results; of all else it makes a few bytes.
Its gradient, as MXNet makes it, is ``_copy`` for the results and zeros for the rest.

CachedOp calls a monitor hook on the thread that has called ``backward``, right after it has pushed
each of these nodes to the engine, with the very array in which the tape wants the gradient
(``CachedOp::DynamicBackward`` in ``src/imperative/cached_op.cc``, ``imperative::RunGraph`` in
``imperative_utils.cc``). So the executor's gradients are pushed in program order, with the real
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

#: Told of a node of the stub: what its input is, which of these, and the array of its gradient.
Told = Callable[[str, int, Any], None]

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
    """Tell where an array lies, as rows, that is no other's part and was allocated or is new."""
    pointer = ctypes.c_void_p()
    check_call(LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def variable(ctx: Any) -> tuple[Any, Any]:
    """Make a variable of one element, and the array of its gradient."""
    made, gradient = mx.nd.zeros((1,), ctx), mx.nd.empty((1,), ctx)
    address(gradient)  # takes its memory here, not on a thread of the engine
    mx.autograd.mark_variables([made], [gradient], "write")
    return made, gradient


class _Held:
    """What the tape holds, and the custom function by which it does so.

    MXNet tells when it deletes a custom function (``CustomFunctionParam`` in
    ``src/c_api/c_api_function.cc``), often on a thread of its engine. There a semaphore is posted
    and no Python runs, for Python might free an executor, the value's or one that is garbage, and
    the engine might wait for ever (see ``_leave`` in ``runner.py``).
    """

    never = _BACKWARD(lambda *_: 0)  # no gradient is asked of it

    def __init__(self, value: Any) -> None:
        self.value = value
        self._semaphore = _Semaphore()
        calls = [ctypes.cast(each, _CALLBACK) for each in (self.never, _libc.sem_post)]
        states = [None, ctypes.cast(ctypes.byref(self._semaphore), ctypes.c_void_p)]
        self.record = mx.base.MXCallbackList(
            ctypes.c_int(2),
            ctypes.cast(mx.base.c_array(_CALLBACK, calls), ctypes.POINTER(_CALLBACK)),
            ctypes.cast(mx.base.c_array(ctypes.c_void_p, states), ctypes.POINTER(ctypes.c_void_p)),
        )

    def is_gone(self) -> bool:
        """Tell, once, whether the tape has let go of it."""
        return bool(_libc.sem_trywait(ctypes.byref(self._semaphore)) == 0)


def hold(ctx: Any, value: Any) -> Any:
    """Make an array that keeps a value alive for as long as it is on the tape, until `release`.

    It is an output of a custom function that is never differentiated.
    """
    with mx.autograd.pause():
        source, made, unused = (mx.nd.zeros((1,), ctx) for _ in range(3))
    mx.autograd.mark_variables([source], [unused], "null")
    held = _Held(value)
    handles, record = mx.base.c_handle_array, ctypes.byref(held.record)
    _held.append(held)
    # MXNet reads the record when it deletes the function, be it after Python has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    check_call(LIB.MXCustomFunctionRecord(1, handles([source]), 1, handles([made]), record))
    return made


def release() -> list[Any]:
    """Forget what the tape has let go of; return what it holds."""
    for each in list(_held):
        if each.is_gone():
            _held.remove(each)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))
    return [each.value for each in list(_held)]


class Stub:
    """The stub of a planned executor, which is called as a function of arrays on the tape.

    ``told`` is called in the backward pass, in the order of the inputs: of ``'other'`` inputs where
    they want a gradient, of the gradient of each ``'head'``, and of ``'last'``.
    """

    def __init__(self, ctx: Any, others: Sequence[bool], outputs: int, told: Any) -> None:
        self._fusion = {"MXNET_USE_FUSION": "0"} if ctx.device_type == "gpu" else {}
        self._outputs = outputs
        flags = [("inline_limit", 0), ("forward_bulk_size", 0)]
        with environment(**self._fusion):
            self._op = mx.nd.CachedOp(stub_symbol(others, outputs), flags)
        listener = weakref.WeakMethod(told)  # or the memory of a plan would wait for Python's gc

        def hook(name: bytes, _: Any, handle: Any, __: Any) -> None:
            array = mx.nd.NDArray(ctypes.cast(handle, mx.base.NDArrayHandle))  # ours to free
            call: Told | None = listener()
            if b":" in name and b"backward" in name and call is not None:  # not the forward pass
                kind, number, *_ = name.decode().split(":")
                call(kind, int(number), array)

        self._hook = _HOOK(hook)
        check_call(LIB.MXCachedOpRegisterOpHook(self._op.handle, self._hook, ctypes.c_int(0)))

    def __call__(self, others: list[Any], lease: Any, results: Any, last: Any) -> Any:
        """Record a call; return copies of the results."""
        inputs = [*others, lease, *results, last]
        # What is made at the first call is fused then, and has other names.
        with environment(**self._fusion) if self._fusion else contextlib.nullcontext():
            made = self._op(*inputs)
        return made[-1 - self._outputs : -1]


def stub_symbol(others: Sequence[bool], outputs: int) -> Any:
    """Make the symbol of a stub; the names of its nodes tell what their gradients are for.

    ``others`` tells of which of these inputs the gradient is added to what the stub has made: the
    tape may have written that or added it, it does not tell. It is -0.0, which changes no bit.

    The order of the inputs is that of the block's own CachedOp, and what is new comes last, for
    MXNet runs the backward pass in an order that depends on it (a search through the inputs in
    depth, ``Imperative::Backward``): the running statistics of a BatchNorm that is called twice, by
    whatever blocks, do so too.
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
