#include "schedules/lifetimes.h"

/* Finds where the outputs of each row start. */
static Int32s find_output_starts(Memory *memory, const SignatureArrays *s, const Rows *rows)
{
    int64_t count = rows->signature.count;
    Int32s start = int32s(memory, count + 1);
    start.at[0] = 0;
    for (int64_t r = 0; r < count; r++) {
        int32_t k = rows->signature.at[r];
        start.at[r + 1] =
            start.at[r] + (int32_t)(s->output_start.at[k + 1] - s->output_start.at[k]);
    }
    return start;
}

/* Returns whether a read holds memory; then ``entry`` is what is read. */
static inline bool holds(
    const SignatureArrays *s, const Rows *rows, const int32_t *output_start, int64_t row,
    int32_t j, int32_t *entry)
{
    int32_t source = rows->read_row.at[j], k = rows->signature.at[row];
    if (source < 0 || s->variable.at[rows->signature.at[source]])
        return false;
    *entry = output_start[source] + rows->read_output.at[j];
    return !s->ignored.at[s->ignored_start.at[k] + j - rows->read_start.at[row]];
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
    Int32s head_output, int64_t outputs, bool views, Lifetimes *result)
{
    int64_t count = rows->signature.count;
    Int32s output_start = find_output_starts(memory, s, rows);
    int64_t tensors = output_start.at[count];
    Lifetimes lives = {
        int32s(memory, tensors), int32s(memory, tensors), int32s(memory, tensors),
        int64s(memory, tensors), {ZEROS(memory, bool, tensors), tensors},
    };
    Memory then = *memory;
    const int32_t *first = output_start.at;
    int32_t *block = lives.block.at, *start = lives.start.at, *stop = lives.stop.at;
    int32_t *reads = ZEROS(memory, int32_t, tensors); /* of each output */
    int32_t *pending = NEW(memory, int32_t, tensors); /* reads of each block that are to come */
    int32_t blocks = 0, entry, forward = -1; /* the last row of the forward pass */
    for (int64_t r = 0; r < count; r++)
        for (int32_t j = rows->read_start.at[r]; j < rows->read_start.at[r + 1]; j++)
            if (holds(s, rows, first, r, j, &entry))
                reads[entry]++;
    for (int64_t h = 0; h < head_row.count; h++) /* as a read that never comes */
        reads[first[head_row.at[h]] + head_output.at[h]]++;
    FILL(block, -1, tensors);
    for (int32_t r = 0; r < count; r++) {
        int32_t k = rows->signature.at[r];
        int64_t tensor = s->output_start.at[k];
        if (s->variable.at[k])
            continue;
        forward = rows->time.at[r] == 0 ? r : forward;
        for (int32_t q = s->option_start.at[k]; q < s->option_start.at[k + 1]; q++) {
            int32_t j = rows->read_start.at[r] + s->option_input.at[q];
            int32_t source = rows->read_row.at[j], output = s->option_output.at[q];
            int32_t out = first[r] + output, other = source < 0 ? 0 : rows->signature.at[source];
            if (source < 0 || s->variable.at[other] || block[out] >= 0 || !reads[out])
                continue;
            int32_t input = rows->read_output.at[j], shared = block[first[source] + input];
            bool identity = s->option_identity.at[q];
            if (!alike(s, s->output_start.at[other] + input, tensor + output, views)
                || (!identity && !s->reads.at[k]) || (!identity && pending[shared] != 1))
                continue;
            block[out] = shared;
            pending[shared] += reads[out];
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
            if (holds(s, rows, first, r, j, &entry) && --pending[block[entry]] == 0)
                stop[block[entry]] = r;
        for (int32_t out = first[r]; out < first[r + 1]; out++)
            if (pending[block[out]] == 0)
                stop[block[out]] = r;
    }
    for (int64_t h = 0; h < head_row.count; h++) {
        int32_t held = block[first[head_row.at[h]] + head_output.at[h]];
        if (held >= 0 && (h < outputs || start[held] > forward))
            lives.of_caller.at[held] = true;
    }
    int64_t *change = ZEROS(memory, int64_t, count + 1), alive = 0, peak = 0;
    for (int32_t b = 0; b < blocks; b++) {
        int64_t nbytes = lives.of_caller.at[b] ? 0 : lives.nbytes.at[b];
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
