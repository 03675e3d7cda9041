"""A plan that is bound to a block's own arrays, for inputs of some shapes on one device.

Its executor computes from ``Parameter.data()`` and the running statistics, and writes gradients
to ``Parameter.grad()``; the tape has a `Stub` of it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Container, Iterable, Iterator, Mapping

import numpy as np

from memonger.gluon import autograd, stub
from memonger.graph.operators.recompute import draws
from memonger.schedules.execution.executor import ScheduledExecutor
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx
from memonger.support.signals import signals_put_off
from memonger.support.symbols import attributes, read

STALE = (
    "this graph was retained, but its planned block has been called again since, which has taken "
    "its memory; run all backward passes before the next call, or train without a plan: "
    "memonger.gluon.unplan(net)"
)

#: Executors that are left to the threads that have bound them.
_left: list[tuple[threading.Thread, Any]] = []


def _leave(thread: threading.Thread, executor: Any) -> None:
    """Leave an executor to its thread, where Python has done with it on another one."""
    # MXNet frees an executor by operators that write all that its own read or write, parameters too
    # (``GraphExecutor::~GraphExecutor``, ``ThreadedEngine::DeleteOperator``). The engine appends an
    # operator to the queues of its variables one after another, with no lock over them all
    # (``ThreadedEngine::Push``). Where a thread does so while another one pushes operators with the
    # same variables, each may come to wait for the other, for ever.
    if thread is not threading.current_thread():
        _left.append((thread, executor))


def free_unused() -> None:
    """Free what this thread has bound for calls that the tape has let go of."""
    stub.release()
    here = threading.current_thread()
    for each in list(_left):
        if each[0] is here or not each[0].is_alive():
            with contextlib.suppress(ValueError):  # another thread has removed it
                _left.remove(each)


def reached(nodes: Iterable[Mapping[str, Any]], wanted: Container[str]) -> list[bool]:
    """Tell of each node of a symbol's JSON whether it depends on one of these variables."""
    found: list[bool] = []
    for node in nodes:
        found.append(node["name"] in wanted or any(found[k] for k, *_ in node["inputs"]))
    return found


@dataclass(frozen=True, eq=False)
class PlannedGraph:
    """A planned symbol, and what its inputs are."""

    symbol: Any
    names: tuple[str, ...]  # of all inputs, in the order of the block's own CachedOp
    parameters: Mapping[str, Any]  # Gluon's, by name; all others are inputs of the block

    @functools.cached_property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes of the symbol's JSON."""
        return list(read(self.symbol)["nodes"])

    @functools.cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers, so that it cannot be run again."""
        return any(draws(node["op"], attributes(node)) for node in self.nodes)

    @functools.cached_property
    def passed(self) -> dict[int, str]:
        """The outputs, by number, that are inputs or parameters of these names."""
        heads = [self.nodes[head[0]] for head in read(self.symbol)["heads"]]
        known = self.symbol.list_arguments()
        return {
            k: node["name"]
            for k, node in enumerate(heads)
            if node["op"] == "null" and node["name"] in known
        }

    def states_beside(self, wanted: set[str]) -> set[str]:
        """Find the running statistics that move in no backward pass for these inputs alone."""
        moved: set[str] = set()
        for node, is_reached in zip(self.nodes, reached(self.nodes, wanted)):
            if is_reached:
                moved.update(self.nodes[k]["name"] for k, *_ in node["inputs"])
        return set(self.symbol.list_auxiliary_states()) - moved


class Call:
    """A recorded call of a planned block, for as long as the tape has it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.last, self._gradient = stub.variable(runner.ctx)
        self.address = stub.address(self._gradient)  # of the gradient of ``last``
        #: What a backward pass must differentiate for this call's gradients to be made.
        self.variables = [*runner.results, self.last]
        self.spent = False  # whether its backward pass has run, so that its memory is free

    def check(self) -> None:
        """Refuse a call whose memory another one has taken."""
        if self.runner.call is not self:
            raise MemongerError(STALE)


class Runner:
    """A bound plan; one of its calls is alive at a time."""

    def __init__(
        self, graph: PlannedGraph, arrays: Mapping[str, Any], requests: Mapping[str, str], lent: Any
    ) -> None:
        self.graph = graph
        self._inputs = [name for name in graph.names if name not in graph.parameters]
        self._wanted_names = [name for name in graph.names if requests.get(name, "null") != "null"]
        self.ctx = arrays[graph.names[0]].context
        self.size = sum(arrays[name].size for name in self._inputs)  # elements of the inputs
        self._bound = {
            name: array if name in graph.parameters else mx.nd.zeros_like(array)
            for name, array in arrays.items()
        }
        known = graph.parameters
        written = [n for n in self._wanted_names if n in known and known[n].grad_req == "write"]
        self._own = {name: known[name].grad(self.ctx) for name in written}
        others = [name for name in self._wanted_names if name not in self._own]
        gradients = {**self._own, **{name: mx.nd.zeros_like(self._bound[name]) for name in others}}
        asked = {name: "write" if name in gradients else "null" for name in requests}
        symbol = graph.symbol
        args = {name: self._bound[name] for name in symbol.list_arguments()}
        aux = {name: self._bound[name] for name in symbol.list_auxiliary_states()}
        with environment():
            self.executor = symbol.bind(self.ctx, args, gradients, asked, aux, shared_exec=lent)
        # It holds the executor, so that Python's gc does not free it together with this object.
        weakref.finalize(self, _leave, threading.current_thread(), self.executor)
        is_ours = isinstance(self.executor, ScheduledExecutor)
        self._states = [] if is_ours else self.executor.aux_arrays  # that it moves unseen (`touch`)
        # Handles of our own, as variables; the tape puts the gradients of the outputs there.
        self.results = [output.detach() for output in self.executor.outputs]
        mx.autograd.mark_variables(self.results, [*map(mx.nd.zeros_like, self.results)], "write")
        adds = [name in self._inputs for name in self._wanted_names]
        self._stub = stub.Stub(self.ctx, adds, len(self.results), self._told)
        self._call: weakref.ref[Call] | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget what a backward pass that did not come to its end has told."""
        self._gradients: dict[str, Any] = {}  # the arrays in which the tape wants them
        self._heads: dict[int, Any] = {}

    @property
    def call(self) -> Call | None:
        """The latest call, if the tape still has it."""
        return None if self._call is None else self._call()

    def is_bound_to(self, arrays: Mapping[str, Any]) -> bool:
        """Tell whether these are still the parameters' arrays, and the gradients' too."""
        known = self.graph.parameters
        same = all(arrays[name] is self._bound[name] for name in known)
        return same and all(known[n].grad(self.ctx) is array for n, array in self._own.items())

    def _run_forward(self) -> None:
        # Several executors move the statistics of a block that is called twice.
        touch(self._states)
        self.executor.forward(is_train=True)

    @signals_put_off()  # the stub calls its hook, and what it holds must come on the tape
    def forward(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Run the forward pass and record it; returns the outputs, which are the caller's own."""
        with mx.autograd.pause(train_mode=True):
            for name in self._inputs:
                arrays[name].copyto(self._bound[name])
            self._run_forward()
            call = Call(self)
            self._call = weakref.ref(call)
        self._begin()
        others = [arrays[name] for name in self._wanted_names]
        lease = stub.hold(self.ctx, call)
        made: list[Any] = self._stub(others, lease, self.results, call.last)
        for k, name in self.graph.passed.items():  # which share memory, as those of a CachedOp
            made[k] = mx.nd.identity(made[k], out=arrays[name].detach())
        return made

    # What is told in the backward pass. Nothing can be raised here: gradients of a pass that fails
    # become NaN, and what began it raises.

    def _told(self, kind: str, number: int, array: Any) -> None:
        try:
            if kind == "head":
                self._heads[number] = array
            elif kind == "other":
                self._gradients[self._wanted_names[number]] = array
            else:
                with mx.autograd.pause(train_mode=mx.autograd.is_training()):
                    self._finish(array)
                self._begin()
        except BaseException as error:  # KeyboardInterrupt too
            autograd.fail(error)
            for gradient in self._gradients.values():
                gradient[:] = np.nan
            self._begin()

    def _finish(self, last: Any) -> None:
        """Run the backward pass, and put the gradients where the tape wants them."""
        call, partial = self.call, autograd.is_partial()
        if call is None or not (partial or stub.address(last) == call.address):
            raise MemongerError(STALE)
        if not mx.autograd.is_training():
            raise MemongerError(
                "a planned block that was called in training mode has no gradients for "
                "backward(train_mode=False), which MXNet leaves undefined; leave it out"
            )
        if call.spent:
            if self.graph.draws:
                raise MemongerError(
                    "a planned block that draws random numbers (Dropout) runs one backward pass "
                    "for each call; for more, train it without a plan: memonger.gluon.unplan(net)"
                )
            self._run_forward()
        with self._kept() if partial else contextlib.nullcontext():
            self.executor.backward([self._heads[k] for k in range(len(self.results))])
            touch(self._states)
            self._deliver(partial)
        call.spent = True  # last, for another thread may take the memory from here on

    def _deliver(self, partial: bool) -> None:
        found, parameters = self.executor.grad_dict, self.graph.parameters
        copied: dict[Any, list[tuple[Any, Any]]] = {}  # by type
        for name, array in self._gradients.items():
            if name not in parameters or (parameters[name].grad_req == "add" and not partial):
                # It holds zeros, or, where the tape adds, what was there: the stub's gradient has
                # written or added zeros (see `stub.stub_symbol`).
                array += found[name]
            else:
                copied.setdefault(array.dtype, []).append((found[name], array))
        for pairs in copied.values():
            # Most are the same array, which this operator leaves alone (``AMPMultiCastCompute``).
            sources, targets = zip(*pairs)
            mx.nd.amp_multicast(*sources, num_outputs=len(sources), out=list(targets))

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Put back all that the gradients of a few variables do not change without a plan."""
        states = self.graph.states_beside(set(self._gradients))
        kept = [*self._own.values(), *(self._bound[name] for name in states)]
        copies = [array.copy() for array in kept]
        yield
        for array, copy in zip(kept, copies):
            copy.copyto(array)


def touch(states: list[Any]) -> None:
    """Have what comes later wait for all that has been pushed with these auxiliary states."""
    # MXNet's engine takes an operator of its executor that moves them (BatchNorm, its gradient) for
    # one that reads them (``GraphExecutor::InitCachedOps``), so that other readers need not wait.
    # An operator in place, which computes nothing, has the engine believe that they are written.
    # (A schedule's operators are imperative calls, which tell the engine: ``FMutateInputs``.)
    for dtype in {array.dtype for array in states}:
        alike = [array for array in states if array.dtype == dtype]
        mx.nd.amp_multicast(*alike, num_outputs=len(alike), out=alike)
