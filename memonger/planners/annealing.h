/* Simulated annealing; see annealing.py. */
#pragma once

#include <stdatomic.h>

#include "support/kernels.h"

#define MORE 0.3 /* the probability of one more change in a step */

/* The fastest plan of each size; of n, plan k needs at most k + 1 n-ths of ``most`` bytes. */
typedef struct {
    int64_t most;
    Int64s pools;
    Doubles seconds; /* or work */
    Bytes states;    /* of each plan; what follows a state that is shorter means nothing */
} Archive;

/* What plans cost, by their hash; one takes the place of another that has the same slot. */
typedef struct {
    UInt64s keys;
    Int64s pools;    /* bytes; -1: more than the limit */
    Doubles limits;  /* bytes; -1: nothing is known */
    Doubles others;  /* what else the search wants to know of a plan */
} Known;

/* Tells the most that the next state may cost, for a random number from 0 to 1 (Metropolis).
 *
 * The temperature falls from ``hot`` to ``cold``; ``done`` is the part of the tries that is over.
 */
double acceptable(double current, double hot, double cold, double done, double draw);

/* Takes a plan into the archive if it is the fastest of its size; its state must not be longer than
 * those of the archive. */
KERNEL void record(
    Memory *memory, const Archive *archive, int64_t pool, double seconds, Bytes state);

/* The hash of a plan (Fowler, Noll and Vo): start with the kind of its evaluation, go on with each
 * integer; then the slot for it, where nothing is known if it was another's. */
static inline uint64_t hash_of(int64_t kind) { return 14695981039346656037u ^ (uint64_t)kind; }
static inline uint64_t hash_with(uint64_t hash, int64_t item)
{
    return (hash ^ (uint64_t)item) * 1099511628211u;
}
int64_t slot_of(const Known *known, uint64_t hash);

/* Tells whether another thread has set the element of ``stop``; counts a try in that of ``done``. */
static inline bool is_stopped(Int64s stop)
{
    return atomic_load_explicit((_Atomic int64_t *)stop.at, memory_order_relaxed) != 0;
}
static inline void count_try(Int64s done)
{
    atomic_fetch_add_explicit((_Atomic int64_t *)done.at, 1, memory_order_relaxed);
}
