"""The training graph as arrays, for the compiled replay.

This module computes once for a network what no plan changes: the in-place options that can apply,
and the order of the forward pass, depth first from the outputs (``nnvm::DFSVisit``).
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.inplace import IGNORED, Options, inplace_options
from memonger.graph.operators.tensors import Attributes, Shape, Tensors
from memonger.support.kernels import Struct, compiled, constant
from memonger.support.types import AnyArray, Array1, Bools, Int32s, Int64s

ORIGINAL = constant("ORIGINAL")
LEFT_OUT = -1  # in place of the row of a read: a variable that the arrays do not have

#: Phases of a row: the forward pass, recomputation, the backward pass.
FORWARD, RECOMPUTED, BACKWARD = 0, 1, 2

#: A read of a row: (row, output, owner). If the operators `owner` and `row` are both recomputed, it
#: reads the copy of `row`. If the owner is ORIGINAL it always reads the row itself.
Read = Tuple[int, int, int]


class Signature(NamedTuple):
    """The data shared by all rows that run the same operator on tensors of the same shapes."""

    op: str  # 'null' for a variable
    attrs: Attributes
    inputs: int  # how many it reads
    ignored: tuple[int, ...]  # inputs of which it reads only the shape
    options: Options  # its in-place options
    tensors: Tensors  # its outputs


class Signatures:
    """Number signatures; ``all`` lists each of them once, in the order of their numbers."""

    def __init__(self, signatures: Sequence[Signature] = (), inexact: Iterable[str] = ()) -> None:
        self.all = list(signatures)
        self.inexact = set(inexact)  # why the replay may differ from MXNet
        self._numbers = {_key(*k[:3], k.tensors): i for i, k in enumerate(signatures)}

    def __call__(self, op: str, attrs: Attributes, inputs: int, tensors: Tensors) -> int:
        """Return the number of the signature of an operator, with MXNet's in-place options."""
        key = _key(op, attrs, inputs, tensors)
        if key in self._numbers:
            return self._numbers[key]
        options = inplace_options(op, attrs, inputs)
        if options is None:
            self.inexact.add(f"the in-place options of {op} are not known")
        usable = tuple(option for option in options or () if option[1] < len(tensors))
        return self.add(Signature(op, attrs, inputs, IGNORED.get(op, ()), usable, tensors), key)

    def add(self, signature: Signature, key: object = None) -> int:
        """Return the number of a signature; add it to ``all`` if it is new."""
        key = key or (_key(*signature[:3], signature.tensors), signature.options)
        number = self._numbers.setdefault(key, len(self.all))
        if number == len(self.all):
            self.all.append(signature)
        return number


def _key(op: str, attrs: Attributes, inputs: int, tensors: Tensors) -> object:
    return op, tuple(attrs.items()), inputs, tuple(tensors)


class GraphArrays(Struct):
    """The training graph as arrays."""

    forward_nodes: int
    variable: Bools
    read_start: Int32s
    read_row: Int32s
    read_output: Int32s
    read_owner: Int32s
    read_entry: Int32s
    read_ignored: Bools
    read_holds: Bools
    pooled_start: Int32s
    pooled_read: Int32s
    output_start: Int32s
    elements: Int64s
    itemsize: Int64s
    rank: Int32s
    sizes: Int64s
    by_size: Int32s
    inplace_start: Int32s
    inplace_read: Int32s
    inplace_output: Int32s
    inplace_identity: Bools
    head_row: Int32s
    head_output: Int32s
    head_owner: Int32s
    outputs: int
    first: Int32s
    first_reads: Int32s
    walk_row: Int32s
    walk_owner: Int32s
    before_start: Int32s
    before_row: Int32s

    @property
    def head_entry(self) -> Int32s:
        """The entry of each head if nothing is recomputed, (heads,)."""
        entry: Int32s = self.output_start[self.head_row] + self.head_output
        return entry


class Step(Struct):
    """The rows of a training graph that run for one set of recomputed operators."""

    order: Int32s
    entry: Int32s
    head: Int32s
    reads: Int32s


class SignatureArrays(Struct):
    """The fields of `Signature`s that the allocator reads."""

    variable: Bools
    reads: Bools
    ignored_start: Int64s
    ignored: Bools
    output_start: Int64s
    elements: Int64s
    itemsize: Int64s
    dtype: Int32s
    shape: Int32s
    rank: Int32s
    by_size: Int32s
    option_start: Int32s
    option_input: Int32s
    option_output: Int32s
    option_identity: Bools
    sizes: Int64s


def signature_arrays(signatures: Sequence[Signature]) -> SignatureArrays:
    """Return the fields of these signatures that the allocator reads, as arrays."""
    tensors = [tensor for signature in signatures for tensor in signature.tensors]
    dtypes = [np.dtype(tensor.dtype) for tensor in tensors]
    variable = np.array([signature.op == "null" for signature in signatures], dtype=np.bool_)
    output_start = np.cumsum([0, *[len(signature.tensors) for signature in signatures]])
    owner = np.repeat(np.arange(len(signatures)), np.diff(output_start))
    elements = np.array([tensor.elements for tensor in tensors], dtype=np.int64)
    pooled = ~variable[owner]
    rank = np.zeros(len(elements), dtype=np.int32)
    sizes, rank[pooled] = np.unique(4 * elements[pooled], return_inverse=True)
    # The largest first, and the last of equal sizes, because MXNet sorts them by a multimap.
    by_size = np.lexsort((-np.arange(len(elements)), -elements, owner))
    ignored_start, ignored = join([[i in k.ignored for i in range(k.inputs)] for k in signatures])
    option_columns = join_columns([signature.options for signature in signatures], 3)
    option_start, option_input, option_output, option_identity = option_columns
    shape_numbers: dict[Shape, int] = {}
    shape = [shape_numbers.setdefault(t.shape, len(shape_numbers)) for t in tensors]
    return SignatureArrays(
        variable=variable,
        reads=np.array([not {*range(k.inputs)} <= {*k.ignored} for k in signatures], np.bool_),
        ignored_start=ignored_start,
        ignored=ignored.astype(np.bool_),
        output_start=output_start,
        elements=elements,
        itemsize=np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64),
        dtype=np.array([dtype.num for dtype in dtypes], dtype=np.int32),
        shape=np.array(shape, dtype=np.int32),
        rank=rank,
        by_size=(by_size - output_start[owner]).astype(np.int32),
        option_start=option_start,
        option_input=option_input,
        option_output=option_output,
        option_identity=option_identity.astype(np.bool_),
        sizes=sizes.astype(np.int64),
    )


def row_arrays(
    signatures: Sequence[Signature],
    number: Int32s,
    *,
    read_start: Int32s,
    read_row: Int32s,
    read_output: Int32s,
    read_owner: Int32s,
    head_row: Int32s,
    head_output: Int32s,
    head_owner: Int32s,
    outputs: int,
) -> GraphArrays:
    """Return the arrays of a training step whose rows run in the order of their numbers.

    Parameters
    ----------
    signatures : sequence of Signature
        The signatures to which rows refer.
    number : array of int32, (rows,)
        The signature of each row.
    read_start : array of int32, (rows + 1,)
        Where the reads of each row start.
    read_row, read_output, read_owner : array of int32, (reads,)
        The columns of each `Read`.
    head_row, head_output, head_owner : array of int32, (heads,)
        The columns of each head, as a `Read`: of the outputs of the network, then of gradients.
    outputs : int
        How many heads are outputs of the network.
    """
    s, nothing = signature_arrays(signatures), np.zeros(0, dtype=np.int32)
    variable = s.variable[number]
    output_start = find_starts(np.diff(s.output_start)[number])
    output_type, maker = gather(s.output_start, number)
    itemsize, rank, dtype = s.itemsize[output_type], s.rank[output_type], s.dtype[output_type]
    ignored = s.ignored[gather(s.ignored_start, number)[0]]
    there = read_row != LEFT_OUT
    pooled = there & ~variable[read_row]
    read_entry = np.where(there, output_start[read_row] + read_output, 0).astype(np.int32)
    # The in-place options that can apply.
    option, taker = gather(s.option_start, number)
    read = read_start[taker] + s.option_input[option]
    output = output_start[taker] + s.option_output[option]
    entry = read_entry[read]
    identity = s.option_identity[option] & (dtype[entry] == dtype[output])
    fits = pooled[read] & (identity | s.reads[number[taker]])
    fits &= (rank[entry] == rank[output]) & (itemsize[entry] == itemsize[output])
    return GraphArrays(
        forward_nodes=0,
        variable=variable,
        read_start=read_start,
        read_row=read_row,
        read_output=read_output,
        read_owner=read_owner,
        read_entry=read_entry,
        read_ignored=ignored,
        read_holds=pooled & ~ignored,
        pooled_start=np.append(0, np.cumsum(pooled))[read_start].astype(np.int32),
        pooled_read=np.flatnonzero(pooled).astype(np.int32),
        output_start=output_start,
        elements=s.elements[output_type],
        itemsize=itemsize,
        rank=rank,
        sizes=s.sizes,
        by_size=s.by_size[output_type] + output_start[maker],
        inplace_start=find_starts(np.bincount(taker[fits], None, len(number))),
        inplace_read=read[fits],
        inplace_output=output[fits],
        inplace_identity=identity[fits],
        head_row=head_row,
        head_output=head_output,
        head_owner=head_owner,
        outputs=outputs,
        first=nothing,
        first_reads=nothing,
        walk_row=nothing,
        walk_owner=nothing,
        before_start=np.zeros(1, dtype=np.int32),
        before_row=nothing,
    )


def order_rows(
    t: GraphArrays, forward_nodes: int, *, wait_start: Int32s, wait_row: Int32s, wait_owner: Int32s
) -> GraphArrays:
    """Return the arrays of a training graph, whose rows run depth first from the heads.

    Each row runs after those that it reads, and those that it waits for.

    Parameters
    ----------
    t : GraphArrays
        The arrays of its rows (`row_arrays`).
    forward_nodes : int
        How many forward rows there are. Their copies follow them.
    wait_start : array of int32, (rows + 1,)
        Where the control dependencies of each row start.
    wait_row, wait_owner : array of int32, (waits,)
        The row for which each of them waits, and its owner, as in a `Read`.
    """
    there, rows = t.read_row != LEFT_OUT, len(t.variable)
    reader = np.append(find_owners(t.read_start)[there], find_owners(wait_start))
    before = np.argsort(reader, kind="stable")
    start = find_starts(np.bincount(reader, minlength=rows))
    before_row = np.append(t.read_row[there], wait_row)[before]
    before_owner = np.append(t.read_owner[there], wait_owner)[before]
    outputs, gradients = slice(t.outputs), slice(t.outputs, None)
    graph = start, before_row, before_owner
    first, _ = compiled.walk(0, *graph, t.head_row[outputs], t.head_owner[outputs])
    heads = t.head_row[gradients], t.head_owner[gradients]
    row, owner = compiled.walk(forward_nodes, *graph, *heads)
    needed = (row >= forward_nodes) | ((owner != ORIGINAL) & ~t.variable[row])
    runs_first = np.isin(find_owners(t.read_start), first)
    first_reads = np.bincount(t.read_entry[t.read_holds & runs_first], minlength=len(t.elements))
    return t.replace(
        forward_nodes=forward_nodes,
        first=first,
        first_reads=first_reads.astype(np.int32),
        walk_row=row[needed],
        walk_owner=owner[needed],
        before_start=start[: forward_nodes + 1],
        before_row=before_row[: start[forward_nodes]],
    )


def run_all(t: GraphArrays) -> Step:
    """Return the step in which all rows run, in the order of their numbers."""
    entry, head = t.read_entry, t.head_entry
    reads = np.bincount(np.append(entry[t.read_holds], head), minlength=len(t.elements))
    order = np.arange(len(t.variable), dtype=np.int32)
    return Step(order=order, entry=entry, head=head, reads=reads.astype(np.int32))


def list_reads(start: Int32s, row: Int32s, output: Int32s) -> list[list[tuple[int, int]]]:
    """List the reads (row, output) of each row, given where those of each row start."""
    entries = list(zip(row.tolist(), output.tolist()))
    return [entries[first:last] for first, last in zip(start, start[1:])]


def find_starts(counts: Array1) -> Int32s:
    """Return where the items of each row start and those of the last row end, (rows + 1,)."""
    return np.append(0, np.cumsum(counts)).astype(np.int32)


def gather(start: AnyArray, rows: AnyArray) -> tuple[Int64s, Int64s]:
    """Return the indices of the items of these rows, and the position in ``rows`` of each owner.

    Row r owns the items from ``start[r]`` to ``start[r + 1]``.
    """
    count = start[rows + 1] - start[rows]
    position = np.repeat(np.arange(len(rows)), count)
    offset = start[rows] - np.cumsum(count) + count
    return np.arange(len(position)) + offset[position], position


def find_owners(start: AnyArray) -> Int64s:
    """Return the row that owns each item, where row r owns items start[r] to start[r + 1]."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def join_columns(lists: Sequence[Sequence[object]], width: int) -> tuple[Int32s, ...]:
    """Join lists of tuples: return where each list starts, then the columns."""
    start, items = join(lists)
    return (start.astype(np.int32), *items.reshape(-1, width).astype(np.int32).T.copy())


def join(lists: Sequence[Sequence[object]]) -> tuple[Int64s, Int64s]:
    """Join lists: return where each starts, (len(lists) + 1,), and all items."""
    items = [item for part in lists for item in part]
    return np.cumsum([0, *map(len, lists)]), np.array(items, dtype=np.int64)
