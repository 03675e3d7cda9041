"""Predict how long the operators of a training step take, from their FLOPs and bytes.

By a roofline (Williams et al. 2009, "Roofline: an insightful visual performance model"): an
operator takes as long as its arithmetic or as moving what it reads and writes, whichever takes
longer, and the time of a call besides. How near an operator comes to it is a matter of its kernel:
for a CPU there is a factor for each class of operators. Nothing runs, so that a prediction is the
same in every process and on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memonger.costs.time.cpu import CPU_RATES, NOMINAL_CPU, find_factors
from memonger.costs.time.flops import count_forward_flops
from memonger.costs.time.gpus import GPUS
from memonger.graph.arrays import BACKWARD, find_owners
from memonger.graph.training import TrainingGraph
from memonger.support.types import Bools, Doubles


class Times(NamedTuple):
    """Seconds that the rows of a training graph take."""

    forward: Doubles  # of each forward node, whenever it runs
    gradient: Doubles  # of the gradient of each forward node, as far as it is computed
    step: float  # of a training step without a plan


def predict_times(training: TrainingGraph, device: str) -> Times:
    """Predict the times of a training step on one of `GPUS`, by its name, or `NOMINAL_CPU`."""
    t, n = training.arrays, training.arrays.forward
    rates = CPU_RATES if device == NOMINAL_CPU else GPUS[device]
    arithmetic, moving = count_row_flops(training) / rates.flops, count_moved_bytes(training)
    seconds = np.maximum(arithmetic, moving / rates.nbytes)
    if device == NOMINAL_CPU:
        factors = np.vstack([find_factors(training.graph), [1, 1]])  # the last: of no operator
        seconds *= factors[training.origin, (training.phases == BACKWARD).astype(int)]
    seconds += rates.call
    seconds[find_free_rows(training)] = 0
    gradients = np.unique(t.walk_row[t.walk_row >= 2 * n])
    owned = gradients[training.origin[gradients] >= 0]
    gradient = np.bincount(training.origin[owned], seconds[owned], minlength=n)
    step = float(seconds[t.first].sum() + seconds[gradients].sum())
    return Times(seconds[n : 2 * n].copy(), gradient.astype(np.float64), step)


def count_row_flops(training: TrainingGraph) -> Doubles:
    """Count the FLOPs of each row; a gradient has its operator's for each input, twice at most."""
    owner = training.origin[training.phases == BACKWARD]
    forward = count_forward_flops(training.graph).astype(np.float64)
    inputs = [min(2, max(1, len(facts.passes))) for facts in training.facts]
    rows = np.bincount(owner[owner >= 0], minlength=len(forward))  # of each operator's gradient
    share = forward * inputs / np.maximum(rows, 1)
    return np.concatenate([forward, forward, np.where(owner >= 0, share[owner], 0)])


def count_moved_bytes(training: TrainingGraph) -> Doubles:
    """Count the bytes that each row of a training graph reads and writes; each tensor once."""
    t, rows = training.arrays, len(training.ops)
    sizes = (t.elements * t.itemsize).astype(np.float64)
    pairs = np.stack([find_owners(t.read_start), t.read_entry], axis=1)
    reader, entry = np.unique(pairs[~t.read_ignored], axis=0).T
    written = np.bincount(find_owners(t.output_start), sizes, rows)
    moved = np.bincount(reader, sizes[entry], rows) + written
    return np.where(t.variable, 0.0, moved)


def find_free_rows(training: TrainingGraph) -> Bools:
    """Find the rows that take no time: variables, and what may hand on its input."""
    t = training.arrays
    # What makes a gradient adds it in place (src/executor/inplace_addto_detect_pass.cc).
    free = t.variable | (np.array(training.ops) == "_grad_add")
    free[find_owners(t.inplace_start)[t.inplace_identity]] = True
    return free
