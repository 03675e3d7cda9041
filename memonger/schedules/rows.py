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
from memonger.support.types import Bools, Int32s, Int64s


class Rows(Struct):
    """The rows of a training step, each after the rows that it reads."""

    signature: Int32s
    source: Int32s
    time: Int32s
    read_start: Int32s
    read_row: Int32s
    read_output: Int32s
    first: Int32s
    latest: Int32s


class NodeVariants(Struct):
    """The rows that training steps of a network consist of, for all schedules."""

    rows: Rows
    forward_nodes: int
    again: int
    variable: Int32s
    operation_start: Int32s
    operation_row: Int32s
    head_row: Int32s
    head_output: Int32s


class Lifetimes(Struct):
    """The blocks of a training step, and their lifetimes."""

    block: Int32s
    start: Int32s
    stop: Int32s
    nbytes: Int64s
    of_caller: Bools
