"""What the results and gradients of a network weigh, and how long they are alive.

The memory is counted in live tensors whose sizes are raised to a power, for several powers at once:
MXNet's planner hands out whole blocks, so that their number counts as well as their bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.planners.trees.judge import Blueprint, grouped
from memonger.planners.trees.unroll import Steps
from memonger.schedules.schedule import Workload, first_time


class Entries(NamedTuple):
    """What the results and gradients of a network weigh, who makes and who reads them.

    Rows and entries are those of ``Tables``.

    Attributes
    ----------
    steps : Steps
    node : np.ndarray
        The forward node of each position.
    forward : int
        Rows from twice that on are gradients.
    emit_start, emit : np.ndarray
        For each position the gradient rows that run with it.
    output_start, use_start, use_entry, inplace_start, ..., inplace_identity
        As in ``Tables``.
    first : np.ndarray of bool
        For each entry whether it is read from the first time that its operator ran.
    weight : np.ndarray, (entries, powers)
        0 where the entry is part of a gradient that the user asked for: that stays to the end.
    reader : np.ndarray
        Of results of operators the last position that reads them; of gradients the first position
        whose gradient reads them (so the last to run); -1 for none.
    made : np.ndarray
        Of gradients the position with whose gradient they are made; otherwise -1.
    """

    steps: Steps
    node: np.ndarray
    forward: int
    emit_start: np.ndarray
    emit: np.ndarray
    output_start: np.ndarray
    use_start: np.ndarray
    use_entry: np.ndarray
    inplace_start: np.ndarray
    inplace_input: np.ndarray
    inplace_entry: np.ndarray
    inplace_output: np.ndarray
    inplace_identity: np.ndarray
    first: np.ndarray
    weight: np.ndarray
    reader: np.ndarray
    made: np.ndarray


def weigh(workload: Workload, b: Blueprint, powers: np.ndarray) -> Entries:
    """The entries of a network, their sizes raised to these powers."""
    training, graph = workload.training, workload.training.graph
    t, p = training.tables, b.patterns
    n, entries, count = t.forward, len(t.elements), len(b.node)
    emitted = [
        (k, int(row))
        for k, i in enumerate(workload.operators)
        for row in p.event_row[p.event_start[i] : p.event_start[i + 1]]
    ]
    emit_start, emit = grouped(emitted, count)
    is_first = np.zeros(entries, dtype=np.bool_)
    for i in workload.operators:
        for k in range(len(graph.tensors[i])):
            is_first[t.output_start[i] + k] = first_time(graph.nodes[i].op, k)
    sums = np.zeros(len(t.variable), dtype=np.bool_)  # rows that add gradients up
    sums[2 * n :] = (training.owners < 0) & ~t.variable[2 * n :]
    nbytes = 4.0 * t.elements
    weight = np.where(nbytes[:, None] > 0, np.maximum(nbytes, 1)[:, None] ** powers, 0.0)
    rows = len(t.variable)
    row_of = np.repeat(np.arange(rows), np.diff(t.output_start))
    when = np.full(rows, -1, dtype=np.int64)  # the position with which it runs
    when[b.node] = np.arange(count)
    when[emit] = np.repeat(np.arange(count), np.diff(emit_start))
    used = np.repeat(np.arange(rows), np.diff(t.use_start))
    runs = when[used] >= 0
    entry, by = t.use_entry[runs], used[runs]
    gradient, late = row_of >= 2 * n, row_of[entry] >= 2 * n
    reader = np.full(entries, -1, dtype=np.int64)
    np.maximum.at(reader, entry[by < n], when[by[by < n]])
    first = np.full(entries, count, dtype=np.int64)
    np.minimum.at(first, entry[late], when[by[late]])
    reader[gradient] = np.where(first == count, -1, first)[gradient]
    # What ends in a gradient that was asked for: nobody reads it, or it is added up to such a one.
    asked = gradient & (reader == -1)
    asked[t.output_start[b.asked[:, 0]] + b.asked[:, 1]] = True
    for row in sorted(emit[sums[emit]].tolist(), reverse=True):
        if asked[t.output_start[row]]:
            for e in t.use_entry[t.use_start[row] : t.use_start[row + 1]].tolist():
                asked[e] |= bool(sums[row_of[e]])
    weight[asked] = 0.0
    return Entries(
        b.steps,
        b.node,
        n,
        emit_start,
        emit,
        t.output_start,
        t.use_start,
        t.use_entry,
        t.inplace_start,
        t.inplace_input,
        t.inplace_entry,
        t.inplace_output,
        t.inplace_identity,
        is_first,
        weight,
        reader,
        np.where(gradient, when[row_of], -1),
    )


def alive_at(g: Entries) -> np.ndarray:
    """What is alive before each position, weighed with the first power; one more at the end."""
    count = len(g.node)
    change = np.zeros(count + 2)
    for i, row in enumerate(g.node.tolist()):
        entries = slice(g.output_start[row], g.output_start[row + 1])
        for last, weight in zip(g.reader[entries].tolist(), g.weight[entries, 0].tolist()):
            if last > i:
                change[i + 1] += weight
                change[last + 1] -= weight
    return np.cumsum(change)[:-1]
