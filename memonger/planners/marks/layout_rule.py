"""The rule that a plan of marks leaves every tensor in the layout that it has without a plan.

What is recomputed is no longer held for the gradient. So an operator that knows no layouts of
MKLDNN writes over it in place, and leaves in blocks what is plain without a plan
(``costs.layouts``). Who reads that rounds otherwise: outputs in the last bits, gradients by up to a
percent.

Here the layouts of the planned step are compared with those of the unplanned one, where numbers may
depend on them. Where an operator writes in place over what the unplanned step still holds, one
operator is kept whose gradient holds it; and where it cannot write in place any more, those that
read the same memory again are kept.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from memonger.costs.allocator import NO_LIMIT, allocate, order_and_reads
from memonger.costs.layouts import (
    NO_COPIES,
    NOT_IN_PLACE,
    PLAIN,
    LayoutTables,
    follow,
    layout_of,
    layout_tables,
    mattering,
)
from memonger.graph.arrays import ragged
from memonger.graph.operators.layouts import MAKE
from memonger.graph.order import gathered
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled

_UNKNOWN = -1  # the layout of what is not compared
_COPIED = -3  # the place of what a plan inserts


class Unplanned(NamedTuple):
    """The layouts in the training step of a network without a plan, as ``layouts.follow`` has them.

    Numbers may come to depend on the layouts of the outputs ``matters``, and do on the reads
    ``shows``.
    """

    training: TrainingGraph
    made: np.ndarray
    found: np.ndarray
    place: np.ndarray
    matters: np.ndarray
    shows: np.ndarray


class LayoutRule(NamedTuple):
    """What the layouts in one training graph must be, for compiled code.

    Of each read the layout that must be ``found``, or -1; of each output the layout ``made`` and
    its ``place`` without a plan, and whether that is ``compared``; of each forward node that a plan
    inserts the node that it copies (``copy_of``), of others -1. ``chain`` is the memory of each
    output without a plan, if no block is used twice; ``chain_node`` the nodes with one in each.
    """

    active: bool
    layouts: LayoutTables
    found: np.ndarray
    made: np.ndarray
    place: np.ndarray
    compared: np.ndarray
    copy_of: np.ndarray
    chain: np.ndarray
    chain_start: np.ndarray
    chain_node: np.ndarray


def _none(kind: type) -> np.ndarray:
    return np.zeros(0, dtype=kind)


#: Where no layout is to be watched.
NO_RULE = LayoutRule(
    False,
    LayoutTables(_none(np.int8), _none(np.int64), *[_none(np.bool_) for _ in range(3)]),
    _none(np.int64),
    _none(np.int64),
    _none(np.int32),
    _none(np.bool_),
    _none(np.int64),
    _none(np.int32),
    _none(np.int64),
    _none(np.int64),
)


def unplanned_layouts(training: TrainingGraph) -> Unplanned | None:
    """Follow the layouts of an unplanned network; None if no plan can change one that matters."""
    if not any(node.op in MAKE for node in training.graph.nodes):
        return None
    t = training.tables
    layouts = layout_tables(training)
    nothing = np.zeros(t.forward, dtype=np.bool_)
    order, reads = order_and_reads(t, nothing)
    made, found, place, entries = follow(t, layouts, nothing, order, reads, NO_COPIES)
    matters = mattering(training, layouts, order, entries)
    if not _may_change(training, layouts, order, found, entries, matters):
        return None
    return Unplanned(training, made, found, place, matters, layouts.shows)


def _may_change(
    training: TrainingGraph,
    layouts: LayoutTables,
    order: np.ndarray,
    found: np.ndarray,
    entries: np.ndarray,
    matters: np.ndarray,
) -> bool:
    """Whether some layout that matters depends on what is in place."""
    t = training.tables
    shown = np.bincount(entries[layouts.shows & (found >= 0)], minlength=len(matters))
    for row in order.tolist():
        first, last = int(t.read_start[row]), int(t.read_start[row + 1])
        into = found[first:last]
        if not into.any():
            continue
        if layouts.adding[row]:
            return True
        possible: dict[int, set[int]] = {}
        for q in range(int(t.inplace_start[row]), int(t.inplace_start[row + 1])):
            out, j = int(t.inplace_output[q]), int(t.inplace_input[q])
            if row >= 2 * t.forward and t.inplace_row[q] >= 2 * t.forward:
                continue  # gradients read gradients in the same order under any plan
            known = layouts.code[out], layouts.number[out]
            plays = layouts.plays[first:last]
            results = possible.setdefault(out, set())
            results.add(int(layout_of(*known, j, into[j], into, plays)))
            if not t.inplace_identity[q]:
                results.add(int(layout_of(*known, NOT_IN_PLACE, PLAIN, into, plays)))
            elif int(into[j]) not in results and shown[entries[first + j]]:
                return True  # others find what this has made of their memory, or do not
        if any(len(results) > 1 and matters[out] for out, results in possible.items()):
            return True
    return False


def layout_rule(
    unplanned: Unplanned,
    training: TrainingGraph,
    moved: np.ndarray | None = None,
    copies: Sequence[Sequence[int]] = (),
) -> LayoutRule:
    """Make the rule for a network, or for that with kept copies.

    ``unplanned`` is of the network without copies; ``moved`` has the new index of each node, and
    ``copies`` the new indices of each inserted node and of that whose first output it copies.
    """
    t, plain = training.tables, unplanned.training
    n, n0 = t.forward, plain.tables.forward
    layouts = layout_tables(training)
    stands_for = np.full(len(training.ops), -1, dtype=np.int64)
    new = np.arange(n0) if moved is None else moved
    stands_for[new] = stands_for[new + n] = np.arange(n0)
    stands_for[2 * n :] = _gradients(training, plain, new)
    rows = np.flatnonzero(stands_for >= 0)
    old = stands_for[rows]
    found = np.full(len(t.read_row), _UNKNOWN, dtype=np.int64)
    reads, old_reads = _both(t.read_start, rows, plain.tables.read_start, old)
    found[reads] = np.where(unplanned.shows[old_reads], unplanned.found[old_reads], _UNKNOWN)
    made = np.zeros(len(t.elements), dtype=np.int64)
    place = np.full(len(t.elements), NOT_IN_PLACE, dtype=np.int32)
    compared = np.zeros(len(t.elements), dtype=np.bool_)
    outputs, old_outputs = _both(t.output_start, rows, plain.tables.output_start, old)
    made[outputs] = unplanned.made[old_outputs]
    place[outputs] = unplanned.place[old_outputs]
    compared[outputs] = unplanned.matters[old_outputs]
    # A recomputed copy has no layouts of its own in the unplanned step.
    copy_of = np.full(n, -1, dtype=np.int64)
    for node, source in copies:
        copy_of[node] = source
        for out in (t.output_start[node], t.output_start[node + n]):
            made[out] = made[t.output_start[source]]
            compared[out] = compared[t.output_start[source]]
            place[out] = _COPIED
    nothing = np.zeros(n, dtype=np.bool_)
    order, count = order_and_reads(t, nothing)
    chain = allocate(t, nothing, order, count, 0, NO_LIMIT)[1]
    members: list[list[int]] = [[] for _ in range(int(chain.max(initial=-1)) + 1)]
    for node in range(n):
        for out in range(int(t.output_start[node]), int(t.output_start[node + 1])):
            if chain[out] >= 0:
                members[chain[out]].append(node)
    start, nodes = ragged(members)
    return LayoutRule(
        True,
        layouts,
        found,
        made,
        place,
        compared,
        copy_of,
        chain,
        start.astype(np.int64),
        nodes.astype(np.int64),
    )


def _both(
    start: np.ndarray, rows: np.ndarray, old_start: np.ndarray, old: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What some rows own, and what the rows own that they stand for."""
    return gathered(start, rows)[0], gathered(old_start, old)[0]


def _gradients(training: TrainingGraph, plain: TrainingGraph, new: np.ndarray) -> np.ndarray:
    """Of each gradient row the row of the network without copies that it stands for, or -1."""
    n, n0 = training.tables.forward, plain.tables.forward
    back = np.full(n + 1, -1, dtype=np.int64)  # the last for rows that no operator owns
    back[new] = np.arange(n0)

    def keys(graph: TrainingGraph, owners: Sequence[int]) -> list[object]:
        count: dict[object, int] = {}
        result: list[object] = []
        for row, owner in enumerate(owners, 2 * graph.tables.forward):
            kind = graph.kinds[row]
            name = owner if owner >= 0 else graph.names[row]
            key = (name, kind.op, kind.inputs, tuple(kind.tensors))
            count[key] = count.get(key, 0) + 1
            result.append((key, count[key]))
        return result

    known = {key: row for row, key in enumerate(keys(plain, plain.owners.tolist()), 2 * n0)}
    owners = [int(back[o]) if o >= 0 else -1 for o in training.owners.tolist()]
    found = np.array([known.get(key, -1) for key in keys(training, owners)], dtype=np.int64)
    inserted = np.array([o >= 0 and back[o] < 0 for o in training.owners.tolist()], dtype=np.bool_)
    return np.where(inserted, -1, found)


# ---------------------------------------------------------------- what must be kept


@compiled
def other_layouts(t, facts, rule, order, reads, mask, found):  # type: ignore[no-untyped-def]
    """Find what to keep of a plan where its layouts differ from those without a plan, if anything.

    ``order`` and ``reads`` are as ``order_and_reads`` gives them for the recomputed nodes ``mask``;
    ``found`` receives the nodes to keep, some of the recomputed ones.
    """
    made, seen, place, entries = follow(t, rule.layouts, mask, order, reads, rule.copy_of)
    differs = False
    for j in range(seen.shape[0]):
        if seen[j] >= 0 and rule.found[j] >= 0 and seen[j] != rule.found[j]:
            differs = True
    if not differs:
        return False
    any_found = False
    for p in range(order.shape[0]):
        row = order[p]
        for out in range(t.output_start[row], t.output_start[row + 1]):
            if not rule.compared[out] or reads[out] == 0:
                continue
            if made[out] == rule.made[out] or place[out] == rule.place[out]:
                continue
            if _keep_for(t, facts, rule, row, place[out], rule.place[out], mask, found):
                any_found = True
    if any_found:
        return True
    # No output says why: keep what makes, is, and reads what the readers find otherwise.
    for p in range(order.shape[0]):
        row = order[p]
        for j in range(t.read_start[row], t.read_start[row + 1]):
            if seen[j] >= 0 and rule.found[j] >= 0 and seen[j] != rule.found[j]:
                for x in (_node(t, row), _node(t, t.read_row[j])):
                    if x >= 0 and _keep_around(facts, x, mask, found):
                        any_found = True
    if not any_found:
        found[:] = mask
        return bool(mask.any())
    return True


@compiled
def _node(t, row):  # type: ignore[no-untyped-def]
    """The forward node of a row, of a gradient -1."""
    if row < 2 * t.forward:
        return row % t.forward
    return -1


@compiled
def _keep_around(facts, x, mask, found):  # type: ignore[no-untyped-def]
    """Keep a node and those that read it."""
    any_found = False
    if mask[x]:
        found[x] = any_found = True
    for q in range(facts.read_start[x], facts.read_start[x + 1]):
        reader = facts.reader[facts.read[q]]
        if mask[reader]:
            found[reader] = any_found = True
    return any_found


@compiled
def _keep_for(t, facts, rule, row, place, before, mask, found):  # type: ignore[no-untyped-def]
    """Keep nodes for an output of a row to be written where it is without a plan.

    ``place`` and ``before`` are the input in whose memory it is written, and without a plan.
    """
    n = t.forward
    if row >= 2 * n:
        any_found = False
        for j in range(t.read_start[row], t.read_start[row + 1]):
            x = _node(t, t.read_row[j])
            if x >= 0 and mask[x]:
                found[x] = any_found = True
        return any_found
    x = row % n
    if before == _COPIED:
        x = rule.copy_of[x]
        if mask[x]:
            found[x] = True
        return mask[x]
    if place >= 0 and (before < 0 or place < before):
        # It is written over an input that is held without a plan: keep what held that.
        j = t.read_start[row] + place
        source = _node(t, t.read_row[j])
        chain = rule.chain[t.output_start[source] + t.read_output[j]]
        holder = -1
        if chain >= 0:
            for c in range(rule.chain_start[chain], rule.chain_start[chain + 1]):
                held = rule.chain_node[c]
                if facts.own_output[held] and mask[held]:
                    holder = held if holder != x else x
                for q in range(facts.read_start[held], facts.read_start[held + 1]):
                    reader = facts.reader[facts.read[q]]
                    if facts.again[facts.read[q]] and mask[reader] and holder != x:
                        holder = reader if reader == x else max(holder, reader)
        if holder >= 0 and (row < n or holder == x):
            found[holder] = True
            return True
        if row >= n and mask[source]:
            found[source] = True
            return True
        if mask[x]:
            found[x] = True
        return mask[x]
    any_found = False
    if row < n and before >= 0:
        # It is not, for its input is read again: keep those that do.
        any_found = _keep_around(
            facts, _node(t, t.read_row[t.read_start[row] + before]), mask, found
        )
    if mask[x]:
        found[x] = any_found = True
    return any_found
