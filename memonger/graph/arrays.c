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
                reader->at[count++] = ORIGINAL;
            }
            if (depth < 0)
                break;
            row = before.at[next[depth]];
            read_by = owner.at[next[depth]++];
        }
    }
    order->count = reader->count = count;
}

/* Lists the rows that run, in order. */
static Int32s find_order(Memory *memory, const GraphArrays *t, const bool *recomputed)
{
    int32_t n = (int32_t)t->forward_nodes;
    const int32_t *before_start = t->before_start.at;
    Int32s order = int32s(memory, t->first.count + t->walk_row.count + n);
    int64_t count = t->first.count;
    COPY(order.at, t->first.at, count);
    Memory then = *memory;
    bool *done = NEW(memory, bool, n); /* whether a copy is listed, or is not needed */
    int32_t *stack = NEW(memory, int32_t, n), *next = NEW(memory, int32_t, n);
    for (int32_t x = 0; x < n; x++)
        done[x] = !recomputed[x];
    COPY(next, before_start, n);
    for (int64_t i = 0; i < t->walk_row.count; i++) {
        int32_t row = t->walk_row.at[i], depth = 0;
        if (row >= n) {
            order.at[count++] = row;
            continue;
        }
        if (done[row] || !recomputed[t->walk_owner.at[i]])
            continue;
        done[row] = true;
        stack[0] = row;
        while (depth >= 0) {
            int32_t x = stack[depth];
            if (next[x] == before_start[x + 1]) {
                order.at[count++] = x + n;
                depth--;
                continue;
            }
            int32_t before = t->before_row.at[next[x]++];
            if (!done[before]) {
                done[before] = true;
                stack[++depth] = before;
            }
        }
    }
    give_back(memory, then);
    order.count = count;
    return order;
}

void find_step(Memory *memory, const GraphArrays *t, Bools recomputed, Step *step)
{
    const bool *mask = recomputed.at, *holds = t->read_holds.at;
    const int32_t *owner = t->read_owner.at, *read_row = t->read_row.at;
    int32_t to_copy = t->output_start.at[t->forward_nodes]; /* from an entry to that of its copy */
    Int32s order = find_order(memory, t, mask);
    Int32s entry = int32s(memory, t->read_entry.count);
    Int32s head = int32s(memory, t->head_row.count);
    Int32s reads = int32s(memory, t->first_reads.count);
    COPY(entry.at, t->read_entry.at, entry.count);
    COPY(reads.at, t->first_reads.at, reads.count);
    for (int64_t h = 0; h < head.count; h++) {
        int32_t row = t->head_row.at[h], by = t->head_owner.at[h];
        bool of_copy = by != ORIGINAL && mask[by] && mask[row];
        head.at[h] = t->output_start.at[row] + t->head_output.at[h] + (of_copy ? to_copy : 0);
        reads.at[head.at[h]]++;
    }
    for (int64_t i = t->first.count; i < order.count; i++) {
        int32_t row = order.at[i];
        for (int32_t q = t->pooled_start.at[row]; q < t->pooled_start.at[row + 1]; q++) {
            int32_t j = t->pooled_read.at[q], read = entry.at[j];
            if (owner[j] != ORIGINAL && mask[owner[j]] && mask[read_row[j]])
                entry.at[j] = read += to_copy;
            reads.at[read] += holds[j];
        }
    }
    *step = (Step){order, entry, head, reads};
}
