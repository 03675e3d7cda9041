"""The operator in the place of a planned block's CachedOp, and the memory that its calls share."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Iterable, Mapping, NamedTuple

import numpy as np

from memonger.api.plan import Plan
from memonger.api.planning import plan
from memonger.gluon import tape
from memonger.gluon.outputs import with_copied_outputs
from memonger.gluon.runner import Call, PlannedGraph, Runner, free_unused, reached
from memonger.graph.operators.recompute import ANY, GPU
from memonger.solve.options import Budget
from memonger.support.errors import BudgetError, MemongerError, UnmatchedError, said_by_mxnet
from memonger.support.mxnet import may_wait, mx
from memonger.support.symbols import read
from memonger.support.types import Context, Keywords, NDArray, Parameter, Symbol

if TYPE_CHECKING:
    from memonger.gluon.runner import Arrays, Requests

    Find = Callable[..., Plan]  # type: ignore[misc]  # with the arguments of `plan`

log = logging.getLogger("memonger")

MAX_RUNNERS = 32  # kinds of calls (shapes, gradients) for which a pool stays bound


class Kind(NamedTuple):
    """The properties of a call on which its plan depends."""

    types: tuple[tuple[type, str], ...]  # of the inputs: as arrays, and of their elements
    np_shape: bool  # whether MXNet reads shapes as NumPy: () is that of a scalar
    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    wanted: frozenset[str]  # the arguments that want a gradient
    run: frozenset[int]  # the operators whose gradients run


@dataclass
class Decision:
    """Whether and how calls are planned, as decided for one kind of them."""

    kind: Kind
    plan: Plan | None = None
    graph: PlannedGraph | None = None  # None: these calls train without a plan
    refusal: str = ""  # why they cannot be planned
    strict: bool = True  # whether it holds for just these gradients, and for no larger inputs

    def holds(self, kind: Kind) -> bool:
        """Tell whether the decision holds for calls of another kind."""
        if (kind.types, kind.np_shape) != (self.kind.types, self.kind.np_shape):
            return False
        if not self.strict:
            return kind.run <= self.kind.run
        pairs = zip(kind.shapes, self.kind.shapes)
        fits = (len(a) == len(b) and all(n <= most for n, most in zip(a, b)) for a, b in pairs)
        return kind.wanted == self.kind.wanted and all(fits)


@dataclass
class PlannedBlock:
    """How a block is to be planned, and the latest decision."""

    name: str
    options: Keywords  # of ``memonger.plan``
    budget: Budget | None  # of these options
    find: Find = plan
    decision: Decision | None = None  # of the latest call
    reasons: set[str] = field(default_factory=set)  # logged, why calls train without a plan

    def refuse(self, reason: str) -> None:
        """Warn, once for each reason, that the block trains without a plan."""
        if reason not in self.reasons:
            log.warning("%s trains without a plan: %s", self.name, reason)
        self.reasons.add(reason)


@dataclass(eq=False)
class Pool:
    """Bound plans that share memory; one of them is in use at a time."""

    runners: dict[object, Runner] = field(default_factory=dict)  # by kind; the latest comes last
    call: Callable[[], Call | None] = lambda: None  # the latest, while the tape has it
    idle: int = 0  # calls of the block on this device since the latest

    @property
    def is_free(self) -> bool:
        """Whether the tape has let go of the latest call, or has its gradients."""
        call = self.call()
        return call is None or call.spent

    def runner(
        self, key: object, graph: PlannedGraph, arrays: Arrays, requests: Requests
    ) -> Runner:
        """Return the plan that is bound for this kind of call; bind it where there is none."""
        runner = self.runners.pop(key, None)
        if runner is not None and not runner.is_bound_to(arrays):  # cast, reset_ctx, grad_req
            runner = None
            self.runners.clear()
        if runner is None:
            # MXNet lends memory to executors that come later. All fit in that of the largest.
            size = sum(arrays[n].size for n in graph.names if n not in graph.parameters)
            largest = max(self.runners.values(), key=lambda other: other.size, default=None)
            if largest is not None and largest.size < size:
                largest = None
                self.runners.clear()
            runner = Runner(graph, arrays, requests, largest and largest.executor)
        self.runners[key] = runner
        if len(self.runners) > MAX_RUNNERS:
            del self.runners[next(iter(self.runners))]
        return runner


class Asked(NamedTuple):
    """The requests for the gradients of the parameters on a device."""

    arrays: Arrays  # while they are here, no others have their ids
    key: list[tuple[int, tape.Mark | None]]  # what they were then
    requests: dict[str, str | None]


def identify(arrays: Iterable[NDArray]) -> list[tuple[int, tape.Mark | None]]:
    """Return what changes when other arrays, or other marks of them, take the places of these."""
    return [(id(array), tape.mark_of(array)) for array in arrays]


class PlannedOp:
    """A block's CachedOp that trains by a plan, and leaves all else to MXNet's own.

    Gluon makes a new one where it makes a new CachedOp: after ``hybridize``, ``cast``, or when a
    layer was added. A plan is made at the first recorded call in training mode. Later calls that
    run more gradients, because layers were frozen then, get plans of their own.
    """

    def __init__(
        self,
        block: PlannedBlock,
        usual: mx.nd.CachedOp,
        symbol: Symbol,
        parameters: Mapping[str, Parameter],  # all other inputs of the symbol are the block's
        refusal: str = "",  # why it cannot be planned
    ) -> None:
        self._block, self._usual, self._symbol = block, usual, symbol
        self._names = tuple(symbol.list_inputs())
        self._parameters, self._refusal = parameters, refusal
        self._inputs = [name for name in self._names if name not in self._parameters]
        self._arguments = self._symbol.list_arguments()
        self._decisions: list[Decision] = []  # the strict ones come first
        self._run: dict[frozenset[str], frozenset[int]] = {}  # `Kind.run` by ``wanted``
        #: By device, and by thread: to an executor MXNet gives the temporary space and the random
        #: numbers of the thread that binds it (``ResourceManager::Get``). On another one, its
        #: operators would wait for all that the first has pushed and that needs these too.
        self._pools: dict[tuple[Context, threading.Thread], list[Pool]] = {}
        self._asked: dict[Context, Asked] = {}  # the latest
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._usual, name)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the block makes its own CachedOp, without a plan

    def __call__(self, *arrays: NDArray) -> object:
        """Compute the outputs of the inputs, in the order of the symbol's."""
        free_unused()
        if not mx.autograd.is_recording() or not mx.autograd.is_training():
            return self._usual(*arrays)
        device = arrays[0].context
        if any(array.context != device for array in arrays):
            return self._usual(*arrays)  # MXNet refuses them
        self._await_calls(device)
        named = dict(zip(self._names, arrays))
        try:
            requests = self._requests(named)
        except MemongerError as error:
            self._block.refuse(str(error))
            return self._usual(*arrays)
        kind = self._kind(named, requests)
        if not kind.wanted:
            return self._usual(*arrays)
        try:
            with self._lock:  # of the threads that call this block
                outputs = self._train(named, requests, kind)
        except (BudgetError, UnmatchedError):
            raise
        except (MemongerError, mx.MXNetError) as error:
            outputs = self._usual(*arrays)  # raises as without a plan if the call is at fault
            self._refuse(kind, error)
        return self._usual(*arrays) if outputs is None else outputs

    def plan_now(self, arrays: Arrays, inputs: Iterable[str] = ()) -> None:
        """Make the plan for inputs and parameters like these arrays, or warn why there is none.

        A gradient of these ``inputs`` is wanted too.
        """
        requests = {**self._requests(arrays), **dict.fromkeys(inputs, tape.WRITE)}
        kind = self._kind(arrays, requests)
        if not kind.wanted:  # then a plan can serve the gradients of the inputs alone
            kind = self._kind(arrays, {**requests, **dict.fromkeys(self._inputs, tape.WRITE)})
        try:
            self._decide(arrays, kind)
        except (BudgetError, UnmatchedError):
            raise
        except MemongerError as error:
            self._refuse(kind, error)

    def _requests(self, arrays: Arrays) -> dict[str, str]:
        """Return the request for the gradient of each argument, as autograd's tape has it."""
        ctx = arrays[self._names[0]].context
        own = {name: arrays[name] for name in self._arguments if name in self._parameters}
        asked = self._asked.get(ctx)
        if asked is None or asked.key != identify(own.values()):
            tape.learn_requests(own.values())
            requests = {name: tape.request_of(array) for name, array in own.items()}
            self._asked[ctx] = asked = Asked(own, identify(own.values()), requests)
        for name, request in asked.requests.items():
            if request is None:
                raise MemongerError(
                    f"{name!r} was marked (attach_grad, mark_variables) before its plan was asked "
                    "for, and a thread that runs a Custom operator or an autograd.Function cannot "
                    "wait to learn how; call the net once outside of them"
                )
        # A gradient is wanted of inputs that were marked unseen. It is added, which fits all.
        inputs = {n: tape.request_of(arrays[n]) or tape.WRITE for n in self._inputs}
        return {name: inputs.get(name) or asked.requests[name] or "" for name in self._arguments}

    def _kind(self, arrays: Arrays, requests: Requests) -> Kind:
        wanted = frozenset(name for name, request in requests.items() if request != tape.NULL)
        if wanted not in self._run:
            nodes = read(self._symbol)["nodes"]
            runs = (k for k, is_reached in enumerate(reached(nodes, wanted)) if is_reached)
            self._run[wanted] = frozenset(k for k in runs if nodes[k]["op"] != "null")
        inputs = [arrays[name] for name in self._inputs]
        types = tuple((type(array), np.dtype(array.dtype).name) for array in inputs)
        shapes = tuple(array.shape for array in inputs)
        return Kind(types, mx.util.is_np_shape(), shapes, wanted, self._run[wanted])

    def _add(self, decision: Decision) -> Decision:
        """Keep a decision for calls to come; the strict ones come first."""
        self._decisions.insert(0 if decision.strict else len(self._decisions), decision)
        self._block.decision = decision
        return decision

    def _refuse(self, kind: Kind, error: Exception) -> None:
        """Train calls of this kind without a plan from now on."""
        reason = said_by_mxnet(error) if isinstance(error, mx.MXNetError) else str(error)
        self._add(Decision(kind, refusal=reason))
        self._block.refuse(reason)

    def _decide(self, arrays: Arrays, kind: Kind) -> Decision:
        """Make the plan for calls of a kind, of which these are the arrays."""
        parameters, block = self._parameters, self._block
        if self._refusal:
            raise MemongerError(self._refusal)
        for name, array in arrays.items():
            if array.stype != "default":
                raise MemongerError(f"{name!r} is {array.stype}, and a plan needs dense arrays")
        shapes = {name: arrays[name].shape for name in self._names}
        types = {name: np.dtype(arrays[name].dtype).name for name in self._names}
        on_gpu = arrays[self._names[0]].context.device_type == GPU
        plan = block.find(
            with_copied_outputs(self._symbol, shapes, types),
            shapes,
            type_dict=types,
            grad_req={n: "write" if n in kind.wanted else "null" for n in self._arguments},
            **{"ctx": GPU if on_gpu else ANY, **block.options},
        )
        decision = Decision(kind, plan)
        if plan.is_used:
            is_np = self._usual.is_np_sym
            decision.graph = PlannedGraph(plan.symbol, self._names, parameters, is_np)
            # Other calls may take more than a budget of bytes, but hardly more than such a share.
            decision.strict = block.budget is not None and not block.budget.is_share
        return self._add(decision)

    def _train(self, arrays: Arrays, requests: Requests, kind: Kind) -> list[NDArray] | None:
        """Run a call by its plan and return its outputs; None where it has no plan."""
        decision = next((past for past in self._decisions if past.holds(kind)), None)
        if decision is None:
            with mx.autograd.pause():
                decision = self._decide(arrays, kind)
        self._block.decision = decision
        if decision.graph is None:
            return None
        ctx = arrays[self._names[0]].context
        key = decision.graph, kind.types, kind.shapes, *requests.values()
        with mx.autograd.pause():
            pool = self._free_pool(ctx)
            runner = pool.runner(key, decision.graph, arrays, requests)
        outputs = runner.forward(arrays)
        pool.call = runner.call
        return outputs

    def _free_pool(self, ctx: Context) -> Pool:
        """Return memory on a device that no call uses; there are as many pools as calls alive."""
        key = ctx, threading.current_thread()
        if key not in self._pools:
            devices = {device for p in self._parameters.values() for device in p.list_ctx()}
            for device, thread in list(self._pools):
                if (devices and device not in devices) or not thread.is_alive():  # by reset_ctx
                    del self._pools[device, thread]
            self._asked = {device: self._asked[device] for device in devices & self._asked.keys()}
            self._pools[key] = []
        pools = self._pools[key]
        free = next((pool for pool in pools if pool.is_free), Pool())
        for pool in pools:
            pool.idle += 1
        free.idle = 0
        # In a loop that needs all pools, none is idle for more calls than half of this.
        kept = [pool for pool in pools if pool.idle <= 2 * len(pools) or not pool.is_free]
        self._pools[key] = kept if free in kept else [*kept, free]
        return free

    def _await_calls(self, ctx: Context) -> None:
        """Wait for MXNet's engine, rather than take memory beside that of calls that are over.

        Operators that have not run yet hold the tape. So in a loop that does not wait, calls that
        are never differentiated would each take a pool.
        """
        pools = self._pools.get((ctx, threading.current_thread()), [])
        if not pools or not may_wait() or any(pool.is_free for pool in pools):
            return
        mx.nd.waitall()
        for _ in range(5):
            free_unused()
            if any(pool.is_free for pool in pools):
                break
            # Operators that have run are deleted a little later (``ThreadedEngine::OnComplete``).
            time.sleep(0.001)
