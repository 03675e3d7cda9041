#include "costs/placement.h"

static const double HEAT = 0.08; /* the share of the goal that an early change may add */
enum { LANES = 32 };             /* blocks that are compared at once, by vector instructions */

typedef struct {
    int64_t low, high; /* the offsets of its first byte and of the first byte behind it */
    int32_t item;
} Block;

typedef struct {
    Block *blocks;         /* sorted by offset */
    int32_t *start, *stop; /* the first and the last step in which each is alive; and LANES more */
    int64_t count, nbytes;
} Arena;

/* The items to place. */
typedef struct {
    const int32_t *start, *stop;
    const int64_t *nbytes;
} Items;

static Arena empty_arena(Memory *memory, int64_t room)
{
    return (Arena){
        .blocks = NEW(memory, Block, room),
        .start = ZEROS(memory, int32_t, room + LANES),
        .stop = ZEROS(memory, int32_t, room + LANES),
    };
}

/* Finds the lowest offset at which an item fits; returns how many blocks are below that gap. */
static int64_t find_gap(
    const Arena *arena, int32_t start, int32_t stop, int64_t nbytes, int64_t *low)
{
    *low = 0;
    for (int64_t k = 0; k < arena->count; k += LANES) {
        bool beside[LANES]; /* whether they are alive at the same time */
        for (int64_t i = 0; i < LANES; i++)
            beside[i] = (arena->start[k + i] <= stop) & (arena->stop[k + i] >= start);
        for (int64_t i = 0; i < LANES; i += 8) { /* as one number, because few of 8 are */
            uint64_t eight;
            for (memcpy(&eight, beside + i, 8); eight; eight &= eight - 1) {
                int64_t other = k + i + __builtin_ctzll(eight) / 8;
                if (other >= arena->count)
                    break;
                if (arena->blocks[other].low - *low >= nbytes)
                    return other;
                *low = max(*low, arena->blocks[other].high);
            }
        }
    }
    return arena->count;
}

#define INSERT(array, place, count, value) \
    memmove((array) + (place) + 1, (array) + (place), sizeof *(array) * (size_t)(count)); \
    (array)[place] = value

/* Places an item at the lowest free offset; returns how many blocks it has compared. */
static int64_t put(Arena *arena, const Items *items, int32_t item)
{
    int32_t start = items->start[item], stop = items->stop[item];
    int64_t nbytes = items->nbytes[item], low, k = find_gap(arena, start, stop, nbytes, &low);
    int64_t place = k;
    while (place && arena->blocks[place - 1].low > low)
        place--;
    Block block = {low, low + nbytes, item};
    int64_t behind = arena->count++ - place;
    INSERT(arena->blocks, place, behind, block);
    INSERT(arena->start, place, behind, start);
    INSERT(arena->stop, place, behind, stop);
    arena->nbytes = max(arena->nbytes, block.high);
    return k;
}

/* Copies the blocks whose rank, their position in the order, is less than ``ranks``. */
static void copy_first(Arena *arena, const Arena *from, const int32_t *rank, int64_t ranks)
{
    arena->count = arena->nbytes = 0;
    for (int64_t k = 0; k < from->count; k++)
        if (rank[from->blocks[k].item] < ranks) {
            arena->blocks[arena->count] = from->blocks[k];
            arena->start[arena->count] = from->start[k];
            arena->stop[arena->count++] = from->stop[k];
            arena->nbytes = max(arena->nbytes, from->blocks[k].high);
        }
}

/* Draws an item that is alive at the same time as this one, perhaps the item itself. */
static int32_t choose_beside(const Arena *arena, const Items *items, int32_t item, Random *random)
{
    for (;;) {
        int64_t k = below(random, arena->count);
        if (arena->stop[k] >= items->start[item] && arena->start[k] <= items->stop[item])
            return arena->blocks[k].item;
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
    const Items items = {start.at, stop.at, nbytes.at};
    int32_t *order = NEW(memory, int32_t, large), *rank = NEW(memory, int32_t, large);
    Arena best = empty_arena(memory, count);
    Arena now = empty_arena(memory, large), next = empty_arena(memory, large);
    Random random = {0};
    for (int32_t k = 0; k < large; k++) {
        order[k] = rank[k] = k;
        put(&now, &items, k);
    }
    copy_first(&best, &now, rank, large);
    while (best.nbytes > goal && work < effort) {
        int64_t high = 0, chosen = 0; /* draws one of the items above the goal */
        for (int64_t k = 0; k < large; k++)
            if (now.blocks[k].high > goal && below(&random, ++high) == 0)
                chosen = k;
        int32_t item = now.blocks[chosen].item;
        if (uniform(&random) < 0.3)
            item = choose_beside(&now, &items, item, &random);
        int64_t from = rank[item], to = rank[choose_beside(&now, &items, item, &random)];
        int64_t first = min(from, to);
        double heat = HEAT * (1 - (double)work / (double)effort) * uniform(&random);
        int64_t limit = now.nbytes + (int64_t)(heat * (double)goal);
        copy_first(&next, &now, rank, first);
        move(order, rank, from, to);
        for (int64_t k = first; k < large && next.nbytes <= limit; k++)
            work += 30 + put(&next, &items, order[k]);
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
        put(&best, &items, k);
    for (int64_t k = 0; k < count; k++)
        offset->at[best.blocks[k].item] = best.blocks[k].low;
    give_back(memory, then);
}
