/* When the tensors of a training step are alive; see lifetimes.py. */
#pragma once

#include "schedules/nodes.h"

typedef struct {
    Int32s block;
    Int32s start, stop;
    Int64s nbytes;
    Bools given;
} Lifetimes;

/* Finds the blocks of a training step; returns the most bytes of blocks that are alive at once.
 *
 * The first ``outputs`` of the heads are the network's, the others gradients. Their blocks are
 * arrays of the caller and do not count; but a gradient's is in the arena if it begins in the
 * forward pass. With ``views`` tensors of other shapes may share a block.
 */
KERNEL int64_t lifetimes(
    Memory *memory, const SignatureArrays *signatures, const Rows *rows, Int32s head_row,
    Int32s head_output, int64_t outputs, bool views, Lifetimes *made);
