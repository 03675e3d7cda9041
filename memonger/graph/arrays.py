"""The training graph as arrays, for the compiled replay.

What no plan changes is computed here once for a network. That is which in-place options can apply,
and how often each tensor is read if nothing is recomputed. It is also the order in which originals
run: depth first from the outputs (``nnvm::DFSVisit``).
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.inplace import IGNORED, Options, inplace_options
from memonger.graph.operators.tensors import Attributes, Shape, Tensors
from memonger.support.kernels import Struct, constant

KEPT = constant("KEPT")

#: Phases of a row: of the forward pass, a recomputed copy, of the backward pass.
FORWARD, RECOMPUTED, BACKWARD = 0, 1, 2

#: What a row reads: (row, output, owner). If the operators `owner` and `row` are both recomputed,
#: the copy of `row` is read instead. With the owner KEPT it is always the row itself.
Read = Tuple[int, int, int]


class Signature(NamedTuple):
    """What rows share that run the same operator on tensors of the same shapes."""

    op: str  # 'null' for a variable
    attrs: Attributes
    inputs: int  # how many it reads
    ignored: tuple[int, ...]  # inputs that it reads for their shape only
    options: Options  # in-place
    tensors: Tensors  # its outputs


class Signatures:
    """The signatures of rows, numbered in the order of ``all``, which lists each of them once."""

    def __init__(self, signatures: Sequence[Signature] = (), inexact: Iterable[str] = ()) -> None:
        self.all = list(signatures)
        self.inexact = set(inexact)  # why the replay may differ from MXNet
        self._numbers = {_key(*k[:3], k.tensors): i for i, k in enumerate(signatures)}

    def __call__(self, op: str, attrs: Attributes, inputs: int, tensors: Tensors) -> int:
        """Return the number of a signature that has its operator's in-place options."""
        key = _key(op, attrs, inputs, tensors)
        if key in self._numbers:
            return self._numbers[key]
        options = inplace_options(op, attrs, inputs)
        if options is None:
            self.inexact.add(f"the in-place options of {op} are not known")
        usable = tuple(option for option in options or () if option[1] < len(tensors))
        return self.add(Signature(op, attrs, inputs, IGNORED.get(op, ()), usable, tensors), key)

    def add(self, signature: Signature, key: object = None) -> int:
        """Return the number of a signature that has in-place options of its own."""
        key = key or (_key(*signature[:3], signature.tensors), signature.options)
        number = self._numbers.setdefault(key, len(self.all))
        if number == len(self.all):
            self.all.append(signature)
        return number


def _key(op: str, attrs: Attributes, inputs: int, tensors: Tensors) -> object:
    return op, tuple(attrs.items()), inputs, tuple(tensors)


class GraphArrays(Struct):
    """The training graph as arrays."""

    forward: int
    outputs: int


class SignatureArrays(Struct):
    """What the allocator reads of `Signature`s."""


class ReadLists(Struct):
    """Lists of `Read`, one for each row."""


class WaitLists(Struct):
    """Lists of control dependencies (row, owner), one for each row."""


class HeadList(Struct):
    """The outputs of a network, then the gradients: a list of `Read`."""


def signature_arrays(signatures: Sequence[Signature]) -> SignatureArrays:
    """Return what the allocator reads of these signatures."""
    tensors = [tensor for signature in signatures for tensor in signature.tensors]
    dtypes = [np.dtype(tensor.dtype) for tensor in tensors]
    variable = np.array([signature.op == "null" for signature in signatures], dtype=np.bool_)
    output_start = np.cumsum([0, *[len(signature.tensors) for signature in signatures]])
    owner = np.repeat(np.arange(len(signatures)), np.diff(output_start))
    elements = np.array([tensor.elements for tensor in tensors], dtype=np.int64)
    pooled = ~variable[owner]
    rank = np.zeros(len(elements), dtype=np.int32)
    sizes, rank[pooled] = np.unique(4 * elements[pooled], return_inverse=True)
    # The largest first, of equal sizes the last: MXNet keeps them in a multimap.
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


def gather(start: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the items that these rows own, and for each its position in ``rows``.

    Row r owns the items from ``start[r]`` to ``start[r + 1]``.
    """
    count = start[rows + 1] - start[rows]
    position = np.repeat(np.arange(len(rows)), count)
    offset = start[rows] - np.cumsum(count) + count
    return np.arange(len(position)) + offset[position], position


def find_owners(start: np.ndarray) -> np.ndarray:
    """Return the row that owns each item, where row r owns items start[r] to start[r + 1]."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def join_columns(lists: Sequence[Sequence[Any]], width: int) -> tuple[np.ndarray, ...]:
    """Join lists of tuples: return where each list starts, then the columns, all of int32."""
    start, items = join(lists)
    return (start.astype(np.int32), *items.reshape(-1, width).astype(np.int32).T.copy())


def join(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join lists: return where each starts, (len(lists) + 1,), and all items, as int64."""
    items = [item for part in lists for item in part]
    return np.cumsum([0, *map(len, lists)]), np.array(items, dtype=np.int64)
