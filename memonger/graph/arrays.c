#include "graph/arrays.h"

void group_by_key(Memory *memory, Int32s key, int64_t keys, Int32s *start, Int32s *items)
{
    *start = (Int32s){ZEROS(memory, int32_t, keys + 1), keys + 1};
    *items = int32s(memory, key.count);
    for (int64_t i = 0; i < key.count; i++)
        start->at[key.at[i] + 1]++;
    for (int64_t k = 0; k < keys; k++)
        start->at[k + 1] += start->at[k];
    int32_t *next = NEW(memory, int32_t, keys);
    COPY(next, start->at, keys);
    for (int32_t i = 0; i < key.count; i++)
        items->at[next[key.at[i]]++] = i;
}

Int32s find_owners(Memory *memory, Int32s start)
{
    int64_t rows = start.count - 1;
    Int32s owner = int32s(memory, start.at[rows]);
    for (int32_t row = 0; row < rows; row++)
        for (int64_t k = start.at[row]; k < start.at[row + 1]; k++)
            owner.at[k] = row;
    return owner;
}

void walk(
    Memory *memory, int64_t have_run, Int32s start, Int32s before, Int32s owner, Int32s heads,
    Int32s head_owner, Int32s *order, Int32s *reader)
{
    int64_t rows = start.count - 1, most = rows + before.count + heads.count;
    narrow(memory, most);
    *order = int32s(memory, most);
    *reader = int32s(memory, most);
    bool *seen = ZEROS(memory, bool, rows);
    int32_t *stack = NEW(memory, int32_t, rows), *next = NEW(memory, int32_t, rows);
    int64_t count = 0, depth = -1;
    for (int64_t h = 0; h < heads.count; h++) {
        int32_t row = heads.at[h], read_by = head_owner.at[h];
        while (true) {
            if (row < have_run) {
                order->at[count] = row;
                reader->at[count++] = read_by;
            } else if (!seen[row]) {
                seen[row] = true;
                stack[++depth] = row;
                next[depth] = start.at[row];
            }
            while (depth >= 0 && next[depth] == start.at[stack[depth] + 1]) {
                order->at[count] = stack[depth--];
                reader->at[count++] = KEPT;
            }
            if (depth < 0)
                break;
            row = before.at[next[depth]];
            read_by = owner.at[next[depth]++];
        }
    }
    order->count = reader->count = count;
}

/* Sets what the signatures say of the outputs of each row; returns their types. */
static int32_t *set_outputs(
    Memory *memory, const SignatureArrays *s, Int32s signature, GraphArrays *g)
{
    int64_t rows = signature.count;
    int32_t outs = 0;
    g->variable = bools(memory, rows);
    g->output_start = int32s(memory, rows + 1);
    g->output_start.at[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        int32_t k = signature.at[r];
        g->variable.at[r] = s->variable.at[k];
        outs = narrow(memory, outs + s->output_start.at[k + 1] - s->output_start.at[k]);
        g->output_start.at[r + 1] = outs;
    }
    g->elements = int64s(memory, outs);
    g->itemsize = int64s(memory, outs);
    g->rank = int32s(memory, outs);
    g->by_size = int32s(memory, outs);
    g->sizes = s->sizes;
    int32_t *dtype = NEW(memory, int32_t, outs);
    for (int64_t r = 0; r < rows; r++) {
        int64_t k = s->output_start.at[signature.at[r]];
        int32_t first = g->output_start.at[r], last = g->output_start.at[r + 1];
        for (int32_t out = first; out < last; out++, k++) {
            g->elements.at[out] = s->elements.at[k];
            g->itemsize.at[out] = s->itemsize.at[k];
            g->rank.at[out] = s->rank.at[k];
            g->by_size.at[out] = first + s->by_size.at[k];
            dtype[out] = s->dtype.at[k];
        }
    }
    return dtype;
}

/* What must have run before each row, and the entry of each read. */
typedef struct {
    Int32s start, row, owner;
    int32_t *entry; /* by read; 0 if it is LEFT_OUT */
} Links;

/* Sets the reads, and those that hold memory. */
static Links set_reads(
    Memory *memory, const SignatureArrays *s, Int32s signature, const WaitLists *waits,
    GraphArrays *g)
{
    int64_t rows = signature.count, count = g->read_row.count, befores = count + waits->row.count;
    g->read_ignored = bools(memory, count);
    g->use_start = int32s(memory, rows + 1);
    g->use_entry = int32s(memory, count);
    g->use_row = int32s(memory, count);
    g->use_owner = int32s(memory, count);
    Links links = {int32s(memory, rows + 1), int32s(memory, befores), int32s(memory, befores),
                   ZEROS(memory, int32_t, count)};
    int32_t uses = 0, before = 0;
    links.start.at[0] = g->use_start.at[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        const bool *ignored = s->ignored.at + s->ignored_start.at[signature.at[r]];
        for (int32_t j = g->read_start.at[r]; j < g->read_start.at[r + 1]; j++) {
            int32_t source = g->read_row.at[j];
            g->read_ignored.at[j] = ignored[j - g->read_start.at[r]];
            if (source == LEFT_OUT)
                continue;
            links.entry[j] = g->output_start.at[source] + g->read_output.at[j];
            links.row.at[before] = source;
            links.owner.at[before++] = g->read_owner.at[j];
            if (!g->variable.at[source] && !g->read_ignored.at[j]) {
                g->use_entry.at[uses] = links.entry[j];
                g->use_row.at[uses] = source;
                g->use_owner.at[uses++] = g->read_owner.at[j];
            }
        }
        for (int32_t j = waits->start.at[r]; j < waits->start.at[r + 1]; j++) {
            links.row.at[before] = waits->row.at[j];
            links.owner.at[before++] = waits->owner.at[j];
        }
        g->use_start.at[r + 1] = uses;
        links.start.at[r + 1] = before;
    }
    g->use_entry.count = g->use_row.count = g->use_owner.count = uses;
    links.row.count = links.owner.count = before;
    return links;
}

/* Sets the in-place options that can apply. */
static void set_inplace(
    Memory *memory, const SignatureArrays *s, Int32s signature, const int32_t *dtype,
    const int32_t *read_entry, GraphArrays *g)
{
    int64_t rows = signature.count, all = 0;
    const int32_t *start = s->option_start.at;
    for (int64_t r = 0; r < rows; r++)
        all = narrow(memory, all + start[signature.at[r] + 1] - start[signature.at[r]]);
    g->inplace_start = int32s(memory, rows + 1);
    g->inplace_input = int32s(memory, all);
    g->inplace_entry = int32s(memory, all);
    g->inplace_row = int32s(memory, all);
    g->inplace_owner = int32s(memory, all);
    g->inplace_output = int32s(memory, all);
    g->inplace_identity = bools(memory, all);
    int32_t count = g->inplace_start.at[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        for (int32_t k = start[signature.at[r]]; k < start[signature.at[r] + 1]; k++) {
            int32_t j = g->read_start.at[r] + s->option_input.at[k], source = g->read_row.at[j];
            int32_t in = read_entry[j], out = g->output_start.at[r] + s->option_output.at[k];
            if (source == LEFT_OUT || g->variable.at[source] || g->rank.at[in] != g->rank.at[out]
                || g->itemsize.at[in] != g->itemsize.at[out])
                continue;
            bool identity = s->option_identity.at[k] && dtype[in] == dtype[out];
            if (!identity && !s->reads.at[signature.at[r]])
                continue;
            g->inplace_input.at[count] = s->option_input.at[k];
            g->inplace_entry.at[count] = in;
            g->inplace_row.at[count] = source;
            g->inplace_owner.at[count] = g->read_owner.at[j];
            g->inplace_output.at[count] = out;
            g->inplace_identity.at[count++] = identity;
        }
        g->inplace_start.at[r + 1] = count;
    }
    g->inplace_input.count = g->inplace_entry.count = g->inplace_row.count = count;
    g->inplace_owner.count = g->inplace_output.count = g->inplace_identity.count = count;
}

static Int32s slice(Int32s array, int64_t first, int64_t stop)
{
    return (Int32s){array.at + first, stop - first};
}

/* Sets the order in which rows run that are no copies; returns which rows run. */
static bool *set_order(Memory *memory, const Links *links, bool as_they_stand, GraphArrays *g)
{
    int64_t rows = g->variable.count, heads = g->head_row.count;
    int64_t last = g->forward ? g->outputs : heads;
    bool *runs = ZEROS(memory, bool, rows);
    if (as_they_stand) {
        g->first = int32s(memory, rows);
        for (int32_t r = 0; r < rows; r++) {
            g->first.at[r] = r;
            runs[r] = true;
        }
        g->before_start = slice(links->start, 0, 1);
        return runs;
    }
    Int32s reader;
    walk(memory, 0, links->start, links->row, links->owner, slice(g->head_row, 0, last),
         slice(g->head_owner, 0, last), &g->first, &reader);
    for (int64_t i = 0; i < g->first.count; i++)
        runs[g->first.at[i]] = true;
    walk(memory, g->forward, links->start, links->row, links->owner,
         slice(g->head_row, last, heads), slice(g->head_owner, last, heads), &g->walk_row,
         &g->walk_owner);
    int64_t count = 0;
    for (int64_t i = 0; i < g->walk_row.count; i++) {
        int32_t row = g->walk_row.at[i], owner = g->walk_owner.at[i];
        runs[row] = true;
        if (row >= g->forward || (owner != KEPT && !g->variable.at[row])) {
            g->walk_row.at[count] = row;
            g->walk_owner.at[count++] = owner;
        }
    }
    g->walk_row.count = g->walk_owner.count = count;
    g->before_start = slice(links->start, 0, g->forward + 1);
    g->before_row = slice(links->row, 0, links->start.at[g->forward]);
    return runs;
}

/* Sets how often each entry is read, and what the gradients of each operator read of operators. */
static void set_reads_of_outputs(Memory *memory, const bool *runs, GraphArrays *g)
{
    int64_t rows = g->variable.count, outs = g->elements.count, heads = g->head_row.count;
    int64_t gradients = g->forward ? 2 * g->forward : rows, count = 0;
    int64_t most = g->use_row.count - g->use_start.at[gradients] + heads;
    Int32s owner = int32s(memory, most), items;
    int32_t *entry = NEW(memory, int32_t, most), *row = NEW(memory, int32_t, most);
    g->reads = (Int32s){ZEROS(memory, int32_t, outs), outs};
    for (int64_t r = 0; r <= rows; r++) { /* the heads come after the rows */
        bool is_row = r < rows;
        const int32_t *read_entry = is_row ? g->use_entry.at : g->head_entry.at;
        const int32_t *read_row = is_row ? g->use_row.at : g->head_row.at;
        const int32_t *read_owner = is_row ? g->use_owner.at : g->head_owner.at;
        int64_t first = is_row ? g->use_start.at[r] : 0;
        int64_t last = is_row ? g->use_start.at[r + 1] : heads;
        for (int64_t q = first; q < last && (!is_row || runs[r]); q++) {
            g->reads.at[read_entry[q]]++;
            if (r >= gradients && read_row[q] < g->forward && !g->variable.at[read_row[q]]
                && read_owner[q] != KEPT) {
                entry[count] = read_entry[q];
                row[count] = read_row[q];
                owner.at[count++] = read_owner[q];
            }
        }
    }
    owner.count = count;
    group_by_key(memory, owner, g->forward, &g->recomputed_start, &items);
    g->recomputed_entry = int32s(memory, count);
    g->recomputed_row = int32s(memory, count);
    for (int64_t i = 0; i < count; i++) {
        g->recomputed_entry.at[i] = entry[items.at[i]];
        g->recomputed_row.at[i] = row[items.at[i]];
    }
}

void graph_arrays(
    Memory *memory, const SignatureArrays *signatures, int64_t forward, Int32s signature,
    const ReadLists *reads, const WaitLists *waits, const HeadList *heads, int64_t outputs,
    GraphArrays *result)
{
    GraphArrays g = {
        .forward = forward, .read_start = reads->start, .read_row = reads->row,
        .read_output = reads->output, .read_owner = reads->owner, .head_row = heads->row,
        .head_owner = heads->owner, .head_entry = int32s(memory, heads->row.count),
        .outputs = outputs,
    };
    int32_t *dtype = set_outputs(memory, signatures, signature, &g);
    Links links = set_reads(memory, signatures, signature, waits, &g);
    set_inplace(memory, signatures, signature, dtype, links.entry, &g);
    for (int64_t h = 0; h < heads->row.count; h++)
        g.head_entry.at[h] = g.output_start.at[heads->row.at[h]] + heads->output.at[h];
    bool *runs = set_order(memory, &links, !forward, &g);
    set_reads_of_outputs(memory, runs, &g);
    *result = g;
}
