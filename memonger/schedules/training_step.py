"""Make the rows, the lifetimes and the arena of a schedule's training step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Mapping, Sequence, Tuple

import numpy as np

from memonger.costs.held import NOTHING, Held
from memonger.costs.layouts import UsualLayouts
from memonger.costs.placement import place_items
from memonger.costs.usage import Usage
from memonger.graph.arrays import (
    BACKWARD,
    ORIGINAL,
    RECOMPUTED,
    Signature,
    Signatures,
    find_starts,
    gather,
    join_columns,
    list_reads,
    row_arrays,
    run_all,
    signature_arrays,
)
from memonger.graph.forward import RowEntry
from memonger.graph.operators.gradients import ZEROS
from memonger.graph.operators.inplace import Options
from memonger.graph.operators.layouts import AXES
from memonger.graph.operators.recompute import truth
from memonger.graph.operators.recorded import ASYNCHRONOUS, RECORDED_LATE
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import NO_NODE, StepGraph, TrainingGraph
from memonger.schedules.layouts import AFTER, BEFORE, HOLD, Insert
from memonger.schedules.rows import Lifetimes, NodeVariants, Rows
from memonger.schedules.schedule import Workload
from memonger.support.errors import MB
from memonger.support.kernels import compiled
from memonger.support.types import Bools, Int64s

VariantEntry = Tuple[int, int]  # a variant of `Parts`, and which of its outputs

ALIGNMENT = 256  # bytes; the alignment of ``cudaMalloc``, and more than MKLDNN needs
ROOM = 2 * ALIGNMENT  # bytes of an arena, before the first tensor and to align it

AT_ONCE = 4  # terms of a sum that MXNet adds to an array at once; more it adds one by one

#: Prefix of the names of rows that only a schedule runs.
OURS = "memonger_again_"

#: Pooling that takes the mean of each channel, which reads tensors in blocks. For an operator that
#: cannot, such as ``max``, MXNet's executor makes a plain copy and keeps it
#: (``StorageFallbackOpExecutor``, ``src/executor/attach_op_execs_pass.cc``). Another operator must
#: read its output, because Pooling without MKLDNN has to write it.
MEAN = {"global_pool": "True", "kernel": "(1, 1)", "pool_type": "avg"}


@dataclass(frozen=True, eq=False)
class Parts:
    """The data shared by the training steps of all schedules of a network."""

    work: Workload
    mkldnn: bool  # whether MKLDNN may compute them
    variants: NodeVariants
    signatures: tuple[Signature, ...]  # of the variants
    #: The gradient of each argument that gets one, as in ``work.training.wanted``; None: zeros.
    gradients: tuple[VariantEntry | None, ...]
    added: frozenset[int]  # arguments whose gradient is added to an array of the caller
    #: Operator whose gradient autograd computes (``operators.recorded``) -> its variants.
    recorded: Mapping[int, Sequence[int]]
    #: Gradients that autograd itself adds to an array: to the sum before them if ``chained`` has
    #: the row that would add them, else to the caller's array.
    adding: frozenset[VariantEntry]
    chained: Mapping[VariantEntry, int]
    left_out: frozenset[int]  # arguments whose gradient MXNet does not write
    zeroed: frozenset[int]  # arguments whose gradient MKLDNN sets to zero, even if it is added
    #: Row whose results depend on whether it overwrites its first input -> whether it does without
    #: a schedule.
    in_place: Mapping[int, bool]
    usual: UsualLayouts | None  # layouts without a schedule; None if no tensor is in blocks
    refusal: str  # why no schedule may run: a gradient would be wrong or other; '' if one may

    @property
    def written(self) -> list[VariantEntry]:
        """The gradients (variant, output) that are written to arrays of the caller, each once."""
        elsewhere = self.added | self.left_out
        pairs = zip(self.work.training.wanted, self.gradients)
        entries = (e for a, e in pairs if e and (a not in elsewhere or e in self.adding))
        return list(dict.fromkeys(entries))


@dataclass(frozen=True, eq=False)
class TrainingStep(StepGraph):
    """The training step of one schedule; that of a plan of marks is a `TrainingGraph`."""

    parts: Parts
    rows: Rows
    heads: list[RowEntry]  # the outputs of the network, then the gradients in arrays of the caller
    #: The gradient of each argument that gets one, as in ``training.wanted``; None: zeros.
    gradients: tuple[RowEntry | None, ...]
    alive: Lifetimes  # the lifetimes of all blocks
    #: Whether blocks that the backward pass gets from the forward pass lie outside of the arena, so
    #: that passes of other runs may come between the two.
    is_split: bool = False

    @property
    def training(self) -> TrainingGraph:
        """The training graph of the network without a schedule."""
        return self.parts.work.training

    @cached_property
    def reads(self) -> list[list[RowEntry]]:
        """What each row reads."""
        rows = self.rows
        return list_reads(rows.read_start, rows.read_row, rows.read_output)

    @cached_property
    def output_blocks(self) -> list[int]:
        """The blocks of the outputs of the network, ascending."""
        return sorted({self.block(head) for head in self.heads[: self.arrays.outputs]} - {-1})

    def tensor(self, entry: RowEntry) -> Tensor:
        """Return the shape and the type of an output of a row."""
        return self.signatures[entry[0]].tensors[entry[1]]

    def block(self, entry: RowEntry) -> int:
        """Return the block of an output of a row; -1 for a variable."""
        return int(self.alive.block[self.arrays.output_start[entry[0]] + entry[1]])

    @cached_property
    def outside(self) -> Bools:
        """Whether each block lies outside of the arena, (blocks,)."""
        outside, last = self.alive.of_caller, np.flatnonzero(self.rows.time == 0)[-1:].sum()
        if self.is_split:
            outside = outside | ((self.alive.start <= last) & (self.alive.stop > last))
        return outside

    @property
    def split_bytes(self) -> int:
        """The bytes of what the backward pass of a split step gets from its forward pass."""
        return int(self.alive.nbytes[self.outside & ~self.alive.of_caller].sum())

    @cached_property
    def offsets(self) -> Int64s:
        """The offset of each block in the arena, bytes (blocks,); -1 for one outside of it."""
        offsets = np.full(len(self.outside), -1)
        offsets[~self.outside], _ = self.placement
        return offsets

    @cached_property
    def recorded(self) -> dict[int, list[int]]:
        """Operator that autograd records -> the rows of its gradient.

        It is -1 for a row of zeros, which runs on its own.
        """
        return _recorded_rows(self.parts, self.rows, self.parts.recorded)

    @cached_property
    def read_again(self) -> dict[str, RowEntry]:
        """The arguments from which results are computed again, by name.

        Gammas that are not trained are left out: their BatchNorm sets them to 1.
        """
        arguments, sources = set(self.training.graph.arguments), self.rows.source.tolist()
        found: dict[str, RowEntry] = {}
        for row in np.flatnonzero(self.phases == RECOMPUTED).tolist():
            op, attrs = self.signatures[row][:2]
            is_fixed = "BatchNorm" in op and truth(attrs.get("fix_gamma", "True"))
            for k, entry in enumerate(self.reads[row]):
                if sources[entry[0]] in arguments and not (is_fixed and k == 1):
                    found[self.names[entry[0]]] = entry
        return found

    @property
    def dropouts(self) -> dict[int, list[int]]:
        """Dropout that runs once -> the rows of its gradient.

        cuDNN has masks of bits, in a format of its own, so that only autograd can apply them.
        """
        graph = self.training.graph
        runs = np.bincount(self.rows.source[self.rows.time >= 0], minlength=len(graph.nodes))
        once = [x for x in graph.operators if graph.nodes[x].op == "Dropout" and runs[x] == 1]
        origin, backward = self.training.origin, self.training.phases == BACKWARD
        variants = {x: np.flatnonzero((origin == x) & backward).tolist() for x in once}
        return _recorded_rows(self.parts, self.rows, variants)

    @cached_property
    def adding(self) -> frozenset[RowEntry]:
        """The gradients that autograd itself adds to an array."""
        return frozenset([(int(self.rows.latest[v]), k) for v, k in self.parts.adding])

    @cached_property
    def placement(self) -> tuple[Int64s, int]:
        """The offsets of the blocks in the arena, and its bytes (`place_items`)."""
        alive, ours = self.alive, ~self.outside
        intervals = alive.start[ours], alive.stop[ours], alive.nbytes[ours]
        return place_items(*intervals, len(self.rows.source), ALIGNMENT)

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena."""
        _, nbytes = self.placement
        return nbytes + ROOM


def arena(step: TrainingStep, held: Held = NOTHING) -> Usage:
    """Return the memory of a schedule's training step: its arena, and the arrays of its outputs."""
    alive, outputs = step.alive, step.output_blocks
    pooled = ~alive.of_caller
    pooled[outputs] = True
    allocated = np.array([step.arena_bytes, *alive.nbytes[outputs].tolist()], dtype=np.int64)
    nbytes = int(allocated.sum())
    return Usage(
        step=step,
        ran=run_all(step.arrays),
        planned=alive.block,
        block=alive.block,
        pooled=pooled,
        allocated=allocated,
        planned_bytes=nbytes,
        bound=nbytes // MB,
        held=held,
        is_arena=True,
    )


def make_step(parts: Parts, rows: Rows, signatures: Sequence[Signature]) -> TrainingStep:
    """Return the training step of these rows: its graph, its gradients and its lifetimes."""
    training = parts.work.training
    heads = [(int(rows.first[x]), k) for x, k in training.graph.heads]
    outputs = len(heads)
    heads += [(int(rows.latest[variant]), k) for variant, k in parts.written]
    head_row, head_output = np.array(heads, dtype=np.int32).T.copy()
    views, packed = not parts.mkldnn, signature_arrays(signatures)
    of_heads = head_row, head_output, outputs
    *_, alive = compiled.lifetimes(packed, rows, *of_heads, views, ALIGNMENT)
    of_rows, of = [signatures[k] for k in rows.signature.tolist()], training.gradient_of
    inserted, sources = rows.source < 0, rows.source.tolist()
    again = inserted | (rows.time > 0)
    names = []  # the names of MXNet's executor for rows that it runs too
    for row, (source, is_again) in enumerate(zip(sources, again.tolist())):
        op = of_rows[row].op
        name = training.names[source] if source >= 0 else op
        is_head = source >= training.arrays.forward_nodes and op == "null"
        names.append(f"{OURS}{row}_{name}" if is_again or is_head else name)
    return TrainingStep(
        graph=training.graph,
        settings=training.settings,
        arrays=row_arrays(
            signatures,
            rows.signature,
            read_start=rows.read_start,
            read_row=rows.read_row,
            read_output=rows.read_output,
            read_owner=np.full_like(rows.read_row, ORIGINAL),
            head_row=head_row,
            head_output=head_output,
            head_owner=np.full_like(head_row, ORIGINAL),
            outputs=outputs,
        ),
        signatures=of_rows,
        names=names,
        phases=np.where(again, RECOMPUTED, training.phases[rows.source]),
        origin=np.where(inserted, NO_NODE, training.origin[rows.source]),
        gradient_of={row: of[source] for row, source in enumerate(sources) if source in of},
        parts=parts,
        rows=rows,
        heads=heads,
        gradients=tuple([e and (int(rows.latest[e[0]]), e[1]) for e in parts.gradients]),
        alive=alive,
    )


def _recorded_rows(
    parts: Parts, rows: Rows, variants_of: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Return the rows of the gradient of each operator; -1 for a row of zeros."""
    rows_of = {}
    for x, variants in variants_of.items():
        pairs = zip(rows.latest[variants].tolist(), parts.work.training.gradients[x].nodes)
        rows_of[x] = [-1 if node.op in ZEROS else row for row, node in pairs]
    return {x: rows for x, rows in rows_of.items() if max(rows) >= 0}


def hold_for_autograd(parts: Parts, rows: Rows, signatures: Signatures) -> Rows:
    """Add to the gradients that autograd computes all reads of autograd, to keep them alive.

    Autograd reads the inputs and outputs of the latest run of the operator. It computes all rows of
    the gradient when the last of them runs, so that the last row gets the reads of all.
    """
    if not parts.recorded and not parts.chained:
        return rows
    reads = list_reads(rows.read_start, rows.read_row, rows.read_output)
    number = rows.signature.copy()

    def read_more(row: int, entries: Sequence[RowEntry], options: Options = ()) -> None:
        signature = signatures.all[number[row]]
        reads[row] = [*reads[row], *entries]
        options = (*signature.options, *options)
        more = signature._replace(inputs=len(reads[row]), options=options)
        number[row] = signatures.add(more)

    for x, recorded in _recorded_rows(parts, rows, parts.recorded).items():
        if parts.work.training.graph.nodes[x].op in RECORDED_LATE:
            continue
        run = int(rows.latest[x])
        all_reads: dict[RowEntry, None] = {}
        for row, gradient in zip(recorded, parts.work.training.gradients[x].nodes):
            if row < 0:
                continue
            for j, (kind, k, output) in enumerate(gradient.inputs):
                if kind != "head" and kind != "node":
                    reads[row][j] = reads[run][k] if kind == "in" else (run, output)
            all_reads.update(dict.fromkeys(reads[row]))
        last = max(recorded)
        more = [entry for entry in all_reads if entry not in reads[last]]
        if more:
            read_more(last, more)
    for (variant, k), adding in parts.chained.items():
        # Autograd adds the term to the sum in place, so that the row that would add it is a copy.
        row, total = int(rows.latest[variant]), int(rows.latest[adding])
        read_more(row, reads[total][:1], ((len(reads[row]), k, False),))
        addition = signatures.all[number[total]]
        copy = addition._replace(op="_copy", attrs={}, inputs=1, options=((0, 0, True),))
        number[total], reads[total] = signatures.add(copy), [(row, k)]
    start, read_row, read_output = join_columns(reads, 2)
    return rows.replace(
        signature=number, read_start=start, read_row=read_row, read_output=read_output
    )


def keep_places(step: TrainingStep, signatures: Signatures) -> TrainingStep:
    """Return the step with the same rows in place as in MXNet, if their results depend on it."""
    inserts: dict[int, list[Insert]] = {}
    for row, source in enumerate(step.rows.source.tolist()):
        usual = step.parts.in_place.get(source)
        if usual is not None and usual != (step.block((row, 0)) == step.block(step.reads[row][0])):
            inserts[row] = [Insert(BEFORE, 0, "add_n") if usual else Insert(HOLD, 0)]
    return insert(step, signatures, inserts) if inserts else step


def lay_out_plainly(parts: Parts, rows: Rows, signatures: Signatures) -> Rows:
    """Insert plain copies of the inputs of operators that run in a thread of their own.

    Of an input in blocks MXNet makes a plain copy for them, and frees it before they have read it
    (``PushOperator`` in ``src/imperative/imperative_utils.h``; MXNet's executor keeps the copy).
    """
    copies: dict[int, list[Insert]] = defaultdict(list)
    training = parts.work.training
    is_apart = [signature.op in ASYNCHRONOUS for signature in signatures.all]
    states = training.graph.auxiliary  # the operator updates them: no copies
    for row in np.flatnonzero(np.array(is_apart, dtype=np.bool_)[rows.signature]).tolist():
        read = rows.read_row[slice(*rows.read_start[row : row + 2])]
        places = [j for j, x in enumerate(rows.source[read].tolist()) if x not in states]
        copies[row] += [Insert(BEFORE, j, "_np_copy") for j in places]
    for x, recorded in _recorded_rows(parts, rows, parts.recorded).items():
        if training.graph.nodes[x].op in ASYNCHRONOUS:
            for row, gradient in zip(recorded, training.gradients[x].nodes):
                heads = [j for j, (kind, *_) in enumerate(gradient.inputs) if kind == "head"]
                if row >= 0:
                    copies[row] += [Insert(BEFORE, j, "_np_copy") for j in heads]
    return splice(rows, signatures, copies) if copies else rows


def insert(
    step: TrainingStep, signatures: Signatures, inserts: Mapping[int, Sequence[Insert]]
) -> TrainingStep:
    """Return the training step with more operators at its rows."""
    return make_step(step.parts, splice(step.rows, signatures, inserts), signatures.all)


def splice(rows: Rows, signatures: Signatures, inserts: Mapping[int, Sequence[Insert]]) -> Rows:
    """Return the rows with more operators around some of them, which add their signatures."""
    n = len(rows.signature)
    read_row, read_output = rows.read_row.copy(), rows.read_output.copy()
    # Of each new operator: the row before which it runs, its signature, and the entry that it
    # reads. The new operators have the numbers from n on, until they are in line.
    before: list[int] = []
    number: list[int] = []
    read: list[RowEntry] = []

    def add(row: int, item: Insert, entry: RowEntry) -> RowEntry:
        """Add the operators that read an entry in front of a row; return the output of the last."""
        source, k = entry
        maker = rows.signature[source] if source < n else number[source - n]
        for signature in _sign(signatures, item, signatures.all[maker].tensors[k]):
            before.append(row)
            number.append(signature)
            read.append(entry)
            entry = n + len(read) - 1, 0
        return entry

    for row in sorted(inserts):
        for item in inserts[row]:
            j = rows.read_start[row] + item.place
            if item.where == BEFORE:
                entry = int(read_row[j]), int(read_output[j])
                read_row[j], read_output[j] = add(row, item, entry)
        for item in inserts[row]:
            j = rows.read_start[row] + item.place
            if item.where == HOLD:
                add(row + 1, item, (int(read_row[j]), int(read_output[j])))
            elif item.where == AFTER:  # later rows read the new operator
                later = (rows.read_row == row) & (rows.read_output == item.place)
                read_row[later], read_output[later] = add(row + 1, item, (row, item.place))
    line = np.insert(np.arange(n), before, np.arange(n, n + len(read)))
    place = np.append(np.argsort(line), -1).astype(np.int32)  # place[-1] is -1
    more = np.array(read, dtype=np.int32).T
    all_row, all_output = np.append(read_row, more[0]), np.append(read_output, more[1])
    start = np.append(rows.read_start, rows.read_start[-1] + np.arange(1, len(read) + 1))
    reads, reader = gather(start, line)
    none = np.full(len(read), -1, dtype=np.int32)
    return Rows(
        signature=np.append(rows.signature, np.array(number, dtype=np.int32))[line],
        source=np.append(rows.source, none)[line],
        time=np.append(rows.time, none)[line],
        read_start=find_starts(np.bincount(reader, minlength=len(line))),
        read_row=place[all_row[reads]],
        read_output=all_output[reads],
        first=place[rows.first],
        latest=place[rows.latest],
    )


def _sign(signatures: Signatures, item: Insert, tensor: Tensor) -> list[int]:
    """Return the signatures of the operators that an Insert adds behind a tensor, in order."""
    small = Tensor((1,), tensor.dtype)
    if item.where == HOLD and len(tensor.shape) == AXES:
        mean = Tensor((*tensor.shape[:2], 1, 1), tensor.dtype)
        return [signatures("Pooling", MEAN, 1, (mean,)), signatures("max", {}, 1, (small,))]
    if item.where == HOLD:
        return [signatures("max", {}, 1, (small,))]
    attrs = {"Reshape": {"shape": str(tuple(tensor.shape))}, "add_n": {"num_args": "1"}}
    number = signatures(item.op, attrs.get(item.op, {}), 1, (tensor,))
    if item.op == "_np_copy":  # in place it would write over the blocks that it reads
        number = signatures.add(signatures.all[number]._replace(options=()))
    return [number]
