"""What stands in the place of a planned block's CachedOp, and the memory that its calls share."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Mapping

import numpy as np

from memonger.api.plan import Plan, plan_of
from memonger.gluon import stub
from memonger.gluon.outputs import with_copied_outputs
from memonger.gluon.runner import Call, PlannedGraph, Runner, free_unused
from memonger.graph.operators.recompute import ANY, GPU
from memonger.solve.request import read_options, read_request
from memonger.solve.solution import solve
from memonger.support.errors import BudgetError, MemongerError, said_by_mxnet
from memonger.support.mxnet import mx

log = logging.getLogger("memonger")

MOST = 32  # kinds of calls (shapes, gradients) that a pool stays bound for


@dataclass
class Asked:
    """How a block is to be planned, and what came of it."""

    name: str  # of the block
    options: Mapping[str, Any]  # of ``memonger.plan``
    plan: Plan | None = None  # the latest
    refused: str = ""  # why it trains without a plan

    def refuse(self, error: Exception) -> None:
        """Tell, once for each reason, why the block trains without a plan."""
        reason = said_by_mxnet(error) if isinstance(error, mx.MXNetError) else str(error)
        if reason != self.refused:
            log.warning("%s trains without a plan: %s", self.name, reason)
        self.refused = reason


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
    layer was added. The plan is made at the first recorded call in training mode.
    """

    def __init__(self, asked: Asked, usual: Any, symbol: Any, arguments: Any) -> None:
        self._asked, self._usual, self._symbol = asked, usual, symbol
        self._names = tuple(symbol.list_inputs())
        named = zip(self._names, arguments)
        self._parameters = {name: each for name, (is_input, each) in named if not is_input}
        self._graph: PlannedGraph | None = None
        self._is_refused = self._saves_nothing = False
        self._pools: dict[Any, list[Pool]] = {}  # by device
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of the block makes its own, without a plan

    def __call__(self, *arrays: Any) -> Any:
        """Compute the outputs of the inputs, in the order of the symbol's."""
        free_unused()
        recorded = mx.autograd.is_recording() and mx.autograd.is_training()
        if not recorded or self._is_refused or self._saves_nothing:
            return self._usual(*arrays)
        self._await_calls(arrays[0].context)
        named = dict(zip(self._names, arrays))
        self._check_devices(named)
        try:
            with self._lock:  # of the threads that call this block
                return self._train(named)
        except BudgetError:
            raise
        except (MemongerError, mx.MXNetError) as error:
            made = self._usual(*arrays)  # raises as without a plan if the call is at fault
            self._refuse(error)
            return made

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
        try:
            self._plan(arrays)
        except BudgetError:
            raise
        except MemongerError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._is_refused = True
        self._asked.refuse(error)

    def _plan(self, arrays: Mapping[str, Any]) -> None:
        parameters = self._parameters
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
        symbol = with_copied_outputs(self._symbol, shapes, types)
        known = symbol.list_arguments()
        wanted = {n for n in known if n in parameters and parameters[n].grad_req != "null"}
        on_gpu = arrays[self._names[0]].context.device_type == GPU
        request = read_request(
            {
                "net": symbol,
                "ctx": GPU if on_gpu else ANY,
                "shapes": shapes,
                "type_dict": types,
                "grad_req": {name: "write" if name in wanted else "null" for name in known},
                **self._asked.options,
            }
        )
        request = replace(request, own_gradients=True)  # ``Parameter.grad()``
        found = plan_of(solve(request, read_options(self._asked.options)))
        self._asked.plan, self._asked.refused = found, ""
        self._graph = PlannedGraph(found.symbol, self._names, parameters)
        self._saves_nothing = found.pool_bytes >= found.unplanned_bytes

    def _train(self, arrays: Mapping[str, Any]) -> Any:
        if self._graph is None:
            with mx.autograd.pause():
                self._plan(arrays)
        if self._saves_nothing:
            return self._usual(*arrays.values())
        assert self._graph is not None
        parameters, ctx = self._parameters, arrays[self._names[0]].context
        requests = {}
        for name in self._graph.symbol.list_arguments():
            if name in parameters:
                requests[name] = parameters[name].grad_req
            else:
                requests[name] = "write" if stub.on_tape(arrays[name]) else "null"
        inputs = [array for name, array in arrays.items() if name not in parameters]
        kinds = tuple((array.shape, np.dtype(array.dtype).name) for array in inputs)
        with mx.autograd.pause():
            pool = self._free_pool(ctx)
            runner = pool.runner((kinds, *requests.values()), self._graph, arrays, requests)
        made = runner.forward(arrays)
        pool.call = weakref.ref(runner.call) if runner.call is not None else None
        return made

    def _free_pool(self, ctx: Any) -> Pool:
        """Return memory on a device that no call uses; there are as many pools as calls alive."""
        if ctx not in self._pools:
            here = {each for p in self._parameters.values() for each in p.list_ctx()}
            for gone in self._pools.keys() - here:  # since reset_ctx
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
