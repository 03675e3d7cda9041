/* The rules that make a plan of marks valid; see rules.py and layout_rule.py. */
#pragma once

#include "costs/layouts.h"

/* The layouts of one training graph without a plan. */
typedef struct {
    bool active;
    LayoutArrays layouts;
    Int64s read_layout;   /* by read; ANY_LAYOUT if the layout does not matter */
    Int64s output_layout; /* by entry */
    Int32s place;         /* by entry: the input that it overwrites, NOT_IN_PLACE or ADDED */
    Bools matters;        /* by entry: whether results may depend on its layout */
} LayoutRule;

/* GradientFacts by forward node, and by input. */
typedef struct {
    Bools own_output, follows, any_gradient;
    Int32s read_start, read; /* by node: the inputs that read it, numbered as in GraphArrays */
    Int64s reader;           /* by input: the node that reads it */
    Bools passes;            /* by input: whether its gradient is not always zero */
    Bools held;              /* by input: whether the gradient reads it */
} GradientArrays;

/* The rules for one training graph. */
typedef struct {
    GraphArrays arrays;
    GradientArrays facts;
    Bools recomputable; /* by node: whether it may be recomputed */
    Bools tolerant;     /* by node: whether it may be recomputed without a reader */
    bool fusion;        /* whether pointwise fusion may be on */
    Int64s same;        /* by node: the first of the nodes with which it shares a mark */
    LayoutRule layouts;
} RuleArrays;

/* Removes from ``mask`` (in place) the nodes that the rules keep; returns the step of the rest. */
KERNEL void apply_rules(Memory *memory, const RuleArrays *r, Bools mask, Step *step);
