/* Simulated annealing; see annealing.py. */
#pragma once

#include "support/kernels.h"

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

/* How long annealing is, and its first and last temperature. */
typedef struct {
    int64_t seed, tries;
    double hot, cold;
    double unit; /* of the temperatures; 0: the least cost so far */
} Cooling;

/* What a state costs. Of equal costs the lower ``second`` is less. */
typedef struct {
    double cost, second;
    int64_t pool;
    double seconds; /* or work */
} Price;

/* A search: its moves, and what they cost. */
typedef struct Search Search;
struct Search {
    /* Returns a changed copy of a state, taken from ``memory``, or the state itself. */
    Bytes (*change)(Memory *memory, const Search *search, Random *random, Bytes state);
    /* Prices a state; false if it costs more than ``most``. */
    bool (*price)(
        Memory *memory, const Search *search, Bytes state, double most, const Memo *memo,
        Price *price);
    bool skips_unchanged;     /* a state that is not changed takes no draw */
    const void *space, *goal; /* of the two functions */
    int64_t room;             /* the bytes of the longest state */
};

/* Anneals a state, and returns the best that was visited.
 *
 * The archive receives what is visited, ``memo`` what it costs. The search ends when the element of
 * ``stop``, which another thread may set, is not 0; that of ``done`` counts the tries.
 */
Bytes anneal(
    Memory *memory, const Search *search, Bytes start, const Cooling *cooling, const Memo *memo,
    const Archive *archive, Int64s stop, Int64s done);

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
