"""What MXNet's memory planner makes of a training graph: blocks, bytes, and what is alive when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection

import numpy as np

from memonger.costs.allocator import (
    NO_LIMIT,
    add_in_place,
    allocate,
    entries_read,
    least_pool,
    order_and_reads,
)
from memonger.graph.forward import Entry

#: A ``TrainingGraph``, or of a schedule a ``TrainingStep``: what has ``tables``, of each of their
#: rows ``names``, ``ops``, ``kinds`` and ``phases``, and the ``settings`` of MXNet for it.
Planned = Any


@dataclass(frozen=True)
class Timeline:
    """The tensors of one training step that the pool holds, in the order in which they are made.

    Tensors that share memory (in-place) have the same ``storage``: it counts for one of them at a
    time, from its ``start`` until the next takes over, so that what is alive at a step adds up.
    """

    steps: int  # how many there are; a step is a place in ``Replay.order``
    row: np.ndarray  # the node of the training graph (``TrainingGraph.names``)
    output: np.ndarray  # which of its outputs
    kind: np.ndarray  # FORWARD, RECOMPUTED or BACKWARD (``arrays``)
    nbytes: np.ndarray  # with the real size of its elements
    start: np.ndarray  # the first step in which it takes up memory
    stop: np.ndarray  # the last
    storage: np.ndarray

    def live_bytes(self, *kinds: int, without: Collection[Entry] = ()) -> np.ndarray:
        """Count the bytes alive in each step, of these kinds (or all), ``without`` some."""
        chosen = np.isin(self.kind, kinds) if kinds else np.ones(len(self.kind), dtype=np.bool_)
        if without:
            made = zip(self.row.tolist(), self.output.tolist())
            chosen &= np.array([entry not in without for entry in made], dtype=np.bool_)
        change = np.zeros(self.steps + 1, dtype=np.int64)
        np.add.at(change, self.start[chosen], self.nbytes[chosen])
        np.add.at(change, self.stop[chosen] + 1, -self.nbytes[chosen])
        return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class Replay:
    """What MXNet's planner makes of one training graph."""

    training: Planned
    recomputed: np.ndarray  # bool, of each forward node: whether it carries ``force_mirroring``
    order: np.ndarray  # the rows of the training graph in the order in which they run
    reads: np.ndarray  # how often each output of a row is read, by its number in ``Tables``
    planned: np.ndarray  # the block that the planner gives each output; negative where none
    pool_bytes: int  # as MXNet counts it and ``debug_str`` reports it: 4 bytes an element

    @property
    def blocks(self) -> np.ndarray:
        """The block that each output really has: terms may be added up where the sum is."""
        return self._added(self.planned.copy())

    def _added(self, storage: np.ndarray) -> np.ndarray:
        adding = adding_rows(self.training)
        add_in_place(self.training.tables, self.recomputed, self.order, adding, storage)
        return storage

    @property
    def allocated_bytes(self) -> int:
        """The pool as it is allocated, with the real size of the elements."""
        return int(self.block_bytes().sum())

    def block_bytes(self) -> np.ndarray:
        """The blocks of the pool as they are allocated, in bytes."""
        tables, blocks = self.training.tables, self.blocks
        used = blocks >= 0
        real = np.zeros(blocks.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(real, blocks[used], (tables.elements * tables.itemsize)[used])
        return (real + 3) // 4 * 4  # pool entries are arrays of float32

    def timeline(self) -> Timeline:
        """Which tensors are alive when."""
        t, mask, order = self.training.tables, self.recomputed, self.order
        storage = self._added(allocate(t, mask, order, self.reads, 0, NO_LIMIT)[1])
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
        # In each storage a tensor gives way to the next.
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
            storage=taken,
        )


def replay(training: Planned, recomputed: np.ndarray) -> Replay:
    """Order a training graph with these forward nodes (bool) marked, and plan its memory."""
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    return replay_in_order(training, mask, *order_and_reads(training.tables, mask))


def replay_in_order(
    training: Planned, mask: np.ndarray, order: np.ndarray, reads: np.ndarray
) -> Replay:
    """Plan the memory of a training graph, as `order_and_reads` has put it in order."""
    ranges = np.array(training.settings.match_ranges)
    pool, planned = least_pool(training.tables, mask, order, reads, ranges, NO_LIMIT)
    return Replay(training, mask, order, reads, planned, int(pool))


def adding_rows(training: Planned) -> np.ndarray:
    """Tell which rows add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)
