/* Simulated annealing of trees; see search.py. */
#pragma once

#include "planners/trees/price.h"

/* The most that a tree may cost; ``by_work``: the work is made small instead of the memory. */
typedef struct {
    int64_t most_bytes;
    double most_work;
    bool by_work;
} Limits;

/* Anneals a tree; ``best`` is the best that was visited.
 *
 * ``hot`` and ``cold`` are the temperatures at the beginning and at the end, as shares of the cost.
 * The archive receives what is visited, ``memo`` what it costs. The search ends when the element
 * of ``stop``, which another thread may set, is not 0; that of ``done`` counts the tries.
 */
KERNEL void anneal_trees(
    Memory *memory, const Problem *b, Int32s tree, const Limits *limits, int64_t seed_number,
    int64_t tries, double hot, double cold, const Memo *memo, const Archive *archive,
    Int64s stop, Int64s done, Int32s *best);
