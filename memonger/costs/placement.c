#include "costs/placement.h"

static const double HEAT = 0.08; /* the share of the goal that an early change may add */

typedef struct {
    int32_t item, start, stop; /* start, stop: the first and the last step in which it is alive */
    int64_t low, high;         /* the offsets of its first byte and of the first byte behind it */
} Block;

typedef struct {
    Block *blocks; /* sorted by offset */
    int64_t count, nbytes;
} Arena;

/* Places an item at the lowest free offset; returns how many blocks it has compared. */
static int64_t put(Arena *arena, Block block, int64_t nbytes)
{
    int64_t k = 0, place;
    block.low = 0;
    for (; k < arena->count; k++) {
        const Block *other = &arena->blocks[k];
        if (other->stop < block.start || other->start > block.stop)
            continue;
        if (other->low - block.low >= nbytes)
            break;
        block.low = max(block.low, other->high);
    }
    block.high = block.low + nbytes;
    for (place = k; place && arena->blocks[place - 1].low > block.low;)
        place--;
    Block *target = arena->blocks + place;
    memmove(target + 1, target, sizeof(Block) * (size_t)(arena->count++ - place));
    *target = block;
    arena->nbytes = max(arena->nbytes, block.high);
    return k;
}

/* Copies the blocks whose rank, their position in the order, is less than ``ranks``. */
static void copy_first(Arena *arena, const Arena *from, const int32_t *rank, int64_t ranks)
{
    arena->count = arena->nbytes = 0;
    for (int64_t k = 0; k < from->count; k++)
        if (rank[from->blocks[k].item] < ranks) {
            arena->blocks[arena->count++] = from->blocks[k];
            arena->nbytes = max(arena->nbytes, from->blocks[k].high);
        }
}

/* Draws a block that is alive at the same time as this one, perhaps the block itself. */
static Block choose_beside(const Arena *arena, Block block, Random *random)
{
    for (;;) {
        Block other = arena->blocks[below(random, arena->count)];
        if (other.stop >= block.start && other.start <= block.stop)
            return other;
    }
}

/* Moves an item in the order; the items between move by one. */
static void move(int32_t *order, int32_t *rank, int64_t from, int64_t to)
{
    int32_t item = order[from];
    for (int64_t step = from < to ? 1 : -1; from != to; from += step)
        rank[order[from] = order[from + step]] = (int32_t)from;
    rank[order[to] = item] = (int32_t)to;
}

void place(
    Memory *memory, Int32s start, Int32s stop, Int64s nbytes, int64_t large, int64_t goal,
    int64_t effort, Int64s *offset)
{
    int64_t count = nbytes.count, work = 0;
    *offset = int64s(memory, count);
    Memory then = *memory;
    int32_t *order = NEW(memory, int32_t, large), *rank = NEW(memory, int32_t, large);
    Arena best = {NEW(memory, Block, count), 0, 0};
    Arena now = {NEW(memory, Block, large), 0, 0}, next = {NEW(memory, Block, large), 0, 0};
    Random random;
    seed(&random, 0);
#define BLOCK(item) ((Block){item, start.at[item], stop.at[item], 0, 0})
    for (int32_t k = 0; k < large; k++) {
        order[k] = rank[k] = k;
        put(&now, BLOCK(k), nbytes.at[k]);
    }
    copy_first(&best, &now, rank, large);
    while (best.nbytes > goal && work < effort) {
        int64_t high = 0, chosen = 0; /* draws one of the items above the goal */
        for (int64_t k = 0; k < large; k++)
            if (now.blocks[k].high > goal && below(&random, ++high) == 0)
                chosen = k;
        Block item = now.blocks[chosen];
        if (uniform(&random) < 0.3)
            item = choose_beside(&now, item, &random);
        int64_t from = rank[item.item], to = rank[choose_beside(&now, item, &random).item];
        int64_t first = min(from, to);
        double heat = HEAT * (1 - (double)work / (double)effort) * uniform(&random);
        int64_t limit = now.nbytes + (int64_t)(heat * (double)goal);
        copy_first(&next, &now, rank, first);
        move(order, rank, from, to);
        for (int64_t k = first; k < large && next.nbytes <= limit; k++)
            work += 30 + put(&next, BLOCK(order[k]), nbytes.at[order[k]]);
        work += 8 * large;
        if (next.nbytes > limit) {
            move(order, rank, to, from);
            continue;
        }
        Arena before = now;
        now = next;
        next = before;
        if (now.nbytes < best.nbytes)
            copy_first(&best, &now, rank, large);
    }
    for (int32_t k = (int32_t)large; k < count; k++)
        put(&best, BLOCK(k), nbytes.at[k]);
    for (int64_t k = 0; k < count; k++)
        offset->at[best.blocks[k].item] = best.blocks[k].low;
    give_back(memory, then);
}
