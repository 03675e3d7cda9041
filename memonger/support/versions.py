"""What memonger asks of MXNet and gets in other words, or not at all, from some versions.

Which versions were tried, and all that differs between them: docs/versions.md.
"""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

from memonger.support.mxnet import mx

_version = ctypes.c_int()
mx.base.check_call(mx.base._LIB.MXGetVersion(ctypes.byref(_version)))
#: As MXNet writes it into files (``include/mxnet/base.h``): 10901 for 1.9.1.
VERSION = _version.value

#: What MXNet raises: an MXNetError, which before 1.7 is no RuntimeError, or one of Python's own.
MXNET_ERRORS = (RuntimeError, mx.MXNetError)

#: Operators whose gradient ``MXImperativeInvoke`` does not run in MXNet 1.6: it is not registered
#: with the number of its inputs (``set_num_inputs``), and taken to have one.
NOT_INVOKED = frozenset(
    """
    BatchNorm Concat Convolution Deconvolution LRN LeakyReLU Pooling SoftmaxActivation SoftmaxOutput
    UpSampling _contrib_ROIAlign _contrib_RROIAlign norm softmax_cross_entropy
    """.split()
    if VERSION < 10700
    else ()
)

#: Inputs that a gradient changes without telling MXNet's engine (``FMutateInputs``), before 1.8.
MOVED_UNTOLD = {"_backward_BatchNorm": (6, 7)} if VERSION < 10800 else {}


def json_of(symbol: Any) -> str:
    """Write a symbol as JSON, with the casts that AMP has put in."""
    if VERSION < 10700:  # which leaves them in
        return str(symbol.tojson())
    return str(symbol.tojson(remove_amp_cast=False))


def invoke(op: int, reads: Sequence[Any], attrs: Any, writes: Sequence[Any]) -> None:
    """Run an operator, given by MXNet's handle of it; autograd may record it."""
    more = () if VERSION < 10700 else (True,)  # whether a list is returned
    about = op, list(reads), list(attrs), list(attrs.values()), list(writes), False, *more
    mx.nd._internal._imperative_invoke(*about)
