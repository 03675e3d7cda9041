"""What a call of a planned block has on autograd's tape: a stub, and a lease.

A *stub* represents the block, and reports gradients. It is a tiny CachedOp. Its inputs are the
inputs of the block's own CachedOp that need a gradient, and an array of the shape of each output.
It copies these arrays, which makes the arrays of the outputs that the plan then computes, and makes
a few bytes of everything else. MXNet's gradient of it is ``_copy`` for the outputs and zeros for
the rest.

CachedOp calls a monitor hook right after it has pushed each of these gradient nodes to the engine,
on the thread that called ``backward``. It passes the tape's own array of the gradient to the hook
(``CachedOp::DynamicBackward`` in ``src/imperative/cached_op.cc``, ``imperative::RunGraph`` in
``imperative_utils.cc``). So the executor's operators are pushed in program order, with the engine's
real variables: no thread waits, and no dependency is hidden.

A *lease* is an input of the stub that keeps the call alive as long as the tape has it. It is an
output of a custom function, and MXNet calls back when it deletes that (``CustomFunctionParam`` in
``src/c_api/c_api_function.cc``), often on a thread of its engine. The callback only posts a
semaphore: Python code there might free an executor, and the engine might deadlock (see
``_defer_free`` in ``runner.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import TYPE_CHECKING, Callable, List, Mapping, Sequence

from memonger.schedules.execution.arena import Frame, address
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx
from memonger.support.symbols import load_nodes
from memonger.support.types import Context, Json, NDArray, Symbol
from memonger.support.variables import NULL, WRITE, mark_unnoted

if TYPE_CHECKING:
    from memonger.gluon.bound import Arrays

    #: Called in the backward pass with the kind of an input of the stub, its number within that
    #: kind, and the array of its gradient.
    Listener = Callable[[str, int, NDArray], None]

STALE = (
    "this graph was retained, but its planned block has been called again and has reused its "
    "memory; run all backward passes before the next call, or train without a plan: "
    "memonger.gluon.unplan(net)"
)

_HOOK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, mx.base.NDArrayHandle, ctypes.c_void_p
)


class Stub:
    """The stub of a planned executor, which is called with arrays on the tape.

    ``on_gradient`` is called in the backward pass, in the order of the inputs, with the gradient of
    each ``'other'`` input that needs one, of each ``'head'``, and of ``'last'``.
    """

    def __init__(
        self,
        ctx: Context,
        others: Sequence[bool],
        outputs: int,
        on_gradient: Listener,
        is_np: bool,  # whether it returns arrays of mx.np
    ) -> None:
        self._fusion = {"MXNET_USE_FUSION": "0"} if ctx.device_type == "gpu" else {}
        self._outputs = outputs
        flags = [("inline_limit", 0), ("forward_bulk_size", 0)]
        with environment(**self._fusion):
            symbol = stub_symbol(others, outputs)
            self._op = mx.nd.CachedOp(symbol.as_np_ndarray() if is_np else symbol, flags)
        # With a strong reference, only Python's gc would free the memory of a plan.
        listener: weakref.WeakMethod[Listener] = weakref.WeakMethod(on_gradient)

        def hook(name: bytes, _: object, handle: ctypes.c_void_p, __: object) -> None:
            array = mx.nd.NDArray(ctypes.cast(handle, mx.base.NDArrayHandle))  # frees the handle
            call = listener()
            if b":" in name and b"backward" in name and call is not None:  # in a backward pass
                kind, number, *_ = name.decode().split(":")
                call(kind, int(number), array)

        self._hook = _HOOK(hook)
        register = mx.base._LIB.MXCachedOpRegisterOpHook
        mx.base.check_call(register(self._op.handle, self._hook, ctypes.c_int(0)))

    def __call__(
        self, others: list[NDArray], lease: NDArray, results: list[NDArray], last: NDArray
    ) -> list[NDArray]:
        """Record a call; return the arrays of its outputs, copies of ``results``."""
        # Without fusion, which would change the names of operators that the hook needs.
        with environment(**self._fusion) if self._fusion else contextlib.nullcontext():
            outputs: list[NDArray] = self._op(*others, lease, *results, last)
        return outputs[-1 - self._outputs : -1]


def stub_symbol(others: Sequence[bool], outputs: int) -> Symbol:
    """Make the symbol of a stub; the name of a node has the kind and the number of its input.

    ``others`` is true for inputs whose gradient is added to that of the stub, because the tape may
    write or add it. The gradient of the stub is -0.0 there, which changes no bit of a sum.

    The inputs of the block's own CachedOp come first, in their order. The order of inputs decides
    in which order MXNet runs the backward pass (depth first, ``Imperative::Backward``), and so the
    running statistics of a BatchNorm that is called twice.
    """
    kinds = [("other", k, "sum" if adds else "shape_array") for k, adds in enumerate(others)]
    kinds.append(("lease", 0, "shape_array"))
    kinds += [("head", k, "_copy") for k in range(outputs)]
    kinds.append(("last", 0, "shape_array"))
    nodes: list[dict[str, Json]] = []
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


class HeadGradients(List[NDArray]):
    """The arrays of the gradients of outputs, which all calls of a runner use in turn."""


class RecordedCall:
    """A call of a planned block that autograd has recorded; it lives as long as the tape has it."""

    def __init__(
        self,
        runner: object,
        calls: Mapping[int, RecordedCall],
        number: int,
        heads: HeadGradients,
        inputs: Arrays,
        frame: Frame,
        passed: Mapping[int, NDArray],
    ) -> None:
        self._runner, self._calls = runner, calls  # the runner lives as long as its calls
        self.inputs = inputs
        self.frame: Frame | None = frame
        ctx = heads[0].context
        # Its size is the number of the call among those of the runner that are alive: a backward
        # pass for a few variables tells it by nothing else.
        self.last: NDArray = mx.nd.empty((number + 1,), ctx)
        gradient = mx.nd.empty((number + 1,), ctx)
        #: Of the gradient of ``last``; reading it allocates the memory now, not in the engine.
        self.address = address(gradient)
        self.heads: HeadGradients | None = heads
        #: Variables for which the tape has the gradients of outputs. Their values do not matter,
        #: but for outputs that are inputs.
        self.results = [passed.get(k, array).detach() for k, array in enumerate(heads)]
        #: Variables to differentiate, so that a backward pass computes this call's gradients.
        self.variables: list[NDArray] = [*self.results, self.last]
        mark_unnoted(self.variables, [*heads, gradient], WRITE)
        self.spent = False  # whether the backward pass has run, so that the memory is free

    def drop(self) -> None:
        """Drop the arrays: no backward pass follows, but the engine may keep the tape a while."""
        self.frame = self.heads = None
        self.inputs, self.results, self.variables = {}, [], []

    def check(self) -> None:
        """Raise MemongerError if another call has reused the memory of this one."""
        if self._calls.get(self.last.size - 1) is not self:
            raise MemongerError(STALE)


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)  # the type to which MXNet casts the deleter
_NEVER = _CALLBACK(lambda: 0)  # the function is not differentiated

_libc = ctypes.CDLL(None)

#: The calls that are on the tape. With each the semaphore that is posted when the tape drops it
#: (C's ``sem_t``), and the record of its custom function.
_held: list[tuple[RecordedCall, ctypes.Array[ctypes.c_long], object]] = []


def make_lease(ctx: Context, call: RecordedCall) -> NDArray:
    """Make a lease: an array that keeps a call alive while it is on the tape, until `release`."""
    with mx.autograd.pause():
        source, lease, unused = (mx.nd.empty((1,), ctx) for _ in range(3))
    mark_unnoted([source], [unused], NULL)
    semaphore = (ctypes.c_long * 4)()  # initialized by zeros
    functions = [_NEVER, ctypes.cast(_libc.sem_post, _CALLBACK)]
    states = [None, ctypes.cast(semaphore, ctypes.c_void_p)]
    record = mx.base.MXCallbackList(
        ctypes.c_int(2),
        ctypes.cast(mx.base.c_array(_CALLBACK, functions), ctypes.POINTER(_CALLBACK)),
        ctypes.cast(mx.base.c_array(ctypes.c_void_p, states), ctypes.POINTER(ctypes.c_void_p)),
    )
    held = call, semaphore, record
    _held.append(held)
    # MXNet reads the record when it deletes the function, which may be after Python has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    handles = mx.base.c_handle_array
    mx.base.check_call(
        mx.base._LIB.MXCustomFunctionRecord(
            1, handles([source]), 1, handles([lease]), ctypes.byref(record)
        )
    )
    return lease


def release() -> list[RecordedCall]:
    """Drop the calls that are no longer on the tape; return the others."""
    for held in list(_held):
        _, semaphore, _ = held
        if _libc.sem_trywait(semaphore) == 0:  # the tape has dropped the call
            _held.remove(held)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))
    return [call for call, *_ in list(_held)]
