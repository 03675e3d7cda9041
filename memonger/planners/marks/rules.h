/* The rules that keep a plan right; see rules.py and layout_rule.py. */
#pragma once

#include "costs/fusion.h"
#include "costs/layouts.h"

typedef struct {
    bool active;
    LayoutArrays layouts;
    Int64s found, made;
    Int32s place;
    Bools matters;
} LayoutRule;

typedef struct {
    Bools own_output, follows, any_gradient;
    Int32s read_start, read;
    Int64s reader;
    Bools passes, held;
} Facts;

typedef struct {
    GraphArrays arrays;
    Facts facts;
    Bools allowed, tolerant;
    bool fusion;
    Fusible fusible;
    Int64s same;
    LayoutRule layouts;
} RuleArrays;

/* Keeps in ``mask`` (in place) what is right, and tells what order_and_reads says of the result. */
KERNEL void obey(Memory *memory, const RuleArrays *r, Bools mask, Int32s *order, Int32s *reads);
