"""Differences between versions of MXNet. docs/versions.md lists all, and the versions tried."""

from __future__ import annotations

import ctypes
from typing import Mapping, Sequence

from memonger.support.mxnet import mx
from memonger.support.types import NDArray, Symbol

_version = ctypes.c_int()
mx.base.check_call(mx.base._LIB.MXGetVersion(ctypes.byref(_version)))
#: 10901 for 1.9.1, as MXNet writes it into files (``include/mxnet/base.h``).
VERSION = _version.value

#: What MXNet raises: a RuntimeError; before 1.7 an MXNetError is none.
MXNET_ERRORS = (RuntimeError, mx.MXNetError)

#: Operators whose gradient ``MXImperativeInvoke`` does not run in MXNet 1.6: it is registered
#: without its number of inputs (``set_num_inputs``), which then counts as one.
NOT_INVOKED = frozenset(
    """
    BatchNorm Concat Convolution Deconvolution LRN LeakyReLU Pooling SoftmaxActivation SoftmaxOutput
    UpSampling _contrib_ROIAlign _contrib_RROIAlign norm softmax_cross_entropy
    """.split()
    if VERSION < 10700
    else ()
)

#: Whether operators of ``mx.np`` have the in-place options of 1.9; those of 1.6 were not examined.
KNOWS_NP = VERSION >= 10700

#: Gradient -> inputs that it changes without telling the engine (``FMutateInputs``), before 1.8.
MOVED_UNTOLD = {"_backward_BatchNorm": (6, 7)} if VERSION < 10800 else {}


def json_of(symbol: Symbol) -> str:
    """Write a symbol as JSON, with the casts that AMP has put in."""
    options = {} if VERSION < 10700 else {"remove_amp_cast": False}  # before, it always keeps them
    return str(symbol.tojson(**options))


def invoke(
    op: int, reads: Sequence[NDArray], attrs: Mapping[str, str], writes: Sequence[NDArray]
) -> None:
    """Run an operator by its handle; autograd may record it."""
    returns_list = () if VERSION < 10700 else (True,)
    mx.nd._internal._imperative_invoke(
        op, list(reads), list(attrs), list(attrs.values()), list(writes), False, *returns_list
    )
