"""The training graph of a schedule as arrays for the allocator, in compiled code.

It is the graph that is written out for MXNet (``rows.rows_of``, then ``tables.build``), made at
once, for a search makes thousands. Variables take no memory of the pool, so there are no rows of
theirs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from memonger.graph.arrays import KEPT, each_row, largest_first, starts
from memonger.schedules.nodes import AWAITED, CHAINED
from memonger.schedules.training_step import Parts
from memonger.support.compiled import compiled


class Footprints(NamedTuple):
    """What the rows of each pattern (``rows.Patterns``) mean to the allocator.

    ``*_start`` has one more element than there are patterns; see ``Tables`` for the rest.

    Attributes
    ----------
    output_start, rank, made : np.ndarray
    read_start, read_at, read_output : np.ndarray
        What it reads of operators.
    read_used : np.ndarray
        1 if more than its shape is read, else 0.
    option_start, option_input, option_at, option_read, option_output, option_identity : np.ndarray
        The in-place options that can apply: the number of the input, what is read by it (as
        ``read_at``) and which output of that, the output.
    head_at, head_output : np.ndarray
        The outputs of the training symbol that are operators': those of the network (as
        ``read_at``), then gradients.
    sizes : np.ndarray
    """

    output_start: np.ndarray
    rank: np.ndarray
    made: np.ndarray
    read_start: np.ndarray
    read_at: np.ndarray
    read_output: np.ndarray
    read_used: np.ndarray
    option_start: np.ndarray
    option_input: np.ndarray
    option_at: np.ndarray
    option_read: np.ndarray
    option_output: np.ndarray
    option_identity: np.ndarray
    head_at: np.ndarray
    head_output: np.ndarray
    sizes: np.ndarray


def footprints(made: Parts) -> Footprints:
    """What the rows of a network's training steps mean to the allocator."""
    t, p, kinds = made.template, made.patterns, made.kinds
    rerun = np.where(t.masked, made.masked_kind, made.kind_of[: len(t.masked)])
    kind = np.concatenate([made.kind_of, rerun, made.reader_kind, made.scratch_kind])
    count = p.first
    output_start, elements = each_row(kind, [[o.elements for o in k.tensors] for k in kinds])
    _, itemsize = each_row(kind, [[np.dtype(o.dtype).itemsize for o in k.tensors] for k in kinds])
    _, dtype = each_row(kind, [[np.dtype(o.dtype).num for o in k.tensors] for k in kinds])
    option_start, number = each_row(kind, [[o[0] for o in k.options] for k in kinds])
    _, output = each_row(kind, [[o[1] for o in k.options] for k in kinds])
    _, identity = each_row(kind, [[o[2] for o in k.options] for k in kinds])
    in_pool = np.repeat([kinds[k].op != "null" for k in kind], np.diff(output_start))
    sizes, place = np.unique(4 * elements[in_pool], return_inverse=True)
    rank = np.zeros(len(elements), dtype=np.int64)
    rank[in_pool] = place
    made_next = largest_first(output_start, elements)

    kept = ~t.variable[p.read_row]
    reader = np.repeat(np.arange(count), np.diff(p.read_start))
    held = np.bincount(reader[~p.read_ignored], minlength=count)  # reads of more than a shape

    option = np.repeat(np.arange(count), np.diff(option_start))
    j = p.read_start[option] + number
    into, out = output_start[p.read_row[j]] + p.read_output[j], output_start[option] + output
    same = identity.astype(np.bool_) & (dtype[into] == dtype[out])
    fits = (
        kept[j]
        & (elements[into] == elements[out])
        & (itemsize[into] == itemsize[out])
        & (same | (held[option] > 0))
    )
    j = j[fits]

    gradient_row, gradient_output = made.asked().T
    head_row = np.concatenate([t.head_row, gradient_row])
    head_at = head_row + np.repeat([count, 0], [len(t.head_row), len(gradient_row)])
    head_output = np.concatenate([t.head_output, gradient_output])
    heads = ~t.variable[head_row]
    small = partial(np.ascontiguousarray, dtype=np.int32)
    return Footprints(
        output_start=small(output_start),
        rank=small(rank),
        made=small(made_next - np.repeat(output_start[:-1], np.diff(output_start))),
        read_start=small(starts(np.bincount(reader[kept], minlength=count))),
        read_at=small(p.read_at[kept]),
        read_output=small(p.read_output[kept]),
        read_used=small(~p.read_ignored[kept]),
        option_start=small(starts(np.bincount(option[fits], minlength=count))),
        option_input=small(number[fits]),
        option_at=small(p.read_at[j]),
        option_read=small(p.read_output[j]),
        option_output=small(output[fits]),
        option_identity=np.ascontiguousarray(same[fits]),
        head_at=small(head_at[heads]),
        head_output=small(head_output[heads]),
        sizes=sizes.astype(np.int64),
    )


class Flat(NamedTuple):
    """The training graph of a schedule as ``allocator.allocate`` reads it; see ``Tables``.

    ``before`` are the rows that must have run before each.
    """

    forward: int
    variable: np.ndarray
    use_start: np.ndarray
    use_entry: np.ndarray
    use_row: np.ndarray
    use_owner: np.ndarray
    output_start: np.ndarray
    elements: np.ndarray
    rank: np.ndarray
    sizes: np.ndarray
    made: np.ndarray
    inplace_start: np.ndarray
    inplace_input: np.ndarray
    inplace_entry: np.ndarray
    inplace_row: np.ndarray
    inplace_owner: np.ndarray
    inplace_output: np.ndarray
    inplace_identity: np.ndarray
    head_row: np.ndarray
    head_entry: np.ndarray
    head_owner: np.ndarray
    outputs: int
    before_start: np.ndarray
    before: np.ndarray


@compiled
def lay_out(p, f, line):  # type: ignore[no-untyped-def]
    """The rows of a training step for the allocator.

    Parameters
    ----------
    p : Patterns
    f : Footprints
    line : np.ndarray of int32
        The pattern of each row.

    Returns
    -------
    Flat
    """
    count = line.shape[0]
    entries = uses = options = befores = 0
    for row in range(count):
        k = line[row]
        entries += f.output_start[k + 1] - f.output_start[k]
        uses += f.read_start[k + 1] - f.read_start[k]
        options += f.option_start[k + 1] - f.option_start[k]
        befores += 2 + p.wait_start[k + 1] - p.wait_start[k]
    output_start = np.zeros(count + 1, dtype=np.int32)
    rank = np.empty(entries, dtype=np.int32)
    made = np.empty(entries, dtype=np.int32)
    use_start = np.zeros(count + 1, dtype=np.int32)
    use_entry = np.empty(uses + 1, dtype=np.int32)
    inplace_start = np.zeros(count + 1, dtype=np.int32)
    inplace_input = np.empty(options, dtype=np.int32)
    inplace_entry = np.empty(options, dtype=np.int32)
    inplace_output = np.empty(options, dtype=np.int32)
    inplace_identity = np.empty(options, dtype=np.bool_)
    before_start = np.zeros(count + 1, dtype=np.int32)
    before = np.empty(befores + uses, dtype=np.int32)
    became = np.full(2 * p.first, -1, dtype=np.int32)  # its last row and its first one
    awaited = np.empty(count, dtype=np.int32)  # by the next row in the chain
    awaiting = 0
    chain = -1  # the last row in it
    entries = uses = option = befores = 0
    for row in range(count):
        k = line[row]
        entry = entries
        for q in range(f.output_start[k], f.output_start[k + 1]):
            rank[entries] = f.rank[q]
            made[entries] = entry + f.made[q]
            entries += 1
        for j in range(f.read_start[k], f.read_start[k + 1]):
            source = became[f.read_at[j]]
            before[befores] = source
            befores += 1
            use_entry[uses] = output_start[source] + f.read_output[j]
            uses += f.read_used[j]
        for q in range(f.option_start[k], f.option_start[k + 1]):
            inplace_input[option] = f.option_input[q]
            inplace_entry[option] = output_start[became[f.option_at[q]]] + f.option_read[q]
            inplace_output[option] = entry + f.option_output[q]
            inplace_identity[option] = f.option_identity[q]
            option += 1
        if p.link[k] == CHAINED:
            for j in range(p.wait_start[k], p.wait_start[k + 1]):
                before[befores] = became[p.wait_at[j]]
                befores += 1
            if chain >= 0:
                before[befores] = chain
                befores += 1
            for q in range(awaiting):
                before[befores] = awaited[q]
                befores += 1
            awaiting = 0
            chain = row
        elif p.link[k] == AWAITED:
            awaited[awaiting] = row
            awaiting += 1
        y = p.target[k]
        became[y] = row
        if became[p.first + y] < 0:
            became[p.first + y] = row
        output_start[row + 1] = entries
        use_start[row + 1] = uses
        inplace_start[row + 1] = option
        before_start[row + 1] = befores
    heads = f.head_at.shape[0]
    head_row = np.empty(heads, dtype=np.int32)
    head_entry = np.empty(heads, dtype=np.int32)
    for h in range(heads):
        head_row[h] = became[f.head_at[h]]
        head_entry[h] = output_start[head_row[h]] + f.head_output[h]
    own = np.full(max(uses, option, heads, befores) + 1, KEPT, dtype=np.int32)
    return Flat(
        count,
        np.zeros(count, dtype=np.bool_),
        use_start,
        use_entry[:uses],
        own,
        own,
        output_start,
        rank,  # for its length
        rank,
        f.sizes,
        made,
        inplace_start,
        inplace_input,
        inplace_entry,
        own,
        own,
        inplace_output,
        inplace_identity,
        head_row,
        head_entry,
        own,
        heads,
        before_start,
        before[:befores],
    )
