/* The rules that make a plan of marks valid; see rules.py and layout_rule.py. */
#pragma once

#include "costs/layouts.h"

/* The rules for one training graph. */
typedef struct {
    GraphArrays arrays;
    /* GradientFacts, by forward node. */
    Bools own_output, follows, any_gradient;
    Int32s used_start, used_by; /* by node: the reads of it, numbered as in GraphArrays */
    /* By read of a forward node: the node that reads, whether the gradient with respect to it is
     * not always zero, and whether the gradient of the node reads it. */
    Int64s reader;
    Bools passes, held;
    Bools recomputable;   /* by node: whether it may be recomputed */
    Bools tolerant;       /* by node: whether it may be recomputed without a reader */
    bool fusion;          /* whether pointwise fusion may be on */
    Int64s same;          /* by node: the first of the nodes with which it shares a mark */
    UsualLayouts layouts; /* empty if no plan changes a layout that matters */
} RuleArrays;

/* Removes from ``mask`` (in place) the nodes that the rules keep; returns the step of the rest. */
KERNEL void apply_rules(Memory *memory, const RuleArrays *r, Bools mask, Step *step);
