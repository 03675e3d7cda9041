"""MXNet's operators, one small use of each: what recomputation must leave unchanged.

`CASES` maps a name to a function from a symbol of shape `SHAPE` to a symbol of any shape. Every
case trains on the CPU without a plan: forward, backward and finite gradients. Values of its input
are positive and moderate where arguments are uniform in [0, 0.5) and auxiliary states are 0.5.

`small_net` puts a case between two nodes named `BEFORE` and `AFTER`, so that it can be marked
alone; `planned_net` puts it inside a network that is worth planning. What follows a case is
softsign: it saturates slowly, so that large values keep a gradient to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import memonger  # noqa: F401  makes MXNet importable on newer NumPy
import mxnet as mx
import networks  # noqa: F401  registers the Custom operator

from planned import nodes

S = mx.sym
C = mx.sym.contrib
N = mx.sym._internal
V = mx.sym.Variable

SHAPE = (4, 8, 6, 6)
SMALL_SHAPES = {"data": (4, 10)}
PLANNED_SHAPES = {"data": SHAPE}
BEFORE = "before"
AFTER = "after"


@dataclass(frozen=True)
class Case:
    """One use of an operator.

    With `draws` it takes random numbers in training: runs agree after the same ``mx.random.seed``,
    recomputation would draw others. The exception is RNN_dropout, which draws only when
    MXNET_USE_MKLDNN_RNN=0: MKLDNN's RNN leaves the dropout out.
    """

    build: Callable[[Any], Any]
    draws: bool = False


def small_net(case: Case) -> Any:
    """Build data -> FullyConnected -> `BEFORE` -> the case -> `AFTER` -> loss; `SMALL_SHAPES`."""
    with mx.name.NameManager():
        x = S.FullyConnected(V("data"), num_hidden=8 * 6 * 6)
        x = N._plus_scalar(S.reshape(x, SHAPE) * 1.5, scalar=0.1, name=BEFORE)
        y = S.softsign(case.build(x), name=AFTER)
        return S.MakeLoss(S.sum(S.square(y)))


def planned_net(case: Case, blocks: int = 3) -> Any:
    """Build a residual network with the case between its blocks; `PLANNED_SHAPES`."""
    with mx.name.NameManager():
        x = _conv(V("data"))
        for _ in range(blocks):
            x = x + _conv(_conv(x))
        y = case.build(N._plus_scalar(S.sigmoid(x) * 1.5, scalar=0.1, name=BEFORE))
        # Of norm 1, so that no case drowns the rest of the network.
        y = S.L2Normalization(S.reshape(S.softsign(y, name=AFTER), (1, -1)))
        y = S.reshape(S.FullyConnected(y, num_hidden=8 * 6 * 6), (1, 8, 6, 6))
        x = S.broadcast_add(x, y)
        for _ in range(blocks):
            x = x + _conv(_conv(x))
        x = S.Pooling(x, kernel=(6, 6), global_pool=True, pool_type="avg")
        x = S.FullyConnected(x, num_hidden=5)
        return S.SoftmaxOutput(x, S.zeros((4,)), name="softmax")


def _conv(x: Any) -> Any:
    x = S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=8, no_bias=True)
    return S.Activation(S.BatchNorm(x, fix_gamma=False), act_type="relu")


# -- inputs that several cases want ------------------------------------------------------------


def _rows(x: Any) -> Any:
    """(4, 288): one row an example."""
    return S.reshape(x, (4, -1))


def _series(x: Any) -> Any:
    """(4, 8, 36): as 4 time steps, a batch of 8 and 36 features."""
    return S.reshape(x, (4, 8, 36))


def _matrices(x: Any) -> Any:
    """(32, 6, 6), symmetric and positive definite."""
    a = S.reshape(x, (32, 6, 6)) * 0.1
    return S.broadcast_add(S.batch_dot(a, a, transpose_b=True), S.expand_dims(S.eye(6), 0))


def _triangles(x: Any) -> Any:
    """(32, 6, 6), lower triangular with a dominant diagonal."""
    a = S.reshape(x, (32, 6, 6)) * 0.1
    return S.broadcast_add(S.linalg_maketrian(S.linalg_extracttrian(a)), S.expand_dims(S.eye(6), 0))


def _channel(name: str = "case_weight") -> Any:
    return V(name, shape=(1, 8, 1, 1))


def _halved(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(S.tanh(x) * 0.5)


def _stepping(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(x * 2 - 3) * x


def _indices(x: Any, high: int) -> Any:
    """(1152,) whole numbers in [0, high): what is looked up depends on x, without gradient."""
    return S.BlockGrad(S.clip(S.floor(S.reshape(x, (-1,)) * 2), 0, high - 1))


def _boxes(x: Any) -> Any:
    """(288, 4) boxes, right of and below their own corner."""
    corner, extent = S.split(S.reshape(x, (288, 4)), num_outputs=2, axis=1)
    return S.concat(corner, corner + extent + 0.5, dim=1)


def _rois() -> Any:
    """(2, 5) regions of interest: the first image, rows of (image, left, top, right, bottom)."""
    return S.concat(S.zeros((2, 3)), S.ones((2, 2)) * 4, dim=1)


def _rnn(x: Any, mode: str, **more: Any) -> Any:
    return S.RNN(_series(x) * 0.05, state_size=6, num_layers=2, mode=mode, **more)


def _same_loss(loss: Callable[..., Any]) -> Callable[[Any], Any]:
    """Use a loss on (4, 288) scores, which is itself a head: its gradient ignores what follows."""
    return lambda x: loss(_rows(x), S.ones((4, 288)) * 0.5)


def _while(x: Any) -> Any:
    outputs, states = C.while_loop(
        cond=lambda i, _: i < 3,
        func=lambda i, y: (y * 0.5, [i + 1, S.tanh(y)]),
        loop_vars=[S.zeros((1,)), x],
        max_iterations=4,
    )
    # Rows beyond the last iteration are undefined.
    outputs = S.slice_axis(outputs, axis=0, begin=0, end=3)
    return S.broadcast_add(outputs, S.expand_dims(states[1], 0))


def _foreach(x: Any) -> Any:
    outputs, state = C.foreach(
        lambda row, state: (S.tanh(row + state), row * state), x, S.ones((8, 6, 6))
    )
    return S.broadcast_add(outputs, S.expand_dims(state, 0))


# -- the table -----------------------------------------------------------------------------------

_LAYERS: dict[str, Callable[[Any], Any]] = {
    "FullyConnected": lambda x: S.FullyConnected(x, num_hidden=8),
    "FullyConnected_no_bias": lambda x: S.FullyConnected(
        x, num_hidden=8, no_bias=True, flatten=False
    ),
    "Convolution": lambda x: S.Convolution(x, kernel=(3, 3), num_filter=8),
    "Convolution_1d": lambda x: S.Convolution(_series(x), kernel=(3,), num_filter=4),
    "Convolution_3d": lambda x: S.Convolution(S.expand_dims(x, 1), kernel=(3, 3, 3), num_filter=2),
    "Convolution_grouped": lambda x: S.Convolution(
        x, kernel=(3, 3), num_filter=8, num_group=8, dilate=(2, 2)
    ),
    "Deconvolution": lambda x: S.Deconvolution(x, kernel=(3, 3), num_filter=8),
    "DeformableConvolution": lambda x: C.DeformableConvolution(
        x, S.zeros((4, 18, 4, 4)) + 0.3, kernel=(3, 3), num_filter=8
    ),
    "Embedding": lambda x: S.Embedding(_indices(x, 4), input_dim=4, output_dim=5),
    "Embedding_plus": lambda x: (
        S.Embedding(_indices(x, 4), input_dim=4, output_dim=1) + S.reshape(x, (-1, 1))
    ),
    "Pooling_max": lambda x: S.Pooling(x, kernel=(2, 2), pool_type="max"),
    "Pooling_max_strided": lambda x: S.Pooling(
        x, kernel=(3, 3), stride=(2, 2), pool_type="max", pooling_convention="full"
    ),
    "Pooling_avg": lambda x: S.Pooling(x, kernel=(2, 2), pool_type="avg"),
    "Pooling_lp": lambda x: S.Pooling(x, kernel=(2, 2), pool_type="lp", p_value=2),
    "Pooling_global": lambda x: S.Pooling(x, kernel=(2, 2), global_pool=True, pool_type="avg"),
    "Pooling_v1": lambda x: S.Pooling_v1(x, kernel=(2, 2), pool_type="max"),
    "Convolution_v1": lambda x: S.Convolution_v1(x, kernel=(3, 3), num_filter=8),
    "BatchNorm": lambda x: S.BatchNorm(x, fix_gamma=False),
    "BatchNorm_fix_gamma": lambda x: S.BatchNorm(x),
    "BatchNorm_global": lambda x: S.BatchNorm(x, fix_gamma=False, use_global_stats=True),
    "BatchNorm_cudnn_off": lambda x: S.BatchNorm(x, fix_gamma=False, cudnn_off=True),
    "BatchNorm_axis": lambda x: S.BatchNorm(x, fix_gamma=False, axis=3),
    "BatchNorm_unread": lambda x: S.broadcast_mul(
        x, S.reshape(S.BatchNorm(x, fix_gamma=False, output_mean_var=True)[1], (1, 8, 1, 1))
    ),
    "BatchNorm_v1": lambda x: S.BatchNorm_v1(x, fix_gamma=False),
    "SyncBatchNorm": lambda x: C.SyncBatchNorm(x, key="key", ndev=1, fix_gamma=False),
    "BatchNormWithReLU": lambda x: C.BatchNormWithReLU(x, fix_gamma=False),
    "LayerNorm": lambda x: S.LayerNorm(x),
    "LayerNorm_axis": lambda x: S.LayerNorm(x, axis=1),
    "GroupNorm": lambda x: S.GroupNorm(x, num_groups=2),
    "InstanceNorm": lambda x: S.InstanceNorm(x),
    "L2Normalization": lambda x: S.L2Normalization(x),
    "L2Normalization_channel": lambda x: S.L2Normalization(x, mode="channel"),
    "LRN": lambda x: S.LRN(x, nsize=3),
    "RNN_lstm": lambda x: _rnn(x, "lstm"),
    "RNN_gru_bidirectional": lambda x: _rnn(x, "gru", bidirectional=True),
    "RNN_tanh": lambda x: _rnn(x, "rnn_tanh"),
    "RNN_relu": lambda x: _rnn(x, "rnn_relu"),
    "RNN_state_unread": lambda x: _rnn(x, "lstm", state_outputs=True)[1],
    "UpSampling": lambda x: S.UpSampling(x, scale=2, sample_type="nearest"),
    "UpSampling_bilinear": lambda x: S.UpSampling(
        x, V("case_weight", shape=(8, 1, 4, 4)), scale=2, sample_type="bilinear", num_filter=8
    ),
    "Custom": lambda x: S.Custom(x, op_type="hard_swish"),
}

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Activation_relu": lambda x: S.Activation(x - 1, act_type="relu"),
    "Activation_softrelu": lambda x: S.Activation(x, act_type="softrelu"),
    "Activation_softsign": lambda x: S.Activation(x, act_type="softsign"),
    "LeakyReLU": lambda x: S.LeakyReLU(x - 1, act_type="leaky"),
    "LeakyReLU_prelu": lambda x: S.LeakyReLU(x - 1, act_type="prelu"),
    "LeakyReLU_elu": lambda x: S.LeakyReLU(x - 1, act_type="elu"),
    "LeakyReLU_gelu": lambda x: S.LeakyReLU(x, act_type="gelu"),
    "LeakyReLU_selu": lambda x: S.LeakyReLU(x, act_type="selu"),
    "hard_sigmoid": lambda x: S.hard_sigmoid(x),
    "softmax": lambda x: S.softmax(x),
    "softmax_temperature": lambda x: S.softmax(x, axis=1, temperature=2.0),
    "log_softmax": lambda x: S.log_softmax(x),
    "softmin": lambda x: S.softmin(x),
    "SoftmaxActivation": lambda x: S.SoftmaxActivation(x, mode="channel"),
    "clip": lambda x: S.clip(x, 0.2, 0.8),
    "smooth_l1": lambda x: S.smooth_l1(x, scalar=1.0),
}

_ARITHMETIC: dict[str, Callable[[Any], Any]] = {
    "_minus_scalar": lambda x: x - 0.3,
    "_rminus_scalar": lambda x: 1 - x,
    "_mul_scalar": lambda x: x * 0.3,
    "_div_scalar": lambda x: x / 3,
    "_rdiv_scalar": lambda x: 3 / (x + 1),
    "_power_scalar": lambda x: x**1.5,
    "_rpower_scalar": lambda x: N._rpower_scalar(x, scalar=2.0),
    "_mod_scalar": lambda x: x % 0.7,
    "_rmod_scalar": lambda x: N._rmod_scalar(x + 1, scalar=5.0),
    "_maximum_scalar": lambda x: S.maximum(x, 1),
    "_minimum_scalar": lambda x: S.minimum(x, 1),
    "_hypot_scalar": lambda x: S.hypot(x, 1),
    "_greater_scalar": lambda x: (x > 1) * x,
    "_equal_scalar": lambda x: (x == 1) + x,
    "elemwise_add": lambda x: x + x * 2,
    "elemwise_sub": lambda x: x - x * 2,
    "elemwise_mul": lambda x: x * x,
    "elemwise_div": lambda x: x / (x + 2),
    "_power": lambda x: x ** (x * 0.5),
    "_mod": lambda x: x % (x * 0.3 + 1),
    "_maximum": lambda x: S.maximum(x, x * x),
    "_minimum": lambda x: S.minimum(x, x * x),
    "_hypot": lambda x: S.hypot(x, x * x),
    "_lesser": lambda x: (x < x * x) * x,
    "logical_not": lambda x: S.logical_not(S.relu(x - 1)) * x,
    "_logical_and": lambda x: N._logical_and(x, x - 1) * x,
    "add_n": lambda x: S.add_n(x, x * x, x * 2),
    "ten_uses": lambda x: S.add_n(*(S.tanh(x * (i + 0.5)) for i in range(10))),
    "broadcast_add": lambda x: S.broadcast_add(x, _channel()),
    "broadcast_sub": lambda x: S.broadcast_sub(x, _channel()),
    "broadcast_mul": lambda x: S.broadcast_mul(x, _channel()),
    "broadcast_div": lambda x: S.broadcast_div(x, _channel() + 1),
    "broadcast_mod": lambda x: S.broadcast_mod(x, _channel() + 1),
    "broadcast_power": lambda x: S.broadcast_power(x, _channel()),
    "broadcast_maximum": lambda x: S.broadcast_maximum(x, _channel() + 0.8),
    "broadcast_minimum": lambda x: S.broadcast_minimum(x, _channel() + 0.8),
    "broadcast_hypot": lambda x: S.broadcast_hypot(x, _channel()),
    "broadcast_greater": lambda x: S.broadcast_greater(x, _channel() + 0.8) * x,
    "broadcast_to": lambda x: S.broadcast_to(_channel(), SHAPE) * x,
    "broadcast_like": lambda x: S.broadcast_like(_channel(), x) * x,
    "broadcast_axis": lambda x: S.broadcast_axis(S.expand_dims(x, 0), axis=0, size=3),
    "where": lambda x: S.where(x > 1, x, x * 2),
    "quadratic": lambda x: C.quadratic(x, a=0.1, b=0.2, c=0.3),
    "div_sqrt_dim": lambda x: C.div_sqrt_dim(x),
    "gradientmultiplier": lambda x: C.gradientmultiplier(x, scalar=-0.5),
    "round_ste": lambda x: C.round_ste(x * 3),
    "sign_ste": lambda x: C.sign_ste(x - 1) * x,
}

_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: S.sum(x, axis=1),
    "mean": lambda x: S.mean(x, axis=(2, 3)),
    "prod": lambda x: S.prod(x, axis=3),
    "nansum": lambda x: S.nansum(x, axis=1),
    "nanprod": lambda x: S.nanprod(x, axis=3),
    "max": lambda x: S.max(x, axis=1),
    "min": lambda x: S.min(x, axis=1),
    "norm": lambda x: S.norm(x, axis=1),
    "norm_l1": lambda x: S.norm(x, ord=1, axis=1),
    "moments": lambda x: S.moments(x, axes=(0, 2, 3))[0],
    "moments_variance": lambda x: S.moments(x, axes=(0, 2, 3))[1],
    "argmax": lambda x: S.broadcast_mul(x, S.argmax(x, axis=1, keepdims=True)),
    "cumsum": lambda x: S.cumsum(x, axis=1) * 0.1,
    "topk": lambda x: S.topk(x, k=3, ret_typ="value"),
    "topk_mask": lambda x: S.topk(x, k=3, ret_typ="mask") * x,
    "sort": lambda x: S.sort(x, axis=1),
    "argsort": lambda x: S.argsort(x, axis=1) * x,
}

_SHAPES: dict[str, Callable[[Any], Any]] = {
    "Reshape": lambda x: S.reshape(x, (4, -1)),
    "reshape_like": lambda x: S.reshape_like(x, S.zeros((4, 288))),
    "Flatten": lambda x: S.Flatten(x),
    "transpose": lambda x: S.transpose(x, (0, 2, 3, 1)),
    "SwapAxis": lambda x: S.SwapAxis(x, dim1=1, dim2=2),
    "expand_dims": lambda x: S.expand_dims(x, 0),
    "squeeze": lambda x: S.squeeze(S.sum(x, axis=1, keepdims=True)),
    "slice": lambda x: S.slice(x, begin=(0, 1), end=(4, 5)),
    "slice_axis": lambda x: S.slice_axis(x, axis=1, begin=1, end=4),
    "slice_like": lambda x: S.slice_like(x, S.zeros((2, 3, 6, 6))),
    "SliceChannel": lambda x: S.SliceChannel(x, num_outputs=2)[0],
    "SliceChannel_unread": lambda x: S.SliceChannel(x, num_outputs=2)[1],
    "SliceChannel_all": lambda x: S.add_n(*S.SliceChannel(x, num_outputs=4)),
    "split_v2": lambda x: S.split_v2(x, (2, 5), axis=1)[1],
    "Concat": lambda x: S.Concat(x, x * 2),
    "stack": lambda x: S.stack(x, x * 2),
    "tile": lambda x: S.tile(x, (2, 1, 1, 1)),
    "repeat": lambda x: S.repeat(x, 2),
    "reverse": lambda x: S.reverse(x, axis=1),
    "Pad": lambda x: S.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1)),
    "Pad_reflect": lambda x: S.Pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 1, 1, 1, 1)),
    "Crop": lambda x: S.Crop(x, offset=(1, 1), h_w=(3, 3)),
    "depth_to_space": lambda x: S.depth_to_space(x, 2),
    "space_to_depth": lambda x: S.space_to_depth(x, 2),
    "diag": lambda x: S.diag(x),
    "im2col": lambda x: S.im2col(x, kernel=(3, 3)),
    "col2im": lambda x: S.col2im(S.im2col(x, kernel=(3, 3)), output_size=(6, 6), kernel=(3, 3)),
    "zeros_like": lambda x: S.zeros_like(x) + x,
    "ones_like": lambda x: S.ones_like(x) * x,
    "shape_array": lambda x: S.broadcast_mul(
        S.reshape(
            S.Cast(S.slice_axis(S.shape_array(x), axis=0, begin=2, end=3), "float32"), (1, 1)
        ),
        _rows(x),
    ),
    "arange_like": lambda x: C.arange_like(x, axis=3) * S.sum(x, axis=(0, 1, 2)),
    "Cast": lambda x: S.Cast(S.Cast(x, "float64") * 2, "float32"),
    "Cast_float16": lambda x: S.Cast(S.Cast(x, "float16"), "float32"),
    "amp_cast": lambda x: S.amp_cast(S.amp_cast(x, "float16"), "float32"),
    "amp_multicast": lambda x: S.add_n(*S.amp_multicast(x, x * 2, num_outputs=2)),
    "BlockGrad": lambda x: S.BlockGrad(x) * x,
    "_copy": lambda x: S.identity(x),
    "like_rhs": lambda x: N._identity_with_attr_like_rhs(x, x * 2),
    "adaptive_pooling": lambda x: C.AdaptiveAvgPooling2D(x, output_size=2),
    "bilinear_resize": lambda x: C.BilinearResize2D(x, height=9, width=9),
}

_LOOKUPS: dict[str, Callable[[Any], Any]] = {
    "take": lambda x: S.take(x, S.zeros((3,))),
    "take_computed": lambda x: S.take(S.reshape(x, (-1,)), _indices(x, 8)),
    "batch_take": lambda x: (
        S.BlockGrad(
            S.batch_take(
                S.reshape(x, (576, 2)), S.Cast(S.take(_indices(x, 2), S.arange(576)), "int32")
            )
        )
        * S.mean(S.reshape(x, (576, 2)), axis=1)
    ),
    "pick": lambda x: S.pick(_rows(x), S.zeros((4,))),
    "one_hot": lambda x: S.broadcast_mul(S.one_hot(_indices(x, 4), depth=4), S.reshape(x, (-1, 1))),
    "gather_nd": lambda x: S.gather_nd(x, S.zeros((1, 3))),
    "scatter_nd": lambda x: S.scatter_nd(x, S.reshape(S.arange(4), (1, 4)), (5, 8, 6, 6)),
    "index_copy": lambda x: C.index_copy(x, S.arange(2), S.ones((2, 8, 6, 6))),
    "index_array": lambda x: S.broadcast_mul(
        S.Cast(C.index_array(x, axes=(3,)), "float32"), S.expand_dims(x, 4)
    ),
    "unravel_index": lambda x: (
        S.sum(S.unravel_index(_indices(x, 4), shape=(2, 2)), axis=0) * S.reshape(x, (-1,))
    ),
    "SequenceMask": lambda x: S.SequenceMask(
        _series(x), S.ones((8,)) * 2, use_sequence_length=True, value=0.1
    ),
    "SequenceReverse": lambda x: S.SequenceReverse(
        _series(x), S.ones((8,)) * 3, use_sequence_length=True
    ),
    "SequenceLast": lambda x: S.SequenceLast(
        _series(x), S.ones((8,)) * 2, use_sequence_length=True
    ),
}

_ALGEBRA: dict[str, Callable[[Any], Any]] = {
    "dot": lambda x: S.dot(_rows(x), V("case_weight", shape=(288, 5))),
    "batch_dot": lambda x: S.batch_dot(_series(x), _series(x), transpose_b=True),
    "khatri_rao": lambda x: S.broadcast_mul(
        S.BlockGrad(S.khatri_rao(_rows(x), _rows(x) * 2)), S.mean(x)
    ),
    "linalg_gemm": lambda x: S.linalg_gemm(x, x, x),
    "linalg_gemm2": lambda x: S.linalg_gemm2(x, x),
    "linalg_potrf": lambda x: S.linalg_potrf(_matrices(x)),
    "linalg_potri": lambda x: S.linalg_potri(_triangles(x)),
    "linalg_trmm": lambda x: S.linalg_trmm(_triangles(x), S.reshape(x, (32, 6, 6))),
    "linalg_trsm": lambda x: S.linalg_trsm(_triangles(x), S.reshape(x, (32, 6, 6))),
    "linalg_syrk": lambda x: S.linalg_syrk(x),
    "linalg_gelqf": lambda x: S.linalg_gelqf(_matrices(x))[0],
    "linalg_syevd": lambda x: S.linalg.syevd(
        S.broadcast_add(_matrices(x), S.expand_dims(S.diag(S.arange(6)), 0))
    )[1],
    "linalg_sumlogdiag": lambda x: S.linalg_sumlogdiag(_matrices(x)),
    "linalg_extractdiag": lambda x: S.linalg_extractdiag(x),
    "linalg_makediag": lambda x: S.linalg_makediag(x),
    "linalg_extracttrian": lambda x: S.linalg_extracttrian(x),
    "linalg_maketrian": lambda x: S.linalg_maketrian(S.reshape(x, (-1, 6))),
    "linalg_inverse": lambda x: S.linalg_inverse(_matrices(x)),
    "linalg_det": lambda x: S.linalg_det(_matrices(x)),
    "linalg_slogdet": lambda x: S.linalg_slogdet(_matrices(x))[1],
    "interleaved_selfatt_qk": lambda x: C.interleaved_matmul_selfatt_qk(_series(x), heads=3),
    "interleaved_selfatt_valatt": lambda x: C.interleaved_matmul_selfatt_valatt(
        _series(x), S.softmax(C.interleaved_matmul_selfatt_qk(_series(x), heads=3)), heads=3
    ),
    "interleaved_encdec_qk": lambda x: C.interleaved_matmul_encdec_qk(
        S.slice_axis(_series(x), axis=2, begin=0, end=18), _series(x), heads=3
    ),
}

_VISION: dict[str, Callable[[Any], Any]] = {
    "ROIPooling": lambda x: S.ROIPooling(x, _rois(), pooled_size=(2, 2), spatial_scale=1.0),
    "ROIAlign": lambda x: C.ROIAlign(x, _rois(), pooled_size=(2, 2), spatial_scale=1.0),
    "PSROIPooling": lambda x: C.PSROIPooling(
        x, _rois(), output_dim=2, pooled_size=2, spatial_scale=1.0
    ),
    "SpatialTransformer": lambda x: S.SpatialTransformer(
        x,
        S.FullyConnected(x, num_hidden=6) * 0.01,
        target_shape=(5, 5),
        transform_type="affine",
        sampler_type="bilinear",
    ),
    "GridGenerator": lambda x: S.GridGenerator(
        S.reshape(x, (192, 6)), transform_type="affine", target_shape=(3, 3)
    ),
    "GridGenerator_warp": lambda x: S.GridGenerator(
        S.slice_axis(x, axis=1, begin=0, end=2), transform_type="warp"
    ),
    "BilinearSampler": lambda x: S.BilinearSampler(
        x, S.tanh(S.slice_axis(x, axis=1, begin=0, end=2) - 1)
    ),
    "Correlation": lambda x: S.Correlation(x, x * 2, kernel_size=1, max_displacement=1),
    "box_iou": lambda x: S.broadcast_mul(
        C.box_iou(_boxes(x), S.slice_axis(_boxes(x), axis=0, begin=0, end=8)), S.mean(x)
    ),
    "box_nms": lambda x: C.box_nms(
        S.concat(S.slice_axis(_boxes(x), axis=1, begin=0, end=1), _boxes(x), dim=1),
        coord_start=1,
        score_index=0,
    ),
    "MultiBoxPrior": lambda x: S.broadcast_mul(
        C.MultiBoxPrior(x, sizes=(0.5, 0.3)), S.mean(x, axis=(0, 1, 2, 3), keepdims=False)
    ),
    "image_normalize": lambda x: (
        mx.sym.image.normalize(
            S.slice_axis(x, axis=1, begin=0, end=3), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)
        )
        + S.slice_axis(x, axis=1, begin=3, end=6)
    ),
}

_LOSSES: dict[str, Callable[[Any], Any]] = {
    "SoftmaxOutput": lambda x: S.SoftmaxOutput(_rows(x), S.ones((4,))),
    "SoftmaxOutput_multi": lambda x: S.SoftmaxOutput(
        x, S.ones((4, 6, 6)), multi_output=True, use_ignore=True, ignore_label=0
    ),
    "SVMOutput": lambda x: S.SVMOutput(_rows(x), S.ones((4,))),
    "LinearRegressionOutput": _same_loss(S.LinearRegressionOutput),
    "MAERegressionOutput": _same_loss(S.MAERegressionOutput),
    "LogisticRegressionOutput": _same_loss(S.LogisticRegressionOutput),
    "MakeLoss": lambda x: S.MakeLoss(S.square(x), grad_scale=0.5),
    "make_loss": lambda x: S.make_loss(S.square(x)),
    "CTCLoss": lambda x: S.ctc_loss(S.reshape(x, (36, 4, 8)), S.ones((4, 3))),
    "softmax_cross_entropy": lambda x: S.softmax_cross_entropy(_rows(x), S.ones((4,))),
    "IdentityAttachKLSparseReg": lambda x: S.IdentityAttachKLSparseReg(S.sigmoid(_rows(x))),
    "L1_chain": lambda x: S.mean(S.abs(x - x * x), axis=0),
}

_CONTROL_FLOW: dict[str, Callable[[Any], Any]] = {"foreach": _foreach}

# Functions of one value, by name.
_UNARY = [
    "abs",
    "cbrt",
    "cos",
    "cosh",
    "arctan",
    "arcsinh",
    "degrees",
    "erf",
    "exp",
    "expm1",
    "gamma",
    "gammaln",
    "log",
    "log10",
    "log1p",
    "log2",
    "negative",
    "radians",
    "rcbrt",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "softsign",
    "sqrt",
    "square",
    "tan",
    "tanh",
]

# Functions that are constant almost everywhere.
_STEPS = ["ceil", "fix", "floor", "rint", "round", "sign", "trunc"]

# Functions of a value in (-1, 1).
_INVERSE = ["arccos", "arcsin", "arctanh", "erfinv"]

# Samplers: their parameters.
_SAMPLED: dict[str, dict[str, float]] = {
    "uniform": {"low": 0.1, "high": 0.9},
    "normal": {"loc": 0.1, "scale": 0.5},
    "gamma": {"alpha": 2.0, "beta": 0.5},
    "exponential": {"lam": 2.0},
    "poisson": {"lam": 2.0},
    "negative_binomial": {"k": 3, "p": 0.4},
    "generalized_negative_binomial": {"mu": 2.0, "alpha": 0.3},
}


def _drawn(name: str) -> Callable[[Any], Any]:
    sample = getattr(N, "_random_" + name)
    return lambda x: sample(shape=SHAPE, **_SAMPLED[name]) * x


def _drawn_like(name: str) -> Callable[[Any], Any]:
    sample = getattr(S.random, name + "_like")
    return lambda x: sample(x, **_SAMPLED[name]) * x


# Not LeakyReLU with rrelu: in training on the CPU it writes where it must not and crashes.
_RANDOM: dict[str, Callable[[Any], Any]] = {
    "Dropout": lambda x: S.Dropout(x, p=0.5),
    "Dropout_axes": lambda x: S.Dropout(x, p=0.5, axes=(2, 3)),
    "Dropout_always": lambda x: S.Dropout(x, p=0.3, mode="always"),
    "RNN_dropout": lambda x: _rnn(x, "lstm", p=0.5),
    "random_randint": lambda x: S.Cast(S.random.randint(0, 5, shape=SHAPE), "float32") * x,
    "sample_uniform": lambda x: N._sample_uniform(x, x + 1) * x,
    "sample_normal": lambda x: N._sample_normal(x, x * 0.1) * x,
    "sample_gamma": lambda x: N._sample_gamma(x, x) * x,
    "sample_exponential": lambda x: N._sample_exponential(x) * x,
    "sample_poisson": lambda x: N._sample_poisson(x) * x,
    "sample_multinomial": lambda x: S.broadcast_mul(
        S.Cast(S.sample_multinomial(S.softmax(_rows(x))), "float32"), S.sum(_rows(x), axis=1)
    ),
    "shuffle": lambda x: S.BlockGrad(S.shuffle(S.arange(4))) * S.mean(_rows(x), axis=1),
}

CASES: dict[str, Case] = {}
for _table in (
    _LAYERS,
    _ACTIVATIONS,
    _ARITHMETIC,
    _REDUCTIONS,
    _SHAPES,
    _LOOKUPS,
    _ALGEBRA,
    _VISION,
    _LOSSES,
    _CONTROL_FLOW,
):
    CASES.update((name, Case(build)) for name, build in _table.items())
CASES.update((name, Case(getattr(S, name))) for name in _UNARY)
CASES.update((name, Case(_stepping(getattr(S, name)))) for name in _STEPS)
CASES.update((name, Case(_halved(getattr(S, name)))) for name in _INVERSE)
CASES.update((name, Case(build, draws=True)) for name, build in _RANDOM.items())
CASES.update(("random_" + name, Case(_drawn(name), draws=True)) for name in _SAMPLED)
CASES.update((f"random_{name}_like", Case(_drawn_like(name), draws=True)) for name in _SAMPLED)

# Their shapes are known to MXNet only when they run: simple_bind refuses them, bind takes them
# (with the arrays of all arguments, in `small_net`), and nothing can be planned.
DYNAMIC_CASES: dict[str, Case] = {
    "while_loop": Case(_while),
    "cond": Case(lambda x: C.cond(S.sum(x) > 1, lambda: S.tanh(x), lambda: x * 2)),
}


def inner(symbol: Any) -> list[str]:
    """The operators of a case: those between BEFORE and AFTER."""
    order = [n["name"] for n in nodes(symbol) if n["op"] != "null"]
    outside = {n["name"] for n in nodes(symbol.get_internals()[BEFORE + "_output"])}
    return [n for n in order[: order.index(AFTER)] if n not in outside]
