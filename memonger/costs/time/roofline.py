"""The time of a training step by a roofline: from FLOPs and bytes, operator by operator.

An operator takes as long as its arithmetic or as moving what it reads and writes, whichever takes
longer, and the time of a call besides (Williams et al. 2009, "Roofline: an insightful visual
performance model").
"""

from __future__ import annotations

from typing import Mapping, NamedTuple

import numpy as np

from memonger.costs.time.flops import forward_flops
from memonger.graph.training import TrainingGraph


class Rates(NamedTuple):
    """What a device can do."""

    flops: float  # floating point operations a second, in a large matrix product
    nbytes: float  # bytes read and written a second, in a large sum of two arrays
    call: float  # seconds that an operator takes that does nothing


class EfficiencyFactor(NamedTuple):
    """How many times as long as by the roofline the operators of a class take."""

    forward: float
    gradient: float


class Times(NamedTuple):
    """Seconds that the rows of a training graph take."""

    forward: np.ndarray  # of each forward node; it takes as long again when it is recomputed
    gradient: np.ndarray  # of the gradient of each, as far as it is computed
    step: float  # of a training step without a plan


def predicted(
    training: TrainingGraph, rates: Rates, factors: Mapping[int, EfficiencyFactor] | None = None
) -> Times:
    """Predict the times of a training step; ``factors`` are of forward nodes.

    The gradient of an operator has its FLOPs for each of the inputs that it has a gradient for, two
    at the most. What its nodes read and write is moved; what only changes a shape moves nothing.
    """
    t, n = training.tables, training.tables.forward
    rows = np.maximum(row_flops(training) / rates.flops, moved_bytes(training) / rates.nbytes)
    rows += rates.call
    longer = np.ones((n + 1, 2))  # the last is that of rows without an owner
    for i, factor in (factors or {}).items():
        longer[i] = factor
    rows *= np.concatenate([longer[:n, 0], longer[:n, 0], longer[training.owners, 1]])
    rows[views(training)] = 0
    run = np.unique(t.walk_row[t.walk_row >= 2 * n])
    owned = run[training.owners[run - 2 * n] >= 0]
    gradient = np.bincount(training.owners[owned - 2 * n], rows[owned], minlength=n)
    step = float(rows[t.first].sum() + rows[run].sum())
    return Times(rows[n : 2 * n].copy(), gradient, step)


def row_flops(training: TrainingGraph) -> np.ndarray:
    """Count the FLOPs of each row of a training graph."""
    n, owners = training.tables.forward, training.owners
    forward = forward_flops(training.graph).astype(np.float64)
    inputs = [min(2, max(1, len(facts.passes))) for facts in training.facts]
    rows = np.bincount(owners[owners >= 0], minlength=n)  # of each operator's gradient
    each = forward * inputs / np.maximum(rows, 1)
    return np.concatenate([forward, forward, np.where(owners >= 0, each[owners], 0)])


def moved_bytes(training: TrainingGraph) -> np.ndarray:
    """Count the bytes that each row of a training graph reads and writes; each tensor once."""
    t, rows = training.tables, np.arange(len(training.ops))
    sizes = (t.elements * t.itemsize).astype(np.float64)
    reader, maker = np.repeat(rows, np.diff(t.read_start)), np.repeat(rows, np.diff(t.output_start))
    pairs = np.stack([reader, t.output_start[t.read_row] + t.read_output], axis=1)
    reader, read = np.unique(pairs[~t.read_ignored], axis=0).T
    moved = np.bincount(reader, sizes[read], len(rows)) + np.bincount(maker, sizes, len(rows))
    moved[t.variable] = 0
    return moved


def views(training: TrainingGraph) -> np.ndarray:
    """Tell which rows take no time: variables, and what may hand on its input as it is."""
    t = training.tables
    # What makes a gradient adds it in place (src/executor/inplace_addto_detect_pass.cc).
    free = t.variable | (np.array(training.ops) == "_grad_add")
    row = np.repeat(np.arange(len(free)), np.diff(t.inplace_start))
    free[row[t.inplace_identity]] = True
    return free
