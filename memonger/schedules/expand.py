"""The training step of a schedule, written out: every node that it runs, as one graph.

What MXNet's executor makes of a network by itself (``graph.training``) is made here in the order
that a schedule says, with as many copies of an operator. `parts` finds out what all the training
steps of a network are made of; `unroll` puts one of them together.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from functools import partial
from itertools import chain
from typing import Collection, Sequence

import numpy as np

from memonger.costs.replay import replay
from memonger.graph.arrays import columns
from memonger.graph.forward import FLOAT, Entry, no_collection
from memonger.graph.operators.layouts import AXES, PRODUCES_BLOCKED
from memonger.graph.operators.recompute import truth
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.layouts import Expected, refusal
from memonger.schedules.nodes import AWAITED, CHAINED, LOOSE, NodeVariants, connect, line_up
from memonger.schedules.schedule import FIRST_TIME, Schedule, Workload
from memonger.schedules.training_step import Node, Nodes, Parts, TrainingStep, insert, step_of
from memonger.support.errors import MemongerError

log = logging.getLogger("memonger")

#: Operators that write the outputs that ``list_outputs`` does not show, read or not.
WRITES_HIDDEN = frozenset(("BatchNorm", "Pooling"))

#: Gradients that are zero, or that MXNet never writes (of labels).
UNWRITTEN = {("_zeros_without_dtype", 0)}
UNWRITTEN |= {(f"_backward_{op}_reg_out", 1) for op in ("linear", "logistic", "mae")}
UNWRITTEN |= {("_backward_SoftmaxOutput", 1)}

ROUNDS = 8  # the most of putting in what layouts need: each changes those of what follows


@no_collection()
def parts(work: Workload, added: Collection[int] = (), mkldnn: bool = True) -> Parts:
    """Find out what all training steps of a network are made of, whatever the schedule.

    ``added`` are the arguments with grad_req 'add'; ``mkldnn``: whether MKLDNN may compute it.
    """
    made = _Maker(work, mkldnn)
    made.add_nodes()
    operations = made.operations()
    gradients = made.add_totals(added, operations)
    expected, training = None, work.training
    if any(node.op in PRODUCES_BLOCKED for node in training.graph.nodes):
        expected = Expected(replay(training, np.zeros(training.arrays.forward, dtype=np.bool_)))
    variants, signatures = made.variants(operations), tuple(made.nodes.signatures.all)
    about = tuple(gradients), made.totals, frozenset(made.left_out)
    return Parts(work, mkldnn, variants, signatures, *about, expected)


class _Maker:
    """What the `Parts` of a workload are made from."""

    def __init__(self, work: Workload, mkldnn: bool) -> None:
        self.work, self.training, self.graph = work, work.training, work.training.graph
        self.ops, self.t = self.training.ops, self.training.arrays
        self.n = self.t.forward
        self.owner = [-1] * (2 * self.n) + self.training.owners.tolist()
        start = self.t.read_start.tolist()
        entries = list(zip(self.t.read_row.tolist(), self.t.read_output.tolist()))
        self.reads = [entries[first:stop] for first, stop in zip(start, start[1:])]
        self.walk = [r for r in self.t.walk_row.tolist() if r >= 2 * self.n]
        # MXNet hands on the gradient of an output through an identity, which takes memory.
        identity = "_identity_with_attr_like_rhs"
        given = (r for r in self.walk if self.ops[r] == identity and self.owner[r] < 0)
        self.handed_on = {(row, 0): self.reads[row][0] for row in given}
        for reads in self.reads[2 * self.n :]:
            reads[:] = [self.handed_on.get(entry, entry) for entry in reads]
        # A Dropout that is recomputed is its input times the mask of the first time.
        nodes = self.graph.nodes
        self.masked = [n.op == "Dropout" and float(n.attrs.get("p", 0.5)) > 0 for n in nodes]
        self.nodes = Nodes({id(each): each for each in self.training.signatures}.values())
        self.totals: dict[int, int] = {}
        self.mkldnn = mkldnn
        self.left_out: set[int] = set()

    def needed(self) -> list[Entry]:
        """List the outputs of operators that must be read, for they are if each runs once."""
        graph, t, found = self.graph, self.t, []
        for x in graph.operators:
            outputs, shown = range(len(graph.tensors[x])), max(1, len(graph.output_names[x]))
            hidden = () if graph.nodes[x].op in WRITES_HIDDEN else outputs[shown:]
            found += [(x, k) for k in (0, *hidden) if t.reads[t.output_start[x] + k] > 0]
        return found

    def gradients(self) -> list[Entry | None]:
        """Find where the gradient of each argument comes from, past copies; None for zeros."""
        t, found = self.t, []
        left_out = self.unwritten_biases() if self.mkldnn else set()
        rows = t.head_row[t.outputs :]
        outputs = t.head_entry[t.outputs :] - t.output_start[rows]
        for a, entry in zip(self.training.wanted, zip(rows.tolist(), outputs.tolist())):
            name = self.graph.nodes[a].name
            if self.training.names[entry[0]] == name + "_copy":
                entry = self.reads[entry[0]][0]
            entry = self.handed_on.get(entry, entry)
            if entry in left_out:
                self.left_out.add(a)
                log.warning(
                    "%r gets no gradient, for the weight it belongs to gets none: MXNet leaves it "
                    "out on the CPU, with or without a schedule, unless MXNET_MKLDNN_ENABLED=0",
                    name,
                )
            found.append(None if (self.ops[entry[0]], entry[1]) in UNWRITTEN else entry)
        return found

    def unwritten_biases(self) -> set[Entry]:
        """Find gradients of biases that MKLDNN does not write, for their weights get none."""
        # src/operator/nn/mkldnn/mkldnn_fully_connected.cc
        found = set()
        for row in (r for r in self.walk if self.ops[r] == "_backward_FullyConnected"):
            head, output = self.reads[row][0]
            given = self.training.signatures[head].tensors[output]
            known = given.dtype == FLOAT and len(given.shape) <= AXES
            _, weight, *bias = self.t.reads[slice(*self.t.output_start[row : row + 2])]
            if known and weight == 0 and any(bias):
                found.add((row, 2))
        for row, _ in sorted(found & set(chain(*self.reads))):
            raise MemongerError(
                f"the bias of {self.graph.nodes[self.owner[row]].name!r} is used more than once, "
                "and its gradient would be wrong, with or without a schedule: MKLDNN leaves it out "
                "where the weight gets none; fix the bias too, or set MXNET_MKLDNN_ENABLED=0"
            )
        return found

    def add_nodes(self) -> None:
        """Put down what nodes can be, as `NodeVariants` has them in order, but for totals."""
        n, nodes, tensors, made = self.n, self.graph.nodes, self.graph.tensors, self.nodes
        first_time = [FIRST_TIME.get(node.op, ()) for node in nodes]
        number = {id(signature): k for k, signature in enumerate(made.signatures.all)}
        for row, (reads, waits) in enumerate(zip(self.reads, self._waits())):
            if row >= n:
                reads = [(~r if r < n and k in first_time[r] else r, k) for r, k in reads]
                # A masked operator is waited for as it ran for the first time.
                waits = [~r if r < n and self.masked[r] else r for r in waits]
            time = 0 if row < n and not self.t.variable[row] else -1
            made.add(Node(number[id(self.training.signatures[row])], row, time, reads, waits))
        recomputed: list[Node] = []
        scratch: dict[tuple[int, Tensor], Entry] = {}
        for x, node in enumerate(made.all[:n]):
            reads = list(node.reads)
            if self.masked[x]:  # it reads its mask instead of all but its data
                result, mask = tensors[x][:2]
                op = "elemwise_mul" if result.shape == mask.shape else "broadcast_mul"
                node = node._replace(signature=made.signatures(op, {}, 2, (result,)))
                reads = [reads[0], (~x, 1)]
            elif not truth(nodes[x].attrs.get("use_global_stats")):
                # States of its own: cuDNN's BatchNorm moves them whenever it runs.
                for j, (state, _) in enumerate(reads):
                    if state in self.graph.auxiliary:
                        key = j, tensors[state][0]
                        if key not in scratch:
                            scratch[key] = made.insert("null", {}, key[1])
                        reads[j] = scratch[key]
            recomputed.append(node._replace(reads=reads))
        self.recomputed = len(made.all)
        made.all += recomputed
        for x, k in self.needed():
            made.insert("max", {}, Tensor((1,), tensors[x][k].dtype), [(x, k)])

    def _waits(self) -> list[list[int]]:
        """List what gradient rows wait for by themselves, not what orders their sums."""
        waits: list[list[int]] = [[] for _ in self.reads]
        for row, before in self.training.waits:
            owner = self.owner[row]
            itself = before < self.n or self.owner[before] == owner
            if owner >= 0 and (waits[row] or itself):
                waits[row].append(before)
        return waits

    def operations(self) -> list[list[int]]:
        """List for each forward node the gradient rows that run in the operation of its gradient.

        Sums run with the last of what they add, what reads nothing with the first that reads it.
        """
        place = {x: k for k, x in enumerate(self.work.gradients)}
        result: list[list[int]] = [[] for _ in range(self.n)]
        walk = [r for r in self.walk if place and not self.t.variable[r]]
        operation: dict[int, int] = {}
        for row in sorted(walk):
            read = [r for r, _ in self.reads[row]]
            last = max((operation.get(r, 0) for r in read), default=len(place) - 1)
            operation[row] = place.get(self.owner[row], last)
            for r in read:
                if r in operation and not self.reads[r]:
                    operation[r] = min(operation[r], operation[row])
        for row in walk:  # in the order in which MXNet would run them
            result[self.work.gradients[operation[row]]].append(row)
        return result

    def add_totals(self, added: Collection[int], operations: list[list[int]]) -> list[Entry | None]:
        """Have gradients added up as MXNet does; return all, the sums in the place of those.

        What makes one adds it to the total, and some round otherwise than by adding what they have
        made: MXNet writes the second input of a ``_grad_add`` into the first
        (``src/executor/inplace_addto_detect_pass.cc``), here a copy of the total. What others read
        too is not summed here: it is added up afterwards.
        """
        made, gradients = self.nodes, self.gradients()
        found = gradients.copy()
        reads = Counter(chain(gradients, *(self.reads[row] for row in self.walk)))
        runs = set(chain(*operations))
        copies: dict[int, list[int]] = defaultdict(list)  # that run before a row
        sums: dict[int, list[int]] = defaultdict(list)  # that run after it
        for place, (a, entry) in enumerate(zip(self.training.wanted, gradients)):
            summed = a in added and a not in self.left_out
            if summed and entry is not None and entry[0] in runs and reads[entry] == 1:
                tensor = made.tensor(entry)
                total = made.insert("null", {}, tensor)
                copy = made.insert("_copy", {}, tensor, [total])
                found[place] = result = made.insert("_grad_add", {}, tensor, [copy, entry])
                self.totals[a] = total[0]
                copies[entry[0]].append(copy[0])
                sums[entry[0]].append(result[0])
        for operation in operations:
            operation[:] = [r for row in operation for r in (*copies[row], row, *sums[row])]
        if self.totals:  # what waits for a row waits for its copies too
            for row, node in enumerate(made.all):
                waits = [w for before in node.waits for w in (*copies[before], before)]
                made.all[row] = node._replace(waits=waits)
        return found

    def variants(self, operations: Sequence[Sequence[int]]) -> NodeVariants:
        """Make arrays of what there is."""
        t, n, made, signatures = self.t, self.n, self.nodes.all, self.nodes.signatures.all
        rows, small = self.nodes.rows(), partial(np.array, dtype=np.int32)
        operation_start, operation_row = columns(operations, 1)
        of, needed = small(self.needed()).reshape(-1, 2).T
        heads = [head for head in self.graph.heads if not t.variable[head[0]]]
        _, head_row, head_output = columns([heads], 2)
        ignored = [j in signatures[m.signature].ignored for m in made for j in range(len(m.reads))]
        chained = (rows.time == 0) | (np.diff(rows.wait_start) > 0)
        loose = np.where(np.diff(rows.read_start) > 0, AWAITED, LOOSE)
        variable = np.array([signatures[node.signature].op == "null" for node in made])
        variable[n : 2 * n] = variable[self.recomputed : self.recomputed + n] = False
        return NodeVariants(
            rows=rows,
            counts=(np.maximum(rows.read_row, ~rows.read_row) < n) & ~np.array(ignored, np.bool_),
            forward=n,
            readers=self.recomputed + n,
            link=small(np.where(chained, CHAINED, loose)),
            variable=small(np.flatnonzero(variable)),
            operation_start=operation_start,
            operation_row=operation_row,
            output_start=small(t.output_start[: n + 1]),
            needed_start=small(np.cumsum([0, *np.bincount(of, minlength=n)])),
            needed=small(t.output_start[of] + needed),
            masked=np.array(self.masked),
            head_row=head_row,
            head_output=head_output,
        )


def unroll(made: Parts, schedule: Schedule) -> TrainingStep:
    """Build the training step of a right schedule (``schedule.check``).

    If MKLDNN may compute it, a schedule is refused (MemongerError) by which it would round
    differently. All others have the same step everywhere, so that they take the memory predicted.
    """
    p = made.variants
    line = line_up(p, np.ascontiguousarray(schedule.operations, dtype=np.int32))
    step = bare = step_of(made, connect(p, np.concatenate([p.variable, line])), made.signatures)
    found = made.expected
    try:
        for k in range(ROUNDS + 1):
            inserts = found.differences(step.replay(), step.rows.source) if found else {}
            if not inserts:
                return step
            if k == ROUNDS:
                raise refusal(step, next(iter(inserts)))
            step = insert(step, inserts)
    except MemongerError:
        if made.mkldnn:
            raise
    return bare
