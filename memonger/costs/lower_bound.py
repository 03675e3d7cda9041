"""Find a lower bound of the memory of a training step, whatever is recomputed.

While an operator or its gradient runs, its inputs and outputs are in memory. So are the outputs of
the network, and results that cannot be recomputed and that a later gradient reads (the mask of a
Dropout). Gradients run in one order with all marks, and in another with all schedules. Tensors that
may share memory count once: an output that can take the memory of an input is left out, an identity
(Flatten, Reshape) is the same tensor as its input, and sums of gradients are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from memonger.graph.arrays import find_owners
from memonger.graph.forward import Node
from memonger.graph.operators.recompute import is_restored
from memonger.graph.training import TrainingGraph
from memonger.support.types import Int64s


@dataclass(frozen=True)
class LowerBound:
    """A lower bound of the memory of any plan, and the row of the training graph that sets it."""

    nbytes: int  # alive at once, without parameters and their gradients
    row: int  # of the training graph; -1: no row
    operator: int  # the forward node that the row runs or is a gradient of; -1: no node
    own_bytes: int  # inputs and outputs of the row; the others are alive while it runs

    def name(self, nodes: Sequence[Node]) -> str:
        """Return a description of the operator or the gradient that sets the bound, or ''."""
        if self.operator < 0:
            return ""
        node = nodes[self.operator]
        of = "the gradient of " if self.row >= 2 * len(nodes) else ""
        return f"{of}{node.name!r} ({node.op})"


def find_lower_bound(training: TrainingGraph) -> LowerBound:
    """Return a lower bound of the memory of all plans."""
    t, nodes = training.arrays, training.graph.nodes
    computed_once = np.zeros(len(t.elements), dtype=np.bool_)
    for x in filter(training.graph.why_kept, training.graph.operators):
        first = t.output_start[x] + is_restored(nodes[x].op, nodes[x].attrs)
        computed_once[first : t.output_start[x + 1]] = True
    n, rows = t.forward_nodes, len(t.variable)
    nbytes = t.elements * t.itemsize
    same = np.arange(len(nbytes))  # the tensor whose memory each can share while both are read
    entry, holds = t.read_entry, t.read_holds
    for q in np.flatnonzero(t.inplace_identity):  # rows come after those that they read
        same[t.inplace_output[q]] = same[entry[t.inplace_read[q]]]
    row, tensor = _find_needed(training, same)
    own = np.bincount(row, nbytes[tensor], rows)
    gradients = t.walk_row[t.walk_row >= 2 * n]
    run = np.append(t.first, gradients)
    run = run[(training.origin[run] >= 0) & ~t.variable[run]]
    if not len(run):
        return LowerBound(0, -1, -1, 0)
    reader, used = find_owners(t.read_start)[holds], entry[holds]
    heads = t.head_entry[: t.outputs][~t.variable[t.head_row[: t.outputs]]]

    def find_bound(order: Int64s) -> LowerBound:
        """Return the bound of plans with the gradients in this order."""
        place = np.full(rows, -1, dtype=np.int64)  # the position of each row
        place[order] = np.arange(len(order))
        # The last position at which each tensor is alive: its last gradient, or the end.
        last = np.full(len(nbytes), -1, dtype=np.int64)
        read = computed_once[used] & (place[reader] >= 0)
        np.maximum.at(last, same[used[read]], place[reader[read]])
        last[same[heads]] = len(order)
        ending = np.bincount(last[last >= 0], nbytes[last >= 0], len(order) + 1)
        over = np.zeros(rows)
        over[order] = np.cumsum(ending[::-1])[::-1][place[order]]
        both = (place[row] >= 0) & (last[tensor] >= place[row])
        total = own + over - np.bincount(row[both], nbytes[tensor[both]], rows)
        most = int(run[np.argmax(total[run])])
        return LowerBound(int(total[most]), most, int(training.origin[most]), int(own[most]))

    orders = gradients, np.unique(gradients)  # with marks, and in schedules
    return min(map(find_bound, orders), key=lambda bound: bound.nbytes)


def _find_needed(training: TrainingGraph, same: Int64s) -> tuple[Int64s, Int64s]:
    """Find the tensors that each row reads or writes: distinct pairs of a row and a tensor."""
    t, entries = training.arrays, len(same)
    reader, maker = find_owners(t.read_start), find_owners(t.output_start)
    entry = t.read_entry
    of_user = np.isin(np.arange(entries), t.head_entry[t.outputs :])  # gradients of arguments
    overwriting = np.isin(np.arange(entries), t.inplace_output)
    used = t.read_holds & ~of_user[entry] & ~np.isin(reader, maker[of_user & overwriting])
    outputs = np.flatnonzero(~of_user & ~overwriting & ~t.variable[maker])
    row = np.concatenate([reader[used], maker[outputs]])
    pairs = np.unique(row * entries + same[np.concatenate([entry[used], outputs])])
    return pairs // entries, pairs % entries
