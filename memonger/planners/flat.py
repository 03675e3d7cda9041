"""The training graph of a schedule as arrays for the allocator, in compiled code.

It is the graph that is written out for MXNet (``rows.rows_of``, then ``tables.build``), made at
once, for a search makes thousands. What a row of it has, whatever the schedule, is worked out
beforehand: its *pattern*. Variables take no memory of the pool, so there are no rows of theirs.
"""

from typing import NamedTuple

import numpy as np

from memonger.compiled import compiled
from memonger.tables import KEPT, each_row, largest_first, starts
from memonger.training_step import Parts

#: How a row is part of the chain in which each waits for the one before it (``rows``): it is, the
#: next that is waits for it, or nothing does.
CHAINED, AWAITED, LOOSE = 0, 1, 2

NO_TARGET = -1


class Patterns(NamedTuple):
    """What rows can be, ``*_start`` has one more element than there are.

    The first are the template rows. Then the forward rows when they run again, for a Dropout is
    then a product with its mask and states are scratch; then the readers of outputs that must be
    read (``Template.needed``).

    Attributes
    ----------
    target : np.ndarray
        The template row whose place in the network it takes, or NO_TARGET.
    link : np.ndarray
        CHAINED, AWAITED or LOOSE.
    output_start, rank, made : np.ndarray
        Of each output the place of its size in ``sizes``; the outputs of each pattern in the order
        in which they get memory.
    read_start, read_at, read_output : np.ndarray
        What it reads of operators: a template row, or that and the number of patterns if it is read
        of the first time that it ran.
    read_used : np.ndarray
        1 if more than its shape is read, else 0.
    wait_start, wait_at : np.ndarray
        What a gradient waits for, its forward node first; as ``read_at``.
    option_start, option_input, option_at, option_read, option_output, option_identity : np.ndarray
        The in-place options that can apply: the number of the input, what is read by it and which
        output of that, the output.
    event_start, event_row : np.ndarray
        For forward rows: the gradient rows of their event (``Template.event_row``).
    forward_start : np.ndarray
        Of forward rows where their outputs start if all are numbered through.
    needed_start, needed : np.ndarray
        For forward rows: the outputs that must have a reader, by that number.
    masked : np.ndarray of bool
        For forward rows (``Template.masked``).
    mark_start, mark : np.ndarray
        What is read of forward rows, used, by that number, and their total more if it is read of
        the first time: by each pattern, then by all gradient rows of each event.
    head_row, head_output : np.ndarray
        The outputs of the network that are operators'.
    gradient_row, gradient_output : np.ndarray
        The outputs of the training symbol that are gradients, each once.
    sizes : np.ndarray
        Bytes, 4 to an element, ascending.
    """

    target: np.ndarray
    link: np.ndarray
    output_start: np.ndarray
    rank: np.ndarray
    made: np.ndarray
    read_start: np.ndarray
    read_at: np.ndarray
    read_output: np.ndarray
    read_used: np.ndarray
    wait_start: np.ndarray
    wait_at: np.ndarray
    option_start: np.ndarray
    option_input: np.ndarray
    option_at: np.ndarray
    option_read: np.ndarray
    option_output: np.ndarray
    option_identity: np.ndarray
    event_start: np.ndarray
    event_row: np.ndarray
    forward_start: np.ndarray
    needed_start: np.ndarray
    needed: np.ndarray
    masked: np.ndarray
    mark_start: np.ndarray
    mark: np.ndarray
    head_row: np.ndarray
    head_output: np.ndarray
    gradient_row: np.ndarray
    gradient_output: np.ndarray
    sizes: np.ndarray


def patterns(made: Parts) -> Patterns:
    """What the rows of a network's training steps can be."""
    t, kinds = made.template, made.kinds
    rows, n = len(t.variable), len(t.masked)
    kind = np.concatenate(
        [made.kind_of, np.where(t.masked, made.masked_kind, made.kind_of[:n]), made.reader_kind]
    )
    count = len(kind)
    output_start, elements = each_row(kind, [[o.elements for o in k.tensors] for k in kinds])
    _, itemsize = each_row(kind, [[np.dtype(o.dtype).itemsize for o in k.tensors] for k in kinds])
    _, dtype = each_row(kind, [[np.dtype(o.dtype).num for o in k.tensors] for k in kinds])
    sizes, rank = np.unique(4 * elements, return_inverse=True)

    # What each reads: when it runs again, a masked one itself instead of all but its data.
    owner = np.repeat(np.arange(rows), np.diff(t.read_start))
    rerun = owner < n
    rerun[rerun] = ~t.masked[owner[rerun]]
    rerun[t.read_start[:n][t.masked]] = True
    masked = np.flatnonzero(t.masked)
    needing = np.repeat(np.arange(n), np.diff(t.needed_start))
    readers = rows + n + np.arange(len(needing))
    reader = np.concatenate([owner, rows + owner[rerun], rows + masked, readers])
    by = np.argsort(reader, kind="stable")
    reader = reader[by]
    read_row = np.concatenate([t.read_row, t.read_row[rerun], masked, needing])[by]
    ones = np.ones(len(masked), dtype=np.int64)
    read_output = np.concatenate([t.read_output, t.read_output[rerun], ones, t.needed])[by]
    nothing = np.zeros(len(reader), dtype=np.bool_)
    read_first = np.concatenate([t.read_first, nothing[: rerun.sum()], ones, nothing])
    at = read_row + count * read_first[: len(reader)][by].astype(np.int64)
    start, ignored = each_row(kind, [[i in k.ignored for i in range(k.inputs)] for k in kinds])
    used = ~ignored.astype(np.bool_)
    kept = ~t.variable[read_row]  # variables take no memory of the pool

    option_start, option_input = each_row(kind, [[o[0] for o in k.options] for k in kinds])
    _, option_output = each_row(kind, [[o[1] for o in k.options] for k in kinds])
    _, identity = each_row(kind, [[o[2] for o in k.options] for k in kinds])
    option = np.repeat(np.arange(count), np.diff(option_start))
    j = start[option] + option_input
    into, out = output_start[read_row[j]] + read_output[j], output_start[option] + option_output
    same = identity.astype(np.bool_) & (dtype[into] == dtype[out])
    fits = (
        kept[j]
        & (elements[into] == elements[out])
        & (itemsize[into] == itemsize[out])
        & (same | (np.bincount(reader[used], minlength=count)[option] > 0))
    )

    waits = np.diff(t.wait_start) > 0
    waits[:n] = True
    link = np.full(count, AWAITED)
    link[:rows] = np.where(waits, CHAINED, np.where(np.diff(t.read_start) > 0, AWAITED, LOOSE))
    link[rows : rows + n] = CHAINED
    of_masked = np.zeros(rows, dtype=np.int64)
    of_masked[masked] = count

    marks = kept & used & (read_row < n)
    mark_start = starts(np.bincount(reader[marks], minlength=count))
    outputs = output_start[n]
    mark = output_start[read_row[marks]] + read_output[marks] + outputs * (at[marks] >= count)
    length = np.diff(mark_start)[t.event_row]
    of_event = starts(length)
    event_mark = mark[
        np.arange(of_event[-1]) + np.repeat(mark_start[t.event_row] - of_event[:-1], length)
    ]

    heads = ~t.variable[t.head_row]
    asked = list(dict.fromkeys(entry for entry in made.gradients if entry is not None))
    gradients = np.array(asked, dtype=np.int64).reshape(-1, 2)
    gradients = gradients[~t.variable[gradients[:, 0]]]

    def small(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array, dtype=np.int32)

    return Patterns(
        target=small(
            np.concatenate([np.arange(rows), np.arange(n), np.full(len(needing), NO_TARGET)])
        ),
        link=small(link),
        output_start=small(output_start),
        rank=small(rank),
        made=small(
            largest_first(output_start, elements)
            - np.repeat(output_start[:-1], np.diff(output_start))
        ),
        read_start=small(starts(np.bincount(reader[kept], minlength=count))),
        read_at=small(at[kept]),
        read_output=small(read_output[kept]),
        read_used=small(used[kept]),
        wait_start=small(np.concatenate([t.wait_start, np.full(count - rows, t.wait_start[-1])])),
        wait_at=small(t.wait_row + of_masked[t.wait_row]),
        option_start=small(starts(np.bincount(option[fits], minlength=count))),
        option_input=small(option_input[fits]),
        option_at=small(at[j[fits]]),
        option_read=small(read_output[j[fits]]),
        option_output=small(option_output[fits]),
        option_identity=np.ascontiguousarray(same[fits]),
        event_start=small(t.event_start),
        event_row=small(t.event_row),
        forward_start=small(output_start[: n + 1]),
        needed_start=small(t.needed_start),
        needed=small(output_start[needing] + t.needed),
        masked=t.masked,
        mark_start=small(
            np.concatenate([mark_start, mark_start[-1] + of_event[t.event_start[1:]]])
        ),
        mark=small(np.concatenate([mark, event_mark])),
        head_row=small(t.head_row[heads]),
        head_output=small(t.head_output[heads]),
        gradient_row=small(gradients[:, 0]),
        gradient_output=small(gradients[:, 1]),
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
def line_up(p, node, events):  # type: ignore[no-untyped-def]
    """The patterns of all rows, in the order in which ``rows_of`` puts them.

    Parameters
    ----------
    p : Patterns
    node : np.ndarray of int32
        The forward node of each position.
    events : np.ndarray of int32
        Those of a schedule, positions.
    """
    n = p.forward_start.shape[0] - 1
    readers = p.target.shape[0] - p.needed.shape[0]  # where their patterns start
    again = readers - n
    ran = np.zeros(n, dtype=np.bool_)
    pattern = np.empty(events.shape[0], dtype=np.int32)
    rows = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x < 0:
            x = node[~x]
            rows += p.event_start[x + 1] - p.event_start[x]
            continue
        x = node[x]
        rows += 1 + p.needed_start[x + 1] - p.needed_start[x]
        pattern[e] = x + again if ran[x] else x
        ran[x] = True
    # From the end: which outputs of what runs are read until it runs again, and which of the first
    # time ever.
    outputs = p.forward_start[n]
    read = np.zeros(2 * outputs, dtype=np.bool_)
    for h in range(p.head_row.shape[0]):
        read[outputs + p.forward_start[p.head_row[h]] + p.head_output[h]] = True
    unread = np.empty(rows, dtype=np.int32)
    at = np.empty(rows, dtype=np.int32)
    count = 0
    for e in range(events.shape[0] - 1, -1, -1):
        x = events[e]
        if x < 0:
            marking = p.target.shape[0] + node[~x]
        else:
            x = node[x]
            marking = pattern[e]
            if marking == x or not p.masked[x]:
                for q in range(p.needed_start[x + 1] - 1, p.needed_start[x] - 1, -1):
                    entry = p.needed[q]
                    if not read[entry] and not (marking == x and read[outputs + entry]):
                        unread[count] = readers + q
                        at[count] = e
                        count += 1
            for entry in range(p.forward_start[x], p.forward_start[x + 1]):
                read[entry] = False
        for j in range(p.mark_start[marking], p.mark_start[marking + 1]):
            read[p.mark[j]] = True
    line = np.empty(rows, dtype=np.int32)
    rows = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x < 0:
            x = node[~x]
            for q in range(p.event_start[x], p.event_start[x + 1]):
                line[rows] = p.event_row[q]
                rows += 1
            continue
        line[rows] = pattern[e]
        rows += 1
        while count and at[count - 1] == e:
            count -= 1
            line[rows] = unread[count]
            rows += 1
    return line[:rows]


@compiled
def lay_out(p, line):  # type: ignore[no-untyped-def]
    """The rows of a training step for the allocator.

    Parameters
    ----------
    p : Patterns
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
        entries += p.output_start[k + 1] - p.output_start[k]
        uses += p.read_start[k + 1] - p.read_start[k]
        options += p.option_start[k + 1] - p.option_start[k]
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
    patterns = p.target.shape[0]
    became = np.full(2 * patterns, -1, dtype=np.int32)  # its last row and its first one
    awaited = np.empty(count, dtype=np.int32)  # by the next row in the chain
    awaiting = 0
    chain = -1  # the last row in it
    entries = uses = option = befores = 0
    for row in range(count):
        k = line[row]
        entry = entries
        for q in range(p.output_start[k], p.output_start[k + 1]):
            rank[entries] = p.rank[q]
            made[entries] = entry + p.made[q]
            entries += 1
        for j in range(p.read_start[k], p.read_start[k + 1]):
            source = became[p.read_at[j]]
            before[befores] = source
            befores += 1
            use_entry[uses] = output_start[source] + p.read_output[j]
            uses += p.read_used[j]
        for q in range(p.option_start[k], p.option_start[k + 1]):
            inplace_input[option] = p.option_input[q]
            inplace_entry[option] = output_start[became[p.option_at[q]]] + p.option_read[q]
            inplace_output[option] = entry + p.option_output[q]
            inplace_identity[option] = p.option_identity[q]
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
        if y >= 0:
            became[y] = row
            if became[patterns + y] < 0:
                became[patterns + y] = row
        output_start[row + 1] = entries
        use_start[row + 1] = uses
        inplace_start[row + 1] = option
        before_start[row + 1] = befores
    outputs = p.head_row.shape[0]
    head_row = np.empty(outputs + p.gradient_row.shape[0], dtype=np.int32)
    head_entry = np.empty(head_row.shape[0], dtype=np.int32)
    heads = 0
    for h in range(outputs):
        head_row[heads] = became[patterns + p.head_row[h]]
        head_entry[heads] = output_start[head_row[heads]] + p.head_output[h]
        heads += 1
    for h in range(p.gradient_row.shape[0]):
        source = became[p.gradient_row[h]]
        entry = output_start[source] + p.gradient_output[h]
        new = True
        for other in range(outputs):
            new &= head_entry[other] != entry
        if new:
            head_row[heads] = source
            head_entry[heads] = entry
            heads += 1
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
        p.sizes,
        made,
        inplace_start,
        inplace_input[:option],
        inplace_entry[:option],
        own,
        own,
        inplace_output[:option],
        inplace_identity[:option],
        head_row[:heads],
        head_entry[:heads],
        own,
        heads,
        before_start,
        before[:befores],
    )
