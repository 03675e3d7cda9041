"""Differences between versions of MXNet; docs/versions.md lists them and the tested versions."""

from __future__ import annotations

import ctypes

from memonger.support.mxnet import mx

_version = ctypes.c_int()
mx.base.check_call(mx.base._LIB.MXGetVersion(ctypes.byref(_version)))
#: 10901 for 1.9.1, as MXNet writes it into files (``include/mxnet/base.h``).
VERSION = _version.value

#: What MXNet raises. Before 1.7 MXNetError is not a RuntimeError.
MXNET_ERRORS = (RuntimeError, mx.MXNetError)

#: Before 1.7 many gradients cannot be invoked by name: they are registered without their number of
#: inputs (``set_num_inputs``), which then counts as one.
CAN_SCHEDULE = VERSION >= 10700

#: Gradient -> inputs that it changes but does not declare (``FMutateInputs``), before 1.8.
UNDECLARED_MUTATIONS = {"_backward_BatchNorm": (6, 7)} if VERSION < 10800 else {}
