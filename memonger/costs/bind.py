"""Bind a network with MXNet, without allocating memory, to read the pool that MXNet plans."""

from __future__ import annotations

import contextlib
import ctypes
import re
from dataclasses import replace
from typing import Iterable, Iterator, Mapping

from memonger.costs.usage import Usage
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.gradients import bind_inferred, makes_rows, unallocated
from memonger.graph.operators.recompute import GPU
from memonger.support.errors import MemongerError, mxnet_message
from memonger.support.mxnet import Settings, environment, mx, without_notices
from memonger.support.types import Context, Executor, Symbol


def bind(
    symbol: Symbol,
    graph: ForwardGraph,
    ctx: Context,
    wanted: Iterable[int] | None = None,
    request: str | Mapping[str, str] = "write",
) -> Executor:
    """Bind a symbol for training, with arrays that are never allocated.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network, with or without marks.
    graph : ForwardGraph
        The forward graph of the symbol.
    ctx : mx.Context
        The device.
    wanted : iterable of int, optional
        The arguments (nodes) that get a gradient; by default all of them.
    request : str or mapping
        ``'write'`` or ``'add'``, for all gradients or by name.

    Returns
    -------
    mx.executor.Executor

    Raises
    ------
    MemongerError
        If MXNet cannot bind it.
    """
    variables = (*graph.arguments, *sorted(graph.auxiliary))
    inputs = {graph.nodes[i].name: graph.tensors[i][0] for i in variables}
    names = [graph.nodes[i].name for i in (graph.arguments if wanted is None else wanted)]
    requests = dict.fromkeys(names, request) if isinstance(request, str) else request
    try:
        with environment(), without_notices():
            if graph.sparse or find_sparse_gradients(graph):
                wanted_requests = {name: requests[name] for name in names}
                return bind_inferred(symbol, ctx, inputs, wanted_requests)
            arrays = {name: unallocated(tensor, ctx) for name, tensor in inputs.items()}
            gradients = {name: unallocated(inputs[name], ctx) for name in names}
            return symbol.bind(ctx, arrays, gradients, request, arrays)
    except mx.MXNetError as error:
        why = mxnet_message(error)
        leaky = [n.name for n in graph.nodes if n.op == "LeakyReLU" and "act_type" not in n.attrs]
        if leaky and "_Map_base" in str(error):  # IsFusionCompatible needs the attribute
            why = (
                f"node {leaky[0]!r} (LeakyReLU) has no act_type, which pointwise fusion needs; "
                "write act_type='leaky', which is the default, or set MXNET_USE_FUSION=0"
            )
        raise MemongerError(f"MXNet cannot bind this network on {ctx}: {why}") from None


@contextlib.contextmanager
def trim_heap() -> Iterator[None]:
    """Return freed memory to the system at the end of the block, where the C library is glibc.

    By itself glibc returns only the end of its heap. A bind of MXNet takes small blocks, 10 KB a
    node, and later blocks that stay alive keep them from being returned.
    """
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def confirm_pool(
    memory: Usage, symbol: Symbol, ctx: Context, request: str | Mapping[str, str]
) -> Usage:
    """Bind a symbol whose pool was predicted, and return the memory with MXNet's own total."""
    with trim_heap():
        executor = bind(symbol, memory.graph, ctx, memory.training.wanted, request)
        total = read_planned_mb(executor)
    return replace(memory, bound=total)


def has_mkldnn(devices: Context | str) -> bool:
    """Return whether MKLDNN may compute in this process, on a device, or on 'any' or any 'gpu'."""
    return Settings().mkldnn and getattr(devices, "device_type", devices) != GPU


def find_sparse_gradients(graph: ForwardGraph) -> set[int]:
    """Return the arguments (nodes) whose gradients MXNet stores as rows (see `makes_rows`)."""
    sparse: set[int] = set()
    for node in graph.nodes:
        if makes_rows(node.op, node.attrs):
            sparse.update(a for a, _ in node.inputs[1:] if graph.nodes[a].is_variable)
    return sparse


def read_planned_mb(executor: Executor) -> int:
    """Return the pool that MXNet has planned, in whole MB (2**20 bytes), rounded down."""
    match = re.search(r"^Total (\d+) MB allocated$", executor.debug_str()[-200:], re.M)
    if match is None:
        raise MemongerError("this MXNet does not report its memory plan; use mxnet 1.9.1")
    return int(match.group(1))
