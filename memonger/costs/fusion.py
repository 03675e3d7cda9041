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

from memonger.costs.allocator import (
    NO_LIMIT,
    Replay,
    allocate,
    order_and_reads,
    replay,
    row_read,
)
from memonger.graph.arrays import KEPT, RowKind, Tables, ragged
from memonger.graph.forward import ForwardGraph
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled
from memonger.support.mxnet import Settings

FUSED_OP = "_FusedOp"
MOST_INPUTS = 63  # of a fused operator that can give up their memory: `allocate` has a bit for each

# How an operator is fused.
APART, FUSED, FIRST = 0, 1, 2  # never; with others; with those that read it alone

# ``ops_desc`` and ``variable_io_ops`` in src/operator/fusion/fused_op-inl.h: by the names that nnvm
# knows operators by.
_FUSED = frozenset(
    """
    Activation Cast Reshape _copy _div_scalar _hypot _hypot_scalar _identity_with_attr_like_rhs
    _maximum _minimum _minus_scalar _mul_scalar _ones _plus_scalar _power _power_scalar _rdiv_scalar
    _rminus_scalar _rpower_scalar _zeros abs add_n amp_cast amp_multicast arccos arccosh arcsin
    arcsinh arctan arctanh cbrt ceil clip cos cosh degrees elemwise_add elemwise_div elemwise_mul
    elemwise_sub erf erfinv exp expand_dims expm1 fix floor gamma gammaln log log10 log1p log2
    negative ones_like radians rcbrt reciprocal relu rint round rsqrt sigmoid sign sin sinh
    smooth_l1 softsign sqrt square squeeze tan tanh trunc zeros_like
    _backward_Activation _backward_abs _backward_amp_cast _backward_amp_multicast _backward_arccos
    _backward_arccosh _backward_arcsin _backward_arcsinh _backward_arctan _backward_arctanh
    _backward_cast _backward_cbrt _backward_clip _backward_cos _backward_cosh _backward_degrees
    _backward_div _backward_div_scalar _backward_erf _backward_erfinv _backward_expm1
    _backward_hypot _backward_hypot_scalar _backward_log _backward_log10 _backward_log1p
    _backward_log2 _backward_maximum _backward_minimum _backward_mul _backward_mul_scalar
    _backward_power _backward_power_scalar _backward_radians _backward_rcbrt _backward_rdiv_scalar
    _backward_reciprocal _backward_relu _backward_reshape _backward_rpower_scalar _backward_rsqrt
    _backward_sigmoid _backward_sign _backward_sin _backward_sinh _backward_smooth_l1
    _backward_sqrt _backward_square _backward_sub _backward_tan _backward_tanh
    """.split()
)
_FIRST = frozenset(["slice", "slice_axis", "slice_like", "broadcast_like"])  # ``slice_ops``
_LEAKY = ("LeakyReLU", "_backward_LeakyReLU")  # for act_type='gelu'


def fused_as(kind: RowKind) -> int:
    """How a row is fused (``IsFusionCompatible``, ``IsInputsOnlyCompatible``)."""
    if kind.op in _FUSED or (kind.op in _LEAKY and kind.attrs.get("act_type") == "gelu"):
        return FUSED
    if kind.op in _FIRST:
        steps = kind.op == "slice" and kind.attrs.get("step", "()") not in ("()", "[]")
        return APART if steps else FIRST
    return APART


class Fusible(NamedTuple):
    """What fusion must know of a training graph beside its ``Tables``, for compiled code.

    Attributes
    ----------
    on : bool
        Whether anything is fused.
    how : np.ndarray of int8
        APART, FUSED or FIRST for each row.
    wait_start, wait_row : np.ndarray of int32
        Of each row the rows that must have run before it (control dependencies), in order; of a
        recomputed operator it is the copy, unless an original waits.
    """

    on: bool
    how: np.ndarray
    wait_start: np.ndarray
    wait_row: np.ndarray


def unfused() -> Fusible:
    """What says that nothing is fused."""
    none = np.zeros(0, dtype=np.int32)
    return Fusible(False, none.astype(np.int8), none, none)


def fusible(training: TrainingGraph) -> Fusible:
    """What fusion must know of a training graph."""
    graph, same = training.graph, training.same
    n = len(graph.nodes)
    inputs = [name for name, op in zip(training.names[:n], training.ops) if op == "null"]
    if len(set(inputs)) < len(inputs):  # CheckForInputNameDuplicates
        return unfused()
    how = {id(kind): fused_as(kind) for kind in training.kinds}
    waits: list[list[int]] = [[same[d] for d in node.deps] for node in graph.nodes] * 2
    waits += [[] for _ in range(2 * n, len(training.ops))]
    for row, before in training.waits:
        waits[row].append(before)
    start, flat = ragged(waits)
    return Fusible(
        True,
        np.array([how[id(kind)] for kind in training.kinds], dtype=np.int8),
        start.astype(np.int32),
        flat.astype(np.int32),
    )


class FusedGraph(NamedTuple):
    """A training graph as fusion leaves it: an ``allocator.Planned``.

    Its rows are the operators and variables that are left, in the order in which they run.
    """

    graph: ForwardGraph
    settings: Settings
    tables: Tables
    names: tuple[str, ...]
    ops: tuple[str, ...]
    kinds: tuple[RowKind, ...]
    phases: np.ndarray


def replay_fused(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Fuse a training graph, order it and plan its memory as MXNet will on a GPU.

    Parameters
    ----------
    training : TrainingGraph
    recomputed : np.ndarray of bool
        As for ``allocator.replay``.

    Returns
    -------
    Replay
        Of a `FusedGraph`; nothing is recomputed in it in the sense of marks.
    """
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = order_and_reads(training.tables, mask)
    parts = fusible(training)
    if not parts.on:
        return replay(training, mask)
    fused, tables, rows = fuse(training.tables, parts, mask, order)
    if not fused:
        return replay(training, mask)
    own = np.where(rows < 0, -1 - rows, rows)
    kinds = [
        training.kinds[k]._replace(op=FUSED_OP, attrs={}) if row < 0 else training.kinds[k]
        for k, row in zip(own, rows)
    ]
    none = np.zeros(0, dtype=np.bool_)
    found = [
        allocate(tables, none, tables.first, tables.reads, match_range, NO_LIMIT)
        for match_range in training.settings.match_ranges
    ]
    pool, planned = min(found, key=lambda pair: pair[0])  # of equals the first
    made = FusedGraph(
        training.graph,
        training.settings,
        tables,
        tuple([training.names[k] for k in own]),
        tuple([kind.op for kind in kinds]),
        tuple(kinds),
        training.phases[own],
    )
    return Replay(made, none, tables.first, tables.reads, planned, int(pool))


def fused_forward(training: TrainingGraph, recomputed: np.ndarray) -> list[list[int]]:
    """The operators (nodes) of each fused operator of the forward pass, in execution order.

    Those that reach farthest come first: what they read is held the longest.
    """
    t, mask = training.tables, np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, _ = order_and_reads(t, mask)
    groups: dict[int, list[int]] = {}
    member = _members(t, fusible(training), mask, order)
    for row in order[order < t.forward].tolist():
        if member[row] >= 0:
            groups.setdefault(int(member[row]), []).append(row)
    return sorted(groups.values(), key=lambda nodes: nodes[0] - nodes[-1])


@compiled
def plan_bytes(t, f, recomputed, order, reads, match_ranges, limit):  # type: ignore[no-untyped-def]
    """The bytes of the pool that MXNet plans, fused or not, or some that are more than ``limit``.

    Parameters
    ----------
    t : Tables
    f : Fusible
    recomputed, order, reads, limit
        As of ``allocator.allocate``.
    match_ranges : np.ndarray
    """
    best = -1
    if f.on:
        fused, made, _ = fuse(t, f, recomputed, order)
        if fused:
            none = np.zeros(0, dtype=np.bool_)
            for match_range in match_ranges:
                pool = allocate(made, none, made.first, made.reads, match_range, limit)[0]
                if best < 0 or pool < best:
                    best = pool
            return best
    for match_range in match_ranges:
        pool = allocate(t, recomputed, order, reads, match_range, limit)[0]
        if best < 0 or pool < best:
            best = pool
    return best


# -- which operators are fused ----------------------------------------------------------------


@compiled
def _root(joined, one):  # type: ignore[no-untyped-def]
    """The set that a set has become part of."""
    while one >= 0 and joined[one] != one:
        one = joined[one]
    return one


@compiled
def _meet(one, other):  # type: ignore[no-untyped-def]
    """Whether two sets, as bits, have something in common."""
    for w in range(one.shape[0]):
        if one[w] & other[w]:
            return True
    return False


@compiled
def _exclude(into, more, first, last, one, members, assigned, joined, excluded):  # type: ignore[no-untyped-def]
    """Add to what a set may not be fused with, and to that of what depends on the set."""
    changed = False
    for w in range(into.shape[0]):
        together = into[w] | more[w]
        changed |= together != into[w]
        into[w] = together
    if changed:
        for j in range(first, last):
            if _root(joined, assigned[j]) == one or _meet(members, excluded[j]):
                for w in range(into.shape[0]):
                    excluded[j, w] |= into[w]


@compiled
def _subsets(how, start, source, forward):  # type: ignore[no-untyped-def]
    """Of each place in the order the set of operators that are fused into one, or -1; how many.

    Parameters
    ----------
    how : np.ndarray
        APART, FUSED or FIRST of each place.
    start, source : np.ndarray
        The places that each reads.
    forward : int
        The last place of the forward pass.
    """
    count = how.shape[0]
    most = 0
    for i in range(count):
        most += how[i] != APART
    words = most // 64 + 1
    assigned = np.full(count, -1, dtype=np.int32)
    joined = np.arange(most)
    begins = np.zeros(most, dtype=np.int64)
    excluded = np.zeros((count, words), dtype=np.uint64)  # of each place sets that it depends on
    barred = np.zeros((most, words), dtype=np.uint64)  # of each set what its operators exclude
    members = np.zeros((most, words), dtype=np.uint64)  # of each set those that it is made of
    sets = 0
    for i in range(count):
        for q in range(start[i], start[i + 1]):
            for w in range(words):
                excluded[i, w] |= excluded[source[q], w]
        if how[i] == FUSED:
            mine = -1
            for q in range(start[i], start[i + 1]):
                theirs = _root(joined, assigned[source[q]])
                if theirs == -1 or theirs == mine:
                    continue
                if (i > forward) != (source[q] > forward) or _meet(members[theirs], excluded[i]):
                    continue
                if mine == -1:
                    mine = theirs
                    more = excluded[i]
                else:
                    members[mine] |= members[theirs]
                    joined[theirs] = mine
                    begins[mine] = min(begins[mine], begins[theirs])
                    more = barred[mine]
                _exclude(
                    barred[theirs],
                    more,
                    begins[mine],
                    i,
                    mine,
                    members[mine],
                    assigned,
                    joined,
                    excluded,
                )
            assigned[i] = mine
        else:
            for q in range(start[i], start[i + 1]):
                theirs = _root(joined, assigned[source[q]])
                if theirs != -1:
                    excluded[i, theirs // 64] |= np.uint64(1) << np.uint64(theirs % 64)
        if how[i] != APART and assigned[i] == -1:
            barred[sets] = excluded[i]
            begins[sets] = i
            members[sets, sets // 64] |= np.uint64(1) << np.uint64(sets % 64)
            assigned[i] = sets
            sets += 1
    sizes = np.zeros(most, dtype=np.int64)
    for i in range(count):
        assigned[i] = _root(joined, assigned[i])
        if assigned[i] != -1:
            sizes[assigned[i]] += 1
    number = np.full(most, -1, dtype=np.int32)
    fused = 0
    for one in range(most):
        if sizes[one] > 1:
            number[one] = fused
            fused += 1
    for i in range(count):
        if assigned[i] != -1:
            assigned[i] = number[assigned[i]]
    return assigned, fused


# -- the graph that is left -------------------------------------------------------------------


@compiled
def _starts(counts):  # type: ignore[no-untyped-def]
    """As ``tables.starts``."""
    start = np.zeros(counts.shape[0] + 1, dtype=np.int32)
    for i in range(counts.shape[0]):
        start[i + 1] = start[i] + counts[i]
    return start


@compiled
def _reads(t, recomputed, order):  # type: ignore[no-untyped-def]
    """The outputs that each place of an order reads: where its own start, and their entries."""
    counts = t.read_start[order + 1] - t.read_start[order]
    start = _starts(counts)
    entry = np.empty(start[-1], dtype=np.int32)
    for p in range(order.shape[0]):
        for k in range(counts[p]):
            j = t.read_start[order[p]] + k
            row = row_read(t.forward, recomputed, t.read_row[j], t.read_owner[j])
            entry[start[p] + k] = t.output_start[row] + t.read_output[j]
    return start, entry


@compiled
def _waits(t, f, recomputed, order, place):  # type: ignore[no-untyped-def]
    """The places that each place of an order waits for (control dependencies)."""
    counts = f.wait_start[order + 1] - f.wait_start[order]
    start = _starts(counts)
    wait = np.empty(start[-1], dtype=np.int32)
    for p in range(order.shape[0]):
        for k in range(counts[p]):
            row = f.wait_row[f.wait_start[order[p]] + k]
            again = order[p] >= t.forward and row < t.forward and recomputed[row]
            wait[start[p] + k] = place[row + t.forward if again else row]
    return start, wait


@compiled
def _outputs(member, groups, start, entry, maker, heads):  # type: ignore[no-untyped-def]
    """What others read of the operators of each fused one, in the order in which they do.

    Parameters
    ----------
    member : np.ndarray
        Of each place the fused operator that it is part of, or -1; there are ``groups`` of them.
    start, entry : np.ndarray
        As of `_reads`.
    maker : np.ndarray
        The place of each entry.
    heads : np.ndarray
        The entries that are outputs of the graph.

    Returns
    -------
    out_start, out_entry : np.ndarray
        The entries that are outputs of each fused operator.
    """
    number = np.full(maker.shape[0], -1, dtype=np.int32)
    counts = np.zeros(groups, dtype=np.int32)
    for p in range(member.shape[0]):
        for q in range(start[p], start[p + 1]):
            one = member[maker[entry[q]]]
            if one >= 0 and one != member[p] and number[entry[q]] < 0:
                number[entry[q]] = counts[one]
                counts[one] += 1
    for e in heads:
        one = member[maker[e]]
        if one >= 0 and number[e] < 0:
            number[e] = counts[one]
            counts[one] += 1
    out_start = _starts(counts)
    out_entry = np.empty(out_start[-1], dtype=np.int32)
    for e in range(number.shape[0]):
        if number[e] >= 0:
            out_entry[out_start[member[maker[e]]] + number[e]] = e
    return out_start, out_entry


@compiled
def _inputs(member, start, entry, maker, wait_start, wait, out_start, out_entry):  # type: ignore[no-untyped-def]
    """What each fused operator reads, in the order of its inputs.

    That is the order of the variables of its own graph: depth first from its outputs.

    Parameters
    ----------
    member, start, entry, maker, out_start, out_entry
        As of `_outputs`.
    wait_start, wait : np.ndarray
        As of `_waits`.

    Returns
    -------
    in_start, in_entry : np.ndarray
        The entries that each reads.
    """
    count, groups = member.shape[0], out_start.shape[0] - 1
    seen = np.zeros(count, dtype=np.bool_)
    reader = np.full(maker.shape[0], -1, dtype=np.int32)  # of each entry, the last that was met
    stack = np.empty(count, dtype=np.int32)
    at = np.empty(count, dtype=np.int32)
    in_start = np.zeros(groups + 1, dtype=np.int32)
    in_entry = np.empty(entry.shape[0], dtype=np.int32)
    total = 0
    for one in range(groups):
        for e in out_entry[out_start[one] : out_start[one + 1]]:
            if seen[maker[e]]:
                continue
            seen[maker[e]] = True
            depth = 0
            stack[0] = maker[e]
            at[0] = 0
            while depth >= 0:
                p = stack[depth]
                k = at[depth]
                at[depth] += 1
                reads = start[p + 1] - start[p]
                if k >= reads + wait_start[p + 1] - wait_start[p]:
                    depth -= 1
                    continue
                if k < reads:
                    read = entry[start[p] + k]
                    following = maker[read]
                    if member[following] != one:
                        if reader[read] != one:
                            reader[read] = one
                            in_entry[total] = read
                            total += 1
                        continue
                else:
                    following = wait[wait_start[p] + k - reads]
                if member[following] == one and not seen[following]:
                    seen[following] = True
                    depth += 1
                    stack[depth] = following
                    at[depth] = 0
        in_start[one + 1] = total
    return in_start, in_entry[:total]


@compiled
def _left(member, groups, start, entry, wait_start, wait, in_start, in_entry):  # type: ignore[no-untyped-def]
    """The graph that is left: what its nodes read and wait for.

    Its nodes are the places that are not fused, and behind all places the fused operators.

    Returns
    -------
    read_start, read : np.ndarray
        The entries that each node reads.
    before_start, before : np.ndarray
        The places that each node waits for; those that are fused are not waited for any more.
    """
    count = member.shape[0]
    reads = np.zeros(count + groups, dtype=np.int32)
    befores = np.zeros(count + groups, dtype=np.int32)
    for p in range(count):
        node = p if member[p] < 0 else count + member[p]
        if member[p] < 0:
            reads[p] = start[p + 1] - start[p]
        for q in range(wait_start[p], wait_start[p + 1]):
            befores[node] += member[wait[q]] < 0
    for one in range(groups):
        reads[count + one] = in_start[one + 1] - in_start[one]
    read_start, before_start = _starts(reads), _starts(befores)
    read = np.empty(read_start[-1], dtype=np.int32)
    before = np.empty(before_start[-1], dtype=np.int32)
    at = before_start.copy()
    for p in range(count):
        node = p if member[p] < 0 else count + member[p]
        if member[p] < 0:
            read[read_start[p] : read_start[p + 1]] = entry[start[p] : start[p + 1]]
        for q in range(wait_start[p], wait_start[p + 1]):
            if member[wait[q]] < 0:
                before[at[node]] = wait[q]
                at[node] += 1
    for one in range(groups):
        node = count + one
        read[read_start[node] : read_start[node + 1]] = in_entry[in_start[one] : in_start[one + 1]]
    return read_start, read, before_start, before


@compiled
def _run(member, maker, read_start, read, before_start, before, heads):  # type: ignore[no-untyped-def]
    """The nodes of the graph that is left in the order in which they run: depth first."""
    count = member.shape[0]
    nodes = read_start.shape[0] - 1
    seen = np.zeros(nodes, dtype=np.bool_)
    stack = np.empty(nodes, dtype=np.int32)
    at = np.empty(nodes, dtype=np.int32)
    found = np.empty(nodes, dtype=np.int32)
    total = 0
    for e in heads:
        place = maker[e]
        head = place if member[place] < 0 else count + member[place]
        if seen[head]:
            continue
        seen[head] = True
        depth = 0
        stack[0] = head
        at[0] = 0
        while depth >= 0:
            node = stack[depth]
            k = at[depth]
            at[depth] += 1
            reads = read_start[node + 1] - read_start[node]
            if k < reads:
                place = maker[read[read_start[node] + k]]
                following = place if member[place] < 0 else count + member[place]
            elif k < reads + before_start[node + 1] - before_start[node]:
                following = before[before_start[node] + k - reads]
            else:
                found[total] = node
                total += 1
                depth -= 1
                continue
            if not seen[following]:
                seen[following] = True
                depth += 1
                stack[depth] = following
                at[depth] = 0
    return found[:total]


@compiled
def _places(t, recomputed, order):  # type: ignore[no-untyped-def]
    """Where the rows of an order stand in it.

    Returns
    -------
    place, maker : np.ndarray
        The place of each row, and of each entry.
    heads : np.ndarray
        The entries that are outputs of the graph.
    int
        The last place of the forward pass.
    """
    place = np.full(t.variable.shape[0], -1, dtype=np.int32)
    maker = np.full(t.elements.shape[0], -1, dtype=np.int32)
    for p in range(order.shape[0]):
        place[order[p]] = p
        maker[t.output_start[order[p]] : t.output_start[order[p] + 1]] = p
    heads = np.empty(t.head_row.shape[0], dtype=np.int32)
    forward = -1
    for h in range(heads.shape[0]):
        row = row_read(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        heads[h] = t.output_start[row] + t.head_entry[h] - t.output_start[t.head_row[h]]
        if h < t.outputs:
            forward = max(forward, place[row])
    return place, maker, heads, forward


@compiled
def _members(t, f, recomputed, order):  # type: ignore[no-untyped-def]
    """Of each row the fused operator that it is part of, or -1."""
    _, maker, _, forward = _places(t, recomputed, order)
    start, entry = _reads(t, recomputed, order)
    member, _ = _subsets(f.how[order], start, maker[entry], forward)
    found = np.full(t.variable.shape[0], -1, dtype=np.int32)
    found[order] = member
    return found


@compiled
def fuse(t, f, recomputed, order):  # type: ignore[no-untyped-def]
    """Fuse a training graph as MXNet does.

    Parameters
    ----------
    t : Tables
    f : Fusible
    recomputed, order
        As of ``allocator.order_and_reads``.

    Returns
    -------
    bool
        Whether anything is fused.
    Tables
        Of what is left, one row for each operator and variable in the order in which they run.
    np.ndarray of int
        Of each of them the row that it is in ``t``; of a fused operator -1 minus that of its last
        output.
    """
    place, maker, heads, forward = _places(t, recomputed, order)
    start, entry = _reads(t, recomputed, order)
    wait_start, wait = _waits(t, f, recomputed, order, place)
    member, groups = _subsets(f.how[order], start, maker[entry], forward)
    out_start, out_entry = _outputs(member, groups, start, entry, maker, heads)
    in_start, in_entry = _inputs(
        member, start, entry, maker, wait_start, wait, out_start, out_entry
    )
    from_start, reads, before_start, before = _left(
        member, groups, start, entry, wait_start, wait, in_start, in_entry
    )
    nodes = _run(member, maker, from_start, reads, before_start, before, heads)
    left, rows = _tables(
        t, order, member, maker, out_start, out_entry, from_start, reads, nodes, heads
    )
    return groups > 0 and _same_variables(t, order, nodes), left, rows


@compiled
def _same_variables(t, order, nodes):  # type: ignore[no-untyped-def]
    """Whether the variables come in the order in which they came before; else nothing is fused."""
    q = 0
    for node in nodes:
        if node < order.shape[0] and t.variable[order[node]]:
            while q < order.shape[0] and not t.variable[order[q]]:
                q += 1
            if q == order.shape[0] or order[q] != order[node]:
                return False
            q += 1
    while q < order.shape[0] and not t.variable[order[q]]:
        q += 1
    return q == order.shape[0]


@compiled
def _tables(t, order, member, maker, out_start, out_entry, from_start, reads, nodes, heads):  # type: ignore[no-untyped-def]
    """The ``Tables`` of the graph that is left, and its rows: as `fuse`."""
    count = order.shape[0]
    rows = nodes.shape[0]
    row_of = np.full(from_start.shape[0] - 1, -1, dtype=np.int32)
    source = np.empty(rows, dtype=np.int64)
    made_counts = np.empty(rows, dtype=np.int32)
    read_counts = np.empty(rows, dtype=np.int32)
    for r in range(rows):
        node = nodes[r]
        row_of[node] = r
        read_counts[r] = from_start[node + 1] - from_start[node]
        if node < count:
            source[r] = order[node]
            made_counts[r] = t.output_start[order[node] + 1] - t.output_start[order[node]]
        else:
            first, last = out_start[node - count], out_start[node - count + 1]
            source[r] = -1 - order[maker[out_entry[last - 1]]]
            made_counts[r] = last - first
    output_start, read_start = _starts(made_counts), _starts(read_counts)
    old = np.empty(output_start[-1], dtype=np.int32)  # of each entry the same of t
    new = np.full(t.elements.shape[0], -1, dtype=np.int32)  # and of each of t the same of these
    made = np.empty(output_start[-1], dtype=np.int32)
    variable = np.zeros(rows, dtype=np.bool_)
    for r in range(rows):
        first, last = output_start[r], output_start[r + 1]
        if nodes[r] < count:
            row = order[nodes[r]]
            variable[r] = t.variable[row]
            for k in range(made_counts[r]):
                old[first + k] = t.output_start[row] + k
                made[first + k] = t.made[t.output_start[row] + k] - t.output_start[row] + first
        else:
            one = nodes[r] - count
            old[first:last] = out_entry[out_start[one] : out_start[one + 1]]
            for k in range(first, last):  # the largest first, of equals the last
                j = k
                while j > first and t.elements[old[made[j - 1]]] <= t.elements[old[k]]:
                    made[j] = made[j - 1]
                    j -= 1
                made[j] = k
        for k in range(first, last):
            new[old[k]] = k

    # What is read, and what of it holds memory.
    total = read_start[-1]
    read_row = np.empty(total, dtype=np.int32)
    read_output = np.empty(total, dtype=np.int32)
    ignored = np.zeros(total, dtype=np.bool_)
    use_counts = np.zeros(rows, dtype=np.int32)
    use_entry = np.empty(total, dtype=np.int32)
    use_row = np.empty(total, dtype=np.int32)
    uses = 0
    counts = np.zeros(old.shape[0], dtype=np.int32)
    for r in range(rows):
        node = nodes[r]
        for k in range(read_counts[r]):
            j = read_start[r] + k
            e = reads[from_start[node] + k]
            place = maker[e]
            read_row[j] = row_of[place if member[place] < 0 else count + member[place]]
            read_output[j] = new[e] - output_start[read_row[j]]
            if node < count:
                ignored[j] = t.read_ignored[t.read_start[order[node]] + k]
            if not ignored[j] and not variable[read_row[j]]:
                use_counts[r] += 1
                use_entry[uses] = new[e]
                use_row[uses] = read_row[j]
                uses += 1
                counts[new[e]] += 1
    head_row = np.empty(heads.shape[0], dtype=np.int32)
    head_entry = np.empty(heads.shape[0], dtype=np.int32)
    for h in range(heads.shape[0]):
        place = maker[heads[h]]
        head_row[h] = row_of[place if member[place] < 0 else count + member[place]]
        head_entry[h] = new[heads[h]]
        counts[head_entry[h]] += 1

    # What may take whose memory.
    option_counts = np.zeros(rows, dtype=np.int32)
    most = t.inplace_input.shape[0]
    for one in range(out_start.shape[0] - 1):
        node = count + one
        inputs = min(MOST_INPUTS, from_start[node + 1] - from_start[node])
        most += inputs * (out_start[one + 1] - out_start[one])
    options = np.empty((most, 3), dtype=np.int32)  # input, its entry, output
    identity = np.zeros(most, dtype=np.bool_)
    found = 0
    for r in range(rows):
        node = nodes[r]
        before = found
        if node < count:
            row = order[node]
            for q in range(t.inplace_start[row], t.inplace_start[row + 1]):
                e = reads[from_start[node] + t.inplace_input[q]]
                out = t.inplace_output[q] - t.output_start[row] + output_start[r]
                options[found, 0] = t.inplace_input[q]
                options[found, 1] = new[e]
                options[found, 2] = out
                identity[found] = t.inplace_identity[q]
                found += 1
        else:
            for k in range(min(MOST_INPUTS, read_counts[r])):
                j = read_start[r] + k
                e = reads[from_start[node] + k]
                if variable[read_row[j]]:
                    continue
                for out in range(output_start[r], output_start[r + 1]):
                    if (
                        t.elements[e] == t.elements[old[out]]
                        and t.itemsize[e] == t.itemsize[old[out]]
                    ):
                        options[found, 0] = k
                        options[found, 1] = new[e]
                        options[found, 2] = out
                        found += 1
        option_counts[r] = found - before
    none = np.zeros(0, dtype=np.int32)
    kept = np.full(max(total, most, heads.shape[0]), KEPT, dtype=np.int32)
    return (
        Tables(
            forward=0,
            variable=variable,
            read_start=read_start,
            read_row=read_row,
            read_output=read_output,
            read_owner=kept[:total],
            read_ignored=ignored,
            use_start=_starts(use_counts),
            use_entry=use_entry[:uses],
            use_row=use_row[:uses],
            use_owner=kept[:uses],
            output_start=output_start,
            elements=t.elements[old],
            itemsize=t.itemsize[old],
            rank=t.rank[old],
            sizes=t.sizes,
            made=made,
            inplace_start=_starts(option_counts),
            inplace_input=options[:found, 0].copy(),
            inplace_entry=options[:found, 1].copy(),
            inplace_row=kept[:found],
            inplace_owner=kept[:found],
            inplace_output=options[:found, 2].copy(),
            inplace_identity=identity[:found],
            head_row=head_row,
            head_entry=head_entry,
            head_owner=kept[: heads.shape[0]],
            outputs=t.outputs,
            first=np.arange(rows).astype(np.int32),
            walk_row=none,
            walk_owner=none,
            before_start=np.zeros(1, dtype=np.int32),
            before_row=none,
            reads=counts,
            again_start=np.zeros(1, dtype=np.int32),
            again_entry=none,
            again_row=none,
        ),
        source,
    )
