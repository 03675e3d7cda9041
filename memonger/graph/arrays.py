"""The training graph as arrays, for the compiled replay.

What does not depend on the plan is worked out here, once for a network: which in-place options can
ever apply, in which order the nodes run that are not recomputed copies, and how often each tensor
is read if there are no copies.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.inplace import IGNORED, inplace_options
from memonger.graph.operators.tensors import Tensor
from memonger.graph.order import by_key, starts, walk
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
            self.all.append(RowKind(op, attrs, inputs, IGNORED.get(op, ()), fitting, tensors))
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
    option_start, number, output, identity = columns([kind.options for kind in kinds], 3)
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
        made=(made - output_start[owner]).astype(np.int32),
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
    """Make the Tables of rows of these kinds with these outputs, in the order that MXNet runs them.

    The first ``n`` outputs are the network's, the others gradients. The rows that they wait for are
    control dependencies; what reads row -1 reads a variable. There are no recomputed copies in the
    sense of marks.
    """
    reads, waits, heads = read_row.shape[0], wait_row.shape[0], head_row.shape[0]
    own = np.full(reads + waits + heads, KEPT, dtype=np.int32)
    of_reads = read_start, read_row, read_output, own[:reads]
    of_waits, of_heads = (wait_start, wait_row, own[:waits]), (head_row, head_output, own[:heads])
    return tables_with_copies(kinds, 0, kind, of_reads, of_waits, of_heads, n)


@compiled
def tables_with_copies(kinds, forward, kind, reads, waits, heads, outputs):  # type: ignore[no-untyped-def]
    """Make the Tables of a network of so many ``forward`` nodes, whose copies may run.

    ``reads`` are where those of each row start, and their rows, outputs and owners (`Read`);
    ``waits`` the same without outputs, ``heads`` rows, outputs and owners.
    """
    read_start, read_row, read_output, read_owner = reads
    wait_start, wait_row, wait_owner = waits
    head_row, head_output, head_owner = heads
    count, read_count = kind.shape[0], read_row.shape[0]
    output_start = np.zeros(count + 1, dtype=np.int32)
    entries = options = 0
    for row in range(count):
        k = kind[row]
        entries += kinds.output_start[k + 1] - kinds.output_start[k]
        output_start[row + 1] = entries
        options += kinds.option_start[k + 1] - kinds.option_start[k]
    variable = kinds.variable[kind]
    place = np.empty(entries, dtype=np.int32)  # of each output the same of its kind
    made = np.empty(entries, dtype=np.int32)
    for row in range(count):
        shift = kinds.output_start[kind[row]] - output_start[row]
        for out in range(output_start[row], output_start[row + 1]):
            place[out] = out + shift
            made[out] = output_start[row] + kinds.made[out + shift]
    rank = kinds.rank[place]
    dtype = kinds.dtype[place]
    itemsize = kinds.itemsize[place]
    read_ignored = np.empty(read_count, dtype=np.bool_)
    use_start = np.zeros(count + 1, dtype=np.int32)
    use = np.empty(read_count, dtype=np.int32)  # the place of the read
    inplace_start = np.zeros(count + 1, dtype=np.int32)
    inplace = np.empty(options, dtype=np.int32)  # the place of the read
    inplace_input = np.empty(options, dtype=np.int32)
    inplace_output = np.empty(options, dtype=np.int32)
    inplace_identity = np.empty(options, dtype=np.bool_)
    before_start = np.zeros(count + 1, dtype=np.int32)
    before_row = np.empty(read_count + wait_row.shape[0], dtype=np.int32)
    before_owner = np.empty(before_row.shape[0], dtype=np.int32)
    read_entry = np.zeros(read_count, dtype=np.int32)
    uses = option = befores = 0
    for row in range(count):
        k = kind[row]
        begin = read_start[row]
        for j in range(begin, read_start[row + 1]):
            source = read_row[j]
            read_ignored[j] = kinds.ignored[kinds.ignored_start[k] + j - begin]
            if source < 0:
                continue
            read_entry[j] = output_start[source] + read_output[j]
            before_row[befores] = source
            before_owner[befores] = read_owner[j]
            befores += 1
            if not read_ignored[j] and not variable[source]:
                use[uses] = j
                uses += 1
        for q in range(kinds.option_start[k], kinds.option_start[k + 1]):
            j = begin + kinds.option_input[q]
            out = output_start[row] + kinds.option_output[q]
            if read_row[j] < 0 or variable[read_row[j]]:
                continue
            entry = read_entry[j]
            if rank[entry] != rank[out] or itemsize[entry] != itemsize[out]:
                continue
            same = kinds.option_identity[q] and dtype[entry] == dtype[out]
            if same or kinds.reads[k]:
                inplace[option] = j
                inplace_input[option] = kinds.option_input[q]
                inplace_output[option] = out
                inplace_identity[option] = same
                option += 1
        for j in range(wait_start[row], wait_start[row + 1]):
            before_row[befores] = wait_row[j]
            before_owner[befores] = wait_owner[j]
            befores += 1
        use_start[row + 1] = uses
        inplace_start[row + 1] = option
        before_start[row + 1] = befores
    use, inplace = use[:uses], inplace[:option]
    use_entry, use_row, use_owner = read_entry[use], read_row[use], read_owner[use]
    head_entry = output_start[head_row] + head_output

    links = before_start, before_row[:befores], before_owner
    last = outputs if forward else head_row.shape[0]
    first, _ = walk(0, *links, head_row[:last], head_owner[:last])
    met, by = walk(forward, *links, head_row[last:], head_owner[last:])
    runs = np.zeros(count + 1, dtype=np.bool_)  # and, after all rows, the user
    runs[first] = runs[met] = runs[count] = True
    # What runs reads, and what the gradients of each operator read of operators.
    reader = np.repeat(np.arange(count), np.diff(use_start))
    reader = np.concatenate((reader, np.full(head_row.shape[0], count)))
    entry = np.concatenate((use_entry, head_entry))
    row_read = np.concatenate((use_row, head_row))
    owner = np.concatenate((use_owner, head_owner))
    gradient = (reader >= 2 * forward) & (owner != KEPT) & (row_read < forward)
    taken = np.flatnonzero(runs[reader] & gradient & ~variable[row_read])
    recomputed_start, items = by_key(owner[taken], forward)
    taken = taken[items]
    walked = (met >= forward) | ((by != KEPT) & ~variable[met])
    return Tables(
        forward=forward,
        variable=variable,
        read_start=read_start,
        read_row=read_row,
        read_output=read_output,
        read_owner=read_owner,
        read_ignored=read_ignored,
        use_start=use_start,
        use_entry=use_entry,
        use_row=use_row,
        use_owner=use_owner,
        output_start=output_start,
        elements=kinds.elements[place],
        itemsize=itemsize,
        rank=rank,
        sizes=kinds.sizes,
        made=made,
        inplace_start=inplace_start,
        inplace_input=inplace_input[:option],
        inplace_entry=read_entry[inplace],
        inplace_row=read_row[inplace],
        inplace_owner=read_owner[inplace],
        inplace_output=inplace_output[:option],
        inplace_identity=inplace_identity[:option],
        head_row=head_row,
        head_entry=head_entry,
        head_owner=head_owner,
        outputs=outputs,
        first=first,
        walk_row=met[walked],
        walk_owner=by[walked],
        before_start=before_start[: forward + 1],
        before_row=before_row[: before_start[forward]],
        reads=np.bincount(entry[runs[reader]], minlength=entries).astype(np.int32),
        recomputed_start=recomputed_start,
        recomputed_entry=entry[taken],
        recomputed_row=row_read[taken],
    )


def columns(lists: Sequence[Sequence[Sequence[int]]], width: int) -> tuple[np.ndarray, ...]:
    """Join lists of tuples: return where each list starts, and their columns, all of int32."""
    start, items = ragged(lists)
    return (start.astype(np.int32), *items.reshape(-1, width).astype(np.int32).T.copy())


def ragged(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join lists to one array: return where each starts, and what is in them."""
    items = [item for one in lists for item in one]
    return starts([len(one) for one in lists]), np.array(items, dtype=np.int64)
