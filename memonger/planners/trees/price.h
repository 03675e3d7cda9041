/* The price of trees; see price.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/trees/trees.h"
#include "schedules/rows.h"

/* A network, ready to be scheduled. */
typedef struct {
    Steps steps;
    NodeVariants variants;
    SignatureArrays signatures;
    Int64s gradients; /* (gradients, 2): the outputs that are gradients (``Parts.written``) */
    Int32s node;      /* the forward node of each position */
    bool views;       /* whether tensors of other shapes may share memory (lifetimes) */
    double one_pass;  /* the work of one forward pass */
} Problem;

/* Returns the most bytes that are alive at once by a schedule, without outputs and gradients. */
KERNEL int64_t alive_of(Memory *memory, const Problem *b, Int32s operations);

/* Returns the bytes of a tree (-1: more than is allowed), and its work. */
KERNEL int64_t evaluate_tree(
    Memory *memory, const Problem *b, Int32s tree, double most_work, int64_t most_bytes,
    const Memo *memo, double *work);
