"""MXNet's pointwise fusion, replayed on a training graph: what it makes of a plan on a GPU.

Where ``MXNET_USE_FUSION`` is on, the executor of a GPU puts pointwise operators into fused ones
before memory is planned. A fused operator has one output for each result that anybody outside
reads, all of them made when it runs, and it runs once all that it reads is there. So results that
were freed one after the other may be alive at once.

1. Which operators are fused with which: ``GetCompatibleSubsets`` in
   ``src/executor/simple_partition_pass.h``. In the order in which they run, each joins the sets of
   its inputs, unless an operator between the two cannot be fused, or one of the two is part of the
   forward pass and the other is not. Recomputed copies are not.
2. What is left of the graph: ``CopyAndReplaceSubgraphs`` in
   ``src/executor/pointwise_fusion_pass.cc``. Control dependencies on what is fused are lost, so
   that operators may run in another order. Where the variables would then come in another order,
   nothing is fused (``InitGraph`` in ``src/executor/graph_executor.cc``).
3. Memory is planned for it as for any graph. Every output of a fused operator may take the memory
   of any of its inputs (``_FusedOp`` in ``src/operator/fusion/fused_op.cc``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.costs.allocator import all_read, entries_read, least_pool, order_and_reads
from memonger.costs.replay import Replay, replay_in_order
from memonger.graph.arrays import KEPT, RowKind, Tables, ragged
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.pointwise import fused_as
from memonger.graph.order import gathered, walk
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled
from memonger.support.mxnet import Settings

FUSED_OP = "_FusedOp"
MOST_INPUTS = 63  # of a fused operator that can give up their memory: `allocate` has a bit for each


class Fusible(NamedTuple):
    """What fusion must know of a training graph beside its ``Tables``; empty: nothing is fused."""

    joins: np.ndarray  # whether each row is fused with what it reads
    starts: np.ndarray  # and with what reads it
    wait_start: np.ndarray  # of each row what must have run before it (control dependencies):
    wait_row: np.ndarray  # of a recomputed operator the copy, unless an original waits


def unfused() -> Fusible:
    """Return what says that nothing is fused."""
    no_row, nothing = np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.int32)
    return Fusible(no_row, no_row, nothing, nothing)


def fusible(training: TrainingGraph) -> Fusible:
    """Look up which rows of a training graph can be fused, and what they wait for."""
    graph, same = training.graph, training.same
    n = len(graph.nodes)
    inputs = [name for name, op in zip(training.names[:n], training.ops) if op == "null"]
    if len(set(inputs)) < len(inputs):  # CheckForInputNameDuplicates
        return unfused()
    how = {id(kind): fused_as(kind.op, kind.attrs) for kind in training.kinds}
    waits: list[list[int]] = [[same[d] for d in node.deps] for node in graph.nodes] * 2
    waits += [[] for _ in range(2 * n, len(training.ops))]
    for row, before in training.waits:
        waits[row].append(before)
    start, flat = ragged(waits)
    joins, starts = np.array([how[id(kind)] for kind in training.kinds], dtype=np.bool_).T.copy()
    return Fusible(joins, starts, start.astype(np.int32), flat.astype(np.int32))


class FusedGraph(NamedTuple):
    """A ``replay.Planned``: rows of a training graph, of which some run no more, and fused ones."""

    graph: ForwardGraph
    settings: Settings
    tables: Tables
    names: tuple[str, ...]
    ops: tuple[str, ...]
    kinds: tuple[RowKind, ...]
    phases: np.ndarray


def replay_fused(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    The result is of a `FusedGraph` if anything is fused, and recomputes nothing in the sense of
    marks then.
    """
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = order_and_reads(training.tables, mask)
    parts = fusible(training)
    member, count = fused_sets(training.tables, parts, mask, order)
    if count:
        fused, tables, last = fuse(training.tables, parts, mask, order, member, count)
        if fused:
            kinds = [training.kinds[row]._replace(op=FUSED_OP, attrs={}) for row in last]
            made = FusedGraph(
                graph=training.graph,
                settings=training.settings,
                tables=tables,
                names=(*training.names, *[training.names[row] for row in last]),
                ops=(*training.ops, *[FUSED_OP] * count),
                kinds=(*training.kinds, *kinds),
                phases=np.concatenate([training.phases, training.phases[last]]),
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
    start = np.zeros(keys + 1, dtype=np.int64)
    start[1:] = np.cumsum(np.bincount(key, minlength=keys))
    at = start.copy()
    items = np.empty(key.shape[0], dtype=np.int64)
    for i in range(key.shape[0]):
        items[at[key[i]]] = i
        at[key[i]] += 1
    return start, items


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
    that run. Also the row that makes the last output of each fused operator.
    """
    rows, outputs, inputs = t.variable.shape[0], t.elements.shape[0], t.read_row.shape[0]
    maker = np.repeat(np.arange(rows), np.diff(t.output_start))
    read = all_read(t, recomputed)
    head = entries_read(t, recomputed, t.head_entry, t.head_row, t.head_owner)
    node = np.where(member < 0, np.arange(rows), rows + member)  # that each row is, or is part of
    nodes = rows + fused

    # The outputs of a fused operator: what others read, in the order in which they do.
    place, which = gathered(t.read_start, order)
    reader, source = order[which], maker[read[place]]
    made = np.concatenate((read[place], head))
    by = np.concatenate((node[reader], np.full(head.shape[0], -1)))
    made = made[(node[maker[made]] >= rows) & (node[maker[made]] != by)]
    made = made[_firsts(made, np.zeros_like(made), outputs)]
    out_start, items = _by(member[maker[made]], fused)
    made = made[items]

    # The graph that is left, depth first. What a fused operator reads is there as nodes of its own:
    # its inputs come in the order in which its rows, depth first from its outputs, meet them.
    given = nodes + place
    waits, which = gathered(f.wait_start, order)
    waiter, wait = order[which], f.wait_row[waits].astype(np.int64)
    copied = np.zeros(rows, dtype=np.bool_)
    copied[: t.forward] = recomputed
    wait += t.forward * ((waiter >= t.forward) & copied[wait])
    within = node[waiter] == node[wait]
    left = within | (member[wait] < 0)  # nobody waits for what is fused
    waiter = np.where(within, waiter, node[waiter])[left]
    of = np.concatenate((reader, node[maker[made]], given, waiter))
    given = np.where(member[reader] < 0, node[source], given)
    given = np.where(node[reader] == node[source], source, given)
    to = np.concatenate((given, maker[made], node[source], wait[left]))
    start, items = _by(of, nodes + inputs)
    found = walk(0, start, to[items], to, node[maker[head]], to)[0]
    hidden = np.ones(nodes + inputs, dtype=np.bool_)
    hidden[:rows] = member >= 0
    hidden[rows:nodes] = False
    run = found[~hidden[found]]
    given = found[found >= nodes] - nodes
    taker = member[np.repeat(np.arange(rows), np.diff(t.read_start))[given]]
    items = _by(taker, fused)[1]
    given, taker = read[given[items]], taker[items]
    once = _firsts(given, taker, outputs)
    given, taker = given[once], taker[once]
    in_start = np.searchsorted(taker, np.arange(fused + 1))

    # Its tables: the outputs of fused operators are new entries.
    new = np.arange(outputs)
    new[made] = outputs + np.arange(made.shape[0])
    variable = np.concatenate((t.variable, np.zeros(fused, dtype=np.bool_)))
    output_start = _then(t.output_start, outputs + out_start[1:])
    maker_of = np.repeat(np.arange(nodes), np.diff(output_start)).astype(np.int32)
    held = ~t.variable[maker[given]]
    use = entries_read(t, recomputed, t.use_entry, t.use_row, t.use_owner)
    use_entry = new[np.concatenate((use, given[held]))]
    use_start = _then(t.use_start, use.shape[0] + _by(taker[held], fused)[0][1:])
    read_entry = new[np.concatenate((read, given))]
    head_entry = new[head]
    used = np.concatenate((use_entry[gathered(use_start, run)[0]], head_entry))
    used = np.bincount(used, minlength=outputs + made.shape[0])
    out, which = gathered(out_start, taker)
    number = which - in_start[taker[which]]
    fits = held[which] & (number < MOST_INPUTS)
    fits &= t.elements[given[which]] == t.elements[made[out]]
    fits &= t.itemsize[given[which]] == t.itemsize[made[out]]
    out, which, number = out[fits], which[fits], number[fits]
    into = entries_read(t, recomputed, t.inplace_entry, t.inplace_row, t.inplace_owner)
    inplace_entry = new[np.concatenate((into, given[which]))]
    inplace_start = _then(t.inplace_start, into.shape[0] + _by(taker[which], fused)[0][1:])
    largest = np.argsort(t.elements[made], kind="mergesort")[::-1]  # of equals the last
    largest = largest[_by(member[maker[made]][largest], fused)[1]]
    last = np.zeros(fused, dtype=np.int64)
    last[member[maker[made]]] = maker[made]

    before, after = order[t.variable[order]], run[variable[run]]
    same = before.shape[0] == after.shape[0] and np.all(before == after)  # else nothing is fused
    none = t.walk_row[:0]
    kept = np.full(max(read_entry.shape[0], inplace_entry.shape[0]), KEPT, dtype=np.int32)
    left_graph = Tables(
        forward=0,
        variable=variable,
        read_start=_then(t.read_start, inputs + in_start[1:]),
        read_row=maker_of[read_entry],
        read_output=(read_entry - output_start[maker_of[read_entry]]).astype(np.int32),
        read_owner=kept[: read_entry.shape[0]],
        read_ignored=_then(t.read_ignored, np.zeros(given.shape[0])),
        use_start=use_start,
        use_entry=use_entry.astype(np.int32),
        use_row=maker_of[use_entry],
        use_owner=kept[: use_entry.shape[0]],
        output_start=output_start,
        elements=np.concatenate((t.elements, t.elements[made])),
        itemsize=np.concatenate((t.itemsize, t.itemsize[made])),
        rank=np.concatenate((t.rank, t.rank[made])),
        sizes=t.sizes,
        made=_then(t.made, outputs + largest),
        inplace_start=inplace_start,
        inplace_input=_then(t.inplace_input, number),
        inplace_entry=inplace_entry.astype(np.int32),
        inplace_row=maker_of[inplace_entry],
        inplace_owner=kept[: inplace_entry.shape[0]],
        inplace_output=_then(t.inplace_output, outputs + out),
        inplace_identity=_then(t.inplace_identity, np.zeros(out.shape[0])),
        head_row=maker_of[head_entry],
        head_entry=head_entry.astype(np.int32),
        head_owner=np.full(head.shape[0], KEPT, dtype=np.int32),
        outputs=t.outputs,
        first=run.astype(np.int32),
        walk_row=none,
        walk_owner=none,
        before_start=np.zeros(1, dtype=np.int32),
        before_row=none,
        reads=used.astype(np.int32),
        recomputed_start=np.zeros(1, dtype=np.int32),
        recomputed_entry=none,
        recomputed_row=none,
    )
    return same, left_graph, last
