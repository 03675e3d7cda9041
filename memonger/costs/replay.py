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
from typing import Any, ClassVar, NamedTuple

import numpy as np

from memonger.graph.arrays import GraphArrays
from memonger.support.kernels import call

#: A ``TrainingGraph``, or of a schedule a ``TrainingStep``: what has ``arrays``, and of each of
#: their rows ``names``, ``ops`` and ``phases``, and words (``what``, ``told``).
Planned = Any


class Fused(NamedTuple):
    """Fused operators, as rows behind the others; entries are those of what is fused."""

    out_start: np.ndarray
    out: np.ndarray  # the entries that each makes
    made: np.ndarray  # these in the order in which they get memory
    read_start: np.ndarray
    read: np.ndarray  # the entries that it reads


NOT_FUSED = Fused(*[np.zeros(0, dtype=np.int32)] * 5)
EXTERNAL = -2  # a gradient: its memory is the user's; as in replay.h


def entries_read(
    t: GraphArrays, recomputed: np.ndarray, entry: np.ndarray, row: np.ndarray, owner: np.ndarray
) -> np.ndarray:
    """Tell the entries that are read: of the copies where both reader and read are recomputed."""
    return call("entries_read", t, recomputed, entry, row, owner)


def order_and_reads(t: GraphArrays, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tell the rows that run, in order, and how often each output of an operator is read.

    Forward nodes come first; each copy comes where the walk through the gradients
    (``GraphArrays.walk_row``), which is the same for every plan, first meets it.
    """
    return call("order_and_reads", t, recomputed)


def allocate(
    t: GraphArrays, recomputed: np.ndarray, order: np.ndarray, reads: np.ndarray, match_range: int
) -> tuple[int, np.ndarray]:
    """Tell the bytes of the pool, 4 to an element, and the block of each output.

    A match range of 0 uses no block again.
    """
    return call("allocate", t, NOT_FUSED, recomputed, order, reads, match_range, math.inf)


def add_in_place(
    t: GraphArrays,
    recomputed: np.ndarray,
    order: np.ndarray,
    adding: np.ndarray,
    storage: np.ndarray,
) -> np.ndarray:
    """Return the storages of a plan with the terms of sums where the sums are.

    A planned ``_grad_add`` may have its second input computed with the write request 'add' right
    into the first (``src/executor/inplace_addto_detect_pass.cc``). ``adding`` tells which rows do.
    """
    return call("add_in_place", t, recomputed, order, adding, storage)


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

    keeps_state: ClassVar[bool] = True  # whether operators do (``costs.held.taken_by``)

    training: Planned
    recomputed: np.ndarray  # bool, of each forward node: whether it carries ``force_mirroring``
    order: np.ndarray  # the rows of the training graph in the order in which they run
    reads: np.ndarray  # how often each output of a row is read, by its number in ``GraphArrays``
    planned: np.ndarray  # the block that the planner gives each output; negative where none
    pool_bytes: int  # as MXNet counts it and ``debug_str`` reports it: 4 bytes an element

    @property
    def blocks(self) -> np.ndarray:
        """The block that each output really has: terms may be added up where the sum is."""
        t, adding = self.training.arrays, adding_rows(self.training)
        return add_in_place(t, self.recomputed, self.order, adding, self.planned)

    @property
    def storage(self) -> np.ndarray:
        """The memory of each output as if none was used again: one number for what is in place."""
        t, mask = self.training.arrays, self.recomputed
        planned = allocate(t, mask, self.order, self.reads, 0)[1]
        return add_in_place(t, mask, self.order, adding_rows(self.training), planned)

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
        read = entries_read(t, mask, t.use_entry, t.use_row, t.use_owner)
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


def replay(training: Planned, recomputed: np.ndarray) -> Replay:
    """Order a training graph with these forward nodes (bool) marked, and plan its memory."""
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = order_and_reads(training.arrays, mask)
    ranges = np.array(training.settings.match_ranges)
    to_plan = training.arrays, NOT_FUSED, mask, order, reads, ranges, math.inf
    pool, planned = call("least_pool", *to_plan)
    return Replay(training, mask, order, reads, planned, pool)


def adding_rows(training: Planned) -> np.ndarray:
    """Tell which rows add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)
