"""Which operators pointwise fusion takes (``src/executor/pointwise_fusion_pass.cc``)."""

from __future__ import annotations

from typing import Mapping

# ``ops_desc`` and ``variable_io_ops`` in src/operator/fusion/fused_op-inl.h: by the names that nnvm
# knows operators by.
_FUSED = frozenset(
    """
    Activation Cast Reshape _copy _div_scalar _hypot _hypot_scalar _identity_with_attr_like_rhs
    _maximum _minimum _minus_scalar _mul_scalar _ones _plus_scalar _power _power_scalar _rdiv_scalar
    _rminus_scalar _rpower_scalar _zeros abs add_n amp_cast amp_multicast arccos arccosh arcsin
    arcsinh arctan arctanh cbrt ceil clip cos cosh degrees elemwise_add elemwise_div elemwise_mul
    elemwise_sub erf erfinv exp expand_dims expm1 fix floor gamma gammaln log log10 log1p log2
    negative ones_like radians rcbrt reciprocal relu rint round rsqrt sigmoid sign sin sinh
    smooth_l1 softsign sqrt square squeeze tan tanh trunc zeros_like
    _backward_Activation _backward_abs _backward_amp_cast _backward_amp_multicast _backward_arccos
    _backward_arccosh _backward_arcsin _backward_arcsinh _backward_arctan _backward_arctanh
    _backward_cast _backward_cbrt _backward_clip _backward_cos _backward_cosh _backward_degrees
    _backward_div _backward_div_scalar _backward_erf _backward_erfinv _backward_expm1
    _backward_hypot _backward_hypot_scalar _backward_log _backward_log10 _backward_log1p
    _backward_log2 _backward_maximum _backward_minimum _backward_mul _backward_mul_scalar
    _backward_power _backward_power_scalar _backward_radians _backward_rcbrt _backward_rdiv_scalar
    _backward_reciprocal _backward_relu _backward_reshape _backward_rpower_scalar _backward_rsqrt
    _backward_sigmoid _backward_sign _backward_sin _backward_sinh _backward_smooth_l1
    _backward_sqrt _backward_square _backward_sub _backward_tan _backward_tanh
    """.split()
)
_FIRST = frozenset(["slice", "slice_axis", "slice_like", "broadcast_like"])  # ``slice_ops``
_LEAKY = ("LeakyReLU", "_backward_LeakyReLU")  # for act_type='gelu'


def fused_as(op: str, attrs: Mapping[str, str]) -> tuple[bool, bool]:
    """Tell whether an operator is fused with what it reads, and with what reads it.

    Source: ``IsFusionCompatible`` and ``IsInputsOnlyCompatible``.
    """
    wholly = op in _FUSED or (op in _LEAKY and attrs.get("act_type") == "gelu")
    steps = op == "slice" and attrs.get("step", "()") not in ("()", "[]")
    return wholly, wholly or (op in _FIRST and not steps)
