/* Simulated annealing of sets of cuts; see search.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/marks/rules.h"

/* What is searched.
 *
 * A state is an array of int8: of each cut whether it is made. What is alive at those is saved, all
 * between is recomputed, and nothing behind the last.
 */
typedef struct {
    RuleArrays rules;
    Int64s match_ranges;
    Int64s after;            /* of each cut the node before it */
    Int64s keep_start, keep; /* the nodes that each cut saves */
    Bools forced;            /* whether a node is recomputed by every plan */
    Int64s saved, identities; /* nodes with saved identities, and those identities */
    Doubles seconds;         /* of each node when it is recomputed */
} Space;

/* Finds the nodes that a state recomputes by the rules, and their step. */
KERNEL void read_state(Memory *memory, const Space *s, Int8s state, Bools *mask, Step *step);

/* Returns the bytes of a state, and the seconds that it adds. */
KERNEL int64_t evaluate_state(Memory *memory, const Space *s, Int8s state, double *seconds);

/* Anneals a state for least memory (anneal); ``best`` is the smallest that was visited. */
KERNEL void anneal_masks(
    Memory *memory, const Space *s, Int8s state, const Cooling *cooling, const Memo *memo,
    const Archive *archive, Int64s stop, Int64s done, Int8s *best);
