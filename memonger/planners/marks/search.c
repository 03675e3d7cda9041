#include "planners/marks/search.h"

/* Finds the nodes that a state would recompute if there were no rules. */
static Bools mask_without_rules(Memory *memory, const Space *s, Int8s state)
{
    int64_t cuts = s->after.count, n = state.count - cuts, end = n;
    const int8_t *is_cut = state.at, *nodes = state.at + cuts;
    bool *mask = NEW(memory, bool, n);
    for (int64_t k = 0; k < cuts; k++)
        if (is_cut[k])
            end = s->after.at[k] + 1;
    for (int64_t i = 0; i < n; i++)
        mask[i] = i < end;
    for (int64_t k = 0; k < cuts; k++)
        for (int64_t q = s->keep_start.at[k]; is_cut[k] && q < s->keep_start.at[k + 1]; q++)
            mask[s->keep.at[q]] = false;
    for (int64_t i = 0; i < n; i++)
        if (nodes[i] != AS_CUTS)
            mask[i] = nodes[i] == RECOMPUTED;
    for (int64_t i = 0; i < n; i++)
        mask[i] |= s->wished.at[i];
    for (int64_t k = 0; k < s->copied.count; k++) {
        int64_t node = s->copied.at[k];
        if (!mask[node]) /* an identity of what is saved itself costs nothing */
            for (int64_t i = node + 1; i <= s->copies.at[k]; i++)
                mask[i] = true;
    }
    return (Bools){mask, n};
}

void read_state(
    Memory *memory, const Space *s, Int8s state, Bools *mask, Int32s *order, Int32s *reads)
{
    *mask = mask_without_rules(memory, s, state);
    obey(memory, &s->rules, *mask, order, reads);
}

static void write_state(const Space *s, Bools mask, Int8s state)
{
    int64_t cuts = s->after.count;
    FILL(state.at, 0, cuts);
    for (int64_t i = 0; i < mask.count; i++)
        state.at[cuts + i] = mask.at[i] ? RECOMPUTED : SAVED;
}

void make_state(Memory *memory, const Space *s, Bools mask, Int8s *state)
{
    state->count = s->after.count + mask.count;
    state->at = NEW(memory, int8_t, state->count);
    write_state(s, mask, *state);
}

/* Adds up the seconds that a plan adds to a step whose rows run in this order. */
static double added_seconds(const Space *s, Bools mask, Int32s order)
{
    int64_t n = mask.count;
    double seconds = 0;
    for (int64_t i = 0; i < order.count; i++)
        if (order.at[i] >= n && order.at[i] < 2 * n)
            seconds += s->seconds.at[order.at[i] - n];
    for (int64_t k = 0; k < s->copied.count; k++)
        if (mask.at[s->copied.at[k]] && !mask.at[s->copies.at[k]])
            seconds += s->copy_seconds.at[k];
    return seconds;
}

static int64_t pool_of(
    Memory *memory, const Space *s, Bools mask, Int32s order, Int32s reads, double limit)
{
    Int32s block;
    const GraphArrays *t = &s->rules.arrays;
    return allocate_least(memory, t, mask, order, reads, s->match_ranges, limit, &block);
}

int64_t evaluate_state(Memory *memory, const Space *s, Int8s state, double *seconds)
{
    Bools mask;
    Int32s order, reads;
    read_state(memory, s, state, &mask, &order, &reads);
    *seconds = added_seconds(s, mask, order);
    return pool_of(memory, s, mask, order, reads, INFINITY);
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

/* Sets some flippable nodes that follow each other to one of the last so many values. */
static void flip(Random *random, const Space *s, int8_t *nodes, int64_t values)
{
    int64_t count = s->flippable.count, first = below(random, count), last = first;
    while (last + 1 < count && uniform(random) < 0.8)
        last++;
    int8_t value = (int8_t)(3 - values + below(random, values));
    for (int64_t q = first; q <= last; q++)
        nodes[s->flippable.at[q]] = value;
}

/* Draws one of the cuts that are made, of which there are ``count``. */
static int64_t draw_cut(Random *random, const int8_t *is_cut, int64_t count)
{
    int64_t left = below(random, count), k = 0;
    while (!is_cut[k] || left-- > 0)
        k++;
    return k;
}

/* Moves, leaves out or makes one of ``count`` possible cuts. */
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

/* Sets what is alive at a cut; there is none at -1, nor beyond the last. */
static void save(const Space *s, int8_t *nodes, int64_t cut, int8_t value)
{
    if (cut < 0 || cut >= s->after.count)
        return;
    for (int64_t q = s->keep_start.at[cut]; q < s->keep_start.at[cut + 1]; q++)
        nodes[s->keep.at[q]] = value;
}

/* Sets what is between two cuts, or saves at another cut what is saved at one. */
static void set_nodes(Random *random, const Space *s, int8_t *nodes, int64_t count)
{
    int64_t cuts = s->after.count;
    double kind = uniform(random);
    if (kind < 0.6) {
        int64_t first = below(random, cuts + 1) - 1, distance = near(random);
        int64_t last = min(cuts, first + max(distance, -distance));
        int64_t start = first >= 0 ? s->after.at[first] + 1 : 0;
        int64_t stop = last < cuts ? s->after.at[last] + 1 : count;
        int64_t choice = below(random, 3);
        for (int64_t i = start; i < stop; i++) {
            bool recomputed = choice == 0 || (choice == 1 && !s->costly.at[i]);
            nodes[i] = recomputed ? RECOMPUTED : SAVED;
        }
        save(s, nodes, first, SAVED);
        save(s, nodes, last, SAVED);
    } else {
        int64_t cut = below(random, cuts);
        save(s, nodes, cut, RECOMPUTED);
        if (kind < 0.87)
            save(s, nodes, min(cuts - 1, max(0, cut + near(random))), SAVED);
    }
}

static Int8s as_state(Bytes state) { return (Int8s){(int8_t *)state.at, state.count}; }

static Bytes change_state(Memory *memory, const Search *search, Random *random, Bytes old)
{
    const Space *s = search->space;
    const Goal *goal = search->goal;
    Int8s state = {NEW(memory, int8_t, old.count), old.count};
    COPY(state.at, as_state(old).at, old.count);
    int64_t cuts = s->after.count;
    int8_t *nodes = state.at + cuts;
    if (s->flippable.count && (!cuts || uniform(random) < goal->flipping))
        flip(random, s, nodes, goal->by_node ? 2 : 3);
    else if (goal->by_node)
        set_nodes(random, s, nodes, state.count - cuts);
    else
        move_cut(random, state.at, cuts);
    return (Bytes){(char *)state.at, state.count};
}

static int64_t slot_of_mask(const Memo *memo, Bools mask)
{
    uint64_t hash = hash_of(0);
    for (int64_t i = 0; i < mask.count; i++)
        hash = hash_with(hash, mask.at[i]);
    return find_slot(memo, hash);
}

/* Returns the most bytes with which a plan of so many seconds has this energy; -1 for none. */
static double most_bytes(const Goal *goal, double energy, double seconds)
{
    double left = energy - goal->second_price * seconds;
    return left >= 0 ? goal->limit + left / goal->byte_price : -1;
}

static bool price_state(
    Memory *memory, const Search *search, Bytes bytes, double most, const Memo *memo, Price *price)
{
    const Space *s = search->space;
    const Goal *goal = search->goal;
    Int8s state = as_state(bytes);
    Memory then = *memory;
    Bools mask = mask_without_rules(memory, s, state);
    int64_t slot = slot_of_mask(memo, mask), *pool = &memo->pools.at[slot];
    double *seconds = &memo->seconds.at[slot], *priced_to = &memo->limits.at[slot];
    double limit = most_bytes(goal, most, *seconds);
    bool is_new = *priced_to < 0 || (*pool < 0 && *priced_to < limit);
    Int32s order, reads;
    if (is_new) {
        obey(memory, &s->rules, mask, &order, &reads);
        *seconds = added_seconds(s, mask, order);
        limit = most_bytes(goal, most, *seconds);
        *pool = limit >= 0 ? pool_of(memory, s, mask, order, reads, limit) : 0;
        if (*pool > limit)
            *pool = OVER_LIMIT;
        *priced_to = fmax(0, limit);
    }
    bool is_within = *pool >= 0 && *pool <= limit;
    if (is_within && goal->by_node) {
        if (!is_new)
            obey(memory, &s->rules, mask, &order, &reads);
        write_state(s, mask, state);
    }
    give_back(memory, then);
    double excess = fmax(0, (double)*pool - goal->limit);
    double energy = goal->second_price * *seconds + goal->byte_price * excess;
    *price = (Price){energy, 0, *pool, *seconds};
    return is_within;
}

void anneal_masks(
    Memory *memory, const Space *s, Int8s state, const Goal *goal, const Cooling *cooling,
    const Memo *memo, const Archive *archive, Int64s stop, Int64s done, Int8s *best)
{
    Search search = {change_state, price_state, false, s, goal, state.count};
    Cooling changing = *cooling;
    if (s->after.count + s->flippable.count == 0)
        changing.tries = 0;
    Bytes start = {(char *)state.at, state.count};
    *best = as_state(anneal(memory, &search, start, &changing, memo, archive, stop, done));
}
