"""Schedules: a whole training step in an order of our own, results computed as often as it pays.

A schedule says everything that one training step runs: operators of the network, any number of
times, and their gradients. Each reads the latest result of what it needs. What is kept follows: a
result is held for as long as something will read it before it is computed again, and no longer.
Where an older result is still held there is no reason to compute it again.

Three things are not the schedule's to choose, for then gradients would not be bit-identical:
gradients come in MXNet's order; the random draws of an operator happen once; and the
outputs of the network are those of the first time (they are held to the end).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Mapping

import numpy as np

from memonger.graph.operators.recompute import why_kept
from memonger.graph.training import TrainingGraph
from memonger.support.errors import MemongerError

#: Outputs that a gradient reads from the first time that the operator ran, however often it runs:
#: the mask of a Dropout, and statistics that are small, so that nothing is run again for them.
FIRST_TIME = {"BatchNorm": frozenset((1, 2)), "Dropout": frozenset((1,))}

_PYTHON = "its gradient is Python code, which no symbol can hold"
#: Operators that no symbol can be loaded with whose gradient is written out.
UNWRITABLE = {
    "Custom": _PYTHON,
    "_NDArray": _PYTHON,
    "_Native": _PYTHON,
    "scatter_nd": "MXNet does not find its forward operator again (infer_graph_attr_pass.cc)",
}


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one training step runs, in order.

    Attributes
    ----------
    events : np.ndarray of int32
        ``x``: operator x (a node of the ForwardGraph) runs, for the first time or again.
        ``~x`` (negative): the gradient of operator x runs.
    """

    events: np.ndarray

    @staticmethod
    def of(events: Iterable[int]) -> Schedule:
        """Make a schedule of these events."""
        return Schedule(np.fromiter(events, dtype=np.int32))

    @property
    def forwards(self) -> np.ndarray:
        """The operators that run, in order."""
        return self.events[self.events >= 0]


@dataclass(frozen=True, eq=False)
class Workload:
    """What one training step of a network must run.

    That is without operators that MXNet merges with an equal one, and those that no output needs.
    """

    training: TrainingGraph
    operators: tuple[int, ...]  # in the order in which they run for the first time
    gradients: tuple[int, ...]  # the operators whose gradient runs, in that order
    inputs: tuple[tuple[int, ...], ...]  # of each node the operators that it reads, each once
    #: Of each node the operators whose latest result its gradient reads, each once. What it reads
    #: of the first time (`FIRST_TIME`) is held until then, whatever the schedule.
    reads: tuple[tuple[int, ...], ...]
    once: np.ndarray  # bool: whether each node must not run again; Dropout may, as its mask is kept


def first_time(op: str, output: int) -> bool:
    """Tell whether a gradient reads this output from the first time that the operator ran."""
    return output in FIRST_TIME.get(op, ())


def masked(op: str, attrs: Mapping[str, str]) -> bool:
    """Tell whether an operator that runs again is its input times the mask of the first time."""
    return op == "Dropout" and float(attrs.get("p", 0.5)) > 0


def workload(training: TrainingGraph, until: int | None = None) -> Workload:
    """Find out what there is to schedule, if all gradients can be written out (MemongerError).

    The nodes from ``until`` on must not run again.
    """
    nodes, t = training.graph.nodes, training.tables
    n, variable = t.forward, t.variable
    unwritable = {x: UNWRITABLE[n.op] for x, n in enumerate(nodes) if n.op in UNWRITABLE}
    for x, why in {**training.unobserved, **unwritable}.items():
        raise MemongerError(
            f"node {nodes[x].name!r} ({nodes[x].op}) cannot be part of a schedule: {why}; "
            "how='marks' can plan this network"
        )
    operators = tuple(int(x) for x in t.first if not variable[x])
    if not operators:
        raise MemongerError("the network has no operators, so there is nothing to schedule")
    rows = np.unique(t.walk_row[t.walk_row >= 2 * n])  # in the order they were made
    owners = training.owners[rows - 2 * n].tolist()

    def read(row: int) -> list[int]:
        read = slice(t.read_start[row], t.read_start[row + 1])
        return [
            x
            for x, k in zip(t.read_row[read].tolist(), t.read_output[read].tolist())
            if x < n and not variable[x] and not first_time(nodes[x].op, k)
        ]

    reads: list[list[int]] = [[] for _ in range(n)]
    for row, x in zip(rows.tolist(), owners):
        if x >= 0:
            reads[x] += read(row)
    once = np.zeros(n, dtype=np.bool_)
    for x, node in enumerate(nodes):
        if node.op == "RNN":
            # MKLDNN's remembers where its inputs were, and its gradient reads them there
            # (src/operator/nn/mkldnn/mkldnn_rnn.cc).
            once[[x, *(training.same[a] for a, _ in node.inputs)]] = True
        elif not node.is_variable and node.op != "Dropout":
            once[x] |= why_kept(node.op, node.attrs) is not None
    once[n if until is None else until :] = True
    return Workload(
        training=training,
        operators=operators,
        gradients=tuple(dict.fromkeys(x for x in owners if x >= 0)),
        inputs=tuple(tuple(dict.fromkeys(read(x))) for x in range(n)),
        reads=tuple(tuple(dict.fromkeys(each)) for each in reads),
        once=once,
    )


def check(work: Workload, schedule: Schedule) -> None:
    """Make sure that a schedule runs all that must run, in its turn (MemongerError).

    Then all that an event reads is there: operators run for the first time in the network's order.
    """
    events, runs = schedule.events.tolist(), schedule.forwards.tolist()
    before = events[: next((k for k, event in enumerate(events) if event < 0), len(events))]
    if tuple(dict.fromkeys(runs)) != work.operators:
        raise MemongerError("schedule: not every operator runs for the first time in its turn")
    if len(set(before)) < len(work.operators):
        raise MemongerError("schedule: gradients before all operators have run")
    if tuple(~event for event in events if event < 0) != work.gradients:
        raise MemongerError("schedule: the gradients are not those of the network in their order")
    for x, times in Counter(runs).items():
        if times > 1 and work.once[x]:
            name = work.training.graph.nodes[x].name
            raise MemongerError(f"schedule: {name!r} must not run again")


def plain(work: Workload) -> Schedule:
    """Make the schedule without recomputation: all operators, then all gradients."""
    return Schedule.of([*work.operators, *(~x for x in work.gradients)])


def of_marks(work: Workload, mask: np.ndarray, held: Iterable[int] = ()) -> Schedule:
    """Make the schedule that does as MXNet does with these operators (bool) marked.

    The gradient of a marked operator runs what it reads of what has not been computed again; that
    of a kept operator runs nothing. ``held`` are nodes whose result is kept in a copy.
    """
    events = list(work.operators)
    recomputed = np.asarray(mask, dtype=np.bool_) & ~work.once
    missing = recomputed.copy()
    missing[list(held)] = False
    for x in work.gradients:
        if recomputed[x]:
            run_again(work, work.reads[x], missing, events)
        events.append(~x)
    return Schedule.of(events)


def adapt(work: Workload, schedule: Schedule) -> Schedule:
    """Make a schedule of the same network for other gradients, or other shapes.

    Gradients that are not asked for are left out, and what is computed again for them alone; those
    that are missing run in their turn.
    """
    place = {x: k for k, x in enumerate(work.gradients)}
    events: list[int] = []
    following = 0  # gradient
    for event in (*schedule.events.tolist(), *(~x for x in work.gradients[-1:])):
        if event >= 0:
            events.append(event)
            continue
        stop = place.get(~event, -1) + 1
        events += [~x for x in work.gradients[following:stop]]
        following = max(following, stop)
    first = {x: k for k, x in reversed(list(enumerate(events)))}
    needed: set[int] = set()
    kept: list[int] = []
    for k, x in reversed(list(enumerate(events))):
        if first[x] == k or x in needed:
            kept.append(x)
            needed.discard(x)
            needed.update(work.reads[~x] if x < 0 else work.inputs[x])
    return Schedule.of(reversed(kept))


def run_again(
    work: Workload, wanted: Iterable[int], missing: np.ndarray, events: list[int]
) -> None:
    """Append what must run to have some results; ``missing`` (bool, of each node) changes too."""
    stack = [x for x in wanted if missing[x]]
    found = set(stack)
    while stack:
        for y in work.inputs[stack.pop()]:
            if missing[y] and y not in found:
                found.add(y)
                stack.append(y)
    for x in sorted(found):
        missing[x] = False
        events.append(x)
