"""The rows of a schedule's training step, built in compiled code: one for each operator that runs.

They stand in the order in which they run, which is the schedule's. A search builds thousands of
them, so there is no Python object for a row.
"""

from __future__ import annotations

from memonger.support.kernels import Struct


class Rows(Struct):
    """The nodes of a training step, each after all that it reads."""


class NodeVariants(Struct):
    """What the nodes of a network's training steps can be, whatever the schedule."""

    rows: Rows
    forward: int
    again: int
