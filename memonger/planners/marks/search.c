#include "planners/marks/search.h"

/* Returns the nodes that a state recomputes, before the rules are applied. */
static Bools mask_without_rules(Memory *memory, const Space *s, Int8s state)
{
    int64_t cuts = s->after.count, n = s->forced.count, end = n;
    bool *mask = NEW(memory, bool, n);
    for (int64_t k = 0; k < cuts; k++)
        if (state.at[k])
            end = s->after.at[k] + 1;
    for (int64_t i = 0; i < n; i++)
        mask[i] = i < end;
    for (int64_t k = 0; k < cuts; k++)
        for (int64_t q = s->keep_start.at[k]; state.at[k] && q < s->keep_start.at[k + 1]; q++)
            mask[s->keep.at[q]] = false;
    for (int64_t i = 0; i < n; i++)
        mask[i] |= s->forced.at[i];
    for (int64_t k = 0; k < s->saved.count; k++) {
        int64_t node = s->saved.at[k];
        if (!mask[node]) /* a saved node needs no identity, so this one is recomputed */
            for (int64_t i = node + 1; i <= s->identities.at[k]; i++)
                mask[i] = true;
    }
    return (Bools){mask, n};
}

void read_state(Memory *memory, const Space *s, Int8s state, Bools *mask, Step *step)
{
    *mask = mask_without_rules(memory, s, state);
    apply_rules(memory, &s->rules, *mask, step);
}

/* Returns the seconds of recomputation in a step whose rows run in this order. */
static double added_seconds(const Space *s, Int32s order)
{
    int64_t n = s->seconds.count;
    double seconds = 0;
    for (int64_t i = 0; i < order.count; i++)
        if (order.at[i] >= n && order.at[i] < 2 * n)
            seconds += s->seconds.at[order.at[i] - n];
    return seconds;
}

static int64_t pool_of(Memory *memory, const Space *s, const Step *step, double limit)
{
    Int32s block;
    return allocate_least(memory, &s->rules.arrays, step, s->match_ranges, limit, &block);
}

int64_t evaluate_state(Memory *memory, const Space *s, Int8s state, double *seconds)
{
    Bools mask;
    Step step;
    read_state(memory, s, state, &mask, &step);
    *seconds = added_seconds(s, step.order);
    return pool_of(memory, s, &step, INFINITY);
}

/* Draws a distance other than 0, mostly small (Cauchy). */
static int64_t near(Random *random)
{
    const double pi = 3.14159265358979323846;
    int64_t distance = (int64_t)nearbyint(tan(pi * (uniform(random) - 0.5)) * 3);
    if (distance == 0)
        distance = uniform(random) < 0.5 ? 1 : -1;
    return distance;
}

/* Draws one of the ``count`` cuts of a state. */
static int64_t draw_cut(Random *random, const int8_t *is_cut, int64_t count)
{
    int64_t left = below(random, count), k = 0;
    while (!is_cut[k] || left-- > 0)
        k++;
    return k;
}

/* Moves, drops or adds a cut; ``count`` cuts are possible. */
static void move_cut(Random *random, int8_t *is_cut, int64_t count)
{
    int64_t cuts = 0;
    for (int64_t k = 0; k < count; k++)
        cuts += is_cut[k] != 0;
    double move = uniform(random);
    if (move < 0.6 && cuts) {
        int64_t k = draw_cut(random, is_cut, cuts);
        is_cut[k] = false;
        is_cut[min(count - 1, max(0, k + near(random)))] = true;
    } else if (move < 0.8 && cuts > 1) {
        is_cut[draw_cut(random, is_cut, cuts)] = false;
    } else {
        is_cut[below(random, count)] = true;
    }
}

static Int8s as_state(Bytes state) { return (Int8s){(int8_t *)state.at, state.count}; }

static Bytes change_state(Memory *memory, const Search *search, Random *random, Bytes old)
{
    (void)search;
    Int8s state = {NEW(memory, int8_t, old.count), old.count};
    COPY(state.at, as_state(old).at, old.count);
    move_cut(random, state.at, state.count);
    return (Bytes){(char *)state.at, state.count};
}

static int64_t slot_of_mask(const Memo *memo, Bools mask)
{
    uint64_t hash = hash_of(0);
    for (int64_t i = 0; i < mask.count; i++)
        hash = hash_with(hash, mask.at[i]);
    return find_slot(memo, hash);
}

static bool price_state(
    Memory *memory, const Search *search, Bytes bytes, double most, const Memo *memo, Price *price)
{
    const Space *s = search->space;
    Memory then = *memory;
    Bools mask = mask_without_rules(memory, s, as_state(bytes));
    int64_t slot = slot_of_mask(memo, mask), *pool = &memo->pools.at[slot];
    double *seconds = &memo->seconds.at[slot], *priced_to = &memo->limits.at[slot];
    if (*priced_to < 0 || (*pool < 0 && *priced_to < most)) {
        Step step;
        apply_rules(memory, &s->rules, mask, &step);
        *seconds = added_seconds(s, step.order);
        *pool = pool_of(memory, s, &step, most);
        if (*pool > most)
            *pool = OVER_LIMIT;
        *priced_to = fmax(0, most);
    }
    give_back(memory, then);
    *price = (Price){(double)*pool, *seconds, *pool, *seconds};
    return *pool >= 0 && *pool <= most;
}

void anneal_masks(
    Memory *memory, const Space *s, Int8s state, const Cooling *cooling, const Memo *memo,
    const Archive *archive, Int64s stop, Int64s done, Int8s *best)
{
    Search search = {change_state, price_state, false, s, NULL, state.count};
    Cooling changing = *cooling;
    if (s->after.count == 0)
        changing.tries = 0;
    Bytes start = {(char *)state.at, state.count};
    *best = as_state(anneal(memory, &search, start, &changing, memo, archive, stop, done));
}
