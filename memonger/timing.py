"""The time of a training step, operator by operator: predicted from FLOPs and bytes, or measured.

Predicted: an operator takes as long as its arithmetic or as moving what it reads and writes,
whichever takes longer, and the time of a call besides (a roofline; Williams et al. 2009, "Roofline:
an insightful visual performance model"). The three rates are measured once on a device.

Measured: each distinct operator (its parameters, shapes and types) is bound alone, warmed, and run
some times, forward and with its gradient; the median counts.

Both are kept on disk, by device, MXNet's version, and what else bears on them.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import numpy as np

from memonger._mxnet import mx
from memonger.flops import forward_flops
from memonger.forward import ForwardGraph, Tensor
from memonger.gradients import alone, load_nodes
from memonger.training import TrainingGraph

log = logging.getLogger("memonger")

SIDE = 1024  # of the square matrices that are multiplied
LONG = 2**24  # elements of the array that is copied
TIMES = 5  # runs, of which the median counts
MATTERS = 1e-4  # of the FLOPs and bytes of the forward pass: an operator with less is predicted


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


class Times(NamedTuple):
    """Seconds that the rows of a training graph take.

    Attributes
    ----------
    forward : np.ndarray, n
        Of each forward node; it takes as long again when it is recomputed.
    step : float
        Of a training step without a plan.
    """

    forward: np.ndarray
    step: float


# ---------------------------------------------------------------- predicted


def predicted(training: TrainingGraph, rates: Rates) -> Times:
    """The times of a training step by a roofline.

    The gradient of an operator has its FLOPs for each of the inputs that it has a gradient for, two
    at the most. What its nodes read and write is moved; what only changes a shape moves nothing.
    """
    seconds = np.maximum(row_flops(training) / rates.flops, moved_bytes(training) / rates.nbytes)
    return _times(training, np.where(_views(training), 0.0, seconds + rates.call))


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
    """The rows that take no time: variables, and what may hand on its input as it is."""
    t = training.tables
    free = t.variable.copy()
    row = np.repeat(np.arange(len(free)), np.diff(t.inplace_start))
    free[row[t.inplace_identity]] = True
    return free


def _times(training: TrainingGraph, rows: np.ndarray) -> Times:
    t = training.tables
    n = t.forward
    gradients = np.unique(t.walk_row[t.walk_row >= 2 * n])
    return Times(rows[n : 2 * n].copy(), float(rows[t.first].sum() + rows[gradients].sum()))


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
    product_time = _median(lambda: mx.nd.dot(square, square, out=product))
    sum_time = _median(lambda: mx.nd.elemwise_add(array, array, out=sums))
    calls = 100

    def many() -> Any:
        for _ in range(calls):
            mx.nd.elemwise_add(one, one, out=one)
        return one

    call = _median(many) / calls
    return Rates(2 * SIDE**3 / product_time, 2 * 4 * LONG / sum_time, call)


def _median(run: Callable[[], Any]) -> float:
    """Seconds that it takes until its result is there, warmed."""
    run().wait_to_read()
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        run().wait_to_read()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measured(training: TrainingGraph, ctx: Any) -> Times:
    """The times of a training step, its operators measured where they matter.

    What cannot be bound alone, and what is too small to matter, is predicted.
    """
    rates = rates_of(ctx)
    base = predicted(training, rates)
    graph, n = training.graph, training.tables.forward
    work, moved = row_flops(training)[:n], moved_bytes(training)[:n]
    matters = (work > MATTERS * work.sum()) | (moved > MATTERS * moved.sum())
    matters &= ~_views(training)[:n]
    forward, change = base.forward.copy(), 0.0
    once = set(training.tables.first.tolist())
    gradient = predicted_gradients(training, rates)
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
            change += max(alone_forward, alone_both) - forward[i] - gradient[i]
            forward[i] = alone_forward
    return Times(forward, base.step + change)


def predicted_gradients(training: TrainingGraph, rates: Rates) -> np.ndarray:
    """Seconds that the gradient of each forward node takes, by a roofline."""
    n = training.tables.forward
    seconds = np.maximum(row_flops(training) / rates.flops, moved_bytes(training) / rates.nbytes)
    rows = np.where(_views(training), 0.0, seconds + rates.call)[2 * n :]
    owned = training.owners >= 0
    return np.bincount(training.owners[owned], rows[owned], minlength=n)


def _signature(graph: ForwardGraph, i: int) -> str:
    node = graph.nodes[i]
    tensors = [graph.tensors[a][b] for a, b in node.inputs]
    return json.dumps([node.op, sorted(node.attrs.items()), tensors])


def _measure(graph: ForwardGraph, i: int, ctx: Any) -> Optional[Tuple[float, float]]:
    """Seconds of an operator alone: forward, and forward with its gradient; None: it cannot be."""
    node = graph.nodes[i]
    tensors = [graph.tensors[a][b] for a, b in node.inputs]
    try:
        nodes, shown = alone(node.op, node.attrs, len(tensors), False)
        symbol = load_nodes(nodes, [[len(tensors), k, 0] for k in range(shown)])
        arrays = {"x%d" % k: _values(tensor, ctx) for k, tensor in enumerate(tensors)}
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

        seconds = _median(forward)
        return seconds, _median(both) if floating else seconds
    except mx.MXNetError:
        return None


def _values(tensor: Tensor, ctx: Any) -> Any:
    """Values that any operator takes: indices are 0, all else is between 0 and 1."""
    if not tensor.dtype.startswith("float"):
        return mx.nd.zeros(tensor.shape, ctx, tensor.dtype)
    return mx.nd.random.uniform(0.1, 0.9, tensor.shape, ctx=ctx).astype(tensor.dtype)


# ---------------------------------------------------------------- on disk


def folder() -> Path:
    """Where measurements are kept: ``MEMONGER_CACHE``, or ``memonger`` in the user's cache."""
    told = os.environ.get("MEMONGER_CACHE")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(told) if told else Path(cache) / "memonger"


@contextlib.contextmanager
def _kept(what: str, ctx: Any) -> Iterator[Dict[str, Any]]:
    """Measurements of a device, as a dict; what is added to it is written to disk.

    What is there but cannot be read is made anew; where nothing can be written, nothing is kept.
    """
    device = device_name(ctx)
    digest = hashlib.sha256(json.dumps([device, mx.__version__]).encode()).hexdigest()[:16]
    path = folder() / ("%s-%s.json" % (what, digest))
    try:
        kept = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        kept = {"device": device, "mxnet": mx.__version__}
    before = json.dumps(kept)
    try:
        yield kept
    finally:
        if json.dumps(kept) != before:
            _write(path, json.dumps(kept))


def _write(path: Path, text: str) -> None:
    """All of it or nothing, for another process may read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=str(path.parent))
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, str(path))
    except OSError as error:
        log.info("measurements cannot be kept in %s: %s", path.parent, error)


@functools.lru_cache(maxsize=None)
def device_name(ctx: Any) -> str:
    """A name for the hardware behind a device, and what bears on its speed."""
    if ctx.device_type == "gpu":
        return _gpu_name(ctx.device_id)
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
    return "%s, %s threads" % (_cpu_name(), threads)


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
