"""The rows of a schedule's training step, and the lifetimes of its tensors, as arrays.

There is a row for each operator that runs, in order. A search makes thousands of steps, so they are
arrays for compiled code.

A *block* is the memory of one tensor, or of several that are computed in place of each other, by
the in-place options of MXNet's planner (``src/nnvm/plan_memory.cc``). Each block is an array of
MXNet, so the tensors in a block have the same type. If MKLDNN may compute them they have the same
shape too, because MKLDNN would convert a view of a blocked array.
"""

from __future__ import annotations

from memonger.support.kernels import Struct


class Rows(Struct):
    """The rows of a training step, each after the rows that it reads."""


class NodeVariants(Struct):
    """The rows that training steps of a network consist of, for all schedules."""

    rows: Rows
    forward: int
    again: int


class Lifetimes(Struct):
    """The blocks of a training step, and their lifetimes."""
