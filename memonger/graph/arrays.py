"""The training graph as arrays, for the compiled replay.

What does not depend on the plan is worked out here, once for a network: which in-place options can
ever apply, in which order (depth first from the outputs, ``nnvm::DFSVisit``) the nodes run that are
not recomputed copies, and how often each tensor is read if there are no copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.inplace import IGNORED, inplace_options
from memonger.graph.operators.tensors import Attributes, Tensors
from memonger.support.compiled import compiled

KEPT = -1

#: What a row is part of: the forward pass, what is computed again, the backward pass.
FORWARD, RECOMPUTED, BACKWARD = 0, 1, 2

#: What a row reads: (row, output, owner). Where the operator `owner` is recomputed, and so is the
#: operator of `row`, its recomputed copy is read instead. KEPT: always the row itself.
Read = Tuple[int, int, int]


class Signature(NamedTuple):
    """What rows have in common that run the same operator on tensors of the same shapes."""

    op: str  # 'null' for a variable
    attrs: Attributes
    inputs: int  # how many it reads
    ignored: tuple[int, ...]  # those of them that are read for their shape alone
    options: tuple[tuple[int, int, bool], ...]  # in-place: input, output, identity
    tensors: Tensors  # its outputs


class Signatures:
    """Numbers the signatures of rows; a new one is appended to ``all``, where each stands once."""

    def __init__(self, known: Sequence[Signature] = ()) -> None:
        self.all = list(known)
        self.inexact: set[str] = set()
        self._numbers = {_key(k.op, k.attrs, k.inputs, k.tensors): i for i, k in enumerate(known)}

    def __call__(self, op: str, attrs: Attributes, inputs: int, tensors: Tensors) -> int:
        key = _key(op, attrs, inputs, tensors)
        if key not in self._numbers:
            options = inplace_options(op, attrs, inputs)
            fitting = tuple(o for o in options or () if o[1] < len(tensors))
            if options is None:
                self.inexact.add(f"the in-place options of {op} are not known")
            self._numbers[key] = len(self.all)
            self.all.append(Signature(op, attrs, inputs, IGNORED.get(op, ()), fitting, tensors))
        return self._numbers[key]


def _key(op: str, attrs: Attributes, inputs: int, tensors: Tensors) -> object:
    return op, tuple(attrs.items()), inputs, tuple(tensors)


class GraphArrays(NamedTuple):
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


class SignatureArrays(NamedTuple):
    """What `Signature`s mean to the allocator, one after the other; see `GraphArrays`."""

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


def arrays_of(signatures: Sequence[Signature]) -> SignatureArrays:
    """Look up what these signatures mean to the allocator."""
    dtypes = [np.dtype(tensor.dtype) for k in signatures for tensor in k.tensors]
    variable = np.array([signature.op == "null" for signature in signatures], dtype=np.bool_)
    output_start = np.cumsum([0, *[len(signature.tensors) for signature in signatures]])
    owner = np.repeat(np.arange(len(signatures)), np.diff(output_start))
    elements = np.array([t.elements for k in signatures for t in k.tensors], dtype=np.int64)
    pooled = ~variable[owner]
    rank = np.zeros(len(elements), dtype=np.int32)
    sizes, rank[pooled] = np.unique(4 * elements[pooled], return_inverse=True)
    made = np.arange(len(elements))  # of equal sizes the last (a reversed multimap)
    made = made[np.lexsort((-made, -elements, owner))]
    ignored_start, ignored = ragged([[i in k.ignored for i in range(k.inputs)] for k in signatures])
    option_start, *options, identity = columns([signature.options for signature in signatures], 3)
    reads = np.array([not {*range(k.inputs)} <= {*k.ignored} for k in signatures], dtype=np.bool_)
    itemsize = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    numbers = np.array([dtype.num for dtype in dtypes], dtype=np.int32)
    made = (made - output_start[owner]).astype(np.int32)
    inputs = variable, reads, ignored_start, ignored.astype(np.bool_)
    outputs = output_start, elements, itemsize, numbers, rank, made
    options_of = option_start, *options, identity.astype(np.bool_)
    return SignatureArrays(*inputs, *outputs, *options_of, sizes.astype(np.int64))  # type: ignore[call-arg]


@compiled
def gathered(start, which):  # type: ignore[no-untyped-def]
    """Return the places of what some rows own, row after row, and of which row each is."""
    count = np.sum(start[which + 1] - start[which])
    place, row = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    k = 0
    for r in range(which.shape[0]):
        for j in range(start[which[r]], start[which[r] + 1]):
            place[k], row[k] = j, r
            k += 1
    return place, row


@compiled
def by_key(key, keys):  # type: ignore[no-untyped-def]
    """Order items by key: return where those of each key start, and which they are."""
    start = np.zeros(keys + 1, dtype=np.int32)
    start[1:] = np.cumsum(np.bincount(key, minlength=keys))
    at = start.copy()
    items = np.empty(key.shape[0], dtype=np.int32)
    for i in range(key.shape[0]):
        items[at[key[i]]] = i
        at[key[i]] += 1
    return start, items


@compiled
def walk(known, start, before, owner, heads, head_owner):  # type: ignore[no-untyped-def]
    """Order rows depth first from the heads, each after what it reads.

    Those below ``known`` have run already: they are put down, with the owner, at each read.
    """
    rows = start.shape[0] - 1
    seen = np.zeros(rows, dtype=np.bool_)
    stack = np.empty(rows, dtype=np.int32)
    at = np.empty(rows, dtype=np.int32)
    met = np.empty(rows + before.shape[0] + heads.shape[0], dtype=np.int32)
    by = np.full(met.shape[0], -1, dtype=np.int32)  # KEPT
    count, depth = 0, -1
    for h in range(heads.shape[0]):
        row, reader = heads[h], head_owner[h]
        while True:
            if row < known:
                met[count] = row
                by[count] = reader
                count += 1
            elif not seen[row]:
                seen[row] = True
                depth += 1
                stack[depth] = row
                at[depth] = start[row]
            while depth >= 0 and at[depth] == start[stack[depth] + 1]:
                met[count] = stack[depth]
                count += 1
                depth -= 1
            if depth < 0:
                break
            row, reader = before[at[depth]], owner[at[depth]]
            at[depth] += 1
    return met[:count], by[:count]


@compiled
def graph_arrays(known, forward, which, reads, waits, heads, outputs):  # type: ignore[no-untyped-def]
    """Make the GraphArrays of rows of signatures ``which``, with copies of the first ``forward``.

    ``reads`` are where those of each row start, and their rows (-1: a variable that is left out),
    outputs and owners (`Read`); ``waits`` are control dependencies. The first ``outputs`` of the
    heads are the network's, the others gradients.
    """
    read_start, read_row, read_output, read_owner = reads
    wait_start, wait_row, wait_owner = waits
    head_row, head_output, head_owner = heads
    rows, count = which.shape[0], read_row.shape[0]
    starts, ignored_start = known.output_start, known.ignored_start
    variable = known.variable[which]

    # The outputs.
    output_start = np.zeros(rows + 1, dtype=np.int32)
    for r in range(rows):
        k = which[r]
        output_start[r + 1] = output_start[r] + starts[k + 1] - starts[k]
    outs = output_start[rows]
    place = np.empty(outs, dtype=np.int32)  # of each output that of its signature
    made = np.empty(outs, dtype=np.int32)
    for r in range(rows):
        k = starts[which[r]]
        for out in range(output_start[r], output_start[r + 1]):
            place[out] = k
            made[out] = output_start[r] + known.made[k]
            k += 1
    rank, dtype, itemsize = known.rank[place], known.dtype[place], known.itemsize[place]

    # What is read, and what must have run before.
    read_ignored = np.empty(count, dtype=np.bool_)
    read_entry = np.zeros(count, dtype=np.int32)
    pooled = np.zeros(count, dtype=np.bool_)
    use = np.empty(count, dtype=np.int32)  # the place of the read
    use_start = np.zeros(rows + 1, dtype=np.int32)
    before_start = np.zeros(rows + 1, dtype=np.int32)
    before_row = np.empty(count + wait_row.shape[0], dtype=np.int32)
    before_owner = np.empty(count + wait_row.shape[0], dtype=np.int32)
    uses = befores = 0
    for r in range(rows):
        first = ignored_start[which[r]] - read_start[r]
        for j in range(read_start[r], read_start[r + 1]):
            read_ignored[j] = known.ignored[first + j]
            source = read_row[j]
            if source < 0:
                continue
            read_entry[j] = output_start[source] + read_output[j]
            pooled[j] = not variable[source]
            before_row[befores], before_owner[befores] = source, read_owner[j]
            befores += 1
            if pooled[j] and not read_ignored[j]:
                use[uses] = j
                uses += 1
        for j in range(wait_start[r], wait_start[r + 1]):
            before_row[befores], before_owner[befores] = wait_row[j], wait_owner[j]
            befores += 1
        use_start[r + 1] = uses
        before_start[r + 1] = befores
    use = use[:uses]
    use_entry, use_row, use_owner = read_entry[use], read_row[use], read_owner[use]

    # The in-place options that can apply: of each its number, and the place of the read.
    option_start, identity = known.option_start, known.option_identity
    option = np.empty(np.sum(option_start[which + 1] - option_start[which]), dtype=np.int32)
    taker, taken = np.empty_like(option), np.empty_like(option)
    inplace_start = np.zeros(rows + 1, dtype=np.int32)
    same = np.empty(option.shape[0], dtype=np.bool_)
    options = 0
    for r in range(rows):
        for k in range(option_start[which[r]], option_start[which[r] + 1]):
            j, out = read_start[r] + known.option_input[k], output_start[r] + known.option_output[k]
            given = read_entry[j]
            if not pooled[j] or rank[given] != rank[out] or itemsize[given] != itemsize[out]:
                continue
            is_same = identity[k] and dtype[given] == dtype[out]
            if is_same or known.reads[which[r]]:
                option[options], taken[options], taker[options] = k, j, out
                same[options] = is_same
                options += 1
        inplace_start[r + 1] = options
    option, taken, taker, same = option[:options], taken[:options], taker[:options], same[:options]

    links = before_start, before_row[:befores], before_owner
    last = outputs if forward else head_row.shape[0]
    first, _ = walk(0, *links, head_row[:last], head_owner[:last])
    met, by = walk(forward, *links, head_row[last:], head_owner[last:])
    runs = np.zeros(rows, dtype=np.bool_)
    runs[first] = runs[met] = True
    walked = (met >= forward) | ((by != KEPT) & ~variable[met])

    # How often each output is read, and what the gradients of each operator read of operators.
    head_entry = output_start[head_row] + head_output
    counts = np.zeros(outs, dtype=np.int32)
    for entry in head_entry:
        counts[entry] += 1
    for r in np.flatnonzero(runs):
        for q in range(use_start[r], use_start[r + 1]):
            counts[use_entry[q]] += 1
    row = 2 * forward if forward else rows  # the first gradient
    tail = use_start[row]
    entry = np.concatenate((use_entry[tail:], head_entry))
    row_read = np.concatenate((use_row[tail:], head_row))
    owner = np.concatenate((use_owner[tail:], head_owner))
    counted = np.ones(entry.shape[0], dtype=np.bool_)
    counted[: uses - tail] = np.repeat(runs[row:], np.diff(use_start[row:]))
    counted &= (row_read < forward) & ~variable[row_read] & (owner != KEPT)
    recomputed_start, items = by_key(owner[counted], forward)
    items = np.flatnonzero(counted)[items]

    # The fields of GraphArrays, in their order.
    held = use_start, use_entry, use_row, use_owner
    of_outputs = output_start, known.elements[place], itemsize, rank, known.sizes, made
    takes = known.option_input[option], read_entry[taken], read_row[taken], read_owner[taken]
    inplace = inplace_start, *takes, taker, same
    ends = head_row, head_entry, head_owner, outputs
    before = before_start[: forward + 1], before_row[: before_start[forward]]
    order = first, met[walked], by[walked], *before, counts
    copies = recomputed_start, entry[items], row_read[items]
    return GraphArrays(  # type: ignore[call-arg]
        forward,
        variable,
        *reads,
        read_ignored,
        *held,
        *of_outputs,
        *inplace,
        *ends,
        *order,
        *copies,
    )


def columns(lists: Sequence[Sequence[Any]], width: int) -> tuple[np.ndarray, ...]:
    """Join lists of tuples: return where each list starts, and their columns, all of int32."""
    start, items = ragged(lists)
    return (start.astype(np.int32), *items.reshape(-1, width).astype(np.int32).T.copy())


def ragged(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join lists to one array: return where each starts, and what is in them."""
    items = [item for one in lists for item in one]
    return np.cumsum([0, *map(len, lists)]), np.array(items, dtype=np.int64)
