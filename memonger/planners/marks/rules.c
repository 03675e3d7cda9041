#include "planners/marks/rules.h"

/* What is recomputed, and which of that is to be kept. Its memory is given back by obey. */
typedef struct {
    const GraphArrays *t;
    const Facts *facts;
    const bool *mask;
    bool *found;
    bool any;
} Search;

static void keep(Search *s, int64_t node)
{
    if (s->mask[node])
        s->found[node] = s->any = true;
}

/* Finds what rules 3 and 4 keep, as far as can be seen at once. */
static void find_unread(Memory *memory, Search *s, const RuleArrays *r, Int32s order, Int32s reads)
{
    const GraphArrays *t = s->t;
    const Facts *f = s->facts;
    const bool *held = f->held.at, *own_output = f->own_output.at;
    int64_t n = t->forward;
    bool *copied = ZEROS(memory, bool, n);
    for (int64_t i = 0; i < order.count; i++) {
        int64_t row = order.at[i], x = row - n;
        if (x < 0 || x >= n)
            continue;
        copied[x] = true;
        if (reads.at[t->output_start.at[row]] == 0 && !r->tolerant.at[x])
            keep(s, x);
    }
    /* Whether a gradient before its own depends on an output. */
    bool *tied = ZEROS(memory, bool, n);
    for (int64_t x = r->fusion ? n - 1 : -1; x >= 0; x--) {
        if (!copied[x])
            continue;
        tied[x] = own_output[x];
        /* A gradient of zeros depends on nothing before it. */
        int32_t stop = f->any_gradient.at[x] ? f->read_start.at[x + 1] : 0;
        for (int32_t q = f->read_start.at[x]; q < stop && !tied[x]; q++) {
            int32_t j = f->read.at[q];
            int64_t c = f->reader.at[j];
            tied[x] = copied[c] && f->passes.at[j] && (held[j] || own_output[c] || tied[c]);
        }
        if (!f->follows.at[x] || tied[x])
            continue;
        for (int32_t j = t->read_start.at[x]; j < t->read_start.at[x + 1]; j++)
            if (copied[t->read_row.at[j]] && !held[j])
                keep(s, x);
    }
}

/* Keeps the node of a row that is no gradient's, and those that read it. */
static void keep_around(Search *s, int64_t row)
{
    const Facts *facts = s->facts;
    if (row >= 2 * s->t->forward)
        return;
    int64_t x = row % s->t->forward;
    keep(s, x);
    for (int32_t q = facts->read_start.at[x]; q < facts->read_start.at[x + 1]; q++)
        keep(s, facts->reader.at[facts->read.at[q]]);
}

/* Keeps one node whose gradient holds the input over which an output of a row is written.
 *
 * If it is written over none, or no gradient holds it, keeps what is around the inputs. */
static void keep_holder(Search *s, int64_t row, int64_t place)
{
    const Facts *facts = s->facts;
    const int32_t *read_row = s->t->read_row.at;
    int32_t first = s->t->read_start.at[row], last = s->t->read_start.at[row + 1];
    int64_t n = s->t->forward, holder = -1;
    if (place >= 0 && row < 2 * n) {
        int64_t x = read_row[first + place] % n;
        for (int32_t q = facts->read_start.at[x]; q < facts->read_start.at[x + 1]; q++) {
            int32_t j = facts->read.at[q];
            int64_t reader = facts->reader.at[j];
            if (facts->held.at[j] && s->mask[reader] && holder != row % n)
                holder = reader == row % n ? reader : max(holder, reader);
        }
    }
    if (holder >= 0) {
        keep(s, holder);
        return;
    }
    keep_around(s, row);
    for (int32_t j = first; j < last; j++)
        keep_around(s, read_row[j]);
}

/* Finds what to keep of a plan where its layouts differ from those without a plan, if anything. */
static void find_other_layouts(
    Memory *memory, Search *s, const LayoutRule *rule, Bools mask, Int32s order, Int32s reads)
{
    const GraphArrays *t = s->t;
    Int64s made, found;
    Int32s place, entries;
    follow_layouts(memory, t, &rule->layouts, mask, order, reads, &made, &found, &place, &entries);
    bool *differs = NEW(memory, bool, found.count);
    bool any_differs = false;
    for (int64_t j = 0; j < found.count; j++) {
        int64_t now = found.at[j], usual = rule->found.at[j];
        differs[j] = now >= 0 && usual >= 0 && now != usual;
        any_differs |= differs[j];
    }
    if (!any_differs)
        return;
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        for (int32_t out = t->output_start.at[row]; out < t->output_start.at[row + 1]; out++) {
            bool other = made.at[out] != rule->made.at[out];
            if (other && place.at[out] != rule->place.at[out] && rule->matters.at[out] &&
                reads.at[out])
                keep_holder(s, row, place.at[out]);
        }
    }
    if (s->any)
        return;
    /* No output says why: keep what makes, is, and reads what the readers find otherwise. */
    for (int64_t i = 0; i < order.count; i++) {
        int32_t row = order.at[i];
        for (int32_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++) {
            if (differs[j]) {
                keep_around(s, row);
                keep_around(s, t->read_row.at[j]);
            }
        }
    }
    if (s->any)
        return;
    for (int64_t x = 0; x < mask.count; x++)
        keep(s, x);
}

/* Gives nodes that share a mark the same: recomputed if all may be. */
static void share(const RuleArrays *r, Bools mask)
{
    const int64_t *same = r->same.at;
    for (int64_t i = 0; i < mask.count; i++)
        mask.at[same[i]] &= mask.at[i];
    for (int64_t i = 0; i < mask.count; i++)
        mask.at[i] = mask.at[same[i]];
}

/* Keeps what no recomputed node reads, nor its gradient: nearly all that find_unread would find,
 * which needs an order for it. */
static void keep_unread(Memory *memory, const RuleArrays *r, Bools mask)
{
    const GraphArrays *t = &r->arrays;
    Memory then = *memory;
    bool *read = ZEROS(memory, bool, mask.count);
    for (int64_t x = mask.count - 1; x >= 0; x--) {
        if (!mask.at[x] || r->same.at[x] != x)
            continue;
        for (int32_t q = t->recomputed_start.at[x]; q < t->recomputed_start.at[x + 1]; q++)
            read[t->recomputed_row.at[q]] = true;
        if (!read[x] && !r->tolerant.at[x])
            mask.at[x] = false;
        else
            for (int32_t q = t->use_start.at[x]; q < t->use_start.at[x + 1]; q++)
                read[t->use_row.at[q]] = true;
    }
    give_back(memory, then);
}

void obey(Memory *memory, const RuleArrays *r, Bools mask, Int32s *order, Int32s *reads)
{
    int64_t n = mask.count;
    for (int64_t i = 0; i < n; i++)
        mask.at[i] &= r->allowed.at[i];
    share(r, mask);
    keep_unread(memory, r, mask);
    Memory then = *memory;
    while (true) {
        share(r, mask);
        order_and_reads(memory, &r->arrays, mask, order, reads);
        Memory ordered = *memory;
        Search s = {&r->arrays, &r->facts, mask.at, ZEROS(memory, bool, n), false};
        find_unread(memory, &s, r, *order, *reads);
        if (!s.any && r->layouts.active)
            find_other_layouts(memory, &s, &r->layouts, mask, *order, *reads);
        for (int64_t i = 0; i < n; i++)
            mask.at[i] &= !s.found[i];
        give_back(memory, s.any ? then : ordered);
        if (!s.any)
            return;
    }
}
