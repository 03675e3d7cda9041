"""Build the training graph: every node of a training step, for any set of recomputed operators.

It is built as MXNet builds it (``InitFullGraph`` in ``src/executor/graph_executor.cc``,
``Gradient`` in ``src/nnvm/gradient.cc``), but without a bind. Common subexpressions are merged.
From the outputs back, the gradient nodes of each operator are added, and the gradients of one
tensor are summed. Each operator has a second row, in which it is recomputed. One table is valid for
every plan by marks: the gradient of X reads recomputed results if X is recomputed, and first
results if X is kept.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Iterable, Mapping, Sequence

import numpy as np

from memonger.graph import arrays
from memonger.graph.arrays import (
    BACKWARD,
    FORWARD,
    ORIGINAL,
    RECOMPUTED,
    GraphArrays,
    Read,
    Signature,
    Step,
)
from memonger.graph.forward import Entry, ForwardGraph, no_collection
from memonger.graph.operators import gradients
from memonger.graph.operators.gradients import ZEROS, GradientFacts, Operator, OperatorGradient
from memonger.graph.operators.tensors import DENSE, Attributes
from memonger.support.errors import MemongerError
from memonger.support.kernels import compiled
from memonger.support.mxnet import Settings
from memonger.support.types import Bools, Int64s

Reads = Sequence[Read]

NO_NODE = -1  # the origin of a row that belongs to no forward node
HEAD_COPY = "_identity_with_attr_like_rhs"  # the operator that copies the gradient of an output


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The rows of a training step."""

    graph: ForwardGraph
    settings: Settings  # MXNet's settings when the rows were made
    arrays: GraphArrays
    signatures: Sequence[Signature]  # of each row
    names: Sequence[str]  # of each row
    phases: Int64s  # of each row: FORWARD, RECOMPUTED or BACKWARD
    #: Row -> the forward node that it runs, recomputes or is part of the gradient of, or NO_NODE.
    origin: Int64s
    #: Row without an operator, such as a sum of gradients -> the tensor whose gradient it is.
    gradient_of: Mapping[int, Entry]

    @property
    def training(self) -> TrainingGraph:
        """The training graph of the network without a schedule."""
        raise NotImplementedError

    @cached_property
    def ops(self) -> list[str]:
        return [signature.op for signature in self.signatures]

    @cached_property
    def adds_gradients(self) -> Bools:
        """Whether each row adds one gradient to another, (rows,)."""
        return np.array([op == "_grad_add" for op in self.ops], dtype=np.bool_)

    def name_and_op(self, row: int) -> tuple[str, str]:
        """Return the name and the kind of the operator to which a row belongs.

        A row without an operator gets the name of the tensor whose gradient it is part of. A row
        that a schedule adds gets the name of what it reads.
        """
        if row in self.gradient_of:
            a, b = self.gradient_of[row]
            return self.graph.output_name(self.graph.user_node(a), b), self.ops[row]
        if self.origin[row] == NO_NODE:
            source = self.arrays.read_row[self.arrays.read_start[row]]
            return self.name_and_op(source)[0], self.ops[row]
        node = self.graph.nodes[self.origin[row]]
        return node.name, node.op

    def describe(self, row: int) -> str:
        """Say what a row is, in names of the network without saved identities."""
        (name, op), x = self.name_and_op(row), int(self.origin[row])
        if row in self.gradient_of:
            sums = op in ("add_n", "_grad_add")
            return f"the {'sum of the gradients' if sums else 'gradient'} of {name!r}"
        if x == NO_NODE:
            return f"{op} of {name!r}, which the schedule adds"
        source = self.graph.user_node(x)
        kept = f"the saved identity of {self.graph.nodes[source].name!r}"
        text = f"{name!r} ({op})" if source == x else kept
        return {
            FORWARD: text,
            RECOMPUTED: f"{text}, recomputed",
            BACKWARD: f"the gradient of {text}",
        }[self.phases[row]]


@dataclass(frozen=True, eq=False)
class TrainingGraph(StepGraph):
    """A training graph for any set of recomputed operators, whose rows are named ``*_mirror``."""

    facts: tuple[GradientFacts, ...]  # of each forward node
    gradients: Mapping[int, OperatorGradient]  # operator with a gradient -> its gradient
    same: tuple[int, ...]  # forward node -> the node with which MXNet merges it, or itself
    inexact: tuple[str, ...]  # why a plan of its memory may differ from MXNet's; usually empty
    wanted: tuple[int, ...]  # the arguments that get a gradient
    waits: tuple[tuple[int, int], ...]  # (gradient row, row that must have run before), in order
    unobserved: Mapping[int, str]  # operator whose gradient cannot be observed -> why

    @property
    def training(self) -> TrainingGraph:
        return self

    @cached_property
    def unmarked(self) -> Step:
        """The rows that run if nothing is recomputed."""
        nothing = np.zeros(self.arrays.forward_nodes, dtype=np.bool_)
        step: Step = compiled.find_step(self.arrays, nothing)
        return step

    @property
    def kept_bytes(self) -> int:
        """The bytes of outputs, and of all results that gradients read."""
        t = self.arrays
        read = [*zip(t.head_row[: t.outputs].tolist(), t.head_output[: t.outputs].tolist())]
        start = t.read_start[2 * t.forward_nodes]
        read += zip(t.read_row[start:].tolist(), t.read_output[start:].tolist())
        saved = {(row, k) for row, k in read if row < t.forward_nodes and not t.variable[row]}
        return sum(self.signatures[row].tensors[k].nbytes for row, k in saved)


def training_graph(graph: ForwardGraph, wanted: Iterable[int] | None = None) -> TrainingGraph:
    """Build the training graph of a network.

    ``wanted`` are the arguments (nodes) that get a gradient, by default all.
    """
    return Differentiation(graph).respect_to(graph.arguments if wanted is None else wanted)


def merged_nodes(graph: ForwardGraph) -> list[int]:
    """Return for each node the one with which MXNet merges it, or itself.

    As ``src/executor/eliminate_common_expr_pass.cc`` merges common subexpressions.
    """
    same, nodes = list(range(len(graph.nodes))), graph.nodes
    alike: dict[object, list[int]] = {}  # nodes of one operator with the same inputs
    for i, node in enumerate(nodes):
        if not node.inputs:
            continue
        others = alike.setdefault((node.op, tuple([(same[a], b) for a, b in node.inputs])), [])
        twins = [k for k in others if nodes[k][2:4] == (node.attrs, node.hidden)]
        if not twins:
            others.append(i)
        elif gradients.merges(_operator(graph, i)):
            same[i] = twins[0]
    return same


def _operator(graph: ForwardGraph, i: int) -> Operator:
    """Return an operator of a network apart from it."""
    node = graph.nodes[i]
    # The Python code of a Custom operator gets all attributes.
    attrs = {**node.attrs, **node.hidden} if node.op == "Custom" else node.attrs
    inputs = tuple([graph.tensors[a][b] for a, b in node.inputs])
    outputs = len(graph.output_names[i])
    return Operator(node.op, tuple(sorted(attrs.items())), inputs, outputs, node.subgraphs)


class Differentiation:
    """The gradients of all operators of a network, from which training graphs are made."""

    @no_collection()
    def __init__(self, graph: ForwardGraph, settings: Settings | None = None) -> None:
        self.graph, self.settings = graph, settings or Settings()
        n = self.n = len(graph.nodes)
        self.same = same = merged_nodes(graph) if self.settings.merging else list(range(n))
        # MXNet merges outputs of the network, but its gradient starts from the outputs of the
        # symbol (``InitFullGraph``). So a merged output has rows of its own here.
        merged_heads = {a for a, _ in graph.heads if same[a] != a}
        reasons = {
            "NNVM_EXEC_NUM_TEMP is set": self.settings.coloring,
            "an output of the network is a common sub-expression": merged_heads,
        }
        self.signatures = arrays.Signatures((), [reason for reason in reasons if reasons[reason]])
        # Of each row. The forward nodes come first, then those recomputed, then the gradient rows.
        names = [node.name for node in graph.nodes]
        self.names = [*names, *[f"{name}_mirror" for name in names]]
        self.numbers = 2 * [  # of their signatures
            self.signatures(node.op, node.attrs, len(node.inputs), tensors)
            for node, tensors in zip(graph.nodes, graph.tensors)
        ]
        inputs = [[(same[a], b) for a, b in node.inputs] for node in graph.nodes]
        self.reads: list[Reads] = [[(a, b, ORIGINAL) for a, b in entries] for entries in inputs]
        self.reads += [[(a, b, x) for a, b in entries] for x, entries in enumerate(inputs)]
        #: Control dependencies: a row, the row for which it waits, and the owner of that.
        self.waits = [(i, same[d], ORIGINAL) for i, k in enumerate(graph.nodes) for d in k.deps]
        self.origin = [*range(n), *range(n)]
        self.gradient_of: dict[int, Entry] = {}
        self.terms: dict[Entry, list[Read]] = {}  # the terms of an entry's gradient so far
        self.sums: dict[Entry, Read] = {}
        self.facts = [GradientFacts()] * n
        self.gradients: dict[int, OperatorGradient] = {}
        self.unobserved: dict[int, str] = {}
        for k, head in enumerate(graph.heads):
            name = f"_head_grad_{k}"
            reads = [self._add_part("null", name, {}, [], head), (*head, ORIGINAL)]
            # If two outputs are the same tensor, only the gradient of the last one counts.
            self.terms[head] = [self._add_part(HEAD_COPY, f"{name}_id", {}, reads, head)]
        order = self._merged_order() if merged_heads else range(n)
        run = [x for x in order if self.reads[x] and (same[x] == x or x in merged_heads)]
        operators = [_operator(graph, x) for x in run]
        kinds = {operator: kind for kind, operator in enumerate(dict.fromkeys(operators))}
        gradients.find_gradients(kinds)
        #: Number of an operator, and whether the gradients of its outputs are zero -> its gradient.
        self.observed: dict[tuple[int, bool], OperatorGradient] = {}
        self.is_sparse = bool(graph.sparse)  # whether MXNet stores any tensor otherwise than dense
        #: Gradient node (its id), and whether it is dense for sure -> the number of its signature.
        self.numbers_of: dict[tuple[int, bool], int] = {}
        for x, operator in zip(reversed(run), reversed(operators)):
            self._add_gradient(x, operator, kinds[operator])
        self.read_columns = arrays.join_columns(self.reads, 3)
        self.reads = []  # lists take ten times as many bytes

    def _merged_order(self) -> list[int]:
        """Return the merged forward nodes in execution order (depth first from the outputs)."""
        links = [[a for a, *_ in reads] for reads in self.reads[: self.n]]
        for i, source, _ in self.waits:
            links[i].append(source)
        start, before = arrays.join_columns(links, 1)
        heads = np.array([a for a, _ in self.graph.heads], dtype=np.int32)
        order: list[int] = compiled.walk(0, start, before, before, heads, heads)[0].tolist()
        return order

    def _copy(self) -> Differentiation:
        """Copy what `respect_to` changes."""
        other = copy.copy(self)
        other.names, other.numbers, other.reads = [*self.names], [*self.numbers], []
        other.waits, other.origin = [*self.waits], [*self.origin]
        other.signatures = arrays.Signatures(self.signatures.all, self.signatures.inexact)
        other.sums, other.gradient_of = dict(self.sums), dict(self.gradient_of)
        return other

    @no_collection()
    def respect_to(self, wanted: Iterable[int]) -> TrainingGraph:
        """Build the training graph in which these arguments (nodes) get a gradient."""
        own, wanted = self._copy(), tuple(wanted)
        heads = [(a, b, ORIGINAL) for a, b in own.graph.heads]
        seen: set[Read] = set()
        for a in wanted:
            read = own._sum((a, 0))
            if read in seen:  # MXNet copies a gradient of two arguments (MXGradient, copy_op)
                read = own._add_part("_copy", own.names[a] + "_copy", {}, [read], (a, 0))
            seen.add(read)
            heads.append(read)
        rows = len(own.names)
        # Only the rows that this has added are joined here.
        starts, *columns = zip(own.read_columns, arrays.join_columns(own.reads, 3))
        read_start = np.append(starts[0], starts[0][-1] + starts[1][1:])
        read_row, read_output, read_owner = map(np.concatenate, columns)
        _, head_row, head_output, head_owner = arrays.join_columns([heads], 3)
        waits = sorted(own.waits, key=itemgetter(0))
        waiting, wait_row, wait_owner = np.array(waits, dtype=np.int32).reshape(-1, 3).T.copy()
        wait_start = arrays.find_starts(np.bincount(waiting, minlength=rows))
        unordered = arrays.row_arrays(
            own.signatures.all,
            np.array(own.numbers, dtype=np.int32),
            read_start=read_start,
            read_row=read_row,
            read_output=read_output,
            read_owner=read_owner,
            head_row=head_row,
            head_output=head_output,
            head_owner=head_owner,
            outputs=len(own.graph.heads),
        )
        return TrainingGraph(
            graph=own.graph,
            settings=own.settings,
            arrays=arrays.order_rows(
                unordered, own.n, wait_start=wait_start, wait_row=wait_row, wait_owner=wait_owner
            ),
            signatures=tuple([own.signatures.all[k] for k in own.numbers]),
            names=tuple(own.names),
            phases=np.minimum(np.arange(rows) // own.n, BACKWARD),
            origin=np.array(own.origin, dtype=np.int64),
            gradient_of=own.gradient_of,
            facts=tuple(own.facts),
            gradients=own.gradients,
            same=tuple(own.same),
            inexact=tuple(sorted({*own.signatures.inexact, *own.unobserved.values()})),
            wanted=wanted,
            waits=tuple([(row, source) for row, source, _ in waits if row >= 2 * own.n]),
            unobserved=own.unobserved,
        )

    def _add(self, number: int, name: str, reads: Reads, origin: int) -> Read:
        """Add a gradient row with the signature of this number; return a read of output 0."""
        self.names.append(name)
        self.numbers.append(number)
        self.reads.append(reads)
        self.origin.append(origin)
        return len(self.names) - 1, 0, ORIGINAL

    def _add_part(
        self,
        op: str,
        name: str,
        attrs: Attributes,
        reads: Reads,
        entry: Entry,
        stype: str | None = None,  # by default that of the tensor
    ) -> Read:
        """Add a row that belongs to no operator, but to the gradient of this tensor."""
        tensor = self.graph.tensors[entry[0]][entry[1]]
        like = (tensor if stype is None else tensor._replace(stype=stype),)
        read = self._add(self.signatures(op, attrs, len(reads), like), name, reads, NO_NODE)
        self.gradient_of[read[0]] = entry
        return read

    def _sum(self, entry: Entry) -> Read:
        """Add the rows that sum the gradient of an entry (``AggregateGradient``), once."""
        if entry in self.sums:
            return self.sums[entry]
        terms = self.terms.get(entry, [])
        if len(terms) > 1:
            terms = [term for term in terms if not self._is_zero(term)] or terms[:1]
        if not terms:
            total = self._add_part("_zeros_without_dtype", "zeros_without_dtype", {}, [], entry)
        elif len(terms) == 1:
            total = terms[0]
        elif len(terms) < self.settings.sum_cap:
            count = {"num_args": str(len(terms))}
            total = self._add_part("add_n", "sum_grad", count, terms, entry, self._stype(terms))
        else:
            total = terms[0]
            for k, (previous, term) in enumerate(zip(terms, terms[1:]), 1):
                if previous[0] != term[0]:  # MXNet makes each term wait for the sum before it
                    if term[0] < 2 * self.n:
                        self.signatures.inexact.add("a gradient is a result of the forward pass")
                    self.waits.append((term[0], total[0], total[2]))
                total = self._add_part("_grad_add", f"sum_grad_{k}", {}, (total, term), entry)
            total = self._add_part("_copy", "sum_grad_final", {}, [total], entry)
        self.sums[entry] = total
        return total

    def _stype(self, terms: Reads) -> str:
        """Return how MXNet stores the sum of these gradients."""
        stypes = {self.signatures.all[self.numbers[row]].tensors[k].stype for row, k, _ in terms}
        return stypes.pop() if len(stypes) == 1 else DENSE

    def _is_zero(self, read: Read) -> bool:
        return self.signatures.all[self.numbers[read[0]]].op in ZEROS

    def _add_gradient(self, x: int, operator: Operator, kind: int) -> None:
        """Add the gradient rows of operator x, and their results to the terms of its inputs."""
        terms = [self.terms.get((x, k), ()) for k in range(len(self.graph.output_names[x]))]
        zero_heads = all(met and self._is_zero(self._sum((x, k))) for k, met in enumerate(terms))
        gradient = self.observed.get((kind, zero_heads)) or self._observe(
            x, operator, kind, zero_heads
        )
        self.gradients[x] = gradient
        self.facts[x] = gradient.facts._replace(summed=max(map(len, terms)))
        pairs = [*zip(self.graph.tensors[x], terms)] if self.is_sparse else []
        from_dense = any(met and tensor.stype != self._stype(met) for tensor, met in pairs)
        inputs = self.reads[self.n + x]
        rows: list[int] = []  # gradient node -> its row

        def read(reference: gradients.Reference) -> Read:
            kind, k, output = reference
            if kind == "in":
                return inputs[k]
            if kind == "out":
                return x, output, x
            return (rows[k], output, ORIGINAL) if kind == "node" else self._sum((x, k))

        for node in gradient.nodes:
            name = node.name_of(self.names[x])
            reads = [read(r) for r in node.inputs]  # may add the sums that it reads
            number = self.numbers_of.get((id(node), from_dense))
            if number is None:
                tensors = node.tensors
                if from_dense:  # a dense gradient of a sparse output makes the others dense
                    tensors = tuple([tensor._replace(stype=DENSE) for tensor in tensors])
                number = self.signatures(node.op, node.attrs, len(reads), tensors)
                self.numbers_of[id(node), from_dense] = number
            row = self._add(number, name, reads, x)[0]
            for d in node.deps:
                self.waits.append((row, x, x) if d is None else (row, rows[d], ORIGINAL))
            rows.append(row)
        for (a, b, _), result in zip(inputs, gradient.gradients):
            if result is not None:
                self.terms.setdefault((a, b), []).append(read(result))

    def _observe(self, x: int, operator: Operator, kind: int, zero_heads: bool) -> OperatorGradient:
        """Return the gradient of operator x, or a stand-in if it cannot be observed."""
        node = self.graph.nodes[x]
        try:
            gradient = gradients.gradient_of(operator, zero_heads)
            stypes = {tensor.stype for node in gradient.nodes for tensor in node.tensors}
            self.is_sparse |= not stypes <= {DENSE}
            return self.observed.setdefault((kind, zero_heads), gradient)
        except gradients.NotDifferentiable:
            raise MemongerError(
                f"node {node.name!r}: MXNet has no gradient for the operator {node.op}; put "
                "mx.sym.BlockGrad after it if no gradient should pass"
            ) from None
        except gradients.NotObservable as error:
            attribute, default = gradients.UNWRITTEN.get(node.op, (None, ""))
            if attribute is not None and attribute not in node.attrs:
                raise MemongerError(
                    f"node {node.name!r} ({node.op}) has no {attribute}, without which MXNet "
                    f"cannot make its gradient; write {attribute}={default}, which is the default"
                ) from None
            self.unobserved[x] = str(error)
            return _reads_everything(self.graph, x)


def _reads_everything(graph: ForwardGraph, x: int) -> OperatorGradient:
    """Make a stand-in for a gradient that cannot be observed: a node that reads everything."""
    node, outputs = graph.nodes[x], range(len(graph.output_names[x]))
    inputs = [("in", k, 0) for k in range(len(node.inputs))]
    reads = *[("head", k, 0) for k in outputs], *inputs, *[("out", 0, k) for k in outputs]
    arguments = [k for k, (a, _) in enumerate(node.inputs) if a not in graph.auxiliary]
    tensors = tuple([graph.tensors[a][b] for a, b in (node.inputs[k] for k in arguments)])
    op, name = f"_backward_{node.op}", f"{gradients.FORWARD}_backward"
    backward = gradients.BackwardNode(op, name, {}, reads, (None,), tensors)
    results: dict[int, gradients.Reference] = {k: ("node", 0, j) for j, k in enumerate(arguments)}
    return OperatorGradient((backward,), tuple([results.get(k) for _, k, _ in inputs]))
