"""Tensors that MKLDNN has laid out in blocks: in a schedule the same ones as without.

A schedule has another memory plan than the network, and the layouts of MKLDNN follow the memory
(``layout_facts``). What is *added* (kAddTo) to an array in blocks is even added to uninitialised
memory, and some operators crash on blocks (slice, BatchNorm with an axis of its own).

Here the layouts of both are followed. Where a schedule would find another one than the network does
without, and numbers depend on it, an operator is put in (`insert`):

- a Reshape to the same shape, in place: it makes any layout plain;
- ``add_n`` of one tensor: a copy in the same layout, into which the next operator then writes in
  place, as it does without a schedule; it takes the memory that this operator would have taken;
- a reader of an input, after the operator that would overwrite it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.layouts import (
    ADDED,
    AXES,
    CHOSEN,
    KNOW,
    NO_COPIES,
    NOT_IN_PLACE,
    PLAIN,
    convert,
    follow,
    layout_of,
    layout_tables,
    mattering,
)
from memonger.costs.replay import Replay
from memonger.graph.arrays import RowKind
from memonger.support.errors import MemongerError

BEFORE, AFTER, HOLD = "before", "after", "hold"


class Insert(NamedTuple):
    """An operator to put in: `BEFORE` or `AFTER` a row, or to read an input after it (`HOLD`).

    Attributes
    ----------
    row : int
    where : str
    place : int
        Which input of the row it stands for, or which output.
    op : str
    attrs : dict
        Of what is put in `BEFORE` or `AFTER`.
    """

    row: int
    where: str
    place: int
    op: str = ""
    attrs: Mapping[str, str] = MappingProxyType({})


class Expected:
    """The layouts of a network without a schedule.

    Parameters
    ----------
    found : Replay
        Of the network without recomputation.
    """

    def __init__(self, found: Replay) -> None:
        training = found.training
        self.tables = training.tables
        layouts = layout_tables(training, scoring=True)
        made, seen, place, entries = follow(
            training.tables, layouts, found.recomputed, found.order, found.reads, NO_COPIES
        )
        self.made, self.found, self.place = made.tolist(), seen.tolist(), place.tolist()
        second = entries[training.tables.read_start[:-1][layouts.adding] + 1]
        rows = np.flatnonzero(layouts.adding)
        self.added = set(rows[place[second] == ADDED].tolist())
        self.matters = mattering(training, layouts, found.order, entries).tolist()

    def differences(self, found: Replay, kinds: Sequence[RowKind], rows: Any) -> list[Insert]:
        """What to put into the training step of a schedule for its layouts to be as expected.

        Parameters
        ----------
        found : Replay
            Of the schedule's training step.
        kinds : sequence of RowKind
            Of its rows.
        rows : np.ndarray
            Of each of its rows the row of the network's training graph that it stands for, or -1.
        """
        comparer = _Comparer(found, kinds, self, rows)
        for row in comparer.order:
            comparer.run(row)
        return comparer.inserts


class _Comparer:
    """Follows the layouts of a schedule, and finds what to put in for them to be as expected.

    From where something is put in it goes on as if that had been there.
    """

    def __init__(
        self, found: Replay, kinds: Sequence[RowKind], expected: Expected, rows: np.ndarray
    ) -> None:
        t = found.training.tables
        self.tables, self.kinds, self.expected = t, kinds, expected
        self.order = [row for row in found.order.tolist() if not t.variable[row]]
        self.outputs, self.inputs = t.output_start.tolist(), t.read_start.tolist()
        self.entries = (t.output_start[t.read_row] + t.read_output).tolist()
        self.layouts = layout_tables(found.training, scoring=True)
        self.shows = self.layouts.shows.tolist()
        self.makes = (self.layouts.code >= CHOSEN).tolist()
        self.planned, self.block = found.planned.tolist(), found.blocks.tolist()
        self.reads = found.reads.tolist()
        self.made = [PLAIN] * len(self.planned)
        self.place = [NOT_IN_PLACE] * len(self.planned)
        self.now: dict[int, int] = {}  # of each block
        self.rows = rows.tolist()
        self.names = found.training
        self.inserts: list[Insert] = []
        read = np.asarray(self.entries, dtype=np.int64)[~t.read_ignored]
        self.readers = np.bincount(read, minlength=len(self.planned)).tolist()
        # Outputs that are made plain by what has been put in.
        self.corrected = {
            self.entries[self.inputs[row]]
            for row in self.order
            if self.rows[row] < 0 and kinds[row].op == "Reshape"
        }
        # What is added to here alone, by an operator that knows no layouts.
        self.sums: set[int] = set()
        knows = np.repeat([kind.op in KNOW for kind in kinds], np.diff(self.outputs)).tolist()
        for row in self.order:
            term = self.inputs[row] + 1
            if self.is_added(row) and not knows[self.entries[term]]:
                if self.rows[row] not in expected.added:
                    self.sums.add(self.entries[term - 1])

    def read(self, j: int) -> int:
        """The layout in which an input is found."""
        entry = self.entries[j]
        block = self.block[entry]
        return self.made[entry] if block < 0 else self.now.get(block, PLAIN)

    def found(self, row: int) -> np.ndarray:
        """The layouts in which a row computes."""
        reads = range(self.inputs[row], self.inputs[row + 1])
        found = np.array([self.read(j) for j in reads], dtype=np.int64)
        if self.outputs[row] < self.outputs[row + 1]:
            convert(self.layouts.code[self.outputs[row]], found)
        return found

    def write(self, entry: int, symbol: int) -> None:
        self.made[entry] = symbol
        if self.block[entry] >= 0:
            self.now[self.block[entry]] = symbol

    def is_added(self, row: int) -> bool:
        """Whether this is a sum that is not run, for its second term is added to the first."""
        if not self.layouts.adding[row]:
            return False
        term = self.entries[self.inputs[row] + 1]
        return self.planned[term] != self.block[term]

    def find_place(self, out: int, first: int, last: int) -> int:
        if self.block[out] != self.planned[out]:
            return ADDED
        if self.planned[out] >= 0:
            for j in range(first, last):
                if self.planned[self.entries[j]] == self.planned[out]:
                    return j - first
        return NOT_IN_PLACE

    def follow(self, row: int) -> None:
        """Find the layouts of what a row makes."""
        first, last = self.inputs[row], self.inputs[row + 1]
        outputs = range(self.outputs[row], self.outputs[row + 1])
        if self.is_added(row):  # the sum is there already
            self.made[outputs[0]] = self.now.get(self.block[outputs[0]], PLAIN)
            return
        found = self.found(row)
        made = []
        for out in outputs:
            self.place[out] = place = self.find_place(out, first, last)
            before = self.now.get(self.block[out], PLAIN) if place != NOT_IN_PLACE else PLAIN
            if self.reads[out] == 0 or not (before or found.any() or self.makes[out]):
                made.append(PLAIN)
                continue
            code, number = self.layouts.code[out], self.layouts.number[out]
            plays = self.layouts.plays[first:last]
            made.append(int(layout_of(code, number, place, before, found, plays)))
        for out, symbol in zip(outputs, made):
            self.write(out, symbol)

    def run(self, row: int) -> None:
        """Find the layouts of what a row reads and makes, and what to put in before and behind."""
        r = self.rows[row]
        first, last = self.inputs[row], self.inputs[row + 1]
        expected = self.expected
        if r >= 0:
            found = self.found(row)
            for j in range(first, last):
                want = expected.found[expected.tables.read_start[r] + j - first]
                if self.shows[j] and found[j - first] != want:
                    self.lay_out_input(row, j, want)
        self.follow(row)
        for k, out in enumerate(range(self.outputs[row], self.outputs[row + 1])):
            have = self.made[out]
            if self.readers[out] == 0 or (out in self.corrected and self.readers[out] == 1):
                continue
            if out in self.sums and have != PLAIN:
                self.make_plain(row, k)
            if r < 0:
                continue
            same = expected.tables.output_start[r] + k
            if have == expected.made[same] or not expected.matters[same]:
                continue
            if self.kinds[row].op == "zeros_like":  # the same in all layouts
                self.write(out, expected.made[same])
            else:
                self.lay_out_output(row, k, expected.made[same], expected.place[same])

    def lay_out_input(self, row: int, j: int, want: int) -> None:
        shape = self.shape(self.entries[j])
        if want != PLAIN or len(shape) > AXES:
            self.refuse(row)
        place = j - self.inputs[row]
        self.inserts.append(Insert(row, BEFORE, place, "Reshape", {"shape": str(shape)}))
        self.now[self.block[self.entries[j]]] = PLAIN

    def make_plain(self, row: int, k: int) -> None:
        """Make an output plain, by a Reshape; with more axes by not writing it in place."""
        out = self.outputs[row] + k
        shape, place = self.shape(out), self.place[out]
        if len(shape) <= AXES:
            self.inserts.append(Insert(row, AFTER, k, "Reshape", {"shape": str(shape)}))
        elif place >= 0:
            self.inserts.append(Insert(row, HOLD, place))
        else:
            self.refuse(row)
        self.write(out, PLAIN)

    def lay_out_output(self, row: int, k: int, want: int, place: int) -> None:
        """Make the layout of an output as expected."""
        out = self.outputs[row] + k
        have = self.place[out]
        if want == PLAIN:
            return self.make_plain(row, k)
        if place == have or place == ADDED:
            self.refuse(row)
        if place != NOT_IN_PLACE:
            self.inserts.append(Insert(row, BEFORE, place, "add_n", {"num_args": "1"}))
        if have >= 0:
            self.inserts.append(Insert(row, HOLD, have))
        self.write(out, want)

    def shape(self, entry: int) -> tuple[int, ...]:
        row = int(np.searchsorted(self.outputs, entry, side="right")) - 1
        return tuple(self.kinds[row].tensors[entry - self.outputs[row]].shape)

    def refuse(self, row: int) -> None:
        raise MemongerError(
            f"MKLDNN would lay out what {self.names.names[row]!r} ({self.kinds[row].op}) reads in "
            "another way by this schedule than without "
            "one, so that it rounds differently; how='marks' can plan this network"
        )
