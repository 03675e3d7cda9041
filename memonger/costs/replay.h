/* MXNet's memory planner, replayed; see replay.py. ``recomputed`` has one element for each forward
 * node, or none if the graph has no copies (``forward`` is 0). */
#pragma once

#include "graph/arrays.h"

enum { EXTERNAL = -2, UNASSIGNED = -1 }; /* instead of a block; external: the user's array */

/* Tells the rows that run, in order, and how often each output of an operator is read.
 *
 * Forward nodes come first; each copy comes where the walk through the gradients
 * (``GraphArrays.walk_row``), which is the same for every plan, first meets it.
 */
KERNEL void order_and_reads(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *order, Int32s *reads);

/* Fused operators, which are rows behind the others; entries are those of what is fused. */
typedef struct {
    Int32s out_start, out; /* the entries that each makes */
    Int32s by_size;        /* these entries as they get memory: the largest first */
    Int32s read_start, read; /* the entries that it reads */
} Fused;

/* Returns the bytes of the pool, 4 to an element, and the block of each output; ends beyond
 * ``limit``. A match range of 0 uses no block twice. */
KERNEL int64_t allocate(
    Memory *memory, const GraphArrays *t, const Fused *fused, Bools recomputed, Int32s order,
    Int32s reads, int64_t match_range, double limit, Int32s *storage);

/* As allocate, with the match range that MXNet takes: the best, of equals the first. */
KERNEL int64_t allocate_least(
    Memory *memory, const GraphArrays *t, const Fused *fused, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit, Int32s *storage);

/* Returns the storages of a plan with the terms of sums where the sums are.
 *
 * A planned ``_grad_add`` may have its second input computed with the write request 'add' right
 * into the first (``src/executor/inplace_addto_detect_pass.cc``). ``adding`` tells which rows do.
 */
KERNEL void add_in_place(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Bools adding,
    Int32s storage, Int32s *moved);

/* The entries that are read by these reads: of the copies where both reader and read are
 * recomputed. */
KERNEL void find_entries(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s entry, Int32s row, Int32s owner,
    Int32s *found);

/* The entries that all rows read; those of the network's outputs and then the gradients. */
void find_read_entries(Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *found);
void find_head_entries(Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *found);
