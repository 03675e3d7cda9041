/* Plans memory as MXNet does; see pool.py. */
#pragma once

#include "graph/arrays.h"

/* In place of the block of an entry without one. EXTERNAL: the entry is an array of the user. */
enum { EXTERNAL = -2, UNASSIGNED = -1 };

/* Gives the block of an input to an output that may be computed in place of it: the output is an
 * identity of it, or no other read of the block is to come (``pending``, by block). ``reads``, by
 * entry: how many reads keep it alive. */
static inline void take_over(
    const int32_t *reads, int32_t *block, int32_t *pending, int32_t input, int32_t output,
    bool identity)
{
    int32_t shared = block[input];
    if (block[output] != UNASSIGNED || !reads[output] || shared < 0)
        return;
    if (identity || pending[shared] == 1) {
        block[output] = shared;
        pending[shared] += reads[output];
    }
}

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
