"""The training step of a schedule as a graph, for the replay of its memory and for the symbol."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.replay import Replay, replay
from memonger.graph import arrays
from memonger.graph.arrays import GraphArrays, Signature, Signatures, arrays_of, columns
from memonger.graph.forward import Entry
from memonger.graph.operators.layouts import AXES
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import TrainingGraph
from memonger.schedules.layouts import AFTER, BEFORE, HOLD, Expected, Insert
from memonger.schedules.nodes import NodeVariants, Rows, lay_out
from memonger.schedules.schedule import Workload
from memonger.support.mxnet import Settings

#: The environment in which the symbol of a schedule must be bound, and its memory replayed. Else
#: MKLDNN would fuse for inference, as grad_req is 'null'; common subexpressions would merge the
#: copies; fusion would reorder; one match range is not enough for tensors that live this shortly.
BIND = {
    "MXNET_SUBGRAPH_BACKEND": "NONE",
    "MXNET_ELIMINATE_COMMON_EXPR": "0",
    "MXNET_USE_FUSION": "0",
    "NNVM_AUTO_SEARCH_MATCH_RANGE": "1",
}

Reads = Sequence[Entry]
Waits = Sequence[int]

#: So begins the name of what only a schedule runs.
OURS = "memonger_again_"

#: The mean of each channel reads blocks. For an operator that cannot, such as ``max``, MXNet's
#: executor makes a plain copy and keeps it (``StorageFallbackOpExecutor``,
#: ``src/executor/attach_op_execs_pass.cc``). It must be read: without MKLDNN, Pooling has to write.
MEAN = {"global_pool": "True", "kernel": "(1, 1)", "pool_type": "avg"}


@dataclass(frozen=True, eq=False)
class Parts:
    """All that the training steps of a network are made of."""

    work: Workload
    mkldnn: bool  # whether MKLDNN may compute them
    variants: NodeVariants
    signatures: tuple[Signature, ...]  # that the variants refer to
    gradients: tuple[Entry | None, ...]  # of the arguments that get one, by variant; None: zeros
    totals: Mapping[int, int]  # of arguments whose gradient is added to a total: its variable
    left_out: frozenset[int]  # arguments whose gradient MKLDNN does not write
    expected: Expected | None  # layouts without a schedule; None if MKLDNN lays out no tensor

    def asked(self) -> np.ndarray:
        """The variants and outputs that are gradients, (variant, output), each once."""
        asked = dict.fromkeys(filter(None, self.gradients))
        return np.array(list(asked), dtype=np.int64).reshape(-1, 2)


class Node(NamedTuple):
    """A node of a training step: one row of `Rows`, with its reads and waits as lists."""

    signature: int
    source: int
    time: int
    reads: Reads
    waits: Waits


class Nodes:
    """Nodes that are put down one after the other, and their signatures."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self.all: list[Node] = []
        self.signatures = Signatures(list(signatures))

    def add(self, node: Node) -> int:
        """Put down a node, and return its number."""
        self.all.append(node)
        return len(self.all) - 1

    def insert(
        self, op: str, attrs: dict[str, str], tensor: Tensor, reads: Reads = (), waits: Waits = ()
    ) -> Entry:
        """Put down a node that the network does not have, and return its one output."""
        signature = self.signatures(op, attrs, len(reads), (tensor,))
        return self.add(Node(signature, -1, -1, reads, waits)), 0

    def tensor(self, entry: Entry) -> Tensor:
        """Tell shape and type of an output."""
        return self.signatures.all[self.all[entry[0]].signature].tensors[entry[1]]

    def rows(self, first: Sequence[int] = (), latest: Sequence[int] = ()) -> Rows:
        """Make rows of the nodes; ``first`` and ``latest`` as in `Rows`."""
        *own, reads, waits = zip(*self.all)
        lists = *own, *columns(reads, 2), *columns(waits, 1), first, latest
        return Rows(*(np.array(each, dtype=np.int32) for each in lists))


def nodes_of(rows: Rows) -> list[Node]:
    """List the rows of a training step as nodes."""
    entries = list(zip(rows.read_row.tolist(), rows.read_output.tolist()))
    reads = [entries[start:stop] for start, stop in zip(rows.read_start, rows.read_start[1:])]
    wait = rows.wait_row.tolist()
    waits = [wait[start:stop] for start, stop in zip(rows.wait_start, rows.wait_start[1:])]
    return list(map(Node, *(column.tolist() for column in rows[:3]), reads, waits))


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """The training graph of a schedule, as ``training.TrainingGraph`` is that of a set of marks."""

    parts: Parts
    rows: Rows
    all_signatures: Sequence[Signature]  # that the rows refer to
    arrays: GraphArrays
    heads: list[Entry]  # the outputs of the symbol: those of the network, then gradients
    #: Of each argument that gets one the output of the symbol; two may be the same. None: zeros.
    gradients: tuple[int | None, ...]

    @property
    def training(self) -> TrainingGraph:
        """The training graph of the network without a schedule."""
        return self.parts.work.training

    @cached_property
    def signatures(self) -> list[Signature]:
        """Operator, parameters, shapes and types of each row."""
        return [self.all_signatures[k] for k in self.rows.signature.tolist()]

    @cached_property
    def ops(self) -> list[str]:
        return [signature.op for signature in self.signatures]

    @cached_property
    def names(self) -> list[str]:
        """Of each row: MXNet's, where it runs that too, or one of our own (`OURS`)."""
        names: list[str] = []
        for row, (source, time) in enumerate(zip(self.rows.source.tolist(), self.rows.time)):
            usual = self.training.names[source] if source >= 0 else self.ops[row]
            is_head = source >= self.training.arrays.forward and self.ops[row] == "null"
            names.append(f"{OURS}{row}_{usual}" if source < 0 or time > 0 or is_head else usual)
        return names

    @property
    def phases(self) -> np.ndarray:
        """FORWARD, RECOMPUTED or BACKWARD for each row."""
        first, recomputed = self.rows.time == 0, (self.rows.time > 0) | (self.rows.source < 0)
        usual = np.where(first, arrays.FORWARD, arrays.BACKWARD)
        return np.where(recomputed, arrays.RECOMPUTED, usual)

    @property
    def settings(self) -> Settings:
        """MXNet's when it is bound (`BIND`)."""
        return replace(self.training.settings, search_match_range=True)

    def replay(self) -> Replay:
        """Order it and plan its memory as MXNet will."""
        return replay(self, np.zeros(0, dtype=np.bool_))


def step_of(made: Parts, rows: Rows, signatures: Sequence[Signature]) -> TrainingStep:
    """Make the training step of these rows, which are of these signatures."""
    training = made.work.training
    found = [entry and (int(rows.latest[entry[0]]), entry[1]) for entry in made.gradients]
    heads = [(int(rows.first[x]), k) for x, k in training.graph.heads]
    heads += filter(None, dict.fromkeys(found))
    place: dict[Entry | None, int] = {entry: k for k, entry in reversed(list(enumerate(heads)))}
    made_of = lay_out(arrays_of(signatures), rows, *np.array(heads, dtype=np.int32).T.copy())
    return TrainingStep(made, rows, signatures, made_of, heads, tuple(map(place.get, found)))


def insert(step: TrainingStep, inserts: Mapping[int, Sequence[Insert]]) -> TrainingStep:
    """Make a training step with more operators, for the layouts of its tensors."""
    new = Nodes(step.all_signatures)
    place: list[int] = []  # of each old row
    instead: dict[Entry, Entry] = {}
    chain: list[int] = []  # the last row that others wait for; what is put in before a row does
    pending: list[int] = []  # what is put in behind rows: the next that may wait, waits for it
    for row, node in enumerate(nodes_of(step.rows)):
        reads = [(place[source], k) for source, k in node.reads]
        reads = [instead.get(entry, entry) for entry in reads]
        for one in inserts.get(row, ()):
            if one.where == BEFORE:
                reads[one.place] = _put_in(new, one, reads[one.place], chain)
        waits = [place[before] for before in node.waits]
        if waits:
            waits, pending = waits + pending, []
        here = new.add(node._replace(reads=reads, waits=waits))
        place.append(here)
        if waits or node.time >= 0:
            chain = [here]
        for one in inserts.get(row, ()):
            if one.where == HOLD:
                pending.append(_put_in(new, one, reads[one.place], [here])[0])
            elif one.where == AFTER:
                entry = here, one.place
                instead[entry] = _put_in(new, one, entry, [])
                pending.append(instead[entry][0])
    moved = np.array([*place, -1], dtype=np.int32)
    rows = new.rows(moved[step.rows.first], moved[step.rows.latest])
    return step_of(step.parts, rows, new.signatures.all)


def _put_in(new: Nodes, one: Insert, entry: Entry, waits: Waits) -> Entry:
    """Put down what a layout needs, reading this."""
    tensor = new.tensor(entry)
    if one.where != HOLD:
        attrs = {"shape": str(tuple(tensor.shape))} if one.op == "Reshape" else {"num_args": "1"}
        return new.insert(one.op, attrs, tensor, [entry], waits)
    if len(tensor.shape) == AXES:
        mean = Tensor((*tensor.shape[:2], 1, 1), tensor.dtype)
        entry, waits = new.insert("Pooling", MEAN, mean, [entry], waits), []
    return new.insert("max", {}, Tensor((1,), tensor.dtype), [entry], waits)
