/* The training graph as arrays; see arrays.py. */
#pragma once

#include "support/kernels.h"

enum { ORIGINAL = -1 }; /* an owner: the read is always of the row itself, never of its copy */

/* The training graph as arrays.
 *
 * Rows 0 to n-1 are the forward nodes, n to 2n-1 their recomputed copies, then come the gradients.
 * ``*_start`` has one element more than there are rows: row r owns items start[r] to start[r + 1].
 * An *entry* is the number of an output among those of all rows: ``output_start[row] + output``.
 * A read is (row, output, owner). If the operator ``owner`` and the row are both recomputed, it
 * reads the copy of the row.
 */
typedef struct {
    int64_t forward_nodes; /* n */
    Bools variable; /* by row */
    Int32s read_start, read_row, read_output, read_owner;
    Int32s read_entry;  /* by read: its entry if nothing is recomputed; 0: none */
    Bools read_ignored; /* by read: whether it reads only the shape */
    Bools read_holds;   /* by read: whether it keeps memory alive: not ignored, not of a variable */
    Int32s pooled_start, pooled_read; /* by row: its reads, but those of variables */
    Int32s output_start;
    Int64s elements, itemsize; /* by entry; bytes of one element */
    Int32s rank;               /* by entry: the index of its size in ``sizes`` */
    Int64s sizes;              /* bytes, 4 to an element, ascending */
    Int32s by_size;            /* the entries of each row in the order in which they get memory */
    /* The in-place options that can apply: sizes agree, and the input is no variable. ``read`` is
     * the number of the read among those of all rows, ``output`` is an entry. */
    Int32s inplace_start, inplace_read, inplace_output;
    Bools inplace_identity;
    Int32s head_row, head_output, head_owner; /* the outputs of the network, then the gradients */
    int64_t outputs;                          /* how many heads are outputs of the network */
    /* The rows of ``first`` are the forward pass. walk_row then lists gradient rows in execution
     * order. Before each gradient, which is part of that of the operator walk_owner, it lists the
     * forward nodes that the gradient reads. If such a node is recomputed, its copy runs there. All
     * are empty if the rows run in the order of their numbers (a schedule, whose ``forward_nodes``
     * is 0). */
    Int32s first, first_reads; /* first_reads, by entry: how many of their reads keep it alive */
    Int32s walk_row, walk_owner;
    Int32s before_start, before_row; /* by forward row: the operators that must have run before */
} GraphArrays;

/* The rows of a training graph that run for one set of recomputed operators. */
typedef struct {
    Int32s order; /* these rows, in execution order */
    Int32s entry; /* by read: the entry that it reads, perhaps of a copy, if its row runs */
    Int32s head;  /* by head: its entry */
    Int32s reads; /* by entry: how many reads and heads keep it alive */
} Step;

/* The fields of signatures that the allocator reads. */
typedef struct {
    Bools variable, reads; /* reads: whether it reads data, and not only shapes */
    Int64s ignored_start;
    Bools ignored; /* by input */
    Int64s output_start, elements, itemsize;
    Int32s dtype, shape; /* by output: a number for each type, and for each shape */
    Int32s rank, by_size;
    Int32s option_start, option_input, option_output;
    Bools option_identity;
    Int64s sizes;
} SignatureArrays;

/* Groups items by key: returns where those of each key start, (keys + 1,), and their indices. */
KERNEL void group_by_key(Memory *memory, Int32s key, int64_t keys, Int32s *start, Int32s *items);

/* Lists rows depth first from the heads, each after the rows that it reads (``before``).
 *
 * Rows below ``have_run`` have run already. The list has them at each read, and ``reader`` is the
 * owner of that read. The ``reader`` of all other rows is ORIGINAL.
 */
KERNEL void walk(
    Memory *memory, int64_t have_run, Int32s start, Int32s before, Int32s owner, Int32s heads,
    Int32s head_owner, Int32s *order, Int32s *reader);

/* Finds the rows that run if these forward nodes are recomputed, and the entries that they read.
 *
 * Forward nodes run first. A copy runs where the walk through the gradients
 * (``GraphArrays.walk_row``) first reaches it; this walk is the same for every plan.
 */
KERNEL void find_step(Memory *memory, const GraphArrays *t, Bools recomputed, Step *step);
