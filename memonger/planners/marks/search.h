/* Simulated annealing of sets of cuts; see search.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/marks/rules.h"

/* The plans that the search considers.
 *
 * A state is an array of int8, (cuts,): whether a plan has each cut. Results that are alive at its
 * cuts are saved, everything between is recomputed, and nothing behind the last cut.
 */
typedef struct {
    RuleArrays rules;
    Int64s match_ranges;
    Int64s after;             /* by cut: the last node before it */
    Int64s keep_start, keep;  /* by cut: the nodes that it saves */
    Bools forced;             /* by node: whether every plan recomputes it */
    Int64s saved, identities; /* the nodes with saved identities, and the identities */
    Doubles seconds;          /* by node: the time that it takes */
} Space;

/* Returns the nodes that a state recomputes by the rules, and their step. */
KERNEL void read_state(Memory *memory, const Space *s, Int8s state, Bools *mask, Step *step);

/* Returns the bytes of a state, and the seconds that it adds to a step. */
KERNEL int64_t evaluate_state(Memory *memory, const Space *s, Int8s state, double *seconds);

/* Anneals a state for least memory (anneal); ``best`` is the smallest state that it visits. */
KERNEL void anneal_masks(
    Memory *memory, const Space *s, Int8s state, const Cooling *cooling, const Memo *memo,
    const Archive *archive, Int64s stop, Int64s done, Int8s *best);
