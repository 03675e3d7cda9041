#include "graph/arrays.h"

void by_key(Memory *memory, Int32s key, int64_t keys, Int32s *start, Int32s *items)
{
    *start = (Int32s){ZEROS(memory, int32_t, keys + 1), keys + 1};
    *items = int32s(memory, key.count);
    for (int64_t i = 0; i < key.count; i++)
        start->at[key.at[i] + 1]++;
    for (int64_t k = 0; k < keys; k++)
        start->at[k + 1] += start->at[k];
    int32_t *at = NEW(memory, int32_t, keys);
    COPY(at, start->at, keys);
    for (int32_t i = 0; i < key.count; i++)
        items->at[at[key.at[i]]++] = i;
}

Int32s owners(Memory *memory, Int32s start)
{
    int64_t rows = start.count - 1;
    Int32s owner = int32s(memory, start.at[rows]);
    for (int32_t row = 0; row < rows; row++)
        for (int64_t k = start.at[row]; k < start.at[row + 1]; k++)
            owner.at[k] = row;
    return owner;
}

void walk(
    Memory *memory, int64_t known, Int32s start, Int32s before, Int32s owner, Int32s heads,
    Int32s head_owner, Int32s *met, Int32s *by)
{
    int64_t rows = start.count - 1, most_met = rows + before.count + heads.count;
    narrow(memory, most_met);
    int32_t *found = NEW(memory, int32_t, most_met), *found_by = NEW(memory, int32_t, most_met);
    bool *seen = ZEROS(memory, bool, rows);
    int32_t *stack = NEW(memory, int32_t, rows), *at = NEW(memory, int32_t, rows);
    int64_t count = 0, depth = -1;
    for (int64_t h = 0; h < heads.count; h++) {
        int32_t row = heads.at[h], reader = head_owner.at[h];
        while (true) {
            if (row < known) {
                found[count] = row;
                found_by[count++] = reader;
            } else if (!seen[row]) {
                seen[row] = true;
                stack[++depth] = row;
                at[depth] = start.at[row];
            }
            while (depth >= 0 && at[depth] == start.at[stack[depth] + 1]) {
                found[count] = stack[depth--];
                found_by[count++] = KEPT;
            }
            if (depth < 0)
                break;
            row = before.at[at[depth]];
            reader = owner.at[at[depth]++];
        }
    }
    *met = (Int32s){found, count};
    *by = (Int32s){found_by, count};
}

/* Sets what is known of the outputs of each row, and makes their types. */
static int32_t *set_outputs(
    Memory *memory, const SignatureArrays *known, Int32s which, GraphArrays *g)
{
    int64_t rows = which.count;
    int32_t outs = 0;
    g->variable = bools(memory, rows);
    g->output_start = int32s(memory, rows + 1);
    g->output_start.at[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        int32_t k = which.at[r];
        g->variable.at[r] = known->variable.at[k];
        outs = narrow(memory, outs + known->output_start.at[k + 1] - known->output_start.at[k]);
        g->output_start.at[r + 1] = outs;
    }
    g->elements = int64s(memory, outs);
    g->itemsize = int64s(memory, outs);
    g->rank = int32s(memory, outs);
    g->made = int32s(memory, outs);
    g->sizes = known->sizes;
    int32_t *dtype = NEW(memory, int32_t, outs);
    for (int64_t r = 0; r < rows; r++) {
        int64_t k = known->output_start.at[which.at[r]];
        int32_t first = g->output_start.at[r], last = g->output_start.at[r + 1];
        for (int32_t out = first; out < last; out++, k++) {
            g->elements.at[out] = known->elements.at[k];
            g->itemsize.at[out] = known->itemsize.at[k];
            g->rank.at[out] = known->rank.at[k];
            g->made.at[out] = first + known->made.at[k];
            dtype[out] = known->dtype.at[k];
        }
    }
    return dtype;
}

/* What has run before a row, and the entry of each read. */
typedef struct {
    Int32s start, row, owner;
    int32_t *entry; /* of each read; 0 for a variable that is left out */
} Links;

/* Sets what is read and holds memory, and makes what must have run before each row. */
static Links set_reads(
    Memory *memory, const SignatureArrays *known, Int32s which, const WaitLists *waits,
    GraphArrays *g)
{
    int64_t rows = which.count, count = g->read_row.count, befores = count + waits->row.count;
    g->read_ignored = bools(memory, count);
    g->use_start = int32s(memory, rows + 1);
    g->use_entry = int32s(memory, count);
    g->use_row = int32s(memory, count);
    g->use_owner = int32s(memory, count);
    Links links = {int32s(memory, rows + 1), int32s(memory, befores), int32s(memory, befores),
                   ZEROS(memory, int32_t, count)};
    int32_t uses = 0, met = 0;
    links.start.at[0] = g->use_start.at[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        const bool *ignored = known->ignored.at + known->ignored_start.at[which.at[r]];
        for (int32_t j = g->read_start.at[r]; j < g->read_start.at[r + 1]; j++) {
            int32_t source = g->read_row.at[j];
            g->read_ignored.at[j] = ignored[j - g->read_start.at[r]];
            if (source < 0)
                continue;
            links.entry[j] = g->output_start.at[source] + g->read_output.at[j];
            links.row.at[met] = source;
            links.owner.at[met++] = g->read_owner.at[j];
            if (!g->variable.at[source] && !g->read_ignored.at[j]) {
                g->use_entry.at[uses] = links.entry[j];
                g->use_row.at[uses] = source;
                g->use_owner.at[uses++] = g->read_owner.at[j];
            }
        }
        for (int32_t j = waits->start.at[r]; j < waits->start.at[r + 1]; j++) {
            links.row.at[met] = waits->row.at[j];
            links.owner.at[met++] = waits->owner.at[j];
        }
        g->use_start.at[r + 1] = uses;
        links.start.at[r + 1] = met;
    }
    g->use_entry.count = g->use_row.count = g->use_owner.count = uses;
    links.row.count = links.owner.count = met;
    return links;
}

/* Sets the in-place options that can apply. */
static void set_inplace(
    Memory *memory, const SignatureArrays *known, Int32s which, const int32_t *dtype,
    const int32_t *read_entry, GraphArrays *g)
{
    int64_t rows = which.count, all = 0;
    const int32_t *start = known->option_start.at;
    for (int64_t r = 0; r < rows; r++)
        all = narrow(memory, all + start[which.at[r] + 1] - start[which.at[r]]);
    g->inplace_start = int32s(memory, rows + 1);
    g->inplace_input = int32s(memory, all);
    g->inplace_entry = int32s(memory, all);
    g->inplace_row = int32s(memory, all);
    g->inplace_owner = int32s(memory, all);
    g->inplace_output = int32s(memory, all);
    g->inplace_identity = bools(memory, all);
    int32_t count = g->inplace_start.at[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        for (int32_t k = start[which.at[r]]; k < start[which.at[r] + 1]; k++) {
            int32_t j = g->read_start.at[r] + known->option_input.at[k], source = g->read_row.at[j];
            int32_t given = read_entry[j];
            int32_t out = g->output_start.at[r] + known->option_output.at[k];
            if (source < 0 || g->variable.at[source] || g->rank.at[given] != g->rank.at[out]
                || g->itemsize.at[given] != g->itemsize.at[out])
                continue;
            bool identity = known->option_identity.at[k] && dtype[given] == dtype[out];
            if (!identity && !known->reads.at[which.at[r]])
                continue;
            g->inplace_input.at[count] = known->option_input.at[k];
            g->inplace_entry.at[count] = given;
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

static Int32s part(Int32s array, int64_t first, int64_t stop)
{
    return (Int32s){array.at + first, stop - first};
}

/* Sets the order in which rows run that are no copies; tells which do. */
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
        g->before_start = part(links->start, 0, 1);
        return runs;
    }
    Int32s by;
    walk(memory, 0, links->start, links->row, links->owner, part(g->head_row, 0, last),
         part(g->head_owner, 0, last), &g->first, &by);
    for (int64_t i = 0; i < g->first.count; i++)
        runs[g->first.at[i]] = true;
    walk(memory, g->forward, links->start, links->row, links->owner, part(g->head_row, last, heads),
         part(g->head_owner, last, heads), &g->walk_row, &g->walk_owner);
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
    g->before_start = part(links->start, 0, g->forward + 1);
    g->before_row = part(links->row, 0, links->start.at[g->forward]);
    return runs;
}

/* Sets how often each output is read, and what the gradients of each operator read of operators. */
static void set_reads_of_outputs(Memory *memory, const bool *runs, GraphArrays *g)
{
    int64_t rows = g->variable.count, outs = g->elements.count, heads = g->head_row.count;
    int64_t gradients = g->forward ? 2 * g->forward : rows, count = 0;
    int64_t most_read = g->use_row.count - g->use_start.at[gradients] + heads;
    Int32s owner = int32s(memory, most_read), items;
    int32_t *entry = NEW(memory, int32_t, most_read), *row = NEW(memory, int32_t, most_read);
    g->reads = (Int32s){ZEROS(memory, int32_t, outs), outs};
    for (int64_t r = 0; r <= rows; r++) { /* after the rows, the heads */
        bool is_row = r < rows;
        const int32_t *entries = is_row ? g->use_entry.at : g->head_entry.at;
        const int32_t *read = is_row ? g->use_row.at : g->head_row.at;
        const int32_t *by = is_row ? g->use_owner.at : g->head_owner.at;
        int64_t first = is_row ? g->use_start.at[r] : 0;
        int64_t last = is_row ? g->use_start.at[r + 1] : heads;
        for (int64_t q = first; q < last && (!is_row || runs[r]); q++) {
            g->reads.at[entries[q]]++;
            if (r >= gradients && read[q] < g->forward && !g->variable.at[read[q]]
                && by[q] != KEPT) {
                entry[count] = entries[q];
                row[count] = read[q];
                owner.at[count++] = by[q];
            }
        }
    }
    owner.count = count;
    by_key(memory, owner, g->forward, &g->recomputed_start, &items);
    g->recomputed_entry = int32s(memory, count);
    g->recomputed_row = int32s(memory, count);
    for (int64_t i = 0; i < count; i++) {
        g->recomputed_entry.at[i] = entry[items.at[i]];
        g->recomputed_row.at[i] = row[items.at[i]];
    }
}

void graph_arrays(
    Memory *memory, const SignatureArrays *known, int64_t forward, Int32s which,
    const ReadLists *reads, const WaitLists *waits, const HeadList *heads, int64_t outputs,
    GraphArrays *made)
{
    GraphArrays g = {
        .forward = forward, .read_start = reads->start, .read_row = reads->row,
        .read_output = reads->output, .read_owner = reads->owner, .head_row = heads->row,
        .head_owner = heads->owner, .head_entry = int32s(memory, heads->row.count),
        .outputs = outputs,
    };
    int32_t *dtype = set_outputs(memory, known, which, &g);
    Links links = set_reads(memory, known, which, waits, &g);
    set_inplace(memory, known, which, dtype, links.entry, &g);
    for (int64_t h = 0; h < heads->row.count; h++)
        g.head_entry.at[h] = g.output_start.at[heads->row.at[h]] + heads->output.at[h];
    bool *runs = set_order(memory, &links, !forward, &g);
    set_reads_of_outputs(memory, runs, &g);
    *made = g;
}
