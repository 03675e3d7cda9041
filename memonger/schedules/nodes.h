/* The training step of a schedule; see nodes.py. */
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

/* Lists the variants that run, in order: all variables, then those of a schedule. */
KERNEL void line_up(Memory *memory, const NodeVariants *p, Int32s operations, Int32s *line);

/* Makes the Rows of these variants; a read of a variable that is left out is -1. */
KERNEL void connect(Memory *memory, const NodeVariants *p, Int32s line, Rows *rows);
