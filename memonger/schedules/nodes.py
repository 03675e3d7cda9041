"""The rows of a schedule's training step, built in compiled code: one for each operator that runs.

They stand in the order in which they run, which is the schedule's. A search builds thousands of
them, so there is no Python object for a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.support.kernels import call


class Rows(NamedTuple):
    """The nodes of a training step, each after all that it reads; starts as in `GraphArrays`."""

    signature: np.ndarray  # the place in `Parts.signatures`
    source: np.ndarray  # the row of the network's TrainingGraph whose place it takes; -1 for none
    time: np.ndarray  # how often the operator has run before; -1 for what is no forward node
    read_start: np.ndarray
    read_row: np.ndarray
    read_output: np.ndarray
    first: np.ndarray  # of each variant the first node that took its place, and the last; or -1
    latest: np.ndarray


class NodeVariants(NamedTuple):
    """What the nodes of a network's training steps can be (node variants), whatever the schedule.

    The first variants are the rows of the TrainingGraph: forward nodes, copies (not used here),
    gradients. Then come scratch states, and the forward nodes when they run again (a Dropout is
    then a product with its mask, and states are scratch).
    """

    #: As nodes. An edge v >= 0 refers to the latest run of variant v, an edge ~v (negative) to its
    #: first run.
    rows: Rows
    forward: int  # forward nodes
    again: int  # how much larger the variant of a forward node is when it runs again
    variable: np.ndarray  # the variants of variables
    operation_start: np.ndarray  # of forward nodes: the gradients of their operation, in order
    operation_row: np.ndarray
    head_row: np.ndarray  # the outputs of the network that are operators'
    head_output: np.ndarray


def line_up(p: NodeVariants, operations: np.ndarray) -> np.ndarray:
    """List the variants of the nodes that run, in order: all variables, then the schedule's."""
    return call("line_up", p, operations)


def connect(p: NodeVariants, line: np.ndarray) -> Rows:
    """Make the Rows of nodes of these variants; who reads a variable that is left out reads -1."""
    return Rows(*call("connect", p, line))
