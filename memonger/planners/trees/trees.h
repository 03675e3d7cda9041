/* Recursive checkpointing trees, and their schedules; see trees.py.
 *
 * A tree is (nodes, 2): the cut and the flag of each node, in preorder.
 */
#pragma once

#include "support/kernels.h"

enum { LEAF = -1, LAZY = 1 };
enum { ALIVE, ALL, COSTLY, NOTHING };
enum { MOST_NODES = 2 }; /* the most nodes of a tree, for each operator */

/* The forward operators of a network by position. */
typedef struct {
    Int32s read_start, read; /* the positions that it reads */
    Int32s want_start, want; /* the positions that its gradient reads */
    Int32s last;             /* its last reader; -1: none */
    Int32s first_want;       /* the first operator whose gradient reads it; their number: none */
    Int32s heads;            /* the operators whose results the network returns */
    Bools always_saved;      /* whether it is a head, or must not be recomputed */
    Bools gradient;          /* whether its gradient runs */
    Bools costly;            /* whether the flag COSTLY saves its results */
    Doubles work;            /* the work of its forward run */
    Bools forced;            /* whether a gradient reads it recomputed only; may be empty */
} Positions;

/* Makes the schedule of a tree, and returns the work of all its forward runs.
 *
 * An operation is a position if the operator runs, and ~position if its gradient runs. Each reads
 * the latest results. Cuts outside of their segment are ignored. The schedule is not complete if it
 * has more than ``most_work`` or ``most_operations``. ``memory`` has only the result.
 */
KERNEL double unroll(
    Memory *memory, const Positions *s, Int32s tree, double most_work, int64_t most_operations,
    Int32s *operations);

/* Changes the tree of a network of ``count`` operators at random: moves, adds or drops a cut, or
 * changes the flag of one.
 *
 * Returns the tree itself if the change cannot be made. ``memory`` has only the changed tree.
 */
Int32s change(Memory *memory, Random *random, Int32s tree, int64_t count);
