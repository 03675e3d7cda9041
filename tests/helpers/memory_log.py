"""What MXNet itself tells of its memory plans, seen from a process of its own.

With ``MXNET_MEM_PLAN_VERBOSE_LOGGING``, which is read once in a process, it prints each node in the
order in which they run, with the entries that it reads and makes: the number among all outputs in
that order, shape and KB (``LogMemoryPlan`` in ``src/common/exec_utils.h``). Which block of the pool
an output has is seen by a step that is really run: its address, as a monitor gets it.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple, Sequence, Tuple

import memonger  # noqa: F401
import mxnet as mx
from memonger.costs.bind import bind
from memonger.schedules.execution.arena import address

import opaque_networks  # noqa: F401  registers operators, in the other process too
from planned import elsewhere, forward

Entry = Tuple[int, Tuple[int, ...], int]  # number, shape, KB


class Job(NamedTuple):
    """A marked symbol as JSON, its shapes and types, and the arguments that get a gradient."""

    json: str
    shapes: dict[str, tuple[int, ...]]
    types: Any
    wanted: Sequence[str]
    request: str = "write"


class LoggedNode(NamedTuple):
    op: str  # 'var' for a variable
    inputs: list[Entry]
    outputs: list[Entry]


def logged(jobs: Sequence[Job]) -> list[list[LoggedNode]]:
    """Return the plan that MXNet logs when it binds each of some networks."""
    text = elsewhere(_bind, jobs, MXNET_MEM_PLAN_VERBOSE_LOGGING="1")[1]
    plans: list[list[LoggedNode]] = []
    is_bound = False  # not by what infers how arrays are stored
    for line in text.split("\n"):
        if line.startswith("memory_log: "):
            is_bound = line == "memory_log: next"
            plans += [[]] if is_bound else []
        if not is_bound:
            continue
        node = re.search(r": node \d+ (\S+)$", line)
        entry = re.search(r"\t(input|output) (\d+): \[([\d,]*)\] \((\d+) KB\)$", line)
        if node:
            plans[-1].append(LoggedNode(node[1], [], []))
        elif entry:
            shape = tuple(int(n) for n in entry[3].split(",") if n)
            getattr(plans[-1][-1], entry[1] + "s").append((int(entry[2]), shape, int(entry[4])))
    return plans


def log_of(plan: Any) -> list[LoggedNode]:
    """Return what MXNet logs of a plan, from its replay."""
    training, arrays = plan.training, plan.training.arrays
    entry_of: dict[int, Entry] = {}  # of each output, numbered in the order in which they are made
    nodes = []
    for row in plan.ran.order:
        for k, tensor in enumerate(training.signatures[row].tensors, int(arrays.output_start[row])):
            entry_of[k] = (len(entry_of), tensor.shape, tensor.nbytes // 1024)
        if training.ops[row] == "null":
            nodes.append(LoggedNode("var", [], []))
            continue
        inputs = []
        for j in range(arrays.read_start[row], arrays.read_start[row + 1]):
            inputs.append(entry_of[int(plan.ran.entry[j])])
        outputs = [
            entry_of[k] for k in range(arrays.output_start[row], arrays.output_start[row + 1])
        ]
        nodes.append(LoggedNode(training.ops[row], inputs, outputs))
    return nodes


class Step(NamedTuple):
    outputs: list[int]  # the addresses of all, in the order in which they were made
    gradients: list[int]


def stepped(jobs: Sequence[Job]) -> list[Step]:
    """Run one training step of each of some networks."""
    # MKLDNN may move a tensor to another address; it has no say in the plan. An address is asked
    # for only after the operator that first writes there has run: one operator at a time.
    plain = {"MXNET_MKLDNN_ENABLED": "0", "MXNET_ENGINE_TYPE": "NaiveEngine"}
    return elsewhere(_run, jobs, **plain)[0]


def _bind(jobs: Sequence[Job]) -> None:
    for job in jobs:
        symbol, graph, wanted = _read(job)
        print("memory_log: next", file=sys.stderr, flush=True)
        bind(symbol, graph, mx.cpu(), wanted, job.request)
        print("memory_log: done", file=sys.stderr, flush=True)


def _read(job: Job) -> tuple[Any, Any, list[int]]:
    symbol = mx.sym.load_json(job.json)
    graph = forward(symbol, job.shapes, job.types)
    return symbol, graph, [a for a in graph.arguments if graph.nodes[a].name in job.wanted]


def _run(jobs: Sequence[Job]) -> list[Step]:
    return [_step(*_read(job), job.request) for job in jobs]


def _step(symbol: Any, graph: Any, wanted: list[int], request: str) -> Step:
    def arrays(nodes: Any) -> dict[str, Any]:
        tensors = {graph.nodes[i].name: graph.tensors[i][0] for i in nodes}
        return {n: mx.nd.zeros(t.shape, dtype=t.dtype) for n, t in tensors.items()}

    gradients, auxiliary = arrays(wanted), arrays(graph.auxiliary)
    executor = symbol.bind(mx.cpu(), arrays(graph.arguments), gradients, request, auxiliary)
    addresses: list[int] = []
    executor.set_monitor_callback(
        lambda name, handle: addresses.append(address(mx.nd.NDArray(mx.base.NDArrayHandle(handle))))
    )
    executor.forward(is_train=True)
    executor.backward([mx.nd.ones(out.shape, dtype=out.dtype) for out in executor.outputs])
    mx.nd.waitall()
    return Step(addresses, [address(g) for g in gradients.values()])
