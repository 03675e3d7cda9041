"""A Symbol with a schedule, which MXNet binds and trains as any other Symbol.

A symbol that MXNet derives from it has no schedule. If a method of the symbol derives it, a warning
is logged when the result is bound for training; inspecting a network (as Module and ``mx.viz`` do)
logs nothing. If the symbol becomes part of another symbol, the warning comes at once, because
memonger does not see later binds. Each warning is logged once for each network and place.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Mapping, Sequence, Union

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import InputSpec, read_requests
from memonger.graph.read import forward_graph
from memonger.schedules.execution import executor
from memonger.schedules.execution.arena import address
from memonger.schedules.execution.executor import BoundStep, ScheduledExecutor, fitted
from memonger.schedules.expand import step_for
from memonger.schedules.schedule import Schedule
from memonger.schedules.training_step import TrainingStep
from memonger.support.cache import Latest
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx, wait_for_engine
from memonger.support.symbols import SymbolWithCasts, json_of
from memonger.support.types import Context, Executor, Int32s, NamedArrays, NDArray, Symbol

if TYPE_CHECKING:
    GradReq = Union[str, Sequence[str], Mapping[str, str]]
    Given = Union[Mapping[str, NDArray], Sequence[NDArray], None]  # arrays, as bind takes them

log = logging.getLogger("memonger")

_SLOT = mx.symbol._internal.SymbolBase.handle  # where MXNet keeps the handle of a symbol

#: The files of MXNet that read the handle of a symbol to derive another one: c_handle_array
#: (operators, Group), CachedOp (SymbolBlock), mixed precision.
DROPS_SCHEDULE = "mxnet/base.py", "mxnet/_ctypes/ndarray.py", "mxnet/contrib/amp/amp.py"


@dataclass(eq=False)
class SharedState:
    """The state that copies of a symbol share."""

    schedule: Schedule
    logged: set[str] = field(default_factory=set)  # the reasons of warnings that were logged
    #: The latest steps, by shapes, gradients and devices.
    steps: Latest[TrainingStep] = field(default_factory=lambda: Latest(16))


def _drops_schedule(method: FunctionType) -> object:
    """Wrap a method of a symbol whose result has no schedule."""

    @functools.wraps(method)
    def call(self: ScheduledSymbol, *args: object, **kwargs: object) -> Symbol:
        result = method(self, *args, **kwargs)
        lost = self._lost or f"it was made by {method.__name__}()"
        return None if result is None else _adopt_handle(result, self.shared, lost)

    return call


class ScheduledSymbol(SymbolWithCasts):
    """A network with a schedule, which is used, saved and inspected as any Symbol.

    A bind without gradients returns MXNet's own executor. A bind for training returns a
    `ScheduledExecutor`, on one device, with dense arrays and the same results. It may share arrays
    and memory with executors of other symbols, planned or not. Copies and pickles have the schedule
    too; files contain the network without it.
    """

    def __init__(self, handle: object, shared: SharedState, lost: str | None = None) -> None:
        super().__init__(handle)
        self.shared = shared
        self._lost = lost  # how MXNet derived this symbol, which then has no schedule

    @property
    def handle(self) -> object:
        """MXNet's handle; a warning is logged if code that drops the schedule reads it."""
        if sys._getframe(1).f_code.co_filename.endswith(DROPS_SCHEDULE):
            self._warn(
                "it has become part of another symbol (by an operator, or mx.sym.Group), of a "
                "Gluon block, or it was converted by mx.contrib.amp"
            )
        return _SLOT.__get__(self)

    @handle.setter
    def handle(self, value: object) -> None:
        _SLOT.__set__(self, value)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule; None if MXNet derived this symbol from one with a schedule."""
        return self.shared.schedule if self._lost is None else None

    def find_step(
        self,
        graph: ForwardGraph,
        requests: Mapping[str, str],
        mkldnn: bool,
        step: TrainingStep | None = None,
    ) -> TrainingStep:
        """Return the training step of this graph: the cached one, or ``step``, or a new one."""
        # The JSON is part of the key, because attributes can be set at any time.
        network = hashlib.sha256(json_of(self).encode()).digest()
        tensors = tuple(graph.tensors[a] for a in graph.arguments)
        key = network, tensors, frozenset(requests.items()), mkldnn
        known = self.shared.steps.get(key)
        if known is None:
            known = step or step_for(graph, self.shared.schedule, requests, mkldnn)
            self.shared.steps.put(key, known)
        return known

    def _warn(self, place: str) -> None:
        text = "the schedule of network %r is lost: %s; to train the new symbol by a schedule, "
        self._log_once(f"{text}plan it", place)

    def warn_of_plain_steps(self, reason: str) -> None:
        """Log, once for a network, why some of its steps run without the schedule."""
        self._log_once("network %r runs steps without its schedule: %s", reason)

    def _log_once(self, text: str, reason: str) -> None:
        if reason not in self.shared.logged:
            self.shared.logged.add(reason)
            log.warning(text, self.name or ", ".join(self.list_outputs()), reason)

    def __deepcopy__(self, memo: object) -> ScheduledSymbol:  # __copy__ calls it too
        return _adopt_handle(super().__deepcopy__(memo), self.shared, self._lost)

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (json_of(self), self.shared.schedule.operations, self._lost)

    def _compose(self, *args: object, **kwargs: object) -> None:
        self._lost = self._lost or "it was composed with other inputs"
        super()._compose(*args, **kwargs)

    def __getitem__(self, index: object) -> ScheduledSymbol:
        """Take outputs by number, name or slice; the schedule is kept if all are taken."""
        take = super().__getitem__
        chosen = range(len(self))[index] if isinstance(index, slice) else None
        taken = take(index) if chosen is None else mx.sym.Group([take(k) for k in chosen])
        same = self._lost or taken.list_outputs() == self.list_outputs()
        return _adopt_handle(
            taken, self.shared, self._lost if same else "an output was taken from it"
        )

    get_internals = _drops_schedule(mx.sym.Symbol.get_internals)
    get_children = _drops_schedule(mx.sym.Symbol.get_children)
    optimize_for = _drops_schedule(mx.sym.Symbol.optimize_for)
    get_backend_symbol = _drops_schedule(mx.sym.Symbol.get_backend_symbol)

    def as_np_ndarray(self) -> Symbol:
        """Return the network as a symbol of NumPy's operators, without a schedule."""
        self._warn("it was converted with as_np_ndarray()")
        return super().as_np_ndarray()

    def _by_schedule(self, requests: Mapping[str, str], group2ctx: object) -> bool:
        """Return whether a bind with these requests runs the schedule; log why if it should not."""
        if set(requests.values()) <= {"null"}:
            return False
        if self._lost is not None:
            self._warn(self._lost)
            return False
        if group2ctx:
            raise MemongerError(
                "a schedule runs on one device, so its network cannot be split with group2ctx; "
                "leave group2ctx out, or plan with how='marks'"
            )
        return True

    def simple_bind(
        self,
        ctx: Context,
        grad_req: GradReq = "write",
        type_dict: Mapping[str, str | type] | None = None,
        stype_dict: Mapping[str, str] | None = None,
        group2ctx: Mapping[str, Context] | None = None,
        shared_arg_names: Sequence[str] | None = None,
        shared_exec: Executor | None = None,
        shared_buffer: NamedArrays | None = None,
        **kwargs: object,
    ) -> Executor:
        """Bind with new arrays; parameters are those of ``mx.sym.Symbol.simple_bind``."""
        requests = requests_of(self.list_arguments(), grad_req)
        if not self._by_schedule(requests, group2ctx):
            with environment():
                shared = shared_arg_names, shared_exec, shared_buffer
                return super().simple_bind(
                    ctx, grad_req, type_dict, stype_dict, group2ctx, *shared, **kwargs
                )
        executor.refuse_sparse(stype_dict or {})
        inputs = {*self.list_arguments(), *self.list_auxiliary_states()}
        listed = {k: v for k, v in kwargs.items() if isinstance(v, (list, tuple))}  # as MXNet does
        shapes = {k: tuple(v) for k, v in listed.items() if k in inputs}
        types = {k: np.dtype(v).name for k, v in (type_dict or {}).items() if k in inputs}
        graph = forward_graph(self, InputSpec(shapes, types))
        tensors = executor.tensors_of(graph, ctx)
        args, grads, shared_names = {}, {}, set()
        lent = lent_grads = states = {}
        if shared_exec is not None and shared_buffer is not None:  # MXNet shares by a buffer only
            shared_names, states = set(shared_arg_names or ()), shared_exec.aux_dict
            lent, lent_grads = shared_exec.arg_dict, shared_exec.grad_dict
        buffer: NamedArrays = {} if shared_buffer is None else shared_buffer
        for name in self.list_arguments():
            if name in shared_names:
                args[name] = fitted(lent.get(name), tensors[name], ctx)
                if lent_grads.get(name) is not None:
                    grads[name] = fitted(lent_grads[name], tensors[name], ctx)
            else:
                args[name] = array = fitted(buffer.get(name), tensors[name], ctx)
                if name not in buffer or array.size > buffer[name].size:
                    buffer[name] = array
        names = self.list_auxiliary_states()
        aux = {name: fitted(states.get(name), tensors[name], ctx) for name in names}
        return ScheduledExecutor(self, ctx, graph, (args, grads, aux), requests, shared_exec)

    def bind(
        self,
        ctx: Context,
        args: Given,
        args_grad: Given = None,
        grad_req: GradReq = "write",
        aux_states: Given = None,
        group2ctx: Mapping[str, Context] | None = None,
        shared_exec: Executor | None = None,
    ) -> Executor:
        """Bind to given arrays; parameters are those of ``mx.sym.Symbol.bind``."""
        names = self.list_arguments()
        grads = by_name(args_grad, names)
        requests = requests_of(names, grad_req)
        requests = {n: r if n in grads else "null" for n, r in requests.items()}
        if not self._by_schedule(requests, group2ctx):
            with environment():
                return super().bind(
                    ctx, args, args_grad, grad_req, aux_states, group2ctx, shared_exec
                )
        arguments = by_name(args, names, "argument")
        aux = by_name(aux_states, self.list_auxiliary_states(), "auxiliary state")
        given = [*arguments.values(), *grads.values(), *aux.values()]
        if any(array.context != ctx for array in given):
            with environment():
                return super().bind(ctx, args, args_grad, grad_req, aux_states)  # as MXNet does
        executor.refuse_sparse({n: a.stype for n, a in [*arguments.items(), *grads.items()]})
        written = {name: array for name, array in grads.items() if requests[name] != "null"}
        refuse_overlaps(written, {**arguments, **aux})
        graph = forward_graph(self, _spec_of(arguments))
        return ScheduledExecutor(self, ctx, graph, (arguments, grads, aux), requests, shared_exec)

    def bind_step(
        self,
        ctx: Context,
        arguments: NamedArrays,
        requests: Mapping[str, str],
        lent: BoundStep | None,
        is_split: bool,
    ) -> BoundStep:
        """Bind the training step for arguments like these to no arrays: each run gives its own."""
        graph = forward_graph(self, _spec_of(arguments))
        executor.tensors_of(graph, ctx)  # which refuses what a schedule cannot run
        step = self.find_step(graph, requests, has_mkldnn(ctx))
        return BoundStep(replace(step, is_split=True) if is_split else step, ctx, lent)


def _spec_of(arguments: NamedArrays) -> InputSpec:
    types = {name: np.dtype(array.dtype).name for name, array in arguments.items()}
    return InputSpec({name: array.shape for name, array in arguments.items()}, types)


def refuse_overlaps(grads: NamedArrays, inputs: NamedArrays) -> None:
    """Raise MemongerError for gradients that overlap in memory with another one or an input."""
    # A schedule writes a gradient early, and may read inputs and other gradients later.
    wait_for_engine("a schedule that is bound to given arrays")  # their addresses must not change
    spans = []
    for what, arrays in ("input", inputs), ("gradient of", grads):
        for name, array in arrays.items():
            nbytes = array.size * np.dtype(array.dtype).itemsize
            spans.append((address(array), nbytes, what, name))
    latest = {"input": (0, ""), "gradient of": (0, "")}  # the end of the latest, and its name
    for start, nbytes, what, name in sorted(spans):
        for other, (end, its_name) in latest.items():
            if start < end and (what, other) != ("input", "input"):
                raise MemongerError(
                    f"bind: the {other} {its_name!r} and the {what} {name!r} overlap in memory; "
                    "give each gradient an array of its own"
                )
        latest[what] = max(latest[what], (start + nbytes, name))


def scheduled(symbol: Symbol, schedule: Schedule) -> ScheduledSymbol:
    """Return a copy of a network without marks that trains by a schedule.

    The nodes in the schedule are those of the network's ForwardGraph.
    """
    return _adopt_handle(symbol.__copy__(), SharedState(schedule))


def _adopt_handle(symbol: Symbol, shared: SharedState, lost: str | None = None) -> ScheduledSymbol:
    """Make a ScheduledSymbol that takes over the handle of a symbol, which loses it."""
    adopted = ScheduledSymbol(symbol.handle, shared, lost)
    symbol.handle = mx.base.SymbolHandle()
    return adopted


def _unpickled(text: str, operations: Int32s, lost: str | None) -> ScheduledSymbol:
    return _adopt_handle(mx.sym.load_json(text), SharedState(Schedule(operations)), lost)


def requests_of(names: Sequence[str], grad_req: object) -> dict[str, str]:
    """Return 'write', 'add' or 'null' for each argument, from the ``grad_req`` of a bind."""
    if isinstance(grad_req, dict):  # MXNet ignores other names
        grad_req = {name: grad_req.get(name, "null") for name in names}
    return read_requests(names, grad_req)


def by_name(arrays: Given, names: Sequence[str], required: str = "") -> NamedArrays:
    """Return the arrays of a ``bind`` by name.

    If ``required`` is given, it is the kind of array in the error for a missing one.
    """
    if not isinstance(arrays, dict):
        listed = [None] * len(names) if arrays is None else arrays
        if len(listed) != len(names):
            raise MemongerError(f"bind: {len(listed)} arrays were given for {len(names)} inputs")
        arrays = dict(zip(names, listed))
    named = {name: arrays[name] for name in names if arrays.get(name) is not None}
    for name in names if required else ():
        if name not in named:
            raise MemongerError(f"bind: the {required} {name!r} is missing")
    return named
