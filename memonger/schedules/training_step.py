"""The training step of a schedule as a graph, for the replay of its memory and for the symbol."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Collection, Iterable, Mapping, NamedTuple, Sequence

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
from memonger.schedules.nodes import Patterns, Rows, lay_out
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

#: So begins the name of what only a schedule runs.
OURS = "memonger_again_"

#: The mean of each channel reads blocks. For an operator that cannot, such as ``max``, MXNet's
#: executor makes a plain copy and keeps it for as long as it lives (``StorageFallbackOpExecutor``,
#: ``src/executor/attach_op_execs_pass.cc``). It must be read: without MKLDNN, Pooling has to write.
MEAN = {"global_pool": "True", "kernel": "(1, 1)", "pool_type": "avg"}


@dataclass(frozen=True, eq=False)
class Parts:
    """All that the training steps of a network are made of."""

    work: Workload
    mkldnn: bool  # whether MKLDNN may compute them
    patterns: Patterns
    kinds: tuple[RowKind, ...]  # that the patterns refer to
    gradients: tuple[Entry | None, ...]  # of the arguments that get one, by pattern; None: zeros
    totals: Mapping[int, int]  # of arguments whose gradient is added to a total: its variable
    left_out: Collection[int]  # arguments whose gradient MKLDNN does not write
    expected: Expected | None  # layouts without a schedule; None if MKLDNN lays out no tensor

    def asked(self) -> np.ndarray:
        """The patterns and outputs that are gradients, (pattern, output), each once."""
        asked = dict.fromkeys(filter(None, self.gradients))
        return np.array(list(asked), dtype=np.int64).reshape(-1, 2)


class Node(NamedTuple):
    """A node of a training step: one row of `Rows`, with its reads and waits as lists."""

    kind: int
    source: int
    time: int
    reads: Sequence[Entry]
    waits: Sequence[int]


class Nodes:
    """Nodes that are put down one after the other, and their kinds."""

    def __init__(self, kinds: Iterable[RowKind]) -> None:
        self.all: list[Node] = []
        self.kinds = Kinds(list(kinds))

    def add(self, node: Node) -> int:
        """Put down a node, and return its number."""
        self.all.append(node)
        return len(self.all) - 1

    def insert(
        self,
        op: str,
        attrs: Mapping[str, str],
        tensor: Tensor,
        reads: Sequence[Entry] = (),
        waits: Sequence[int] = (),
    ) -> Entry:
        """Put down a node that the network does not have, and return its one output."""
        kind = self.kinds(op, attrs, len(reads), (tensor,))
        return self.add(Node(kind, -1, -1, reads, waits)), 0

    def tensor(self, entry: Entry) -> Tensor:
        """Tell shape and type of an output."""
        return self.kinds.all[self.all[entry[0]].kind].tensors[entry[1]]

    def rows(self, first: Sequence[int] = (), latest: Sequence[int] = ()) -> Rows:
        """Make rows of the nodes; ``first`` and ``latest`` as in `Rows`."""
        *columns, reads, waits = zip(*self.all)
        read_start, entries = ragged(reads)
        lists = (*columns, read_start, *entries.reshape(-1, 2).T, *ragged(waits), first, latest)
        return Rows(*(np.array(each, dtype=np.int32) for each in lists))


def nodes_of(rows: Rows) -> list[Node]:
    """List the rows of a training step as nodes."""
    entries = list(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    reads = [entries[start:stop] for start, stop in zip(rows.read_start, rows.read_start[1:])]
    wait = rows.wait_row.tolist()
    waits = [wait[start:stop] for start, stop in zip(rows.wait_start, rows.wait_start[1:])]
    return list(map(Node, *(column.tolist() for column in rows[:3]), reads, waits))


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """The training graph of a schedule, as ``training.TrainingGraph`` is that of a set of marks."""

    parts: Parts
    rows: Rows
    all_kinds: Sequence[RowKind]  # that the rows refer to
    tables: Tables
    heads: list[Entry]  # the outputs of the symbol: those of the network, then gradients
    #: Of each argument that gets one the output of the symbol; two may be the same. None: zeros.
    gradients: tuple[int | None, ...]

    @property
    def training(self) -> TrainingGraph:
        """The training graph of the network without a schedule."""
        return self.parts.work.training

    @property
    def graph(self) -> ForwardGraph:
        return self.training.graph

    @cached_property
    def kinds(self) -> list[RowKind]:
        """Operator, parameters, shapes and types of each row."""
        return [self.all_kinds[k] for k in self.rows.kind.tolist()]

    @cached_property
    def ops(self) -> list[str]:
        return [kind.op for kind in self.kinds]

    @cached_property
    def names(self) -> list[str]:
        """Of each row: MXNet's, where it runs that too, or one of our own (`OURS`)."""
        usual = self.training.names
        names: list[str] = []
        stems: list[str] = []
        for row, node in enumerate(nodes_of(self.rows)):
            if node.source >= 0:
                stems.append(usual[node.source])
            else:
                stems.append("_".join([*(stems[r] for r, _ in node.reads[:1]), self.ops[row]]))
            is_head = node.source >= len(self.graph.nodes) and self.ops[row] == "null"
            is_ours = node.source < 0 or node.time > 0 or is_head
            names.append(f"{OURS}{row}_{stems[row]}" if is_ours else stems[row])
        return names

    @property
    def phases(self) -> np.ndarray:
        """FORWARD, RECOMPUTED or BACKWARD for each row."""
        time, source = self.rows.time, self.rows.source
        own = np.where(time == 0, FORWARD, BACKWARD)
        return np.where((time > 0) | (source < 0), RECOMPUTED, own)

    @property
    def settings(self) -> Settings:
        """Those of MXNet when it is bound (`BIND`)."""
        return replace(self.training.settings, search_match_range=True)

    def replay(self) -> Replay:
        """Order it and plan its memory as MXNet will."""
        return replay(self, np.zeros(0, dtype=np.bool_))


def step_of(made: Parts, rows: Rows, kinds: Sequence[RowKind]) -> TrainingStep:
    """Make the training step of these rows, which are of these kinds."""
    t = made.work.training.tables
    outputs = t.head_entry[: t.outputs] - t.output_start[t.head_row[: t.outputs]]
    heads = list(zip(rows.first[t.head_row[: t.outputs]].tolist(), outputs.tolist()))
    place = {entry: k for k, entry in reversed(list(enumerate(heads)))}
    gradients: list[int | None] = []
    for found in made.gradients:
        if found is not None:
            entry = int(rows.latest[found[0]]), found[1]
            if entry not in place:
                place[entry] = len(heads)
                heads.append(entry)
        gradients.append(None if found is None else place[entry])
    head_row, head_output = np.array(heads, dtype=np.int32).T.copy()
    tables = lay_out(arrays_of(kinds), rows, head_row, head_output)
    return TrainingStep(made, rows, kinds, tables, heads, tuple(gradients))


def insert(step: TrainingStep, inserts: Sequence[Insert]) -> TrainingStep:
    """Make a training step with more operators, for the layouts of its tensors.

    What is put in before a row waits for what ran before; what is put in behind it waits for
    nothing, and the next row that may wait, waits for it.
    """
    new = Nodes(step.all_kinds)
    of_row: dict[int, list[Insert]] = defaultdict(list)
    for one in inserts:
        of_row[one.row].append(one)
    place: list[int] = []  # of each old row
    instead: dict[Entry, Entry] = {}
    chain: list[int] = []  # the last row that others wait for
    pending: list[int] = []  # what the next row that may wait, waits for
    for row, node in enumerate(nodes_of(step.rows)):
        entries = [(place[source], k) for source, k in node.reads]
        read = [instead.get(entry, entry) for entry in entries]
        for one in of_row[row]:
            if one.where == BEFORE:
                read[one.place] = _put_in(new, one, read[one.place], chain)
        wait = [place[before] for before in node.waits]
        if wait:
            wait += pending
            pending = []
        here = new.add(node._replace(reads=read, waits=wait))
        place.append(here)
        if wait or node.time >= 0:
            chain = [here]
        for one in of_row[row]:
            if one.where == HOLD:
                pending.append(_put_in(new, one, read[one.place], [here])[0])
            elif one.where == AFTER:
                entry = here, one.place
                instead[entry] = _put_in(new, one, entry, [])
                pending.append(instead[entry][0])
    moved = np.array([*place, -1], dtype=np.int32)
    rows = new.rows(moved[step.rows.first], moved[step.rows.latest])
    return step_of(step.parts, rows, new.kinds.all)


def _put_in(new: Nodes, one: Insert, entry: Entry, wait: Sequence[int]) -> Entry:
    """Put down what a layout needs, reading this."""
    tensor = new.tensor(entry)
    if one.where != HOLD:
        copies = one.op == "add_n"
        attrs = {"num_args": "1"} if copies else {"shape": str(tuple(tensor.shape))}
        return new.insert(one.op, attrs, tensor, [entry], wait)
    if len(tensor.shape) == AXES:
        mean = Tensor((*tensor.shape[:2], 1, 1), tensor.dtype)
        entry, wait = new.insert("Pooling", MEAN, mean, [entry], wait), []
    return new.insert("max", {}, Tensor((1,), tensor.dtype), [entry], wait)
