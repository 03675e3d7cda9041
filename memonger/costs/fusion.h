/* MXNet's pointwise fusion, replayed; see fusion.py. */
#pragma once

#include "costs/replay.h"

/* What fusion must know of a training graph beside its GraphArrays. */
typedef struct {
    Bools joins;  /* whether each row is fused with what it reads; empty: nothing is fused */
    Bools starts; /* and with what reads it */
    Int32s wait_start, wait_row; /* of each row what must have run before it (control
                                  * dependencies): of a recomputed operator the copy, unless an
                                  * original waits */
    Int32s forward; /* of what runs first (``GraphArrays.first``) the fused operator, or -1 */
} Fusible;

/* Tells the bytes of the pool that MXNet plans, fused or not; as allocate_least. */
int64_t count_pool_bytes(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit);

/* Tells of each row that runs, by its place in the order, the fused operator that it becomes part
 * of, or -1; returns how many there are.
 *
 * A set depends on what any of its rows depends on, and so does all that depends on the set.
 */
KERNEL int64_t find_fused_sets(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s *set);

/* Tells whether MXNet fuses; if so, what, the rows that it runs then, and how often each output is
 * read. */
KERNEL bool fuse(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Fused *fused, Int32s *rows, Int32s *left);
