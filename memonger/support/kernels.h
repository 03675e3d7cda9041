/* Arrays, memory and random numbers for compiled code.
 *
 * Python calls the functions that a header marks KERNEL (support/kernels.py). It passes an array of
 * NumPy as a pointer and a count, and a Struct as the C struct of the same name. A pointer that is
 * not const is a result. The first argument of a function that allocates is a Memory; Python copies
 * the results and then gives it back. setup.py reads the headers. For each function it writes a
 * function ``try_<name>``, which takes a Memory, a pointer to the returned value, and the arguments,
 * and returns the status of the call. It also writes ``declarations``, which returns what the
 * headers declare.
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KERNEL __attribute__((visibility("protected")))

typedef struct { bool *at; int64_t count; } Bools;
typedef struct { int8_t *at; int64_t count; } Int8s;
typedef struct { int32_t *at; int64_t count; } Int32s;
typedef struct { int64_t *at; int64_t count; } Int64s;
typedef struct { uint16_t *at; int64_t count; } UInt16s;
typedef struct { uint64_t *at; int64_t count; } UInt64s;
typedef struct { float *at; int64_t count; } Floats;
typedef struct { double *at; int64_t count; } Doubles;
typedef struct { char *at; int64_t count; } Bytes; /* an array of any type */

/* Memory that is taken piece by piece and given back at once. */
typedef struct Chunk Chunk;
typedef struct Memory Memory;
struct Memory {
    Chunk *last;
    int64_t used;         /* bytes of the last chunk */
    Memory *inner, *outer; /* a second Memory of the same call; of the second, the first */
    void *ended;           /* the jmp_buf of the call */
};

/* Statuses with which a call ends; support/kernels.py raises an error for each. */
enum { DONE, NO_MEMORY, TOO_LARGE, MISFIT };

/* Ends the call with a status, and gives its memory back. */
_Noreturn void fail(Memory *memory, int status);

/* Returns a number as int32; ends the call if it does not fit. */
static inline int32_t narrow(Memory *memory, int64_t number)
{
    if (number < INT32_MIN || number > INT32_MAX)
        fail(memory, TOO_LARGE);
    return (int32_t)number;
}

/* Takes memory for ``count`` elements of ``size`` bytes; take_zeros sets it to 0. */
void *take_zeros(Memory *memory, int64_t size, int64_t count);
void *take(Memory *memory, int64_t size, int64_t count);

/* Gives back the memory taken since ``then``, an earlier copy of ``memory``; {0}: all of it. */
KERNEL void give_back(Memory *memory, Memory then);

#define NEW(memory, type, count) ((type *)take(memory, sizeof(type), count))
#define ZEROS(memory, type, count) ((type *)take_zeros(memory, sizeof(type), count))

#define COPY(to, from, count) memcpy(to, from, sizeof *(to) * (size_t)(count))
#define FILL(array, byte, count) memset(array, byte, sizeof *(array) * (size_t)(count))

/* Arrays whose elements are not set. */
static inline Int32s int32s(Memory *memory, int64_t count)
{
    return (Int32s){NEW(memory, int32_t, count), count};
}
static inline Int64s int64s(Memory *memory, int64_t count)
{
    return (Int64s){NEW(memory, int64_t, count), count};
}

/* A generator of random numbers: SplitMix64 (Steele, Lea and Flood 2014). */
typedef struct { uint64_t state; } Random;

double uniform(Random *random);               /* draws from [0, 1) */
int64_t below(Random *random, int64_t limit); /* draws from 0 to limit - 1; limit: below 2**32 */

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
