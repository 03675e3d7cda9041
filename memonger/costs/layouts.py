"""Facts about the layouts in which MKLDNN leaves the tensors of a training step.

On the CPU a convolution writes its output in blocks of 8 or 16 channels. Operators that support
such layouts (``operators.layouts``) compute in the layout of their input, and some round
differently in different layouts. All other operators convert their inputs to the plain layout and
write a plain output; but an output that is written in place of a blocked tensor is blocked
(``SetupDefaultBlobsOut`` in ``src/common/exec_utils.h``, ``CreateMKLDNNMem`` in
``src/operator/nn/mkldnn/mkldnn_base.cc``). An output that is not in place loses its old layout
first (``InvalidateOutputs``). So layouts, and with them the last bits, depend on what the memory
planner does in place. Here a layout is a number; equal numbers are equal layouts.
"""

from __future__ import annotations

import zlib
from itertools import chain
from typing import List, Sequence, Tuple

import numpy as np

from memonger.graph.arrays import GraphArrays, Signature, Step
from memonger.graph.operators.inplace import reads_overwritten
from memonger.graph.operators.layouts import (
    BY_SHAPE,
    REORDERING,
    REQUESTS_NONE,
    copies_in_place,
    count_reordered,
    layout_of_output,
    layouts_of_inputs,
)
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import StepGraph, TrainingGraph
from memonger.support.kernels import Struct, compiled, constant
from memonger.support.types import AnyArray, Bools, Int8s, Int32s, Int64s

PLAIN = constant("PLAIN")  # not laid out in blocks
ANY_LAYOUT = constant("ANY_LAYOUT")  # in place of a required layout: none is required
#: The place of an output: the index of the input whose memory it reuses, or one of these.
NOT_IN_PLACE, ADDED = constant("NOT_IN_PLACE"), constant("ADDED")

#: How an output gets its layout (`layout_of_output`).
IN_PLACE, CHOSEN, USUAL = map(constant, ("IN_PLACE", "CHOSEN", "USUAL"))

#: The facts of a signature, as in `LayoutArrays`: code, number, shows, plays.
LayoutFacts = Tuple[List[int], List[int], Sequence[bool], Sequence[bool]]


class LayoutArrays(Struct):
    """Facts about the layouts in a training graph (``layouts.h`` lists the arrays)."""

    code: Int8s
    number: Int64s
    shape: Int64s
    shows: Bools
    plays: Bools
    adding: Bools


class UsualLayouts(Struct):
    """The layouts of a training graph without a plan."""

    facts: LayoutArrays
    written: Int64s
    read: Int64s
    place: Int32s
    matters: Bools


def find_usual_layouts(training: TrainingGraph, scoring: bool = False) -> UsualLayouts:
    """Find the layouts of a training graph without a plan; ``scoring`` as in `find_layouts`."""
    t, step = training.arrays, training.unmarked
    facts = find_layouts(training, scoring)
    followed = compiled.follow_layouts(t, facts, step)
    return UsualLayouts(facts, *followed, find_mattering(training, facts, step))


def find_layouts(training: StepGraph, scoring: bool = False) -> LayoutArrays:
    """Look up facts about the layouts in a training graph.

    With ``scoring`` they are valid for inference too: there oneDNN's brgconv (AVX512) writes
    channels last, so no two convolutions can be assumed to use the same layout.
    """
    t, signatures = training.arrays, training.signatures
    facts_of: dict[tuple[int, Tensor | None], LayoutFacts] = {}
    facts = []
    for signature, first in zip(signatures, t.read_start.tolist()):
        data = None
        if signature.op in BY_SHAPE:
            data = signatures[t.read_row[first]].tensors[t.read_output[first]]
        key = id(signature), data
        facts_of[key] = facts_of.get(key) or _find_facts(signature, data)
        facts.append(facts_of[key])
    code, number, shows, plays = (
        np.array([*chain(*lists)], dtype)
        for lists, dtype in zip(zip(*facts), ("int8", "int64", "bool", "bool"))
    )
    if scoring:
        code[code == USUAL] = CHOSEN
    read = ~t.read_ignored
    shape = np.array([hash(x.shape) for signature in signatures for x in signature.tensors])
    return LayoutArrays(code, number, shape, shows & read, plays & read, training.adds_gradients)


def _find_facts(signature: Signature, data: Tensor | None) -> LayoutFacts:
    """Look up the facts of one signature of rows."""
    op, attrs, inputs, tensors = signature.op, signature.attrs, signature.inputs, signature.tensors
    names = [layout_of_output(op, attrs, inputs, t, k, data) for k, t in enumerate(tensors)]
    # cudnn_off chooses between kernels on a GPU, which has no such layouts.
    parameters = sorted(pair for pair in attrs.items() if pair[0] != "cudnn_off")
    text = repr((op, parameters, inputs, [tensor[:2] for tensor in tensors]))
    number = [zlib.crc32(f"{text} {k}".encode()) for k in range(len(tensors))]
    neither = [False] * inputs, [False] * inputs
    unaware = {*names} <= {"keeps"} and not reads_overwritten(op, attrs)
    depend = neither if unaware else layouts_of_inputs(op, attrs, inputs)
    return ([constant(name.upper()) for name in names], number, *depend)


def count_copies(graph: StepGraph, run: Step, planned: Int32s, block: Int32s) -> tuple[int, int]:
    """Count the bytes that a gradient of MKLDNN copies at most, in temporary space and beside it.

    It copies what it writes in place, what it adds to, and what it reads in another layout.

    Parameters
    ----------
    graph : StepGraph
        The rows of a training step.
    run : Step
        Those that run, and what they read.
    planned, block : array of int, (entries,)
        The block of each entry before gradients are added in place, and after.

    Returns
    -------
    tuple of int
        Of a gradient that requests temporary space, and of one that requests none.
    """
    t, signatures, entry, owners = graph.arrays, graph.signatures, run.entry, graph.arrays.read_row
    anything = np.zeros(0, dtype=np.int64)
    layouts = find_layouts(graph)
    written, read, *_ = compiled.lead_layouts(t, layouts, run, planned, block, anything, anything)
    by_product = np.array([op == "_backward_FullyConnected" for op in graph.ops])  # of matrices
    is_plain = (read == PLAIN) | (written[entry] == PLAIN) | by_product[owners]
    requested, beside = 0, 0
    for row in run.order[~t.variable[run.order]].tolist():
        op, attrs, _, _, options, tensors = signatures[row]
        if not op.startswith("_backward_") or not tensors or tensors[0].dtype != "float32":
            continue
        reads, outputs = (slice(*start[row : row + 2]) for start in (t.read_start, t.output_start))
        copied = 0
        if copies_in_place(op, attrs, tensors[0]) and block[outputs.start] >= 0:
            places = [entry[reads.start + j] for j, k, _ in options if k == 0]
            copied = tensors[0].nbytes * int(block[outputs.start] in block[places])
        if op in REQUESTS_NONE:
            beside = max(beside, copied)
            continue
        if op in REORDERING:
            is_added = block[outputs] != planned[outputs]
            copied += sum(tensor.nbytes for tensor, is_in in zip(tensors, is_added) if is_in)
            pairs = zip(owners[reads].tolist(), t.read_output[reads].tolist())
            inputs = [signatures[owner].tensors[k] for owner, k in pairs]
            wants_data = bool(run.reads[outputs.start])
            copied += count_reordered(op, attrs, inputs, is_plain[reads].tolist(), wants_data)
        requested = max(requested, copied)
    return requested, beside


def find_mattering(training: StepGraph, layouts: LayoutArrays, step: Step) -> Bools:
    """Find the outputs on whose layout results may depend; return a bool for each output."""
    t, signatures = training.arrays, training.signatures
    matters = np.zeros(len(t.elements), dtype=np.bool_)
    for row in step.order[::-1].tolist():
        if t.variable[row]:
            continue
        reads, begin = slice(*t.read_start[row : row + 2]), t.output_start[row]
        read = layouts.shows[reads].copy()
        if matters[begin : t.output_start[row + 1]].any():
            read |= layouts.plays[reads]
            read[:1] |= layouts.adding[row]
            for j, k, _ in signatures[row].options:
                read[j] |= matters[begin + k]
        matters[step.entry[reads][read]] = True
    return matters


def read_with_workspace(t: GraphArrays, ops: AnyArray) -> list[tuple[int, int]]:
    """List the reads of the image by each max pooling and by its gradient, as pairs.

    The two reads must have the same layout: MKLDNN's max pooling writes a workspace in the layout
    of its image, and its gradient assumes the layout of its own image
    (``src/operator/nn/mkldnn/mkldnn_pooling.cc``).
    """
    start = t.read_start
    rows = np.flatnonzero((ops == "_backward_Pooling") & (np.diff(start) == 5))
    return [(int(start[t.read_row[start[r] + 4]]), int(start[r]) + 2) for r in rows]


def find_wrong_poolings(training: TrainingGraph) -> list[int]:
    """Find max poolings whose gradient MKLDNN computes wrongly without a plan.

    Another operator has made their image plain before, such as a Reshape in place. Recomputed, they
    read the plain image, and their gradient is another one.
    """
    t = training.arrays
    pairs = read_with_workspace(t, np.array(training.ops))
    if not pairs:
        return []
    _, read, _ = compiled.follow_layouts(t, find_layouts(training), training.unmarked)
    wrong = (one for one, other in pairs if read[other] not in (ANY_LAYOUT, read[one]))
    return [int(np.searchsorted(t.read_start, one, side="right")) - 1 for one in wrong]
