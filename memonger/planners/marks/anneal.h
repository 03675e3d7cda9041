/* Simulated annealing of recomputation masks; see anneal.py. */
#pragma once

#include "planners/annealing.h"
#include "planners/marks/rules.h"

typedef struct {
    RuleArrays rules;
    Int64s match_ranges, after, keep_start, keep, flippable;
    Doubles seconds;
    Bools costly;
    Int64s copied, copies;
    Doubles copy_seconds;
} Space;

typedef struct {
    double limit, byte_price, second_price, flipping;
    bool by_node;
} Goal;

/* Tells the nodes that a state recomputes by the rules, and what obey tells of them. */
KERNEL void plan_of(
    Memory *memory, const Space *s, Int8s state, Bools *mask, Int32s *order, Int32s *reads);

/* Tells the bytes that a state costs, and the seconds that it adds. */
KERNEL int64_t evaluate_state(Memory *memory, const Space *s, Int8s state, double *seconds);

/* Tells the state that names what a plan does with each node. */
KERNEL void named(Memory *memory, const Space *s, Bools mask, Int8s *state);

/* Anneals a state in place, to the one of least energy that was visited.
 *
 * ``hot`` and ``cold`` are the temperatures at the beginning and at the end, in units of the
 * energy. The archive receives what is visited, ``known`` what is replayed. The search ends when
 * the element of ``stop``, which another thread may set, is not 0; that of ``done`` counts the
 * tries. Returns the energy.
 */
KERNEL double anneal_masks(
    Memory *memory, const Space *s, Int8s state, const Goal *goal, int64_t seed_number,
    int64_t tries, double hot, double cold, const Known *known, const Archive *archive,
    Int64s stop, Int64s done);
