"""The training graph of a schedule as arrays for the allocator, in compiled code.

It is the graph that is written out for MXNet (``rows.rows_of``, then ``tables.build``), made at
once, for a search makes thousands. What a row of it has, whatever the schedule, is worked out
beforehand: its *pattern*. Variables take no memory of the pool, so there are no rows of theirs.
"""

from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.compiled import compiled
from memonger.rows import Template
from memonger.tables import KEPT, RowKind, largest_first, ragged
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
    read_start, read_row, read_output : np.ndarray
        What it reads of operators, template rows.
    read_first, read_used : np.ndarray of bool
        Whether of the first time that it ran; whether more than its shape is read.
    wait_start, wait_row, wait_first : np.ndarray
        What a gradient waits for, its forward node first, and whether for the first time.
    option_start, option_input, option_read, option_output, option_identity : np.ndarray
        The in-place options that can apply: the number of the input, its place in ``read_row``,
        the output.
    event_start, event_row : np.ndarray
        For forward rows: the gradient rows of their event (``Template.event_row``).
    needed_start, needed : np.ndarray
        For forward rows: the outputs that must have a reader; as places in ``forward_start``.
    masked : np.ndarray of bool
        For forward rows (``Template.masked``).
    forward_start : np.ndarray
        Of forward rows where their outputs start if all are numbered through.
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
    read_row: np.ndarray
    read_output: np.ndarray
    read_first: np.ndarray
    read_used: np.ndarray
    wait_start: np.ndarray
    wait_row: np.ndarray
    wait_first: np.ndarray
    option_start: np.ndarray
    option_input: np.ndarray
    option_read: np.ndarray
    option_output: np.ndarray
    option_identity: np.ndarray
    event_start: np.ndarray
    event_row: np.ndarray
    needed_start: np.ndarray
    needed: np.ndarray
    masked: np.ndarray
    forward_start: np.ndarray
    head_row: np.ndarray
    head_output: np.ndarray
    gradient_row: np.ndarray
    gradient_output: np.ndarray
    sizes: np.ndarray


class _Read(NamedTuple):
    row: int
    output: int
    first: bool


class _Maker:
    """Makes the `Patterns` of a network."""

    def __init__(self, made: Parts) -> None:
        self.made = made
        self.template: Template = made.template
        self.n = len(self.template.masked)
        self.kind: List[RowKind] = []
        self.target: List[int] = []
        self.link: List[int] = []
        self.read: List[List[Tuple[int, int, bool, bool]]] = []
        self.wait: List[List[int]] = []
        self.option: List[List[Tuple[int, int, int, bool]]] = []

    def patterns(self) -> Patterns:
        made, t, n = self.made, self.template, self.n
        kinds = made.kinds
        rows = len(t.variable)
        for row in range(rows):
            waits = t.wait_row[t.wait_start[row] : t.wait_start[row + 1]].tolist()
            reads = self._reads(row)
            alone = not waits and row >= n
            link = CHAINED if not alone else AWAITED if reads else LOOSE
            self._add(kinds[made.kind_of[row]], row, link, reads, waits)
        for x in range(n):
            kind, reads = kinds[made.kind_of[x]], self._reads(x)
            if t.masked[x]:
                kind, reads = kinds[made.masked_kind[x]], [reads[0], _Read(x, 1, True)]
            self._add(kind, x, CHAINED, reads, [])
        for x in range(n):
            for q in range(t.needed_start[x], t.needed_start[x + 1]):
                reads = [_Read(x, int(t.needed[q]), False)]
                self._add(kinds[made.reader_kind[q]], NO_TARGET, AWAITED, reads, [])
        return self._arrays()

    def _reads(self, row: int) -> List[_Read]:
        t = self.template
        span = slice(t.read_start[row], t.read_start[row + 1])
        columns = t.read_row[span], t.read_output[span], t.read_first[span]
        return [_Read(*read) for read in zip(*(column.tolist() for column in columns))]

    def _add(
        self, kind: RowKind, target: int, link: int, reads: Sequence[_Read], waits: List[int]
    ) -> None:
        """One more pattern. What it reads of variables is left out."""
        places = {}
        kept: List[Tuple[int, int, bool, bool]] = []
        for k, read in enumerate(reads):
            if not self.template.variable[read.row]:
                places[k] = len(kept)
                kept.append((*read, k not in kind.ignored))
        holds = len(kind.ignored) < len(reads)
        options = []
        for k, out, identity in kind.options:
            if k in places:
                read, result = reads[k], kind.tensors[out]
                given = self.made.kinds[self.made.kind_of[read.row]].tensors[read.output]
                into, onto = np.dtype(given.dtype), np.dtype(result.dtype)
                same = identity and into == onto
                fits = given.elements == result.elements and into.itemsize == onto.itemsize
                if fits and (same or holds):
                    options.append((k, places[k], out, same))
        self.kind.append(kind)
        self.target.append(target)
        self.link.append(link)
        self.read.append(kept)
        self.wait.append(waits)
        self.option.append(options)

    def _arrays(self) -> Patterns:
        t, n = self.template, self.n
        tensors = [kind.tensors for kind in self.kind]
        output_start, elements = ragged([[tensor.elements for tensor in own] for own in tensors])
        sizes, rank = np.unique(4 * elements, return_inverse=True)
        made = largest_first(output_start, elements)
        made -= np.repeat(output_start[:-1], np.diff(output_start))
        read_start, read = ragged(self.read)
        read = read.reshape(-1, 4)
        wait_start, wait = ragged(self.wait)
        option_start, option = ragged(self.option)
        option = option.reshape(-1, 4)
        count = np.diff(option_start)
        option[:, 1] += np.repeat(read_start[:-1], count)
        first = np.zeros(len(t.variable), dtype=np.bool_)
        first[:n] = t.masked
        needed = t.needed + np.repeat(output_start[:n], np.diff(t.needed_start[: n + 1]))
        heads = ~t.variable[t.head_row]
        asked = list(dict.fromkeys(e for e in self.made.gradients if e is not None))
        gradients = np.array([e for e in asked if not t.variable[e[0]]], dtype=np.int64).reshape(
            -1, 2
        )

        def small(array: Any) -> np.ndarray:
            return np.ascontiguousarray(array, dtype=np.int32)

        def flags(array: Any) -> np.ndarray:
            return np.ascontiguousarray(array, dtype=np.bool_)

        return Patterns(
            small(self.target),
            small(self.link),
            small(output_start),
            small(rank),
            small(made),
            small(read_start),
            small(read[:, 0]),
            small(read[:, 1]),
            flags(read[:, 2]),
            flags(read[:, 3]),
            small(wait_start),
            small(wait),
            first[wait.astype(np.int64)],
            small(option_start),
            small(option[:, 0]),
            small(option[:, 1]),
            small(option[:, 2]),
            flags(option[:, 3]),
            small(t.event_start),
            small(t.event_row),
            small(t.needed_start),
            small(needed),
            t.masked,
            small(output_start[: n + 1]),
            small(t.head_row[heads]),
            small(t.head_output[heads]),
            small(gradients[:, 0]),
            small(gradients[:, 1]),
            sizes.astype(np.int64),
        )


def patterns(made: Parts) -> Patterns:
    """What the rows of a network's training steps can be."""
    return _Maker(made).patterns()


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
    # From the end: which outputs of what runs are read until it runs again.
    latest = np.zeros(p.forward_start[n], dtype=np.bool_)
    first = np.zeros(p.forward_start[n], dtype=np.bool_)
    for h in range(p.head_row.shape[0]):
        first[p.forward_start[p.head_row[h]] + p.head_output[h]] = True
    unread = np.empty(rows, dtype=np.int32)
    at = np.empty(rows, dtype=np.int32)
    count = 0
    for e in range(events.shape[0] - 1, -1, -1):
        x = events[e]
        if x < 0:
            x = node[~x]
            start, stop = p.event_start[x], p.event_start[x + 1]
        else:
            x = node[x]
            start, stop = 0, 1
            if pattern[e] == x or not p.masked[x]:
                for q in range(p.needed_start[x + 1] - 1, p.needed_start[x] - 1, -1):
                    entry = p.needed[q]
                    if not latest[entry] and not (pattern[e] == x and first[entry]):
                        unread[count] = readers + q
                        at[count] = e
                        count += 1
            for entry in range(p.forward_start[x], p.forward_start[x + 1]):
                latest[entry] = False
        for k in range(start, stop):
            row = p.event_row[k] if events[e] < 0 else pattern[e]
            for j in range(p.read_start[row], p.read_start[row + 1]):
                y = p.read_row[j]
                if y < n and p.read_used[j]:
                    if p.read_first[j]:
                        first[p.forward_start[y] + p.read_output[j]] = True
                    else:
                        latest[p.forward_start[y] + p.read_output[j]] = True
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
    use_entry = np.empty(uses, dtype=np.int32)
    inplace_start = np.zeros(count + 1, dtype=np.int32)
    inplace_input = np.empty(options, dtype=np.int32)
    inplace_entry = np.empty(options, dtype=np.int32)
    inplace_output = np.empty(options, dtype=np.int32)
    inplace_identity = np.empty(options, dtype=np.bool_)
    before_start = np.zeros(count + 1, dtype=np.int32)
    before = np.empty(befores + uses, dtype=np.int32)
    templates = p.target.shape[0] - p.needed.shape[0]
    first = np.full(templates, -1, dtype=np.int32)
    latest = np.full(templates, -1, dtype=np.int32)
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
            y = p.read_row[j]
            source = first[y] if p.read_first[j] else latest[y]
            before[befores] = source
            befores += 1
            if p.read_used[j]:
                use_entry[uses] = output_start[source] + p.read_output[j]
                uses += 1
        for q in range(p.option_start[k], p.option_start[k + 1]):
            j = p.option_read[q]
            y = p.read_row[j]
            source = first[y] if p.read_first[j] else latest[y]
            inplace_input[option] = p.option_input[q]
            inplace_entry[option] = output_start[source] + p.read_output[j]
            inplace_output[option] = entry + p.option_output[q]
            inplace_identity[option] = p.option_identity[q]
            option += 1
        if p.link[k] == CHAINED:
            for j in range(p.wait_start[k], p.wait_start[k + 1]):
                y = p.wait_row[j]
                before[befores] = first[y] if p.wait_first[j] else latest[y]
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
            latest[y] = row
            if first[y] < 0:
                first[y] = row
        output_start[row + 1] = entries
        use_start[row + 1] = uses
        inplace_start[row + 1] = option
        before_start[row + 1] = befores
    outputs = p.head_row.shape[0]
    head_row = np.empty(outputs + p.gradient_row.shape[0], dtype=np.int32)
    head_entry = np.empty(head_row.shape[0], dtype=np.int32)
    heads = 0
    for h in range(outputs):
        head_row[heads] = first[p.head_row[h]]
        head_entry[heads] = output_start[head_row[heads]] + p.head_output[h]
        heads += 1
    for h in range(p.gradient_row.shape[0]):
        source = latest[p.gradient_row[h]]
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
