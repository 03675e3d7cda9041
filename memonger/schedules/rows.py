"""The rows of a schedule's training step, and when its tensors are alive, in compiled code.

There is a row for each operator that runs, in the order in which they run. A search makes thousands
of steps, so there is no Python object for a row.

A *block* is the memory of one tensor, or of several that are computed in place, one over the other:
by the in-place options that MXNet's planner has (``src/nnvm/plan_memory.cc``). To MXNet each block
is an array of its own, so tensors share one only if they have the same type. Where MKLDNN may lay
them out they must have the same shape too: it converts a view of an array in blocks.
"""

from __future__ import annotations

from memonger.support.kernels import Struct


class Rows(Struct):
    """The nodes of a training step, each after all that it reads."""


class NodeVariants(Struct):
    """The forms in which rows can stand in a network's training steps, whatever the schedule."""

    rows: Rows
    forward: int
    again: int


class Lifetimes(Struct):
    """The blocks of a training step, and when they are alive."""
