#include "schedules/nodes.h"

static Int32s filled(Memory *memory, int64_t count, int value)
{
    Int32s array = int32s(memory, count);
    FILL(array.at, value, count);
    return array;
}

void line_up(Memory *memory, const NodeVariants *p, Int32s operations, Int32s *line)
{
    const int32_t *gradient_start = p->operation_start.at;
    int64_t count = p->variable.count;
    int32_t again = (int32_t)p->again;
    for (int64_t e = 0; e < operations.count; e++) {
        int32_t x = operations.at[e];
        count += x >= 0 ? 1 : gradient_start[~x + 1] - gradient_start[~x];
    }
    *line = int32s(memory, count);
    COPY(line->at, p->variable.at, p->variable.count);
    Memory then = *memory;
    bool *has_run = ZEROS(memory, bool, p->forward);
    int32_t *next = line->at + p->variable.count;
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
}

void connect(Memory *memory, const NodeVariants *p, Int32s line, Rows *rows)
{
    const Rows *m = &p->rows;
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
    int32_t *runs = ZEROS(memory, int32_t, p->forward);
    reads = 0;
    for (int32_t row = 0; row < count; row++) {
        int32_t k = line.at[row];
        int32_t y = m->source.at[k] >= 0 ? m->source.at[k] : k; /* the variant that it stands for */
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
