"""The stub of a planned block: it represents the block on autograd's tape, and reports gradients.

A *stub* is a tiny CachedOp. Its inputs are the inputs of the block's own CachedOp that need a
gradient, and an array of the shape of each output. It copies these arrays, which makes the arrays
of the outputs that the plan then computes, and makes a few bytes of everything else. MXNet's
gradient of it is ``_copy`` for the outputs and zeros for the rest.

CachedOp calls a monitor hook right after it has pushed each of these gradient nodes to the engine,
on the thread that called ``backward``. It passes the tape's own array of the gradient to the hook
(``CachedOp::DynamicBackward`` in ``src/imperative/cached_op.cc``, ``imperative::RunGraph`` in
``imperative_utils.cc``). So the executor's operators are pushed in program order, with the engine's
real variables: no thread waits, and no dependency is hidden.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import TYPE_CHECKING, Callable, Sequence

from memonger.support.mxnet import environment, mx
from memonger.support.symbols import load_nodes
from memonger.support.types import Context, Json, NDArray, Symbol

if TYPE_CHECKING:
    #: Called in the backward pass with the kind of an input of the stub, its number within that
    #: kind, and the array of its gradient.
    Listener = Callable[[str, int, NDArray], None]


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
