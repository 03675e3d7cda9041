"""The training step of a schedule, written out: every node that it runs, as one graph.

What MXNet's executor makes of a network by itself (``training``) is made here in the order that a
schedule says, with as many copies of an operator as it says: forward nodes, gradient nodes and
sums, each reading the copies that it should. `parts` finds out what all the training steps of a
network are made of; `unroll` puts one of them together: its ``rows``, what is put in so that
gradients and the last bits are those of MXNet (``inserts``), and its graph (``training_step``).
That tells its memory; ``written`` makes the symbol that MXNet binds.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import numpy as np

from memonger.costs.allocator import replay
from memonger.costs.layouts import AXES, MAKE
from memonger.graph.arrays import Kinds, Tables, ragged
from memonger.graph.forward import FLOAT, Entry, no_collection
from memonger.graph.operators.recompute import truth
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import TrainingGraph
from memonger.schedules.inserts import insert, with_totals
from memonger.schedules.layouts import Expected
from memonger.schedules.nodes import Template, patterns, rows_of
from memonger.schedules.schedule import Schedule, Workload, first_time, masked
from memonger.schedules.training_step import Parts, TrainingStep, step_of
from memonger.support.errors import MemongerError

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
        unique = {id(kind): kind for kind in self.training.kinds}
        self.kinds = Kinds(list(unique.values()))

    def parts(self) -> Parts:
        graph, n, t = self.graph, self.n, self.tables
        self._read_head_gradients_themselves()
        gradients = self._gradients()
        scratch, read_scratch = self._scratch()
        event_start, event_row = ragged(self._events())
        wait_start, wait_row = ragged(self._waits())
        is_masked = [masked(node.op, node.attrs) for node in graph.nodes]
        masked_kind = [self._masked_kind(x) if m else -1 for x, m in enumerate(is_masked)]
        to_read = [self._needed(x) for x in range(n)]
        needed_start, needed = ragged(to_read)
        reader_kind = [
            self.kinds("max", {}, 1, (Tensor((1,), graph.tensors[x][k].dtype),))
            for x, outputs in enumerate(to_read)
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
            wait_start=wait_start,
            wait_row=wait_row,
            event_start=event_start,
            event_row=event_row,
            needed_start=needed_start,
            needed=needed,
            masked=np.array(is_masked, dtype=np.bool_),
            head_row=heads,
            head_output=t.head_entry[: t.outputs] - t.output_start[heads],
        )
        return Parts(
            self.work,
            template,
            patterns(template),
            self.kinds.all,
            np.array([places[id(kind)] for kind in self.training.kinds], dtype=np.int64),
            np.array(masked_kind, dtype=np.int64),
            np.array(reader_kind, dtype=np.int64),
            np.array(scratch_kind, dtype=np.int64),
            gradients,
            *self._left_out(gradients),
            self._expected(),
        )

    def _left_out(
        self, gradients: Sequence[Entry | None]
    ) -> tuple[frozenset[int], tuple[str, ...]]:
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

    def _expected(self) -> Expected | None:
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

    def _gradients(self) -> tuple[Entry | None, ...]:
        """Where the gradient of each argument comes from, without copies of what is another's."""
        t, ops, names = self.tables, self.training.ops, self.training.names
        found: list[Entry | None] = []
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

    def _events(self) -> list[list[int]]:
        """For each forward node the gradient rows that run in the event of its gradient.

        Sums run with the last of what they add, what reads nothing with the first that reads it.
        """
        n, t = self.n, self.tables
        place = {x: k for k, x in enumerate(self.work.gradients)}
        walk = [int(r) for r in t.walk_row if r >= 2 * n and not t.variable[r]]
        event: dict[int, int] = {}
        for row in sorted(walk):
            start, stop = self.read_start[row], self.read_start[row + 1]
            owner = self._owner(row)
            if owner >= 0:
                event[row] = place[owner]
            elif start < stop:
                event[row] = max(event.get(int(r), 0) for r in self.read_row[start:stop])
            else:
                event[row] = max(0, len(place) - 1)
            for r in self.read_row[start:stop]:
                if int(r) in event and self.read_start[r] == self.read_start[r + 1]:
                    event[int(r)] = min(event[int(r)], event[row])
        result: list[list[int]] = [[] for _ in range(n)]
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

    def _scratch(self) -> tuple[tuple[Tensor, ...], np.ndarray]:
        """States for operators that run again: cuDNN's BatchNorm moves its own when it runs."""
        known: dict[tuple[int, Tensor], int] = {}
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

    def _waits(self) -> list[list[int]]:
        """What gradient rows wait for by themselves, not what orders their sums."""
        waits: list[list[int]] = [[] for _ in range(self.rows)]
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

    def _needed(self, x: int) -> list[int]:
        """The outputs of an operator that must be read, for they are if it runs once."""
        t, node = self.tables, self.graph.nodes[x]
        if node.is_variable:
            return []
        last = int(t.output_start[x + 1] - t.output_start[x])
        hidden = [] if node.op in WRITES_HIDDEN else range(max(1, len(self.graph.shown(x))), last)
        return [k for k in (0, *hidden) if t.reads[t.output_start[x] + k] > 0]


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
    rows = rows_of(made.patterns, np.ascontiguousarray(schedule.events, dtype=np.int32))
    plain = step = with_totals(step_of(made, rows, {}), frozenset(added))
    if made.expected is None:
        return plain
    for _ in range(ROUNDS):
        inserts = made.expected.differences(step.replay(), step.kinds, step.rows.stands_for())
        if not inserts:
            return step
        step = insert(step, inserts)
    if not mkldnn:
        return plain
    raise MemongerError(
        "MKLDNN lays out tensors in another way by this schedule than without one, so that it "
        "rounds differently; how='marks' can plan this network"
    )
