"""Find the memory that operators of a training step hold on a device, beside the pool.

An operator with a state (``FCreateOpState``) may hold arrays outside the pool. Of the operators
that are trained, only ``RNN`` does. It is never recomputed (``ForwardGraph.why_kept``), so no plan
changes these arrays. Operators of an executor share one temporary space of the device
(``kTempSpace``), which is as large as the largest request (``src/resource.cc``). On a CPU the
operators of a schedule, which are imperative, take turns at several (``MXNET_CPU_TEMP_COPY``). Of
what MKLDNN's operators hold on a CPU, copies of gradients that MXNet has them write in place are
counted, and copies in other layouts (``layouts.count_copies``); not workspaces of ``RNN``, scratch
memory, and the plain copies that other operators read.
``docs/how-it-works.md`` lists the operators whose source was read, and ``benchmarks/held.py``
measures each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import numpy as np

from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.recompute import GPU, truth
from memonger.graph.operators.tensors import Tensor
from memonger.support.errors import MB
from memonger.support.mxnet import Settings
from memonger.support.types import ArrayLike, Int64s

#: Mode of an RNN -> how many arrays of the size of a layer's output it holds. The first number is
#: for cuDNN, for each layer (one array less in all). The others are for MXNet's own kernels: for
#: each layer, and in all. cuDNN does not document its number. A developer of cuDNN gave 736 and 864
#: million bytes for an LSTM and a GRU of 4 layers of 320 units
#: (github.com/pytorch/pytorch/issues/2895), which are these numbers for 25000 rows; for other modes
#: the gate and the output are assumed. MXNet's numbers are its reserve and its workspace, without
#: the part of a single step (``GetRNN*Size`` in ``src/operator/rnn-inl.h``).
CELLS = {"lstm": (6, 7, 4), "gru": (7, 9, 10), "rnn_relu": (2, 6, 3), "rnn_tanh": (2, 6, 3)}


#: Memory of up to this size comes from the heap of glibc, whose pages have been written before
#: (mallopt(3), M_MMAP_THRESHOLD); in larger memory only what is written takes pages.
FROM_HEAP = 32 * MB


@dataclass(frozen=True)
class Held:
    """The memory that the operators of a network hold on a device, outside the pool."""

    device_type: str = GPU
    arrays: tuple[int, ...] = ()  # bytes of each array, for the life of the executor
    temporary: int = 0  # bytes of the largest temporary space that is known
    mkldnn: bool = False  # whether MKLDNN may compute them
    spaces: int = 1  # temporary spaces at which the operators of a schedule take turns

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.arrays)


NOTHING = Held()


def find_held(graph: ForwardGraph, device_type: str, mkldnn: bool) -> Held:
    """Find the memory that the operators of a network hold in training, at most.

    ``device_type`` is 'cpu' or 'gpu'. ``mkldnn`` is whether MKLDNN computes there.
    """
    arrays: list[int] = []
    temporary = 0
    for outputs, node in zip(graph.tensors, graph.nodes):
        inputs = [graph.tensors[a][b] for a, b in node.inputs]
        if node.op == "RNN" and not (mkldnn and _is_by_mkldnn(node.attrs, inputs[0])):
            arrays.append(_count_rnn_bytes(node.attrs, inputs[0], device_type))
        elif node.op in _TEMPORARY and not (node.op in _ON_CPU and device_type == GPU):
            temporary = max(temporary, _TEMPORARY[node.op](inputs, outputs))
    spaces = 1 if device_type == GPU else Settings().cpu_spaces
    return Held(device_type, tuple(arrays), temporary, mkldnn, spaces)


def round_for_gpu(nbytes: ArrayLike) -> Int64s:
    """Return the bytes that MXNet allocates on a GPU for arrays of these sizes in bytes."""
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
    """Round sizes up to multiples of a unit."""
    return -(-sizes // unit) * unit


def _is_by_mkldnn(attrs: Mapping[str, str], data: Tensor) -> bool:
    """Return whether MKLDNN computes this RNN, on a device where it may."""
    # SupportMKLDNNRnn in src/operator/nn/mkldnn/mkldnn_rnn-inl.h
    is_projected = attrs.get("projection_size", "None") != "None"
    return Settings().mkldnn_rnn and data.dtype == "float32" and not is_projected


def _count_rnn_bytes(attrs: Mapping[str, str], data: Tensor, device_type: str) -> int:
    """Count the bytes that an RNN holds, with cuDNN on a GPU or with MXNet's own kernels."""
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    mode, layers, units = attrs["mode"], int(attrs["num_layers"]), int(attrs["state_size"])
    steps, batch, _ = data.shape
    output = directions * steps * batch * units * np.dtype(data.dtype).itemsize
    by_cudnn, per_layer, besides = CELLS[mode]
    if device_type == GPU:
        return output * (by_cudnn * layers - 1)
    besides -= mode == "lstm" and directions == 2
    return output * (per_layer * layers + besides)


def _count_targets(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Count as ``src/operator/contrib/multibox_target-inl.h``: of anchors, labels and classes."""
    anchors, (batch, labels, _) = inputs[0].shape[1], inputs[1].shape
    return 11 * batch * anchors * labels * np.dtype(inputs[2].dtype).itemsize


def _count_alignments(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Count as ``get_workspace_size`` in ``src/operator/nn/ctc_loss-inl.h``, for full labels."""
    (steps, batch, letters), (_, labels) = inputs[0].shape, inputs[1].shape
    states = 2 * labels + 1
    return 4 * batch * (6 + labels + states + steps * (letters + states + 1))


def _count_sorted(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Count as ``TopKImpl`` in ``src/operator/tensor/ordering_op-inl.h``, on a CPU."""
    data, indices = inputs[0].nbytes, 4 * inputs[0].elements
    return max(data, indices) + data + indices


#: Operator -> the bytes of its temporary space, given its inputs and outputs.
_TEMPORARY: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], int]] = {
    "_contrib_MultiBoxTarget": _count_targets,
    # src/operator/contrib/multibox_detection-inl.h
    "_contrib_MultiBoxDetection": lambda inputs, outputs: outputs[0].nbytes,
    "CTCLoss": _count_alignments,
    **dict.fromkeys(("argsort", "sort", "topk"), _count_sorted),
    # The gradient, in src/operator/nn/group_norm-inl.h; its reductions take less.
    "GroupNorm": lambda inputs, outputs: 2 * inputs[0].nbytes + outputs[1].nbytes,
    # The gradient on a CPU, in src/operator/nn/layer_norm-inl.h; its reductions take less.
    "LayerNorm": lambda inputs, outputs: 2 * inputs[0].nbytes + outputs[1].nbytes,
    # src/operator/nn/moments-inl.h
    "moments": lambda inputs, outputs: inputs[0].nbytes,
    # src/operator/loss_binary_op-inl.h
    "softmax_cross_entropy": lambda inputs, outputs: inputs[0].nbytes + inputs[1].nbytes,
}
#: Those of which a GPU's kernels are others.
_ON_CPU = frozenset(("LayerNorm", "argsort", "sort", "topk"))
