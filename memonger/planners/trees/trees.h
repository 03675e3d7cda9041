/* Recursive checkpointing trees, and the schedules that they stand for; see trees.py.
 *
 * A tree is (nodes, 2): the cut and the flag of each node, in preorder.
 */
#pragma once

#include "support/kernels.h"

enum { LEAF = -1, LAZY = 1 };
enum { ALIVE, ALL, COSTLY, NOTHING };
enum { MOST_NODES = 2 }; /* that a tree may grow to, for each operator */

/* The forward operators of a network by position. */
typedef struct {
    Int32s read_start, read; /* positions that each operator reads */
    Int32s want_start, want; /* positions that its gradient reads */
    Int32s last;             /* its last reader (-1: none) */
    Int32s first_want;       /* the first operator whose gradient reads it (their number: none) */
    Int32s heads;            /* the operators of which the network returns a result */
    Bools pinned;            /* whether it is one of those, or not recomputable */
    Bools gradient;          /* whether its gradient runs */
    Bools costly;            /* whether its results are worth saving where others are recomputed */
    Doubles work;            /* of running it forward */
    Bools forced; /* whether it is to run again before a gradient reads it; empty: none is */
} Steps;

/* Makes the schedule of a tree, and returns the work of all its forward runs.
 *
 * A position: the operator runs; ~position: its gradient does. Each reads the latest results. Cuts
 * outside of their segment are passed over. It ends early, with a part of the operations, once there
 * is more than ``most_work``, or more than ``most_operations``. Nothing but the result is taken from
 * ``memory``.
 */
KERNEL double unroll(
    Memory *memory, const Steps *s, Int32s tree, double most_work, int64_t most_operations,
    Int32s *operations);

/* Changes a tree at random: move, add or drop a cut, or change what is saved of its left part.
 *
 * The tree of a network of ``count`` operators comes back itself where the change that was drawn
 * cannot be made; a changed one is taken from ``memory``, and nothing else.
 */
Int32s change(Memory *memory, Random *random, Int32s tree, int64_t count);
