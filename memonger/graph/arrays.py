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
from memonger.support.kernels import Struct, constant

KEPT = constant("KEPT")

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


class GraphArrays(Struct):
    """The training graph as arrays."""

    forward: int
    outputs: int


class SignatureArrays(Struct):
    """What `Signature`s mean to the allocator."""


class ReadLists(Struct):
    """What rows read: lists of `Read`."""


class WaitLists(Struct):
    """Control dependencies of rows: lists of (row, owner)."""


class HeadList(Struct):
    """The outputs of a network, then the gradients: `Read`s."""


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
    made = np.arange(len(elements))  # the largest first, of equal sizes the last (a multimap)
    made = made[np.lexsort((-made, -elements, owner))]
    ignored_start, ignored = ragged([[i in k.ignored for i in range(k.inputs)] for k in signatures])
    start, inputs, outputs, identity = columns([signature.options for signature in signatures], 3)
    numbers: dict[tuple[int, ...], int] = {}
    shapes = [numbers.setdefault(t.shape, len(numbers)) for k in signatures for t in k.tensors]
    return SignatureArrays(
        variable=variable,
        reads=np.array([not {*range(k.inputs)} <= {*k.ignored} for k in signatures], np.bool_),
        ignored_start=ignored_start,
        ignored=ignored.astype(np.bool_),
        output_start=output_start,
        elements=elements,
        itemsize=np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64),
        dtype=np.array([dtype.num for dtype in dtypes], dtype=np.int32),
        shape=np.array(shapes, dtype=np.int32),
        rank=rank,
        made=(made - output_start[owner]).astype(np.int32),
        option_start=start,
        option_input=inputs,
        option_output=outputs,
        option_identity=identity.astype(np.bool_),
        sizes=sizes.astype(np.int64),
    )


def gathered(start: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of what some rows own, row after row, and of which row each is."""
    count = start[which + 1] - start[which]
    row = np.repeat(np.arange(len(which)), count)
    return np.arange(len(row)) + (start[which] - np.cumsum(count) + count)[row], row


def columns(lists: Sequence[Sequence[Any]], width: int) -> tuple[np.ndarray, ...]:
    """Join lists of tuples: return where each list starts, and their columns, all of int32."""
    start, items = ragged(lists)
    return (start.astype(np.int32), *items.reshape(-1, width).astype(np.int32).T.copy())


def ragged(lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Join lists to one array: return where each starts, and what is in them."""
    items = [item for one in lists for item in one]
    return np.cumsum([0, *map(len, lists)]), np.array(items, dtype=np.int64)
