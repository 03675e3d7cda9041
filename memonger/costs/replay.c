#include "costs/replay.h"

/* An entry as it is read for an operator ``owner``: of the copy where both are recomputed. */
static inline int32_t as_read(
    const bool *recomputed, int32_t copies, int32_t entry, int32_t row, int32_t owner)
{
    return owner != KEPT && recomputed[owner] && recomputed[row] ? entry + copies : entry;
}

void find_entries(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s entry, Int32s row, Int32s owner,
    Int32s *found)
{
    int32_t copies = t->output_start.at[t->forward];
    *found = int32s(memory, entry.count);
    for (int64_t k = 0; k < entry.count; k++)
        found->at[k] = as_read(recomputed.at, copies, entry.at[k], row.at[k], owner.at[k]);
}

void find_read_entries(Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *found)
{
    int32_t copies = t->output_start.at[t->forward];
    *found = int32s(memory, t->read_row.count);
    for (int64_t k = 0; k < found->count; k++) {
        int32_t row = t->read_row.at[k];
        int32_t entry = row < 0 ? 0 : t->output_start.at[row] + t->read_output.at[k];
        found->at[k] = as_read(recomputed.at, copies, entry, row, t->read_owner.at[k]);
    }
}

void find_head_entries(Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *found)
{
    find_entries(memory, t, recomputed, t->head_entry, t->head_row, t->head_owner, found);
}

void order_and_reads(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s *order, Int32s *reads)
{
    int32_t n = (int32_t)t->forward, copies = t->output_start.at[n];
    const bool *again = recomputed.at;
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
        done[x] = !again[x];
        if (done[x])
            continue;
        for (int32_t q = t->recomputed_start.at[x]; q < t->recomputed_start.at[x + 1]; q++) {
            if (again[t->recomputed_row.at[q]]) {
                read[t->recomputed_entry.at[q]]--;
                read[t->recomputed_entry.at[q] + copies]++;
            }
        }
    }
    int32_t *stack = NEW(memory, int32_t, n), *at = NEW(memory, int32_t, n);
    COPY(at, before_start, n);
    for (int64_t i = 0; i < t->walk_row.count; i++) {
        int32_t row = t->walk_row.at[i], depth = 0;
        if (row >= n) {
            run[count++] = row;
            continue;
        }
        if (done[row] || !again[t->walk_owner.at[i]])
            continue;
        done[row] = true;
        stack[0] = row;
        while (depth >= 0) {
            int32_t x = stack[depth];
            if (at[x] < before_start[x + 1]) {
                int32_t before = t->before_row.at[at[x]++];
                if (!done[before]) {
                    done[before] = true;
                    stack[++depth] = before;
                }
                continue;
            }
            depth--;
            run[count++] = x + n;
            for (int32_t q = use_start[x]; q < use_start[x + 1]; q++)
                read[t->use_entry.at[q] + (again[t->use_row.at[q]] ? copies : 0)]++;
        }
    }
    give_back(memory, then);
    order->count = count;
}

/* The free list. It holds blocks by their size, of equals the oldest first; a block has the size of
 * one of the tensors, so there is a queue for each of their sizes. */
typedef struct {
    int32_t *oldest, *newest; /* of each size that has any */
    int32_t *next, *before;   /* of each free block; -1 for none */
    uint64_t *any;            /* one bit for each size: whether it has any */
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

static inline int32_t take_oldest(Free *free, int32_t rank)
{
    int32_t block = free->oldest[rank], next = free->oldest[rank] = free->next[block];
    if (next < 0)
        free->any[rank / 64] &= ~(1ull << rank % 64);
    else
        free->before[next] = -1;
    return block;
}

static inline int32_t take_newest(Free *free, int32_t rank)
{
    int32_t block = free->newest[rank], before = free->newest[rank] = free->before[block];
    if (before < 0)
        free->any[rank / 64] &= ~(1ull << rank % 64);
    else
        free->next[before] = -1;
    return block;
}

/* Finds the smallest size from ``first`` on that has any; ``stop`` if there is none before it. */
static inline int32_t smallest_of(const Free *free, int32_t first, int32_t stop)
{
    for (int32_t rank = first; rank < stop; rank = (rank / 64 + 1) * 64) {
        uint64_t left = free->any[rank / 64] >> rank % 64;
        if (left)
            return (int32_t)min(stop, rank + __builtin_ctzll(left));
    }
    return stop;
}

/* Finds the largest size down from ``first`` that has any; -1 if there is none down to ``last``. */
static inline int32_t largest_of(const Free *free, int32_t first, int32_t last)
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
    const int32_t *read; /* how often each output is read */
    int32_t *storage;    /* of each output its block */
    int32_t *rank;       /* of each block which of the sizes it has */
    int32_t *pending;    /* its reads that are still to come */
    /* Of each size where those that it may have a block of start and end; at itself for none. */
    int32_t *smallest, *largest;
    Free free;
    int32_t blocks;
    int64_t bytes;
} Pool;

/* An input's memory goes to an output that may have it. */
static inline void take_over(Pool *p, int32_t out, int32_t input, bool identity)
{
    if (p->storage[out] != UNASSIGNED || p->read[out] == 0)
        return;
    int32_t block = p->storage[input];
    if (block >= 0 && (p->pending[block] == 1 || identity)) {
        p->storage[out] = block;
        p->pending[block] += p->read[out];
    }
}

/* Another output gets a block. */
static inline void get_block(Pool *p, int32_t out)
{
    const int64_t *sizes = p->t->sizes.at;
    int32_t r = p->t->rank.at[out], block;
    if (p->storage[out] != UNASSIGNED)
        return;
    int32_t c = smallest_of(&p->free, r, p->largest[r]);
    if (c < p->largest[r]) { /* the oldest of those that are large enough */
        block = take_oldest(&p->free, c);
    } else { /* or else the newest of those that are not */
        c = largest_of(&p->free, r - 1, p->smallest[r]);
        block = c >= 0 ? take_newest(&p->free, c) : p->blocks++;
        p->rank[block] = r;
        p->bytes += sizes[r] - (c >= 0 ? sizes[c] : 0);
    }
    p->pending[block] = p->read[out];
    p->storage[out] = block;
}

/* What has been read for the last time is free. */
static inline void read_once(Pool *p, int32_t input)
{
    int32_t block = p->storage[input];
    if (block >= 0 && --p->pending[block] == 0)
        put(&p->free, p->rank[block], block);
}

/* So is what nobody will read. */
static inline void free_unread(Pool *p, int32_t out)
{
    int32_t block = p->storage[out];
    if (block >= 0 && p->pending[block] == 0)
        put(&p->free, p->rank[block], block);
}

/* Plans the memory of one row; of its outputs the largest first. */
static inline void plan_row(Pool *p, const bool *again, int32_t row)
{
    const GraphArrays *t = p->t;
    int32_t copies = t->output_start.at[t->forward];
    int32_t first = t->output_start.at[row], last = t->output_start.at[row + 1];
    for (int32_t q = t->inplace_start.at[row]; q < t->inplace_start.at[row + 1]; q++) {
        int32_t owner = t->inplace_owner.at[q], source = t->inplace_row.at[q];
        int32_t input = as_read(again, copies, t->inplace_entry.at[q], source, owner);
        take_over(p, t->inplace_output.at[q], input, t->inplace_identity.at[q]);
    }
    for (int32_t m = first; m < last; m++)
        get_block(p, t->by_size.at[m]);
    for (int32_t j = t->use_start.at[row]; j < t->use_start.at[row + 1]; j++) {
        int32_t owner = t->use_owner.at[j], source = t->use_row.at[j];
        read_once(p, as_read(again, copies, t->use_entry.at[j], source, owner));
    }
    for (int32_t out = first; out < last; out++)
        free_unread(p, out);
}

/* And of a fused operator: each output may take the memory of each input. */
static inline void plan_fused(Pool *p, const Fused *f, int32_t k)
{
    const GraphArrays *t = p->t;
    int32_t first = f->out_start.at[k], last = f->out_start.at[k + 1];
    for (int32_t j = f->read_start.at[k]; j < f->read_start.at[k + 1]; j++)
        for (int32_t o = first, in = f->read.at[j]; o < last; o++) {
            int32_t out = f->out.at[o];
            if (t->rank.at[in] == t->rank.at[out] && t->itemsize.at[in] == t->itemsize.at[out])
                take_over(p, out, in, false);
        }
    for (int32_t o = first; o < last; o++)
        get_block(p, f->by_size.at[o]);
    for (int32_t j = f->read_start.at[k]; j < f->read_start.at[k + 1]; j++)
        read_once(p, f->read.at[j]);
    for (int32_t o = first; o < last; o++)
        free_unread(p, f->out.at[o]);
}

int64_t allocate(
    Memory *memory, const GraphArrays *t, const Fused *fused, Bools recomputed, Int32s order,
    Int32s reads, int64_t match_range, double limit, Int32s *storage)
{
    int32_t outputs = (int32_t)t->elements.count, ranks = (int32_t)t->sizes.count;
    int32_t rows = (int32_t)t->variable.count;
    const int64_t *sizes = t->sizes.at;
    *storage = int32s(memory, outputs);
    Memory then = *memory;
    Pool p = {
        .t = t, .read = reads.at, .storage = storage->at,
        .rank = NEW(memory, int32_t, outputs), .pending = NEW(memory, int32_t, outputs),
        .smallest = NEW(memory, int32_t, ranks), .largest = NEW(memory, int32_t, ranks),
        .free = {
            NEW(memory, int32_t, ranks), NEW(memory, int32_t, ranks),
            NEW(memory, int32_t, outputs), NEW(memory, int32_t, outputs),
            ZEROS(memory, uint64_t, ranks / 64 + 1),
        },
    };
    for (int32_t out = 0; out < outputs; out++)
        p.storage[out] = UNASSIGNED;
    for (int64_t h = t->outputs; h < t->head_row.count; h++) {
        int32_t row = t->head_row.at[h], owner = t->head_owner.at[h];
        int32_t copies = t->output_start.at[t->forward], entry = t->head_entry.at[h];
        p.storage[as_read(recomputed.at, copies, entry, row, owner)] = EXTERNAL;
    }
    for (int32_t r = 0, low = 0, high = 0; r < ranks; r++) {
        while (match_range && sizes[low] < sizes[r] / match_range)
            low++;
        while (match_range && high < ranks && sizes[high] <= sizes[r] * match_range)
            high++;
        p.smallest[r] = match_range ? low : r;
        p.largest[r] = match_range ? high : r;
    }
    for (int64_t i = 0; i < order.count && !(p.bytes > limit); i++) {
        int32_t row = order.at[i];
        if (row >= rows)
            plan_fused(&p, fused, row - rows);
        else if (!t->variable.at[row])
            plan_row(&p, recomputed.at, row);
    }
    give_back(memory, then);
    return p.bytes;
}

int64_t allocate_least(
    Memory *memory, const GraphArrays *t, const Fused *fused, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit, Int32s *storage)
{
    int64_t best = 0;
    for (int64_t k = 0; k < match_ranges.count; k++) {
        Int32s other;
        int64_t range = match_ranges.at[k];
        int64_t pool = allocate(memory, t, fused, recomputed, order, reads, range, limit, &other);
        if (k == 0 || pool < best) {
            best = pool;
            *storage = other;
        }
    }
    return best;
}

void add_in_place(
    Memory *memory, const GraphArrays *t, Bools recomputed, Int32s order, Bools adding,
    Int32s storage, Int32s *moved)
{
    int64_t rows = t->variable.count, outputs = storage.count, sums = 0;
    *moved = int32s(memory, outputs);
    COPY(moved->at, storage.at, outputs);
    for (int64_t i = 0; i < order.count; i++)
        sums += adding.at[order.at[i]];
    if (!sums)
        return;
    Memory then = *memory;
    Int32s read, heads;
    find_read_entries(memory, t, recomputed, &read);
    find_head_entries(memory, t, recomputed, &heads);
    int32_t *count = ZEROS(memory, int32_t, outputs); /* of all reads, ignored or not */
    int32_t *place = ZEROS(memory, int32_t, rows);
    const int32_t *maker = find_owners(memory, t->output_start).at;
    for (int64_t h = 0; h < heads.count; h++)
        count[heads.at[h]]++;
    for (int32_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        place[row] = i;
        for (int32_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++)
            count[read.at[j]]++;
    }
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        if (!adding.at[row])
            continue;
        int32_t into = read.at[t->read_start.at[row]], added = read.at[t->read_start.at[row] + 1];
        int32_t total = maker[into], term = maker[added];
        if (storage.at[into] == storage.at[t->output_start.at[row]] && count[added] == 1
            && !t->variable.at[total] && !t->variable.at[term] && place[total] < place[term])
            moved->at[added] = storage.at[into];
    }
    give_back(memory, then);
}
