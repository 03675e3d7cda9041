"""Bind a plan to a block's parameters: marks by MXNet's executor, a schedule in an arena.

Both compute the outputs of a call into arrays on autograd's tape, and later its gradients into the
arrays that the tape has for them.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Union,
)

import numpy as np

from memonger.graph.marks import FORCE, list_fixed_gammas
from memonger.graph.operators.gradients import unallocated
from memonger.graph.operators.recompute import draws, truth, waits_for_devices
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution.arena import Frame
from memonger.schedules.execution.calls import Place
from memonger.schedules.execution.executor import BoundStep
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.schedules.execution.unchanged import digest, watched_passes
from memonger.support.mxnet import environment, mx, without_notices
from memonger.support.symbols import attributes, read
from memonger.support.types import Executor, Json, NDArray, Parameter, Symbol
from memonger.support.variables import ADD, NULL, WRITE, Mark

if TYPE_CHECKING:
    Arrays = Mapping[str, NDArray]  # by the names of inputs, of arguments or of states
    Marks = Mapping[str, Mark]  # of each argument
    Bound = Union["BoundMarks", "BoundSchedule"]


def reached(nodes: Iterable[Mapping[str, Json]], wanted: Container[str]) -> list[bool]:
    """Return for each node of a symbol's JSON whether it depends on one of these variables."""
    depends: list[bool] = []
    for node in nodes:
        depends.append(node["name"] in wanted or any(depends[k] for k, *_ in node["inputs"]))
    return depends


def wanted_by(marks: Marks) -> list[str]:
    """Return the arguments whose gradients are requested, in their order."""
    return [name for name, mark in marks.items() if mark.request != NULL]


def waits(symbol: Symbol) -> bool:
    """Return whether an operator may wait in the engine for other devices that are called later."""
    nodes = read(symbol)["nodes"]
    return any(waits_for_devices(node["op"], attributes(node)) for node in nodes)


@dataclass(frozen=True, eq=False)
class PlannedGraph:
    """A planned symbol and its inputs."""

    symbol: Symbol
    names: tuple[str, ...]  # of all inputs, in the order of the block's own CachedOp
    parameters: Mapping[str, Parameter]  # Gluon's, by name; other names are inputs of the block
    is_np: bool  # whether the outputs are arrays of mx.np

    @functools.cached_property
    def inputs(self) -> list[str]:
        """The names of the inputs of the block, in their order."""
        return [name for name in self.names if name not in self.parameters]

    @functools.cached_property
    def nodes(self) -> list[dict[str, Json]]:
        """The nodes of the symbol's JSON."""
        return list(read(self.symbol)["nodes"])

    @property
    def is_scheduled(self) -> bool:
        """Whether the plan is a schedule."""
        return isinstance(self.symbol, ScheduledSymbol)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether an operator draws random numbers, so that a second run would differ."""
        return any(draws(node["op"], attributes(node)) for node in self.nodes)

    @functools.cached_property
    def passed(self) -> dict[int, str]:
        """Output number -> name, for outputs that are inputs or parameters."""
        passed: dict[int, str] = {}
        names = self.symbol.list_arguments()
        for k, (a, *_) in enumerate(read(self.symbol)["heads"]):
            if self.nodes[a]["op"] == "null" and self.nodes[a]["name"] in names:
                passed[k] = self.nodes[a]["name"]
        return passed

    def states_beside(self, wanted: set[str]) -> set[str]:
        """Return the running statistics that a backward pass for these inputs does not update."""
        moved: set[str] = set()
        for node, is_reached in zip(self.nodes, reached(self.nodes, wanted)):
            if is_reached:
                moved.update(self.nodes[k]["name"] for k, *_ in node["inputs"])
        return set(self.symbol.list_auxiliary_states()) - moved


class BoundMarks:
    """A plan of marks: an executor of MXNet, with the results of one call at a time.

    It has arrays of its own for inputs, outputs, and the gradients that the tape may add.
    """

    def __init__(
        self, graph: PlannedGraph, arrays: Arrays, marks: Marks, lent: BoundMarks | None
    ) -> None:
        self._graph, ctx = graph, arrays[graph.names[0]].context
        # Arrays of mx.nd, because an executor takes none of mx.np; they include auxiliary states.
        bound = {name: array.as_nd_ndarray() for name, array in arrays.items()}
        bound.update({name: mx.nd.zeros_like(bound[name]) for name in graph.inputs})
        self._bound = bound
        #: The arrays of parameters' gradients that the executor writes directly.
        self._own: dict[str, NDArray] = {}
        gradients: dict[str, NDArray] = {}
        for name in wanted_by(marks):
            array = arrays[name].grad if name in graph.parameters else None
            if array is not None and array.stype == "default" and marks[name].request == WRITE:
                self._own[name] = gradients[name] = array.as_nd_ndarray()
            else:
                gradients[name] = mx.nd.zeros_like(bound[name])
        requests = {name: WRITE if name in gradients else NULL for name in marks}
        with environment(), without_notices():
            self.executor: Executor = graph.symbol.bind(
                ctx, bound, gradients, requests, bound, shared_exec=lent and lent.executor
            )
        self._results: list[NDArray] = self.executor.outputs
        self.outputs = [Tensor(a.shape, np.dtype(a.dtype).name) for a in self._results]
        self._states = self.executor.aux_arrays
        gammas = list_fixed_gammas(graph.symbol)
        self._gammas = [bound[name] for name in gammas]
        again = (node for node in graph.nodes if truth(node.get("attrs", {}).get(FORCE)))
        read = {graph.nodes[k]["name"] for node in again for k, *_ in node["inputs"]}
        names = [n for n in marks if n in graph.parameters and n in read and n not in gammas]
        #: The parameters from which the backward pass computes results again; without those of a
        #: network whose operators wait for another device, because this one would wait for them.
        self._read_again = {} if waits(graph.symbol) else {name: bound[name] for name in names}
        self._watched = watched_passes()

    def hold(self, arrays: Arrays, marks: Marks) -> Arrays:
        """Copy the inputs of a call into the executor's arrays; the call itself holds none."""
        for name in self._graph.inputs:
            copy_as_laid_out(arrays[name].as_nd_ndarray(), self._bound[name])
        return {}

    def forward(self, inputs: Arrays, frame: Frame, outputs: Sequence[NDArray]) -> None:
        """Run the forward pass, and write the outputs that are no inputs."""
        # If a block is called twice, several executors update its statistics.
        order_state_readers(self._states)
        self.executor.forward(is_train=True)
        for gamma in self._gammas:
            gamma[:] = 1
        for k, (result, output) in enumerate(zip(self._results, outputs)):
            if k not in self._graph.passed:
                copy_as_laid_out(result, output)
        if self._watched and not frame.digest:
            frame.digest = digest(self._read_again)

    def backward(
        self, frame: Frame, heads: list[NDArray], gradients: Arrays, marks: Marks, is_partial: bool
    ) -> None:
        """Run the backward pass, and write the gradients or add them."""
        frame.digest_again = digest({name: self._bound[name] for name in frame.digest})
        kept: list[NDArray] = []  # what a backward pass for a few variables must not change
        if is_partial:
            states = self._graph.states_beside(set(gradients))
            kept = [*self._own.values(), *(self._bound[name] for name in states)]
        with restored(kept):
            self.executor.backward(heads)
            order_state_readers(self._states)
            deliver(self.executor.grad_dict, gradients, marks)
        self._watched -= self._watched > 0


class BoundSchedule:
    """A plan by a schedule, whose step runs in an arena.

    If it is split, what its backward pass reads is not in the arena, and any number of its calls
    may be alive at a time.
    """

    def __init__(
        self,
        graph: PlannedGraph,
        arrays: Arrays,
        marks: Marks,
        lent: BoundSchedule | None,
        is_split: bool,
    ) -> None:
        self._graph, self._ctx = graph, arrays[graph.names[0]].context
        requests = {name: NULL if mark.request == NULL else WRITE for name, mark in marks.items()}
        arguments = {name: arrays[name] for name in graph.symbol.list_arguments()}
        self._step: BoundStep = graph.symbol.bind_step(
            self._ctx, arguments, requests, lent and lent._step, is_split
        )
        own = {n: a.as_nd_ndarray() for n, a in arrays.items() if n in graph.parameters}
        #: The places of the inputs of the block that the step reads, and of all other variables.
        self._inputs: dict[str, Place] = {}
        self._parameters = self._step.place_inputs(own)
        for name, place in self._step.variables.items():
            if name in graph.inputs:
                self._inputs[name] = place
                del self._parameters[place]
        self._states = {n: own[n] for n in graph.symbol.list_auxiliary_states() if n in own}
        #: The shapes and types of the gradients that are requested.
        self._wanted: dict[str, Tensor] = {}
        for name in wanted_by(marks):
            self._wanted[name] = Tensor(arrays[name].shape, np.dtype(arrays[name].dtype).name)
        self.outputs = self._step.outputs  # their shapes and types

    def hold(self, arrays: Arrays, marks: Marks) -> Arrays:
        """Return the inputs of a call: arrays on the tape as they are, and copies of others.

        A script may write to the others before the backward pass.
        """
        inputs = {}
        for name in self._inputs:
            array, is_on_tape = arrays[name].as_nd_ndarray(), name in marks and marks[name].name
            inputs[name] = array if is_on_tape else array.copy()
        return inputs

    def forward(self, inputs: Arrays, frame: Frame, outputs: Sequence[NDArray]) -> None:
        """Run the forward pass, and write the outputs that are no inputs."""
        step = self._step
        frame.arrays = {
            **self._parameters,
            **{place: inputs[name] for name, place in self._inputs.items()},
            **step.place_outputs(outputs),
        }
        step.run_forward(frame, is_train=True)
        for source, number in step.repeated_outputs:
            outputs[source].reshape(outputs[number].shape).copyto(outputs[number])
        late = step.backward_places
        frame.arrays = {place: array for place, array in frame.arrays.items() if place in late}

    def backward(
        self, frame: Frame, heads: list[NDArray], gradients: Arrays, marks: Marks, is_partial: bool
    ) -> None:
        """Run the backward pass, and write the gradients or add them."""
        step, arrays = self._step, frame.arrays
        written: dict[str, NDArray] = {}
        others: dict[str, NDArray] = {}  # of them those that are not arrays of the tape
        for name, tensor in self._wanted.items():
            array = gradients.get(name)
            if array is None or array.stype != "default" or marks[name].request != WRITE:
                array = others[name] = unallocated(tensor, self._ctx)
            written[name] = array
        arrays.update({place: heads[k] for k, place in step.heads.items()})
        arrays.update(step.place_gradients(written))
        beside = self._graph.states_beside(set(gradients)) if is_partial else set()
        with restored([self._states[name] for name in beside.intersection(self._states)]):
            step.run_backward(frame)
        deliver(others, gradients, marks)
        arrays.clear()


def copy_as_laid_out(source: NDArray, target: NDArray) -> None:
    """Copy an array with its layout of MKLDNN, by which operators that read it round."""
    if source.dtype == np.float32 and len(source.shape) > 2 and source.stype == "default":
        mx.nd.add_n(source, out=target)  # a sum of one; `copyto` writes rows
    else:
        source.copyto(target)


def deliver(sources: Arrays, targets: Arrays, marks: Marks) -> None:
    """Copy or add gradients to the tape's arrays, those that ``sources`` has."""
    copies: dict[object, list[tuple[NDArray, NDArray]]] = {}  # by type
    for name, array in targets.items():
        if name not in sources:
            continue
        if marks[name].request == ADD:
            # The stub's gradient has written or added zeros there (see `tape.stub_symbol`).
            array += sources[name]
        elif array.stype != "default" or array.shape == ():
            # MKLDNN, and so the operator below, does not support arrays without axes.
            sources[name].copyto(array)
        elif array.size:
            copies.setdefault(array.dtype, []).append((sources[name], array))
    for pairs in copies.values():
        # Most pairs are one array, which this operator does not copy (``AMPMultiCastCompute``).
        ours, theirs = zip(*pairs)
        mx.nd.amp_multicast(*ours, num_outputs=len(ours), out=list(theirs))


@contextlib.contextmanager
def restored(arrays: Sequence[NDArray]) -> Iterator[None]:
    """Restore arrays after the block."""
    copies = [array.copy() for array in arrays]
    yield
    for array, copy in zip(arrays, copies):
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
