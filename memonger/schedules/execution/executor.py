"""The executor of a schedule's training step, with the interface of MXNet's executor."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Dict, Mapping, Sequence, Union

import numpy as np

from memonger.costs.bind import find_sparse_gradients, has_mkldnn
from memonger.graph.forward import ForwardGraph, RowEntry
from memonger.graph.operators import recompute
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution.arena import Arena, array_at, refuse_types
from memonger.schedules.execution.calls import BoundCalls, Calls, Place, calls_of
from memonger.schedules.execution.monitor import Callback, Monitor
from memonger.schedules.execution.plain import PlainNetwork
from memonger.support import versions
from memonger.support.errors import MB, MemongerError
from memonger.support.mxnet import mx
from memonger.support.signals import deferred_signals
from memonger.support.types import Context, NDArray, Symbol

if TYPE_CHECKING:
    Arrays = Dict[str, NDArray]  # by the names of arguments or auxiliary states
    OutGrads = Union[Mapping[str, NDArray], Sequence[NDArray], NDArray, None]

POISON = "MEMONGER_POISON"  # environment variable for tests: overwrite dead tensors


class ScheduledExecutor(mx.executor.Executor):
    """An executor of a training step in an arena, made by `ScheduledSymbol`.

    ``forward`` runs the operations up to the network's outputs. Inference runs them too, so that it
    has the layouts of training and rounds the same. ``backward`` runs the rest. Outputs have their
    own arrays; gradients are written or added to the caller's arrays. Gradients of an inference
    are computed by the network without its plan.
    """

    # Properties of MXNet's class make these dicts when they are first read.
    _arg_dict = _grad_dict = _aux_dict = _output_dict = None
    _monitor_callback: Callback | None = None
    _monitor: Monitor | None = None
    _optimized_symbol = _group2ctx = None

    def __init__(
        self,
        symbol: Symbol,
        ctx: Context,
        graph: ForwardGraph,
        arrays: tuple[Arrays, Arrays, Arrays],
        requests: Mapping[str, str],
        lent: object,
    ) -> None:
        refuse_waiting(graph, ctx.device_type)
        args, grads, aux = arrays
        tensors, names = tensors_of(graph), symbol.list_arguments()
        self._symbol, self._ctx, self._grad_req = symbol, ctx, dict(requests)
        self._plain = PlainNetwork(symbol, symbol.warn_of_plain_steps)
        self._step = step = symbol.find_step(graph, requests, has_mkldnn(ctx))
        refuse_types(tensor for signature in step.signatures for tensor in signature.tensors)
        arena = lent.arena if isinstance(lent, ScheduledExecutor) else Arena(ctx)
        self.arena: Arena[BoundCalls] = arena
        self.arena.reserve(step.arena_bytes)
        self._pass: object = None  # identifies a forward pass whose gradients may be computed
        wanted = [name for name, request in requests.items() if request != "null"]
        fitting = {name: fitted(grads.get(name), tensors[name], ctx) for name in wanted}
        grads = {**dict.fromkeys(names), **grads, **fitting}
        self.arg_arrays = [args[name] for name in names]
        self.grad_arrays = [grads[name] for name in names]
        self.aux_arrays = [aux[name] for name in symbol.list_auxiliary_states()]
        self._arrays = self._variables({**args, **aux})  # of the step, outside of the arena
        self._heads = self._head_gradients()
        self._array_of_block: dict[int, NDArray] = {}  # arrays of the caller, and outputs
        self.outputs = [self._output(head) for head in step.heads[: step.arrays.outputs]]
        #: Copies after the backward pass: target, source (None: zeros), whether it is added.
        self._copied: list[tuple[NDArray, NDArray | None, bool]] = []
        for a, entry in zip(step.training.wanted, step.gradients):
            name = graph.nodes[a].name
            if a not in step.parts.left_out or entry in step.adding:
                is_added = requests[name] == "add" and a not in step.parts.zeroed
                self._gradient(grads[name], entry, is_added)
            self._arrays[name] = grads[name]

    def __del__(self) -> None:
        pass  # MXNet's method would free an executor of MXNet, which does not exist

    def _variables(self, inputs: Arrays) -> dict[Place, NDArray]:
        """Find or make the arrays of the variables of the step."""
        step = self._step
        read = {*step.rows.read_row.tolist(), *(row for row, _ in step.heads)}
        variables: dict[Place, NDArray] = {}
        for row in sorted(read.intersection(np.flatnonzero(step.arrays.variable).tolist())):
            array = inputs.get(step.names[row])
            tensor = step.signatures[row].tensors[0]
            variables[row, 0] = fitted(None, tensor, self._ctx) if array is None else array
        return variables

    def _head_gradients(self) -> dict[int, NDArray]:
        """Find the arrays for the gradients of outputs that are not losses, by output number."""
        step, heads = self._step, {}
        for row, source in enumerate(step.rows.source.tolist()):
            if source >= step.parts.variants.forward and (row, 0) in self._arrays:
                heads[int(step.training.names[source].rsplit("_", 1)[1])] = self._arrays[row, 0]
        return heads

    def _output(self, head: RowEntry) -> NDArray:
        """Find or make the array of an output of the network."""
        if head in self._arrays:  # a variable
            return self._arrays[head]
        tensor = self._step.tensor(head)
        array = fitted(None, tensor, self._ctx)
        array = self._array_of_block.setdefault(self._step.block(head), array)
        return array if array.shape == tensor.shape else array.reshape(tensor.shape)

    def _gradient(self, array: NDArray, entry: RowEntry | None, added: bool) -> None:
        """Decide how the array of a gradient is filled: by the step itself, or by a copy."""
        if entry is None:
            if not added:
                self._copied.append((array, None, False))
        elif entry in self._arrays:  # a variable
            self._copied.append((array, self._arrays[entry], added))
        elif not added or entry in self._step.adding:
            block = self._step.block(entry)
            if self._step.alive.of_caller[block]:
                first = self._array_of_block.setdefault(block, array)
                if first is not array:
                    self._copied.append((array, first.reshape(array.shape), False))

    @property
    def handle(self) -> object:
        """The handle of MXNet's executor of the network without its plan.

        An unplanned network that is bound with this one as ``shared_exec`` reads it.
        """
        return self._plain.bound(self).handle

    def _ready(self) -> BoundCalls:
        """Return the calls, bound to the present memory of the arena."""
        memory = self.arena.memory()
        if self not in self.arena.calls:
            step, place = self._step, self.arena.place
            arrays, array_of_block = dict(self._arrays), dict(self._array_of_block)
            for row in np.flatnonzero(~step.arrays.variable).tolist():
                for k, tensor in enumerate(step.signatures[row].tensors):
                    block = step.block((row, k))
                    if block not in array_of_block:
                        offset = place + int(step.offsets[block])
                        array_of_block[block] = array_at(offset, tensor, self._ctx)
                    array = array_of_block[block]
                    same = array.shape == tensor.shape
                    arrays[row, k] = array if same else array.reshape(tensor.shape)
            self.arena.calls[self] = BoundCalls(self._program, arrays, memory)
        return self.arena.calls[self]

    @functools.cached_property
    def _program(self) -> Calls:
        on_gpu = self._ctx.device_type == "gpu"
        return calls_of(self._step, on_gpu, bool(os.environ.get(POISON)))

    def forward(self, is_train: bool = False, **kwargs: NDArray) -> list[NDArray]:
        """Compute the outputs; parameters are those of ``mx.executor.Executor.forward``."""
        for name, array in kwargs.items():
            if name not in self.arg_dict:
                raise TypeError(f"Unknown argument {name}")
            target = self.arg_dict[name]
            if getattr(array, "shape", None) != target.shape:
                raise ValueError(f"argument {name!r} takes an array of shape {target.shape}")
            target[:] = array
        self._pass = None
        if self._plain.forward(self, bool(is_train)):
            return self.outputs
        self.arena.last_pass = None
        self._run(0, self._program.forward, bool(is_train))
        self._pass = self.arena.last_pass = object() if is_train else None
        return self.outputs

    def backward(self, out_grads: OutGrads = None, is_train: bool = True) -> None:
        """Compute the gradients; parameters are those of ``mx.executor.Executor.backward``."""
        if self._plain.is_latest:
            self._plain.backward(self, out_grads, is_train)
            return
        if self._pass is None or not is_train:
            raise MemongerError(
                "a network with a schedule needs one forward(is_train=True) before each "
                "backward(), which runs in training mode; call that first"
            )
        if self.arena.last_pass is not self._pass:
            raise MemongerError(
                "another executor that shares the memory of this one has run after its "
                "forward(is_train=True), and has overwritten its results; call that again"
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
                    "gradient, an NDArray in out_grads; to minimize the output, use mx.sym.MakeLoss"
                )
            out_grads[k].copyto(array)
        self._pass = None
        self._run(self._program.forward, len(self._program.all), True)
        for array, source, added in self._copied:
            if source is None:
                array[:] = 0
            elif added:
                array += source
            else:
                source.copyto(array)

    # Operators of autograd run outside of bulks. If Ctrl-C came before the next bulk, they might
    # write to the arena's memory after it was freed (`calls`).
    @deferred_signals()
    def _run(self, first: int, stop: int, is_train: bool) -> None:
        # Only a forward pass may allocate a larger arena.
        calls = self._ready() if first == 0 else self.arena.calls[self]
        monitor = self._monitor
        if monitor is None:
            calls.run(first, stop, is_train)
            return
        for k in range(first, stop):
            monitor.before(self._program.all[k], calls.arrays)
            calls.run(k, k + 1, is_train)
            monitor.after(self._program.all[k], calls.arrays)

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Sequence[int]
    ) -> ScheduledExecutor:
        """Make an executor for other shapes, even larger ones, that shares arrays and memory."""
        arrays = self.arg_dict
        if all(arrays[k].shape == tuple(v) for k, v in kwargs.items() if k in arrays):
            return self
        executor: ScheduledExecutor = self._symbol.simple_bind(
            self._ctx,
            self._grad_req,
            {name: array.dtype for name, array in arrays.items()},
            shared_arg_names=list(arrays),
            shared_exec=self,
            shared_buffer={},
            **kwargs,
        )
        for name, array in executor.arg_dict.items():
            if arrays[name].shape != array.shape and name not in kwargs and not partial_shaping:
                raise MemongerError(
                    f"reshape changes the shape of {name!r} from {arrays[name].shape} to "
                    f"{array.shape}; give that shape too, or partial_shaping=True"
                )
        if self._monitor_callback is not None:
            executor.set_monitor_callback(self._monitor_callback, self._monitor_all)
        return executor

    def debug_str(self) -> str:
        """Return a text: the operators of the training step in order, and their memory."""
        step = self._step
        lines = [f"Op:{op}, Name={name}" for op, name in zip(step.ops, step.names) if op != "null"]
        total = step.plan_memory().pool_bytes // MB
        spaces = "Total 1 TempSpace resource requested"  # Module reads the line before this one
        return "\n".join([*lines, f"Total {total} MB allocated", spaces, ""])

    def set_monitor_callback(self, callback: Callback, monitor_all: bool = False) -> None:
        """Install a callback, which gets each result once, even if it is recomputed."""
        self._monitor_callback, self._monitor_all = callback, monitor_all
        self._monitor = Monitor(self._step, callback, monitor_all)
        self._plain.set_monitor(callback, monitor_all)


def refuse_sparse(kinds: Mapping[str, str]) -> None:
    """Raise MemongerError for inputs that are not dense; ``kinds`` are their storage types."""
    for name, kind in kinds.items():
        if kind not in ("default", "undefined"):
            raise MemongerError(
                f"input {name!r} is stored as {kind}, but a schedule takes dense inputs only; plan "
                "with how='marks', or make the input dense with tostype('default')"
            )


def refuse_waiting(graph: ForwardGraph, device_type: str) -> None:
    """Raise MemongerError for operators that wait for other devices, unless these are GPUs.

    On the CPU the arrays of all arenas are of device 0 (`calls`), so that the operators of all
    devices would run in one thread, and one operator would wait there for the other for ever.
    """
    waiting = (n for n in graph.nodes if recompute.waits_for_devices(n.op, n.attrs))
    for node in waiting if device_type != recompute.GPU else ():
        raise MemongerError(
            f"{node.name!r} ({node.op}) waits for other devices, which a schedule can do on GPUs "
            "alone; plan with how='marks', or for GPUs with ctx='gpu'"
        )


def tensors_of(graph: ForwardGraph) -> dict[str, Tensor]:
    """Return shape and type of each argument and auxiliary state, by name.

    Raises
    ------
    MemongerError
        If a schedule cannot run the network, because it has sparse arrays or MXNet is too old.
    """
    if not versions.CAN_SCHEDULE:
        raise MemongerError(
            f"MXNet {mx.__version__} cannot run a schedule, which takes 1.7 or later; plan with "
            "how='marks', or install mxnet==1.9.1"
        )
    kinds, nodes = mx.ndarray.ndarray._STORAGE_TYPE_ID_TO_STR, graph.nodes
    stored = {nodes[i].name: nodes[i].hidden.get("__storage_type__", 0) for i in graph.arguments}
    refuse_sparse({name: kinds[int(k)] for name, k in stored.items()})
    for i in sorted(find_sparse_gradients(graph)):
        raise MemongerError(
            f"the gradient of {nodes[i].name!r} is stored row by row (sparse_grad), which a "
            "schedule cannot hold; plan with how='marks', or set sparse_grad=False"
        )
    for i in sorted({a for a, _ in graph.sparse}):
        raise MemongerError(
            f"{nodes[i].name!r} ({nodes[i].op}) makes a sparse array, which a schedule cannot "
            "hold; plan with how='marks'"
        )
    return {nodes[i].name: graph.tensors[i][0] for i in (*graph.arguments, *graph.auxiliary)}


def fitted(array: NDArray | None, tensor: Tensor, ctx: Context) -> NDArray:
    """Return a view of an array with a tensor's shape; zeros if the array does not fit.

    An array fits if it has the tensor's type and at least as many elements.
    """
    if array is None or np.dtype(array.dtype) != tensor.dtype or array.size < tensor.elements:
        return mx.nd.zeros(tensor.shape, ctx, dtype=tensor.dtype)
    if array.shape == tensor.shape:
        return array
    return array.reshape((-1,))[: tensor.elements].reshape(tensor.shape)
