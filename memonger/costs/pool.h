/* Plans memory as MXNet does; see pool.py. */
#pragma once

#include "graph/arrays.h"

/* In place of the block of an entry without one. EXTERNAL: the entry is an array of the user. */
enum { EXTERNAL = -2, UNASSIGNED = -1 };

/* Returns the bytes of the pool, 4 an element, and the block of each entry. Stops once the pool is
 * larger than ``limit``. With a match range of 0 no free block is used again. */
KERNEL int64_t allocate(
    Memory *memory, const GraphArrays *t, const Step *step, int64_t match_range, double limit,
    Int32s *block);

/* As allocate, with the match range that MXNet chooses: the first one that gives the least. */
KERNEL int64_t allocate_least(
    Memory *memory, const GraphArrays *t, const Step *step, Int64s match_ranges, double limit,
    Int32s *block);

/* Moves the terms of sums into the blocks of the sums.
 *
 * MXNet may compute the second input of a ``_grad_add`` with the write request 'add', so that it is
 * added to the first where that is (``src/executor/inplace_addto_detect_pass.cc``). ``adding``, by
 * row: whether it is such a sum.
 */
KERNEL void add_in_place(
    Memory *memory, const GraphArrays *t, const Step *step, Bools adding, Int32s planned,
    Int32s *block);
