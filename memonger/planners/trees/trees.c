#include "planners/trees/trees.h"

enum { FREE, HELD, ALWAYS_SAVED }; /* ALWAYS_SAVED: held to the end, because it never runs again */

typedef struct {
    int32_t cut, flag;
} Node;

/* Returns where the subtree of each node ends. */
static int32_t *find_ends(Memory *memory, const Node *tree, int64_t nodes)
{
    int32_t *end = NEW(memory, int32_t, nodes);
    for (int32_t q = (int32_t)nodes - 1; q >= 0; q--)
        end[q] = tree[q].cut == LEAF ? q + 1 : end[end[q + 1]];
    return end;
}

/* ---------------------------------------------------------------- the schedule of a tree */

/* A segment that is still to be processed, with its node. */
typedef struct {
    int32_t node, lo, hi;
} Part;

/* A schedule during its construction.
 *
 * Marks are timestamps: an operator was requested in this query if its mark is at least ``mark``. A
 * reader requests with ``mark`` plus its own position. Each query adds more than the number of
 * operators to ``mark``, so that arrays need no clearing. */
typedef struct {
    const Positions *s;
    int64_t mark;
    int8_t *held;
    int64_t *needed; /* marks: requested by the gradients right of a cut */
    int64_t *wanted; /* marks: requested by the query */
    int64_t *alive;  /* marks: to be saved at a cut */
    int32_t *operations;
    int64_t count, room;
    double work;
} Making;

/* Requests the outputs of the network that have not run (those that have are ALWAYS_SAVED). Returns
 * the first of them. */
static int64_t request_heads(Making *m, int64_t lo, int64_t hi, int64_t *wanted)
{
    int64_t first = hi;
    for (int64_t h = 0; h < m->s->heads.count; h++) {
        int64_t i = m->s->heads.at[h];
        if (lo <= i && i < hi && m->held[i] == FREE) {
            wanted[i] = max(wanted[i], m->mark + i);
            first = min(first, i);
        }
    }
    return first;
}

/* Requests the operators that operator i reads, or that its gradient reads. */
static inline void request_items(
    Int32s start, Int32s items, int64_t i, int64_t *wanted, int64_t mark)
{
    for (int32_t k = start.at[i]; k < start.at[i + 1]; k++)
        wanted[items.at[k]] = max(wanted[items.at[k]], mark + i);
}

/* Requests the operators that the gradients and outputs of a segment read, and those that they need
 * to be computed. */
static void request(Making *m, int64_t lo, int64_t hi, int64_t *wanted)
{
    const Positions *s = m->s;
    int64_t mark = m->mark;
    request_heads(m, lo, hi, wanted);
    for (int64_t i = hi - 1; i >= lo; i--) {
        if (s->gradient.at[i])
            request_items(s->want_start, s->want, i, wanted, mark);
        if (wanted[i] >= mark && m->held[i] == FREE)
            request_items(s->read_start, s->read, i, wanted, mark);
    }
}

/* Runs the operators that are requested and not held. */
static void run(Making *m, int64_t lo, int64_t hi, const int64_t *wanted, int64_t mark)
{
    const Positions *s = m->s;
    double work = 0;
    for (int64_t i = lo; i < hi; i++)
        if (m->held[i] == FREE && wanted[i] >= mark) {
            m->operations[m->count++] = (int32_t)i;
            m->held[i] = s->always_saved.at[i] ? ALWAYS_SAVED : HELD;
            work += s->work.at[i];
        }
    m->work += work;
}

/* Marks the operators of a left part that the flag ALL or COSTLY saves. */
static void save(Making *m, int64_t lo, int64_t cut, int32_t flag)
{
    const Positions *s = m->s;
    int64_t n = s->last.count, mark = m->mark;
    request(m, lo, cut, m->wanted);
    for (int64_t i = lo; i < cut; i++) {
        if (flag == COSTLY && s->costly.at[i] && m->wanted[i] >= mark)
            m->alive[i] = mark + n;
        if (flag == ALL && s->gradient.at[i])
            for (int32_t k = s->want_start.at[i]; k < s->want_start.at[i + 1]; k++) {
                int32_t j = s->want.at[k];
                if (j >= lo && m->wanted[j] >= mark)
                    m->alive[j] = mark + n;
            }
    }
    m->mark += n + 1; /* the next query */
}

/* Runs forward to a cut, and frees the results that it does not save. ``right`` is the mark of the
 * operators that the gradients right of the cut need. */
static void run_to_cut(Making *m, int64_t lo, int64_t cut, int32_t flag, int64_t right)
{
    const Positions *s = m->s;
    int64_t *wanted = m->wanted, *alive = m->alive;
    if (flag == ALL || flag == COSTLY)
        save(m, lo, cut, flag);
    int64_t mark = m->mark, first = request_heads(m, lo, cut, wanted);
    for (int64_t i = lo; i < cut; i++) {
        bool crosses = s->last.at[i] >= cut && s->first_want.at[i] < cut;
        bool is_needed = m->needed[i] >= right + cut || (crosses && flag != NOTHING);
        if (is_needed || alive[i] == mark - 1) {
            alive[i] = wanted[i] = mark;
            first = min(first, i);
        }
    }
    for (int64_t i = cut - 1; i >= first; i--)
        if (wanted[i] >= mark && m->held[i] == FREE)
            for (int32_t k = s->read_start.at[i]; k < s->read_start.at[i + 1]; k++) {
                int32_t j = s->read.at[k];
                wanted[j] = mark;
                first = max(lo, min(first, j));
            }
    int64_t before = m->count;
    run(m, first, cut, wanted, mark);
    for (int64_t k = before; k < m->count; k++) {
        int32_t i = m->operations[k];
        if (m->held[i] == HELD && alive[i] != mark)
            m->held[i] = FREE;
    }
}

/* Sorts positions, of which most are in descending order. */
static void sort(int32_t *items, int64_t count)
{
    for (int64_t low = 0, high = count - 1; low < high; low++, high--) {
        int32_t item = items[low];
        items[low] = items[high];
        items[high] = item;
    }
    for (int64_t k = 1; k < count; k++) {
        int32_t item = items[k];
        int64_t place = k;
        for (; place && items[place - 1] > item; place--)
            items[place] = items[place - 1];
        items[place] = item;
    }
}

/* Runs the operators that the gradient of operator i needs and that are not held. */
static void run_for(Making *m, int64_t lo, int64_t i)
{
    const Positions *s = m->s;
    int64_t mark = m->mark += s->last.count + 1, first = m->count, next = first;
    const Int32s *start = &s->want_start, *items = &s->want;
    for (int64_t reader = i;; reader = m->operations[next++]) {
        for (int32_t k = start->at[reader]; k < start->at[reader + 1]; k++) {
            int32_t j = items->at[k];
            if (j >= lo && m->held[j] == FREE && m->wanted[j] < mark) {
                m->wanted[j] = mark;
                m->operations[m->count++] = j;
            }
        }
        start = &s->read_start, items = &s->read;
        if (next == m->count)
            break;
    }
    sort(m->operations + first, m->count - first);
    for (int64_t k = first; k < m->count; k++) {
        int32_t j = m->operations[k];
        m->held[j] = s->always_saved.at[j] ? ALWAYS_SAVED : HELD;
        m->work += s->work.at[j];
    }
}

/* Makes room for ``more`` operations. */
static void make_room(Memory *memory, Making *m, int64_t more)
{
    if (m->count + more <= m->room)
        return;
    m->room = 2 * m->room + more;
    int32_t *longer = NEW(memory, int32_t, m->room);
    COPY(longer, m->operations, m->count);
    m->operations = longer;
}

/* Inserts recomputation of forced operators: before each operation, a gradient or a recomputed
 * operator, that would read their result of the forward pass. So nothing keeps it alive. */
static void run_forced(Memory *memory, Making *m)
{
    const Positions *s = m->s;
    int64_t n = s->last.count, count = m->count, first, mark = m->mark += n + 1;
    const int32_t *old = m->operations;
    bool *has_run = ZEROS(memory, bool, n), *is_stale = ZEROS(memory, bool, n);
    m->operations = NEW(memory, int32_t, m->room = count + n);
    m->count = 0;
    for (int64_t k = 0; k < count; k++) {
        int32_t i = old[k], reader = i < 0 ? ~i : i;
        if (i >= 0 && !has_run[i]) {
            has_run[i] = true;
            is_stale[i] = s->forced.at[i];
            m->operations[m->count++] = i;
            continue;
        }
        const Int32s *start = i < 0 ? &s->want_start : &s->read_start;
        const Int32s *items = i < 0 ? &s->want : &s->read;
        int64_t next = first = m->count;
        while (true) {
            for (int32_t q = start->at[reader]; q < start->at[reader + 1]; q++) {
                int32_t j = items->at[q];
                if (is_stale[j] && m->wanted[j] < mark) {
                    m->wanted[j] = mark;
                    m->operations[m->count++] = j;
                }
            }
            if (next == m->count)
                break;
            reader = m->operations[next++];
            start = &s->read_start, items = &s->read;
        }
        sort(m->operations + first, m->count - first);
        for (int64_t q = first; q < m->count; q++) {
            is_stale[m->operations[q]] = false;
            m->work += s->work.at[m->operations[q]];
        }
        m->operations[m->count++] = i;
        if (i >= 0)
            is_stale[i] = false;
    }
}

double unroll(
    Memory *memory, const Positions *s, Int32s tree_array, double most_work,
    int64_t most_operations, Int32s *operations)
{
    Memory own = {.outer = memory}; /* of its own, because the number of operations is not known */
    memory->inner = &own;
    const Node *tree = (const Node *)tree_array.at;
    int64_t nodes = tree_array.count / 2, n = s->last.count;
    int32_t *end = find_ends(&own, tree, nodes);
    Part *pending = NEW(&own, Part, nodes + 1);
    Making m = {
        .s = s,
        .held = ZEROS(&own, int8_t, n),
        .needed = ZEROS(&own, int64_t, n),
        .wanted = ZEROS(&own, int64_t, n),
        .alive = ZEROS(&own, int64_t, n),
        .operations = NEW(&own, int32_t, 4 * n + 16),
        .room = 4 * n + 16,
    };
    pending[0] = (Part){0, 0, (int32_t)n};
    bool is_backward = false; /* whether a gradient has run: everything runs before the first */
    for (int64_t depth = 1; depth && m.work <= most_work && m.count <= most_operations;) {
        Part part = pending[--depth];
        int32_t q = part.node, lo = part.lo, hi = part.hi;
        /* Marks once for all cuts to the right what the gradients before hi need, because nothing
         * right of a cut runs before the cut is processed. */
        int64_t right = -1;
        bool is_leaf = false;
        while (m.work <= most_work && m.count <= most_operations) {
            while (tree[q].cut != LEAF && !(lo < tree[q].cut && tree[q].cut < hi))
                q = tree[q].cut <= lo ? end[q + 1] : q + 1;
            is_leaf = tree[q].cut == LEAF;
            int32_t cut = is_leaf ? lo : tree[q].cut;
            m.mark += n + 1;
            if (right < 0) {
                right = m.mark;
                request(&m, cut, hi, m.needed);
            }
            make_room(&own, &m, 2 * (hi - lo));
            if (is_leaf)
                break;
            run_to_cut(&m, lo, cut, tree[q].flag, right);
            pending[depth++] = (Part){q + 1, lo, cut};
            q = end[q + 1];
            lo = cut;
        }
        if (is_leaf) {
            bool is_lazy = is_backward && tree[q].flag == LAZY;
            if (!is_lazy)
                run(&m, lo, hi, m.needed, right);
            for (int32_t i = hi - 1; i >= lo; i--)
                if (s->gradient.at[i]) {
                    if (is_lazy)
                        run_for(&m, lo, i);
                    m.operations[m.count++] = ~i;
                }
            is_backward = true;
        }
    }
    if (s->forced.count)
        run_forced(&own, &m);
    *operations = (Int32s){NEW(memory, int32_t, m.count), m.count};
    COPY(operations->at, m.operations, m.count);
    give_back(&own, (Memory){0});
    memory->inner = NULL;
    return m.work;
}

/* ---------------------------------------------------------------- other trees */

typedef struct {
    int64_t lo, hi;
    int64_t right, end; /* where the subtree of its right child starts (0: a leaf), its own ends */
} Segment;

/* Finds the segment of node q in a network of ``count`` operators. */
static Segment find_segment(
    Memory *memory, const Node *tree, int64_t nodes, int64_t q, int64_t count)
{
    Memory then = *memory;
    const int32_t *end = find_ends(memory, tree, nodes);
    int64_t lo = 0, hi = count, p = 0;
    while (p != q) {
        int64_t cut = min(max(tree[p].cut, lo), hi);
        if (q < end[p + 1]) {
            hi = cut;
            p++;
        } else {
            lo = cut;
            p = end[p + 1];
        }
    }
    Segment result = {lo, hi, tree[q].cut == LEAF ? 0 : end[q + 1], end[q]};
    give_back(memory, then);
    return result;
}

/* Copies a tree with the nodes from start to stop replaced. */
static Int32s splice(
    Memory *memory, Int32s tree, int64_t start, int64_t stop, const Node *middle, int64_t count)
{
    const Node *nodes = (const Node *)tree.at;
    int64_t rest = tree.count / 2 - stop;
    Node *result = NEW(memory, Node, start + count + rest);
    COPY(result, nodes, start);
    COPY(result + start, middle, count);
    COPY(result + start + count, nodes + stop, rest);
    return (Int32s){(int32_t *)result, 2 * (start + count + rest)};
}

Int32s change(Memory *memory, Random *random, Int32s tree, int64_t count)
{
    const Node *nodes = (const Node *)tree.at;
    int64_t size = tree.count / 2, q = below(random, size);
    Segment at = find_segment(memory, nodes, size, q, count);
    int64_t cuts = at.hi - at.lo - 1; /* the places for a cut in the segment */
    double kind = uniform(random);
    Node node = nodes[q], leaf = {LEAF, 0};
    if (node.cut == LEAF) {
        if (cuts < 1 || kind >= 0.5 || size >= MOST_NODES * count)
            return tree;
        node.cut = (int32_t)(at.lo + 1 + below(random, cuts));
        node.flag = (int32_t)max(0, below(random, 6) - 2);
        Node divided[] = {node, {LEAF, LEAF}, {LEAF, LEAF}};
        return splice(memory, tree, q, q + 1, divided, 3);
    }
    if (kind < 0.55) {
        int64_t farthest = uniform(random) < 0.33 ? 12 : 3;
        int64_t distance = 1 + below(random, farthest);
        int64_t cut = node.cut + (uniform(random) < 0.5 ? distance : -distance);
        if (cut <= at.lo || cut >= at.hi)
            return tree;
        node.cut = (int32_t)cut;
        return splice(memory, tree, q, q + 1, &node, 1);
    }
    if (kind < 0.62) {
        if (cuts < 1)
            return tree;
        node.cut = (int32_t)(at.lo + 1 + below(random, cuts));
        return splice(memory, tree, q, q + 1, &node, 1);
    }
    if (kind < 0.72) {
        node.flag = (int32_t)below(random, NOTHING + 1);
        Node all[] = {node, leaf}; /* all of the left part is saved: no cuts in it */
        bool is_all = node.flag == ALL;
        return splice(memory, tree, q, is_all ? at.right : q + 1, all, is_all ? 2 : 1);
    }
    if (kind < 0.8)
        return splice(memory, tree, q, at.end, &leaf, 1);
    if (kind < 0.88)
        return splice(memory, tree, q, at.end, nodes + at.right, at.end - at.right);
    return splice(memory, tree, q, at.end, nodes + q + 1, at.right - q - 1);
}
