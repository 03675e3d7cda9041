"""Memory that operators hold for the life of an executor, outside its pool.

An operator with a state of its own (``FCreateOpState``) may keep arrays in it; of those that are
trained only ``RNN`` does, from its first step on. What it keeps is larger than its output, which is
all that recomputing it could free, and a recomputed copy is a second operator with a second state:
so it is never recomputed (``operators.why_kept``), and what it holds is the same under any plan.

What operators ask for while they run (``ResourceRequest::kTempSpace``) is one space of the device
(``MXNET_GPU_TEMP_COPY``), as large as the largest that was asked for (``src/resource.cc``). On the
CPU MKLDNN's operators ask for it, for what they find or write in another layout than they compute
in (``TmpMemMgr`` in ``src/operator/nn/mkldnn/mkldnn_base-inl.h``).

``docs/held-by-operators.md`` lists all operators that were looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.costs.layouts import KEEPS, NO_COPIES, NOT_IN_PLACE, PLAIN, follow, layout_tables
from memonger.costs.replay import Replay
from memonger.graph.arrays import RowKind
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.layouts import KNOW, MAKE
from memonger.graph.operators.recompute import GPU, truth
from memonger.graph.operators.tensors import Tensor
from memonger.support.mxnet import settings

#: Gates of a cell; arrays of the size of a layer's output that cuDNN keeps for each layer, one less
#: in all. Not documented: a developer of it gave 736 and 864 million bytes for an LSTM and a GRU of
#: 4 layers of 320 units (github.com/pytorch/pytorch/issues/2895), which is this for 25000 rows. Of
#: the others it is the gate and the output.
CELLS = {"rnn_relu": (1, 2), "rnn_tanh": (1, 2), "lstm": (4, 6), "gru": (3, 7)}
PAGE = 4096


@dataclass(frozen=True)
class Held:
    """What the operators of a network hold on a device, outside the pool."""

    device_type: str = GPU
    arrays: tuple[int, ...] = ()  # bytes of each array that is there for the life of the executor
    temporary: int = 0  # bytes of the largest temporary space, as far as it is known
    in_blocks: bool = False  # whether MKLDNN lays out tensors in blocks, so that `with_copies` adds

    @property
    def nbytes(self) -> int:
        """Bytes that are held for the life of the executor."""
        return sum(self.arrays)


NOTHING = Held()


def held_by(graph: ForwardGraph, device_type: str, mkldnn: bool) -> Held:
    """Tell what the operators of a network hold in training; ``mkldnn``: on a CPU, with MKLDNN."""
    arrays: list[int] = []
    temporary = 0
    for outputs, node in zip(graph.tensors, graph.nodes):
        inputs = [graph.tensors[a][b] for a, b in node.inputs]
        if node.op == "RNN":
            arrays += _rnn(node.attrs, inputs[0], device_type, mkldnn)
        elif node.op in _TEMPORARY:
            temporary = max(temporary, _TEMPORARY[node.op](inputs, outputs))
    return Held(device_type, tuple(arrays), temporary, mkldnn)


def with_copies(held: Held, found: Replay) -> Held:
    """Add what operators take in a training step for the layouts that MKLDNN gives to tensors.

    One that knows no such layouts keeps a plain copy of each input that it finds in blocks, and of
    each output that it writes in place over blocks, from its first step on
    (``StorageFallbackOpExecutor`` in ``src/executor/attach_op_execs_pass.cc``,
    ``SetupDefaultBlobsInOut`` in ``src/common/exec_utils.h``). So does its recomputed copy.
    MKLDNN's own have their copies in the temporary space.
    """
    t, kinds = found.training.tables, found.training.kinds
    made_in = [len(kind.tensors[0].shape) for kind in kinds if kind.op in MAKE]
    if not held.in_blocks or not made_in:
        return held
    layouts = layout_tables(found.training)
    made, read, places, entries = follow(
        t, layouts, found.recomputed, found.order, found.reads, NO_COPIES
    )
    ignorant = np.zeros(len(kinds), dtype=np.bool_)
    ignorant[found.order] = [kinds[row].op not in KNOW for row in found.order]
    ignorant &= ~t.variable & ~layouts.adding
    # What has fewer axes than any convolution's output is in no blocks.
    axes = np.array([len(tensor.shape) for kind in kinds for tensor in kind.tensors])
    nbytes = np.where(axes >= min(made_in), t.elements * t.itemsize, 0)
    copied = np.repeat(ignorant, np.diff(t.read_start)) & (read > PLAIN) & ~t.read_ignored
    written = np.repeat(ignorant, np.diff(t.output_start)) & (made > PLAIN)
    copies = int(nbytes[entries[copied]].sum() + nbytes[written].sum())
    temporary = held.temporary
    for row in found.order.tolist():
        kind, begin = kinds[row], t.output_start[row]
        knows = kind.op == "_backward_Concat" or layouts.code[begin] != KEEPS
        if kind.op in _COPY and knows:
            reads = range(t.read_start[row], t.read_start[row + 1])
            inputs = [kinds[t.read_row[j]].tensors[t.read_output[j]] for j in reads]
            plain = [bool(made[entries[j]] == PLAIN) for j in reads]
            outputs = range(begin, t.output_start[row + 1])
            is_read = [(int(places[k]), bool(found.reads[k])) for k in outputs]
            asked = _reordered(kind, inputs, plain) + _apart(kind, plain, is_read)
            temporary = max(temporary, asked)
    return replace(held, arrays=(*held.arrays, copies), temporary=temporary)


# ---------------------------------------------------------------- RNN


class _Rnn(NamedTuple):
    """The sizes of a fused recurrent network, or of layers of it that MKLDNN runs as one."""

    mode: str
    layers: int
    directions: int
    steps: int
    batch: int
    inputs: int
    units: int

    @property
    def rows(self) -> int:
        return self.directions * self.steps * self.batch


def _rnn(attrs: Mapping[str, str], data: Tensor, device_type: str, mkldnn: bool) -> list[int]:
    """Bytes of the arrays that one RNN holds."""
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    layers, units = int(attrs["num_layers"]), int(attrs["state_size"])
    steps, batch, inputs = data.shape
    rnn = _Rnn(attrs["mode"], layers, directions, steps, batch, inputs, units)
    itemsize = np.dtype(data.dtype).itemsize
    if device_type == GPU:
        return [rnn.rows * units * (CELLS[rnn.mode][1] * layers - 1) * itemsize]
    # SupportMKLDNNRnn in src/operator/nn/mkldnn/mkldnn_rnn-inl.h
    projected = attrs.get("projection_size", "None") != "None"
    if mkldnn and settings().mkldnn_rnn and data.dtype == "float32" and not projected:
        return _mkldnn(rnn)
    return [elements * itemsize for elements in _reserve_and_workspace(rnn)]


def _reserve_and_workspace(rnn: _Rnn) -> tuple[int, int]:
    """Elements, of which both are kept: ``GetRNN*Size`` in ``src/operator/rnn-inl.h``."""
    each, step, directions = rnn.rows * rnn.units, rnn.batch * rnn.units, rnn.directions
    if rnn.mode == "lstm":
        both = directions if directions > 1 else 0
        workspace = rnn.steps * (step * (4 + directions + both) + 8 * rnn.units) + 6 * step
        return each * (7 * rnn.layers - 1), workspace
    if rnn.mode == "gru":
        reserve = each * (9 * rnn.layers + 6) + 9 * directions * step + 6 * rnn.units * rnn.steps
        return reserve, each * 4 + step * (6 + directions)
    reserve = each * (6 * rnn.layers + 1) + 3 * directions * step + 2 * rnn.units * rnn.steps
    return reserve, each * 2 + step * (1 + directions)


def _mkldnn(rnn: _Rnn) -> list[int]:
    """Bytes that become resident of what MKLDNN's RNN allocates, which is about twice as much.

    Layers of equal sizes are one primitive (``MKLDNNRnnFullParamParser`` in
    ``src/operator/nn/mkldnn/mkldnn_rnn.cc``).
    """
    first = rnn._replace(layers=1)
    if rnn.directions == 2:
        parts = [first] + [first._replace(inputs=2 * rnn.units)] * (rnn.layers - 1)
    elif rnn.inputs == rnn.units:
        parts = [rnn]
    else:
        parts = [first, rnn._replace(layers=rnn.layers - 1, inputs=rnn.units)][: rnn.layers]
    arrays = [size for part in parts for size in _primitive(part)]
    between = 4 * rnn.rows * rnn.units
    if len(parts) > 1:  # dst_ and diff_src
        arrays += [between * (len(parts) - 1), 4 * rnn.steps * rnn.batch * parts[-1].inputs]
    return arrays


def _primitive(rnn: _Rnn) -> list[int]:
    """Bytes: its workspace, its scratch memory, its weights in each layout.

    The workspace is oneDNN's (``set_conf`` and ``set_offsets`` in ``src/cpu/rnn/rnn_utils``, 2.4)
    without what is never written: the states that lie in the input and output of one direction,
    and spaces for projections. Forward and backward have a scratch memory each.
    """
    layers, directions = rnn.layers, rnn.directions
    width = CELLS[rnn.mode][0] * rnn.units
    gates, wide = _leading(width), _leading(max(rnn.inputs, rnn.units))
    states = layers - 1 if directions == 1 else layers + 1
    workspace = layers * rnn.rows * gates + states * rnn.rows * wide
    workspace += (2 * layers + 1) * rnn.rows * wide  # gradients of both kinds of states
    cell = rnn.batch * rnn.units
    compared = 0
    if rnn.mode == "lstm":
        workspace += 2 * layers * rnn.rows * rnn.units
    elif rnn.mode == "gru":  # every fourth part is written
        compared = layers * directions * rnn.steps * min(16 * cell, 4 * cell + PAGE)
    scratch = rnn.steps * rnn.batch * gates
    forward = scratch if rnn.batch < 128 else rnn.batch * gates
    # As MXNet lays them out, forward's, backward's, and gradients in two.
    weights = 5 * layers * directions * width * (rnn.inputs + rnn.units)
    return [4 * workspace + compared, 4 * forward, 4 * scratch, 4 * weights]


def _leading(size: int) -> int:
    """``get_good_ld`` in oneDNN's ``src/cpu/rnn/rnn_utils.cpp``, for 4 bytes."""
    size = -(-size // 16) * 16
    return size + 16 if size % 256 == 0 else size


# ---------------------------------------------------------------- temporary space


def _targets(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """``src/operator/contrib/multibox_target-inl.h``: anchors, labels, classes."""
    anchors, (batch, labels, _) = inputs[0].shape[1], inputs[1].shape
    return 11 * batch * anchors * labels * np.dtype(inputs[2].dtype).itemsize


def _alignments(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """``get_workspace_size`` in ``src/operator/nn/ctc_loss-inl.h``, for labels of full length."""
    (steps, batch, letters), (_, labels) = inputs[0].shape, inputs[1].shape
    states = 2 * labels + 1
    return 4 * batch * (6 + labels + states + steps * (letters + states + 1))


_TEMPORARY: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], int]] = {
    "_contrib_MultiBoxTarget": _targets,
    # src/operator/contrib/multibox_detection-inl.h
    "_contrib_MultiBoxDetection": lambda inputs, outputs: outputs[0].nbytes,
    "CTCLoss": _alignments,
    # Its gradient, in src/operator/nn/group_norm-inl.h; without what reducing takes, which is less.
    "GroupNorm": lambda inputs, outputs: 2 * inputs[0].nbytes + outputs[1].nbytes,
    # src/operator/nn/moments-inl.h
    "moments": lambda inputs, outputs: inputs[0].nbytes,
    # src/operator/loss_binary_op-inl.h
    "softmax_cross_entropy": lambda inputs, outputs: inputs[0].nbytes + inputs[1].nbytes,
}
#: Operators of MKLDNN that have copies there (callers of ``TmpMemMgr::Init``).
_SUMS = frozenset(("add_n", "elemwise_add"))
_COPY = MAKE | _SUMS | {"Concat", "FullyConnected", "_backward_FullyConnected"}
_COPY |= {"_backward_" + op for op in ("Activation", "BatchNorm", "Concat", "LeakyReLU", "Pooling")}


def _reordered(kind: RowKind, inputs: Sequence[Tensor], plain: Sequence[bool]) -> int:
    """Bytes of the inputs that are found in another layout than the operator computes in.

    Which layout that is of a convolution was seen with ``DNNL_VERBOSE=1``, on AVX512; that of the
    gradient of one of up to 3 channels reads its output's gradient both plain and in blocks.
    Weights are plain, and so are their gradients.
    """
    op, given = kind.op.replace("_backward_", ""), len(inputs)
    backward = op != kind.op
    if op in MAKE or op == "FullyConnected":
        data, weight = inputs[backward], inputs[backward + 1]
        blocks = op in MAKE
        if blocks:
            groups, out = int(kind.attrs.get("num_group", "1")), int(kind.attrs["num_filter"])
            channels, unit = data.shape[1], 8 if op == "Convolution" else 16
            groups = 1 if groups == channels == out else groups
            blocks = channels // groups % unit == out // groups % unit == 0
            if backward and op == "Convolution" and channels < 4 and out % unit == 0:
                return inputs[0].nbytes
        asked = sum(inputs[j].nbytes for j in range(1 + backward) if plain[j] == blocks)
        return asked + blocks * (1 + backward) * weight.nbytes
    if not backward or op == "Concat":
        return 0
    like = {"BatchNorm": 3, "Pooling": given // 2}.get(op, given - 1)
    return inputs[0].nbytes if plain[0] != plain[like] else 0


def _apart(kind: RowKind, plain: Sequence[bool], outputs: Sequence[tuple[int, bool]]) -> int:
    """Bytes of the outputs that are not written where they belong (``CreateMKLDNNMem``).

    They are those that are added to something, those that a gradient writes in place, and those
    that nobody reads. Of each output the place is given, and whether it is read.
    """
    if kind.op in _SUMS and outputs[0][0] == 0 and (all(plain) or not plain[0]):
        return 0
    backward = kind.op.startswith("_backward_")
    return sum(
        tensor.nbytes
        for tensor, (place, read) in zip(kind.tensors, outputs)
        if place != NOT_IN_PLACE or not (read or backward)
    )
