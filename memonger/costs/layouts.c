#include "costs/layouts.h"

int64_t find_layout(
    int64_t code, int64_t number, int64_t place, int64_t before, Int64s found, Bools plays)
{
    const int64_t *at = found.at;
    if (code == KEEPS)
        return before;
    int64_t first = PLAIN; /* that is not */
    bool alike = true;
    for (int64_t j = 0; j < found.count; j++)
        if (plays.at[j]) {
            if (first == PLAIN)
                first = at[j];
            alike = alike && at[j] == at[0];
        }
    if (code == ALWAYS_PLAIN || (code < CHOSEN && first == PLAIN && before == PLAIN))
        return PLAIN;
    if (place != ADDED) {
        if (code == COPIES || (place != NOT_IN_PLACE && code < OTHER))
            return before;
        if ((code == SUMS && (alike || first == BLOCKS)) || (code == ALIKE && alike))
            return first;
        if (code == FIRST)
            return at[0];
        if (code == USUAL || (code == PASSES && at[0] == BLOCKS) ||
            (code == POOLING_GRADIENT && at[found.count / 2] == BLOCKS))
            return BLOCKS;
        if (code == NORM_GRADIENT) {
            if (at[3] == BLOCKS || at[3] == at[0])
                return at[3];
            if (at[3] == PLAIN)
                return at[0];
        }
    }
    uint64_t symbol = ((uint64_t)number * 31 + (uint64_t)place) * 1000003 + (uint64_t)before;
    for (int64_t j = 0; j < found.count; j++)
        if (plays.at[j])
            symbol = symbol * 1000003 + (uint64_t)at[j];
    return (int64_t)(symbol & 0x3FFFFFFFFFFFFFFF) + 2;
}

/* Layouts as they are followed: what is found so far, and that of each block as it is ``now``. */
typedef struct {
    const GraphArrays *t;
    const LayoutArrays *layouts;
    const int32_t *entries, *planned, *blocks; /* blocks: with the terms of sums in place */
    int64_t *made, *found, *now;
    int32_t *place;
} State;

/* Looks up what a row finds. */
static void find(const State *s, int32_t row)
{
    int64_t first = s->t->read_start.at[row], last = s->t->read_start.at[row + 1];
    int64_t begin = s->t->output_start.at[row], end = s->t->output_start.at[row + 1];
    int64_t *found = s->found;
    for (int64_t j = first; j < last; j++) {
        int32_t entry = s->entries[j], block = s->blocks[entry];
        found[j] = block < 0 ? s->made[entry] : s->now[block];
    }
    /* The gradient of BatchNorm brings what is plain into the blocks of its data
     * (MKLDNNBatchNormBackwardImpl). */
    if (end > begin && s->layouts->code.at[begin] == NORM_GRADIENT)
        if (found[first + 3] == BLOCKS && found[first] == PLAIN)
            found[first] = BLOCKS;
}

/* Tells in the place of which input an output is. */
static int32_t place_of(const State *s, int32_t row, int64_t out)
{
    const int32_t *planned = s->planned, *read_start = s->t->read_start.at;
    if (s->blocks[out] != planned[out])
        return ADDED;
    for (int32_t j = read_start[row]; planned[out] >= 0 && j < read_start[row + 1]; j++)
        if (planned[s->entries[j]] == planned[out])
            return j - read_start[row];
    return NOT_IN_PLACE;
}

/* Tells where the outputs of a row are, and how it lays them out. */
static void make(const State *s, int32_t row, const int32_t *reads)
{
    int64_t first = s->t->read_start.at[row], inputs = s->t->read_start.at[row + 1] - first;
    const LayoutArrays *l = s->layouts;
    bool is_there = false; /* the sum */
    if (l->adding.at[row]) {
        int32_t term = s->entries[first + 1];
        is_there = s->blocks[term] != s->planned[term];
    }
    for (int64_t out = s->t->output_start.at[row]; out < s->t->output_start.at[row + 1]; out++) {
        int64_t before = s->blocks[out] < 0 ? PLAIN : s->now[s->blocks[out]];
        if (is_there) {
            s->made[out] = before;
            continue;
        }
        int32_t place = s->place[out] = place_of(s, row, out);
        if (place == NOT_IN_PLACE)
            before = PLAIN;
        if (reads[out] > 0) {
            Int64s found = {s->found + first, inputs};
            Bools plays = {l->plays.at + first, inputs};
            s->made[out] = find_layout(
                l->code.at[out], l->number.at[out], place, before, found, plays);
        }
    }
}

void lead_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, Bools recomputed,
    Int32s order, Int32s reads, Int64s want_found, Int64s want_made, Int64s *made, Int64s *found,
    Int32s *place, Int32s *entries, Bools *other_found, Bools *other_made)
{
    int64_t outputs = t->elements.count, inputs = t->read_row.count;
    *made = (Int64s){ZEROS(memory, int64_t, outputs), outputs};
    *found = int64s(memory, inputs);
    *place = int32s(memory, outputs);
    *other_found = (Bools){ZEROS(memory, bool, inputs), inputs};
    *other_made = (Bools){ZEROS(memory, bool, outputs), outputs};
    for (int64_t j = 0; j < inputs; j++)
        found->at[j] = -1;
    for (int64_t out = 0; out < outputs; out++)
        place->at[out] = NOT_IN_PLACE;
    find_read_entries(memory, t, recomputed, entries);
    Memory then = *memory;
    Int32s planned, blocks;
    allocate(memory, t, &(Fused){0}, recomputed, order, reads, 0, INFINITY, &planned);
    add_in_place(memory, t, recomputed, order, layouts->adding, planned, &blocks);
    int64_t *now = ZEROS(memory, int64_t, outputs);
    State s = {
        t, layouts, entries->at, planned.at, blocks.at, made->at, found->at, now, place->at,
    };
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        if (t->variable.at[row])
            continue;
        find(&s, row);
        bool other = false;
        for (int64_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++) {
            if (!want_found.count || want_found.at[j] < 0 || found->at[j] == want_found.at[j])
                continue;
            other_found->at[j] = other = true;
            if (blocks.at[entries->at[j]] >= 0)
                now[blocks.at[entries->at[j]]] = PLAIN;
        }
        if (other)
            find(&s, row);
        make(&s, row, reads.at);
        for (int64_t out = t->output_start.at[row]; out < t->output_start.at[row + 1]; out++) {
            if (want_made.count && want_made.at[out] >= 0 && want_made.at[out] != made->at[out]) {
                other_made->at[out] = true;
                made->at[out] = want_made.at[out];
            }
            if (blocks.at[out] >= 0)
                now[blocks.at[out]] = made->at[out];
        }
    }
    give_back(memory, then);
}

void follow_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, Bools recomputed,
    Int32s order, Int32s reads, Int64s *made, Int64s *found, Int32s *place, Int32s *entries)
{
    Int64s any = {0};
    Bools other_found, other_made;
    lead_layouts(memory, t, layouts, recomputed, order, reads, any, any, made, found, place, entries,
         &other_found, &other_made);
}
