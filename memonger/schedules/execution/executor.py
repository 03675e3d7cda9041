"""The executor of a training step that is written out (``write``), as MXNet's own to its users.

It runs what comes before the network's outputs in ``forward`` and the rest in ``backward``, so that
each does what it does in MXNet: statistics move, random numbers are drawn and gradients change when
they always do. Inference runs the first part too, as in MXNet's executors: in the layouts of
MKLDNN that training has, and so with the same roundings.

The gradients that are written (not added to) and for which no arrays are given are outputs of the
step, in its memory pool: they last until the next ``forward`` of it, or of an executor that shares
its memory.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any, Mapping

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.gradients import unallocated
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution import arrays
from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.execution.write import Lowered, Recipe, run
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx

log = logging.getLogger("memonger")


class ScheduledExecutor(mx.executor.Executor):
    """An executor of a training step that is written out; made by `ScheduledSymbol`.

    What differs from MXNet's own:

    * ``backward`` runs once after each ``forward(is_train=True)``.
    * Gradients may be in the memory pool (see the module's docstring).
    * With 'add', a gradient is added to a copy of its array, in the pool, and the sum copied back.
    * With ``MXNET_ENGINE_TYPE=NaiveEngine`` an operator that fails ends the process, after MXNet's
      message (``write.run``).

    ``grads`` are the arrays where gradients are to go. For others that are asked for, arrays are
    made, or are the training step's own. ``requests`` says 'write', 'add' or 'null' for each
    argument; memory is shared with ``shared_exec``.
    """

    def __init__(
        self,
        symbol: Any,
        recipe: Recipe,
        ctx: Any,
        args: Arrays,
        grads: Arrays,
        requests: Mapping[str, str],
        aux: Arrays,
        shared_exec: Any,
    ) -> None:
        names = symbol.list_arguments()
        tensors = {name: arrays.tensor_of(array) for name, array in args.items()}
        mkldnn = has_mkldnn(ctx)
        self._step = step = recipe.step(symbol, tensors, requests, mkldnn)
        if step.unwritten and mkldnn:
            raise MemongerError(
                f"the bias of {step.unwritten[0]!r} is used more than once, and its gradient "
                "would be wrong, with or without a schedule: MKLDNN leaves it out where the "
                "weight gets none; fix the bias too, or set MXNET_MKLDNN_ENABLED=0"
            )
        self._symbol, self._recipe, self._ctx = symbol, recipe, ctx
        self._grad_req, self._group2ctx = dict(requests), None
        totals = {name: grads.get(name) for name in step.totals}
        for name, array in totals.items():
            totals[name] = arrays.zeros(tensors[name], ctx) if array is None else array
        self._given_grads = {**grads, **totals}
        self._heads = {k: arrays.zeros(t, ctx) for k, t in step.head_tensors.items()}
        variables = {step.heads[k]: array for k, array in self._heads.items()}
        variables.update({step.totals[name]: array for name, array in totals.items()})
        scratch = {name: arrays.zeros(tensor, ctx) for name, tensor in step.scratch.items()}
        self._training = step.bind(
            ctx, {**args, **variables}, {**aux, **scratch}, of_memory(shared_exec)
        )
        for output in self._training.outputs[step.outputs :]:
            arrays.address(output)  # MKLDNN's Deconvolution needs the memory before it writes
        self._plain: Any = None
        self._ran_forward = self._has_looked = self._trains = False
        #: Whose gradients lie in the memory pool, of all executors that share it: one or none.
        self._holder: weakref.WeakSet[ScheduledExecutor] = weakref.WeakSet()
        if isinstance(shared_exec, ScheduledExecutor):
            self._holder = shared_exec._holder
        self._origin = object()  # the same of all that are reshaped from one another
        self.arg_arrays = [args[name] for name in names]
        self.aux_arrays = [aux[name] for name in symbol.list_auxiliary_states()]
        self.outputs = self._training.outputs[: step.outputs]
        self._optimized_symbol: Any = None
        self._arg_dict = self._grad_dict = self._aux_dict = self._output_dict = None
        self._monitor_callback: Any = None
        self._own: list[Any] = []  # gradients in the memory of the training step
        self._copied: list[tuple[Any, Any, str]] = []  # to, from, request
        self.grad_arrays = [self._gradient(name, tensors[name]) for name in names]

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
            own, grads = self._own_gradients(), {}
            for name, array in self.grad_dict.items():
                if name in own:
                    dtype = arrays.tensor_of(array).dtype
                    grads[name] = unallocated(array.shape, dtype, self._ctx)
                elif array is not None:
                    grads[name] = array
            about = self._ctx, self.arg_dict, grads, self._grad_req, self.aux_dict
            self._plain = mx.sym.Symbol.bind(self._symbol, *about, shared_exec=self._training)
        return self._plain.handle

    def _own_gradients(self) -> Arrays:
        """List those in the memory pool, by name."""
        own = {id(array) for array in self._own}
        return {name: array for name, array in self.grad_dict.items() if id(array) in own}

    def holds(self, array: Any) -> bool:
        """Tell whether this is a gradient in the memory pool."""
        return arrays.address(array) in set(map(arrays.address, self._own))

    def _gradient(self, name: str, tensor: Tensor) -> Any:
        """Find or make the array of a gradient, and note how it is filled."""
        request, array = self._grad_req[name], self._given_grads.get(name)
        if request == "null":
            return array
        output = self._step.gradients.get(name)
        if name in self._step.left_out and has_mkldnn(self._ctx):
            log.warning(
                "the bias %r gets no gradient, because its weight gets none: MKLDNN leaves it out, "
                "with or without a schedule; set MXNET_MKLDNN_ENABLED=0 to compute it",
                name,
            )
            output = None
        source = None if output is None else self._training.outputs[output]
        if array is None:
            others = [*self._own, *self.outputs, *self.arg_arrays, *self._heads.values()]
            if request == "write" and source is not None:
                if arrays.address(source) not in set(map(arrays.address, others)):
                    self._own.append(source)
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
        if not self._has_looked:
            self._has_looked = True
            self._refuse_one_array_for_two()
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

    def _refuse_one_array_for_two(self) -> None:
        # Not when it is bound, for then the memory of the arrays may not have been taken yet.
        seen: dict[int, str] = {}
        for name in filter(self._step.totals.get, self._symbol.list_arguments()):
            place = arrays.address(self._given_grads[name])
            if place in seen:
                raise MemongerError(
                    f"the gradients of {seen[place]!r} and {name!r} are added to one array, and a "
                    "schedule copies back each sum by itself; give each an array of its own, or "
                    "plan with how='marks'"
                )
            seen[place] = name

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

        Its gradients in the memory pool are put back afterwards, for they may still be wanted;
        until then they are held in the memory of the host.
        """
        own = self._own
        if self not in self._holder:
            self._holder.clear()
            own = []
        held = [arrays.held(array) for array in own]
        run(self._training, 0, self._step.forward, is_train=False)
        for copy, array in zip(held, own):
            arrays.put_back(copy, array)

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
        types = {name: arrays.tensor_of(array).dtype for name, array in known.items()}
        tensors, auxiliary = self._recipe.tensors(self._symbol, InputSpec(shapes, types))
        for name, tensor in tensors.items():
            if known[name].shape != tensor.shape and name not in shapes and not partial_shaping:
                raise MemongerError(
                    f"reshape changes the shape of {name!r} from {known[name].shape} to "
                    f"{tensor.shape}; give it too, or partial_shaping=True"
                )

        def sized(old: Mapping[str, Any], new: Mapping[str, Tensor]) -> Arrays:
            return {
                name: arrays.resized(name, array, new[name], self._ctx, allow_up_sizing)
                for name, array in old.items()
            }

        own = self._own_gradients()
        grads = {n: g for n, g in self.grad_dict.items() if g is not None and n not in own}
        args, grads = sized(known, tensors), sized(grads, tensors)
        aux, requests = sized(self.aux_dict, auxiliary), self._grad_req
        about = self._symbol, self._recipe, self._ctx
        made = ScheduledExecutor(*about, args, grads, requests, aux, shared_exec=self)
        made._origin = self._origin
        made._take_gradients()
        if self._monitor_callback is not None:
            made.set_monitor_callback(self._monitor_function, self._monitor_all)
        return made

    def _take_gradients(self) -> None:
        """Take over the gradients in the pool of an executor that this one is reshaped from."""
        holders = [one for one in self._holder if one is not self and one._origin is self._origin]
        for holder in holders:
            held = {name: arrays.held(array) for name, array in holder._own_gradients().items()}
            for name, array in self.grad_dict.items():
                if name in held and held[name].shape == array.shape:
                    arrays.put_back(held[name], array)
            self._holder.clear()
            self._holder.add(self)

    def debug_str(self) -> str:
        """The training step as MXNet has bound it, and the memory planned for it."""
        return str(self._training.debug_str())

    def set_monitor_callback(self, callback: Any, monitor_all: bool = False) -> None:
        """Install a callback; it is told of each result once, however often it is computed."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, mx.base.NDArrayHandle, ctypes.c_void_p)
        self._monitor_function, self._monitor_all = callback, bool(monitor_all)
        self._monitor_callback = kind(monitored(callback, self._symbol, self._step, monitor_all))
        install = mx.base._LIB.MXExecutorSetMonitorCallbackEX
        every = ctypes.c_int(self._monitor_all)
        mx.base.check_call(install(self._training.handle, self._monitor_callback, None, every))


def of_memory(executor: Any) -> Any:
    """Return the executor of MXNet whose memory one that is to be bound may share."""
    return executor._training if isinstance(executor, ScheduledExecutor) else executor


def monitored(callback: Any, symbol: Any, step: Lowered, inputs: bool) -> Any:
    """Make a monitor's callback that is told of each result once, by MXNet's name.

    It is not told of what is computed again, nor of names of ours. What MXNet tells has the name of
    the node, '_' and that of the output or input. Before an input that is a variable it tells the
    variable, by its own name (``GraphExecutor::ExecuteMonInputCallback``).
    """
    ours = {*step.scratch, *step.totals.values()}
    variables = {*symbol.list_inputs(), *ours} if inputs else set()
    held: list[Any] = []

    def name_of(text: str) -> bytes | None:
        stems = (text[:k] for k, letter in enumerate(text) if letter == "_")
        stem = next((stem for stem in stems if stem in step.called), "")
        name = step.called.get(stem, "")
        return None if name is None else (name + text[len(stem) :]).encode()

    def told(name: Any, array: Any, _: Any) -> None:
        text = mx.base.py_str(name)
        if not held and text in variables:
            held.append((name, array))
            return
        found = [*held, (name_of(text), array)]
        held.clear()
        for said, value in found:
            if found[-1][0] is None:  # what is handed to a callback is its own to free
                mx.nd.NDArray(ctypes.cast(value, mx.base.NDArrayHandle))
            else:
                callback(said, value)

    return told
