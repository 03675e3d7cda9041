"""Rates of a nominal CPU, and factors for classes of operators: one x86-64 thread with AVX2.

The efficiency of MXNet's kernels on a CPU differs a hundredfold: MKLDNN computes convolutions, but
a power is one call of the C library for each number. So each class of operators has two factors,
forward and gradient: its time divided by that of the roofline. They are rounded, because only the
relative cost of operators matters. `benchmarks/operators.py` compares them with the CPU at hand.
"""

from __future__ import annotations

import re

import numpy as np

from memonger.costs.time.gpus import Rates
from memonger.graph.forward import ForwardGraph
from memonger.support.types import Doubles

NOMINAL_CPU = "CPU"  # the name of the nominal CPU, as a GPU has a name
#: FLOPs a second of a convolution, bytes a second of a sum of two arrays, seconds of a call.
CPU_RATES = Rates(50e9, 6e9, 5e-6)

#: Classes of operators -> factors on the time of the roofline, forward and gradient. The variant of
#: an operator (see `find_class`) has precedence; an operator in no class has (1, 1).
_CLASSES: dict[str, tuple[float, float]] = {
    "Convolution Deconvolution dot matmul einsum tensordot tensordot_int_axes RNN": (1, 1.2),
    "Convolution:grouped Deconvolution:grouped": (1.6, 2),  # few products for each byte
    """
    FullyConnected batch_dot gemm gemm2 trmm syrk interleaved_matmul_selfatt_qk
    interleaved_matmul_selfatt_valatt interleaved_matmul_encdec_qk interleaved_matmul_encdec_valatt
    """: (2, 2.2),
    "BatchNorm BatchNormWithReLU SyncBatchNorm": (0.9, 0.9),
    "Activation:relu LeakyReLU:leaky LeakyReLU:elu relu": (0.3, 1),
    "Activation:tanh": (3.5, 2.8),
    "LeakyReLU:prelu": (7, 30),
    "LeakyReLU:selu": (9, 4),
    "exp sin cos erf sigmoid hypot _hypot broadcast_hypot sign abs": (4, 2.5),
    "clip": (6, 5),
    """
    tanh log log2 log10 log1p expm1 sqrt rsqrt cbrt rcbrt tan arcsin arccos arctan sinh cosh
    _power_scalar _rpower_scalar power_scalar rpower_scalar softmin
    """: (10, 4),
    "_power broadcast_power power": (10, 20),
    "gamma gammaln erfinv": (30, 50),
    "softmax log_softmax": (1, 2),
    "SoftmaxOutput SoftmaxActivation softmax_cross_entropy": (7, 2),
    "LayerNorm": (3, 30),
    "L2Normalization": (2.5, 9),
    "InstanceNorm GroupNorm": (20, 30),
    "LRN": (2, 60),
    "Dropout": (6, 0.2),
    "Pooling:max": (5, 2.5),
    "broadcast:other": (1, 8),
    "sum mean max min prod norm nansum nanprod argmax argmin moments std var": (10, 3),
    "Concat concatenate stack slice slice_axis slice_like Cast SwapAxis transpose": (0.4, 0.6),
    "SliceChannel split_v2": (6, 12),
    "UpSampling tile repeat reverse flip": (4, 4),
    "BilinearResize2D BilinearSampler": (4.5, 10),
    "depth_to_space space_to_depth": (10, 7),
    "SequenceMask SequenceReverse SequenceLast": (2, 2),
}
_FACTORS = {name: factors for names, factors in _CLASSES.items() for name in names.split()}


def find_factors(graph: ForwardGraph) -> Doubles:
    """Return the factors of each node on the roofline's time: (nodes, 2), forward and gradient."""
    factors = np.ones((len(graph.nodes), 2))
    for i in graph.operators:
        factors[i] = _FACTORS.get(find_class(graph, i), (1, 1))
    return factors


def find_class(graph: ForwardGraph, i: int) -> str:
    """Return the class of an operator: its name without prefix, with a variant that matters."""
    node = graph.nodes[i]
    op = re.sub("^_(npi|np|npx|contrib|linalg)_", "", node.op) if node.op[0] == "_" else node.op
    variant = node.attrs.get("act_type", "leaky" if op == "LeakyReLU" else "")
    if op == "Pooling":
        variant = node.attrs.get("pool_type", "max")
    elif int(node.attrs.get("num_group", 1)) > 1:
        variant = "grouped"
    elif op.startswith("broadcast_"):
        if len({graph.tensors[a][b].shape for a, b in node.inputs}) > 1:  # its gradient is a sum
            return "broadcast:other"
    return f"{op}:{variant}" if f"{op}:{variant}" in _FACTORS else op
