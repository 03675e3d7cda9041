"""The executor of a schedule's training step, with the interface of MXNet's executor."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from typing import Mapping, Sequence

import numpy as np

from memonger.costs.bind import find_sparse_gradients, has_mkldnn
from memonger.graph.forward import ForwardGraph, RowEntry
from memonger.graph.operators import recompute
from memonger.graph.operators.gradients import unallocated
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution.arena import Arena, BoundCalls, Frame, array_at, refuse_types
from memonger.schedules.execution.calls import Calls, Invocation, Place, calls_of
from memonger.schedules.execution.monitor import Callback, Monitor
from memonger.schedules.execution.plain import PlainNetwork
from memonger.schedules.execution.unchanged import check_unchanged, digest, watched_passes
from memonger.schedules.training_step import TrainingStep, arena
from memonger.support import versions
from memonger.support.errors import MB, MemongerError
from memonger.support.mxnet import mx
from memonger.support.signals import deferred_signals
from memonger.support.types import Context, NamedArrays, NDArray, OutGrads, Symbol

DENSE = "default", "undefined"  # storage types
SPARSE_INPUT = (
    "input {!r} is stored as {}, but a schedule takes dense inputs only; plan with how='marks', or "
    "make the input dense with tostype('default')"
)
POISON = "MEMONGER_POISON"  # environment variable for tests: overwrite dead tensors


class BoundStep:
    """A training step that runs in an arena.

    A `Frame` has the arrays outside of the arena, and each run is given one: variables, outputs,
    gradients, and what a step that is split has for its backward pass.
    """

    def __init__(self, step: TrainingStep, ctx: Context, lent: BoundStep | None) -> None:
        refuse_types(tensor for signature in step.signatures for tensor in signature.tensors)
        self.step, self._ctx = step, ctx
        self.arena: Arena = lent.arena if lent is not None else Arena(ctx)
        self.arena.reserve(step.arena_bytes)
        read = {*step.rows.read_row.tolist(), *(row for row, _ in step.heads)}
        #: The variables that the step reads, by name, and those that are gradients of outputs.
        self.variables: dict[str, RowEntry] = {}
        self.heads: dict[int, RowEntry] = {}  # by the number of the output
        forward_nodes = step.parts.variants.forward_nodes
        for row in sorted(read.intersection(np.flatnonzero(step.arrays.variable).tolist())):
            source = step.rows.source[row]
            if source >= forward_nodes:
                name = step.training.names[source]
                self.heads[int(name.rsplit("_", 1)[1])] = row, 0
            else:
                self.variables[step.names[row]] = row, 0
        # To wait on one device for operators that wait for another device may be a deadlock.
        nodes = step.training.graph.nodes
        waits = any(recompute.waits_for_devices(node.op, node.attrs) for node in nodes)
        self._read_again = {} if waits else step.read_again
        self._watched = watched_passes()
        #: The tensors of each block, in the arena or outside of it.
        self._tensors: dict[int, list[tuple[RowEntry, Tensor]]] = defaultdict(list)
        for row in np.flatnonzero(~step.arrays.variable).tolist():
            for k, tensor in enumerate(step.signatures[row].tensors):
                self._tensors[step.block((row, k))].append(((row, k), tensor))
        heads = step.heads[: step.arrays.outputs]
        #: The shapes and types of the network's outputs.
        self.outputs = [step.tensor(head) for head in heads]
        #: The blocks of outputs; an output in the block of an earlier one has the number of it too.
        self._output_blocks: dict[int, int] = {}
        self.repeated_outputs: list[tuple[int, int]] = []
        for k, block in enumerate(map(step.block, heads)):
            if block >= 0:
                first_output = self._output_blocks.setdefault(block, k)
                if first_output != k:
                    self.repeated_outputs.append((first_output, k))
        split = step.outside & ~step.alive.of_caller
        #: The blocks that the backward pass of a split step gets from the forward pass.
        self._split = np.flatnonzero(split).tolist()
        #: The block of each gradient that the step itself writes; by the name of the argument.
        self._written: dict[str, int] = {}
        #: Copies after the backward pass: argument, the source of its gradient (None: zeros), and
        #: whether it is added.
        self._copied: list[tuple[str, Place | None, bool]] = []
        first: dict[int, str] = {}  # block -> the argument whose gradient is written there
        parts = step.parts
        for a, entry in zip(step.training.wanted, step.gradients):
            name, added = step.training.graph.nodes[a].name, a in parts.added - parts.zeroed
            if a in parts.left_out and entry not in step.adding:
                continue
            if entry is None:
                if not added:
                    self._copied.append((name, None, False))
            elif step.block(entry) in {-1, *self._output_blocks}:
                self._copied.append((name, entry, added))
            elif not added or entry in step.adding:
                block = step.block(entry)
                if step.alive.of_caller[block]:
                    if first.setdefault(block, name) == name:
                        self._written[name] = block
                    else:
                        self._copied.append((name, first[block], False))

    def make_outputs(self, inputs: Mapping[str, NDArray]) -> list[NDArray]:
        """Return an array for each output: a variable, a new array, or a view of another's."""
        of_block: dict[int, NDArray] = {}
        outputs: list[NDArray] = []
        for head, tensor in zip(self.step.heads, self.outputs):
            block = self.step.block(head)
            if block < 0:
                outputs.append(inputs[self.step.names[head[0]]])
                continue
            if block not in of_block:
                of_block[block] = unallocated(tensor, self._ctx)
            array = of_block[block]
            outputs.append(array if array.shape == tensor.shape else array.reshape(tensor.shape))
        return outputs

    def place_inputs(self, arrays: Mapping[str, NDArray]) -> dict[Place, NDArray]:
        """Return the places of arguments and states, given by name; others become zeros."""
        places: dict[Place, NDArray] = {}
        for name, entry in self.variables.items():
            array = arrays.get(name)
            tensor = self.step.tensor(entry)
            places[entry] = fitted(None, tensor, self._ctx) if array is None else array
        return places

    def place_outputs(self, outputs: Sequence[NDArray]) -> dict[Place, NDArray]:
        """Return the places of what a forward pass writes outside of the arena.

        These are the network's outputs (of those in one block, the first counts), and in new arrays
        what the backward pass of a split step gets.
        """
        blocks = {block: outputs[k] for block, k in self._output_blocks.items()}
        for block in self._split:
            _, tensor = self._tensors[block][0]
            blocks[block] = unallocated(tensor, self._ctx)
        return self._place(blocks)

    def place_gradients(self, arrays: Mapping[str, NDArray]) -> dict[Place, NDArray]:
        """Return the places of the gradients of arguments."""
        places: dict[Place, NDArray] = dict(arrays.items())
        places.update(self._place({block: arrays[name] for name, block in self._written.items()}))
        return places

    def _place(self, blocks: Mapping[int, NDArray]) -> dict[Place, NDArray]:
        """Return the places of blocks; an array has the shape of one tensor of its block."""
        places: dict[Place, NDArray] = {}
        for block, array in blocks.items():
            shape = array.shape
            for entry, tensor in self._tensors[block]:
                is_same = tensor.shape == shape
                places[entry] = array if is_same else array.reshape(tensor.shape)
        return places

    def run_forward(self, frame: Frame, is_train: bool) -> None:
        """Run the operators up to the network's outputs."""
        self._run(0, self.program.forward_calls, is_train, frame)
        if is_train and self._watched and not frame.digest:
            frame.digest = digest({n: frame.arrays[place] for n, place in self._read_again.items()})

    def run_backward(self, frame: Frame) -> None:
        """Run the others, and write or add the gradients of arguments.

        The caller checks that no argument has changed since the forward pass.
        """
        arguments = {name: frame.arrays[self._read_again[name]] for name in frame.digest}
        frame.digest_again = digest(arguments)
        self._run(self.program.forward_calls, len(self.program.all), True, frame)
        for name, source, added in self._copied:
            array = frame.arrays[name]
            if source is None:
                array[:] = 0
            elif added:
                array += frame.arrays[source]
            else:
                frame.arrays[source].reshape(array.shape).copyto(array)
        self._watched -= self._watched > 0

    @functools.cached_property
    def program(self) -> Calls:
        """All calls of the step."""
        on_gpu = self._ctx.device_type == "gpu"
        return calls_of(self.step, on_gpu, bool(os.environ.get(POISON)))

    @functools.cached_property
    def backward_places(self) -> set[Place]:
        """The places that the backward pass reads or writes."""
        places = {source for _, source, _ in self._copied if source is not None}
        places.update(self._read_again.values() if self._watched else ())
        for call in self.program.all[self.program.forward_calls :]:
            places.update(call.writes)
            if isinstance(call, Invocation):
                places.update(call.reads)
            else:
                places.update(place for _, place in call.heads)
                if call.late is not None:
                    places.update(call.late.reads, call.late.writes)
        return places

    def _ready(self) -> BoundCalls:
        """Return the calls, bound to the present memory of the arena."""
        memory = self.arena.memory()
        if self not in self.arena.calls:
            step, start = self.step, self.arena.start
            blocks: dict[int, NDArray] = {}
            for block, tensors in self._tensors.items():
                if not step.outside[block]:
                    _, tensor = tensors[0]
                    blocks[block] = array_at(start + int(step.offsets[block]), tensor, self._ctx)
            self.arena.calls[self] = BoundCalls(self.program, self._place(blocks), memory)
        return self.arena.calls[self]

    # Operators of autograd run outside of bulks. If Ctrl-C came before the next bulk, they might
    # write to the arena's memory after it was freed (`arena`).
    @deferred_signals()
    def _run(self, first: int, stop: int, is_train: bool, frame: Frame) -> None:
        # Only a forward pass may allocate a larger arena, if its backward pass reads the arena.
        is_first = first == 0 or self.step.is_split
        calls, monitor = self._ready() if is_first else self.arena.calls[self], self.monitor
        if monitor is None:
            calls.run(first, stop, is_train, frame)
            return
        arrays = calls.arrays(frame)
        for k in range(first, stop):
            monitor.before(self.program.all[k], arrays)
            calls.run(k, k + 1, is_train, frame)
            monitor.after(self.program.all[k], arrays)

    monitor: Monitor | None = None


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
    _optimized_symbol = _group2ctx = None

    def __init__(
        self,
        symbol: Symbol,
        ctx: Context,
        graph: ForwardGraph,
        arrays: tuple[NamedArrays, NamedArrays, NamedArrays],
        requests: Mapping[str, str],
        lent: object,
    ) -> None:
        args, grads, aux = arrays
        tensors, names = tensors_of(graph, ctx), symbol.list_arguments()
        self._symbol, self._ctx, self._grad_req = symbol, ctx, dict(requests)
        self._plain = PlainNetwork(symbol, symbol.warn_of_plain_steps)
        step = symbol.find_step(graph, requests, has_mkldnn(ctx))
        self._bound: BoundStep = BoundStep(
            step, ctx, lent._bound if isinstance(lent, ScheduledExecutor) else None
        )
        self._pass: object = None  # identifies a forward pass whose gradients may be computed
        wanted = [name for name, request in requests.items() if request != "null"]
        fitting = {name: fitted(grads.get(name), tensors[name], ctx) for name in wanted}
        grads = {**dict.fromkeys(names), **grads, **fitting}
        self.arg_arrays = [args[name] for name in names]
        self.grad_arrays = [grads[name] for name in names]
        self.aux_arrays = [aux[name] for name in symbol.list_auxiliary_states()]
        inputs = {**args, **aux}
        self.outputs = self._bound.make_outputs(inputs)
        self._frame = Frame(
            {
                **self._bound.place_inputs(inputs),
                **self._bound.place_outputs(self.outputs),
                **self._bound.place_gradients(fitting),
            }
        )

    def __del__(self) -> None:
        pass  # MXNet's method would free an executor of MXNet, which does not exist

    @property
    def arena(self) -> Arena:
        """The arena, which other executors may share."""
        return self._bound.arena

    @property
    def step(self) -> TrainingStep:
        """The training step that it runs."""
        return self._bound.step

    @property
    def handle(self) -> object:
        """The handle of MXNet's executor of the network without its plan.

        An unplanned network that is bound with this one as ``shared_exec`` reads it.
        """
        return self._plain.bound(self).handle

    def forward(self, is_train: bool = False, **kwargs: NDArray) -> list[NDArray]:
        """Compute the outputs; parameters are those of ``mx.executor.Executor.forward``."""
        for name, array in kwargs.items():
            if name not in self.arg_dict:
                raise TypeError(f"Unknown argument {name}")
            target = self.arg_dict[name]
            if getattr(array, "shape", None) != target.shape:
                raise ValueError(f"argument {name!r} takes an array of shape {target.shape}")
            target[:] = array
        self._pass, self._frame.digest = None, {}
        if self._plain.forward(self, bool(is_train)):
            return self.outputs
        self.arena.last_pass = None
        self._bound.run_forward(self._frame, bool(is_train))
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
        out_grads, heads = out_grads or [], self._bound.heads
        for k, place in heads.items():
            if k >= len(out_grads) or not isinstance(out_grads[k], mx.nd.NDArray):
                raise MemongerError(
                    f"output {self._symbol.list_outputs()[k]!r} is no loss, so backward needs its "
                    "gradient, an NDArray in out_grads; to minimize the output, use mx.sym.MakeLoss"
                )
            # A copy, because a gradient may be written to the caller's array.
            copy = unallocated(self._bound.step.tensor(place), self._ctx)
            self._frame.arrays[place] = out_grads[k].copyto(copy)
        self._pass = None
        try:
            self._bound.run_backward(self._frame)
        finally:
            for place in heads.values():
                del self._frame.arrays[place]
        check_unchanged(self._frame.digest, self._frame.digest_again)

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
        step = self._bound.step
        lines = [f"Op:{op}, Name={name}" for op, name in zip(step.ops, step.names) if op != "null"]
        total = arena(step).planned_bytes // MB
        spaces = "Total 1 TempSpace resource requested"  # Module reads the line before this one
        return "\n".join([*lines, f"Total {total} MB allocated", spaces, ""])

    def set_monitor_callback(self, callback: Callback, monitor_all: bool = False) -> None:
        """Install a callback, which gets each result once, even if it is recomputed."""
        self._monitor_callback, self._monitor_all = callback, monitor_all
        self._bound.monitor = Monitor(self._bound.step, callback, monitor_all)
        self._plain.set_monitor(callback, monitor_all)


def refuse_sparse(kinds: Mapping[str, str]) -> None:
    """Raise MemongerError for inputs that are not dense; ``kinds`` are their storage types."""
    for name, kind in kinds.items():
        if kind not in DENSE:
            raise MemongerError(SPARSE_INPUT.format(name, kind))


def why_refused(graph: ForwardGraph, device_type: str) -> str:
    """Return why no schedule can run a network on this type of device; '' if one may.

    MXNet is too old, arrays are sparse, or operators wait for other devices, and these are no GPUs.
    On the CPU the arrays of all arenas are of device 0 (`arena`), so that the operators of all
    devices would run in one thread, and one operator would wait there for the other for ever.
    """
    if not versions.CAN_SCHEDULE:
        return (
            f"MXNet {mx.__version__} cannot run a schedule, which takes 1.7 or later; plan with "
            "how='marks', or install mxnet==1.9.1"
        )
    kinds, nodes = mx.ndarray.ndarray._STORAGE_TYPE_ID_TO_STR, graph.nodes
    for i in graph.arguments:
        kind = kinds[int(nodes[i].hidden.get("__storage_type__", 0))]
        if kind not in DENSE:
            return SPARSE_INPUT.format(nodes[i].name, kind)
    for i in sorted(find_sparse_gradients(graph)):
        return (
            f"the gradient of {nodes[i].name!r} is stored row by row (sparse_grad), which a "
            "schedule cannot hold; plan with how='marks', or set sparse_grad=False"
        )
    for i, _ in sorted(graph.sparse):
        return (
            f"{nodes[i].name!r} ({nodes[i].op}) makes a sparse array, which a schedule cannot "
            "hold; plan with how='marks'"
        )
    for node in nodes if device_type != recompute.GPU else ():
        if recompute.waits_for_devices(node.op, node.attrs):
            return (
                f"{node.name!r} ({node.op}) waits for other devices, which a schedule can do on "
                "GPUs alone; plan with how='marks', or for GPUs with ctx='gpu'"
            )
    return ""


def tensors_of(graph: ForwardGraph, ctx: Context) -> dict[str, Tensor]:
    """Return shape and type of each argument and auxiliary state, by name.

    Raises
    ------
    MemongerError
        If no schedule can run the network on this device (`why_refused`).
    """
    why = why_refused(graph, ctx.device_type)
    if why:
        raise MemongerError(why)
    both = (*graph.arguments, *graph.auxiliary)
    return {graph.nodes[i].name: graph.tensors[i][0] for i in both}


def fitted(array: NDArray | None, tensor: Tensor, ctx: Context) -> NDArray:
    """Return a view of an array with a tensor's shape; zeros if the array does not fit.

    An array fits if it has the tensor's type and at least as many elements.
    """
    if array is None or np.dtype(array.dtype) != tensor.dtype or array.size < tensor.elements:
        return mx.nd.zeros(tensor.shape, ctx, dtype=tensor.dtype)
    if array.shape == tensor.shape:
        return array
    return array.reshape((-1,))[: tensor.elements].reshape(tensor.shape)
