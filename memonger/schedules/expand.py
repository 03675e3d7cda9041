"""The training step of a schedule, written out: every node that it runs, as one graph.

What MXNet's executor makes of a network by itself (``training``) is made here in the order that a
schedule says, with as many copies of an operator as it says: forward nodes, gradient nodes and
sums, each reading the copies that it should. `parts` finds out what all the training steps of a
network are made of; `unroll` puts one of them together: its nodes (``nodes``), and its graph
(``training_step``). That tells its memory; ``write`` makes the symbol that MXNet binds.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Iterable, Sequence

import numpy as np

from memonger.costs.replay import replay
from memonger.graph.arrays import Kinds, RowKind, ragged, starts
from memonger.graph.forward import FLOAT, Entry, no_collection
from memonger.graph.operators.layouts import AXES, MAKE
from memonger.graph.operators.recompute import truth
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.layouts import Expected
from memonger.schedules.nodes import (
    AWAITED,
    CHAINED,
    ITSELF,
    LOOSE,
    MASKED,
    READER,
    SCRATCH,
    Patterns,
    connect,
    line_up,
)
from memonger.schedules.schedule import Schedule, Workload, first_time, masked
from memonger.schedules.training_step import (
    Node,
    Parts,
    TrainingStep,
    insert,
    rows_of,
    step_of,
    with_totals,
)
from memonger.support.errors import MemongerError

#: Operators that write the outputs that ``list_outputs`` does not show, read or not.
WRITES_HIDDEN = frozenset(("BatchNorm", "Pooling"))

#: Its output 2, the gradient of the bias, is written by MKLDNN only if its output 1 is, that of the
#: weight (``src/operator/nn/mkldnn/mkldnn_fully_connected.cc``).
WITH_WEIGHT = "_backward_FullyConnected"

#: Gradients that MXNet never writes, those of labels: the user's array stays as it is.
UNWRITTEN = frozenset(
    (f"_backward_{op}", 1)
    for op in ("linear_reg_out", "logistic_reg_out", "mae_reg_out", "SoftmaxOutput")
)

#: Through this MXNet hands on the gradient of an output.
IDENTITY = "_identity_with_attr_like_rhs"

#: So often a training step is gone through for `layouts`; what is put in there changes little.
ROUNDS = 8


@no_collection()
def parts(work: Workload) -> Parts:
    """Find out what all training steps of a network are made of, whatever the schedule."""
    maker = _Maker(work)
    gradients = maker.gradients()
    left_out, unwritten = maker.left_out(gradients)
    kinds = Kinds(list({id(kind): kind for kind in work.training.kinds}.values()))
    nodes = maker.nodes(kinds)
    expected = None
    if any(node.op in MAKE for node in work.training.graph.nodes):
        expected = Expected(replay(work.training, np.zeros(maker.n, dtype=np.bool_)))
    patterns = maker.patterns(nodes, kinds.all)
    return Parts(work, patterns, tuple(kinds.all), gradients, left_out, unwritten, expected)


class _Maker:
    """What the `Parts` of a workload are made from."""

    def __init__(self, work: Workload) -> None:
        self.work, self.training, self.graph = work, work.training, work.training.graph
        self.ops, self.t = self.training.ops, self.training.tables
        self.n, self.rows = self.t.forward, len(self.t.variable)
        start = self.t.read_start.tolist()
        entries = list(zip(self.t.read_row.tolist(), self.t.read_output.tolist()))
        self.reads = [entries[first:stop] for first, stop in zip(start, start[1:])]
        for reads in self.reads[2 * self.n :]:
            # MXNet hands on the gradient of an output through an identity, which takes memory.
            for j, (row, _) in enumerate(reads):
                if row >= 2 * self.n and self.ops[row] == IDENTITY and self._owner(row) < 0:
                    reads[j] = self.reads[row][0]
        self.needed = [(x, k) for x in range(self.n) for k in self._needed(x)]

    def _owner(self, row: int) -> int:
        return int(self.training.owners[row - 2 * self.n])

    def _needed(self, x: int) -> list[int]:
        """List the outputs of an operator that must be read, for they are if it runs once."""
        t, node = self.t, self.graph.nodes[x]
        if node.is_variable:
            return []
        last = int(t.output_start[x + 1] - t.output_start[x])
        hidden = [] if node.op in WRITES_HIDDEN else range(max(1, len(self.graph.shown(x))), last)
        return [k for k in (0, *hidden) if t.reads[t.output_start[x] + k] > 0]

    def gradients(self) -> tuple[Entry | None, ...]:
        """Find where the gradient of each argument comes from, past copies of another's."""
        t, ops = self.t, self.ops
        found: list[Entry | None] = []
        for h, a in enumerate(self.training.wanted, t.outputs):
            row = int(t.head_row[h])
            entry = row, int(t.head_entry[h] - t.output_start[row])
            copied = self.training.names[row] == self.graph.nodes[a].name + "_copy"
            if ops[row] == "_copy" and copied:
                entry = self.reads[row][0]
            if ops[entry[0]] == IDENTITY:
                entry = self.reads[entry[0]][0]
            op = ops[entry[0]]
            nothing = op == "_zeros_without_dtype" or (op, entry[1]) in UNWRITTEN
            found.append(None if nothing else entry)
        return tuple(found)

    def left_out(self, gradients: Sequence[Entry | None]) -> tuple[frozenset[int], tuple[str, ...]]:
        """Find the arguments whose gradient is left out, and operators where it is read.

        Such are the biases of FullyConnected operators whose weight gets none (`WITH_WEIGHT`).
        """
        t, kinds = self.t, self.training.kinds
        found = set()
        for row in (
            r for r in t.walk_row.tolist() if r >= 2 * self.n and self.ops[r] == WITH_WEIGHT
        ):
            head, output = self.reads[row][0]
            given = kinds[head].tensors[output]
            known = given.dtype == FLOAT and len(given.shape) <= AXES
            if len(kinds[row].tensors) > 2 and known and t.reads[t.output_start[row] + 1] == 0:
                found.add((row, 2))
        read = sorted(found & set(chain(*self.reads)))
        return (
            frozenset(a for a, e in zip(self.training.wanted, gradients) if e in found),
            tuple(self.graph.nodes[self._owner(row)].name for row, _ in read),
        )

    def nodes(self, kinds: Kinds) -> list[Node]:
        """Make what nodes can be (`Patterns.rows`); their kinds are added."""
        n, nodes, tensors = self.n, self.graph.nodes, self.graph.tensors
        number = {id(kind): k for k, kind in enumerate(kinds.all)}
        given = [number[id(kind)] for kind in self.training.kinds]
        waits = self._waits()
        scratch, states = self._scratch()
        scratches = self.rows + n + len(self.needed)
        count = scratches + len(scratch)
        is_masked = [masked(node.op, node.attrs) for node in nodes]
        time = np.where(self.t.variable[:n], -1, 0).tolist()
        made = [Node(given[x], x, ITSELF, time[x], self.reads[x], []) for x in range(n)]
        for row in range(n, self.rows):
            once = [r < n and first_time(nodes[r].op, k) for r, k in self.reads[row]]
            reads = [(r + count * first, k) for (r, k), first in zip(self.reads[row], once)]
            # A masked operator is waited for as it ran for the first time.
            wait = [r + count * (r < n and is_masked[r]) for r in waits[row]]
            made.append(Node(given[row], row, ITSELF, -1, reads, wait))
        for x, node in enumerate(made[:n]):
            if is_masked[x]:  # it reads its mask instead of all but its data
                result, mask = tensors[x][:2]
                op = "elemwise_mul" if result.shape == mask.shape else "broadcast_mul"
                reads = [node.reads[0], (x + count, 1)]
                node = Node(kinds(op, {}, 2, (result,)), x, MASKED, 0, reads, [])
            elif x in states:
                reads = list(node.reads)
                for j, state in states[x].items():
                    reads[j] = scratches + state, 0
                node = node._replace(reads=reads)
            made.append(node)
        for place, (x, k) in enumerate(self.needed):
            kind = kinds("max", {}, 1, (Tensor((1,), tensors[x][k].dtype),))
            made.append(Node(kind, place, READER, -1, [(x, k)], []))
        for place, tensor in enumerate(scratch):
            made.append(Node(kinds("null", {}, 0, (tensor,)), place, SCRATCH, -1, [], []))
        return made

    def patterns(self, made: Sequence[Node], kinds: Sequence[RowKind]) -> Patterns:
        """Make arrays of them."""
        t, n, count = self.t, self.n, len(made)
        output_start = t.output_start[: n + 1].tolist()
        mark = [
            [
                output_start[at % count] + k + output_start[n] * (at >= count)
                for j, (at, k) in enumerate(node.reads)
                if at % count < n and not t.variable[at % count]
                if j not in kinds[node.kind].ignored
            ]
            for node in made
        ]
        events = self._events()
        mark += [[m for row in event for m in mark[row]] for event in events]
        small = partial(np.array, dtype=np.int32)
        mark_start, marks = map(small, ragged(mark))
        event_start, event_row = map(small, ragged(events))
        of, needed = small(self.needed).reshape(-1, 2).T
        heads = t.head_row[: t.outputs]
        outputs = t.head_entry[: t.outputs] - t.output_start[heads]
        rows = rows_of(made, small([]), small([]))
        own = (rows.what == ITSELF) | (rows.what == MASKED)
        chained = (rows.time == 0) | (np.diff(rows.wait_start) > 0)
        loose = np.where(np.diff(rows.read_start) > 0, AWAITED, LOOSE)
        variable = (rows.what == SCRATCH) | (own & t.variable[np.where(own, rows.source, 0)])
        variable[n : 2 * n] = variable[self.rows : self.rows + n] = False
        return Patterns(
            rows=rows,
            forward=n,
            readers=self.rows + n,
            target=np.where(own, rows.source, small(range(count))),
            link=small(np.where(chained, CHAINED, loose)),
            variable=small(np.flatnonzero(variable)),
            event_start=event_start,
            event_row=event_row,
            output_start=small(output_start),
            needed_start=small(starts(np.bincount(of, minlength=n))),
            needed=small(t.output_start[of] + needed),
            masked=rows.what[self.rows : self.rows + n] == MASKED,
            mark_start=mark_start,
            mark=marks,
            head_row=small(heads[~t.variable[heads]]),
            head_output=small(outputs[~t.variable[heads]]),
        )

    def _events(self) -> list[list[int]]:
        """List for each forward node the gradient rows that run in the event of its gradient.

        Sums run with the last of what they add, what reads nothing with the first that reads it.
        """
        place = {x: k for k, x in enumerate(self.work.gradients)}
        walk = [r for r in self.t.walk_row.tolist() if r >= 2 * self.n and not self.t.variable[r]]
        event: dict[int, int] = {}
        for row in sorted(walk):
            owner, read = self._owner(row), [r for r, _ in self.reads[row]]
            if owner >= 0:
                event[row] = place[owner]
            else:
                last = max(0, len(place) - 1)
                event[row] = max((event.get(r, 0) for r in read), default=last)
            for r in read:
                if r in event and not self.reads[r]:
                    event[r] = min(event[r], event[row])
        result: list[list[int]] = [[] for _ in range(self.n)]
        for row in walk if place else ():  # in the order in which MXNet would run them
            result[self.work.gradients[event[row]]].append(row)
        return result

    def _scratch(self) -> tuple[list[Tensor], dict[int, dict[int, int]]]:
        """Choose states for operators that run again: cuDNN's BatchNorm moves its own when it runs.

        Also which of them each operator reads, by the input.
        """
        known: dict[tuple[int, Tensor], int] = {}
        read: dict[int, dict[int, int]] = {}
        for x in self.work.operators:
            if self.work.once[x] or truth(self.graph.nodes[x].attrs.get("use_global_stats")):
                continue
            for j, (state, _) in enumerate(self.reads[x]):
                if state in self.graph.auxiliary:
                    key = (j, self.graph.tensors[state][0])
                    read.setdefault(x, {})[j] = known.setdefault(key, len(known))
        return [tensor for _, tensor in known], read

    def _waits(self) -> list[list[int]]:
        """List what gradient rows wait for by themselves, not what orders their sums."""
        waits: list[list[int]] = [[] for _ in range(self.rows)]
        for row, before in self.training.waits:
            owner = self._owner(row)
            itself = before < self.n or self._owner(before) == owner
            if owner >= 0 and (waits[row] or itself):
                waits[row].append(before)
        return waits


def unroll(
    made: Parts, schedule: Schedule, mkldnn: bool = True, added: Iterable[int] = ()
) -> TrainingStep:
    """Build the training step of a right schedule (``schedule.check``); no symbol is made.

    ``mkldnn`` says whether MKLDNN may compute it. If so, a schedule is refused (MemongerError) by
    which it would round differently; one that need not be is the same everywhere, so that it takes
    the memory that was predicted. ``added`` are the arguments whose gradient is added to a total
    (grad_req 'add'), as far as it can be.
    """
    p = made.patterns
    line = line_up(p, np.ascontiguousarray(schedule.events, dtype=np.int32))
    rows = connect(p, np.concatenate([p.variable, line]))
    step = with_totals(step_of(made, rows, made.kinds, {}), frozenset(added))
    try:
        return step if made.expected is None else _laid_out(step, made.expected)
    except MemongerError:
        if mkldnn:
            raise
        return step


def _laid_out(step: TrainingStep, expected: Expected) -> TrainingStep:
    """Insert what it takes for the layouts of a training step to be as expected."""
    for _ in range(ROUNDS):
        inserts = expected.differences(step.replay(), step.stands_for)
        if not inserts:
            return step
        step = insert(step, inserts)
    raise MemongerError(
        "MKLDNN lays out tensors in another way by this schedule than without one, so that it "
        "rounds differently; how='marks' can plan this network"
    )
