"""Replay MXNet's pointwise fusion on a training graph: what it makes of a plan on a GPU.

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
from typing import Any

import numpy as np

from memonger.costs.replay import Fused, Replay, replay
from memonger.graph.arrays import KEPT, GraphArrays, Signature, find_owners, gather
from memonger.graph.operators.inplace import fused_as
from memonger.graph.training import TrainingGraph
from memonger.support.kernels import Struct, compiled


class Fusible(Struct):
    """What fusion must know of a training graph beside its ``GraphArrays``."""


#: Of a network in which nothing is fused.
UNFUSED = Fusible(*[np.zeros(0, dtype) for dtype in (np.bool_, np.bool_, *[np.int32] * 3)])

FUSED_OPERATOR = Signature("_FusedOp", {}, 0, (), (), ())  # what it has is in `Fused`


def find_fusible(training: TrainingGraph) -> Fusible:
    """Look up which rows of a training graph can be fused, and what they wait for."""
    nodes, same, t = training.graph.nodes, training.same, training.arrays
    n = len(nodes)
    inputs = [name for name, op in zip(training.names[:n], training.ops) if op == "null"]
    if len(set(inputs)) < len(inputs):  # CheckForInputNameDuplicates
        return UNFUSED
    deps = [(x, same[d]) for x, node in enumerate(nodes) for d in node.deps]
    waits = [*deps, *[(n + x, d) for x, d in deps], *training.waits]
    row, before = np.array(waits, dtype=np.int32).reshape(-1, 2).T.copy()
    start, items = compiled.group_by_key(row, len(training.ops))
    joins, starts = np.array([fused_as(s.op, s.attrs) for s in training.signatures]).T.copy()
    fusible = Fusible(joins, starts, start, before[items], UNFUSED.forward)
    no_marks = np.zeros(t.forward, dtype=np.bool_)
    _, sets = compiled.find_fused_sets(t, fusible, no_marks, t.first)
    with_forward: Fusible = fusible.replace(forward=sets)
    return with_forward


def replay_fused(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    Fused operators are rows behind the others; nothing is recomputed in the sense of marks.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = compiled.order_and_reads(t, mask)
    is_fused, fused, order, reads = compiled.fuse(t, find_fusible(training), mask, order, reads)
    if not is_fused:
        return replay(training, mask)
    count = len(fused.out_start) - 1
    output = np.append(fused.out, 0)[fused.out_start[:-1]]  # of each; any if it never runs
    row = np.searchsorted(t.output_start, output, side="right") - 1
    step = replace(
        training,
        arrays=_append_fused(t, mask, fused, order, reads),
        signatures=(*training.signatures, *[FUSED_OPERATOR] * count),
        names=(*training.names, *[FUSED_OPERATOR.op] * count),
        phases=np.append(training.phases, training.phases[row]),
        origin=np.append(training.origin, training.origin[row]),
    )
    return replay(step, mask[:0])


def _append_fused(
    t: GraphArrays, mask: np.ndarray, fused: Fused, order: np.ndarray, reads: np.ndarray
) -> GraphArrays:
    """Make the arrays of all rows and of what is fused, which run in this order."""
    out, count = fused.out, len(fused.out_start) - 1
    entry_now = np.arange(len(reads))  # what each entry has become
    entry_now[out] = len(reads) + np.arange(len(out))

    def append_starts(start: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return np.append(start, start[-1] + np.cumsum(counts)).astype(np.int32)

    def find_read(entry: np.ndarray, row: np.ndarray, owner: np.ndarray) -> np.ndarray:
        return entry_now[compiled.find_entries(t, mask, entry, row, owner)]

    start = append_starts(t.output_start, np.diff(fused.out_start))
    maker = find_owners(start)
    variable = np.append(t.variable, np.zeros(count, dtype=np.bool_))
    itemsize, rank = np.append(t.itemsize, t.itemsize[out]), np.append(t.rank, t.rank[out])
    # What each row reads, and each fused operator.
    entry = t.output_start[t.read_row] + t.read_output
    fused_read = entry_now[fused.read]
    entry = np.append(find_read(entry, t.read_row, t.read_owner), fused_read)
    ignored = np.append(t.read_ignored, np.zeros(len(fused_read), dtype=np.bool_))
    used = ~ignored & ~variable[maker[entry]]
    read_start = append_starts(t.read_start, np.diff(fused.read_start))
    # Each output of a fused operator may take the memory of each input.
    taker = find_owners(fused.read_start)
    output, which = gather(fused.out_start, taker)
    source, output = fused_read[which], output + len(reads)
    fits = (rank[source] == rank[output]) & (itemsize[source] == itemsize[output])
    fits &= ~variable[maker[source]]
    options = np.bincount(taker[which[fits]], minlength=count)
    inplace = find_read(t.inplace_entry, t.inplace_row, t.inplace_owner)
    inplace = np.append(inplace, source[fits])
    head = find_read(t.head_entry, t.head_row, t.head_owner)
    columns: dict[str, Any] = {}
    for name, entries in ("use", entry[used]), ("inplace", inplace), ("head", head):
        columns[f"{name}_entry"] = entries.astype(np.int32)
        columns[f"{name}_row"] = maker[entries].astype(np.int32)
        columns[f"{name}_owner"] = np.full(len(entries), KEPT, dtype=np.int32)
    arrays: GraphArrays = t.replace(
        forward=0,
        variable=variable,
        read_start=read_start,
        read_row=maker[entry].astype(np.int32),
        read_output=(entry - start[maker[entry]]).astype(np.int32),
        read_owner=np.full(len(entry), KEPT, dtype=np.int32),
        read_ignored=ignored,
        use_start=np.append(0, np.cumsum(used))[read_start].astype(np.int32),
        output_start=start,
        elements=np.append(t.elements, t.elements[out]),
        itemsize=itemsize,
        rank=rank,
        by_size=np.append(t.by_size, entry_now[fused.by_size]).astype(np.int32),
        inplace_start=append_starts(t.inplace_start, options),
        inplace_output=np.append(t.inplace_output, output[fits]).astype(np.int32),
        inplace_identity=np.append(t.inplace_identity, ~fits[fits]),
        first=order,
        walk_row=t.walk_row[:0],
        walk_owner=t.walk_row[:0],
        reads=np.append(reads, reads[out]),
        **columns,
    )
    return arrays


def list_fused_forward(training: TrainingGraph, recomputed: np.ndarray) -> list[list[int]]:
    """List the operators (nodes) of each fused operator of the forward pass, in execution order.

    Those that reach farthest come first: what they read is held the longest.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = compiled.order_and_reads(t, mask)
    count, sets = compiled.find_fused_sets(t, find_fusible(training), mask, order)
    sets[order >= t.forward] = -1
    groups = [order[sets == k].tolist() for k in range(count)]
    return sorted(filter(None, groups), key=lambda nodes: nodes[0] - nodes[-1])
