#include "costs/pool.h"

/* The free blocks: a queue for each size, from the oldest to the newest. */
typedef struct {
    int32_t *oldest, *newest; /* by rank of a size, if its queue is not empty */
    int32_t *next, *before;   /* by block; -1 at the end */
    uint64_t *any;            /* one bit for each rank: whether its queue is not empty */
} Free;

static inline void put(Free *free, int32_t rank, int32_t block)
{
    uint64_t *any = &free->any[rank / 64], bit = 1ull << rank % 64;
    int32_t newest = *any & bit ? free->newest[rank] : -1;
    *any |= bit;
    free->next[block] = -1;
    free->before[block] = newest;
    if (newest < 0)
        free->oldest[rank] = block;
    else
        free->next[newest] = block;
    free->newest[rank] = block;
}

static inline int32_t take_block(Free *free, int32_t rank, bool newest)
{
    int32_t *ends = newest ? free->newest : free->oldest;
    int32_t *inwards = newest ? free->before : free->next;
    int32_t block = ends[rank], end = ends[rank] = inwards[block];
    if (end < 0)
        free->any[rank / 64] &= ~(1ull << rank % 64);
    else
        (newest ? free->next : free->before)[end] = -1;
    return block;
}

/* Returns the smallest rank from ``first`` on with a free block; ``stop`` if none is below it. */
static inline int32_t find_smallest(const Free *free, int32_t first, int32_t stop)
{
    for (int32_t rank = first; rank < stop; rank = (rank / 64 + 1) * 64) {
        uint64_t left = free->any[rank / 64] >> rank % 64;
        if (left)
            return (int32_t)min(stop, rank + __builtin_ctzll(left));
    }
    return stop;
}

/* Returns the largest rank from ``first`` down to ``last`` with a free block; -1 if none has. */
static inline int32_t find_largest(const Free *free, int32_t first, int32_t last)
{
    for (int32_t rank = first; rank >= last; rank = rank / 64 * 64 - 1) {
        uint64_t left = free->any[rank / 64] << (63 - rank % 64);
        if (left) {
            rank -= __builtin_clzll(left);
            return rank < last ? -1 : rank;
        }
    }
    return -1;
}

/* The pool, while the rows get their memory in order. */
typedef struct {
    const GraphArrays *t;
    const Step *step;
    int32_t *block;       /* by entry */
    int32_t *rank;        /* by block: the rank of its size */
    int32_t *pending;     /* by block: how many reads are still to come */
    int32_t *smallest, *largest; /* by rank: a block for it has smallest <= rank < largest */
    Free free;
    int32_t blocks;
    int64_t bytes;
} Pool;

/* Gives a block to an output that has none. */
static inline void get_block(Pool *p, int32_t out)
{
    const int64_t *sizes = p->t->sizes.at;
    int32_t rank = p->t->rank.at[out], block;
    if (p->block[out] != UNASSIGNED)
        return;
    int32_t other = find_smallest(&p->free, rank, p->largest[rank]);
    if (other < p->largest[rank]) { /* the oldest block that is large enough */
        block = take_block(&p->free, other, false);
    } else { /* otherwise the newest smaller block, which grows */
        other = find_largest(&p->free, rank - 1, p->smallest[rank]);
        block = other >= 0 ? take_block(&p->free, other, true) : p->blocks++;
        p->rank[block] = rank;
        p->bytes += sizes[rank] - (other >= 0 ? sizes[other] : 0);
    }
    p->pending[block] = p->step->reads.at[out];
    p->block[out] = block;
}

/* Counts ``reads`` reads of an entry, and frees its block after the last. */
static inline void free_read(Pool *p, int32_t entry, int32_t reads)
{
    int32_t block = p->block[entry];
    if (block >= 0 && (p->pending[block] -= reads) == 0)
        put(&p->free, p->rank[block], block);
}

/* Plans the memory of the outputs of one row, the largest output first. */
static inline void plan_row(Pool *p, int32_t row)
{
    const GraphArrays *t = p->t;
    const int32_t *entry = p->step->entry.at;
    int32_t first = t->output_start.at[row], last = t->output_start.at[row + 1];
    for (int32_t q = t->inplace_start.at[row]; q < t->inplace_start.at[row + 1]; q++) {
        int32_t input = entry[t->inplace_read.at[q]], out = t->inplace_output.at[q];
        take_over(p->step->reads.at, p->block, p->pending, input, out, t->inplace_identity.at[q]);
    }
    for (int32_t m = first; m < last; m++)
        get_block(p, t->by_size.at[m]);
    for (int32_t q = t->pooled_start.at[row]; q < t->pooled_start.at[row + 1]; q++)
        if (t->read_holds.at[t->pooled_read.at[q]])
            free_read(p, entry[t->pooled_read.at[q]], 1);
    for (int32_t out = first; out < last; out++)
        if (!p->step->reads.at[out])
            free_read(p, out, 0);
}

int64_t allocate(
    Memory *memory, const GraphArrays *t, const Step *step, int64_t match_range, double limit,
    Int32s *block)
{
    int32_t entries = (int32_t)t->elements.count, ranks = (int32_t)t->sizes.count;
    const int64_t *sizes = t->sizes.at;
    *block = int32s(memory, entries);
    Memory then = *memory;
    Pool p = {
        .t = t, .step = step, .block = block->at,
        .rank = NEW(memory, int32_t, entries), .pending = NEW(memory, int32_t, entries),
        .smallest = NEW(memory, int32_t, ranks), .largest = NEW(memory, int32_t, ranks),
        .free = {
            NEW(memory, int32_t, ranks), NEW(memory, int32_t, ranks),
            NEW(memory, int32_t, entries), NEW(memory, int32_t, entries),
            ZEROS(memory, uint64_t, ranks / 64 + 1),
        },
    };
    for (int32_t entry = 0; entry < entries; entry++)
        p.block[entry] = UNASSIGNED;
    for (int64_t h = t->outputs; h < step->head.count; h++)
        p.block[step->head.at[h]] = EXTERNAL;
    for (int32_t rank = 0, low = 0, high = 0; rank < ranks; rank++) {
        while (match_range && sizes[low] < sizes[rank] / match_range)
            low++;
        while (match_range && high < ranks && sizes[high] <= sizes[rank] * match_range)
            high++;
        p.smallest[rank] = match_range ? low : rank;
        p.largest[rank] = match_range ? high : rank;
    }
    for (int64_t i = 0; i < step->order.count && !(p.bytes > limit); i++) {
        int32_t row = step->order.at[i];
        if (!t->variable.at[row])
            plan_row(&p, row);
    }
    give_back(memory, then);
    return p.bytes;
}

int64_t allocate_least(
    Memory *memory, const GraphArrays *t, const Step *step, Int64s match_ranges, double limit,
    Int32s *block)
{
    int64_t least = 0;
    for (int64_t k = 0; k < match_ranges.count; k++) {
        Int32s blocks;
        int64_t pool = allocate(memory, t, step, match_ranges.at[k], limit, &blocks);
        if (k == 0 || pool < least) {
            least = pool;
            *block = blocks;
        }
    }
    return least;
}

void add_in_place(
    Memory *memory, const GraphArrays *t, const Step *step, Bools adding, Int32s planned,
    Int32s *block)
{
    int64_t entries = planned.count, sums = 0;
    const int32_t *entry = step->entry.at;
    *block = int32s(memory, entries);
    COPY(block->at, planned.at, entries);
    for (int64_t i = 0; i < step->order.count; i++)
        sums += adding.at[step->order.at[i]];
    if (!sums)
        return;
    Memory then = *memory;
    int32_t *reads = ZEROS(memory, int32_t, entries); /* with reads of the shape alone */
    int32_t *made = ZEROS(memory, int32_t, entries);  /* 1 + position in the order; 0: variables */
    for (int64_t h = 0; h < step->head.count; h++)
        reads[step->head.at[h]]++;
    for (int32_t i = 0; i < step->order.count; i++) {
        int32_t row = step->order.at[i];
        for (int32_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++)
            reads[entry[j]]++;
        int32_t first = t->output_start.at[row], last = t->output_start.at[row + 1];
        for (int32_t out = first; out < last && !t->variable.at[row]; out++)
            made[out] = i + 1;
    }
    for (int64_t i = 0; i < step->order.count; i++) {
        int32_t row = step->order.at[i];
        if (!adding.at[row])
            continue;
        int32_t j = t->read_start.at[row], sum = entry[j], term = entry[j + 1];
        bool in_place = planned.at[sum] == planned.at[t->output_start.at[row]];
        if (in_place && reads[term] == 1 && made[sum] && made[sum] < made[term])
            block->at[term] = planned.at[sum];
    }
    give_back(memory, then);
}
