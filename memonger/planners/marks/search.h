/* Simulated annealing of recomputation masks; see search.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/marks/rules.h"

/* What is searched.
 *
 * A state is an array of int8. Of n cuts the first n elements say which are made: what is alive at
 * those is saved, all between is recomputed, and nothing behind the last. The other elements say
 * for each node AS_CUTS, or SAVED or RECOMPUTED all the same.
 */
typedef struct {
    RuleArrays rules;
    Int64s match_ranges;
    Int64s after;            /* of each cut the node before it */
    Int64s keep_start, keep; /* the nodes that each cut saves */
    Int64s flippable;        /* nodes that may change by themselves */
    Bools wished;            /* whether a node is recomputed by every plan */
    Doubles seconds;         /* of each node when it is recomputed */
    Bools costly;            /* whether that is much for its bytes */
    Int64s copied, copies;   /* nodes with saved identities, and those identities */
    Doubles copy_seconds;    /* of each that is saved where its node is recomputed */
} Space;

enum { AS_CUTS, SAVED, RECOMPUTED };

/* What annealing looks for, and how. The energy of a plan is its bytes above ``limit`` and its
 * seconds, each times a price. */
typedef struct {
    double limit, byte_price, second_price;
    double flipping; /* the share of changes that set single nodes instead of cuts */
    bool by_node;    /* states name each node; what is not flipped is set between two cuts */
} Goal;

/* Finds the nodes that a state recomputes by the rules, and their order and reads as in obey. */
KERNEL void read_state(
    Memory *memory, const Space *s, Int8s state, Bools *mask, Int32s *order, Int32s *reads);

/* Makes the state that names what a plan does with each node. */
KERNEL void make_state(Memory *memory, const Space *s, Bools mask, Int8s *state);

/* Returns the bytes of a state, and the seconds that it adds. */
KERNEL int64_t evaluate_state(Memory *memory, const Space *s, Int8s state, double *seconds);

/* Anneals a state (anneal); ``best`` is the one of least energy that was visited. */
KERNEL void anneal_masks(
    Memory *memory, const Space *s, Int8s state, const Goal *goal, const Cooling *cooling,
    const Memo *memo, const Archive *archive, Int64s stop, Int64s done, Int8s *best);
