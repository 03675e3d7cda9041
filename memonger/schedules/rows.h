/* The rows of a schedule's training step, and when its tensors are alive; see rows.py. */
#pragma once

#include "graph/arrays.h"

/* The rows of a training step, each after all that it reads; starts as in GraphArrays. */
typedef struct {
    Int32s signature; /* the place in ``Parts.signatures`` */
    Int32s source;    /* the row of the network's TrainingGraph that it stands for; -1 for none */
    Int32s time;      /* how often the operator has run before; -1 for what is no forward node */
    Int32s read_start, read_row, read_output;
    Int32s first, latest; /* of each variant the first and the last row that stands for it; or -1 */
} Rows;

/* The forms in which rows can stand in a network's training steps, whatever the schedule.
 *
 * The first variants are the rows of the TrainingGraph: forward nodes, copies (not used here),
 * gradients. Then come scratch states, and the forward nodes when they run again (a Dropout is
 * then a product with its mask, and states are scratch).
 */
typedef struct {
    Rows rows; /* as nodes. An edge v >= 0 refers to the latest run of variant v, an edge ~v
                * (negative) to its first run. */
    int64_t forward;  /* forward nodes */
    int64_t again;    /* forward node x is the variant x + again when it runs again */
    Int32s variable;  /* the variants of variables */
    Int32s operation_start, operation_row; /* of forward nodes: the gradients of their operation */
    Int32s head_row, head_output; /* the outputs of the network that are operators' */
} NodeVariants;

/* Makes the Rows of a step: all variables, then the operations of a schedule in order. A read of a
 * variable that is left out is -1. */
KERNEL void make_rows(Memory *memory, const NodeVariants *p, Int32s operations, Rows *rows);

/* The blocks of a training step. A time is the number of a row. */
typedef struct {
    Int32s block;       /* of each output of each row (numbered through); -1 for variables */
    Int32s start, stop; /* of each block: the row that makes it, and the last row that reads it */
    Int64s nbytes;
    /* Whether it is an array of the caller: of an output of the network, or of a gradient. The
     * arrays of gradients are left alone in the forward pass: no block that begins there is one. */
    Bools of_caller;
} Lifetimes;

/* Finds the blocks of a training step; returns the most bytes of blocks that are alive at once.
 *
 * The first ``outputs`` of the heads are the network's, the others gradients. Their blocks are
 * arrays of the caller and do not count; but a gradient's is in the arena if it begins in the
 * forward pass. With ``views`` tensors of other shapes may share a block.
 */
KERNEL int64_t lifetimes(
    Memory *memory, const SignatureArrays *signatures, const Rows *rows, Int32s head_row,
    Int32s head_output, int64_t outputs, bool views, Lifetimes *result);
