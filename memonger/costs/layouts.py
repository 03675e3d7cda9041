"""In which layout MKLDNN leaves each tensor of a training step, as far as memory decides it.

On the CPU a convolution writes its output in blocks of 8 or 16 channels. Operators that know such
layouts (``operators.layouts``) compute in the layout that they find, and some round differently in
each. All others convert what they read, and write plainly; but what is written in place over blocks
goes into blocks (``SetupDefaultBlobsOut`` in ``src/common/exec_utils.h``, ``CreateMKLDNNMem`` in
``src/operator/nn/mkldnn/mkldnn_base.cc``). What is not in place has lost its old layout before
(``InvalidateOutputs``). So layouts, and with them the last bits, depend on what the memory planner
does in place. Here they are followed as symbols: equal ones are equal layouts, whatever they are.
"""

from __future__ import annotations

import zlib
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from memonger.costs.replay import NO_LIMIT, Planned, add_in_place, adding_rows, all_read, allocate
from memonger.graph.arrays import Signature
from memonger.graph.operators.layouts import layout_of_output, layouts_of_inputs
from memonger.graph.operators.tensors import Tensor
from memonger.support.compiled import compiled

PLAIN = 0  # not laid out in blocks
BLOCKS = 1  # the usual blocks of this CPU: of 16 channels, or of 8
NOT_IN_PLACE, ADDED = -1, -2  # instead of the input in whose memory an output is

#: How the layout of an output comes about (`layout_of_output`), and the codes of these:
_CODES = (
    "keeps,plain,copies,sums,alike,first,passes,norm gradient,pooling gradient,other,chosen,usual"
).split(",")
KEEPS, _PLAIN, _COPIES, _SUMS, _ALIKE, _FIRST, _PASSES = range(7)
_NORM_GRADIENT, _POOLING_GRADIENT, _OTHER, CHOSEN, _USUAL = range(7, 12)


class LayoutArrays(NamedTuple):
    """What is known of the layouts in a training graph, for compiled code."""

    code: np.ndarray  # int8, of each output: how its layout comes about
    number: np.ndarray  # int64, of each output; the same where an operator of a signature makes it
    shows: np.ndarray  # of each read: whether the numbers may depend on the layout that is found
    plays: np.ndarray  # of each read: whether the layouts of the outputs may
    adding: np.ndarray  # of each row: whether it adds one gradient to another


def layout_arrays(training: Planned, scoring: bool = False) -> LayoutArrays:
    """Look up what is known of the layouts in a training graph; with ``scoring`` of inference too.

    There oneDNN's brgconv (AVX512) writes channels last, so that no convolutions are alike.
    """
    t, signatures = training.arrays, training.signatures
    known: dict[tuple[int, Tensor | None], Any] = {}
    facts = []
    for signature, first in zip(signatures, t.read_start.tolist()):
        data = None
        if signature.op == "Convolution":
            data = signatures[t.read_row[first]].tensors[t.read_output[first]]
        key = id(signature), data
        known[key] = known.get(key) or _facts(signature, data)
        facts.append(known[key])
    dtypes: Any = np.int8, np.int64, np.bool_, np.bool_
    columns = (np.array([*chain(*each)], dtype) for each, dtype in zip(zip(*facts), dtypes))
    code, number, shows, plays = columns
    if scoring:
        code[code == _USUAL] = CHOSEN
    read = ~t.read_ignored
    return LayoutArrays(code, number, shows & read, plays & read, adding_rows(training))


def _facts(signature: Signature, data: Tensor | None) -> tuple[Any, ...]:
    """Look up the `LayoutArrays` of one signature of rows: code and number, shows and plays."""
    op, attrs, inputs, tensors = signature.op, signature.attrs, signature.inputs, signature.tensors
    names = [layout_of_output(op, attrs, inputs, t, k, data) for k, t in enumerate(tensors)]
    # Which of two kernels runs on a GPU is no matter here.
    given = sorted(pair for pair in attrs.items() if pair[0] != "cudnn_off")
    same = repr((op, given, inputs, [tuple(tensor) for tensor in tensors]))
    number = [zlib.crc32(f"{same} {k}".encode()) for k in range(len(tensors))]
    neither = [False] * inputs, [False] * inputs
    depend = neither if {*names} <= {"keeps"} else layouts_of_inputs(op, attrs, inputs)
    return ([_CODES.index(name) for name in names], number, *depend)


@compiled
def layout_of(code, number, place, before, found, plays):  # type: ignore[no-untyped-def]
    """The layout of an output at a ``place`` (`follow`) in memory of the layout ``before``.

    That is PLAIN if it is not in place; ``found`` has the layouts of the inputs.
    """
    if code == KEEPS:
        return before
    first = PLAIN  # that is not
    alike = True
    for j in range(found.shape[0]):
        if plays[j]:
            if first == PLAIN:
                first = found[j]
            alike &= found[j] == found[0]
    if code == _PLAIN or (code < CHOSEN and first == PLAIN and before == PLAIN):
        return PLAIN
    if place != ADDED:
        if code == _COPIES or (place != NOT_IN_PLACE and code < _OTHER):
            return before
        if code == _SUMS and (alike or first == BLOCKS):
            return first
        if code == _ALIKE and alike:
            return first
        if code == _FIRST:
            return found[0]
        usual = code == _USUAL or (code == _PASSES and found[0] == BLOCKS)
        if usual or (code == _POOLING_GRADIENT and found[found.shape[0] // 2] == BLOCKS):
            return BLOCKS
        if code == _NORM_GRADIENT:
            if found[3] == BLOCKS or found[3] == found[0]:
                return found[3]
            if found[3] == PLAIN:
                return found[0]
    symbol = (number * 31 + place) * 1000003 + before
    for j in range(found.shape[0]):
        if plays[j]:
            symbol = symbol * 1000003 + found[j]
    return (symbol & 0x3FFFFFFFFFFFFFFF) + 2


@compiled
def follow(t, layouts, recomputed, order, reads):  # type: ignore[no-untyped-def]
    """Of each output the layout, of each input that which is found (-1: it does not run).

    And of each output the input in whose ``place`` it is, or `NOT_IN_PLACE` or `ADDED`; of each
    input the output that it reads.
    """
    any_found = np.full(t.read_row.shape[0], -1, dtype=np.int64)
    any_made = np.full(t.elements.shape[0], -1, dtype=np.int64)
    return lead(t, layouts, recomputed, order, reads, any_found, any_made)[:4]


@compiled
def lead(t, layouts, recomputed, order, reads, want_found, want_made):  # type: ignore[no-untyped-def]
    """As `follow`; where a layout is not as wanted (-1: any) it goes on as if it were.

    An input is then taken to be PLAIN. Returned too: the inputs and outputs that are not as wanted.
    """
    planned = allocate(t, recomputed, order, reads, 0, NO_LIMIT)[1]
    blocks = add_in_place(t, recomputed, order, layouts.adding, planned)
    moved = blocks != planned
    made = np.zeros(planned.shape[0], dtype=np.int64)
    place = np.full(planned.shape[0], NOT_IN_PLACE, dtype=np.int32)
    found = np.full(t.read_row.shape[0], -1, dtype=np.int64)
    entries = all_read(t, recomputed)
    now = np.zeros(planned.shape[0], dtype=np.int64)  # of each block
    other_found = np.zeros(found.shape[0], dtype=np.bool_)
    other_made = np.zeros(made.shape[0], dtype=np.bool_)
    for row in order:
        if t.variable[row]:
            continue
        first, last = t.read_start[row], t.read_start[row + 1]
        begin, end = t.output_start[row], t.output_start[row + 1]
        for corrected in range(2):
            for j in range(first, last):
                block = blocks[entries[j]]
                found[j] = made[entries[j]] if block < 0 else now[block]
            # The gradient of BatchNorm brings what is plain into the blocks of its data
            # (MKLDNNBatchNormBackwardImpl).
            if end > begin and layouts.code[begin] == _NORM_GRADIENT:
                if found[first + 3] == BLOCKS and found[first] == PLAIN:
                    found[first] = BLOCKS
            other = False
            for j in range(first, last):
                if not corrected and want_found[j] >= 0 and found[j] != want_found[j]:
                    other_found[j] = other = True
                    now[blocks[entries[j]]] = PLAIN
            if not other:
                break
        is_there = layouts.adding[row] and moved[entries[first + 1]]
        for out in range(begin, end):
            if is_there:  # the sum
                made[out] = now[blocks[out]]
                continue
            if moved[out]:
                place[out] = ADDED
            elif planned[out] >= 0:
                for j in range(first, last):
                    if planned[entries[j]] == planned[out]:
                        place[out] = j - first
                        break
            before = PLAIN if place[out] == NOT_IN_PLACE else now[blocks[out]]
            if reads[out] > 0:
                inputs = found[first:last], layouts.plays[first:last]
                code, number = layouts.code[out], layouts.number[out]
                made[out] = layout_of(code, number, place[out], before, *inputs)
        for out in range(begin, end):
            if want_made[out] >= 0 and want_made[out] != made[out]:
                other_made[out] = True
                made[out] = want_made[out]
            if blocks[out] >= 0:
                now[blocks[out]] = made[out]
    return made, found, place, entries, other_found, other_made


def mattering(
    training: Planned, layouts: LayoutArrays, order: np.ndarray, entries: np.ndarray
) -> np.ndarray:
    """Find the outputs (bool, of each) of whose layout the numbers may come to depend."""
    t, signatures = training.arrays, training.signatures
    matters = np.zeros(len(t.elements), dtype=np.bool_)
    for row in order[::-1].tolist():
        if t.variable[row]:
            continue
        reads, begin = slice(*t.read_start[row : row + 2]), t.output_start[row]
        read = layouts.shows[reads].copy()
        if matters[begin : t.output_start[row + 1]].any():
            read |= layouts.plays[reads]
            read[:1] |= layouts.adding[row]
            for j, k, _ in signatures[row].options:
                read[j] |= matters[begin + k]
        matters[entries[reads][read]] = True
    return matters
