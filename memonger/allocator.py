"""MXNet's memory planner, replayed on a training graph: what a plan will cost, without a bind.

Order: depth first from the outputs of the network and then the gradients (``nnvm::DFSVisit``),
inputs before control dependencies. Memory: ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc``:
reference counts, in-place options, and a free list of whole blocks. A block serves any size within
a factor of ``NNVM_EXEC_MATCH_RANGE`` (16), grows to the largest tensor it ever holds and is never
split. The planner counts 4 bytes for every element; what is then allocated has the elements' real
size (``InitDataEntryMemory`` in ``src/executor/graph_executor.cc``).
"""

import os
from typing import Any, List, NamedTuple, Tuple

import numpy as np
from numba import njit

from memonger.training import KEPT, TrainingGraph

EXTERNAL = -2  # a gradient: its memory is the user's
UNASSIGNED = -1

#: What a tensor of the timeline was made by.
FORWARD, RECOMPUTED, BACKWARD = 0, 1, 2


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
        FORWARD, RECOMPUTED or BACKWARD.
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

    def live_bytes(self, *kinds: int) -> np.ndarray:
        """Bytes alive in each step, of tensors of these kinds (of all by default)."""
        chosen = np.isin(self.kind, kinds) if kinds else np.ones(len(self.kind), dtype=np.bool_)
        change = np.zeros(self.steps + 1, dtype=np.int64)
        np.add.at(change, self.start[chosen], self.nbytes[chosen])
        np.add.at(change, self.stop[chosen] + 1, -self.nbytes[chosen])
        return np.cumsum(change)[:-1]


class Replay(NamedTuple):
    """What MXNet's planner makes of one training graph.

    Attributes
    ----------
    training : TrainingGraph
    recomputed : np.ndarray of bool
        For each forward node whether it carries ``force_mirroring``.
    order : np.ndarray
        The rows of the training graph in the order in which they run.
    reads : np.ndarray
        How often each output of a row is read, by its number in ``Tables.elements``.
    blocks : np.ndarray
        The block of the pool that each output has, by the same number; negative for none.
    pool_bytes : int
        The pool as MXNet counts it and ``debug_str`` reports it: 4 bytes an element.
    """

    training: TrainingGraph
    recomputed: np.ndarray
    order: np.ndarray
    reads: np.ndarray
    blocks: np.ndarray
    pool_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """The pool as it is allocated, with the real size of the elements."""
        tables = self.training.tables
        blocks = self.blocks.copy()
        _add_in_place(tables, self.recomputed, self.order, _adding(self.training), blocks)
        used = blocks >= 0
        real = np.zeros(blocks.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(real, blocks[used], (tables.elements * tables.itemsize)[used])
        return int(((real + 3) // 4 * 4).sum())  # pool entries are arrays of float32

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that are alive at once: what no allocator can do without."""
        return int(self.timeline().live_bytes().max(initial=0))

    def timeline(self) -> Timeline:
        """Which tensors are alive when."""
        tables, mask, order = self.training.tables, self.recomputed, self.order
        storage, birth, last = _lifetimes(tables, mask, order, self.reads)
        _add_in_place(tables, mask, order, _adding(self.training), storage)
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
            np.minimum(row // tables.forward, BACKWARD),
            (tables.elements * tables.itemsize)[made],
            birth[made],
            stop,
            storage[made],
        )


def replay(training: TrainingGraph, recomputed: np.ndarray) -> Replay:
    """Order a training graph and plan its memory as MXNet will.

    Parameters
    ----------
    training : TrainingGraph
    recomputed : np.ndarray of bool
        For each forward node whether it carries ``force_mirroring``.
    """
    tables = training.tables
    mask = np.ascontiguousarray(recomputed, dtype=np.bool_)
    order, reads = order_and_reads(tables, mask)
    best: List[Tuple[int, Any]] = []
    for match_range in match_ranges():
        pool, blocks = allocate(tables, mask, order, reads, match_range)
        if not best or pool < best[0][0]:
            best = [(int(pool), blocks)]
    return Replay(training, mask, order, reads, best[0][1], best[0][0])


def timeline(training: TrainingGraph, recomputed: np.ndarray) -> Timeline:
    """Which tensors of a training step are alive when; parameters as those of `replay`."""
    return replay(training, recomputed).timeline()


def match_ranges() -> List[int]:
    """The factors that MXNet will try, from the environment (``MXPlanMemory``)."""
    largest = int(os.environ.get("NNVM_EXEC_MATCH_RANGE", "16"))
    search = os.environ.get("NNVM_AUTO_SEARCH_MATCH_RANGE", "0") not in ("", "0", "false", "False")
    if not search or largest == 0:
        return [largest]
    return [2**k for k in range(largest.bit_length()) if 2**k <= largest]


@njit(cache=True)
def _resolve(forward, recomputed, row, owner):  # type: ignore[no-untyped-def]
    """The row that is read: the recomputed copy where both reader and read are recomputed."""
    if owner != KEPT and row < forward and recomputed[owner] and recomputed[row]:
        return row + forward
    return row


@njit(cache=True)
def order_and_reads(t, recomputed):  # type: ignore[no-untyped-def]
    """The rows of ``Tables`` that run, in order, and how often each output is read."""
    rows = t.variable.shape[0]
    order = np.empty(rows, dtype=np.int64)
    reads = np.zeros(t.elements.shape[0], dtype=np.int64)
    seen = np.zeros(rows, dtype=np.bool_)
    stack = np.empty(rows, dtype=np.int64)
    at = np.empty(rows, dtype=np.int64)
    count = 0
    for h in range(t.head_row.shape[0]):
        head = _resolve(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        reads[t.output_start[head] + t.head_output[h]] += 1
        if seen[head]:
            continue
        seen[head] = True
        depth = 0
        stack[0] = head
        at[0] = 0
        while depth >= 0:
            row = stack[depth]
            inputs = t.read_start[row + 1] - t.read_start[row]
            k = at[depth]
            if k == inputs + t.dep_start[row + 1] - t.dep_start[row]:
                order[count] = row
                count += 1
                depth -= 1
                continue
            at[depth] += 1
            if k < inputs:
                j = t.read_start[row] + k
                following = _resolve(t.forward, recomputed, t.read_row[j], t.read_owner[j])
                if not t.read_ignored[j]:
                    reads[t.output_start[following] + t.read_output[j]] += 1
            else:
                j = t.dep_start[row] + k - inputs
                following = _resolve(t.forward, recomputed, t.dep_row[j], t.dep_owner[j])
            if not seen[following]:
                seen[following] = True
                depth += 1
                stack[depth] = following
                at[depth] = 0
    return order[:count], reads


@njit(cache=True)
def _lower_bound(sizes, count, size):  # type: ignore[no-untyped-def]
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if sizes[middle] < size:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _take_over(t, recomputed, reads, row, storage, held):  # type: ignore[no-untyped-def]
    """Give an input's storage to each output of a row that may have it."""
    first = t.read_start[row]
    last = t.read_start[row + 1]
    start = t.output_start[row]
    reads_any = last == first
    for j in range(first, last):
        reads_any = reads_any or not t.read_ignored[j]
    taken = 0  # bit k: input k was; the tables have no option beyond the first 63 inputs
    for q in range(t.inplace_start[row], t.inplace_start[row + 1]):
        k = t.inplace_input[q]
        j = first + k
        source = _resolve(t.forward, recomputed, t.read_row[j], t.read_owner[j])
        into = t.output_start[source] + t.read_output[j]
        out = start + t.inplace_output[q]
        block = storage[into]
        if (taken >> k) & 1 or storage[out] != UNASSIGNED or block < 0 or reads[out] == 0:
            continue
        if t.elements[out] != t.elements[into] or t.itemsize[out] != t.itemsize[into]:
            continue
        if (held[block] == 1 and reads_any) or t.inplace_identity[q]:
            taken |= 1 << k
            storage[out] = block
            held[block] += reads[out]


@njit(cache=True)
def allocate(t, recomputed, order, reads, match_range):  # type: ignore[no-untyped-def]
    outputs = t.elements.shape[0]
    storage = np.full(outputs, UNASSIGNED, dtype=np.int64)
    for h in range(t.outputs, t.head_row.shape[0]):
        head = _resolve(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        storage[t.output_start[head] + t.head_output[h]] = EXTERNAL
    blocks = 0
    counted = np.zeros(outputs, dtype=np.int64)  # bytes of each block, 4 to an element
    held = np.zeros(outputs, dtype=np.int64)  # reads of each block that are still to come
    free = np.empty(outputs, dtype=np.int64)  # free blocks, smallest first, of equals the oldest
    sizes = np.empty(outputs, dtype=np.int64)  # and their sizes
    frees = 0
    for p in range(order.shape[0]):
        row = order[p]
        if t.variable[row]:
            continue
        first = t.read_start[row]
        last = t.read_start[row + 1]
        start = t.output_start[row]
        end = t.output_start[row + 1]
        _take_over(t, recomputed, reads, row, storage, held)
        # The other outputs get a block each, the largest output first.
        for _ in range(end - start):
            out = -1
            for o in range(start, end):  # of equal sizes the last (a reversed multimap)
                if storage[o] == UNASSIGNED and (out < 0 or t.elements[o] >= t.elements[out]):
                    out = o
            if out < 0:
                break
            size = 4 * t.elements[out]
            found = -1
            if match_range > 0:
                at = _lower_bound(sizes, frees, size)
                if at < frees and sizes[at] <= size * match_range:
                    found = at
                elif at > 0 and sizes[at - 1] >= size // match_range:
                    found = at - 1
            if found < 0:
                block = blocks
                blocks += 1
            else:
                block = free[found]
                frees -= 1
                for f in range(found, frees):
                    free[f] = free[f + 1]
                    sizes[f] = sizes[f + 1]
            counted[block] = max(counted[block], size)
            held[block] = reads[out]
            storage[out] = block
        # What has been read for the last time is free, and so is what nobody will read.
        for j in range(first, last + end - start):
            if j < last:
                if t.read_ignored[j]:
                    continue
                source = _resolve(t.forward, recomputed, t.read_row[j], t.read_owner[j])
                block = storage[t.output_start[source] + t.read_output[j]]
                if block < 0:
                    continue
                held[block] -= 1
            else:
                block = storage[start + j - last]
                if block < 0:
                    continue
            if held[block] == 0:
                size = counted[block]
                at = _lower_bound(sizes, frees, size + 1)
                for f in range(frees, at, -1):
                    free[f] = free[f - 1]
                    sizes[f] = sizes[f - 1]
                free[at] = block
                sizes[at] = size
                frees += 1
    pool = 0
    for block in range(blocks):
        pool += counted[block]
    return pool, storage


@njit(cache=True)
def _lifetimes(t, recomputed, order, reads):  # type: ignore[no-untyped-def]
    """Of each output its storage (shared in place), and the steps it is made and last read in."""
    outputs = t.elements.shape[0]
    steps = order.shape[0]
    storage = np.full(outputs, UNASSIGNED, dtype=np.int64)
    birth = np.zeros(outputs, dtype=np.int64)
    last = np.zeros(outputs, dtype=np.int64)
    held = np.zeros(outputs, dtype=np.int64)
    storages = 0
    for h in range(t.outputs, t.head_row.shape[0]):
        head = _resolve(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        storage[t.output_start[head] + t.head_output[h]] = EXTERNAL
    for p in range(steps):
        row = order[p]
        if t.variable[row]:
            continue
        first = t.read_start[row]
        start = t.output_start[row]
        for out in range(start, t.output_start[row + 1]):
            birth[out] = p
            last[out] = p
        _take_over(t, recomputed, reads, row, storage, held)
        for out in range(start, t.output_start[row + 1]):
            if storage[out] == UNASSIGNED:
                storage[out] = storages
                held[storages] = reads[out]
                storages += 1
        for j in range(first, t.read_start[row + 1]):
            if not t.read_ignored[j]:
                source = _resolve(t.forward, recomputed, t.read_row[j], t.read_owner[j])
                into = t.output_start[source] + t.read_output[j]
                last[into] = p
                if storage[into] >= 0:
                    held[storage[into]] -= 1
    for h in range(t.outputs):
        head = _resolve(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        last[t.output_start[head] + t.head_output[h]] = steps - 1
    return storage, birth, last


def _adding(training: TrainingGraph) -> np.ndarray:
    """The rows that add one gradient to another."""
    return np.array([op == "_grad_add" for op in training.ops], dtype=np.bool_)


@njit(cache=True)
def _add_in_place(t, recomputed, order, adding, storage):  # type: ignore[no-untyped-def]
    """Put the terms of a sum where the sum is, in the storages of a plan.

    Once the memory is planned, the second input of a ``_grad_add`` may be computed with the write
    request 'add' right into the first (``src/executor/inplace_addto_detect_pass.cc``).
    """
    count = np.zeros(storage.shape[0], dtype=np.int64)  # of readers, those that ignore it as well
    place = np.zeros(t.variable.shape[0], dtype=np.int64)
    for h in range(t.head_row.shape[0]):
        head = _resolve(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        count[t.output_start[head] + t.head_output[h]] += 1
    for p in range(order.shape[0]):
        row = order[p]
        place[row] = p
        for j in range(t.read_start[row], t.read_start[row + 1]):
            source = _resolve(t.forward, recomputed, t.read_row[j], t.read_owner[j])
            count[t.output_start[source] + t.read_output[j]] += 1
    for row in order:
        if not adding[row]:
            continue
        j = t.read_start[row]
        total = _resolve(t.forward, recomputed, t.read_row[j], t.read_owner[j])
        term = _resolve(t.forward, recomputed, t.read_row[j + 1], t.read_owner[j + 1])
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
