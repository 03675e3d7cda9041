"""What no plan can do without: the least that must be in memory at once, whatever is recomputed.

An operator, or its gradient, has all that it reads and makes in memory while it runs. Beside it
stand the outputs of the network, and what can be computed only once and a later gradient reads (the
mask of a Dropout, random draws). Gradients run in the same order under all marks, and in another
under all schedules, so the sum of these is known for each of them, and the largest bounds those
plans from below; the lesser of the two, every plan.

What may share memory counts once: an output that can take an input's memory is left out, an
identity (Flatten, Reshape) is the tensor that it passes on. Sums of gradients are left out, for a
term may be added up where the sum is. So the bound is safe, not sharp.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.graph.operators.recompute import why_kept
from memonger.graph.training import TrainingGraph


class Floor(NamedTuple):
    """The least memory that any plan of a network needs.

    Attributes
    ----------
    nbytes : int
        Alive at once, with the real size of elements; parameters and their gradients apart.
    row : int
        What runs then, a row of the training graph; -1 if nothing needs memory.
    operator : int
        The operator (a node) that it is, or whose gradient it is; -1 if nothing needs memory.
    own_bytes : int
        What it reads and makes itself; the others are held over it.
    """

    nbytes: int
    row: int
    operator: int
    own_bytes: int

    def sets(self, name: str, op: str, nodes: int) -> str:
        """What sets it in words, from the operator's name and kind and the number of nodes."""
        return ("the gradient of %r (%s)" if self.row >= 2 * nodes else "%r (%s)") % (name, op)


def floor(training: TrainingGraph, bare: bool = False) -> Floor:
    """The least memory that any plan of a network needs.

    Parameters
    ----------
    training : TrainingGraph
    bare : bool
        Whether plans may recompute what must not be (``rules=False``).
    """
    t = training.tables
    n = t.forward
    nbytes = t.elements * t.itemsize
    same = _passed_on(training)
    gradients = t.walk_row[t.walk_row >= 2 * n]
    rows = np.concatenate([t.first, gradients])
    owner = np.full(len(t.variable), -1, dtype=np.int64)
    owner[:n] = np.arange(n)
    owner[2 * n :] = training.owners

    # What each row needs itself: (row, tensor), each once.
    reader = np.repeat(np.arange(len(t.variable)), np.diff(t.use_start))
    maker = np.repeat(np.arange(len(t.variable)), np.diff(t.output_start))
    apart = np.zeros(len(nbytes), dtype=np.bool_)  # gradients: their memory is the user's
    apart[t.head_entry[t.outputs :]] = True
    overwriting = np.zeros(len(nbytes), dtype=np.bool_)
    overwriting[t.inplace_output] = True
    into_gradient = np.zeros(len(t.variable), dtype=np.bool_)  # may overwrite what they read
    into_gradient[maker[apart & overwriting]] = True
    used = ~apart[t.use_entry] & ~into_gradient[reader]
    made = ~apart & ~overwriting & ~t.variable[maker]
    needs = np.unique(
        np.concatenate(
            [
                reader[used] * len(nbytes) + same[t.use_entry[used]],
                maker[made] * len(nbytes) + same[np.flatnonzero(made)],
            ]
        )
    )
    row, tensor = needs // len(nbytes), needs % len(nbytes)
    own = np.bincount(row, nbytes[tensor], len(t.variable))

    held = _only_once(training) if not bare else np.zeros(len(nbytes), dtype=np.bool_)
    outputs = t.head_entry[: t.outputs]
    to_the_end = same[outputs[~t.variable[t.head_row[: t.outputs]]]]
    rows = rows[(owner[rows] >= 0) & ~t.variable[rows]]
    if not len(rows):
        return Floor(0, -1, -1, 0)

    def under(order: np.ndarray) -> Floor:
        """The floor under plans with the gradients in this order."""
        place = np.full(len(t.variable), -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        # What is held over each row: until its last gradient, or to the end.
        last = np.full(len(nbytes), -1, dtype=np.int64)
        read = (place[reader] >= 0) & held[t.use_entry]
        np.maximum.at(last, same[t.use_entry[read]], place[reader][read])
        last[to_the_end] = len(order)
        ending = np.bincount(last[last >= 0], nbytes[last >= 0], len(order) + 1)
        over = np.zeros(len(t.variable))
        over[order] = np.cumsum(ending[::-1])[::-1][place[order]]
        counted = (place[row] >= 0) & (last[tensor] >= place[row])  # in both
        over -= np.bincount(row[counted], nbytes[tensor[counted]], len(t.variable))
        total = own + over
        most = int(rows[np.argmax(total[rows])])
        return Floor(int(total[most]), most, int(owner[most]), int(own[most]))

    as_made = np.unique(gradients)  # so they run in schedules
    return min((under(order) for order in (gradients, as_made)), key=lambda least: least.nbytes)


def _passed_on(training: TrainingGraph) -> np.ndarray:
    """For each tensor the one whose memory it can have while both are read, or itself."""
    t = training.tables
    same = np.arange(len(t.elements))
    for q in np.flatnonzero(t.inplace_identity):  # by rows, each after what it reads
        same[t.inplace_output[q]] = same[t.inplace_entry[q]]
    return same


def _only_once(training: TrainingGraph) -> np.ndarray:
    """The tensors that are computed once, whatever the plan."""
    t, nodes = training.tables, training.graph.nodes
    once = np.zeros(len(t.elements), dtype=np.bool_)
    for x, node in enumerate(nodes):
        if node.is_variable or why_kept(node.op, node.attrs) is None:
            continue
        # A schedule computes the output of a Dropout again, from its mask.
        first = t.output_start[x] + (1 if node.op == "Dropout" else 0)
        once[first : t.output_start[x + 1]] = True
    return once
