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
from memonger.support.compiled import compiled

KEPT = -1

#: What a row is part of: the forward pass, what is computed again, the backward pass.
FORWARD, RECOMPUTED, BACKWARD = 0, 1, 2

#: What a row reads: (row, output, owner). Where the operator `owner` is recomputed, and so is the
#: operator of `row`, its recomputed copy is read instead. KEPT: always the row itself.
Read = Tuple[int, int, int]


class RowKind(NamedTuple):
    """What rows have in common that run the same operator on tensors of the same shapes.

    Attributes
    ----------
    op : str
        'null' for a variable.
    attrs : dict of str
        Its parameters.
    inputs : int
        How many it reads.
    ignored : tuple of int
        Those of them that are read for their shape alone.
    options : tuple of (input, output, identity)
        Its in-place options.
    tensors : sequence of Tensor
        Its outputs.
    """

    op: str
    attrs: Mapping[str, str]
    inputs: int
    ignored: tuple[int, ...]
    options: tuple[tuple[int, int, bool], ...]
    tensors: Sequence[Tensor]


class Kinds:
    """Numbers the kinds of rows; a new kind is appended to ``all``.

    Parameters
    ----------
    known : list of RowKind
        Those that have a number already, each once.
    """

    def __init__(self, known: list[RowKind]) -> None:
        self.all = known
        self.inexact: set[str] = set()
        self._numbers = {
            (kind.op, tuple(kind.attrs.items()), kind.inputs, tuple(kind.tensors)): k
            for k, kind in enumerate(known)
        }

    def __call__(
        self, op: str, attrs: Mapping[str, str], inputs: int, tensors: Sequence[Tensor]
    ) -> int:
        key = (op, tuple(attrs.items()), inputs, tuple(tensors))
        if key not in self._numbers:
            options = () if op == "null" else inplace_options(op, attrs, inputs)
            if options is None:
                self.inexact.add(f"the in-place options of {op} are not listed")
                options = ()
            fitting = tuple(o for o in options if o[0] < inputs and o[1] < len(tensors))
            if any(k > 62 for k, _, _ in fitting):  # the compiled loop keeps a bit for each
                self.inexact.add(f"{op} has more than 63 inputs that it may overwrite")
            self._numbers[key] = len(self.all)
            self.all.append(RowKind(op, attrs, inputs, ignored_inputs(op), fitting, tensors))
        return self._numbers[key]


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


def build(
    forward: Sequence[int],
    inputs: np.ndarray,
    deps: np.ndarray,
    gradients: Sequence[int] | np.ndarray,
    reads: Sequence[Read],
    waits: Sequence[tuple[int, int, int]],
    kinds: Sequence[RowKind],
    heads: Sequence[Read],
    outputs: int,
) -> Tables:
    """Make the tables.

    Parameters
    ----------
    forward, gradients : sequence of int
        The kind of each forward node and of each gradient node.
    inputs : np.ndarray
        (row, output) of each input of the forward nodes, one node after the other.
    deps : np.ndarray
        (node, node that must have run before it) for the forward nodes, in order.
    reads : sequence of Read
        Those of the gradient nodes, one after the other.
    waits : sequence of (row, row, owner)
        The gradient nodes, in order, and what must have run before them.
    kinds : sequence of RowKind
    heads : sequence of Read
        The outputs of the network, then the gradients.
    outputs : int
        How many of them are outputs.
    """
    n = len(forward)
    kind = np.concatenate([forward, forward, gradients]).astype(np.int64)
    rows = len(kind)
    of = arrays_of(kinds)
    variable = of.variable[kind]

    def each(start: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        """Where what each row owns starts, and these values of it."""
        place, _ = gathered(start, kind)
        return (starts(np.diff(start)[kind]), *(value[place] for value in values))

    read_start, read_ignored = each(of.ignored_start, of.ignored)
    output_start, elements, itemsize, dtype, rank, made = each(
        of.output_start, of.elements, of.itemsize, of.dtype, of.rank, of.made
    )
    inplace_start, option_input, option_output, identity = each(
        of.option_start, of.option_input, of.option_output, of.option_identity
    )
    made = made + np.repeat(output_start[:-1], np.diff(output_start))

    own = np.full(len(inputs), KEPT)
    copied = np.repeat(np.arange(n), np.diff(read_start[: n + 1]))
    later = _columns(reads, 3)
    read_row = np.concatenate([inputs[:, 0], inputs[:, 0], later[0]])
    read_output = np.concatenate([inputs[:, 1], inputs[:, 1], later[1]])
    read_owner = np.concatenate([own, copied, later[2]])
    read_entry = output_start[read_row] + read_output
    reader = np.repeat(np.arange(rows), np.diff(read_start))

    used = ~read_ignored & ~variable[read_row]
    use_start = starts(np.bincount(reader[used], minlength=rows))

    # In-place options, those that can apply.
    row = np.repeat(np.arange(rows), np.diff(inplace_start))
    j = read_start[row] + option_input
    into, out = read_entry[j], output_start[row] + option_output
    same = identity & (dtype[into] == dtype[out])
    fits = (
        (elements[into] == elements[out])
        & (itemsize[into] == itemsize[out])
        & ~variable[read_row[j]]
        & (same | of.reads[kind[row]])
    )
    row, j = row[fits], j[fits]
    head_row, head_output, head_owner = _columns(heads, 3)
    head_entry = output_start[head_row] + head_output

    # The order, as far as it is the same for every plan.
    wait_row, wait_for, wait_owner = _columns(waits, 3)
    before_of = np.concatenate([reader, deps[:, 0], wait_row])
    by_row = np.argsort(before_of, kind="stable")  # inputs before control dependencies
    before_of = before_of[by_row]
    before = np.concatenate([read_row, deps[:, 1], wait_for])[by_row]
    before_owner = np.concatenate([read_owner, np.full(len(deps), KEPT), wait_owner])[by_row]
    next_start = starts(np.bincount(before_of, minlength=rows))
    first, _ = walk(0, next_start, before, before_owner, head_row[:outputs], head_owner)
    walk_row, walk_owner = walk(
        n, next_start, before, before_owner, head_row[outputs:], head_owner[outputs:]
    )
    telling = (walk_row >= n) | ((walk_owner != KEPT) & ~variable[walk_row])
    walk_row, walk_owner = walk_row[telling], walk_owner[telling]
    _, once = np.unique(walk_row * (n + 1) + walk_owner + 1, return_index=True)
    once.sort()
    walk_row, walk_owner = walk_row[once], walk_owner[once]
    inner = (before_of < n) & ~variable[before]

    runs = np.zeros(rows, dtype=np.bool_)
    runs[first] = True
    runs[walk_row[walk_row >= n]] = True
    base = np.bincount(read_entry[used & runs[reader]], minlength=len(elements))
    np.add.at(base, head_entry, 1)

    swaps = used & runs[reader] & (reader >= 2 * n) & (read_owner != KEPT) & (read_row < n)
    head_swaps = (head_owner != KEPT) & (head_row < n) & ~variable[head_row]
    recomputed_owner = np.concatenate([read_owner[swaps], head_owner[head_swaps]])
    recomputed_row = np.concatenate([read_row[swaps], head_row[head_swaps]])
    recomputed_entry = np.concatenate([read_entry[swaps], head_entry[head_swaps]])
    by_owner = np.argsort(recomputed_owner, kind="stable")

    def small(array: np.ndarray) -> np.ndarray:
        return array.astype(np.int32)

    return Tables(
        forward=n,
        variable=variable,
        read_start=small(read_start),
        read_row=small(read_row),
        read_output=small(read_output),
        read_owner=small(read_owner),
        read_ignored=read_ignored,
        use_start=small(use_start),
        use_entry=small(read_entry[used]),
        use_row=small(read_row[used]),
        use_owner=small(read_owner[used]),
        output_start=small(output_start),
        elements=elements,
        itemsize=itemsize,
        rank=small(rank),
        sizes=of.sizes,
        made=small(made),
        inplace_start=small(starts(np.bincount(row, minlength=rows))),
        inplace_input=small(option_input[fits]),
        inplace_entry=small(into[fits]),
        inplace_row=small(read_row[j]),
        inplace_owner=small(read_owner[j]),
        inplace_output=small(out[fits]),
        inplace_identity=same[fits],
        head_row=small(head_row),
        head_entry=small(head_entry),
        head_owner=small(head_owner),
        outputs=outputs,
        first=small(first),
        walk_row=small(walk_row),
        walk_owner=small(walk_owner),
        before_start=small(starts(np.bincount(before_of[inner], minlength=n))),
        before_row=small(before[inner]),
        reads=small(base),
        recomputed_start=small(starts(np.bincount(recomputed_owner, minlength=n))),
        recomputed_entry=small(recomputed_entry[by_owner]),
        recomputed_row=small(recomputed_row[by_owner]),
    )


def depth_first(
    inputs: np.ndarray, counts: np.ndarray, deps: np.ndarray, heads: Sequence[int]
) -> list[int]:
    """The forward nodes in the order in which they run; arguments as those of `build`.

    ``counts`` says how many of the inputs are each node's.
    """
    reader = np.repeat(np.arange(len(counts)), counts)
    of = np.concatenate([reader, deps[:, 0]])
    by_row = np.argsort(of, kind="stable")
    before = np.concatenate([inputs[:, 0], deps[:, 1]])[by_row]
    start = starts(np.bincount(of, minlength=len(counts)))
    own = np.full(len(before), KEPT)
    return walk(0, start, before, own, np.array(heads, dtype=np.int64), own)[0].tolist()


def starts(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of some lists of these lengths starts if they follow one another, and the end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def ragged(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists as one array: where each starts, and what is in them."""
    items = [item for one in lists for item in one]
    return starts([len(one) for one in lists]), np.array(items, dtype=np.int64)


def _columns(items: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(items, dtype=np.int64).reshape(len(items), width).T


@compiled
def gathered(start, which):  # type: ignore[no-untyped-def]
    """The places of what some rows own, one row after the other; and for each of which row."""
    length = start[which + 1] - start[which]
    row = np.repeat(np.arange(which.shape[0]), length)
    return np.arange(row.shape[0]) + (start[which] + length - np.cumsum(length))[row], row


@compiled
def walk(known, start, before, owner, heads, head_owner):  # type: ignore[no-untyped-def]
    """Rows depth first from the heads (``nnvm::DFSVisit``), each after what it reads.

    The rows below ``known`` have run already: they are put down whenever they are met, with the
    owner of the read.
    """
    rows = start.shape[0] - 1
    seen = np.zeros(rows, dtype=np.bool_)
    stack = np.empty(rows, dtype=np.int64)
    at = np.empty(rows, dtype=np.int64)
    met = np.empty(rows + before.shape[0] + heads.shape[0], dtype=np.int64)
    by = np.full(rows + before.shape[0] + heads.shape[0], KEPT, dtype=np.int64)
    count = 0
    for h in range(heads.shape[0]):
        if heads[h] < known:
            met[count] = heads[h]
            by[count] = head_owner[h]
            count += 1
            continue
        if seen[heads[h]]:
            continue
        seen[heads[h]] = True
        depth = 0
        stack[0] = heads[h]
        at[0] = start[heads[h]]
        while depth >= 0:
            row = stack[depth]
            k = at[depth]
            if k == start[row + 1]:
                met[count] = row
                count += 1
                depth -= 1
                continue
            at[depth] += 1
            following = before[k]
            if following < known:
                met[count] = following
                by[count] = owner[k]
                count += 1
            elif not seen[following]:
                seen[following] = True
                depth += 1
                stack[depth] = following
                at[depth] = start[following]
    return met[:count], by[:count]
