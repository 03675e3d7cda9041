"""The training step of a schedule, built in compiled code: its nodes, then the allocator's arrays.

A search builds thousands of them; what is written out for MXNet is built in the same way.

Each node waits for the one before it by a control dependency, for MXNet orders nodes depth first
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

from typing import NamedTuple

import numpy as np

from memonger.graph.arrays import tables_of
from memonger.support.compiled import compiled

# What a node is: its pattern itself, a scratch state, a Dropout that runs again, a reader of an
# output that nobody else reads, what ``inserts`` puts in.
ITSELF, SCRATCH, MASKED, READER, INSERTED = 0, 1, 2, 3, 4

#: How a node is part of the chain in which each waits for the one before it: it is, the next that
#: is waits for it, or nothing does.
CHAINED, AWAITED, LOOSE = 0, 1, 2


class Patterns(NamedTuple):
    """What the nodes of a network's training steps can be (node variants), whatever the schedule.

    The first patterns are the rows of the TrainingGraph: forward nodes, copies (not used here),
    gradients. Then come the forward nodes when they run again (a Dropout is then a product with its
    mask, and states are scratch), the readers of outputs that must be read, and the scratch states.
    ``*_start`` has one more element than there are owners; x owns [start[x], start[x + 1]).
    """

    forward: int  # forward nodes
    readers: int  # the first reader
    kind: np.ndarray  # the place in `Parts.kinds`
    source: np.ndarray  # as in `Rows`
    what: np.ndarray
    target: np.ndarray  # whose place it takes: of what runs again, what runs for the first time
    link: np.ndarray
    read_start: np.ndarray
    read_at: np.ndarray  # a target: its last node; if the number of patterns is added, its first
    read_output: np.ndarray
    wait_start: np.ndarray  # what a gradient waits for by itself, its forward node first
    wait_at: np.ndarray  # as read_at
    variable: np.ndarray  # the patterns of variables and scratch states
    event_start: np.ndarray  # of forward nodes: the gradients of their event, in order
    event_row: np.ndarray
    output_start: np.ndarray  # of forward nodes, if their outputs are numbered through
    needed_start: (
        np.ndarray
    )  # of forward nodes: the outputs that must have a reader, by that number
    needed: np.ndarray
    masked: np.ndarray  # of forward nodes: Dropout, which runs again as a product with its mask
    # What is read of operators by each pattern, then by all gradients of each event, by the number
    # of the output; their total is added if it is read of the first time.
    mark_start: np.ndarray
    mark: np.ndarray
    head_row: np.ndarray  # the outputs of the network that are operators'
    head_output: np.ndarray


class Rows(NamedTuple):
    """The nodes of a training step, each after all that it reads.

    ``source`` is the row of the network's TrainingGraph, the number of a scratch state or of what
    must be read, -1 for what is inserted. ``time`` is how often the operator has run before, -1 for
    what is no forward node. ``wait_*`` are control dependencies. ``first`` and ``latest`` are the
    first and the last node that each pattern became as a target, -1 for none.
    """

    kind: np.ndarray
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


@compiled
def line_up(p, events):  # type: ignore[no-untyped-def]
    """Tell the patterns of the nodes that run, in order, for the events of a schedule."""
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
    for h in range(p.head_row.shape[0]):
        read[outputs + p.output_start[p.head_row[h]] + p.head_output[h]] = True
    unread = np.empty(rows, dtype=np.int32)
    at = np.empty(rows, dtype=np.int32)
    count = 0
    for e in range(events.shape[0] - 1, -1, -1):
        x = events[e]
        marking = p.kind.shape[0] + ~x
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


@compiled
def connect(p, line):  # type: ignore[no-untyped-def]
    """Make the Rows of nodes of these patterns, in this order.

    Variables may be left out; what reads them then reads -1.
    """
    count = line.shape[0]
    patterns = p.kind.shape[0]
    reads = waits = 0
    for k in line:
        reads += p.read_start[k + 1] - p.read_start[k]
        waits += 2 + p.wait_start[k + 1] - p.wait_start[k]
    read_start = np.zeros(count + 1, dtype=np.int32)
    read_row = np.empty(reads, dtype=np.int32)
    read_output = np.empty(reads, dtype=np.int32)
    wait_start = np.zeros(count + 1, dtype=np.int32)
    wait_row = np.empty(waits, dtype=np.int32)
    time = np.full(count, -1, dtype=np.int32)
    runs = np.zeros(p.forward, dtype=np.int32)
    became = np.full(2 * patterns, -1, dtype=np.int32)  # its last node and its first one
    awaited = np.empty(count, dtype=np.int32)  # by the next node in the chain
    awaiting = 0
    chain = -1  # the last node in it
    reads = waits = 0
    for row in range(count):
        k = line[row]
        y = p.target[k]
        for j in range(p.read_start[k], p.read_start[k + 1]):
            read_row[reads] = became[p.read_at[j]]
            read_output[reads] = p.read_output[j]
            reads += 1
        if p.link[k] == CHAINED:
            for j in range(p.wait_start[k], p.wait_start[k + 1]):
                wait_row[waits] = became[p.wait_at[j]]
                waits += 1
            if chain >= 0:
                wait_row[waits] = chain
                waits += 1
            for q in range(awaiting):
                wait_row[waits] = awaited[q]
                waits += 1
            awaiting = 0
            chain = row
            if y < p.forward:
                time[row] = runs[y]
                runs[y] += 1
        elif p.link[k] == AWAITED:
            awaited[awaiting] = row
            awaiting += 1
        became[y] = row
        if became[patterns + y] < 0:
            became[patterns + y] = row
        read_start[row + 1] = reads
        wait_start[row + 1] = waits
    return Rows(
        p.kind[line],
        p.source[line],
        p.what[line],
        time,
        read_start,
        read_row,
        read_output,
        wait_start,
        wait_row[:waits],
        became[patterns:],
        became[:patterns],
    )


@compiled
def lay_out(kinds, rows, head_row, head_output):  # type: ignore[no-untyped-def]
    """Make the Tables of a training step with these outputs: ordered as MXNet orders it."""
    return tables_of(
        kinds,
        rows.kind,
        rows.read_start,
        rows.read_row,
        rows.read_output,
        rows.wait_start,
        rows.wait_row,
        head_row,
        head_output,
    )
