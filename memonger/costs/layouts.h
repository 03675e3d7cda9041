/* Predicts the layouts that MKLDNN gives to the tensors of a training step; see layouts.py. */
#pragma once

#include "costs/pool.h"

/* Facts about the layouts in a training graph. */
typedef struct {
    Int8s code;    /* by entry: how its layout is determined */
    Int64s number; /* by entry: equal for operators of equal signatures */
    Int64s shape;  /* by entry: equal for tensors of equal shapes */
    Bools shows;   /* by read: whether results may depend on the layout of the input */
    Bools plays;   /* by read: whether the layouts of outputs may depend on that of the input */
    Bools adding;  /* by row: whether it adds one gradient to another */
} LayoutArrays;

/* The layouts of a training graph without a plan. */
typedef struct {
    LayoutArrays facts;
    Int64s written; /* by entry */
    Int64s read;    /* by read; ANY_LAYOUT if its row does not run */
    Int32s place;   /* by entry: the input that it overwrites, NOT_IN_PLACE or ADDED */
    Bools matters;  /* by entry: whether results may depend on its layout */
} UsualLayouts;

enum { PLAIN = 0, BLOCKS = 1 }; /* the usual blocks of this CPU: of 16 channels, or of 8 */
/* The place of an output: the index of the input whose memory it reuses, or one of these. */
enum { NOT_IN_PLACE = -1, ADDED = -2 };
enum { /* how the layout of an output is determined: ``layout_of_output`` in operators/layouts.py */
    KEEPS, ALWAYS_PLAIN, COPIES, SUMS, ALIKE, FIRST, PASSES,
    NORM_GRADIENT, POOLING_GRADIENT, OTHER, IN_PLACE, CHOSEN, USUAL
};
enum { ANY_LAYOUT = -1 }; /* no layout is expected, or the row of the read does not run */

/* Returns the layout of an output at a ``place``; ``inputs`` are the layouts of the inputs.
 *
 * ``before`` is the former layout of its memory; PLAIN if the output is not in place. */
KERNEL int64_t find_layout(
    int64_t code, int64_t number, int64_t place, int64_t before, Int64s inputs, Bools plays);

/* Predicts the layouts of a step in the memory of MXNet's executor.
 *
 * Returns, by entry, the layout that is ``written`` and its ``place``; by read, the layout that is
 * ``read`` (ANY_LAYOUT if the row does not run). */
KERNEL void follow_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, const Step *step,
    Int64s *written, Int64s *read, Int32s *place);

/* As follow_layouts, and compares with the layouts ``want_read`` and ``want_written``.
 *
 * These are by read and by entry; they are empty if any layout is right. ``planned`` is the block
 * of each entry before add_in_place, and ``block`` after it. After a difference the prediction goes
 * on with the wanted layout of an entry, and with PLAIN for an input. Returns also which reads and
 * which entries differ. */
KERNEL void lead_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, const Step *step,
    Int32s planned, Int32s block, Int64s want_read, Int64s want_written, Int64s *written,
    Int64s *read, Int32s *place, Bools *other_read, Bools *other_written);
