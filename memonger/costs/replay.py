"""Replay MXNet's memory planner on a training graph: the memory of a plan without a bind.

Rows run depth first from the outputs of the network and then from the gradients
(``nnvm::DFSVisit``). ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc`` plans their memory by
reference counts, in-place options, and a free list of whole blocks. A block serves any size within
a factor of ``NNVM_EXEC_MATCH_RANGE`` (16), grows to its largest tensor and is never split. The
planner counts 4 bytes for every element, but MXNet allocates the elements' real size
(``InitDataEntryMemory`` in ``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memonger.graph.arrays import Step
from memonger.graph.forward import RowEntry
from memonger.graph.training import StepGraph, TrainingGraph
from memonger.support.kernels import compiled
from memonger.support.types import Bools, Int32s, Int64s


@dataclass(frozen=True)
class Timeline:
    """The lifetimes of the tensors in the pool during a training step, in order of their starts."""

    steps: int  # the number of steps; a step is a position in ``Replay.order``
    row: Int64s  # (tensors,): the row of the training graph that computes it
    output: Int64s  # (tensors,): which output of that row it is
    kind: Int64s  # (tensors,): FORWARD, RECOMPUTED or BACKWARD (``graph.arrays``)
    nbytes: Int64s  # (tensors,): bytes with the real size of its elements
    start: Int64s  # (tensors,): the first step in which it is alive
    stop: Int64s  # (tensors,): the last step, before another is computed in place of it, if any is

    def live_bytes(self, *kinds: int) -> Int64s:
        """Return the bytes alive in each step, (steps,), of these kinds of tensors (or all)."""
        nbytes = self.nbytes * np.isin(self.kind, kinds) if kinds else self.nbytes
        births = np.bincount(self.start, nbytes, self.steps + 1)
        deaths = np.bincount(self.stop + 1, nbytes, self.steps + 1)
        return np.cumsum(births - deaths)[:-1].astype(np.int64)


@dataclass(frozen=True)
class Replay:
    """The order and the memory of a training step, as MXNet's executor plans them."""

    training: StepGraph
    recomputed: Bools  # (forward nodes,): whether it has the mark ``force_mirroring``
    step: Step  # the rows of the training graph that run
    planned: Int32s  # (entries,): the block that the planner assigns; negative: none
    pool_bytes: int  # as MXNet counts and ``debug_str`` reports: 4 bytes an element

    @property
    def order(self) -> Int32s:
        """The rows of the training graph that run, in execution order."""
        order: Int32s = self.step.order
        return order

    @property
    def blocks(self) -> Int32s:
        """The block of each entry after terms of sums are moved to their sums, (entries,)."""
        return self._add_in_place(self.planned)

    @property
    def storage(self) -> Int32s:
        """The memory of each entry, (entries,), as a number: equal where entries are in place."""
        _, blocks = compiled.allocate(self.training.arrays, self.step, 0, math.inf)
        return self._add_in_place(blocks)

    def _add_in_place(self, blocks: Int32s) -> Int32s:
        """Return these blocks with the terms of sums moved to the blocks of the sums."""
        t, adding = self.training.arrays, find_adding_rows(self.training)
        return compiled.add_in_place(t, self.step, adding, blocks)

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the pool that MXNet allocates, with the real size of the elements."""
        return int(self.block_bytes().sum())

    def block_bytes(self) -> Int64s:
        """Return the bytes of each block of the pool that MXNet allocates, (blocks,)."""
        arrays, blocks = self.training.arrays, self.blocks
        used = blocks >= 0
        real = np.zeros(blocks.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(real, blocks[used], (arrays.elements * arrays.itemsize)[used])
        return (real + 3) // 4 * 4  # pool entries are arrays of float32

    def timeline(self) -> Timeline:
        """Return the lifetimes of all tensors in the pool."""
        t, order, storage = self.training.arrays, self.order, self.storage
        place_of_row = np.full(len(t.variable), -1)
        place_of_row[order] = np.arange(len(order))
        birth, reader = (
            np.repeat(place_of_row, np.diff(s)) for s in (t.output_start, t.read_start)
        )
        last = birth.copy()  # the position of the last reader of each entry
        held = t.read_holds & (reader >= 0)
        np.maximum.at(last, self.step.entry[held], reader[held])
        last[t.head_entry[: t.outputs]] = len(order) - 1
        entries = np.flatnonzero(storage >= 0)
        entries = entries[np.lexsort((entries, birth[entries]))]
        row = np.searchsorted(t.output_start, entries, side="right") - 1
        birth, storage = birth[entries], storage[entries]
        death = np.full(storage.max(initial=-1) + 1, -1)
        np.maximum.at(death, storage, last[entries])
        stop, sequence = death[storage], np.argsort(storage, kind="stable")
        same = storage[sequence][1:] == storage[sequence][:-1]
        stop[sequence[:-1][same]] = birth[sequence[1:][same]] - 1
        return Timeline(
            steps=len(order),
            row=row,
            output=entries - t.output_start[row],
            kind=self.training.phases[row],
            nbytes=(t.elements * t.itemsize)[entries],
            start=birth,
            stop=stop,
        )


def replay(training: StepGraph, recomputed: Bools) -> Replay:
    """Return the order and the memory of a training step with marks.

    Parameters
    ----------
    training : StepGraph
        The training graph.
    recomputed : array of bool, (forward nodes,)
        Which nodes are marked.

    Returns
    -------
    Replay
        Exact, unless ``training.inexact`` says why not.
    """
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    step = compiled.find_step(training.arrays, mask)
    ranges = np.array(training.settings.match_ranges)
    pool, planned = compiled.allocate_least(training.arrays, step, ranges, math.inf)
    return Replay(training, mask, step, planned, pool)


def find_adding_rows(training: StepGraph) -> Bools:
    """Return which rows add one gradient to another, (rows,) of bool."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)


def find_added_in_place(training: TrainingGraph) -> dict[RowEntry, int]:
    """Find the terms of gradients that MXNet's executor adds to a sum in place, without a plan.

    Returns the row that would add each term.
    """
    adding = np.flatnonzero(find_adding_rows(training))
    if not len(adding):
        return {}
    t = training.arrays
    unplanned = replay(training, np.zeros(t.forward, dtype=np.bool_))
    in_place = unplanned.planned != unplanned.blocks
    row_of = {}
    for row in adding.tolist():
        j = int(t.read_start[row]) + 1
        term, k = int(t.read_row[j]), int(t.read_output[j])
        if in_place[t.output_start[term] + k]:
            row_of[term, k] = row
    return row_of
