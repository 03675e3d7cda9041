#include "support/kernels.h"

#include <setjmp.h>
#include <stdlib.h>

struct Chunk {
    Chunk *previous;
    int64_t size;
    char bytes[] __attribute__((aligned(16)));
};

/* Bytes of the smallest chunk. With a memory checker every piece is a chunk of its own, because the
 * checker finds accesses beyond a chunk, but not beyond a piece of it. */
#ifdef __SANITIZE_ADDRESS__
static const int64_t MIN_CHUNK = 1;
#else
static const int64_t MIN_CHUNK = 1 << 20;
#endif

void fail(Memory *memory, int status)
{
    Memory *outer = memory->outer ? memory->outer : memory;
    if (outer->inner)
        give_back(outer->inner, (Memory){0});
    longjmp(*(jmp_buf *)outer->ended, status);
}

void *take(Memory *memory, int64_t size, int64_t count)
{
    Chunk *last = memory->last;
    int64_t bytes;
    if (__builtin_mul_overflow(size, count, &bytes) || bytes < 0 || bytes > INT64_MAX / 4)
        fail(memory, NO_MEMORY);
    int64_t aligned = (bytes + 15) & ~(int64_t)15;
    if (MIN_CHUNK == 1 || !last || memory->used + aligned > last->size) {
        int64_t room = max(aligned, last ? 2 * last->size : 0);
        room = MIN_CHUNK == 1 ? max(bytes, 1) : max(room, MIN_CHUNK);
        last = malloc(sizeof(Chunk) + (size_t)room);
        if (!last)
            fail(memory, NO_MEMORY);
        last->previous = memory->last;
        last->size = room;
        memory->last = last;
        memory->used = 0;
    }
    void *piece = last->bytes + memory->used;
    memory->used += aligned;
    return piece;
}

void *take_zeros(Memory *memory, int64_t size, int64_t count)
{
    return memset(take(memory, size, count), 0, (size_t)(size * count));
}

void give_back(Memory *memory, Memory then)
{
    while (memory->last != then.last) {
        Chunk *last = memory->last;
        memory->last = last->previous;
        free(last);
    }
    memory->used = then.used;
}

void seed(Random *random, uint32_t number)
{
    for (int i = 0; i < 624; i++) {
        random->state[i] = number;
        number = 1812433253u * (number ^ (number >> 30)) + (uint32_t)i + 1;
    }
    random->next = 624;
}

static uint32_t bits(Random *random)
{
    uint32_t *state = random->state;
    if (random->next == 624) {
        for (int i = 0; i < 624; i++) {
            uint32_t both = (state[i] & 0x80000000u) | (state[(i + 1) % 624] & 0x7fffffffu);
            state[i] = state[(i + 397) % 624] ^ (both >> 1) ^ (both & 1 ? 0x9908b0dfu : 0);
        }
        random->next = 0;
    }
    uint32_t y = state[random->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

double uniform(Random *random)
{
    uint32_t high = bits(random) >> 5, low = bits(random) >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
}

int64_t below(Random *random, int64_t limit)
{
    if (limit <= 1)
        return 0;
    uint32_t mask = 0xffffffffu >> __builtin_clz((uint32_t)(limit - 1));
    while (true) {
        int64_t drawn = bits(random) & mask;
        if (drawn < limit)
            return drawn;
    }
}
