/* Follows the layouts in which MKLDNN leaves the tensors of a training step; see layouts.py. */
#pragma once

#include "costs/replay.h"

/* Facts about the layouts in a training graph. */
typedef struct {
    Int8s code;    /* by entry: how its layout comes about */
    Int64s number; /* by entry: the same where an operator of one signature makes it */
    Bools shows;   /* by read: whether numbers may depend on the layout of the input */
    Bools plays;   /* by read: whether the layouts of the outputs may */
    Bools adding;  /* by row: whether it adds one gradient to another */
} LayoutArrays;

enum { PLAIN = 0, BLOCKS = 1 }; /* the usual blocks of this CPU: of 16 channels, or of 8 */
/* The place of an output: the index of the input whose memory it reuses, or one of these. */
enum { NOT_IN_PLACE = -1, ADDED = -2 };
enum { /* how the layout of an output comes about: ``layout_of_output`` in operators/layouts.py */
    KEEPS, ALWAYS_PLAIN, COPIES, SUMS, ALIKE, FIRST, PASSES,
    NORM_GRADIENT, POOLING_GRADIENT, OTHER, IN_PLACE, CHOSEN, USUAL
};
enum { ANY_LAYOUT = -1 }; /* that is wanted; and of a read that does not run */

/* Returns the layout of an output at a ``place``, from the ``inputs``, the layouts of its inputs.
 *
 * ``before`` is the layout that its memory had; PLAIN if it is not in place. */
KERNEL int64_t find_layout(
    int64_t code, int64_t number, int64_t place, int64_t before, Int64s inputs, Bools plays);

/* Follows the layouts of a step.
 *
 * Returns, by entry, the layout that is ``written`` and its ``place``; by read, the layout that is
 * ``read`` (ANY_LAYOUT: it does not run). */
KERNEL void follow_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, const Step *step,
    Int64s *written, Int64s *read, Int32s *place);

/* As follow_layouts; where a layout is not as wanted, it goes on as if it were.
 *
 * Such an input is then taken to be PLAIN. Wanted are layouts by read and by entry, or none: any.
 * Returns also which reads and which entries are not as wanted. */
KERNEL void lead_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, const Step *step,
    Int64s want_read, Int64s want_written, Int64s *written, Int64s *read, Int32s *place,
    Bools *other_read, Bools *other_written);
