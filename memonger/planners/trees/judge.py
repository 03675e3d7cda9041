"""What a schedule costs, in compiled code: its training graph, MXNet's order, MXNet's memory.

The graph is the one that is written out for MXNet (``schedules.nodes``), the order and the memory
are those of the replay (``replay``). Here they are put together without a Python object for each
node, so that a search can judge thousands of schedules.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from memonger.costs.replay import allocate
from memonger.costs.time.flops import forward_flops
from memonger.graph.arrays import KindArrays, arrays_of, starts
from memonger.planners.trees.unroll import Steps
from memonger.schedules.nodes import Patterns, connect, lay_out, line_up
from memonger.schedules.schedule import Workload
from memonger.schedules.training_step import Parts
from memonger.support.compiled import compiled

#: Operators whose results are worth keeping where others are computed again.
COSTLY = frozenset(
    "Convolution Deconvolution FullyConnected dot batch_dot RNN Correlation _linalg_gemm "
    "_linalg_gemm2 _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution "
    "_contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt "
    "_contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt".split()
)


ONE_PASS = 1e9  # the work of one forward pass where it is not counted in FLOPs


class Blueprint(NamedTuple):
    """A network, ready to be scheduled in compiled code.

    Attributes
    ----------
    steps : Steps
    patterns : Patterns
    kinds : KindArrays
    asked : np.ndarray
        The outputs that are gradients (``Parts.asked``).
    node : np.ndarray
        The forward node of each position.
    """

    steps: Steps
    patterns: Patterns
    kinds: KindArrays
    asked: np.ndarray
    node: np.ndarray


def blueprint(made: Parts, weights: np.ndarray | None = None) -> Blueprint:
    """Make the arrays for a network.

    Parameters
    ----------
    made : Parts
    weights : np.ndarray, optional
        The work of each forward node, in any unit; by default its FLOPs.
    """
    workload = made.work
    node = np.array(workload.operators, dtype=np.int32)
    return Blueprint(
        _steps(workload, positions(node, len(workload.once)), weights),
        made.patterns,
        arrays_of(made.kinds),
        made.asked(),
        node,
    )


def positions(node: np.ndarray, nodes: int) -> np.ndarray:
    """The position of each forward node, -1 where it never runs."""
    position = np.full(nodes, -1, dtype=np.int32)
    position[node] = np.arange(len(node))
    return position


def grouped(pairs: Sequence[tuple[int, int]], groups: int) -> tuple[np.ndarray, np.ndarray]:
    """(group, value) pairs by group: where each group starts, and the values, in their order."""
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    start = starts(np.bincount(array[:, 0], minlength=groups))
    order = np.argsort(array[:, 0], kind="stable")
    return start.astype(np.int32), array[order, 1].astype(np.int32)


def _steps(workload: Workload, position: np.ndarray, weights: np.ndarray | None) -> Steps:
    graph = workload.training.graph
    operators = workload.operators
    count = len(operators)
    reads = [(p, position[j]) for p, i in enumerate(operators) for j in workload.inputs[i]]
    gradient = np.zeros(count, dtype=np.bool_)
    gradient[position[list(workload.gradients)]] = True
    wants = [(p, position[j]) for p, i in enumerate(operators) for j in workload.reads[i]]
    last = np.full(count, -1, dtype=np.int32)
    for p, j in reads:
        last[j] = p
    first_want = np.full(count, count, dtype=np.int32)
    for p, j in wants:
        first_want[j] = min(first_want[j], p)
    head = np.zeros(count, dtype=np.bool_)
    head[[position[workload.training.same[a]] for a, _ in graph.heads]] = True
    nodes = list(operators)
    work = forward_flops(graph)[nodes].astype(np.float64)
    if weights is not None:
        # Whole numbers: their sums do not depend on the order.
        work = np.ceil(weights[nodes] * (ONE_PASS / max(float(weights[nodes].sum()), 1e-300)))
    if not work.any():  # copies alone: every run counts the same
        work[:] = 1.0
    return Steps(
        *grouped(reads, count),
        *grouped(wants, count),
        last,
        first_want,
        np.flatnonzero(head).astype(np.int32),
        head,
        workload.once[nodes],
        gradient,
        np.array([graph.nodes[i].op in COSTLY for i in operators], dtype=np.bool_),
        work,
    )


@compiled
def judge(b, events, match_ranges, limit):  # type: ignore[no-untyped-def]
    """Bytes of the pool of a schedule, 4 to an element; -1 if it is more than ``limit``.

    The gradients are part of it: they are outputs of the training symbol.

    Parameters
    ----------
    b : Blueprint
    events : np.ndarray of int32
        As ``unroll`` makes them, positions.
    match_ranges : np.ndarray
        Those that MXNet tries; it takes the best.
    limit : int
        Bytes.

    Returns
    -------
    int
        Bytes, or -1.
    int
        The place of the best match range.
    """
    nodes = np.empty(events.shape[0], dtype=np.int32)
    for k in range(events.shape[0]):
        nodes[k] = b.node[events[k]] if events[k] >= 0 else ~b.node[~events[k]]
    p = b.patterns
    rows = connect(p, line_up(p, nodes))
    head_row = np.concatenate((rows.first[p.head_row], rows.latest[b.asked[:, 0]]))
    head_output = np.concatenate((p.head_output, b.asked[:, 1].astype(np.int32)))
    runs = head_row >= 0  # the gradient of an argument may be that of an output: a variable
    t = lay_out(b.kinds, rows, head_row[runs], head_output[runs])
    recomputed = np.zeros(1, dtype=np.bool_)
    best = -1
    place = 0
    for k in range(match_ranges.shape[0]):
        pool = allocate(t, recomputed, t.first, t.reads, match_ranges[k], limit)[0]
        if pool <= limit:
            best = pool
            place = k
            limit = pool - 1
    return best, place
