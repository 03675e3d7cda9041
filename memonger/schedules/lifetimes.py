"""When the tensors of a training step are alive, and which of them lie in the same memory.

A *block* is the memory of one tensor, or of several that are computed in place, one over the other:
by the in-place options that MXNet's planner has (``src/nnvm/plan_memory.cc``). Each block is an
array of its own for MXNet, so tensors share one only if they have the same type and, where MKLDNN
may lay them out, the same shape (a view of an array that is laid out in blocks is converted).
"""

from __future__ import annotations

from memonger.support.kernels import Struct


class Lifetimes(Struct):
    """The blocks of a training step, and when they are alive."""
