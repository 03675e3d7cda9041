#include "planners/trees/tree_dp.h"

/* ---------------------------------------------------------------- segments */

/* What is made in the segment left of boundary ``maker``, and alive after the ends of segments from
 * boundary ``after`` on, but not from ``until`` on. */
typedef struct {
    int64_t maker, after, until;
    double size;
} Span;

/* Boundaries, with the number of boundaries up to each position. */
typedef struct {
    Int64s bounds;
    int64_t lo, hi;
    const int64_t *up_to;
} Cuts;

static Cuts count_cuts(Memory *memory, Int64s bounds)
{
    int64_t lo = bounds.at[0], hi = bounds.at[bounds.count - 1];
    int64_t *up_to = NEW(memory, int64_t, hi - lo);
    for (int64_t s = 0; s + 1 < bounds.count; s++)
        for (int64_t i = bounds.at[s]; i < bounds.at[s + 1]; i++)
            up_to[i - lo] = s + 1;
    return (Cuts){bounds, lo, hi, up_to};
}

static int64_t up_to(const Cuts *cuts, int64_t i)
{
    return i < cuts->hi ? cuts->up_to[i - cuts->lo] : cuts->bounds.count;
}

/* Sums what is made in each segment and alive after its end, (m, m). */
static const double *sum_spans(Memory *memory, int64_t m, const Span *spans, int64_t count)
{
    double *rows = ZEROS(memory, double, (m + 1) * (m + 1)), *sums = ZEROS(memory, double, m * m);
    for (int64_t k = 0; k < count; k++)
        rows[(spans[k].maker - 1) * (m + 1) + spans[k].after] += spans[k].size;
    for (int64_t k = 0; k < count; k++)
        rows[(spans[k].maker - 1) * (m + 1) + max(spans[k].after, spans[k].until)] -= spans[k].size;
    for (int64_t s = m - 1; s >= 0; s--) {
        double row = 0;
        for (int64_t t = 0; t < m; t++) {
            row += rows[s * (m + 1) + t];
            sums[s * m + t] = row + (s + 1 < m ? sums[(s + 1) * m + t] : 0);
        }
    }
    return sums;
}

/* Computes the work of running all operators of each segment, and that of base cases. */
static void measure_work(Memory *memory, const Positions *positions, const Cuts *cuts, Segments *g)
{
    int64_t m = cuts->bounds.count, lo = cuts->lo, count = cuts->hi - lo;
    Span *spans = NEW(memory, Span, count);
    double *before = ZEROS(memory, double, count + 1);
    for (int64_t flag = -1; flag < FLAGS; flag++) { /* -1: all work */
        if (flag == ALL)
            continue;
        for (int64_t i = 0; i < count; i++) {
            bool is_saved = flag == COSTLY && positions->costly.at[lo + i];
            double work = is_saved ? 0 : positions->work.at[lo + i];
            int64_t last = max(positions->last.at[lo + i], lo + i), after = up_to(cuts, lo + i);
            spans[i] = (Span){after, after, up_to(cuts, last), work};
            before[i + 1] = before[i] + work;
        }
        const double *alive = sum_spans(memory, m, spans, count);
        for (int64_t s = 0; s < m; s++)
            for (int64_t t = s; t < m; t++) {
                double total = before[cuts->bounds.at[t] - lo] - before[cuts->bounds.at[s] - lo];
                if (flag < 0)
                    g->work.at[s * m + t] = (float)total;
                else
                    g->recomputed.at[(flag * m + s) * m + t] = (float)(total - alive[s * m + t]);
            }
    }
}

/* Computes the sizes that are saved, for each flag; results from ``first`` to ``end``. */
static void measure_saved(
    Memory *memory, const Positions *positions, const Sizes *sizes, const Cuts *cuts, int64_t first,
    int64_t end, Segments *g)
{
    int64_t m = cuts->bounds.count, n = positions->last.count, read = 0, costly = 0;
    Span *spans[FLAGS];
    for (int64_t flag = 0; flag < FLAGS; flag++)
        spans[flag] = NEW(memory, Span, end - first);
    for (int64_t k = first; k < end; k++) {
        int64_t start = sizes->start.at[k], stop = sizes->stop.at[k], want = sizes->wanted.at[k];
        int64_t after = up_to(cuts, start), until = up_to(cuts, stop);
        double size = sizes->result.at[k];
        spans[ALIVE][k - first] = (Span){after, after, until, size};
        if (want < n)
            spans[ALL][read++] = (Span){after, up_to(cuts, max(stop, want)), m, size};
        if (positions->costly.at[start])
            spans[COSTLY][costly++] = (Span){after, until, m, size};
    }
    const double *alive = sum_spans(memory, m, spans[ALIVE], end - first);
    const double *all = sum_spans(memory, m, spans[ALL], read);
    const double *heavy = sum_spans(memory, m, spans[COSTLY], costly);
    for (int64_t st = 0; st < m * m; st++) {
        g->saved_size.at[st] = alive[st];
        g->saved_size.at[m * m + st] = alive[st] + all[st];
        g->saved_size.at[2 * m * m + st] = alive[st] + heavy[st];
    }
}

/* Computes the largest sizes alive in segments, of the results from ``first`` to ``end``. */
static void measure_peaks(
    Memory *memory, const Sizes *sizes, const Cuts *cuts, int64_t first, int64_t end, Segments *g)
{
    int64_t m = cuts->bounds.count, lo = cuts->lo, count = cuts->hi - lo;
    double *taken = ZEROS(memory, double, count), *freed = NEW(memory, double, count);
    double *wanted = NEW(memory, double, count);
    for (int64_t k = first; k < end; k++)
        taken[sizes->start.at[k] - lo] += sizes->result.at[k];
    for (int64_t s = 0; s + 1 < m; s++) {
        int64_t from = cuts->bounds.at[s] - lo, t = s + 1;
        FILL(freed, 0, count);
        FILL(wanted, 0, count);
        for (; first < end && sizes->start.at[first] < lo + from; first++)
            ;
        for (int64_t k = first; k < end; k++) {
            if (sizes->stop.at[k] + 1 < cuts->hi)
                freed[sizes->stop.at[k] + 1 - lo] += sizes->result.at[k];
            if (sizes->wanted.at[k] < cuts->hi)
                wanted[sizes->wanted.at[k] - lo] += sizes->result.at[k];
        }
        double forward = 0, backward = 0, highest = -INFINITY, leaf = -INFINITY;
        for (int64_t i = 0; i < count; i++) {
            backward += wanted[i];
            if (i < from)
                continue;
            forward += taken[i] - freed[i];
            highest = fmax(highest, forward - sizes->in_place.at[lo + i]);
            leaf = fmax(leaf, backward + sizes->backward.at[lo + i]);
            if (lo + i + 1 == cuts->bounds.at[t]) {
                g->highest.at[s * m + t] = highest;
                g->leaf.at[s * m + t++] = leaf;
            }
        }
    }
}

static Doubles zeros(Memory *memory, int64_t count)
{
    return (Doubles){ZEROS(memory, double, count), count};
}

void measure(
    Memory *memory, const Positions *positions, const Sizes *sizes, Int64s bounds,
    Segments *segments)
{
    int64_t m = bounds.count, first = 0, end, results = sizes->start.count;
    Segments g = {
        .bounds = bounds,
        .saved_size = zeros(memory, FLAGS * m * m),
        .highest = zeros(memory, m * m),
        .leaf = zeros(memory, m * m),
        .gradients = zeros(memory, m),
        .work = {ZEROS(memory, float, m * m), m * m},
        .recomputed = {ZEROS(memory, float, FLAGS * m * m), FLAGS * m * m},
    };
    Memory then = *memory;
    Cuts cuts = count_cuts(memory, bounds);
    for (int64_t t = 0; t < m; t++)
        g.gradients.at[t] = sizes->passing.at[bounds.at[t]];
    while (first < results && sizes->start.at[first] < cuts.lo)
        first++;
    for (end = first; end < results && sizes->start.at[end] < cuts.hi;)
        end++;
    measure_work(memory, positions, &cuts, &g);
    measure_saved(memory, positions, sizes, &cuts, first, end, &g);
    measure_peaks(memory, sizes, &cuts, first, end, &g);
    *segments = g;
    give_back(memory, then);
}

/* ---------------------------------------------------------------- the least work */

/* Compiles a function for AVX2 too; the loader chooses the version for the CPU. */
#if defined(__x86_64__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* Lowers ``best`` to the work of a choice, and records the choice, in all slots where it is less.
 *
 * Nearly all of the time is spent here. gcc vectorizes the loop with -O3 and without branches only.
 */
__attribute__((optimize("O3"))) WIDE static void lower(
    float *best, int32_t *choice, float run, const float *right, const float *left, int64_t count,
    int32_t chosen)
{
    for (int64_t k = 0; k < count; k++) {
        float total = run + right[k] + left[k], old = best[k];
        int32_t is_better = -(total < old);
        best[k] = total < old ? total : old;
        choice[k] = (chosen & is_better) | (choice[k] & ~is_better);
    }
}

enum { FEW = 16 }; /* slots that are not worth to be left out */

/* Returns sizes in slots of ``unit``, rounded up; ``far`` for those that are larger. */
static const int64_t *slots_of(Memory *memory, Doubles sizes, double unit, int64_t far)
{
    int64_t *slots = NEW(memory, int64_t, sizes.count);
    for (int64_t k = 0; k < sizes.count; k++) {
        double size = ceil(sizes.at[k] / unit - 1e-9); /* 1e-9 for rounding */
        slots[k] = size < (double)far ? (int64_t)size : far;
    }
    return slots;
}

void least_work(
    Memory *memory, const Segments *g, double unit, Floats divided, Floats *least, UInt16s *choice)
{
    int64_t m = g->bounds.count, far = divided.count / (m - 1);
    least->count = far;
    least->at = NEW(memory, float, far);
    choice->count = m * m * far;
    choice->at = ZEROS(memory, uint16_t, choice->count);
    Memory then = *memory;
    float *all = NEW(memory, float, m * m * far), *nothing = ZEROS(memory, float, far);
    const int64_t *saved_size = slots_of(memory, g->saved_size, unit, far);
    const int64_t *leaf = slots_of(memory, g->leaf, unit, far);
    int32_t *chosen = NEW(memory, int32_t, far); /* as wide as the work, for vector instructions */
    int64_t *enough = NEW(memory, int64_t, m * m); /* by segment: the first slot with a choice */
    double *highest = NEW(memory, double, m * m);
    for (int64_t st = 0; st < m * m; st++)
        highest[st] = g->highest.at[st] / unit;
    for (int64_t t = 1; t < m; t++) { /* in this order the cache still has what a step reads */
        for (int64_t s = t - 1; s >= 0; s--) {
            int64_t st = s * m + t;
            float *best = all + st * far;
            for (int64_t k = 0; k < far; k++) {
                best[k] = k < leaf[st] ? INFINITY : g->recomputed.at[st];
                chosen[k] = 0;
            }
            if (s + 1 == t)
                lower(best, chosen, 0, divided.at + s * far, nothing, far, DIVIDED);
            double behind = g->gradients.at[t] / unit + ceil(g->saved_size.at[st] / unit - 1e-9);
            for (int64_t c = s + 1; c < t; c++) {
                int64_t sc = s * m + c, ct = c * m + t;
                double through = behind + highest[sc];
                if (through > (double)(far - 1))
                    continue;
                int64_t slot = (int64_t)through;
                slot += (double)slot < through;
                for (int64_t flag = 0; flag < FLAGS; flag++) {
                    int64_t at = flag * m * m + sc;
                    int64_t from = max(slot, saved_size[at] + enough[ct]);
                    from = max(from, flag ? leaf[sc] : enough[sc]);
                    const float *right = all + ct * far - saved_size[at];
                    const float *left = flag ? nothing : all + sc * far;
                    float run = g->work.at[sc] + (flag ? g->recomputed.at[at] : 0);
                    if (from >= far)
                        continue;
                    /* More memory never takes more work: where ``best`` is not more than the work
                     * of the last slot, it is not lowered, and so in all slots behind. */
                    float last = run + right[far - 1] + left[far - 1];
                    int64_t until = last < best[from] ? far : from;
                    for (int64_t k; until - from > FEW && best[k = (from + until) / 2] <= last;)
                        until = k;
                    lower(
                        best + from, chosen + from, run, right + from, left + from, until - from,
                        (int32_t)(4 * c + flag));
                }
            }
            for (enough[st] = 0; enough[st] < far && isinf(best[enough[st]]);)
                enough[st]++;
            for (int64_t k = 0; k < far; k++)
                choice->at[st * far + k] = (uint16_t)chosen[k];
        }
    }
    COPY(least->at, all + (m - 1) * far, far);
    give_back(memory, then);
}
