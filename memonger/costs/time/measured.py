"""Predict or measure the time of a training step on a device, operator by operator.

Predicted: by a roofline (Williams et al. 2009, "Roofline: an insightful visual performance model").
An operator takes as long as its arithmetic or as moving what it reads and writes, whichever takes
longer, and the time of a call besides; and as many times longer as others of its class. How near an
operator comes to the roofline is a matter of its kernel, so one `Example` of each class is run.
MKLDNN hands on images in layouts of its own. BatchNorm and pooling are several times faster on
these, and operators that do not know them have them put back into order first. So operators on
images are measured behind a convolution. A GPU that is not here has its data sheet (`GPUS`) and
no factors: those of a CPU would say of it what is not so.

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
from typing import Callable, ContextManager, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.costs.bind import has_mkldnn
from memonger.costs.time.flops import count_forward_flops
from memonger.costs.time.gpus import GPUS, Rates
from memonger.graph.arrays import BACKWARD, find_owners
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import InputSpec
from memonger.graph.operators.gradients import alone
from memonger.graph.operators.tensors import Attributes, Shape, Tensor
from memonger.graph.read import forward_graph
from memonger.graph.training import TrainingGraph, training_graph
from memonger.support.cache import on_disk
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx
from memonger.support.symbols import load_nodes
from memonger.support.types import Bools, Context, Doubles, Json, NDArray, Symbol
from memonger.support.versions import MXNET_ERRORS

SIDE = 1024  # of the square matrices that are multiplied
LONG = 2**24  # elements of the array that is copied
ROUNDS = 7  # of which the least time counts
FACTORS = (0.5, 20.0)  # the least and the most factor that is believed
Factors = Mapping[int, Sequence[float]]  # of forward nodes: of their run and their gradient
Run = Callable[[], NDArray]  # begins something and gives an array that is ready when it is done
IMAGES: Shape = (8, 64, 56, 56)  # for operators that take images of any shape
ONE: Shape = (1,)  # of what is taken to be a constant, which gets no gradient
ROWS: Shape = (256, 2048)  # for operators that take anything


class Times(NamedTuple):
    """Seconds that the rows of a training graph take."""

    forward: Doubles  # of each forward node, whenever it runs
    gradient: Doubles  # of the gradient of each forward node, as far as it is computed
    step: float  # of a training step without a plan


class Example(NamedTuple):
    """An operator that stands for its class."""

    op: str
    attrs: tuple[tuple[str, str], ...]  # its parameters, sorted
    shapes: tuple[Shape, ...]  # of its inputs, float32; those of the shape `ONE` are constants

    @property
    def behind(self) -> bool:
        """Whether it is measured behind a convolution; and before one, if its result is `IMAGES`"""
        return IMAGES in self.shapes

    def build_alone(self) -> Symbol:
        """Build the symbol of the operator between variables."""
        return load_nodes(*alone(self.op, dict(self.attrs), len(self.shapes)))


def find_times(training: TrainingGraph, ctx: Context | str, measure: bool = False) -> Times:
    """Predict the times of a training step, or ``measure`` those of operators that run alone.

    ``ctx`` is the name of one of `GPUS` where the device is not here: its roofline alone predicts.
    """
    if isinstance(ctx, str):
        return predict_times(training, GPUS[ctx])
    factors = find_factors(training, ctx)
    times = predict_times(training, find_rates(ctx), factors)
    return _measure_operators(training, ctx, times, factors) if measure else times


def predict_times(training: TrainingGraph, rates: Rates, factors: Factors | None = None) -> Times:
    """Predict the times of a training step."""
    t, n = training.arrays, training.arrays.forward
    arithmetic, moving = count_row_flops(training) / rates.flops, count_moved_bytes(training)
    seconds = np.maximum(arithmetic, moving / rates.nbytes) + rates.call
    factor_of_node = np.ones((n + 1, 2))  # the last is that of rows without an owner
    for i, factor in (factors or {}).items():
        factor_of_node[i] = factor
    seconds *= factor_of_node[training.origin, (training.phases == BACKWARD).astype(int)]
    seconds[find_free_rows(training)] = 0
    gradients = np.unique(t.walk_row[t.walk_row >= 2 * n])
    owned = gradients[training.origin[gradients] >= 0]
    gradient = np.bincount(training.origin[owned], seconds[owned], minlength=n)
    step = float(seconds[t.first].sum() + seconds[gradients].sum())
    return Times(seconds[n : 2 * n].copy(), gradient.astype(np.float64), step)


def count_row_flops(training: TrainingGraph) -> Doubles:
    """Count the FLOPs of each row; a gradient has its operator's for each input, twice at most."""
    owner = training.origin[training.phases == BACKWARD]
    forward = count_forward_flops(training.graph).astype(np.float64)
    inputs = [min(2, max(1, len(facts.passes))) for facts in training.facts]
    rows = np.bincount(owner[owner >= 0], minlength=len(forward))  # of each operator's gradient
    share = forward * inputs / np.maximum(rows, 1)
    return np.concatenate([forward, forward, np.where(owner >= 0, share[owner], 0)])


def count_moved_bytes(training: TrainingGraph) -> Doubles:
    """Count the bytes that each row of a training graph reads and writes; each tensor once."""
    t, rows = training.arrays, len(training.ops)
    sizes = (t.elements * t.itemsize).astype(np.float64)
    entry = t.output_start[t.read_row] + t.read_output
    pairs = np.stack([find_owners(t.read_start), entry], axis=1)
    reader, entry = np.unique(pairs[~t.read_ignored], axis=0).T
    written = np.bincount(find_owners(t.output_start), sizes, rows)
    moved = np.bincount(reader, sizes[entry], rows) + written
    return np.where(t.variable, 0.0, moved)


def find_free_rows(training: TrainingGraph) -> Bools:
    """Find the rows that take no time: variables, and what may hand on its input."""
    t = training.arrays
    # What makes a gradient adds it in place (src/executor/inplace_addto_detect_pass.cc).
    free = t.variable | (np.array(training.ops) == "_grad_add")
    free[find_owners(t.inplace_start)[t.inplace_identity]] = True
    return free


def find_rates(ctx: Context) -> Rates:
    """Look up what a device can do: measured the first time, then read from disk."""
    with _open_stored("rates", ctx) as stored:
        if "rates" not in stored:
            stored["rates"] = _measure_rates(ctx)
        return Rates(*stored["rates"])


def _measure_rates(ctx: Context) -> Rates:
    calls, a = 100, mx.sym.Variable("a")
    chain = a
    for _ in range(calls):
        chain = mx.sym.elemwise_add(chain, chain)
    symbols = {(SIDE, SIDE): mx.sym.dot(a, a), (LONG,): mx.sym.elemwise_add(a, a), ONE: chain}
    tensors = [{"a": Tensor(shape, "float32")} for shape in symbols]
    runs = [_bind_runs(s, t, ctx, trains=False)[0] for s, t in zip(symbols.values(), tensors)]
    product, total, call = _measure_least(*runs)
    return Rates(2 * SIDE**3 / product, 2 * 4 * LONG / total, call / calls)


def _measure(run: Run) -> float:
    """Measure the seconds until the result of a run is there, warmed."""
    # Of one thread the processor's time counts, which other processes do not lengthen.
    on_cpu = run().context.device_type.startswith("cpu")
    one_thread = on_cpu and os.environ.get("OMP_NUM_THREADS") == "1"
    clock = time.process_time if one_thread else time.perf_counter
    mx.nd.waitall()
    start = clock()
    run().wait_to_read()
    return clock() - start


def _measure_least(*runs: Run) -> list[float]:
    """Measure the least seconds of each run, by turns, to compare them."""
    return np.min([[_measure(run) for run in runs] for _ in range(ROUNDS)], axis=0).tolist()


def find_factors(training: TrainingGraph, ctx: Context) -> dict[int, tuple[float, ...]]:
    """Look up, or measure first, how much longer than by the roofline forward nodes take."""
    rates, factors = None, {}
    with _open_stored("kinds", ctx) as stored:
        for i in _list_timed(training):
            example = choose_example(training.graph, i)
            if example is None:
                continue
            key = json.dumps(example)
            if key not in stored:
                # Not the stored rates: what else runs just then slows both down.
                rates = rates or _measure_rates(ctx)
                stored[key] = _measure_factors(example, rates, ctx)
            if stored[key]:
                factors[i] = tuple(stored[key])
    return factors


def _list_timed(training: TrainingGraph) -> list[int]:
    return np.setdiff1d(training.arrays.first, np.flatnonzero(find_free_rows(training))).tolist()


def _measure_factors(example: Example, rates: Rates, ctx: Context) -> list[float] | None:
    """Measure the two factors of a class; None: its example cannot be run."""
    shapes = {f"x{k}": shape for k, shape in enumerate(example.shapes)}
    tensors = [Tensor(shape, "float32") for shape in example.shapes]
    try:
        training = training_graph(forward_graph(example.build_alone(), InputSpec(shapes, {})))
        seconds = _measure_steps(build_symbols(example), tensors, ctx)
    except (MemongerError, *MXNET_ERRORS):
        return None
    forward, both = seconds[-1] - (seconds[0] if example.behind else 0.0)
    times = predict_times(training, rates)
    expected = np.maximum([times.forward[-1], times.gradient[-1]], 1e-9)
    return np.clip([forward, both - forward] / expected, *FACTORS).tolist()


def choose_example(graph: ForwardGraph, i: int) -> Example | None:
    """Choose the operator that stands for the class of an operator, if there is one."""
    node = graph.nodes[i]
    inputs = [graph.tensors[a][b] for a, b in node.inputs]
    if not inputs or node.subgraphs or graph.why_kept(i) is not None:
        return None
    if node.op in _OWN:
        choice = _choose_own(node.op, node.attrs, [tensor.shape for tensor in inputs])
        if choice is None:
            return None
        attrs, shapes = choice
    else:
        outputs = {tensor.shape for tensor in graph.shown_tensors(i)}
        others = {tensor.shape for tensor in inputs} - outputs - {ONE}
        if len(outputs) != 1 or others or {tensor.dtype for tensor in inputs} != {"float32"}:
            return None
        whole = IMAGES if len(min(outputs)) == 4 else ROWS
        attrs, shapes = node.attrs, [whole if t.shape in outputs else ONE for t in inputs]
    return Example(node.op, tuple(sorted((k, str(v)) for k, v in attrs.items())), tuple(shapes))


def build_symbols(example: Example) -> list[Symbol]:
    """Build what is run to measure an example: without it, if it is ``behind``, and with it."""
    x = _convolve(mx.sym.Variable("data"), "before")
    symbol_of = {IMAGES: x, ONE: mx.sym.ones(ONE)}
    shapes = {f"x{k}": shape for k, shape in enumerate(example.shapes) if shape in symbol_of}
    symbol = example.build_alone()(**{name: symbol_of[shape] for name, shape in shapes.items()})
    if not example.behind:
        return [symbol]
    if symbol[0].infer_shape(data=IMAGES)[1] == [IMAGES]:
        return [_convolve(x, "behind"), _convolve(symbol[0], "behind")]
    return [x, symbol[0]]


def _convolve(x: Symbol, name: str) -> Symbol:
    return mx.sym.Convolution(x, num_filter=IMAGES[1], kernel=(1, 1), no_bias=True, name=name)


Choice = Tuple[Mapping[str, object], Sequence[Shape]]
#: Operators whose classes have parameters and shapes of their own.
_OWN = ("Convolution", "FullyConnected", "BatchNorm", "Pooling", "SliceChannel")


def _choose_own(op: str, attrs: Attributes, shapes: Sequence[Shape]) -> Choice | None:
    """Choose parameters, and shapes of inputs; None where there is no class."""
    data = shapes[0]
    images = len(data) == 4 and attrs.get("layout", "None") in ("None", "NCHW")
    if op == "FullyConnected":
        batch = 32 if data[0] < 128 else 256
        return {"num_hidden": 1024, "no_bias": True}, [(batch, 1024), (1024, 1024)]
    if op == "SliceChannel" and len(data) == 2:
        return {"num_outputs": 4, "axis": 1}, [ROWS]
    if op == "Pooling" and images:
        return attrs, [IMAGES]
    if op == "BatchNorm" and images and attrs.get("axis", "1") == "1":
        chosen = {"fix_gamma": False, "use_global_stats": attrs.get("use_global_stats", False)}
        return chosen, [IMAGES, *[(IMAGES[1],)] * 4]
    if op == "Convolution" and images:
        return _choose_convolution(attrs, data[1], shapes[1][2:])
    return None


def _choose_convolution(attrs: Attributes, channels: int, kernel: Shape) -> Choice | None:
    """Choose a convolution with as many groups and a similar kernel."""
    groups = int(attrs.get("num_group", 1))
    filters, data, stride = 128, (8, 256, 28, 28), "(1, 1)"
    if groups > 1:
        filters, data = 192, (8, 192, 28, 28)
        groups = filters if groups == channels else min(groups, 32)
        if filters % groups:
            return None
    elif channels < 16:  # few are a class of their own
        filters, data, stride = 64, (4, channels, 112, 112), attrs.get("stride", stride)
    elif kernel != (1, 1):
        kernel, data = (3, 3), (4, 128, 28, 28)
    chosen = {
        "num_filter": filters,
        "num_group": groups,
        "no_bias": True,
        "kernel": kernel,
        "stride": stride,
        "pad": tuple(k // 2 for k in kernel),
    }
    return chosen, [data, (filters, data[1] // groups, *kernel)]


def _measure_operators(
    training: TrainingGraph, ctx: Context, base: Times, factors: Factors
) -> Times:
    """Measure the operators that can be bound alone; the others take what they are predicted to."""
    graph, blocks = training.graph, has_mkldnn(ctx)
    forward, gradient = base.forward.copy(), base.gradient.copy()
    with _open_stored("operators", ctx) as stored:
        for i in _list_timed(training):
            example = choose_example(graph, i) if i in factors else None
            # Alone they would get other layouts than in the network, and their constants gradients.
            if example and (blocks and example.behind or ONE in example.shapes):
                continue
            node, tensors = graph.nodes[i], [graph.tensors[a][b] for a, b in graph.nodes[i].inputs]
            key = json.dumps([node.op, sorted(node.attrs.items()), tensors])
            if key not in stored:
                try:
                    symbol = load_nodes(*alone(node.op, node.attrs, len(tensors)))
                    stored[key] = _measure_steps([symbol], tensors, ctx)[0].tolist()
                except MXNET_ERRORS:  # it cannot be bound alone
                    stored[key] = None
            if stored[key]:
                forward[i], both = stored[key]
                gradient[i] = max(0.0, both - forward[i]) if gradient[i] else 0.0
    more = (forward - base.forward + gradient - base.gradient).sum()
    return Times(forward, gradient, base.step + float(more))


def _measure_steps(symbols: Sequence[Symbol], inputs: Sequence[Tensor], ctx: Context) -> Doubles:
    """Measure the seconds of each symbol, forward and forward with its gradients."""
    tensors = {f"x{k}": tensor for k, tensor in enumerate(inputs)}
    tensors["data"] = Tensor(IMAGES, "float32")
    runs = [run for symbol in symbols for run in _bind_runs(symbol, tensors, ctx)]
    return np.reshape(_measure_least(*runs), (-1, 2))


def _bind_runs(
    symbol: Symbol, tensors: Mapping[str, Tensor], ctx: Context, trains: bool = True
) -> tuple[Run, Run]:
    """Bind what runs a symbol forward, and forward with its gradients; indices are 0."""
    # Random numbers of both signs, for kernels that branch have it easy where all go one way. Not
    # MXNet's: a plan may be made in mid-training, whose own draws must stay what they are.
    random = np.random.RandomState(0)
    inputs = {name: tensors[name] for name in symbol.list_inputs() if name in tensors}
    indices = {name for name, t in inputs.items() if not t.dtype.startswith("float")}
    trained = [name for name in symbol.list_arguments() if trains and name not in indices]
    types = {name: t.dtype for name, t in inputs.items()}
    shapes = {name: t.shape for name, t in inputs.items()}
    with environment():
        executor = symbol.simple_bind(
            ctx, dict.fromkeys(trained, "write") or "null", types, **shapes
        )
    for name, array in (*executor.arg_dict.items(), *executor.aux_dict.items()):
        if name not in indices:
            values = random.uniform(-0.9, 0.9, min(array.size, 2**16)).astype(array.dtype)
            array[:] = np.resize(values, array.shape)
    heads = [mx.nd.ones_like(output) for output in executor.outputs if trained]

    def forward() -> NDArray:
        return executor.forward(is_train=True)[0]

    def both() -> NDArray:
        executor.forward(is_train=True)
        executor.backward(heads)
        return executor.grad_dict[trained[-1]]

    whole = both if trained else forward
    whole().wait_to_read()
    return forward, whole


def _open_stored(kind: str, ctx: Context) -> ContextManager[Json]:
    """Open the measurements of a device, as a dict; what is added to it is written to disk."""
    return on_disk(kind, {"device": device_name(ctx), "mxnet": mx.__version__})


@functools.lru_cache(maxsize=None)
def device_name(ctx: Context | str) -> str:
    """Name the hardware behind a device, and what bears on its speed."""
    if isinstance(ctx, str):
        return ctx
    if ctx.device_type == "gpu":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={ctx.device_id}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(query, timeout=10).decode().strip()
        return f"a GPU of {mx.context.gpu_memory_info(ctx.device_id)[1]} bytes"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        name = re.findall(r"^model name\s*: *(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0]
    return f"{name}, {os.environ.get('OMP_NUM_THREADS') or os.cpu_count()} threads"
