/* The rules that keep a plan right; see rules.py and layout_rule.py. */
#pragma once

#include "costs/fusion.h"
#include "costs/layouts.h"

/* The layouts in one training graph without a plan. */
typedef struct {
    bool active;
    LayoutArrays layouts;
    Int64s found;  /* of each read the layout that must be found, or -1 */
    Int64s made;   /* of each output its layout, */
    Int32s place;  /* the input in whose place it is written, */
    Bools matters; /* and whether numbers may come to depend on it */
} LayoutRule;

/* GradientFacts: of each forward node, and of each of its inputs in turn. */
typedef struct {
    Bools own_output, follows, any_gradient;
    Int32s read_start, read; /* the inputs, numbered as in GraphArrays, that read a node */
    Int64s reader;           /* of each input the node that has it */
    Bools passes;            /* of each input whether a gradient other than zero reaches it */
    Bools held;              /* of each input whether the gradient reads it */
} Facts;

/* The rules for one training graph. */
typedef struct {
    GraphArrays arrays;
    Facts facts;
    Bools allowed, tolerant; /* nodes that may be recomputed; also if nobody reads them then */
    bool fusion;
    Fusible fusible;
    Int64s same; /* of each node the one with which it shares a mark */
    LayoutRule layouts;
} RuleArrays;

/* Keeps in ``mask`` (in place) what is right, and tells what order_and_reads says of the result. */
KERNEL void obey(Memory *memory, const RuleArrays *r, Bools mask, Int32s *order, Int32s *reads);
