/* The rules that keep a plan right; see rules.py and layout_rule.py. */
#pragma once

#include "costs/layouts.h"

/* The layouts of one training graph without a plan. */
typedef struct {
    bool active;
    LayoutArrays layouts;
    Int64s read_layout;   /* of each read; ANY_LAYOUT: any */
    Int64s output_layout; /* of each output */
    Int32s place;         /* of each output the input in whose place it is written */
    Bools matters;        /* of each output whether numbers may come to depend on its layout */
} LayoutRule;

/* GradientFacts: of each forward node, and of each of its inputs in turn. */
typedef struct {
    Bools own_output, follows, any_gradient;
    Int32s read_start, read; /* of each node the inputs that read it, numbered as in GraphArrays */
    Int64s reader;           /* of each input the node that has it */
    Bools passes;            /* of each input whether a gradient other than zero reaches it */
    Bools held;              /* of each input whether the gradient reads it */
} Facts;

/* The rules for one training graph. */
typedef struct {
    GraphArrays arrays;
    Facts facts;
    Bools allowed;  /* whether a node may be recomputed */
    Bools tolerant; /* whether it may be if nobody reads it then */
    bool fusion;
    Int64s same; /* of each node the first of those with which it shares a mark */
    LayoutRule layouts;
} RuleArrays;

/* Takes out of ``mask`` (in place) what is not right; returns the step of the rest. */
KERNEL void apply_rules(Memory *memory, const RuleArrays *r, Bools mask, Step *step);
