#include "planners/marks/rules.h"

/* The nodes of a mask that the rules keep. apply_rules gives its memory back. */
typedef struct {
    const RuleArrays *r;
    const bool *mask;
    bool *kept;
    bool any;
} Keeping;

static void keep(Keeping *k, int64_t node)
{
    if (k->mask[node])
        k->kept[node] = k->any = true;
}

/* Keeps nodes by rules 3 and 4, for this step: keeping them may leave others without a reader. */
static void keep_unread(Memory *memory, Keeping *k, const Step *step)
{
    const RuleArrays *r = k->r;
    const GraphArrays *t = &r->arrays;
    const bool *held = r->held.at, *own_output = r->own_output.at;
    int64_t n = t->forward_nodes;
    bool *copied = ZEROS(memory, bool, n);
    for (int64_t i = 0; i < step->order.count; i++) {
        int64_t row = step->order.at[i], x = row - n;
        if (x < 0 || x >= n)
            continue;
        copied[x] = true;
        if (step->reads.at[t->output_start.at[row]] == 0 && !r->tolerant.at[x])
            keep(k, x);
    }
    /* Whether a gradient before its own depends on an output. */
    bool *tied = ZEROS(memory, bool, n);
    for (int64_t x = r->fusion ? n - 1 : -1; x >= 0; x--) {
        if (!copied[x])
            continue;
        tied[x] = own_output[x];
        /* A gradient of zeros does not depend on other gradients. */
        int32_t stop = r->any_gradient.at[x] ? r->used_start.at[x + 1] : 0;
        for (int32_t q = r->used_start.at[x]; q < stop && !tied[x]; q++) {
            int32_t j = r->used_by.at[q];
            int64_t c = r->reader.at[j];
            tied[x] = copied[c] && r->passes.at[j] && (held[j] || own_output[c] || tied[c]);
        }
        if (!r->follows.at[x] || tied[x])
            continue;
        for (int32_t j = t->read_start.at[x]; j < t->read_start.at[x + 1]; j++)
            if (copied[t->read_row.at[j]] && !held[j])
                keep(k, x);
    }
}

/* Keeps the node of a forward row or of a copy, and its readers. */
static void keep_around(Keeping *k, int64_t row)
{
    const RuleArrays *r = k->r;
    if (row >= 2 * r->arrays.forward_nodes)
        return;
    int64_t x = row % r->arrays.forward_nodes;
    keep(k, x);
    for (int32_t q = r->used_start.at[x]; q < r->used_start.at[x + 1]; q++)
        keep(k, r->reader.at[r->used_by.at[q]]);
}

/* Keeps one operator whose gradient reads the input ``place`` that a row overwrites. That input
 * then stays alive, so that the row cannot overwrite it. If there is no such operator, keeps the
 * nodes around the row and its inputs. */
static void keep_holder(Keeping *k, int64_t row, int64_t place)
{
    const RuleArrays *r = k->r;
    const int32_t *read_row = k->r->arrays.read_row.at;
    int32_t first = k->r->arrays.read_start.at[row], last = k->r->arrays.read_start.at[row + 1];
    int64_t n = k->r->arrays.forward_nodes, holder = -1;
    if (place >= 0 && row < 2 * n) {
        int64_t x = read_row[first + place] % n;
        for (int32_t q = r->used_start.at[x]; q < r->used_start.at[x + 1]; q++) {
            int32_t j = r->used_by.at[q];
            int64_t reader = r->reader.at[j];
            if (r->held.at[j] && k->mask[reader] && holder != row % n)
                holder = reader == row % n ? reader : max(holder, reader);
        }
    }
    if (holder >= 0) {
        keep(k, holder);
        return;
    }
    keep_around(k, row);
    for (int32_t j = first; j < last; j++)
        keep_around(k, read_row[j]);
}

/* Keeps nodes by rule 5: some of those around a layout that differs from that without a plan. */
static void keep_layouts(Memory *memory, Keeping *k, Bools mask, const Step *step)
{
    const UsualLayouts *usual = &k->r->layouts;
    const GraphArrays *t = &k->r->arrays;
    Int64s output_layout, read_layout;
    Int32s order = step->order, place;
    follow_layouts(memory, t, &usual->facts, step, &output_layout, &read_layout, &place);
    bool *differs = NEW(memory, bool, read_layout.count);
    bool any_differs = false;
    for (int64_t j = 0; j < read_layout.count; j++) {
        int64_t now = read_layout.at[j], before = usual->read.at[j];
        differs[j] = now >= 0 && before >= 0 && now != before;
        any_differs |= differs[j];
    }
    /* A row must overwrite blocks and cannot, because a recomputed row reads them later. */
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i], out = t->output_start.at[row], j = t->read_start.at[row];
        if (usual->facts.code.at[out] == IN_PLACE && place.at[out] == NOT_IN_PLACE &&
            usual->place.at[out] != NOT_IN_PLACE && read_layout.at[j] != PLAIN) {
            keep_around(k, row);
            keep_around(k, t->read_row.at[j]);
        }
    }
    if (!any_differs || k->any)
        return;
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        for (int32_t out = t->output_start.at[row]; out < t->output_start.at[row + 1]; out++) {
            bool is_other = output_layout.at[out] != usual->written.at[out];
            if (is_other && place.at[out] != usual->place.at[out] && usual->matters.at[out] &&
                step->reads.at[out])
                keep_holder(k, row, place.at[out]);
        }
    }
    if (k->any)
        return;
    /* No output is the cause: keep the nodes that write or read a tensor of another layout. */
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        for (int32_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++) {
            if (differs[j]) {
                keep_around(k, row);
                keep_around(k, t->read_row.at[j]);
            }
        }
    }
    if (k->any)
        return;
    for (int64_t x = 0; x < mask.count; x++)
        keep(k, x);
}

/* Gives nodes that share a mark the same one: they are recomputed if all of them may be. */
static void share(const RuleArrays *r, Bools mask)
{
    const int64_t *same = r->same.at;
    for (int64_t i = 0; i < mask.count; i++)
        mask.at[same[i]] &= mask.at[i];
    for (int64_t i = 0; i < mask.count; i++)
        mask.at[i] = mask.at[same[i]];
}

/* Keeps nodes that neither a recomputed node nor its gradient reads. These are nearly all nodes
 * that keep_unread would keep, but it needs an execution order, which is slower. */
static void keep_surely_unread(Memory *memory, const RuleArrays *r, Bools mask)
{
    const GraphArrays *t = &r->arrays;
    int64_t n = mask.count, reads = t->read_row.count;
    Memory then = *memory;
    bool *read = ZEROS(memory, bool, n);
    for (int64_t j = t->read_start.at[2 * n]; j < reads; j++)
        if (t->read_owner.at[j] != ORIGINAL && mask.at[t->read_owner.at[j]] && t->read_holds.at[j])
            read[t->read_row.at[j]] = true;
    for (int64_t x = n - 1; x >= 0; x--) {
        if (!mask.at[x] || r->same.at[x] != x)
            continue;
        if (!read[x] && !r->tolerant.at[x])
            mask.at[x] = false;
        else
            for (int32_t j = t->read_start.at[x]; j < t->read_start.at[x + 1]; j++)
                if (t->read_holds.at[j])
                    read[t->read_row.at[j]] = true;
    }
    give_back(memory, then);
}

void apply_rules(Memory *memory, const RuleArrays *r, Bools mask, Step *step)
{
    int64_t n = mask.count;
    for (int64_t i = 0; i < n; i++)
        mask.at[i] &= r->recomputable.at[i];
    share(r, mask);
    keep_surely_unread(memory, r, mask);
    Memory then = *memory;
    while (true) {
        share(r, mask);
        find_step(memory, &r->arrays, mask, step);
        Memory ordered = *memory;
        Keeping k = {r, mask.at, ZEROS(memory, bool, n), false};
        keep_unread(memory, &k, step);
        if (!k.any && r->layouts.read.count)
            keep_layouts(memory, &k, mask, step);
        for (int64_t i = 0; i < n; i++)
            mask.at[i] &= !k.kept[i];
        give_back(memory, k.any ? then : ordered);
        if (!k.any)
            return;
    }
}
