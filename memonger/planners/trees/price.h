/* What trees cost; see price.py. */
#pragma once

#include "costs/replay.h"
#include "planners/annealing.h"
#include "planners/trees/trees.h"
#include "schedules/nodes.h"

typedef struct {
    Steps steps;
    NodeVariants variants;
    SignatureArrays signatures;
    Int64s asked; /* (gradients, 2) */
    Int32s node;
    double one_pass;
} Problem;

/* Evaluates the memory of a schedule, 4 bytes to an element, gradients included.
 *
 * Returns the bytes of the pool with the best of ``match_ranges``, -1 if that is more than
 * ``limit``; tells its place.
 */
KERNEL int64_t pool_of(
    Memory *memory, const Problem *b, Int32s operations, Int64s match_ranges, int64_t limit,
    int64_t *place);

/* Evaluates a tree with these match ranges: bytes (-1: more than is allowed), work, place. */
KERNEL int64_t evaluate_tree(
    Memory *memory, const Problem *b, Int32s tree, double most_work, int64_t most_bytes,
    Int64s match_ranges, const Known *known, double *work, int64_t *place);
