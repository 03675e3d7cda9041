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

from memonger.costs.layouts import (
    ADDED,
    ANY_LAYOUT,
    IN_PLACE,
    NOT_IN_PLACE,
    PLAIN,
    UsualLayouts,
    find_layouts,
    read_with_workspace,
)
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


def find_overwriting(training: TrainingGraph, usual: UsualLayouts) -> list[int]:
    """Find the rows that crash in MKLDNN unless they overwrite their blocked input."""
    t = training.arrays
    in_place = (usual.facts.code == IN_PLACE) & (usual.place != NOT_IN_PLACE)
    rows = np.flatnonzero(in_place[t.output_start[:-1]])
    return rows[usual.read[t.read_start[rows]] != PLAIN].tolist()


def find_inserts(
    step: StepGraph, usual: UsualLayouts, source: Int32s, block: Int32s
) -> dict[int, list[Insert]]:
    """Find the operators to insert at each row of a schedule's step, so that layouts are usual.

    The layouts of later rows are computed as if the operators were inserted. ``source`` is as in
    `Rows`, and ``block`` as in `Lifetimes`.
    """
    t, ran, old = step.arrays, run_all(step.arrays), step.training.arrays
    layouts = find_layouts(step, scoring=True)
    reader, place, inside = _counterparts(t.read_start, old.read_start, source)
    want_read = np.where(inside & layouts.shows, usual.read[place], ANY_LAYOUT)
    maker, same, inside = _counterparts(t.output_start, old.output_start, source)
    want_output = np.where(inside & usual.matters[same], usual.written[same], ANY_LAYOUT)
    ops = np.array(step.ops)
    readers = np.bincount(ran.entry[~t.read_ignored], minlength=len(want_output))
    corrected = np.zeros(len(want_output), dtype=np.bool_)  # made plain by inserted operators
    corrected[ran.entry[t.read_start[:-1][(source < 0) & (ops == "Reshape")]]] = True
    want_output[(readers == 0) | (corrected & (readers == 1))] = ANY_LAYOUT
    _, read, have, other_read, other_output = compiled.lead_layouts(
        t, layouts, ran, block, block, want_read, want_output
    )
    for row in np.flatnonzero(ops == "BatchNorm").tolist():
        # MKLDNN's BatchNorm along another axis reads a view, which it cannot of blocks.
        along = step.signatures[row].attrs.get("axis", "1")
        if along != "1" and read[t.read_start[row]] not in (PLAIN, ANY_LAYOUT):
            raise refusal(step, row)
    for one, other in read_with_workspace(t, ops):
        known, found = usual.read[place[[one, other]]], read[[one, other]]
        if known[0] != known[1]:  # MXNet's gradient is wrong (`find_wrong_poolings`)
            if (known != found).any():
                raise refusal(step, int(reader[other]))
        elif found[0] != found[1]:
            want_read[[one, other]] = PLAIN
            other_read[[one, other]] = read[[one, other]] != PLAIN
    inserts: dict[int, list[Insert]] = defaultdict(list)
    for j in np.flatnonzero(other_read).tolist():
        row, tensors = int(reader[j]), step.signatures[t.read_row[j]].tensors
        if want_read[j] != PLAIN or len(tensors[t.read_output[j]].shape) > AXES:
            raise refusal(step, row)
        inserts[row].append(Insert(BEFORE, j - int(t.read_start[row])))
    other_output &= ops[maker] != "zeros_like"  # zeros are equal in all layouts
    for k in np.flatnonzero(other_output).tolist():
        row, plain, before = int(maker[k]), want_output[k] == PLAIN, int(usual.place[same[k]])
        output = k - int(t.output_start[row])
        inserts[row] += _lay_out(step, row, output, plain, int(have[k]), before)
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
