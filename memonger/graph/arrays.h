/* The training graph as arrays; see GraphArrays and SignatureArrays in arrays.py. */
#pragma once

#include "support/kernels.h"

enum { KEPT = -1 };

typedef struct {
    int64_t forward;
    Bools variable;
    Int32s read_start, read_row, read_output, read_owner;
    Bools read_ignored;
    Int32s use_start, use_entry, use_row, use_owner;
    Int32s output_start;
    Int64s elements, itemsize;
    Int32s rank;
    Int64s sizes;
    Int32s made;
    Int32s inplace_start, inplace_input, inplace_entry, inplace_row, inplace_owner, inplace_output;
    Bools inplace_identity;
    Int32s head_row, head_entry, head_owner;
    int64_t outputs;
    Int32s first, walk_row, walk_owner;
    Int32s before_start, before_row;
    Int32s reads;
    Int32s recomputed_start, recomputed_entry, recomputed_row;
} GraphArrays;

typedef struct {
    Bools variable, reads;
    Int64s ignored_start;
    Bools ignored;
    Int64s output_start, elements, itemsize;
    Int32s dtype, shape, rank, made;
    Int32s option_start, option_input, option_output;
    Bools option_identity;
    Int64s sizes;
} SignatureArrays;

/* Lists of (row, output, owner), one after the other: where each starts, and their columns. */
typedef struct {
    Int32s start, row, output, owner;
} ReadLists;

/* Lists of (row, owner). */
typedef struct {
    Int32s start, row, owner;
} WaitLists;

typedef struct {
    Int32s row, output, owner;
} HeadList;

/* Makes the GraphArrays of rows of signatures ``which``, with copies of the first ``forward``.
 *
 * Without copies (``forward`` is 0) all rows run, in the order in which they stand.
 * ``reads`` are what each row reads (`Read`; row -1: a variable that is left out), ``waits`` are
 * control dependencies. The first ``outputs`` of the heads are the network's, the others gradients.
 * Its temporaries are left to the caller to give back; it refers to arrays that it was given.
 */
KERNEL void graph_arrays(
    Memory *memory, const SignatureArrays *known, int64_t forward, Int32s which,
    const ReadLists *reads, const WaitLists *waits, const HeadList *heads, int64_t outputs,
    GraphArrays *made);

/* Orders items by key: where those of each key start (``keys`` + 1), and which they are. */
KERNEL void by_key(Memory *memory, Int32s key, int64_t keys, Int32s *start, Int32s *items);

/* Tells of each item the row that owns it. */
Int32s owners(Memory *memory, Int32s start);

/* Orders rows depth first from the heads, each after what it reads (``start``, ``before``).
 *
 * Those below ``known`` have run already: they are put down, with the owner, at each read.
 */
void walk(
    Memory *memory, int64_t known, Int32s start, Int32s before, Int32s owner, Int32s heads,
    Int32s head_owner, Int32s *met, Int32s *by);
