#include "costs/fusion.h"

/* A copy of an array with zeros for more behind it. */
#define LONGER(memory, array, more) memcpy( \
    take_zeros(memory, sizeof *(array).at, (array).count + (more)), (array).at, \
    sizeof *(array).at * (array).count)

int64_t plan_bytes(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int32s reads, Int64s match_ranges, double limit)
{
    Memory then = *memory;
    Int64s member;
    Int32s storage;
    GraphArrays made;
    int64_t fused = fused_sets(memory, t, f, recomputed, order, &member);
    if (fused && fuse(memory, t, f, recomputed, order, member, fused, &made)) {
        t = &made;
        recomputed.count = 0;
        order = made.first;
        reads = made.reads;
    }
    int64_t bytes = least_pool(memory, t, recomputed, order, reads, match_ranges, limit, &storage);
    give_back(memory, then);
    return bytes;
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
};

/* The sets, as they are found in the order of execution.
 *
 * A place depends, through what cannot be fused, on the sets of a list, and on those that they have
 * come to depend on since it was made; a set never on itself. A set is closed once no place to come
 * can join it. It then grows no more and nobody asks who depends on it: new lists leave it out. */
typedef struct {
    int32_t *set;    /* of each place the set that it was put in, or -1, */
    Link **list;     /* and its list, if it is in none */
    int32_t *joined; /* the last place that reads it and may join its set, or -1 */
    int32_t *united; /* of each set that which it has become part of, or itself, */
    Link **depends;  /* the list of all its places, */
    int32_t *grown;  /* the place for which that was made, */
    int32_t *until;  /* the last place that may join it, */
    int32_t *linked; /* the first place that has it in its list, or none */
    int32_t *met;    /* and the last place that was seen to depend on it */
    int32_t *open;   /* the sets, not closed, that a place is seen to depend on, */
    Link **walk;     /* and the lists that are still to be walked for it */
    int64_t opened, walks;
} Sets;

static int32_t whole(const Sets *s, int32_t set)
{
    while (s->united[set] != set)
        set = s->united[set] = s->united[s->united[set]];
    return set;
}

static int32_t set_of(const Sets *s, int32_t place)
{
    return s->set[place] < 0 ? -1 : whole(s, s->set[place]);
}

static Link *list_of(const Sets *s, int32_t place)
{
    int32_t set = set_of(s, place);
    return set < 0 ? s->list[place] : s->depends[set];
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
    if (s->met[set] != place && s->until[set] >= place)
        s->open[s->opened++] = set;
    s->met[set] = place;
}

/* Meets the sets of a list as far as it was not walked yet; what these depend on since it was made
 * is left to be walked. */
static void walk_list(Sets *s, int32_t place, Link *list)
{
    for (Link *link = list; link && link->walked != place; link = link->next) {
        int32_t set = whole(s, link->set);
        link->walked = place;
        if (s->met[set] != place && s->grown[set] > link->place)
            s->walk[s->walks++] = s->depends[set];
        meet(s, place, set);
    }
}

/* Tells whether a set is seen in a list. */
static bool is_in(const Sets *s, int32_t set, const Link *list)
{
    for (; list && list->place >= s->linked[set]; list = list->next)
        if (whole(s, list->set) == set)
            return true;
    return false;
}

/* Makes the list of a place: of what the places that it reads depend on, and, unless it joins them,
 * of their sets. Meets all of it that not each of them depends on, and takes out of the sources
 * (to -1) those that another depends on as far as that is seen at once. */
static Link *make_list(
    Memory *memory, Sets *s, int32_t place, int32_t *source, int64_t sources, bool joins)
{
    Link *longest = NULL;
    for (int64_t j = 0; j < sources; j++) {
        Link *list = source[j] < 0 ? NULL : list_of(s, source[j]);
        if (length(list) > length(longest))
            longest = list;
    }
    s->opened = s->walks = 0;
    Link *end = longest; /* that all have in common */
    for (int64_t j = 0; j < sources; j++) {
        int32_t set = source[j] < 0 ? -1 : set_of(s, source[j]);
        Link *list = source[j] < 0 ? NULL : list_of(s, source[j]);
        if (list == longest || (!list && (set < 0 || s->linked[set] == NEVER)))
            continue;
        if (set >= 0 && is_in(s, set, longest)) {
            source[j] = -1;
        } else {
            end = shared(end, list);
            s->walk[s->walks++] = list;
        }
    }
    if (longest && longest->length > 2 * longest->open + 8)
        end = NULL;
    if (end)
        end->walked = place;
    walk_list(s, place, longest);
    int64_t listed = s->opened; /* in the longest, as far as it was walked */
    if (longest && !end)
        longest->open = listed;
    while (s->walks)
        walk_list(s, place, s->walk[--s->walks]);
    for (int64_t j = 0; j < sources && !joins; j++)
        if (source[j] >= 0 && s->set[source[j]] >= 0)
            meet(s, place, set_of(s, source[j]));
    if (length(longest) - length(end) > 2 * listed + 8) { /* most of it is closed */
        longest = end;
        listed = 0;
    }
    int64_t open = end ? end->open : s->opened;
    for (; listed < s->opened; listed++) {
        int32_t set = s->open[listed];
        Link *link = NEW(memory, Link, 1);
        *link = (Link){longest, set, length(longest) + 1, place, -1, open};
        s->linked[set] = least(s->linked[set], place);
        longest = link;
    }
    return longest;
}

/* Numbers the sets of several rows, and returns how many they are. */
static int64_t number_sets(Memory *memory, const Sets *s, int64_t sets, Int32s order, Int64s member)
{
    int64_t fused = 0, *number = ZEROS(memory, int64_t, sets);
    for (int64_t i = 0; i < order.count; i++)
        if (s->set[i] >= 0)
            number[set_of(s, i)]++;
    for (int64_t k = 0; k < sets; k++)
        number[k] = number[k] > 1 ? fused++ : -1;
    memset(member.at, -1, sizeof(int64_t) * member.count);
    for (int64_t i = 0; i < order.count; i++)
        if (s->set[i] >= 0)
            member.at[order.at[i]] = number[set_of(s, i)];
    return fused;
}

int64_t fused_sets(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int64s *member)
{
    *member = int64s(memory, f->starts.count); /* none if nothing is fused */
    if (!f->starts.count)
        return 0;
    Memory then = *memory;
    const int32_t *read_start = t->read_start.at;
    Int32s read, maker = owners(memory, t->output_start);
    all_read(memory, t, recomputed, &read);
    int32_t *place = NEW(memory, int32_t, t->variable.count);
    int64_t starts = 0, sets = 0, last = -1; /* of the forward pass */
    for (int64_t i = 0; i < order.count; i++) {
        place[order.at[i]] = i;
        starts += f->starts.at[order.at[i]];
    }
    for (int64_t h = 0; h < t->outputs; h++)
        last = most(last, place[t->head_row.at[h]]);
    Sets s = {
        .set = NEW(memory, int32_t, order.count), .list = NEW(memory, Link *, order.count),
        .joined = NEW(memory, int32_t, order.count), .united = NEW(memory, int32_t, starts),
        .depends = NEW(memory, Link *, starts), .grown = NEW(memory, int32_t, starts),
        .until = NEW(memory, int32_t, starts), .met = NEW(memory, int32_t, starts),
        .linked = NEW(memory, int32_t, starts), .open = NEW(memory, int32_t, starts),
        .walk = NEW(memory, Link *, starts + t->read_row.count),
    };
    /* The place of each read; -1 in the forward pass for what is behind it: no set is in both. */
    int32_t *source = read.at;
    for (int64_t i = 0; i < order.count; i++) {
        int64_t row = order.at[i];
        s.joined[i] = -1;
        for (int64_t j = read_start[row]; j < read_start[row + 1]; j++) {
            source[j] = place[maker.at[read.at[j]]];
            if ((i > last) != (source[j] > last))
                source[j] = -1;
            else if (f->joins.at[row])
                s.joined[source[j]] = i;
        }
    }
    for (int64_t i = 0; i < order.count; i++) {
        int64_t row = order.at[i], first = read_start[row], after = read_start[row + 1];
        bool joins = f->joins.at[row];
        int32_t mine = -1;
        Link *list = make_list(memory, &s, i, source + first, after - first, joins);
        for (int64_t j = first; joins && j < after; j++) {
            int32_t theirs = source[j] < 0 ? -1 : set_of(&s, source[j]);
            if (theirs < 0 || theirs == mine || s.met[theirs] == i)
                continue;
            if (mine >= 0) {
                s.united[theirs] = mine;
                s.grown[mine] = i;
                s.until[mine] = most(s.until[mine], s.until[theirs]);
                s.linked[mine] = least(s.linked[mine], s.linked[theirs]);
            } else {
                mine = theirs;
            }
        }
        if (mine < 0 && f->starts.at[row]) {
            mine = sets++;
            s.united[mine] = mine;
            s.depends[mine] = NULL;
            s.linked[mine] = NEVER;
            s.grown[mine] = s.until[mine] = s.met[mine] = -1;
        }
        s.set[i] = mine;
        s.list[i] = list;
        if (mine < 0)
            continue;
        if (s.depends[mine] != list)
            s.grown[mine] = i;
        s.depends[mine] = list;
        s.until[mine] = most(s.until[mine], s.joined[i]);
    }
    int64_t fused = number_sets(memory, &s, sets, order, *member);
    give_back(memory, then);
    return fused;
}

/* The fused operators, and what is known of the rows for them. An entry is as in GraphArrays. */
typedef struct {
    const GraphArrays *t;
    const Fusible *f;
    Bools recomputed;
    Int32s order;
    const int64_t *member;
    int64_t fused;         /* how many there are */
    Int32s maker, reader;  /* the row of each entry, and of each read */
    Int32s read, head;     /* the entries that are read */
    Int32s out_start, out; /* of each fused operator the entries that it makes, */
    Int32s in_start, in;   /* and those that it reads */
} Fusion;

/* What a row must wait for: a copy's row, if that runs. */
static int32_t waited(const Fusion *x, int64_t row, int64_t wait)
{
    int64_t forward = x->t->forward, before = x->f->wait_row.at[wait];
    if (row >= forward && before < forward && x->recomputed.at[before])
        before += forward;
    return before;
}

/* Finds what the fused operators make: what others read, in the order in which they do. */
static void find_outputs(Memory *memory, Fusion *x)
{
    const GraphArrays *t = x->t;
    int64_t outputs = t->elements.count, count = 0;
    int32_t *entries = NEW(memory, int32_t, outputs), *set = NEW(memory, int32_t, outputs);
    bool *seen = ZEROS(memory, bool, outputs);
    for (int64_t i = 0; i <= x->order.count; i++) {
        Int32s read = x->head; /* behind all rows */
        int64_t own = -1;
        if (i < x->order.count) {
            int32_t row = x->order.at[i], first = t->read_start.at[row];
            read = (Int32s){x->read.at + first, t->read_start.at[row + 1] - first};
            own = x->member[row];
        }
        for (int64_t j = 0; j < read.count; j++) {
            int32_t entry = read.at[j], theirs = x->member[x->maker.at[entry]];
            if (theirs < 0 || theirs == own || seen[entry])
                continue;
            seen[entry] = true;
            entries[count] = entry;
            set[count++] = theirs;
        }
    }
    by_key(memory, (Int32s){set, count}, x->fused, &x->out_start, &x->out);
    for (int64_t k = 0; k < count; k++)
        x->out.at[k] = entries[x->out.at[k]];
}

/* Finds what they read of others, as they meet it depth first from what they make. */
static void find_inputs(Memory *memory, Fusion *x)
{
    const GraphArrays *t = x->t;
    const int64_t *member = x->member;
    int64_t rows = t->variable.count, reads = t->read_row.count;
    /* What is read of others is a row of its own, behind the others. */
    Int32s start = int32s(memory, rows + reads + 1);
    Int32s before = {NEW(memory, int32_t, reads + x->f->wait_row.count), 0};
    for (int64_t row = 0; row < rows; row++) {
        start.at[row] = before.count;
        if (member[row] < 0)
            continue;
        for (int64_t j = t->read_start.at[row]; j < t->read_start.at[row + 1]; j++) {
            int64_t source = x->maker.at[x->read.at[j]];
            before.at[before.count++] = member[source] == member[row] ? source : rows + j;
        }
        for (int64_t q = x->f->wait_start.at[row]; q < x->f->wait_start.at[row + 1]; q++) {
            int32_t wait = waited(x, row, q);
            if (member[wait] == member[row])
                before.at[before.count++] = wait;
        }
    }
    for (int64_t row = rows; row <= rows + reads; row++)
        start.at[row] = before.count;
    Int32s heads = int32s(memory, x->out.count), met, by;
    for (int64_t k = 0; k < heads.count; k++)
        heads.at[k] = x->maker.at[x->out.at[k]];
    walk(memory, 0, start, before, before, heads, heads, &met, &by);
    x->in = (Int32s){NEW(memory, int32_t, met.count), 0};
    x->in_start = (Int32s){ZEROS(memory, int32_t, x->fused + 1), x->fused + 1};
    int64_t *last = NEW(memory, int64_t, t->elements.count); /* that read the entry */
    for (int64_t entry = 0; entry < t->elements.count; entry++)
        last[entry] = -1;
    for (int64_t k = 0; k < met.count; k++) {
        if (met.at[k] < rows)
            continue;
        int32_t entry = x->read.at[met.at[k] - rows];
        int64_t taker = member[x->reader.at[met.at[k] - rows]];
        if (last[entry] == taker)
            continue;
        last[entry] = taker;
        x->in.at[x->in.count++] = entry;
        x->in_start.at[taker + 1]++;
    }
    for (int64_t k = 0; k < x->fused; k++)
        x->in_start.at[k + 1] += x->in_start.at[k];
}

/* Sorts the outputs of a fused operator: the largest first, of equals the last. */
static void sort_outputs(const Fusion *x, int64_t first, int64_t count, int32_t *sorted)
{
    for (int64_t i = 0; i < count; i++) {
        const int64_t *elements = x->t->elements.at;
        const int32_t *out = x->out.at + first;
        int64_t at = i;
        for (; at > 0 && elements[out[sorted[at - 1]]] <= elements[out[i]]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = i;
    }
}

/* Makes a signature of each row, and then of each fused operator. */
static SignatureArrays signatures_of(Memory *memory, const Fusion *x)
{
    const GraphArrays *t = x->t;
    const int32_t *out_start = x->out_start.at, *in_start = x->in_start.at;
    int64_t rows = t->variable.count, all = rows + x->fused, outputs = t->elements.count;
    int64_t reads = t->read_row.count, options = t->inplace_input.count, more = 0;
    for (int64_t k = 0; k < x->fused; k++)
        more += (int64_t)(in_start[k + 1] - in_start[k]) * (out_start[k + 1] - out_start[k]);
    int64_t made = outputs + x->out.count, read = reads + x->in.count;
    narrow(memory, most(made, most(read, options + more)));
    SignatureArrays s = {
        .variable = {LONGER(memory, t->variable, x->fused), all},
        .reads = bools(memory, all),
        .ignored_start = int64s(memory, all + 1),
        .ignored = {LONGER(memory, t->read_ignored, x->in.count), read},
        .output_start = int64s(memory, all + 1),
        .elements = {LONGER(memory, t->elements, x->out.count), made},
        .itemsize = {LONGER(memory, t->itemsize, x->out.count), made},
        .dtype = {ZEROS(memory, int32_t, made), made},
        .rank = {LONGER(memory, t->rank, x->out.count), made},
        .made = {LONGER(memory, t->made, x->out.count), made},
        .option_start = {LONGER(memory, t->inplace_start, x->fused), all + 1},
        .option_input = {LONGER(memory, t->inplace_input, more), options + more},
        .option_output = {LONGER(memory, t->inplace_output, more), options + more},
        .option_identity = {LONGER(memory, t->inplace_identity, more), options + more},
        .sizes = t->sizes,
    };
    for (int64_t row = 0; row < rows; row++) {
        int32_t first = t->output_start.at[row];
        s.ignored_start.at[row] = t->read_start.at[row];
        s.output_start.at[row] = first;
        for (int64_t k = first; k < t->output_start.at[row + 1]; k++)
            s.made.at[k] -= first;
        for (int64_t q = t->inplace_start.at[row]; q < t->inplace_start.at[row + 1]; q++)
            s.option_output.at[q] -= first;
    }
    memset(s.reads.at, true, all);
    for (int64_t k = 0; k < x->out.count; k++) {
        s.elements.at[outputs + k] = t->elements.at[x->out.at[k]];
        s.itemsize.at[outputs + k] = t->itemsize.at[x->out.at[k]];
        s.rank.at[outputs + k] = t->rank.at[x->out.at[k]];
    }
    for (int64_t k = 0; k <= x->fused; k++) {
        s.ignored_start.at[rows + k] = reads + in_start[k];
        s.output_start.at[rows + k] = outputs + out_start[k];
    }
    /* Each output may take the memory of each input. */
    for (int64_t k = 0; k < x->fused; k++) {
        int64_t inputs = in_start[k + 1] - in_start[k], makes = out_start[k + 1] - out_start[k];
        sort_outputs(x, out_start[k], makes, s.made.at + outputs + out_start[k]);
        for (int64_t i = 0; i < inputs; i++)
            for (int64_t o = 0; o < makes; o++) {
                s.option_input.at[options] = i;
                s.option_output.at[options++] = o;
            }
        s.option_start.at[rows + k + 1] = options;
    }
    return s;
}

/* Gives what waits for others, and what for; nobody waits for what is fused. */
static WaitLists waits_left(Memory *memory, const Fusion *x, Int32s kept)
{
    int64_t rows = x->t->variable.count, count = 0;
    int32_t *key = NEW(memory, int32_t, x->f->wait_row.count);
    int32_t *before = NEW(memory, int32_t, x->f->wait_row.count);
    for (int64_t i = 0; i < x->order.count; i++) {
        int64_t row = x->order.at[i], set = x->member[row];
        for (int64_t q = x->f->wait_start.at[row]; q < x->f->wait_start.at[row + 1]; q++) {
            int32_t wait = waited(x, row, q);
            if (x->member[wait] >= 0)
                continue;
            key[count] = set < 0 ? row : rows + set;
            before[count++] = wait;
        }
    }
    WaitLists left;
    by_key(memory, (Int32s){key, count}, rows + x->fused, &left.start, &left.row);
    for (int64_t k = 0; k < count; k++)
        left.row.at[k] = before[left.row.at[k]];
    left.owner = (Int32s){kept.at, count};
    return left;
}

/* Whether the variables come in the same order as before. */
static bool same_variables(const Fusion *x, const GraphArrays *made)
{
    Int32s was = x->order, now = made->first;
    int64_t i = 0;
    for (int64_t k = 0; k < now.count; k++) {
        if (!made->variable.at[now.at[k]])
            continue;
        while (i < was.count && !x->t->variable.at[was.at[i]])
            i++;
        if (i == was.count || was.at[i++] != now.at[k])
            return false;
    }
    while (i < was.count && !x->t->variable.at[was.at[i]])
        i++;
    return i == was.count;
}

bool fuse(
    Memory *memory, const GraphArrays *t, const Fusible *f, Bools recomputed, Int32s order,
    Int64s member, int64_t fused, GraphArrays *made)
{
    int64_t rows = t->variable.count, outputs = t->elements.count, reads = t->read_row.count;
    Fusion x = {
        t, f, recomputed, order, member.at, fused,
        .maker = owners(memory, t->output_start), .reader = owners(memory, t->read_start),
    };
    all_read(memory, t, recomputed, &x.read);
    heads_read(memory, t, recomputed, &x.head);
    find_outputs(memory, &x);
    find_inputs(memory, &x);
    SignatureArrays signatures = signatures_of(memory, &x);
    /* The row that makes each entry now, and its output. */
    int32_t *row = LONGER(memory, x.maker, 0), *output = NEW(memory, int32_t, outputs);
    for (int64_t entry = 0; entry < outputs; entry++)
        output[entry] = entry - t->output_start.at[row[entry]];
    for (int64_t k = 0; k < fused; k++)
        for (int32_t o = x.out_start.at[k]; o < x.out_start.at[k + 1]; o++) {
            row[x.out.at[o]] = rows + k;
            output[x.out.at[o]] = o - x.out_start.at[k];
        }
    int64_t count = reads + x.in.count, heads = x.head.count;
    int64_t longest = most(most(count, heads), f->wait_row.count);
    Int32s kept = int32s(memory, longest);
    memset(kept.at, KEPT, sizeof(int32_t) * longest);
    Int32s own = int32s(memory, rows + fused);
    for (int64_t k = 0; k < own.count; k++)
        own.at[k] = k;
    ReadLists of_reads = {
        {LONGER(memory, t->read_start, fused), rows + fused + 1}, int32s(memory, count),
        int32s(memory, count), {kept.at, count}};
    for (int64_t k = 0; k < fused; k++)
        of_reads.start.at[rows + k + 1] = reads + x.in_start.at[k + 1];
    for (int64_t j = 0; j < count; j++) {
        int32_t entry = j < reads ? x.read.at[j] : x.in.at[j - reads];
        of_reads.row.at[j] = row[entry];
        of_reads.output.at[j] = output[entry];
    }
    HeadList of_heads = {int32s(memory, heads), int32s(memory, heads), {kept.at, heads}};
    for (int64_t h = 0; h < heads; h++) {
        of_heads.row.at[h] = row[x.head.at[h]];
        of_heads.output.at[h] = output[x.head.at[h]];
    }
    WaitLists of_waits = waits_left(memory, &x, kept);
    graph_arrays(memory, &signatures, 0, own, &of_reads, &of_waits, &of_heads, t->outputs, made);
    return same_variables(&x, made);
}
