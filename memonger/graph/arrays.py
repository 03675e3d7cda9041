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
from memonger.support.kernels import call

KEPT = -1  # as in arrays.h

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

    def add(self, signature: Signature) -> int:
        """Number a signature with in-place options of its own."""
        key = (
            _key(signature.op, signature.attrs, signature.inputs, signature.tensors),
            signature.options,
        )
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(signature)
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
    shape: np.ndarray  # the same number for the same shape
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
    known: dict[tuple[int, ...], int] = {}
    shapes = [known.setdefault(t.shape, len(known)) for k in signatures for t in k.tensors]
    outputs = output_start, elements, itemsize, numbers, np.array(shapes, np.int32), rank, made
    options_of = option_start, *options, identity.astype(np.bool_)
    return SignatureArrays(*inputs, *outputs, *options_of, sizes.astype(np.int64))  # type: ignore[call-arg]


def gathered(start: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of what some rows own, row after row, and of which row each is."""
    count = start[which + 1] - start[which]
    row = np.repeat(np.arange(len(which)), count)
    return np.arange(len(row)) + (start[which] - np.cumsum(count) + count)[row], row


def by_key(key: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Order items by key: return where those of each key start, and which they are."""
    return call("by_key", key, keys)


def graph_arrays(
    known: SignatureArrays,
    forward: int,
    which: np.ndarray,
    reads: Sequence[np.ndarray],
    waits: Sequence[np.ndarray],
    heads: Sequence[np.ndarray],
    outputs: int,
) -> GraphArrays:
    """Make the GraphArrays of rows of signatures ``which``, with copies of the first ``forward``.

    Without copies (``forward`` is 0) all rows run, in the order in which they stand.
    ``reads`` are where those of each row start, and their rows (-1: a variable that is left out),
    outputs and owners (`Read`); ``waits`` are control dependencies. The first ``outputs`` of the
    heads are the network's, the others gradients.
    """
    found = call("graph_arrays", known, forward, which, reads, waits, heads, outputs)
    return GraphArrays(*found)


def columns(lists: Sequence[Sequence[Any]], width: int) -> tuple[np.ndarray, ...]:
    """Join lists of tuples: return where each list starts, and their columns, all of int32."""
    start, items = ragged(lists)
    return (start.astype(np.int32), *items.reshape(-1, width).astype(np.int32).T.copy())


def ragged(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join lists to one array: return where each starts, and what is in them."""
    items = [item for one in lists for item in one]
    return np.cumsum([0, *map(len, lists)]), np.array(items, dtype=np.int64)
