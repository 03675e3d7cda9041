"""Find the least that must be in memory at once, whatever is recomputed: no plan takes less.

An operator, or its gradient, has all that it reads and makes in memory while it runs. Beside it
stand the outputs of the network, and what can be computed only once and a later gradient reads (the
mask of a Dropout). Gradients run in the same order under all marks, and in another under all
schedules. What may share memory counts once: an output that can take an input's memory is left out,
an identity (Flatten, Reshape) is the tensor that it passes on, and sums of gradients are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

import numpy as np

from memonger.graph.arrays import find_owners
from memonger.graph.forward import Node
from memonger.graph.training import TrainingGraph
from memonger.support.types import Int64s


@dataclass(frozen=True)
class LowerBound:
    """The least memory that any plan of a network needs, where ``row`` runs; -1: nowhere."""

    nbytes: int  # alive at once, with the real size of elements; parameters, their gradients apart
    row: int  # of the training graph
    operator: int  # the forward node that the row is, or whose gradient it is
    own_bytes: int  # what it reads and makes itself; the others are held over it

    def name(self, nodes: Sequence[Node]) -> str:
        """Name the operator, or the gradient, that needs so much; empty if nothing does."""
        if self.operator < 0:
            return ""
        node = nodes[self.operator]
        of = "the gradient of " if self.row >= 2 * len(nodes) else ""
        return f"{of}{node.name!r} ({node.op})"


def find_lower_bound(training: TrainingGraph, kept: Iterable[int] | None = None) -> LowerBound:
    """Find the least memory of plans that keep these operators, by default all that must be."""
    t, nodes = training.arrays, training.graph.nodes
    if kept is None:
        kept = [x for x in training.graph.operators if training.graph.why_kept(x)]
    once = np.zeros(len(t.elements), dtype=np.bool_)  # tensors that are computed once
    for x in kept:  # a schedule computes the output of a Dropout again, from its mask
        once[t.output_start[x] + (nodes[x].op == "Dropout") : t.output_start[x + 1]] = True
    n, rows = t.forward, len(t.variable)
    nbytes = t.elements * t.itemsize
    same = np.arange(len(nbytes))  # the tensor whose memory each can have while both are read
    entry, holds = t.read_entry, t.read_holds
    for q in np.flatnonzero(t.inplace_identity):  # by rows, each after what it reads
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
        """Find the bound of plans with the gradients in this order."""
        place = np.full(rows, -1, dtype=np.int64)  # of each row
        place[order] = np.arange(len(order))
        # What is held over each row: until its last gradient, or to the end.
        last = np.full(len(nbytes), -1, dtype=np.int64)
        read = once[used] & (place[reader] >= 0)
        np.maximum.at(last, same[used[read]], place[reader[read]])
        last[same[heads]] = len(order)
        ending = np.bincount(last[last >= 0], nbytes[last >= 0], len(order) + 1)
        over = np.zeros(rows)
        over[order] = np.cumsum(ending[::-1])[::-1][place[order]]
        both = (place[row] >= 0) & (last[tensor] >= place[row])
        total = own + over - np.bincount(row[both], nbytes[tensor[both]], rows)
        most = int(run[np.argmax(total[run])])
        return LowerBound(int(total[most]), most, int(training.origin[most]), int(own[most]))

    orders = gradients, np.unique(gradients)  # under marks; as they were made: in schedules
    return min(map(find_bound, orders), key=lambda bound: bound.nbytes)


def _find_needed(training: TrainingGraph, same: Int64s) -> tuple[Int64s, Int64s]:
    """Find what each row needs in memory itself: pairs of a row and a tensor, without doubles."""
    t, entries = training.arrays, len(same)
    reader, maker = find_owners(t.read_start), find_owners(t.output_start)
    entry = t.read_entry
    apart = np.isin(np.arange(entries), t.head_entry[t.outputs :])  # gradients: the user's memory
    overwriting = np.isin(np.arange(entries), t.inplace_output)
    used = t.read_holds & ~apart[entry] & ~np.isin(reader, maker[apart & overwriting])
    outputs = np.flatnonzero(~apart & ~overwriting & ~t.variable[maker])
    row = np.concatenate([reader[used], maker[outputs]])
    pairs = np.unique(row * entries + same[np.concatenate([entry[used], outputs])])
    return pairs // entries, pairs % entries
