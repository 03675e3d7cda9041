"""What is put into the training step of a schedule for it to give what MXNet gives, bit for bit.

That is where a gradient is added to a total, and where a tensor would be laid out in another way
(``layouts``).
"""

from __future__ import annotations

from collections import Counter
from typing import Collection, Iterable, Mapping, NamedTuple, Sequence, TypeVar

import numpy as np

from memonger.costs.layouts import AXES
from memonger.graph.arrays import Kinds, RowKind, ragged
from memonger.graph.forward import Entry
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.layouts import AFTER, BEFORE, HOLD, Insert
from memonger.schedules.nodes import INSERTED, Rows
from memonger.schedules.training_step import TrainingStep, step_of

#: The mean of each channel reads blocks. For an operator that cannot, such as ``max``, MXNet's
#: executor makes a plain copy and keeps it for as long as it lives (``StorageFallbackOpExecutor``,
#: ``src/executor/attach_op_execs_pass.cc``). It must be read: without MKLDNN, Pooling has to write.
MEAN = {"global_pool": "True", "kernel": "(1, 1)", "pool_type": "avg"}


class Total(NamedTuple):
    """An output of a row that is to be added to a total, the gradient of an argument."""

    row: int
    output: int
    argument: int


def with_totals(step: TrainingStep, added: Collection[int]) -> TrainingStep:
    """Add gradients up as MXNet does: the operator that makes one adds to the total itself.

    Some round otherwise than by adding what they have made (an Embedding adds row after row). The
    executor sees to it that the second input of a ``_grad_add`` is added to the first
    (``src/executor/inplace_addto_detect_pass.cc``), here a copy of the total. Where a gradient is
    read by others too it is not done: it is added up afterwards.

    Parameters
    ----------
    step : TrainingStep
    added : collection of int
        The arguments whose gradient is added to a total.
    """
    made, rows = step.parts, step.rows
    reads = Counter(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    reads.update(step.heads)
    given = Counter(step.gradients)
    totals = []
    for a, found, output in zip(step.training.wanted, made.gradients, step.gradients):
        if a in added and found is not None and a not in made.left_out and given[output] == 1:
            row, k = int(rows.latest[found[0]]), found[1]
            if reads[row, k] == 1:
                totals.append(Total(row, k, a))
    return insert(step, (), totals) if totals else step


def insert(
    step: TrainingStep, inserts: Sequence[Insert], totals: Sequence[Total] = ()
) -> TrainingStep:
    """A training step with more operators.

    What is put in before a row waits for what ran before; what is put in behind it waits for
    nothing, and the next row that may wait, waits for it.
    """
    rows, kinds = step.rows, step.kinds
    new = _Rows(step)
    before = _by_row(one for one in inserts if one.where == BEFORE)
    behind = _by_row(one for one in inserts if one.where != BEFORE)
    summed = _by_row(totals)
    place: list[int] = []  # of each old row
    instead: dict[Entry, Entry] = {}
    chain: list[int] = []  # the last row that others wait for
    pending: list[int] = []  # what the next row that may wait, waits for
    ahead: dict[int, list[int]] = {}  # copies of totals before rows that wait for nothing
    sums: dict[int, tuple[int, int]] = {}  # of each argument: the variable of its total, the sum
    sources, whats, times = rows.source.tolist(), rows.what.tolist(), rows.time.tolist()
    reads, waits = rows.inputs()
    for row, kind in enumerate(kinds):
        entries = [(place[source], k) for source, k in reads[row]]
        read = [instead.get(entry, entry) for entry in entries]
        for one in before.get(row, ()):
            read[one.place] = new.put_in(one, read[one.place], chain)
        begun = []
        for total in summed.get(row, ()):
            tensor = kind.tensors[total.output]
            variable = new.insert("null", {}, tensor, [], [])
            copy = new.insert("_copy", {}, tensor, [(variable, 0)], chain)
            begun.append((total, variable, copy))
        copies = [copy for _, _, copy in begun]
        if waits[row]:
            pending += copies
        else:
            ahead[row] = copies
        wait = [w for old in waits[row] for w in (*ahead.get(old, ()), place[old])]
        if wait:
            wait += pending
            pending = []
        here = new.add(kind, sources[row], whats[row], times[row], read, wait)
        place.append(here)
        if wait or times[row] >= 0:
            chain = [here]
        for one in behind.get(row, ()):
            if one.where == AFTER:
                entry = here, one.place
                instead[entry] = put = new.put_in(one, entry, [])
            else:
                put = new.put_in(one, read[one.place], [here])
            pending.append(put[0])
        for total, variable, copy in begun:
            both = [(copy, 0), (here, total.output)]
            added = new.insert("_grad_add", {}, kind.tensors[total.output], both, [])
            sums[total.argument] = variable, added
            pending.append(added)
    for a, (variable, added) in step.totals.items():
        entry = place[added], 0
        sums[a] = place[variable], instead.get(entry, entry)[0]
    moved = np.array([*place, -1], dtype=np.int32)
    return step_of(step.parts, new.rows(moved[rows.first], moved[rows.latest]), sums)


Row = TypeVar("Row", Insert, Total)


def _by_row(items: Iterable[Row]) -> Mapping[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for item in items:
        found.setdefault(item.row, []).append(item)
    return found


class _Rows:
    """Rows that are put down one after the other."""

    def __init__(self, step: TrainingStep) -> None:
        self._number = Kinds(step.parts.kinds)
        self._kinds: list[RowKind] = []
        self._source: list[int] = []
        self._what: list[int] = []
        self._time: list[int] = []
        self._reads: list[list[Entry]] = []
        self._waits: list[list[int]] = []

    def add(
        self, kind: RowKind, source: int, what: int, time: int, read: list[Entry], wait: list[int]
    ) -> int:
        self._kinds.append(kind)
        self._source.append(source)
        self._what.append(what)
        self._time.append(time)
        self._reads.append(read)
        self._waits.append(wait)
        return len(self._kinds) - 1

    def insert(
        self, op: str, attrs: Mapping[str, str], tensor: Tensor, read: list[Entry], wait: list[int]
    ) -> int:
        """A row that the schedule does not have, with one output."""
        number = self._number(op, attrs, len(read), (tensor,))
        return self.add(self._number.all[number], number, INSERTED, -1, read, wait)

    def put_in(self, one: Insert, entry: Entry, wait: list[int]) -> Entry:
        """What a layout needs, reading this."""
        row, k = entry
        tensor = self._kinds[row].tensors[k]
        if one.where != HOLD:
            return self.insert(one.op, one.attrs, tensor, [entry], wait), 0
        if len(tensor.shape) == AXES:
            mean = Tensor((*tensor.shape[:2], 1, 1), tensor.dtype)
            entry, wait = (self.insert("Pooling", MEAN, mean, [entry], wait), 0), []
        return self.insert("max", {}, Tensor((1,), tensor.dtype), [entry], wait), 0

    def rows(self, first: np.ndarray, latest: np.ndarray) -> Rows:
        """All of them; of each template row the first and the last."""
        read_start, entries = ragged(self._reads)
        wait_start, wait_row = ragged(self._waits)
        read_row, read_output = np.ascontiguousarray(entries.reshape(-1, 2).T, dtype=np.int32)
        return Rows(
            np.array(self._source, dtype=np.int32),
            np.array(self._what, dtype=np.int32),
            np.array(self._time, dtype=np.int32),
            read_start,
            read_row,
            read_output,
            wait_start,
            wait_row.astype(np.int32),
            first,
            latest,
        )
