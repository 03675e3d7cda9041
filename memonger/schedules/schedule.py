"""Schedules: a whole training step in an order of our own, results computed as often as it pays.

Each operator, and each gradient, reads the latest results that it needs. What is saved follows: a
result is held as long as something will read it before it is computed again, and no longer.

A schedule must not change three things, for then results would not be bit-identical: what reads or
moves the same auxiliary state runs in MXNet's order, which depends on the gradients that are
wanted; the random draws of an operator happen once; and the outputs of the network are those of the
first time (they are held to the end).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Iterable, Sequence

import numpy as np

from memonger.graph.arrays import list_reads
from memonger.graph.operators.recorded import ASYNCHRONOUS, NOT_INTO_ARRAYS
from memonger.graph.training import NO_NODE, TrainingGraph
from memonger.support.errors import MemongerError
from memonger.support.types import Bools, Int32s, Int64s

#: Outputs that a gradient reads from the first time that the operator ran, however often it runs:
#: the mask of a Dropout, and statistics that are small, so that nothing is run again for them.
FIRST_TIME = {"BatchNorm": frozenset((1, 2)), "Dropout": frozenset((1,))}


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one training step runs, in order."""

    #: ``x``: operator x (a node of the ForwardGraph) runs, for the first time or again;
    #: ``~x`` (negative): the gradient of operator x runs.
    operations: Int32s

    @staticmethod
    def of(operations: Iterable[int]) -> Schedule:
        """Make a schedule of these operations."""
        return Schedule(np.fromiter(operations, dtype=np.int32))

    @property
    def forwards(self) -> Int32s:
        """The operators that run, in order."""
        return self.operations[self.operations >= 0]

    def recomputed(self, nodes: int) -> Int64s:
        """Count how often each of so many nodes runs again."""
        return np.maximum(np.bincount(self.forwards, minlength=nodes) - 1, 0)


@dataclass(frozen=True, eq=False)
class Workload:
    """What a training step must run, without operators that are merged or that nobody needs."""

    training: TrainingGraph
    operators: tuple[int, ...]  # in the order in which they run for the first time
    gradients: tuple[int, ...]  # the operators whose gradient runs, in that order
    inputs: tuple[tuple[int, ...], ...]  # of each node the operators that it reads, each once
    #: Of each node the operators whose latest result its gradient reads, each once. What it reads
    #: of the first time (`FIRST_TIME`) is held until then, whatever the schedule.
    reads: tuple[tuple[int, ...], ...]
    once: Bools  # whether each node must not run again; Dropout may, as its mask is kept
    forced: Bools  # whether each node is to run again before a gradient reads its result


def workload(
    training: TrainingGraph, kept: Sequence[int] = (), forced: Sequence[int] = ()
) -> Workload:
    """Find what a training step must run.

    The nodes ``kept`` must not run again, and ``forced`` are to, where they may.
    A network whose gradients cannot all be written out is refused (MemongerError).
    """
    nodes, t = training.graph.nodes, training.arrays
    n, variable = t.forward, t.variable
    refused = {x: why for x, why in training.unobserved.items() if nodes[x].op not in ASYNCHRONOUS}
    text = "MXNet takes no array for its output; use mx.np.concatenate"
    refused.update({x: text for x, node in enumerate(nodes) if node.op in NOT_INTO_ARRAYS})
    text = "it holds a graph of its own"
    refused.update({x: text for x, node in enumerate(nodes) if node.holds_graph})
    for x, why in refused.items():  # of those that are asynchronous, autograd calls the Python code
        raise MemongerError(
            f"node {nodes[x].name!r} ({nodes[x].op}) cannot be part of a schedule: {why}; "
            "how='marks' can plan this network"
        )
    operators = tuple(int(x) for x in t.first if not variable[x])
    if not operators:
        raise MemongerError("the network has no operators, so there is nothing to schedule")

    reads = list_reads(t)

    def read(rows: Sequence[int]) -> tuple[int, ...]:
        """List the operators whose latest result these rows read, each once."""
        entries = (entry for row in rows for entry in reads[row])
        latest = (x for x, k in entries if x < n and k not in FIRST_TIME.get(nodes[x].op, ()))
        return tuple(x for x in dict.fromkeys(latest) if not variable[x])

    rows = np.unique(t.walk_row[t.walk_row >= 2 * n])  # in the order they were made
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, x in zip(rows.tolist(), training.origin[rows].tolist()):
        rows_of[x].append(row)
    rows_of.pop(-1, None)
    once = np.zeros(n, dtype=np.bool_)
    for x, node in enumerate(nodes):
        if node.op == "RNN":
            # MKLDNN's remembers where its inputs were, and its gradient reads them there
            # (src/operator/nn/mkldnn/mkldnn_rnn.cc).
            once[[x, *(training.same[a] for a, _ in node.inputs)]] = True
        elif not node.is_variable and node.op != "Dropout":
            once[x] |= training.graph.why_kept(x) is not None
    once[list(kept)] = True
    runs_again = np.isin(np.arange(n), [training.same[x] for x in forced]) & ~once
    runs_again[[x for x, _ in training.graph.heads]] = False
    return Workload(
        training=training,
        operators=operators,
        gradients=_order_gradients(training, tuple(rows_of)),
        inputs=tuple(read([x]) for x in range(n)),
        reads=tuple(read(rows_of.get(x, [])) for x in range(n)),
        once=once,
        forced=runs_again,
    )


def _order_gradients(training: TrainingGraph, operators: tuple[int, ...]) -> tuple[int, ...]:
    """Put the gradients of operators into an order in which MXNet's results come out.

    They keep the order that they have (the last operator's comes first), unless gradients read or
    move the same auxiliary state. Those run in MXNet's order: depth first, from the gradient of the
    first argument that wants one (``nnvm::DFSVisit``).
    """
    states, t = training.graph.moved_states, training.arrays
    if not states:
        return operators
    unit = training.origin.copy()  # of a row: the operator whose gradient it is part of, or
    alone = unit == NO_NODE  # itself, where it is a sum of gradients
    unit[alone] = t.forward + np.flatnonzero(alone)
    walk = [row for row in t.walk_row.tolist() if row >= 2 * t.forward]
    before: dict[int, set[int]] = {int(unit[row]): set() for row in walk}
    waits: dict[int, list[int]] = defaultdict(list)
    for row, source in training.waits:
        waits[row].append(source)
    latest: dict[int, int] = {}  # state -> the latest row that reads or moves it
    for row in walk:
        reads = t.read_row[t.read_start[row] : t.read_start[row + 1]].tolist()
        shared = states.intersection(reads)
        sources = (*reads, *waits[row], *(latest[a] for a in shared if a in latest))
        before[int(unit[row])].update(int(unit[r]) for r in sources if r >= 2 * t.forward)
        latest.update(dict.fromkeys(shared, row))
    after: dict[int, list[int]] = defaultdict(list)
    for x, others in before.items():
        others.discard(x)
        for other in others:
            after[other].append(x)
    place = {x: k for k, x in enumerate(operators)}  # sums run as soon as they can
    ready = [(place.get(x, -1), x) for x in before if not before[x]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        x = heapq.heappop(ready)[1]
        if x in place:
            order.append(x)
        for reader in after[x]:
            before[reader].discard(x)
            if not before[reader]:
                heapq.heappush(ready, (place.get(reader, -1), reader))
    if len(order) < len(operators):
        names = ", ".join(sorted(repr(training.graph.nodes[a].name) for a in latest))
        raise MemongerError(
            f"no schedule moves the auxiliary states {names} in MXNet's order; how='marks' can "
            "plan this network"
        )
    return tuple(order)


def check(work: Workload, schedule: Schedule) -> None:
    """Make sure that a schedule runs all that must run, in its turn (MemongerError)."""
    order, runs = schedule.operations.tolist(), schedule.forwards.tolist()
    before = order[: next((k for k, x in enumerate(order) if x < 0), len(order))]
    recomputed = [x for x, times in Counter(runs).items() if times > 1]
    if (
        tuple(dict.fromkeys(runs)) != work.operators
        or len(set(before)) < len(work.operators)
        or tuple(~x for x in order if x < 0) != work.gradients
        or work.once[recomputed].any()
    ):
        raise MemongerError(
            "this schedule does not run what the network must run, in its order; plan it anew"
        )


def plain(work: Workload) -> Schedule:
    """Make the schedule without recomputation: all operators, then all gradients."""
    return Schedule.of([*work.operators, *(~x for x in work.gradients)])


def adapt(work: Workload, schedule: Schedule) -> Schedule:
    """Make a schedule of the same network for other gradients, or another order of them.

    What is computed again for a gradient is so right before it. What is computed again for none of
    them is left out.
    """
    operations, ordered = schedule.operations.tolist(), set(work.gradients)
    latest: dict[int, int] = {}  # operator -> where it runs
    read: list[list[int]] = []  # of each operation: the runs whose results it reads
    group_of: dict[int, list[int]] = {}  # gradient -> the runs between the one before it and it
    group: list[int] = []
    for k, x in enumerate(operations):
        reads = work.reads[~x] if x < 0 else work.inputs[x]
        read.append([latest[y] for y in reads if y in latest])
        if x >= 0:
            latest[x] = k
            group.append(k)
        elif ~x in ordered:
            group_of[~x] = [*group, *read[k]]
            group = []
    order: list[int] = []
    done: set[int] = set()

    def run(needed: list[int]) -> None:
        """Run these, and what they read, in the order that they had."""
        found: set[int] = set()
        while needed:
            k = needed.pop()
            if k not in found and k not in done:
                found.add(k)
                needed += read[k]
        order.extend(operations[k] for k in sorted(found))
        done.update(found)

    run([*range(next((k for k, x in enumerate(operations) if x < 0), len(operations)))])
    others: list[int] = []  # gradients that the schedule does not have: they run before the next
    for gradient in work.gradients:
        others.append(~gradient)
        if gradient in group_of:
            run(group_of[gradient])
            order += others
            others = []
    return _without_unread(work, [*order, *others])


def _without_unread(work: Workload, order: Sequence[int]) -> Schedule:
    """Make a schedule of these operations, but for what is computed again and never read."""
    backwards = list(enumerate(order))[::-1]
    first = {x: k for k, x in backwards}
    needed: set[int] = set()
    kept: list[int] = []
    for k, x in backwards:
        if first[x] == k or x in needed:
            kept.append(x)
            needed.discard(x)
            needed.update(work.reads[~x] if x < 0 else work.inputs[x])
    return Schedule.of(kept[::-1])
