"""The training step of a schedule, written out: every node that it runs, as one graph.

What MXNet's executor makes of a network by itself (``training``) is made here in the order that a
schedule says, with as many copies of an operator as it says: forward nodes, gradient nodes and
sums, each reading the copies that it should. From the same rows come the tables for the replay of
the memory planner and the symbol that MXNet binds.

What makes MXNet run it in that order and not merge it again:
- Nodes are ordered depth first from the outputs (``nnvm::DFSVisit``), inputs before control
  dependencies. So each node has a control dependency on the one before it.
- The first control dependency of a gradient node must be its forward node: shapes and the state of
  the operator come from there (``src/executor/infer_graph_attr_pass.cc``). A gradient node without
  one must not get any; the next node that may, waits for it. In this way gradients are summed as
  soon as they are there (those of shared weights would all be held to the end otherwise).
- An output that nobody reads is not written (kNullOp), and then what the operator's gradient reads
  may not be either. Where the network would have it read, it is given a reader.
- `BIND` is set around every bind: without gradients to write (grad_req 'null') MKLDNN would fuse
  for inference, common sub-expressions would merge the copies, pointwise fusion would reorder, and
  one match range is not enough for tensors that live this shortly.
"""

import json
from collections import Counter
from typing import (
    Any,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Sized,
    Tuple,
)

import numpy as np

from memonger import tables
from memonger._mxnet import mx
from memonger.allocator import Replay, replay
from memonger.compiled import compiled
from memonger.errors import MemongerError
from memonger.forward import FLOAT, Entry, Tensor, no_collection
from memonger.gradients import MXNET_VERSION, environment
from memonger.layouts import AFTER, AXES, BEFORE, MAKE, TOTAL, Expected, Insert
from memonger.operators import truth
from memonger.schedule import Schedule, Workload, first_time, masked
from memonger.tables import BACKWARD, FORWARD, KEPT, RECOMPUTED, RowKind, Tables
from memonger.training import TrainingGraph

#: The environment in which the symbol of a schedule must be bound, and its memory replayed.
BIND: Mapping[str, str] = {
    "MXNET_SUBGRAPH_BACKEND": "NONE",
    "MXNET_ELIMINATE_COMMON_EXPR": "0",
    "MXNET_USE_FUSION": "0",
    "NNVM_AUTO_SEARCH_MATCH_RANGE": "1",
}

#: Operators that write the outputs that ``list_outputs`` does not show, read or not.
WRITES_HIDDEN = frozenset(("BatchNorm", "Pooling"))

#: Its output 2, the gradient of the bias, is written by MKLDNN only if its output 1 is, that of the
#: weight (``src/operator/nn/mkldnn/mkldnn_fully_connected.cc``).
WITH_WEIGHT = "_backward_FullyConnected"

#: Gradients that MXNet never writes, those of labels: the user's array stays as it is.
UNWRITTEN = frozenset(
    (
        ("_backward_linear_reg_out", 1),
        ("_backward_logistic_reg_out", 1),
        ("_backward_mae_reg_out", 1),
        ("_backward_SoftmaxOutput", 1),
    )
)

#: So often a training step is gone through for `layouts`; what is put in there changes little.
ROUNDS = 8

# What a row is: its template row itself, a scratch state, a Dropout that runs again, a reader of an
# output that nobody else reads, what `layouts` puts in.
ITSELF, SCRATCH, MASKED, READER, INSERTED = 0, 1, 2, 3, 4


class Template(NamedTuple):
    """What can be written out of a training graph, as arrays for compiled code.

    A *template row* is a row of the TrainingGraph: forward nodes, then (from 2n on) gradients.
    ``*_start`` has one more element than there are rows: row r owns [start[r], start[r + 1]).
    """

    variable: np.ndarray
    outputs: np.ndarray  # how many each row has
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    read_ignored: np.ndarray
    read_first: np.ndarray  # read of the first time that the operator ran
    read_scratch: np.ndarray  # the scratch state that is read when the operator runs again; or -1
    scratches: int
    wait_start: np.ndarray  # what a gradient row must wait for, its forward node first
    wait_row: np.ndarray
    event_start: np.ndarray  # for forward rows: the gradient rows of their event, in order
    event_row: np.ndarray
    needed_start: np.ndarray  # for forward rows: the outputs that must have a reader
    needed: np.ndarray
    masked: np.ndarray  # for forward rows: Dropout, which runs again as a product with its mask
    head_row: np.ndarray  # the outputs of the network
    head_output: np.ndarray


class Parts(NamedTuple):
    """A template, and what belongs to its rows.

    Attributes
    ----------
    work : Workload
    template : Template
    kinds : list of RowKind
    kind_of : np.ndarray
        Of each template row.
    masked_kind, reader_kind : np.ndarray
        Of forward rows that are `MASKED`; of the reader of each output that must have one.
    scratch_kind : np.ndarray
    scratch : tuple of Tensor
        The scratch states.
    gradients : tuple of (row, output) or None
        Of each argument that gets a gradient.
    left_out : frozenset of int
        The arguments whose gradient MKLDNN leaves out.
    unwritten : tuple of str
        The operators with a gradient that MKLDNN leaves out, and MXNet adds to others all the same.
    expected : Expected or None
        The layouts of the network without a schedule; None if MKLDNN lays out no tensor of it.
    """

    work: Workload
    template: Template
    kinds: List[RowKind]
    kind_of: np.ndarray
    masked_kind: np.ndarray
    reader_kind: np.ndarray
    scratch_kind: np.ndarray
    scratch: Tuple[Tensor, ...]
    gradients: Tuple[Optional[Entry], ...]
    left_out: FrozenSet[int]
    unwritten: Tuple[str, ...]
    expected: Optional[Expected]


class Rows(NamedTuple):
    """The rows of a training step, each after all that it reads.

    Attributes
    ----------
    source : np.ndarray
        The template row, the number of a scratch state, for a `READER` the place in
        ``Template.needed``, for what is `INSERTED` its kind.
    what : np.ndarray
        `ITSELF`, `SCRATCH`, ...
    time : np.ndarray
        How often the operator has run before; -1 for what is no forward node.
    read_start, read_row, read_output : np.ndarray
    wait_start, wait_row : np.ndarray
        Control dependencies.
    first, latest : np.ndarray
        Of each template row the first and the last row that it became; -1 for none.
    """

    source: np.ndarray
    what: np.ndarray
    time: np.ndarray
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    wait_start: np.ndarray
    wait_row: np.ndarray
    first: np.ndarray
    latest: np.ndarray


@no_collection()
def parts(work: Workload) -> Parts:
    """All that the training steps of a network are made of, whatever the schedule."""
    return _Maker(work).parts()


class _Maker:
    """Makes the `Parts` of a workload."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.training: TrainingGraph = work.training
        self.graph = self.training.graph
        self.tables: Tables = self.training.tables
        self.n = self.tables.forward
        self.rows = len(self.tables.variable)
        self.read_start = self.tables.read_start
        self.read_row = self.tables.read_row.copy()
        self.read_output = self.tables.read_output.copy()
        self.kinds = self.training.builder.kinds

    def parts(self) -> Parts:
        graph, n, t = self.graph, self.n, self.tables
        self._read_head_gradients_themselves()
        gradients = self._gradients()
        events = self._events({row for row, _ in filter(None, gradients)})
        scratch, read_scratch = self._scratch()
        waits = self._waits()
        is_masked = [masked(node.op, node.attrs) for node in graph.nodes]
        masked_kind = [self._masked_kind(x) if m else -1 for x, m in enumerate(is_masked)]
        needed = [self._needed(x) for x in range(n)]
        reader_kind = [
            self.kinds("max", {}, 1, (Tensor((1,), graph.tensors[x][k].dtype),))
            for x, outputs in enumerate(needed)
            for k in outputs
        ]
        scratch_kind = [self.kinds("null", {}, 0, (tensor,)) for tensor in scratch]
        places = {id(kind): k for k, kind in enumerate(self.kinds.all)}
        heads = t.head_row[: t.outputs]
        template = Template(
            variable=t.variable,
            outputs=np.diff(t.output_start),
            read_start=self.read_start,
            read_row=self.read_row,
            read_output=self.read_output,
            read_ignored=t.read_ignored,
            read_first=self._read_first(),
            read_scratch=read_scratch,
            scratches=len(scratch),
            wait_start=_starts(waits),
            wait_row=_flat(waits),
            event_start=_starts(events),
            event_row=_flat(events),
            needed_start=_starts(needed),
            needed=_flat(needed),
            masked=np.array(is_masked, dtype=np.bool_),
            head_row=heads,
            head_output=t.head_entry[: t.outputs] - t.output_start[heads],
        )
        return Parts(
            self.work,
            template,
            self.kinds.all,
            np.array([places[id(kind)] for kind in self.training.kinds], dtype=np.int64),
            np.array(masked_kind, dtype=np.int64),
            np.array(reader_kind, dtype=np.int64),
            np.array(scratch_kind, dtype=np.int64),
            scratch,
            gradients,
            *self._left_out(gradients),
            self._expected(),
        )

    def _left_out(
        self, gradients: Sequence[Optional[Entry]]
    ) -> Tuple[FrozenSet[int], Tuple[str, ...]]:
        """See `WITH_WEIGHT`: arguments whose gradient is left out, and operators where it is read.

        Such are the biases of FullyConnected operators whose weight gets no gradient.
        """
        t, kinds, n = self.tables, self.training.kinds, self.n
        found = set()
        for row in (r for r in t.walk_row.tolist() if r >= 2 * n and kinds[r].op == WITH_WEIGHT):
            weight = int(t.output_start[row]) + 1
            head = self._source(row)
            given = kinds[head[0]].tensors[head[1]]
            known = given.dtype == FLOAT and len(given.shape) <= AXES
            if len(kinds[row].tensors) > 2 and known and t.reads[weight] == 0:
                found.add((row, 2))
        read = {(int(r), int(k)) for r, k in zip(self.read_row, self.read_output)}
        return (
            frozenset(a for a, e in zip(self.training.wanted, gradients) if e in found),
            tuple(self.graph.nodes[self._owner(row)].name for row, k in sorted(found & read)),
        )

    def _expected(self) -> Optional[Expected]:
        if not any(node.op in MAKE for node in self.graph.nodes):
            return None
        return Expected(replay(self.training, np.zeros(self.n, dtype=np.bool_)))

    def _read_head_gradients_themselves(self) -> None:
        """MXNet hands on the gradient of an output through an identity, which takes memory."""
        ops = self.training.ops
        for j in np.flatnonzero(self.read_row >= 2 * self.n):
            row = self.read_row[j]
            if ops[row] == "_identity_with_attr_like_rhs" and self._owner(row) < 0:
                self.read_row[j], self.read_output[j] = self._source(int(row))

    def _source(self, row: int) -> Entry:
        """What a row reads first."""
        j = self.read_start[row]
        return int(self.read_row[j]), int(self.read_output[j])

    def _owner(self, row: int) -> int:
        return int(self.training.owners[row - 2 * self.n])

    def _gradients(self) -> Tuple[Optional[Entry], ...]:
        """Where the gradient of each argument comes from, without copies of what is another's."""
        t, ops, names = self.tables, self.training.ops, self.training.names
        found: List[Optional[Entry]] = []
        for h, a in enumerate(self.training.wanted, t.outputs):
            row = int(t.head_row[h])
            entry = row, int(t.head_entry[h] - t.output_start[row])
            if ops[row] == "_copy" and names[row] == self.graph.nodes[a].name + "_copy":
                entry = self._source(row)
            if ops[entry[0]] == "_identity_with_attr_like_rhs":
                entry = self._source(entry[0])
            nothing = ops[entry[0]] == "_zeros_without_dtype"
            nothing |= (ops[entry[0]], entry[1]) in UNWRITTEN
            found.append(None if nothing else entry)
        return tuple(found)

    def _events(self, wanted: Any) -> List[List[int]]:
        """For each forward node the gradient rows that run in the event of its gradient.

        Sums run with the last of what they add, what reads nothing with the first that reads it.
        """
        n, t = self.n, self.tables
        place = {x: k for k, x in enumerate(self.work.gradients)}
        walk = [int(r) for r in t.walk_row if r >= 2 * n and not t.variable[r]]
        event: Dict[int, int] = {}
        sources: List[int] = []
        for row in sorted(walk):
            start, stop = self.read_start[row], self.read_start[row + 1]
            owner = self._owner(row)
            if owner >= 0:
                event[row] = place[owner]
            elif start < stop:
                event[row] = max(event.get(int(r), 0) for r in self.read_row[start:stop])
            else:
                sources.append(row)
                event[row] = max(0, len(place) - 1)
            for r in self.read_row[start:stop]:
                if int(r) in event and self.read_start[r] == self.read_start[r + 1]:
                    event[int(r)] = min(event[int(r)], event[row])
        result: List[List[int]] = [[] for _ in range(n)]
        if place:
            for row in walk:  # in the order in which MXNet would run them
                result[self.work.gradients[event[row]]].append(row)
        return result

    def _read_first(self) -> np.ndarray:
        nodes, n = self.graph.nodes, self.n
        first = np.zeros(len(self.read_row), dtype=np.bool_)
        for j in range(int(self.read_start[2 * n]), len(first)):
            x = self.read_row[j]
            if x < n:
                first[j] = first_time(nodes[x].op, int(self.read_output[j]))
        return first

    def _scratch(self) -> Tuple[Tuple[Tensor, ...], np.ndarray]:
        """States for operators that run again: cuDNN's BatchNorm moves its own when it runs."""
        known: Dict[Tuple[int, Tensor], int] = {}
        read = np.full(len(self.read_row), -1, dtype=np.int32)
        for x in self.work.operators:
            node = self.graph.nodes[x]
            if self.work.once[x] or truth(node.attrs.get("use_global_stats")):
                continue
            for k, j in enumerate(range(self.read_start[x], self.read_start[x + 1])):
                state = int(self.read_row[j])
                if state in self.graph.auxiliary:
                    key = (k, self.graph.tensors[state][0])
                    read[j] = known.setdefault(key, len(known))
        return tuple(tensor for _, tensor in known), read

    def _waits(self) -> List[List[int]]:
        """What gradient rows wait for by themselves, not what orders their sums."""
        waits: List[List[int]] = [[] for _ in range(self.rows)]
        for row, before in self.training.waits:
            if self._owner(row) >= 0 and (waits[row] or self._waits_itself(row, before)):
                waits[row].append(before)
        return waits

    def _waits_itself(self, row: int, before: int) -> bool:
        return before < self.n or self._owner(before) == self._owner(row)

    def _masked_kind(self, x: int) -> int:
        node, result = self.graph.nodes[x], self.graph.tensors[x]
        whole = result[0].shape == result[1].shape
        op = "elemwise_mul" if whole else "broadcast_mul"
        assert node.op == "Dropout"
        return self.kinds(op, {}, 2, result[:1])

    def _needed(self, x: int) -> List[int]:
        """The outputs of an operator that must be read, for they are if it runs once."""
        t, node = self.tables, self.graph.nodes[x]
        if node.is_variable:
            return []
        last = int(t.output_start[x + 1] - t.output_start[x])
        hidden = [] if node.op in WRITES_HIDDEN else range(max(1, self.graph.visible[x]), last)
        return [k for k in (0, *hidden) if t.reads[t.output_start[x] + k] > 0]


def _starts(lists: Sequence[Sized]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)


def _flat(lists: List[List[int]]) -> np.ndarray:
    return np.array([item for one in lists for item in one], dtype=np.int64)


@compiled
def _read(t, events):  # type: ignore[no-untyped-def]
    """Which outputs of each event are read (`slot` has where those of an event start)."""
    n = t.masked.shape[0]
    latest = np.full(n, -1, dtype=np.int64)
    first = np.full(n, -1, dtype=np.int64)
    slot = np.zeros(events.shape[0] + 1, dtype=np.int64)
    for e in range(events.shape[0]):
        slot[e + 1] = slot[e] + (t.outputs[events[e]] if events[e] >= 0 else 0)
    read = np.zeros(slot[-1], dtype=np.bool_)
    for e in range(events.shape[0]):
        x = events[e]
        if x >= 0:
            for j in range(t.read_start[x], t.read_start[x + 1]):
                y = t.read_row[j]
                if not t.variable[y] and not t.read_ignored[j]:
                    read[slot[latest[y]] + t.read_output[j]] = True
            latest[x] = e
            if first[x] < 0:
                first[x] = e
            continue
        for q in range(t.event_start[~x], t.event_start[~x + 1]):
            row = t.event_row[q]
            for j in range(t.read_start[row], t.read_start[row + 1]):
                y = t.read_row[j]
                if y < n and not t.variable[y] and not t.read_ignored[j]:
                    source = first[y] if t.read_first[j] else latest[y]
                    read[slot[source] + t.read_output[j]] = True
    for h in range(t.head_row.shape[0]):
        if not t.variable[t.head_row[h]]:
            read[slot[first[t.head_row[h]]] + t.head_output[h]] = True
    return slot, read


@compiled
def _unroll(t, events):  # type: ignore[no-untyped-def]
    """The rows of a schedule's training step; see `Rows`."""
    n = t.masked.shape[0]
    slot, is_read = _read(t, events)
    most_rows = t.variable.sum() + t.scratches
    most_reads = 0
    most_waits = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x >= 0:
            readers = t.needed_start[x + 1] - t.needed_start[x]
            most_rows += 1 + readers
            most_reads += max(2, t.read_start[x + 1] - t.read_start[x]) + readers
            most_waits += 1 + readers
            continue
        for q in range(t.event_start[~x], t.event_start[~x + 1]):
            row = t.event_row[q]
            most_rows += 1
            most_reads += t.read_start[row + 1] - t.read_start[row]
            most_waits += 2 + t.wait_start[row + 1] - t.wait_start[row]
    source = np.empty(most_rows, dtype=np.int32)
    what = np.full(most_rows, ITSELF, dtype=np.int32)
    time = np.full(most_rows, -1, dtype=np.int32)
    read_start = np.zeros(most_rows + 1, dtype=np.int64)
    read_row = np.empty(most_reads, dtype=np.int32)
    read_output = np.empty(most_reads, dtype=np.int32)
    wait_start = np.zeros(most_rows + 1, dtype=np.int64)
    wait_row = np.empty(most_waits, dtype=np.int32)
    first = np.full(t.variable.shape[0], -1, dtype=np.int32)
    latest = np.full(t.variable.shape[0], -1, dtype=np.int32)
    count = 0
    for row in range(t.variable.shape[0]):  # variables that nothing reads do no harm
        if t.variable[row] and (row < n or row >= 2 * n):
            source[count] = row
            first[row] = latest[row] = count
            count += 1
    scratch = count
    for k in range(t.scratches):
        source[count] = k
        what[count] = SCRATCH
        count += 1
    times = np.zeros(n, dtype=np.int32)
    pending = np.empty(most_rows, dtype=np.int32)  # what the next row in the chain waits for
    pendings = 0
    chain = -1  # the last row that waits for the one before it
    reads = 0
    waits = 0
    for e in range(events.shape[0]):
        x = events[e]
        if x >= 0:
            again = times[x] > 0
            source[count] = x
            if again and t.masked[x]:
                what[count] = MASKED
                data = t.read_start[x]
                read_row[reads] = latest[t.read_row[data]]
                read_output[reads] = t.read_output[data]
                read_row[reads + 1] = first[x]
                read_output[reads + 1] = 1
                reads += 2
            else:
                for j in range(t.read_start[x], t.read_start[x + 1]):
                    if again and t.read_scratch[j] >= 0:
                        read_row[reads] = scratch + t.read_scratch[j]
                    else:
                        read_row[reads] = latest[t.read_row[j]]
                    read_output[reads] = t.read_output[j]
                    reads += 1
            if chain >= 0:
                wait_row[waits] = chain
                waits += 1
            for k in range(pendings):
                wait_row[waits] = pending[k]
                waits += 1
            pendings = 0
            time[count] = times[x]
            times[x] += 1
            if not again:
                first[x] = count
            latest[x] = chain = count
            count += 1
            read_start[count] = reads
            wait_start[count] = waits
            if what[count - 1] == MASKED:
                continue
            for q in range(t.needed_start[x], t.needed_start[x + 1]):
                if not is_read[slot[e] + t.needed[q]]:
                    source[count] = q
                    what[count] = READER
                    read_row[reads] = latest[x]
                    read_output[reads] = t.needed[q]
                    reads += 1
                    pending[pendings] = count
                    pendings += 1
                    count += 1
                    read_start[count] = reads
                    wait_start[count] = waits
            continue
        for q in range(t.event_start[~x], t.event_start[~x + 1]):
            row = t.event_row[q]
            source[count] = row
            for j in range(t.read_start[row], t.read_start[row + 1]):
                y = t.read_row[j]
                read_row[reads] = first[y] if t.read_first[j] else latest[y]
                read_output[reads] = t.read_output[j]
                reads += 1
            if t.wait_start[row] < t.wait_start[row + 1]:
                for j in range(t.wait_start[row], t.wait_start[row + 1]):
                    y = t.wait_row[j]
                    wait_row[waits] = first[y] if y < n and t.masked[y] else latest[y]
                    waits += 1
                if chain >= 0:
                    wait_row[waits] = chain
                    waits += 1
                for k in range(pendings):
                    wait_row[waits] = pending[k]
                    waits += 1
                pendings = 0
                chain = count
            elif t.read_start[row] < t.read_start[row + 1]:
                pending[pendings] = count
                pendings += 1
            first[row] = latest[row] = count
            count += 1
            read_start[count] = reads
            wait_start[count] = waits
    return Rows(
        source[:count],
        what[:count],
        time[:count],
        read_start[: count + 1],
        read_row[:reads],
        read_output[:reads],
        wait_start[: count + 1],
        wait_row[:waits],
        first,
        latest,
    )


class TrainingStep(NamedTuple):
    """The training graph of a schedule, as ``training.TrainingGraph`` is that of a set of marks.

    Attributes
    ----------
    parts : Parts
    rows : Rows
    tables : Tables
        For the replay. There are no recomputed copies in the sense of marks: a schedule's are rows
        like any other.
    gradients : tuple of int or None
        For each argument that gets a gradient which output of the symbol it is. Two may be the
        same; None is a gradient of zeros.
    totals : dict of int
        Of arguments (node indices) whose gradient is added to a total the row of the variable that
        holds it; their output is then the new total.
    """

    parts: Parts
    rows: Rows
    tables: Tables
    gradients: Tuple[Optional[int], ...]
    totals: Dict[int, int]

    @property
    def training(self) -> TrainingGraph:
        """The training graph of the network without a schedule."""
        return self.parts.work.training

    @property
    def graph(self) -> Any:
        return self.training.graph

    @property
    def inexact(self) -> Tuple[str, ...]:
        """Why the replay of this graph may differ from MXNet; empty if it should not."""
        return tuple(sorted(self.training.builder.inexact))

    @property
    def kinds(self) -> List[RowKind]:
        """Operator, parameters, shapes and types of each row."""
        return [self.parts.kinds[k] for k in _kind_numbers(self.parts, self.rows).tolist()]

    @property
    def ops(self) -> List[str]:
        return [kind.op for kind in self.kinds]

    @property
    def names(self) -> List[str]:
        """Of each row; those of variables and of what runs for the first time are the network's."""
        return _names(self)

    @property
    def phases(self) -> np.ndarray:
        """FORWARD, RECOMPUTED or BACKWARD for each row."""
        rows = self.rows
        phases = np.full(len(rows.source), BACKWARD)
        phases[rows.time == 0] = FORWARD
        again = (rows.time > 0) | (rows.what == READER) | (rows.what == INSERTED)
        phases[again] = RECOMPUTED
        return phases

    @property
    def heads(self) -> List[Entry]:
        """The outputs of the symbol: those of the network, then gradients."""
        t = self.tables
        outputs = t.head_entry - t.output_start[t.head_row]
        return list(zip(t.head_row.tolist(), outputs.tolist()))

    def order(self) -> np.ndarray:
        """The rows in the order in which MXNet runs them, variables among them."""
        return self.tables.first

    def replay(self) -> Replay:
        """Order it and plan its memory as MXNet will."""
        with environment(**BIND):
            return replay(self, np.zeros(0, dtype=np.bool_))


def unroll(
    made: Parts, schedule: Schedule, mkldnn: bool = True, added: Iterable[int] = ()
) -> TrainingStep:
    """Write out the training step of a schedule.

    Parameters
    ----------
    made : Parts
        Of the network (`parts`).
    schedule : Schedule
        A right one (``schedule.check``).
    mkldnn : bool
        Whether MKLDNN may compute it. Where not, no schedule is refused for its layouts; one that
        need not be is the same everywhere, so that it takes the memory that was predicted.
    added : iterable of int
        The arguments whose gradient is added to a total (grad_req 'add'), as far as it can be.

    Returns
    -------
    TrainingStep
        Linear in the number of events; no symbol is made yet.

    Raises
    ------
    MemongerError
        If MKLDNN would round differently than without a schedule.
    """
    rows = _unroll(made.template, np.ascontiguousarray(schedule.events, dtype=np.int32))
    plain = step = _with_totals(_step(made, rows), frozenset(added))
    if made.expected is None:
        return step
    for _ in range(ROUNDS):
        rows = step.rows
        stands_for = np.where((rows.what == ITSELF) | (rows.what == MASKED), rows.source, -1)
        inserts = made.expected.differences(step.replay(), step.kinds, stands_for)
        if not inserts:
            return step
        step = _insert(step, inserts)
    if not mkldnn:
        return plain
    raise MemongerError(
        "MKLDNN lays out tensors in another way by this schedule than without one, so that it "
        "rounds differently; how='marks' can plan this network"
    )


def _with_totals(step: TrainingStep, added: FrozenSet[int]) -> TrainingStep:
    """Add gradients up as MXNet does: the operator that makes one adds to the total itself.

    Some round otherwise than by adding what they have made (an Embedding adds row after row). The
    executor sees to it that the second input of a ``_grad_add`` is added to the first
    (``src/executor/inplace_addto_detect_pass.cc``), here a copy of the total. Where a gradient is
    read by others too it is not done: it is added up afterwards.
    """
    made, rows = step.parts, step.rows
    count = Counter(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    count.update(step.heads)
    inserts = []
    for a, found in zip(step.training.wanted, made.gradients):
        if a in added and found is not None and a not in made.left_out:
            entry = int(rows.latest[found[0]]), found[1]
            if count[entry] == 1 and step.gradients.count(_output(step, a)) == 1:
                inserts.append(Insert(entry[0], TOTAL, entry[1], "_grad_add", {}, a))
    return _insert(step, inserts) if inserts else step


def _output(step: TrainingStep, argument: int) -> Optional[int]:
    return step.gradients[step.training.wanted.index(argument)]


def _step(
    made: Parts, rows: Rows, totals: Optional[Dict[int, Tuple[int, int]]] = None
) -> TrainingStep:
    """The training step of these rows; of each total the rows of the variable and the sum."""
    totals = totals or {}
    template = made.template
    heads = [
        (int(rows.first[row]), int(k)) for row, k in zip(template.head_row, template.head_output)
    ]
    outputs = {entry: k for k, entry in reversed(list(enumerate(heads)))}
    gradients: List[Optional[int]] = []
    kinds = _kind_numbers(made, rows)
    for a, found in zip(made.work.training.wanted, made.gradients):
        if found is None:
            gradients.append(None)
            continue
        entry = (totals[a][1], 0) if a in totals else (int(rows.latest[found[0]]), found[1])
        if entry not in outputs:
            outputs[entry] = len(heads)
            heads.append(entry)
        gradients.append(outputs[entry])
    read = np.stack([rows.read_row, rows.read_output, np.full(len(rows.read_row), KEPT)], axis=1)
    waiting = np.repeat(np.arange(len(rows.source)), np.diff(rows.wait_start))
    waits = np.stack([waiting, rows.wait_row, np.full(len(waiting), KEPT)], axis=1)
    return TrainingStep(
        made,
        rows,
        tables.build(
            [],
            np.zeros((0, 2), dtype=np.int64),
            np.zeros((0, 2), dtype=np.int64),
            kinds,
            read,
            waits,
            made.kinds,
            [(row, k, KEPT) for row, k in heads],
            len(heads),
        ),
        tuple(gradients),
        {a: variable for a, (variable, _) in totals.items()},
    )


def _insert(step: TrainingStep, inserts: List[Insert]) -> TrainingStep:
    """A training step with more operators."""
    rows, kinds = step.rows, step.kinds
    kind_of = step.training.builder.kinds
    at: Dict[Tuple[int, bool], List[Insert]] = {}
    for insert in inserts:
        at.setdefault((insert.row, insert.where == BEFORE), []).append(insert)
    source: List[int] = []
    what: List[int] = []
    time: List[int] = []
    reads: List[List[Entry]] = []
    waits: List[List[int]] = []
    place: List[int] = []  # of each old row
    instead: Dict[Entry, Entry] = {}
    chain: List[int] = []  # the last row that others wait for
    pending: List[int] = []

    def add(code: int, kind: int, count: int, read: List[Entry], wait: List[int]) -> int:
        source.append(kind)
        what.append(code)
        time.append(count)
        reads.append(read)
        waits.append(wait)
        return len(source) - 1

    def put_in(insert: Insert, entry: Entry, wait: List[int]) -> Entry:
        row, k = entry
        tensor = made[row].tensors[k]
        result = Tensor((1,), tensor.dtype) if insert.op == "max" else tensor
        kind = kind_of(insert.op, insert.attrs, 1, (result,))
        made.append(kind_of.all[kind])
        return add(INSERTED, kind, -1, [entry], wait), 0

    def put_total(insert: Insert) -> int:
        """A variable and a copy of it."""
        tensors = (kinds[insert.row].tensors[insert.place],)
        null, copy = kind_of("null", {}, 0, tensors), kind_of("_copy", {}, 1, tensors)
        made.extend([kind_of.all[null], kind_of.all[copy]])
        totals[insert.argument] = add(INSERTED, null, -1, [], []), -1
        return add(INSERTED, copy, -1, [(len(source) - 1, 0)], list(chain))

    made: List[RowKind] = []
    totals: Dict[int, Tuple[int, int]] = {}
    copies: Dict[int, int] = {}
    ahead: Dict[int, List[int]] = {}  # copies of totals before rows that wait for nothing
    read_start, wait_start = rows.read_start.tolist(), rows.wait_start.tolist()
    read_row, read_output = rows.read_row.tolist(), rows.read_output.tolist()
    wait_row = rows.wait_row.tolist()
    for row, kind in enumerate(kinds):
        read = []
        for j in range(read_start[row], read_start[row + 1]):
            entry = place[read_row[j]], read_output[j]
            read.append(instead.get(entry, entry))
        for insert in at.get((row, True), ()):
            read[insert.place] = put_in(insert, read[insert.place], list(chain))
        for insert in at.get((row, False), ()):
            if insert.where == TOTAL:
                copies[insert.argument] = put_total(insert)
                if wait_start[row] < wait_start[row + 1]:
                    pending.append(copies[insert.argument])
                else:
                    ahead.setdefault(row, []).append(copies[insert.argument])
        wait = []
        for w in wait_row[wait_start[row] : wait_start[row + 1]]:
            wait += [*ahead.get(w, ()), place[w]]
        if wait:
            wait += pending
            pending = []
        place.append(add(rows.what[row], rows.source[row], rows.time[row], read, wait))
        made.append(kind)
        if wait or rows.time[row] >= 0:
            chain = [place[row]]
        for insert in at.get((row, False), ()):
            if insert.where == AFTER:
                entry = place[row], insert.place
                instead[entry] = put_in(insert, entry, [])
            elif insert.where == TOTAL:
                a = insert.argument
                sum_of = kind_of("_grad_add", {}, 2, kind.tensors[insert.place : insert.place + 1])
                made.append(kind_of.all[sum_of])
                both = [(copies[a], 0), (place[row], insert.place)]
                totals[a] = totals[a][0], add(INSERTED, sum_of, -1, both, [])
            else:
                put_in(insert, read[insert.place], [place[row]])
            pending.append(len(source) - 1)
    moved = np.array([*place, -1], dtype=np.int32)
    for a, variable in step.totals.items():
        total = _sum(step, a)
        totals[a] = place[variable], instead.get((place[total], 0), (place[total], 0))[0]
    return _step(
        step.parts,
        Rows(
            np.array(source, dtype=np.int32),
            np.array(what, dtype=np.int32),
            np.array(time, dtype=np.int32),
            _starts(reads),
            _flat([[r for r, _ in one] for one in reads]).astype(np.int32),
            _flat([[k for _, k in one] for one in reads]).astype(np.int32),
            _starts(waits),
            _flat(waits).astype(np.int32),
            moved[rows.first],
            moved[rows.latest],
        ),
        totals,
    )


def _sum(step: TrainingStep, argument: int) -> int:
    """The row of a new total."""
    output = _output(step, argument)
    assert output is not None
    return int(step.tables.head_row[output])


def _kind_numbers(made: Parts, rows: Rows) -> np.ndarray:
    kinds = made.kind_of[np.where(rows.what == ITSELF, rows.source, 0)]
    for what, of in (
        (SCRATCH, made.scratch_kind),
        (MASKED, made.masked_kind),
        (READER, made.reader_kind),
    ):
        chosen = rows.what == what
        kinds[chosen] = of[rows.source[chosen]]
    chosen = rows.what == INSERTED
    kinds[chosen] = rows.source[chosen]
    return kinds


def _names(step: TrainingStep) -> List[str]:
    """A name for each row; MXNet wants those of variables to differ, people all."""
    given = step.training.names
    rows = step.rows
    taken = {node.name for node in step.graph.nodes}
    count: Dict[str, int] = {}

    def new(stem: str) -> str:
        name = stem
        while name in taken:
            count[stem] = count.get(stem, 0) + 1
            name = "%s_%d" % (stem, count[stem])
        taken.add(name)
        return name

    names = []
    read_row = rows.read_row
    for k, (source, what, time) in enumerate(
        zip(rows.source.tolist(), rows.what.tolist(), rows.time.tolist())
    ):
        if what == SCRATCH:
            names.append(new("scratch"))
        elif what == READER:
            names.append(new(names[read_row[rows.read_start[k]]] + "_read"))
        elif what == INSERTED and rows.read_start[k] == rows.read_start[k + 1]:
            names.append(new("total"))
        elif what == INSERTED:
            names.append(new(names[read_row[rows.read_start[k]]] + "_laid_out"))
        elif source < len(step.graph.nodes):
            names.append(given[source] if time <= 0 else new(given[source] + "_again"))
        else:
            names.append(new(given[source]))
    return names


class Written(NamedTuple):
    """A training step as a symbol.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        Its outputs are those of the network, then the gradients. To be bound within
        ``environment(**BIND)`` with grad_req 'null'; ``forward(is_train=True)`` is a whole step.
    outputs : int
        How many of its outputs are the network's.
    gradients : dict
        For each argument that gets a gradient which output of the symbol that is; None for zeros.
    left_out : frozenset of str
        The arguments whose gradient MKLDNN leaves out: that output is not written.
    unwritten : tuple of str
        As in `Parts`.
    totals : dict of str
        For arguments whose gradient is added to a total the argument that it is given in; the
        output is the new total.
    heads : dict
        For each output of the network whose gradient must be given the argument that it is given
        in. Empty if all outputs are losses.
    scratch : dict of Tensor
        Auxiliary states that only the symbol has.
    """

    symbol: Any
    outputs: int
    gradients: Dict[str, Optional[int]]
    left_out: FrozenSet[str]
    unwritten: Tuple[str, ...]
    totals: Dict[str, str]
    heads: Dict[int, str]
    scratch: Dict[str, Tensor]


@no_collection()
def write(step: TrainingStep) -> Written:
    """Make the symbol of a training step."""
    rows, graph, training = step.rows, step.graph, step.training
    names = step.names
    kinds = step.kinds
    used = np.zeros(len(names), dtype=np.bool_)
    used[rows.read_row] = True
    used[step.tables.head_row] = True
    nodes: List[Dict[str, Any]] = []
    place: List[int] = []
    read_start, wait_start = rows.read_start.tolist(), rows.wait_start.tolist()
    read_row, read_output = rows.read_row.tolist(), rows.read_output.tolist()
    wait_row = rows.wait_row.tolist()
    heads: Dict[int, str] = {}
    scratch: Dict[str, Tensor] = {}
    totals: Dict[int, str] = {}
    multiplied = set(rows.source[rows.what == MASKED].tolist())
    for k, name in enumerate(names):
        kind = kinds[k]
        place.append(len(nodes))
        if kind.op == "null":
            if not used[k]:
                continue
            source = int(rows.source[k])
            attrs: Mapping[str, str] = {}
            if rows.what[k] == INSERTED:
                totals[k] = name
            elif rows.what[k] == SCRATCH:
                scratch[name] = kind.tensors[0]
            elif source < len(graph.nodes):
                attrs = graph.nodes[source].hidden
            else:  # named _head_grad_k
                heads[int(training.names[source].rsplit("_", 1)[1])] = name
        else:
            attrs = _attributes(kind)
            if rows.what[k] == ITSELF and int(rows.source[k]) in multiplied:
                # cuDNN's mask is one of bits, no factors (src/operator/nn/dropout-inl.h)
                attrs = {**attrs, "cudnn_off": "True"}
        node: Dict[str, Any] = {"op": kind.op, "name": name, "inputs": []}
        node["inputs"] = [
            [place[read_row[j]], read_output[j], 0] for j in range(read_start[k], read_start[k + 1])
        ]
        if attrs:
            node["attrs"] = dict(attrs)
        if wait_start[k] < wait_start[k + 1]:
            waits = [place[wait_row[j]] for j in range(wait_start[k], wait_start[k + 1])]
            node["control_deps"] = list(dict.fromkeys(waits))
        nodes.append(node)
    text = json.dumps(
        {
            "nodes": nodes,
            "arg_nodes": [i for i, node in enumerate(nodes) if node["op"] == "null"],
            "heads": [[place[row], k, 0] for row, k in step.heads],
            "attrs": {"mxnet_version": MXNET_VERSION},
        }
    )
    arguments = [graph.nodes[a].name for a in training.wanted]
    return Written(
        mx.sym.load_json(text),
        len(graph.heads),
        dict(zip(arguments, step.gradients)),
        frozenset([graph.nodes[a].name for a in step.parts.left_out]),
        step.parts.unwritten,
        {graph.nodes[a].name: totals[row] for a, row in step.totals.items()},
        heads,
        scratch,
    )


def _attributes(kind: RowKind) -> Mapping[str, str]:
    if kind.op == "_zeros_without_dtype":  # its shape is inferred from nothing
        return {**kind.attrs, "shape": str(tuple(kind.tensors[0].shape))}
    return kind.attrs
