"""The training step of a schedule, built in compiled code: its nodes, then the allocator's arrays.

Each node waits for the one before it by a control dependency, for MXNet orders nodes depth first
from the outputs (``nnvm::DFSVisit``), inputs before control dependencies. Two rules shape this:

- The first control dependency of a gradient node must be its forward node: shapes and the state of
  the operator come from there (``src/executor/infer_graph_attr_pass.cc``). A gradient node without
  one must not get any; the next node that may, waits for it. In this way gradients are summed as
  soon as they are there (those of shared weights would all be held to the end otherwise).
- An output that nobody reads is not written (kNullOp), and then what the operator's gradient reads
  may not be either. Where the network would have it read, it is given a reader.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.graph.arrays import GraphArrays, SignatureArrays
from memonger.support.kernels import call

#: How a node is part of the chain in which each waits for the one before it: it is, the next that
#: is waits for it, or nothing does (as in nodes.c).
CHAINED, AWAITED, LOOSE = 0, 1, 2


class Rows(NamedTuple):
    """The nodes of a training step, each after all that it reads; starts as in `GraphArrays`."""

    signature: np.ndarray  # the place in `Parts.signatures`
    source: np.ndarray  # the row of the network's TrainingGraph whose place it takes; -1 for none
    time: np.ndarray  # how often the operator has run before; -1 for what is no forward node
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    wait_start: np.ndarray  # of control dependencies
    wait_row: np.ndarray
    first: np.ndarray  # of each variant the first node that took its place, and the last; or -1
    latest: np.ndarray


class NodeVariants(NamedTuple):
    """What the nodes of a network's training steps can be (node variants), whatever the schedule.

    The first variants are the rows of the TrainingGraph: forward nodes, copies (not used here),
    gradients. Then come scratch states, the forward nodes when they run again (a Dropout is then a
    product with its mask, and states are scratch), the readers of outputs that must be read, and
    what adds gradients to totals.
    """

    #: As nodes. They read and wait for a variant, as it ran last; for ~variant, as it ran first.
    #: A gradient waits for its forward node first.
    rows: Rows
    counts: np.ndarray  # of their reads: whether it is of a forward node, not for its shape alone
    forward: int  # forward nodes
    readers: int  # the first reader; the forward nodes that run again come right before
    link: np.ndarray
    variable: np.ndarray  # the variants of variables
    operation_start: np.ndarray  # of forward nodes: the gradients of their operation, in order
    operation_row: np.ndarray
    output_start: np.ndarray  # of forward nodes
    needed_start: np.ndarray  # of forward nodes: the outputs that must be read
    needed: np.ndarray
    masked: np.ndarray  # of forward nodes: whether a mask is read instead of the first time
    head_row: np.ndarray  # the outputs of the network that are operators'
    head_output: np.ndarray


def line_up(p: NodeVariants, operations: np.ndarray) -> np.ndarray:
    """Tell the variants of the nodes that run, in order, for the operations of a schedule."""
    return call("line_up", p, operations)


def connect(p: NodeVariants, line: np.ndarray) -> Rows:
    """Make the Rows of nodes of these variants; who reads a variable that is left out reads -1."""
    return Rows(*call("connect", p, line))


def lay_out(
    signatures: SignatureArrays, rows: Rows, head_row: np.ndarray, head_output: np.ndarray
) -> GraphArrays:
    """Make the GraphArrays of a training step with these outputs: ordered as MXNet orders it."""
    return GraphArrays(*call("lay_out", signatures, rows, head_row, head_output))
