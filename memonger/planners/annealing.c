#include "planners/annealing.h"

/* As they were called before glibc 2.29, so that a wheel runs with 2.17 too. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#endif
#ifdef FIRST
__asm__(".symver log,log@" FIRST "\n.symver pow,pow@" FIRST);
#endif

double acceptable(double current, double hot, double cold, double done, double draw)
{
    return current - hot * pow(cold / hot, done) * log(1 - draw);
}

void record(
    Memory *memory, const Archive *archive, int64_t pool, double seconds, Bytes state)
{
    int64_t bins = archive->pools.count, row = archive->states.count / bins;
    if (state.count > row)
        fail(memory, MISFIT);
    if (pool > archive->most)
        return;
    int64_t k = pool > 0 ? (pool * bins - 1) / archive->most : 0;
    int64_t *known_pool = &archive->pools.at[k];
    double *known = &archive->seconds.at[k];
    if (seconds < *known || (seconds == *known && pool < *known_pool)) {
        *known_pool = pool;
        *known = seconds;
        COPY(archive->states.at + k * row, state.at, state.count);
    }
}

int64_t slot_of(const Known *known, uint64_t hash)
{
    int64_t slot = (int64_t)((hash ^ hash >> 32) % (uint64_t)known->keys.count);
    if (known->keys.at[slot] != hash) {
        known->keys.at[slot] = hash;
        known->pools.at[slot] = -1;
        known->limits.at[slot] = -1;
    }
    return slot;
}
