"""Run a plan that is bound to a block's own arrays, for inputs of some shapes on one device.

The executor of the plan reads ``Parameter.data()`` and the running statistics, and writes gradients
into the arrays of autograd's tape. A `Stub` represents the executor on the tape.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Container, Iterable, Iterator, Mapping

import numpy as np

from memonger.gluon import autograd, stub, tape
from memonger.graph.marks import list_fixed_gammas
from memonger.graph.operators.recompute import draws, waits_for_devices
from memonger.schedules.execution.arena import address
from memonger.schedules.execution.executor import ScheduledExecutor
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, may_wait, mx, without_notices
from memonger.support.signals import deferred_signals
from memonger.support.symbols import attributes, read
from memonger.support.types import Context, Executor, Json, NDArray, Parameter, Symbol
from memonger.support.variables import WRITE

if TYPE_CHECKING:
    Arrays = Mapping[str, NDArray]  # by the names of inputs, of arguments or of states
    Requests = Mapping[str, str]  # grad_req of each argument

STALE = (
    "this graph was retained, but its planned block has been called again and has reused its "
    "memory; run all backward passes before the next call, or train without a plan: "
    "memonger.gluon.unplan(net)"
)

#: Executors to be freed, with the threads that bound them and must free them.
_deferred: list[tuple[threading.Thread, Executor]] = []


def _defer_free(thread: threading.Thread, executor: Executor) -> None:
    """Keep an executor until the thread that bound it frees it, if this is another thread."""
    # MXNet frees an executor by operators that write all variables of its operators, parameters too
    # (``GraphExecutor::~GraphExecutor``, ``ThreadedEngine::DeleteOperator``). The engine appends an
    # operator to the queues of its variables one by one, without a lock over all of them
    # (``ThreadedEngine::Push``). If another thread pushes operators with the same variables at that
    # moment, a deadlock is possible.
    if thread is not threading.current_thread():
        _deferred.append((thread, executor))


def free_unused() -> None:
    """Free executors that this thread bound and that autograd no longer needs."""
    tape.release()
    here = threading.current_thread()
    for entry in list(_deferred):
        if entry[0] is here or not entry[0].is_alive():
            with contextlib.suppress(ValueError):  # another thread has removed it
                _deferred.remove(entry)


def reached(nodes: Iterable[Mapping[str, Json]], wanted: Container[str]) -> list[bool]:
    """Return for each node of a symbol's JSON whether it depends on one of these variables."""
    depends: list[bool] = []
    for node in nodes:
        depends.append(node["name"] in wanted or any(depends[k] for k, *_ in node["inputs"]))
    return depends


def waits(symbol: Symbol) -> bool:
    """Return whether an operator may wait in the engine for other devices that are called later."""
    nodes = (node for node in read(symbol)["nodes"] if node["op"] != "null")
    return any(waits_for_devices(node["op"], attributes(node)) for node in nodes)


def bind(
    symbol: Symbol,
    ctx: Context,
    arrays: Arrays,
    gradients: Arrays,
    requests: Requests,
    lent: Executor | None,
) -> Executor:
    """Bind a planned symbol to arrays of its arguments and states."""
    # ScheduledSymbol.bind waits for the engine to check that no arrays overlap.
    if not isinstance(symbol, ScheduledSymbol) or (may_wait() and not waits(symbol)):
        with environment(), without_notices():
            return symbol.bind(ctx, arrays, gradients, requests, arrays, shared_exec=lent)
    arguments = {name: arrays[name] for name in symbol.list_arguments()}
    states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    return symbol.bind_apart(ctx, (arguments, dict(gradients), states), requests, lent)


@dataclass(frozen=True, eq=False)
class PlannedGraph:
    """A planned symbol and its inputs."""

    symbol: Symbol
    names: tuple[str, ...]  # of all inputs, in the order of the block's own CachedOp
    parameters: Mapping[str, Parameter]  # Gluon's, by name; other names are inputs of the block
    is_np: bool  # whether the outputs are arrays of mx.np

    @functools.cached_property
    def nodes(self) -> list[dict[str, Json]]:
        """The nodes of the symbol's JSON."""
        return list(read(self.symbol)["nodes"])

    @functools.cached_property
    def draws(self) -> bool:
        """Whether an operator draws random numbers, so that a second run would differ."""
        return any(draws(node["op"], attributes(node)) for node in self.nodes)

    @functools.cached_property
    def passed(self) -> dict[int, str]:
        """Output number -> name, for outputs that are inputs or parameters."""
        heads = [self.nodes[head[0]] for head in read(self.symbol)["heads"]]
        names = self.symbol.list_arguments()
        return {
            k: node["name"]
            for k, node in enumerate(heads)
            if node["op"] == "null" and node["name"] in names
        }

    def states_beside(self, wanted: set[str]) -> set[str]:
        """Return the running statistics that a backward pass for these inputs does not update."""
        moved: set[str] = set()
        for node, is_reached in zip(self.nodes, reached(self.nodes, wanted)):
            if is_reached:
                moved.update(self.nodes[k]["name"] for k, *_ in node["inputs"])
        return set(self.symbol.list_auxiliary_states()) - moved


class RecordedCall:
    """A call of a planned block that autograd has recorded; it lives as long as the tape has it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.last: NDArray = mx.nd.zeros((1,), runner.ctx)
        self._gradient = mx.nd.empty((1,), runner.ctx)
        #: Of the gradient of ``last``; reading it allocates the memory now, not in the engine.
        self.address = address(self._gradient)
        mx.autograd.mark_variables([self.last], [self._gradient], "write")
        #: Variables to differentiate, so that a backward pass computes this call's gradients.
        self.variables: list[NDArray] = [*runner.results, self.last]
        self.spent = False  # whether the backward pass has run, so that the memory is free

    def check(self) -> None:
        """Raise MemongerError if another call has reused the memory of this one."""
        if self.runner.call() is not self:
            raise MemongerError(STALE)


class Runner:
    """A bound plan; one of its calls is alive at a time."""

    def __init__(
        self, graph: PlannedGraph, arrays: Arrays, requests: Requests, lent: Executor | None
    ) -> None:
        self.graph = graph
        self._inputs = [name for name in graph.names if name not in graph.parameters]
        self._wanted_names = [name for name in graph.names if requests.get(name, "null") != "null"]
        self.ctx = arrays[graph.names[0]].context
        self.size = sum(arrays[name].size for name in self._inputs)  # elements of the inputs
        self._bound = {
            name: array if name in graph.parameters else mx.nd.zeros_like(array.as_nd_ndarray())
            for name, array in arrays.items()
        }
        own = {n: arrays[n].grad for n in self._wanted_names if n in graph.parameters}
        sparse = {name for name, array in own.items() if array.stype != "default"}
        for name in sparse:
            if requests[name] != WRITE:
                raise MemongerError(
                    f"the gradient of {name!r} is added to an array that is stored as "
                    f"{own[name].stype}, which a plan cannot do; mark it with a dense array"
                )
        #: The arrays of parameters' gradients that the executor writes directly.
        self._own = {n: a for n, a in own.items() if requests[n] == WRITE and n not in sparse}
        # Arrays of mx.nd, because an executor takes none of mx.np; they include auxiliary states.
        bound = {name: array.as_nd_ndarray() for name, array in self._bound.items()}
        gradients = {name: array.as_nd_ndarray() for name, array in self._own.items()}
        others = [name for name in self._wanted_names if name not in gradients]
        gradients.update({name: mx.nd.zeros_like(bound[name]) for name in others})
        grad_req = {name: "write" if name in gradients else "null" for name in requests}
        self.executor = bind(graph.symbol, self.ctx, bound, gradients, grad_req, lent)
        # The finalizer holds the executor, so that Python's gc does not free it with this object.
        weakref.finalize(self, _defer_free, threading.current_thread(), self.executor)
        is_scheduled = isinstance(self.executor, ScheduledExecutor)
        self._states = [] if is_scheduled else self.executor.aux_arrays  # `order_state_readers`
        self._gammas = [bound[name] for name in list_fixed_gammas(graph.symbol)]
        # New handles of the outputs, marked as variables, for which the tape has gradients.
        self.results = [output.detach() for output in self.executor.outputs]
        mx.autograd.mark_variables(self.results, [*map(mx.nd.zeros_like, self.results)], "write")
        adds = [name not in self._own and name not in sparse for name in self._wanted_names]
        self._stub = stub.Stub(self.ctx, adds, len(self.results), self._on_gradient, graph.is_np)
        self._np_shape = mx.util.is_np_shape()  # the thread of the backward pass may differ
        #: Returns the latest call, or None if the tape does not have it any more.
        self.call: Callable[[], RecordedCall | None] = lambda: None
        self._begin()

    def _begin(self) -> None:
        """Drop the gradients of a backward pass that did not end."""
        self._gradients: dict[str, NDArray] = {}  # the tape's arrays of gradients, by name
        self._heads: dict[int, NDArray] = {}  # the gradients of the outputs

    def _run_forward(self) -> None:
        # If a block is called twice, several executors update its statistics.
        order_state_readers(self._states)
        self.executor.forward(is_train=True)
        for gamma in self._gammas:
            gamma[:] = 1

    @deferred_signals()  # an exception in the stub's hook would be lost, and the call with it
    def forward(self, arrays: Arrays) -> list[NDArray]:
        """Run the forward pass, record it, and return the outputs as new arrays."""
        with mx.autograd.pause(train_mode=True):
            for name in self._inputs:
                arrays[name].as_nd_ndarray().copyto(self._bound[name])
            self._run_forward()
            call = RecordedCall(self)
            self.call = weakref.ref(call)
        self._begin()
        others = [arrays[name] for name in self._wanted_names]
        lease = tape.hold(self.ctx, call)
        outputs = self._stub(others, lease, self.results, call.last)
        for k, name in self.graph.passed.items():  # they share memory, as with a CachedOp
            shared = arrays[name].detach().as_nd_ndarray()
            mx.nd.identity(outputs[k].as_nd_ndarray(), out=shared)
            outputs[k] = shared.as_np_ndarray() if self.graph.is_np else shared
        return outputs

    def _on_gradient(self, kind: str, number: int, array: NDArray) -> None:
        """Note a gradient in the backward pass; after the last one, run the executor's pass.

        MXNet calls this function, so it cannot raise. If it fails, gradients become NaN, and the
        function that began the pass raises the error (`autograd`).
        """
        try:
            if kind == "head":
                self._heads[number] = array
            elif kind == "other":
                self._gradients[self._wanted_names[number]] = array
            else:
                training = mx.autograd.is_training()
                with mx.util.np_shape(self._np_shape or None), mx.autograd.pause(training):
                    self._finish(array)
                self._begin()
        except BaseException as error:  # KeyboardInterrupt too
            autograd.backward_pass.errors.append(error)
            for gradient in self._gradients.values():
                gradient[:] = np.nan
            self._begin()

    def _finish(self, last: NDArray) -> None:
        """Run the backward pass, and copy the gradients into the tape's arrays."""
        call, partial = self.call(), autograd.backward_pass.is_partial
        if call is None or not (partial or address(last) == call.address):
            raise MemongerError(STALE)
        if not mx.autograd.is_training():
            raise MemongerError(
                "a planned block that was called in training mode has no gradients for "
                "backward(train_mode=False), which MXNet leaves undefined; leave train_mode out"
            )
        if call.spent:
            if self.graph.draws:
                raise MemongerError(
                    "a planned block that draws random numbers (Dropout) can run one backward pass "
                    "for each call; for more, train it without a plan: memonger.gluon.unplan(net)"
                )
            self._run_forward()
        with self._kept() if partial else contextlib.nullcontext():
            self.executor.backward([self._heads[k] for k in range(len(self.results))])
            order_state_readers(self._states)
            self._deliver()
        call.spent = True  # last, because another thread may use the memory from here on

    def _deliver(self) -> None:
        """Copy or add the executor's gradients to the tape's arrays."""
        gradients = self.executor.grad_dict
        copies: dict[object, list[tuple[NDArray, NDArray]]] = {}  # by type
        for name, array in self._gradients.items():
            if array.stype != "default":
                gradients[name].copyto(array)
            elif name not in self._own:
                # The stub's gradient has written or added zeros there (see `stub.stub_symbol`).
                array += gradients[name]
            elif array.shape == ():
                # MKLDNN, and so the operator below, does not support arrays without axes.
                gradients[name].copyto(array)
            elif array.size:
                copies.setdefault(array.dtype, []).append((gradients[name], array))
        for pairs in copies.values():
            # Most pairs are one array, which this operator does not copy (``AMPMultiCastCompute``).
            sources, targets = zip(*pairs)
            mx.nd.amp_multicast(*sources, num_outputs=len(sources), out=list(targets))

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Restore what a backward pass for a few variables must not change, after the block."""
        states = self.graph.states_beside(set(self._gradients))
        kept = [*self._own.values(), *(self._bound[name] for name in states)]
        copies = [array.copy() for array in kept]
        yield
        for array, copy in zip(kept, copies):
            copy.copyto(array)


def order_state_readers(states: list[NDArray]) -> None:
    """Make later readers of auxiliary states wait for all operators pushed with these states."""
    # The engine treats an operator of MXNet's executor that updates states (BatchNorm, its
    # gradient) as a reader of them (``GraphExecutor::InitCachedOps``), so other readers do not wait
    # for it. The operator below computes nothing in place, but counts as a writer. A schedule does
    # not need it, because the engine sees what imperative calls update (``FMutateInputs``).
    for dtype in {array.dtype for array in states}:
        alike = [array for array in states if array.dtype == dtype]
        mx.nd.amp_multicast(*alike, num_outputs=len(alike), out=alike)
