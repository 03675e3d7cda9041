"""The rows of a schedule's training step: what runs, what each row reads and waits for.

A *template* holds all that a network's training steps are made of, whatever the schedule. From it
and the events of a schedule compiled code makes the rows, so that a search can do so thousands of
times (``planners.judge``).

Each row waits for the one before it by a control dependency, for MXNet orders nodes depth first
from the outputs (``nnvm::DFSVisit``), inputs before control dependencies. Two rules of MXNet's
shape this:

- The first control dependency of a gradient node must be its forward node: shapes and the state of
  the operator come from there (``src/executor/infer_graph_attr_pass.cc``). A gradient node without
  one must not get any; the next node that may, waits for it. In this way gradients are summed as
  soon as they are there (those of shared weights would all be held to the end otherwise).
- An output that nobody reads is not written (kNullOp), and then what the operator's gradient reads
  may not be either. Where the network would have it read, it is given a reader.
"""

from typing import List, NamedTuple, Tuple

import numpy as np

from memonger.compiled import compiled
from memonger.forward import Entry

# What a row is: its template row itself, a scratch state, a Dropout that runs again, a reader of an
# output that nobody else reads, what ``inserts`` puts in.
ITSELF, SCRATCH, MASKED, READER, INSERTED = 0, 1, 2, 3, 4


class Template(NamedTuple):
    """What can be written out of a training graph, as arrays for compiled code.

    A *template row* is a row of the TrainingGraph: forward nodes, then (from 2n on) gradients.
    ``*_start`` has one more element than there are rows: row r owns [start[r], start[r + 1]).
    """

    variable: np.ndarray
    outputs: np.ndarray  # how many each row has
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    read_ignored: np.ndarray
    read_first: np.ndarray  # read of the first time that the operator ran
    read_scratch: np.ndarray  # the scratch state that is read when the operator runs again; or -1
    scratches: int
    wait_start: np.ndarray  # what a gradient row must wait for, its forward node first
    wait_row: np.ndarray
    event_start: np.ndarray  # for forward rows: the gradient rows of their event, in order
    event_row: np.ndarray
    needed_start: np.ndarray  # for forward rows: the outputs that must have a reader
    needed: np.ndarray
    masked: np.ndarray  # for forward rows: Dropout, which runs again as a product with its mask
    head_row: np.ndarray  # the outputs of the network
    head_output: np.ndarray


class Rows(NamedTuple):
    """The rows of a training step, each after all that it reads.

    Attributes
    ----------
    source : np.ndarray
        The template row, the number of a scratch state, for a `READER` the place in
        ``Template.needed``, for what is `INSERTED` its kind.
    what : np.ndarray
        `ITSELF`, `SCRATCH`, ...
    time : np.ndarray
        How often the operator has run before; -1 for what is no forward node.
    read_start, read_row, read_output : np.ndarray
    wait_start, wait_row : np.ndarray
        Control dependencies.
    first, latest : np.ndarray
        Of each template row the first and the last row that it became; -1 for none.
    """

    source: np.ndarray
    what: np.ndarray
    time: np.ndarray
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    wait_start: np.ndarray
    wait_row: np.ndarray
    first: np.ndarray
    latest: np.ndarray

    def stands_for(self) -> np.ndarray:
        """Of each row the template row whose place in the network it takes; -1 for none."""
        return np.where((self.what == ITSELF) | (self.what == MASKED), self.source, -1)

    def inputs(self) -> Tuple[List[List[Entry]], List[List[int]]]:
        """For each row what it reads, (row, output), and the rows that it waits for."""
        entries = list(zip(self.read_row.tolist(), self.read_output.tolist()))
        rows = self.wait_row.tolist()
        return (
            [entries[start:stop] for start, stop in zip(self.read_start, self.read_start[1:])],
            [rows[start:stop] for start, stop in zip(self.wait_start, self.wait_start[1:])],
        )


@compiled
def _read(t, events):  # type: ignore[no-untyped-def]
    """Which outputs of each event are read (`slot` has where those of an event start)."""
    n = t.masked.shape[0]
    latest = np.full(n, -1, dtype=np.int64)
    first = np.full(n, -1, dtype=np.int64)
    slot = np.zeros(events.shape[0] + 1, dtype=np.int64)
    for e in range(events.shape[0]):
        slot[e + 1] = slot[e] + (t.outputs[events[e]] if events[e] >= 0 else 0)
    read = np.zeros(slot[-1], dtype=np.bool_)
    for e in range(events.shape[0]):
        x = events[e]
        if x >= 0:
            for j in range(t.read_start[x], t.read_start[x + 1]):
                y = t.read_row[j]
                if not t.variable[y] and not t.read_ignored[j]:
                    read[slot[latest[y]] + t.read_output[j]] = True
            latest[x] = e
            if first[x] < 0:
                first[x] = e
            continue
        for q in range(t.event_start[~x], t.event_start[~x + 1]):
            row = t.event_row[q]
            for j in range(t.read_start[row], t.read_start[row + 1]):
                y = t.read_row[j]
                if y < n and not t.variable[y] and not t.read_ignored[j]:
                    source = first[y] if t.read_first[j] else latest[y]
                    read[slot[source] + t.read_output[j]] = True
    for h in range(t.head_row.shape[0]):
        if not t.variable[t.head_row[h]]:
            read[slot[first[t.head_row[h]]] + t.head_output[h]] = True
    return slot, read


@compiled
def _wait(chain, pending, pendings, wait_row, waits):  # type: ignore[no-untyped-def]
    """Let a row wait for the last one of the chain, and for what is pending."""
    if chain >= 0:
        wait_row[waits] = chain
        waits += 1
    for k in range(pendings):
        wait_row[waits] = pending[k]
        waits += 1
    return waits


@compiled
def rows_of(t, events):  # type: ignore[no-untyped-def]
    """The rows of a schedule's training step.

    Parameters
    ----------
    t : Template
    events : np.ndarray of int32
        Those of the schedule.

    Returns
    -------
    Rows
        Linear in the number of events.
    """
    n = t.masked.shape[0]
    slot, is_read = _read(t, events)
    most_rows = t.variable.sum() + t.scratches
    most_reads = 0
    most_waits = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x >= 0:
            readers = t.needed_start[x + 1] - t.needed_start[x]
            most_rows += 1 + readers
            most_reads += max(2, t.read_start[x + 1] - t.read_start[x]) + readers
            most_waits += 1 + readers
            continue
        for q in range(t.event_start[~x], t.event_start[~x + 1]):
            row = t.event_row[q]
            most_rows += 1
            most_reads += t.read_start[row + 1] - t.read_start[row]
            most_waits += 2 + t.wait_start[row + 1] - t.wait_start[row]
    source = np.empty(most_rows, dtype=np.int32)
    what = np.full(most_rows, ITSELF, dtype=np.int32)
    time = np.full(most_rows, -1, dtype=np.int32)
    read_start = np.zeros(most_rows + 1, dtype=np.int64)
    read_row = np.empty(most_reads, dtype=np.int32)
    read_output = np.empty(most_reads, dtype=np.int32)
    wait_start = np.zeros(most_rows + 1, dtype=np.int64)
    wait_row = np.empty(most_waits, dtype=np.int32)
    first = np.full(t.variable.shape[0], -1, dtype=np.int32)
    latest = np.full(t.variable.shape[0], -1, dtype=np.int32)
    count = 0
    for row in range(t.variable.shape[0]):  # variables that nothing reads do no harm
        if t.variable[row] and (row < n or row >= 2 * n):
            source[count] = row
            first[row] = latest[row] = count
            count += 1
    scratch = count
    for k in range(t.scratches):
        source[count] = k
        what[count] = SCRATCH
        count += 1
    times = np.zeros(n, dtype=np.int32)
    pending = np.empty(most_rows, dtype=np.int32)  # what the next row in the chain waits for
    pendings = 0
    chain = -1  # the last row that waits for the one before it
    reads = 0
    waits = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x >= 0:
            again = times[x] > 0
            source[count] = x
            if again and t.masked[x]:
                what[count] = MASKED
                data = t.read_start[x]
                read_row[reads] = latest[t.read_row[data]]
                read_output[reads] = t.read_output[data]
                read_row[reads + 1] = first[x]
                read_output[reads + 1] = 1
                reads += 2
            else:
                for j in range(t.read_start[x], t.read_start[x + 1]):
                    if again and t.read_scratch[j] >= 0:
                        read_row[reads] = scratch + t.read_scratch[j]
                    else:
                        read_row[reads] = latest[t.read_row[j]]
                    read_output[reads] = t.read_output[j]
                    reads += 1
            waits = _wait(chain, pending, pendings, wait_row, waits)
            pendings = 0
            time[count] = times[x]
            times[x] += 1
            if not again:
                first[x] = count
            latest[x] = chain = count
            count += 1
            read_start[count] = reads
            wait_start[count] = waits
            if what[count - 1] == MASKED:
                continue
            for q in range(t.needed_start[x], t.needed_start[x + 1]):
                if not is_read[slot[e] + t.needed[q]]:
                    source[count] = q
                    what[count] = READER
                    read_row[reads] = latest[x]
                    read_output[reads] = t.needed[q]
                    reads += 1
                    pending[pendings] = count
                    pendings += 1
                    count += 1
                    read_start[count] = reads
                    wait_start[count] = waits
            continue
        for q in range(t.event_start[~x], t.event_start[~x + 1]):
            row = t.event_row[q]
            source[count] = row
            for j in range(t.read_start[row], t.read_start[row + 1]):
                y = t.read_row[j]
                read_row[reads] = first[y] if t.read_first[j] else latest[y]
                read_output[reads] = t.read_output[j]
                reads += 1
            if t.wait_start[row] < t.wait_start[row + 1]:
                for j in range(t.wait_start[row], t.wait_start[row + 1]):
                    y = t.wait_row[j]
                    wait_row[waits] = first[y] if y < n and t.masked[y] else latest[y]
                    waits += 1
                waits = _wait(chain, pending, pendings, wait_row, waits)
                pendings = 0
                chain = count
            elif t.read_start[row] < t.read_start[row + 1]:
                pending[pendings] = count
                pendings += 1
            first[row] = latest[row] = count
            count += 1
            read_start[count] = reads
            wait_start[count] = waits
    return Rows(
        source[:count],
        what[:count],
        time[:count],
        read_start[: count + 1],
        read_row[:reads],
        read_output[:reads],
        wait_start[: count + 1],
        wait_row[:waits],
        first,
        latest,
    )
