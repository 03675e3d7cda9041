"""Operators that must not be recomputed, and operators that may be recomputed without a reader.

Both tables were measured on the CPU build and in the GPU executor dry run, one operator at a time
between kept neighbours. ``tests/graph/test_operators.py`` tests every entry.
"""

from __future__ import annotations

import re
from typing import Sequence

from memonger.graph.operators.tensors import Attributes
from memonger.support.mxnet import Settings
from memonger.support.symbols import CONTROL_FLOW

CPU = "cpu"
GPU = "gpu"
GPU_FUSION = "gpu with pointwise fusion"
ANY = "any"  # the device type of a plan for any device
#: The targets of a plan for any device.
ANYWHERE: frozenset[str] = frozenset((CPU, GPU, GPU_FUSION))

_PYTHON = "a mark would reach its Python code as an unexpected argument"
_NESTED = "it may hold operators that must not run twice"
#: Operator that must never carry a mark, not even 'False' -> why.
UNTOUCHED = {
    **dict.fromkeys(("Custom", "_Native", "_NDArray"), _PYTHON),
    **dict.fromkeys((*CONTROL_FLOW, "_CachedOp"), _NESTED),
}
_KEPT = {
    **UNTOUCHED,
    "Dropout": "MXNet never recomputes it, because its mask is kept",
    "RNN": "each copy would hold a reserve space of its own, larger than what it frees",
    # src/operator/nn/moments-inl.h: of a recomputed one, the gradient reads only the mean.
    "moments": "its variance is computed from a mean that is not written when it is recomputed",
}

_RANDOM = re.compile(
    r"_random_|_sample_|sample_|_npi_(uniform|normal|bernoulli|gamma|exponential|choice|multinomial"
    r"|laplace|gumbel|logistic|pareto|rayleigh|weibull|powerd|shuffle)|_shuffle$"
    r"|_image_random_|_contrib_dgl_|_unique_zipfian"
)
_MUTATING = re.compile(r".*_update(_phase[12])?$|reset_arrays$|_contrib_(group_)?adagrad")
#: Operators that update running statistics, in their gradient or (cuDNN's) when they run. In
#: training their results do not depend on the statistics.
_MOVING = frozenset(
    """
    BatchNorm BatchNorm_v1 CuDNNBatchNorm IdentityAttachKLSparseReg _contrib_BatchNormWithReLU
    _contrib_SyncBatchNorm
    """.split()
)
SYNCHRONIZED = "_contrib_SyncBatchNorm"
_SOURCES = frozenset(
    ("_zeros", "_ones", "_full", "_zeros_without_dtype", "_npi_zeros", "_npi_ones")
)


def why_kept(op: str, attrs: Attributes) -> str | None:
    """Return the reason why an operator must not be recomputed, or None if it may be."""
    if op in _KEPT:
        return _KEPT[op]
    if _is_random(op, attrs):
        return "a second draw of random numbers would differ from the first"
    if _MUTATING.match(op):
        return "it changes its inputs, which it must do only once"
    if waits_for_devices(op, attrs):
        return "it waits for the other devices, which would not run it again"
    if op in _SOURCES:
        sizes = re.findall(r"-?\d+|None", attrs.get("shape", ""))
        if not sizes or {"0", "-1", "None"} & set(sizes):
            return "its shape is inferred from its readers, which a recomputed one may not have"
    return None


def waits_for_devices(op: str, attrs: Attributes) -> bool:
    """Return whether an operator waits in training until other devices run it too.

    Source: ``src/operator/contrib/sync_batch_norm-inl.h``.
    """
    several = op == SYNCHRONIZED and int(attrs.get("ndev", 1)) > 1
    return several and not truth(attrs.get("use_global_stats"))


def is_restored(op: str, attrs: Attributes) -> bool:
    """Return whether a schedule computes an operator's output again without running it again.

    Saved outputs of its first run are enough: the mask of a Dropout, the statistics of a
    SyncBatchNorm.
    """
    return op == "Dropout" or (op == SYNCHRONIZED and not truth(attrs.get("use_global_stats")))


def on_one_device(op: str, attrs: Attributes) -> Attributes:
    """Return the attributes with which an operator waits for no other device.

    The key is another one, because MXNet keeps the number of devices of each key in the process.
    """
    if not waits_for_devices(op, attrs):
        return attrs
    return {**attrs, "ndev": "1", "key": f"{attrs['key']} on one device"}


def draws(op: str, attrs: Attributes) -> bool:
    """Return whether an operator may draw random numbers in training, so that runs differ."""
    return op == "Dropout" or op == "RNN" or op in UNTOUCHED or _is_random(op, attrs)


def moves_states(op: str, attrs: Attributes) -> bool:
    """Return whether an operator updates the auxiliary states that it reads in training."""
    if op in _MOVING or op in UNTOUCHED:
        return not truth(attrs.get("use_global_stats"))
    return bool(_MUTATING.match(op))


def _is_random(op: str, attrs: Attributes) -> bool:
    return bool(_RANDOM.match(op)) or (op == "LeakyReLU" and attrs.get("act_type") == "rrelu")


def why_refused(op: str, attrs: Attributes) -> str | None:
    """Return the reason why a network with this operator cannot be planned, or None if it can."""
    if op.startswith(("_sg_mkldnn", "_sg_onednn", "_TensorRT", "_FusedOp")):
        return (
            "it was fused for inference, and its gradients are zero; plan the symbol before fusing"
        )
    if op == "SoftmaxOutput" and truth(attrs.get("out_grad")):
        # SoftmaxOutputGradCompute (src/operator/softmax_output.cc) multiplies by inputs[0], which
        # is the gradient or the output, depending on the memory plan.
        return (
            "with out_grad=True its gradient depends on MXNet's memory plan, so that a plan could "
            "change it; leave out_grad out, and scale the loss with mx.sym.MakeLoss"
        )
    return None


def truth(value: str | None) -> bool:
    """Return whether MXNet reads this attribute as true."""
    return value in ("True", "true", "1")


# A recomputed operator whose first output has no reader runs with the write request 'null'
# (kNullOp). Some operators then abort. Others do not compute what their gradient reads: gradients
# of LayerNorm and GroupNorm are silently wrong. Fusion (src/executor/pointwise_fusion_pass.cc)
# cannot bind a graph in which an operator that it would fuse has no reader.

#: Operators that may be without a reader on all targets.
UNREAD_ANYWHERE = frozenset(
    """
    BatchNorm_v1 BlockGrad Concat Correlation Flatten FullyConnected IdentityAttachKLSparseReg
    InstanceNorm LRN MakeLoss Pad ROIPooling SequenceLast SequenceMask SequenceReverse SliceChannel
    SpatialTransformer SwapAxis _contrib_AdaptiveAvgPooling2D _contrib_BilinearResize2D
    _contrib_ROIAlign _contrib_SyncBatchNorm _contrib_div_sqrt_dim
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_selfatt_qk
    _contrib_interleaved_matmul_selfatt_valatt
    _linalg_gemm _linalg_gemm2 _linalg_syrk _linalg_trmm _maximum_scalar _minimum_scalar
    _split_v2 batch_dot broadcast_add broadcast_axis broadcast_div broadcast_hypot broadcast_like
    broadcast_maximum broadcast_minimum broadcast_mul broadcast_power broadcast_sub broadcast_to
    depth_to_space dot gather_nd im2col mean one_hot repeat reshape_like reverse slice slice_axis
    slice_like softmax_cross_entropy space_to_depth stack sum take tile topk transpose where
    _np_cumsum _np_dot _np_roll _np_squeeze _np_sum _np_transpose _npi_add _npi_arctan2
    _npi_broadcast_to _npi_concatenate _npi_copysign _npi_einsum _npi_flip _npi_hypot _npi_ldexp
    _npi_matmul _npi_mean _npi_mod _npi_mod_scalar _npi_multiply _npi_nan_to_num _npi_power
    _npi_stack _npi_subtract _npi_tensordot_int_axes _npi_tril _npi_true_divide _npi_vstack
    _npi_where
    """.split()
)

#: Operators that may be without a reader unless fusion is on; of ``mx.np``, those whose gradients
#: are fused.
UNREAD_UNFUSED = frozenset(
    """
    Cast Reshape _copy _div_scalar _hypot _hypot_scalar _maximum _minimum _minus_scalar _mul_scalar
    _plus_scalar _power _power_scalar _rdiv_scalar _rminus_scalar abs add_n arccos arcsin
    arcsinh arctan arctanh clip cos cosh degrees elemwise_add elemwise_div elemwise_mul
    elemwise_sub erf expand_dims expm1 gamma gammaln log log10 log1p log2 make_loss negative radians
    rcbrt reciprocal rsqrt sign sin sinh smooth_l1 softsign square squeeze
    _np_reshape _npi_absolute _npi_add_scalar _npi_arccos _npi_arcsin _npi_arcsinh _npi_arctan
    _npi_arctanh _npi_cos _npi_cosh _npi_degrees _npi_expm1 _npi_log _npi_log10 _npi_log1p _npi_log2
    _npi_multiply_scalar _npi_negative _npi_power_scalar _npi_radians _npi_reciprocal
    _npi_rsubtract_scalar _npi_rtrue_divide_scalar _npi_sin _npi_sinh _npi_square
    _npi_subtract_scalar _npi_true_divide_scalar _npx_reshape
    """.split()
)


def tolerates_unread(
    op: str, attrs: Attributes, dtypes: Sequence[str], targets: frozenset[str], mkldnn: bool = True
) -> bool:
    """Return whether a recomputed operator may run if its output 0 has no reader.

    ``dtypes`` are the types of its inputs, and ``mkldnn`` is whether MKLDNN may compute on a CPU.
    """
    native = truth(attrs.get("cudnn_off"))
    if op == "BatchNorm":
        return targets <= {CPU} or native or truth(attrs.get("use_global_stats"))
    if op in ("Convolution", "Deconvolution"):
        # MXNet's own kernels check the request; MKLDNN's and cuDNN's do not.
        on_cpu = mkldnn and set(dtypes) <= {"float32"}
        return (CPU not in targets or on_cpu) and (targets <= {CPU} or not native)
    if op == "UpSampling":
        return attrs.get("sample_type") == "nearest"
    return op in UNREAD_ANYWHERE or (GPU_FUSION not in targets and op in UNREAD_UNFUSED)


def targets_of(device_type: str) -> frozenset[str]:
    """Return the targets of a plan for this device type: 'cpu', 'gpu' or 'any'."""
    if device_type == ANY:
        return ANYWHERE
    if device_type != "gpu":
        return frozenset((CPU,))
    return frozenset((GPU, GPU_FUSION) if Settings().fusion else (GPU,))


def fuses(targets: frozenset[str]) -> bool:
    """Return whether all targets are GPUs, and pointwise fusion is on."""
    return GPU_FUSION in targets and CPU not in targets
