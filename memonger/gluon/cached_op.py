"""The operator that replaces a planned block's CachedOp, and the memory that its calls share."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Callable, Collection, Mapping, NamedTuple

import numpy as np

from memonger.api.plan import Plan
from memonger.api.planning import plan
from memonger.costs.bind import has_mkldnn
from memonger.gluon.bound import PlannedGraph, reached, waits, wanted_by
from memonger.gluon.outputs import with_copied_outputs
from memonger.gluon.runner import Runner, free_unused
from memonger.gluon.tape import RecordedCall
from memonger.graph.inputs import devices_like
from memonger.graph.operators.recompute import ANY
from memonger.graph.read import forward_graph
from memonger.graph.training import HEAD_COPY, NO_NODE, training_graph
from memonger.schedules.execution.arena import address
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.solve.facts import find_wanted
from memonger.solve.limits import Budget
from memonger.support.errors import (
    BudgetError,
    MemongerError,
    UnmatchedError,
    format_size,
    why_unplanned,
)
from memonger.support.mxnet import may_wait, mx
from memonger.support.symbols import read
from memonger.support.types import Context, Keywords, NDArray, Parameter, Symbol
from memonger.support.variables import NULL, WRITE, Mark, is_noted, mark_of

if TYPE_CHECKING:
    from memonger.gluon.bound import Arrays, Marks

    Find = Callable[..., Plan]  # type: ignore[misc]  # with the arguments of `plan`

log = logging.getLogger("memonger")

MAX_RUNNERS = 32  # kinds of calls (shapes, gradients) for which `Runners` keep a bound plan


class Kind(NamedTuple):
    """The properties of a call on which its plan depends."""

    types: tuple[tuple[type, str], ...]  # of the inputs: class of array, type of elements
    np_shape: bool  # whether MXNet reads shapes as NumPy does: () is a scalar
    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    run: frozenset[int]  # the operators whose gradients run


class Count(NamedTuple):
    """Bytes of calls of one kind."""

    planned: int  # that a step takes by the plan
    plain: int  # that it takes without
    planned_together: int  # that a call holds by the plan, if another one is alive too
    plain_together: int  # that it holds without


def count_bytes(plan: Plan, inputs: Collection[str]) -> Count:
    """Count the bytes of calls of a block with these inputs, by a plan and without.

    Without it, MXNet's executor, whose pool a plan counts, copies gradients of outputs, and Gluon
    does not. Marks need copies of inputs and outputs, and arrays for the gradients of inputs.

    Raises
    ------
    MemongerError
        If a step takes no less by the plan.
    """
    request, symbol = plan.request, plan.symbol
    graph = forward_graph(request.symbol, request.spec)
    training = training_graph(graph, find_wanted(graph, request.grad_req))
    plain = plan.before.pool_bytes
    for row in training.arrays.walk_row.tolist():
        if training.ops[row] == HEAD_COPY and training.origin[row] == NO_NODE:
            plain -= training.signatures[row].tensors[0].nbytes
    outputs = sum(graph.tensors[a][b].nbytes for a, b in graph.heads if a not in graph.arguments)
    if isinstance(symbol, ScheduledSymbol):
        planned, mkldnn = plan.after.pool_bytes, has_mkldnn(request.ctx)
        step = symbol.find_step(forward_graph(symbol, request.spec), request.grad_req, mkldnn)
        together = replace(step, is_split=True).split_bytes + outputs
    else:
        planned = plan.after.pool_bytes + outputs
        for a in graph.arguments:
            name = graph.nodes[a].name
            if name in inputs:
                arrays = 1 if request.grad_req[name] == "null" else 2
                planned += arrays * graph.tensors[a][0].nbytes
        together = planned
    if planned >= plain:
        raise MemongerError(
            f"by its plan it would take {format_size(planned)} in Gluon, and without it "
            f"{format_size(plain, planned)}"
        )
    return Count(planned, plain, together, training.kept_bytes)


@dataclass
class Decision:
    """Whether and how calls of one kind are planned."""

    kind: Kind
    plan: Plan | None = None
    graph: PlannedGraph | None = None  # None: these calls train without a plan
    refusal: str = ""  # why they cannot be planned
    for_all_shapes: bool = False  # True: for inputs of any shapes; False: for no larger ones
    count: Count | None = None  # of the memory of calls, if they are planned

    @property
    def is_smaller_together(self) -> bool:
        """Whether calls that are alive together hold less memory by the plan than without it."""
        count = self.count
        return count is not None and count.planned_together < count.plain_together

    def holds(self, kind: Kind) -> bool:
        """Return whether the decision is valid for another kind, which runs no more gradients."""
        pairs = [] if self.for_all_shapes else zip(kind.shapes, self.kind.shapes)
        fits = (len(a) == len(b) and all(n <= most for n, most in zip(a, b)) for a, b in pairs)
        return kind[:2] == self.kind[:2] and kind.run <= self.kind.run and all(fits)


@dataclass
class PlannedBlock:
    """The options by which a block is planned, and the latest decision."""

    name: str
    options: Keywords  # of ``memonger.plan``
    budget: Budget | None  # of these options
    find: Find = plan
    decision: Decision | None = None  # of the latest call
    reasons: set[str] = field(default_factory=set)  # logged reasons of calls without a plan

    def refuse(self, reason: str) -> None:
        """Warn, once for each reason, that the block trains without a plan."""
        if reason not in self.reasons:
            log.warning("%s trains without a plan: %s", self.name, reason)
        self.reasons.add(reason)

    def note_plain_calls(self, decision: Decision) -> None:
        """Warn, once, that calls run without the plan while an earlier one is alive."""
        assert decision.count is not None
        sizes = decision.count.planned_together, decision.count.plain_together
        planned, plain = (format_size(nbytes, max(sizes)) for nbytes in sizes)
        self.refuse(
            f"a call while an earlier one waits for its backward pass holds {planned} by the plan, "
            f"and {plain} without it"
        )


class Runners:
    """Bound plans that share memory.

    One call at a time is alive, or if the plans are split, any number of calls.
    """

    def __init__(self, is_split: bool) -> None:
        self.is_split = is_split
        self._by_kind: dict[object, Runner] = {}  # the latest last
        self._bound: object = None  # the parameters to which they are bound
        #: Returns the latest call, or None if the tape does not have it any more.
        self._call: Callable[[], RecordedCall | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether the latest call is no longer on the tape, or has had its backward pass."""
        call = self._call()
        return self.is_split or call is None or call.spent

    def run(self, graph: PlannedGraph, arrays: Arrays, marks: Marks) -> list[NDArray]:
        """Run a call by a plan and return its outputs; bind the plan first if necessary."""
        parameters = [(id(arrays[name]), marks.get(name)) for name in graph.parameters]
        if self._bound != parameters:  # cast, reset_ctx, grad_req
            self._by_kind.clear()
            self._bound = parameters
        inputs = [arrays[name] for name in graph.inputs]
        requests = [mark.request for mark in marks.values()]
        key = graph, *(array.shape for array in inputs), *requests
        runner = self._by_kind.pop(key, None)
        if runner is None:
            # A plan shares the memory of the largest. If it is larger, the others are dropped.
            size = sum(array.size for array in inputs)
            largest = max(self._by_kind.values(), key=lambda other: other.size, default=None)
            if largest is not None and largest.size < size:
                largest = None
                self._by_kind.clear()
            with mx.autograd.pause():
                lent = None if largest is None else largest.bound
                runner = Runner(graph, arrays, marks, lent, self.is_split)
        self._by_kind[key] = runner
        if len(self._by_kind) > MAX_RUNNERS:
            del self._by_kind[next(iter(self._by_kind))]
        outputs, call = runner.forward(arrays, marks)
        self._call = weakref.ref(call)
        return outputs


class PlannedOp:
    """The operator of a planned block: it trains by a plan, and otherwise calls the CachedOp.

    It is made anew where Gluon makes a new CachedOp: after ``hybridize``, ``cast``, or when a layer
    was added. A plan is made at the first recorded call in training mode. Later calls that run more
    gradients, because layers were frozen before, get their own plans.
    """

    def __init__(
        self,
        block: PlannedBlock,
        usual: mx.nd.CachedOp,
        symbol: Symbol,
        parameters: Mapping[str, Parameter],  # other inputs of the symbol are inputs of the block
        refusal: str = "",  # why the block cannot be planned
    ) -> None:
        self._block, self._usual, self._symbol = block, usual, symbol
        self._names = tuple(symbol.list_inputs())
        self._parameters, self._refusal = parameters, refusal
        self._inputs = [name for name in self._names if name not in self._parameters]
        self._arguments = self._symbol.list_arguments()
        self._waits = waits(symbol)
        self._decisions: list[Decision] = []
        self._run: dict[frozenset[str], frozenset[int]] = {}  # `Kind.run` by wanted arguments
        #: By device and by thread. An executor has the temporary space and the random numbers of
        #: the thread that binds it (``ResourceManager::Get``). On another thread, its operators
        #: would wait for all operators of the first thread that need these too.
        self._runners: dict[tuple[Context, threading.Thread], list[Runners]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._usual, name)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the block makes its own CachedOp, without a plan

    def __call__(self, *arrays: NDArray) -> object:
        """Compute the outputs; ``arrays`` are in the order of the symbol's inputs."""
        free_unused()
        device, named = arrays[0].context, dict(zip(self._names, arrays))
        is_trained = mx.autograd.is_recording() and mx.autograd.is_training()
        if not is_trained or any(array.context != device for array in arrays):  # MXNet refuses it
            return self._usual(*arrays)
        marks: dict[str, Mark] = {}
        for name in self._arguments:
            parameter = self._parameters.get(name)
            unseen = WRITE if parameter is None else parameter.grad_req
            marks[name] = mark_of(named[name], unseen)
        wanted = frozenset(wanted_by(marks))
        if not wanted:
            return self._usual(*arrays)
        kind, outputs = self._kind(named, wanted), None
        try:
            with self._lock:  # of the threads that call this block
                decision = next((past for past in self._decisions if past.holds(kind)), None)
                if decision is None:
                    decision = self._decide(named, wanted, kind)
                    self._decisions.append(decision)
                self._block.decision = decision
            if decision.graph is not None:
                runners = self._free_runners(device, decision, decision.graph.is_scheduled)
                if runners is None:
                    self._block.note_plain_calls(decision)
                else:
                    with self._lock:
                        outputs = runners.run(decision.graph, named, marks)
        except (BudgetError, UnmatchedError):
            raise
        except Exception as error:
            outputs = self._usual(*arrays)  # raises Gluon's error if the call is wrong
            reason = why_unplanned(error)
            self._block.refuse(reason)
            self._block.decision = Decision(kind, refusal=reason)
            self._decisions.insert(0, self._block.decision)
        return self._usual(*arrays) if outputs is None else outputs

    def _kind(self, arrays: Arrays, wanted: frozenset[str]) -> Kind:
        if wanted not in self._run:
            nodes = read(self._symbol)["nodes"]
            pairs = enumerate(zip(nodes, reached(nodes, wanted)))
            self._run[wanted] = frozenset(
                k for k, (node, is_reached) in pairs if is_reached and node["op"] != "null"
            )
        types, shapes = [], []
        for name in self._inputs:
            array = arrays[name]
            types.append((type(array), np.dtype(array.dtype).name))
            shapes.append(array.shape)
        return Kind(tuple(types), mx.util.is_np_shape(), tuple(shapes), self._run[wanted])

    def _check_mark(self, name: str, array: NDArray, parameter: Parameter) -> None:
        """Raise MemongerError if the request of a parameter that was marked by hand is unknown."""
        if is_noted(array) or array.grad is None or array.grad.stype != "default":
            return
        own = [] if parameter.grad_req == NULL else parameter.list_grad()
        if address(array.grad) not in map(address, own):
            text = "was marked on autograd's tape before memonger was imported; import it first"
            raise MemongerError(f"the parameter {name!r} {text}")

    def _decide(self, arrays: Arrays, wanted: frozenset[str], kind: Kind) -> Decision:
        """Plan a kind of calls; raise MemongerError if that is not possible."""
        if self._refusal:
            raise MemongerError(self._refusal)
        shapes: dict[str, tuple[int, ...]] = {}
        types: dict[str, str] = {}
        for name, array in arrays.items():
            if array.stype != "default":
                raise MemongerError(
                    f"{name!r} is stored as {array.stype}, but a plan needs dense arrays; convert "
                    "it with tostype('default')"
                )
            shapes[name], types[name] = array.shape, np.dtype(array.dtype).name
        for name, parameter in self._parameters.items():
            self._check_mark(name, arrays[name], parameter)
        devices = devices_like(arrays[self._names[0]].context, on_cpu=ANY)
        block = self._block
        with mx.autograd.pause():
            plan = block.find(
                with_copied_outputs(self._symbol, shapes, types),
                shapes,
                type_dict=types,
                grad_req={n: "write" if n in wanted else "null" for n in self._arguments},
                **{"ctx": devices, **block.options},
            )
        plan = replace(plan, of_block=True)
        if not plan.is_used:
            return Decision(kind, plan)
        count = count_bytes(plan, self._inputs)
        graph = PlannedGraph(plan.symbol, self._names, self._parameters, self._usual.is_np_sym)
        # Calls of other shapes may exceed a budget in bytes, but hardly a share of their memory.
        return Decision(
            kind,
            plan,
            graph,
            for_all_shapes=block.budget is None or block.budget.is_share,
            count=count,
        )

    def _free_runners(self, ctx: Context, decision: Decision, can_split: bool) -> Runners | None:
        """Return runners that no call uses; None if the call takes less memory without its plan.

        If plans can be split, a thread has two on a device. Of others it has as many as calls are
        alive. Then it waits for MXNet's engine before it makes new ones, unless the engine may
        wait for calls on other devices. Operators that have not run yet keep the tape alive. So in
        a loop that does not wait, each call without a backward pass would get new runners.
        """
        key = ctx, threading.current_thread()
        if key not in self._runners:
            devices = {device for p in self._parameters.values() for device in p.list_ctx()}
            for device, thread in list(self._runners):
                if (devices and device not in devices) or not thread.is_alive():  # by reset_ctx
                    self._runners.pop((device, thread), None)  # another thread may do it too
        runners = self._runners.setdefault(key, [])
        # The engine deletes operators shortly after they have run (`ThreadedEngine::OnComplete`).
        tries = [mx.nd.waitall, *5 * [functools.partial(time.sleep, 0.001)]]
        may_try = may_wait() and not self._waits and not can_split
        for wait in tries if runners and may_try else ():
            if any(each.is_free for each in runners if not each.is_split):
                break
            wait()
            free_unused()
        usable = (each for each in runners if each.is_free and (can_split or not each.is_split))
        free = next(usable, None)
        if runners and (free is None or free.is_split) and not decision.is_smaller_together:
            return None
        if free is None:
            free = Runners(is_split=can_split and bool(runners))
            runners.append(free)
        return free
