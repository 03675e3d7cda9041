#include "costs/replay.h"

void find_entries(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s entry, Int32s row, Int32s owner,
    Int32s *result)
{
    int32_t copies = t->output_start.at[t->forward];
    *result = int32s(memory, entry.count);
    for (int64_t k = 0; k < entry.count; k++)
        result->at[k] = as_read(recomputed.at, copies, entry.at[k], row.at[k], owner.at[k]);
}

Int32s find_read_entries(Memory *memory, const GraphArrays *t, Bools recomputed)
{
    int32_t copies = t->output_start.at[t->forward];
    Int32s entries = int32s(memory, t->read_row.count);
    for (int64_t k = 0; k < entries.count; k++) {
        int32_t row = t->read_row.at[k];
        int32_t entry = row < 0 ? 0 : t->output_start.at[row] + t->read_output.at[k];
        entries.at[k] = as_read(recomputed.at, copies, entry, row, t->read_owner.at[k]);
    }
    return entries;
}

Int32s find_head_entries(Memory *memory, const GraphArrays *t, Bools recomputed)
{
    Int32s entries;
    find_entries(memory, t, recomputed, t->head_entry, t->head_row, t->head_owner, &entries);
    return entries;
}

void order_and_reads(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *order, Int32s *reads)
{
    int32_t n = (int32_t)t->forward, copies = t->output_start.at[n];
    const bool *is_recomputed = recomputed.at;
    const int32_t *before_start = t->before_start.at, *use_start = t->use_start.at;
    *order = int32s(memory, t->first.count + t->walk_row.count + n);
    *reads = int32s(memory, t->reads.count);
    int32_t *run = order->at, *read = reads->at;
    int64_t count = t->first.count;
    COPY(run, t->first.at, count);
    COPY(read, t->reads.at, t->reads.count);
    Memory then = *memory;
    bool *done = NEW(memory, bool, n); /* or never done */
    for (int32_t x = 0; x < n; x++) {
        done[x] = !is_recomputed[x];
        if (done[x])
            continue;
        for (int32_t q = t->recomputed_start.at[x]; q < t->recomputed_start.at[x + 1]; q++) {
            if (is_recomputed[t->recomputed_row.at[q]]) {
                read[t->recomputed_entry.at[q]]--;
                read[t->recomputed_entry.at[q] + copies]++;
            }
        }
    }
    int32_t *stack = NEW(memory, int32_t, n), *next = NEW(memory, int32_t, n);
    COPY(next, before_start, n);
    for (int64_t i = 0; i < t->walk_row.count; i++) {
        int32_t row = t->walk_row.at[i], depth = 0;
        if (row >= n) {
            run[count++] = row;
            continue;
        }
        if (done[row] || !is_recomputed[t->walk_owner.at[i]])
            continue;
        done[row] = true;
        stack[0] = row;
        while (depth >= 0) {
            int32_t x = stack[depth];
            if (next[x] < before_start[x + 1]) {
                int32_t before = t->before_row.at[next[x]++];
                if (!done[before]) {
                    done[before] = true;
                    stack[++depth] = before;
                }
                continue;
            }
            depth--;
            run[count++] = x + n;
            for (int32_t q = use_start[x]; q < use_start[x + 1]; q++)
                read[t->use_entry.at[q] + (is_recomputed[t->use_row.at[q]] ? copies : 0)]++;
        }
    }
    give_back(memory, then);
    order->count = count;
}

/* The free blocks: a queue for each rank of a size, from the oldest to the newest. */
typedef struct {
    int32_t *oldest, *newest; /* by rank, of queues that are not empty */
    int32_t *next, *before;   /* by block; -1 at the end */
    uint64_t *any;            /* one bit for each rank: whether its queue has a block */
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

/* Finds the smallest rank from ``first`` on with a free block; ``stop`` if there is none before. */
static inline int32_t find_smallest(const Free *free, int32_t first, int32_t stop)
{
    for (int32_t rank = first; rank < stop; rank = (rank / 64 + 1) * 64) {
        uint64_t left = free->any[rank / 64] >> rank % 64;
        if (left)
            return (int32_t)min(stop, rank + __builtin_ctzll(left));
    }
    return stop;
}

/* Finds the largest rank down from ``first`` with a free block; -1 if there is none to ``last``. */
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

/* The pool while memory is planned. */
typedef struct {
    const GraphArrays *t;
    const int32_t *reads; /* by entry: how often it is read */
    int32_t *block;       /* by entry */
    int32_t *rank;        /* by block: that of its size */
    int32_t *pending;     /* by block: the reads that are still to come */
    int32_t *smallest, *largest; /* by rank: a block for it has smallest <= rank < largest */
    Free free;
    int32_t blocks;
    int64_t bytes;
} Pool;

/* Gives an input's memory to an output that may have it. */
static inline void take_over(Pool *p, int32_t out, int32_t input, bool identity)
{
    if (p->block[out] != UNASSIGNED || p->reads[out] == 0)
        return;
    int32_t block = p->block[input];
    if (block >= 0 && (p->pending[block] == 1 || identity)) {
        p->block[out] = block;
        p->pending[block] += p->reads[out];
    }
}

/* Gives a block to an output that has none. */
static inline void get_block(Pool *p, int32_t out)
{
    const int64_t *sizes = p->t->sizes.at;
    int32_t rank = p->t->rank.at[out], block;
    if (p->block[out] != UNASSIGNED)
        return;
    int32_t other = find_smallest(&p->free, rank, p->largest[rank]);
    if (other < p->largest[rank]) { /* the oldest of those that are large enough */
        block = take_block(&p->free, other, false);
    } else { /* or else the newest of those that are not */
        other = find_largest(&p->free, rank - 1, p->smallest[rank]);
        block = other >= 0 ? take_block(&p->free, other, true) : p->blocks++;
        p->rank[block] = rank;
        p->bytes += sizes[rank] - (other >= 0 ? sizes[other] : 0);
    }
    p->pending[block] = p->reads[out];
    p->block[out] = block;
}

/* Frees the block of an entry if all its reads have come, ``reads`` of them just now. */
static inline void free_read(Pool *p, int32_t entry, int32_t reads)
{
    int32_t block = p->block[entry];
    if (block >= 0 && (p->pending[block] -= reads) == 0)
        put(&p->free, p->rank[block], block);
}

/* Plans the memory of one row; of its outputs the largest first. */
static inline void plan_row(Pool *p, const bool *recomputed, int32_t row)
{
    const GraphArrays *t = p->t;
    int32_t copies = t->output_start.at[t->forward];
    int32_t first = t->output_start.at[row], last = t->output_start.at[row + 1];
    for (int32_t q = t->inplace_start.at[row]; q < t->inplace_start.at[row + 1]; q++) {
        int32_t owner = t->inplace_owner.at[q], source = t->inplace_row.at[q];
        int32_t input = as_read(recomputed, copies, t->inplace_entry.at[q], source, owner);
        take_over(p, t->inplace_output.at[q], input, t->inplace_identity.at[q]);
    }
    for (int32_t m = first; m < last; m++)
        get_block(p, t->by_size.at[m]);
    for (int32_t j = t->use_start.at[row]; j < t->use_start.at[row + 1]; j++) {
        int32_t owner = t->use_owner.at[j], source = t->use_row.at[j];
        free_read(p, as_read(recomputed, copies, t->use_entry.at[j], source, owner), 1);
    }
    for (int32_t out = first; out < last; out++)
        free_read(p, out, 0);
}

int64_t allocate(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Int32s reads,
    int64_t match_range, double limit, Int32s *block)
{
    int32_t entries = (int32_t)t->elements.count, ranks = (int32_t)t->sizes.count;
    const int64_t *sizes = t->sizes.at;
    *block = int32s(memory, entries);
    Memory then = *memory;
    Pool p = {
        .t = t, .reads = reads.at, .block = block->at,
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
    for (int64_t h = t->outputs; h < t->head_row.count; h++) {
        int32_t row = t->head_row.at[h], owner = t->head_owner.at[h];
        int32_t copies = t->output_start.at[t->forward], entry = t->head_entry.at[h];
        p.block[as_read(recomputed.at, copies, entry, row, owner)] = EXTERNAL;
    }
    for (int32_t rank = 0, low = 0, high = 0; rank < ranks; rank++) {
        while (match_range && sizes[low] < sizes[rank] / match_range)
            low++;
        while (match_range && high < ranks && sizes[high] <= sizes[rank] * match_range)
            high++;
        p.smallest[rank] = match_range ? low : rank;
        p.largest[rank] = match_range ? high : rank;
    }
    for (int64_t i = 0; i < order.count && !(p.bytes > limit); i++) {
        int32_t row = order.at[i];
        if (!t->variable.at[row])
            plan_row(&p, recomputed.at, row);
    }
    give_back(memory, then);
    return p.bytes;
}

int64_t allocate_least(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Int32s reads,
    Int64s match_ranges, double limit, Int32s *block)
{
    int64_t least = 0;
    for (int64_t k = 0; k < match_ranges.count; k++) {
        Int32s blocks;
        int64_t range = match_ranges.at[k];
        int64_t pool = allocate(memory, t, recomputed, order, reads, range, limit, &blocks);
        if (k == 0 || pool < least) {
            least = pool;
            *block = blocks;
        }
    }
    return least;
}

void add_in_place(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Bools adding,
    Int32s planned, Int32s *block)
{
    int64_t rows = t->variable.count, entries = planned.count, sums = 0;
    *block = int32s(memory, entries);
    COPY(block->at, planned.at, entries);
    for (int64_t i = 0; i < order.count; i++)
        sums += adding.at[order.at[i]];
    if (!sums)
        return;
    Memory then = *memory;
    const int32_t *read = find_read_entries(memory, t, recomputed).at;
    Int32s heads = find_head_entries(memory, t, recomputed);
    int32_t *reads = ZEROS(memory, int32_t, entries); /* ignored ones too */
    int32_t *place = ZEROS(memory, int32_t, rows);
    for (int64_t h = 0; h < heads.count; h++)
        reads[heads.at[h]]++;
    for (int32_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        place[row] = i;
        for (int32_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++)
            reads[read[j]]++;
    }
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        if (!adding.at[row])
            continue;
        int32_t j = t->read_start.at[row], sum = read[j], term = read[j + 1];
        int32_t of_sum = find_row(t, recomputed.at, j), of_term = find_row(t, recomputed.at, j + 1);
        bool in_place = planned.at[sum] == planned.at[t->output_start.at[row]];
        bool computed = !t->variable.at[of_sum] && !t->variable.at[of_term];
        if (in_place && computed && reads[term] == 1 && place[of_sum] < place[of_term])
            block->at[term] = planned.at[sum];
    }
    give_back(memory, then);
}
