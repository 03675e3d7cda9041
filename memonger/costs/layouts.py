"""In which layout MKLDNN leaves each tensor of a training step, as far as memory decides it.

On the CPU a convolution writes its output in blocks of 8 or 16 channels. Operators that know such
layouts (`KNOW`) compute in the layout that they find, and some round differently in each: the sums
of a BatchNorm, an average, a log_softmax. All others convert what they read, and write plainly, but
for one case: what they write in place goes into an array that is laid out in blocks and stays so
(``SetupDefaultBlobsOut`` in ``src/common/exec_utils.h``; the layout belongs to the memory,
``NDArray::Chunk::mkl_mem_``). An operator that knows blocks keeps them too where it writes in place
(``CreateMKLDNNMem``, ``CommitOutput`` in ``src/operator/nn/mkldnn/mkldnn_base.cc``). What is not
written in place has lost its old layout before (``InvalidateOutputs``).

So the layout in which a tensor is found, and with it the last bits of what is computed from it,
depends on what the memory planner does in place. Here layouts are followed as symbols: equal ones
are equal layouts, whatever they are. What is in place does not depend on the sizes of blocks.
"""

from __future__ import annotations

import ast
import zlib
from typing import List, Mapping, NamedTuple, Tuple

import numpy as np

from memonger.costs.allocator import NO_LIMIT, add_in_place, all_read, allocate
from memonger.costs.replay import Planned, adding_rows
from memonger.graph.arrays import RowKind
from memonger.graph.forward import FLOAT
from memonger.graph.operators.tensors import Tensor
from memonger.support.compiled import compiled

_FORWARD = frozenset(
    "Activation BatchNorm Concat Convolution Deconvolution FullyConnected LRN LeakyReLU Pooling "
    "RNN _contrib_BatchNormWithReLU _copy add_n amp_cast amp_multicast elemwise_add log_softmax "
    "softmax".split()
)
#: Operators that compute in the layout that they find: ``TIsMKLDNN`` in MXNet's source.
KNOW = (
    _FORWARD
    | {"_backward_" + op for op in _FORWARD}
    | {"_backward_add", "_backward_contrib_BatchNormWithReLU", "_backward_copy"}
    | {"Flatten", "Reshape", "SoftmaxOutput", "expand_dims", "slice", "transpose"}
)
#: Those that make blocks of plain tensors.
MAKE = frozenset(
    ("Convolution", "Deconvolution", "_backward_Convolution", "_backward_Deconvolution")
)
#: Those that make any layout plain, up to 4 axes (``src/operator/nn/mkldnn/mkldnn_reshape.cc``).
RESHAPE = frozenset(("Flatten", "Reshape", "expand_dims"))
#: Those that copy in place by doing nothing, and plainly otherwise.
COPY = frozenset(("_backward_add", "_backward_copy", "_copy"))
#: Those that bring what they read into a layout of their own choice.
_CHOOSE = MAKE | {"FullyConnected", "_backward_FullyConnected"}
#: Those whose numbers are the same in all layouts: they choose, add two numbers, copy, or add up
#: each window in the same order.
_EXACT = _CHOOSE | RESHAPE | COPY | {"Concat", "Pooling", "_backward_Concat", "elemwise_add"}
#: One number after the other; all but `_PIECEWISE` may round as they are computed in vectors.
_POINTWISE = frozenset(("Activation", "LeakyReLU", "_backward_Activation", "_backward_LeakyReLU"))
_PIECEWISE = frozenset(("leaky", "relu"))
#: What MKLDNN computes of them (``SupportMKLDNNAct``, ``SupportMKLDNNLeakyRelu``).
_SUPPORTED = frozenset(("elu", "gelu", "leaky", "relu", "sigmoid", "softrelu", "tanh"))
#: Of the gradient of Pooling, by its number of inputs, those that MKLDNN reads other than for their
#: shape: the input of Pooling (whose layout decides on the computation), and the workspace.
_POOLING_READS = {3: (1,), 5: (2, 4)}
AXES = 4

# ---------------------------------------------------------------- layouts as symbols

PLAIN = 0  # not laid out in blocks
BLOCKS = 1  # the usual blocks of this CPU: of 16 channels, or of 8
NOT_IN_PLACE, ADDED = -1, -2  # instead of the input in whose memory an output is

# How the layout of an output comes about:
KEEPS = 0  # as the memory was where it is written in place, plain otherwise
_PLAIN = 1  # always plain
_COPIES = 2
_SUMS = 3  # that of the first input which is not plain
_ALIKE = 4  # that of the inputs if they are alike
_FIRST = 5  # that of the first input
_PASSES = 6  # the usual blocks if the first input has them
_NORM_GRADIENT = 7  # that of the data (input 3), or of the gradient where that is plain
_POOLING_GRADIENT = 8  # the usual blocks if the input of Pooling has them (its input 1 or 2)
_OTHER = 9  # some function of the inputs' layouts
CHOSEN = 10  # some layout, whatever those of the inputs
_USUAL = 11  # the usual blocks


class LayoutTables(NamedTuple):
    """What is known of the layouts in a training graph, for compiled code."""

    code: np.ndarray  # int8, of each output: how its layout comes about
    number: np.ndarray  # int64, of each output; the same where an operator of a kind makes it
    shows: np.ndarray  # of each read: whether the numbers may depend on the layout that is found
    plays: np.ndarray  # of each read: whether the layouts of the outputs may
    adding: np.ndarray  # of each row: whether it adds one gradient to another


def layout_tables(training: Planned, scoring: bool = False) -> LayoutTables:
    """Look up what is known of the layouts in a training graph.

    Parameters
    ----------
    training : Planned
    scoring : bool
        Whether it must hold in inference too. There a CPU with AVX512 has other usual blocks for
        some convolutions than for others (oneDNN's brgconv writes the channels last), so that no
        two of them are taken to be alike.
    """
    t, kinds = training.tables, training.kinds
    known: dict[tuple[int, Tensor | None], _Facts] = {}
    facts = []
    for kind, first in zip(kinds, t.read_start.tolist()):
        data = None
        if kind.op == "Convolution":
            data = kinds[t.read_row[first]].tensors[t.read_output[first]]
        if (id(kind), data) not in known:
            known[id(kind), data] = _facts(kind, data)
        facts.append(known[id(kind), data])
    code = np.array([c for codes, _, _, _ in facts for c in codes], dtype=np.int8)
    number = np.array([n for _, numbers, _, _ in facts for n in numbers], dtype=np.int64)
    shows = np.array([s for _, _, shows, _ in facts for s in shows], dtype=np.bool_)
    plays = np.array([p for _, _, _, plays in facts for p in plays], dtype=np.bool_)
    if scoring:
        code[code == _USUAL] = CHOSEN
    read = ~t.read_ignored
    return LayoutTables(code, number, shows & read, plays & read, adding_rows(training))


#: `LayoutTables` of the rows of one kind: code and number, shows and plays.
_Facts = Tuple[List[int], List[int], List[bool], List[bool]]


def _facts(kind: RowKind, data: Tensor | None) -> _Facts:
    outputs, reads = range(len(kind.tensors)), range(kind.inputs)
    # Which of two kernels runs on a GPU is no matter here.
    attrs = sorted(pair for pair in kind.attrs.items() if pair[0] != "cudnn_off")
    same = repr((kind.op, attrs, kind.inputs, [tuple(tensor) for tensor in kind.tensors]))
    number = [zlib.crc32(f"{same} {k}".encode()) for k in outputs]
    code = [_code(kind, k, data) for k in outputs]
    exact = kind.op in _EXACT or (kind.op == "add_n" and kind.inputs <= 2)
    exact |= kind.op in _POINTWISE and _act_type(kind) in _PIECEWISE
    plays = [kind.op not in _CHOOSE] * kind.inputs
    if all(c == KEEPS for c in code):
        exact, plays = True, [False] * kind.inputs
    elif kind.op == "_backward_Pooling":
        plays = [p in _POOLING_READS.get(kind.inputs, reads) for p in reads]
        # Windows that overlap are added up in another order in blocks (seen with AVX2).
        return code, number, plays if _overlap(kind) else [False] * kind.inputs, plays
    return code, number, [not exact] * kind.inputs, plays


def _code(kind: RowKind, k: int, data: Tensor | None) -> int:
    op, tensor = kind.op, kind.tensors[k]
    axes = len(tensor.shape)
    if op not in KNOW or tensor.dtype != FLOAT or op == "_backward_Concat":
        return KEEPS
    if op in RESHAPE and axes <= AXES:
        return _PLAIN
    if op in COPY:
        return _COPIES
    if op in _POINTWISE:
        return _FIRST if _act_type(kind) in _SUPPORTED else KEEPS
    if axes <= 2:  # MKLDNN has no blocks for them
        return _PLAIN
    if op == "elemwise_add":
        return _SUMS if axes <= AXES else KEEPS
    if op == "add_n":
        return _ALIKE
    images = axes == AXES and kind.attrs.get("axis", "1") == "1"
    if op == "BatchNorm" and k == 0 and images:
        return _PASSES
    if op == "_backward_BatchNorm" and k == 0 and images:
        return _NORM_GRADIENT
    if op == "_backward_Pooling" and k == 0 and axes == AXES and kind.inputs in _POOLING_READS:
        return _OTHER if _overlap(kind) else _POOLING_GRADIENT
    if op == "Pooling" and k == 0 and axes == AXES:
        pool = kind.attrs.get("pool_type", "max")
        valid = kind.attrs.get("pooling_convention", "valid") == "valid"
        if pool == "max" or (pool == "avg" and valid):
            return _PASSES
    if op in _CHOOSE:
        return _chosen(kind, data) if op == "Convolution" else CHOSEN
    return _OTHER


def _overlap(kind: RowKind) -> bool:
    """Whether windows of a Pooling have elements in common."""
    whole = kind.attrs.get("global_pool", "False") != "False"
    kernel, stride = (ast.literal_eval(kind.attrs.get(name, "()")) for name in ("kernel", "stride"))
    return not whole and any(s < k for k, s in zip(kernel, stride or (1,) * len(kernel)))


def _act_type(kind: RowKind) -> str:
    return kind.attrs.get("act_type", "leaky")


def _chosen(kind: RowKind, data: Tensor | None) -> int:
    """How a convolution lays out its output, as far as that is the same for many of them.

    Seen with ``DNNL_VERBOSE=1`` in thousands of convolutions, on CPUs with AVX2 and with AVX512
    (``tests/costs/test_layouts.py``). More than 4 channels that are not a multiple of 8 are plain.
    Multiples of 16 are in the usual blocks where they are made of 3 channels, of a multiple of 16,
    or each of its own one, by kernels of at most 7 that are not dilated, with little padding and on
    images that are not smaller than the kernel.
    """
    shape = kind.tensors[0].shape
    if data is None or len(shape) != AXES or len(data.shape) != AXES:
        return CHOSEN
    channels, groups = shape[1], int(kind.attrs.get("num_group", "1"))
    if groups > 1 and not groups == channels == data.shape[1]:
        return CHOSEN
    if channels % 8 and channels > 4:
        return _PLAIN
    kernel, size = _pair(kind.attrs, "kernel"), data.shape[2:]
    pad = _pair(kind.attrs, "pad", 0)
    usual = (
        channels % 16 == 0
        and (data.shape[1] % 16 == 0 or data.shape[1] == 3)
        and max(kernel) <= 7
        and max(_pair(kind.attrs, "stride")) <= 2
        and _pair(kind.attrs, "dilate") == (1, 1)
        and all(2 * p < width <= s for p, width, s in zip(pad, kernel, size))
    )
    return _USUAL if usual else CHOSEN


def _pair(attrs: Mapping[str, str], name: str, default: int = 1) -> tuple[int, ...]:
    value = ast.literal_eval(attrs.get(name, "()"))
    return tuple(value) or (default, default)


# ---------------------------------------------------------------- following them


@compiled
def layout_of(code, number, place, before, found, plays):  # type: ignore[no-untyped-def]
    """The layout of an output.

    ``code`` and ``number`` are those of `LayoutTables`. ``place`` is the input in whose memory it
    is written, `NOT_IN_PLACE` or `ADDED`; ``before`` the layout of that memory, PLAIN if it is not
    in place. ``found`` has of each input the layout that is found, ``plays`` whether that matters.
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
    if first == PLAIN and before == PLAIN and code != CHOSEN and code != _USUAL:
        return PLAIN
    if code == _PLAIN:
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
        if code == _PASSES and found[0] == BLOCKS:
            return BLOCKS
        if code == _POOLING_GRADIENT and found[found.shape[0] // 2] == BLOCKS:
            return BLOCKS
        if code == _NORM_GRADIENT:
            if found[3] == BLOCKS or found[3] == found[0]:
                return found[3]
            if found[3] == PLAIN:
                return found[0]
        if code == _USUAL:
            return BLOCKS
    symbol = number * 31 + place
    symbol = symbol * 1000003 + before
    for j in range(found.shape[0]):
        if plays[j]:
            symbol = symbol * 1000003 + found[j]
    return (symbol & 0x3FFFFFFFFFFFFFFF) + 2


@compiled
def convert(code, found):  # type: ignore[no-untyped-def]
    """Write the layouts in which an operator computes over those that it finds (``found``).

    The gradient of BatchNorm brings what is plain into the blocks of its data
    (``MKLDNNBatchNormBackwardImpl``).
    """
    if code == _NORM_GRADIENT and found[3] == BLOCKS and found[0] == PLAIN:
        found[0] = BLOCKS


@compiled
def follow(t, layouts, recomputed, order, reads, copy_of):  # type: ignore[no-untyped-def]
    """Follow the layouts through a training graph in the order in which it runs.

    Parameters
    ----------
    t : Tables
    layouts : LayoutTables
    recomputed, order, reads
        As of ``order_and_reads``.
    copy_of : np.ndarray of int64
        Of each forward node that a plan may insert the node that it copies, of others -1 (or
        nothing at all). A copy of what is not recomputed will not be there: its layout is that of
        the node.

    Returns
    -------
    made : np.ndarray of int64
        The layout of each output when it is made.
    found : np.ndarray of int64
        That in which each input is computed with (`convert`); -1 where the row does not run.
    place : np.ndarray of int32
        Of each output the input in whose memory it is, `NOT_IN_PLACE` or `ADDED`.
    entries : np.ndarray of int64
        Of each input the output that it reads.
    """
    nothing = np.zeros(0, dtype=np.int64)
    return lead(t, layouts, recomputed, order, reads, copy_of, nothing, nothing)[:4]


@compiled
def lead(t, layouts, recomputed, order, reads, copy_of, want_found, want_made):  # type: ignore[no-untyped-def]
    """Follow the layouts as `follow` does, and where one is not as wanted go on as if it were.

    Parameters
    ----------
    t, layouts, recomputed, order, reads, copy_of
        As for `follow`.
    want_found, want_made : np.ndarray of int64
        The layout that each input is to be found in (or else PLAIN) and each output is to be made
        in; -1 for any. Nothing at all if there are no wishes.

    Returns
    -------
    made, found, place, entries : np.ndarray
        As of `follow`.
    other_found, other_made : np.ndarray of bool
        The inputs and outputs whose layout is not as wanted.
    """
    planned = allocate(t, recomputed, order, reads, 0, NO_LIMIT)[1]
    blocks = planned.copy()
    add_in_place(t, recomputed, order, layouts.adding, blocks)
    made = np.zeros(planned.shape[0], dtype=np.int64)
    place = np.full(planned.shape[0], NOT_IN_PLACE, dtype=np.int32)
    found = np.full(t.read_row.shape[0], -1, dtype=np.int64)
    entries = all_read(t, recomputed)
    now = np.zeros(planned.shape[0], dtype=np.int64)  # of each block
    other_found = np.zeros(want_found.shape[0], dtype=np.bool_)
    other_made = np.zeros(want_made.shape[0], dtype=np.bool_)
    symbols = np.zeros(planned.shape[0], dtype=np.int64)  # of a row's outputs
    for p in range(order.shape[0]):
        row = order[p]
        if t.variable[row]:
            continue
        first, last = t.read_start[row], t.read_start[row + 1]
        for j in range(first, last):
            entry = entries[j]
            found[j] = made[entry] if blocks[entry] < 0 else now[blocks[entry]]
        begin, end = t.output_start[row], t.output_start[row + 1]
        if end > begin:
            convert(layouts.code[begin], found[first:last])
        if want_found.shape[0]:
            other = False
            for j in range(first, last):
                if want_found[j] >= 0 and found[j] != want_found[j]:
                    other_found[j] = other = True
                    now[blocks[entries[j]]] = PLAIN
            if other:
                for j in range(first, last):
                    block = blocks[entries[j]]
                    found[j] = made[entries[j]] if block < 0 else now[block]
                convert(layouts.code[begin], found[first:last])
        is_there = layouts.adding[row] and (
            planned[entries[first + 1]] != blocks[entries[first + 1]]
        )
        for out in range(begin, end):
            if is_there:  # the sum
                symbols[out - begin] = now[blocks[out]]
                continue
            if blocks[out] != planned[out]:
                place[out] = ADDED
            elif planned[out] >= 0:
                for j in range(first, last):
                    if planned[entries[j]] == planned[out]:
                        place[out] = j - first
                        break
            before = PLAIN
            if place[out] != NOT_IN_PLACE:
                before = now[blocks[out]]
            symbols[out - begin] = PLAIN
            if row < copy_of.shape[0] and copy_of[row] >= 0 and not recomputed[copy_of[row]]:
                symbols[out - begin] = found[first]
            elif reads[out] > 0:
                symbols[out - begin] = layout_of(
                    layouts.code[out],
                    layouts.number[out],
                    place[out],
                    before,
                    found[first:last],
                    layouts.plays[first:last],
                )
        for out in range(begin, end):
            made[out] = symbols[out - begin]
            if want_made.shape[0] and want_made[out] >= 0 and want_made[out] != made[out]:
                other_made[out] = True
                made[out] = want_made[out]
            if blocks[out] >= 0:
                now[blocks[out]] = made[out]
    return made, found, place, entries, other_found, other_made


NO_COPIES = np.zeros(0, dtype=np.int64)


def mattering(
    training: Planned, layouts: LayoutTables, order: np.ndarray, entries: np.ndarray
) -> np.ndarray:
    """Find the outputs (bool, of each) of whose layout the numbers may come to depend.

    ``order`` has the rows as they run, ``entries`` of each input the output that it reads.
    """
    t, kinds = training.tables, training.kinds
    matters = np.zeros(len(t.elements), dtype=np.bool_)
    for row in order[::-1].tolist():
        if t.variable[row]:
            continue
        first, last = int(t.read_start[row]), int(t.read_start[row + 1])
        begin, end = int(t.output_start[row]), int(t.output_start[row + 1])
        read = layouts.shows[first:last].copy()
        if matters[begin:end].any():
            read |= layouts.plays[first:last]
            if layouts.adding[row]:
                read[0] = True
            for j, k, _ in kinds[row].options:
                read[j] |= matters[begin + k]
        matters[entries[first:last][read]] = True
    return matters
