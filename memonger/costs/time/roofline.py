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
    """What a device can do.

    Attributes
    ----------
    flops : float
        Floating point operations a second, in a large matrix product.
    nbytes : float
        Bytes read and written a second, in a large sum of two arrays.
    call : float
        Seconds that an operator takes that does nothing.
    """

    flops: float
    nbytes: float
    call: float


class Pace(NamedTuple):
    """How many times as long as by the roofline the operators of a class take."""

    forward: float
    gradient: float


class Times(NamedTuple):
    """Seconds that the rows of a training graph take.

    Attributes
    ----------
    forward : np.ndarray, n
        Of each forward node; it takes as long again when it is recomputed.
    gradient : np.ndarray, n
        Of the gradient of each, as far as it is computed.
    step : float
        Of a training step without a plan.
    """

    forward: np.ndarray
    gradient: np.ndarray
    step: float


def predicted(
    training: TrainingGraph, rates: Rates, paces: Mapping[int, Pace] | None = None
) -> Times:
    """Predict the times of a training step.

    The gradient of an operator has its FLOPs for each of the inputs that it has a gradient for, two
    at the most. What its nodes read and write is moved; what only changes a shape moves nothing.

    Parameters
    ----------
    training : TrainingGraph
    rates : Rates
    paces : dict of Pace, optional
        Of forward nodes: how much longer they take.
    """
    t, n = training.tables, training.tables.forward
    rows = np.maximum(row_flops(training) / rates.flops, moved_bytes(training) / rates.nbytes)
    rows += rates.call
    longer = np.ones((n + 1, 2))  # the last is that of rows without an owner
    for i, pace in (paces or {}).items():
        longer[i] = pace
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
    owned = np.flatnonzero(owners >= 0)
    of = owners[owned]
    rows = np.bincount(of, minlength=n)  # of each operator's gradient
    inputs = np.array([min(2, max(1, len(facts.passes))) for facts in training.facts])
    gradients = np.zeros(len(owners))
    gradients[owned] = forward[of] * inputs[of] / rows[of]
    return np.concatenate([forward, forward, gradients])


def moved_bytes(training: TrainingGraph) -> np.ndarray:
    """Count the bytes that each row of a training graph reads and writes; each tensor once."""
    t, rows = training.tables, len(training.ops)
    sizes = (t.elements * t.itemsize).astype(np.float64)
    reader = np.repeat(np.arange(rows), np.diff(t.read_start))
    read = t.output_start[t.read_row].astype(np.int64) + t.read_output
    counted = ~t.read_ignored
    pairs = np.unique(np.stack([reader[counted], read[counted]], axis=1), axis=0)
    moved = np.bincount(pairs[:, 0], sizes[pairs[:, 1]], minlength=rows)
    moved += np.bincount(np.repeat(np.arange(rows), np.diff(t.output_start)), sizes, minlength=rows)
    moved[t.variable] = 0
    return moved


def views(training: TrainingGraph) -> np.ndarray:
    """Tell which rows take no time: variables, and what may hand on its input as it is.

    And ``_grad_add``: the gradient before it is added in place
    (``src/executor/inplace_addto_detect_pass.cc``).
    """
    t = training.tables
    free = t.variable | (np.array(training.ops) == "_grad_add")
    row = np.repeat(np.arange(len(free)), np.diff(t.inplace_start))
    free[row[t.inplace_identity]] = True
    return free
