"""MXNet's memory planner, replayed on a training graph: what a plan will cost, without a bind.

Order: depth first from the outputs of the network and then the gradients (``nnvm::DFSVisit``),
inputs before control dependencies. Memory: ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc``:
reference counts, in-place options, and a free list of whole blocks. A block serves any size within
a factor of ``NNVM_EXEC_MATCH_RANGE`` (16), grows to the largest tensor it ever holds and is never
split. The planner counts 4 bytes for every element; what is then allocated has the elements' real
size (``InitDataEntryMemory`` in ``src/executor/graph_executor.cc``).
"""

import os
from typing import List, NamedTuple, Tuple

import numpy as np
from numba import njit

from memonger.training import KEPT, TrainingGraph

EXTERNAL = -2  # a gradient: its memory is the user's
UNASSIGNED = -1


class Replay(NamedTuple):
    """What MXNet's planner makes of one training graph.

    Attributes
    ----------
    order : np.ndarray
        The rows of the training graph in the order in which they run.
    reads : np.ndarray
        How often each output of a row is read, by its number in ``Tables.elements``.
    pool_bytes : int
        The pool as MXNet counts it and ``debug_str`` reports it: 4 bytes an element.
    allocated_bytes : int
        The pool as it is allocated, with the real size of the elements.
    """

    order: np.ndarray
    reads: np.ndarray
    pool_bytes: int
    allocated_bytes: int


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
    best: List[Tuple[int, int]] = []
    for match_range in match_ranges():
        counted, real = allocate(tables, mask, order, reads, match_range)
        if not best or counted < best[0][0]:
            best = [(int(counted), int(real))]
    return Replay(order, reads, *best[0])


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
def allocate(t, recomputed, order, reads, match_range):  # type: ignore[no-untyped-def]
    outputs = t.elements.shape[0]
    storage = np.full(outputs, UNASSIGNED, dtype=np.int64)
    for h in range(t.outputs, t.head_row.shape[0]):
        head = _resolve(t.forward, recomputed, t.head_row[h], t.head_owner[h])
        storage[t.output_start[head] + t.head_output[h]] = EXTERNAL
    blocks = 0
    counted = np.zeros(outputs, dtype=np.int64)  # bytes of each block, 4 to an element
    real = np.zeros(outputs, dtype=np.int64)
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
        reads_any = last == first
        for j in range(first, last):
            reads_any = reads_any or not t.read_ignored[j]
        # An input's memory goes to an output that may have it.
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
        for out in range(start, end):
            if storage[out] >= 0:
                size = t.elements[out] * t.itemsize[out]
                real[storage[out]] = max(real[storage[out]], size)
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
    allocated = 0
    for block in range(blocks):
        allocated += (real[block] + 3) // 4 * 4  # pool entries are arrays of float32
    return pool, allocated
