/* The rows of a schedule's training step, and the lifetimes of its tensors; see rows.py. */
#pragma once

#include "graph/arrays.h"

/* The rows of a training step, each after the rows that it reads; starts as in GraphArrays. */
typedef struct {
    Int32s signature; /* by row: the index in ``Parts.signatures`` */
    Int32s source;    /* by row: the same row of the network's TrainingGraph; -1: there is none */
    Int32s time;      /* by row: how often the operator has run before; -1: not a forward node */
    Int32s read_start, read_row, read_output;
    Int32s first, latest; /* by variant: the first and the last row that runs it; -1: none */
} Rows;

/* The variants of rows in the training steps of all schedules of a network.
 *
 * The first variants are the rows of the TrainingGraph: forward nodes, copies (not used here),
 * gradients. Scratch states follow, and then the forward nodes as they run again: a Dropout is a
 * product with its mask, and states are scratch.
 */
typedef struct {
    Rows rows; /* the variants. A read of v >= 0 refers to the latest run of variant v, a read of ~v
                * (negative) to its first run. */
    int64_t forward_nodes;
    int64_t again;    /* variant x + again is the forward node x as it runs again */
    Int32s variable;  /* the variants of variables */
    Int32s operation_start, operation_row; /* by forward node: the rows of its gradient operation */
    Int32s head_row, head_output; /* the outputs of the network, without those of variables */
} NodeVariants;

/* Makes the rows of a step: all variables, then the operations of a schedule in order. A read is -1
 * if the step does not have its variable. */
KERNEL void make_rows(Memory *memory, const NodeVariants *p, Int32s operations, Rows *rows);

/* The blocks of a training step. A time is the number of a row. */
typedef struct {
    Int32s block;       /* by output of all rows: its block; -1 for variables */
    Int32s start, stop; /* by block: the row that makes it, and the last row that reads it */
    Int64s nbytes;
    /* By block: whether it is an array of the caller, for an output of the network or a gradient.
     * The forward pass must not change the arrays of gradients, so that a block that starts in it
     * is not one of them. */
    Bools of_caller;
} Lifetimes;

/* Finds the blocks of a training step; returns the most bytes of the arena that are alive at once,
 * if each block takes a multiple of ``alignment`` bytes.
 *
 * The first ``outputs`` heads are outputs of the network, the others gradients. Their blocks are
 * arrays of the caller, outside the arena, except a gradient that starts in the forward pass. With
 * ``views`` tensors of different shapes may share a block. ``output_bytes`` are those of the blocks
 * of the outputs.
 */
KERNEL int64_t lifetimes(
    Memory *memory, const SignatureArrays *signatures, const Rows *rows, Int32s head_row,
    Int32s head_output, int64_t outputs, bool views, int64_t alignment, int64_t *output_bytes,
    Lifetimes *result);
