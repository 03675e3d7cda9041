/* MXNet's pointwise fusion, replayed; see fusion.py. */
#pragma once

#include "costs/replay.h"

typedef struct {
    Bools joins, starts;
    Int32s wait_start, wait_row, forward;
} Fusible;

/* Tells the bytes of the pool that MXNet plans, fused or not; as least_pool. */
int64_t plan_bytes(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit);

/* Tells of each row that runs, by its place in the order, the fused operator that it becomes part
 * of, or -1; returns how many there are.
 *
 * A set depends on what any of its rows depends on, and so does all that depends on the set.
 */
KERNEL int64_t fused_sets(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s *set);

/* Tells whether MXNet fuses; if so, what, the rows that it runs then, and how often each output is
 * read. */
KERNEL bool fuse(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Fused *fused, Int32s *rows, Int32s *left);
