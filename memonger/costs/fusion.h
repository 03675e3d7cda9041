/* Replays MXNet's pointwise fusion; see fusion.py. */
#pragma once

#include "costs/replay.h"

/* What fusion must know of a training graph beside its GraphArrays. */
typedef struct {
    Bools joins;  /* by row: whether it is fused with what it reads; empty: nothing is fused */
    Bools starts; /* by row: whether it is fused with what reads it */
    /* By row: the rows that must have run before it (control dependencies). Of a recomputed
     * operator the copy must have run, unless an original waits. */
    Int32s wait_start, wait_row;
    Int32s forward; /* by place in GraphArrays.first: the set of the row, or -1 */
} Fusible;

/* Returns the bytes of the pool that MXNet plans, fused or not; as allocate_least. */
int64_t count_pool_bytes(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit);

/* Finds the sets of rows that become one operator; returns how many there are.
 *
 * ``set`` has for each place in the order the set of its row, or -1. A set depends on what any of
 * its rows depends on, and so does all that depends on the set.
 */
KERNEL int64_t find_fused_sets(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s *set);

/* Returns whether MXNet fuses; if so, what, the rows that run then, and the reads of each entry. */
KERNEL bool fuse(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Fused *fused, Int32s *rows, Int32s *left);
