#include "planners/marks/cuts.h"

bool cheapest_cuts(Memory *memory, const Weights *weights, double limit, Int64s *chosen)
{
    int64_t count = weights->keep.count, cuts = 0;
    const double *until = weights->until.at, *keep = weights->keep.at;
    chosen->at = NEW(memory, int64_t, count);
    Memory then = *memory;
    double *kept = NEW(memory, double, count); /* the least up to a cut here, with it */
    int64_t *before = ZEROS(memory, int64_t, count); /* the cut before this one in that */
    kept[0] = 0;
    for (int64_t j = 1; j < count; j++) {
        double highest = 0;
        kept[j] = INFINITY;
        for (int64_t i = j - 1; i >= 0; i--) {
            highest = fmax(highest, weights->highest.at[i + 1]);
            double segment = highest - until[i];
            if (segment > limit)
                break;
            if (kept[i] + segment <= limit && kept[i] + keep[j] < kept[j]) {
                kept[j] = kept[i] + keep[j];
                before[j] = i;
            }
        }
    }
    for (int64_t k = before[count - 1]; k > 0; k = before[k])
        cuts++;
    chosen->count = cuts;
    for (int64_t k = before[count - 1]; k > 0; k = before[k])
        chosen->at[--cuts] = k - 1;
    bool possible = isfinite(kept[count - 1]);
    give_back(memory, then);
    return possible;
}
