"""The training step of a schedule as a graph, for the replay of its memory and for the symbol."""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping, NamedTuple

import numpy as np

from memonger.costs.replay import Replay, replay
from memonger.graph import arrays as tables
from memonger.graph.arrays import BACKWARD, FORWARD, KEPT, RECOMPUTED, RowKind, Tables
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
    Template,
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


class Parts(NamedTuple):
    """A template, and what belongs to its rows.

    Attributes
    ----------
    work : Workload
    template : Template
    patterns : Patterns
    kinds : list of RowKind
    kind_of : np.ndarray
        Of each template row.
    masked_kind, reader_kind : np.ndarray
        Of forward rows that are `MASKED`; of the reader of each output that must have one.
    scratch_kind : np.ndarray
        Of each scratch state.
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
    patterns: Patterns
    kinds: list[RowKind]
    kind_of: np.ndarray
    masked_kind: np.ndarray
    reader_kind: np.ndarray
    scratch_kind: np.ndarray
    gradients: tuple[Entry | None, ...]
    left_out: frozenset[int]
    unwritten: tuple[str, ...]
    expected: Expected | None

    def asked(self) -> np.ndarray:
        """The outputs of template rows that are gradients, (row, output), each once."""
        asked = dict.fromkeys(entry for entry in self.gradients if entry is not None)
        return np.array(list(asked), dtype=np.int64).reshape(-1, 2)


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
    totals : dict of (row, row)
        Of arguments (node indices) whose gradient is added to a total: the variable that holds it,
        and the sum, which is then their output.
    """

    parts: Parts
    rows: Rows
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

    @property
    def kinds(self) -> list[RowKind]:
        """Operator, parameters, shapes and types of each row."""
        return [self.parts.kinds[k] for k in _kind_numbers(self.parts, self.rows).tolist()]

    @property
    def ops(self) -> list[str]:
        return [kind.op for kind in self.kinds]

    @property
    def names(self) -> list[str]:
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


def step_of(made: Parts, rows: Rows, totals: Mapping[int, tuple[int, int]]) -> TrainingStep:
    """The training step of these rows; ``totals`` as in `TrainingStep`."""
    template = made.template
    heads = [
        (int(rows.first[row]), int(k)) for row, k in zip(template.head_row, template.head_output)
    ]
    outputs = {entry: k for k, entry in reversed(list(enumerate(heads)))}
    gradients: list[int | None] = []
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
        totals,
    )


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


def _names(step: TrainingStep) -> list[str]:
    """A name for each row; MXNet wants those of variables to differ, people all."""
    given = step.training.names
    rows = step.rows
    taken = {node.name for node in step.graph.nodes}
    count: dict[str, int] = {}

    def new(stem: str) -> str:
        name = stem
        while name in taken:
            count[stem] = count.get(stem, 0) + 1
            name = "%s_%d" % (stem, count[stem])
        taken.add(name)
        return name

    names: list[str] = []
    reads, _ = rows.inputs()
    columns = rows.source.tolist(), rows.what.tolist(), rows.time.tolist()
    for source, what, time, read in zip(*columns, reads):
        if what == SCRATCH:
            names.append(new("scratch"))
        elif what == READER:
            names.append(new(names[read[0][0]] + "_read"))
        elif what == INSERTED and not read:
            names.append(new("total"))
        elif what == INSERTED:
            names.append(new(names[read[0][0]] + "_laid_out"))
        elif source < len(step.graph.nodes):
            names.append(given[source] if time <= 0 else new(given[source] + "_again"))
        else:
            names.append(new(given[source]))
    return names
