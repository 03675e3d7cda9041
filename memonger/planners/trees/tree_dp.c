#include "planners/trees/tree_dp.h"

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

/* Returns the slot of a size, at most ``slots``. */
static int64_t slot_of_size(double size, int64_t slots)
{
    return size < (double)slots ? (int64_t)size : slots;
}

void least_work(
    Memory *memory, Doubles saved_size, Doubles highest, Doubles leaf, Doubles gradients,
    Floats work, Floats recomputed, Floats divided, Floats *least, UInt16s *choice)
{
    int64_t m = gradients.count, far = divided.count / (m - 1);
    least->count = far;
    least->at = NEW(memory, float, far);
    choice->count = m * m * far;
    choice->at = ZEROS(memory, uint16_t, choice->count);
    Memory then = *memory;
    float *all = NEW(memory, float, m * m * far), *nothing = ZEROS(memory, float, far);
    int32_t *chosen = NEW(memory, int32_t, far); /* as wide as the work, for vector instructions */
    for (int64_t t = 1; t < m; t++) { /* in this order the cache still has what a step reads */
        for (int64_t s = t - 1; s >= 0; s--) {
            int64_t st = s * m + t, base = slot_of_size(leaf.at[st], far);
            float *best = all + st * far;
            for (int64_t k = 0; k < far; k++) {
                best[k] = k < base ? INFINITY : recomputed.at[st];
                chosen[k] = 0;
            }
            if (s + 1 == t)
                lower(best, chosen, 0, divided.at + s * far, nothing, far, DIVIDED);
            double behind = gradients.at[t] + saved_size.at[st];
            for (int64_t c = s + 1; c < t; c++) {
                int64_t sc = s * m + c;
                int64_t through = slot_of_size(ceil(behind + highest.at[sc]), far);
                for (int64_t flag = 0; flag < FLAGS; flag++) {
                    int64_t at = flag * m * m + sc, shift = slot_of_size(saved_size.at[at], far);
                    int64_t from = max(through, shift);
                    const float *right = all + (c * m + t) * far, *left = all + sc * far;
                    float run = work.at[sc];
                    if (flag) {
                        from = max(from, slot_of_size(leaf.at[sc], far));
                        left = nothing;
                        run += recomputed.at[at];
                    }
                    lower(
                        best + from, chosen + from, run, right + from - shift, left + from,
                        far - from, (int32_t)(4 * c + flag));
                }
            }
            for (int64_t k = 0; k < far; k++)
                choice->at[st * far + k] = (uint16_t)chosen[k];
        }
    }
    COPY(least->at, all + (m - 1) * far, far);
    give_back(memory, then);
}
