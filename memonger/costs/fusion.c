#include "costs/fusion.h"

/* What runs, by its place in the order. */
typedef struct {
    const GraphArrays *t;
    const Fusible *f;
    Bools recomputed;
    Int32s order;
    int32_t *place;  /* of each row, or -1 */
    int32_t *source; /* of each read the place of what makes it, */
    int32_t *entry;  /* and which entry it is */
} Run;

static Run run_of(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order)
{
    Run x = {
        t, f, recomputed, order, NEW(memory, int32_t, t->variable.count),
        NEW(memory, int32_t, t->read_row.count), NEW(memory, int32_t, t->read_row.count),
    };
    FILL(x.place, -1, t->variable.count);
    for (int32_t i = 0; i < order.count; i++)
        x.place[order.at[i]] = i;
    for (int64_t i = 0; i < order.count; i++) {
        int32_t reader = order.at[i], last = t->read_start.at[reader + 1];
        for (int32_t j = t->read_start.at[reader]; j < last; j++) {
            int32_t row = find_row(t, recomputed.at, j);
            x.source[j] = x.place[row];
            x.entry[j] = t->output_start.at[row] + t->read_output.at[j];
        }
    }
    return x;
}

enum { NEVER = INT32_MAX };

/* A list of sets. Lists share their ends. */
typedef struct Link Link;
struct Link {
    Link *next;
    int32_t set;
    int32_t length; /* of the list that begins here */
    int32_t place;  /* for which it was made */
    int32_t walked; /* the last place for which it was walked from here on */
    int32_t open;   /* how many were not closed when all of it was walked */
    int32_t line;   /* of lists of which each has all that those before it have, if not closed; */
    int32_t within; /* the line whose last list has all that this one has */
};

typedef struct {
    Link *depends;  /* the list of all its places, */
    int32_t grown;  /* the place for which that was made, */
    int32_t united; /* the set that it has become part of, or itself, */
    int32_t until;  /* the last place that may join it, */
    int32_t linked; /* the first place that has it in its list, or none, */
    int32_t met;    /* and the last place that was seen to depend on it */
} Set;

/* The sets, as they are found in the order of execution.
 *
 * A place depends, through what cannot be fused, on the sets of a list, and on those that they have
 * come to depend on since it was made; a set never on itself. A set is closed once no place to come
 * can join it. It then grows no more and nobody asks who depends on it: new lists leave it out. */
typedef struct {
    int32_t *set;    /* of each place the set that it was put in, or -1, */
    Link **list;     /* and its list, if it is in none */
    int32_t *joined; /* the last place that reads it and may join its set, or -1 */
    Set *sets;
    int32_t *open;   /* the sets, not closed, that a place is seen to depend on, */
    Link **walk;     /* and the lists that are still to be walked for it */
    Link **last;     /* the last list of each line */
    int64_t opened, walks, lines;
    int32_t line;    /* of the list that is made */
} Sets;

static int32_t whole(const Sets *s, int32_t set)
{
    while (s->sets[set].united != set)
        set = s->sets[set].united = s->sets[s->sets[set].united].united;
    return set;
}

static int32_t set_of(const Sets *s, int32_t place)
{
    return s->set[place] < 0 ? -1 : whole(s, s->set[place]);
}

static int32_t length(const Link *list)
{
    return list ? list->length : 0;
}

/* The end that two lists share. */
static Link *shared(Link *one, Link *other)
{
    while (one != other) {
        if (length(one) > length(other))
            one = one->next;
        else
            other = other->next;
    }
    return one;
}

static void meet(Sets *s, int32_t place, int32_t set)
{
    if (s->sets[set].met != place && s->sets[set].until >= place)
        s->open[s->opened++] = set;
    s->sets[set].met = place;
}

/* Meets the sets of a list as far as it was not walked yet; what these depend on since it was made
 * is left to be walked. */
static void walk_list(Sets *s, int32_t place, Link *list)
{
    for (Link *link = list; link && link->walked != place; link = link->next) {
        int32_t set = whole(s, link->set);
        link->walked = place;
        link->within = s->line;
        if (s->sets[set].met != place && s->sets[set].grown > link->place)
            s->walk[s->walks++] = s->sets[set].depends;
        meet(s, place, set);
    }
}

/* Tells whether a set is seen in a list. */
static bool is_in(const Sets *s, int32_t set, const Link *list)
{
    for (; list && list->place >= s->sets[set].linked; list = list->next)
        if (whole(s, list->set) == set)
            return true;
    return false;
}

/* What a place reads: a set, or -1, and a list. */
typedef struct {
    int32_t set;
    Link *list;
} Source;

/* Makes the list of a place: of what the places that it reads depend on, and, unless it joins them,
 * of their sets. The base is that of these lists which was made last. Meets all of it that not each
 * of them depends on, and takes out of the sources (to -1) the sets that another depends on as far
 * as that is seen at once. */
static Link *make_list(
    Memory *memory, Sets *s, int32_t place, Source *source, int64_t sources, bool joins)
{
    Link *base = NULL;
    for (int64_t j = 0; j < sources; j++)
        if (source[j].list && (!base || source[j].list->place > base->place))
            base = source[j].list;
    s->opened = s->walks = 0;
    s->line = base && s->last[base->line] == base ? base->line : (int32_t)s->lines++;
    Link *end = base; /* that all have in common */
    for (int64_t j = 0; j < sources; j++) {
        int32_t set = source[j].set;
        Link *list = source[j].list;
        if (list == base || (!list && (set < 0 || s->sets[set].linked == NEVER))
            || (set < 0 && list->within == s->line))
            continue;
        if (set >= 0 && is_in(s, set, base)) {
            source[j].set = -1;
        } else {
            end = shared(end, list);
            s->walk[s->walks++] = list;
        }
    }
    if (base && base->length > 2 * base->open + 8)
        end = NULL;
    if (end)
        end->walked = place;
    walk_list(s, place, base);
    int32_t listed = (int32_t)s->opened; /* in the base, as far as it was walked */
    if (base && !end)
        base->open = listed;
    while (s->walks)
        walk_list(s, place, s->walk[--s->walks]);
    for (int64_t j = 0; j < sources && !joins; j++)
        if (source[j].set >= 0)
            meet(s, place, source[j].set);
    if (length(base) - length(end) > 2 * listed + 8) { /* most of it is closed */
        base = end;
        listed = 0;
    }
    int32_t open = end ? end->open : (int32_t)s->opened;
    for (; listed < s->opened; listed++) {
        int32_t set = s->open[listed];
        Link *link = NEW(memory, Link, 1);
        *link = (Link){base, set, length(base) + 1, place, -1, open, s->line, s->line};
        s->sets[set].linked = (int32_t)min(s->sets[set].linked, place);
        base = link;
    }
    s->last[s->line] = base;
    return base;
}

/* Numbers the sets of several rows from ``first`` on, behind those before; tells how many there are
 * then. */
static int64_t number_sets(
    Memory *memory, const Sets *s, int64_t sets, int64_t first, Int32s member)
{
    int32_t fused = 0, *number = ZEROS(memory, int32_t, sets);
    for (int64_t i = 0; i < first; i++)
        fused = (int32_t)max(fused, member.at[i] + 1);
    for (int32_t i = (int32_t)first; i < member.count; i++)
        if (s->set[i] >= 0)
            number[member.at[i] = set_of(s, i)]++;
    for (int64_t k = 0; k < sets; k++)
        number[k] = number[k] > 1 ? fused++ : -1;
    for (int64_t i = first; i < member.count; i++)
        member.at[i] = s->set[i] < 0 ? -1 : number[member.at[i]];
    return fused;
}

/* As find_fused_sets. */
static int64_t sets_of(Memory *memory, const Run *x, Int32s *member)
{
    const Fusible *f = x->f;
    const int32_t *read_start = x->t->read_start.at, *order = x->order.at;
    int64_t places = x->order.count, forward = x->t->first.count, begin = f->forward.count;
    *member = int32s(memory, f->starts.count ? places : 0); /* none if nothing is fused */
    if (!f->starts.count)
        return 0;
    Memory then = *memory;
    int64_t starts = 0, most_read = 0;
    int32_t sets = 0;
    COPY(member->at, f->forward.at, begin);
    for (int64_t i = begin; i < places; i++) {
        starts += f->starts.at[order[i]];
        most_read = max(most_read, read_start[order[i] + 1] - read_start[order[i]]);
    }
    Sets s = {
        .set = NEW(memory, int32_t, places), .list = NEW(memory, Link *, places),
        .joined = NEW(memory, int32_t, places), .sets = NEW(memory, Set, starts),
        .open = NEW(memory, int32_t, starts),
        .walk = NEW(memory, Link *, starts + most_read), .last = NEW(memory, Link *, places),
    };
    for (int32_t i = (int32_t)begin; i < places; i++) {
        s.joined[i] = -1;
        if (f->joins.at[order[i]])
            for (int32_t j = read_start[order[i]]; j < read_start[order[i] + 1]; j++)
                if ((i >= forward) == (x->source[j] >= forward))
                    s.joined[x->source[j]] = i;
    }
    Source *source = NEW(memory, Source, most_read);
    for (int32_t i = (int32_t)begin; i < places; i++) {
        int64_t row = order[i], sources = 0;
        bool joins = f->joins.at[row];
        int32_t mine = -1;
        for (int32_t j = read_start[row]; j < read_start[row + 1]; j++) {
            int32_t place = x->source[j];
            if ((i >= forward) != (place >= forward)) /* no set is in both passes */
                continue;
            int32_t set = set_of(&s, place);
            source[sources++] = (Source){set, set < 0 ? s.list[place] : s.sets[set].depends};
        }
        Link *list = make_list(memory, &s, i, source, sources, joins);
        for (int64_t j = 0; joins && j < sources; j++) {
            int32_t theirs = source[j].set < 0 ? -1 : whole(&s, source[j].set);
            if (theirs < 0 || theirs == mine || s.sets[theirs].met == i)
                continue;
            if (mine >= 0) {
                s.sets[theirs].united = mine;
                s.sets[mine].grown = i;
                s.sets[mine].until = (int32_t)max(s.sets[mine].until, s.sets[theirs].until);
                s.sets[mine].linked = (int32_t)min(s.sets[mine].linked, s.sets[theirs].linked);
            } else {
                mine = theirs;
            }
        }
        if (mine < 0 && f->starts.at[row]) {
            mine = sets++;
            s.sets[mine].united = mine;
            s.sets[mine].depends = NULL;
            s.sets[mine].linked = NEVER;
            s.sets[mine].grown = s.sets[mine].until = s.sets[mine].met = -1;
        }
        s.set[i] = mine;
        s.list[i] = list;
        if (mine < 0)
            continue;
        if (s.sets[mine].depends != list)
            s.sets[mine].grown = i;
        s.sets[mine].depends = list;
        s.sets[mine].until = (int32_t)max(s.sets[mine].until, s.joined[i]);
    }
    int64_t fused = number_sets(memory, &s, sets, begin, *member);
    give_back(memory, then);
    return fused;
}

/* The fused operators, and which places they take the place of. */
typedef struct {
    const int32_t *set; /* of each place that which it is part of, or -1 */
    int64_t count;
    Fused lists;
    int32_t *maker;     /* of each entry that they make its place */
    int32_t *source;    /* of each that they read */
} Operators;

/* The place of what a row must wait for: of a copy, if that runs. */
static int32_t waited(const Run *x, int64_t row, int64_t wait)
{
    int64_t forward = x->t->forward, before = x->f->wait_row.at[wait];
    if (row >= forward && before < forward && x->recomputed.at[before])
        before += forward;
    return x->place[before];
}

/* Finds what the fused operators make: what others read, in the order in which they do. */
static void find_outputs(Memory *memory, const Run *x, Int32s head, Int32s head_entry, Operators *o)
{
    const GraphArrays *t = x->t;
    int64_t outputs = t->elements.count, count = 0;
    int32_t *entries = NEW(memory, int32_t, outputs), *set = NEW(memory, int32_t, outputs);
    int32_t *place = NEW(memory, int32_t, outputs);
    bool *seen = ZEROS(memory, bool, outputs);
    for (int64_t i = 0; i <= x->order.count; i++) {
        const int32_t *source = head.at, *entry = head_entry.at; /* behind all rows */
        int32_t own = -1, first = 0, after = (int32_t)head.count;
        if (i < x->order.count) {
            own = o->set[i];
            first = t->read_start.at[x->order.at[i]];
            after = t->read_start.at[x->order.at[i] + 1];
            source = x->source;
            entry = x->entry;
        }
        for (int32_t j = first; j < after; j++) {
            int32_t theirs = o->set[source[j]];
            if (theirs < 0 || theirs == own || seen[entry[j]])
                continue;
            seen[entry[j]] = true;
            entries[count] = entry[j];
            place[count] = source[j];
            set[count++] = theirs;
        }
    }
    Int32s *out = &o->lists.out;
    group_by_key(memory, (Int32s){set, count}, o->count, &o->lists.out_start, out);
    o->maker = NEW(memory, int32_t, count);
    for (int64_t k = 0; k < count; k++) {
        o->maker[k] = place[out->at[k]];
        out->at[k] = entries[out->at[k]];
    }
    /* They get memory by their size, the largest first, of equals the last. */
    const int64_t *elements = t->elements.at;
    int32_t *made = NEW(memory, int32_t, count);
    o->lists.by_size = (Int32s){made, count};
    for (int64_t k = 0; k < o->count; k++)
        for (int32_t q = o->lists.out_start.at[k]; q < o->lists.out_start.at[k + 1]; q++) {
            int32_t at = q;
            for (; at > o->lists.out_start.at[k]
                   && elements[made[at - 1]] <= elements[out->at[q]]; at--)
                made[at] = made[at - 1];
            made[at] = out->at[q];
        }
}

/* Finds what they read of others, as they meet it depth first from what they make. */
static void find_inputs(Memory *memory, const Run *x, Operators *o)
{
    const GraphArrays *t = x->t;
    const int32_t *wait_start = x->f->wait_start.at, *out_start = o->lists.out_start.at;
    int64_t places = x->order.count, outputs = t->elements.count;
    Int32s start = int32s(memory, o->count + 1), in = {NEW(memory, int32_t, t->read_row.count), 0};
    o->source = NEW(memory, int32_t, t->read_row.count);
    int32_t *stack = NEW(memory, int32_t, places), *at = NEW(memory, int32_t, places);
    bool *seen = ZEROS(memory, bool, places);
    int32_t *taker = NEW(memory, int32_t, outputs); /* that read the entry last */
    FILL(taker, -1, outputs);
    for (int64_t k = 0; k < o->count; k++) {
        start.at[k] = (int32_t)in.count;
        for (int32_t q = out_start[k]; q < out_start[k + 1]; q++) {
            int32_t depth = -1, next = o->maker[q];
            while (true) {
                if (next >= 0 && o->set[next] == k && !seen[next]) {
                    seen[next] = true;
                    stack[++depth] = next;
                    at[depth] = 0;
                }
                if (depth < 0)
                    break;
                int32_t row = x->order.at[stack[depth]], j = at[depth]++ + t->read_start.at[row];
                int32_t wait = j - t->read_start.at[row + 1] + wait_start[row];
                next = -1;
                if (wait >= wait_start[row + 1]) {
                    depth--;
                } else if (wait >= wait_start[row]) {
                    next = waited(x, row, wait);
                } else {
                    next = x->source[j];
                    if (o->set[next] == k || taker[x->entry[j]] == k)
                        continue;
                    taker[x->entry[j]] = (int32_t)k;
                    o->source[in.count] = next;
                    in.at[in.count++] = x->entry[j];
                }
            }
        }
    }
    start.at[o->count] = (int32_t)in.count;
    o->lists.read_start = start;
    o->lists.read = in;
}

/* Orders what is left as MXNet does: places, and behind all places the fused operators. Nobody
 * waits for what is fused. */
static Int32s new_order(Memory *memory, const Run *x, Int32s head, const Operators *o)
{
    const int32_t *read_start = x->t->read_start.at, *in_start = o->lists.read_start.at;
    int64_t places = x->order.count, waits = x->f->wait_row.count, reads = x->t->read_row.count;
    Int32s start = int32s(memory, places + o->count + 1), met, by, wait_start, wait;
    narrow(memory, reads + waits + head.count);
    Int32s before = {NEW(memory, int32_t, reads + waits + head.count), 0};
    Int32s wait_set = {NEW(memory, int32_t, waits), 0};
    int32_t *wait_for = NEW(memory, int32_t, waits);
    for (int64_t i = 0; i < places; i++) {
        int32_t row = x->order.at[i], set = o->set[i];
        start.at[i] = (int32_t)before.count;
        for (int32_t j = read_start[row]; set < 0 && j < read_start[row + 1]; j++)
            before.at[before.count++] = x->source[j];
        for (int32_t q = x->f->wait_start.at[row]; q < x->f->wait_start.at[row + 1]; q++) {
            int32_t place = waited(x, row, q);
            if (place < 0 || o->set[place] >= 0)
                continue;
            if (set < 0) {
                before.at[before.count++] = place;
            } else {
                wait_for[wait_set.count] = place;
                wait_set.at[wait_set.count++] = set;
            }
        }
    }
    group_by_key(memory, wait_set, o->count, &wait_start, &wait);
    for (int64_t k = 0; k < o->count; k++) {
        start.at[places + k] = (int32_t)before.count;
        for (int32_t q = in_start[k]; q < in_start[k + 1]; q++)
            before.at[before.count++] = o->source[q];
        for (int32_t q = wait_start.at[k]; q < wait_start.at[k + 1]; q++)
            before.at[before.count++] = wait_for[wait.at[q]];
    }
    start.at[places + o->count] = (int32_t)before.count;
    Int32s heads = {before.at + before.count, head.count};
    COPY(heads.at, head.at, head.count);
    for (int64_t k = 0; k < before.count + head.count; k++)
        if (o->set[before.at[k]] >= 0)
            before.at[k] = (int32_t)places + o->set[before.at[k]];
    walk(memory, 0, start, before, before, heads, heads, &met, &by);
    return met;
}

/* Whether the variables come in the same order as before. */
static bool same_variables(const GraphArrays *t, Int32s was, Int32s now)
{
    int64_t i = 0, k = 0, rows = t->variable.count;
    while (true) {
        while (i < was.count && !t->variable.at[was.at[i]])
            i++;
        while (k < now.count && (now.at[k] >= rows || !t->variable.at[now.at[k]]))
            k++;
        if (i == was.count || k == now.count)
            return i == was.count && k == now.count;
        if (was.at[i++] != now.at[k++])
            return false;
    }
}

/* How often each output is read: by a fused operator once, and what is made within it never. */
static Int32s reads_left(Memory *memory, const Run *x, const Operators *o, Int32s reads)
{
    const GraphArrays *t = x->t;
    Int32s left = int32s(memory, reads.count);
    COPY(left.at, reads.at, reads.count);
    for (int64_t i = 0; i < x->order.count; i++) {
        int32_t row = x->order.at[i], j = t->read_start.at[row];
        for (; o->set[i] >= 0 && j < t->read_start.at[row + 1]; j++)
            left.at[x->entry[j]] -= !t->read_ignored.at[j];
    }
    for (int64_t j = 0; j < o->lists.read.count; j++)
        left.at[o->lists.read.at[j]]++;
    return left;
}

bool fuse(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Fused *fused, Int32s *rows, Int32s *left)
{
    *fused = (Fused){0};
    *rows = order;
    *left = reads;
    if (!f->starts.count)
        return false;
    Run x = run_of(memory, t, f, recomputed, order);
    Int32s set, heads = t->head_row, head = int32s(memory, heads.count);
    Operators o = {.count = sets_of(memory, &x, &set)};
    if (!o.count)
        return false;
    o.set = set.at;
    for (int64_t h = 0; h < heads.count; h++) {
        int32_t row = heads.at[h], owner = t->head_owner.at[h];
        head.at[h] = x.place[as_read(recomputed.at, (int32_t)t->forward, row, row, owner)];
    }
    find_outputs(memory, &x, head, find_head_entries(memory, t, recomputed), &o);
    find_inputs(memory, &x, &o);
    *rows = new_order(memory, &x, head, &o);
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t k = rows->at[i] - order.count;
        rows->at[i] = k < 0 ? order.at[rows->at[i]] : (int32_t)(t->variable.count + k);
    }
    *fused = o.lists;
    *left = reads_left(memory, &x, &o, reads);
    return same_variables(t, order, *rows);
}


int64_t count_pool_bytes(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit)
{
    Memory then = *memory;
    Fused fused;
    Int32s rows, left, storage;
    if (fuse(memory, t, f, recomputed, order, reads, &fused, &rows, &left)) {
        order = rows;
        reads = left;
    }
    int64_t bytes = allocate_least(
        memory, t, &fused, recomputed, order, reads, match_ranges, limit, &storage);
    give_back(memory, then);
    return bytes;
}

int64_t find_fused_sets(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s *set)
{
    Run x = run_of(memory, t, f, recomputed, order);
    return sets_of(memory, &x, set);
}
