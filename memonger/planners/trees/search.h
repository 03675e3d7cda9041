/* Simulated annealing of trees; see search.py. */
#pragma once

#include "planners/trees/price.h"

/* The limits of a tree. ``by_work``: whether a search minimises the work, not the memory. */
typedef struct {
    int64_t most_bytes;
    double most_work;
    bool by_work;
} Limits;

/* Anneals a tree (anneal); ``best`` is the best tree that it visits. */
KERNEL void anneal_trees(
    Memory *memory, const Problem *b, Int32s tree, const Limits *limits, const Cooling *cooling,
    const Memo *memo, const Archive *archive, Int64s stop, Int64s done, Int32s *best);
