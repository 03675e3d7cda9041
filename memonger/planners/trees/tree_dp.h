/* Dynamic programming over trees; see tree_dp.py. */
#pragma once

#include "support/kernels.h"

enum { FLAGS = 3, DIVIDED = 1 }; /* FLAGS: ALIVE, ALL and COSTLY of trees.h */

/* Finds the least work from the first of m boundaries to the last, for each amount of memory.
 *
 * Sizes are those of `Segments` in slots; ``saved_size``, (3, m, m), and ``leaf``, (m, m), are
 * whole numbers.
 * ``divided``, (m - 1, slots + 1), is the least work between neighbouring boundaries if the segment
 * between them is divided further. ``least``, (slots + 1), is the work; infinity where the memory
 * is not enough. ``choice``, (m, m, slots + 1), is 0 for a base case, 1 for a segment divided
 * further, and 4 c + flag for a cut at boundary c.
 */
KERNEL void least_work(
    Memory *memory, Doubles saved_size, Doubles highest, Doubles leaf, Doubles gradients,
    Floats work, Floats recomputed, Floats divided, Floats *least, UInt16s *choice);
