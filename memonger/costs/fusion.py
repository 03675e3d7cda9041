"""MXNet's pointwise fusion, replayed on a training graph: what it makes of a plan on a GPU.

Where ``MXNET_USE_FUSION`` is on, the executor of a GPU puts pointwise operators into fused ones
before memory is planned. A fused operator makes all results that anybody outside reads at once, so
that results may be alive together that were freed one after the other.

1. Which operators are fused with which: ``GetCompatibleSubsets`` in
   ``src/executor/simple_partition_pass.h``. In the order in which they run, each joins the sets of
   its inputs, unless an operator between the two cannot be fused, or one of the two is part of the
   forward pass (recomputed copies are not) and the other is not.
2. What is left of the graph: ``CopyAndReplaceSubgraphs`` in
   ``src/executor/pointwise_fusion_pass.cc``. Control dependencies on what is fused are lost, so
   that operators may run in another order. Where the variables would then come in another order,
   nothing is fused (``InitGraph`` in ``src/executor/graph_executor.cc``).
3. Memory is planned for it as for any graph. Every output of a fused operator may take the memory
   of any of its inputs (``_FusedOp`` in ``src/operator/fusion/fused_op.cc``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memonger.costs.allocator import all_read, entries_read, least_pool, order_and_reads
from memonger.costs.replay import Replay, replay_in_order
from memonger.graph.arrays import KindArrays, RowKind, arrays_of, gathered, ragged, tables_of, walk
from memonger.graph.operators.inplace import fused_as
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled

FUSED = RowKind("_FusedOp", {}, 0, (), (), ())  # its outputs are in the tables alone
MOST_INPUTS = 63  # of a fused operator that can give up their memory: `allocate` has a bit for each


class Fusible(NamedTuple):
    """What fusion must know of a training graph beside its ``Tables``."""

    joins: np.ndarray  # whether each row is fused with what it reads; empty: nothing is fused
    starts: np.ndarray  # and with what reads it
    wait_start: np.ndarray  # of each row what must have run before it (control dependencies):
    wait_row: np.ndarray  # of a recomputed operator the copy, unless an original waits
    kinds: KindArrays
    kind: np.ndarray  # of each row


def unfused() -> Fusible:
    """Return what says that nothing is fused."""
    no_row, nothing = np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.int32)
    return Fusible(no_row, no_row, nothing, nothing, arrays_of(()), nothing)


def fusible(training: TrainingGraph) -> Fusible:
    """Look up which rows of a training graph can be fused, and what they wait for."""
    graph, same = training.graph, training.same
    n = len(graph.nodes)
    inputs = [name for name, op in zip(training.names[:n], training.ops) if op == "null"]
    if len(set(inputs)) < len(inputs):  # CheckForInputNameDuplicates
        return unfused()
    waits: list[list[int]] = [[same[d] for d in node.deps] for node in graph.nodes] * 2
    waits += [[] for _ in range(2 * n, len(training.ops))]
    for row, before in training.waits:
        waits[row].append(before)
    start, flat = ragged(waits)
    known = {id(kind): kind for kind in training.kinds}
    number = {key: k for k, key in enumerate(known)}
    kind = np.array([number[id(each)] for each in training.kinds], dtype=np.int32)
    how = np.array([fused_as(each.op, each.attrs) for each in known.values()], dtype=np.bool_)
    joins, starts = how[kind].T.copy()
    waits_of = start.astype(np.int32), flat.astype(np.int32)
    return Fusible(joins, starts, *waits_of, arrays_of(list(known.values())), kind)


def replay_fused(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    If anything is fused, the fused operators are rows behind the others, of which some run no more,
    and nothing is recomputed in the sense of marks.
    """
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = order_and_reads(training.tables, mask)
    parts = fusible(training)
    member, count = fused_sets(training.tables, parts, mask, order)
    if count:
        fused, tables, phase = fuse(training.tables, parts, mask, order, member, count)
        if fused:
            made = replace(
                training,
                tables=tables,
                names=(*training.names, *[FUSED.op] * count),
                ops=(*training.ops, *[FUSED.op] * count),
                kinds=(*training.kinds, *[FUSED] * count),
                phases=np.concatenate([training.phases, training.phases[phase]]),
            )
            return replay_in_order(made, mask[:0], tables.first, tables.reads)
    return replay_in_order(training, mask, order, reads)


def fused_forward(training: TrainingGraph, recomputed: np.ndarray) -> list[list[int]]:
    """List the operators (nodes) of each fused operator of the forward pass, in execution order.

    Those that reach farthest come first: what they read is held the longest.
    """
    t, mask = training.tables, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = order_and_reads(t, mask)
    member, count = fused_sets(t, fusible(training), mask, order)
    groups: dict[int, list[int]] = {}
    for row in order[order < t.forward].tolist() if count else ():
        if member[row] >= 0:
            groups.setdefault(int(member[row]), []).append(row)
    return sorted(groups.values(), key=lambda nodes: nodes[0] - nodes[-1])


@compiled
def plan_bytes(t, f, recomputed, order, reads, match_ranges, limit):  # type: ignore[no-untyped-def]
    """The bytes of the pool that MXNet plans, fused or not; as ``allocator.least_pool``."""
    member, count = fused_sets(t, f, recomputed, order)
    if count:
        fused, made, _ = fuse(t, f, recomputed, order, member, count)
        if fused:
            none = recomputed[:0]
            return least_pool(made, none, made.first, made.reads, match_ranges, limit)[0]
    return least_pool(t, recomputed, order, reads, match_ranges, limit)[0]


# -- which operators are fused ----------------------------------------------------------------


@compiled
def _has(sets, one):  # type: ignore[no-untyped-def]
    return (sets[one // 64] >> np.uint64(one % 64)) & np.uint64(1) != 0


@compiled
def _add(sets, one):  # type: ignore[no-untyped-def]
    sets[one // 64] |= np.uint64(1) << np.uint64(one % 64)


@compiled
def fused_sets(t, f, recomputed, order):  # type: ignore[no-untyped-def]
    """Of each row the fused operator that it becomes part of, or -1; and how many there are.

    A row joins the sets of what it reads, and makes one set of them, but for those that it depends
    on through what cannot be fused (``behind``). A set depends on what any of its rows depends on,
    and so does all that depends on the set.
    """
    if not f.starts.shape[0]:
        return np.zeros(0, dtype=np.int64), 0
    count, last = order.shape[0], -1
    place = np.empty(t.variable.shape[0], dtype=np.int64)
    place[order] = np.arange(count)
    source = np.repeat(place, np.diff(t.output_start))[all_read(t, recomputed)]
    for row in t.head_row[: t.outputs]:
        last = max(last, place[row])  # of the forward pass
    most = np.sum(f.starts[order])
    behind = np.zeros((count, most // 64 + 1), dtype=np.uint64)  # of each place sets, as bits
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
                _add(behind[i], theirs)
            elif (i > last) == (k > last) and not _has(behind[i], theirs):
                if mine < 0:
                    mine = theirs
                    continue
                for j in range(begin[theirs], i):
                    if member[j] == theirs:
                        member[j] = mine
                    if _has(behind[j], theirs):
                        _add(behind[j], mine)
                begin[mine] = min(begin[mine], begin[theirs])
        if mine >= 0:
            for j in range(begin[mine], i):
                if member[j] == mine or _has(behind[j], mine):
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


# -- the graph that is left -------------------------------------------------------------------


@compiled
def _by(key, keys):  # type: ignore[no-untyped-def]
    """The items of each key: where they start, and which they are, in their order."""
    items = np.argsort(key, kind="mergesort")
    return np.searchsorted(key[items], np.arange(keys + 1)), items


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
    """Fuse a training graph as MXNet does, if it does (bool); ``member, fused`` as of `fused_sets`.

    The Tables are of what is left: all rows of ``t``, then the fused operators; ``first`` are those
    that run. Also a row of each fused operator.
    """
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
    out_start, items = _by(member[maker[made]], fused)
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
    start, items = _by(np.concatenate((reader[inside], waiter[within])), rows + reads)
    before = np.concatenate((met, wait[within]))[items]
    given = walk(0, start, before, before, making, making)[0]
    given = given[given >= rows] - rows
    taker = member[np.repeat(np.arange(rows), np.diff(t.read_start))[given]]
    given = read[given]
    once = _firsts(given, taker, outputs)
    given, taker = given[once], taker[once]
    in_start = np.searchsorted(taker, np.arange(fused + 1))

    # Its memory: each output, the largest first, may take that of each input.
    k = f.kinds
    like = k.output_start[f.kind[making]] + made - t.output_start[making]
    largest = np.argsort(t.elements[made], kind="mergesort")[::-1]  # of equals the last
    largest = largest[_by(member[making][largest], fused)[1]]
    out, which = gathered(out_start, taker)
    number = which - in_start[taker[which]]
    fits = number < MOST_INPUTS
    out, which, number = out[fits], which[fits], number[fits]
    options = _by(taker[which], fused)[0][1:]
    kinds = KindArrays(
        variable=_then(k.variable, np.zeros(fused)),
        reads=_then(k.reads, np.ones(fused)),
        ignored_start=_then(k.ignored_start, k.ignored.shape[0] + in_start[1:]),
        ignored=_then(k.ignored, np.zeros(given.shape[0])),
        output_start=_then(k.output_start, k.elements.shape[0] + out_start[1:]),
        elements=_then(k.elements, k.elements[like]),
        itemsize=_then(k.itemsize, k.itemsize[like]),
        dtype=_then(k.dtype, k.dtype[like]),
        rank=_then(k.rank, k.rank[like]),
        made=_then(k.made, largest - out_start[member[making]]),
        option_start=_then(k.option_start, k.option_input.shape[0] + options),
        option_input=_then(k.option_input, number),
        option_output=_then(k.option_output, out - out_start[taker[which]]),
        option_identity=_then(k.option_identity, np.zeros(out.shape[0])),
        sizes=k.sizes,
    )

    # The graph that is left. Nobody waits for what is fused.
    new = np.arange(outputs)
    new[made] = outputs + np.arange(made.shape[0])
    output_start = _then(t.output_start, outputs + out_start[1:])
    row_of = np.repeat(np.arange(rows + fused), np.diff(output_start)).astype(np.int32)
    entry, head = new[np.concatenate((read, given))], new[head]
    left = member[wait] < 0
    wait_start, items = _by(node[waiter[left]], rows + fused)
    tables = tables_of(
        kinds,
        _then(f.kind, k.variable.shape[0] + np.arange(fused)),
        _then(t.read_start, reads + in_start[1:]),
        row_of[entry],
        (entry - output_start[row_of[entry]]).astype(np.int32),
        wait_start.astype(np.int32),
        wait[left][items].astype(np.int32),
        row_of[head],
        (head - output_start[row_of[head]]).astype(np.int32),
        t.outputs,
    )
    was, runs = order[t.variable[order]], tables.first[tables.variable[tables.first]]
    same = was.shape[0] == runs.shape[0] and np.all(was == runs)  # else nothing is fused
    last = np.zeros(fused, dtype=np.int64)
    last[member[making]] = making
    return same, tables, last
