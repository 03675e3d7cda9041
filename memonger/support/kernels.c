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

static uint64_t draw(Random *random)
{
    uint64_t bits = random->state += 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return bits ^ bits >> 31;
}

double uniform(Random *random)
{
    return (double)(draw(random) >> 11) * 0x1p-53;
}

int64_t below(Random *random, int64_t limit)
{
    return (int64_t)((draw(random) >> 32) * (uint64_t)limit >> 32);
}
