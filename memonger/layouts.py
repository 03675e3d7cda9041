"""Tensors that MKLDNN has laid out in blocks: in a schedule the same ones as without.

On the CPU a convolution writes its output in blocks of 8 or 16 channels. Operators that know such
layouts (`KNOW`) compute in the layout that they find, and some round differently in each: the sums
of a BatchNorm, log_softmax. All others convert what they read, and write plainly, but for one case:
what they write in place, or add, goes into an array that is laid out in blocks and stays so
(``SetupDefaultBlobsOut`` in ``src/common/exec_utils.h``; the layout belongs to the memory,
``NDArray::Chunk::mkl_mem_``). So the layout in which a tensor is found, and with it the last bits
of what is made of it, depends on what the memory planner does in place. Worse, what is *added*
(kAddTo) to an array in blocks is added to uninitialised memory, and some operators crash on blocks
(slice, BatchNorm with an axis of its own).

A schedule has another memory plan. Here the layouts of both are followed, as symbols: equal ones
are equal layouts, whatever they are. Where a schedule would find another one than the network does
without, an operator is put in (`insert`):

- a Reshape to the same shape, in place: it makes any layout plain;
- ``add_n`` of one tensor: a copy in the same layout, into which the next operator then writes in
  place, as it does without a schedule; it takes the memory that this operator would have taken;
- a reader of an input, after the operator that would overwrite it.
"""

from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from memonger.allocator import Replay
from memonger.errors import MemongerError
from memonger.tables import RowKind

#: Operators that compute in the layout that they find: ``TIsMKLDNN`` in MXNet's source.
_FORWARD = frozenset(
    (
        "Activation",
        "BatchNorm",
        "Concat",
        "Convolution",
        "Deconvolution",
        "FullyConnected",
        "LRN",
        "LeakyReLU",
        "Pooling",
        "RNN",
        "_contrib_BatchNormWithReLU",
        "_copy",
        "add_n",
        "amp_cast",
        "amp_multicast",
        "elemwise_add",
        "log_softmax",
        "softmax",
    )
)
KNOW = (
    _FORWARD
    | {"_backward_" + op for op in _FORWARD}
    | {"_backward_add", "_backward_contrib_BatchNormWithReLU", "_backward_copy"}
    | {"Flatten", "Reshape", "SoftmaxOutput", "expand_dims", "slice", "transpose"}
)
#: Those that make blocks of plain tensors.
MAKE = frozenset(
    ("Convolution", "Deconvolution", "_backward_Convolution", "_backward_Deconvolution")
)
#: Those whose output is laid out as their inputs are, if these are alike.
ALIKE = frozenset(("Activation", "LeakyReLU", "_backward_Activation", "add_n", "elemwise_add"))
#: Those that make any layout plain, up to 4 axes (``src/operator/nn/mkldnn/mkldnn_reshape.cc``).
RESHAPE = frozenset(("Flatten", "Reshape", "expand_dims"))
#: Those that copy in place by doing nothing, and plainly otherwise.
COPY = frozenset(("_backward_add", "_backward_copy", "_copy"))
AXES = 4

PLAIN = 0  # the layout of arrays that are not laid out in blocks
NOT_IN_PLACE, ADDED = -1, -2
BEFORE, AFTER, HOLD = "before", "after", "hold"


class Insert(NamedTuple):
    """An operator to put in: `BEFORE` or `AFTER` a row, or to read an input after it (`HOLD`).

    Attributes
    ----------
    row : int
    where : str
    place : int
        Which input of the row it stands for, or which output.
    op : str
    attrs : dict
        Of what is put in `BEFORE` or `AFTER`.
    """

    row: int
    where: str
    place: int
    op: str = ""
    attrs: Mapping[str, str] = MappingProxyType({})


class Layouts(NamedTuple):
    """The layouts in one training graph, as symbols.

    Attributes
    ----------
    made : list of int
        Of each output when it is made.
    found : list of int
        Of each input when it is read.
    place : list of int
        Of each output the input in whose memory it is, `NOT_IN_PLACE` or `ADDED`.
    """

    made: List[int]
    found: List[int]
    place: List[int]


class Expected:
    """The layouts of a network without a schedule.

    Parameters
    ----------
    found : Replay
        Of the network without recomputation.
    """

    def __init__(self, found: Replay) -> None:
        self.symbols: Dict[Any, int] = {}
        self.tables = found.training.tables
        kinds = found.training.kinds
        follower = _Follower(found, kinds, self.symbols)
        self.layouts = follower.follow()
        self.added = {row for row in follower.order if follower.is_added(row)}
        self.matters = _matters(found, kinds)

    def differences(self, found: Replay, kinds: Sequence[RowKind], rows: Any) -> List[Insert]:
        """What to put into the training step of a schedule for its layouts to be as expected.

        Parameters
        ----------
        found : Replay
            Of the schedule's training step.
        kinds : sequence of RowKind
            Of its rows.
        rows : np.ndarray
            Of each of its rows the row of the network's training graph that it stands for, or -1.
        """
        follower = _Comparer(found, kinds, self, rows)
        follower.follow()
        return follower.inserts


class _Follower:
    """Follows the layouts through a training graph in the order in which it runs."""

    def __init__(self, found: Replay, kinds: Sequence[RowKind], symbols: Dict[Any, int]) -> None:
        t = found.training.tables
        self.tables, self.kinds, self.symbols = t, kinds, symbols
        self.order = [row for row in found.order.tolist() if not t.variable[row]]
        self.outputs, self.inputs = t.output_start.tolist(), t.read_start.tolist()
        self.entries = (t.output_start[t.read_row] + t.read_output).tolist()
        self.ignored = t.read_ignored.tolist()
        self.planned, self.block = found.planned.tolist(), found.blocks.tolist()
        self.reads = found.reads.tolist()
        self.layouts = Layouts(
            [PLAIN] * len(self.planned),
            [PLAIN] * len(self.entries),
            [NOT_IN_PLACE] * len(self.planned),
        )
        self.now: Dict[int, int] = {}  # of each block

    def follow(self) -> Layouts:
        for row in self.order:
            self.run(row)
        return self.layouts

    def read(self, j: int) -> int:
        """The layout in which an input is found."""
        entry = self.entries[j]
        block = self.block[entry]
        return self.layouts.made[entry] if block < 0 else self.now.get(block, PLAIN)

    def write(self, entry: int, symbol: int) -> None:
        self.layouts.made[entry] = symbol
        if self.block[entry] >= 0:
            self.now[self.block[entry]] = symbol

    def run(self, row: int) -> None:
        kind, layouts = self.kinds[row], self.layouts
        first, last = self.inputs[row], self.inputs[row + 1]
        for j in range(first, last):
            layouts.found[j] = self.read(j)
        outputs = range(self.outputs[row], self.outputs[row + 1])
        if self.is_added(row):  # the sum is there already
            layouts.made[outputs[0]] = self.now.get(self.block[outputs[0]], PLAIN)
            return
        symbols = tuple([layouts.found[j] for j in range(first, last) if not self.ignored[j]])
        made = []
        for k, out in enumerate(outputs):
            layouts.place[out] = place = self.place(out, first, last)
            before = self.now.get(self.block[out], PLAIN) if place != NOT_IN_PLACE else PLAIN
            unread = self.reads[out] == 0
            made.append(PLAIN if unread else self.symbol(kind, k, place, symbols, before))
        for out, symbol in zip(outputs, made):
            self.write(out, symbol)

    def is_added(self, row: int) -> bool:
        """Whether this is a sum that is not run, for its second term is added to the first."""
        if self.kinds[row].op != "_grad_add":
            return False
        term = self.entries[self.inputs[row] + 1]
        return self.planned[term] != self.block[term]

    def place(self, out: int, first: int, last: int) -> int:
        if self.block[out] != self.planned[out]:
            return ADDED
        if self.planned[out] >= 0:
            for j in range(first, last):
                if self.planned[self.entries[j]] == self.planned[out]:
                    return j - first
        return NOT_IN_PLACE

    def symbol(
        self, kind: RowKind, k: int, place: int, symbols: Tuple[int, ...], before: int
    ) -> int:
        """The layout of an output, written over a layout."""
        op, axes = kind.op, len(kind.tensors[k].shape)
        if op not in KNOW:
            return before
        if op not in MAKE and before == PLAIN and not any(symbols):
            return PLAIN
        if op in RESHAPE and axes <= AXES:
            return PLAIN
        if op in COPY and place != ADDED:
            return before
        if op in ALIKE and place != ADDED and len(set(symbols)) == 1:
            return symbols[0]
        if axes <= 2:  # MKLDNN has no blocks for them
            return PLAIN
        key = (id(kind), k, place, symbols, before)
        return self.symbols.setdefault(key, len(self.symbols) + 1)


class _Comparer(_Follower):
    """Follows the layouts of a schedule, and finds what to put in for them to be as expected.

    From where something is put in it goes on as if that had been there.
    """

    def __init__(
        self, found: Replay, kinds: Sequence[RowKind], expected: Expected, rows: np.ndarray
    ) -> None:
        super().__init__(found, kinds, expected.symbols)
        self.expected = expected
        self.rows = rows.tolist()
        self.names = found.training
        self.inserts: List[Insert] = []
        read = np.asarray(self.entries, dtype=np.int64)[~self.tables.read_ignored]
        self.readers = np.bincount(read, minlength=len(self.planned)).tolist()
        # Outputs that are made plain by what has been put in.
        self.corrected = {
            self.entries[self.inputs[row]]
            for row in self.order
            if self.rows[row] < 0 and kinds[row].op == "Reshape"
        }
        # What is added to here alone, by an operator that knows no layouts.
        self.sums: Set[int] = set()
        knows = np.repeat([kind.op in KNOW for kind in kinds], np.diff(self.outputs)).tolist()
        for row in self.order:
            term = self.inputs[row] + 1
            if self.is_added(row) and not knows[self.entries[term]]:
                if self.rows[row] not in expected.added:
                    self.sums.add(self.entries[term - 1])

    def run(self, row: int) -> None:
        r = self.rows[row]
        first, last = self.inputs[row], self.inputs[row + 1]
        plain, wanted = self.expected.tables, self.expected.layouts
        if r >= 0 and self.kinds[row].op in KNOW - RESHAPE - COPY:  # these do not compute
            for j in range(first, last):
                want = wanted.found[plain.read_start[r] + j - first]
                if not self.ignored[j] and self.read(j) != want:
                    self.lay_out_input(row, j, want)
        super().run(row)
        for k, out in enumerate(range(self.outputs[row], self.outputs[row + 1])):
            have = self.layouts.made[out]
            if self.readers[out] == 0 or (out in self.corrected and self.readers[out] == 1):
                continue
            if out in self.sums and have != PLAIN:
                self.make_plain(row, k)
            if r < 0:
                continue
            same = plain.output_start[r] + k
            if have == wanted.made[same] or not self.expected.matters[same]:
                continue
            if self.kinds[row].op == "zeros_like":  # the same in all layouts
                self.write(out, wanted.made[same])
            else:
                self.lay_out_output(row, k, wanted.made[same], wanted.place[same])

    def lay_out_input(self, row: int, j: int, want: int) -> None:
        shape = self.shape(self.entries[j])
        if want != PLAIN or len(shape) > AXES:
            self.refuse(row)
        place = j - self.inputs[row]
        self.inserts.append(Insert(row, BEFORE, place, "Reshape", {"shape": str(shape)}))
        self.now[self.block[self.entries[j]]] = PLAIN

    def make_plain(self, row: int, k: int) -> None:
        """Make an output plain, by a Reshape; with more axes by not writing it in place."""
        out = self.outputs[row] + k
        shape, place = self.shape(out), self.layouts.place[out]
        if len(shape) <= AXES:
            self.inserts.append(Insert(row, AFTER, k, "Reshape", {"shape": str(shape)}))
        elif place >= 0:
            self.inserts.append(Insert(row, HOLD, place))
        else:
            self.refuse(row)
        self.write(out, PLAIN)

    def lay_out_output(self, row: int, k: int, want: int, place: int) -> None:
        """Make the layout of an output as expected."""
        out = self.outputs[row] + k
        have = self.layouts.place[out]
        if want == PLAIN:
            return self.make_plain(row, k)
        if place == have or place == ADDED:
            self.refuse(row)
        if place != NOT_IN_PLACE:
            self.inserts.append(Insert(row, BEFORE, place, "add_n", {"num_args": "1"}))
        if have >= 0:
            self.inserts.append(Insert(row, HOLD, have))
        self.write(out, want)

    def shape(self, entry: int) -> Tuple[int, ...]:
        row = int(np.searchsorted(self.outputs, entry, side="right")) - 1
        return tuple(self.kinds[row].tensors[entry - self.outputs[row]].shape)

    def refuse(self, row: int) -> None:
        raise MemongerError(
            "MKLDNN would lay out what %r (%s) reads in another way by this schedule than without "
            "one, so that it rounds differently; how='marks' can plan this network"
            % (self.names.names[row], self.kinds[row].op)
        )


def _matters(found: Replay, kinds: Sequence[RowKind]) -> List[bool]:
    """Of each output whether an operator may come to know the layout that it has."""
    t = found.training.tables
    entries = t.output_start[t.read_row] + t.read_output
    matters = np.zeros(len(t.elements), dtype=np.bool_)
    for row in found.order[::-1].tolist():
        if t.variable[row]:
            continue
        kind = kinds[row]
        first, last = int(t.read_start[row]), int(t.read_start[row + 1])
        if kind.op in KNOW:
            reads = [j for j in range(first, last) if not t.read_ignored[j]]
        elif kind.op == "_grad_add":
            reads = [first]
        else:
            out = int(t.output_start[row])
            reads = [first + j for j, k, _ in kind.options if matters[out + k]]
        matters[entries[reads]] = True
    return matters.tolist()
