"""Count all that a training step takes of a device, with what operators hold outside the pool.

An operator with a state of its own (``FCreateOpState``) may keep arrays in it; of those that are
trained only ``RNN`` does: in MXNet's executor from its first step on, in a schedule from its run to
its gradient. It is never recomputed (``ForwardGraph.why_kept``). What operators ask for while they
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
from typing import Callable, Iterable, Mapping, Sequence

import numpy as np

from memonger.costs.layouts import ALWAYS_PLAIN, KEEPS, NOT_IN_PLACE, PLAIN, find_layouts
from memonger.costs.replay import Replay
from memonger.graph.arrays import Signature, find_owners
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.layouts import LAYOUT_AWARE, PRODUCES_BLOCKED
from memonger.graph.operators.recompute import GPU, truth
from memonger.graph.operators.tensors import Shape, Tensor
from memonger.support.kernels import compiled
from memonger.support.mxnet import Settings, has_avx2
from memonger.support.types import ArrayLike, Bools, Int32s, Int64s

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
    in_blocks: bool = False  # whether MKLDNN may lay out tensors in blocks

    @property
    def nbytes(self) -> int:
        """Bytes that are held at once."""
        return sum(self.arrays)


NOTHING = Held()


def find_held(graph: ForwardGraph, device_type: str, mkldnn: bool) -> Held:
    """Find what the operators of a network hold in training; ``mkldnn``: on a CPU, with MKLDNN."""
    arrays: list[int] = []
    temporary = 0
    for outputs, node in zip(graph.tensors, graph.nodes):
        inputs = [graph.tensors[a][b] for a, b in node.inputs]
        if node.op == "RNN":
            arrays += sum(_list_rnn_arrays(node.attrs, inputs[0], device_type, mkldnn), [])
        elif node.op in _TEMPORARY:
            temporary = max(temporary, _TEMPORARY[node.op](inputs, outputs))
    return Held(device_type, tuple(arrays), temporary, mkldnn)


def refine_held(held: Held, step: Replay) -> Held:
    """Find what of it is there at once, with the plain copies of blocks that operators make.

    MXNet's executor keeps all; for an operator that is invoked the copies are gone when it has run,
    and what it holds is gone with its gradient. MKLDNN's own copies are in temporary space.
    """
    # ``StorageFallbackOpExecutor`` in ``src/executor/attach_op_execs_pass.cc``
    t, signatures = step.training.arrays, step.training.signatures
    if held.arrays:
        held = _refine_rnns(held, step)
    blocked_axes = [len(s.tensors[0].shape) for s in signatures if s.op in PRODUCES_BLOCKED]
    if not held.in_blocks or not blocked_axes:
        return held
    layouts = find_layouts(step.training)
    is_plain_product = np.array([_is_plain_product(signature) for signature in signatures])
    layouts.code[np.repeat(is_plain_product, np.diff(t.output_start))] = ALWAYS_PLAIN
    layout_of_entry, layout_of_read, place, entry_of_read = compiled.follow_layouts(
        t, layouts, step.recomputed, step.order, step.reads
    )
    ignorant = np.array([signature.op not in LAYOUT_AWARE for signature in signatures])
    ignorant &= ~t.variable & ~layouts.adding
    tensors = [tensor for signature in signatures for tensor in signature.tensors]
    # What has fewer axes than any convolution's output is in no blocks.
    may_be_blocked = np.array([len(tensor.shape) >= min(blocked_axes) for tensor in tensors])
    nbytes = t.elements * t.itemsize * may_be_blocked
    readers, makers = find_owners(t.read_start), find_owners(t.output_start)
    copied = ignorant[readers] & (layout_of_read > PLAIN) & ~t.read_ignored
    written = ignorant[makers] & (layout_of_entry > PLAIN)
    copies = np.bincount(readers[copied], nbytes[entry_of_read[copied]], len(ignorant))
    copies += np.bincount(makers[written], nbytes[written], len(ignorant))
    temporary = held.temporary if step.keeps_state else max(held.temporary, int(copies.max()))
    scratch: dict[object, int] = {}  # of each primitive
    for row in step.order.tolist():
        signature = signatures[row]
        op, outputs = signature.op, slice(*t.output_start[row : row + 2])
        if op in _COPY and (op == "_backward_Concat" or layouts.code[outputs.start] != KEEPS):
            entries = entry_of_read[slice(*t.read_start[row : row + 2])]
            inputs, plain = [tensors[entry] for entry in entries], layout_of_entry[entries] == PLAIN
            if op == "_backward_Convolution" and is_plain_product[row]:
                for k in np.flatnonzero(step.reads[outputs][:2]).tolist():
                    scratch[id(signature), tuple(plain), k] = _count_im2col(signature, inputs)
            apart = _count_apart(signature, plain, place[outputs], step.reads[outputs])
            temporary = max(temporary, apart + _count_reordered(signature, inputs, plain))
    kept = [*scratch.values(), *([int(copies.sum())] if step.keeps_state else ())]
    return replace(held, arrays=(*held.arrays, *kept), temporary=temporary)


def _refine_rnns(held: Held, step: Replay) -> Held:
    """Find which arrays of RNNs are there where they are most, and what MKLDNN asks for besides.

    An RNN that is invoked gives back what it holds when its gradient has run.
    """
    t, signatures = step.training.arrays, step.training.signatures
    arrays_of_row: dict[int, list[int]] = {}  # of the RNNs whose gradient is still to run
    most: list[int] = []
    temporary = held.temporary
    for row in step.order.tolist():
        begin, signature = t.read_start[row], signatures[row]
        if signature.op not in ("RNN", "_backward_RNN"):
            continue
        data = signatures[t.read_row[begin]].tensors[t.read_output[begin]]
        forward, gradient = _list_rnn_arrays(
            signature.attrs, data, held.device_type, held.in_blocks
        )
        if signature.op == "RNN":
            arrays_of_row[row] = forward
            most = max(most, [*chain(*arrays_of_row.values())], key=sum)
            continue
        most = max(most, [*chain(*arrays_of_row.values()), *gradient], key=sum)
        del arrays_of_row[t.read_row[begin + 3]]  # the gradient reads an output of the RNN
        if gradient and step.keeps_state:  # here go gradients without a request (kNullOp)
            outputs = zip(signature.tensors, step.reads[t.output_start[row] :])
            temporary = max(temporary, sum(tensor.nbytes for tensor, n in outputs if n == 0))
    arrays = held.arrays if step.keeps_state else tuple(most)
    return replace(held, arrays=arrays, temporary=temporary)


def _is_plain_product(signature: Signature) -> bool:
    """Return whether a convolution is computed as products of plain matrices.

    Without AVX2 so are all gradients, but for those of a group for each channel.
    """
    # Seen with ``DNNL_VERBOSE=1``. A Deconvolution is the gradient of a convolution.
    if signature.op not in ("_backward_Convolution", "Deconvolution") or has_avx2():
        return False
    groups = int(signature.attrs.get("num_group", "1"))
    return groups == 1 or groups != int(signature.attrs["num_filter"])


def _count_im2col(signature: Signature, inputs: Sequence[Tensor]) -> int:
    """Count the bytes that oneDNN keeps for one gradient of such a convolution, with one thread."""
    # ``im2col_sz`` in oneDNN's ``src/cpu/gemm_convolution_utils.cpp``
    head, data, weight, *_ = (tensor.shape for tensor in inputs)
    if math.prod(weight[2:]) == 1 and head[2:] == data[2:]:
        return 0
    return 4 * math.prod(weight[1:]) * math.prod(head[2:])


def round_for_gpu(nbytes: ArrayLike) -> Int64s:
    """Return the bytes that MXNet asks a GPU for, for arrays of these sizes (``Settings``)."""
    # src/storage/pooled_storage_manager.h; by default to pages, above 2 MB to blocks of 2 MB
    sizes, settings = np.asarray(nbytes, dtype=np.int64), Settings()
    page = settings.page
    if settings.pool == "Unpooled":
        return sizes
    if settings.pool == "Round":  # to powers of two, above the cutoff to its multiples
        cutoff = settings.cutoff
        powers = np.array([1 << max(int(n) - 1, 0).bit_length() for n in sizes.ravel()])
        small = np.maximum(powers.reshape(sizes.shape), page)
        small[sizes == 0] = 0
        return np.where(sizes > cutoff, _round_up(sizes, cutoff), small)
    pages = _round_up(sizes, page)
    return np.where(pages > settings.large, _round_up(pages, settings.large), pages)


def _round_up(sizes: Int64s, unit: int) -> Int64s:
    """Return the multiples of a unit that are not smaller."""
    return -(-sizes // unit) * unit


def count_device_bytes(
    step: Replay, gradients: Iterable[Tensor], held: Held, pool_bytes: int
) -> int:
    """Count the bytes of a device that a step takes; ``gradients`` have arrays of their own.

    Where ``pool_bytes`` is not what was replayed, all blocks are larger or smaller by one factor.
    """
    t, blocks = step.training.arrays, step.block_bytes()
    if pool_bytes != blocks.sum():
        blocks = np.ceil(blocks * (pool_bytes / max(1, blocks.sum()))).astype(np.int64)
    variables = t.output_start[step.order[t.variable[step.order]]]
    others = [*[tensor.nbytes for tensor in gradients], *held.arrays, held.temporary]
    nbytes = np.concatenate([blocks, t.elements[variables] * t.itemsize[variables], others])
    return int((round_for_gpu(nbytes) if held.device_type == GPU else nbytes).sum())


def _list_rnn_arrays(
    attrs: Mapping[str, str], data: Tensor, device_type: str, mkldnn: bool
) -> tuple[list[int], list[int]]:
    """List the bytes of an RNN's arrays: those held from its run on, and from its gradient on."""
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    mode, layers, units = attrs["mode"], int(attrs["num_layers"]), int(attrs["state_size"])
    steps, batch, inputs = data.shape
    output = directions * steps * batch * units * np.dtype(data.dtype).itemsize
    _, cudnn_per_layer, per_layer, besides = CELLS[mode]
    if device_type == GPU:
        return [output * (cudnn_per_layer * layers - 1)], []
    # SupportMKLDNNRnn in src/operator/nn/mkldnn/mkldnn_rnn-inl.h
    is_projected = attrs.get("projection_size", "None") != "None"
    if not mkldnn or not Settings().mkldnn_rnn or data.dtype != "float32" or is_projected:
        besides -= mode == "lstm" and directions == 2
        return [output * (per_layer * layers + besides)], []
    # Layers of equal sizes are one primitive (MKLDNNRnnFullParamParser in mkldnn_rnn.cc).
    widths = [inputs, *[directions * units] * (layers - 1)]
    parts = [(1, width) for width in widths]
    if directions == 1:
        parts = [(widths.count(width), width) for width in dict.fromkeys(widths)]
    forward: list[int] = []
    gradient: list[int] = []
    for count, width in parts:
        arrays = _list_primitive_arrays(mode, directions, (steps, batch, units), count, width)
        forward += arrays[0]
        gradient += arrays[1]
    if len(parts) > 1:  # dst_ and diff_src
        forward.append(output * (len(parts) - 1))
        gradient.append(4 * steps * batch * parts[-1][1])
    return forward, gradient


def _list_primitive_arrays(
    mode: str, directions: int, size: Shape, layers: int, inputs: int
) -> tuple[list[int], list[int]]:
    """List the bytes that MKLDNN's RNN allocates and that become resident: half of what it asks."""
    # oneDNN's workspace (``set_conf``, ``set_offsets`` in ``src/cpu/rnn/rnn_utils``, 2.4), without
    # states that lie in the input and output of one direction, and spaces for projections.
    steps, batch, units = size
    rows, width = directions * steps * batch, CELLS[mode][0] * units
    gates, wide = _pad(width), _pad(max(inputs, units))
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


def _pad(size: int) -> int:
    """Pad a row as ``get_good_ld`` in oneDNN's ``src/cpu/rnn/rnn_utils.cpp``, for 4 bytes."""
    size = -(-size // 16) * 16
    return size + 16 if size % 256 == 0 else size


def _count_targets(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Count as ``src/operator/contrib/multibox_target-inl.h``: of anchors, labels and classes."""
    anchors, (batch, labels, _) = inputs[0].shape[1], inputs[1].shape
    return 11 * batch * anchors * labels * np.dtype(inputs[2].dtype).itemsize


def _count_alignments(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Count as ``get_workspace_size`` in ``src/operator/nn/ctc_loss-inl.h``, for full labels."""
    (steps, batch, letters), (_, labels) = inputs[0].shape, inputs[1].shape
    states = 2 * labels + 1
    return 4 * batch * (6 + labels + states + steps * (letters + states + 1))


#: The bytes of temporary space of an operator, by its inputs and outputs.
_TEMPORARY: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], int]] = {
    "_contrib_MultiBoxTarget": _count_targets,
    # src/operator/contrib/multibox_detection-inl.h
    "_contrib_MultiBoxDetection": lambda inputs, outputs: outputs[0].nbytes,
    "CTCLoss": _count_alignments,
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


def _count_reordered(signature: Signature, inputs: Sequence[Tensor], plain: Bools) -> int:
    """Count the bytes of inputs in another layout than the operator computes in."""
    # Seen with ``DNNL_VERBOSE=1``; with AVX2 and AVX512 the gradient of a convolution of up to 3
    # channels reads its output's gradient in both layouts. Weights and their gradients are plain.
    op = signature.op.replace("_backward_", "")
    backward = op != signature.op
    if op in PRODUCES_BLOCKED or op == "FullyConnected":
        data, weight = inputs[backward], inputs[backward + 1]
        in_blocks = op in PRODUCES_BLOCKED
        if in_blocks:
            attrs = signature.attrs
            groups, out = int(attrs.get("num_group", "1")), int(attrs["num_filter"])
            channels, unit = data.shape[1], 8 if op == "Convolution" else 16
            groups = 1 if groups == channels == out else groups
            in_blocks = channels // groups % unit == out // groups % unit == 0
            in_blocks &= not _is_plain_product(signature)
            like_rgb = op == "Convolution" and channels < 4 and out % unit == 0
            if backward and like_rgb and has_avx2():
                return inputs[0].nbytes
        count = 1 + backward
        reordered = sum(inputs[j].nbytes for j in range(count) if plain[j] == in_blocks)
        return reordered + in_blocks * count * weight.nbytes
    if not backward or op == "Concat":
        return 0
    like = {"BatchNorm": 3, "Pooling": len(inputs) // 2}.get(op, -1)
    return inputs[0].nbytes if plain[0] != plain[like] else 0


def _count_apart(signature: Signature, plain: Bools, place: Int32s, reads: Int32s) -> int:
    """Count the bytes of outputs that are not written where they belong (``CreateMKLDNNMem``)."""
    # They are added to something, written in place by a gradient, or read by nobody.
    if signature.op in _SUMS and place[0] == 0 and (plain.all() or not plain[0]):
        return 0
    apart = (place != NOT_IN_PLACE) | ((reads == 0) & (not signature.op.startswith("_backward_")))
    return sum(tensor.nbytes for tensor, is_apart in zip(signature.tensors, apart) if is_apart)
