#include "planners/trees/search.h"

static Int32s tree_of(Bytes state)
{
    return (Int32s){(int32_t *)(void *)state.at, state.count / (int64_t)sizeof(int32_t)};
}

static Bytes state_of(Int32s tree)
{
    return (Bytes){(char *)tree.at, (int64_t)sizeof(int32_t) * tree.count};
}

static Bytes change_state(Memory *memory, const Search *search, Random *random, Bytes state)
{
    const Problem *b = search->space;
    return state_of(change(memory, random, tree_of(state), b->node.count));
}

static bool price_state(
    Memory *memory, const Search *search, Bytes state, double most, const Memo *memo, Price *price)
{
    const Limits *limits = search->goal;
    double most_work = limits->most_work, work;
    int64_t most_bytes = limits->most_bytes;
    if (limits->by_work)
        most_work = fmin(most_work, most);
    else if (most < (double)most_bytes)
        most_bytes = (int64_t)most;
    int64_t pool = evaluate_tree(
        memory, search->space, tree_of(state), most_work, most_bytes, memo, &work);
    double bytes = (double)pool;
    *price = limits->by_work ? (Price){work, bytes, pool, work} : (Price){bytes, work, pool, work};
    return pool >= 0;
}

void anneal_trees(
    Memory *memory, const Problem *b, Int32s tree, const Limits *limits, const Cooling *cooling,
    const Memo *memo, const Archive *archive, Int64s stop, Int64s done, Int32s *best)
{
    int64_t room = 2 * (MOST_NODES * b->node.count + 2) * (int64_t)sizeof(int32_t);
    Search search = {change_state, price_state, true, b, limits, room};
    *best = tree_of(anneal(memory, &search, state_of(tree), cooling, memo, archive, stop, done));
}
