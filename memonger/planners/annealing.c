#include "planners/annealing.h"

#include <stdatomic.h>

/* Link log and pow of glibc before 2.29, so that a wheel runs with glibc 2.17 too. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#endif
#ifdef FIRST
__asm__(".symver log,log@" FIRST "\n.symver pow,pow@" FIRST);
#endif

#define MORE 0.3 /* the probability of one more change in a try */

/* Copies a state out of the memory of a try, which is given back. */
static void keep(Bytes *kept, Bytes state)
{
    COPY(kept->at, state.at, state.count);
    kept->count = state.count;
}

static bool is_same(Bytes a, Bytes b)
{
    return a.count == b.count && memcmp(a.at, b.at, (size_t)a.count) == 0;
}

static bool is_less(Price a, Price b)
{
    return a.cost < b.cost || (a.cost == b.cost && a.second < b.second);
}

Bytes anneal(
    Memory *memory, const Search *search, Bytes start, const Cooling *cooling, const Memo *memo,
    const Archive *archive, Int64s stop, Int64s done)
{
    int64_t room = max(start.count, search->room);
    Bytes now = {NEW(memory, char, room), 0}, best = {NEW(memory, char, room), 0};
    Price current, least, price;
    keep(&now, start);
    bool is_possible = search->price(memory, search, now, INFINITY, memo, &current);
    keep(&best, now);
    least = current;
    Random random = {(uint64_t)cooling->seed};
    Memory then = *memory;
    for (int64_t k = 0; is_possible && k < cooling->tries; k++, give_back(memory, then)) {
        if (atomic_load_explicit((_Atomic int64_t *)stop.at, memory_order_relaxed))
            break;
        atomic_fetch_add_explicit((_Atomic int64_t *)done.at, 1, memory_order_relaxed);
        Bytes new = search->change(memory, search, &random, now);
        while (uniform(&random) < MORE)
            new = search->change(memory, search, &random, new);
        if (search->skips_unchanged && is_same(new, now))
            continue;
        /* The most that the next state may cost (Metropolis), at a falling temperature. */
        double draw = uniform(&random), progress = (double)k / (double)cooling->tries;
        double unit = cooling->unit > 0 ? cooling->unit : least.cost;
        double hot = cooling->hot * unit, cold = cooling->cold * unit;
        double most = current.cost - hot * pow(cold / hot, progress) * log(1 - draw);
        if (!search->price(memory, search, new, most, memo, &price))
            continue;
        keep(&now, new);
        current = price;
        record(memory, archive, price.pool, price.seconds, now);
        if (is_less(price, least)) {
            keep(&best, now);
            least = price;
        }
    }
    return best;
}

void record(
    Memory *memory, const Archive *archive, int64_t pool, double seconds, Bytes state)
{
    int64_t bins = archive->pools.count, room = archive->states.count / bins;
    if (state.count > room)
        fail(memory, MISFIT);
    if (pool > archive->most_bytes)
        return;
    int64_t k = pool > 0 ? (pool * bins - 1) / archive->most_bytes : 0;
    int64_t *old_pool = &archive->pools.at[k];
    double *old_seconds = &archive->seconds.at[k];
    if (seconds < *old_seconds || (seconds == *old_seconds && pool < *old_pool)) {
        *old_pool = pool;
        *old_seconds = seconds;
        COPY(archive->states.at + k * room, state.at, state.count);
    }
}

int64_t find_slot(const Memo *memo, uint64_t hash)
{
    int64_t slot = (int64_t)((hash ^ hash >> 32) % (uint64_t)memo->keys.count);
    if (memo->keys.at[slot] != hash) {
        memo->keys.at[slot] = hash;
        memo->pools.at[slot] = OVER_LIMIT;
        memo->limits.at[slot] = UNPRICED;
    }
    return slot;
}
