/* Dynamic programming over trees; see tree_dp.py. */
#pragma once

#include "planners/trees/trees.h"

enum { FLAGS = 3, DIVIDED = 1 }; /* FLAGS: ALIVE, ALL and COSTLY of trees.h */

/* The results of a network, and sizes of tensors. A size is in bytes raised to an exponent. */
typedef struct {
    Int64s start, stop, wanted; /* of each result, as in `Tensors` */
    Doubles result;             /* of each result: its size */
    Doubles in_place;           /* by position: of results written in place */
    Doubles backward;           /* by position: of gradients alive while its gradient runs */
    Doubles passing;            /* by position: of gradients alive before its gradient runs */
} Sizes;

/* Sizes and work of segments: entry (s, t) is the segment from boundary s to boundary t. */
typedef struct {
    Int64s bounds;      /* the positions of the boundaries */
    Doubles saved_size; /* (flag, s, t): size saved while the part right of it is processed */
    Doubles highest;    /* (s, t): largest size alive while its operators run forward */
    Doubles leaf;       /* (s, t): largest size alive in a base case */
    Doubles gradients;  /* (t,): size of gradients alive at a boundary */
    Floats work;        /* (s, t): work of running its operators forward */
    Floats recomputed;  /* (flag, s, t): work of a base case */
} Segments;

/* Computes the sizes and the work of all segments between these boundaries. */
KERNEL void measure(
    Memory *memory, const Positions *positions, const Sizes *sizes, Int64s bounds,
    Segments *segments);

/* Finds the least work from the first of m boundaries to the last, for each amount of memory.
 *
 * Memory is counted in slots of ``unit``. ``divided``, (m - 1, slots + 1), is the least work
 * between neighbouring boundaries if the segment between them is divided further. ``least``,
 * (slots + 1), is the work; infinity where the memory is not enough. ``choice``,
 * (m, m, slots + 1), is 0 for a base case, 1 for a segment divided further, and 4 c + flag for a
 * cut at boundary c.
 */
KERNEL void least_work(
    Memory *memory, const Segments *g, double unit, Floats divided, Floats *least, UInt16s *choice);
