"""MXNet's own executors for a network with a schedule: bound as they must be, and run in parts."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Mapping

from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.execution.lowered import Step
from memonger.schedules.training_step import BIND
from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import environment, mx, without_line

#: What MXNet logs of it at each bind (the constructor of ``GraphExecutor``).
_DETECTED = b"MXNET_SUBGRAPH_BACKEND=NONE is detected"

#: ``GraphExecutor::RunOps(bool is_train, size_t first, size_t end)``: the nodes first to end - 1 of
#: the graph run (``src/executor/graph_executor.cc``). ``MXExecutorForward`` calls it for all nodes;
#: there is no C function for some of them, but the libraries of 1.9.1 export the method itself.
_RUN_OPS = "_ZN5mxnet4exec13GraphExecutor6RunOpsEbmm"


def bind_step(step: Step, ctx: Any, args: Arrays, aux: Arrays, shared_exec: Any) -> Any:
    """The executor of a training step, with these arrays (there may be others among them).

    Raises
    ------
    MemongerError
        If MXNet cannot bind it, or has made something else of it.
    """
    symbol = step.written.symbol
    args = {name: args[name] for name in symbol.list_arguments()}
    aux = {name: aux[name] for name in symbol.list_auxiliary_states()}
    try:
        with environment(**_settings(BIND, ctx)), without_line(_DETECTED):
            made = symbol.bind(ctx, args, None, "null", aux, shared_exec=shared_exec)
    except mx.MXNetError as error:
        raise MemongerError(
            f"MXNet cannot bind the schedule of this network on {ctx}: {said_by_mxnet(error)}"
        ) from None
    _check_size(made, step)
    return made


def run(executor: Any, first: int, end: int, is_train: bool = True) -> None:
    """Run some of the nodes, in training or in inference.

    Operators run in MXNet's engine, and their errors are told when something waits for them. Only
    the engine for debugging runs them at once, and no C function is there to catch what they throw.
    """
    function = getattr(mx.base._LIB, _RUN_OPS)
    function.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = None
    function(executor.handle, is_train, first, end)


def _settings(usual: Mapping[str, str], ctx: Any) -> Mapping[str, str]:
    """Without the subgraph backend where there is none anyhow, for MXNet logs that it has none."""
    backend = "MXNET_SUBGRAPH_BACKEND"  # MKLDNN if it is not set, which is for the CPU
    silent = ctx.device_type == "gpu" and backend not in os.environ
    return {name: value for name, value in usual.items() if not (silent and name == backend)}


def _check_size(executor: Any, step: Step) -> None:
    """Make sure that the executor has the nodes that `run` will ask for."""
    if not hasattr(mx.base._LIB, _RUN_OPS):
        raise MemongerError("this build of MXNet cannot run a schedule: it exports no RunOps")
    found = executor.debug_str().count("\nOp:")
    if found != step.operators:
        raise MemongerError(
            "MXNet has made %d operators of the %d of a training step; please report this network"
            % (found, step.operators)
        )
