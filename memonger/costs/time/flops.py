"""Floating point operations of a forward pass, operator by operator, from parameters and shapes.

Every multiplication, addition, comparison, division or function (exp, tanh, root) of an element is
one operation, so a multiply-add is two. Products with zeros of the padding count, as in the figures
that papers give; the scalars alpha and beta of a matrix product do not. Moving data is free. An
operator that is in no table is taken to be elementwise: one operation for every element of its
outputs.

Layouts, groups and dilation need no attention: a weight's shape tells how many products go into
one output, whatever the order of the axes (``src/operator/nn/convolution.cc``).
"""

from __future__ import annotations

import math
import re
from typing import Callable, Mapping, Sequence, Tuple

import numpy as np

from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.recompute import truth

Shapes = Sequence[Tuple[int, ...]]
Attrs = Mapping[str, str]
#: Of an operator's parameters, and the shapes of its inputs and of its outputs.
Formula = Callable[[Attrs, Shapes, Shapes], int]

_size = math.prod


def _per_input(operations: int) -> Formula:
    """So many operations for every element of the first input."""
    return lambda attrs, ins, outs: operations * _size(ins[0])


def _per_output(operations: int) -> Formula:
    """So many operations for every element of the outputs."""
    return lambda attrs, ins, outs: operations * sum(map(_size, outs))


def _product(attrs: Attrs, ins: Shapes, outs: Shapes, transposed: int = -2) -> int:
    """For every output a multiply-add over the last axis of the first input, or that one."""
    return 2 * _size(outs[0]) * ins[0][transposed if truth(attrs.get("transpose_a")) else -1]


def _gemm2(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    return _product(attrs, ins, outs, int(attrs.get("axis", -2)))


def _batch_norm(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    # Mean 1; variance 3 (subtract, multiply, add); normalised 3 (subtract, multiply, add), for
    # scale and deviation are one factor of a channel.
    return (3 if truth(attrs.get("use_global_stats")) else 7) * _size(ins[0])


def _window(attrs: Attrs) -> int:
    return _size(map(int, re.findall(r"\d+", attrs["kernel"])))


def _convolution(weight: int, per_sample: int = 0) -> Formula:
    """A convolution; ``per_sample`` operations interpolate a value, group by group of filters."""

    def formula(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
        products = _size(ins[weight]) // int(attrs["num_filter"])
        samples = ins[0][0] * ins[0][1] * _window(attrs) * _size(outs[0][2:])
        return (2 * products + (len(ins) > weight + 1)) * _size(outs[0]) + per_sample * samples

    return formula


def _correlation(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    """A window of all channels of one image with one of the other, and the mean."""
    window = int(attrs.get("kernel_size", 1)) ** 2 * ins[0][1]
    products = 2 if truth(attrs.get("is_multiply", "True")) else 3  # subtract, absolute, add
    return (products * window + 1) * _size(outs[0])


def _syrk(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    """One triangle of a product with itself; the other is a copy."""
    side, shared = outs[0][-1], ins[0][-2 if truth(attrs.get("transpose")) else -1]
    return _size(outs[0][:-2]) * side * (side + 1) * shared


def _scores(interleaved: int) -> Formula:
    """Queries, keys and values of a head stand side by side (contrib/transformer.cc)."""
    return lambda attrs, ins, outs: (
        2 * (ins[0][-1] // interleaved // int(attrs["heads"])) * _size(outs[0])
    )


#: Gates, and operations of one element of the state beside the two matrix products: adding them
#: and two biases and the activation of each gate (4), then what the cell does with the gates.
_CELLS = {"rnn_relu": (1, 4), "rnn_tanh": (1, 4), "lstm": (4, 16 + 5), "gru": (3, 12 + 5)}


def _rnn(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    steps, batch, width = ins[0]
    hidden, projected = int(attrs["state_size"]), attrs.get("projection_size", "None")
    state = hidden if projected in ("None", "0") else int(projected)
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    gates, pointwise = _CELLS[attrs["mode"]]
    total = 0
    for _ in range(int(attrs["num_layers"])):
        total += hidden * (2 * gates * (width + state) + pointwise)
        total += 2 * hidden * state * (state != hidden)
        width = state * directions
    return total * directions * steps * batch


_OF_SEVERAL: dict[str, Formula] = {
    "Convolution Convolution_v1": _convolution(1),
    "_contrib_DeformableConvolution": _convolution(2, 8),  # four multiply-adds
    "_contrib_ModulatedDeformableConvolution": _convolution(3, 9),
    # Every element of the input is multiplied with the weights of its channel, and added.
    "Deconvolution": lambda attrs, ins, outs: (
        2 * _size(ins[0]) * _size(ins[1][1:]) + (len(ins) > 2) * _size(outs[0])
    ),
    # Bilinear: a deconvolution with one filter a channel.
    "UpSampling": lambda attrs, ins, outs: (
        0 if attrs.get("sample_type") == "nearest" else 2 * _size(ins[0]) * _size(ins[-1][1:])
    ),
    "FullyConnected": lambda attrs, ins, outs: (
        (2 * _size(ins[1][1:]) + (len(ins) > 2)) * _size(outs[0])
    ),
    "dot": lambda attrs, ins, outs: _product(attrs, ins, outs, 0),
    "batch_dot": _product,
    "_linalg_gemm": lambda attrs, ins, outs: _gemm2(attrs, ins, outs) + _size(outs[0]),
    "_linalg_gemm2": _gemm2,
    "_linalg_syrk": _syrk,
    # A triangle of n x n with n x m: n (n + 1) / 2 products, n (n - 1) / 2 sums a column.
    "_linalg_trmm _linalg_trsm": lambda attrs, ins, outs: ins[0][-1] * _size(outs[0]),
    "RNN": _rnn,
    "_contrib_interleaved_matmul_selfatt_qk": _scores(3),
    "_contrib_interleaved_matmul_encdec_qk": _scores(1),
    "_contrib_interleaved_matmul_selfatt_valatt _contrib_interleaved_matmul_encdec_valatt": (
        lambda attrs, ins, outs: 2 * ins[1][-1] * _size(outs[0])
    ),
    "Correlation": _correlation,
    "Pooling Pooling_v1": lambda attrs, ins, outs: (
        _size(ins[0]) if truth(attrs.get("global_pool")) else _window(attrs) * _size(outs[0])
    ),
    "BilinearSampler _contrib_BilinearResize2D": _per_output(8),  # four multiply-adds
    "BatchNorm BatchNorm_v1 _contrib_SyncBatchNorm": _batch_norm,
    "_contrib_BatchNormWithReLU": lambda attrs, ins, outs: (
        _batch_norm(attrs, ins, outs) + _size(ins[0])
    ),
    "InstanceNorm GroupNorm": _per_input(7),
    "LayerNorm": _per_input(8),  # scale and deviation are of different axes
    "moments": _per_input(4),
    "L2Normalization": _per_input(3),  # multiply, add, multiply with 1 / norm
    # Square 1, their sum over ``nsize`` channels, multiply-add 2, power 1, multiply 1.
    "LRN": lambda attrs, ins, outs: (int(attrs["nsize"]) + 5) * _size(ins[0]),
    # Largest, subtract it, exp, their sum, and divide by it or subtract its logarithm.
    "softmax log_softmax SoftmaxActivation SoftmaxOutput softmax_cross_entropy": _per_input(5),
    "softmin": _per_input(6),
    "add_n": lambda attrs, ins, outs: (len(ins) - 1) * _size(outs[0]),
    "norm": _per_input(2),
    # One operation for every element that goes in.
    "_contrib_AdaptiveAvgPooling2D argmax argmax_channel argmin col2im max mean min nanprod nansum"
    " prod sum _square_sum": _per_input(1),
    # Those that move data.
    """
    BlockGrad Cast Concat Crop Embedding Flatten IdentityAttachKLSparseReg LinearRegressionOutput
    MAERegressionOutput MakeLoss Pad Reshape SequenceLast SequenceMask SequenceReverse SliceChannel
    SwapAxis _arange _contrib_SparseEmbedding _contrib_arange_like _contrib_boolean_mask
    _contrib_index_copy _copy _copyto _crop_assign _eye _full _identity_with_attr_like_rhs _linspace
    _ones _scatter_set_nd _slice_assign _slice_assign_scalar _split_v2 _zeros _zeros_without_dtype
    amp_cast amp_multicast batch_take broadcast_axis broadcast_like broadcast_to cast_storage
    depth_to_space diag expand_dims fill_element_0index gather_nd im2col make_loss one_hot ones_like
    pick ravel_multi_index repeat reshape_like reverse _rnn_param_concat scatter_nd shape_array
    size_array slice slice_axis slice_like space_to_depth squeeze stack take tile transpose
    unravel_index where zeros_like
    """: _per_output(0),
}
_FORMULAS = {op: formula for ops, formula in _OF_SEVERAL.items() for op in ops.split()}


def forward_flops(graph: ForwardGraph) -> np.ndarray:
    """Count the operations of the forward pass of each node of a graph, int64.

    The outputs that count are those that ``list_outputs`` shows.
    """
    counts = np.zeros(len(graph.nodes), dtype=np.int64)
    for i in graph.operators:
        node, shown = graph.nodes[i], [tensor.shape for tensor in graph.shown(i)]
        inputs = [graph.tensors[a][b].shape for a, b in node.inputs]
        counts[i] = _FORMULAS.get(node.op, _per_output(1))(node.attrs, inputs, shown)
    return counts
