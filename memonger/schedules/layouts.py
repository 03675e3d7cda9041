"""Tensors that MKLDNN has laid out in blocks: in a schedule the same ones as without.

A schedule has another memory plan than the network, and the layouts of MKLDNN follow the memory
(``costs.layouts``). Here both are followed. Where a schedule would find another layout than the
network does without, and numbers depend on it, an operator is inserted (`training_step.insert`):

- a Reshape to the same shape, in place: it makes any layout plain;
- ``add_n`` of one tensor: a copy in the same layout, into which the next operator then writes in
  place, as it does without a schedule; it takes the memory that this operator would have taken;
- a reader of an input, after the operator that would overwrite it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from memonger.costs import layouts as mkldnn
from memonger.costs.layouts import ADDED, ANY_LAYOUT, IN_PLACE, NOT_IN_PLACE, PLAIN
from memonger.costs.replay import Replay
from memonger.graph.arrays import GraphArrays, gather
from memonger.graph.operators.layouts import AXES
from memonger.graph.training import StepGraph
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled
from memonger.support.types import AnyArray, Bools, Int32s, Int64s

BEFORE, AFTER, HOLD = "before", "after", "hold"  # a row: HOLD reads an input after it


class LayoutMismatch(MemongerError):
    """A schedule by which a layout cannot be as expected; another one may be carried out."""


class Insert(NamedTuple):
    """A repair at a row: a copy of an input or an output, or a reader that holds an input."""

    where: str
    place: int  # the input of the row that it stands for, or the output
    op: str = "Reshape"


class Expected:
    """The layouts of a network without a schedule, of which this is the Replay."""

    def __init__(self, unplanned: Replay) -> None:
        training = unplanned.training
        t = self.arrays = training.arrays
        layouts = mkldnn.find_layouts(training, scoring=True)
        self.output_layout, self.read_layout, self.place = compiled.follow_layouts(
            t, layouts, unplanned.step
        )
        self.matters = mkldnn.find_mattering(training, layouts, unplanned.step)
        in_place = (layouts.code == IN_PLACE) & (self.place != NOT_IN_PLACE)
        rows = np.flatnonzero(in_place[t.output_start[:-1]])
        #: Rows that can read their input only if they overwrite it.
        self.overwriting = rows[self.read_layout[t.read_start[rows]] != PLAIN].tolist()

    def differences(self, training: StepGraph, source: Int32s) -> dict[int, list[Insert]]:
        """Return what to insert at each row of a training step for its layouts to be as expected.

        Layouts after an insertion are followed as if it were there. ``source`` is as in `Rows`.
        """
        t = training.arrays
        step = compiled.find_step(t, np.zeros(0, dtype=np.bool_))
        layouts = mkldnn.find_layouts(training, scoring=True)
        reader, place, inside = _counterparts(t.read_start, self.arrays.read_start, source)
        want_read = np.where(inside & layouts.shows, self.read_layout[place], ANY_LAYOUT)
        maker, same, inside = _counterparts(t.output_start, self.arrays.output_start, source)
        want_output = np.where(inside & self.matters[same], self.output_layout[same], ANY_LAYOUT)
        ops = np.array(training.ops)
        readers = np.bincount(step.entry[~t.read_ignored], minlength=len(want_output))
        corrected = np.zeros(len(want_output), dtype=np.bool_)  # made plain by what was inserted
        corrected[step.entry[t.read_start[:-1][(source < 0) & (ops == "Reshape")]]] = True
        want_output[(readers == 0) | (corrected & (readers == 1))] = ANY_LAYOUT
        _, read, have, other_read, other_output = compiled.lead_layouts(
            t, layouts, step, want_read, want_output
        )
        for one, other in _read_with_workspace(t, ops):
            usual = self.read_layout[place[[one, other]]]
            if usual[0] == usual[1] and read[one] != read[other]:
                want_read[[one, other]] = PLAIN
                other_read[[one, other]] = read[[one, other]] != PLAIN
        inserts: dict[int, list[Insert]] = defaultdict(list)
        for j in np.flatnonzero(other_read).tolist():
            row, tensors = int(reader[j]), training.signatures[t.read_row[j]].tensors
            if want_read[j] != PLAIN or len(tensors[t.read_output[j]].shape) > AXES:
                raise refusal(training, row)
            inserts[row].append(Insert(BEFORE, j - int(t.read_start[row])))
        other_output &= ops[maker] != "zeros_like"  # the same in all layouts
        for k in np.flatnonzero(other_output).tolist():
            row, plain, usual = int(maker[k]), want_output[k] == PLAIN, int(self.place[same[k]])
            output = k - int(t.output_start[row])
            inserts[row] += _lay_out(training, row, output, plain, int(have[k]), usual)
        return inserts


def _counterparts(start: Int32s, old_start: Int32s, source: Int32s) -> tuple[Int64s, Int64s, Bools]:
    """Return of all that rows own the row, the same of the row that it stands for, and if any."""
    place, row = gather(start, np.arange(len(source)))
    old = old_start[source[row]] + place - start[row]
    inside = (source[row] >= 0) & (old < old_start[source[row] + 1])
    return row, np.where(inside, old, 0), inside


def _read_with_workspace(t: GraphArrays, ops: AnyArray) -> list[tuple[int, int]]:
    """List the reads of the images from which max poolings and their gradients compute.

    The workspace that MKLDNN's max pooling leaves for its gradient has the layout of its image. The
    gradient takes it for that of its own (``src/operator/nn/mkldnn/mkldnn_pooling.cc``).
    """
    start = t.read_start
    rows = np.flatnonzero((ops == "_backward_Pooling") & (np.diff(start) == 5))
    return [(int(start[t.read_row[start[r] + 4]]), int(start[r]) + 2) for r in rows]


def _lay_out(step: StepGraph, row: int, k: int, plain: bool, have: int, usual: int) -> list[Insert]:
    """Return what gives an output its expected layout.

    It is written in the place of input ``have``, and of input ``usual`` without a schedule. One
    with more axes than a Reshape makes plain is not written in place.
    """
    if plain and len(step.signatures[row].tensors[k].shape) <= AXES:
        return [Insert(AFTER, k)]
    hopeless = have < 0 if plain else usual in (have, ADDED)
    if hopeless:
        raise refusal(step, row)
    inserts = [Insert(HOLD, have)] if have >= 0 else []
    if not plain and usual != NOT_IN_PLACE:
        inserts.insert(0, Insert(BEFORE, usual, "add_n"))
    return inserts


def refusal(training: StepGraph, row: int) -> LayoutMismatch:
    """Make the error for a schedule by which a layout cannot be as expected."""
    return LayoutMismatch(
        f"MKLDNN would lay out what {training.describe(row)} reads in another "
        "way by this schedule than without one, so that it rounds differently; how='marks' can "
        "plan this network"
    )
