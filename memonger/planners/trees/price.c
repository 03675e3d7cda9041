#include "planners/trees/price.h"

enum { MOST_RUNS = 3 }; /* a limit: runs of an operator for each forward pass of work */

int64_t alive_of(
    Memory *memory, const Problem *b, Int32s operations, int64_t alignment, int64_t *output_bytes)
{
    const NodeVariants *p = &b->variants;
    Memory then = *memory;
    Rows rows;
    Lifetimes lives;
    make_rows(memory, p, operations, &rows);
    int64_t outputs = p->head_row.count, gradients = b->gradients.count / 2;
    Int32s head_row = int32s(memory, outputs + gradients);
    Int32s head_output = int32s(memory, outputs + gradients);
    for (int64_t k = 0; k < outputs; k++) {
        head_row.at[k] = rows.first.at[p->head_row.at[k]];
        head_output.at[k] = p->head_output.at[k];
    }
    for (int64_t k = 0; k < gradients; k++) {
        head_row.at[outputs + k] = rows.latest.at[b->gradients.at[2 * k]];
        head_output.at[outputs + k] = (int32_t)b->gradients.at[2 * k + 1];
    }
    int64_t alive = lifetimes(
        memory, &b->signatures, &rows, head_row, head_output, outputs, b->views, alignment,
        output_bytes, &lives);
    give_back(memory, then);
    return alive;
}

static int64_t slot_of_schedule(const Memo *memo, Int32s positions)
{
    uint64_t hash = hash_of(0);
    for (int64_t k = 0; k < positions.count; k++)
        hash = hash_with(hash, positions.at[k]);
    return find_slot(memo, hash);
}

int64_t evaluate_tree(
    Memory *memory, const Problem *b, Int32s tree, double most_work, int64_t most_bytes,
    const Memo *memo, double *work)
{
    Memory then = *memory;
    double most = MOST_RUNS * (2 + most_work / b->one_pass) * (double)b->node.count;
    int64_t most_operations = most < (double)INT64_MAX ? (int64_t)most : INT64_MAX;
    Int32s run; /* the operations as positions; then as nodes, as in a Schedule */
    *work = unroll(memory, &b->positions, tree, most_work, most_operations, &run);
    int64_t alive = -1;
    if (*work <= most_work && run.count <= most_operations) {
        int64_t slot = slot_of_schedule(memo, run);
        if (memo->limits.at[slot] < 0) {
            const int32_t *node = b->node.at;
            for (int64_t k = 0; k < run.count; k++)
                run.at[k] = run.at[k] >= 0 ? node[run.at[k]] : ~node[~run.at[k]];
            int64_t output_bytes;
            memo->pools.at[slot] = alive_of(memory, b, run, 1, &output_bytes);
            memo->limits.at[slot] = (double)INT64_MAX;
        }
        alive = memo->pools.at[slot];
    }
    give_back(memory, then);
    return alive <= most_bytes ? alive : -1;
}
