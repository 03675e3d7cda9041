/* Where a network can be cut; see cuts.py. */
#pragma once

#include "support/kernels.h"

typedef struct {
    Doubles until, highest, keep;
} Weights;

/* Finds the cuts that keep least while no segment needs more than ``limit`` besides what was kept.
 *
 * Tells their indices in ascending order; returns whether there are such cuts.
 */
KERNEL bool cheapest_cuts(Memory *memory, const Weights *weights, double limit, Int64s *chosen);
