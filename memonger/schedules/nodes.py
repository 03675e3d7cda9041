"""The rows of a schedule's training step: what runs, what each row reads and waits for.

A *template* holds all that a network's training steps are made of, whatever the schedule. What a
row can be is a *pattern*. Compiled code lines them up for the events of a schedule, so that a
search can do so thousands of times (``planners.flat``).

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

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from memonger.graph.arrays import gathered, starts
from memonger.graph.forward import Entry
from memonger.support.compiled import compiled

# What a row is: its template row itself, a scratch state, a Dropout that runs again, a reader of an
# output that nobody else reads, what ``inserts`` puts in.
ITSELF, SCRATCH, MASKED, READER, INSERTED = 0, 1, 2, 3, 4

# How a row is part of the chain in which each waits for the one before it: it is, the next that is
# waits for it, or nothing does.
CHAINED, AWAITED, LOOSE = 0, 1, 2


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

    def inputs(self) -> tuple[list[list[Entry]], list[list[int]]]:
        """For each row what it reads, (row, output), and the rows that it waits for."""
        entries = list(zip(self.read_row.tolist(), self.read_output.tolist()))
        rows = self.wait_row.tolist()
        return (
            [entries[start:stop] for start, stop in zip(self.read_start, self.read_start[1:])],
            [rows[start:stop] for start, stop in zip(self.wait_start, self.wait_start[1:])],
        )


class Patterns(NamedTuple):
    """What rows can be.

    The first are the template rows. Then come the forward rows when they run again (a Dropout is
    then a product with its mask, and states are scratch), the readers of outputs that must be read,
    and the scratch states. ``*_start`` has one more element than there are.

    Attributes
    ----------
    source, what : np.ndarray
        As in `Rows`.
    target : np.ndarray
        The pattern whose place in the network it takes: for forward rows that of the first time.
    link : np.ndarray
        CHAINED, AWAITED or LOOSE.
    read_start, read_row, read_output : np.ndarray
        What it reads, template rows.
    read_at : np.ndarray
        The target that is read: its last row, or its first one if that and ``first`` are added up.
    read_ignored : np.ndarray of bool
    wait_start, wait_at : np.ndarray
        What a gradient waits for by itself, its forward node first; as ``read_at``.
    first : int
        How many patterns there are.
    readers : int
        The first reader.
    variable : np.ndarray
        The patterns of variables and scratch states.
    event_start, event_row : np.ndarray
        For forward rows: the gradient rows of their event, in order.
    output_start : np.ndarray
        Of forward rows where their outputs start if all are numbered through.
    needed_start, needed : np.ndarray
        For forward rows: the outputs that must have a reader, by that number.
    masked : np.ndarray of bool
        For forward rows.
    mark_start, mark : np.ndarray
        What is read of operators by each pattern, then by all gradient rows of each event, by that
        number; their total is added if it is read of the first time.
    head : np.ndarray
        The outputs of the network that are operators', by that number.
    """

    source: np.ndarray
    what: np.ndarray
    target: np.ndarray
    link: np.ndarray
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    read_at: np.ndarray
    read_ignored: np.ndarray
    wait_start: np.ndarray
    wait_at: np.ndarray
    first: int
    readers: int
    variable: np.ndarray
    event_start: np.ndarray
    event_row: np.ndarray
    output_start: np.ndarray
    needed_start: np.ndarray
    needed: np.ndarray
    masked: np.ndarray
    mark_start: np.ndarray
    mark: np.ndarray
    head: np.ndarray


def patterns(t: Template) -> Patterns:
    """What the rows of a network's training steps can be."""
    rows, n = len(t.variable), len(t.masked)
    masked = np.flatnonzero(t.masked)
    needing = np.repeat(np.arange(n), np.diff(t.needed_start))
    readers = rows + n
    scratch = readers + len(needing)
    count = scratch + t.scratches

    # When it runs again, a masked row reads its mask instead of all but its data.
    owner = np.repeat(np.arange(rows), np.diff(t.read_start))
    again = owner < n
    again[again] = ~t.masked[owner[again]]
    again[t.read_start[:n][t.masked]] = True
    reader = np.concatenate(
        [owner, rows + owner[again], rows + masked, readers + np.arange(len(needing))]
    )
    by = np.argsort(reader, kind="stable")

    def reads(given: np.ndarray, rerun: np.ndarray, mask: Any, needed: Any) -> np.ndarray:
        added = np.broadcast_to(mask, len(masked)), np.broadcast_to(needed, len(needing))
        return np.concatenate([given, rerun[again], *added])[by]

    rerun = np.where(t.read_scratch >= 0, scratch + t.read_scratch, t.read_row)
    read_row = reads(t.read_row, t.read_row, masked, needing)
    read_output = reads(t.read_output, t.read_output, 1, t.needed)
    ignored = reads(t.read_ignored, t.read_ignored, False, False)
    given = t.read_row + count * t.read_first
    read_at = reads(given, rerun, masked + count, needing)
    read_start = starts(np.bincount(reader, minlength=count))

    link = np.full(count, LOOSE)
    link[:rows] = np.where(np.diff(t.read_start) > 0, AWAITED, LOOSE)
    link[:rows][np.diff(t.wait_start) > 0] = CHAINED
    link[:n] = link[rows:readers] = CHAINED
    link[:rows][t.variable] = LOOSE
    link[readers:scratch] = AWAITED

    output_start = starts(t.outputs[:n])
    marks = (read_row < n) & ~t.variable[read_row] & ~ignored
    mark = output_start[read_row[marks]] + read_output[marks]
    mark += output_start[-1] * (read_at[marks] >= count)
    mark_start = starts(np.bincount(reader[by][marks], minlength=count))
    event, _ = gathered(mark_start, t.event_row)
    event_start = starts(np.diff(mark_start)[t.event_row])[t.event_start]
    heads = ~t.variable[t.head_row]
    waiting = np.zeros(rows, dtype=np.int64)  # for a masked row it is for the first time
    waiting[masked] = count
    small = partial(np.ascontiguousarray, dtype=np.int32)
    return Patterns(
        source=small(
            np.concatenate(
                [np.arange(rows), np.arange(n), np.arange(len(needing)), np.arange(t.scratches)]
            )
        ),
        what=small(
            np.repeat([ITSELF, ITSELF, READER, SCRATCH], [rows, n, len(needing), t.scratches])
            + MASKED * np.isin(np.arange(count), rows + masked)
        ),
        target=small(np.concatenate([np.arange(rows), np.arange(n), np.arange(readers, count)])),
        link=small(link),
        read_start=small(read_start),
        read_row=small(read_row),
        read_output=small(read_output),
        read_at=small(read_at),
        read_ignored=ignored,
        wait_start=small(np.concatenate([t.wait_start, np.full(count - rows, t.wait_start[-1])])),
        wait_at=small(t.wait_row + waiting[t.wait_row]),
        first=count,
        readers=readers,
        variable=np.concatenate(
            [
                [x for x in np.flatnonzero(t.variable) if not n <= x < 2 * n],
                np.arange(scratch, count),
            ]
        ).astype(np.int64),
        event_start=small(t.event_start),
        event_row=small(t.event_row),
        output_start=small(output_start),
        needed_start=small(t.needed_start),
        needed=small(output_start[needing] + t.needed),
        masked=t.masked,
        mark_start=small(np.concatenate([mark_start, mark_start[-1] + event_start[1:]])),
        mark=small(np.concatenate([mark, mark[event]])),
        head=small(output_start[t.head_row[heads]] + t.head_output[heads]),
    )


@compiled
def line_up(p, events):  # type: ignore[no-untyped-def]
    """The patterns of the rows that run, in order.

    Parameters
    ----------
    p : Patterns
    events : np.ndarray of int32
        Those of a schedule.
    """
    n = p.masked.shape[0]
    ran = np.zeros(n, dtype=np.bool_)
    pattern = np.empty(events.shape[0], dtype=np.int32)
    rows = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x < 0:
            rows += p.event_start[~x + 1] - p.event_start[~x]
            continue
        rows += 1 + p.needed_start[x + 1] - p.needed_start[x]
        pattern[e] = x + p.readers - n if ran[x] else x
        ran[x] = True
    # From the end: which outputs of what runs are read until it runs again, and which of the first
    # time ever.
    outputs = p.output_start[n]
    read = np.zeros(2 * outputs, dtype=np.bool_)
    for entry in p.head:
        read[outputs + entry] = True
    unread = np.empty(rows, dtype=np.int32)
    at = np.empty(rows, dtype=np.int32)
    count = 0
    for e in range(events.shape[0] - 1, -1, -1):
        x = events[e]
        marking = p.first + ~x
        if x >= 0:
            marking = pattern[e]
            if marking == x or not p.masked[x]:
                for q in range(p.needed_start[x + 1] - 1, p.needed_start[x] - 1, -1):
                    entry = p.needed[q]
                    if not read[entry] and not (marking == x and read[outputs + entry]):
                        unread[count] = p.readers + q
                        at[count] = e
                        count += 1
            for entry in range(p.output_start[x], p.output_start[x + 1]):
                read[entry] = False
        for j in range(p.mark_start[marking], p.mark_start[marking + 1]):
            read[p.mark[j]] = True
    line = np.empty(rows, dtype=np.int32)
    rows = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x < 0:
            for q in range(p.event_start[~x], p.event_start[~x + 1]):
                line[rows] = p.event_row[q]
                rows += 1
            continue
        line[rows] = pattern[e]
        rows += 1
        while count and at[count - 1] == e:
            count -= 1
            line[rows] = unread[count]
            rows += 1
    return line[:rows]


def rows_of(p: Patterns, events: np.ndarray) -> Rows:
    """The rows of a schedule's training step: variables, whether read or not, then what runs.

    Parameters
    ----------
    p : Patterns
    events : np.ndarray of int32
        Those of the schedule.
    """
    n, templates = len(p.masked), p.readers - len(p.masked)
    pattern = np.concatenate([p.variable, line_up(p, events)])
    count = len(pattern)
    row = np.arange(count)
    # Each row by its target, then in order.
    target = p.target[pattern].astype(np.int64)
    became = np.sort(target * count + row)
    group = np.searchsorted(became, np.arange(p.first + 1) * count)

    def rows_at(at: np.ndarray, by: np.ndarray) -> np.ndarray:
        """What these rows find at ``read_at``."""
        again, of = np.divmod(at.astype(np.int64), p.first)
        last = np.searchsorted(became, of * count + by) - 1
        return became[np.where(again == 1, group[of], last)] % count

    j, reader = gathered(p.read_start, pattern)
    waits, waiting = gathered(p.wait_start, pattern)
    chained, awaited = (np.flatnonzero(p.link[pattern] == link) for link in (CHAINED, AWAITED))
    place = np.searchsorted(chained, awaited)
    awaited, place = awaited[place < len(chained)], place[place < len(chained)]
    by = np.concatenate([waiting, chained[1:], chained[place]])
    wait_row = np.concatenate([rows_at(p.wait_at[waits], waiting), chained[:-1], awaited])
    time = np.empty(count, dtype=np.int64)
    time[became % count] = row - group[became // count]
    time[(target >= n) | (row < len(p.variable))] = -1
    ran = np.diff(group[: templates + 1]) > 0
    first, latest = (np.full(templates, -1, dtype=np.int64) for _ in range(2))
    first[ran] = became[group[:templates][ran]] % count
    latest[ran] = became[group[1 : templates + 1][ran] - 1] % count
    small = partial(np.ascontiguousarray, dtype=np.int32)
    return Rows(
        p.source[pattern],
        p.what[pattern],
        small(time),
        starts(np.diff(p.read_start)[pattern]),
        small(rows_at(p.read_at[j], reader)),
        p.read_output[j],
        starts(np.bincount(by, minlength=count)),
        small(wait_row[np.argsort(by, kind="stable")]),
        small(first),
        small(latest),
    )
