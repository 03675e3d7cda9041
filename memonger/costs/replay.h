/* Replays MXNet's memory planner; see replay.py. */
#pragma once

#include "graph/arrays.h"

/* The block of an entry is one of these where it has none; external: it is an array of the user. */
enum { EXTERNAL = -2, UNASSIGNED = -1 };

/* Returns the bytes of the pool, 4 to an element, and the block of each entry; ends beyond
 * ``limit``. A match range of 0 uses no block twice. */
KERNEL int64_t allocate(
    Memory *memory, const GraphArrays *t, const Step *step, int64_t match_range, double limit,
    Int32s *block);

/* As allocate, with the match range that MXNet takes: the best, of equals the first. */
KERNEL int64_t allocate_least(
    Memory *memory, const GraphArrays *t, const Step *step, Int64s match_ranges, double limit,
    Int32s *block);

/* Moves the terms of sums into the blocks of the sums.
 *
 * A planned ``_grad_add`` may have its second input computed with the write request 'add' right
 * into the first (``src/executor/inplace_addto_detect_pass.cc``). ``adding``: the rows that add.
 */
KERNEL void add_in_place(
    Memory *memory, const GraphArrays *t, const Step *step, Bools adding, Int32s planned,
    Int32s *block);
