/* In which layout MKLDNN leaves each tensor of a training step; see layouts.py. */
#pragma once

#include "costs/replay.h"

/* What is known of the layouts in a training graph. */
typedef struct {
    Int8s code;    /* of each output: how its layout comes about */
    Int64s number; /* of each output; the same where an operator of a signature makes it */
    Bools shows;   /* of each read: whether the numbers may depend on the layout that is found */
    Bools plays;   /* of each read: whether the layouts of the outputs may */
    Bools adding;  /* of each row: whether it adds one gradient to another */
} LayoutArrays;

enum { PLAIN = 0, BLOCKS = 1 };
enum { NOT_IN_PLACE = -1, ADDED = -2 }; /* instead of the input whose memory an output reuses */
enum { /* how the layout of an output comes about: ``layout_of_output`` in operators/layouts.py */
    KEEPS, ALWAYS_PLAIN, COPIES, SUMS, ALIKE, FIRST, PASSES,
    NORM_GRADIENT, POOLING_GRADIENT, OTHER, CHOSEN, USUAL
};

/* Tells the layout of an output at a ``place`` (see follow_layouts) in memory of the layout ``before``.
 *
 * That is PLAIN if it is not in place; ``found`` has the layouts of the inputs.
 */
KERNEL int64_t find_layout(
    int64_t code, int64_t number, int64_t place, int64_t before, Int64s found, Bools plays);

/* Tells of each output the layout, of each input that which is found (-1: it does not run).
 *
 * And of each output the input in whose ``place`` it is, or NOT_IN_PLACE or ADDED; of each input
 * the output that it reads.
 */
KERNEL void follow_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, Bools recomputed,
    Int32s order, Int32s reads, Int64s *made, Int64s *found, Int32s *place, Int32s *entries);

/* As follow_layouts; where a layout is not as wanted (-1, or none given: any) it goes on as if it were.
 *
 * An input is then taken to be PLAIN. Told too: the inputs and outputs that are not as wanted.
 */
KERNEL void lead_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, Bools recomputed,
    Int32s order, Int32s reads, Int64s want_found, Int64s want_made, Int64s *made, Int64s *found,
    Int32s *place, Int32s *entries, Bools *other_found, Bools *other_made);
