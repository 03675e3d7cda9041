"""Compute the exact memory and the work of trees, in compiled code.

The memory of a schedule is the most bytes alive at once in its training step (``schedules.rows``),
because its arena is hardly larger. Compiled code makes no Python object for a node, so a search can
evaluate thousands of schedules.
"""

from __future__ import annotations

import sys
from typing import Sequence

import numpy as np

from memonger.graph.arrays import SignatureArrays, join, signature_arrays
from memonger.graph.operators.recorded import PRODUCTS
from memonger.planners.annealing import empty_memo
from memonger.planners.trees.trees import Positions
from memonger.schedules.rows import NodeVariants
from memonger.schedules.training_step import Parts
from memonger.support.kernels import Struct, compiled
from memonger.support.types import Doubles, Int32s, Int64s

ONE_PASS = 1e9  # the work of one forward pass where it is not counted in FLOPs


class Problem(Struct):
    """A network as arrays, for searches in compiled code."""

    positions: Positions
    variants: NodeVariants
    signatures: SignatureArrays
    gradients: Int64s
    node: Int32s
    views: bool
    one_pass: float


class Limits(Struct):
    """Limits of the memory and the work of a tree, and which of the two is minimized."""

    most_bytes: int
    most_work: float
    by_work: bool


def make_problem(parts: Parts, weights: Doubles | None = None) -> Problem:
    """Make the arrays of a network.

    ``weights`` is the work of each node, in any unit; by default its FLOPs.
    """
    node = np.array(parts.work.operators, dtype=np.int32)
    positions = _positions(parts, node, weights)
    return Problem(
        positions=positions,
        variants=parts.variants,
        signatures=signature_arrays(parts.signatures),
        gradients=np.array(parts.written, dtype=np.int64).reshape(-1, 2),
        node=node,
        views=not parts.mkldnn,
        one_pass=max(1.0, float(positions.work.sum())),
    )


def _positions(parts: Parts, node: Int32s, weights: Doubles | None) -> Positions:
    workload, graph, count = parts.work, parts.work.training.graph, len(node)
    position = positions_of_nodes(node, len(graph.nodes))

    def join_lists(lists: Sequence[Sequence[int]]) -> tuple[Int32s, Int32s, Int64s]:
        start, nodes = join([lists[x] for x in node])
        return start.astype(np.int32), position[nodes], np.repeat(np.arange(count), np.diff(start))

    read_start, read, reader = join_lists(workload.inputs)
    want_start, want, wanting = join_lists(workload.reads)
    last, first_want = np.full(count, -1, dtype=np.int32), np.full(count, count, dtype=np.int32)
    np.maximum.at(last, read, reader)
    np.minimum.at(first_want, want, wanting)
    heads = np.unique(position[[a for a, _ in graph.heads]])
    heads = heads[heads >= 0]
    if weights is None:
        work = graph.flops[node].astype(np.float64)
    else:  # sums of integers do not depend on the order
        work = np.ceil(weights[node] * (ONE_PASS / max(float(weights[node].sum()), 1e-300)))
    if not work.any():  # a network of copies, whose operators all count the same
        work[:] = 1.0
    return Positions(
        read_start=read_start,
        read=read,
        want_start=want_start,
        want=want,
        last=last,
        first_want=first_want,
        heads=heads,
        always_saved=np.isin(np.arange(count), heads) | ~workload.recomputable[node],
        gradient=np.isin(node, workload.gradients),
        costly=np.array([graph.nodes[x].op in PRODUCTS for x in node], dtype=np.bool_),
        work=work,
        forced=workload.forced[node] if workload.forced.any() else np.zeros(0, dtype=np.bool_),
    )


def positions_of_nodes(node: Int32s, nodes: int) -> Int32s:
    """Return the position of each of ``nodes`` forward nodes; -1 for those that never run."""
    position = np.full(nodes, -1, dtype=np.int32)
    position[node] = np.arange(len(node))
    return position


def price_tree(problem: Problem, tree: Int32s, most_work: float) -> tuple[int, float] | None:
    """Return the bytes and the work of a tree; None if it takes more work than ``most_work``.

    The bytes are the most that are alive at once in its schedule, without outputs and gradients.
    """
    alive, work = compiled.evaluate_tree(problem, tree, most_work, sys.maxsize, empty_memo(1))
    return (alive, work) if alive >= 0 else None
