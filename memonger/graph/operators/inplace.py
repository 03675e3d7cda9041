"""What MXNet's memory planner asks of an operator: in-place options and ignored inputs.

``MXAllocMemory`` (``src/nnvm/plan_memory.cc``) lets an output take over the memory of an input
where the operator's ``FInplaceOption`` offers the pair, the sizes agree and nobody else still reads
that memory (or, where ``FInplaceIdentity`` says that the output IS the input, even then). An input
named by ``FIgnoreInputs`` is not read at all.

MXNet has no Python interface to these attributes, so they stand here as tables, with the source
files of 1.9.1 below ``src/operator`` that register them (BINARY: the macro
``MXNET_OPERATOR_REGISTER_BINARY``, and so on). A backward node counts as an operator of its own.
CPU and GPU builds agree, both being built with MKLDNN, as long as pointwise fusion is off.
``tests/graph/test_inplace.py`` compares the tables with what MXNet plans.

Legacy operators (``OperatorProperty``) offer their pairs through ``src/nnvm/legacy_op_util.cc``.
``OpBackInplaceOption`` there numbers the gradients wrongly for operators of two and more inputs:
it offers the LAST gradient where the first is meant. The tables say what MXNet does.

Not listed, and so None: optimizer updates, control flow, quantized operators, input readers, and
the operators of mx.np (numpy) that are not other names of those listed.
"""

from __future__ import annotations

import re
from typing import Callable, Iterator, Mapping, Tuple

from memonger.graph.operators.recompute import truth

Options = Tuple[Tuple[int, int, bool], ...]  # input, output, identity
Attrs = Mapping[str, str]

_NONE: Options = ()
_FIRST: Options = ((0, 0, False),)
_SECOND: Options = ((1, 0, False),)
_EITHER: Options = ((0, 0, False), (1, 0, False))
_FIRST_TO_SECOND: Options = ((0, 1, False),)
_FIRST_TO_BOTH: Options = ((0, 0, False), (0, 1, False))
_SAME: Options = ((0, 0, True),)

# Other names of operators (nnvm's add_alias). Symbols that MXNet made carry the canonical one.
_ALIASES = dict(
    pair.split("=")
    for pair in """
    ElementWiseSum=add_n Softmax=SoftmaxOutput _Plus=elemwise_add _plus=elemwise_add
    _minus=elemwise_sub _mul=elemwise_mul _div=elemwise_div cast=Cast concat=Concat flatten=Flatten
    identity=_copy pad=Pad reshape=Reshape split=SliceChannel stop_gradient=BlockGrad
    swapaxes=SwapAxis
    """.split()
)

_TABLE: dict[Options, str] = {
    _FIRST: """
        # tensor/elemwise_binary_scalar_op*.cc (BINARY_SCALAR), elemwise_scatter_op.cc
        _div_scalar _equal_scalar _greater_equal_scalar _greater_scalar _hypot_scalar
        _lesser_equal_scalar _lesser_scalar _logical_and_scalar _logical_or_scalar
        _logical_xor_scalar _maximum_scalar _minimum_scalar _minus_scalar _mod_scalar _mul_scalar
        _not_equal_scalar _plus_scalar _power_scalar _rdiv_scalar _rminus_scalar _rmod_scalar
        _rpower_scalar _scatter_minus_scalar _scatter_plus_scalar smooth_l1 _backward_div_scalar
        _backward_mul_scalar _contrib_backward_gradientmultiplier
        # nn/{activation,dropout,group_norm,layer_norm,softmax*,softmin,log_softmax,moments}.cc;
        # leaky_relu.cc, softmax_output.cc, regression_output.cc
        Activation Dropout GroupNorm LayerNorm LeakyReLU LinearRegressionOutput
        LogisticRegressionOutput MAERegressionOutput SoftmaxActivation SoftmaxOutput log_softmax
        moments softmax softmin _backward_Activation _backward_Dropout _backward_LeakyReLU
        _backward_SoftmaxActivation _backward_SoftmaxOutput
        # tensor/la_op.cc
        _linalg_gelqf _linalg_inverse _linalg_potrf _linalg_potri _linalg_syevd
        _backward_linalg_gelqf _backward_linalg_inverse _backward_linalg_potrf
        _backward_linalg_syevd
        # image/image_random.cc, image_random-inl.h
        _image_adjust_lighting _image_flip_left_right _image_flip_top_bottom _image_normalize
        _image_random_brightness _image_random_color_jitter _image_random_contrast
        _image_random_flip_left_right _image_random_flip_top_bottom _image_random_hue
        _image_random_lighting _image_random_saturation
        # tensor/elemwise_sum.cc (only the first of its inputs), matrix_op.cc; random/shuffle_op.cc;
        # contrib/transformer.cc, quadratic_op.cc
        _contrib_div_sqrt_dim _contrib_quadratic _shuffle _slice_assign _slice_assign_scalar add_n
        # tensor/elemwise_unary_op.h (UNARY); contrib/stes_op.cc
        _contrib_round_ste _contrib_sign_ste abs arccos arccosh arcsin arcsinh arctan arctanh cbrt
        ceil cos cosh degrees erf erfinv exp expm1 fix floor gamma gammaln hard_sigmoid log log10
        log1p log2 logical_not negative radians rcbrt reciprocal relu rint round rsqrt sigmoid sign
        sin sinh softsign sqrt square tan tanh trunc
        # Legacy: identity_attach_KL_sparse_reg-inl.h, l2_normalization-inl.h, make_loss-inl.h,
        # sequence_mask-inl.h, svm_output-inl.h
        IdentityAttachKLSparseReg MakeLoss SVMOutput SequenceMask
        _backward_IdentityAttachKLSparseReg _backward_L2Normalization
    """,
    _SAME: """
        # tensor/elemwise_unary_op_basic.cc, matrix_op.cc, amp_cast.cc, indexing_op.cc;
        # contrib/gradient_multiplier_op.cc
        BlockGrad Cast Flatten Reshape _contrib_gradientmultiplier _copy
        _identity_with_attr_like_rhs _scatter_set_nd amp_cast expand_dims make_loss reshape_like
        _backward_amp_cast _backward_cast _backward_copy _backward_hard_sigmoid _backward_reshape
    """,
    _EITHER: """
        # tensor/elemwise_binary_op.h (BINARY), elemwise_binary_broadcast_op.h (BINARY_BROADCAST)
        _equal _grad_add _greater _greater_equal _hypot _lesser _lesser_equal _logical_and
        _logical_or _logical_xor _maximum _minimum _mod _not_equal _power _scatter_elemwise_div
        broadcast_add broadcast_div broadcast_equal broadcast_greater broadcast_greater_equal
        broadcast_hypot broadcast_lesser broadcast_lesser_equal broadcast_logical_and
        broadcast_logical_or broadcast_logical_xor broadcast_maximum broadcast_minimum broadcast_mod
        broadcast_mul broadcast_not_equal broadcast_power broadcast_sub elemwise_add elemwise_div
        elemwise_mul elemwise_sub
        # Gradients made by BINARY: tensor/elemwise_unary_op_*.cc, elemwise_binary_scalar_op_*.cc
        _backward_abs _backward_arccos _backward_arccosh _backward_arcsin _backward_arcsinh
        _backward_arctan _backward_arctanh _backward_cbrt _backward_cos _backward_cosh
        _backward_degrees _backward_erf _backward_erfinv _backward_expm1 _backward_gamma
        _backward_gammaln _backward_hypot_scalar _backward_log _backward_log10 _backward_log1p
        _backward_log2 _backward_maximum_scalar _backward_minimum_scalar _backward_mod_scalar
        _backward_power_scalar _backward_radians _backward_rcbrt _backward_rdiv_scalar
        _backward_reciprocal _backward_relu _backward_rmod_scalar _backward_rpower_scalar
        _backward_rsqrt _backward_sigmoid _backward_sign _backward_sin _backward_sinh
        _backward_smooth_l1 _backward_softsign _backward_sqrt _backward_square _backward_tan
        _backward_tanh
    """,
    _FIRST_TO_BOTH: """
        # tensor/elemwise_binary_op_basic.cc, elemwise_binary_broadcast_op_basic.cc
        _backward_add _backward_broadcast_add _backward_broadcast_sub _backward_sub
    """,
    _FIRST_TO_SECOND: """
        # tensor/elemwise_binary_op_*.cc, elemwise_binary_broadcast_op_*.cc, la_op.cc
        _backward_broadcast_div _backward_broadcast_hypot _backward_broadcast_maximum
        _backward_broadcast_minimum _backward_broadcast_mod _backward_broadcast_mul
        _backward_broadcast_power _backward_div _backward_hypot _backward_linalg_trmm
        _backward_maximum _backward_minimum _backward_mod _backward_mul _backward_power
    """,
    _SECOND: """
        # nn/fully_connected.cc; regression_output.cc; tensor/la_op.cc
        _linalg_trmm _linalg_trsm _backward_FullyConnected _backward_linalg_sumlogdiag
        _backward_linear_reg_out _backward_logistic_reg_out _backward_mae_reg_out
        # Legacy: pooling_v1-inl.h (nothing with cuDNN), contrib/fft-inl.h, ifft-inl.h
        _backward_Pooling_v1 _backward__contrib_fft _backward__contrib_ifft
    """,
    ((2, 0, False),): "_linalg_gemm",  # tensor/la_op.cc
    ((2, 1, False),): "_backward_linalg_gemm2",
    ((2, 1, False), (3, 2, False)): "_backward_linalg_gemm",
    ((0, 1, False), (1, 0, False)): "_backward_linalg_trsm",
    # random/pdf_op.cc
    ((1, 0, False), (2, 1, False)): """
        _backward_pdf_dirichlet _backward_pdf_exponential _backward_pdf_poisson
    """,
    ((1, 0, False), (2, 1, False), (3, 2, False)): """
        _backward_pdf_gamma _backward_pdf_generalized_negative_binomial
        _backward_pdf_negative_binomial _backward_pdf_normal _backward_pdf_uniform
    """,
    ((1, 1, False),): "_backward_SVMOutput",  # legacy: svm_output-inl.h
    ((1, 2, False),): "_backward__contrib_count_sketch",  # legacy: contrib/count_sketch-inl.h
    _NONE: """
        # nn, rnn.cc, loss_binary_op.cc, custom/custom.cc
        BatchNorm CTCLoss Concat Convolution Custom Deconvolution Embedding FullyConnected LRN
        Pooling RNN UpSampling _NoGradient _rnn_param_concat col2im im2col softmax_cross_entropy
        _backward_BatchNorm _backward_Concat _backward_Convolution _backward_Deconvolution
        _backward_Embedding _backward_GroupNorm _backward_LRN _backward_LayerNorm
        _backward_UpSampling _backward_backward_FullyConnected _backward_col2im _backward_ctc_loss
        _backward_im2col _backward_moments _backward_Custom _backward_RNN
        _backward_softmax_cross_entropy
        # contrib
        _contrib_AdaptiveAvgPooling2D _contrib_BatchNormWithReLU _contrib_BilinearResize2D
        _contrib_ROIAlign _contrib_RROIAlign _contrib_SparseEmbedding _contrib_allclose
        _contrib_arange_like _contrib_bipartite_matching _contrib_boolean_mask _contrib_box_decode
        _contrib_box_encode _contrib_box_iou _contrib_box_nms _contrib_hawkesll _contrib_index_array
        _contrib_index_copy _contrib_interleaved_matmul_encdec_qk
        _contrib_interleaved_matmul_encdec_valatt _contrib_interleaved_matmul_selfatt_qk
        _contrib_interleaved_matmul_selfatt_valatt _backward_ROIAlign _backward_RROIAlign
        _backward_SparseEmbedding _backward_contrib_AdaptiveAvgPooling2D
        _backward_contrib_BatchNormWithReLU _backward_contrib_BilinearResize2D
        _backward_contrib_bipartite_matching _backward_contrib_boolean_mask
        _backward_contrib_box_iou _backward_contrib_box_nms _backward_interleaved_matmul_encdec_qk
        _backward_interleaved_matmul_encdec_valatt _backward_interleaved_matmul_selfatt_qk
        _backward_interleaved_matmul_selfatt_valatt _contrib_backward_hawkesll
        _contrib_backward_index_copy _contrib_backward_quadratic
        # random; the samplers of numpy/random
        _random_exponential _random_exponential_like _random_gamma _random_gamma_like
        _random_generalized_negative_binomial _random_generalized_negative_binomial_like
        _random_negative_binomial _random_negative_binomial_like _random_normal _random_normal_like
        _random_pdf_dirichlet _random_pdf_exponential _random_pdf_gamma
        _random_pdf_generalized_negative_binomial _random_pdf_negative_binomial _random_pdf_normal
        _random_pdf_poisson _random_pdf_uniform _random_poisson _random_poisson_like _random_randint
        _random_uniform _random_uniform_like _sample_exponential _sample_gamma
        _sample_generalized_negative_binomial _sample_multinomial _sample_negative_binomial
        _sample_normal _sample_poisson _sample_uniform _sample_unique_zipfian
        _backward_broadcast_exponential _backward_broadcast_gumbel _backward_broadcast_logistic
        _backward_broadcast_normal _backward_broadcast_pareto _backward_broadcast_rayleigh
        _backward_broadcast_weibull _backward_sample_multinomial
        # tensor, image
        _arange _eye _full _histogram _image_crop _image_resize _image_to_tensor _linalg_det
        _linalg_extractdiag _linalg_extracttrian _linalg_gemm2 _linalg_makediag _linalg_maketrian
        _linalg_slogdet _linalg_sumlogdiag _linalg_syrk _linspace _ones _ravel_multi_index
        _sparse_retain _split_v2 _square_sum _unravel_index _zeros _zeros_without_dtype argmax
        argmax_channel argmin argsort batch_dot batch_take broadcast_axis broadcast_like
        broadcast_to cast_storage clip depth_to_space diag dot gather_nd khatri_rao max mean min
        nanprod nansum norm one_hot ones_like pick prod repeat reverse scatter_nd shape_array
        size_array slice slice_axis slice_like sort space_to_depth squeeze stack sum take tile topk
        transpose where zeros_like _backward_clip _backward_diag _backward_dot _backward_gather_nd
        _backward_image_crop _backward_image_normalize _backward_linalg_det
        _backward_linalg_extractdiag _backward_linalg_extracttrian _backward_linalg_makediag
        _backward_linalg_maketrian _backward_linalg_potri _backward_linalg_slogdet
        _backward_linalg_syrk _backward_max _backward_mean _backward_min _backward_nanprod
        _backward_nansum _backward_norm _backward_pick _backward_prod _backward_repeat
        _backward_reverse _backward_slice _backward_slice_axis _backward_slice_like
        _backward_sparse_retain _backward_square_sum _backward_squeeze _backward_stack _backward_sum
        _backward_take _backward_tile _backward_topk _backward_tril _backward_where
        _broadcast_backward _split_v2_backward
        # Legacy, as those above
        L2Normalization Pooling_v1 _backward_MakeLoss _contrib_count_sketch _contrib_fft
        _contrib_ifft
    """,
}

# Legacy operators that offer nothing, nor does their gradient, ``_backward_`` and the name:
# every other MXNET_REGISTER_OP_PROPERTY.
_LEGACY = """
    BatchNorm_v1 BilinearSampler Convolution_v1 Correlation Crop GridGenerator InstanceNorm Pad
    ROIPooling SequenceLast SequenceReverse SliceChannel SpatialTransformer SwapAxis
    _CrossDeviceCopy _NDArray _Native _contrib_DeformableConvolution
    _contrib_DeformablePSROIPooling _contrib_ModulatedDeformableConvolution
    _contrib_MultiBoxDetection _contrib_MultiBoxPrior _contrib_MultiBoxTarget
    _contrib_MultiProposal _contrib_PSROIPooling _contrib_Proposal _contrib_SyncBatchNorm
"""

# tensor/init_op.cc, elemwise_unary_op_basic.cc; random/sample_op.cc
_IGNORED = {
    "_identity_with_attr_like_rhs": (1,),
    "reshape_like": (1,),
    **dict.fromkeys(
        """
        zeros_like ones_like _contrib_arange_like _random_exponential_like _random_gamma_like
        _random_generalized_negative_binomial_like _random_negative_binomial_like
        _random_normal_like _random_poisson_like _random_uniform_like
        """.split(),
        (0,),
    ),
}


def _listed() -> Iterator[tuple[str, Options]]:
    for options, names in _TABLE.items():
        for op in re.sub("#.*", "", names).split():
            yield op, options
    for op in _LEGACY.split():
        yield op, _NONE
        yield "_backward_" + op, _NONE


def pooling_workspace(attrs: Attrs) -> bool:
    """Whether MKLDNN's max pooling keeps a workspace: nn/pooling.cc, GetNumOutputs."""
    return (
        attrs.get("pool_type", "max") == "max"
        and bool(re.search(r"\d", attrs.get("kernel", "")))
        and attrs.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW")
    )


def _softmax_gradient(attrs: Attrs) -> Options:
    """nn/softmax-inl.h, SoftmaxGradOpInplaceOption."""
    if truth(attrs.get("use_length")):
        return ((0, 0, False), (1, 0, False), (2, 1, False), (3, 0, False))
    if attrs.get("dtype", "None") != "None":
        return ((0, 0, False), (1, 0, False), (2, 0, False))
    return _EITHER


def _multicast(attrs: Attrs) -> Options:
    """tensor/amp_cast.cc."""
    return tuple((i, i, True) for i in range(int(attrs["num_outputs"])))


_OPTIONS: dict[str, Options | Callable[[Attrs], Options]] = {
    **dict(_listed()),
    **dict.fromkeys(
        ["_backward_" + op for op in ("softmax", "log_softmax", "softmin")], _softmax_gradient
    ),
    "amp_multicast": _multicast,
    "_backward_amp_multicast": _multicast,
    "_backward_Pooling": lambda attrs: _SECOND if pooling_workspace(attrs) else _NONE,
    "_backward_SequenceMask": lambda attrs: (
        _FIRST_TO_SECOND if truth(attrs.get("use_sequence_length")) else _FIRST
    ),
}


def canonical(op: str) -> str:
    """Return the name that the tables, here and of hidden outputs, know an operator by."""
    return _ALIASES.get(op, op)


def inplace_options(op: str, attrs: Attrs, num_inputs: int) -> Options | None:
    """Return the in-place pairs that an operator offers, in the order that the planner tries.

    Parameters
    ----------
    op : str
        Name of the operator as nnvm stores it, forward or backward.
    attrs : mapping of str to str
        The operator's parameters as written in the symbol's JSON.
    num_inputs : int
        How many inputs the node has; pairs beyond it are left out.

    Returns
    -------
    tuple of (input, output, identity), or None
        Empty for an operator that offers nothing, None for one that is not listed.

    Source: ``FInplaceOption`` and ``FInplaceIdentity`` of each operator.

    Examples
    --------
    >>> inplace_options("elemwise_add", {}, 2)
    ((0, 0, False), (1, 0, False))
    >>> inplace_options("Convolution", {"kernel": "(3, 3)", "num_filter": "8"}, 3)
    ()
    """
    options = _OPTIONS.get(canonical(op))
    if callable(options):
        options = options(attrs)
    return options and tuple(pair for pair in options if pair[0] < num_inputs)


def ignored_inputs(op: str) -> tuple[int, ...]:
    """Return the inputs of which an operator reads no more than the shape; they need no memory.

    Source: ``FIgnoreInputs`` of each operator. Operators that look only at the shape without saying
    so (``shape_array``, ``broadcast_like``, ``slice_like``) keep their inputs alive.

    Examples
    --------
    >>> ignored_inputs("reshape_like")
    (1,)
    """
    return _IGNORED.get(canonical(op), ())
