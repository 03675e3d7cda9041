"""Which operators pointwise fusion takes (``src/executor/pointwise_fusion_pass.cc``)."""

from __future__ import annotations

from typing import Mapping

from memonger.graph.operators.inplace import expanded

# ``ops_desc`` and ``variable_io_ops`` in src/operator/fusion/fused_op-inl.h: by the names that nnvm
# knows operators by.
_FUSED = frozenset(
    expanded("""
        {},_backward_{}: Activation abs amp_cast amp_multicast arccos arccosh arcsin arcsinh arctan
        arctanh cbrt clip cos cosh degrees erf erfinv expm1 log log10 log1p log2 radians rcbrt
        reciprocal relu rsqrt sigmoid sign sin sinh smooth_l1 sqrt square tan tanh
        _{},_backward_{}: div_scalar hypot hypot_scalar maximum minimum mul_scalar power
        power_scalar rdiv_scalar rpower_scalar
        _backward_{}: cast div mul reshape sub
        {}: Cast Reshape _copy _identity_with_attr_like_rhs _minus_scalar _ones _plus_scalar
        _rminus_scalar _zeros add_n ceil elemwise_add elemwise_div elemwise_mul elemwise_sub exp
        expand_dims fix floor gamma gammaln negative ones_like rint round softsign squeeze trunc
        zeros_like
    """)
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
