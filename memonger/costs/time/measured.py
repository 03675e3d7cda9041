"""The time of a training step on a device, operator by operator: predicted or measured.

Predicted: by a roofline (``roofline``). Its three rates are measured once on a device, and so is
how much longer the classes of operators take (``classes``).

Measured: each distinct operator (its parameters, shapes and types) is bound alone, warmed, and run
some times, forward and with its gradient; the median counts.

Both are kept on disk, by device, MXNet's version, and what else bears on them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import re
import subprocess
import time
from itertools import chain
from pathlib import Path
from typing import Any, Callable, ContextManager, Mapping

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.time import classes
from memonger.costs.time.classes import Example
from memonger.costs.time.roofline import (
    EfficiencyFactor,
    Rates,
    Times,
    moved_bytes,
    predicted,
    row_flops,
    views,
)
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.gradients import alone
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import TrainingGraph, training_graph
from memonger.support.cache import folder, on_disk
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes

log = logging.getLogger("memonger")

SIDE = 1024  # of the square matrices that are multiplied
LONG = 2**24  # elements of the array that is copied
TIMES = 5  # runs, of which the median counts
QUICKER = 0.98  # a time that is shorter by more than the clock's noise
FACTORS = (0.5, 20.0)  # the least and the most that is believed
MATTERS = 1e-4  # of the FLOPs and bytes of the forward pass: an operator with less is predicted


Run = Callable[[], Any]  # begins something and gives an array that is ready when it is done


def times_of(training: TrainingGraph, ctx: Any, measure: bool = False) -> Times:
    """Find the times of a training step on a device; what has to be measured first is."""
    if measure:
        return measured(training, ctx)
    return predicted(training, rates_of(ctx), paces_of(training, ctx))


# ---------------------------------------------------------------- predicted


def rates_of(ctx: Any) -> Rates:
    """Look up what a device can do: measured the first time, then read from disk."""
    with _kept("rates", ctx) as kept:
        if "rates" not in kept:
            kept["rates"] = list(_measure_rates(ctx))
            log.info("measured %s: %.3g FLOP/s, %.3g B/s, %.3g s a call", ctx, *kept["rates"])
        return Rates(*kept["rates"])


def _measure_rates(ctx: Any) -> Rates:
    square = mx.nd.random.uniform(shape=(SIDE, SIDE), ctx=ctx)
    product = mx.nd.zeros((SIDE, SIDE), ctx)
    array, sums = (mx.nd.zeros((LONG,), ctx) for _ in range(2))
    calls, x = 100, mx.sym.Variable("x")
    for _ in range(calls):
        x = mx.sym.elemwise_add(x, x)
    chain = x.bind(ctx, {"x": mx.nd.zeros((1,), ctx)})
    product_time, sum_time, call_time = _quickest(
        lambda: mx.nd.dot(square, square, out=product),
        lambda: mx.nd.elemwise_add(array, array, out=sums),
        lambda: chain.forward()[0],
    )
    return Rates(2 * SIDE**3 / product_time, 2 * 4 * LONG / sum_time, call_time / calls)


def _seconds(run: Run) -> float:
    """Measure the seconds until its result is there, warmed."""
    # Of one thread the processor's time counts, which other processes do not lengthen.
    on_cpu = run().context.device_type.startswith("cpu")
    one_thread = on_cpu and os.environ.get("OMP_NUM_THREADS") == "1"
    now = time.process_time if one_thread else time.perf_counter
    mx.nd.waitall()
    start = now()
    run().wait_to_read()
    return now() - start


def _quickest(*runs: Run) -> list[float]:
    """Measure seconds by turns until none was shorter for some time, to compare them."""
    best, since = np.array([_seconds(run) for run in runs]), 0
    while since < TIMES:
        seconds = np.array([_seconds(run) for run in runs])
        since = 0 if (seconds < QUICKER * best).any() else since + 1
        best = np.minimum(best, seconds)
    return best.tolist()


_paces: dict[tuple[Path, str, Example], EfficiencyFactor | None] = {}


def paces_of(training: TrainingGraph, ctx: Any) -> dict[int, EfficiencyFactor]:
    """Look up, or measure first, how much longer than by the roofline forward nodes take."""
    where = folder(), device_name(ctx)
    examples = {i: classes.example_of(training.graph, i) for i in training.graph.operators}
    new = {e for e in examples.values() if e is not None and (*where, e) not in _paces}
    if new:
        with _kept("kinds", ctx) as kept:
            rates = None
            for example in sorted(new):
                key = json.dumps(example)
                if key not in kept:
                    # Not the rates that are kept: what else runs just then slows both down.
                    rates = rates or _measure_rates(ctx)
                    kept[key] = _measure_pace(example, rates, ctx)
                found = kept[key]
                _paces[(*where, example)] = None if found is None else EfficiencyFactor(*found)
    factors = {i: _paces[(*where, e)] for i, e in examples.items() if e is not None}
    return {i: factor for i, factor in factors.items() if factor is not None}


def _measure_pace(example: Example, rates: Rates, ctx: Any) -> EfficiencyFactor | None:
    """Measure the factor of a class; None: its example cannot be run."""
    try:
        graph = classes.graph_of(example)
        training = training_graph(graph)
        symbols = classes.symbols_of(example)
    except (MemongerError, mx.MXNetError):
        return None
    (i,) = graph.operators
    times = predicted(training, rates)
    expected = np.array([times.forward[i], times.gradient[i]])
    if not expected[0]:
        return None
    known = {f"x{k}": Tensor(shape, "float32") for k, shape in enumerate(example.shapes)}
    known["data"] = Tensor(classes.IMAGES, "float32")
    # Of both signs, for kernels that branch have it easy where all go one way.
    runs = [_runs(symbol, known, ctx, -0.9) for symbol in symbols]
    if None in runs:
        return None
    seconds = np.reshape(_quickest(*chain(*filter(None, runs))), (-1, 2))
    forward, both = seconds[-1] - (seconds[0] if example.behind else 0.0)
    taken = np.array([forward, both - forward])
    forward, gradient = np.clip(taken / np.maximum(expected, 1e-9), *FACTORS)
    return EfficiencyFactor(float(forward), float(gradient) if expected[1] else 1.0)


# ---------------------------------------------------------------- measured


def measured(training: TrainingGraph, ctx: Any) -> Times:
    """Measure the operators that matter and can be bound alone, and predict the others."""
    factors = paces_of(training, ctx)
    base = predicted(training, rates_of(ctx), factors)
    graph, n = training.graph, training.tables.forward
    work, moved = row_flops(training)[:n], moved_bytes(training)[:n]
    matters = (work > MATTERS * work.sum()) | (moved > MATTERS * moved.sum())
    matters &= ~views(training)[:n] & np.isin(np.arange(n), training.tables.first)
    blocks = has_mkldnn(ctx)
    forward, gradient, change = base.forward.copy(), base.gradient.copy(), 0.0
    with _kept("operators", ctx) as kept:
        for i in filter(matters.__getitem__, graph.operators):
            example = classes.example_of(graph, i) if i in factors else None
            # Alone they would get other layouts than in the network, and their constants gradients.
            if example and (blocks and example.behind or classes.ONE in example.shapes):
                continue
            node, tensors = graph.nodes[i], [graph.tensors[a][b] for a, b in graph.nodes[i].inputs]
            key = json.dumps([node.op, sorted(node.attrs.items()), tensors])
            if key not in kept:
                kept[key] = _measure(graph, i, ctx)
            if kept[key] is not None:
                own_forward, both = kept[key]
                own_gradient = max(0.0, both - own_forward) if gradient[i] else 0.0
                change += own_forward + own_gradient - forward[i] - gradient[i]
                forward[i], gradient[i] = own_forward, own_gradient
    return Times(forward, gradient, base.step + change)


def _measure(graph: ForwardGraph, i: int, ctx: Any) -> tuple[float, float] | None:
    """Seconds of an operator alone: forward, and forward with its gradient; None: it cannot be."""
    node = graph.nodes[i]
    tensors = [graph.tensors[a][b] for a, b in node.inputs]
    try:
        symbol = load_nodes(*alone(node.op, node.attrs, len(tensors)))
    except mx.MXNetError:
        return None
    runs = _runs(symbol, {f"x{k}": tensor for k, tensor in enumerate(tensors)}, ctx)
    if runs is None:
        return None
    forward, both = (float(np.median([_seconds(run) for _ in range(TIMES)])) for run in runs)
    return forward, both


def _runs(
    symbol: Any, known: Mapping[str, Tensor], ctx: Any, least: float = 0.1
) -> tuple[Run, Run] | None:
    """Make what runs a symbol forward, and forward with its gradients; None: it cannot be run.

    Its inputs, of which some are known, are random numbers from ``least`` to 0.9; indices are 0.
    """
    inputs = {n: known[n] for n in symbol.list_inputs() if n in known}
    indices = {n for n, tensor in inputs.items() if not tensor.dtype.startswith("float")}
    names = symbol.list_arguments()
    try:
        executor = symbol.simple_bind(
            ctx,
            {n: "null" if n in indices else "write" for n in names},
            {n: tensor.dtype for n, tensor in inputs.items()},
            **{n: tensor.shape for n, tensor in inputs.items()},
        )
        for name, array in (*executor.arg_dict.items(), *executor.aux_dict.items()):
            if name not in indices:
                values = mx.nd.random.uniform(least, 0.9, array.shape, ctx=ctx)
                values.astype(array.dtype).copyto(array)
        heads = [mx.nd.ones_like(output) for output in executor.outputs]
        trained = [name for name in names if name not in indices]

        def forward() -> Any:
            return executor.forward(is_train=True)[0]

        def both() -> Any:
            executor.forward(is_train=True)
            executor.backward(heads)
            return executor.grad_dict[trained[-1]]

        whole = both if trained else forward
        whole().wait_to_read()
        return forward, whole
    except RuntimeError:  # MXNet's error is one
        return None


# ---------------------------------------------------------------- on disk


def _kept(what: str, ctx: Any) -> ContextManager[dict[str, Any]]:
    """Measurements of a device, as a dict; what is added to it is written to disk."""
    return on_disk(what, {"device": device_name(ctx), "mxnet": mx.__version__})


@functools.lru_cache(maxsize=None)
def device_name(ctx: Any) -> str:
    """Name the hardware behind a device, and what bears on its speed."""
    if ctx.device_type == "gpu":
        return _gpu_name(ctx.device_id)
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
    return f"{_cpu_name()}, {threads} threads"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found is not None:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _gpu_name(number: int) -> str:
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={number}"]
    try:
        return subprocess.check_output(asked, timeout=10).decode().strip()
    except (OSError, subprocess.SubprocessError):
        return f"a GPU of {mx.context.gpu_memory_info(number)[1]} bytes"
