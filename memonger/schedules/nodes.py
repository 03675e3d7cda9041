"""The rows of a schedule's training step, built in compiled code: one for each operator that runs.

They stand in the order in which they run, which is the schedule's. A search builds thousands of
steps, so there is no Python object for a row.
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
