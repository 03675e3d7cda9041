"""Floating point operations of a forward pass, operator by operator, from parameters and shapes.

What is counted: every multiplication, addition, comparison, division or function (exp, tanh, root)
of an element is one operation, so a multiply-add is two. Products with zeros of the padding count,
as in the figures that papers give; the scalars alpha and beta of a matrix product do not. Moving
data (reshape, transpose, Concat, Embedding, a cast) is free. An operator that is in no table is
taken to be elementwise: one operation for every element of its outputs; so are those that hold
Python code or a graph of their own (Custom, control flow), which are never recomputed.

Layouts, groups and dilation need no attention: a weight's shape tells how many products go into
one output, whatever the order of the axes (``src/operator/nn/convolution.cc``).
"""

from __future__ import annotations

import re
from typing import Callable, Iterable, Mapping, Sequence, Tuple

import numpy as np

from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.recompute import truth

Shape = Tuple[int, ...]
Shapes = Sequence[Shape]
Attrs = Mapping[str, str]
Formula = Callable[[Attrs, Shapes, Shapes], int]


def _size(shape: Iterable[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _sizes(shapes: Shapes) -> int:
    return sum(_size(shape) for shape in shapes)


def _numbers(value: str) -> Shape:
    """The lengths in an attribute: '(3, 3)', '[3, 3]' or '3'."""
    return tuple(int(number) for number in re.findall(r"\d+", value))


# ---------------------------------------------------------------- by the element


def _per_input(operations: int) -> Formula:
    """So many operations for every element of the first input."""
    return lambda attrs, inputs, outputs: operations * _size(inputs[0])


def _per_output(operations: int) -> Formula:
    """So many operations for every element of the outputs."""
    return lambda attrs, inputs, outputs: operations * _sizes(outputs)


_free = _per_output(0)
_elementwise = _per_output(1)


def _add_n(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    return (len(inputs) - 1) * _size(outputs[0])


# ---------------------------------------------------------------- normalisation

# Mean 1; variance 3 (subtract, multiply, add); normalised 3 (subtract, multiply, add), for scale
# and deviation are one factor of a channel.


def _batch_norm(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    return (3 if truth(attrs.get("use_global_stats")) else 7) * _size(inputs[0])


def _batch_norm_relu(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    return _batch_norm(attrs, inputs, outputs) + _size(inputs[0])


def _lrn(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """Square 1, their sum over ``nsize`` channels, multiply-add 2, power 1, multiply 1."""
    return (int(attrs["nsize"]) + 5) * _size(inputs[0])


# ---------------------------------------------------------------- windows


def _convolution_of(weight: int) -> Formula:
    def formula(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
        products = _size(inputs[weight]) // int(attrs["num_filter"])
        bias = len(inputs) > weight + 1
        return (2 * products + bias) * _size(outputs[0])

    return formula


def _deformable_of(weight: int, per_sample: int) -> Formula:
    """A convolution of values that are interpolated, group by group of filters."""
    convolution = _convolution_of(weight)

    def formula(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
        batch, channels = inputs[0][:2]
        samples = batch * channels * _size(_numbers(attrs["kernel"])) * _size(outputs[0][2:])
        return convolution(attrs, inputs, outputs) + per_sample * samples

    return formula


def _deconvolution(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """Every element of the input is multiplied with the weights of its channel, and added."""
    bias = len(inputs) > 2
    return 2 * _size(inputs[0]) * _size(inputs[1][1:]) + bias * _size(outputs[0])


def _up_sampling(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """Bilinear: a deconvolution with one filter a channel."""
    if attrs.get("sample_type") == "nearest":
        return 0
    return 2 * _size(inputs[0]) * _size(inputs[-1][1:])


def _pooling(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    if truth(attrs.get("global_pool")):
        return _size(inputs[0])
    return _size(_numbers(attrs["kernel"])) * _size(outputs[0])


def _correlation(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """A window of all channels of one image with one of the other, and the mean."""
    window = int(attrs.get("kernel_size", 1)) ** 2 * inputs[0][1]
    # Multiply and add, or else subtract, absolute value and add.
    products = 2 if truth(attrs.get("is_multiply", "True")) else 3
    return (products * window + 1) * _size(outputs[0])


# ---------------------------------------------------------------- matrix products


def _fully_connected(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    bias = len(inputs) > 2
    return (2 * _size(inputs[1][1:]) + bias) * _size(outputs[0])


def _dot(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """Over the last axis of the first input and the first of the second."""
    return 2 * _size(outputs[0]) * inputs[0][0 if truth(attrs.get("transpose_a")) else -1]


def _batch_dot(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * _size(outputs[0]) * inputs[0][-2 if truth(attrs.get("transpose_a")) else -1]


def _gemm2(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    rows = int(attrs.get("axis", -2))
    return 2 * _size(outputs[0]) * inputs[0][rows if truth(attrs.get("transpose_a")) else -1]


def _gemm(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    return _gemm2(attrs, inputs, outputs) + _size(outputs[0])


def _syrk(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """One triangle of a product with itself; the other is a copy."""
    side = outputs[0][-1]
    shared = inputs[0][-2 if truth(attrs.get("transpose")) else -1]
    return _size(outputs[0][:-2]) * side * (side + 1) * shared


def _trmm(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """A triangle of n x n with n x m: n (n + 1) / 2 products and n (n - 1) / 2 sums a column."""
    return inputs[0][-1] * _size(outputs[0])


# ---------------------------------------------------------------- attention and recurrence

# src/operator/contrib/transformer.cc. Queries, keys and values of a head stand side by side in the
# last axis: three, two or one of them.


def _scores_of(interleaved: int) -> Formula:
    def formula(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
        width = inputs[0][-1] // interleaved // int(attrs["heads"])
        return 2 * width * _size(outputs[0])

    return formula


def _attended(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * inputs[1][-1] * _size(outputs[0])


#: Gates, and operations of one element of the state beside the two matrix products: adding them
#: and two biases and the activation of each gate (4), then what the cell does with the gates.
_CELLS = {"rnn_relu": (1, 4), "rnn_tanh": (1, 4), "lstm": (4, 16 + 5), "gru": (3, 12 + 5)}


def _rnn(attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    steps, batch, width = inputs[0]
    hidden = int(attrs["state_size"])
    projected = attrs.get("projection_size", "None")
    state = hidden if projected in ("None", "0") else int(projected)
    directions = 2 if truth(attrs.get("bidirectional")) else 1
    gates, pointwise = _CELLS[attrs["mode"]]
    total = 0
    for _ in range(int(attrs["num_layers"])):
        total += hidden * (2 * gates * (width + state) + pointwise)
        if state != hidden:
            total += 2 * hidden * state
        width = state * directions
    return total * directions * steps * batch


# ---------------------------------------------------------------- the tables

_FORMULAS: dict[str, Formula] = {
    "Convolution": _convolution_of(1),
    "Convolution_v1": _convolution_of(1),
    "_contrib_DeformableConvolution": _deformable_of(2, 8),  # four multiply-adds
    "_contrib_ModulatedDeformableConvolution": _deformable_of(3, 9),
    "Deconvolution": _deconvolution,
    "FullyConnected": _fully_connected,
    "dot": _dot,
    "batch_dot": _batch_dot,
    "_linalg_gemm": _gemm,
    "_linalg_gemm2": _gemm2,
    "_linalg_syrk": _syrk,
    "_linalg_trmm": _trmm,
    "_linalg_trsm": _trmm,
    "RNN": _rnn,
    "_contrib_interleaved_matmul_selfatt_qk": _scores_of(3),
    "_contrib_interleaved_matmul_encdec_qk": _scores_of(1),
    "_contrib_interleaved_matmul_selfatt_valatt": _attended,
    "_contrib_interleaved_matmul_encdec_valatt": _attended,
    "Correlation": _correlation,
    "Pooling": _pooling,
    "Pooling_v1": _pooling,
    "_contrib_AdaptiveAvgPooling2D": _per_input(1),
    "UpSampling": _up_sampling,
    "BilinearSampler": _per_output(8),  # four multiply-adds
    "_contrib_BilinearResize2D": _per_output(8),
    "BatchNorm": _batch_norm,
    "BatchNorm_v1": _batch_norm,
    "_contrib_SyncBatchNorm": _batch_norm,
    "_contrib_BatchNormWithReLU": _batch_norm_relu,
    "InstanceNorm": _per_input(7),
    "GroupNorm": _per_input(7),
    "LayerNorm": _per_input(8),  # scale and deviation are of different axes
    "moments": _per_input(4),
    "L2Normalization": _per_input(3),  # multiply, add, multiply with 1 / norm
    "LRN": _lrn,
    # Largest, subtract it, exp, their sum, and divide by it or subtract its logarithm.
    "softmax": _per_input(5),
    "log_softmax": _per_input(5),
    "softmin": _per_input(6),
    "SoftmaxActivation": _per_input(5),
    "SoftmaxOutput": _per_input(5),
    "softmax_cross_entropy": _per_input(5),
    "add_n": _add_n,
    "norm": _per_input(2),
}

#: One operation for every element that goes in.
_REDUCTIONS = """
    argmax argmax_channel argmin col2im max mean min nanprod nansum prod sum _square_sum
"""

_MOVERS = """
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
"""

_FORMULAS.update((op, _per_input(1)) for op in _REDUCTIONS.split())
_FORMULAS.update((op, _free) for op in _MOVERS.split())


def flops(op: str, attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """Floating point operations of one operator's forward pass; a multiply-add is two.

    Parameters
    ----------
    op : str
        The name that nnvm knows it by.
    attrs : dict of str
        Its parameters, as the symbol's JSON has them.
    inputs, outputs : sequence of tuple of int
        Their shapes; outputs are those that ``list_outputs`` shows.

    Examples
    --------
    >>> flops("FullyConnected", {"num_hidden": "10"}, [(32, 784), (10, 784), (10,)], [(32, 10)])
    502080
    """
    return _FORMULAS.get(op, _elementwise)(attrs, inputs, outputs)


def forward_flops(graph: ForwardGraph) -> np.ndarray:
    """Operations of the forward pass of each node of a graph, int64; variables have none."""
    counts = np.zeros(len(graph.nodes), dtype=np.int64)
    for i in graph.operators:
        node = graph.nodes[i]
        counts[i] = flops(
            node.op,
            node.attrs,
            [graph.tensors[a][b].shape for a, b in node.inputs],
            [tensor.shape for tensor in graph.shown(i)],
        )
    return counts
