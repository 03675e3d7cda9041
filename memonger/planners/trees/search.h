/* Simulated annealing of trees; see search.py. */
#pragma once

#include "planners/trees/price.h"

/* What a tree may cost; ``by_work``: the least work is looked for instead of least memory. */
typedef struct {
    int64_t most_bytes;
    double most_work;
    bool by_work;
} Limits;

/* Anneals a tree, and tells the best that was visited.
 *
 * ``hot`` and ``cold`` are the temperatures at the beginning and at the end, as shares of the cost.
 * The archive receives what is visited, ``known`` what it costs. The search ends when the element
 * of ``stop``, which another thread may set, is not 0; that of ``done`` counts the tries.
 */
KERNEL void anneal_trees(
    Memory *memory, const Problem *b, Int32s tree, const Limits *limits, int64_t seed_number,
    int64_t tries, double hot, double cold, const Known *known, const Archive *archive,
    Int64s stop, Int64s done, Int32s *best);
