/* Dynamic programming over trees; see tree_dp.py. */
#pragma once

#include "support/kernels.h"

enum { FLAGS = 3, DIVIDED = 1 }; /* FLAGS: ALIVE, ALL and COSTLY of trees.h */

/* Finds the least work from the first of m boundaries to the last within each memory.
 *
 * Sizes are those of `Segments` in slots, ``kept`` (3, m, m) and ``leaf`` (m, m) whole numbers;
 * ``divided``, (m - 1, slots + 1), is the least work between neighbouring boundaries if that is
 * divided further. ``least``, (slots + 1), is the work, infinity where there is no way; ``choice``
 * is (m, m, slots + 1): 0 a base case; 1 divided further; 4 c + flag cut at boundary c.
 */
KERNEL void least_work(
    Memory *memory, Doubles kept, Doubles highest, Doubles leaf, Doubles gradients, Floats work,
    Floats recomputed, Floats divided, Floats *least, UInt16s *choice);
