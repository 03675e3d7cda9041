/* What trees cost; see price.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/trees/trees.h"
#include "schedules/lifetimes.h"

typedef struct {
    Steps steps;
    NodeVariants variants;
    SignatureArrays signatures;
    Int64s asked; /* (gradients, 2) */
    Int32s node;
    bool views;
    double one_pass;
} Problem;

/* Returns the most bytes that are alive at once by a schedule, without outputs and gradients. */
KERNEL int64_t alive_of(Memory *memory, const Problem *b, Int32s operations);

/* Evaluates a tree: its bytes (-1: more than is allowed) and its work. */
KERNEL int64_t evaluate_tree(
    Memory *memory, const Problem *b, Int32s tree, double most_work, int64_t most_bytes,
    const Known *known, double *work);
