"""The training step of a schedule, written out: every node that it runs, as one graph.

What MXNet's executor makes of a network by itself (``graph.training``) is made here in the order
that a schedule says, with as many copies of an operator. `parts` finds out what all the training
steps of a network are made of; `unroll` puts one of them together.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from itertools import chain
from typing import Collection, Sequence

import numpy as np

from memonger.costs.replay import replay
from memonger.graph.arrays import join_columns
from memonger.graph.forward import FLOAT, Entry, no_collection
from memonger.graph.operators.gradients import ZEROS
from memonger.graph.operators.layouts import AXES, PRODUCES_BLOCKED
from memonger.graph.operators.recompute import truth
from memonger.graph.operators.recorded import (
    ACCUMULATING,
    ASYNCHRONOUS,
    BY_MKLDNN,
    IN_PLACE,
    is_recorded,
)
from memonger.graph.operators.tensors import Tensor, Tensors
from memonger.schedules.layouts import Expected, refusal
from memonger.schedules.nodes import NodeVariants
from memonger.schedules.schedule import FIRST_TIME, Schedule, Workload
from memonger.schedules.training_step import (
    Node,
    Nodes,
    Parts,
    TrainingStep,
    holding,
    insert,
    plainly,
    step_of,
)
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled

log = logging.getLogger("memonger")

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
    gradients = made.gradients()
    chained = made.chained()
    recorded, adding = made.recorded(added, gradients, chained)
    made.add_nodes(recorded)
    expected, training = None, work.training
    if any(node.op in PRODUCES_BLOCKED for node in training.graph.nodes):
        expected = Expected(replay(training, np.zeros(training.arrays.forward, dtype=np.bool_)))
    return Parts(
        work=work,
        mkldnn=mkldnn,
        variants=made.variants(made.operations()),
        signatures=tuple(made.nodes.signatures.all),
        gradients=tuple(gradients),
        added=frozenset(added),
        recorded=recorded,
        adding=adding.union(chained),
        chained=chained,
        left_out=frozenset(made.left_out),
        expected=expected,
    )


class _Maker:
    """What the `Parts` of a workload are made from."""

    def __init__(self, work: Workload, mkldnn: bool) -> None:
        self.work, self.training, self.graph = work, work.training, work.training.graph
        self.ops, self.t = self.training.ops, self.training.arrays
        self.n = self.t.forward
        self.owner = [-1] * (2 * self.n) + self.training.origin[2 * self.n :].tolist()
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
        self.mkldnn = mkldnn
        self.left_out: set[int] = set()

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

    def recorded(
        self,
        added: Collection[int],
        gradients: Sequence[Entry | None],
        chained: Collection[Entry],
    ) -> tuple[dict[int, list[int]], frozenset[Entry]]:
        """Find the operators whose gradient autograd computes (``operators.recorded``).

        So it is where the gradient of an argument is added to an array: to add it afterwards may
        round otherwise, for some operators begin with what is in the array. (None with auxiliary
        states does, and what runs again has others.) Told too: those gradients.
        """
        reads = Counter(chain(gradients, *(self.reads[row] for row in self.walk)))
        nodes, rows = self.graph.nodes, defaultdict(list)
        for row in range(2 * self.n, len(self.owner)):
            rows[self.owner[row]].append(row)
        run = {self.owner[row] for row in self.walk} - {-1}
        found = {x for x in run if is_recorded(nodes[x].op, self.training.gradients[x])}
        found |= {self.owner[row] for row, _ in chained}
        adding = set()
        for a, entry in zip(self.training.wanted, gradients):
            if a in added and entry is not None and reads[entry] == 1:
                x = self.owner[entry[0]]
                if x < 0 or nodes[x].op in IN_PLACE or self.ops[entry[0]] in ZEROS:
                    continue
                states = any(i in self.graph.auxiliary for i, _ in nodes[x].inputs)
                if not states and not self.masked[x] and not nodes[x].subgraphs:
                    found.add(x)
                    adding.add(entry)
        return {x: rows[x] for x in sorted(found)}, frozenset(adding)

    def chained(self) -> dict[Entry, int]:
        """Find the terms that MXNet's executor adds to a sum in place, where that rounds otherwise.

        Told too is the row that would add them.
        """
        if "_grad_add" not in self.ops:
            return {}
        found, nodes = replay(self.training, np.zeros(self.n, dtype=np.bool_)), self.graph.nodes
        other = found.planned != found.blocks
        chained: dict[Entry, int] = {}
        for row in (r for r in self.walk if self.ops[r] == "_grad_add"):
            term, k = self.reads[row][1]
            x = self.owner[term]
            if x < 0 or not other[self.t.output_start[term] + k]:
                continue
            by_mkldnn = self.mkldnn and self.training.signatures[term].tensors[k].dtype == FLOAT
            if nodes[x].op in ACCUMULATING and not (by_mkldnn and nodes[x].op in BY_MKLDNN):
                chained[term, k] = row
        return chained

    def add_nodes(self, recorded: Collection[int]) -> None:
        """Put down what nodes can be, as `NodeVariants` has them in order."""
        n, nodes, tensors, made = self.n, self.graph.nodes, self.graph.tensors, self.nodes
        first_time = [FIRST_TIME.get(node.op, ()) for node in nodes]
        number = {id(signature): k for k, signature in enumerate(made.signatures.all)}
        for row, reads in enumerate(self.reads):
            signature = self.training.signatures[row]
            k, owner = number[id(signature)], self.owner[row]
            if row >= n:
                reads = [(~r if r < n and k in first_time[r] else r, k) for r, k in reads]
            # What autograd computes has arrays of its own, and so has the gradient of a Dropout on
            # a GPU, which autograd computes if the Dropout runs once.
            apart = owner in recorded or (signature.op == "_backward_Dropout" and not self.mkldnn)
            if apart and signature.options:
                k = made.signatures.add(signature._replace(options=()))
            elif signature.op == "_zeros_without_dtype":
                k = made.signatures.add(signature._replace(tensors=_floats(signature.tensors)))
            time = 0 if row < n and not self.t.variable[row] else -1
            made.add(Node(k, row, time, reads))
        again: list[Node] = []
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
            again.append(node._replace(reads=reads))
        self.again = len(made.all)
        made.all += again

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

    def variants(self, operations: Sequence[Sequence[int]]) -> NodeVariants:
        """Make arrays of what there is."""
        t, n, made, signatures = self.t, self.n, self.nodes.all, self.nodes.signatures.all
        operation_start, operation_row = join_columns(operations, 1)
        heads = [head for head in self.graph.heads if not t.variable[head[0]]]
        _, head_row, head_output = join_columns([heads], 2)
        variable = np.array([signatures[node.signature].op == "null" for node in made])
        variable[n : 2 * n] = variable[self.again : self.again + n] = False
        return NodeVariants(
            rows=self.nodes.rows(),
            forward=n,
            again=self.again,
            variable=np.flatnonzero(variable).astype(np.int32),
            operation_start=operation_start,
            operation_row=operation_row,
            head_row=head_row,
            head_output=head_output,
        )


def _floats(tensors: Tensors) -> Tensors:
    """Make the zeros that stand for the gradient of MKLDNN's workspace those of a float."""
    # The gradient of Pooling is written over them, which takes an array of its type.
    return tuple([t._replace(dtype=FLOAT) if t.dtype == "int32" else t for t in tensors])


def unroll(made: Parts, schedule: Schedule) -> TrainingStep:
    """Build the training step of a right schedule (``schedule.check``).

    If MKLDNN may compute it, a schedule is refused (MemongerError) by which it would round
    differently. All others have the same step everywhere, so that they take the memory predicted.
    """
    p = made.variants
    line = compiled.line_up(p, np.ascontiguousarray(schedule.operations, dtype=np.int32))
    rows, signatures = compiled.connect(p, line), list(made.signatures)
    if made.mkldnn and any(signature.op in ASYNCHRONOUS for signature in signatures):
        step = plainly(step_of(made, rows, signatures))
        rows, signatures = step.rows, list(step.all_signatures)
    step = bare = step_of(made, *holding(made, rows, signatures))
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
