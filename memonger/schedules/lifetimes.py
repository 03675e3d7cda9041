"""When the tensors of a training step are alive, and which of them lie in the same memory.

A *block* is the memory of one tensor, or of several that are computed in place, one over the other:
by the in-place options that MXNet's planner has (``src/nnvm/plan_memory.cc``). To MXNet each block
is an array of its own, so tensors share one only if they have the same type. Where MKLDNN may lay
them out they must have the same shape too: it converts a view of an array in blocks.
"""

from __future__ import annotations

from memonger.support.kernels import Struct


class Lifetimes(Struct):
    """The blocks of a training step, and when they are alive."""
