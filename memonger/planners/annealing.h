/* Simulated annealing; see annealing.py. */
#pragma once

#include <stdatomic.h>

#include "support/kernels.h"

#define MORE 0.3 /* the probability of one more change in a step */

/* The fastest plan of each size; of n, plan k needs at most k + 1 n-ths of ``most_bytes``. */
typedef struct {
    int64_t most_bytes;
    Int64s pools;
    Doubles seconds; /* or work */
    Bytes states;    /* of each plan; what follows a state that is shorter means nothing */
} Archive;

/* What plans cost, by their hash; one takes the place of another that has the same slot. */
typedef struct {
    UInt64s keys;
    Int64s pools;    /* bytes; OVER_LIMIT: more than the limit */
    Doubles limits;  /* bytes; UNPRICED: the slot is empty */
    Doubles seconds; /* of marks: what the plan adds to a step */
} Memo;

enum { OVER_LIMIT = -1, UNPRICED = -1 };

/* Returns the most that the next state may cost, for a random number from 0 to 1 (Metropolis).
 *
 * The temperature falls from ``hot`` to ``cold``; ``progress`` is the share of the tries that is
 * over.
 */
double acceptable(double current, double hot, double cold, double progress, double draw);

/* Takes a plan into the archive if it is the fastest of its size; its state must not be longer than
 * those of the archive. */
KERNEL void record(
    Memory *memory, const Archive *archive, int64_t pool, double seconds, Bytes state);

/* The hash of a plan (Fowler, Noll and Vo): start with the kind of its evaluation, go on with each
 * integer. */
static inline uint64_t hash_of(int64_t kind) { return 14695981039346656037u ^ (uint64_t)kind; }
static inline uint64_t hash_with(uint64_t hash, int64_t item)
{
    return (hash ^ (uint64_t)item) * 1099511628211u;
}

/* Finds the slot of a hash; it is emptied if it was another's. */
int64_t find_slot(const Memo *memo, uint64_t hash);

/* Returns whether another thread has set the element of ``stop``. */
static inline bool is_stopped(Int64s stop)
{
    return atomic_load_explicit((_Atomic int64_t *)stop.at, memory_order_relaxed) != 0;
}

/* Adds a try to the element of ``done``. */
static inline void count_try(Int64s done)
{
    atomic_fetch_add_explicit((_Atomic int64_t *)done.at, 1, memory_order_relaxed);
}
