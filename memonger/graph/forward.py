"""The forward graph of a network as plain data: its operators in execution order, with tensors.

The nodes are those of the symbol's JSON; a node's index is its identity, for names may repeat.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass
from typing import Iterable, Iterator, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.graph.operators.tensors import Attributes, Tensor, Tensors

Entry = Tuple[int, int]  # a node's index and which of its outputs

FLOAT = "float32"
RECORD = "__memonger__"  # JSON: attribute -> what it was before, null if it was not there
INSERTED = '"inserted"'  # the record of a node that was not there at all


class Node(NamedTuple):
    """One node of the graph; ``op`` is 'null' for a variable."""

    name: str
    op: str
    attrs: Attributes  # the operator's own parameters
    hidden: Attributes  # what executors and planners read: __force_mirroring__ and the like
    inputs: tuple[Entry, ...]
    deps: tuple[int, ...]  # nodes that must have run before
    subgraphs: bool  # a control-flow operator

    @property
    def is_variable(self) -> bool:
        return self.op == "null"

    @property
    def is_inserted(self) -> bool:
        """Whether a plan has put it in (`Insertion`)."""
        return self.hidden.get(RECORD) == INSERTED


@dataclass(frozen=True)
class ForwardGraph:
    """Everything a planner may know of a network, as plain data."""

    nodes: tuple[Node, ...]  # in execution order
    tensors: tuple[Tensors, ...]  # of each node, first those that list_outputs shows
    output_names: tuple[tuple[str, ...], ...]  # of those, as get_internals().list_outputs()
    heads: tuple[Entry, ...]  # the outputs of the network
    arguments: tuple[int, ...]  # variables that can have a gradient, as list_arguments
    auxiliary: frozenset[int]  # variables that are auxiliary states

    @functools.cached_property
    def operators(self) -> tuple[int, ...]:
        """Indices of the nodes that are not variables."""
        return tuple([i for i, node in enumerate(self.nodes) if not node.is_variable])

    def shown(self, i: int) -> Tensors:
        """Return the outputs of a node that ``list_outputs`` shows."""
        return self.tensors[i][: len(self.output_names[i])]

    def given(self, i: int) -> int:
        """Return the node behind which a plan put this one in; itself where no plan did."""
        while self.nodes[i].is_inserted:  # what has no inputs stands right before what reads it
            i = self.nodes[i].inputs[0][0] if self.nodes[i].inputs else i + 1
        return i

    def output_name(self, i: int, k: int) -> str:
        """Name an output of a node as ``list_outputs`` does, also one that that does not show."""
        names = self.output_names[i]
        return names[k] if k < len(names) else f"{self.nodes[i].name}[{k}]"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave the garbage collector off: a large graph makes no garbage but is walked by it often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


COPY = "_copy"  # the identity: takes its input's memory, and its gradient reads nothing
# The same, of a tensor and itself. Pointwise fusion knows neither it nor its gradient, but makes
# `_copy` one more output of a fused operator, with memory of its own. It fails where its input's
# shape is inferred from what reads it, and MKLDNN, which sees through `_copy` in inference, does
# not fuse a convolution with what is behind it.
UNFUSED_COPY = "reshape_like"
# By one; recomputed before a tied copy. Fusion leaves it alone, and its gradient reads its input.
PRODUCT = "broadcast_mul"


class KeptCopy(NamedTuple):
    """An identity behind the first output of a recomputed node: the result that is kept."""

    node: int
    # Where the recomputed copy of the node must have a reader (``rules``), the NumPy type of the
    # output: a product with one then stands between the two and is recomputed. Otherwise ''.
    tie: str = ""
    unfused: bool = False  # for training on a GPU alone: pointwise fusion leaves it alone
    apart: bool = False  # it only keeps apart what would be fused, though the node may be kept

    @property
    def offset(self) -> int:
        """How far behind the node it stands."""
        return 3 if self.tie else 1


class Insertion:
    """Where the nodes of a network, of these names, and of its kept copies stand when all are in.

    All that read the first output of a node with a kept copy read the copy instead.
    """

    def __init__(self, names: Sequence[str], copies: Iterable[KeptCopy]) -> None:
        at = {copy.node: copy for copy in sorted(copies)}
        sizes = [1 + at[i].offset if i in at else 1 for i in range(len(names))]
        #: The new index of each node; what is inserted comes right after its node.
        self.moved: list[int] = np.cumsum([0, *sizes])[:-1].tolist()
        self._taken = set(names)
        #: Of each node with a copy what is inserted behind it, the copy last.
        self.behind = {i: list(self._behind(names[i], copy)) for i, copy in at.items()}

    def entry(self, a: int, b: int) -> Entry:
        """Return what is read now by a node that read output ``b`` of node ``a``."""
        return self.moved[a] + (len(self.behind.get(a, ())) if b == 0 else 0), b

    def _behind(self, name: str, copy: KeptCopy) -> Iterator[Node]:
        at = self.moved[copy.node]
        if copy.tie:
            yield self._node(name + "_one", "_ones", {"shape": "(1,)", "dtype": copy.tie})
            yield self._node(name + "_tie", PRODUCT, {}, at, at + 1)
            at += 2
        op, inputs = (UNFUSED_COPY, (at, at)) if copy.unfused else (COPY, (at,))
        yield self._node(name, op, {}, *inputs)

    def _node(self, stem: str, op: str, attrs: dict[str, str], *inputs: int) -> Node:
        name, number = stem + "_keep", 1
        while name in self._taken:
            name, number = f"{stem}_{number}_keep", number + 1
        self._taken.add(name)
        hidden = {RECORD: INSERTED}
        return Node(name, op, attrs, hidden, tuple([(i, 0) for i in inputs]), (), False)


def with_copies(graph: ForwardGraph, copies: Iterable[KeptCopy]) -> tuple[ForwardGraph, np.ndarray]:
    """Return the graph as ``marks.apply`` leaves the symbol, and the new index of each node."""
    made = Insertion([node.name for node in graph.nodes], copies)
    moved = made.moved
    rows: list[tuple[Node, Tensors, tuple[str, ...]]] = []
    for i, (node, tensors) in enumerate(zip(graph.nodes, graph.tensors)):
        inputs = tuple([made.entry(a, b) for a, b in node.inputs])
        node = node._replace(inputs=inputs, deps=tuple([moved[d] for d in node.deps]))
        rows.append((node, tensors, graph.output_names[i]))
        for new in made.behind.get(i, ()):
            tensor = tensors[0] if new.inputs else Tensor((1,), new.attrs["dtype"])
            rows.append((new, (tensor,), (new.name + "_output",)))
    nodes, all_tensors, output_names = zip(*rows)
    found = ForwardGraph(
        nodes=nodes,
        tensors=all_tensors,
        output_names=output_names,
        heads=tuple((moved[a], b) for a, b in graph.heads),
        arguments=tuple(moved[a] for a in graph.arguments),
        auxiliary=frozenset(moved[a] for a in graph.auxiliary),
    )
    return found, np.array(moved)


def mask_with_copies(
    mask: np.ndarray, moved: np.ndarray, copies: Iterable[KeptCopy], count: int
) -> np.ndarray:
    """Return what a plan recomputes of the nodes of ``with_copies``: not the kept copies."""
    full = np.zeros(count, dtype=np.bool_)
    full[moved] = mask
    full[moved[[copy.node for copy in copies if copy.tie]] + 2] = True  # the products
    return full
