"""The training graph as arrays, for the compiled replay.

What does not depend on the plan is worked out here, once for a network: which in-place options can
ever apply, in which order the nodes run that are not recomputed copies, and how often each tensor
is read if there are no copies.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.inplace import ignored_inputs, inplace_options
from memonger.graph.operators.tensors import Tensor
from memonger.graph.order import Links, links, starts, walk
from memonger.support.compiled import compiled

KEPT = -1

#: What a row is part of: the forward pass, what is computed again, the backward pass.
FORWARD, RECOMPUTED, BACKWARD = 0, 1, 2

#: What a row reads: (row, output, owner). Where the operator `owner` is recomputed, and so is the
#: operator of `row`, its recomputed copy is read instead. KEPT: always the row itself.
Read = Tuple[int, int, int]


class RowKind(NamedTuple):
    """What rows have in common that run the same operator on tensors of the same shapes."""

    op: str  # 'null' for a variable
    attrs: Mapping[str, str]
    inputs: int  # how many it reads
    ignored: tuple[int, ...]  # those of them that are read for their shape alone
    options: tuple[tuple[int, int, bool], ...]  # in-place: input, output, identity
    tensors: Sequence[Tensor]  # its outputs


class Kinds:
    """Numbers the kinds of rows; a new kind is appended to ``all``, where each stands once."""

    def __init__(self, known: list[RowKind]) -> None:
        self.all = known
        self.inexact: set[str] = set()
        self._numbers = {_key(k.op, k.attrs, k.inputs, k.tensors): i for i, k in enumerate(known)}

    def __call__(
        self, op: str, attrs: Mapping[str, str], inputs: int, tensors: Sequence[Tensor]
    ) -> int:
        key = _key(op, attrs, inputs, tensors)
        if key not in self._numbers:
            options = () if op == "null" else inplace_options(op, attrs, inputs)
            if options is None:
                self.inexact.add(f"the in-place options of {op} are not listed")
            fitting = tuple(o for o in options or () if o[1] < len(tensors))
            if any(k > 62 for k, _, _ in fitting):  # the compiled loop keeps a bit for each
                self.inexact.add(f"{op} has more than 63 inputs that it may overwrite")
            self._numbers[key] = len(self.all)
            self.all.append(RowKind(op, attrs, inputs, ignored_inputs(op), fitting, tensors))
        return self._numbers[key]


def _key(op: str, attrs: Mapping[str, str], inputs: int, tensors: Sequence[Tensor]) -> object:
    return op, tuple(attrs.items()), inputs, tuple(tensors)


class Tables(NamedTuple):
    """The training graph as arrays.

    Rows 0 to n-1 are the forward nodes, n to 2n-1 their recomputed copies, then the gradients.
    ``*_start`` has one more element than there are rows: row r owns [start[r], start[r + 1]). The
    outputs of all rows are numbered through: ``output_start[row] + output``; an *entry* is such a
    number.
    """

    forward: int  # n
    variable: np.ndarray
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    read_owner: np.ndarray
    read_ignored: np.ndarray
    # The reads that hold memory: not ignored, not of variables.
    use_start: np.ndarray
    use_entry: np.ndarray
    use_row: np.ndarray
    use_owner: np.ndarray
    output_start: np.ndarray
    elements: np.ndarray  # of each output
    itemsize: np.ndarray  # bytes of one element of it
    rank: np.ndarray  # of each output the place of its size in `sizes`
    sizes: np.ndarray  # bytes, 4 to an element, ascending
    made: np.ndarray  # the outputs of each row in the order in which they get memory
    # The in-place options that can apply: sizes agree, the input is no variable.
    inplace_start: np.ndarray
    inplace_input: np.ndarray
    inplace_entry: np.ndarray  # read by that input
    inplace_row: np.ndarray
    inplace_owner: np.ndarray
    inplace_output: np.ndarray  # an entry
    inplace_identity: np.ndarray
    head_row: np.ndarray  # the outputs of the network, then the gradients
    head_entry: np.ndarray
    head_owner: np.ndarray
    outputs: int  # how many of them are outputs of the network
    # The order: `first`, then `walk_row`. In that stands a gradient, to be run, or a forward node,
    # met by the gradient of walk_owner: its copy, if there is one, must have run by then.
    first: np.ndarray
    walk_row: np.ndarray
    walk_owner: np.ndarray
    before_start: np.ndarray  # for forward rows: the operators that must have run before
    before_row: np.ndarray
    reads: np.ndarray  # of each output, how often it is read if nothing is recomputed
    recomputed_start: np.ndarray  # for forward rows: what their gradients read of operators
    recomputed_entry: np.ndarray
    recomputed_row: np.ndarray


class KindArrays(NamedTuple):
    """What `RowKind`s mean to the allocator, one after the other; see `Tables`."""

    variable: np.ndarray
    reads: np.ndarray  # whether it reads more than shapes
    ignored_start: np.ndarray  # of its inputs
    ignored: np.ndarray
    output_start: np.ndarray
    elements: np.ndarray
    itemsize: np.ndarray
    dtype: np.ndarray
    rank: np.ndarray
    made: np.ndarray  # the largest first
    option_start: np.ndarray
    option_input: np.ndarray
    option_output: np.ndarray
    option_identity: np.ndarray
    sizes: np.ndarray


def arrays_of(kinds: Sequence[RowKind]) -> KindArrays:
    """Look up what these kinds mean to the allocator."""
    tensors = [tensor for kind in kinds for tensor in kind.tensors]
    dtypes = [np.dtype(tensor.dtype) for tensor in tensors]
    variable = np.array([kind.op == "null" for kind in kinds], dtype=np.bool_)
    output_start = starts([len(kind.tensors) for kind in kinds])
    owner = np.repeat(np.arange(len(kinds)), np.diff(output_start))
    elements = np.array([tensor.elements for tensor in tensors], dtype=np.int64)
    pooled = ~variable[owner]
    rank = np.zeros(len(elements), dtype=np.int32)
    sizes, rank[pooled] = np.unique(4 * elements[pooled], return_inverse=True)
    made = np.arange(len(elements))  # of equal sizes the last (a reversed multimap)
    made = made[np.lexsort((-made, -elements, owner))]
    ignored_start, ignored = ragged([[i in k.ignored for i in range(k.inputs)] for k in kinds])
    option_start, options = ragged([kind.options for kind in kinds])
    number, output, identity = options.reshape(-1, 3).T.copy()
    return KindArrays(
        variable=variable,
        reads=np.array([not {*range(k.inputs)} <= {*k.ignored} for k in kinds], dtype=np.bool_),
        ignored_start=ignored_start,
        ignored=ignored.astype(np.bool_),
        output_start=output_start,
        elements=elements,
        itemsize=np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64),
        dtype=np.array([dtype.num for dtype in dtypes], dtype=np.int32),
        rank=rank,
        made=made - output_start[owner],
        option_start=option_start,
        option_input=number,
        option_output=output,
        option_identity=identity.astype(np.bool_),
        sizes=sizes.astype(np.int64),
    )


@compiled
def tables_of(  # type: ignore[no-untyped-def]
    kinds, kind, read_start, read_row, read_output, wait_start, wait_row, head_row, head_output, n
):
    """Make the Tables of rows of these kinds with these outputs, in the order that MXNet runs.

    The first ``n`` outputs are the network's, the others gradients. The rows that they wait for are
    control dependencies; what reads row -1 reads a variable. There are no recomputed copies in the
    sense of marks.
    """
    count = kind.shape[0]
    output_start = np.zeros(count + 1, dtype=np.int32)
    outputs = options = 0
    for row in range(count):
        k = kind[row]
        outputs += kinds.output_start[k + 1] - kinds.output_start[k]
        output_start[row + 1] = outputs
        options += kinds.option_start[k + 1] - kinds.option_start[k]
    reads = read_row.shape[0]
    variable = kinds.variable[kind]
    place = np.empty(outputs, dtype=np.int32)  # of each output the same of its kind
    made = np.empty(outputs, dtype=np.int32)
    for row in range(count):
        shift = kinds.output_start[kind[row]] - output_start[row]
        for out in range(output_start[row], output_start[row + 1]):
            place[out] = out + shift
            made[out] = output_start[row] + kinds.made[out + shift]
    rank = kinds.rank[place]
    dtype = kinds.dtype[place]
    itemsize = kinds.itemsize[place]
    read_ignored = np.empty(reads, dtype=np.bool_)
    use_start = np.zeros(count + 1, dtype=np.int32)
    use_entry = np.empty(reads, dtype=np.int32)
    inplace_start = np.zeros(count + 1, dtype=np.int32)
    inplace_input = np.empty(options, dtype=np.int32)
    inplace_entry = np.empty(options, dtype=np.int32)
    inplace_output = np.empty(options, dtype=np.int32)
    inplace_identity = np.empty(options, dtype=np.bool_)
    before_start = np.zeros(count + 1, dtype=np.int32)
    before = np.empty(reads + wait_row.shape[0], dtype=np.int32)
    uses = option = befores = 0
    for row in range(count):
        k = kind[row]
        begin = output_start[row]
        first = read_start[row]
        for j in range(first, read_start[row + 1]):
            source = read_row[j]
            read_ignored[j] = kinds.ignored[kinds.ignored_start[k] + j - first]
            if source < 0:
                continue
            before[befores] = source
            befores += 1
            if not read_ignored[j] and not variable[source]:
                use_entry[uses] = output_start[source] + read_output[j]
                uses += 1
        for q in range(kinds.option_start[k], kinds.option_start[k + 1]):
            j = first + kinds.option_input[q]
            source = read_row[j]
            if source < 0 or variable[source]:
                continue
            entry = output_start[source] + read_output[j]
            out = begin + kinds.option_output[q]
            if rank[entry] != rank[out] or itemsize[entry] != itemsize[out]:
                continue
            same = kinds.option_identity[q] and dtype[entry] == dtype[out]
            if same or kinds.reads[k]:
                inplace_input[option] = kinds.option_input[q]
                inplace_entry[option] = entry
                inplace_output[option] = out
                inplace_identity[option] = same
                option += 1
        for j in range(wait_start[row], wait_start[row + 1]):
            before[befores] = wait_row[j]
            befores += 1
        use_start[row + 1] = uses
        inplace_start[row + 1] = option
        before_start[row + 1] = befores
    own = np.full(max(reads, befores, options, head_row.shape[0]) + 1, KEPT, dtype=np.int32)
    order, _ = walk(0, before_start, before[:befores], own, head_row, own)
    times = np.zeros(outputs, dtype=np.int32)
    for row in order:
        for j in range(use_start[row], use_start[row + 1]):
            times[use_entry[j]] += 1
    head_entry = output_start[head_row] + head_output
    for entry in head_entry:
        times[entry] += 1
    nothing = np.zeros(1, dtype=np.int32)
    return Tables(
        forward=0,
        variable=variable,
        read_start=read_start,
        read_row=read_row,
        read_output=read_output,
        read_owner=own,
        read_ignored=read_ignored,
        use_start=use_start,
        use_entry=use_entry[:uses],
        use_row=own,
        use_owner=own,
        output_start=output_start,
        elements=kinds.elements[place],
        itemsize=itemsize,
        rank=rank,
        sizes=kinds.sizes,
        made=made,
        inplace_start=inplace_start,
        inplace_input=inplace_input[:option],
        inplace_entry=inplace_entry[:option],
        inplace_row=own,
        inplace_owner=own,
        inplace_output=inplace_output[:option],
        inplace_identity=inplace_identity[:option],
        head_row=head_row,
        head_entry=head_entry,
        head_owner=own,
        outputs=n,
        first=order.astype(np.int32),
        walk_row=nothing[1:],
        walk_owner=nothing[1:],
        before_start=nothing,
        before_row=nothing[1:],
        reads=times,
        recomputed_start=nothing,
        recomputed_entry=nothing[1:],
        recomputed_row=nothing[1:],
    )


def build(
    forward: Sequence[int],
    inputs: Sequence[tuple[int, int]],
    gradients: Sequence[int],
    reads: Sequence[Read],
    waits: Sequence[tuple[int, int, int]],
    kinds: Sequence[RowKind],
    heads: Sequence[Read],
    outputs: int,
) -> Tables:
    """Make the Tables of a training graph whose operators may be recomputed.

    ``forward`` and ``gradients`` are the kinds of these nodes, ``inputs`` what the forward nodes
    read (row, output), ``reads`` what the gradients read, one node after the other. ``waits`` are
    rows, what must have run before them besides, and owners. ``heads`` are the outputs of the
    network, so many as ``outputs`` says, then the gradients.
    """
    n = len(forward)
    kind = np.array([*forward, *forward, *gradients], dtype=np.int32)
    of = arrays_of(kinds)
    counts = np.diff(of.ignored_start)[kind]
    copied = np.repeat(np.arange(n), counts[:n])
    both = [np.c_[np.reshape(inputs, (-1, 2)), x] for x in (np.full_like(copied, KEPT), copied)]
    read = np.concatenate([*both, np.reshape(reads, (-1, 3))]).astype(np.int32)
    row, output, owner = read.T.copy()
    head_row, head_output, head_owner = head = np.array(heads, dtype=np.int32).T.copy()
    start, none = _small(starts(counts)), np.zeros(len(kind) + 1, dtype=np.int32)
    t = tables_of(of, kind, start, row, output, none, none[:0], head_row, head_output, outputs)

    reader = np.repeat(np.arange(len(kind)), counts)
    used = ~t.read_ignored & ~t.variable[row]
    option = start[np.repeat(np.arange(len(kind)), np.diff(t.inplace_start))] + t.inplace_input
    before = links(len(kind), np.c_[reader, row, owner], waits)
    order = _order(n, t.variable, before, head, outputs)
    # What runs reads, and what the gradients of each operator read of operators.
    runs = np.zeros(len(kind), dtype=np.bool_)
    runs[order["first"]] = runs[order["walk_row"]] = True
    entry = t.output_start[row] + output
    times = np.bincount(entry[used & runs[reader]], minlength=len(t.elements))
    np.add.at(times, t.head_entry, 1)
    taken = np.r_[used & runs[reader] & (reader >= 2 * n), ~t.variable[head_row]]
    taker, taken_row = np.r_[owner, head_owner], np.r_[row, head_row]
    taken &= (taker != KEPT) & (taken_row < n)
    by_taker = np.flatnonzero(taken)[np.argsort(taker[taken], kind="stable")]
    return t._replace(
        forward=n,
        read_owner=owner,
        use_row=row[used],
        use_owner=owner[used],
        inplace_row=row[option],
        inplace_owner=owner[option],
        head_owner=head_owner,
        **order,
        reads=_small(times),
        recomputed_start=_small(starts(np.bincount(taker[taken], minlength=n))),
        recomputed_entry=np.r_[entry, t.head_entry][by_taker],
        recomputed_row=taken_row[by_taker],
    )


def _order(
    n: int, variable: np.ndarray, before: Links, head: np.ndarray, outputs: int
) -> dict[str, Any]:
    """Work out the order: these fields of `Tables`, each pair of ``walk_*`` once."""
    row, _, owner = head.astype(np.int64)
    first, _ = walk(0, *before, row[:outputs], owner)
    row, owner = walk(n, *before, row[outputs:], owner[outputs:])
    met = (row >= n) | ((owner != KEPT) & ~variable[row])
    row, owner = row[met], owner[met]
    once = np.sort(np.unique(row * (n + 1) + owner, return_index=True)[1])
    reader = np.repeat(np.arange(n), np.diff(before[0][: n + 1]))
    source = before[1][: len(reader)]
    start = starts(np.bincount(reader[~variable[source]], minlength=n))
    return {
        "first": _small(first),
        "walk_row": _small(row[once]),
        "walk_owner": _small(owner[once]),
        "before_start": _small(start),
        "before_row": _small(source[~variable[source]]),
    }


def _small(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32)


def ragged(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join lists to one array: return where each starts, and what is in them."""
    items = [item for one in lists for item in one]
    return starts([len(one) for one in lists]), np.array(items, dtype=np.int64)
