#include "schedules/rows.h"

#include "costs/pool.h"

static Int32s filled(Memory *memory, int64_t count, int value)
{
    Int32s array = int32s(memory, count);
    FILL(array.at, value, count);
    return array;
}

/* Lists the variants that run, in order: all variables, then the operations of a schedule. */
static Int32s line_up(Memory *memory, const NodeVariants *p, Int32s operations)
{
    const int32_t *gradient_start = p->operation_start.at;
    int64_t count = p->variable.count;
    int32_t again = (int32_t)p->again;
    for (int64_t e = 0; e < operations.count; e++) {
        int32_t x = operations.at[e];
        count += x >= 0 ? 1 : gradient_start[~x + 1] - gradient_start[~x];
    }
    Int32s line = int32s(memory, count);
    COPY(line.at, p->variable.at, p->variable.count);
    Memory then = *memory;
    bool *has_run = ZEROS(memory, bool, p->forward_nodes);
    int32_t *next = line.at + p->variable.count;
    for (int64_t e = 0; e < operations.count; e++) {
        int32_t x = operations.at[e];
        if (x >= 0) {
            *next++ = has_run[x] ? x + again : x;
            has_run[x] = true;
            continue;
        }
        for (int32_t q = gradient_start[~x]; q < gradient_start[~x + 1]; q++)
            *next++ = p->operation_row.at[q];
    }
    give_back(memory, then);
    return line;
}

void make_rows(Memory *memory, const NodeVariants *p, Int32s operations, Rows *rows)
{
    const Rows *m = &p->rows;
    Int32s line = line_up(memory, p, operations);
    int32_t count = (int32_t)line.count;
    int64_t variants = m->signature.count;
    int32_t reads = 0;
    for (int64_t row = 0; row < count; row++)
        reads += m->read_start.at[line.at[row] + 1] - m->read_start.at[line.at[row]];
    Rows new = {
        .signature = int32s(memory, count),
        .source = int32s(memory, count),
        .time = filled(memory, count, -1),
        .read_start = int32s(memory, count + 1),
        .read_row = int32s(memory, reads),
        .read_output = int32s(memory, reads),
        .first = filled(memory, variants, -1),
        .latest = filled(memory, variants, -1),
    };
    Memory then = *memory;
    int32_t *runs = ZEROS(memory, int32_t, p->forward_nodes);
    reads = 0;
    for (int32_t row = 0; row < count; row++) {
        int32_t k = line.at[row];
        int32_t y = m->source.at[k] >= 0 ? m->source.at[k] : k; /* the variant of its first run */
        new.signature.at[row] = m->signature.at[k];
        new.source.at[row] = m->source.at[k];
        new.read_start.at[row] = reads;
        for (int32_t j = m->read_start.at[k]; j < m->read_start.at[k + 1]; j++) {
            int32_t x = m->read_row.at[j];
            new.read_row.at[reads] = x >= 0 ? new.latest.at[x] : new.first.at[~x];
            new.read_output.at[reads++] = m->read_output.at[j];
        }
        if (m->time.at[k] == 0)
            new.time.at[row] = runs[y]++;
        new.latest.at[y] = row;
        if (new.first.at[y] < 0)
            new.first.at[y] = row;
    }
    new.read_start.at[count] = reads;
    *rows = new;
    give_back(memory, then);
}

/* Returns whether two outputs of signatures may be one array. */
static inline bool alike(const SignatureArrays *s, int64_t one, int64_t other, bool views)
{
    return s->dtype.at[one] == s->dtype.at[other]
        && s->elements.at[one] == s->elements.at[other]
        && (views || s->shape.at[one] == s->shape.at[other]);
}

int64_t lifetimes(
    Memory *memory, const SignatureArrays *s, const Rows *rows, Int32s head_row,
    Int32s head_output, int64_t outputs, bool views, int64_t alignment, int64_t *output_bytes,
    Lifetimes *result)
{
    int64_t count = rows->signature.count;
    int32_t *first = ZEROS(memory, int32_t, count + 1); /* where the outputs of each row start */
    for (int64_t r = 0; r < count; r++) {
        const int64_t *output = s->output_start.at + rows->signature.at[r];
        first[r + 1] = first[r] + (int32_t)(output[1] - output[0]);
    }
    int64_t tensors = first[count];
    Lifetimes lives = {
        int32s(memory, tensors), int32s(memory, tensors), int32s(memory, tensors),
        int64s(memory, tensors), {ZEROS(memory, bool, tensors), tensors},
    };
    Memory then = *memory;
    int32_t *block = lives.block.at, *start = lives.start.at, *stop = lives.stop.at;
    int32_t *reads = ZEROS(memory, int32_t, tensors); /* by output */
    int32_t *pending = NEW(memory, int32_t, tensors); /* by block: the reads to come */
    int32_t *held = NEW(memory, int32_t, rows->read_row.count); /* by read: an output, or -1 */
    int32_t blocks = 0, forward = -1; /* the last row of the forward pass */
    for (int64_t r = 0; r < count; r++) {
        int64_t ignored = s->ignored_start.at[rows->signature.at[r]];
        for (int32_t j = rows->read_start.at[r]; j < rows->read_start.at[r + 1]; j++) {
            int32_t source = rows->read_row.at[j];
            bool nothing = s->ignored.at[ignored++] || source < 0;
            held[j] = -1;
            if (nothing || s->variable.at[rows->signature.at[source]])
                continue;
            held[j] = first[source] + rows->read_output.at[j];
            reads[held[j]]++;
        }
    }
    for (int64_t h = 0; h < head_row.count; h++) /* heads stay alive to the end */
        reads[first[head_row.at[h]] + head_output.at[h]]++;
    FILL(block, UNASSIGNED, tensors);
    for (int32_t r = 0; r < count; r++) {
        int32_t k = rows->signature.at[r];
        int64_t tensor = s->output_start.at[k];
        if (s->variable.at[k])
            continue;
        forward = rows->time.at[r] == 0 ? r : forward;
        for (int32_t q = s->option_start.at[k]; q < s->option_start.at[k + 1]; q++) {
            int32_t j = rows->read_start.at[r] + s->option_input.at[q];
            int32_t source = rows->read_row.at[j], output = s->option_output.at[q];
            int32_t other = source < 0 ? 0 : rows->signature.at[source];
            if (source < 0 || s->variable.at[other])
                continue;
            int32_t input = rows->read_output.at[j];
            bool identity = s->option_identity.at[q];
            if (alike(s, s->output_start.at[other] + input, tensor + output, views)
                && (identity || s->reads.at[k]))
                take_over(
                    reads, block, pending, first[source] + input, first[r] + output, identity);
        }
        for (int32_t out = first[r]; out < first[r + 1]; out++, tensor++) {
            if (block[out] >= 0)
                continue;
            block[out] = blocks;
            start[blocks] = r;
            stop[blocks] = (int32_t)count - 1;
            lives.nbytes.at[blocks] = s->elements.at[tensor] * s->itemsize.at[tensor];
            pending[blocks++] = reads[out];
        }
        for (int32_t j = rows->read_start.at[r]; j < rows->read_start.at[r + 1]; j++)
            if (held[j] >= 0 && --pending[block[held[j]]] == 0)
                stop[block[held[j]]] = r;
        for (int32_t out = first[r]; out < first[r + 1]; out++)
            if (pending[block[out]] == 0)
                stop[block[out]] = r;
    }
    *output_bytes = 0;
    for (int64_t h = 0; h < head_row.count; h++) {
        int32_t b = block[first[head_row.at[h]] + head_output.at[h]];
        if (b < 0 || lives.of_caller.at[b] || (h >= outputs && start[b] <= forward))
            continue;
        lives.of_caller.at[b] = true;
        *output_bytes += h < outputs ? lives.nbytes.at[b] : 0;
    }
    int64_t *change = ZEROS(memory, int64_t, count + 1), alive = 0, peak = 0;
    for (int32_t b = 0; b < blocks; b++) {
        int64_t size = (lives.nbytes.at[b] + alignment - 1) / alignment * alignment;
        int64_t nbytes = lives.of_caller.at[b] ? 0 : size;
        change[start[b]] += nbytes;
        change[stop[b] + 1] -= nbytes;
    }
    for (int64_t r = 0; r < count; r++) {
        alive += change[r];
        peak = max(peak, alive);
    }
    give_back(memory, then);
    lives.start.count = lives.stop.count = lives.nbytes.count = lives.of_caller.count = blocks;
    *result = lives;
    return peak;
}
