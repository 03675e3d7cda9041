"""MXNet's memory planner, replayed on a training graph: what a plan will cost, without a bind.

Order: depth first from the outputs of the network and then the gradients (``nnvm::DFSVisit``).
Memory: ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc``: reference counts, in-place options, and a
free list of whole blocks. A block serves any size within a factor of ``NNVM_EXEC_MATCH_RANGE``
(16), grows to the largest tensor it ever holds and is never split. The planner counts 4 bytes for
every element; what is allocated has the elements' real size (``InitDataEntryMemory`` in
``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection

import numpy as np

from memonger.graph.arrays import KEPT, gathered
from memonger.graph.forward import Entry
from memonger.support.compiled import compiled

#: A ``TrainingGraph``, or of a schedule a ``TrainingStep``: what has ``arrays``, of each of their
#: rows ``names``, ``ops``, ``kinds`` and ``phases``, and the ``settings`` of MXNet for it.
Planned = Any
EXTERNAL = -2  # a gradient: its memory is the user's
UNASSIGNED = -1
NO_LIMIT = float("inf")


@compiled
def entries_read(t, recomputed, entry, row, owner):  # type: ignore[no-untyped-def]
    """The entries that are read: of the copies where both reader and read are recomputed."""
    found = entry.astype(np.int64)
    for k in np.flatnonzero(owner != KEPT):
        if recomputed[owner[k]] and recomputed[row[k]]:
            found[k] += t.output_start[t.forward]  # from an output to the same of the copy
    return found


@compiled
def all_read(t, recomputed):  # type: ignore[no-untyped-def]
    """`entries_read` of all reads."""
    entry = t.output_start[t.read_row] + t.read_output
    return entries_read(t, recomputed, entry, t.read_row, t.read_owner)


@compiled
def heads_read(t, recomputed):  # type: ignore[no-untyped-def]
    """`entries_read` by the outputs of the network, and then by the gradients."""
    return entries_read(t, recomputed, t.head_entry, t.head_row, t.head_owner)


@compiled
def order_and_reads(t, recomputed):  # type: ignore[no-untyped-def]
    """The rows that run, in order, and how often each output of an operator is read.

    Forward nodes come first; each copy comes where the walk through the gradients
    (``GraphArrays.walk_row``), which is the same for every plan, first meets it.
    """
    n = t.forward
    copies = t.output_start[n]  # from an output to the same of the copy
    order = np.empty(t.first.shape[0] + t.walk_row.shape[0] + n, dtype=np.int32)
    count = t.first.shape[0]
    order[:count] = t.first
    reads = t.reads.copy()
    for x in np.flatnonzero(recomputed[:n]):
        for q in range(t.recomputed_start[x], t.recomputed_start[x + 1]):
            if recomputed[t.recomputed_row[q]]:
                reads[t.recomputed_entry[q]] -= 1
                reads[t.recomputed_entry[q] + copies] += 1
    done = ~recomputed[:n]  # or never done
    stack = np.empty(n, dtype=np.int32)
    at = t.before_start.copy()
    for i in range(t.walk_row.shape[0]):
        row = t.walk_row[i]
        if row >= n:
            order[count] = row
            count += 1
            continue
        if done[row] or not recomputed[t.walk_owner[i]]:
            continue
        done[row] = True
        depth, stack[0] = 0, row
        while depth >= 0:
            x = stack[depth]
            if at[x] < t.before_start[x + 1]:
                before = t.before_row[at[x]]
                at[x] += 1
                if not done[before]:
                    done[before] = True
                    depth += 1
                    stack[depth] = before
                continue
            depth -= 1
            order[count] = x + n
            count += 1
            for q in range(t.use_start[x], t.use_start[x + 1]):
                reads[t.use_entry[q] + copies * recomputed[t.use_row[q]]] += 1
    return order[:count], reads


@compiled
def allocate(t, recomputed, order, reads, match_range, limit):  # type: ignore[no-untyped-def]
    """Bytes of the pool, 4 to an element, and the block of each output; ends beyond ``limit``.

    A match range of 0 uses no block again.
    """
    # The free list holds blocks by their size, of equals the oldest first. A block has the size of
    # one of the tensors, so there is a queue for each of their sizes. Nothing is handed to a
    # function in the loops: numba counts references to each array of a tuple.
    outputs, ranks = t.elements.shape[0], t.sizes.shape[0]
    copies = t.output_start[t.forward]
    storage = np.full(outputs, UNASSIGNED, dtype=np.int32)
    heads = heads_read(t, recomputed)
    storage[heads[t.outputs :]] = EXTERNAL
    blocks = pool = 0
    rank = np.empty(outputs, dtype=np.int32)  # of each block which of the sizes it has
    pending = np.empty(outputs, dtype=np.int32)  # reads of each block that are still to come
    # Of each free block the next of its size, then (from `outputs` on) the one before; of each size
    # the oldest free block, then (from `ranks` on) the newest.
    links = np.empty(2 * outputs, dtype=np.int32)
    ends = np.full(2 * ranks, -1, dtype=np.int32)
    # Of each size where those that it may have a block of start and end; at itself for none.
    smallest = largest = np.arange(ranks)
    if match_range > 0:
        smallest = np.searchsorted(t.sizes, t.sizes // match_range)
        largest = np.searchsorted(t.sizes, t.sizes * match_range, side="right")
    for row in order:
        if t.variable[row]:
            continue
        # An input's memory goes to an output that may have it.
        for q in range(t.inplace_start[row], t.inplace_start[row + 1]):
            out = t.inplace_output[q]
            if storage[out] != UNASSIGNED or reads[out] == 0:
                continue
            entry = t.inplace_entry[q]
            owner = t.inplace_owner[q]
            if owner != KEPT and recomputed[owner] and recomputed[t.inplace_row[q]]:
                entry += copies
            block = storage[entry]
            if block >= 0 and (pending[block] == 1 or t.inplace_identity[q]):
                storage[out] = block
                pending[block] += reads[out]
        # The other outputs get a block each, the largest output first.
        for m in range(t.output_start[row], t.output_start[row + 1]):
            out = t.made[m]
            if storage[out] != UNASSIGNED:
                continue
            c = r = t.rank[out]
            side = 0  # the oldest of those that are large enough
            while c < largest[r] and ends[c] < 0:
                c += 1
            if c >= largest[r]:
                side = 1  # or else the newest of those that are not
                c = r - 1
                while c >= smallest[r] and ends[ranks + c] < 0:
                    c -= 1
            if c >= smallest[r]:
                block = ends[side * ranks + c]
                other = ends[side * ranks + c] = links[side * outputs + block]
                if other < 0:
                    ends[(1 - side) * ranks + c] = -1
                else:
                    links[(1 - side) * outputs + other] = -1
                if side == 1:
                    rank[block] = r
                    pool += t.sizes[r] - t.sizes[c]
            else:
                block = blocks
                blocks += 1
                rank[block] = r
                pool += t.sizes[r]
            pending[block] = reads[out]
            storage[out] = block
        if pool > limit:
            break
        # What has been read for the last time is free, and so is what nobody will read.
        first = t.use_start[row]
        last = t.use_start[row + 1]
        for j in range(first, last + t.output_start[row + 1] - t.output_start[row]):
            entry = t.output_start[row] + j - last
            if j < last:
                entry = t.use_entry[j]
                owner = t.use_owner[j]
                if owner != KEPT and recomputed[owner] and recomputed[t.use_row[j]]:
                    entry += copies
            block = storage[entry]
            if block < 0:
                continue
            if j < last:
                pending[block] -= 1
            if pending[block] == 0:
                r = rank[block]
                newest = ends[ranks + r]
                links[block] = -1
                links[outputs + block] = newest
                if newest < 0:
                    ends[r] = block
                else:
                    links[newest] = block
                ends[ranks + r] = block
    return pool, storage


@compiled
def least_pool(t, recomputed, order, reads, match_ranges, limit):  # type: ignore[no-untyped-def]
    """As `allocate`, with the match range that MXNet takes: the best, of equals the first."""
    best, storage = allocate(t, recomputed, order, reads, match_ranges[0], limit)
    for match_range in match_ranges[1:]:
        pool, other = allocate(t, recomputed, order, reads, match_range, limit)
        if pool < best:
            best, storage = pool, other
    return best, storage


@compiled
def add_in_place(t, recomputed, order, adding, storage):  # type: ignore[no-untyped-def]
    """Return the storages of a plan with the terms of sums where the sums are.

    A planned ``_grad_add`` may have its second input computed with the write request 'add' right
    into the first (``src/executor/inplace_addto_detect_pass.cc``).
    """
    row, storage = order[adding[order]], storage.copy()
    if not row.shape[0]:
        return storage
    read = all_read(t, recomputed)
    heads = heads_read(t, recomputed)
    by = read[gathered(t.read_start, order)[0]]  # of those that ignore it too
    count = np.bincount(np.concatenate((heads, by)), minlength=storage.shape[0])
    place = np.zeros(t.variable.shape[0], dtype=np.int64)
    place[order] = np.arange(order.shape[0])
    into, added = read[t.read_start[row]], read[t.read_start[row] + 1]
    total = np.searchsorted(t.output_start, into, side="right") - 1
    term = np.searchsorted(t.output_start, added, side="right") - 1
    fits = (storage[into] == storage[t.output_start[row]]) & (count[added] == 1)
    fits &= ~t.variable[total] & ~t.variable[term] & (place[total] < place[term])
    storage[added[fits]] = storage[into[fits]]
    return storage


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

    def live_bytes(self, *kinds: int, without: Collection[Entry] = ()) -> np.ndarray:
        """Count the bytes alive in each step, of these kinds (or all), ``without`` some."""
        chosen = np.isin(self.kind, kinds) if kinds else np.ones(len(self.kind), dtype=np.bool_)
        if without:
            made = zip(self.row.tolist(), self.output.tolist())
            chosen &= np.array([entry not in without for entry in made], dtype=np.bool_)
        nbytes, most = self.nbytes * chosen, self.steps + 1
        change = np.bincount(self.start, nbytes, most) - np.bincount(self.stop + 1, nbytes, most)
        return np.cumsum(change)[:-1].astype(np.int64)


@dataclass(frozen=True)
class Replay:
    """What MXNet's planner makes of one training graph."""

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
        t, mask, order = self.training.arrays, self.recomputed, self.order
        planned = allocate(t, mask, order, self.reads, 0, NO_LIMIT)[1]
        storage = add_in_place(t, mask, order, adding_rows(self.training), planned)
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
    pool, planned = least_pool(training.arrays, mask, order, reads, ranges, NO_LIMIT)
    return Replay(training, mask, order, reads, planned, int(pool))


def adding_rows(training: Planned) -> np.ndarray:
    """Tell which rows add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)
