"""The training graph as arrays, for the compiled replay.

What does not depend on the plan is worked out here, once for a network: which in-place options can
ever apply, in which order the nodes run that are not recomputed copies, and how often each tensor
is read if there are no copies.
"""

from __future__ import annotations

from types import SimpleNamespace
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
    """What rows have in common that run the same operator on tensors of the same shapes."""

    op: str  # 'null' for a variable
    attrs: Mapping[str, str]  # its parameters
    inputs: int  # how many it reads
    ignored: tuple[int, ...]  # those of them that are read for their shape alone
    options: tuple[tuple[int, int, bool], ...]  # in-place: input, output, identity
    tensors: Sequence[Tensor]  # its outputs


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
    again_start: np.ndarray  # for forward rows: what their gradients read of operators
    again_entry: np.ndarray
    again_row: np.ndarray


def build(
    forward: Sequence[int],
    inputs: np.ndarray,
    deps: np.ndarray,
    gradients: Sequence[int] | np.ndarray,
    reads: Sequence[Read] | np.ndarray,
    waits: Sequence[tuple[int, int, int]] | np.ndarray,
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
    kind = np.concatenate([forward, forward, gradients]).astype(np.int64)
    t = SimpleNamespace(forward=len(forward), outputs=outputs)
    t.variable = np.array([k.op == "null" for k in kinds], dtype=np.bool_)[kind]
    t.output_start, t.elements = each_row(kind, [[o.elements for o in k.tensors] for k in kinds])
    types = [[np.dtype(o.dtype) for o in k.tensors] for k in kinds]
    t.itemsize = each_row(kind, [[dtype.itemsize for dtype in own] for own in types])[1]
    t.made = largest_first(t.output_start, t.elements)
    of_operators = ~np.repeat(t.variable, np.diff(t.output_start))
    t.sizes, place = np.unique(4 * t.elements[of_operators], return_inverse=True)
    t.rank = np.zeros(len(t.elements), dtype=np.int64)
    t.rank[of_operators] = place
    _add_reads(t, kind, kinds, inputs, _columns(reads), _columns(heads))
    _add_inplace(t, kind, kinds, each_row(kind, [[d.num for d in own] for own in types])[1])
    _add_order(t, deps, _columns(waits))
    _add_recomputed(t)
    wide = ("elements", "itemsize", "sizes", "forward", "outputs")
    arrays: dict[str, Any] = {name: getattr(t, name) for name in Tables._fields}
    for name, array in arrays.items():
        if name not in wide and array.dtype == np.int64:
            arrays[name] = array.astype(np.int32)
    return Tables(**arrays)


def _add_reads(
    t: Any,
    kind: np.ndarray,
    kinds: Sequence[RowKind],
    inputs: np.ndarray,
    later: np.ndarray,
    heads: np.ndarray,
) -> None:
    """What the rows read, and which of it holds memory; the outputs of the symbol."""
    ignored = [[i in k.ignored for i in range(k.inputs)] for k in kinds]
    t.read_start, found = each_row(kind, ignored)
    t.read_ignored = found.astype(np.bool_)
    copied = np.repeat(np.arange(t.forward), np.diff(t.read_start[: t.forward + 1]))
    t.read_row = np.concatenate([inputs[:, 0], inputs[:, 0], later[0]])
    t.read_output = np.concatenate([inputs[:, 1], inputs[:, 1], later[1]])
    t.read_owner = np.concatenate([np.full(len(inputs), KEPT), copied, later[2]])
    t.read_entry = t.output_start[t.read_row] + t.read_output
    t.reader = np.repeat(np.arange(len(kind)), np.diff(t.read_start))
    t.used = ~t.read_ignored & ~t.variable[t.read_row]
    t.use_start = starts(np.bincount(t.reader[t.used], minlength=len(kind)))
    t.use_entry, t.use_row = t.read_entry[t.used], t.read_row[t.used]
    t.use_owner = t.read_owner[t.used]
    t.head_row, head_output, t.head_owner = heads
    t.head_entry = t.output_start[t.head_row] + head_output


def _add_inplace(t: Any, kind: np.ndarray, kinds: Sequence[RowKind], dtype: np.ndarray) -> None:
    """The in-place options that can apply to any plan."""
    start, option = each_row(kind, [[n for o in k.options for n in o] for k in kinds])
    option_input, option_output, identity = option.reshape(-1, 3).T
    row = np.repeat(np.arange(len(kind)), np.diff(start) // 3)
    j = t.read_start[row] + option_input
    into, out = t.read_entry[j], t.output_start[row] + option_output
    same = (identity > 0) & (dtype[into] == dtype[out])
    counts = np.bincount(t.reader[~t.read_ignored], minlength=len(kind))
    fits = (
        (t.elements[into] == t.elements[out])
        & (t.itemsize[into] == t.itemsize[out])
        & ~t.variable[t.read_row[j]]
        & (same | (counts[row] > 0))  # not if all inputs are ignored
    )
    t.inplace_start = starts(np.bincount(row[fits], minlength=len(kind)))
    t.inplace_input, t.inplace_entry, t.inplace_output = option_input[fits], into[fits], out[fits]
    t.inplace_row, t.inplace_owner = t.read_row[j][fits], t.read_owner[j][fits]
    t.inplace_identity = same[fits]


def _add_order(t: Any, deps: np.ndarray, waits: np.ndarray) -> None:
    """The order in which the rows run, as far as it is the same for every plan."""
    n, rows = t.forward, len(t.variable)
    before_of = np.concatenate([t.reader, deps[:, 0], waits[0]])
    by_row = np.argsort(before_of, kind="stable")  # inputs before control dependencies
    before_of = before_of[by_row]
    before = np.concatenate([t.read_row, deps[:, 1], waits[1]])[by_row]
    owner = np.concatenate([t.read_owner, np.full(len(deps), KEPT), waits[2]])[by_row]
    start = starts(np.bincount(before_of, minlength=rows))
    t.first, _ = walk(0, start, before, owner, t.head_row[: t.outputs], t.head_owner)
    gradients = t.head_row[t.outputs :], t.head_owner[t.outputs :]
    walk_row, walk_owner = walk(n, start, before, owner, *gradients)
    telling = (walk_row >= n) | ((walk_owner != KEPT) & ~t.variable[walk_row])
    walk_row, walk_owner = walk_row[telling], walk_owner[telling]
    _, once = np.unique(walk_row * (n + 1) + walk_owner + 1, return_index=True)
    once.sort()
    t.walk_row, t.walk_owner = walk_row[once], walk_owner[once]
    inner = (before_of < n) & ~t.variable[before]
    t.before_start = starts(np.bincount(before_of[inner], minlength=n))
    t.before_row = before[inner]


def _add_recomputed(t: Any) -> None:
    """How often everything is read if nothing is recomputed, and what is read of copies then."""
    n = t.forward
    runs = np.zeros(len(t.variable), dtype=np.bool_)
    runs[t.first] = runs[t.walk_row[t.walk_row >= n]] = True
    read = t.used & runs[t.reader]
    t.reads = np.bincount(t.read_entry[read], minlength=len(t.elements))
    np.add.at(t.reads, t.head_entry, 1)
    swaps = read & (t.reader >= 2 * n) & (t.read_owner != KEPT) & (t.read_row < n)
    heads = (t.head_owner != KEPT) & (t.head_row < n) & ~t.variable[t.head_row]
    owner = np.concatenate([t.read_owner[swaps], t.head_owner[heads]])
    by_owner = np.argsort(owner, kind="stable")
    t.again_start = starts(np.bincount(owner, minlength=n))
    t.again_row = np.concatenate([t.read_row[swaps], t.head_row[heads]])[by_owner]
    t.again_entry = np.concatenate([t.read_entry[swaps], t.head_entry[heads]])[by_owner]


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


def _columns(items: Sequence[tuple[int, int, int]] | np.ndarray) -> np.ndarray:
    return np.array(items, dtype=np.int64).reshape(len(items), 3).T


def gathered(start: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of what some rows own, one row after the other; and for each of which row."""
    length = np.diff(start)[which]
    row = np.repeat(np.arange(len(which)), length)
    return np.arange(len(row)) + (start[which] - starts(length)[:-1])[row], row


def each_row(kind: np.ndarray, values: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """For each row in turn the values of its kind: where they start, and all of them."""
    own, flat = ragged(values)
    return starts(np.diff(own)[kind]), flat[gathered(own, kind)[0]]


def largest_first(output_start: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """The outputs of each row, the largest first; of equals the last (a reversed multimap)."""
    made = np.arange(len(elements))
    row = np.repeat(np.arange(len(output_start) - 1), np.diff(output_start))
    return made[np.lexsort((-made, -elements, row))]


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
