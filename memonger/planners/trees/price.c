#include "planners/trees/price.h"

static const int64_t NO_LIMIT = (int64_t)1 << 60;
enum { MOST_RUNS = 3 }; /* of each operator, for a unit of work: more are of no use */

/* The gradient of an argument may be that of an output: a variable, which no row makes. */
static void add_head(Int32s *rows, Int32s *outputs, int32_t row, int64_t output)
{
    if (row < 0)
        return;
    rows->at[rows->count++] = row;
    outputs->at[outputs->count++] = (int32_t)output;
}

static void arrays_of(Memory *memory, const Problem *b, Int32s operations, GraphArrays *t)
{
    const NodeVariants *p = &b->variants;
    Int32s line;
    Rows rows;
    line_up(memory, p, operations, &line);
    connect(memory, p, line, &rows);
    int64_t gradients = b->asked.count / 2, heads = p->head_row.count + gradients;
    Int32s head_row = int32s(memory, heads), head_output = int32s(memory, heads);
    head_row.count = head_output.count = 0;
    for (int64_t k = 0; k < p->head_row.count; k++)
        add_head(&head_row, &head_output, rows.first.at[p->head_row.at[k]], p->head_output.at[k]);
    for (int64_t k = 0; k < gradients; k++) {
        const int64_t *asked = b->asked.at + 2 * k;
        add_head(&head_row, &head_output, rows.latest.at[asked[0]], asked[1]);
    }
    lay_out(memory, &b->signatures, &rows, head_row, head_output, t);
}

int64_t pool_of(
    Memory *memory, const Problem *b, Int32s operations, Int64s match_ranges, int64_t limit,
    int64_t *place)
{
    Memory then = *memory;
    GraphArrays t;
    Int32s storage;
    arrays_of(memory, b, operations, &t);
    int64_t best = -1;
    *place = 0;
    for (int64_t k = 0; k < match_ranges.count; k++) {
        Memory before = *memory;
        int64_t pool = allocate(
            memory, &t, (Bools){0}, t.first, t.reads, match_ranges.at[k], (double)limit, &storage);
        give_back(memory, before);
        if (pool <= limit) {
            best = pool;
            *place = k;
            limit = pool - 1;
        }
    }
    give_back(memory, then);
    return best;
}

/* Finds the slot of a schedule, evaluated in this way. */
static int64_t slot_for(const Known *known, Int32s positions, Int64s match_ranges)
{
    uint64_t hash = hash_of(match_ranges.at[0] + 31 * match_ranges.count);
    for (int64_t k = 0; k < positions.count; k++)
        hash = hash_with(hash, positions.at[k]);
    return slot_of(known, hash);
}

int64_t evaluate_tree(
    Memory *memory, const Problem *b, Int32s tree, double most_work, int64_t most_bytes,
    Int64s match_ranges, const Known *known, double *work, int64_t *place)
{
    Memory then = *memory;
    double most = MOST_RUNS * (2 + most_work / b->one_pass) * (double)b->node.count;
    int64_t most_operations = most < (double)NO_LIMIT ? (int64_t)most : NO_LIMIT;
    Int32s run; /* positions, then nodes, as a Schedule has them */
    *work = unroll(memory, &b->steps, tree, most_work, most_operations, &run);
    *place = 0;
    int64_t pool = -1;
    if (*work <= most_work && run.count <= most_operations) {
        int64_t slot = slot_for(known, run, match_ranges);
        if (known->pools.at[slot] < 0 && known->limits.at[slot] < (double)most_bytes) {
            const int32_t *node = b->node.at;
            for (int64_t k = 0; k < run.count; k++)
                run.at[k] = run.at[k] >= 0 ? node[run.at[k]] : ~node[~run.at[k]];
            known->pools.at[slot] = pool_of(memory, b, run, match_ranges, most_bytes, place);
            known->others.at[slot] = (double)*place;
            known->limits.at[slot] = (double)most_bytes;
        }
        pool = known->pools.at[slot];
        *place = (int64_t)known->others.at[slot];
    }
    give_back(memory, then);
    return pool <= most_bytes ? pool : -1;
}
