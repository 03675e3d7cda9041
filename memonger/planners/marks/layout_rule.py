"""The rule that a plan of marks leaves every tensor in the layout that it has without a plan.

What is recomputed is no longer held for the gradient. So an operator that knows no layouts of
MKLDNN writes over it in place, and leaves in blocks what is row-major without a plan
(``costs.layouts``). Who reads that rounds otherwise: outputs in the last bits, gradients by up to a
percent.

Few networks can come to that. In those the layouts of the planned step are compared with those of
the unplanned one, and what is around a difference is kept. They get no saved identities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.costs.allocator import order_and_reads
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
from memonger.graph.operators.layouts import MAKE
from memonger.graph.training import TrainingGraph
from memonger.support.compiled import compiled

_ANY = -1  # the layout that must be found where numbers do not depend on it


class LayoutRule(NamedTuple):
    """The layout that each read of one training graph must find, or -1, for compiled code."""

    active: bool
    layouts: LayoutTables
    found: np.ndarray


def _none(kind: type) -> np.ndarray:
    return np.zeros(0, dtype=kind)


#: Where no layout is to be watched.
NO_RULE = LayoutRule(
    False,
    LayoutTables(_none(np.int8), _none(np.int64), *[_none(np.bool_) for _ in range(3)]),
    _none(np.int64),
)


def layout_rule(training: TrainingGraph) -> LayoutRule:
    """Make the rule for a network: that of no plan, if a plan can change a layout that matters."""
    if not any(node.op in MAKE for node in training.graph.nodes):
        return NO_RULE
    t = training.tables
    layouts = layout_tables(training)
    nothing = np.zeros(t.forward, dtype=np.bool_)
    order, reads = order_and_reads(t, nothing)
    _, found, _, entries = follow(t, layouts, nothing, order, reads, NO_COPIES)
    matters = mattering(training, layouts, order, entries)
    if not _may_change(training, layouts, order, found, entries, matters):
        return NO_RULE
    return LayoutRule(True, layouts, np.where(layouts.shows, found, _ANY))


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


@compiled
def other_layouts(t, facts, rule, order, reads, mask, found):  # type: ignore[no-untyped-def]
    """Find what to keep of a plan where its layouts differ from those without a plan, if anything.

    ``order`` and ``reads`` are as ``order_and_reads`` gives them for the recomputed nodes ``mask``;
    ``found`` receives the nodes to keep, some of the recomputed ones: those that make what is found
    otherwise, that read it, and that read the same.
    """
    seen = follow(t, rule.layouts, mask, order, reads, NO_COPIES)[1]
    differs = any_found = False
    for row in order:
        first, last = t.read_start[row], t.read_start[row + 1]
        other = False
        for j in range(first, last):
            other |= seen[j] >= 0 and rule.found[j] >= 0 and seen[j] != rule.found[j]
        if other:
            differs = True
            any_found |= _keep_around(t, facts, row, mask, found)
            for source in t.read_row[first:last]:
                any_found |= _keep_around(t, facts, source, mask, found)
    if differs and not any_found:
        found[:] = mask
        return bool(mask.any())
    return any_found


@compiled
def _keep_around(t, facts, row, mask, found):  # type: ignore[no-untyped-def]
    """Keep the node of a row that is no gradient's, and those that read it."""
    if row >= 2 * t.forward:
        return False
    x = row % t.forward
    any_found = mask[x]
    found[x] |= mask[x]
    for q in range(facts.read_start[x], facts.read_start[x + 1]):
        reader = facts.reader[facts.read[q]]
        any_found |= mask[reader]
        found[reader] |= mask[reader]
    return any_found
