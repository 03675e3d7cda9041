"""How MXNet's imperative interface computes the gradient of an operator.

Most gradients are operators of their own (``_backward_X``), which ``MXImperativeInvoke`` runs by
name. Some cannot be: they need the state of their forward operator (``FCreateOpState``, and all
that ``MXNET_REGISTER_OP_PROPERTY`` registers, ``src/nnvm/legacy_op_util.cc``), or insist that a
gradient that nobody wants is not computed (``kNullOp``), for which the interface has no word, or
have results of several types, which it takes for one (``SameType``). (MXNet 1.6 does not tell it
how many inputs some have: ``support.versions``.) Those are *recorded*: autograd
records the operator alone, and its backward pass writes the gradients.
"""

from __future__ import annotations

from memonger.graph.operators.gradients import OperatorGradient
from memonger.support import versions

#: What ``MXNET_REGISTER_OP_PROPERTY`` registers.
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
_STATES = "Custom RNN _npi_einsum"
# src/operator/tensor/indexing_op.h, src/operator/contrib/hawkes_ll-inl.h
_UNWANTED = "Embedding _contrib_hawkesll"

#: (Of SliceChannel and softmax_cross_entropy others compute it: ``schedules.execution.calls``.)
_RECORDED = LEGACY.union(f"{_STATES} {_UNWANTED}".split()) - {"SliceChannel"}

#: Operators whose gradient computes all that it can, also what nobody reads.
COMPUTES_ALL = frozenset(("RNN",))

#: Operators whose gradient reads what it has overwritten, where MXNet computes it in place: that of
#: PReLU's slope. Autograd would compute it aright (``src/operator/leaky_relu-inl.h``).
IN_PLACE = frozenset(("LeakyReLU",))

#: Operators whose gradient rounds otherwise when it adds to what is there than when it is added
#: afterwards: products of matrices (a gemm with beta = 1), and sums over rows that are looked up.
ACCUMULATING = frozenset(
    """
    Convolution Deconvolution Embedding FullyConnected _contrib_interleaved_matmul_encdec_qk
    _contrib_interleaved_matmul_encdec_valatt _contrib_interleaved_matmul_selfatt_qk
    _contrib_interleaved_matmul_selfatt_valatt _linalg_gemm _linalg_gemm2 _linalg_syrk _linalg_trmm
    batch_dot dot gather_nd take
    """.split()
)

#: Of those, what MKLDNN computes, and adds afterwards.
BY_MKLDNN = frozenset(("Convolution", "Deconvolution", "FullyConnected"))

#: Inputs that a gradient changes without telling MXNet's engine (``FMutateInputs``).
MOVED_UNTOLD = {"_backward_contrib_BatchNormWithReLU": (6, 7), **versions.MOVED_UNTOLD}

#: Operators that run on a thread of their own (``ExecType::kAsync``): never in a bulk of others.
ASYNCHRONOUS = frozenset(("Custom", "_NDArray", "_Native", "_CrossDeviceCopy"))


def is_recorded(op: str, gradient: OperatorGradient) -> bool:
    """Tell whether the gradient of an operator is recorded."""
    types = [{t.dtype for t in n.tensors} for n in gradient.nodes if n.op.startswith("_backward_")]
    return (
        op in _RECORDED or op in versions.NOT_INVOKED or any(len(several) > 1 for several in types)
    )
