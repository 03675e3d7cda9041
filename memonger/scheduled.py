"""Training with a schedule: a Symbol that MXNet binds and trains as any other.

`ScheduledSymbol` is the user's network, with a schedule. Everything about it is the network's:
names, shapes, JSON, what is saved. Only when it is bound for training does it hand out an executor
of its own, `ScheduledExecutor`, which runs the training step that is written out (``unrolled``).
Its memory pool holds the gradients too, where they are written and not added to.

An executor runs what comes before the network's outputs in ``forward`` and the rest in
``backward``, so that each does what it does in MXNet: statistics move, random numbers are drawn and
gradients change when they always do. Inference runs the plain network, in the same memory.
"""

import ctypes
import logging
import os
import threading
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memonger._mxnet import mx
from memonger.errors import MemongerError
from memonger.executor import reason, sparse_gradients
from memonger.forward import Tensor, forward_graph
from memonger.gradients import environment
from memonger.inputs import GRAD_REQS, InputSpec
from memonger.schedule import Schedule, adapt, check, workload
from memonger.training import training_graph
from memonger.unrolled import BIND, Written, parts, unroll, write

log = logging.getLogger("memonger")

REMEMBERED = 16  # training steps of one symbol: shapes, gradients

Symbol = mx.sym.Symbol
Arrays = Dict[str, Any]


class Step(NamedTuple):
    """A training step, ready to be bound.

    Attributes
    ----------
    written : Written
    forward, nodes : int
        How many nodes run (variables counted) before the outputs are there, and in all.
    operators : int
        How many of the nodes are operators.
    again : frozenset of str
        Names of the nodes that the network has not.
    """

    written: Written
    forward: int
    nodes: int
    operators: int
    again: frozenset


class Recipe:
    """A schedule, and the training steps that were made of it; shared by copies of a symbol."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._known: OrderedDict[Any, Step] = OrderedDict()
        self._lock = threading.Lock()

    def step(
        self,
        symbol: Any,
        tensors: Mapping[str, Tensor],
        wanted: Sequence[str],
        added: Sequence[str] = (),
    ) -> Step:
        """The training step for inputs of these shapes and types, with these gradients.

        Those of ``added`` are added to totals.
        """
        key = (tuple(sorted(tensors.items())), tuple(wanted), tuple(added))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        step = make_step(symbol, self.schedule, tensors, wanted, added)
        with self._lock:
            self._known[key] = step
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return step


def make_step(
    symbol: Any,
    schedule: Schedule,
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    added: Sequence[str] = (),
) -> Step:
    """Write out a training step; parameters as those of `Recipe.step`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    graph = forward_graph(symbol, InputSpec(shapes, types))
    chosen = set(wanted)
    work = workload(
        training_graph(graph, [a for a in graph.arguments if graph.nodes[a].name in chosen])
    )
    fitting = adapt(work, schedule)
    check(work, fitting)
    sums = [a for a in graph.arguments if graph.nodes[a].name in set(added)]
    step = unroll(parts(work), fitting, sums)
    order = step.order()
    first = np.flatnonzero(step.rows.time[order] == 0)
    names = step.names
    again = (step.rows.time > 0) | (step.rows.what != 0)
    return Step(
        write(step),
        int(first.max(initial=-1)) + 1,
        len(order),
        int((~step.tables.variable[order]).sum()),
        frozenset(names[k] for k in np.flatnonzero(again)),
    )


class ScheduledSymbol(Symbol):  # type: ignore[misc, valid-type]
    """A network with a schedule. It is used, saved and inspected as the network is.

    Copies and pickles keep the schedule. What MXNet makes of it does not: ``load_checkpoint``,
    ``mx.sym.load``, ``mx.sym.Group``, ``get_internals``, indexing, operators applied to it.
    """

    def __init__(self, handle: Any, recipe: Recipe) -> None:
        super().__init__(handle)
        self._recipe = recipe

    def __deepcopy__(self, memo: Any) -> "ScheduledSymbol":  # __copy__ calls it too
        return _with_recipe(super().__deepcopy__(memo), self._recipe)

    def __reduce__(self) -> Any:
        return _unpickled, (self.tojson(remove_amp_cast=False), self._recipe.schedule.events)

    def __getitem__(self, index: Any) -> Any:
        if index in (0, *self.list_outputs()) and len(self.list_outputs()) == 1:
            return self.__copy__()
        return self._lost(super().__getitem__(index), "an output of it")

    def get_internals(self) -> Any:
        """The network's internals, as a symbol without a schedule."""
        return super().get_internals()

    def _lost(self, symbol: Any, what: str) -> Any:
        log.warning("the schedule of a planned network is not handed on to %s", what)
        return symbol

    @property
    def schedule(self) -> Schedule:
        """What a training step runs."""
        return self._recipe.schedule

    # ------------------------------------------------------------------ binding

    def simple_bind(
        self,
        ctx: Any,
        grad_req: Any = "write",
        type_dict: Optional[Mapping[str, Any]] = None,
        stype_dict: Optional[Mapping[str, str]] = None,
        group2ctx: Any = None,
        shared_arg_names: Optional[Sequence[str]] = None,
        shared_exec: Any = None,
        shared_buffer: Optional[Arrays] = None,
        **kwargs: Any,
    ) -> Any:
        """Bind with arrays made for it; as ``mx.sym.Symbol.simple_bind``."""
        requests = _requests(self.list_arguments(), grad_req)
        if not any(request != "null" for request in requests.values()):
            return super().simple_bind(
                ctx,
                grad_req,
                type_dict,
                stype_dict,
                group2ctx,
                shared_arg_names,
                shared_exec,
                shared_buffer,
                **kwargs,
            )
        _refuse_groups(group2ctx)
        for name, kind in (stype_dict or {}).items():
            if kind != "default":
                raise MemongerError(
                    "input %r is to be stored as %s; a schedule takes dense inputs only"
                    % (name, kind)
                )
        shapes = {k: tuple(v) for k, v in kwargs.items() if isinstance(v, (tuple, list))}
        types = {k: np.dtype(v).name for k, v in (type_dict or {}).items()}
        tensors, auxiliary = _tensors(self, InputSpec(shapes, types))
        sharing = set(shared_arg_names or ()) if shared_exec is not None else set()
        args = {
            name: _shared(shared_exec.arg_dict, name, tensor)
            if name in sharing
            else _buffered(shared_buffer, name, tensor, ctx)
            for name, tensor in tensors.items()
        }
        args = {n: _zeros(tensors[n], ctx) if a is None else a for n, a in args.items()}
        known = {} if shared_exec is None else shared_exec.aux_dict
        aux = {name: _shared(known, name, tensor) for name, tensor in auxiliary.items()}
        aux = {n: _zeros(auxiliary[n], ctx) if a is None else a for n, a in aux.items()}
        grads: Arrays = {}
        if shared_exec is not None:  # what gradients are added to is the same for all that share
            for name, request in requests.items():
                if request == "add" and name in sharing:
                    found = _shared(shared_exec.grad_dict, name, tensors[name])
                    if found is not None:
                        grads[name] = found
        return ScheduledExecutor(self, ctx, args, grads, requests, aux, shared_exec)

    def bind(
        self,
        ctx: Any,
        args: Any,
        args_grad: Any = None,
        grad_req: Any = "write",
        aux_states: Any = None,
        group2ctx: Any = None,
        shared_exec: Any = None,
    ) -> Any:
        """Bind to arrays that are given; as ``mx.sym.Symbol.bind``."""
        names = self.list_arguments()
        grads = _by_name(args_grad, names)
        requests = _requests(names, grad_req)
        requests = {n: r if grads.get(n) is not None else "null" for n, r in requests.items()}
        if not any(request != "null" for request in requests.values()):
            return super().bind(ctx, args, args_grad, grad_req, aux_states, group2ctx, shared_exec)
        _refuse_groups(group2ctx)
        given, aux = _by_name(args, names), _by_name(aux_states, self.list_auxiliary_states())
        for kind, found, asked in (
            ("argument", given, names),
            ("auxiliary state", aux, self.list_auxiliary_states()),
        ):
            for name in asked:
                if found.get(name) is None:
                    raise MemongerError("bind: the %s %r is missing" % (kind, name))
        grads = {n: g for n, g in grads.items() if requests.get(n, "null") != "null"}
        return ScheduledExecutor(self, ctx, given, grads, requests, aux, shared_exec)


def scheduled(symbol: Any, schedule: Schedule) -> ScheduledSymbol:
    """A copy of a network that trains by a schedule.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        Without marks.
    schedule : Schedule
        In the nodes of its ForwardGraph.
    """
    return _with_recipe(symbol.__copy__(), Recipe(schedule))


def _with_recipe(symbol: Any, recipe: Recipe) -> ScheduledSymbol:
    """A ScheduledSymbol that takes a symbol's place: the handle is its from now on."""
    made = ScheduledSymbol(symbol.handle, recipe)
    symbol.handle = mx.base.SymbolHandle()
    return made


def _unpickled(text: str, events: np.ndarray) -> ScheduledSymbol:
    return _with_recipe(mx.sym.load_json(text), Recipe(Schedule(events)))


class ScheduledExecutor(mx.executor.Executor):
    """An executor of a training step that is written out; made by `ScheduledSymbol`.

    What differs from MXNet's own: ``backward`` once after each ``forward(is_train=True)``;
    outputs of training and of inference are different arrays, so read ``outputs`` anew.

    Parameters
    ----------
    symbol : ScheduledSymbol
    ctx : mx.Context
    args, aux : dict of NDArray
    grads : dict of NDArray
        Where gradients are to go. For others that are asked for, arrays are made, or are the
        training step's own.
    requests : dict of str
        'write', 'add' or 'null' for each argument.
    shared_exec : mx.executor.Executor, optional
        Whose memory is used.
    """

    def __init__(
        self,
        symbol: ScheduledSymbol,
        ctx: Any,
        args: Arrays,
        grads: Arrays,
        requests: Mapping[str, str],
        aux: Arrays,
        shared_exec: Any,
    ) -> None:
        names = symbol.list_arguments()
        wanted = [name for name in names if requests[name] != "null"]
        tensors = {n: Tensor(tuple(a.shape), np.dtype(a.dtype).name) for n, a in args.items()}
        added = [name for name in wanted if requests[name] == "add"]
        step = symbol._recipe.step(symbol, tensors, wanted, added)
        written = step.written
        if written.unwritten and _has_mkldnn(ctx):
            raise MemongerError(
                "the bias of %r is used more than once, and its gradient would be wrong, with or "
                "without a schedule: MKLDNN leaves it out where the weight gets none; fix the bias "
                "too, or set MXNET_MKLDNN_ENABLED=0" % written.unwritten[0]
            )
        self._symbol, self._ctx, self._step = symbol, ctx, step
        self._grad_req, self._group2ctx = dict(requests), None
        self._given_grads = dict(grads)
        for name in written.totals:
            if self._given_grads.get(name) is None:
                self._given_grads[name] = _zeros(tensors[name], ctx)
        self._heads = {
            k: mx.nd.zeros(shape, ctx, dtype=dtype)
            for k, (shape, dtype) in _head_shapes(symbol, tensors, written).items()
        }
        variables = dict(args)
        variables.update({written.heads[k]: array for k, array in self._heads.items()})
        variables.update({written.totals[n]: self._given_grads[n] for n in written.totals})
        states = dict(aux)
        states.update({name: _zeros(tensor, ctx) for name, tensor in written.scratch.items()})
        self._training = _bind(written, ctx, variables, states, shared_exec)
        self.handle = self._training.handle
        _check_size(self._training, step)
        for output in self._training.outputs[written.outputs :]:
            _address(output)  # MKLDNN's Deconvolution needs the memory before it writes
        self._inference: Any = None
        self._inferred: List[Any] = []
        self._ran_forward = False
        self.arg_arrays = [args[name] for name in names]
        self.aux_arrays = [aux[name] for name in symbol.list_auxiliary_states()]
        self.outputs = self._training.outputs[: written.outputs]
        self._optimized_symbol = None
        self._arg_dict = self._grad_dict = self._aux_dict = self._output_dict = None
        self._monitor_callback: Any = None
        self._monitor_all: Any = None
        self._own: List[Any] = []  # gradients in the memory of the training step
        self._copied: List[Tuple[Any, Any, str]] = []  # to, from, request
        self.grad_arrays = [self._gradient(name) for name in names]

    def __del__(self) -> None:
        pass  # the handle is that of self._training

    def _gradient(self, name: str) -> Any:
        """The array of a gradient, and how it is filled."""
        request, made = self._grad_req[name], self._step.written.gradients
        if request == "null":
            return None
        output = made.get(name)
        if name in self._step.written.left_out and _has_mkldnn(self._ctx):
            log.warning(
                "%r gets no gradient, for the weight it belongs to gets none: MXNet leaves it out "
                "on the CPU, with or without a schedule, unless MXNET_MKLDNN_ENABLED=0",
                name,
            )
            output = None
        source = None if output is None else self._training.outputs[output]
        array = self._given_grads.get(name)
        if array is None:
            if request == "write" and source is not None and not self._taken(source):
                self._own.append(source)
                return source
            like = self.arg_arrays[self._symbol.list_arguments().index(name)]
            array = mx.nd.zeros(like.shape, self._ctx, dtype=like.dtype)
        if name in self._step.written.totals:
            request = "write"  # what comes out is the new total
        self._copied.append((array, source, request))
        return array

    def _taken(self, array: Any) -> bool:
        """Whether an array is in the same memory as an output or another gradient."""
        others = [*self._own, *self.outputs, *self.arg_arrays, *self._heads.values()]
        return _address(array) in {_address(other) for other in others}

    # ------------------------------------------------------------------ running

    def forward(self, is_train: bool = False, **kwargs: Any) -> List[Any]:
        """Compute the outputs; parameters as those of ``mx.executor.Executor.forward``."""
        for name, array in kwargs.items():
            if name not in self.arg_dict:
                raise TypeError("Unknown argument %s" % name)
            if self.arg_dict[name].shape != array.shape:
                raise ValueError(
                    "Shape not match! Argument %s, need: %s, received: %s"
                    % (name, self.arg_dict[name].shape, array.shape)
                )
            self.arg_dict[name][:] = array
        self._output_dict = None
        if not is_train:
            self.outputs = self._infer()
            return self.outputs
        _run(self._training, 0, self._step.forward)
        self._ran_forward = True
        self.outputs = self._training.outputs[: self._step.written.outputs]
        return self.outputs

    def backward(self, out_grads: Any = None, is_train: bool = True) -> None:
        """Compute the gradients; parameters as those of ``mx.executor.Executor.backward``."""
        if not self._ran_forward or not is_train:
            raise MemongerError(
                "a scheduled network computes its gradients once after each "
                "forward(is_train=True), in training mode; call that first"
            )
        if out_grads is None:
            out_grads = []
        elif isinstance(out_grads, mx.nd.NDArray):
            out_grads = [out_grads]
        elif isinstance(out_grads, dict):
            out_grads = [out_grads[name] for name in self._symbol.list_outputs()]
        for k, array in self._heads.items():
            if k >= len(out_grads):
                raise MemongerError(
                    "output %r is no loss, so backward needs its gradient (out_grads); to minimize "
                    "it, make a loss of it with mx.sym.MakeLoss" % self._symbol.list_outputs()[k]
                )
            out_grads[k].copyto(array)
        self._ran_forward = False
        _run(self._training, self._step.forward, self._step.nodes)
        for array, source, request in self._copied:
            if request == "add":
                if source is not None:
                    array += source
            elif source is None:
                array[:] = 0
            else:
                source.copyto(array)

    def _infer(self) -> List[Any]:
        """Outputs of the plain network in inference, which uses the memory of the training step.

        The gradients are put back afterwards, for they may still be wanted.
        """
        if self._inference is None:
            # As an executor that can train runs it: without the fusions that are for inference.
            with environment(MXNET_SUBGRAPH_BACKEND="NONE"):
                self._inference = Symbol.bind(
                    self._symbol,
                    self._ctx,
                    self.arg_dict,
                    None,
                    "null",
                    self.aux_dict,
                    shared_exec=self._training,
                )
            self._inferred = [
                mx.nd.zeros(out.shape, self._ctx, dtype=out.dtype)
                for out in self._inference.outputs
            ]
            if self._monitor_callback is not None:
                self._watch(self._inference)
        held = [array.copy() for array in self._own]
        self._ran_forward = False
        for found, kept in zip(self._inference.forward(is_train=False), self._inferred):
            found.copyto(kept)
        for array, copy in zip(self._own, held):
            copy.copyto(array)
        return list(self._inferred)

    # ------------------------------------------------------------------ the rest

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any
    ) -> "ScheduledExecutor":
        """An executor for other shapes that shares arrays and memory with this one."""
        shapes = {k: tuple(v) for k, v in kwargs.items()}
        if all(self.arg_dict[k].shape == v for k, v in shapes.items() if k in self.arg_dict):
            return self
        types = {n: np.dtype(a.dtype).name for n, a in self.arg_dict.items()}
        tensors, auxiliary = _tensors(self._symbol, InputSpec(shapes, types))
        args: Arrays = {}
        for name, tensor in tensors.items():
            old = self.arg_dict[name]
            if old.shape != tensor.shape and name not in shapes and not partial_shaping:
                raise MemongerError(
                    "reshape changes the shape of %r from %s to %s; give it too, or "
                    "partial_shaping=True" % (name, old.shape, tensor.shape)
                )
            args[name] = _resized(name, old, tensor, self._ctx, allow_up_sizing)
        aux = {
            name: _resized(name, self.aux_dict[name], tensor, self._ctx, allow_up_sizing)
            for name, tensor in auxiliary.items()
        }
        grads = {
            name: _resized(name, array, tensors[name], self._ctx, allow_up_sizing)
            for name, array in self.grad_dict.items()
            if array is not None and (name in self._given_grads or self._grad_req[name] == "add")
        }
        made = ScheduledExecutor(
            self._symbol, self._ctx, args, grads, self._grad_req, aux, self._training
        )
        if self._monitor_callback is not None:
            made._monitor_callback, made._monitor_all = self._monitor_callback, self._monitor_all
            made._watch(made._training)
        return made

    def set_monitor_callback(self, callback: Any, monitor_all: bool = False) -> None:
        """Install a callback; it sees each result once, however often it is computed."""
        again = self._step.again

        def first_time(name: Any, array: Any, _: Any) -> None:
            text = name.decode() if isinstance(name, bytes) else name
            if text.rsplit("_", 1)[0] not in again:
                callback(name, array)

        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, mx.base.NDArrayHandle, ctypes.c_void_p)
        self._monitor_callback, self._monitor_all = kind(first_time), monitor_all
        self._watch(self._training)
        if self._inference is not None:
            self._watch(self._inference)

    def _watch(self, executor: Any) -> None:
        mx.base.check_call(
            mx.base._LIB.MXExecutorSetMonitorCallbackEX(
                executor.handle, self._monitor_callback, None, ctypes.c_int(bool(self._monitor_all))
            )
        )


# ---------------------------------------------------------------------- MXNet


def _bind(written: Written, ctx: Any, args: Arrays, aux: Arrays, shared_exec: Any) -> Any:
    names = written.symbol.list_arguments()
    states = written.symbol.list_auxiliary_states()
    try:
        with environment(**BIND):
            return written.symbol.bind(
                ctx,
                {name: args[name] for name in names},
                None,
                "null",
                {name: aux[name] for name in states},
                shared_exec=shared_exec,
            )
    except mx.MXNetError as error:
        raise MemongerError(
            "MXNet cannot bind the schedule of this network on %s: %s" % (ctx, reason(error))
        ) from None


#: ``GraphExecutor::RunOps(bool is_train, size_t first, size_t end)``: the nodes first to end - 1 of
#: the graph run (``src/executor/graph_executor.cc``). ``MXExecutorForward`` calls it for all nodes;
#: there is no C function for some of them, but the libraries of 1.9.1 export the method itself.
_RUN_OPS = "_ZN5mxnet4exec13GraphExecutor6RunOpsEbmm"


def _run(executor: Any, first: int, end: int) -> None:
    function = getattr(mx.base._LIB, _RUN_OPS)
    function.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = None
    function(executor.handle, True, first, end)


def _check_size(executor: Any, step: Step) -> None:
    """Make sure that the executor has the nodes that `_run` will ask for."""
    if not hasattr(mx.base._LIB, _RUN_OPS):
        raise MemongerError("this build of MXNet cannot run a schedule: it exports no RunOps")
    found = executor.debug_str().count("\nOp:")
    if found != step.operators:
        raise MemongerError(
            "MXNet has made %d operators of the %d of a training step; please report this network"
            % (found, step.operators)
        )


def _has_mkldnn(ctx: Any) -> bool:
    """Whether MKLDNN computes on this device."""
    enabled = os.environ.get("MXNET_MKLDNN_ENABLED", "1") not in ("0", "false", "False")
    built = mx.runtime.Features().is_enabled("MKLDNN")
    return enabled and built and ctx.device_type.startswith("cpu")


def _address(array: Any) -> int:
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


# ---------------------------------------------------------------------- arguments of bind


def _requests(names: Sequence[str], grad_req: Any) -> Dict[str, str]:
    """'write', 'add' or 'null' for each argument."""
    if isinstance(grad_req, str):
        found = dict.fromkeys(names, grad_req)
    elif isinstance(grad_req, (list, tuple)):
        found = dict(zip(names, grad_req))
    else:
        found = {name: grad_req.get(name, "null") for name in names}
    for name, request in found.items():
        if request not in GRAD_REQS:
            raise MemongerError(
                "grad_req of %r is %r; there are %s"
                % (name, request, ", ".join(map(repr, GRAD_REQS)))
            )
    return {name: found.get(name, "null") for name in names}


def _refuse_groups(group2ctx: Any) -> None:
    groups = group2ctx if isinstance(group2ctx, (list, tuple)) else [group2ctx]
    if any(groups):
        raise MemongerError("a schedule runs on one device; it cannot be split with group2ctx")


def _by_name(arrays: Any, names: Sequence[str]) -> Arrays:
    if arrays is None:
        return {}
    return dict(arrays) if isinstance(arrays, dict) else dict(zip(names, arrays))


def _tensors(symbol: Any, spec: InputSpec) -> Tuple[Dict[str, Tensor], Dict[str, Tensor]]:
    """Shape and type of each argument and each auxiliary state."""
    graph = forward_graph(symbol, spec)
    of = {graph.nodes[i].name: graph.tensors[i][0] for i in (*graph.arguments, *graph.auxiliary)}
    sparse = sparse_gradients(graph)
    if sparse:
        raise MemongerError(
            "the gradient of %r is made row by row (sparse_grad), which a schedule cannot hold"
            % graph.nodes[min(sparse)].name
        )
    return (
        {name: of[name] for name in symbol.list_arguments()},
        {name: of[name] for name in symbol.list_auxiliary_states()},
    )


def _zeros(tensor: Tensor, ctx: Any) -> Any:
    return mx.nd.zeros(tensor.shape, ctx, dtype=tensor.dtype)


def _shared(arrays: Mapping[str, Any], name: str, tensor: Tensor) -> Any:
    """The array of another executor, if it has one that fits."""
    array = arrays.get(name)
    if array is None or Tensor(tuple(array.shape), np.dtype(array.dtype).name) != tensor:
        return None
    return array


def _buffered(buffer: Optional[Arrays], name: str, tensor: Tensor, ctx: Any) -> Any:
    """An array in memory that is there for all executors, which is made if there is too little."""
    if buffer is None:
        return None
    array = buffer.get(name)
    fits = array is not None and np.dtype(array.dtype).name == tensor.dtype
    if array is None or not fits or array.size < tensor.elements:
        buffer[name] = array = _zeros(tensor, ctx)
    return _view(array, tensor)


def _view(array: Any, tensor: Tensor) -> Any:
    if array.shape == tensor.shape:
        return array
    return array.reshape((-1,))[: tensor.elements].reshape(tensor.shape)


def _resized(name: str, array: Any, tensor: Tensor, ctx: Any, up: bool) -> Any:
    if array.size >= tensor.elements:
        return _view(array, tensor)
    if not up:
        raise MemongerError(
            "reshape makes %r larger, from %s to %s; allow it with allow_up_sizing=True"
            % (name, array.shape, tensor.shape)
        )
    return _zeros(tensor, ctx)


def _head_shapes(symbol: Any, tensors: Mapping[str, Tensor], written: Written) -> Dict[int, Tensor]:
    """Of each output that needs a gradient its shape and type."""
    if not written.heads:
        return {}
    _, shapes, _ = symbol.infer_shape(**{n: t.shape for n, t in tensors.items()})
    _, types, _ = symbol.infer_type(**{n: t.dtype for n, t in tensors.items()})
    return {k: Tensor(tuple(shapes[k]), np.dtype(types[k]).name) for k in written.heads}
