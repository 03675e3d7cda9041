/* The memory and the work of trees; see price.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/trees/trees.h"
#include "schedules/rows.h"

/* The data of a network from which trees are evaluated. */
typedef struct {
    Positions positions;
    NodeVariants variants;
    SignatureArrays signatures;
    Int64s gradients; /* (gradients, 2): variant and output of each gradient (``Parts.written``) */
    Int32s node;      /* by position: the forward node */
    bool views;       /* whether tensors of different shapes may share memory (lifetimes) */
    double one_pass;  /* the work of one forward pass */
} Problem;

/* Returns the most bytes alive at once in a schedule, without outputs and gradients, if each block
 * takes a multiple of ``alignment`` bytes; and the bytes of the outputs. */
KERNEL int64_t alive_of(
    Memory *memory, const Problem *b, Int32s operations, int64_t alignment, int64_t *output_bytes);

/* Returns the bytes of a tree, and its work; -1 if bytes or work exceed their limit. */
KERNEL int64_t evaluate_tree(
    Memory *memory, const Problem *b, Int32s tree, double most_work, int64_t most_bytes,
    const Memo *memo, double *work);
