"""MXNet's memory planner, replayed on a training graph: what a plan will cost, without a bind.

Order: depth first from the outputs of the network and then the gradients (``nnvm::DFSVisit``).
Memory: ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc``: reference counts, in-place options, and a
free list of whole blocks. A block serves any size within a factor of ``NNVM_EXEC_MATCH_RANGE``
(16), grows to the largest tensor it ever holds and is never split. The planner counts 4 bytes for
every element; what is allocated has the elements' real size (``InitDataEntryMemory`` in
``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

import numpy as np

from memonger.graph.arrays import KEPT, gathered
from memonger.support.compiled import compiled

EXTERNAL = -2  # a gradient: its memory is the user's
UNASSIGNED = -1
NO_LIMIT = float("inf")


@compiled
def entries_read(t, recomputed, entry, row, owner):  # type: ignore[no-untyped-def]
    """The entries that are read: of the copies where both reader and read are recomputed."""
    found = np.empty(entry.shape[0], dtype=np.int64)
    copies = t.output_start[t.forward]  # from an output to the same of the copy
    for k in range(entry.shape[0]):
        found[k] = entry[k]
        if owner[k] != KEPT and recomputed[owner[k]] and recomputed[row[k]]:
            found[k] += copies
    return found


@compiled
def all_read(t, recomputed):  # type: ignore[no-untyped-def]
    """`entries_read` of all reads."""
    entry = t.output_start[t.read_row] + t.read_output
    return entries_read(t, recomputed, entry, t.read_row, t.read_owner)


@compiled
def order_and_reads(t, recomputed):  # type: ignore[no-untyped-def]
    """The rows of ``Tables`` that run, in order, and how often each output of an operator is read.

    A copy reads nothing but forward nodes and copies. So the forward nodes come first in an order
    of their own, that of the gradients is the same for every plan, and each copy comes where the
    walk through the gradients first meets it (``Tables.walk_row``).
    """
    n = t.forward
    copies = t.output_start[n]  # from an output to the same of the copy
    order = np.empty(t.first.shape[0] + t.walk_row.shape[0] + n, dtype=np.int32)
    count = t.first.shape[0]
    order[:count] = t.first
    reads = t.reads.copy()
    seen = np.zeros(n, dtype=np.bool_)
    for x in np.flatnonzero(recomputed[:n]):
        for q in range(t.recomputed_start[x], t.recomputed_start[x + 1]):
            if recomputed[t.recomputed_row[q]]:
                reads[t.recomputed_entry[q]] -= 1
                reads[t.recomputed_entry[q] + copies] += 1
    stack = np.empty(n, dtype=np.int32)
    at = np.empty(n, dtype=np.int32)
    for i in range(t.walk_row.shape[0]):
        row = t.walk_row[i]
        if row >= n:
            order[count] = row
            count += 1
            continue
        if not recomputed[row] or not recomputed[t.walk_owner[i]] or seen[row]:
            continue
        seen[row] = True
        depth = 0
        stack[0] = row
        at[0] = t.before_start[row]
        while depth >= 0:
            x = stack[depth]
            k = at[depth]
            if k < t.before_start[x + 1]:
                at[depth] += 1
                before = t.before_row[k]
                if recomputed[before] and not seen[before]:
                    seen[before] = True
                    depth += 1
                    stack[depth] = before
                    at[depth] = t.before_start[before]
                continue
            depth -= 1
            order[count] = x + n
            count += 1
            for q in range(t.use_start[x], t.use_start[x + 1]):
                reads[t.use_entry[q] + copies * recomputed[t.use_row[q]]] += 1
    return order[:count], reads


@compiled
def allocate(t, recomputed, order, reads, match_range, limit):  # type: ignore[no-untyped-def]
    """Bytes of the pool, 4 to an element, and the block of each output.

    The free list holds whole blocks, smallest first, of equals the oldest first. A block has the
    size of one of the tensors, so there is a queue for each of their sizes. A match range of 0 uses
    no block again. It ends early once the pool exceeds ``limit``.

    Nothing is handed to a function in the loops: numba counts references to each array of a tuple.
    """
    outputs, ranks = t.elements.shape[0], t.sizes.shape[0]
    copies = t.output_start[t.forward]
    storage = np.full(outputs, UNASSIGNED, dtype=np.int32)
    heads = entries_read(t, recomputed, t.head_entry, t.head_row, t.head_owner)
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
            if pending[block] == 1 or t.inplace_identity[q]:
                taken |= 1 << t.inplace_input[q]
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
    """Put the terms of a sum where the sum is, in the storages of a plan.

    Once the memory is planned, the second input of a ``_grad_add`` may be computed with the write
    request 'add' right into the first (``src/executor/inplace_addto_detect_pass.cc``).
    """
    row = order[adding[order]]
    if not row.shape[0]:
        return
    read = all_read(t, recomputed)
    heads = entries_read(t, recomputed, t.head_entry, t.head_row, t.head_owner)
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
