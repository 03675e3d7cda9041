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
# output that nobody else reads, what is put in.
ITSELF, SCRATCH, MASKED, READER, INSERTED = 0, 1, 2, 3, 4

#: How a node is part of the chain in which each waits for the one before it: it is, the next that
#: is waits for it, or nothing does.
CHAINED, AWAITED, LOOSE = 0, 1, 2


class Rows(NamedTuple):
    """The nodes of a training step, each after all that it reads.

    ``source`` is the row of the network's TrainingGraph, the number of a scratch state or of what
    must be read, -1 for what is inserted. ``time`` is how often the operator has run before, -1 for
    what is no forward node. ``wait_*`` are control dependencies. ``first`` and ``latest`` are the
    first and the last node that each pattern became as a target, -1 for none.
    """

    kind: np.ndarray  # the place in `Parts.kinds`
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


class Patterns(NamedTuple):
    """What the nodes of a network's training steps can be (node variants), whatever the schedule.

    The first patterns are the rows of the TrainingGraph: forward nodes, copies (not used here),
    gradients. Then come the forward nodes when they run again (a Dropout is then a product with its
    mask, and states are scratch), the readers of outputs that must be read, and the scratch states.
    ``*_start`` has one more element than there are owners; x owns [start[x], start[x + 1]).
    """

    #: As nodes. They read and wait for a target, the last node that it is; if the number of
    #: patterns is added, the first. A gradient waits for its forward node first.
    rows: Rows
    forward: int  # forward nodes
    readers: int  # the first reader
    target: np.ndarray  # whose place it takes: of what runs again, what runs for the first time
    link: np.ndarray
    variable: np.ndarray  # the patterns of variables and scratch states
    event_start: np.ndarray  # of forward nodes: the gradients of their event, in order
    event_row: np.ndarray
    output_start: np.ndarray  # of forward nodes, if their outputs are numbered through
    needed_start: np.ndarray  # of forward nodes: outputs that must have a reader, by that number
    needed: np.ndarray
    masked: np.ndarray  # of forward nodes: Dropout, which runs again as a product with its mask
    # What is read of operators by each pattern, then by all gradients of each event, by the number
    # of the output; their total is added if it is read of the first time.
    mark_start: np.ndarray
    mark: np.ndarray
    head_row: np.ndarray  # the outputs of the network that are operators'
    head_output: np.ndarray


@compiled
def line_up(p, events):  # type: ignore[no-untyped-def]
    """Tell the patterns of the nodes that run, in order, for the events of a schedule."""
    first = np.empty(p.forward, dtype=np.int32)  # of each operator the event that runs it first
    rows = 0
    for e in range(events.shape[0] - 1, -1, -1):
        x = events[e]
        if x < 0:
            rows += p.event_start[~x + 1] - p.event_start[~x]
        else:
            rows += 1 + p.needed_start[x + 1] - p.needed_start[x]
            first[x] = e
    # From the end: which outputs of what runs are read until it runs again, and which of the first
    # time ever.
    outputs = p.output_start[p.forward]
    read = np.zeros(2 * outputs, dtype=np.bool_)
    for h in range(p.head_row.shape[0]):
        read[outputs + p.output_start[p.head_row[h]] + p.head_output[h]] = True
    line = np.empty(rows, dtype=np.int32)
    for e in range(events.shape[0] - 1, -1, -1):
        x = events[e]
        if x < 0:
            marking = p.target.shape[0] + ~x
            for q in range(p.event_start[~x + 1] - 1, p.event_start[~x] - 1, -1):
                rows -= 1
                line[rows] = p.event_row[q]
        else:
            is_first = first[x] == e
            marking = x if is_first else x + p.readers - p.forward
            if is_first or not p.masked[x]:
                for q in range(p.needed_start[x + 1] - 1, p.needed_start[x] - 1, -1):
                    entry = p.needed[q]
                    if not read[entry] and not (is_first and read[outputs + entry]):
                        rows -= 1
                        line[rows] = p.readers + q
            rows -= 1
            line[rows] = marking
            for entry in range(p.output_start[x], p.output_start[x + 1]):
                read[entry] = False
        for j in range(p.mark_start[marking], p.mark_start[marking + 1]):
            read[p.mark[j]] = True
    return line[rows:]


@compiled
def connect(p, line):  # type: ignore[no-untyped-def]
    """Make the Rows of nodes of these patterns; who reads a variable that is left out reads -1."""
    m, count, patterns = p.rows, line.shape[0], p.target.shape[0]
    reads = waits = 0
    for k in line:
        reads += m.read_start[k + 1] - m.read_start[k]
        waits += 2 + m.wait_start[k + 1] - m.wait_start[k]
    read_start = np.zeros(count + 1, dtype=np.int32)
    read_row = np.empty(reads, dtype=np.int32)
    read_output = np.empty(reads, dtype=np.int32)
    wait_start = np.zeros(count + 1, dtype=np.int32)
    wait_row = np.empty(waits, dtype=np.int32)
    time = np.full(count, -1, dtype=np.int32)
    runs = np.zeros(p.forward, dtype=np.int32)
    became = np.full(2 * patterns, -1, dtype=np.int32)  # its last node and its first one
    chain = -1  # the last node in it
    reads = waits = 0
    for row in range(count):
        k = line[row]
        y = p.target[k]
        for j in range(m.read_start[k], m.read_start[k + 1]):
            read_row[reads] = became[m.read_row[j]]
            read_output[reads] = m.read_output[j]
            reads += 1
        if p.link[k] == CHAINED:
            for j in range(m.wait_start[k], m.wait_start[k + 1]):
                wait_row[waits] = became[m.wait_row[j]]
                waits += 1
            for before in range(max(chain, 0), row):
                if before == chain or p.link[line[before]] == AWAITED:
                    wait_row[waits] = before
                    waits += 1
            chain = row
            if y < p.forward:
                time[row] = runs[y]
                runs[y] += 1
        became[y] = row
        if became[patterns + y] < 0:
            became[patterns + y] = row
        read_start[row + 1] = reads
        wait_start[row + 1] = waits
    first, latest = became[patterns:], became[:patterns]
    kind, source, what = m.kind[line], m.source[line], m.what[line]
    wait = wait_row[:waits]
    return Rows(
        kind, source, what, time, read_start, read_row, read_output, wait_start, wait, first, latest
    )


@compiled
def lay_out(kinds, rows, head_row, head_output):  # type: ignore[no-untyped-def]
    """Make the Tables of a training step with these outputs: ordered as MXNet orders it."""
    reads, waits = (rows.read_start, rows.read_row, rows.read_output), rows.wait_start
    heads = head_row, head_output, head_row.shape[0]
    return tables_of(kinds, rows.kind, *reads, waits, rows.wait_row, *heads)
