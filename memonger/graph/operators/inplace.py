"""In-place options and ignored inputs of operators.

``MXAllocMemory`` (``src/nnvm/plan_memory.cc``) gives the memory of an input to an output if the
operator's ``FInplaceOption`` has the pair, the sizes are equal and no other operator still reads
that memory. If ``FInplaceIdentity`` declares that the output equals the input, others may still
read it. An input in ``FIgnoreInputs`` is not read at all.

Python cannot read these attributes from MXNet. The tables name the source files of 1.9.1, below
``src/operator``, that register them (BINARY is the macro ``MXNET_OPERATOR_REGISTER_BINARY``, and so
on; a ``-inl.h`` alone has legacy operators). CPU and GPU builds, both with MKLDNN, agree if
pointwise fusion is off.

The tables describe what MXNet does, even where its code has a mistake: ``OpBackInplaceOption`` in
``src/nnvm/legacy_op_util.cc`` offers the last gradient of a legacy operator instead of the first.
"""

from __future__ import annotations

import re
from typing import Callable, Tuple

from memonger.graph.operators.recompute import truth
from memonger.graph.operators.tensors import Attributes
from memonger.support.mxnet import built_with_mkldnn
from memonger.support.versions import VERSION

Options = Tuple[Tuple[int, int, bool], ...]  # (input, output, whether the output is the input)

_NONE: Options = ()
_FIRST: Options = ((0, 0, False),)
_SECOND: Options = ((1, 0, False),)
_EITHER: Options = ((0, 0, False), (1, 0, False))
_FIRST_TO_SECOND: Options = ((0, 1, False),)
_FIRST_TO_BOTH: Options = ((0, 0, False), (0, 1, False))
_SAME: Options = ((0, 0, True),)

#: Options -> the sources that register them -> the operators that have them.
_TABLE: dict[Options, dict[str, str]] = {
    _FIRST: {
        "tensor/elemwise_binary_scalar_op*.cc (BINARY_SCALAR), elemwise_scatter_op.cc": """
            _div_scalar _equal_scalar _greater_equal_scalar _greater_scalar _hypot_scalar
            _lesser_equal_scalar _lesser_scalar _logical_and_scalar _logical_or_scalar
            _logical_xor_scalar _maximum_scalar _minimum_scalar _minus_scalar _mod_scalar
            _mul_scalar _not_equal_scalar _plus_scalar _power_scalar _rdiv_scalar _rminus_scalar
            _rmod_scalar _rpower_scalar _scatter_minus_scalar _scatter_plus_scalar smooth_l1
            _backward_div_scalar _backward_mul_scalar
        """,
        "nn/{activation,dropout,group_norm,layer_norm,log_softmax,moments,softmax*,softmin}.cc": """
            Activation Dropout GroupNorm LayerNorm SoftmaxActivation log_softmax moments softmax
            softmin _backward_Activation _backward_Dropout _backward_SoftmaxActivation
        """,
        "leaky_relu.cc, softmax_output.cc, regression_output.cc": """
            LeakyReLU LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput
            SoftmaxOutput _backward_LeakyReLU _backward_SoftmaxOutput
        """,
        "tensor/la_op.cc": """
            _linalg_gelqf _linalg_inverse _linalg_potrf _linalg_potri _linalg_syevd
            _backward_linalg_gelqf _backward_linalg_inverse _backward_linalg_potrf
            _backward_linalg_syevd
        """,
        "image/image_random.cc, image_random-inl.h": """
            _image_adjust_lighting _image_flip_left_right _image_flip_top_bottom _image_normalize
            _image_random_brightness _image_random_color_jitter _image_random_contrast
            _image_random_flip_left_right _image_random_flip_top_bottom _image_random_hue
            _image_random_lighting _image_random_saturation
        """,
        "contrib/{gradient_multiplier_op,quadratic_op,stes_op,transformer}.cc": """
            _contrib_backward_gradientmultiplier _contrib_div_sqrt_dim _contrib_quadratic
            _contrib_round_ste _contrib_sign_ste
        """,
        "random/shuffle_op.cc": "_shuffle",
        "tensor/matrix_op.cc": "_slice_assign _slice_assign_scalar",
        "tensor/elemwise_sum.cc (only the first of its inputs)": "add_n",
        "{identity_attach_KL_sparse_reg,l2_normalization,make_loss,sequence_mask}-inl.h": """
            IdentityAttachKLSparseReg MakeLoss SequenceMask _backward_IdentityAttachKLSparseReg
            _backward_L2Normalization
        """,
        "svm_output-inl.h": "SVMOutput",
        "tensor/elemwise_unary_op.h (UNARY)": """
            abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees erf erfinv
            exp expm1 fix floor gamma gammaln hard_sigmoid log log10 log1p log2 logical_not negative
            radians rcbrt reciprocal relu rint round rsqrt sigmoid sign sin sinh softsign sqrt
            square tan tanh trunc
        """,
        "numpy/np_{elemwise_broadcast_*,elemwise_unary_op_basic,true_divide}.cc": """
            _npi_absolute _npi_arccos _npi_arccosh _npi_arcsin _npi_arcsinh _npi_arctan _npi_arctan2
            _npi_arctanh _npi_around _npi_bitwise_and_scalar _npi_bitwise_or_scalar
            _npi_bitwise_xor_scalar _npi_cbrt _npi_ceil _npi_cos _npi_cosh _npi_degrees
            _npi_equal_scalar _npi_exp _npi_expm1 _npi_fix _npi_floor _npi_greater_equal_scalar
            _npi_greater_scalar _npi_isfinite _npi_isinf _npi_isnan _npi_isneginf _npi_isposinf
            _npi_lcm_scalar _npi_less_equal_scalar _npi_less_scalar _npi_log _npi_log10 _npi_log1p
            _npi_log2 _npi_logical_not _npi_nan_to_num _npi_negative _npi_not_equal_scalar
            _npi_radians _npi_reciprocal _npi_rint _npi_rtrue_divide_scalar _npi_sign _npi_sin
            _npi_sinh _npi_sqrt _npi_square _npi_tan _npi_tanh _npi_true_divide_scalar _npi_trunc
            _npx_relu _npx_sigmoid
        """,
        "numpy/np_{boolean_mask_assign,cumsum,diff,ediff1d_op,tril_op}.cc": """
            _np_cumsum _npi_boolean_mask_assign_scalar _npi_boolean_mask_assign_tensor _npi_diff
            _npi_ediff1d _npi_tril
        """,
        "numpy/linalg/np_potrf.cc": "_npi_cholesky",
    },
    _SAME: {
        "tensor/{amp_cast,elemwise_unary_op_basic,indexing_op,matrix_op}.cc": """
            BlockGrad Cast Flatten Reshape _copy _identity_with_attr_like_rhs _scatter_set_nd
            amp_cast expand_dims make_loss reshape_like _backward_amp_cast _backward_cast
            _backward_copy _backward_hard_sigmoid _backward_reshape
        """,
        "contrib/gradient_multiplier_op.cc": "_contrib_gradientmultiplier",
        "numpy/np_{elemwise_unary_op_basic,matrix_op}.cc": "_np_copy _np_reshape _npx_reshape",
    },
    _EITHER: {
        "tensor/elemwise_binary{,_broadcast}_op.h (BINARY, BINARY_BROADCAST)": """
            _equal _grad_add _greater _greater_equal _hypot _lesser _lesser_equal _logical_and
            _logical_or _logical_xor _maximum _minimum _mod _not_equal _power _scatter_elemwise_div
            broadcast_add broadcast_div broadcast_equal broadcast_greater broadcast_greater_equal
            broadcast_hypot broadcast_lesser broadcast_lesser_equal broadcast_logical_and
            broadcast_logical_or broadcast_logical_xor broadcast_maximum broadcast_minimum
            broadcast_mod broadcast_mul broadcast_not_equal broadcast_power broadcast_sub
            elemwise_add elemwise_div elemwise_mul elemwise_sub
        """,
        "tensor/{elemwise_unary_op_*,elemwise_binary_scalar_op_*}.cc (gradients by BINARY)": """
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
        "numpy/np_{elemwise_broadcast_*,true_divide}.cc": """
            _npi_add _npi_bitwise_and _npi_bitwise_or _npi_bitwise_xor _npi_copysign _npi_equal
            _npi_greater _npi_greater_equal _npi_hypot _npi_lcm _npi_ldexp _npi_less _npi_less_equal
            _npi_mod _npi_multiply _npi_not_equal _npi_power _npi_subtract _npi_true_divide
            _backward_npi_arctan2_scalar _backward_npi_ldexp_scalar _backward_npi_rarctan2_scalar
            _backward_npi_rldexp_scalar
        """,
    },
    _FIRST_TO_BOTH: {
        "tensor/{elemwise_binary_op_*,elemwise_binary_broadcast_op_*}.cc": """
            _backward_add _backward_broadcast_add _backward_broadcast_sub _backward_sub
        """,
        "numpy/np_{elemwise_broadcast_*,true_divide}.cc": """
            _backward_npi_broadcast_add _backward_npi_broadcast_sub
        """,
    },
    _FIRST_TO_SECOND: {
        "tensor/{elemwise_binary_op_*,elemwise_binary_broadcast_op_*}.cc": """
            _backward_broadcast_div _backward_broadcast_hypot _backward_broadcast_maximum
            _backward_broadcast_minimum _backward_broadcast_mod _backward_broadcast_mul
            _backward_broadcast_power _backward_div _backward_hypot _backward_maximum
            _backward_minimum _backward_mod _backward_mul _backward_power
        """,
        "tensor/la_op.cc": "_backward_linalg_trmm",
        "numpy/np_{elemwise_broadcast_*,true_divide}.cc": """
            _backward_npi_broadcast_div _backward_npi_broadcast_mod _backward_npi_broadcast_mul
            _backward_npi_broadcast_power _backward_npi_copysign _backward_npi_hypot
            _backward_npi_ldexp
        """,
    },
    _SECOND: {
        "tensor/la_op.cc": "_linalg_trmm _linalg_trsm _backward_linalg_sumlogdiag",
        "nn/fully_connected.cc, regression_output.cc": """
            _backward_FullyConnected _backward_linear_reg_out _backward_logistic_reg_out
            _backward_mae_reg_out
        """,
        "pooling_v1-inl.h (nothing with cuDNN)": "_backward_Pooling_v1",
        "contrib/{fft,ifft}-inl.h": "_backward__contrib_fft _backward__contrib_ifft",
        "numpy/np_where_op.cc": "_npi_where_lscalar _npi_where_rscalar",
    },
    ((2, 0, False),): {
        "tensor/la_op.cc": "_linalg_gemm",
        "numpy/linalg/np_gesvd.cc": "_backward_npi_svd",
    },
    ((2, 1, False),): {"tensor/la_op.cc": "_backward_linalg_gemm2"},
    ((2, 1, False), (3, 2, False)): {"tensor/la_op.cc": "_backward_linalg_gemm"},
    ((0, 1, False), (1, 0, False)): {"tensor/la_op.cc": "_backward_linalg_trsm"},
    ((1, 0, False), (2, 1, False)): {
        "random/pdf_op.cc": """
            _backward_pdf_dirichlet _backward_pdf_exponential _backward_pdf_poisson
        """,
    },
    ((1, 0, False), (2, 1, False), (3, 2, False)): {
        "random/pdf_op.cc": """
            _backward_pdf_gamma _backward_pdf_generalized_negative_binomial
            _backward_pdf_negative_binomial _backward_pdf_normal _backward_pdf_uniform
        """,
    },
    ((1, 1, False),): {"svm_output-inl.h": "_backward_SVMOutput"},
    ((1, 0, False), (2, 0, False)): {"numpy/np_where_op.cc": "_npi_where"},
    ((0, 2, False),): {"numpy/linalg/np_gesvd.cc": "_npi_svd"},
    ((1, 2, False),): {"contrib/count_sketch-inl.h": "_backward__contrib_count_sketch"},
}

#: Operators whose options are not known: optimizer updates, quantized operators, input readers. All
#: others have the options in the table, or none.
_UNKNOWN = re.compile(
    r".*update|.*quanti|_sg_|_cv|_npi_cv|_imdecode|multi_|all_finite|reset_arrays"
    r"|_(backward_)?cumsum|cumsum"
    r"|_contrib_(calibrate|dgl|edge_id|getnnz)|_copyto|_onehot_encode|_set_value|fill_element"
)

#: Operator -> the inputs of which it reads only the shape (``FIgnoreInputs``: tensor/init_op.cc,
#: elemwise_unary_op_basic.cc; random/sample_op.cc; numpy/np_init_op.cc). ``shape_array``,
#: ``broadcast_like`` and ``slice_like`` do not register the attribute, and keep their inputs alive.
IGNORED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("_identity_with_attr_like_rhs", "reshape_like"), (1,)),
    **dict.fromkeys(
        """
        _contrib_arange_like _npi_full_like ones_like zeros_like
        _random_exponential_like _random_gamma_like _random_generalized_negative_binomial_like
        _random_negative_binomial_like _random_normal_like _random_poisson_like _random_uniform_like
        """.split(),
        (0,),
    ),
}


def _pooling_gradient(attrs: Attributes) -> Options:
    """Return the options, which need the workspace of MKLDNN's max pooling.

    See ``GetNumOutputs`` in nn/pooling.cc.
    """
    workspace = (
        built_with_mkldnn()
        and attrs.get("pool_type", "max") == "max"
        and re.search(r"\d", attrs.get("kernel", ""))
        and attrs.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW")
    )
    return _SECOND if workspace else _NONE


def _softmax_gradient(attrs: Attributes) -> Options:
    """Return the options (``SoftmaxGradOpInplaceOption`` in nn/softmax-inl.h)."""
    if truth(attrs.get("use_length")):
        return ((0, 0, False), (1, 0, False), (2, 1, False), (3, 0, False))
    if attrs.get("dtype", "None") != "None":
        return ((0, 0, False), (1, 0, False), (2, 0, False))
    return _EITHER


_OPTIONS: dict[str, Options | Callable[[Attributes], Options]] = {
    **{
        op: options
        for options, sources in _TABLE.items()
        for ops in sources.values()
        for op in ops.split()
    },
    "_backward_log_softmax": _softmax_gradient,
    "_backward_softmax": _softmax_gradient,
    "_backward_softmin": _softmax_gradient,
    **dict.fromkeys(
        ("amp_multicast", "_backward_amp_multicast"),  # tensor/amp_cast.cc
        lambda attrs: tuple((i, i, True) for i in range(int(attrs["num_outputs"]))),
    ),
    "_backward_Pooling": _pooling_gradient,
    "_backward_SequenceMask": lambda attrs: (
        _FIRST_TO_SECOND if truth(attrs.get("use_sequence_length")) else _FIRST
    ),
}


def inplace_options(op: str, attrs: Attributes, num_inputs: int) -> Options | None:
    """Return an operator's in-place options in the planner's order, or None if they are unknown."""
    unknown = _UNKNOWN.match(op) or ("_np" in op and VERSION < 10700)  # 1.6 has others
    options = None if unknown else _OPTIONS.get(op, _NONE)
    if callable(options):
        options = options(attrs)
    return options and tuple(option for option in options if option[0] < num_inputs)


def reads_overwritten(op: str, attrs: Attributes) -> bool:
    """Return whether an operator reads its input after it has overwritten it in place.

    The gradient of PReLU writes the gradient of the data over that of the output, and then computes
    the gradient of the slope from it (``BinaryBroadcastBackwardUseInImpl`` in
    tensor/elemwise_binary_broadcast_op.h). That is so in the plain layout only: blocked inputs are
    copied first (``SetupDefaultBlobsIn`` in ``src/common/exec_utils.h``).
    """
    return op == "_backward_LeakyReLU" and attrs.get("act_type") == "prelu"
