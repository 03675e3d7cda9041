"""Arenas: memory of one device, in which a schedule places tensors.

``MXNDArrayFromDLPackEx`` makes an array over an address. It has its own variable in MXNet's engine
and is not a view, so MKLDNN may use a blocked layout for it, and operators get the same write
requests as in an executor. But the engine does not know which tensors overlap, so the operators of
an arena are ordered by a token (`calls`).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Generic, Iterable, TypeVar

import numpy as np

from memonger.graph.operators.tensors import Tensor
from memonger.schedules.training_step import ALIGNMENT
from memonger.support.errors import MemongerError, format_size, mxnet_message
from memonger.support.mxnet import may_wait, mx
from memonger.support.types import Context, NDArray

T = TypeVar("T")

#: Type code and bits of DLPack (``DLDataTypeTransform`` in ``include/mxnet/tensor_blob.h``).
DTYPES = {
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "uint8": (1, 8),
    "int8": (0, 8),
    "int32": (0, 32),
    "int64": (0, 64),
    "bool": (1, 1),
}
DEVICES = {"cpu": 1, "gpu": 2, "cpu_pinned": 3}


class Arena(Generic[T]):
    """Memory of a device for the tensors of training steps, one step at a time.

    It is allocated when it is first used, and allocated anew if a larger step needs more.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.nbytes = 0
        self._array: NDArray | None = None  # the memory
        #: The calls of each training step, which are bound to that memory and dropped with it.
        self.calls: weakref.WeakKeyDictionary[object, T] = weakref.WeakKeyDictionary()
        self.last_pass: object = None  # identifies the last forward pass in the arena

    def reserve(self, nbytes: int) -> None:
        """Require room for a step of ``nbytes`` bytes."""
        self.nbytes = max(nbytes, self.nbytes)

    def memory(self) -> NDArray:
        """Return the array over the whole memory, whose engine variable orders the bulks."""
        if self._array is not None and self._array.size < self.nbytes // 8:
            self.calls.clear()
            self._array = self.last_pass = None
            if may_wait():
                mx.nd.waitall()  # until the old memory is free
        if self._array is None:
            try:
                self._array = mx.nd.empty((self.nbytes // 8,), self.ctx, dtype="float64")
            except mx.MXNetError as error:
                raise MemongerError(
                    f"an arena of {format_size(self.nbytes)} cannot be allocated on {self.ctx}: "
                    f"{mxnet_message(error)}; make the batch smaller, or give a budget"
                ) from None
        return self._array

    @property
    def place(self) -> int:
        """The address of offset 0: the first aligned one after the token (`calls`)."""
        return -(-(address(self.memory()) + 1) // ALIGNMENT) * ALIGNMENT


def address(array: NDArray) -> int:
    """Return where the values of an array are in memory."""
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def array_at(place: int, tensor: Tensor, ctx: Context) -> NDArray:
    """Make an array over memory at an address, which the caller must keep allocated."""
    types, axes = mx.nd.ndarray, len(tensor.shape)
    device = types.DLContext(DEVICES[ctx.device_type], ctx.device_id)
    dtype = types.DLDataType(*DTYPES[tensor.dtype], 1)
    shape = (ctypes.c_int64 * axes)(*tensor.shape)
    managed = types.DLManagedTensor(types.DLTensor(place, device, axes, dtype, shape))
    handle = mx.base.NDArrayHandle()
    transient = ctypes.c_bool(True)  # MXNet copies the description
    mx.base.check_call(
        mx.base._LIB.MXNDArrayFromDLPackEx(ctypes.byref(managed), transient, ctypes.byref(handle))
    )
    return mx.nd.NDArray(handle)


def refuse_types(tensors: Iterable[Tensor]) -> None:
    """Raise MemongerError for tensors of a type that an array over an address cannot have."""
    for dtype in sorted({tensor.dtype for tensor in tensors}):
        if np.dtype(dtype).name not in DTYPES:
            raise MemongerError(
                f"a schedule cannot hold tensors of type {dtype}; how='marks' can plan this network"
            )
