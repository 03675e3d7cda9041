"""Replay MXNet's memory planner on a training graph: what a plan will cost, without a bind.

Order: depth first from the outputs of the network and then the gradients (``nnvm::DFSVisit``).
Memory: ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc``: reference counts, in-place options, and a
free list of whole blocks. A block serves any size within a factor of ``NNVM_EXEC_MATCH_RANGE``
(16), grows to the largest tensor it ever holds and is never split. The planner counts 4 bytes for
every element; what is allocated has the elements' real size (``InitDataEntryMemory`` in
``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memonger.graph.arrays import Step
from memonger.graph.training import StepGraph
from memonger.support.kernels import compiled
from memonger.support.types import Bools, Int32s, Int64s


@dataclass(frozen=True)
class Timeline:
    """The tensors of one training step that the pool holds, in the order in which they are made."""

    steps: int  # how many there are; a step is a place in ``Replay.order``
    row: Int64s  # of the training graph
    output: Int64s  # which of the outputs of that row
    kind: Int64s  # FORWARD, RECOMPUTED or BACKWARD (``arrays``)
    nbytes: Int64s  # with the real size of its elements
    start: Int64s  # the first step in which it takes up memory
    stop: Int64s  # the last, until another tensor takes over its memory (in-place)

    def live_bytes(self, *kinds: int) -> Int64s:
        """Count the bytes alive in each step, of these kinds (or all)."""
        nbytes = self.nbytes * np.isin(self.kind, kinds) if kinds else self.nbytes
        births = np.bincount(self.start, nbytes, self.steps + 1)
        deaths = np.bincount(self.stop + 1, nbytes, self.steps + 1)
        return np.cumsum(births - deaths)[:-1].astype(np.int64)


@dataclass(frozen=True)
class Replay:
    """What MXNet's planner makes of one training graph."""

    training: StepGraph
    recomputed: Bools  # of each forward node: whether it carries ``force_mirroring``
    step: Step  # the rows of the training graph that run
    planned: Int32s  # the block that the planner gives each entry; negative where none
    pool_bytes: int  # as MXNet counts it and ``debug_str`` reports it: 4 bytes an element

    @property
    def order(self) -> Int32s:
        """The rows of the training graph in the order in which they run."""
        order: Int32s = self.step.order
        return order

    @property
    def blocks(self) -> Int32s:
        """The block that each entry really has: terms may be added up where the sum is."""
        return self._add_in_place(self.planned)

    @property
    def storage(self) -> Int32s:
        """The memory of each entry as if none was used again: one number for what is in place."""
        _, blocks = compiled.allocate(self.training.arrays, self.step, 0, math.inf)
        return self._add_in_place(blocks)

    def _add_in_place(self, blocks: Int32s) -> Int32s:
        """Return these blocks with the terms of sums where the sums are."""
        t, adding = self.training.arrays, find_adding_rows(self.training)
        return compiled.add_in_place(t, self.step, adding, blocks)

    @property
    def allocated_bytes(self) -> int:
        """The pool as it is allocated, with the real size of the elements."""
        return int(self.block_bytes().sum())

    def block_bytes(self) -> Int64s:
        """The blocks of the pool as they are allocated, in bytes."""
        arrays, blocks = self.training.arrays, self.blocks
        used = blocks >= 0
        real = np.zeros(blocks.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(real, blocks[used], (arrays.elements * arrays.itemsize)[used])
        return (real + 3) // 4 * 4  # pool entries are arrays of float32

    def timeline(self) -> Timeline:
        """Find out which tensors are alive when."""
        t, order, storage = self.training.arrays, self.order, self.storage
        place_of_row = np.full(len(t.variable), -1)
        place_of_row[order] = np.arange(len(order))
        birth, reader = (
            np.repeat(place_of_row, np.diff(s)) for s in (t.output_start, t.read_start)
        )
        last = birth.copy()  # the place of the last reader of each entry
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
    """Order a training graph with these forward nodes (bool) marked, and plan its memory."""
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    step = compiled.find_step(training.arrays, mask)
    ranges = np.array(training.settings.match_ranges)
    pool, planned = compiled.allocate_least(training.arrays, step, ranges, math.inf)
    return Replay(training, mask, step, planned, pool)


def find_adding_rows(training: StepGraph) -> Bools:
    """Find the rows (bool) that add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)
