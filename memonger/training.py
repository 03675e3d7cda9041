"""The training graph: every node that one training step runs, for any set of recomputed operators.

Built as MXNet builds it (``InitFullGraph`` in ``src/executor/graph_executor.cc``, ``Gradient`` in
``src/nnvm/gradient.cc``), without a bind: common sub-expressions are merged, then the operators are
walked from the outputs back, each one's gradient nodes (``gradients.gradient_of``) are added, and
gradients that meet are summed. An operator has a second row, its recomputed copy. Which of the two
a gradient reads depends on the marks alone, so one table serves every plan:
the gradient of X reads the copies where X itself is recomputed, the originals where X is kept.
"""

import os
from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from memonger.errors import MemongerError
from memonger.forward import Entry, ForwardGraph, Node, Tensor
from memonger.gradients import (
    BackwardNode,
    NotDifferentiable,
    NotObservable,
    Reference,
    gradient_of,
    merges,
)
from memonger.inplace import ignored_inputs, inplace_options

KEPT = -1
ZEROS = ("zeros_like", "_zeros")  # what AggregateGradient leaves out of a sum

#: What a row reads: (row, output, owner). Where the operator `owner` is recomputed, and so is the
#: operator of `row`, its recomputed copy is read instead. KEPT: always the row itself.
Read = Tuple[int, int, int]


class _Row:
    """A node of the training graph while it is built."""

    __slots__ = ("op", "name", "attrs", "reads", "deps", "tensors")

    def __init__(
        self,
        op: str,
        name: str,
        attrs: Dict[str, str],
        reads: List[Read],
        deps: List[Tuple[int, int]],
        tensors: Sequence[Tensor],
    ) -> None:
        self.op, self.name, self.attrs = op, name, attrs
        self.reads, self.deps, self.tensors = reads, deps, tensors


class Tables(NamedTuple):
    """The training graph as arrays, for the compiled replay (``allocator``).

    Rows 0 to n-1 are the forward nodes, n to 2n-1 their recomputed copies, then the gradients.
    ``*_start`` has one more element than there are rows: row r owns [start[r], start[r + 1]).
    """

    forward: int  # n
    variable: np.ndarray
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    read_owner: np.ndarray
    read_ignored: np.ndarray
    dep_start: np.ndarray
    dep_row: np.ndarray
    dep_owner: np.ndarray
    output_start: np.ndarray
    elements: np.ndarray  # of each output
    itemsize: np.ndarray  # bytes of one element of it
    inplace_start: np.ndarray
    inplace_input: np.ndarray
    inplace_output: np.ndarray
    inplace_identity: np.ndarray
    head_row: np.ndarray  # the outputs of the network, then the gradients
    head_output: np.ndarray
    head_owner: np.ndarray
    outputs: int  # how many of them are outputs of the network


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
    inputs: FrozenSet[int]
    passes: FrozenSet[int]
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
    facts : tuple of GradientFacts
        Of each forward node.
    same : tuple of int
        For each forward node the one that MXNet merges it with (or itself).
    inexact : tuple of str
        Why the replay of this graph may differ from MXNet; empty if it should not.
    wanted : tuple of int
        The arguments that get a gradient.
    """

    graph: ForwardGraph
    tables: Tables
    names: Tuple[str, ...]
    ops: Tuple[str, ...]
    facts: Tuple[GradientFacts, ...]
    same: Tuple[int, ...]
    inexact: Tuple[str, ...]
    wanted: Tuple[int, ...]


def training_graph(graph: ForwardGraph, wanted: Optional[Iterable[int]] = None) -> TrainingGraph:
    """Build the training graph of a network.

    Parameters
    ----------
    graph : ForwardGraph
    wanted : iterable of int, optional
        The arguments (node indices) that get a gradient; all of them by default.

    Raises
    ------
    MemongerError
        If MXNet has no gradient for an operator that needs one.
    """
    return _Builder(graph, graph.arguments if wanted is None else tuple(wanted)).build()


def sum_cap() -> int:
    """From so many terms on a gradient is summed in a chain (``AggregateGradient``)."""
    return int(os.environ.get("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "8"))


def merged_nodes(graph: ForwardGraph) -> List[int]:
    """For each node the one that common-subexpression elimination leaves in its place.

    Source: ``src/executor/eliminate_common_expr_pass.cc``. Two operators are one if they are the
    same with the same parameters, marks and inputs, and neither keeps state nor draws numbers.
    """
    same = list(range(len(graph.nodes)))
    if os.environ.get("MXNET_ELIMINATE_COMMON_EXPR", "1") in ("0", "false", "False"):
        return same
    first: Dict[object, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable or not node.inputs:
            continue
        key = (
            node.op,
            tuple(sorted(node.attrs.items())),
            tuple(sorted(node.hidden.items())),
            tuple((same[a], b) for a, b in node.inputs),
        )
        other = first.setdefault(key, i)
        if other != i and merges(
            node.op, node.attrs, [graph.tensors[a][b] for a, b in node.inputs]
        ):
            same[i] = other
    return same


class _Builder:
    def __init__(self, graph: ForwardGraph, wanted: Sequence[int]) -> None:
        self.graph, self.wanted = graph, wanted
        self.n = len(graph.nodes)
        self.same = merged_nodes(graph)
        self.inexact: Set[str] = set()
        self.rows: List[_Row] = []
        self.gradients: Dict[Entry, List[Read]] = {}
        self.sums: Dict[Entry, Read] = {}
        self.facts: Dict[int, GradientFacts] = {}
        self.cap = sum_cap()

    def build(self) -> TrainingGraph:
        graph = self.graph
        heads = [(self.same[a], b) for a, b in graph.heads]
        if heads != list(graph.heads):
            self.inexact.add("an output of the network is a common sub-expression")
        self._forward_rows()
        for k, head in enumerate(heads):
            tensor = [self._tensor(head)]
            variable = self._add("null", "_head_grad_%d" % k, {}, [], [], tensor)
            like = self._add(
                "_identity_with_attr_like_rhs",
                "_head_grad_%d_id" % k,
                {},
                [(variable, 0, KEPT), (head[0], head[1], KEPT)],
                [],
                tensor,
            )
            self.gradients[head] = [(like, 0, KEPT)]
        for x in reversed(self._order(heads)):
            if not graph.nodes[x].is_variable and graph.nodes[x].inputs:
                self._differentiate(x)
        reads: List[Read] = [(a, b, KEPT) for a, b in heads]
        seen: Dict[Read, int] = {}
        for a in self.wanted:
            read = self._sum((a, 0))
            if read in seen:  # no two gradients may be the same array (MXGradient, copy_op)
                tensor = [self._tensor((a, 0))]
                read = (
                    self._add("_copy", graph.nodes[a].name + "_copy", {}, [read], [], tensor),
                    0,
                    -1,
                )
            seen[read] = a
            reads.append(read)
        rows = self.rows
        return TrainingGraph(
            graph,
            self._tables(reads),
            tuple(row.name for row in rows),
            tuple(row.op for row in rows),
            tuple(self.facts.get(x, NO_GRADIENT) for x in range(self.n)),
            tuple(self.same),
            tuple(sorted(self.inexact)),
            tuple(self.wanted),
        )

    # ------------------------------------------------------------------ rows

    def _add(
        self,
        op: str,
        name: str,
        attrs: Dict[str, str],
        reads: List[Read],
        deps: List[Tuple[int, int]],
        tensors: Sequence[Tensor],
    ) -> int:
        self.rows.append(_Row(op, name, attrs, reads, deps, tensors))
        return len(self.rows) - 1

    def _tensor(self, entry: Entry) -> Tensor:
        return self.graph.tensors[entry[0]][entry[1]]

    def _forward_rows(self) -> None:
        """The forward nodes, then a recomputed copy of each, reading copies where there are any."""
        for copy in (False, True):
            for x, node in enumerate(self.graph.nodes):
                owner = x if copy else KEPT
                self._add(
                    node.op,
                    node.name + ("_mirror" if copy else ""),
                    dict(node.attrs),
                    [(self.same[a], b, owner) for a, b in node.inputs],
                    [(self.same[d], owner) for d in node.deps],
                    self.graph.tensors[x],
                )

    def _order(self, heads: Sequence[Entry]) -> List[int]:
        """The forward nodes in the order in which they run once duplicates are merged."""
        order: List[int] = []
        seen: Set[int] = set()
        for head, _ in heads:
            if head in seen:
                continue
            seen.add(head)
            stack = [(head, iter(self._before(head)))]
            while stack:
                x, before = stack[-1]
                following = next((y for y in before if y not in seen), None)
                if following is None:
                    order.append(x)
                    stack.pop()
                else:
                    seen.add(following)
                    stack.append((following, iter(self._before(following))))
        return order

    def _before(self, x: int) -> List[int]:
        row = self.rows[x]
        return [a for a, _, _ in row.reads] + [d for d, _ in row.deps]

    # ------------------------------------------------------------------ gradients

    def _sum(self, entry: Entry) -> Read:
        """The gradient of an entry (``AggregateGradient``): all that met there, added up."""
        if entry in self.sums:
            return self.sums[entry]
        tensor = [self._tensor(entry)]
        terms = self.gradients.get(entry, [])
        if not terms:
            self.sums[entry] = (self._zeros(tensor), 0, KEPT)
            return self.sums[entry]
        terms = [t for t in terms if not self._is_zero(t)] or terms[:1]
        if len(terms) == 1:
            total = terms[0]
        elif len(terms) < self.cap:
            attrs = {"num_args": str(len(terms))}
            total = (self._add("add_n", "sum_grad", attrs, terms, [], tensor), 0, KEPT)
        else:
            total = terms[0]
            for k in range(1, len(terms)):
                if terms[k - 1][0] != terms[k][0]:  # adds up in the order of the backward pass
                    if terms[k][0] < 2 * self.n:
                        self.inexact.add("a gradient is a result of the forward pass")
                    self.rows[terms[k][0]].deps.append((total[0], total[2]))
                name = "sum_grad_%d" % k
                total = (self._add("_grad_add", name, {}, [total, terms[k]], [], tensor), 0, KEPT)
            total = (self._add("_copy", "sum_grad_final", {}, [total], [], tensor), 0, KEPT)
        self.sums[entry] = total
        return total

    def _zeros(self, tensor: List[Tensor]) -> int:
        return self._add("_zeros_without_dtype", "zeros_without_dtype", {}, [], [], tensor)

    def _is_zero(self, read: Read) -> bool:
        return self.rows[read[0]].op in ZEROS

    def _differentiate(self, x: int) -> None:
        """Add the gradient nodes of operator x, and hand their results to its inputs."""
        graph, node = self.graph, self.graph.nodes[x]
        into = [(self.same[a], b) for a, b in node.inputs]
        shown = [(x, k) for k in range(graph.visible[x])]
        zero_heads = all(
            entry in self.gradients and self._is_zero(self._sum(entry)) for entry in shown
        )
        try:
            if node.subgraphs:
                raise NotObservable("%s holds a graph of its own" % node.op)
            found = gradient_of(node.op, node.attrs, [self._tensor(e) for e in into], zero_heads)
            made, gradients = found.nodes, found.gradients
        except NotDifferentiable:
            raise MemongerError(
                "node %r: MXNet has no gradient for the operator %s, so the network cannot be "
                "trained through it; put mx.sym.BlockGrad after it if no gradient should pass"
                % (node.name, node.op)
            ) from None
        except NotObservable as error:
            self.inexact.add(str(error))
            made, gradients = _reads_everything(graph, x)
        summed = max(len(self.gradients.get(entry, ())) for entry in shown)
        self.facts[x] = _facts(made, gradients, summed)

        def read(reference: Reference) -> Read:
            kind, k = reference[0], reference[1]
            if kind == "head":
                return self._sum((x, k))
            if kind == "in":
                return (into[k][0], into[k][1], x)
            if kind == "out":
                return (x, k, x)
            return (at[k], reference[2], KEPT)

        at: List[int] = []
        for j, backward in enumerate(made):
            reads = [read(r) for r in backward.inputs]  # may add the sums that it reads
            deps = [(x, x) if d is None else (at[d], KEPT) for d in backward.deps]
            name = node.name + "_backward" + ("" if j == 0 else "_%d" % j)
            at.append(
                self._add(backward.op, name, dict(backward.attrs), reads, deps, backward.tensors)
            )
        for entry, reference in zip(into, gradients):
            if reference is not None:
                self.gradients.setdefault(entry, []).append(read(reference))

    # ------------------------------------------------------------------ arrays

    def _tables(self, heads: List[Read]) -> Tables:
        rows = self.rows
        reads = [read for row in rows for read in row.reads]
        deps = [dep for row in rows for dep in row.deps]
        tensors = [tensor for row in rows for tensor in row.tensors]
        ignored: List[bool] = []
        inplace: List[Tuple[int, int, bool]] = []
        inplace_start = [0]
        for row in rows:
            count = len(row.reads)
            skip = set(ignored_inputs(row.op, row.attrs, count)) if count else set()
            ignored.extend(k in skip for k in range(count))
            options = () if row.op == "null" else inplace_options(row.op, row.attrs, count)
            if options is None:
                self.inexact.add("the in-place options of %s are not listed" % row.op)
                options = ()
            inplace.extend(o for o in options if o[0] < count and o[1] < len(row.tensors))
            inplace_start.append(len(inplace))
        sizes = {t.dtype: np.dtype(t.dtype).itemsize for t in tensors}

        def column(items: Sequence[Sequence[int]], k: int) -> np.ndarray:
            return np.array([item[k] for item in items], dtype=np.int64)

        def starts(counts: Iterable[int]) -> np.ndarray:
            return np.concatenate([[0], np.cumsum(list(counts))]).astype(np.int64)

        return Tables(
            self.n,
            np.array([row.op == "null" for row in rows], dtype=np.bool_),
            starts(len(row.reads) for row in rows),
            column(reads, 0),
            column(reads, 1),
            column(reads, 2),
            np.array(ignored, dtype=np.bool_),
            starts(len(row.deps) for row in rows),
            column(deps, 0),
            column(deps, 1),
            starts(len(row.tensors) for row in rows),
            np.array([tensor.elements for tensor in tensors], dtype=np.int64),
            np.array([sizes[tensor.dtype] for tensor in tensors], dtype=np.int64),
            np.array(inplace_start, dtype=np.int64),
            column(inplace, 0),
            column(inplace, 1),
            np.array([o[2] for o in inplace], dtype=np.bool_),
            column(heads, 0),
            column(heads, 1),
            column(heads, 2),
            len(self.graph.heads),
        )


def _facts(
    made: Sequence[BackwardNode], gradients: Sequence[Optional[Reference]], summed: int
) -> GradientFacts:
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


def _reads_everything(
    graph: ForwardGraph, x: int
) -> Tuple[Tuple[BackwardNode, ...], Tuple[Optional[Reference], ...]]:
    """A stand-in for a gradient that cannot be observed: one node that reads all there is."""
    node: Node = graph.nodes[x]
    outputs = range(graph.visible[x])
    inputs = [k for k, (a, _) in enumerate(node.inputs) if a not in graph.auxiliary]
    reads: List[Reference] = [("head", k) for k in outputs]
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
    return (made,), tuple(
        ("node", 0, place[k]) if k in place else None for k in range(len(node.inputs))
    )
