"""Plan the pool of a training step as MXNet's executor does, without a bind.

Rows run depth first from the outputs of the network and then from the gradients
(``nnvm::DFSVisit``). ``MXAllocMemory`` in ``src/nnvm/plan_memory.cc`` plans their memory by
reference counts, in-place options, and a free list of whole blocks. A block serves any size within
a factor of ``NNVM_EXEC_MATCH_RANGE`` (16), grows to its largest tensor and is never split. The
planner counts 4 bytes for every element, but MXNet allocates the elements' real size
(``InitDataEntryMemory`` in ``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

import math

import numpy as np

from memonger.costs.held import NOTHING, Held
from memonger.costs.usage import Usage
from memonger.graph.forward import RowEntry
from memonger.graph.training import TrainingGraph
from memonger.support.errors import MB
from memonger.support.kernels import compiled
from memonger.support.types import Bools


def pool(training: TrainingGraph, recomputed: Bools, held: Held = NOTHING) -> Usage:
    """Return the memory of a training step with marks, without pointwise fusion.

    Parameters
    ----------
    training : TrainingGraph
        The training graph.
    recomputed : array of bool, (forward nodes,)
        Which nodes are marked.
    held : Held
        What the operators hold beside the pool.

    Returns
    -------
    Usage
        Exact, unless ``training.inexact`` says why not.
    """
    t = training.arrays
    step = compiled.find_step(t, np.ascontiguousarray(recomputed, dtype=np.bool_))
    ranges = np.array(training.settings.match_ranges)
    nbytes, planned = compiled.allocate_least(t, step, ranges, math.inf)
    block = compiled.add_in_place(t, step, training.adds_gradients, planned)
    used = block >= 0
    real = np.zeros(block.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(real, block[used], (t.elements * t.itemsize)[used])
    return Usage(
        step=training,
        ran=step,
        planned=planned,
        block=block,
        pooled=np.ones(len(real), dtype=np.bool_),
        allocated=(real + 3) // 4 * 4,  # the arrays of the pool are of float32
        planned_bytes=nbytes,
        bound=nbytes // MB,
        inexact=training.inexact,
        held=held,
    )


def find_added_in_place(training: TrainingGraph) -> dict[RowEntry, int]:
    """Find the terms of gradients that MXNet's executor adds to a sum in place, without a plan.

    Returns the row that would add each term.
    """
    t, adding = training.arrays, np.flatnonzero(training.adds_gradients)
    if not len(adding):
        return {}
    step, ranges = training.unmarked, np.array(training.settings.match_ranges)
    _, planned = compiled.allocate_least(t, step, ranges, math.inf)
    moved = planned != compiled.add_in_place(t, step, training.adds_gradients, planned)
    row_of = {}
    for row in adding.tolist():
        j = int(t.read_start[row]) + 1
        term, k = int(t.read_row[j]), int(t.read_output[j])
        if moved[t.output_start[term] + k]:
            row_of[term, k] = row
    return row_of
