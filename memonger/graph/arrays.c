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
