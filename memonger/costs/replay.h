/* Replays MXNet's memory planner; see replay.py. ``recomputed`` has one element for each forward
 * node, or none if the graph has no copies (``forward`` is 0). */
#pragma once

#include "graph/arrays.h"

/* The block of an entry is one of these where it has none; external: it is an array of the user. */
enum { EXTERNAL = -2, UNASSIGNED = -1 };

/* Returns an entry as it is read for an operator ``owner``: of the copy if both are recomputed. */
static inline int32_t as_read(
    const bool *recomputed, int32_t copies, int32_t entry, int32_t row, int32_t owner)
{
    return owner != KEPT && recomputed[owner] && recomputed[row] ? entry + copies : entry;
}

/* Returns the row that a read reads. */
static inline int32_t find_row(const GraphArrays *t, const bool *recomputed, int64_t read)
{
    int32_t row = t->read_row.at[read];
    return as_read(recomputed, (int32_t)t->forward, row, row, t->read_owner.at[read]);
}

/* Lists the rows that run, in order, and counts the reads of each entry.
 *
 * Forward nodes come first; each copy comes where the walk through the gradients
 * (``GraphArrays.walk_row``), which is the same for every plan, first meets it.
 */
KERNEL void order_and_reads(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *order, Int32s *reads);

/* Returns the bytes of the pool, 4 to an element, and the block of each entry; ends beyond
 * ``limit``. A match range of 0 uses no block twice. */
KERNEL int64_t allocate(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Int32s reads,
    int64_t match_range, double limit, Int32s *block);

/* As allocate, with the match range that MXNet takes: the best, of equals the first. */
KERNEL int64_t allocate_least(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Int32s reads,
    Int64s match_ranges, double limit, Int32s *block);

/* Moves the terms of sums into the blocks of the sums.
 *
 * A planned ``_grad_add`` may have its second input computed with the write request 'add' right
 * into the first (``src/executor/inplace_addto_detect_pass.cc``). ``adding``: the rows that add.
 */
KERNEL void add_in_place(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Bools adding,
    Int32s planned, Int32s *block);

/* Returns the entry of each read: that of the copy where both owner and row are recomputed. */
KERNEL void find_entries(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s entry, Int32s row, Int32s owner,
    Int32s *result);

/* Returns the entries that all rows read; and those of the network's outputs and the gradients. */
Int32s find_read_entries(Memory *memory, const GraphArrays *t, Bools recomputed);
Int32s find_head_entries(Memory *memory, const GraphArrays *t, Bools recomputed);
