"""The executor of a training step that is written out (``write``), as MXNet's own to its users."""

from __future__ import annotations

import ctypes
import weakref
from itertools import chain
from typing import Any, Mapping

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.gradients import unallocated
from memonger.graph.operators.tensors import Tensor
from memonger.graph.read import forward_graph
from memonger.schedules.execution import arrays
from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.execution.write import Recipe, run
from memonger.schedules.training_step import OURS
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx


class ScheduledExecutor(mx.executor.Executor):
    """An executor of a training step that is written out; made by `ScheduledSymbol`.

    It runs what comes before the network's outputs in ``forward`` and the rest in ``backward``, so
    that each does what it does in MXNet: statistics move, random numbers are drawn and gradients
    change when they always do. Inference runs the first part too, as in MXNet's executors: in the
    layouts of MKLDNN that training has, and so with the same roundings.

    What differs from MXNet's own:

    * ``backward`` runs once after each ``forward(is_train=True)``.
    * Gradients that are written and for which no arrays are given are in the memory pool: they last
      until the next ``forward`` of it, or of an executor that shares its memory.
    * With 'add', a gradient is added to a copy of its array, in the pool, and the sum copied back.
    * With ``MXNET_ENGINE_TYPE=NaiveEngine`` an operator that fails ends the process, after MXNet's
      message (``write.run``).

    ``graph`` is that of the symbol for ``args``. ``grads`` are the arrays that gradients go to,
    ``requests`` says 'write', 'add' or 'null' for each; memory is shared with ``shared_exec``.
    """

    def __init__(
        self,
        symbol: Any,
        recipe: Recipe,
        ctx: Any,
        graph: ForwardGraph,
        args: Arrays,
        grads: Arrays,
        requests: Mapping[str, str],
        aux: Arrays,
        shared_exec: Any,
    ) -> None:
        tensors = arrays.tensors_of(graph)[0]
        self._step = step = recipe.step(symbol, graph, requests, has_mkldnn(ctx))
        self._symbol, self._recipe, self._ctx = symbol, recipe, ctx
        self._grad_req, self._group2ctx = dict(requests), None
        extra = {step.totals[name]: array for name, array in grads.items() if name in step.totals}
        for name in step.extra.keys() - extra.keys():
            extra[name] = arrays.zeros(step.extra[name], ctx)
        self._given_grads = {**grads, **{name: extra[k] for name, k in step.totals.items()}}
        self._heads = {k: extra[name] for k, name in step.heads.items()}
        self._training = step.bind(ctx, {**args, **extra}, {**aux, **extra}, of_memory(shared_exec))
        for output in self._training.outputs[step.outputs :]:
            arrays.address(output)  # MKLDNN's Deconvolution needs the memory before it writes
        self._plain: Any = None
        self._ran_forward = self._trains = False
        # Whose gradients lie in the memory pool, of all executors that share it: one or none.
        self._holder: weakref.WeakSet[ScheduledExecutor] = weakref.WeakSet()
        if isinstance(shared_exec, ScheduledExecutor):
            self._holder = shared_exec._holder
        self._origin = object()  # the same of all that are reshaped from one another
        self.arg_arrays = [args[name] for name in tensors]
        self.aux_arrays = [aux[name] for name in symbol.list_auxiliary_states()]
        self.outputs = self._training.outputs[: step.outputs]
        self._optimized_symbol: Any = None
        self._arg_dict = self._grad_dict = self._aux_dict = self._output_dict = None
        self._monitor_callback: Any = None
        self.own: Arrays = {}  # gradients in the memory of the training step
        self._copied: list[tuple[Any, Any, str]] = []  # to, from, request
        self.grad_arrays = [self._gradient(name, tensor) for name, tensor in tensors.items()]

    def __del__(self) -> None:
        pass  # the handles are those of other executors

    @property
    def handle(self) -> Any:
        """Of an executor that never runs: that of the plain network with the same arrays.

        MXNet takes arrays and memory from it for an executor of an unplanned network that shares
        with this one (another bucket). Gradients in the pool are not handed on: the other executor
        gets its own.
        """
        if self._plain is None:
            grads = {name: array for name, array in self.grad_dict.items() if array is not None}
            for name, array in self.own.items():
                grads[name] = unallocated(array.shape, arrays.type_of(array), self._ctx)
            about = self._ctx, self.arg_dict, grads, self._grad_req, self.aux_dict
            self._plain = mx.sym.Symbol.bind(self._symbol, *about, shared_exec=self._training)
        return self._plain.handle

    def _gradient(self, name: str, tensor: Tensor) -> Any:
        """Find or make the array of a gradient, and note how it is filled."""
        request, array = self._grad_req[name], self._given_grads.get(name)
        if request == "null":
            return array
        output = self._step.gradients.get(name)
        source = None if output is None else self._training.outputs[output]
        if array is None:
            others = self.own.values(), self.outputs, self.arg_arrays, self._heads.values()
            if request == "write" and source is not None:
                if arrays.address(source) not in map(arrays.address, chain(*others)):
                    self.own[name] = source
                    return source
            array = arrays.zeros(tensor, self._ctx)
        # What comes out for a total is the new total.
        self._copied.append((array, source, "write" if name in self._step.totals else request))
        return array

    # ------------------------------------------------------------------ running

    def forward(self, is_train: bool = False, **kwargs: Any) -> list[Any]:
        """Compute the outputs; parameters as those of ``mx.executor.Executor.forward``."""
        for name, array in kwargs.items():
            if not isinstance(array, (mx.nd.NDArray, np.ndarray)):
                raise ValueError("only accept keyword argument of NDArrays and numpy.ndarray")
            if name not in self.arg_dict:
                raise TypeError(f"Unknown argument {name}")
            if self.arg_dict[name].shape != array.shape:
                raise ValueError(
                    f"Shape not match! Argument {name}, need: {self.arg_dict[name].shape}, "
                    f"received: {array.shape}"
                )
            self.arg_dict[name][:] = array
        self._ran_forward = bool(is_train)
        if self._trains != self._ran_forward:
            # MXNet tells the operators at once (GraphExecutor::RunOps), those too that still wait.
            for output in self.outputs:
                output.wait_to_read()
            self._trains = self._ran_forward
        if is_train:
            self._holder.clear()
            self._train(0, self._step.forward)
        else:
            self._infer()
        return self.outputs

    def backward(self, out_grads: Any = None, is_train: bool = True) -> None:
        """Compute the gradients; parameters as those of ``mx.executor.Executor.backward``."""
        if not self._ran_forward or not is_train:
            raise MemongerError(
                "a scheduled network computes its gradients once after each "
                "forward(is_train=True), in training mode; call that first"
            )
        if isinstance(out_grads, dict):
            out_grads = [out_grads[name] for name in self._symbol.list_outputs()]
        elif isinstance(out_grads, mx.nd.NDArray):
            out_grads = [out_grads]
        out_grads = out_grads or []
        for k, array in self._heads.items():
            if k >= len(out_grads):
                raise MemongerError(
                    f"output {self._symbol.list_outputs()[k]!r} is no loss, so backward needs its "
                    "gradient (out_grads); to minimize it, make a loss of it with mx.sym.MakeLoss"
                )
            if not isinstance(out_grads[k], mx.nd.NDArray):
                raise TypeError("inputs must be NDArray")
            out_grads[k].copyto(array)
        self._ran_forward = False
        self._holder.clear()
        self._holder.add(self)
        self._train(self._step.forward, self._step.nodes)
        for array, source, request in self._copied:
            if request == "add":
                if source is not None:
                    array += source
            elif source is None:
                array[:] = 0
            else:
                source.copyto(array)

    def _train(self, first: int, end: int) -> None:
        """Run a part of the training step, in order with what reads auxiliary states.

        MXNet's engine takes an operator that moves them (BatchNorm, its gradient) for one that
        reads them (``GraphExecutor::InitCachedOps``), so that other readers need not wait.
        """
        arrays.touch(self.aux_arrays)
        run(self._training, first, end)
        arrays.touch(self.aux_arrays)

    def _infer(self) -> None:
        """Compute the outputs in inference.

        Its gradients in the memory pool are put back afterwards, for they may still be wanted.
        """
        held = self._held_gradients() if self in self._holder else {}
        if not held:
            self._holder.clear()
        run(self._training, 0, self._step.forward, is_train=False)
        for name, copy in held.items():
            arrays.put_back(copy, self.own[name])

    def _held_gradients(self) -> Arrays:
        """Copy the gradients in the memory pool to the memory of the host."""
        return {name: arrays.held(array) for name, array in self.own.items()}

    # ------------------------------------------------------------------ the rest

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any
    ) -> ScheduledExecutor:
        """An executor for other shapes that shares arrays and memory with this one."""
        known = self.arg_dict
        shapes = {k: tuple(v) for k, v in kwargs.items() if k in known or k in self.aux_dict}
        if all(known[k].shape == v for k, v in shapes.items() if k in known):
            self._take_gradients()
            return self
        types = {name: arrays.type_of(array) for name, array in known.items()}
        graph = forward_graph(self._symbol, InputSpec(shapes, types))
        tensors, auxiliary = arrays.tensors_of(graph)
        for name, tensor in tensors.items():
            if known[name].shape != tensor.shape and name not in shapes and not partial_shaping:
                raise MemongerError(
                    f"reshape changes the shape of {name!r} from {known[name].shape} to "
                    f"{tensor.shape}; give it too, or partial_shaping=True"
                )

        def sized(old: Mapping[str, Any], new: Mapping[str, Tensor]) -> Arrays:
            for name, array in old.items():
                if array.size < new[name].elements and not allow_up_sizing:
                    raise MemongerError(
                        f"reshape makes {name!r} larger, from {array.shape} to {new[name].shape}; "
                        "allow it with allow_up_sizing=True"
                    )
            return {name: arrays.fitted(array, new[name], self._ctx) for name, array in old.items()}

        grads = {n: g for n, g in self.grad_dict.items() if g is not None and n not in self.own}
        made = ScheduledExecutor(
            self._symbol,
            self._recipe,
            self._ctx,
            graph,
            sized(known, tensors),
            sized(grads, tensors),
            self._grad_req,
            sized(self.aux_dict, auxiliary),
            shared_exec=self,
        )
        made._origin = self._origin
        made._take_gradients()
        if self._monitor_callback is not None:
            made.set_monitor_callback(self._monitor_callback, self._monitor_all)
        return made

    def _take_gradients(self) -> None:
        """Take over the gradients in the pool of an executor that this one is reshaped from."""
        for holder in set(self._holder) - {self}:
            if holder._origin is not self._origin:
                continue
            for name, copy in holder._held_gradients().items():
                if copy.shape == self.grad_dict[name].shape:
                    arrays.put_back(copy, self.grad_dict[name])
            self._holder.clear()
            self._holder.add(self)

    def debug_str(self) -> str:
        """The training step as MXNet has bound it, and the memory planned for it."""
        return str(self._training.debug_str())

    def set_monitor_callback(self, callback: Any, monitor_all: bool = False) -> None:
        """Install a callback; it is told of each result once, however often it is computed."""
        self._monitor_callback, self._monitor_all = callback, monitor_all

        def told(name: bytes, array: Any) -> None:
            if name.startswith(OURS.encode()):
                mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle))  # ours to free
            else:
                callback(name, array)

        self._training.set_monitor_callback(told, monitor_all)


def of_memory(executor: Any) -> Any:
    """Return the executor of MXNet whose memory one that is to be bound may share."""
    return executor._training if isinstance(executor, ScheduledExecutor) else executor
