"""MXNet's pointwise fusion, replayed on a training graph: what it makes of a plan on a GPU.

Where ``MXNET_USE_FUSION`` is on, pointwise operators are fused before memory is planned. A fused
operator makes all results that anybody outside reads at once, which may then be alive together.

1. Which are fused: ``GetCompatibleSubsets`` in ``src/executor/simple_partition_pass.h``. In the
   order in which they run, each joins the sets of its inputs, unless an operator between the two
   cannot be fused, or one alone is part of the forward pass (recomputed copies are not).
2. What is left: ``CopyAndReplaceSubgraphs`` in ``src/executor/pointwise_fusion_pass.cc``. Control
   dependencies on what is fused are lost. Where the variables would then come in another order,
   nothing is fused (``InitGraph`` in ``src/executor/graph_executor.cc``).
3. Memory is planned as for any graph. Every output of a fused operator may take the memory of any
   of its inputs (``_FusedOp`` in ``src/operator/fusion/fused_op.cc``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memonger.costs.replay import Replay, order_and_reads, replay
from memonger.graph.arrays import GraphArrays, by_key
from memonger.graph.operators.inplace import fused_as
from memonger.graph.training import TrainingGraph
from memonger.support.kernels import call


class Fusible(NamedTuple):
    """What fusion must know of a training graph beside its ``GraphArrays``."""

    joins: np.ndarray  # whether each row is fused with what it reads; empty: nothing is fused
    starts: np.ndarray  # and with what reads it
    wait_start: np.ndarray  # of each row what must have run before it (control dependencies):
    wait_row: np.ndarray  # of a recomputed operator the copy, unless an original waits


#: Of a network in which nothing is fused.
UNFUSED = Fusible(*[np.zeros(0, dtype) for dtype in (np.bool_, np.bool_, np.int32, np.int32)])


def fusible(training: TrainingGraph) -> Fusible:
    """Look up which rows of a training graph can be fused, and what they wait for."""
    graph, same = training.graph, training.same
    n = len(graph.nodes)
    inputs = [name for name, op in zip(training.names[:n], training.ops) if op == "null"]
    if len(set(inputs)) < len(inputs):  # CheckForInputNameDuplicates
        return UNFUSED
    deps = [(x, same[d]) for x, node in enumerate(graph.nodes) for d in node.deps]
    waits = [*deps, *[(n + x, d) for x, d in deps], *training.waits]
    row, before = np.array(waits, dtype=np.int32).reshape(-1, 2).T.copy()
    start, items = by_key(row, len(training.ops))
    joins, starts = np.array([fused_as(s.op, s.attrs) for s in training.signatures]).T.copy()
    return Fusible(joins, starts, start, before[items])


def replay_fused(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    The fused operators are rows behind the others; nothing is recomputed in the sense of marks.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = order_and_reads(t, mask)
    parts = fusible(training)
    count, member = fused_sets(t, parts, mask, order)
    fused, arrays = fuse(t, parts, mask, order, member, count) if count else (False, t)
    if not fused:
        return replay(training, mask)
    rows = np.unique(member, return_index=True)[1][-count:]  # the first of each fused operator
    made = replace(
        training,
        arrays=arrays,
        names=(*training.names, *["_FusedOp"] * count),
        ops=(*training.ops, *["_FusedOp"] * count),
        phases=np.append(training.phases, training.phases[rows]),
    )
    return replay(made, mask[:0])


def fused_forward(training: TrainingGraph, recomputed: np.ndarray) -> list[list[int]]:
    """List the operators (nodes) of each fused operator of the forward pass, in execution order.

    Those that reach farthest come first: what they read is held the longest.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = order_and_reads(t, mask)
    count, member = fused_sets(t, fusible(training), mask, order)
    order = order[order < t.forward]
    groups = [order[member[order] == k].tolist() for k in range(count)]
    return sorted(filter(None, groups), key=lambda nodes: nodes[0] - nodes[-1])


def fused_sets(
    t: GraphArrays, parts: Fusible, recomputed: np.ndarray, order: np.ndarray
) -> tuple[int, np.ndarray]:
    """Count the fused operators; of each row that which it becomes part of, or -1."""
    count, member = call("fused_sets", t, parts, recomputed, order)
    return count, member


def fuse(
    t: GraphArrays,
    parts: Fusible,
    recomputed: np.ndarray,
    order: np.ndarray,
    member: np.ndarray,
    count: int,
) -> tuple[bool, GraphArrays]:
    """Tell whether MXNet fuses these sets, and make the arrays of all rows and what is fused."""
    fused, made = call("fuse", t, parts, recomputed, order, member, count)
    return fused, GraphArrays(*made)
