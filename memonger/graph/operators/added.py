"""Operators whose gradient is not the same if it is added to a sum in place.

MXNet sums a gradient of 8 or more terms (``MXNET_EXEC_INPLACE_GRAD_SUM_CAP``) in a chain. Its
executor, and CachedOp with ``static_alloc``, compute each term with the request 'add': the operator
adds to the sum of the terms before (``src/executor/inplace_addto_detect_pass.cc``). CachedOp
without ``static_alloc`` adds afterwards. ``tests/graph/test_added_in_place.py`` compares both.
"""

from __future__ import annotations

from memonger.graph.operators.recompute import truth
from memonger.graph.operators.recorded import BY_MKLDNN, PRODUCTS
from memonger.graph.operators.tensors import Attributes

#: Operators that ignore the request, write over the sum or scale it: MXNet's gradient is wrong.
WRONG = frozenset(
    """
    Crop LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput SVMOutput SoftmaxOutput
    SpatialTransformer _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution
    _contrib_MultiBoxPrior _contrib_box_iou _contrib_box_nms _linalg_gelqf _linalg_gemm
    _linalg_gemm2 _linalg_inverse _linalg_syevd _np_cumsum _npi_flip _npi_mean _split_v2
    amp_multicast clip mean moments reverse
    """.split()
)
#: Operators that round differently, because they add several numbers to each one of the sum. So do
#: products of matrices (a gemm with beta = 1).
ROUNDING = PRODUCTS | frozenset(
    """
    BilinearSampler Embedding GroupNorm LayerNorm Pad Pooling ROIPooling UpSampling
    _contrib_BilinearResize2D _contrib_PSROIPooling _contrib_ROIAlign _contrib_index_copy
    _image_normalize gather_nd im2col take
    """.split()
)


def adds_otherwise(op: str, by_mkldnn: bool) -> bool:
    """Return whether the gradient of an operator may differ if it is added in place.

    ``by_mkldnn`` says whether MKLDNN may compute it: it adds its products of matrices afterwards.
    """
    return op in WRONG or (op in ROUNDING and not (by_mkldnn and op in BY_MKLDNN))


def is_fixed_gamma(op: str, attrs: Attributes, k: int) -> bool:
    """Return whether result ``k`` of a gradient is that of a gamma that is not trained.

    It is zero. MKLDNN writes zeros where it should add them (``MKLDNNBatchNormBackward`` in
    ``src/operator/nn/mkldnn/mkldnn_batch_norm-inl.h``).
    """
    is_norm = op in ("_backward_BatchNorm", "_backward_contrib_BatchNormWithReLU")
    return is_norm and k == 1 and truth(attrs.get("fix_gamma", "True"))
