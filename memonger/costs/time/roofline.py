"""Predict how long the operators of a training step take, from their FLOPs and bytes.

The model is the roofline (Williams et al. 2009, "Roofline: an insightful visual performance
model"): an operator takes the time of its arithmetic or of its memory traffic, whichever is longer,
plus the time of a call. On a CPU there is a factor for each class of operators, because kernels
differ in efficiency. Nothing runs, so a prediction is the same in every process and on every
machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.costs.time.cpu import CPU_RATES, NOMINAL_CPU, find_factors
from memonger.costs.time.gpus import GPUS
from memonger.graph.arrays import BACKWARD, find_owners
from memonger.graph.training import TrainingGraph
from memonger.support.types import Bools, Doubles


class Times(NamedTuple):
    """The times of a training step."""

    forward_seconds: Doubles  # (nodes,): of each forward node, each time it runs
    gradient_seconds: Doubles  # (nodes,): of the gradient of each; 0 if it is not computed
    step_seconds: float  # of a training step without a plan


def predict_times(training: TrainingGraph, device: str) -> Times:
    """Predict the times of a training step on a device: a name in `GPUS`, or `NOMINAL_CPU`."""
    t, n = training.arrays, training.arrays.forward_nodes
    rates = CPU_RATES if device == NOMINAL_CPU else GPUS[device]
    arithmetic, moving = count_row_flops(training) / rates.flops, count_moved_bytes(training)
    seconds = np.maximum(arithmetic, moving / rates.nbytes)
    if device == NOMINAL_CPU:
        factors = np.vstack([find_factors(training.graph), [1, 1]])  # the last for rows without one
        seconds *= factors[training.origin, (training.phases == BACKWARD).astype(int)]
    seconds += rates.call
    seconds[find_free_rows(training)] = 0
    gradients = np.unique(t.walk_row[t.walk_row >= 2 * n])
    owned = gradients[training.origin[gradients] >= 0]
    gradient = np.bincount(training.origin[owned], seconds[owned], minlength=n)
    step = float(seconds[t.first].sum() + seconds[gradients].sum())
    return Times(seconds[n : 2 * n].copy(), gradient.astype(np.float64), step)


def count_row_flops(training: TrainingGraph) -> Doubles:
    """Count the FLOPs of each row.

    A gradient counts as its operator for each input that has a gradient, but at most twice.
    """
    owner = training.origin[training.phases == BACKWARD]
    flops = training.graph.flops.astype(np.float64)
    inputs = [min(2, max(1, len(facts.passes))) for facts in training.facts]
    rows = np.bincount(owner[owner >= 0], minlength=len(flops))  # gradient rows of each operator
    share = flops * inputs / np.maximum(rows, 1)
    return np.concatenate([flops, flops, np.where(owner >= 0, share[owner], 0)])


def count_moved_bytes(training: TrainingGraph) -> Doubles:
    """Count the bytes that each row of a training graph reads and writes, each tensor once."""
    t, rows = training.arrays, len(training.ops)
    sizes = (t.elements * t.itemsize).astype(np.float64)
    pairs = np.stack([find_owners(t.read_start), t.read_entry], axis=1)
    reader, entry = np.unique(pairs[~t.read_ignored], axis=0).T
    written = np.bincount(find_owners(t.output_start), sizes, rows)
    moved = np.bincount(reader, sizes[entry], rows) + written
    return np.where(t.variable, 0.0, moved)


def find_free_rows(training: TrainingGraph) -> Bools:
    """Find the rows that take no time: variables, and operators that may pass on their input."""
    t = training.arrays
    # The row that computes a term adds it in place (src/executor/inplace_addto_detect_pass.cc).
    free = t.variable | (np.array(training.ops) == "_grad_add")
    free[find_owners(t.inplace_start)[t.inplace_identity]] = True
    return free
