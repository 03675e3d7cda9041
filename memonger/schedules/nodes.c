#include "schedules/nodes.h"

enum { CHAINED, AWAITED, LOOSE }; /* as in nodes.py */

/* None of them: every item -1. */
static Int32s minus_ones(Memory *memory, int64_t count)
{
    Int32s made = int32s(memory, count);
    memset(made.at, -1, sizeof(int32_t) * count);
    return made;
}

/* Marks the outputs of forward nodes that a variant reads: as they ran last, or first. */
static void mark_read(const NodeVariants *p, int32_t variant, bool *read, bool *read_first)
{
    const Rows *m = &p->rows;
    const int32_t *start = m->read_start.at + variant;
    for (int32_t j = start[0]; j < start[1]; j++) {
        int32_t x = m->read_row.at[j], output = m->read_output.at[j];
        if (p->counts.at[j] && x >= 0)
            read[p->output_start.at[x] + output] = true;
        else if (p->counts.at[j])
            read_first[p->output_start.at[~x] + output] = true;
    }
}

void line_up(Memory *memory, const NodeVariants *p, Int32s operations, Int32s *line)
{
    const int32_t *outputs = p->output_start.at, *gradient_start = p->operation_start.at;
    const int32_t *needed_start = p->needed_start.at, *needed = p->needed.at;
    int64_t most_rows = 0;
    for (int64_t e = 0; e < operations.count; e++) {
        int32_t x = operations.at[e];
        const int32_t *start = x >= 0 ? needed_start + x : gradient_start + ~x;
        most_rows += start[1] - start[0] + (x >= 0);
    }
    int32_t *made = NEW(memory, int32_t, most_rows);
    Memory then = *memory;

    int64_t *first = NEW(memory, int64_t, p->forward); /* the operation that runs it first */
    for (int64_t e = operations.count - 1; e >= 0; e--)
        if (operations.at[e] >= 0)
            first[operations.at[e]] = e;
    /* From the end: which outputs of what runs are read until it runs again, and which of the first
     * time ever. */
    bool *read = ZEROS(memory, bool, outputs[p->forward]);
    bool *read_first = ZEROS(memory, bool, outputs[p->forward]);
    for (int64_t h = 0; h < p->head_row.count; h++)
        read_first[outputs[p->head_row.at[h]] + p->head_output.at[h]] = true;
    int64_t rows = most_rows;
    for (int64_t e = operations.count - 1; e >= 0; e--) {
        int32_t x = operations.at[e];
        if (x < 0) {
            for (int32_t q = gradient_start[~x + 1] - 1; q >= gradient_start[~x]; q--) {
                made[--rows] = p->operation_row.at[q];
                mark_read(p, made[rows], read, read_first);
            }
            continue;
        }
        bool is_first = first[x] == e;
        if (is_first || !p->masked.at[x])
            for (int32_t q = needed_start[x + 1] - 1; q >= needed_start[x]; q--)
                if (!read[needed[q]] && !(is_first && read_first[needed[q]]))
                    made[--rows] = p->readers + q;
        made[--rows] = is_first ? x : x + p->readers - p->forward;
        memset(read + outputs[x], false, outputs[x + 1] - outputs[x]);
        mark_read(p, made[rows], read, read_first);
    }
    *line = (Int32s){made + rows, most_rows - rows};
    give_back(memory, then);
}

/* Takes the Rows of nodes of these variants. */
static Rows take_rows(Memory *memory, const Rows *m, Int32s line)
{
    int64_t count = line.count, variants = m->signature.count, reads = 0, waits = 0;
    for (int64_t row = 0; row < count; row++) {
        int32_t k = line.at[row];
        reads += m->read_start.at[k + 1] - m->read_start.at[k];
        waits += m->wait_start.at[k + 1] - m->wait_start.at[k];
    }
    return (Rows){
        .signature = int32s(memory, count),
        .source = int32s(memory, count),
        .time = minus_ones(memory, count),
        .read_start = int32s(memory, count + 1),
        .read_row = int32s(memory, reads),
        .read_output = int32s(memory, reads),
        .wait_start = int32s(memory, count + 1),
        .wait_row = int32s(memory, waits + 2 * count), /* at most: each is in the chain or awaited */
        .first = minus_ones(memory, variants),
        .latest = minus_ones(memory, variants),
    };
}

/* The row that a variant reads or waits for. */
static inline int32_t row_of(const Rows *made, int32_t x)
{
    return x >= 0 ? made->latest.at[x] : made->first.at[~x];
}

void connect(Memory *memory, const NodeVariants *p, Int32s line, Rows *result)
{
    const Rows *m = &p->rows;
    const int32_t *link = p->link.at;
    Rows made = take_rows(memory, m, line);
    Memory then = *memory;
    int32_t *runs = ZEROS(memory, int32_t, p->forward);
    int64_t chain = -1; /* the last node in it */
    int32_t reads = 0, waits = 0;
    for (int64_t row = 0; row < line.count; row++) {
        int32_t k = line.at[row];
        int32_t y = m->source.at[k] >= 0 ? m->source.at[k] : k; /* whose place it takes */
        made.signature.at[row] = m->signature.at[k];
        made.source.at[row] = m->source.at[k];
        made.read_start.at[row] = reads;
        for (int32_t j = m->read_start.at[k]; j < m->read_start.at[k + 1]; j++) {
            made.read_row.at[reads] = row_of(&made, m->read_row.at[j]);
            made.read_output.at[reads++] = m->read_output.at[j];
        }
        made.wait_start.at[row] = waits;
        if (link[k] == CHAINED) {
            for (int32_t j = m->wait_start.at[k]; j < m->wait_start.at[k + 1]; j++)
                made.wait_row.at[waits++] = row_of(&made, m->wait_row.at[j]);
            for (int64_t before = most(chain, 0); before < row; before++)
                if (before == chain || link[line.at[before]] == AWAITED)
                    made.wait_row.at[waits++] = before;
            chain = row;
            if (y < p->forward)
                made.time.at[row] = runs[y]++;
        }
        made.latest.at[y] = row;
        if (made.first.at[y] < 0)
            made.first.at[y] = row;
    }
    made.read_start.at[line.count] = reads;
    made.wait_start.at[line.count] = made.wait_row.count = waits;
    *result = made;
    give_back(memory, then);
}

void lay_out(
    Memory *memory, const SignatureArrays *signatures, const Rows *rows, Int32s head_row,
    Int32s head_output, GraphArrays *made)
{
    int64_t reads = rows->read_row.count, waits = rows->wait_row.count, heads = head_row.count;
    int32_t *kept = minus_ones(memory, most(most(reads, waits), heads)).at; /* KEPT */
    ReadLists read = {rows->read_start, rows->read_row, rows->read_output, {kept, reads}};
    WaitLists wait = {rows->wait_start, rows->wait_row, {kept, waits}};
    HeadList head = {head_row, head_output, {kept, heads}};
    graph_arrays(memory, signatures, 0, rows->signature, &read, &wait, &head, heads, made);
}
