"""The time of a training step, operator by operator: predicted from FLOPs and bytes, or measured.

Predicted: an operator takes as long as its arithmetic or as moving what it reads and writes,
whichever takes longer, and the time of a call besides (a roofline; Williams et al. 2009, "Roofline:
an insightful visual performance model"). The three rates are measured once on a device, and so is
how much longer the kinds of operators take (``kinds``).

Measured: each distinct operator (its parameters, shapes and types) is bound alone, warmed, and run
some times, forward and with its gradient; the median counts.

Both are kept on disk, by device, MXNet's version, and what else bears on them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, Mapping, NamedTuple

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.time import classes as kinds
from memonger.costs.time.classes import Example
from memonger.costs.time.flops import forward_flops
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.gradients import alone, load_nodes
from memonger.graph.operators.tensors import Tensor
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph, training_graph
from memonger.support.cache import folder, on_disk
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx

log = logging.getLogger("memonger")

SIDE = 1024  # of the square matrices that are multiplied
LONG = 2**24  # elements of the array that is copied
TIMES = 5  # runs, of which the median counts
QUICKER = 0.98  # a time that is shorter by more than the clock's noise
PACES = (0.5, 20.0)  # the least and the most that is believed
MATTERS = 1e-4  # of the FLOPs and bytes of the forward pass: an operator with less is predicted


Run = Callable[[], Any]  # begins something and gives an array that is ready when it is done


class Rates(NamedTuple):
    """What a device can do.

    Attributes
    ----------
    flops : float
        Floating point operations a second, in a large matrix product.
    nbytes : float
        Bytes read and written a second, in a large sum of two arrays.
    call : float
        Seconds that an operator takes that does nothing.
    """

    flops: float
    nbytes: float
    call: float


class Pace(NamedTuple):
    """How many times as long as by the roofline the operators of a kind take.

    Attributes
    ----------
    forward, gradient : float
    """

    forward: float
    gradient: float


class Times(NamedTuple):
    """Seconds that the rows of a training graph take.

    Attributes
    ----------
    forward : np.ndarray, n
        Of each forward node; it takes as long again when it is recomputed.
    gradient : np.ndarray, n
        Of the gradient of each, as far as it is computed.
    step : float
        Of a training step without a plan.
    """

    forward: np.ndarray
    gradient: np.ndarray
    step: float


def times_of(training: TrainingGraph, ctx: Any, measure: bool = False) -> Times:
    """The times of a training step on a device; what has to be measured first is."""
    if measure:
        return measured(training, ctx)
    return predicted(training, rates_of(ctx), paces_of(training, ctx))


# ---------------------------------------------------------------- predicted


def predicted(
    training: TrainingGraph, rates: Rates, paces: Mapping[int, Pace] | None = None
) -> Times:
    """The times of a training step by a roofline.

    The gradient of an operator has its FLOPs for each of the inputs that it has a gradient for, two
    at the most. What its nodes read and write is moved; what only changes a shape moves nothing.

    Parameters
    ----------
    training : TrainingGraph
    rates : Rates
    paces : dict of Pace, optional
        Of forward nodes: how much longer they take.
    """
    return _times(training, _rows(training, rates, paces or {}))


def _rows(training: TrainingGraph, rates: Rates, paces: Mapping[int, Pace]) -> np.ndarray:
    """Seconds of each row of a training graph."""
    n = training.tables.forward
    seconds = np.maximum(row_flops(training) / rates.flops, moved_bytes(training) / rates.nbytes)
    seconds += rates.call
    forward, gradient = np.ones(n), np.ones(n + 1)  # the last is that of rows without an owner
    for i, pace in paces.items():
        forward[i], gradient[i] = pace
    seconds[:n] *= forward
    seconds[n : 2 * n] *= forward
    seconds[2 * n :] *= gradient[training.owners]
    return np.where(_views(training), 0.0, seconds)


def row_flops(training: TrainingGraph) -> np.ndarray:
    """FLOPs of each row of a training graph."""
    n = training.tables.forward
    forward = forward_flops(training.graph).astype(np.float64)
    work = np.zeros(len(training.ops))
    work[:n] = work[n : 2 * n] = forward
    owners = training.owners
    owned = np.flatnonzero(owners >= 0)
    rows = np.bincount(owners[owned], minlength=n)  # of each operator's gradient
    gradients = np.array([min(2, max(1, len(f.passes))) for f in training.facts])
    of = owners[owned]
    work[2 * n + owned] = forward[of] * gradients[of] / rows[of]
    return work


def moved_bytes(training: TrainingGraph) -> np.ndarray:
    """Bytes that each row of a training graph reads and writes; each tensor once."""
    t = training.tables
    rows = len(training.ops)
    sizes = (t.elements * t.itemsize).astype(np.float64)
    reader = np.repeat(np.arange(rows), np.diff(t.read_start))
    read = t.output_start[t.read_row].astype(np.int64) + t.read_output
    counted = ~t.read_ignored
    pairs = np.unique(np.stack([reader[counted], read[counted]], axis=1), axis=0)
    moved = np.bincount(pairs[:, 0], sizes[pairs[:, 1]], minlength=rows)
    moved += np.bincount(np.repeat(np.arange(rows), np.diff(t.output_start)), sizes, minlength=rows)
    moved[t.variable] = 0
    return moved


def _views(training: TrainingGraph) -> np.ndarray:
    """The rows that take no time: variables, and what may hand on its input as it is.

    And ``_grad_add``: the gradient before it is added in place
    (``src/executor/inplace_addto_detect_pass.cc``).
    """
    t = training.tables
    free = t.variable | (np.array(training.ops) == "_grad_add")
    row = np.repeat(np.arange(len(free)), np.diff(t.inplace_start))
    free[row[t.inplace_identity]] = True
    return free


def _times(training: TrainingGraph, rows: np.ndarray) -> Times:
    t = training.tables
    n = t.forward
    run = np.unique(t.walk_row[t.walk_row >= 2 * n])
    owned = run[training.owners[run - 2 * n] >= 0]
    gradient = np.bincount(training.owners[owned - 2 * n], rows[owned], minlength=n)
    step = float(rows[t.first].sum() + rows[run].sum())
    return Times(rows[n : 2 * n].copy(), gradient, step)


# ---------------------------------------------------------------- measured


def rates_of(ctx: Any) -> Rates:
    """What a device can do: measured the first time, then read from disk."""
    with _kept("rates", ctx) as kept:
        if "rates" not in kept:
            kept["rates"] = list(_measure_rates(ctx))
            log.info("measured %s: %.3g FLOP/s, %.3g B/s, %.3g s a call", ctx, *kept["rates"])
        return Rates(*kept["rates"])


def _measure_rates(ctx: Any) -> Rates:
    square = mx.nd.random.uniform(shape=(SIDE, SIDE), ctx=ctx)
    product = mx.nd.zeros((SIDE, SIDE), ctx)
    array, sums = (mx.nd.zeros((LONG,), ctx) for _ in range(2))
    one = mx.nd.zeros((1,), ctx)
    calls = 100
    x = mx.sym.Variable("x")
    for _ in range(calls):
        x = mx.sym.elemwise_add(x, x)
    chain = x.bind(ctx, {"x": one})

    product_time, sum_time, call_time = _quickest(
        lambda: mx.nd.dot(square, square, out=product),
        lambda: mx.nd.elemwise_add(array, array, out=sums),
        lambda: chain.forward()[0],
    )
    return Rates(2 * SIDE**3 / product_time, 2 * 4 * LONG / sum_time, call_time / calls)


def _seconds(run: Run) -> float:
    """Seconds that it takes until its result is there, warmed.

    Of one thread the processor's time counts, which other processes do not lengthen.
    """
    on_cpu = run().context.device_type.startswith("cpu")
    one_thread = on_cpu and os.environ.get("OMP_NUM_THREADS") == "1"
    now = time.process_time if one_thread else time.perf_counter
    mx.nd.waitall()
    start = now()
    run().wait_to_read()
    return now() - start


def _median(run: Run) -> float:
    """The median of several times."""
    return float(np.median([_seconds(run) for _ in range(TIMES)]))


def _quickest(*runs: Run) -> list[float]:
    """The seconds of what is to be compared, whatever else the device does just then.

    They take turns, until so many times in a row none is shorter.
    """
    best, since = np.array([_seconds(run) for run in runs]), 0
    while since < TIMES:
        seconds = np.array([_seconds(run) for run in runs])
        since = 0 if (seconds < QUICKER * best).any() else since + 1
        best = np.minimum(best, seconds)
    return best.tolist()


_paces: dict[tuple[Path, str, Example], Pace | None] = {}


def paces_of(training: TrainingGraph, ctx: Any) -> dict[int, Pace]:
    """How much longer than by the roofline the forward nodes of a network take.

    Kinds that were not met before are measured; nodes of no known kind are left out.
    """
    graph, found = training.graph, {}
    device, where = device_name(ctx), folder()
    examples = {i: kinds.example_of(graph, i) for i in graph.operators}
    new = {e for e in examples.values() if e is not None and (where, device, e) not in _paces}
    if new:
        with _kept("kinds", ctx) as kept:
            rates = None
            for example in sorted(new):
                key = json.dumps(example)
                if key not in kept:
                    # Not the rates that are kept: what else runs just then slows both down.
                    rates = rates or _measure_rates(ctx)
                    kept[key] = _measure_pace(example, rates, ctx)
                _paces[where, device, example] = None if kept[key] is None else Pace(*kept[key])
    for i, kind in examples.items():
        pace = None if kind is None else _paces[where, device, kind]
        if pace is not None:
            found[i] = pace
    return found


def _measure_pace(example: Example, rates: Rates, ctx: Any) -> Pace | None:
    """The pace of a kind; None: its example cannot be run."""
    try:
        graph = kinds.graph_of(example)
        training = training_graph(graph)
        symbols = kinds.symbols_of(example)
    except (MemongerError, mx.MXNetError):
        return None
    (i,) = graph.operators
    by_roofline = predicted(training, rates)
    expected = np.array([by_roofline.forward[i], by_roofline.gradient[i]])
    if not expected[0]:
        return None
    runs: list[Run] = []
    for symbol in symbols:
        shapes = {"x%d" % k: shape for k, shape in enumerate(example.shapes)}
        names = symbol.list_inputs()
        known = {n: s for n, s in [("data", kinds.IMAGES), *shapes.items()] if n in names}
        whole = forward_graph(symbol, InputSpec(known, {}))
        inputs = {
            node.name: whole.tensors[v][0] for v, node in enumerate(whole.nodes) if node.is_variable
        }
        # Of both signs, for kernels that branch have it easy where all go one way.
        found = _runs(symbol, inputs, ctx, -0.9)
        if found is None:
            return None
        runs += found
    seconds = np.reshape(_quickest(*runs), (-1, 2))
    forward, both = seconds[-1] - (seconds[0] if example.behind else 0.0)
    taken = np.array([forward, both - forward])
    forward, gradient = np.clip(taken / np.maximum(expected, 1e-9), *PACES)
    return Pace(float(forward), float(gradient) if expected[1] else 1.0)


def measured(training: TrainingGraph, ctx: Any) -> Times:
    """The times of a training step, its operators measured where they matter.

    What cannot be bound alone, and what is too small to matter, is predicted.
    """
    rates, paces = rates_of(ctx), paces_of(training, ctx)
    base = predicted(training, rates, paces)
    graph, n = training.graph, training.tables.forward
    work, moved = row_flops(training)[:n], moved_bytes(training)[:n]
    matters = (work > MATTERS * work.sum()) | (moved > MATTERS * moved.sum())
    matters &= ~_views(training)[:n]
    blocks = has_mkldnn(ctx)
    for i in np.flatnonzero(matters):
        kind = kinds.example_of(graph, i)
        if kind is not None and i in paces:
            # Alone they would get other layouts than in the network, and their constants gradients.
            matters[i] = not (blocks and kind.behind or kinds.ONE in kind.shapes)
    forward, gradient, change = base.forward.copy(), base.gradient.copy(), 0.0
    once = set(training.tables.first.tolist())
    with _kept("operators", ctx) as kept:
        for i in graph.operators:
            if not matters[i] or i not in once:
                continue
            key = _signature(graph, i)
            if key not in kept:
                kept[key] = _measure(graph, i, ctx)
            if kept[key] is None:
                continue
            alone_forward, alone_both = kept[key]
            alone_gradient = max(0.0, alone_both - alone_forward) if gradient[i] else 0.0
            change += alone_forward + alone_gradient - forward[i] - gradient[i]
            forward[i], gradient[i] = alone_forward, alone_gradient
    return Times(forward, gradient, base.step + change)


def _signature(graph: ForwardGraph, i: int) -> str:
    node = graph.nodes[i]
    tensors = [graph.tensors[a][b] for a, b in node.inputs]
    return json.dumps([node.op, sorted(node.attrs.items()), tensors])


def _measure(graph: ForwardGraph, i: int, ctx: Any) -> tuple[float, float] | None:
    """Seconds of an operator alone: forward, and forward with its gradient; None: it cannot be."""
    node = graph.nodes[i]
    tensors = [graph.tensors[a][b] for a, b in node.inputs]
    try:
        nodes, shown = alone(node.op, node.attrs, len(tensors), False)
        symbol = load_nodes(nodes, [[len(tensors), k, 0] for k in range(shown)])
    except mx.MXNetError:
        return None
    runs = _runs(symbol, {"x%d" % k: tensor for k, tensor in enumerate(tensors)}, ctx)
    return None if runs is None else (_median(runs[0]), _median(runs[1]))


def _runs(
    symbol: Any, inputs: dict[str, Tensor], ctx: Any, least: float = 0.1
) -> tuple[Run, Run] | None:
    """What runs a symbol forward, and forward with its gradients; None: it cannot be run.

    Its inputs are random numbers from ``least`` to 0.9; indices are 0.
    """
    try:
        arrays = {name: _values(tensor, ctx, least) for name, tensor in inputs.items()}
        names, states = symbol.list_arguments(), symbol.list_auxiliary_states()
        floating = [n for n in names if arrays[n].dtype.__name__.startswith("float")]
        gradients = {n: mx.nd.zeros_like(arrays[n]) for n in floating}
        executor = symbol.bind(
            ctx,
            {n: arrays[n] for n in names},
            gradients,
            {n: "write" if n in gradients else "null" for n in names},
            {n: arrays[n] for n in states},
        )
        heads = [mx.nd.ones_like(output) for output in executor.outputs]

        def forward() -> Any:
            return executor.forward(is_train=True)[0]

        def both() -> Any:
            executor.forward(is_train=True)
            executor.backward(heads)
            return gradients[floating[-1]]

        whole = both if floating else forward
        whole().wait_to_read()
        return forward, whole
    except mx.MXNetError:
        return None


def _values(tensor: Tensor, ctx: Any, least: float) -> Any:
    if not tensor.dtype.startswith("float"):
        return mx.nd.zeros(tensor.shape, ctx, tensor.dtype)
    return mx.nd.random.uniform(least, 0.9, tensor.shape, ctx=ctx).astype(tensor.dtype)


# ---------------------------------------------------------------- on disk


def _kept(what: str, ctx: Any) -> ContextManager[dict[str, Any]]:
    """Measurements of a device, as a dict; what is added to it is written to disk."""
    return on_disk(what, {"device": device_name(ctx), "mxnet": mx.__version__})


@functools.lru_cache(maxsize=None)
def device_name(ctx: Any) -> str:
    """A name for the hardware behind a device, and what bears on its speed."""
    if ctx.device_type == "gpu":
        return _gpu_name(ctx.device_id)
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
    return f"{_cpu_name()}, {threads} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_name(number: int) -> str:
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=%d" % number]
    try:
        found = subprocess.run(asked, stdout=subprocess.PIPE, timeout=10, check=True)
        return found.stdout.decode().strip()
    except (OSError, subprocess.SubprocessError):
        return "a GPU of %d bytes" % mx.context.gpu_memory_info(number)[1]
