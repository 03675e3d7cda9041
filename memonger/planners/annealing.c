#include "planners/annealing.h"

/* The versions of log and pow from before glibc 2.29, so that a wheel runs with 2.17 too. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#endif
#ifdef FIRST
__asm__(".symver log,log@" FIRST "\n.symver pow,pow@" FIRST);
#endif

double acceptable(double current, double hot, double cold, double progress, double draw)
{
    return current - hot * pow(cold / hot, progress) * log(1 - draw);
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
