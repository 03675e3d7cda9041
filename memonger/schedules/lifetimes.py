"""When the tensors of a training step are alive, and which of them lie in the same memory.

A *block* is the memory of one tensor, or of several that are computed in place, one over the other:
by the in-place options that MXNet's planner has (``src/nnvm/plan_memory.cc``). Each block is an
array of its own for MXNet, so tensors share one only if they have the same type and, where MKLDNN
may lay them out, the same shape (a view of an array that is laid out in blocks is converted).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.graph.arrays import SignatureArrays
from memonger.schedules.nodes import Rows
from memonger.support.kernels import call


class Lifetimes(NamedTuple):
    """The blocks of a training step. A time is the number of a row."""

    block: np.ndarray  # of each output of each row (numbered through); -1 for variables
    start: np.ndarray  # of each block: the row that makes it
    stop: np.ndarray  # and the last row that reads it
    nbytes: np.ndarray
    #: bool: an array of the caller: an output of the network, or a gradient. The array of a
    #: gradient is left alone in the forward pass: a block that begins there is none.
    given: np.ndarray


def lifetimes(
    signatures: SignatureArrays,
    rows: Rows,
    head_row: np.ndarray,
    head_output: np.ndarray,
    outputs: int,
    views: bool,
) -> Lifetimes:
    """Find the blocks of a training step; the first ``outputs`` of the heads are the network's.

    The others are gradients. With ``views`` tensors of other shapes may share a block.
    """
    _, found = call("lifetimes", signatures, rows, head_row, head_output, outputs, views)
    return Lifetimes(*found)
