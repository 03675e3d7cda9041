"""MXNet's memory planner, replayed on a training graph: what a plan will cost, without a bind.

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
from typing import ClassVar

import numpy as np

from memonger.graph.training import StepGraph
from memonger.support.kernels import Struct, compiled, constant


class Fused(Struct):
    """Fused operators, as rows behind the others."""


NOT_FUSED = Fused(*[np.zeros(0, dtype=np.int32)] * 5)
EXTERNAL = constant("EXTERNAL")  # a gradient: its memory is the user's


@dataclass(frozen=True)
class Timeline:
    """The tensors of one training step that the pool holds, in the order in which they are made."""

    steps: int  # how many there are; a step is a place in ``Replay.order``
    row: np.ndarray  # the node of the training graph (``TrainingGraph.names``)
    output: np.ndarray  # which of its outputs
    kind: np.ndarray  # FORWARD, RECOMPUTED or BACKWARD (``arrays``)
    nbytes: np.ndarray  # with the real size of its elements
    start: np.ndarray  # the first step in which it takes up memory
    stop: np.ndarray  # the last, until another tensor takes over its memory (in-place)

    def live_bytes(self, *kinds: int) -> np.ndarray:
        """Count the bytes alive in each step, of these kinds (or all)."""
        chosen = np.isin(self.kind, kinds) if kinds else np.ones(len(self.kind), dtype=np.bool_)
        nbytes, most = self.nbytes * chosen, self.steps + 1
        change = np.bincount(self.start, nbytes, most) - np.bincount(self.stop + 1, nbytes, most)
        return np.cumsum(change)[:-1].astype(np.int64)


@dataclass(frozen=True)
class Replay:
    """What MXNet's planner makes of one training graph."""

    keeps_state: ClassVar[bool] = True  # whether operators do (``costs.held.refine_held``)

    training: StepGraph
    recomputed: np.ndarray  # bool, of each forward node: whether it carries ``force_mirroring``
    order: np.ndarray  # the rows of the training graph in the order in which they run
    reads: np.ndarray  # how often each output of a row is read, by its number in ``GraphArrays``
    planned: np.ndarray  # the block that the planner gives each output; negative where none
    pool_bytes: int  # as MXNet counts it and ``debug_str`` reports it: 4 bytes an element

    @property
    def blocks(self) -> np.ndarray:
        """The block that each output really has: terms may be added up where the sum is."""
        t, adding = self.training.arrays, find_adding_rows(self.training)
        return compiled.add_in_place(t, self.recomputed, self.order, adding, self.planned)

    @property
    def storage(self) -> np.ndarray:
        """The memory of each output as if none was used again: one number for what is in place."""
        t, mask = self.training.arrays, self.recomputed
        adding = find_adding_rows(self.training)
        planned = compiled.allocate(t, NOT_FUSED, mask, self.order, self.reads, 0, math.inf)[1]
        return compiled.add_in_place(t, mask, self.order, adding, planned)

    @property
    def allocated_bytes(self) -> int:
        """The pool as it is allocated, with the real size of the elements."""
        return int(self.block_bytes().sum())

    def block_bytes(self) -> np.ndarray:
        """The blocks of the pool as they are allocated, in bytes."""
        arrays, blocks = self.training.arrays, self.blocks
        used = blocks >= 0
        real = np.zeros(blocks.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(real, blocks[used], (arrays.elements * arrays.itemsize)[used])
        return (real + 3) // 4 * 4  # pool entries are arrays of float32

    def timeline(self) -> Timeline:
        """Which tensors are alive when."""
        t, mask, order, storage = self.training.arrays, self.recomputed, self.order, self.storage
        place = np.full(len(t.variable), -1)
        place[order] = np.arange(len(order))
        birth, reader = (np.repeat(place, np.diff(s)) for s in (t.output_start, t.use_start))
        read = compiled.find_entries(t, mask, t.use_entry, t.use_row, t.use_owner)
        last = birth.copy()
        np.maximum.at(last, read[reader >= 0], reader[reader >= 0])
        last[t.head_entry[: t.outputs]] = len(order) - 1
        made = np.flatnonzero(storage >= 0)
        made = made[np.lexsort((made, birth[made]))]
        row = np.searchsorted(t.output_start, made, side="right") - 1
        birth, taken = birth[made], storage[made]
        death = np.full(storage.max(initial=-1) + 1, -1)
        np.maximum.at(death, taken, last[made])
        stop, sequence = death[taken], np.argsort(taken, kind="stable")
        same = taken[sequence][1:] == taken[sequence][:-1]
        stop[sequence[:-1][same]] = birth[sequence[1:][same]] - 1
        return Timeline(
            steps=len(order),
            row=row,
            output=made - t.output_start[row],
            kind=self.training.phases[row],
            nbytes=(t.elements * t.itemsize)[made],
            start=birth,
            stop=stop,
        )


def replay(training: StepGraph, recomputed: np.ndarray) -> Replay:
    """Order a training graph with these forward nodes (bool) marked, and plan its memory."""
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = compiled.order_and_reads(training.arrays, mask)
    ranges = np.array(training.settings.match_ranges)
    pool, planned = compiled.allocate_least(
        training.arrays, NOT_FUSED, mask, order, reads, ranges, math.inf
    )
    return Replay(training, mask, order, reads, planned, pool)


def find_adding_rows(training: StepGraph) -> np.ndarray:
    """Tell which rows add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)
