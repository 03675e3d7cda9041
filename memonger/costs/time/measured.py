"""The time of a training step on a device, operator by operator: predicted or measured.

Predicted: by a roofline (Williams et al. 2009, "Roofline: an insightful visual performance model").
An operator takes as long as its arithmetic or as moving what it reads and writes, whichever takes
longer, and the time of a call besides; and as many times longer as its class does (``classes``).

Measured: each distinct operator (its parameters, shapes and types) is bound alone, warmed, and run
some times, forward and with its gradient. What is measured is kept on disk, by device.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.time import classes
from memonger.costs.time.flops import forward_flops
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.gradients import alone
from memonger.graph.operators.tensors import Tensor
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph, training_graph
from memonger.support.cache import on_disk
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes

SIDE = 1024  # of the square matrices that are multiplied
LONG = 2**24  # elements of the array that is copied
ROUNDS = 7  # of which the least time counts
FACTORS = (0.5, 20.0)  # the least and the most that is believed
Run = Callable[[], Any]  # begins something and gives an array that is ready when it is done
#: How many times as long as by the roofline operators take, and their gradients.
Factor = Tuple[float, float]


class Rates(NamedTuple):
    """What a device can do."""

    flops: float  # floating point operations a second, in a large matrix product
    nbytes: float  # bytes read and written a second, in a large sum of two arrays
    call: float  # seconds that an operator takes that does nothing


class Times(NamedTuple):
    """Seconds that the rows of a training graph take."""

    forward: np.ndarray  # of each forward node; it takes as long again when it is recomputed
    gradient: np.ndarray  # of the gradient of each, as far as it is computed
    step: float  # of a training step without a plan


def times_of(training: TrainingGraph, ctx: Any, measure: bool = False) -> Times:
    """Predict the times of a training step, or ``measure`` those of operators that can run alone.

    What has to be measured for it first is.
    """
    factors = paces_of(training, ctx)
    times = predicted(training, rates_of(ctx), factors)
    return _measured(training, ctx, times, factors) if measure else times


def predicted(
    training: TrainingGraph, rates: Rates, factors: Mapping[int, Factor] | None = None
) -> Times:
    """Predict the times of a training step; ``factors`` are of forward nodes.

    The gradient of an operator has its FLOPs for each of the inputs that it has a gradient for, two
    at the most. What its nodes read and write is moved; what only changes a shape moves nothing.
    """
    t, n = training.tables, training.tables.forward
    rows = np.maximum(row_flops(training) / rates.flops, moved_bytes(training) / rates.nbytes)
    rows += rates.call
    longer = np.ones((n + 1, 2))  # the last is that of rows without an owner
    for i, factor in (factors or {}).items():
        longer[i] = factor
    rows *= np.concatenate([longer[:n, 0], longer[:n, 0], longer[training.owners, 1]])
    rows[views(training)] = 0
    run = np.unique(t.walk_row[t.walk_row >= 2 * n])
    owned = run[training.owners[run - 2 * n] >= 0]
    gradient = np.bincount(training.owners[owned - 2 * n], rows[owned], minlength=n)
    step = float(rows[t.first].sum() + rows[run].sum())
    return Times(rows[n : 2 * n].copy(), gradient, step)


def row_flops(training: TrainingGraph) -> np.ndarray:
    """Count the FLOPs of each row of a training graph."""
    n, owners = training.tables.forward, training.owners
    forward = forward_flops(training.graph).astype(np.float64)
    inputs = [min(2, max(1, len(facts.passes))) for facts in training.facts]
    rows = np.bincount(owners[owners >= 0], minlength=n)  # of each operator's gradient
    each = forward * inputs / np.maximum(rows, 1)
    return np.concatenate([forward, forward, np.where(owners >= 0, each[owners], 0)])


def moved_bytes(training: TrainingGraph) -> np.ndarray:
    """Count the bytes that each row of a training graph reads and writes; each tensor once."""
    t, rows = training.tables, np.arange(len(training.ops))
    sizes = (t.elements * t.itemsize).astype(np.float64)
    reader, maker = np.repeat(rows, np.diff(t.read_start)), np.repeat(rows, np.diff(t.output_start))
    pairs = np.stack([reader, t.output_start[t.read_row] + t.read_output], axis=1)
    reader, read = np.unique(pairs[~t.read_ignored], axis=0).T
    moved = np.bincount(reader, sizes[read], len(rows)) + np.bincount(maker, sizes, len(rows))
    moved[t.variable] = 0
    return moved


def views(training: TrainingGraph) -> np.ndarray:
    """Tell which rows take no time: variables, and what may hand on its input as it is."""
    t = training.tables
    # What makes a gradient adds it in place (src/executor/inplace_addto_detect_pass.cc).
    free = t.variable | (np.array(training.ops) == "_grad_add")
    row = np.repeat(np.arange(len(free)), np.diff(t.inplace_start))
    free[row[t.inplace_identity]] = True
    return free


def rates_of(ctx: Any) -> Rates:
    """Look up what a device can do: measured the first time, then read from disk."""
    with _kept("rates", ctx) as kept:
        if "rates" not in kept:
            kept["rates"] = _measure_rates(ctx)
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
    """Measure the least seconds of each, by turns, to compare them."""
    return np.min([[_seconds(run) for run in runs] for _ in range(ROUNDS)], axis=0).tolist()


def paces_of(training: TrainingGraph, ctx: Any) -> dict[int, Factor]:
    """Look up, or measure first, how much longer than by the roofline forward nodes take."""
    rates, factors = None, {}
    with _kept("kinds", ctx) as kept:
        for i in _timed(training):
            example = classes.example_of(training.graph, i)
            key = json.dumps(example)
            if example and key not in kept:
                # Not the rates that are kept: what else runs just then slows both down.
                rates = rates or _measure_rates(ctx)
                kept[key] = _measure_pace(example, rates, ctx)
            if example and kept[key]:
                factors[i] = tuple(kept[key])
    return factors


def _timed(training: TrainingGraph) -> list[int]:
    """List the forward nodes that take time."""
    return np.setdiff1d(training.tables.first, np.flatnonzero(views(training))).tolist()


def _measure_pace(example: classes.Example, rates: Rates, ctx: Any) -> list[float] | None:
    """Measure the factor of a class; None: its example cannot be run."""
    shapes = {f"x{k}": shape for k, shape in enumerate(example.shapes)}
    tensors = [Tensor(shape, "float32") for shape in example.shapes]
    try:
        training = training_graph(forward_graph(example.alone(), InputSpec(shapes, {})))
        seconds = _quickest_steps(classes.symbols_of(example), tensors, ctx)
    except (MemongerError, RuntimeError):  # MXNet's error is one
        return None
    forward, both = seconds[-1] - (seconds[0] if example.behind else 0.0)
    times = predicted(training, rates)
    expected = np.maximum([times.forward[-1], times.gradient[-1]], 1e-9)
    return np.clip([forward, both - forward] / expected, *FACTORS).tolist()


# ---------------------------------------------------------------- measured


def _measured(
    training: TrainingGraph, ctx: Any, base: Times, factors: Mapping[int, Factor]
) -> Times:
    """Measure the operators that can be bound alone; the others take what they are predicted to."""
    graph, blocks = training.graph, has_mkldnn(ctx)
    forward, gradient = base.forward.copy(), base.gradient.copy()
    with _kept("operators", ctx) as kept:
        for i in _timed(training):
            example = classes.example_of(graph, i) if i in factors else None
            # Alone they would get other layouts than in the network, and their constants gradients.
            if example and (blocks and example.behind or classes.ONE in example.shapes):
                continue
            node, tensors = graph.nodes[i], [graph.tensors[a][b] for a, b in graph.nodes[i].inputs]
            key = json.dumps([node.op, sorted(node.attrs.items()), tensors])
            if key not in kept:
                try:
                    symbol = load_nodes(*alone(node.op, node.attrs, len(tensors)))
                    kept[key] = _quickest_steps([symbol], tensors, ctx)[0].tolist()
                except RuntimeError:  # it cannot be bound alone; MXNet's error is one
                    kept[key] = None
            if kept[key]:
                forward[i], both = kept[key]
                gradient[i] = max(0.0, both - forward[i]) if gradient[i] else 0.0
    change = forward - base.forward + gradient - base.gradient
    return Times(forward, gradient, base.step + float(change.sum()))


def _quickest_steps(symbols: Sequence[Any], inputs: Sequence[Tensor], ctx: Any) -> np.ndarray:
    """Measure the seconds of each symbol, forward and forward with its gradients."""
    known = {f"x{k}": tensor for k, tensor in enumerate(inputs)}
    known["data"] = Tensor(classes.IMAGES, "float32")
    return np.reshape(_quickest(*(run for s in symbols for run in _runs(s, known, ctx))), (-1, 2))


def _runs(symbol: Any, known: Mapping[str, Tensor], ctx: Any) -> tuple[Run, Run]:
    """Make what runs a symbol forward, and forward with its gradients.

    Its inputs are random numbers of both signs, for kernels that branch have it easy where all go
    one way; indices are 0.
    """
    inputs = {n: known[n] for n in symbol.list_inputs() if n in known}
    indices = {n for n, tensor in inputs.items() if not tensor.dtype.startswith("float")}
    names = symbol.list_arguments()
    trained = [name for name in names if name not in indices]
    executor = symbol.simple_bind(
        ctx,
        {n: "write" if n in trained else "null" for n in names},
        {n: tensor.dtype for n, tensor in inputs.items()},
        **{n: tensor.shape for n, tensor in inputs.items()},
    )
    for name, array in (*executor.arg_dict.items(), *executor.aux_dict.items()):
        if name not in indices:
            values = mx.nd.random.uniform(-0.9, 0.9, array.shape, ctx=ctx)
            values.astype(array.dtype).copyto(array)
    heads = [mx.nd.ones_like(output) for output in executor.outputs]

    def forward() -> Any:
        return executor.forward(is_train=True)[0]

    def both() -> Any:
        executor.forward(is_train=True)
        executor.backward(heads)
        return executor.grad_dict[trained[-1]]

    whole = both if trained else forward
    whole().wait_to_read()
    return forward, whole


# ---------------------------------------------------------------- on disk


def _kept(what: str, ctx: Any) -> ContextManager[dict[str, Any]]:
    """Measurements of a device, as a dict; what is added to it is written to disk."""
    return on_disk(what, {"device": device_name(ctx), "mxnet": mx.__version__})


@functools.lru_cache(maxsize=None)
def device_name(ctx: Any) -> str:
    """Name the hardware behind a device, and what bears on its speed."""
    if ctx.device_type == "gpu":
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={ctx.device_id}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(asked, timeout=10).decode().strip()
        return f"a GPU of {mx.context.gpu_memory_info(ctx.device_id)[1]} bytes"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        said = Path("/proc/cpuinfo").read_text()
        name = re.findall(r"^model name\s*: *(.*)$", said, re.M)[0]
    return f"{name}, {os.environ.get('OMP_NUM_THREADS') or os.cpu_count()} threads"
