/* Simulated annealing; see annealing.py. */
#pragma once

#include "support/kernels.h"

/* The fastest plan of each size: plan k of n takes at most (k + 1) / n of ``most_bytes``. */
typedef struct {
    int64_t most_bytes;
    Int64s pools;
    Doubles seconds; /* or work, of a search of trees */
    Bytes states;    /* of equal size; the bytes behind a shorter state are undefined */
} Archive;

/* A cache of the costs of plans, by hash. A plan replaces another one that has the same slot. */
typedef struct {
    UInt64s keys;
    Int64s pools;    /* bytes; OVER_LIMIT: more than the limit */
    Doubles limits;  /* bytes: the limit of the evaluation; UNPRICED: the slot is empty */
    Doubles seconds; /* of marks: the time that the plan adds to a step */
} Memo;

enum { OVER_LIMIT = -1, UNPRICED = -1 };

/* The number of tries of an annealing, and its first and last temperature. */
typedef struct {
    int64_t seed, tries;
    double hot, cold;
    double unit; /* the cost that a temperature of 1 is; 0: the least cost so far */
} Cooling;

/* The cost of a state. Of states with equal costs, that with the lower ``second`` is better. */
typedef struct {
    double cost, second;
    int64_t pool;
    double seconds; /* or work, of a search of trees */
} Price;

/* A search: its moves, and the price of a state. */
typedef struct Search Search;
struct Search {
    /* Returns a changed copy of a state, taken from ``memory``, or the state itself. */
    Bytes (*change)(Memory *memory, const Search *search, Random *random, Bytes state);
    /* Computes the price of a state; returns false if it costs more than ``most``. */
    bool (*price)(
        Memory *memory, const Search *search, Bytes state, double most, const Memo *memo,
        Price *price);
    bool skips_unchanged;     /* whether an unchanged state ends a try before the next draw */
    const void *space, *goal; /* arguments of the two functions */
    int64_t room;             /* the bytes of the longest state */
};

/* Anneals a state, and returns the best state that it visits.
 *
 * The archive receives the accepted states, ``memo`` the costs of all that are priced. Another
 * thread may set the element of ``stop``, which ends the search. That of ``done`` counts the tries.
 */
Bytes anneal(
    Memory *memory, const Search *search, Bytes start, const Cooling *cooling, const Memo *memo,
    const Archive *archive, Int64s stop, Int64s done);

/* Archives a plan if it is the fastest of its size. Its state must not be longer than those of the
 * archive. */
KERNEL void record(
    Memory *memory, const Archive *archive, int64_t pool, double seconds, Bytes state);

/* The hash of a plan (Fowler, Noll and Vo), from the kind of its evaluation and its integers. */
static inline uint64_t hash_of(int64_t kind) { return 14695981039346656037u ^ (uint64_t)kind; }
static inline uint64_t hash_with(uint64_t hash, int64_t item)
{
    return (hash ^ (uint64_t)item) * 1099511628211u;
}

/* Returns the slot of a hash, and empties it if it belongs to another hash. */
int64_t find_slot(const Memo *memo, uint64_t hash);
