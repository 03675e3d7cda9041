/* Where a network can be cut; see cuts.py. */
#pragma once

#include "support/kernels.h"

/* A network as dynamic programming over its cuts sees it: n cuts, n + 1 segments between them. The
 * first element of each array stands for the beginning of the network, the last for its end. */
typedef struct {
    Doubles until;   /* what gradients read of the results of all operators before each cut */
    Doubles highest; /* the most while gradients of the segment before it run, without a plan */
    Doubles keep;    /* what must be kept at each cut */
} Weights;

/* Finds the cuts that keep least while no segment needs more than ``limit`` besides what was kept.
 *
 * ``chosen`` are their indices in ascending order; returns whether there are such cuts.
 */
KERNEL bool cheapest_cuts(Memory *memory, const Weights *weights, double limit, Int64s *chosen);
