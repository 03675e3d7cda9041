#include "schedules/execution/arena.h"

/* MXImperativeInvoke and MXEngineSetBulkSize (include/mxnet/c_api.h). */
typedef int (*Invoke)(
    void *creator, int inputs, void **input, int *outputs, void ***output, int params,
    const char **keys, const char **values);
typedef int (*SetBulkSize)(int size, int *before);

/* The numbers of a call, in the order of arena.py; CALL is their count. */
enum { CREATOR, INPUTS, INPUT, OUTPUTS, OUTPUT, PARAMS, KEYS, VALUES, TOKEN, CALL };

static int run_call(Invoke invoke, const int64_t *call)
{
    int outputs = (int)call[OUTPUTS];
    void **output = (void **)call[OUTPUT];
    return invoke(
        (void *)call[CREATOR], (int)call[INPUTS], (void **)call[INPUT], &outputs, &output,
        (int)call[PARAMS], (const char **)call[KEYS], (const char **)call[VALUES]);
}

int64_t run_calls(
    int64_t invoke_at, int64_t set_bulk_size_at, Int64s calls, int64_t first, int64_t stop,
    int64_t size)
{
    Invoke invoke = (Invoke)invoke_at;
    SetBulkSize set_bulk_size = (SetBulkSize)set_bulk_size_at;
    int64_t failed = -1;
    int before, ours;
    set_bulk_size(0, &before); /* this pushes an unfinished bulk of the caller */
    while (first < stop && failed < 0) {
        int64_t end = min(stop, first + size), token = calls.at[CALL * first + TOKEN];
        set_bulk_size((int)size + 2, &ours); /* larger, so that the bulk ends below */
        if (run_call(invoke, calls.at + CALL * token))
            failed = first;
        for (; first < end && failed < 0 && calls.at[CALL * first + TOKEN] == token; first++)
            if (run_call(invoke, calls.at + CALL * first))
                failed = first;
        set_bulk_size(0, &ours);
    }
    set_bulk_size(before, &ours);
    return failed;
}
