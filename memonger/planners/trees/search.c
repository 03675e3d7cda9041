#include "planners/trees/search.h"

typedef struct {
    double first, second; /* bytes and work, or work and bytes: the second compares equals */
} Cost;

static Cost cost_of(const Limits *limits, int64_t pool, double work)
{
    return limits->by_work ? (Cost){work, (double)pool} : (Cost){(double)pool, work};
}

static bool is_less(Cost a, Cost b)
{
    return a.first < b.first || (a.first == b.first && a.second < b.second);
}

/* Copies a tree of a try, whose memory is given back. */
static void keep(Int32s *kept, Int32s tree)
{
    COPY(kept->at, tree.at, tree.count);
    kept->count = tree.count;
}

static bool is_same(Int32s a, Int32s b)
{
    return a.count == b.count && memcmp(a.at, b.at, sizeof(int32_t) * (size_t)a.count) == 0;
}

void anneal_trees(
    Memory *memory, const Problem *b, Int32s tree, const Limits *limits, int64_t seed_number,
    int64_t tries, double hot, double cold, const Memo *memo, const Archive *archive,
    Int64s stop, Int64s done, Int32s *best)
{
    int64_t count = b->node.count, room = max(tree.count, 2 * (MOST_NODES * count + 2));
    Int32s now = {NEW(memory, int32_t, room), 0};
    best->at = NEW(memory, int32_t, room);
    keep(&now, tree);
    keep(best, tree);
    double work;
    int64_t most_bytes = limits->most_bytes;
    int64_t pool = evaluate_tree(memory, b, tree, limits->most_work, most_bytes, memo, &work);
    if (pool < 0)
        return;
    Cost least = cost_of(limits, pool, work), current = least;
    Random random;
    seed(&random, (uint32_t)seed_number);
    Memory then = *memory;
    for (int64_t step = 0; step < tries && !is_stopped(stop); step++, give_back(memory, then)) {
        count_try(done);
        Int32s new = change(memory, &random, now, count);
        while (uniform(&random) < MORE)
            new = change(memory, &random, new, count);
        if (is_same(new, now))
            continue;
        double draw = uniform(&random), progress = (double)step / (double)tries;
        double limit = acceptable(
            current.first, hot * least.first, cold * least.first, progress, draw);
        double most_work = limits->most_work;
        most_bytes = limits->most_bytes;
        if (limits->by_work)
            most_work = limit < most_work ? limit : most_work;
        else if (limit < (double)most_bytes)
            most_bytes = (int64_t)limit;
        pool = evaluate_tree(memory, b, new, most_work, most_bytes, memo, &work);
        if (pool < 0)
            continue;
        keep(&now, new);
        current = cost_of(limits, pool, work);
        Bytes state = {(char *)now.at, (int64_t)sizeof(int32_t) * now.count};
        record(memory, archive, pool, work, state);
        if (is_less(current, least)) {
            keep(best, now);
            least = current;
        }
    }
}
