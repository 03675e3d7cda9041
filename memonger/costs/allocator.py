"""MXNet's memory planner, replayed on a training graph: what a plan will cost, without a bind.

Order: depth first from the outputs of the network and then the gradients (``nnvm::DFSVisit``),
inputs before control dependencies. Memory: ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc``:
reference counts, in-place options, and a free list of whole blocks. A block serves any size within
a factor of ``NNVM_EXEC_MATCH_RANGE`` (16), grows to the largest tensor it ever holds and is never
split. The planner counts 4 bytes for every element; what is then allocated has the elements' real
size (``InitDataEntryMemory`` in ``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

from typing import Collection, NamedTuple, Protocol, Sequence

import numpy as np

from memonger.graph.arrays import KEPT, RowKind, Tables
from memonger.graph.forward import Entry, ForwardGraph
from memonger.support.compiled import compiled
from memonger.support.mxnet import Settings

EXTERNAL = -2  # a gradient: its memory is the user's
UNASSIGNED = -1
NO_LIMIT = float("inf")


class Planned(Protocol):
    """``training.TrainingGraph``, or ``training_step.TrainingStep``, that of a schedule."""

    @property
    def graph(self) -> ForwardGraph: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def tables(self) -> Tables: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def ops(self) -> Sequence[str]: ...

    @property
    def kinds(self) -> Sequence[RowKind]: ...

    @property
    def phases(self) -> np.ndarray: ...


class Timeline(NamedTuple):
    """The tensors of one training step and when each of them takes up memory.

    One element for each tensor that the pool holds, in the order in which they are made; variables
    and their gradients are not in the pool. A step is a place in ``Replay.order``. Tensors that
    share memory (in-place) have the same ``storage``: it counts for one of them at a time, from its
    ``start`` until the next takes over, so that what is alive at a step adds up.

    Attributes
    ----------
    steps : int
        How many there are.
    row, output : np.ndarray
        The node of the training graph (``TrainingGraph.names``) and which of its outputs.
    kind : np.ndarray
        FORWARD, RECOMPUTED or BACKWARD (``tables``).
    nbytes : np.ndarray
        With the real size of its elements.
    start, stop : np.ndarray
        The first and the last step in which it takes up memory.
    storage : np.ndarray
    """

    steps: int
    row: np.ndarray
    output: np.ndarray
    kind: np.ndarray
    nbytes: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    storage: np.ndarray

    def live_bytes(self, *kinds: int, without: Collection[Entry] = ()) -> np.ndarray:
        """Bytes alive in each step, of tensors of these kinds (of all by default).

        Parameters
        ----------
        *kinds : int
        without : collection of (row, output)
            Tensors that do not count.
        """
        chosen = np.isin(self.kind, kinds) if kinds else np.ones(len(self.kind), dtype=np.bool_)
        if without:
            made = zip(self.row.tolist(), self.output.tolist())
            chosen &= np.array([entry not in without for entry in made], dtype=np.bool_)
        change = np.zeros(self.steps + 1, dtype=np.int64)
        np.add.at(change, self.start[chosen], self.nbytes[chosen])
        np.add.at(change, self.stop[chosen] + 1, -self.nbytes[chosen])
        return np.cumsum(change)[:-1]


class Replay(NamedTuple):
    """What MXNet's planner makes of one training graph.

    Attributes
    ----------
    training : Planned
    recomputed : np.ndarray of bool
        For each forward node whether it carries ``force_mirroring``.
    order : np.ndarray
        The rows of the training graph in the order in which they run.
    reads : np.ndarray
        How often each output of a row is read, by its number in ``Tables.elements``.
    planned : np.ndarray
        The block of the pool that the planner gives each output, by the same number; negative where
        it gives none.
    pool_bytes : int
        The pool as MXNet counts it and ``debug_str`` reports it: 4 bytes an element.
    """

    training: Planned
    recomputed: np.ndarray
    order: np.ndarray
    reads: np.ndarray
    planned: np.ndarray
    pool_bytes: int

    @property
    def blocks(self) -> np.ndarray:
        """The block that each output really has: terms may be added up where the sum is."""
        blocks = self.planned.copy()
        adding = adding_rows(self.training)
        add_in_place(self.training.tables, self.recomputed, self.order, adding, blocks)
        return blocks

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

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that are alive at once: what no allocator can do without."""
        return int(self.timeline().live_bytes().max(initial=0))

    def timeline(self) -> Timeline:
        """Which tensors are alive when."""
        tables, mask, order = self.training.tables, self.recomputed, self.order
        _, storage = allocate(tables, mask, order, self.reads, 0, NO_LIMIT)
        birth, last = _made_and_last_read(tables, mask, order)
        add_in_place(tables, mask, order, adding_rows(self.training), storage)
        made = np.flatnonzero(storage >= 0)
        made = made[np.lexsort((made, birth[made]))]
        row = np.searchsorted(tables.output_start, made, side="right") - 1
        death = np.full(storage.max(initial=-1) + 1, -1, dtype=np.int64)
        np.maximum.at(death, storage[made], last[made])
        # In each storage a tensor gives way to the next.
        sequence = np.lexsort((np.arange(len(made)), storage[made]))
        stop = death[storage[made]]
        same = storage[made][sequence][1:] == storage[made][sequence][:-1]
        stop[sequence[:-1][same]] = birth[made][sequence[1:][same]] - 1
        return Timeline(
            len(order),
            row,
            made - tables.output_start[row],
            self.training.phases[row],
            (tables.elements * tables.itemsize)[made],
            birth[made],
            stop,
            storage[made],
        )


def replay(training: Planned, recomputed: np.ndarray) -> Replay:
    """Order a training graph and plan its memory as MXNet will.

    Parameters
    ----------
    training : Planned
    recomputed : np.ndarray of bool
        For each forward node whether it carries ``force_mirroring``.
    """
    tables = training.tables
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads, planned, pool = _replay(tables, mask, np.array(training.settings.match_ranges))
    return Replay(training, mask, order, reads, planned, int(pool))


@compiled
def row_read(forward, recomputed, row, owner):  # type: ignore[no-untyped-def]
    """The row that is read: the recomputed copy where both reader and read are recomputed."""
    if owner != KEPT and row < forward and recomputed[owner] and recomputed[row]:
        return row + forward
    return row


@compiled
def order_and_reads(t, recomputed):  # type: ignore[no-untyped-def]
    """The rows of ``Tables`` that run, in order, and how often each output of an operator is read.

    A copy reads nothing but forward nodes and copies. So the forward nodes come first in an order
    of their own, that of the gradients is the same for every plan, and each copy comes where the
    walk through the gradients first meets it (``Tables.walk_row``).
    """
    n = t.forward
    start = t.before_start
    copies = t.output_start[n]  # from an output to the same of the copy
    order = np.empty(t.first.shape[0] + t.walk_row.shape[0] + n, dtype=np.int32)
    count = t.first.shape[0]
    order[:count] = t.first
    reads = t.reads.copy()
    seen = np.zeros(n, dtype=np.bool_)
    for x in range(n):
        if recomputed[x]:
            for q in range(t.again_start[x], t.again_start[x + 1]):
                if recomputed[t.again_row[q]]:
                    reads[t.again_entry[q]] -= 1
                    reads[t.again_entry[q] + copies] += 1
    stack = np.empty(n, dtype=np.int32)
    at = np.empty(n, dtype=np.int32)
    for i in range(t.walk_row.shape[0]):
        met = t.walk_row[i]
        if met >= n:
            order[count] = met
            count += 1
            continue
        if not recomputed[met] or not recomputed[t.walk_owner[i]] or seen[met]:
            continue
        seen[met] = True
        depth = 0
        stack[0] = met
        at[0] = start[met]
        while depth >= 0:
            x = stack[depth]
            k = at[depth]
            end = start[x + 1]
            while k < end:
                before = t.before_row[k]
                k += 1
                if recomputed[before] and not seen[before]:
                    seen[before] = True
                    at[depth] = k
                    depth += 1
                    stack[depth] = before
                    k = start[before]
                    x = before
                    end = start[x + 1]
            depth -= 1
            order[count] = x + n
            count += 1
            for q in range(t.use_start[x], t.use_start[x + 1]):
                if recomputed[t.use_row[q]]:
                    reads[t.use_entry[q] + copies] += 1
                else:
                    reads[t.use_entry[q]] += 1
    return order[:count], reads


@compiled
def entry_read(recomputed, copies, entry, row, owner):  # type: ignore[no-untyped-def]
    """`row_read` for an output by its number."""
    if owner != KEPT and recomputed[owner] and recomputed[row]:
        return entry + copies
    return entry


@compiled
def allocate(t, recomputed, order, reads, match_range, limit):  # type: ignore[no-untyped-def]
    """Bytes of the pool, 4 to an element, and the block of each output.

    The free list holds whole blocks, smallest first, of equals the oldest first. A block has the
    size of one of the tensors, so there is a queue for each of their sizes. A match range of 0 uses
    no block again.

    It ends early once the pool exceeds ``limit``, which it can only do more and more.

    Nothing is handed to a function in the loops: numba counts references to each array of a tuple
    that is, unless it happens to see through.
    """
    outputs = t.elements.shape[0]
    copies = t.output_start[t.forward]
    storage = np.full(outputs, UNASSIGNED, dtype=np.int32)
    for h in range(t.outputs, t.head_row.shape[0]):
        entry = t.head_entry[h]
        owner = t.head_owner[h]
        if owner != KEPT and recomputed[owner] and recomputed[t.head_row[h]]:
            entry += copies
        storage[entry] = EXTERNAL
    blocks = 0
    pool = 0
    rank = np.empty(outputs, dtype=np.int32)  # of each block which of the sizes it has
    held = np.empty(outputs, dtype=np.int32)  # reads of each block that are still to come
    following = np.empty(outputs, dtype=np.int32)  # of each free block the next of its size
    preceding = np.empty(outputs, dtype=np.int32)
    ranks = t.sizes.shape[0]
    # Of each size where those that it may have a block of start and end; at itself for none.
    smallest = np.arange(ranks)
    largest = np.arange(ranks)
    if match_range > 0:
        smallest = np.searchsorted(t.sizes, t.sizes // match_range)
        largest = np.searchsorted(t.sizes, t.sizes * match_range, side="right")
    oldest = np.full(ranks, -1, dtype=np.int32)  # free block of each size
    newest = np.full(ranks, -1, dtype=np.int32)
    for p in range(order.shape[0]):
        row = order[p]
        if t.variable[row]:
            continue
        # An input's memory goes to an output that may have it.
        taken = 0  # bit k: input k was; the tables have no option beyond the first 63 inputs
        for q in range(t.inplace_start[row], t.inplace_start[row + 1]):
            out = t.inplace_output[q]
            if storage[out] != UNASSIGNED or reads[out] == 0:
                continue
            entry = t.inplace_entry[q]
            owner = t.inplace_owner[q]
            if owner != KEPT and recomputed[owner] and recomputed[t.inplace_row[q]]:
                entry += copies
            block = storage[entry]
            if block < 0 or (taken >> t.inplace_input[q]) & 1:
                continue
            if held[block] == 1 or t.inplace_identity[q]:
                taken |= 1 << t.inplace_input[q]
                storage[out] = block
                held[block] += reads[out]
        # The other outputs get a block each, the largest output first.
        for m in range(t.output_start[row], t.output_start[row + 1]):
            out = t.made[m]
            if storage[out] != UNASSIGNED:
                continue
            r = t.rank[out]
            block = -1
            c = r
            while c < largest[r] and oldest[c] < 0:
                c += 1
            if c < largest[r]:
                block = oldest[c]
                oldest[c] = following[block]
                if oldest[c] < 0:
                    newest[c] = -1
                else:
                    preceding[oldest[c]] = -1
            else:
                c = r - 1
                while c >= smallest[r] and newest[c] < 0:
                    c -= 1
                if c >= smallest[r]:
                    block = newest[c]
                    newest[c] = preceding[block]
                    if newest[c] < 0:
                        oldest[c] = -1
                    else:
                        following[newest[c]] = -1
                    rank[block] = r
                    pool += t.sizes[r] - t.sizes[c]
            if block < 0:
                block = blocks
                blocks += 1
                rank[block] = r
                pool += t.sizes[r]
            held[block] = reads[out]
            storage[out] = block
        if pool > limit:
            break
        # What has been read for the last time is free, and so is what nobody will read.
        first = t.use_start[row]
        last = t.use_start[row + 1]
        for j in range(first, last + t.output_start[row + 1] - t.output_start[row]):
            if j < last:
                entry = t.use_entry[j]
                owner = t.use_owner[j]
                if owner != KEPT and recomputed[owner] and recomputed[t.use_row[j]]:
                    entry += copies
                block = storage[entry]
                if block < 0:
                    continue
                held[block] -= 1
            else:
                block = storage[t.output_start[row] + j - last]
                if block < 0:
                    continue
            if held[block] == 0:
                r = rank[block]
                following[block] = -1
                preceding[block] = newest[r]
                if newest[r] < 0:
                    oldest[r] = block
                else:
                    following[newest[r]] = block
                newest[r] = block
    return pool, storage


@compiled
def _replay(t, recomputed, match_ranges):  # type: ignore[no-untyped-def]
    order, reads = order_and_reads(t, recomputed)
    best, storage = allocate(t, recomputed, order, reads, match_ranges[0], NO_LIMIT)
    for k in range(1, match_ranges.shape[0]):
        pool, other = allocate(t, recomputed, order, reads, match_ranges[k], NO_LIMIT)
        if pool < best:
            best = pool
            storage = other
    return order, reads, storage, best


@compiled
def _made_and_last_read(t, recomputed, order):  # type: ignore[no-untyped-def]
    """Of each output the step in which it is made, and the last in which it is read."""
    copies = t.output_start[t.forward]
    made = np.zeros(t.elements.shape[0], dtype=np.int64)
    last = np.zeros(t.elements.shape[0], dtype=np.int64)
    for p in range(order.shape[0]):
        row = order[p]
        for out in range(t.output_start[row], t.output_start[row + 1]):
            made[out] = p
            last[out] = p
        for j in range(t.use_start[row], t.use_start[row + 1]):
            entry = entry_read(recomputed, copies, t.use_entry[j], t.use_row[j], t.use_owner[j])
            last[entry] = p
    for h in range(t.outputs):
        last[t.head_entry[h]] = order.shape[0] - 1
    return made, last


def adding_rows(training: Planned) -> np.ndarray:
    """The rows that add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)


@compiled
def add_in_place(t, recomputed, order, adding, storage):  # type: ignore[no-untyped-def]
    """Put the terms of a sum where the sum is, in the storages of a plan.

    Once the memory is planned, the second input of a ``_grad_add`` may be computed with the write
    request 'add' right into the first (``src/executor/inplace_addto_detect_pass.cc``).
    """
    copies = t.output_start[t.forward]
    count = np.zeros(storage.shape[0], dtype=np.int64)  # of readers, those that ignore it as well
    place = np.zeros(t.variable.shape[0], dtype=np.int64)
    for h in range(t.head_row.shape[0]):
        count[entry_read(recomputed, copies, t.head_entry[h], t.head_row[h], t.head_owner[h])] += 1
    for p in range(order.shape[0]):
        row = order[p]
        place[row] = p
        for j in range(t.read_start[row], t.read_start[row + 1]):
            source = row_read(t.forward, recomputed, t.read_row[j], t.read_owner[j])
            count[t.output_start[source] + t.read_output[j]] += 1
    for row in order:
        if not adding[row]:
            continue
        j = t.read_start[row]
        total = row_read(t.forward, recomputed, t.read_row[j], t.read_owner[j])
        term = row_read(t.forward, recomputed, t.read_row[j + 1], t.read_owner[j + 1])
        into = t.output_start[total] + t.read_output[j]
        added = t.output_start[term] + t.read_output[j + 1]
        if (
            storage[into] == storage[t.output_start[row]]
            and not t.variable[total]
            and not t.variable[term]
            and count[added] == 1
            and place[total] < place[term]
        ):
            storage[added] = storage[into]
