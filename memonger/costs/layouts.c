#include "costs/layouts.h"

int64_t find_layout(
    int64_t code, int64_t number, int64_t place, int64_t before, Int64s inputs, Bools plays)
{
    const int64_t *input = inputs.at;
    if (code == KEEPS)
        return before;
    int64_t first = PLAIN; /* the layout of the first input that is not plain */
    bool alike = true;
    for (int64_t j = 0; j < inputs.count; j++)
        if (plays.at[j]) {
            if (first == PLAIN)
                first = input[j];
            alike = alike && input[j] == input[0];
        }
    if (code == ALWAYS_PLAIN || (code < CHOSEN && first == PLAIN && before == PLAIN))
        return PLAIN;
    if (place != ADDED) {
        if (code == COPIES || (place != NOT_IN_PLACE && code < OTHER))
            return before;
        if ((code == SUMS && (alike || first == BLOCKS)) || (code == ALIKE && alike))
            return first;
        if (code == FIRST)
            return input[0];
        if (code == USUAL || (code == PASSES && input[0] == BLOCKS) ||
            (code == POOLING_GRADIENT && input[inputs.count / 2] == BLOCKS))
            return BLOCKS;
        if (code == NORM_GRADIENT) {
            if (input[3] == BLOCKS || input[3] == input[0])
                return input[3];
            if (input[3] == PLAIN)
                return input[0];
        }
    }
    /* An unknown layout: a number for each combination of operator, place and input layouts. */
    uint64_t layout = ((uint64_t)number * 31 + (uint64_t)place) * 1000003 + (uint64_t)before;
    for (int64_t j = 0; j < inputs.count; j++)
        if (plays.at[j])
            layout = layout * 1000003 + (uint64_t)input[j];
    return (int64_t)(layout & 0x3FFFFFFFFFFFFFFF) + 2;
}

/* The layouts of a step as it runs. */
typedef struct {
    const GraphArrays *t;
    const LayoutArrays *layouts;
    const Step *step;
    const int32_t *planned, *block; /* by entry; block: after add_in_place */
    int64_t *written, *read;        /* layouts, by entry and by read */
    int64_t *now;                   /* by block: its layout */
    int64_t *shape;                 /* by block: the shape that it is laid out for */
    int32_t *place;
} State;

/* Returns the layout in which an entry is read. Nothing reads the blocks of another shape. */
static int64_t layout_of(const State *s, int32_t entry)
{
    int32_t block = s->block[entry];
    if (block < 0)
        return s->written[entry];
    return s->shape[block] == s->layouts->shape.at[entry] ? s->now[block] : PLAIN;
}

/* Finds the layouts of the inputs of a row. */
static void read_layouts(const State *s, int32_t row)
{
    int64_t first = s->t->read_start.at[row], begin = s->t->output_start.at[row];
    int64_t *read = s->read;
    for (int64_t j = first; j < s->t->read_start.at[row + 1]; j++)
        read[j] = layout_of(s, s->step->entry.at[j]);
    /* The gradient of BatchNorm converts a plain gradient to the blocks of its data
     * (MKLDNNBatchNormBackwardImpl). */
    if (s->t->output_start.at[row + 1] > begin && s->layouts->code.at[begin] == NORM_GRADIENT)
        if (read[first + 3] == BLOCKS && read[first] == PLAIN)
            read[first] = BLOCKS;
}

static int32_t find_place(const State *s, int32_t row, int64_t out)
{
    const int32_t *planned = s->planned, *read_start = s->t->read_start.at;
    if (s->block[out] != planned[out])
        return ADDED;
    for (int32_t j = read_start[row]; planned[out] >= 0 && j < read_start[row + 1]; j++)
        if (planned[s->step->entry.at[j]] == planned[out])
            return j - read_start[row];
    return NOT_IN_PLACE;
}

/* Finds the places of the outputs of a row and their layouts. */
static void write_layouts(const State *s, int32_t row)
{
    int64_t first = s->t->read_start.at[row], count = s->t->read_start.at[row + 1] - first;
    const LayoutArrays *l = s->layouts;
    bool is_added = false; /* whether the term is added to the sum already */
    if (l->adding.at[row]) {
        int32_t term = s->step->entry.at[first + 1];
        is_added = s->block[term] != s->planned[term];
    }
    for (int64_t out = s->t->output_start.at[row]; out < s->t->output_start.at[row + 1]; out++) {
        int64_t before = s->block[out] < 0 ? PLAIN : s->now[s->block[out]];
        if (is_added) {
            s->written[out] = before;
            continue;
        }
        int32_t place = s->place[out] = find_place(s, row, out);
        if (place == NOT_IN_PLACE)
            before = PLAIN;
        if (s->step->reads.at[out] > 0) {
            Int64s inputs = {s->read + first, count};
            Bools plays = {l->plays.at + first, count};
            s->written[out] = find_layout(
                l->code.at[out], l->number.at[out], place, before, inputs, plays);
        }
    }
}

void lead_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, const Step *step,
    Int32s planned, Int32s block, Int64s want_read, Int64s want_written, Int64s *written,
    Int64s *read, Int32s *place, Bools *other_read, Bools *other_written)
{
    int64_t outputs = t->elements.count, inputs = t->read_row.count;
    *written = (Int64s){ZEROS(memory, int64_t, outputs), outputs};
    *read = int64s(memory, inputs);
    *place = int32s(memory, outputs);
    *other_read = (Bools){ZEROS(memory, bool, inputs), inputs};
    *other_written = (Bools){ZEROS(memory, bool, outputs), outputs};
    for (int64_t j = 0; j < inputs; j++)
        read->at[j] = ANY_LAYOUT;
    for (int64_t out = 0; out < outputs; out++)
        place->at[out] = NOT_IN_PLACE;
    Memory then = *memory;
    int64_t *now = ZEROS(memory, int64_t, outputs), *shape = ZEROS(memory, int64_t, outputs);
    const int32_t *entry = step->entry.at;
    State s = {
        t, layouts, step, planned.at, block.at, written->at, read->at, now, shape, place->at,
    };
    for (int64_t i = 0; i < step->order.count; i++) {
        int32_t row = step->order.at[i];
        if (t->variable.at[row])
            continue;
        read_layouts(&s, row);
        bool other = false;
        for (int64_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++) {
            if (!want_read.count || want_read.at[j] == ANY_LAYOUT || read->at[j] == want_read.at[j])
                continue;
            other_read->at[j] = other = true;
            if (block.at[entry[j]] >= 0)
                now[block.at[entry[j]]] = PLAIN;
        }
        if (other)
            read_layouts(&s, row);
        write_layouts(&s, row);
        for (int64_t out = t->output_start.at[row]; out < t->output_start.at[row + 1]; out++) {
            int64_t *layout = written->at + out;
            int32_t b = block.at[out];
            if (b >= 0 && (place->at[out] == NOT_IN_PLACE || *layout != now[b]))
                shape[b] = layouts->shape.at[out];
            if (b >= 0)
                now[b] = *layout;
            *layout = layout_of(&s, (int32_t)out);
            int64_t want = want_written.count ? want_written.at[out] : ANY_LAYOUT;
            if (want == ANY_LAYOUT || want == *layout)
                continue;
            other_written->at[out] = true;
            *layout = want;
            if (b >= 0) {
                now[b] = want;
                shape[b] = layouts->shape.at[out];
            }
        }
    }
    give_back(memory, then);
}

void follow_layouts(
    Memory *memory, const GraphArrays *t, const LayoutArrays *layouts, const Step *step,
    Int64s *written, Int64s *read, Int32s *place)
{
    Int64s any = {0};
    Int32s planned, block;
    Bools other_read, other_written;
    allocate(memory, t, step, 0, INFINITY, &planned);
    add_in_place(memory, t, step, layouts->adding, planned, &block);
    lead_layouts(
        memory, t, layouts, step, planned, block, any, any, written, read, place, &other_read,
        &other_written);
}
