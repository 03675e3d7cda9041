/* The training graph as arrays; see arrays.py. */
#pragma once

#include "support/kernels.h"

enum { KEPT = -1 }; /* the owner of what is always read of the row itself */

/* The training graph as arrays.
 *
 * Rows 0 to n-1 are the forward nodes, n to 2n-1 their recomputed copies, then the gradients.
 * ``*_start`` has one more element than there are rows: row r owns [start[r], start[r + 1]). The
 * outputs of all rows are numbered through, ``output_start[row] + output``; an *entry* is such a
 * number. Where the operator ``owner`` is recomputed, and so is the row that it reads, the copy of
 * that row is read instead.
 */
typedef struct {
    int64_t forward; /* n */
    Bools variable;  /* by row */
    Int32s read_start, read_row, read_output, read_owner;
    Bools read_ignored; /* of each read: only the shape is read */
    /* The reads that hold memory: not ignored, not of variables. */
    Int32s use_start, use_entry, use_row, use_owner;
    Int32s output_start;
    Int64s elements, itemsize; /* by entry; bytes of one element */
    Int32s rank;               /* by entry: the place of its size in ``sizes`` */
    Int64s sizes;              /* bytes, 4 to an element, ascending */
    Int32s made;               /* the entries of each row in the order in which they get memory */
    /* The in-place options that can apply: sizes agree, the input is no variable. Inputs are
     * numbered within their row; entry, row and owner are of what is read; an output is an entry. */
    Int32s inplace_start, inplace_input, inplace_entry, inplace_row, inplace_owner, inplace_output;
    Bools inplace_identity;
    Int32s head_row, head_entry, head_owner; /* the outputs of the network, then the gradients */
    int64_t outputs;                         /* how many of them are outputs of the network */
    /* The rows of ``first`` run first. walk_row then lists gradient rows in execution order. Before
     * each it lists the forward nodes which that gradient (of the operator walk_owner) reads; if
     * such a node is recomputed, its copy runs first. */
    Int32s first, walk_row, walk_owner;
    Int32s before_start, before_row; /* of forward rows: the operators that must have run before */
    Int32s reads; /* by entry: how often it is read if nothing is recomputed */
    Int32s recomputed_start, recomputed_entry, recomputed_row; /* of forward rows: what their
                                                                * gradients read of operators */
} GraphArrays;

/* What signatures mean to the allocator, one after the other. */
typedef struct {
    Bools variable, reads; /* reads: it reads more than shapes */
    Int64s ignored_start;  /* of its inputs */
    Bools ignored;
    Int64s output_start, elements, itemsize;
    Int32s dtype, shape, rank, made; /* shape: the same number for the same shape */
    Int32s option_start, option_input, option_output;
    Bools option_identity;
    Int64s sizes;
} SignatureArrays;

/* Lists of (row, output, owner), one after the other: where each starts, and their columns. A row
 * of -1 is a variable that is left out. */
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
