"""Measure how long operators take, each alone at its own shapes, in a child process.

Nothing is measured in the user's process (`support.child`). The child binds each distinct operator
(its parameters, shapes and types) alone, warms it up, and runs it several times, forward and with
its gradient. If that fails, the predicted time is used. Measurements are cached in the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import re
import time
from pathlib import Path
from typing import Callable, Iterator, Sequence

import numpy as np

from memonger.costs.time.gpus import read_gpu_name
from memonger.costs.time.roofline import Times, find_free_rows
from memonger.graph.operators.gradients import alone
from memonger.graph.operators.recompute import GPU, on_one_device
from memonger.graph.operators.tensors import Attributes, Tensor
from memonger.graph.training import TrainingGraph
from memonger.support.cache import Latest
from memonger.support.child import run_child
from memonger.support.errors import MemongerError, mxnet_message
from memonger.support.mxnet import environment, mx
from memonger.support.symbols import load_nodes
from memonger.support.types import Context, Json, NDArray
from memonger.support.versions import MXNET_ERRORS

log = logging.getLogger("memonger")

ROUNDS = 7  # the shortest of these counts

Run = Callable[[], NDArray]  # starts a computation and returns an array that waits for it

#: Seconds of operators, forward and with the gradient; () for one that cannot be measured.
_measured: Latest[Json] = Latest(4096)


def measure_times(training: TrainingGraph, ctx: Context, predicted: Times) -> Times:
    """Measure the operators of a training step; the predicted time counts where that fails."""
    graph, device = training.graph, describe_device(ctx)
    keys = {}
    for i in np.setdiff1d(training.arrays.first, np.flatnonzero(find_free_rows(training))).tolist():
        node = graph.nodes[i]
        tensors = [graph.tensors[a][b] for a, b in node.inputs]
        keys[i] = device, json.dumps([node.op, sorted(node.attrs.items()), tensors])
    known = {key: _measured.get(key) for key in keys.values()}
    missing = [key for key, seconds in known.items() if seconds is None]
    found = _measure_elsewhere([json.loads(operator) for _, operator in missing], ctx)
    for key, seconds in zip(missing, found):
        known[key] = seconds
        _measured.put(key, seconds)
    once, gradient = predicted.forward_seconds.copy(), predicted.gradient_seconds.copy()
    for i, key in keys.items():
        seconds = known[key]
        if seconds:
            once[i], both = seconds
            gradient[i] = max(0.0, both - once[i]) if gradient[i] else 0.0
    more = (once - predicted.forward_seconds + gradient - predicted.gradient_seconds).sum()
    return Times(once, gradient, predicted.step_seconds + float(more))


def _measure_elsewhere(operators: Sequence[Json], ctx: Context) -> list[Json]:
    """Measure operators in a child process; after a crash, the rest in a new one."""
    results: list[Json] = []
    while len(results) < len(operators):
        rest = operators[len(results) :]
        job = {
            "device": [ctx.device_type, ctx.device_id],
            "rounds": ROUNDS,
            "np_shape": mx.util.is_np_shape(),
            "operators": rest,
        }
        answers, status = run_child(__name__, job)
        if answers is None:
            log.warning("no operator can be measured, so times are predicted: %s", status)
            return results + [()] * len(rest)
        if len(answers) < len(rest):
            answers.append(status)
        for (op, _, tensors), answer in zip(rest, answers):
            if isinstance(answer, str):
                shapes = ", ".join(str(tuple(shape)) for shape, *_ in tensors)
                text = "%s of %s cannot be measured, so its time is predicted: %s"
                log.warning(text, op, shapes, answer)
        results += [() if isinstance(answer, str) else answer for answer in answers]
    return results


def answer(job: Json) -> Iterator[Json]:
    """Measure the operators of a job, in the child process.

    Yields for each its seconds forward and with the gradient, or why it cannot be measured.
    """
    mx.util.set_np_shape(job["np_shape"])
    ctx = mx.Context(*job["device"])
    for op, attrs, tensors in job["operators"]:
        inputs = [Tensor(tuple(shape), *types) for shape, *types in tensors]
        try:
            yield _measure_operator(op, dict(attrs), inputs, ctx, job["rounds"])
        except (MemongerError, *MXNET_ERRORS) as error:  # it cannot be bound alone
            yield mxnet_message(error)


def _measure_operator(
    op: str, attrs: Attributes, inputs: Sequence[Tensor], ctx: Context, rounds: int
) -> list[float]:
    """Measure the least seconds of an operator, forward and forward with its gradient.

    Indices are 0. Other numbers are random and of both signs, because kernels that branch are
    faster if all numbers take the same branch.
    """
    nodes, random = alone(op, on_one_device(op, attrs), len(inputs)), np.random.RandomState(0)
    internals = load_nodes(nodes, [[len(inputs), 0, 0]]).get_internals()
    outputs = range(len(inputs), len(internals.list_outputs()))
    symbol = mx.sym.Group([internals[k] for k in outputs])
    tensors = {node["name"]: tensor for node, tensor in zip(nodes, inputs)}
    indices = {name for name, t in tensors.items() if not t.dtype.startswith("float")}
    trained = [name for name in symbol.list_arguments() if name not in indices]
    with environment():
        executor = symbol.simple_bind(
            ctx,
            dict.fromkeys(trained, "write") or "null",
            {name: t.dtype for name, t in tensors.items()},
            **{name: t.shape for name, t in tensors.items()},
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

    runs = (forward, both if trained else forward)
    runs[1]().wait_to_read()
    return np.min([[_measure(run) for run in runs] for _ in range(rounds)], axis=0).tolist()


def _measure(run: Run) -> float:
    """Measure the seconds until the result of a run is ready, after warming up."""
    # With one thread CPU time counts, which does not depend on other processes.
    on_cpu = run().context.device_type.startswith("cpu")
    one_thread = on_cpu and os.environ.get("OMP_NUM_THREADS") == "1"
    clock = time.process_time if one_thread else time.perf_counter
    mx.nd.waitall()
    start = clock()
    run().wait_to_read()
    return clock() - start


@functools.lru_cache(maxsize=None)
def describe_device(ctx: Context) -> str:
    """Describe the hardware of a device, and what its speed depends on."""
    if ctx.device_type == GPU:
        return read_gpu_name(ctx.device_id)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        name = re.findall(r"^model name\s*: *(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0]
    return f"{name}, {os.environ.get('OMP_NUM_THREADS') or os.cpu_count()} threads"
