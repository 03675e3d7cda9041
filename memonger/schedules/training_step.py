"""The training step of a schedule as a graph, for the replay of its memory and for the symbol.

Nodes are inserted to make it bit-identical to MXNet's own: where a gradient is added to a total,
and where a tensor would be laid out in another way (``layouts``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Collection, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.replay import Replay, replay
from memonger.graph.arrays import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    Kinds,
    RowKind,
    Tables,
    arrays_of,
    ragged,
)
from memonger.graph.forward import Entry, ForwardGraph
from memonger.graph.operators.layouts import AXES
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import TrainingGraph
from memonger.schedules.layouts import AFTER, BEFORE, HOLD, Expected, Insert
from memonger.schedules.nodes import (
    INSERTED,
    ITSELF,
    MASKED,
    READER,
    SCRATCH,
    Patterns,
    Rows,
    lay_out,
)
from memonger.schedules.schedule import Workload
from memonger.support.mxnet import Settings

#: The environment in which the symbol of a schedule must be bound, and its memory replayed. Without
#: gradients to write (grad_req 'null') MKLDNN would fuse for inference; common subexpressions would
#: merge the copies; pointwise fusion would reorder; and one match range is not enough for tensors
#: that live this shortly.
BIND: Mapping[str, str] = {
    "MXNET_SUBGRAPH_BACKEND": "NONE",
    "MXNET_ELIMINATE_COMMON_EXPR": "0",
    "MXNET_USE_FUSION": "0",
    "NNVM_AUTO_SEARCH_MATCH_RANGE": "1",
}

#: The mean of each channel reads blocks. For an operator that cannot, such as ``max``, MXNet's
#: executor makes a plain copy and keeps it for as long as it lives (``StorageFallbackOpExecutor``,
#: ``src/executor/attach_op_execs_pass.cc``). It must be read: without MKLDNN, Pooling has to write.
MEAN = {"global_pool": "True", "kernel": "(1, 1)", "pool_type": "avg"}


@dataclass(frozen=True, eq=False)
class Parts:
    """All that the training steps of a network are made of."""

    work: Workload
    patterns: Patterns
    kinds: tuple[RowKind, ...]  # that the patterns refer to
    gradients: tuple[Entry | None, ...]  # of the arguments that get one, in the TrainingGraph
    left_out: frozenset[int]  # the arguments whose gradient MKLDNN leaves out
    unwritten: tuple[str, ...]  # operators where MXNet adds such a one to others all the same
    expected: Expected | None  # layouts without a schedule; None if MKLDNN lays out no tensor

    def asked(self) -> np.ndarray:
        """The rows and outputs that are gradients, (row, output), each once."""
        asked = dict.fromkeys(entry for entry in self.gradients if entry is not None)
        return np.array(list(asked), dtype=np.int64).reshape(-1, 2)


class Node(NamedTuple):
    """A node of a training step: one row of `Rows`, with its reads and waits as lists."""

    kind: int
    source: int
    what: int
    time: int
    reads: list[Entry]
    waits: list[int]


def nodes_of(rows: Rows) -> list[Node]:
    """List the rows of a training step as nodes."""
    entries = list(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    reads = [entries[start:stop] for start, stop in zip(rows.read_start, rows.read_start[1:])]
    wait = rows.wait_row.tolist()
    waits = [wait[start:stop] for start, stop in zip(rows.wait_start, rows.wait_start[1:])]
    return list(map(Node, *(column.tolist() for column in rows[:4]), reads, waits))


def rows_of(nodes: Sequence[Node], first: np.ndarray, latest: np.ndarray) -> Rows:
    """Make rows of nodes; ``first`` and ``latest`` as in `Rows`."""
    *columns, reads, waits = zip(*nodes)
    read_start, entries = ragged(reads)
    lists = (*columns, read_start, *entries.reshape(-1, 2).T, *ragged(waits), first, latest)
    return Rows(*(np.array(each, dtype=np.int32) for each in lists))


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """The training graph of a schedule, as ``training.TrainingGraph`` is that of a set of marks."""

    parts: Parts
    rows: Rows
    all_kinds: Sequence[RowKind]  # that the rows refer to
    tables: Tables
    #: Of each argument that gets one the output of the symbol; two may be the same. None: zeros.
    gradients: tuple[int | None, ...]
    #: The arguments (node indices) whose gradient is added to a total: the row of the variable that
    #: holds it, and that of the sum, which is then their output.
    totals: Mapping[int, tuple[int, int]]

    @property
    def training(self) -> TrainingGraph:
        """The training graph of the network without a schedule."""
        return self.parts.work.training

    @property
    def graph(self) -> ForwardGraph:
        return self.training.graph

    @property
    def inexact(self) -> tuple[str, ...]:
        """Why the replay of this graph may differ from MXNet; empty if it should not."""
        return self.training.inexact

    @cached_property
    def kinds(self) -> list[RowKind]:
        """Operator, parameters, shapes and types of each row."""
        return [self.all_kinds[k] for k in self.rows.kind.tolist()]

    @cached_property
    def ops(self) -> list[str]:
        return [kind.op for kind in self.kinds]

    @cached_property
    def names(self) -> list[str]:
        """Of each row; MXNet wants those of variables to differ, people all.

        Those of variables and of what runs for the first time are the network's.
        """
        given, forward = self.training.names, len(self.graph.nodes)
        taken = set(given[:forward])
        count: dict[str, int] = {}
        names: list[str] = []
        for node in nodes_of(self.rows):
            read = names[node.reads[0][0]] if node.reads else ""
            own = node.what in (ITSELF, MASKED)
            if own:
                stem = given[node.source] + "_again" * (node.time > 0)
            elif node.what == INSERTED:
                stem = read + "_laid_out" if read else "total"
            else:
                stem = "scratch" if node.what == SCRATCH else read + "_read"
            name = stem
            while name in taken and not (own and node.source < forward and node.time <= 0):
                count[stem] = count.get(stem, 0) + 1
                name = f"{stem}_{count[stem]}"
            taken.add(name)
            names.append(name)
        return names

    @property
    def stands_for(self) -> np.ndarray:
        """Of each row the row of the TrainingGraph whose place it takes; -1 for none."""
        what = self.rows.what
        return np.where((what == ITSELF) | (what == MASKED), self.rows.source, -1)

    @property
    def phases(self) -> np.ndarray:
        """FORWARD, RECOMPUTED or BACKWARD for each row."""
        time, what = self.rows.time, self.rows.what
        again = (time > 0) | (what == READER) | (what == INSERTED)
        return np.where(again, RECOMPUTED, np.where(time == 0, FORWARD, BACKWARD))

    @property
    def heads(self) -> list[Entry]:
        """The outputs of the symbol: those of the network, then gradients."""
        t = self.tables
        outputs = t.head_entry - t.output_start[t.head_row]
        return list(zip(t.head_row.tolist(), outputs.tolist()))

    def order(self) -> np.ndarray:
        """The rows in the order in which MXNet runs them, variables among them."""
        return self.tables.first

    @property
    def settings(self) -> Settings:
        """Those of MXNet when it is bound (`BIND`)."""
        return replace(self.training.settings, search_match_range=True)

    def replay(self) -> Replay:
        """Order it and plan its memory as MXNet will."""
        return replay(self, np.zeros(0, dtype=np.bool_))


def step_of(
    made: Parts, rows: Rows, kinds: Sequence[RowKind], totals: Mapping[int, tuple[int, int]]
) -> TrainingStep:
    """Make the training step of these rows, which are of these kinds; see `TrainingStep`."""
    t = made.work.training.tables
    outputs = t.head_entry[: t.outputs] - t.output_start[t.head_row[: t.outputs]]
    heads = list(zip(rows.first[t.head_row[: t.outputs]].tolist(), outputs.tolist()))
    place = {entry: k for k, entry in reversed(list(enumerate(heads)))}
    gradients: list[int | None] = []
    for a, found in zip(made.work.training.wanted, made.gradients):
        if found is not None:
            entry = (totals[a][1], 0) if a in totals else (int(rows.latest[found[0]]), found[1])
            if entry not in place:
                place[entry] = len(heads)
                heads.append(entry)
        gradients.append(None if found is None else place[entry])
    head_row, head_output = np.array(heads, dtype=np.int32).T.copy()
    tables = lay_out(arrays_of(kinds), rows, head_row, head_output)
    return TrainingStep(made, rows, kinds, tables, tuple(gradients), totals)


# ---------------------------------------------------------------- more operators


def with_totals(step: TrainingStep, added: Collection[int]) -> TrainingStep:
    """Add the gradients of these arguments up as MXNet does: what makes one adds it to the total.

    Some round otherwise than by adding what they have made (an Embedding adds row after row). The
    executor sees to it that the second input of a ``_grad_add`` is added to the first
    (``src/executor/inplace_addto_detect_pass.cc``), here a copy of the total. Where a gradient is
    read by others too it is not done: it is added up afterwards.
    """
    made, rows = step.parts, step.rows
    reads = Counter(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    reads.update(step.heads)
    given = Counter(step.gradients)
    totals = []
    for a, found, output in zip(step.training.wanted, made.gradients, step.gradients):
        if a in added and found is not None and a not in made.left_out and given[output] == 1:
            row, k = int(rows.latest[found[0]]), found[1]
            if reads[row, k] == 1:
                totals.append((row, k, a))
    return insert(step, (), totals) if totals else step


def insert(
    step: TrainingStep, inserts: Sequence[Insert], totals: Sequence[tuple[int, int, int]] = ()
) -> TrainingStep:
    """Make a training step with more operators, and totals: (row, output, argument).

    What is put in before a row waits for what ran before; what is put in behind it waits for
    nothing, and the next row that may wait, waits for it.
    """
    new = _Nodes(step)
    before: dict[int, list[Insert]] = defaultdict(list)
    behind: dict[int, list[Insert]] = defaultdict(list)
    summed: dict[int, list[tuple[Tensor, int, int]]] = defaultdict(list)
    for one in inserts:
        (before if one.where == BEFORE else behind)[one.row].append(one)
    for row, k, argument in totals:
        summed[row].append((step.kinds[row].tensors[k], k, argument))
    place: list[int] = []  # of each old row
    instead: dict[Entry, Entry] = {}
    chain: list[int] = []  # the last row that others wait for
    pending: list[int] = []  # what the next row that may wait, waits for
    ahead: dict[int, list[int]] = {}  # copies of totals before rows that wait for nothing
    sums: dict[int, tuple[int, int]] = {}  # of each argument: the variable of its total, the sum
    for row, node in enumerate(nodes_of(step.rows)):
        entries = [(place[source], k) for source, k in node.reads]
        read = [instead.get(entry, entry) for entry in entries]
        for one in before[row]:
            read[one.place] = new.put_in(one, read[one.place], chain)
        variables, copies = [], []
        for tensor, _, _ in summed[row]:
            variables.append(new.insert("null", {}, tensor, [], []))
            copies.append(new.insert("_copy", {}, tensor, [(variables[-1], 0)], chain))
        if node.waits:
            pending += copies
        else:
            ahead[row] = copies
        wait = [w for old in node.waits for w in (*ahead.get(old, ()), place[old])]
        if wait:
            wait += pending
            pending = []
        here = new.add(node._replace(reads=read, waits=wait))
        place.append(here)
        if wait or node.time >= 0:
            chain = [here]
        for one in behind[row]:
            if one.where == AFTER:
                entry = here, one.place
                instead[entry] = put = new.put_in(one, entry, [])
            else:
                put = new.put_in(one, read[one.place], [here])
            pending.append(put[0])
        for (tensor, k, a), variable, copy in zip(summed[row], variables, copies):
            pending.append(new.insert("_grad_add", {}, tensor, [(copy, 0), (here, k)], []))
            sums[a] = variable, pending[-1]
    for a, (variable, added) in step.totals.items():
        entry = place[added], 0
        sums[a] = place[variable], instead.get(entry, entry)[0]
    moved = np.array([*place, -1], dtype=np.int32)
    rows = rows_of(new.nodes, moved[step.rows.first], moved[step.rows.latest])
    return step_of(step.parts, rows, new.kinds.all, sums)


class _Nodes:
    """Nodes that are put down one after the other, and what they are."""

    def __init__(self, step: TrainingStep) -> None:
        self.nodes: list[Node] = []
        self.kinds = Kinds(list(step.all_kinds))

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def insert(
        self, op: str, attrs: Mapping[str, str], tensor: Tensor, read: list[Entry], wait: list[int]
    ) -> int:
        """A node that the schedule does not have, with one output."""
        kind = self.kinds(op, attrs, len(read), (tensor,))
        return self.add(Node(kind, -1, INSERTED, -1, read, wait))

    def put_in(self, one: Insert, entry: Entry, wait: list[int]) -> Entry:
        """What a layout needs, reading this."""
        row, k = entry
        tensor = self.kinds.all[self.nodes[row].kind].tensors[k]
        if one.where != HOLD:
            return self.insert(one.op, one.attrs, tensor, [entry], wait), 0
        if len(tensor.shape) == AXES:
            mean = Tensor((*tensor.shape[:2], 1, 1), tensor.dtype)
            entry, wait = (self.insert("Pooling", MEAN, mean, [entry], wait), 0), []
        return self.insert("max", {}, Tensor((1,), tensor.dtype), [entry], wait), 0
