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
from functools import lru_cache

import numpy as np

from memonger.costs.replay import Fused, Replay, replay
from memonger.graph.arrays import KEPT, Signature, find_owners, graph_arrays
from memonger.graph.operators.inplace import fused_as
from memonger.graph.operators.tensors import Tensors
from memonger.graph.training import TrainingGraph
from memonger.support.kernels import Struct, compiled
from memonger.support.types import Bools, Int32s


class Fusible(Struct):
    """What fusion must know of a training graph beside its ``GraphArrays``."""


#: Of a network in which nothing is fused.
UNFUSED = Fusible(*[np.zeros(0, dtype) for dtype in (np.bool_, np.bool_, *[np.int32] * 3)])


def find_fusible(training: TrainingGraph) -> Fusible:
    """Look up which rows of a training graph can be fused, and what they wait for.

    MXNet fuses nothing if two inputs have one name; `check_symbol` refuses such networks.
    """
    nodes, same, t = training.graph.nodes, training.same, training.arrays
    n = len(nodes)
    deps = [(x, same[d]) for x, node in enumerate(nodes) for d in node.deps]
    waits = [*deps, *[(n + x, d) for x, d in deps], *training.waits]
    row, before = np.array(waits, dtype=np.int32).reshape(-1, 2).T.copy()
    start, items = compiled.group_by_key(row, len(training.ops))
    joins, starts = np.array([fused_as(s.op, s.attrs) for s in training.signatures]).T.copy()
    fusible = Fusible(joins, starts, start, before[items], UNFUSED.forward)
    no_marks = np.zeros(t.forward, dtype=np.bool_)
    _, sets = compiled.find_fused_sets(t, fusible, no_marks, t.first)
    return fusible.replace(forward=sets)


def replay_fused(training: TrainingGraph, recomputed: Bools) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    Fused operators are rows behind the others; nothing is recomputed in the sense of marks.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = compiled.order_and_reads(t, mask)
    is_fused, fused, order, reads = compiled.fuse(t, find_fusible(training), mask, order, reads)
    if not is_fused:
        return replay(training, mask)
    return replay(_append_fused(training, mask, fused, order, reads), mask[:0])


@lru_cache(maxsize=256)
def _fused_signature(inputs: int, outputs: Tensors) -> Signature:
    """Return the signature of a fused operator; each output may take the memory of each input."""
    options = tuple([(j, k, False) for j in range(inputs) for k in range(len(outputs))])
    return Signature("_FusedOp", {}, inputs, (), options, outputs)


def _append_fused(
    training: TrainingGraph, mask: Bools, fused: Fused, order: Int32s, reads: Int32s
) -> TrainingGraph:
    """Make the step of all rows and of what is fused, which run in this order."""
    t, out, out_start = training.arrays, fused.out, fused.out_start
    makers, signatures = find_owners(t.output_start), list(training.signatures)
    tensors = [tensor for signature in signatures for tensor in signature.tensors]
    for first, last, count in zip(out_start, out_start[1:], np.diff(fused.read_start).tolist()):
        outputs = tuple([tensors[entry] for entry in out[first:last]])
        signatures.append(_fused_signature(count, outputs))
    distinct = {id(signature): signature for signature in signatures}
    numbers = {key: number for number, key in enumerate(distinct)}
    output_start = np.append(t.output_start, t.output_start[-1] + out_start[1:])
    maker = find_owners(output_start).astype(np.int32)
    entry_now = np.arange(len(maker), dtype=np.int32)  # what each entry has become
    entry_now[out] = entry_now[len(reads) :]

    def find_reads(entry: Int32s, row: Int32s, owner: Int32s, more: Int32s) -> list[Int32s]:
        entry = entry_now[np.append(compiled.find_entries(t, mask, entry, row, owner), more)]
        kept = np.full(len(entry), KEPT, dtype=np.int32)
        return [maker[entry], entry - output_start[maker[entry]], kept]

    entry = t.output_start[t.read_row] + t.read_output
    read_start = np.append(t.read_start, t.read_start[-1] + fused.read_start[1:])
    arrays = graph_arrays(
        list(distinct.values()),
        np.array([numbers[id(signature)] for signature in signatures], dtype=np.int32),
        [read_start, *find_reads(entry, t.read_row, t.read_owner, fused.read)],
        find_reads(t.head_entry, t.head_row, t.head_owner, out[:0]),
        t.outputs,
    )
    row = makers[np.append(out, 0)[out_start[:-1]]]  # of an output; any if it never runs
    return replace(
        training,
        arrays=arrays.replace(first=order, reads=np.append(reads, reads[out])),
        signatures=signatures,
        names=(*training.names, *["_FusedOp"] * len(row)),
        phases=np.append(training.phases, training.phases[row]),
        origin=np.append(training.origin, training.origin[row]),
    )


def list_fused_forward(training: TrainingGraph, recomputed: Bools) -> list[list[int]]:
    """List the operators (nodes) of each fused operator of the forward pass, in execution order.

    Those that reach farthest come first: what they read is held the longest.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = compiled.order_and_reads(t, mask)
    count, sets = compiled.find_fused_sets(t, find_fusible(training), mask, order)
    sets[order >= t.forward] = -1
    groups = [order[sets == k].tolist() for k in range(count)]
    return sorted(filter(None, groups), key=lambda nodes: nodes[0] - nodes[-1])
