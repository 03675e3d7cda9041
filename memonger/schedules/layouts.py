"""Give tensors in a schedule the same MKLDNN layouts that they have without a schedule.

MKLDNN's layouts depend on the memory plan (``costs.layouts``), and a schedule has another memory
plan than the network. This module follows the layouts of both. Where they differ and results depend
on the layout, it inserts an operator (`training_step.splice`):

- a Reshape to the same shape, in place, which makes any layout plain;
- ``add_n`` of one tensor, a copy in the same layout, over which the next operator then writes in
  place, as it does without a schedule; the copy takes the memory of that operator's output;
- a reader of an input after an operator, which keeps the operator from overwriting the input.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from memonger.costs import layouts as mkldnn
from memonger.costs.layouts import ADDED, ANY_LAYOUT, IN_PLACE, NOT_IN_PLACE, PLAIN
from memonger.graph.arrays import gather, run_all
from memonger.graph.operators.layouts import AXES
from memonger.graph.training import StepGraph, TrainingGraph
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled
from memonger.support.types import Bools, Int32s, Int64s

BEFORE, AFTER, HOLD = "before", "after", "hold"  # HOLD: after the row, a reader of its input


class LayoutMismatch(MemongerError):
    """Raised for a schedule in which a layout differs from the one without a schedule.

    Another schedule of the network may be possible.
    """


class Insert(NamedTuple):
    """An operator to insert at a row: a copy of an input or an output, or a reader of an input."""

    where: str
    place: int  # the index of the input or the output of the row
    op: str = "Reshape"


class Expected:
    """The layouts of a network without a schedule."""

    def __init__(self, training: TrainingGraph) -> None:
        t, step = training.arrays, training.unmarked
        self.arrays = t
        layouts = mkldnn.find_layouts(training, scoring=True)
        self.output_layout, self.read_layout, self.place = compiled.follow_layouts(t, layouts, step)
        self.matters = mkldnn.find_mattering(training, layouts, step)
        in_place = (layouts.code == IN_PLACE) & (self.place != NOT_IN_PLACE)
        rows = np.flatnonzero(in_place[t.output_start[:-1]])
        #: Rows that crash in MKLDNN unless they overwrite their blocked input.
        self.overwriting = rows[self.read_layout[t.read_start[rows]] != PLAIN].tolist()

    def differences(
        self, training: StepGraph, source: Int32s, block: Int32s
    ) -> dict[int, list[Insert]]:
        """Return the operators to insert at each row of a training step, so that layouts match.

        The layouts of later rows are computed as if the operators were inserted. ``source`` is as
        in `Rows`, and ``block`` as in `Lifetimes`.
        """
        t, step = training.arrays, run_all(training.arrays)
        layouts = mkldnn.find_layouts(training, scoring=True)
        reader, place, inside = _counterparts(t.read_start, self.arrays.read_start, source)
        want_read = np.where(inside & layouts.shows, self.read_layout[place], ANY_LAYOUT)
        maker, same, inside = _counterparts(t.output_start, self.arrays.output_start, source)
        want_output = np.where(inside & self.matters[same], self.output_layout[same], ANY_LAYOUT)
        ops = np.array(training.ops)
        readers = np.bincount(step.entry[~t.read_ignored], minlength=len(want_output))
        corrected = np.zeros(len(want_output), dtype=np.bool_)  # made plain by inserted operators
        corrected[step.entry[t.read_start[:-1][(source < 0) & (ops == "Reshape")]]] = True
        want_output[(readers == 0) | (corrected & (readers == 1))] = ANY_LAYOUT
        _, read, have, other_read, other_output = compiled.lead_layouts(
            t, layouts, step, block, block, want_read, want_output
        )
        for row in np.flatnonzero(ops == "BatchNorm").tolist():
            # MKLDNN's BatchNorm along another axis reads a view, which it cannot of blocks.
            along = training.signatures[row].attrs.get("axis", "1")
            if along != "1" and read[t.read_start[row]] not in (PLAIN, ANY_LAYOUT):
                raise refusal(training, row)
        for one, other in mkldnn.read_with_workspace(t, ops):
            usual, found = self.read_layout[place[[one, other]]], read[[one, other]]
            if usual[0] != usual[1]:  # MXNet's gradient is wrong (`find_wrong_poolings`)
                if (usual != found).any():
                    raise refusal(training, int(reader[other]))
            elif found[0] != found[1]:
                want_read[[one, other]] = PLAIN
                other_read[[one, other]] = read[[one, other]] != PLAIN
        inserts: dict[int, list[Insert]] = defaultdict(list)
        for j in np.flatnonzero(other_read).tolist():
            row, tensors = int(reader[j]), training.signatures[t.read_row[j]].tensors
            if want_read[j] != PLAIN or len(tensors[t.read_output[j]].shape) > AXES:
                raise refusal(training, row)
            inserts[row].append(Insert(BEFORE, j - int(t.read_start[row])))
        other_output &= ops[maker] != "zeros_like"  # zeros are equal in all layouts
        for k in np.flatnonzero(other_output).tolist():
            row, plain, usual = int(maker[k]), want_output[k] == PLAIN, int(self.place[same[k]])
            output = k - int(t.output_start[row])
            inserts[row] += _lay_out(training, row, output, plain, int(have[k]), usual)
        return inserts


def _counterparts(start: Int32s, old_start: Int32s, source: Int32s) -> tuple[Int64s, Int64s, Bools]:
    """Find the counterparts, in the network without a schedule, of the items that rows own.

    Return for each item its row, the index of its counterpart, and whether it has one.
    """
    place, row = gather(start, np.arange(len(source)))
    old = old_start[source[row]] + place - start[row]
    inside = (source[row] >= 0) & (old < old_start[source[row] + 1])
    return row, np.where(inside, old, 0), inside


def _lay_out(step: StepGraph, row: int, k: int, plain: bool, have: int, usual: int) -> list[Insert]:
    """Return the operators to insert so that an output gets its expected layout.

    The output is written in place of input ``have``, and without a schedule in place of input
    ``usual``. An output with more axes than Reshape can make plain must not be written in place.
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
    """Make the error for a schedule in which the layout of an input of a row would differ."""
    return LayoutMismatch(
        f"with this schedule, MKLDNN would use another layout for an input of "
        f"{training.describe(row)}, which would then round differently; how='marks' can plan this "
        "network"
    )
