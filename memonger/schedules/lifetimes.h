/* When the tensors of a training step are alive; see lifetimes.py. */
#pragma once

#include "schedules/nodes.h"

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
