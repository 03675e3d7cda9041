"""MXNet's operators, one small use of each: what recomputation must leave unchanged.

`CASES` maps a name to a function from a symbol of shape `SHAPE` to a symbol of any shape. Every
case trains on the CPU without a plan: forward, backward and finite gradients. Values of its input
are positive and moderate where arguments are uniform in [0, 0.5) and auxiliary states are 0.5.

What follows a case is softsign: it saturates slowly, so that large values keep a gradient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable

import memonger  # noqa: F401  makes MXNet importable on newer NumPy
import mxnet as mx
import networks  # noqa: F401  registers the Custom operator

from planned import nodes

S = mx.sym
N = mx.sym._internal
V = mx.sym.Variable

SHAPE = (4, 8, 6, 6)
SMALL_SHAPES = {"data": (4, 10)}
PLANNED_SHAPES = {"data": SHAPE}
BLOCKED_SHAPES = {"data": (4, 1, 6, 6)}
BEFORE = "before"
AFTER = "after"


@dataclass(frozen=True)
class Case:
    """One use of an operator.

    With `draws` it takes random numbers in training, and recomputed it would draw others. The
    exception is RNN_dropout: MKLDNN's RNN leaves the dropout out.
    """

    build: Callable[[Any], Any]
    draws: bool = False


def small_net(case: Case) -> Any:
    """Return the case alone, between `BEFORE` and `AFTER`; of `SMALL_SHAPES`."""
    with mx.name.NameManager():
        x = S.FullyConnected(V("data"), num_hidden=8 * 6 * 6)
        x = N._plus_scalar(S.reshape(x, SHAPE) * 1.5, scalar=0.1, name=BEFORE)
        y = S.softsign(case.build(x), name=AFTER)
        return S.MakeLoss(S.sum(S.square(y)))


def planned_net(case: Case, blocks: int = 2) -> Any:
    """Build a residual network worth planning, with the case in it; of `PLANNED_SHAPES`."""
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


#: What reads a case in `blocked_net`; their gradients are laid out in blocks, or not.
READERS: dict[str, Callable[[Any], Any]] = {
    "Pooling": lambda x: S.Pooling(x, kernel=(2, 2), stride=(2, 2), pad=(1, 1), pool_type="max"),
    "Convolution": lambda x: S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=8),
    "BatchNorm": lambda x: S.BatchNorm(x, fix_gamma=False),
}


def blocked_net(case: Case, reader: str) -> Any:
    """Return the case between a convolution and one of `READERS`; of `BLOCKED_SHAPES`."""
    with mx.name.NameManager():
        x = S.Convolution(V("data"), kernel=(3, 3), pad=(1, 1), num_filter=8)
        y = case.build(x)
        shape = y.infer_shape(**BLOCKED_SHAPES)[1][0]
        if len(shape) != 4:
            y = S.reshape(y, (1, -1, 1, 1))
        y = S.softsign(READERS[reader](y))
        return S.MakeLoss(S.mean(S.square(S.FullyConnected(S.reshape(y, (1, -1)), num_hidden=3))))


def _conv(x: Any) -> Any:
    x = S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=8, no_bias=True)
    return S.Activation(S.BatchNorm(x, fix_gamma=False), act_type="relu")


# -- the tables: expressions of x in the names of mx.sym, with a name where the operator's does not
#    do; of several names each stands for @ ------------------------------------------------------

#: Inputs that several cases want.
_INPUTS: dict[str, Callable[..., Any]] = {
    # (4, 288): one row an example
    "_rows": lambda x: S.reshape(x, (4, -1)),
    # 4 time steps, a batch of 8 and 36 features
    "_series": lambda x: S.reshape(x, (4, 8, 36)),
    # (32, 6, 6), symmetric and positive definite
    "_matrices": lambda x: _plus_eye(S.linalg_syrk(S.reshape(x, (32, 6, 6)) * 0.1)),
    # (32, 6, 6), lower triangular with a dominant diagonal
    "_triangles": lambda x: _plus_eye(
        S.linalg_maketrian(S.linalg_extracttrian(S.reshape(x, (32, 6, 6)) * 0.1))
    ),
    "_channel": lambda: V("case_weight", shape=(1, 8, 1, 1)),
    # (1152,) whole numbers in [0, high): what is looked up depends on x, without gradient
    "_indices": lambda x, high: S.BlockGrad(S.clip(S.floor(S.reshape(x, (-1,)) * 2), 0, high - 1)),
    # (2, 5) regions of interest: the first image, rows of (image, left, top, right, bottom)
    "_rois": lambda: S.concat(S.zeros((2, 3)), S.ones((2, 2)) * 4, dim=1),
    "_rnn": lambda x, mode, **more: S.RNN(
        S.reshape(x, (4, 8, 36)) * 0.05, state_size=6, num_layers=2, mode=mode, **more
    ),
}


def _plus_eye(x: Any) -> Any:
    return S.broadcast_add(x, S.expand_dims(S.eye(6), 0))


def _boxes(x: Any) -> Any:
    """(288, 4) boxes, right of and below their own corner."""
    corner, extent = S.split(S.reshape(x, (288, 4)), num_outputs=2, axis=1)
    return S.concat(corner, corner + extent + 0.5, dim=1)


def _times_mean(outputs: Any) -> Any:
    return S.broadcast_mul(S.tanh(outputs[0]), S.reshape(outputs[1], (1, 8, 1, 1)))


def _foreach(x: Any) -> Any:
    outputs, state = S.contrib.foreach(
        lambda row, state: (S.tanh(row + state), row * state), x, S.ones((8, 6, 6))
    )
    return S.broadcast_add(outputs, S.expand_dims(state, 0))


_CASES = """
# layers
FullyConnected(x, num_hidden=8)
FullyConnected_no_bias: FullyConnected(x, num_hidden=8, no_bias=True, flatten=False)
Convolution Deconvolution Convolution_v1: @(x, kernel=(3, 3), num_filter=8)
Convolution_1d: Convolution(_series(x), kernel=(3,), num_filter=4)
Convolution_3d: Convolution(expand_dims(x, 1), kernel=(3, 3, 3), num_filter=2)
Convolution_grouped: Convolution(x, kernel=(3, 3), num_filter=8, num_group=8, dilate=(2, 2))
contrib.DeformableConvolution(x, zeros((4, 18, 4, 4)) + 0.3, kernel=(3, 3), num_filter=8)
Embedding(_indices(x, 4), input_dim=4, output_dim=5)
Embedding_plus: Embedding(_indices(x, 4), input_dim=4, output_dim=1) + reshape(x, (-1, 1))
Pooling_max: Pooling(x, kernel=(2, 2), pool_type='max')
Pooling_max_strided: Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type='max',
    pooling_convention='full')
Pooling_avg: Pooling(x, kernel=(2, 2), pool_type='avg')
Pooling_lp: Pooling(x, kernel=(2, 2), pool_type='lp', p_value=2)
Pooling_global: Pooling(x, kernel=(2, 2), global_pool=True, pool_type='avg')
Pooling_v1(x, kernel=(2, 2), pool_type='max'); BatchNorm BatchNorm_v1: @(x, fix_gamma=False)
BatchNorm_fix_gamma: BatchNorm(x)
BatchNorm_global: BatchNorm(x, fix_gamma=False, use_global_stats=True)
BatchNorm_cudnn_off: BatchNorm(x, fix_gamma=False, cudnn_off=True)
BatchNorm_axis: BatchNorm(x, fix_gamma=False, axis=3)
BatchNorm_unread: broadcast_mul(x, reshape(BatchNorm(x, fix_gamma=False, output_mean_var=True)[1],
    (1, 8, 1, 1)))
contrib.SyncBatchNorm(x, key='key', ndev=1, fix_gamma=False)
SyncBatchNorm_mean: _times_mean(contrib.SyncBatchNorm(x, key='mean', eps=0.1, output_mean_var=True))
SyncBatchNorm_global: contrib.SyncBatchNorm(x, key='global', use_global_stats=True)
contrib.BatchNormWithReLU(x, fix_gamma=False); LayerNorm InstanceNorm L2Normalization: @(x)
LayerNorm_axis: LayerNorm(x, axis=1); GroupNorm(x, num_groups=2)
L2Normalization_channel: L2Normalization(x, mode='channel'); LRN(x, nsize=3)
RNN_lstm: _rnn(x, 'lstm'); RNN_gru_bidirectional: _rnn(x, 'gru', bidirectional=True)
RNN_tanh: _rnn(x, 'rnn_tanh'); RNN_relu: _rnn(x, 'rnn_relu')
RNN_state_unread: _rnn(x, 'lstm', state_outputs=True)[1]
UpSampling(x, scale=2, sample_type='nearest')
UpSampling_bilinear: UpSampling(x, V('case_weight', shape=(8, 1, 4, 4)), scale=2,
    sample_type='bilinear', num_filter=8)
Custom(x, op_type='hard_swish')
# activations
Activation_relu: Activation(x - 1, act_type='relu')
Activation_softrelu: Activation(x, act_type='softrelu')
Activation_softsign: Activation(x, act_type='softsign'); LeakyReLU(x - 1, act_type='leaky')
LeakyReLU_prelu: LeakyReLU(x - 1, act_type='prelu'); LeakyReLU_elu: LeakyReLU(x - 1, act_type='elu')
LeakyReLU_gelu: LeakyReLU(x, act_type='gelu'); LeakyReLU_selu: LeakyReLU(x, act_type='selu')
hard_sigmoid softmax log_softmax softmin: @(x)
softmax_temperature: softmax(x, axis=1, temperature=2.0); SoftmaxActivation(x, mode='channel')
clip(x, 0.2, 0.8); smooth_l1(x, scalar=1.0)
# arithmetic
_minus_scalar: x - 0.3; _rminus_scalar: 1 - x; _mul_scalar: x * 0.3; _div_scalar: x / 3
_rdiv_scalar: 3 / (x + 1); _power_scalar: x ** 1.5; N._rpower_scalar(x, scalar=2.0)
_mod_scalar: x % 0.7; N._rmod_scalar(x + 1, scalar=5.0); _maximum_scalar: maximum(x, 1)
_minimum_scalar: minimum(x, 1); _hypot_scalar: hypot(x, 1); _greater_scalar: (x > 1) * x
_equal_scalar: (x == 1) + x; elemwise_add: x + x * 2; elemwise_sub: x - x * 2; elemwise_mul: x * x
elemwise_div: x / (x + 2); _power: x ** (x * 0.5); _mod: x % (x * 0.3 + 1)
_maximum: maximum(x, x * x); _minimum: minimum(x, x * x); _hypot: hypot(x, x * x)
_lesser: (x < x * x) * x; logical_not(relu(x - 1)) * x; N._logical_and(x, x - 1) * x
add_n(x, x * x, x * 2); ten_uses: add_n(*(tanh(x * (i + 0.5)) for i in range(10)))
broadcast_add broadcast_sub broadcast_mul broadcast_power broadcast_hypot: @(x, _channel())
broadcast_div broadcast_mod: @(x, _channel() + 1)
broadcast_maximum broadcast_minimum: @(x, _channel() + 0.8)
broadcast_greater(x, _channel() + 0.8) * x; broadcast_to(_channel(), SHAPE) * x
broadcast_like(_channel(), x) * x; broadcast_axis(expand_dims(x, 0), axis=0, size=3)
where(x > 1, x, x * 2); contrib.quadratic(x, a=0.1, b=0.2, c=0.3); contrib.div_sqrt_dim(x)
contrib.gradientmultiplier(x, scalar=-0.5); contrib.round_ste(x * 3); contrib.sign_ste(x - 1) * x
# reductions
sum nansum max min norm sort: @(x, axis=1); mean(x, axis=(2, 3)); prod nanprod: @(x, axis=3)
norm_l1: norm(x, ord=1, axis=1); moments(x, axes=(0, 2, 3))[0]
moments_variance: moments(x, axes=(0, 2, 3))[1]
argmax: broadcast_mul(x, argmax(x, axis=1, keepdims=True)); cumsum(x, axis=1) * 0.1
topk(x, k=3, ret_typ='value'); topk_mask: topk(x, k=3, ret_typ='mask') * x; argsort(x, axis=1) * x
# shapes
Reshape: reshape(x, (4, -1)); reshape_like(x, zeros((4, 288))); Flatten diag: @(x)
transpose(x, (0, 2, 3, 1)); SwapAxis(x, dim1=1, dim2=2); expand_dims(x, 0)
squeeze(sum(x, axis=1, keepdims=True)); slice(x, begin=(0, 1), end=(4, 5))
slice_axis(x, axis=1, begin=1, end=4); slice_like(x, zeros((2, 3, 6, 6)))
SliceChannel(x, num_outputs=2)[0]; SliceChannel_unread: SliceChannel(x, num_outputs=2)[1]
SliceChannel_all: add_n(*SliceChannel(x, num_outputs=4)); split_v2(x, (2, 5), axis=1)[1]
Concat stack: @(x, x * 2); tile(x, (2, 1, 1, 1)); repeat depth_to_space space_to_depth: @(x, 2)
reverse(x, axis=1); Pad(x, mode='constant', pad_width=(0, 0, 0, 0, 1, 1, 1, 1))
Pad_reflect: Pad(x, mode='reflect', pad_width=(0, 0, 0, 0, 1, 1, 1, 1))
Crop(x, offset=(1, 1), h_w=(3, 3)); im2col(x, kernel=(3, 3))
col2im(im2col(x, kernel=(3, 3)), output_size=(6, 6), kernel=(3, 3)); zeros_like(x) + x
ones_like BlockGrad: @(x) * x
shape_array: broadcast_mul(reshape(Cast(slice_axis(shape_array(x), axis=0, begin=2, end=3),
    'float32'), (1, 1)), _rows(x))
contrib.arange_like(x, axis=3) * sum(x, axis=(0, 1, 2)); Cast(Cast(x, 'float64') * 2, 'float32')
Cast_float16: Cast(Cast(x, 'float16'), 'float32'); amp_cast(amp_cast(x, 'float16'), 'float32')
amp_multicast: add_n(*amp_multicast(x, x * 2, num_outputs=2)); _copy: identity(x)
like_rhs: N._identity_with_attr_like_rhs(x, x * 2)
adaptive_pooling: contrib.AdaptiveAvgPooling2D(x, output_size=2)
bilinear_resize: contrib.BilinearResize2D(x, height=9, width=9)
# lookups
take(x, zeros((3,))); take_computed: take(reshape(x, (-1,)), _indices(x, 8))
batch_take: BlockGrad(batch_take(reshape(x, (576, 2)), Cast(take(_indices(x, 2), arange(576)),
    'int32'))) * mean(reshape(x, (576, 2)), axis=1)
pick(_rows(x), zeros((4,)))
one_hot: broadcast_mul(one_hot(_indices(x, 4), depth=4), reshape(x, (-1, 1)))
gather_nd(x, zeros((1, 3))); scatter_nd(x, reshape(arange(4), (1, 4)), (5, 8, 6, 6))
contrib.index_copy(x, arange(2), ones((2, 8, 6, 6)))
index_array: broadcast_mul(Cast(contrib.index_array(x, axes=(3,)), 'float32'), expand_dims(x, 4))
unravel_index: sum(unravel_index(_indices(x, 4), shape=(2, 2)), axis=0) * reshape(x, (-1,))
SequenceMask(_series(x), ones((8,)) * 2, use_sequence_length=True, value=0.1)
SequenceReverse(_series(x), ones((8,)) * 3, use_sequence_length=True)
SequenceLast(_series(x), ones((8,)) * 2, use_sequence_length=True)
# algebra
dot(_rows(x), V('case_weight', shape=(288, 5))); batch_dot(_series(x), _series(x), transpose_b=True)
khatri_rao: broadcast_mul(BlockGrad(khatri_rao(_rows(x), _rows(x) * 2)), mean(x))
linalg_gemm(x, x, x); linalg_gemm2(x, x)
linalg_potrf linalg_sumlogdiag linalg_inverse linalg_det: @(_matrices(x))
linalg_potri(_triangles(x)); linalg_trmm linalg_trsm: @(_triangles(x), reshape(x, (32, 6, 6)))
linalg_syrk linalg_extractdiag linalg_makediag linalg_extracttrian: @(x)
linalg_gelqf(_matrices(x))[0]
linalg_syevd: linalg.syevd(broadcast_add(_matrices(x), expand_dims(diag(arange(6)), 0)))[1]
linalg_maketrian(reshape(x, (-1, 6))); linalg_slogdet(_matrices(x))[1]
interleaved_selfatt_qk: contrib.interleaved_matmul_selfatt_qk(_series(x), heads=3)
interleaved_selfatt_valatt: contrib.interleaved_matmul_selfatt_valatt(_series(x),
    softmax(contrib.interleaved_matmul_selfatt_qk(_series(x), heads=3)), heads=3)
interleaved_encdec_qk: contrib.interleaved_matmul_encdec_qk(slice_axis(_series(x), axis=2, begin=0,
    end=18), _series(x), heads=3)
# vision
ROIPooling(x, _rois(), pooled_size=(2, 2), spatial_scale=1.0)
contrib.ROIAlign(x, _rois(), pooled_size=(2, 2), spatial_scale=1.0)
contrib.PSROIPooling(x, _rois(), output_dim=2, pooled_size=2, spatial_scale=1.0)
SpatialTransformer(x, FullyConnected(x, num_hidden=6) * 0.01, target_shape=(5, 5),
    transform_type='affine', sampler_type='bilinear')
GridGenerator(reshape(x, (192, 6)), transform_type='affine', target_shape=(3, 3))
GridGenerator_warp: GridGenerator(slice_axis(x, axis=1, begin=0, end=2), transform_type='warp')
BilinearSampler(x, tanh(slice_axis(x, axis=1, begin=0, end=2) - 1))
Correlation(x, x * 2, kernel_size=1, max_displacement=1)
box_iou: broadcast_mul(contrib.box_iou(_boxes(x), slice_axis(_boxes(x), axis=0, begin=0, end=8)),
    mean(x))
contrib.box_nms(concat(slice_axis(_boxes(x), axis=1, begin=0, end=1), _boxes(x), dim=1),
    coord_start=1, score_index=0)
MultiBoxPrior: broadcast_mul(contrib.MultiBoxPrior(x, sizes=(0.5, 0.3)), mean(x, axis=(0, 1, 2, 3),
    keepdims=False))
image_normalize: image.normalize(slice_axis(x, axis=1, begin=0, end=3), mean=(0.1, 0.2, 0.3),
    std=(0.5, 0.6, 0.7)) + slice_axis(x, axis=1, begin=3, end=6)
# losses
SoftmaxOutput SVMOutput softmax_cross_entropy: @(_rows(x), ones((4,)))
SoftmaxOutput_multi: SoftmaxOutput(x, ones((4, 6, 6)), multi_output=True, use_ignore=True,
    ignore_label=0)
LinearRegressionOutput MAERegressionOutput LogisticRegressionOutput: @(_rows(x), ones((4, 288)) *
    0.5)
MakeLoss(square(x), grad_scale=0.5); make_loss(square(x))
CTCLoss: ctc_loss(reshape(x, (36, 4, 8)), ones((4, 3)))
IdentityAttachKLSparseReg(sigmoid(_rows(x))); L1_chain: mean(abs(x - x * x), axis=0)
foreach: _foreach(x)
# functions of one value; those that are constant almost everywhere; of a value in (-1, 1)
abs cbrt cos cosh arctan arcsinh degrees erf exp expm1 gamma gammaln log log10 log1p log2 negative
    radians rcbrt reciprocal relu rsqrt sigmoid sin sinh softsign sqrt square tan tanh: @(x)
ceil fix floor rint round sign trunc: @(x * 2 - 3) * x
arccos arcsin arctanh erfinv: @(tanh(x) * 0.5)
"""

# Not LeakyReLU with rrelu: in training on the CPU it writes where it must not and crashes.
_RANDOM = """
Dropout(x, p=0.5); Dropout_axes: Dropout(x, p=0.5, axes=(2, 3))
Dropout_always: Dropout(x, p=0.3, mode='always'); RNN_dropout: _rnn(x, 'lstm', p=0.5)
random_randint: Cast(random.randint(0, 5, shape=SHAPE), 'float32') * x
sample_uniform: N._sample_uniform(x, x + 1) * x; sample_normal: N._sample_normal(x, x * 0.1) * x
sample_gamma: N._sample_gamma(x, x) * x; sample_exponential: N._sample_exponential(x) * x
sample_poisson: N._sample_poisson(x) * x
sample_multinomial: broadcast_mul(Cast(sample_multinomial(softmax(_rows(x))), 'float32'),
    sum(_rows(x), axis=1))
shuffle: BlockGrad(shuffle(arange(4))) * mean(_rows(x), axis=1)
"""

# Samplers: their parameters.
_RANDOM += "".join(
    f"random_{name}: N._random_{name}(shape=SHAPE, {parameters}) * x\n"
    f"random_{name}_like: random.{name}_like(x, {parameters}) * x\n"
    for name, parameters in {
        "uniform": "low=0.1, high=0.9",
        "normal": "loc=0.1, scale=0.5",
        "gamma": "alpha=2.0, beta=0.5",
        "exponential": "lam=2.0",
        "poisson": "lam=2.0",
        "negative_binomial": "k=3, p=0.4",
        "generalized_negative_binomial": "mu=2.0, alpha=0.3",
    }.items()
)

#: Of ``mx.np``, in which x is a symbol of it. The names of the cases begin with ``np_``.
_OF_NP = """
relu sigmoid: npx.@(x - 1); add: x + x * 2; subtract: x - x * 2; multiply: x * x
true_divide: x / (x + 2); power: x ** (x * 0.5); mod: x % (x * 0.3 + 1); hypot: np.hypot(x, x * x)
copysign: np.copysign(x, x - 1); ldexp: np.ldexp(x, x); arctan2: np.arctan2(x, x + 1)
add_scalar: x + 0.3; subtract_scalar: x - 0.3; rsubtract_scalar: 1 - x; multiply_scalar: x * 0.3
mod_scalar: x % 0.7; power_scalar: x ** 1.5; rpower_scalar: 2.0 ** x; true_divide_scalar: x / 3
rtrue_divide_scalar: 3 / (x + 1); greater: (x > x * x) * x; less_scalar: (x < 1) * x
add_channel: x + channel; multiply_channel: x * channel; true_divide_channel: x / (channel + 1)
where: np.where(x > 1, x, x * 2); sum max min prod mean std var: np.@(x, axis=1)
cumsum: np.cumsum(x, axis=1) * 0.1; argmax: np.argmax(x, axis=1).astype('float32') + x.sum(axis=1)
reshape: np.reshape(x, (4, -1)); reshape_npx: npx.reshape(x, (-2, -2, -1))
transpose: np.transpose(x, (0, 2, 3, 1)); squeeze: np.squeeze(x.sum(axis=1, keepdims=True))
concatenate stack: np.@([x, x * 2], axis=1); vstack: np.vstack([x, x * 2])
broadcast_to: np.broadcast_to(channel, (4, 8, 6, 6)) * x; flip: np.flip(x, 1); roll: np.roll(x, 2)
moveaxis: np.moveaxis(x, 1, 3); tril: np.tril(x); diag: np.diag(np.reshape(x, (32, 36)))
pad: np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))); full_like: np.full_like(x, 2) * x
dot: np.dot(np.reshape(x, (4, -1)), weight); matmul: np.matmul(x, x)
tensordot: np.tensordot(np.reshape(x, (4, -1)), weight, 1)
einsum: np.einsum('ij,jk->ik', np.reshape(x, (4, -1)), weight)
zeros ones: np.@((4, 8, 6, 6)) + x; clip: np.clip(x, 0.2, 0.8); nan_to_num: np.nan_to_num(x)
abs exp expm1 log log10 log1p log2 negative reciprocal sqrt cbrt square sin cos tan sinh cosh tanh
    arctan arcsinh degrees radians: np.@(x)
ceil fix floor rint sign trunc around: np.@(x * 2 - 3) * x; arccos arcsin arctanh:
    np.@(np.tanh(x) * 0.5)
"""
_RANDOM_OF_NP = """
uniform: np.random.uniform(0.1, 0.9, (4, 8, 6, 6)) * x; dropout: npx.dropout(x, p=0.5)
normal: np.random.normal(0.1, 0.5, (4, 8, 6, 6)) * x
"""

_NAMES = {**vars(mx.sym), **globals(), **_INPUTS}


def _of_np(build: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a case of one that takes and makes symbols of ``mx.np``."""

    def build_it(x: Any) -> Any:
        inputs = x, V("case_channel", shape=(1, 8, 1, 1)), V("case_weight", shape=(288, 5))
        return build(*[symbol.as_np_ndarray() for symbol in inputs]).as_nd_ndarray()

    return build_it


def _table(text: str, draws: bool = False, of_np: bool = False) -> dict[str, Case]:
    """Read a table; a line that is indented goes on with the one before."""
    lines = re.sub(r"\n +", " ", text).strip().splitlines()
    cases = {}
    for entry in "; ".join(line for line in lines if line[0] != "#").split("; "):
        names, expression, operator = re.findall(r"^(?:([\w ]+): )?((?:\w+\.)?(\w*).*)", entry)[0]
        for name in (names or operator).split():
            takes = "x, channel, weight" if of_np else "x"
            build = eval(f"lambda {takes}: " + expression.replace("@", name), _NAMES)
            prefix = "np_" if of_np else ""
            cases[prefix + name] = Case(_of_np(build) if of_np else build, draws)
    return cases


CASES = {**_table(_CASES), **_table(_RANDOM, draws=True)}
CASES_OF_NP = {
    **_table(_OF_NP, of_np=True),
    **_table(_RANDOM_OF_NP, draws=True, of_np=True),
}
ALL_CASES = {**CASES, **CASES_OF_NP}

# Their shapes are known to MXNet only when they run: simple_bind refuses them, bind takes them
# (with the arrays of all arguments, in `small_net`), and nothing can be planned.
DYNAMIC_CASES = _table("""
while_loop: contrib.while_loop(lambda i, _: i < 3, lambda i, y: (y * 0.5, [i + 1, tanh(y)]),
    [zeros((1,)), x], max_iterations=4)[1][1]
cond: contrib.cond(sum(x) > 1, lambda: tanh(x), lambda: x * 2)
""")


def inner(symbol: Any) -> list[str]:
    """Return the operators of a case: those between BEFORE and AFTER."""
    order = [n["name"] for n in nodes(symbol) if n["op"] != "null"]
    outside = {n["name"] for n in nodes(symbol.get_internals()[BEFORE + "_output"])}
    return [n for n in order[: order.index(AFTER)] if n not in outside]
