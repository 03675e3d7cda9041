"""In-place options and ignored inputs of operators.

``MXAllocMemory`` (``src/nnvm/plan_memory.cc``) gives the memory of an input to an output if the
operator's ``FInplaceOption`` has the pair, the sizes are equal and no other operator still reads
that memory. If ``FInplaceIdentity`` declares that the output equals the input, others may still
read it. An input in ``FIgnoreInputs`` is not read at all.

Python cannot read these attributes from MXNet. The tables name the source files of 1.9.1, below
``src/operator``, that register them (BINARY is the macro ``MXNET_OPERATOR_REGISTER_BINARY``, and so
on). CPU and GPU builds, both with MKLDNN, agree if pointwise fusion is off.

The tables describe what MXNet does, even where its code has a mistake: ``OpBackInplaceOption`` in
``src/nnvm/legacy_op_util.cc`` offers the last gradient of a legacy operator instead of the first.
"""

from __future__ import annotations

import re
from typing import Callable, Iterator, Tuple

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

#: Options -> the operators that have them, in the form that `expand` reads.
_TABLE: dict[Options, str] = {
    _FIRST: """
        # tensor/elemwise_binary_scalar_op*.cc (BINARY_SCALAR), elemwise_scatter_op.cc
        _{}_scalar: backward_div backward_mul div equal greater greater_equal hypot lesser
        lesser_equal logical_and logical_or logical_xor maximum minimum minus mod mul not_equal plus
        power rdiv rminus rmod rpower scatter_minus scatter_plus
        # nn/{activation,dropout,group_norm,layer_norm,softmax*,softmin,log_softmax,moments}.cc;
        # leaky_relu.cc, softmax_output.cc, regression_output.cc
        {},_backward_{}: Activation Dropout LeakyReLU SoftmaxActivation SoftmaxOutput
        {}: GroupNorm LayerNorm LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput
        log_softmax moments smooth_l1 softmax softmin
        # tensor/la_op.cc
        _linalg_{},_backward_linalg_{}: gelqf inverse potrf syevd
        {}: _linalg_potri
        # image/image_random.cc, image_random-inl.h
        _image_{}: adjust_lighting flip_left_right flip_top_bottom normalize
        _image_random_{}: brightness color_jitter contrast flip_left_right flip_top_bottom hue
        lighting saturation
        # tensor/elemwise_sum.cc (only the first of its inputs), matrix_op.cc; random/shuffle_op.cc;
        # contrib/transformer.cc, quadratic_op.cc, gradient_multiplier_op.cc
        {}: _contrib_backward_gradientmultiplier _contrib_div_sqrt_dim _contrib_quadratic _shuffle
        _slice_assign _slice_assign_scalar add_n
        # Legacy: identity_attach_KL_sparse_reg-inl.h, l2_normalization-inl.h, make_loss-inl.h,
        # sequence_mask-inl.h, svm_output-inl.h
        IdentityAttachKLSparseReg MakeLoss SVMOutput SequenceMask
        _backward_IdentityAttachKLSparseReg _backward_L2Normalization
        # tensor/elemwise_unary_op.h (UNARY); contrib/stes_op.cc
        _contrib_round_ste _contrib_sign_ste abs arccos arccosh arcsin arcsinh arctan arctanh cbrt
        ceil cos cosh degrees erf erfinv exp expm1 fix floor gamma gammaln hard_sigmoid log log10
        log1p log2 logical_not negative radians rcbrt reciprocal relu rint round rsqrt sigmoid sign
        sin sinh softsign sqrt square tan tanh trunc
        # numpy/: np_{elemwise_unary_op_basic,true_divide,elemwise_broadcast_*,diff,ediff1d_op}.cc,
        # np_{cumsum,tril_op,boolean_mask_assign}.cc, linalg/np_potrf.cc
        _npx_{}: relu sigmoid
        _npi_{}: absolute arccos arccosh arcsin arcsinh arctan arctanh around cbrt ceil cos cosh
        degrees exp expm1 fix floor isfinite isinf isnan isneginf isposinf log log10 log1p log2
        logical_not nan_to_num negative radians reciprocal rint sign sin sinh sqrt square tan tanh
        trunc arctan2 boolean_mask_assign_scalar boolean_mask_assign_tensor cholesky diff ediff1d
        tril
        _npi_{}_scalar: bitwise_and bitwise_or bitwise_xor equal greater greater_equal lcm less
        less_equal not_equal rtrue_divide true_divide
        {}: _np_cumsum
    """,
    _SAME: """
        # tensor/elemwise_unary_op_basic.cc, matrix_op.cc, amp_cast.cc, indexing_op.cc;
        # contrib/gradient_multiplier_op.cc
        {}: BlockGrad Cast Flatten Reshape _contrib_gradientmultiplier _copy expand_dims
        _identity_with_attr_like_rhs _scatter_set_nd amp_cast make_loss reshape_like
        _backward_{}: amp_cast cast copy hard_sigmoid reshape
        _np_{}: copy reshape  # numpy/np_{elemwise_unary_op_basic,matrix_op}.cc
        _npx_{}: reshape
    """,
    _EITHER: """
        # tensor/elemwise_binary_op.h (BINARY), elemwise_binary_broadcast_op.h (BINARY_BROADCAST)
        _{},broadcast_{}: equal greater greater_equal hypot lesser lesser_equal logical_and
        logical_or logical_xor maximum minimum mod not_equal power
        broadcast_{},elemwise_{}: add div mul sub
        {}: _grad_add _scatter_elemwise_div
        # Gradients made by BINARY: tensor/elemwise_unary_op_*.cc, elemwise_binary_scalar_op_*.cc
        _backward_{}_scalar: hypot maximum minimum mod power rdiv rmod rpower
        _backward_{}: abs arccos arccosh arcsin arcsinh arctan arctanh cbrt cos cosh degrees erf
        erfinv expm1 gamma gammaln log log10 log1p log2 radians rcbrt reciprocal relu rsqrt sigmoid
        sign sin sinh smooth_l1 softsign sqrt square tan tanh
        # numpy/np_{elemwise_broadcast_*,true_divide}.cc
        _npi_{}: add bitwise_and bitwise_or bitwise_xor copysign equal greater greater_equal hypot
        lcm ldexp less less_equal mod multiply not_equal power subtract true_divide
        _backward_npi_{}_scalar: arctan2 ldexp rarctan2 rldexp
    """,
    # tensor/elemwise_binary_op_*.cc, elemwise_binary_broadcast_op_*.cc, la_op.cc
    # numpy/np_{elemwise_broadcast_*,true_divide}.cc
    _FIRST_TO_BOTH: "_backward_{},_backward_broadcast_{},_backward_npi_broadcast_{}: add sub",
    _FIRST_TO_SECOND: """
        _backward_{},_backward_broadcast_{}: div hypot maximum minimum mod mul power
        {}: _backward_linalg_trmm
        _backward_npi_{}: broadcast_div broadcast_mod broadcast_mul broadcast_power copysign hypot
        ldexp
    """,
    _SECOND: """
        # nn/fully_connected.cc; regression_output.cc; tensor/la_op.cc
        {}: _linalg_trmm _linalg_trsm
        _backward_{}: FullyConnected linalg_sumlogdiag linear_reg_out logistic_reg_out mae_reg_out
        # Legacy: pooling_v1-inl.h (nothing with cuDNN), contrib/fft-inl.h, ifft-inl.h
        Pooling_v1 _contrib_fft _contrib_ifft
        _npi_where_{}: lscalar rscalar  # numpy/np_where_op.cc
    """,
    # tensor/la_op.cc; numpy/linalg/np_gesvd.cc
    ((2, 0, False),): "{}: _linalg_gemm _backward_npi_svd",
    ((2, 1, False),): "{}: _backward_linalg_gemm2",
    ((2, 1, False), (3, 2, False)): "{}: _backward_linalg_gemm",
    ((0, 1, False), (1, 0, False)): "{}: _backward_linalg_trsm",
    # random/pdf_op.cc
    ((1, 0, False), (2, 1, False)): "_backward_pdf_{}: dirichlet exponential poisson",
    ((1, 0, False), (2, 1, False), (3, 2, False)): """
        _backward_pdf_{}: gamma generalized_negative_binomial negative_binomial normal uniform
    """,
    ((1, 1, False),): "{}: _backward_SVMOutput",  # legacy: svm_output-inl.h
    ((1, 0, False), (2, 0, False)): "_npi_{}: where",  # numpy/np_where_op.cc
    ((0, 2, False),): "_npi_{}: svd",  # numpy/linalg/np_gesvd.cc
    ((1, 2, False),): "{}: _backward__contrib_count_sketch",  # legacy: contrib/count_sketch-inl.h
}


def expand(text: str) -> Iterator[str]:
    """List the names in a text: a word ending with a colon has templates for the words after it."""
    templates: list[str] = []
    for word in re.sub("#.*", "", text).split():
        if word.endswith(":"):
            templates = word[:-1].split(",")
        else:
            yield from (template.format(word) for template in templates)


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
        expand("""
            {}: zeros_like ones_like _contrib_arange_like _npi_full_like
            _random_{}_like: exponential gamma
            generalized_negative_binomial negative_binomial normal poisson uniform
        """),
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
    **{op: options for options, text in _TABLE.items() for op in expand(text)},
    **dict.fromkeys(expand("_backward_{}: softmax log_softmax softmin"), _softmax_gradient),
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
