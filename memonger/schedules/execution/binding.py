"""MXNet's own executors for a network with a schedule: bound, run in parts and monitored."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.execution.write import Lowered
from memonger.schedules.training_step import BIND
from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import environment, mx, without_line

_BACKEND = "MXNET_SUBGRAPH_BACKEND"
#: What MXNet logs of it at each bind (the constructor of ``GraphExecutor``).
_DETECTED = b"MXNET_SUBGRAPH_BACKEND=NONE is detected"

#: ``GraphExecutor::RunOps(bool is_train, size_t first, size_t end)``: the nodes first to end - 1 of
#: the graph run (``src/executor/graph_executor.cc``). ``MXExecutorForward`` calls it for all nodes;
#: there is no C function for some of them, but the libraries of 1.9.1 export the method itself.
_RUN_OPS = "_ZN5mxnet4exec13GraphExecutor6RunOpsEbmm"


def bind_step(step: Lowered, ctx: Any, args: Arrays, aux: Arrays, shared_exec: Any) -> Any:
    """The executor of a training step, with these arrays (there may be others among them).

    Raises
    ------
    MemongerError
        If MXNet cannot bind it, or has made something else of it.
    """
    symbol = step.symbol
    args = {name: args[name] for name in symbol.list_arguments()}
    aux = {name: aux[name] for name in symbol.list_auxiliary_states()}
    settings = dict(BIND)
    if ctx.device_type == "gpu" and _BACKEND not in os.environ:
        # It is MKLDNN if it is not set, which is for the CPU; MXNet logs that there is none.
        del settings[_BACKEND]
    try:
        with environment(**settings), without_line(_DETECTED):
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


def monitored(callback: Any, symbol: Any, step: Lowered, inputs: bool) -> Any:
    """Make a monitor's callback that is told of each result once, by MXNet's name.

    It is not told of what is computed again, nor of names of ours. What MXNet tells has the name of
    the node, '_' and that of the output or input. Before an input that is a variable it tells the
    variable, by its own name (``GraphExecutor::ExecuteMonInputCallback``).
    """
    ours = {*step.scratch, *step.totals.values()}
    variables = {*symbol.list_inputs(), *ours} if inputs else set()
    held: list[Any] = []

    def name_of(text: str) -> bytes | None:
        for k, letter in enumerate(text):
            if letter == "_" and text[:k] in step.called:
                name = step.called[text[:k]]
                return None if name is None else (name + text[k:]).encode()
        return text.encode()

    def told(name: Any, array: Any, _: Any) -> None:
        text = mx.base.py_str(name)
        if not held and text in variables:
            held.append((name, array))
            return
        found = [*held, (name_of(text), array)]
        held.clear()
        for said, value in found:
            if found[-1][0] is None:  # what is handed to a callback is its own to free
                mx.nd.NDArray(ctypes.cast(value, mx.base.NDArrayHandle))
            else:
                callback(said, value)

    return told


def _check_size(executor: Any, step: Lowered) -> None:
    """Make sure that the executor has the nodes that `run` will ask for."""
    if not hasattr(mx.base._LIB, _RUN_OPS):
        raise MemongerError("this build of MXNet cannot run a schedule: it exports no RunOps")
    found = executor.debug_str().count("\nOp:")
    if found != step.operators:
        raise MemongerError(
            f"MXNet has made {found} operators of the {step.operators} of a training step; please "
            "report this network"
        )
