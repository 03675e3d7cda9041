"""Arenas: memory of one device for the tensors of a schedule, and the calls that run in it.

``MXNDArrayFromDLPackEx`` makes an array over an address. It has its own variable in MXNet's engine
and is not a view, so MKLDNN may use a blocked layout for it, and operators get the same write
requests as in an executor.

A compiled loop invokes operators by ``MXImperativeInvoke``. The engine does not know which tensors
overlap in the arena, so calls are pushed in *bulks* (``MXEngineSetBulkSize``): the operators of a
bulk run one after the other. Each bulk begins with an operator, its *token*, that changes the
engine variable of the arena, so that bulks run in order (``BulkAppend`` in
``src/engine/threaded_engine.h``).

Operators that autograd records (`operators.recorded`) run outside of bulks. To keep the order, each
of their outputs is copied to itself (which computes nothing) at the end of the bulk before and in
the bulk after.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import ChainMap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Iterable, Mapping, Sequence, Union

import numpy as np

from memonger.graph.forward import RowEntry
from memonger.graph.operators.gradients import unallocated
from memonger.graph.operators.recompute import truth
from memonger.graph.operators.tensors import Attributes, Tensor
from memonger.schedules.execution.calls import Calls, Differentiated, Invocation, Place
from memonger.schedules.training_step import ALIGNMENT
from memonger.support.errors import MemongerError, format_size, mxnet_message
from memonger.support.kernels import compiled
from memonger.support.mxnet import may_wait, mx, wait_for_engine
from memonger.support.symbols import creator
from memonger.support.types import Context, NDArray

if TYPE_CHECKING:
    Arrays = Sequence[NDArray]
    Slot = Union[NDArray, Place]

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

BULK = 32  # operators; the engine is idle until a bulk is full, and larger bulks are not faster


class Arena:
    """Memory of a device for the tensors of training steps, one step at a time.

    It is allocated when it is first used, and allocated anew if a larger step needs more.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.nbytes = 0
        self._array: NDArray | None = None  # the memory
        #: The calls of each training step, which are bound to that memory and dropped with it.
        self.calls: weakref.WeakKeyDictionary[object, BoundCalls] = weakref.WeakKeyDictionary()
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
    def start(self) -> int:
        """The address of offset 0: the first aligned one after the token."""
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


@dataclass(eq=False)
class Frame:
    """The arrays outside of an arena that a run of a training step reads and writes."""

    arrays: dict[Place, NDArray]
    #: The operators that autograd has recorded in the forward pass, by row.
    recordings: dict[int, _Recording] = field(default_factory=dict)
    #: Digests of the arguments (`unchanged`) in the forward pass, and in the backward pass.
    digest: dict[str, NDArray] = field(default_factory=dict)
    digest_again: dict[str, NDArray] = field(default_factory=dict)


class BoundCalls:
    """Calls bound to the ``arrays`` of tensors in the ``memory`` of an arena.

    A `Frame` has all other arrays; each run is given one.
    """

    def __init__(self, calls: Calls, arrays: Mapping[Place, NDArray], memory: NDArray) -> None:
        self._calls, self._of_arena = calls.all, arrays
        self._kept: list[object] = []  # objects to which the table points
        self._table: list[list[int]] = []
        #: The first row of each call in the table, and the end of the last.
        self._starts: list[int] = []
        #: The row before which each action runs.
        self._actions: list[tuple[int, Callable[[Frame], None]]] = []
        #: The table has the arrays of one frame; the backward pass may be on another thread.
        self._lock = threading.RLock()
        #: Where the table has the handle of an array of the frame.
        self._slots: dict[Place, list[tuple[ctypes.Array[ctypes.c_void_p], int]]] = {}
        token = memory[0:1]  # a view: its variable is that of the arena
        alias = array_at(address(memory), Tensor((1,), "float64"), memory.context)
        # On the CPU an array over an address is always on device 0 (``Chunk`` in
        # include/mxnet/ndarray.h). A bulk is on one device, that of the first input of each call.
        self._devices = [alias.context, memory.context]
        for array in (alias, token):
            self._add("_copy", {}, [array], [token])
        for call in calls.all:
            self._starts.append(len(self._table))
            if isinstance(call, Differentiated):
                late = call.late.writes if call.late is not None else ()
                action = functools.partial(self._differentiate, call)
                self._outside((*call.writes, *late), action)
            elif call.gradients is None:
                self._add(call.op, call.attrs, call.reads, call.writes)
            else:
                self._outside(call.writes, functools.partial(self._record, call))
        self._starts.append(len(self._table))
        self._numbers = np.array(self._table, dtype=np.int64).ravel()

    def arrays(self, frame: Frame) -> Mapping[Place, NDArray]:
        """Return the arrays of all places."""
        return ChainMap(frame.arrays, self._of_arena)  # type: ignore[arg-type]  # read only

    def _add(
        self, op: str, attrs: Attributes, reads: Sequence[Slot], writes: Sequence[Slot]
    ) -> None:
        keys = (ctypes.c_char_p * len(attrs))(*[name.encode() for name in attrs])
        values = (ctypes.c_char_p * len(attrs))(*[str(text).encode() for text in attrs.values()])
        read, written = (ctypes.c_void_p * len(reads))(), (ctypes.c_void_p * len(writes))()
        devices = []
        for part, slots in ((read, reads), (written, writes)):
            for k, slot in enumerate(slots):
                array = slot if isinstance(slot, mx.nd.NDArray) else self._of_arena.get(slot)
                if array is None:
                    self._slots.setdefault(slot, []).append((part, k))
                    devices.append(self._devices[1])
                else:
                    part[k] = array.handle.value
                    self._kept.append(array)
                    devices.append(array.context)
        self._kept += [keys, values, read, written]
        row = [
            creator(op),
            len(reads),
            ctypes.addressof(read),
            len(writes),
            ctypes.addressof(written),
            len(attrs),
            ctypes.addressof(keys),
            ctypes.addressof(values),
            self._devices.index(devices[0]),
        ]
        self._table.append(row)

    def _outside(self, writes: Sequence[Slot], action: Callable[[Frame], None]) -> None:
        """Add an action that runs between two bulks, both of which write to its outputs."""
        for place in writes:
            self._add("_copy", {}, [place], [place])
        self._actions.append((len(self._table), action))
        for place in writes:
            self._add("_copy", {}, [place], [place])

    def _record(self, call: Invocation, frame: Frame) -> None:
        recording = frame.recordings[call.row] = _Recording(call, self.arrays(frame))
        recording.run()

    def _differentiate(self, call: Differentiated, frame: Frame) -> None:
        arrays = self.arrays(frame)
        heads = [(k, arrays[place]) for k, place in call.heads]
        if call.late is not None:
            recording = _Recording(call.late, arrays)
            recording.run(train_mode=False)
        else:
            recording = frame.recordings.pop(call.row)  # and drop what is recorded
        recording.differentiate(heads, arrays)

    def run(self, first: int, stop: int, is_train: bool, frame: Frame) -> None:
        """Push calls [first, stop) to MXNet's engine."""
        start, end = self._starts[first], self._starts[stop]
        with self._lock, mx.autograd.pause(train_mode=is_train):
            for place, array in frame.arrays.items():
                handle = array.handle.value
                for handles, k in self._slots.get(place, ()):
                    handles[k] = handle
            for row, action in self._actions:
                if start <= row < end:
                    self._push(start, row)
                    action(frame)
                    start = row
            self._push(start, end)

    def _push(self, first: int, stop: int) -> None:
        lib, alone = mx.base._LIB, bool(_profiler())
        invoke = ctypes.cast(lib.MXImperativeInvoke, ctypes.c_void_p).value
        set_bulk_size = ctypes.cast(lib.MXEngineSetBulkSize, ctypes.c_void_p).value
        for k in range(first, stop) if alone else [first]:
            end = k + 1 if alone else stop
            failed = compiled.run_calls(invoke, set_bulk_size, self._numbers, k, end, BULK)
            if failed >= 0:
                message = mxnet_message(mx.base.py_str(lib.MXGetLastError()))
                place = int(np.searchsorted(self._starts, failed, side="right")) - 1
                call = self._calls[place]
                raise MemongerError(f"the step of a schedule failed at {call}: {message}")
            if alone:
                wait_for_engine("a schedule under a profiler with aggregate_stats")


class _Recording:
    """An operator that autograd has recorded in one run of a step."""

    def __init__(self, call: Invocation, arrays: Mapping[Place, NDArray]) -> None:
        # Detached, because an array of the caller may be on the tape of another computation.
        self._reads = [arrays[place].detach() for place in call.reads]
        self._writes = [arrays[place] for place in call.writes]
        #: Gradients whose arrays the frame gets later -> what autograd computes instead.
        self._later: list[tuple[RowEntry, NDArray, bool]] = []
        marked = []
        for k, entry, is_added in call.gradients or ():
            read, gradient = self._reads[k], arrays.get(entry)
            if gradient is None:
                gradient = unallocated(Tensor(read.shape, read.dtype), read.context)
                self._later.append((entry, gradient, is_added))
            marked.append((read, gradient, "add" if is_added else "write"))
        if marked:
            mx.autograd.mark_variables(*map(list, zip(*marked)))
        self._op, self._attrs = creator(call.op), call.attrs
        self._outputs: Arrays = []  # on the tape

    def run(self, train_mode: bool = True) -> None:
        """Run the operator, and record it in training."""
        self._outputs = [array.detach() for array in self._writes]
        record = functools.partial(mx.autograd.record, train_mode)
        with record() if mx.autograd.is_training() else mx.autograd.pause():
            invoke(self._op, self._reads, self._attrs, self._outputs)

    def differentiate(
        self, heads: Sequence[tuple[int, NDArray]], arrays: Mapping[Place, NDArray]
    ) -> None:
        """Run its backward pass."""
        for entry, gradient, is_added in self._later:
            if is_added:
                arrays[entry].copyto(gradient)
        # If no gradient of an output is read, any array may stand in for one.
        chosen = heads or [(0, self._outputs[0])]
        outputs, gradients = zip(*[(self._outputs[k], array) for k, array in chosen])
        mx.autograd.backward(list(outputs), list(gradients), train_mode=True)
        for entry, gradient, _ in self._later:
            gradient.copyto(arrays[entry])


def invoke(op: int, reads: Arrays, attrs: Attributes, writes: Arrays) -> None:
    """Run an operator by its handle; autograd records it if it is recording."""
    is_np, returns_list = False, True
    mx.nd._internal._imperative_invoke(
        op, list(reads), list(attrs), list(attrs.values()), list(writes), is_np, returns_list
    )


@functools.lru_cache(maxsize=None)
def _profiler() -> set[str]:
    """Return the set of the profiler's options that are on: ``aggregate_stats``, or nothing.

    The set is updated when the profiler is configured. With ``aggregate_stats`` MXNet has no bulks
    (`bulk_size` in src/engine/threaded_engine.h). The option can be read only by printing the
    statistics, which ends a profile that MXNet is writing (``DumpProfile`` in
    src/profiler/profiler.cc), so this is done once.
    """
    lib, option = mx.base._LIB, "aggregate_stats"
    text, as_json = ctypes.c_char_p(), 1
    mx.base.check_call(lib.MXAggregateProfileStatsPrintEx(ctypes.byref(text), 0, as_json, 0, 0))
    options = {option} if text.value else set()  # the text is empty if the option is off
    configure = lib.MXSetProcessProfilerConfig

    def noting(count: int, keys: Sequence[bytes], values: Sequence[bytes], *process: object) -> int:
        failed: int = configure(count, keys, values, *process)
        config = {key.decode(): value.decode() for key, value in zip(keys, values)}
        if not failed and config.get("profile_process") != "server":
            options.discard(option)
            options.update([option] if truth(config.get(option)) else [])
        return failed

    lib.MXSetProcessProfilerConfig = noting
    return options
