"""The training step of a schedule as a graph, for the replay of its memory and for the symbol."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.replay import Replay, replay
from memonger.graph.arrays import BACKWARD, FORWARD, RECOMPUTED, RowKind, Tables, arrays_of, ragged
from memonger.graph.forward import Entry, ForwardGraph
from memonger.graph.training import TrainingGraph
from memonger.schedules.layouts import Expected
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


@dataclass(frozen=True)
class Parts:
    """All that the training steps of a network are made of.

    ``kinds`` are those that the patterns refer to; ``gradients`` tells for each argument that gets
    one which output of which row of the network's TrainingGraph it is. MKLDNN leaves out the
    gradients of the arguments ``left_out``; MXNet adds those of the operators ``unwritten`` to
    others all the same. ``expected`` are the layouts of the network without a schedule, None if
    MKLDNN lays out no tensor of it.
    """

    work: Workload
    patterns: Patterns
    kinds: tuple[RowKind, ...]
    gradients: tuple[Entry | None, ...]
    left_out: frozenset[int]
    unwritten: tuple[str, ...]
    expected: Expected | None

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
    """The rows of a training step as nodes."""
    entries = list(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    waits = rows.wait_row.tolist()
    return list(
        map(
            Node,
            *(column.tolist() for column in rows[:4]),
            [entries[start:stop] for start, stop in zip(rows.read_start, rows.read_start[1:])],
            [waits[start:stop] for start, stop in zip(rows.wait_start, rows.wait_start[1:])],
        )
    )


def rows_of(nodes: Sequence[Node], first: np.ndarray, latest: np.ndarray) -> Rows:
    """Nodes as rows; ``first`` and ``latest`` as in `Rows`."""
    *columns, reads, waits = zip(*nodes)
    read_start, entries = ragged(reads)
    lists = (*columns, read_start, *entries.reshape(-1, 2).T, *ragged(waits), first, latest)
    return Rows(*(np.array(each, dtype=np.int32) for each in lists))


@dataclass(frozen=True)
class TrainingStep:
    """The training graph of a schedule, as ``training.TrainingGraph`` is that of a set of marks.

    ``gradients`` tells for each argument that gets one which output of the symbol it is; two may be
    the same, None is a gradient of zeros. ``totals`` are the arguments (node indices) whose
    gradient is added to a total: the row of the variable that holds it, and that of the sum, which
    is then their output.
    """

    parts: Parts
    rows: Rows
    all_kinds: Sequence[RowKind]  # that the rows refer to
    tables: Tables
    gradients: tuple[int | None, ...]
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
        """Of each row; those of variables and of what runs for the first time are the network's."""
        return _names(self)

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
        if found is None:
            gradients.append(None)
            continue
        entry = (totals[a][1], 0) if a in totals else (int(rows.latest[found[0]]), found[1])
        if entry not in place:
            place[entry] = len(heads)
            heads.append(entry)
        gradients.append(place[entry])
    head_row, head_output = np.array(heads, dtype=np.int32).T.copy()
    tables = lay_out(arrays_of(kinds), rows, head_row, head_output)
    return TrainingStep(made, rows, kinds, tables, tuple(gradients), totals)


def _names(step: TrainingStep) -> list[str]:
    """A name for each row; MXNet wants those of variables to differ, people all."""
    given = step.training.names
    forward = len(step.graph.nodes)
    taken = set(given[:forward])
    count: dict[str, int] = {}

    def new(stem: str) -> str:
        name = stem
        while name in taken:
            count[stem] = count.get(stem, 0) + 1
            name = f"{stem}_{count[stem]}"
        taken.add(name)
        return name

    names: list[str] = []
    for node in nodes_of(step.rows):
        read = names[node.reads[0][0]] if node.reads else ""
        if node.what == SCRATCH:
            names.append(new("scratch"))
        elif node.what == READER:
            names.append(new(read + "_read"))
        elif node.what == INSERTED:
            names.append(new(read + "_laid_out" if read else "total"))
        elif node.source >= forward:
            names.append(new(given[node.source]))
        else:
            names.append(
                new(given[node.source] + "_again") if node.time > 0 else given[node.source]
            )
    return names
