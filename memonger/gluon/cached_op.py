"""What stands in the place of a planned block's CachedOp, and the memory that its calls share."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.api.plan import Plan
from memonger.api.planning import plan
from memonger.gluon import stub
from memonger.gluon.outputs import with_copied_outputs
from memonger.gluon.runner import Call, PlannedGraph, Runner, free_unused, reached
from memonger.graph.operators.recompute import ANY, GPU
from memonger.solve.options import Budget
from memonger.support.errors import BudgetError, MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.symbols import read

log = logging.getLogger("memonger")

MOST = 32  # kinds of calls (shapes, gradients) that a pool stays bound for


class Kind(NamedTuple):
    """What it depends on whether and how a call is planned."""

    types: Sequence[Any]  # of the inputs, as arrays and of their elements
    shapes: Sequence[tuple[int, ...]]  # of the inputs
    wanted: frozenset[str]  # the arguments that want a gradient
    run: frozenset[int]  # the operators whose gradients run


@dataclass
class Decision:
    """Whether and how calls are planned, as it was decided for one kind of them."""

    kind: Kind
    plan: Plan | None = None
    graph: PlannedGraph | None = None  # None: these calls train without a plan
    refused: str = ""  # why they cannot be planned
    strict: bool = True  # it holds for just these gradients, and for no larger inputs

    def holds(self, kind: Kind) -> bool:
        """Tell whether it holds for calls of another kind."""
        if kind.types != self.kind.types:
            return False
        if not self.strict:
            return kind.run <= self.kind.run
        pairs = zip(kind.shapes, self.kind.shapes)
        fits = (len(a) == len(b) and all(n <= most for n, most in zip(a, b)) for a, b in pairs)
        return kind.wanted == self.kind.wanted and all(fits)


@dataclass
class Asked:
    """How a block is to be planned, and what came of it."""

    name: str  # of the block
    options: Mapping[str, Any]  # of ``memonger.plan``
    budget: Budget | None  # of them
    find: Callable[..., Plan] = plan
    decision: Decision | None = None  # of the latest call
    told: set[str] = field(default_factory=set)  # why calls train without a plan

    def refuse(self, reason: str) -> None:
        """Tell, once for each reason, why the block trains without a plan."""
        if reason not in self.told:
            log.warning("%s trains without a plan: %s", self.name, reason)
        self.told.add(reason)


@dataclass(eq=False)
class Pool:
    """Bound plans that share memory; one of them is in use at a time."""

    runners: dict[Any, Runner] = field(default_factory=dict)  # the last that was used is the last
    call: weakref.ref[Call] | None = None  # the latest
    idle: int = 0  # calls of the block on this device since

    @property
    def is_free(self) -> bool:
        """Whether it can be used: the tape has let go of the latest call, or has its gradients."""
        call = None if self.call is None else self.call()
        return call is None or call.spent

    def runner(
        self,
        key: Any,
        graph: PlannedGraph,
        arrays: Mapping[str, Any],
        requests: Mapping[str, str],
    ) -> Runner:
        """Return the plan that is bound for this kind of call; bind it where there is none."""
        runner = self.runners.pop(key, None)
        if runner is not None and not runner.is_bound_to(arrays):  # cast, reset_ctx, grad_req
            runner = None
            self.runners.clear()
        if runner is None:
            # MXNet lends memory to executors that come later. All fit in that of the largest.
            size = sum(arrays[n].size for n in graph.names if n not in graph.parameters)
            largest = max(self.runners.values(), key=lambda each: each.size, default=None)
            if largest is not None and largest.size < size:
                largest = None
                self.runners.clear()
            lent = None if largest is None else largest.executor
            runner = Runner(graph, arrays, requests, lent)
        self.runners[key] = runner
        if len(self.runners) > MOST:
            del self.runners[next(iter(self.runners))]
        return runner


class PlannedOp:
    """A block's CachedOp that trains by a plan; all else MXNet's own does.

    Gluon makes it anew where it makes a CachedOp anew: after ``hybridize``, ``cast``, or when a
    layer was added. A plan is made at the first recorded call in training mode, and later ones for
    calls that it does not serve: that run more gradients, for layers were frozen then.
    """

    def __init__(self, asked: Asked, usual: Any, symbol: Any, arguments: Any) -> None:
        self._asked, self._usual, self._symbol = asked, usual, symbol
        self._names = tuple(symbol.list_inputs())
        named = zip(self._names, arguments)
        self._parameters = {name: each for name, (is_input, each) in named if not is_input}
        self._inputs = [name for name in self._names if name not in self._parameters]
        self._arguments = symbol.list_arguments()
        self._decisions: list[Decision] = []  # the strict ones come first
        self._run: dict[frozenset[str], frozenset[int]] = {}  # `Kind.run` by ``wanted``
        self._pools: dict[Any, list[Pool]] = {}  # by device
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of the block makes its own, without a plan

    def __call__(self, *arrays: Any) -> Any:
        """Compute the outputs of the inputs, in the order of the symbol's."""
        free_unused()
        if not mx.autograd.is_recording() or not mx.autograd.is_training():
            return self._usual(*arrays)
        self._await_calls(arrays[0].context)
        named = dict(zip(self._names, arrays))
        self._check_devices(named)
        requests = self._requests(n for n in self._inputs if stub.on_tape(named[n]))
        kind, made = self._kind(named, requests), None
        if not kind.wanted:
            return self._usual(*arrays)
        try:
            with self._lock:  # of the threads that call this block
                made = self._train(named, requests, kind)
        except BudgetError:
            raise
        except (MemongerError, mx.MXNetError) as error:
            made = self._usual(*arrays)  # raises as without a plan if the call is at fault
            self._refuse(kind, error)
        return self._usual(*arrays) if made is None else made

    def _check_devices(self, arrays: Mapping[str, Any]) -> None:
        devices = {name: array.context for name, array in arrays.items()}
        home = next((devices[name] for name in self._names if name in self._parameters), None)
        for name, device in devices.items():
            if name not in self._parameters and device != (home or device):
                raise MemongerError(
                    f"{self._asked.name}: input {name!r} is on {device}, and the parameters are on "
                    f"{home}; give it as .as_in_context(mx.{home}), or have parameters there too: "
                    f"net.collect_params().reset_ctx(mx.{device})"
                )

    def plan_now(self, arrays: Mapping[str, Any]) -> None:
        """Make the plan, or tell why there is none, for inputs and parameters like these arrays."""
        kind = self._kind(arrays, self._requests())
        if not kind.wanted:  # then a plan can serve the gradients of the inputs alone
            kind = self._kind(arrays, self._requests(self._inputs))
        try:
            self._decide(arrays, kind)
        except BudgetError:
            raise
        except MemongerError as error:
            self._refuse(kind, error)

    def _requests(self, inputs: Iterable[str] = ()) -> dict[str, str]:
        """Tell what is asked for the gradient of each argument; these inputs want theirs."""
        known = self._parameters
        parameters = {n: known[n].grad_req if n in known else "null" for n in self._arguments}
        return {**parameters, **dict.fromkeys(inputs, "write")}

    def _kind(self, arrays: Mapping[str, Any], requests: Mapping[str, str]) -> Kind:
        wanted = frozenset(name for name, request in requests.items() if request != "null")
        if wanted not in self._run:
            nodes = read(self._symbol)["nodes"]
            run = enumerate(reached(nodes, wanted))
            self._run[wanted] = frozenset(k for k, r in run if r and nodes[k]["op"] != "null")
        inputs = [arrays[name] for name in self._inputs]
        types = tuple((type(array), np.dtype(array.dtype).name) for array in inputs)
        return Kind(types, tuple(array.shape for array in inputs), wanted, self._run[wanted])

    def _add(self, decision: Decision) -> Decision:
        self._decisions.insert(0 if decision.strict else len(self._decisions), decision)
        self._asked.decision = decision
        return decision

    def _refuse(self, kind: Kind, error: Exception) -> None:
        reason = said_by_mxnet(error) if isinstance(error, mx.MXNetError) else str(error)
        self._add(Decision(kind, refused=reason))
        self._asked.refuse(reason)

    def _decide(self, arrays: Mapping[str, Any], kind: Kind) -> Decision:
        """Make the plan for calls of a kind, of which these are the arrays."""
        parameters, options = self._parameters, self._asked.options
        if any(isinstance(array, mx.np.ndarray) for array in arrays.values()):
            raise MemongerError("it takes arrays of mx.np, and memonger plans networks of mx.sym")
        for name, array in arrays.items():
            sparse = array.stype != "default"
            if sparse or (name in parameters and parameters[name]._grad_stype != "default"):
                raise MemongerError(
                    f"{name!r} is sparse, or its gradient is (sparse_grad), and a plan needs "
                    "dense arrays"
                )
        shapes = {name: arrays[name].shape for name in self._names}
        types = {name: np.dtype(arrays[name].dtype).name for name in self._names}
        on_gpu = arrays[self._names[0]].context.device_type == GPU
        found = self._asked.find(
            with_copied_outputs(self._symbol, shapes, types),
            shapes,
            type_dict=types,
            grad_req={n: "write" if n in kind.wanted else "null" for n in self._arguments},
            **{"ctx": GPU if on_gpu else ANY, **options},
        )
        decision = Decision(kind, found)
        if found.pool_bytes < found.unplanned_bytes:
            decision.graph = PlannedGraph(found.symbol, self._names, parameters)
            # Others may take more than a budget of bytes, but hardly more than such a share.
            budget = self._asked.budget
            decision.strict = budget is not None and not budget.is_share
        return self._add(decision)

    def _train(self, arrays: Mapping[str, Any], requests: Mapping[str, str], kind: Kind) -> Any:
        """Run a call by its plan; None where it has none."""
        decision = next((each for each in self._decisions if each.holds(kind)), None)
        if decision is None:
            with mx.autograd.pause():
                decision = self._decide(arrays, kind)
        self._asked.decision = decision
        if decision.graph is None:
            return None
        ctx = arrays[self._names[0]].context
        key = decision.graph, kind.types, kind.shapes, *requests.values()
        with mx.autograd.pause():
            pool = self._free_pool(ctx)
            runner = pool.runner(key, decision.graph, arrays, requests)
        made = runner.forward(arrays)
        pool.call = weakref.ref(runner.call) if runner.call is not None else None
        return made

    def _free_pool(self, ctx: Any) -> Pool:
        """Return memory on a device that no call uses; there are as many pools as calls alive."""
        if ctx not in self._pools:
            here = {each for p in self._parameters.values() for each in p.list_ctx()}
            for gone in self._pools.keys() - here if here else ():  # since reset_ctx
                del self._pools[gone]
            self._pools[ctx] = []
        pools = self._pools[ctx]
        found = next((pool for pool in pools if pool.is_free), Pool())
        for pool in pools:
            pool.idle += 1
        found.idle = 0
        # A pool goes that was idle for twice as long as any is in a loop that needs all of them.
        kept = [each for each in pools if each.idle <= 2 * len(pools) or not each.is_free]
        self._pools[ctx] = kept if found in kept else [*kept, found]
        return found

    def _await_calls(self, ctx: Any) -> None:
        """Wait for MXNet's engine, rather than to take memory beside that of calls that are over.

        Operators that are yet to run hold the tape. So in a loop that does not wait, calls that are
        never differentiated would each take a pool.
        """
        pools = self._pools.get(ctx, [])
        # Within a Custom operator, on a thread of MXNet's, the engine would wait for this call.
        alien = isinstance(threading.current_thread(), threading._DummyThread)
        if not pools or alien or any(pool.is_free for pool in pools):
            return
        mx.nd.waitall()
        for _ in range(5):
            free_unused()
            if any(pool.is_free for pool in pools):
                break
            time.sleep(0.001)  # what is done is yet to be deleted (``ThreadedEngine::OnComplete``)


def _nothing() -> None:
    """Stand for a PlannedOp in copies and pickles."""
