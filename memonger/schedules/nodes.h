/* The training step of a schedule; see nodes.py. */
#pragma once

#include "graph/arrays.h"

typedef struct {
    Int32s signature, source, time;
    Int32s read_start, read_row, read_output;
    Int32s first, latest;
} Rows;

typedef struct {
    Rows rows;
    int64_t forward, again;
    Int32s variable;
    Int32s operation_start, operation_row;
    Int32s head_row, head_output;
} NodeVariants;

/* Lists the variants of the nodes that run, in order: all variables, then a schedule's. */
KERNEL void line_up(Memory *memory, const NodeVariants *p, Int32s operations, Int32s *line);

/* Makes the Rows of nodes of these variants; who reads a variable that is left out reads -1. */
KERNEL void connect(Memory *memory, const NodeVariants *p, Int32s line, Rows *made);
