"""All that a training step takes of a device, and what of it operators hold outside the pool.

An operator with a state of its own (``FCreateOpState``) may keep arrays in it; of those that are
trained only ``RNN`` does: in MXNet's executor from its first step on, in a schedule from its run to
its gradient. It is never recomputed (``operators.why_kept``). What operators ask for while they
run (``kTempSpace``) is one space of the device (``MXNET_GPU_TEMP_COPY``), as large as the largest
that was asked for (``src/resource.cc``). On the CPU MKLDNN's operators ask for it, for what they
find or write in another layout than they compute in, and for gradients that nobody reads
(``src/operator/nn/mkldnn/mkldnn_base-inl.h``).
``docs/held-by-operators.md`` lists all operators that were looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from memonger.costs.layouts import ALWAYS_PLAIN, KEEPS, NOT_IN_PLACE, PLAIN, find_layouts
from memonger.costs.replay import Replay
from memonger.graph.arrays import Signature
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.layouts import LAYOUT_AWARE, PRODUCES_BLOCKED
from memonger.graph.operators.recompute import GPU, truth
from memonger.graph.operators.tensors import Shape, Tensor
from memonger.support.kernels import compiled
from memonger.support.mxnet import Settings, has_avx2

#: Gates of a cell. Then arrays of the size of a layer's output: those that cuDNN keeps for each
#: layer, one less in all; those that MXNet's own kernels keep for each layer, and in all. cuDNN's
#: are not documented: a developer of it gave 736 and 864 million bytes for an LSTM and a GRU of 4
#: layers of 320 units (github.com/pytorch/pytorch/issues/2895), which is this for 25000 rows. Of
#: the others it is the gate and the output. MXNet's are the reserve and the workspace without what
#: is of one step (``GetRNN*Size`` in ``src/operator/rnn-inl.h``).
CELLS = {"lstm": (4, 6, 7, 4), "gru": (3, 7, 9, 10), "rnn_relu": (1, 2, 6, 3)}
CELLS["rnn_tanh"] = CELLS["rnn_relu"]


@dataclass(frozen=True)
class Held:
    """What the operators of a network hold on a device, outside the pool."""

    device_type: str = GPU
    arrays: tuple[int, ...] = ()  # bytes of each array that is there at once
    temporary: int = 0  # bytes of the largest temporary space, as far as it is known
    in_blocks: bool = False  # whether MKLDNN lays out tensors in blocks, so that `refine_held` adds

    @property
    def nbytes(self) -> int:
        """Bytes that are held at once."""
        return sum(self.arrays)


NOTHING = Held()


def find_held(graph: ForwardGraph, device_type: str, mkldnn: bool) -> Held:
    """Tell what the operators of a network hold in training; ``mkldnn``: on a CPU, with MKLDNN."""
    arrays: list[int] = []
    temporary = 0
    for outputs, node in zip(graph.tensors, graph.nodes):
        inputs = [graph.tensors[a][b] for a, b in node.inputs]
        if node.op == "RNN":
            arrays += sum(_rnn(node.attrs, inputs[0], device_type, mkldnn), [])
        elif node.op in _TEMPORARY:
            temporary = max(temporary, _TEMPORARY[node.op](inputs, outputs))
    return Held(device_type, tuple(arrays), temporary, mkldnn)


def refine_held(held: Held, found: Replay) -> Held:
    """Tell what of it is there at once, with the plain copies of blocks that operators make.

    MXNet's executor keeps all; for an operator that is invoked the copies are gone when it has run,
    and what it holds is gone with its gradient. MKLDNN's own copies are in temporary space.
    """
    # ``StorageFallbackOpExecutor`` in ``src/executor/attach_op_execs_pass.cc``
    t, signatures = found.training.arrays, found.training.signatures
    if held.arrays:
        held = _of_rnns(held, found)
    made_in = [len(s.tensors[0].shape) for s in signatures if s.op in PRODUCES_BLOCKED]
    if not held.in_blocks or not made_in:
        return held
    layouts = find_layouts(found.training)
    in_plain = np.array([_in_plain(signature) for signature in signatures])
    layouts.code[np.repeat(in_plain, np.diff(t.output_start))] = ALWAYS_PLAIN
    made, read, places, entries = compiled.follow_layouts(
        t, layouts, found.recomputed, found.order, found.reads
    )
    ignorant = np.array([signature.op not in LAYOUT_AWARE for signature in signatures])
    ignorant &= ~t.variable & ~layouts.adding
    tensors = [tensor for signature in signatures for tensor in signature.tensors]
    # What has fewer axes than any convolution's output is in no blocks.
    in_blocks = np.array([len(tensor.shape) >= min(made_in) for tensor in tensors])
    nbytes = t.elements * t.itemsize * in_blocks
    copied = np.repeat(ignorant, np.diff(t.read_start)) & (read > PLAIN) & ~t.read_ignored
    written = np.repeat(ignorant, np.diff(t.output_start)) & (made > PLAIN)
    readers, makers = (owners(start) for start in (t.read_start, t.output_start))
    copies = np.bincount(readers[copied], nbytes[entries[copied]], len(ignorant))
    copies += np.bincount(makers[written], nbytes[written], len(ignorant))
    temporary = held.temporary if found.keeps_state else max(held.temporary, int(copies.max()))
    scratch: dict[Any, int] = {}  # of each primitive
    for row in found.order.tolist():
        signature, begin = signatures[row], t.output_start[row]
        op = signature.op
        if op in _COPY and (op == "_backward_Concat" or layouts.code[begin] != KEEPS):
            reads = slice(*t.read_start[row : row + 2])
            outputs = slice(*t.output_start[row : row + 2])
            inputs = [tensors[entry] for entry in entries[reads]]
            plain = made[entries[reads]] == PLAIN
            if op == "_backward_Convolution" and _in_plain(signature):
                for k in np.flatnonzero(found.reads[outputs][:2]).tolist():
                    scratch[id(signature), tuple(plain), k] = _columns(signature, inputs)
            apart = _apart(signature, plain, places[outputs], found.reads[outputs])
            temporary = max(temporary, apart + _reordered(signature, inputs, plain))
    kept = [*scratch.values(), *([int(copies.sum())] if found.keeps_state else ())]
    return replace(held, arrays=(*held.arrays, *kept), temporary=temporary)


def _of_rnns(held: Held, found: Replay) -> Held:
    """Tell which arrays of RNNs are there where they are most, and count what MKLDNN asks besides.

    An RNN that is invoked gives back what it holds when its gradient has run.
    """
    t, signatures = found.training.arrays, found.training.signatures
    now: dict[int, list[int]] = {}  # by the row of the RNN
    most: list[int] = []
    temporary = held.temporary
    for row in found.order.tolist():
        begin, signature = t.read_start[row], signatures[row]
        if signature.op not in ("RNN", "_backward_RNN"):
            continue
        data = signatures[t.read_row[begin]].tensors[t.read_output[begin]]
        made = _rnn(signature.attrs, data, held.device_type, held.in_blocks)
        if signature.op == "RNN":
            now[row] = made[0]
            most = max(most, [*chain(*now.values())], key=sum)
            continue
        run = t.read_row[begin + 3]  # the gradient reads what the RNN has made
        most = max(most, [*chain(*now.values()), *made[1]], key=sum)
        del now[run]
        if made[1] and found.keeps_state:  # here go gradients without a request (kNullOp)
            unread = found.reads[slice(*t.output_start[row : row + 2])] == 0
            nbytes = sum(x.nbytes for x, each in zip(signature.tensors, unread.tolist()) if each)
            temporary = max(temporary, nbytes)
    arrays = held.arrays if found.keeps_state else tuple(most)
    return replace(held, arrays=arrays, temporary=temporary)


def _in_plain(signature: Signature) -> bool:
    """Tell whether a convolution is computed as products of plain matrices.

    Without AVX2 so are all gradients, but for those of a group for each channel.
    """
    # Seen with ``DNNL_VERBOSE=1``. A Deconvolution is the gradient of a convolution.
    if signature.op not in ("_backward_Convolution", "Deconvolution") or has_avx2():
        return False
    groups = int(signature.attrs.get("num_group", "1"))
    return groups == 1 or groups != int(signature.attrs["num_filter"])


def _columns(signature: Signature, inputs: Sequence[Tensor]) -> int:
    """Bytes of what oneDNN keeps for one gradient of such a convolution, with one thread."""
    # ``im2col_sz`` in oneDNN's ``src/cpu/gemm_convolution_utils.cpp``
    head, data, weight, *_ = (tensor.shape for tensor in inputs)
    if math.prod(weight[2:]) == 1 and head[2:] == data[2:]:
        return 0
    return 4 * math.prod(weight[1:]) * math.prod(head[2:])


def owners(start: np.ndarray) -> np.ndarray:
    """Tell the row that owns each item; the items of a row begin at its ``start``."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def round_for_gpu(nbytes: Any) -> np.ndarray:
    """Return the bytes that MXNet asks a GPU for, for arrays of these sizes (``Settings``)."""
    # src/storage/pooled_storage_manager.h; by default to pages, above 2 MB to blocks of 2 MB
    sizes, found = np.asarray(nbytes, dtype=np.int64), Settings()
    if found.pool == "Unpooled":
        return sizes
    if found.pool == "Round":  # to powers of two, above the cutoff to its multiples
        powers = np.array([1 << max(int(n) - 1, 0).bit_length() for n in sizes.ravel()])
        small = np.maximum(powers.reshape(sizes.shape), found.page)
        small[sizes == 0] = 0
        return np.where(sizes > found.cutoff, -(-sizes // found.cutoff) * found.cutoff, small)
    pages = -(-sizes // found.page) * found.page
    return np.where(pages > found.large, -(-pages // found.large) * found.large, pages)


def device_bytes(found: Replay, gradients: Iterable[Tensor], held: Held, pool_bytes: int) -> int:
    """Return the bytes of a device that a step takes; ``gradients`` have arrays of their own.

    Where ``pool_bytes`` is not what was replayed, all blocks are larger or smaller by one factor.
    """
    t, blocks = found.training.arrays, found.block_bytes()
    if pool_bytes != blocks.sum():
        blocks = np.ceil(blocks * (pool_bytes / max(1, blocks.sum()))).astype(np.int64)
    variables = t.output_start[found.order[t.variable[found.order]]]
    others = [*[tensor.nbytes for tensor in gradients], *held.arrays, held.temporary]
    nbytes = np.concatenate([blocks, t.elements[variables] * t.itemsize[variables], others])
    return int((round_for_gpu(nbytes) if held.device_type == GPU else nbytes).sum())


def _rnn(
    attrs: Mapping[str, str], data: Tensor, device_type: str, mkldnn: bool
) -> tuple[list[int], list[int]]:
    """Bytes of the arrays that one RNN holds: from its run on, and from its gradient on."""
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    mode, layers, units = attrs["mode"], int(attrs["num_layers"]), int(attrs["state_size"])
    steps, batch, inputs = data.shape
    output = directions * steps * batch * units * np.dtype(data.dtype).itemsize
    _, of_cudnn, of_each, in_all = CELLS[mode]
    if device_type == GPU:
        return [output * (of_cudnn * layers - 1)], []
    # SupportMKLDNNRnn in src/operator/nn/mkldnn/mkldnn_rnn-inl.h
    projected = attrs.get("projection_size", "None") != "None"
    if not mkldnn or not Settings().mkldnn_rnn or data.dtype != "float32" or projected:
        return [output * (of_each * layers + in_all - (mode == "lstm" and directions == 2))], []
    # Layers of equal sizes are one primitive (MKLDNNRnnFullParamParser in mkldnn_rnn.cc).
    widths = [inputs, *[directions * units] * (layers - 1)]
    parts = [(1, width) for width in widths]
    if directions == 1:
        parts = [(widths.count(width), width) for width in dict.fromkeys(widths)]
    cell = mode, directions, (steps, batch, units)
    made = [_primitive(*cell, *part) for part in parts]
    first, late = ([*chain(*each)] for each in zip(*made))
    if len(parts) > 1:  # dst_ and diff_src
        first.append(output * (len(parts) - 1))
        late.append(4 * steps * batch * parts[-1][1])
    return first, late


def _primitive(
    mode: str, directions: int, size: Shape, layers: int, inputs: int
) -> tuple[list[int], list[int]]:
    """Bytes of what MKLDNN's RNN allocates that become resident; it allocates twice as much."""
    # oneDNN's workspace (``set_conf``, ``set_offsets`` in ``src/cpu/rnn/rnn_utils``, 2.4), without
    # states that lie in the input and output of one direction, and spaces for projections.
    steps, batch, units = size
    rows, width = directions * steps * batch, CELLS[mode][0] * units
    gates, wide = _leading(width), _leading(max(inputs, units))
    reached = directions * (steps + 1) * batch  # with the states before the first step
    states = layers - 1 if directions == 1 else layers + 1
    workspace = layers * rows * gates + states * reached * wide
    gradients = (2 * layers + 1) * reached * wide  # of both kinds of states
    compared, cell = 0, batch * units
    if mode == "lstm":
        workspace += layers * reached * units
        gradients += layers * reached * units
    elif mode == "gru":  # every fourth part is written, in whole pages
        compared = layers * directions * steps * min(16 * cell, 4 * cell + 4096)
    scratch = steps * batch * gates
    forward = scratch if batch < 128 else batch * gates
    # As MXNet lays them out and forward's, then backward's and gradients in two.
    weights = layers * directions * width * (inputs + units)
    first = [4 * workspace + compared, 4 * forward, 2 * 4 * weights]
    return first, [4 * gradients, 4 * scratch, 3 * 4 * weights]


def _leading(size: int) -> int:
    """``get_good_ld`` in oneDNN's ``src/cpu/rnn/rnn_utils.cpp``, for 4 bytes."""
    size = -(-size // 16) * 16
    return size + 16 if size % 256 == 0 else size


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


def _reordered(signature: Signature, inputs: Sequence[Tensor], plain: np.ndarray) -> int:
    """Bytes of the inputs that are found in another layout than the operator computes in."""
    # Seen with ``DNNL_VERBOSE=1``; with AVX2 and AVX512 the gradient of a convolution of up to 3
    # channels reads its output's gradient in both layouts. Weights and their gradients are plain.
    op = signature.op.replace("_backward_", "")
    backward = op != signature.op
    if op in PRODUCES_BLOCKED or op == "FullyConnected":
        data, weight = inputs[backward], inputs[backward + 1]
        blocks = op in PRODUCES_BLOCKED
        if blocks:
            attrs = signature.attrs
            groups, out = int(attrs.get("num_group", "1")), int(attrs["num_filter"])
            channels, unit = data.shape[1], 8 if op == "Convolution" else 16
            groups = 1 if groups == channels == out else groups
            blocks = channels // groups % unit == out // groups % unit == 0
            blocks &= not _in_plain(signature)
            like_rgb = op == "Convolution" and channels < 4 and out % unit == 0
            if backward and like_rgb and has_avx2():
                return inputs[0].nbytes
        asked = sum(inputs[j].nbytes for j in range(1 + backward) if plain[j] == blocks)
        return asked + blocks * (1 + backward) * weight.nbytes
    if not backward or op == "Concat":
        return 0
    like = {"BatchNorm": 3, "Pooling": len(inputs) // 2}.get(op, -1)
    return inputs[0].nbytes if plain[0] != plain[like] else 0


def _apart(signature: Signature, plain: np.ndarray, places: np.ndarray, reads: np.ndarray) -> int:
    """Bytes of the outputs that are not written where they belong (``CreateMKLDNNMem``)."""
    # They are added to something, written in place by a gradient, or read by nobody.
    if signature.op in _SUMS and places[0] == 0 and (plain.all() or not plain[0]):
        return 0
    apart = (places != NOT_IN_PLACE) | ((reads == 0) & (not signature.op.startswith("_backward_")))
    return sum(tensor.nbytes for tensor, is_apart in zip(signature.tensors, apart) if is_apart)
