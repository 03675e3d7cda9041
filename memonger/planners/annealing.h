/* Simulated annealing; see annealing.py. */
#pragma once

#include "support/kernels.h"

#define MORE 0.3 /* the probability of one more change in a step */

typedef struct {
    int64_t most;
    Int64s pools;
    Doubles seconds;
    Bytes states;
} Archive;

typedef struct {
    UInt64s keys;
    Int64s pools;
    Doubles limits, others;
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
