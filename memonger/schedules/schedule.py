"""Schedules: the order of all operators and gradients of a training step, with recomputation.

An operator or a gradient reads the latest result of each operator that it needs. A result is saved
until its last reader before it is computed again.

A schedule must not change three things, or results would not be bit-identical. Operators that read
or update the same auxiliary state run in MXNet's order, which depends on the requested gradients.
An operator draws random numbers only once. The outputs of the network are the first results (they
are saved to the end).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Iterable, Sequence

import numpy as np

from memonger.graph.arrays import list_reads
from memonger.graph.operators.recompute import SYNCHRONIZED, is_restored
from memonger.graph.operators.recorded import ASYNCHRONOUS, NOT_INTO_ARRAYS
from memonger.graph.training import NO_NODE, TrainingGraph
from memonger.support.errors import MemongerError
from memonger.support.types import Bools, Int32s, Int64s

#: Operator -> outputs that its gradient reads from its first run, even if it is recomputed: the
#: mask of a Dropout, and small statistics, for which nothing needs to be recomputed.
FIRST_TIME = {
    "BatchNorm": frozenset((1, 2)),
    "Dropout": frozenset((1,)),
    SYNCHRONIZED: frozenset((1, 2)),
}


@dataclass(frozen=True, eq=False)
class Schedule:
    """The operations of one training step, in order."""

    #: ``x`` >= 0: operator x (a node of the ForwardGraph) runs, for the first time or again;
    #: ``~x`` < 0: the gradient of operator x runs.
    operations: Int32s

    @staticmethod
    def of(operations: Iterable[int]) -> Schedule:
        """Make a schedule from these operations."""
        return Schedule(np.fromiter(operations, dtype=np.int32))

    @property
    def forwards(self) -> Int32s:
        """The operators that run, in order."""
        return self.operations[self.operations >= 0]

    def recomputed(self, nodes: int) -> Int64s:
        """Return how often each of ``nodes`` nodes is recomputed: (nodes,) of int64."""
        return np.maximum(np.bincount(self.forwards, minlength=nodes) - 1, 0)


@dataclass(frozen=True, eq=False)
class Workload:
    """The operators and gradients that a training step must run, without merged or unread ones."""

    training: TrainingGraph
    operators: tuple[int, ...]  # in the order in which they run for the first time
    gradients: tuple[int, ...]  # the operators whose gradient runs, in order
    inputs: tuple[tuple[int, ...], ...]  # of each node: the distinct operators that it reads
    #: Of each node: the distinct operators whose latest result its gradient reads, without results
    #: of their first run (`FIRST_TIME`), which every schedule saves.
    reads: tuple[tuple[int, ...], ...]
    #: (nodes,): whether each node may be recomputed. Variables may not; what is restored may.
    recomputable: Bools
    forced: Bools  # (nodes,): whether a node must be recomputed before a gradient reads its result


def why_unscheduled(training: TrainingGraph) -> str:
    """Return why the operators of a network cannot be part of a schedule; '' if they can."""
    nodes, t = training.graph.nodes, training.arrays
    # The gradients of asynchronous operators are Python code, which autograd calls.
    refused = {x: why for x, why in training.unobserved.items() if nodes[x].op not in ASYNCHRONOUS}
    text = "MXNet takes no array for its output; use mx.np.concatenate"
    refused.update({x: text for x, node in enumerate(nodes) if node.op in NOT_INTO_ARRAYS})
    text = "it holds a graph of its own"
    refused.update({x: text for x, node in enumerate(nodes) if node.holds_graph})
    for x, why in refused.items():
        return (
            f"node {nodes[x].name!r} ({nodes[x].op}) cannot be part of a schedule: {why}; "
            "how='marks' can plan this network"
        )
    has_operators = bool((~t.variable[t.first]).any())
    return "" if has_operators else "the network has no operators, so it has no schedule"


def workload(
    training: TrainingGraph, kept: Sequence[int] = (), forced: Sequence[int] = ()
) -> Workload:
    """Find the operators and gradients that a training step must run.

    Parameters
    ----------
    training : TrainingGraph
        The training graph of the network.
    kept, forced : sequence of int
        Nodes that must not be recomputed, and nodes that must be if they may.

    Raises
    ------
    MemongerError
        If no schedule can run the network (`why_unscheduled`).
    """
    why_not = why_unscheduled(training)
    if why_not:
        raise MemongerError(why_not)
    nodes, t = training.graph.nodes, training.arrays
    n, variable = t.forward_nodes, t.variable
    operators = tuple(int(x) for x in t.first if not variable[x])
    reads = list_reads(t.read_start, t.read_row, t.read_output)

    def read(rows: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct operators whose latest result these rows read."""
        entries = (entry for row in rows for entry in reads[row])
        latest = (x for x, k in entries if x < n and k not in FIRST_TIME.get(nodes[x].op, ()))
        return tuple(x for x in dict.fromkeys(latest) if not variable[x])

    rows = np.unique(t.walk_row[t.walk_row >= 2 * n])  # in the order of their numbers
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, x in zip(rows.tolist(), training.origin[rows].tolist()):
        rows_of[x].append(row)
    rows_of.pop(-1, None)
    recomputable = ~variable[:n]
    for x, node in enumerate(nodes):
        if node.op == "RNN":
            # MKLDNN's RNN stores the addresses of its inputs, and its gradient reads there
            # (src/operator/nn/mkldnn/mkldnn_rnn.cc).
            recomputable[[x, *(training.same[a] for a, _ in node.inputs)]] = False
        elif not node.is_variable and not is_restored(node.op, node.attrs):
            recomputable[x] &= training.graph.why_kept(x) is None
    recomputable[list(kept)] = False
    runs_again = np.isin(np.arange(n), [training.same[x] for x in forced]) & recomputable
    runs_again[[x for x, _ in training.graph.heads]] = False
    return Workload(
        training=training,
        operators=operators,
        gradients=_order_gradients(training, tuple(rows_of)),
        inputs=tuple(read([x]) for x in range(n)),
        reads=tuple(read(rows_of.get(x, [])) for x in range(n)),
        recomputable=recomputable,
        forced=runs_again,
    )


def _order_gradients(training: TrainingGraph, operators: tuple[int, ...]) -> tuple[int, ...]:
    """Return the gradients of operators in an order that gives MXNet's results.

    The given order (the gradient of the last operator first) is kept, unless gradients read or
    update the same auxiliary state. Those run in MXNet's order: depth first, from the gradient of
    the first argument that has one (``nnvm::DFSVisit``).
    """
    states, t = training.graph.moved_states, training.arrays
    if not states:
        return operators
    # The unit of a row: the operator whose gradient it is part of, or a unit of its own if it is a
    # sum of gradients.
    unit = training.origin.copy()
    alone = unit == NO_NODE
    unit[alone] = t.forward_nodes + np.flatnonzero(alone)
    walk = [row for row in t.walk_row.tolist() if row >= 2 * t.forward_nodes]
    before: dict[int, set[int]] = {int(unit[row]): set() for row in walk}
    waits: dict[int, list[int]] = defaultdict(list)
    for row, source in training.waits:
        waits[row].append(source)
    latest: dict[int, int] = {}  # state -> the latest row that reads or updates it
    for row in walk:
        reads = t.read_row[t.read_start[row] : t.read_start[row + 1]].tolist()
        shared = states.intersection(reads)
        sources = (*reads, *waits[row], *(latest[a] for a in shared if a in latest))
        before[int(unit[row])].update(int(unit[r]) for r in sources if r >= 2 * t.forward_nodes)
        latest.update(dict.fromkeys(shared, row))
    after: dict[int, list[int]] = defaultdict(list)
    for x, others in before.items():
        others.discard(x)
        for other in others:
            after[other].append(x)
    place = {x: k for k, x in enumerate(operators)}  # sums are not in it, and run first
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
            f"no schedule can update the auxiliary states {names} in MXNet's order; how='marks' "
            "can plan this network"
        )
    return tuple(order)


def check(work: Workload, schedule: Schedule) -> None:
    """Raise MemongerError unless a schedule runs all operators and gradients in a valid order."""
    order, runs = schedule.operations.tolist(), schedule.forwards.tolist()
    before = order[: next((k for k, x in enumerate(order) if x < 0), len(order))]
    recomputed = [x for x, times in Counter(runs).items() if times > 1]
    if (
        tuple(dict.fromkeys(runs)) != work.operators
        or len(set(before)) < len(work.operators)
        or tuple(~x for x in order if x < 0) != work.gradients
        or not work.recomputable[recomputed].all()
    ):
        raise MemongerError(
            "invalid schedule: every operator must run, and gradients must keep MXNet's order; "
            "plan again"
        )


def plain(work: Workload) -> Schedule:
    """Make the schedule without recomputation: all operators, then all gradients."""
    return Schedule.of([*work.operators, *(~x for x in work.gradients)])


def adapt(work: Workload, schedule: Schedule) -> Schedule:
    """Adapt a schedule to other gradients of the same network, or to another order of them.

    Results that are recomputed for a gradient are recomputed right before it. Recomputation that no
    gradient needs is left out.
    """
    operations, ordered = schedule.operations.tolist(), set(work.gradients)
    latest: dict[int, int] = {}  # operator -> the position of its latest run
    read: list[list[int]] = []  # of each operation: the positions of the runs that it reads
    group_of: dict[int, list[int]] = {}  # gradient -> the runs after the gradient before it
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
        """Add these runs, and those that they read, in their old order."""
        found: set[int] = set()
        while needed:
            k = needed.pop()
            if k not in found and k not in done:
                found.add(k)
                needed += read[k]
        order.extend(operations[k] for k in sorted(found))
        done.update(found)

    run([*range(next((k for k, x in enumerate(operations) if x < 0), len(operations)))])
    others: list[int] = []  # gradients that the schedule lacks run with the next one that it has
    for gradient in work.gradients:
        others.append(~gradient)
        if gradient in group_of:
            run(group_of[gradient])
            order += others
            others = []
    return _without_unread(work, [*order, *others])


def _without_unread(work: Workload, order: Sequence[int]) -> Schedule:
    """Make a schedule from these operations, without recomputation that is never read."""
    backwards = list(enumerate(order))[::-1]
    first = {x: k for k, x in backwards}
    needed: set[int] = set()
    used: list[int] = []
    for k, x in backwards:
        if first[x] == k or x in needed:
            used.append(x)
            needed.discard(x)
            needed.update(work.reads[~x] if x < 0 else work.inputs[x])
    return Schedule.of(used[::-1])
