"""Count the floating point operations of a forward pass, from parameters and shapes.

Every multiplication, addition, comparison, division or function (exp, tanh, root) of an element is
one operation, so a multiply-add is two. Products with padding zeros count, as in the figures of
papers; the scalars alpha and beta of a matrix product do not. Moving data is free. An operator that
is not in the table counts as elementwise. The shape of a weight gives the number of products for
one output, for all layouts and groups (``src/operator/nn/convolution.cc``).
"""

from __future__ import annotations

import re
from math import isqrt, prod
from typing import Callable, Mapping, Sequence, Tuple

from memonger.graph.operators.recompute import truth

Shapes = Sequence[Tuple[int, ...]]
Attrs = Mapping[str, str]
Formula = Callable[[Attrs, Shapes, Shapes], int]


def _per_input(operations: int) -> Formula:
    """Return the formula for this number of operations for each element of the first input."""
    return lambda a, x, y: operations * prod(x[0])


def _filters(weight: int) -> Formula:
    """Return the formula for filters, which are input ``weight``; the next input is the bias."""
    return lambda a, x, y: (2 * prod(x[weight][1:]) + (len(x) > weight + 1)) * prod(y[0])


def _count_product(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    """Count a product of matrices: each element of the left one times a row of the right one."""
    return 2 * prod(ins[0]) * outs[0][-1]


def _count_einsum(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
    """Count a product of one element of each input, and a sum, for every combination of labels.

    The order of ``optimize`` is ignored. The axes of an ellipsis come first, and are counted as
    those of the input with most of them.
    """
    sizes: dict[str, int] = {}
    others = 1
    for text, shape in zip(attrs["subscripts"].split("->")[0].split(","), ins):
        labels = re.sub(r"[\s.]", "", text)
        sizes.update(zip(labels, shape[len(shape) - len(labels) :]))
        others = max(others, prod(shape[: len(shape) - len(labels)]))
    return len(ins) * prod(sizes.values()) * others


#: Mode -> number of gates, and operations for each element of the state besides the two matrix
#: products: 4 for each gate (adding the products and two biases, activation), then the cell's.
_CELLS = {"rnn_relu": (1, 4), "rnn_tanh": (1, 4), "lstm": (4, 16 + 5), "gru": (3, 12 + 5)}


def _count_rnn(attrs: Attrs, ins: Shapes, outs: Shapes) -> int:
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


#: Operators -> formula, of the parameters (a), the shapes of inputs (x) and of outputs (y).
_OF_SEVERAL: dict[str, Formula] = {
    "Convolution Convolution_v1 FullyConnected": _filters(1),
    "_contrib_DeformableConvolution": _filters(2),  # without interpolation, 1 to 2 % of it
    "_contrib_ModulatedDeformableConvolution": _filters(3),
    # Every element of the input is multiplied with the weights of its channel, and added.
    "Deconvolution": lambda a, x, y: 2 * prod(x[0]) * prod(x[1][1:]) + (len(x) > 2) * prod(y[0]),
    # Bilinear: a deconvolution with one filter a channel.
    "UpSampling": lambda a, x, y: (
        0 if a.get("sample_type") == "nearest" else 2 * prod(x[0]) * prod(x[-1][1:])
    ),
    # Of n k, k m and n m elements: n k m products.
    "dot _np_dot _npi_tensordot _npi_tensordot_int_axes": (
        lambda a, x, y: 2 * isqrt(prod(map(prod, (*x, *y))))
    ),
    "_npi_matmul": lambda a, x, y: 2 * x[0][-1] * prod(y[0]),
    "_npi_einsum": _count_einsum,
    "batch_dot _linalg_gemm2 _contrib_interleaved_matmul_encdec_qk": _count_product,
    "_linalg_gemm": lambda a, x, y: _count_product(a, x, y) + prod(y[0]),
    # One triangle of a product with itself; the other is a copy.
    "_linalg_syrk": lambda a, x, y: prod(x[0]) * (y[0][-1] + 1),
    # A triangle of n x n with n x m: n (n + 1) / 2 products, n (n - 1) / 2 sums a column.
    "_linalg_trmm _linalg_trsm": lambda a, x, y: x[0][-1] * prod(y[0]),
    "RNN": _count_rnn,
    # Queries, keys and values stand side by side (contrib/transformer.cc).
    "_contrib_interleaved_matmul_selfatt_qk": lambda a, x, y: _count_product(a, x, y) // 3,
    "_contrib_interleaved_matmul_selfatt_valatt _contrib_interleaved_matmul_encdec_valatt": (
        lambda a, x, y: 2 * x[1][-1] * prod(y[0])
    ),
    # A window of all channels of one image with one of the other, and the mean.
    "Correlation": lambda a, x, y: (
        prod(y[0]) * (1 + 2 * x[0][1] * int(a.get("kernel_size", 1)) ** 2)
    ),
    "Pooling Pooling_v1": lambda a, x, y: (
        prod(x[0])
        if truth(a.get("global_pool"))
        else prod(map(int, re.findall(r"\d+", a["kernel"]))) * prod(y[0])
    ),
    # Four multiply-adds.
    "BilinearSampler _contrib_BilinearResize2D": lambda a, x, y: 8 * prod(y[0]),
    # Mean 1; variance 3 (subtract, multiply, add); normalised 3 (subtract, multiply, add), for
    # scale and deviation are one factor of a channel.
    "BatchNorm BatchNorm_v1 _contrib_SyncBatchNorm": lambda a, x, y: (
        (3 if truth(a.get("use_global_stats")) else 7) * prod(x[0])
    ),
    "InstanceNorm GroupNorm": _per_input(7),
    "LayerNorm _contrib_BatchNormWithReLU": _per_input(8),  # scale and deviation of different axes
    "moments _npi_std _npi_var": _per_input(4),
    "L2Normalization": _per_input(3),  # multiply, add, multiply with 1 / norm
    # Square 1, their sum over ``nsize`` channels, multiply-add 2, power 1, multiply 1.
    "LRN": lambda a, x, y: (int(a["nsize"]) + 5) * prod(x[0]),
    # Largest, subtract it, exp, their sum, and divide by it or subtract its logarithm.
    "softmax log_softmax SoftmaxActivation SoftmaxOutput softmax_cross_entropy": _per_input(5),
    "softmin": _per_input(6),
    "add_n": lambda a, x, y: (len(x) - 1) * prod(y[0]),
    "norm _npi_norm": _per_input(2),
    # One operation for every element of the input.
    "_contrib_AdaptiveAvgPooling2D argmax argmax_channel argmin col2im max mean min nanprod nansum"
    " prod sum _square_sum _np_all _np_any _np_max _np_min _np_prod _np_sum _npi_argmax _npi_argmin"
    " _npi_mean": _per_input(1),
    # Operators that only move data.
    """
    BlockGrad Cast Concat Crop Embedding Flatten IdentityAttachKLSparseReg LinearRegressionOutput
    MAERegressionOutput MakeLoss Pad Reshape SequenceLast SequenceMask SequenceReverse SliceChannel
    SwapAxis _contrib_SparseEmbedding _copy _full _identity_with_attr_like_rhs _ones _split_v2
    _zeros _zeros_without_dtype amp_cast amp_multicast broadcast_axis broadcast_like broadcast_to
    depth_to_space diag expand_dims gather_nd im2col make_loss one_hot ones_like pick repeat
    reshape_like reverse slice slice_axis slice_like space_to_depth squeeze stack take tile
    transpose where zeros_like _rnn_param_concat
    _np_atleast_1d _np_atleast_2d _np_atleast_3d _np_copy _np_diag _np_diagflat _np_diagonal
    _np_moveaxis _np_reshape _np_roll _np_squeeze _np_transpose _npi_arange _npi_broadcast_to
    _npi_column_stack _npi_concatenate _npi_dsplit _npi_dstack _npi_eye _npi_flip _npi_full_like
    _npi_hsplit _npi_hstack _npi_identity _npi_ones _npi_pad _npi_rot90 _npi_stack _npi_tril
    _npi_vstack _npi_where _npi_where_lscalar _npi_where_rscalar _npi_zeros _npx_reshape
    """: lambda a, x, y: 0,
}
_FORMULAS = {op: formula for ops, formula in _OF_SEVERAL.items() for op in ops.split()}


def count_flops(op: str, attrs: Attrs, inputs: Shapes, outputs: Shapes) -> int:
    """Count the operations of an operator in a forward pass, from the shapes of its tensors."""
    formula = _FORMULAS.get(op)
    return formula(attrs, inputs, outputs) if formula else sum(map(prod, outputs))
