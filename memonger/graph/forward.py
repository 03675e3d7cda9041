"""The forward graph of a network as plain data: its operators in execution order, with tensors.

Its nodes are those of the symbol's JSON. An index identifies a node, because names may repeat.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Iterator, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators import recompute
from memonger.graph.operators.flops import count_flops
from memonger.graph.operators.tensors import DENSE, Attributes, Tensor, Tensors
from memonger.support.types import Bools, Int64s

Entry = Tuple[int, int]  # a node of a graph, and which of its outputs
RowEntry = Tuple[int, int]  # a row of a training step, and which of its outputs

FLOAT = "float32"
RECORD = "__memonger__"  # JSON: attribute -> its value before the plan, null if there was none
INSERTED = '"inserted"'  # the record of a node that the plan has inserted
#: The attribute of the variables of a network whose terms of gradients are added afterwards, not in
#: place, because autograd adds them (``operators.added``).
AFTERWARDS = "__adds_afterwards__"


class Node(NamedTuple):
    """A node of the graph: a variable or an operator."""

    name: str
    op: str  # 'null' for a variable
    attrs: Attributes  # the operator's own parameters
    hidden: Attributes  # attributes for executors and planners, such as __force_mirroring__
    inputs: tuple[Entry, ...]
    deps: tuple[int, ...]  # nodes that must have run before
    subgraphs: str = ""  # JSON of the graphs that an operator of control flow runs

    @property
    def is_variable(self) -> bool:
        return self.op == "null"

    @property
    def holds_graph(self) -> bool:
        """Whether it runs a graph of its own: control flow, or a ``_CachedOp``."""
        return bool(self.subgraphs) or self.op == "_CachedOp"

    @property
    def is_inserted(self) -> bool:
        """Whether a plan has inserted it (`insert_identities`)."""
        return self.hidden.get(RECORD) == INSERTED


@dataclass(frozen=True)
class ForwardGraph:
    """The nodes and tensors of a network, from which a planner plans it."""

    nodes: tuple[Node, ...]  # in execution order
    tensors: tuple[Tensors, ...]  # the outputs of each node; list_outputs shows the first of them
    output_names: tuple[tuple[str, ...], ...]  # of the shown outputs, as in get_internals()
    heads: tuple[Entry, ...]  # the outputs of the network
    arguments: tuple[int, ...]  # variables that may have a gradient, as in list_arguments
    auxiliary: frozenset[int]  # variables that are auxiliary states

    @functools.cached_property
    def operators(self) -> tuple[int, ...]:
        """Indices of the nodes that are not variables."""
        return tuple([i for i, node in enumerate(self.nodes) if not node.is_variable])

    @functools.cached_property
    def adds_afterwards(self) -> bool:
        """Whether terms of gradients are added afterwards, not in place."""
        return any(AFTERWARDS in self.nodes[i].hidden for i in self.arguments)

    @functools.cached_property
    def sparse(self) -> frozenset[Entry]:
        """The tensors that MXNet stores as csr or row_sparse."""
        entries = ((i, k, t) for i, ts in enumerate(self.tensors) for k, t in enumerate(ts))
        return frozenset((i, k) for i, k, tensor in entries if tensor.stype != DENSE)

    @functools.cached_property
    def flops(self) -> Int64s:
        """The FLOPs of each node in a forward pass, (nodes,)."""
        counts = np.zeros(len(self.nodes), dtype=np.int64)
        for i in self.operators:
            node, outputs = self.nodes[i], [tensor.shape for tensor in self.shown_tensors(i)]
            inputs = [self.tensors[a][b].shape for a, b in node.inputs]
            counts[i] = count_flops(node.op, node.attrs, inputs, outputs)
        return counts

    @functools.cached_property
    def moved_states(self) -> frozenset[int]:
        """The auxiliary states that one operator updates and other operators read or update too."""
        readers = [a for i in self.operators for a in {a for a, _ in self.nodes[i].inputs}]
        counts = Counter(a for a in readers if a in self.auxiliary)
        moved = (
            a
            for node in self.nodes
            if recompute.moves_states(node.op, node.attrs)
            for a, _ in node.inputs
        )
        return frozenset(a for a in moved if counts[a] > 1)

    def why_kept(self, i: int) -> str | None:
        """Return why an operator must not be recomputed, or None if it may be."""
        node = self.nodes[i]
        reason = recompute.why_kept(node.op, node.attrs)
        if reason is None and self.sparse:
            outputs = [(i, k) for k in range(len(self.tensors[i]))]
            if not self.sparse.isdisjoint([*node.inputs, *outputs]):
                return "it reads or makes a sparse array"
        if reason is None and not self.moved_states.isdisjoint([a for a, _ in node.inputs]):
            if not recompute.moves_states(node.op, node.attrs):
                return "it reads an auxiliary state that another operator has updated by then"
        return reason

    def shown_tensors(self, i: int) -> Tensors:
        """Return the outputs of a node that ``list_outputs`` shows."""
        return self.tensors[i][: len(self.output_names[i])]

    def user_node(self, i: int) -> int:
        """Return the node behind which a plan has inserted this one, or else the node itself."""
        while self.nodes[i].is_inserted:  # a node without inputs is right before its reader
            i = self.nodes[i].inputs[0][0] if self.nodes[i].inputs else i + 1
        return i

    def output_name(self, i: int, k: int) -> str:
        """Return the name of an output as in ``list_outputs``, or one for an output not there."""
        names = self.output_names[i]
        return names[k] if k < len(names) else f"{self.nodes[i].name}[{k}]"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would walk a large graph often and find no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


IDENTITY = "_copy"  # its output is its input's memory, and its gradient reads nothing
# Another identity, which reads its input twice. Pointwise fusion ignores it and its gradient. Of a
# `_copy` fusion makes one more output of a fused operator, with memory of its own. This identity
# fails if MXNet infers the shape of its input from a reader. In inference MKLDNN fuses a
# convolution with what follows a `_copy`, but not with what follows this identity.
UNFUSED_IDENTITY = "reshape_like"
# A product with one, which is recomputed before a tied identity. Fusion ignores it, and its
# gradient reads its input.
FUSION_BARRIER = "broadcast_mul"


class SavedIdentity(NamedTuple):
    """An identity behind the first output of a recomputed node, whose result is saved instead."""

    node: int
    #: The NumPy type of the output if a reader of the node must be recomputed too (``rules``): then
    #: a recomputed `FUSION_BARRIER` is between node and identity. Otherwise ''.
    tied_dtype: str = ""
    unfused: bool = False  # whether it is an `UNFUSED_IDENTITY`: for training on a GPU only

    @property
    def offset(self) -> int:
        """How many nodes behind its node it is."""
        return 3 if self.tied_dtype else 1


class Insertion(NamedTuple):
    """The inserted nodes of saved identities, and the new indices of all nodes."""

    identities: tuple[SavedIdentity, ...]
    new_index: list[int]  # old node -> its index in the network with the identities
    behind: dict[int, list[Node]]  # old node -> the nodes inserted behind it, the identity last
    node_count: int  # of the network with the identities
    saved: Int64s  # (identities,): the new index of the node of each
    places: Int64s  # (identities,): the index of each

    def entry(self, a: int, b: int) -> Entry:
        """Return the new entry for readers of (a, b): the identity of the node, if it has one."""
        return self.new_index[a] + (len(self.behind.get(a, ())) if b == 0 else 0), b

    def extend(self, mask: Bools) -> Bools:
        """Return the recomputed nodes of the network with the identities.

        Parameters
        ----------
        mask : array of bool, (nodes,)
            The recomputed nodes of the network without them.

        Returns
        -------
        array of bool, (node_count,)
            The same nodes, and fusion barriers, but no identities.
        """
        extended = np.zeros(self.node_count, dtype=np.bool_)
        extended[self.new_index] = mask
        is_tied = [bool(k.tied_dtype) for k in self.identities]
        extended[self.places[is_tied] - 1] = True
        return extended

    def find_used(self, extended: Bools) -> tuple[SavedIdentity, ...]:
        """Return the identities that a plan saves, of nodes that it recomputes."""
        used = np.flatnonzero(extended[self.saved] & ~extended[self.places])
        return tuple([self.identities[k] for k in used.tolist()])


def insert_identities(names: Sequence[str], identities: Iterable[SavedIdentity] = ()) -> Insertion:
    """Return the nodes of saved identities for a network whose nodes have these names."""
    identities = tuple(identities)
    identity_of = {identity.node: identity for identity in identities}
    new_index: list[int] = []
    behind: dict[int, list[Node]] = {}
    taken = set(names)
    index = 0

    def add(new: list[Node], stem: str, op: str, attrs: Attributes, *inputs: int) -> None:
        name, number = stem + "_keep", 1
        while name in taken:
            name, number = f"{stem}_{number}_keep", number + 1
        taken.add(name)
        entries = tuple([(i, 0) for i in inputs])
        new.append(Node(name, op, attrs, {RECORD: INSERTED}, entries, ()))

    for i, name in enumerate(names):
        new_index.append(index)
        if i in identity_of:
            _, dtype, unfused = identity_of[i]
            new = behind[i] = []
            source = index
            if dtype:
                add(new, name + "_one", "_ones", {"shape": "(1,)", "dtype": dtype})
                add(new, name + "_tie", FUSION_BARRIER, {}, index, index + 1)
                source = index + 2
            op, inputs = (UNFUSED_IDENTITY, (source, source)) if unfused else (IDENTITY, (source,))
            add(new, name, op, {}, *inputs)
            index += len(new)
        index += 1
    saved = np.array([new_index[k.node] for k in identities], dtype=np.int64)
    places = saved + np.array([k.offset for k in identities], dtype=np.int64)
    return Insertion(identities, new_index, behind, index, saved, places)


def with_identities(
    graph: ForwardGraph, identities: Iterable[SavedIdentity]
) -> tuple[ForwardGraph, Insertion]:
    """Return the graph of the symbol that ``marks.write`` returns, and its inserted nodes."""
    insertion = insert_identities([node.name for node in graph.nodes], identities)
    new_index = insertion.new_index
    rows: list[tuple[Node, Tensors, tuple[str, ...]]] = []
    for i, (old, tensors) in enumerate(zip(graph.nodes, graph.tensors)):
        inputs = tuple([insertion.entry(a, b) for a, b in old.inputs])
        deps = tuple([new_index[d] for d in old.deps])
        node = Node(old.name, old.op, old.attrs, old.hidden, inputs, deps, old.subgraphs)
        rows.append((node, tensors, graph.output_names[i]))
        for new in insertion.behind.get(i, ()):
            tensor = tensors[0] if new.inputs else Tensor((1,), new.attrs["dtype"])
            rows.append((new, (tensor,), (new.name + "_output",)))
    nodes, all_tensors, output_names = zip(*rows)
    extended = ForwardGraph(
        nodes=nodes,
        tensors=all_tensors,
        output_names=output_names,
        heads=tuple((new_index[a], b) for a, b in graph.heads),
        arguments=tuple(new_index[a] for a in graph.arguments),
        auxiliary=frozenset(new_index[a] for a in graph.auxiliary),
    )
    return extended, insertion
