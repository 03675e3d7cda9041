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

from memonger.costs.replay import (
    Replay,
    all_read,
    entries_read,
    least_pool,
    order_and_reads,
    replay_in_order,
)
from memonger.graph.arrays import (
    KEPT,
    SignatureArrays,
    by_key,
    gathered,
    graph_arrays,
    ragged,
    starts_of,
    walk,
)
from memonger.graph.operators.inplace import fused_as
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled


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
    waits: list[list[int]] = [[same[d] for d in node.deps] for node in graph.nodes] * 2
    waits += [[] for _ in range(2 * n, len(training.ops))]
    for row, before in training.waits:
        waits[row].append(before)
    start, flat = ragged(waits)
    joins, starts = np.array(
        [fused_as(signature.op, signature.attrs) for signature in training.signatures]
    ).T.copy()
    return Fusible(joins, starts, start.astype(np.int32), flat.astype(np.int32))


def replay_fused(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    The fused operators are rows behind the others; nothing is recomputed in the sense of marks.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = order_and_reads(t, mask)
    parts = fusible(training)
    member, count = fused_sets(t, parts, mask, order)
    fused, arrays = fuse(t, parts, mask, order, member, count) if count else (False, t)
    if not fused:
        return replay_in_order(training, mask, order, reads)
    rows = np.unique(member, return_index=True)[1][-count:]  # the first of each fused operator
    made = replace(
        training,
        arrays=arrays,
        names=(*training.names, *["_FusedOp"] * count),
        ops=(*training.ops, *["_FusedOp"] * count),
        phases=np.append(training.phases, training.phases[rows]),
    )
    return replay_in_order(made, mask[:0], arrays.first, arrays.reads)


def fused_forward(training: TrainingGraph, recomputed: np.ndarray) -> list[list[int]]:
    """List the operators (nodes) of each fused operator of the forward pass, in execution order.

    Those that reach farthest come first: what they read is held the longest.
    """
    t, mask = training.arrays, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = order_and_reads(t, mask)
    member, count = fused_sets(t, fusible(training), mask, order)
    order = order[order < t.forward]
    groups = [order[member[order] == k].tolist() for k in range(count)]
    return sorted(filter(None, groups), key=lambda nodes: nodes[0] - nodes[-1])


@compiled
def plan_bytes(t, f, recomputed, order, reads, match_ranges, limit):  # type: ignore[no-untyped-def]
    """The bytes of the pool that MXNet plans, fused or not; as `least_pool`."""
    member, count = fused_sets(t, f, recomputed, order)
    if count:
        fused, made = fuse(t, f, recomputed, order, member, count)
        if fused:
            none = recomputed[:0]
            return least_pool(made, none, made.first, made.reads, match_ranges, limit)[0]
    return least_pool(t, recomputed, order, reads, match_ranges, limit)[0]


@compiled
def fused_sets(t, f, recomputed, order):  # type: ignore[no-untyped-def]
    """Of each row the fused operator that it becomes part of, or -1; and how many there are.

    A set depends on what any of its rows depends on, and so does all that depends on the set.
    """
    if not f.starts.shape[0]:
        return np.zeros(0, dtype=np.int64), 0
    count = order.shape[0]
    place = np.empty(t.variable.shape[0], dtype=np.int64)
    place[order] = np.arange(count)
    source = np.repeat(place, np.diff(t.output_start))[all_read(t, recomputed)]
    last = place[t.head_row[: t.outputs]].max()  # of the forward pass
    most = np.sum(f.starts[order])
    # Of each place, as bits, the sets that it depends on through what cannot be fused.
    behind = np.zeros((count, most // 64 + 1), dtype=np.uint64)
    bit = np.uint64(1) << (np.arange(most) % 64).astype(np.uint64)
    member = np.full(count, -1, dtype=np.int64)
    begin = np.zeros(most, dtype=np.int64)
    sets = 0
    for i in range(count):
        mine = -1
        row = order[i]
        sources = source[t.read_start[row] : t.read_start[row + 1]]
        for k in sources:
            behind[i] |= behind[k]
        for k in sources:
            theirs = member[k]
            if theirs < 0 or theirs == mine:
                continue
            if not f.joins[row]:
                behind[i, theirs // 64] |= bit[theirs]
            elif (i > last) == (k > last) and not behind[i, theirs // 64] & bit[theirs]:
                if mine < 0:
                    mine = theirs
                    continue
                for j in range(begin[theirs], i):
                    if member[j] == theirs:
                        member[j] = mine
                    if behind[j, theirs // 64] & bit[theirs]:
                        behind[j, mine // 64] |= bit[mine]
                begin[mine] = min(begin[mine], begin[theirs])
        if mine >= 0:
            for j in range(begin[mine], i):
                if member[j] == mine or behind[j, mine // 64] & bit[mine]:
                    behind[j] |= behind[i]
        elif f.starts[row]:
            mine = sets
            begin[mine] = i
            sets += 1
        member[i] = mine
    several = np.bincount(member[member >= 0], minlength=sets + 1) > 1
    found = np.full(t.variable.shape[0], -1, dtype=np.int64)
    found[order] = np.where(several, np.cumsum(several) - 1, -1)[member]  # -1: the last of them
    return found, several.sum()


@compiled
def _firsts(entry, by, entries):  # type: ignore[no-untyped-def]
    """Whether each entry is there for the first time; for the first time with its key ``by``."""
    last = np.full(entries, -1)
    first = np.empty(entry.shape[0], dtype=np.bool_)
    for k in range(entry.shape[0]):
        first[k] = last[entry[k]] != by[k]
        last[entry[k]] = by[k]
    return first


@compiled
def _then(values, more):  # type: ignore[no-untyped-def]
    return np.concatenate((values, more.astype(values.dtype)))


@compiled
def fuse(t, f, recomputed, order, member, fused):  # type: ignore[no-untyped-def]
    """Tell whether MXNet fuses these sets, and make the arrays of all rows and what is fused."""
    rows, outputs, reads = t.variable.shape[0], t.elements.shape[0], t.read_row.shape[0]
    maker = np.repeat(np.arange(rows), np.diff(t.output_start))
    read = all_read(t, recomputed)
    head = entries_read(t, recomputed, t.head_entry, t.head_row, t.head_owner)
    node = np.where(member < 0, np.arange(rows), rows + member)  # that each row is, or is part of

    # The outputs of a fused operator: what others read, in the order in which they do.
    place, which = gathered(t.read_start, order)
    reader, source = order[which], maker[read[place]]
    made = np.concatenate((read[place], head))
    by = np.concatenate((node[reader], np.full(head.shape[0], -1)))
    made = made[(node[maker[made]] >= rows) & (node[maker[made]] != by)]
    made = made[_firsts(made, np.zeros_like(made), outputs)]
    out_start, items = by_key(member[maker[made]], fused)
    made = made[items]
    making = maker[made]

    # Its inputs: what its rows read of others, as they meet it depth first from its outputs.
    waits, which = gathered(f.wait_start, order)
    waiter, wait = order[which], f.wait_row[waits].astype(np.int64)
    copied = np.zeros(rows, dtype=np.bool_)
    copied[: t.forward] = recomputed
    wait += t.forward * ((waiter >= t.forward) & copied[wait])
    within = node[waiter] == node[wait]
    inside = member[reader] >= 0
    met = np.where(node[reader] == node[source], source, rows + place)[inside]
    start, items = by_key(np.concatenate((reader[inside], waiter[within])), rows + reads)
    before = np.concatenate((met, wait[within]))[items]
    given = walk(0, start, before, before, making, making)[0]
    given = given[given >= rows] - rows
    taker = member[np.repeat(np.arange(rows), np.diff(t.read_start))[given]]
    given = read[given]
    once = _firsts(given, taker, outputs)
    given, taker = given[once], taker[once]
    in_start = starts_of(taker, fused)

    # Its memory: each output, the largest first, may take that of each input. A row: a signature.
    largest = np.argsort(t.elements[made], kind="mergesort")[::-1]  # of equals the last
    largest = largest[by_key(member[making][largest], fused)[1]]
    out, which = gathered(out_start, taker)
    options = starts_of(taker[which], fused)[1:]
    offering = np.repeat(np.arange(rows), np.diff(t.inplace_start))
    output_start = _then(t.output_start, outputs + out_start[1:])
    signatures = SignatureArrays(
        variable=_then(t.variable, np.zeros(fused)),
        reads=np.ones(rows + fused, dtype=np.bool_),
        ignored_start=_then(t.read_start, reads + in_start[1:]).astype(np.int64),
        ignored=_then(t.read_ignored, np.zeros(given.shape[0])),
        output_start=output_start.astype(np.int64),
        elements=_then(t.elements, t.elements[made]),
        itemsize=_then(t.itemsize, t.itemsize[made]),
        dtype=np.zeros(outputs + made.shape[0], dtype=np.int32),
        rank=_then(t.rank, t.rank[made]),
        made=_then(t.made - t.output_start[maker], largest - out_start[member[making]]),
        option_start=_then(t.inplace_start, t.inplace_input.shape[0] + options),
        option_input=_then(t.inplace_input, which - in_start[taker[which]]),
        option_output=_then(
            t.inplace_output - t.output_start[offering], out - out_start[taker[which]]
        ),
        option_identity=_then(t.inplace_identity, np.zeros(out.shape[0])),
        sizes=t.sizes,
    )

    # The graph that is left. Nobody waits for what is fused.
    new = np.arange(outputs)
    new[made] = outputs + np.arange(made.shape[0])
    row_of = np.repeat(np.arange(rows + fused), np.diff(output_start)).astype(np.int32)
    entry, head = new[np.concatenate((read, given))], new[head]
    left = member[wait] < 0
    wait_start, items = by_key(node[waiter[left]], rows + fused)
    wait_row, read_row, head_row = wait[left][items].astype(np.int32), row_of[entry], row_of[head]
    read_output = (entry - output_start[read_row]).astype(np.int32)
    head_output = (head - output_start[head_row]).astype(np.int32)
    read_start = _then(t.read_start, reads + in_start[1:])
    arrays = graph_arrays(
        signatures,
        0,
        np.arange(rows + fused).astype(np.int32),
        (read_start, read_row, read_output, np.full_like(read_row, KEPT)),
        (wait_start, wait_row, np.full_like(wait_row, KEPT)),
        (head_row, head_output, np.full_like(head_row, KEPT)),
        t.outputs,
    )
    was, runs = order[t.variable[order]], arrays.first[arrays.variable[arrays.first]]
    return was.shape[0] == runs.shape[0] and np.all(was == runs), arrays
