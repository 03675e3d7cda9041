"""What is put into the training step of a schedule for it to give what MXNet gives, bit for bit.

That is where a gradient is added to a total, and where a tensor would be laid out in another way
(``layouts``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Collection, Iterable, Mapping, NamedTuple, Sequence, TypeVar

import numpy as np

from memonger.costs.layouts import AXES
from memonger.graph.forward import Entry
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import Kinds
from memonger.schedules.layouts import AFTER, BEFORE, HOLD, Insert
from memonger.schedules.nodes import INSERTED
from memonger.schedules.training_step import (
    Node,
    TrainingStep,
    nodes_of,
    rows_of,
    step_of,
)

#: The mean of each channel reads blocks. For an operator that cannot, such as ``max``, MXNet's
#: executor makes a plain copy and keeps it for as long as it lives (``StorageFallbackOpExecutor``,
#: ``src/executor/attach_op_execs_pass.cc``). It must be read: without MKLDNN, Pooling has to write.
MEAN = {"global_pool": "True", "kernel": "(1, 1)", "pool_type": "avg"}


class Total(NamedTuple):
    """An output of a row that is to be added to a total, the gradient of an argument."""

    row: int
    output: int
    argument: int


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
                totals.append(Total(row, k, a))
    return insert(step, (), totals) if totals else step


def insert(
    step: TrainingStep, inserts: Sequence[Insert], totals: Sequence[Total] = ()
) -> TrainingStep:
    """Make a training step with more operators.

    What is put in before a row waits for what ran before; what is put in behind it waits for
    nothing, and the next row that may wait, waits for it.
    """
    new = _Nodes(step)
    before = _by_row(one for one in inserts if one.where == BEFORE)
    behind = _by_row(one for one in inserts if one.where != BEFORE)
    summed = _by_row(totals)
    place: list[int] = []  # of each old row
    instead: dict[Entry, Entry] = {}
    chain: list[int] = []  # the last row that others wait for
    pending: list[int] = []  # what the next row that may wait, waits for
    ahead: dict[int, list[int]] = {}  # copies of totals before rows that wait for nothing
    sums: dict[int, tuple[int, int]] = {}  # of each argument: the variable of its total, the sum
    for row, node in enumerate(nodes_of(step.rows)):
        entries = [(place[source], k) for source, k in node.reads]
        read = [instead.get(entry, entry) for entry in entries]
        for one in before.get(row, ()):
            read[one.place] = new.put_in(one, read[one.place], chain)
        begun = []
        for total in summed.get(row, ()):
            tensor = step.kinds[row].tensors[total.output]
            variable = new.insert("null", {}, tensor, [], [])
            copy = new.insert("_copy", {}, tensor, [(variable, 0)], chain)
            begun.append((total, tensor, variable, copy))
        copies = [copy for _, _, _, copy in begun]
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
        for one in behind.get(row, ()):
            if one.where == AFTER:
                entry = here, one.place
                instead[entry] = put = new.put_in(one, entry, [])
            else:
                put = new.put_in(one, read[one.place], [here])
            pending.append(put[0])
        for total, tensor, variable, copy in begun:
            added = new.insert("_grad_add", {}, tensor, [(copy, 0), (here, total.output)], [])
            sums[total.argument] = variable, added
            pending.append(added)
    for a, (variable, added) in step.totals.items():
        entry = place[added], 0
        sums[a] = place[variable], instead.get(entry, entry)[0]
    moved = np.array([*place, -1], dtype=np.int32)
    rows = rows_of(new.nodes, moved[step.rows.first], moved[step.rows.latest])
    return step_of(step.parts, rows, new.kinds.all, sums)


Item = TypeVar("Item", Insert, Total)


def _by_row(items: Iterable[Item]) -> Mapping[int, list[Item]]:
    found: dict[int, list[Item]] = defaultdict(list)
    for item in items:
        found[item.row].append(item)
    return found


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
