"""The training graph: every node that one training step runs, for any set of recomputed operators.

Built as MXNet builds it (``InitFullGraph`` in ``src/executor/graph_executor.cc``, ``Gradient`` in
``src/nnvm/gradient.cc``), without a bind: common sub-expressions are merged, then the operators are
walked from the outputs back, each one's gradient nodes (``gradients.gradient_of``) are added, and
gradients that meet are summed. An operator has a second row, its recomputed copy. Which of the two
a gradient reads depends on the marks alone, so one table serves every plan:
the gradient of X reads the copies where X itself is recomputed, the originals where X is kept.
"""

from __future__ import annotations

import os
from typing import (
    Iterable,
    Mapping,
    NamedTuple,
    Sequence,
)

import numpy as np

from memonger.graph import arrays as tables
from memonger.graph.arrays import KEPT, Read, RowKind, Tables
from memonger.graph.forward import Entry, ForwardGraph, Node, no_collection
from memonger.graph.operators.gradients import (
    BackwardNode,
    NotDifferentiable,
    NotObservable,
    OperatorGradient,
    Reference,
    gradient_of,
    merges,
)
from memonger.graph.operators.inplace import ignored_inputs, inplace_options
from memonger.graph.operators.tensors import Tensor
from memonger.support.errors import MemongerError

ZEROS = ("zeros_like", "_zeros")  # what AggregateGradient leaves out of a sum


class GradientFacts(NamedTuple):
    """What the gradient of one operator reads.

    Attributes
    ----------
    own_output : bool
        Whether it reads the operator's first output.
    inputs : frozenset of int
        The inputs that it reads, other than for their shape.
    passes : frozenset of int
        The inputs that it has a gradient for, other than zero.
    summed : int
        The most gradients that meet at one of the operator's outputs.
    follows : bool
        Whether it runs only after the operator (a control dependency), so that a recomputed copy
        runs even where nobody reads it.
    """

    own_output: bool
    inputs: frozenset[int]
    passes: frozenset[int]
    summed: int
    follows: bool


NO_GRADIENT = GradientFacts(False, frozenset(), frozenset(), 0, False)


class TrainingGraph(NamedTuple):
    """A training graph for every set of recomputed operators.

    Attributes
    ----------
    graph : ForwardGraph
    tables : Tables
    names, ops : tuple of str
        Of each row; a recomputed copy is named ``*_mirror``.
    kinds : tuple of RowKind
        Of each row: the shapes and types of its outputs, among other things.
    facts : tuple of GradientFacts
        Of each forward node.
    same : tuple of int
        For each forward node the one that MXNet merges it with (or itself).
    inexact : tuple of str
        Why the replay of this graph may differ from MXNet; empty if it should not.
    wanted : tuple of int
        The arguments that get a gradient.
    owners : np.ndarray
        Of each gradient row (from 2n on) the operator whose gradient it is part of; -1 for what
        adds gradients up, and for the gradients of the outputs.
    waits : tuple of (row, row)
        Gradient rows, in order, and what must have run before them.
    unobserved : dict
        Of operators whose gradient could not be observed: why.
    """

    graph: ForwardGraph
    tables: Tables
    names: tuple[str, ...]
    ops: tuple[str, ...]
    kinds: tuple[RowKind, ...]
    facts: tuple[GradientFacts, ...]
    same: tuple[int, ...]
    inexact: tuple[str, ...]
    wanted: tuple[int, ...]
    owners: np.ndarray
    waits: tuple[tuple[int, int], ...]
    unobserved: dict[int, str]
    builder: _Builder

    @property
    def phases(self) -> np.ndarray:
        """FORWARD, RECOMPUTED or BACKWARD for each row."""
        return np.minimum(np.arange(len(self.ops)) // self.tables.forward, tables.BACKWARD)

    def with_gradients(self, wanted: Iterable[int]) -> TrainingGraph:
        """The training graph of the same network with gradients of other arguments.

        As `training_graph` makes it, and much faster.
        """
        return self.builder.build(tuple(wanted))


@no_collection()
def training_graph(graph: ForwardGraph, wanted: Iterable[int] | None = None) -> TrainingGraph:
    """Build the training graph of a network.

    Parameters
    ----------
    graph : ForwardGraph
    wanted : iterable of int, optional
        The arguments (node indices) that get a gradient; all of them by default. Whether it is
        written or added to (grad_req) makes no difference: it is the user's memory.

    Raises
    ------
    MemongerError
        If MXNet has no gradient for an operator that needs one.
    """
    return _Builder(graph).build(graph.arguments if wanted is None else tuple(wanted))


def sum_cap() -> int:
    """From so many terms on a gradient is summed in a chain (``AggregateGradient``)."""
    return int(os.environ.get("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "8"))


def merged_nodes(graph: ForwardGraph) -> list[int]:
    """For each node the one that common-subexpression elimination leaves in its place.

    Source: ``src/executor/eliminate_common_expr_pass.cc``. Two operators are one if they are the
    same with the same parameters, marks and inputs, and neither keeps state nor draws numbers.
    """
    same = list(range(len(graph.nodes)))
    if os.environ.get("MXNET_ELIMINATE_COMMON_EXPR", "1") in ("0", "false", "False"):
        return same
    first: dict[object, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.op == "null" or not node.inputs:
            continue
        others = first.setdefault((node.op, tuple([(same[a], b) for a, b in node.inputs])), [])
        for other in others:
            twin = graph.nodes[other]
            if twin.attrs == node.attrs and twin.hidden == node.hidden:
                if merges(node.op, node.attrs, [graph.tensors[a][b] for a, b in node.inputs]):
                    same[i] = other
                break
        else:
            others.append(i)
    return same


class _Kinds:
    """The kinds of rows that there are, by number."""

    def __init__(self) -> None:
        self.all: list[RowKind] = []
        self.inexact: set[str] = set()
        self._known: dict[object, int] = {}

    def __call__(
        self, op: str, attrs: Mapping[str, str], inputs: int, tensors: Sequence[Tensor]
    ) -> int:
        key = (op, tuple(attrs.items()), inputs, tuple(tensors))
        if key not in self._known:
            self._known[key] = len(self.all)
            self.all.append(self._kind(op, attrs, inputs, tensors))
        return self._known[key]

    def _kind(
        self, op: str, attrs: Mapping[str, str], inputs: int, tensors: Sequence[Tensor]
    ) -> RowKind:
        options = () if op == "null" else inplace_options(op, attrs, inputs)
        if options is None:
            self.inexact.add(f"the in-place options of {op} are not listed")
            options = ()
        fitting = tuple(o for o in options if o[0] < inputs and o[1] < len(tensors))
        if any(k > 62 for k, _, _ in fitting):  # the compiled loop keeps a bit for each
            self.inexact.add(f"{op} has more than 63 inputs that it may overwrite")
        ignored = ignored_inputs(op)
        return RowKind(op, attrs, inputs, ignored, fitting, tensors)


class _Step(NamedTuple):
    """How an operator's gradient is added to the graph: the same for all alike."""

    made: tuple[tuple[BackwardNode, int, str], ...]  # node, kind, what its name ends in
    gradients: tuple[Reference | None, ...]
    facts: dict[int, GradientFacts]  # by how many gradients are summed


class _Builder:
    """The training graph without the sums of the variables' gradients, which `build` adds."""

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.n = len(graph.nodes)
        self.same = merged_nodes(graph)
        self.kinds = _Kinds()
        self.inexact = self.kinds.inexact
        self.cap = sum_cap()
        # The gradient nodes; row 2n is the first. What they read and wait for has their order.
        self.names: list[str] = []
        self.ops: list[str] = []
        self.kind: list[int] = []
        self.owners: list[int] = []
        self.reads: list[Read] = []
        self.waits: list[tuple[int, int, int]] = []
        self.gradients: dict[Entry, list[Read]] = {}  # what has met at an entry so far
        self.sums: dict[Entry, Read] = {}
        self.facts: list[GradientFacts] = [NO_GRADIENT] * self.n
        self.steps: dict[object, _Step] = {}
        self.unobserved: dict[int, str] = {}
        if os.environ.get("NNVM_EXEC_NUM_TEMP", "1") not in ("0", "1"):
            self.inexact.add("NNVM_EXEC_NUM_TEMP is set")
        self.heads = [(self.same[a], b) for a, b in graph.heads]
        if self.heads != list(graph.heads):
            self.inexact.add("an output of the network is a common sub-expression")
        self._forward()
        for k, head in enumerate(self.heads):
            tensor = (self._tensor(head),)
            variable = self._add("null", "_head_grad_%d" % k, {}, [], tensor)
            like = self._add(
                "_identity_with_attr_like_rhs",
                "_head_grad_%d_id" % k,
                {},
                [(variable, 0, KEPT), (head[0], head[1], KEPT)],
                tensor,
            )
            self.gradients[head] = [(like, 0, KEPT)]
        counts = np.array([len(node.inputs) for node in graph.nodes])
        outputs = [a for a, _ in self.heads]
        for x in reversed(tables.depth_first(self.inputs, counts, self.deps, outputs)):
            if graph.nodes[x].inputs:
                self._differentiate(x)

    def build(self, wanted: Sequence[int]) -> TrainingGraph:
        """Add the gradients of these arguments."""
        graph = self.graph
        base = len(self.kind), len(self.reads), len(self.waits), dict(self.sums)
        heads: list[Read] = [(a, b, KEPT) for a, b in self.heads]
        seen: set[Read] = set()
        for a in wanted:
            read = self._sum((a, 0))
            if read in seen:  # no two gradients may be the same array (MXGradient, copy_op)
                name = graph.nodes[a].name + "_copy"
                read = (self._add("_copy", name, {}, [read], (self._tensor((a, 0)),)), 0, KEPT)
            seen.add(read)
            heads.append(read)
        names = [node.name for node in graph.nodes]
        ops = [node.op for node in graph.nodes]
        training = TrainingGraph(
            graph,
            tables.build(
                self.forward,
                self.inputs,
                self.deps,
                self.kind,
                self.reads,
                self.waits,
                self.kinds.all,
                heads,
                len(self.heads),
            ),
            (*names, *[name + "_mirror" for name in names], *self.names),
            (*ops, *ops, *self.ops),
            tuple([self.kinds.all[k] for k in (*self.forward, *self.forward, *self.kind)]),
            tuple(self.facts),
            tuple(self.same),
            tuple(sorted(self.inexact)),
            tuple(wanted),
            np.array(self.owners, dtype=np.int64),
            tuple([(row, before) for row, before, _ in self.waits]),
            self.unobserved,
            self,
        )
        rows, reads, waits, self.sums = base
        del self.names[rows:], self.ops[rows:], self.kind[rows:], self.owners[rows:]
        del self.reads[reads:], self.waits[waits:]
        return training

    # ------------------------------------------------------------------ rows

    def _add(
        self,
        op: str,
        name: str,
        attrs: Mapping[str, str],
        reads: Sequence[Read],
        tensors: Sequence[Tensor],
    ) -> int:
        return self._add_kind(self.kinds(op, attrs, len(reads), tensors), op, name, reads)

    def _add_kind(
        self, kind: int, op: str, name: str, reads: Sequence[Read], owner: int = KEPT
    ) -> int:
        self.owners.append(owner)
        self.names.append(name)
        self.ops.append(op)
        self.kind.append(kind)
        self.reads.extend(reads)
        return 2 * self.n + len(self.kind) - 1

    def _tensor(self, entry: Entry) -> Tensor:
        return self.graph.tensors[entry[0]][entry[1]]

    def _forward(self) -> None:
        """The forward nodes: their kinds, what they read and what must have run before."""
        graph, same = self.graph, self.same
        self.forward = [
            self.kinds(node.op, node.attrs, len(node.inputs), tensors)
            for node, tensors in zip(graph.nodes, graph.tensors)
        ]
        inputs = [(same[a], b) for node in graph.nodes for a, b in node.inputs]
        self.inputs = np.array(inputs, dtype=np.int64).reshape(-1, 2)
        deps = [(x, same[d]) for x, node in enumerate(graph.nodes) for d in node.deps]
        self.deps = np.array(deps, dtype=np.int64).reshape(-1, 2)

    # ------------------------------------------------------------------ gradients

    def _sum(self, entry: Entry) -> Read:
        """The gradient of an entry (``AggregateGradient``): all that met there, added up."""
        if entry in self.sums:
            return self.sums[entry]
        tensor = (self._tensor(entry),)
        terms = self.gradients.get(entry, [])
        if len(terms) > 1:
            terms = [t for t in terms if not self._is_zero(t)] or terms[:1]
        if not terms:
            row = self._add("_zeros_without_dtype", "zeros_without_dtype", {}, [], tensor)
            total = (row, 0, KEPT)
        elif len(terms) == 1:
            total = terms[0]
        elif len(terms) < self.cap:
            attrs = {"num_args": str(len(terms))}
            total = (self._add("add_n", "sum_grad", attrs, terms, tensor), 0, KEPT)
        else:
            total = terms[0]
            add = self.kinds("_grad_add", {}, 2, tensor)
            for k in range(1, len(terms)):
                if terms[k - 1][0] != terms[k][0]:  # adds up in the order of the backward pass
                    if terms[k][0] < 2 * self.n:
                        self.inexact.add("a gradient is a result of the forward pass")
                    self.waits.append((terms[k][0], total[0], total[2]))
                row = self._add_kind(add, "_grad_add", "sum_grad_%d" % k, (total, terms[k]))
                total = (row, 0, KEPT)
            total = (self._add("_copy", "sum_grad_final", {}, [total], tensor), 0, KEPT)
        self.sums[entry] = total
        return total

    def _is_zero(self, read: Read) -> bool:
        row = read[0] - 2 * self.n
        return (self.ops[row] if row >= 0 else self.graph.nodes[read[0]].op) in ZEROS

    def _differentiate(self, x: int) -> None:
        """Add the gradient nodes of operator x, and hand their results to its inputs."""
        graph, node, same = self.graph, self.graph.nodes[x], self.same
        into = [(same[a], b) for a, b in node.inputs]
        shown = range(graph.visible[x])
        met = [self.gradients.get((x, k), ()) for k in shown]
        zero_heads = all(m and self._is_zero(self._sum((x, k))) for k, m in enumerate(met))
        step = self._step(x, zero_heads)
        summed = max(map(len, met))
        facts = step.facts.get(summed)
        if facts is None:
            facts = step.facts[summed] = _facts(step, summed)
        self.facts[x] = facts

        def read(reference: Reference) -> Read:
            kind, k = reference[0], reference[1]
            if kind == "in":
                return (*into[k], x)
            if kind == "out":
                return (x, k, x)
            if kind == "node":
                return (at[k], reference[2], KEPT)
            return self._sum((x, k))

        at: list[int] = []
        for backward, kind, suffix in step.made:
            reads = [read(r) for r in backward.inputs]  # may add the sums that it reads
            row = self._add_kind(kind, backward.op, node.name + suffix, reads, x)
            for d in backward.deps:
                self.waits.append((row, x, x) if d is None else (row, at[d], KEPT))
            at.append(row)
        for entry, gradient in zip(into, step.gradients):
            if gradient is not None:
                self.gradients.setdefault(entry, []).append(read(gradient))

    def _step(self, x: int, zero_heads: bool) -> _Step:
        """What to add for an operator's gradient; ``forward`` kind, inputs and heads decide."""
        graph, node = self.graph, self.graph.nodes[x]
        tensors = tuple([graph.tensors[a][b] for a, b in node.inputs])
        key = (self.forward[x], tensors, zero_heads)
        if key in self.steps:
            return self.steps[key]
        alike = True
        try:
            if node.subgraphs:
                raise NotObservable(f"{node.op} holds a graph of its own")
            found = gradient_of(node.op, node.attrs, tensors, zero_heads)
        except NotDifferentiable:
            raise MemongerError(
                f"node {node.name!r}: MXNet has no gradient for the operator {node.op}, so the "
                "network cannot be trained through it; put mx.sym.BlockGrad after it if no "
                "gradient should pass"
            ) from None
        except NotObservable as error:
            self.inexact.add(str(error))
            self.unobserved[x] = str(error)
            found, alike = _reads_everything(graph, x), False
        step = _Step(
            tuple(
                (
                    backward,
                    self.kinds(backward.op, backward.attrs, len(backward.inputs), backward.tensors),
                    "_backward" + ("" if j == 0 else "_%d" % j),
                )
                for j, backward in enumerate(found.nodes)
            ),
            found.gradients,
            {},
        )
        if alike:
            self.steps[key] = step
        return step


def _facts(step: _Step, summed: int) -> GradientFacts:
    made, gradients = [backward for backward, _, _ in step.made], step.gradients
    read = {reference for node in made if node.op not in ZEROS for reference in node.inputs}
    return GradientFacts(
        ("out", 0) in read,
        frozenset(r[1] for r in read if r[0] == "in"),
        frozenset(
            k
            for k, r in enumerate(gradients)
            if r is not None and not (r[0] == "node" and made[r[1]].op in ZEROS)
        ),
        summed,
        any(d is None for node in made for d in node.deps),
    )


def _reads_everything(graph: ForwardGraph, x: int) -> OperatorGradient:
    """A stand-in for a gradient that cannot be observed: one node that reads all there is."""
    node: Node = graph.nodes[x]
    outputs = range(graph.visible[x])
    inputs = [k for k, (a, _) in enumerate(node.inputs) if a not in graph.auxiliary]
    reads: list[Reference] = [("head", k) for k in outputs]
    reads += [("in", k) for k in range(len(node.inputs))]
    reads += [("out", k) for k in outputs]
    made = BackwardNode(
        "_backward_" + node.op,
        {},
        tuple(reads),
        (None,),
        tuple(graph.tensors[a][b] for a, b in (node.inputs[k] for k in inputs)),
    )
    place = {k: j for j, k in enumerate(inputs)}
    gradients = [("node", 0, place[k]) if k in place else None for k in range(len(node.inputs))]
    return OperatorGradient((made,), tuple(gradients))
