/* Places tensors in one arena; see placement.py. */
#pragma once

#include "support/kernels.h"

/* Puts items one by one into the lowest gap that none fills while they are alive.
 *
 * Searches for the order of the first items, as many as ``large``, until they take no more than
 * ``goal`` or ``effort`` items were looked at; the others follow in the order that they have.
 * Returns the offset of each item.
 */
KERNEL void place(
    Memory *memory, Int32s start, Int32s stop, Int64s nbytes, int64_t large, int64_t goal,
    int64_t effort, Int64s *offset);
