"""The training step of a schedule, built in compiled code: its nodes, then the allocator's arrays.

Each node waits for the one before it by a control dependency, for MXNet orders nodes depth first
from the outputs (``nnvm::DFSVisit``), inputs before control dependencies. Two rules shape this:

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

from memonger.graph.arrays import KEPT, graph_arrays
from memonger.support.compiled import compiled

#: How a node is part of the chain in which each waits for the one before it: it is, the next that
#: is waits for it, or nothing does.
CHAINED, AWAITED, LOOSE = 0, 1, 2


class Rows(NamedTuple):
    """The nodes of a training step, each after all that it reads; starts as in `GraphArrays`."""

    signature: np.ndarray  # the place in `Parts.signatures`
    source: np.ndarray  # the row of the network's TrainingGraph whose place it takes; -1 for none
    time: np.ndarray  # how often the operator has run before; -1 for what is no forward node
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    wait_start: np.ndarray  # of control dependencies
    wait_row: np.ndarray
    first: np.ndarray  # of each variant the first node that took its place, and the last; or -1
    latest: np.ndarray


class NodeVariants(NamedTuple):
    """What the nodes of a network's training steps can be (node variants), whatever the schedule.

    The first variants are the rows of the TrainingGraph: forward nodes, copies (not used here),
    gradients. Then come scratch states, the forward nodes when they run again (a Dropout is then a
    product with its mask, and states are scratch), the readers of outputs that must be read, and
    what adds gradients to totals.
    """

    #: As nodes. They read and wait for a variant, as it ran last; for ~variant, as it ran first.
    #: A gradient waits for its forward node first.
    rows: Rows
    counts: np.ndarray  # of their reads: whether it is of a forward node, not for its shape alone
    forward: int  # forward nodes
    readers: int  # the first reader; the forward nodes that run again come right before
    link: np.ndarray
    variable: np.ndarray  # the variants of variables
    operation_start: np.ndarray  # of forward nodes: the gradients of their operation, in order
    operation_row: np.ndarray
    output_start: np.ndarray  # of forward nodes
    needed_start: np.ndarray  # of forward nodes: the outputs that must be read
    needed: np.ndarray
    masked: np.ndarray  # of forward nodes: whether a mask is read instead of the first time
    head_row: np.ndarray  # the outputs of the network that are operators'
    head_output: np.ndarray


@compiled
def line_up(p, operations):  # type: ignore[no-untyped-def]
    """Tell the variants of the nodes that run, in order, for the operations of a schedule."""
    outputs, needed_start, needed = p.output_start, p.needed_start, p.needed
    read_start, read_row, read_output = p.rows.read_start, p.rows.read_row, p.rows.read_output
    first = np.empty(p.forward, dtype=np.int64)  # of each operator the operation that runs it first
    rows = 0  # at most
    for e in range(operations.shape[0] - 1, -1, -1):
        x = operations[e]
        if x >= 0:
            first[x] = e
            rows += needed_start[x + 1] - needed_start[x] + 1
        else:
            rows += p.operation_start[~x + 1] - p.operation_start[~x]
    line = np.empty(rows, dtype=np.int32)
    # From the end: which outputs of what runs are read until it runs again, and which of the first
    # time ever.
    read = np.zeros(outputs[p.forward], dtype=np.bool_)
    read_first = read.copy()
    read_first[outputs[p.head_row] + p.head_output] = True
    for e in range(operations.shape[0] - 1, -1, -1):
        x = operations[e]
        end = rows
        if x < 0:
            for q in range(p.operation_start[~x + 1] - 1, p.operation_start[~x] - 1, -1):
                rows -= 1
                line[rows] = p.operation_row[q]
        else:
            is_first = first[x] == e
            if is_first or not p.masked[x]:
                for q in range(needed_start[x + 1] - 1, needed_start[x] - 1, -1):
                    if not read[needed[q]] and not (is_first and read_first[needed[q]]):
                        rows -= 1
                        line[rows] = p.readers + q
            rows -= 1
            line[rows] = x if is_first else x + p.readers - p.forward
            read[outputs[x] : outputs[x + 1]] = False
            end = rows + 1
        for row in range(rows, end):
            for j in range(read_start[line[row]], read_start[line[row] + 1]):
                x = read_row[j]
                if p.counts[j] and x >= 0:
                    read[outputs[x] + read_output[j]] = True
                elif p.counts[j]:
                    read_first[outputs[~x] + read_output[j]] = True
    return line[rows:]


@compiled
def connect(p, line):  # type: ignore[no-untyped-def]
    """Make the Rows of nodes of these variants; who reads a variable that is left out reads -1."""
    m, count = p.rows, line.shape[0]
    read_start = np.zeros(count + 1, dtype=np.int32)
    own_waits = 0
    for row, k in enumerate(line):
        read_start[row + 1] = read_start[row] + m.read_start[k + 1] - m.read_start[k]
        own_waits += m.wait_start[k + 1] - m.wait_start[k]
    read_row = np.empty(read_start[count], dtype=np.int32)
    read_output = np.empty_like(read_row)
    wait_start = np.zeros(count + 1, dtype=np.int32)
    wait_row = np.empty(2 * count + own_waits, dtype=np.int32)
    time = np.full(count, -1, dtype=np.int32)
    runs = np.zeros(p.forward, dtype=np.int32)
    first = np.full(m.signature.shape[0], -1, dtype=np.int32)
    latest = first.copy()
    chain = -1  # the last node in it
    waits = 0
    for row, k in enumerate(line):
        y = m.source[k] if m.source[k] >= 0 else k  # whose place it takes
        offset = m.read_start[k] - read_start[row]
        for j in range(read_start[row], read_start[row + 1]):
            x = m.read_row[offset + j]
            read_row[j] = latest[x] if x >= 0 else first[~x]
            read_output[j] = m.read_output[offset + j]
        if p.link[k] == CHAINED:
            for j in range(m.wait_start[k], m.wait_start[k + 1]):
                x = m.wait_row[j]
                wait_row[waits] = latest[x] if x >= 0 else first[~x]
                waits += 1
            for before in range(max(chain, 0), row):
                if before == chain or p.link[line[before]] == AWAITED:
                    wait_row[waits] = before
                    waits += 1
            chain = row
            if y < p.forward:
                time[row] = runs[y]
                runs[y] += 1
        latest[y] = row
        if first[y] < 0:
            first[y] = row
        wait_start[row + 1] = waits
    own = m.signature[line], m.source[line], time
    ends = wait_start, wait_row[:waits], first, latest
    return Rows(*own, read_start, read_row, read_output, *ends)


@compiled
def lay_out(signatures, rows, head_row, head_output):  # type: ignore[no-untyped-def]
    """Make the GraphArrays of a training step with these outputs: ordered as MXNet orders it."""
    reads = rows.read_start, rows.read_row, rows.read_output, np.full_like(rows.read_row, KEPT)
    waits = rows.wait_start, rows.wait_row, np.full_like(rows.wait_row, KEPT)
    heads = head_row, head_output, np.full_like(head_row, KEPT)
    return graph_arrays(signatures, 0, rows.signature, reads, waits, heads, head_row.shape[0])
