"""The training graph: every node that one training step runs, for any set of recomputed operators.

Built as MXNet builds it (``InitFullGraph`` in ``src/executor/graph_executor.cc``, ``Gradient`` in
``src/nnvm/gradient.cc``), without a bind: common subexpressions are merged, then the operators are
walked from the outputs back, each one's gradient nodes are added, and gradients that meet are
summed. An operator has a second row, its recomputed copy. One table serves every plan: the gradient
of X reads the copies where X itself is recomputed, the originals where X is kept.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Mapping, Sequence

import numpy as np

from memonger.graph import arrays
from memonger.graph.arrays import BACKWARD, FORWARD, KEPT, RECOMPUTED, GraphArrays, Read, Signature
from memonger.graph.forward import Entry, ForwardGraph, Node, no_collection
from memonger.graph.operators import gradients
from memonger.graph.operators.gradients import ZEROS, GradientFacts, OperatorGradient
from memonger.graph.operators.tensors import Attributes, Tensors
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled
from memonger.support.mxnet import Settings

Reads = Sequence[Read]


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The rows of a training step, and what each of them is."""

    graph: ForwardGraph
    settings: Settings  # of MXNet, as they were when it was built
    arrays: GraphArrays
    signatures: Sequence[Signature]  # of each row: the shapes and types of its outputs, and more
    names: Sequence[str]  # of each row
    phases: np.ndarray  # FORWARD, RECOMPUTED or BACKWARD for each row
    #: The forward node that each row is, runs again, or is part of the gradient of; -1 for none.
    origin: np.ndarray
    #: Of what adds gradients up, and the gradients of outputs: the tensor that they are of.
    gradient_of: Mapping[int, Entry]

    @cached_property
    def ops(self) -> list[str]:
        return [signature.op for signature in self.signatures]

    def what(self, row: int) -> tuple[str, str]:
        """Return the name and the kind of the operator that a row is of.

        What no operator owns goes by the name of the tensor whose gradient it is part of; what a
        schedule adds by that of what it reads.
        """
        if row in self.gradient_of:
            a, b = self.gradient_of[row]
            return self.graph.output_name(self.graph.user_node(a), b), self.ops[row]
        if self.origin[row] < 0:
            return self.what(self.arrays.read_row[self.arrays.read_start[row]])[0], self.ops[row]
        node = self.graph.nodes[self.origin[row]]
        return node.name, node.op

    def told(self, row: int) -> str:
        """Say what a row is, with no name that the network that was given does not have."""
        (name, op), x = self.what(row), int(self.origin[row])
        if row in self.gradient_of:
            sums = op in ("add_n", "_grad_add")
            return f"the {'sum of the gradients' if sums else 'gradient'} of {name!r}"
        if x < 0:
            return f"{op} of {name!r}, which the schedule adds"
        copied = self.graph.user_node(x)
        kept = f"the kept copy of {self.graph.nodes[copied].name!r}"
        text = f"{name!r} ({op})" if copied == x else kept
        return {
            FORWARD: text,
            RECOMPUTED: f"{text}, recomputed",
            BACKWARD: f"the gradient of {text}",
        }[self.phases[row]]


@dataclass(frozen=True, eq=False)
class TrainingGraph(StepGraph):
    """A training graph for every set of recomputed operators; a copy is named ``*_mirror``."""

    facts: tuple[GradientFacts, ...]  # of each forward node
    gradients: Mapping[int, OperatorGradient]  # of each operator that has any
    same: tuple[int, ...]  # for each forward node the one that MXNet merges it with (or itself)
    inexact: tuple[str, ...]  # why the replay may differ from MXNet; empty if it should not
    wanted: tuple[int, ...]  # the arguments that get a gradient
    waits: tuple[tuple[int, int], ...]  # gradient rows, in order, and what must have run before
    unobserved: Mapping[int, str]  # operators whose gradient could not be observed: why


def training_graph(graph: ForwardGraph, wanted: Iterable[int] | None = None) -> TrainingGraph:
    """Build a network's training graph, with the gradients of the ``wanted`` arguments (or all)."""
    return training_graphs(graph, [graph.arguments if wanted is None else wanted])[0]


@no_collection()
def training_graphs(
    graph: ForwardGraph, wanted: Iterable[Iterable[int]], found: Settings | None = None
) -> list[TrainingGraph]:
    """Build a network's training graphs, each with the gradients of one set of arguments."""
    common = _Builder(graph, found or Settings())
    return [common.copy().finished(tuple(arguments)) for arguments in wanted]


def merged_nodes(graph: ForwardGraph) -> list[int]:
    """Return for each node the one that ``eliminate_common_expr_pass.cc`` leaves in its place."""
    same = list(range(len(graph.nodes)))
    first: dict[object, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.inputs:
            inputs = tuple([(same[a], b) for a, b in node.inputs])
            attrs = frozenset(node.attrs.items()), frozenset(node.hidden.items())
            other = first.setdefault((node.op, inputs, *attrs), i)
            if other != i and gradients.merges(node.op, *_signature(graph, node)):
                same[i] = other
    return same


def _signature(graph: ForwardGraph, node: Node) -> tuple[gradients.Attrs, Tensors]:
    """Return the attributes of an operator and its inputs, as `gradient_of` takes them."""
    return tuple(sorted(node.attrs.items())), tuple([graph.tensors[a][b] for a, b in node.inputs])


class _Builder:
    """The rows, with the gradients of all operators, without those of variables (`finished`)."""

    def __init__(self, graph: ForwardGraph, found: Settings) -> None:
        self.graph, self.settings = graph, found
        n = self.n = len(graph.nodes)
        self.same = same = merged_nodes(graph) if found.merging else list(range(n))
        self.signatures = arrays.Signatures()
        self.inexact = {"NNVM_EXEC_NUM_TEMP is set"} if found.coloring else set()
        # MXNet merges outputs of the network, but not in the gradient, which starts from those that
        # the symbol has (``InitFullGraph``). An output that is merged runs here by itself.
        apart = {a for a, _ in graph.heads if same[a] != a}
        if apart:
            self.inexact.add("an output of the network is a common sub-expression")
        # Of each row; the forward nodes and their copies come first.
        names = [node.name for node in graph.nodes]
        self.names = [*names, *[f"{name}_mirror" for name in names]]
        self.numbers = 2 * [
            self.signatures(node.op, node.attrs, len(node.inputs), tensors)
            for node, tensors in zip(graph.nodes, graph.tensors)
        ]
        reads = [[(same[a], b) for a, b in node.inputs] for node in graph.nodes]
        self.reads: list[Reads] = [[(*r, KEPT) for r in each] for each in reads]
        self.reads += [[(*r, x) for r in each] for x, each in enumerate(reads)]
        # What must have run before it, and the owner.
        self.waits = [[(same[d], KEPT) for d in node.deps] for node in graph.nodes]
        self.waits += [[] for _ in graph.nodes]
        self.owners: list[int] = []  # of the gradient rows
        self.parts: dict[int, Entry] = {}
        self.gradients: dict[Entry, list[Read]] = {}  # what has met at an entry so far
        self.sums: dict[Entry, Read] = {}
        self.facts = [GradientFacts()] * n
        self.found: dict[int, OperatorGradient] = {}
        self.unobserved: dict[int, str] = {}
        for k, head in enumerate(graph.heads):
            name, op = f"_head_grad_{k}", "_identity_with_attr_like_rhs"
            given = [self._add_part("null", name, {}, [], head), (*head, KEPT)]
            like_head = self._add_part(op, f"{name}_id", {}, given, head)
            self.gradients[head] = [like_head]  # the last, where two outputs are one
        for x in reversed(self._merged_order() if apart else range(n)):
            if self.reads[x] and (same[x] == x or x in apart):
                self._add_gradient(x)

    def _merged_order(self) -> list[int]:
        """List the forward nodes from the inputs on, in depth first order, as merged."""
        order: list[int] = []
        seen: set[int] = set()
        stack = [a for a, _ in reversed(self.graph.heads)]
        while stack:
            x = stack.pop()
            if x < 0:
                order.append(~x)
            elif x not in seen:
                seen.add(x)
                before = [r[0] for r in (*self.reads[x], *self.waits[x])]
                stack += [~x, *reversed(before)]
        return order

    def copy(self) -> _Builder:
        """Copy what `finished` changes."""
        other = copy.copy(self)
        other.names, other.numbers, other.reads = [*self.names], [*self.numbers], [*self.reads]
        other.waits, other.owners = [[*waits] for waits in self.waits], [*self.owners]
        other.signatures = arrays.Signatures(self.signatures.all)
        other.signatures.inexact, other.inexact = {*self.signatures.inexact}, {*self.inexact}
        other.sums, other.parts = dict(self.sums), dict(self.parts)
        return other

    def finished(self, wanted: tuple[int, ...]) -> TrainingGraph:
        """Return the training graph with the gradients of these arguments."""
        graph, heads = self.graph, [(a, b, KEPT) for a, b in self.graph.heads]
        seen: set[Read] = set()
        for a in wanted:
            read = self._sum((a, 0))
            if read in seen:  # no two gradients may be the same array (MXGradient, copy_op)
                read = self._add_part("_copy", self.names[a] + "_copy", {}, [read], (a, 0))
            seen.add(read)
            heads.append(read)
        signatures = tuple([self.signatures.all[k] for k in self.numbers])
        inexact = {*self.inexact, *self.signatures.inexact, *self.unobserved.values()}
        gradients = range(2 * self.n, len(signatures))
        return TrainingGraph(
            graph=graph,
            settings=self.settings,
            arrays=compiled.graph_arrays(
                arrays.signature_arrays(self.signatures.all),
                self.n,
                np.array(self.numbers, dtype=np.int32),
                arrays.ReadLists(*arrays.join_columns(self.reads, 3)),
                arrays.WaitLists(*arrays.join_columns(self.waits, 2)),
                arrays.HeadList(*arrays.join_columns([heads], 3)[1:]),
                len(graph.heads),
            ),
            signatures=signatures,
            names=tuple(self.names),
            phases=np.minimum(np.arange(len(signatures)) // self.n, BACKWARD),
            origin=np.array([*range(self.n), *range(self.n), *self.owners], dtype=np.int64),
            gradient_of=self.parts,
            facts=tuple(self.facts),
            gradients=self.found,
            same=tuple(self.same),
            inexact=tuple(sorted(inexact)),
            wanted=wanted,
            waits=tuple([(row, wait) for row in gradients for wait, _ in self.waits[row]]),
            unobserved=self.unobserved,
        )

    def _add(
        self, op: str, name: str, attrs: Attributes, reads: Reads, like: Tensors, owner: int
    ) -> Read:
        """Add a gradient row, with outputs ``like`` these; return the first of them."""
        self.names.append(name)
        self.numbers.append(self.signatures(op, attrs, len(reads), like))
        self.reads.append(reads)
        self.waits.append([])
        self.owners.append(owner)
        return len(self.names) - 1, 0, KEPT

    def _add_part(self, op: str, name: str, attrs: Attributes, reads: Reads, entry: Entry) -> Read:
        """Add a row that no operator owns, part of the gradient of this tensor."""
        like = (self.graph.tensors[entry[0]][entry[1]],)
        read = self._add(op, name, attrs, reads, like, KEPT)
        self.parts[read[0]] = entry
        return read

    def _sum(self, entry: Entry) -> Read:
        """Add up the gradients that met at an entry (``AggregateGradient``)."""
        if entry in self.sums:
            return self.sums[entry]
        terms = self.gradients.get(entry, [])
        if len(terms) > 1:
            terms = [t for t in terms if not self._is_zero(t)] or terms[:1]
        if not terms:
            total = self._add_part("_zeros_without_dtype", "zeros_without_dtype", {}, [], entry)
        elif len(terms) == 1:
            total = terms[0]
        elif len(terms) < self.settings.sum_cap:
            count = {"num_args": str(len(terms))}
            total = self._add_part("add_n", "sum_grad", count, terms, entry)
        else:
            total = terms[0]
            for k in range(1, len(terms)):
                if terms[k - 1][0] != terms[k][0]:  # adds up in the order of the backward pass
                    if terms[k][0] < 2 * self.n:
                        self.inexact.add("a gradient is a result of the forward pass")
                    self.waits[terms[k][0]].append((total[0], total[2]))
                total = self._add_part("_grad_add", f"sum_grad_{k}", {}, (total, terms[k]), entry)
            total = self._add_part("_copy", "sum_grad_final", {}, [total], entry)
        self.sums[entry] = total
        return total

    def _is_zero(self, read: Read) -> bool:
        return self.signatures.all[self.numbers[read[0]]].op in ZEROS

    def _add_gradient(self, x: int) -> None:
        """Add the gradient nodes of operator x, and hand their results to its inputs."""
        met = [self.gradients.get((x, k), ()) for k in range(len(self.graph.output_names[x]))]
        zero_heads = all(found and self._is_zero(self._sum((x, k))) for k, found in enumerate(met))
        found = self.found[x] = self._gradient(x, zero_heads)
        self.facts[x] = found.facts._replace(summed=max(map(len, met)))
        into = self.reads[self.n + x]
        at: list[int] = []  # the rows of its gradient nodes

        def read(reference: gradients.Reference) -> Read:
            kind, k, output = reference
            if kind == "in":
                return into[k]
            if kind == "out":
                return x, output, x
            return (at[k], output, KEPT) if kind == "node" else self._sum((x, k))

        for node in found.nodes:
            name = node.name_of(self.names[x])
            reads = [read(r) for r in node.inputs]  # may add the sums that it reads
            row = self._add(node.op, name, node.attrs, reads, node.tensors, x)[0]
            self.waits[row] += [(x, x) if d is None else (at[d], KEPT) for d in node.deps]
            at.append(row)
        for (a, b, _), gradient in zip(into, found.gradients):
            if gradient is not None:
                self.gradients.setdefault((a, b), []).append(read(gradient))

    def _gradient(self, x: int, zero_heads: bool) -> OperatorGradient:
        """Return the gradient of operator x, or what stands in for it."""
        node = self.graph.nodes[x]
        try:
            if node.subgraphs:
                raise gradients.NotObservable(f"{node.op} holds a graph of its own")
            return gradients.gradient_of(node.op, *_signature(self.graph, node), zero_heads)
        except gradients.NotDifferentiable:
            raise MemongerError(
                f"node {node.name!r}: MXNet has no gradient for the operator {node.op}; put "
                "mx.sym.BlockGrad after it if no gradient should pass"
            ) from None
        except gradients.NotObservable as error:
            self.unobserved[x] = str(error)
            return _reads_everything(self.graph, x)


def _reads_everything(graph: ForwardGraph, x: int) -> OperatorGradient:
    """Stand in for a gradient that cannot be observed: one node that reads all there is."""
    node, outputs = graph.nodes[x], range(len(graph.output_names[x]))
    inputs = [("in", k, 0) for k in range(len(node.inputs))]
    reads = *[("head", k, 0) for k in outputs], *inputs, *[("out", 0, k) for k in outputs]
    into = [k for k, (a, _) in enumerate(node.inputs) if a not in graph.auxiliary]
    tensors = tuple([graph.tensors[a][b] for a, b in (node.inputs[k] for k in into)])
    op, name = f"_backward_{node.op}", f"{gradients.FORWARD}_backward"
    made = gradients.BackwardNode(op, name, {}, reads, (None,), tensors)
    result: dict[int, gradients.Reference] = {k: ("node", 0, j) for j, k in enumerate(into)}
    return OperatorGradient((made,), tuple([result.get(k) for _, k, _ in inputs]))
