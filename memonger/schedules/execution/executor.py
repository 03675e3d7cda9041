"""The executor of a training step that is written out (``write``), as MXNet's own to its users."""

from __future__ import annotations

import ctypes
import functools
import weakref
from itertools import chain
from typing import Any, Mapping, Sequence

import numpy as np

from memonger.costs.bind import has_mkldnn, sparse_gradients
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.gradients import unallocated
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution.write import RUN_OPS, Arrays, Requests
from memonger.schedules.training_step import OURS
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx


class ScheduledExecutor(mx.executor.Executor):
    """An executor of a training step that is written out; made by `ScheduledSymbol`.

    ``forward`` runs what comes before the network's outputs, in inference too (in the layouts that
    training has, so that it rounds the same), and ``backward`` runs the rest. Gradients that are
    written and have no arrays of their own lie in the memory pool, until the next ``forward`` of
    it, or of an executor that shares its memory. With 'add' a gradient is added to a copy of its
    array, in the pool, and the sum is copied back.
    """

    # Made when MXNet's own properties are first asked for them.
    _arg_dict = _grad_dict = _aux_dict = _output_dict = _monitor_callback = None
    _optimized_symbol = _group2ctx = None

    def __init__(
        self, symbol: Any, ctx: Any, graph: ForwardGraph, arrays: Any, requests: Requests, lent: Any
    ) -> None:
        args, grads, aux = arrays  # by name
        tensors, names = tensors_of(graph), symbol.list_arguments()
        self._step = step = symbol.recipe.step(symbol, graph, requests, has_mkldnn(ctx))
        self._symbol, self._ctx, self._grad_req = symbol, ctx, dict(requests)
        extra = {step.totals[name]: array for name, array in grads.items() if name in step.totals}
        for name in step.extra.keys() - extra.keys():
            extra[name] = fitted(None, step.extra[name], ctx)
        given = {**grads, **{name: extra[total] for name, total in step.totals.items()}}
        self._heads = {k: extra[name] for k, name in step.heads.items()}
        shared = getattr(lent, "training", lent)
        self.training = step.bind(ctx, {**args, **extra}, {**aux, **extra}, shared)
        for output in self.training.outputs[step.outputs :]:
            address(output)  # MKLDNN's Deconvolution needs the memory before it writes
        self._ran_forward = self._trains = False
        # Whose gradients lie in the memory pool, of all executors that share it: one or none.
        self._holder: weakref.WeakSet[ScheduledExecutor] = weakref.WeakSet()
        if isinstance(lent, ScheduledExecutor):
            self._holder = lent._holder
        self._origin = object()  # the same of all that are reshaped from one another
        self.arg_arrays = [args[name] for name in names]
        self.aux_arrays = [aux[name] for name in symbol.list_auxiliary_states()]
        self.outputs = self.training.outputs[: step.outputs]
        self.own: Arrays = {}  # gradients in the memory of the training step
        self._copied: list[tuple[Any, Any, bool]] = []  # to, from (None: zeros), whether added
        self.grad_arrays = [self._gradient(n, given.get(n), tensors[n]) for n in names]

    def __del__(self) -> None:
        pass  # the handles are those of other executors

    @functools.cached_property
    def _plain(self) -> Any:
        """The plain network with the same arrays, but for gradients in the pool; it never runs."""
        grads = {name: array for name, array in self.grad_dict.items() if array is not None}
        for name, array in self.own.items():
            grads[name] = unallocated(array.shape, array.dtype, self._ctx)
        about = self._ctx, self.arg_dict, grads, self._grad_req, self.aux_dict
        return mx.sym.Symbol.bind(self._symbol, *about, shared_exec=self.training)

    @property
    def handle(self) -> Any:
        """From this MXNet takes arrays and memory for an unplanned network that shares them."""
        with environment():  # before the lock that Python has for `_plain`: a bind asks for it
            return self._plain.handle

    def _gradient(self, name: str, array: Any, tensor: Tensor) -> Any:
        """Find or make the array of a gradient, and note how it is filled."""
        request, output = self._grad_req[name], self._step.gradients.get(name)
        if request == "null":
            return array
        source = None if output is None else self.training.outputs[output]
        if array is None:
            others = self.own.values(), self.outputs, self.arg_arrays, self._heads.values()
            if request == "write" and source is not None:
                if address(source) not in map(address, chain(*others)):
                    self.own[name] = source
                    return source
            array = fitted(None, tensor, self._ctx)
        if source is not None or request == "write":
            # What comes out for a total is the new total.
            added = request == "add" and name not in self._step.totals
            self._copied.append((array, source, added))
        return array

    def forward(self, is_train: bool = False, **kwargs: Any) -> list[Any]:
        """Compute the outputs; parameters as those of ``mx.executor.Executor.forward``."""
        for name, array in kwargs.items():
            if name not in self.arg_dict:
                raise TypeError(f"Unknown argument {name}")
            target = self.arg_dict[name]
            if getattr(array, "shape", None) != target.shape:
                raise ValueError(f"argument {name!r} takes an array of shape {target.shape}")
            target[:] = array
        self._ran_forward = bool(is_train)
        if self._trains != self._ran_forward:
            # MXNet tells the operators at once (GraphExecutor::RunOps), those too that still wait.
            for output in self.outputs:
                output.wait_to_read()
            self._trains = self._ran_forward
        # Inference puts back its gradients in the memory pool, for they may still be wanted.
        held = self._held_gradients() if self in self._holder and not is_train else {}
        if not held:
            self._holder.clear()
        self._run(0, self._step.forward, self._trains)
        for name, copy in held.items():
            put_back(copy, self.own[name])
        return self.outputs

    def backward(self, out_grads: Any = None, is_train: bool = True) -> None:
        """Compute the gradients; parameters as those of ``mx.executor.Executor.backward``."""
        if not self._ran_forward or not is_train:
            raise MemongerError(
                "a scheduled network computes its gradients once after each "
                "forward(is_train=True), in training mode; call that first"
            )
        if isinstance(out_grads, dict):
            out_grads = [out_grads.get(name) for name in self._symbol.list_outputs()]
        elif isinstance(out_grads, mx.nd.NDArray):
            out_grads = [out_grads]
        out_grads = out_grads or []
        for k, array in self._heads.items():
            if k >= len(out_grads) or not isinstance(out_grads[k], mx.nd.NDArray):
                raise MemongerError(
                    f"output {self._symbol.list_outputs()[k]!r} is no loss, so backward needs its "
                    "gradient (out_grads), an NDArray; to minimize it, use mx.sym.MakeLoss"
                )
            out_grads[k].copyto(array)
        self._ran_forward = False
        self._holder.clear()
        self._holder.add(self)
        self._run(self._step.forward, self._step.nodes, True)
        for array, source, added in self._copied:
            if source is None:
                array[:] = 0
            elif added:
                array += source
            else:
                source.copyto(array)

    def _run(self, first: int, end: int, is_train: bool) -> None:
        """Run a part of the training step, in order with what reads auxiliary states."""
        touch(self.aux_arrays)
        # With MXNET_ENGINE_TYPE=NaiveEngine an operator that fails ends the process, after MXNet's
        # message, for no C function is there to catch what it throws.
        places = map(ctypes.c_size_t, (first, end))
        getattr(mx.base._LIB, RUN_OPS)(self.training.handle, ctypes.c_bool(is_train), *places)
        touch(self.aux_arrays)

    def _held_gradients(self) -> Arrays:
        """Copy the gradients in the memory pool to the memory of the host."""
        # The layout of MKLDNN belongs to the memory: where another executor has used it since, a
        # copy would fail, or end the process. To ask for its address makes it plain.
        for array in self.own.values():
            address(array)
        return {name: array.copyto(mx.cpu()) for name, array in self.own.items()}

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any
    ) -> ScheduledExecutor:
        """Make an executor for other shapes, also larger ones, that shares arrays and memory."""
        known = self.arg_dict
        if all(known[k].shape == tuple(v) for k, v in kwargs.items() if k in known):
            self._take_gradients()
            return self
        about = self._ctx, self._grad_req, {name: array.dtype for name, array in known.items()}
        lent = {"shared_arg_names": list(known), "shared_exec": self, "shared_buffer": {}}
        made: ScheduledExecutor = self._symbol.simple_bind(*about, **lent, **kwargs)
        for name, array in made.arg_dict.items():
            if known[name].shape != array.shape and name not in kwargs and not partial_shaping:
                raise MemongerError(
                    f"reshape changes the shape of {name!r} from {known[name].shape} to "
                    f"{array.shape}; give it too, or partial_shaping=True"
                )
        made._origin = self._origin
        made._take_gradients()
        if self._monitor_callback is not None:
            made.set_monitor_callback(self._monitor_callback, self._monitor_all)
        return made

    def _take_gradients(self) -> None:
        """Take over the gradients in the pool of an executor that this one is reshaped from."""
        for holder in set(self._holder) - {self}:
            if holder._origin is self._origin:
                for name, copy in holder._held_gradients().items():
                    if copy.shape == self.grad_dict[name].shape:
                        put_back(copy, self.grad_dict[name])
                self._holder.clear()
                self._holder.add(self)

    def debug_str(self) -> str:
        """The training step as MXNet has bound it, and the memory planned for it."""
        return str(self.training.debug_str())

    def set_monitor_callback(self, callback: Any, monitor_all: bool = False) -> None:
        """Install a callback; it is told of each result once, however often it is computed."""
        self._monitor_callback, self._monitor_all = callback, monitor_all

        def told(name: bytes, array: Any) -> None:
            if name.startswith(OURS.encode()):
                mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # ours to free
            else:
                callback(name, array)

        self.training.set_monitor_callback(told, monitor_all)


def touch(states: Sequence[Any]) -> None:
    """Have what comes later wait for all that has been pushed with these auxiliary states."""
    # MXNet's engine takes an operator of an executor that moves them (BatchNorm, its gradient) for
    # one that reads them (``GraphExecutor::InitCachedOps``), so that other readers need not wait.
    # An operator in place, which computes nothing, has the engine believe that they are written.
    for dtype in {array.dtype for array in states}:
        alike = [array for array in states if array.dtype == dtype]
        mx.nd.amp_multicast(*alike, num_outputs=len(alike), out=alike)


def refuse_sparse(kinds: Mapping[str, str]) -> None:
    """Refuse inputs that are stored otherwise than densely."""
    for name, kind in kinds.items():
        if kind not in ("default", "undefined"):
            raise MemongerError(
                f"input {name!r} is stored as {kind}; a schedule takes dense inputs only, so plan "
                "this network with marks, or make it dense with tostype('default')"
            )


def tensors_of(graph: ForwardGraph) -> dict[str, Tensor]:
    """Return shape and type of each argument and auxiliary state; refuse sparse ones."""
    kinds, nodes = mx.ndarray.ndarray._STORAGE_TYPE_ID_TO_STR, graph.nodes
    stored = {nodes[i].name: nodes[i].hidden.get("__storage_type__", 0) for i in graph.arguments}
    refuse_sparse({name: kinds[int(k)] for name, k in stored.items()})
    for i in sorted(sparse_gradients(graph)):
        raise MemongerError(
            f"the gradient of {nodes[i].name!r} is made row by row (sparse_grad), which a "
            "schedule cannot hold; set sparse_grad=False, or plan with marks"
        )
    return {nodes[i].name: graph.tensors[i][0] for i in (*graph.arguments, *graph.auxiliary)}


def fitted(array: Any, tensor: Tensor, ctx: Any) -> Any:
    """Return a view of an array, or a new one of zeros where there is none or it is too small."""
    if array is None or np.dtype(array.dtype) != tensor.dtype or array.size < tensor.elements:
        return mx.nd.zeros(tensor.shape, ctx, dtype=tensor.dtype)
    if array.shape == tensor.shape:
        return array
    return array.reshape((-1,))[: tensor.elements].reshape(tensor.shape)


def put_back(source: Any, target: Any) -> None:
    """Copy to an array in a memory pool, which has been used for others since."""
    # ``copyto`` would take the layout of what was there for that of the target
    # (``CopyFromToDnsImpl`` in ``src/ndarray/ndarray.cc``); what an operator writes to forgets it.
    target[:] = 0
    source.copyto(target)


def address(array: Any) -> int:
    """Tell where its values are in memory, which is taken if it has not been yet."""
    # MXNet makes it plain, but looks before it waits (``MXNDArrayGetData``), and convolutions that
    # have run lay out their weights later (``MKLDNNDataReorderAsync``).
    mx.nd.waitall()
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0
