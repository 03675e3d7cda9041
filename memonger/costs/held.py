"""Memory that operators hold for the life of an executor, outside its pool.

An operator with a state of its own (``FCreateOpState``) may keep arrays in it; of those that are
trained only ``RNN`` does, from its first step on. It is never recomputed (``operators.why_kept``),
so what it holds is the same under any plan.

What operators ask for while they run (``ResourceRequest::kTempSpace``) is one space of the device
(``MXNET_GPU_TEMP_COPY``), as large as the largest that was asked for (``src/resource.cc``). On the
CPU MKLDNN's operators ask for it, for what they find or write in another layout than they compute
in (``TmpMemMgr`` in ``src/operator/nn/mkldnn/mkldnn_base-inl.h``).

``docs/held-by-operators.md`` lists all operators that were looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Mapping, Sequence

import numpy as np

from memonger.costs.layouts import KEEPS, NOT_IN_PLACE, PLAIN, follow, layout_tables
from memonger.costs.replay import Replay
from memonger.graph.arrays import RowKind
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.layouts import LAYOUT_AWARE, PRODUCES_BLOCKED
from memonger.graph.operators.recompute import GPU, truth
from memonger.graph.operators.tensors import Tensor
from memonger.support.mxnet import settings

#: Gates of a cell. Then arrays of the size of a layer's output: those that cuDNN keeps for each
#: layer, one less in all; those that MXNet's own kernels keep for each layer, and in all. cuDNN's
#: are not documented: a developer of it gave 736 and 864 million bytes for an LSTM and a GRU of 4
#: layers of 320 units (github.com/pytorch/pytorch/issues/2895), which is this for 25000 rows. Of
#: the others it is the gate and the output. MXNet's are the reserve and the workspace without what
#: is of one step (``GetRNN*Size`` in ``src/operator/rnn-inl.h``).
CELLS = {"lstm": (4, 6, 7, 4), "gru": (3, 7, 9, 10), "rnn_relu": (1, 2, 6, 3)}
CELLS["rnn_tanh"] = CELLS["rnn_relu"]
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
    made_in = [len(kind.tensors[0].shape) for kind in kinds if kind.op in PRODUCES_BLOCKED]
    if not held.in_blocks or not made_in:
        return held
    layouts = layout_tables(found.training)
    made, read, places, entries = follow(t, layouts, found.recomputed, found.order, found.reads)
    ignorant = np.zeros(len(kinds), dtype=np.bool_)
    ignorant[found.order] = [kinds[row].op not in LAYOUT_AWARE for row in found.order]
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
        if kind.op in _COPY and (kind.op == "_backward_Concat" or layouts.code[begin] != KEEPS):
            reads = slice(*t.read_start[row : row + 2])
            outputs = slice(*t.output_start[row : row + 2])
            sources = zip(t.read_row[reads].tolist(), t.read_output[reads].tolist())
            inputs = [kinds[source].tensors[k] for source, k in sources]
            plain = made[entries[reads]] == PLAIN
            asked = _reordered(kind, inputs, plain.tolist())
            asked += _apart(kind, plain, places[outputs], found.reads[outputs])
            temporary = max(temporary, asked)
    return replace(held, arrays=(*held.arrays, copies), temporary=temporary)


# ---------------------------------------------------------------- RNN


def _rnn(attrs: Mapping[str, str], data: Tensor, device_type: str, mkldnn: bool) -> list[int]:
    """Bytes of the arrays that one RNN holds."""
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    mode, layers, units = attrs["mode"], int(attrs["num_layers"]), int(attrs["state_size"])
    steps, batch, inputs = data.shape
    output = directions * steps * batch * units * np.dtype(data.dtype).itemsize
    _, of_cudnn, of_each, in_all = CELLS[mode]
    if device_type == GPU:
        return [output * (of_cudnn * layers - 1)]
    # SupportMKLDNNRnn in src/operator/nn/mkldnn/mkldnn_rnn-inl.h
    projected = attrs.get("projection_size", "None") != "None"
    if not mkldnn or not settings().mkldnn_rnn or data.dtype != "float32" or projected:
        return [output * (of_each * layers + in_all - (mode == "lstm" and directions == 2))]
    # Layers of equal sizes are one primitive (MKLDNNRnnFullParamParser in mkldnn_rnn.cc).
    if directions == 2:
        parts = [(1, inputs), *[(1, 2 * units)] * (layers - 1)]
    elif inputs == units:
        parts = [(layers, inputs)]
    else:
        parts = [(1, inputs), (layers - 1, units)][:layers]
    sizes = mode, directions, steps, batch, units
    arrays = [nbytes for part in parts for nbytes in _primitive(*sizes, *part)]
    if len(parts) > 1:  # dst_ and diff_src
        arrays += [output * (len(parts) - 1), 4 * steps * batch * parts[-1][1]]
    return arrays


def _primitive(
    mode: str, directions: int, steps: int, batch: int, units: int, layers: int, inputs: int
) -> list[int]:
    """Bytes of what MKLDNN's RNN allocates that become resident; it allocates twice as much.

    They are its workspace, its scratch memory, its weights in each layout. The workspace is
    oneDNN's (``set_conf`` and ``set_offsets`` in ``src/cpu/rnn/rnn_utils``, 2.4) without what is
    never written: the states that lie in the input and output of one direction, and spaces for
    projections. Forward and backward have a scratch memory each.
    """
    rows, width = directions * steps * batch, CELLS[mode][0] * units
    gates, wide = _leading(width), _leading(max(inputs, units))
    states = layers - 1 if directions == 1 else layers + 1
    states += 2 * layers + 1  # gradients of both kinds of states
    workspace = layers * rows * gates + states * rows * wide
    compared, cell = 0, batch * units
    if mode == "lstm":
        workspace += 2 * layers * rows * units
    elif mode == "gru":  # every fourth part is written
        compared = layers * directions * steps * min(16 * cell, 4 * cell + PAGE)
    scratch = steps * batch * gates
    forward = scratch if batch < 128 else batch * gates
    # As MXNet lays them out, forward's, backward's, and gradients in two.
    weights = 5 * layers * directions * width * (inputs + units)
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
_COPY = PRODUCES_BLOCKED | _SUMS | {"Concat", "FullyConnected", "_backward_FullyConnected"}
_COPY |= {"_backward_" + op for op in ("Activation", "BatchNorm", "Concat", "LeakyReLU", "Pooling")}


def _reordered(kind: RowKind, inputs: Sequence[Tensor], plain: Sequence[bool]) -> int:
    """Bytes of the inputs that are found in another layout than the operator computes in.

    Which layout that is of a convolution was seen with ``DNNL_VERBOSE=1``, on AVX512; that of the
    gradient of one of up to 3 channels reads its output's gradient both plain and in blocks.
    Weights are plain, and so are their gradients.
    """
    op, given = kind.op.replace("_backward_", ""), len(inputs)
    backward = op != kind.op
    if op in PRODUCES_BLOCKED or op == "FullyConnected":
        data, weight = inputs[backward], inputs[backward + 1]
        blocks = op in PRODUCES_BLOCKED
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


def _apart(kind: RowKind, plain: np.ndarray, places: np.ndarray, reads: np.ndarray) -> int:
    """Bytes of the outputs that are not written where they belong (``CreateMKLDNNMem``).

    They are those that are added to something, those that a gradient writes in place, and those
    that nobody reads.
    """
    if kind.op in _SUMS and places[0] == 0 and (plain.all() or not plain[0]):
        return 0
    apart = (places != NOT_IN_PLACE) | ((reads == 0) & (not kind.op.startswith("_backward_")))
    return sum(tensor.nbytes for tensor, is_apart in zip(kind.tensors, apart) if is_apart)
