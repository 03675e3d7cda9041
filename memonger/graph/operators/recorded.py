"""Operators whose gradient MXNet's imperative interface cannot run by name.

Most gradients are operators (``_backward_X``), which ``MXImperativeInvoke`` runs by name. The
others are *recorded*: autograd records the operator alone, and its backward pass writes the
gradients. A gradient is recorded if

- it needs the state of its forward operator (``FCreateOpState``, and all operators that
  ``MXNET_REGISTER_OP_PROPERTY`` registers, ``src/nnvm/legacy_op_util.cc``),
- it requires the request ``kNullOp`` for unwanted gradients, which the interface cannot pass,
- its results have several types, but the interface assumes one (``SameType``).
"""

from __future__ import annotations

from memonger.graph.operators.gradients import OperatorGradient
from memonger.graph.operators.recompute import SYNCHRONIZED
from memonger.support import versions

#: Operators that ``MXNET_REGISTER_OP_PROPERTY`` registers.
LEGACY = frozenset(
    """
    BatchNorm_v1 BilinearSampler Convolution_v1 Correlation Crop GridGenerator
    IdentityAttachKLSparseReg InstanceNorm L2Normalization MakeLoss Pad Pooling_v1 ROIPooling
    SVMOutput SequenceLast SequenceMask SequenceReverse SliceChannel SpatialTransformer SwapAxis
    _CrossDeviceCopy _NDArray _Native _contrib_DeformableConvolution
    _contrib_DeformablePSROIPooling _contrib_MultiBoxDetection _contrib_MultiBoxPrior
    _contrib_MultiBoxTarget _contrib_MultiProposal _contrib_PSROIPooling _contrib_Proposal
    _contrib_SyncBatchNorm _contrib_count_sketch _contrib_fft _contrib_ifft
    """.split()
)
_STATES = {"Custom", "RNN", "_npi_einsum"}
# src/operator/tensor/indexing_op.h, src/operator/contrib/hawkes_ll-inl.h
_UNWANTED = {"Embedding", "_contrib_hawkesll"}

#: ``schedules.execution.calls`` computes the gradient of SliceChannel with other operators.
_RECORDED = (LEGACY | _STATES | _UNWANTED) - {"SliceChannel"}

#: Operators whose gradient computes all its results, also those that are not requested.
COMPUTES_ALL = frozenset(("RNN",))

#: Operators that autograd records when their gradient runs, in inference mode: then they neither
#: compute statistics nor wait for other devices. The gradient reads the statistics of the first run
#: (``src/operator/contrib/sync_batch_norm-inl.h``).
RECORDED_LATE = frozenset((SYNCHRONIZED,))

#: Products of matrices, and operators that are computed by them.
PRODUCTS = frozenset(
    """
    Convolution Convolution_v1 Correlation Deconvolution FullyConnected RNN
    _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt _linalg_gemm
    _linalg_gemm2 _linalg_syrk _linalg_trmm _linalg_trsm _np_dot _npi_einsum _npi_matmul
    _npi_tensordot _npi_tensordot_int_axes batch_dot dot
    """.split()
)

#: The ones of these that MKLDNN computes. With the request 'add' it adds afterwards.
BY_MKLDNN = frozenset(("Convolution", "Deconvolution", "FullyConnected"))

#: Gradient -> inputs that it changes but does not declare (``FMutateInputs``).
UNDECLARED_MUTATIONS = {
    "_backward_contrib_BatchNormWithReLU": (6, 7),
    **versions.UNDECLARED_MUTATIONS,
}

#: Operators that cannot write into an existing array, because they infer its shape wrongly: they
#: count its height as that of an input (``NumpyVstackShape`` in
#: src/operator/numpy/np_matrix_op.cc).
NOT_INTO_ARRAYS = frozenset(("_npi_column_stack", "_npi_vstack"))

#: Operators that run on a separate thread (``ExecType::kAsync``), never in bulk with others.
ASYNCHRONOUS = frozenset(("Custom", "_NDArray", "_Native", "_CrossDeviceCopy"))


def is_recorded(op: str, gradient: OperatorGradient) -> bool:
    """Return whether the gradient of an operator is recorded."""
    nodes = [node for node in gradient.nodes if node.op.startswith("_backward_")]
    several_types = any(len({tensor.dtype for tensor in node.tensors}) > 1 for node in nodes)
    return op in _RECORDED or several_types
