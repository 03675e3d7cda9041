"""Keep every tensor of a plan of marks in the layout that it has without a plan.

A result that is recomputed does not stay in memory for its gradient. So an operator that ignores
layouts of MKLDNN may overwrite it in place, and its output is then blocked where it is row-major
without a plan (``costs.layouts``). The readers of the output round differently: outputs change in
the last bits, gradients by up to a percent.

This can happen in some networks, such as those with gates. For them the rule compares the layouts
of the planned step with those of the unplanned one. If an operator overwrites a tensor that the
unplanned step still needs, the rule keeps one operator whose gradient reads that tensor. Otherwise
it keeps the operators around a difference. Such networks get no saved identities.
"""

from __future__ import annotations

import numpy as np

from memonger.costs.layouts import (
    ANY_LAYOUT,
    NOT_IN_PLACE,
    PLAIN,
    LayoutArrays,
    UsualLayouts,
    find_usual_layouts,
)
from memonger.graph.operators.layouts import PRODUCES_BLOCKED
from memonger.graph.training import TrainingGraph
from memonger.support.kernels import compiled

#: The rule for networks in which no plan can change a layout that matters.
NO_RULE = UsualLayouts(
    LayoutArrays(*[np.zeros(0, k) for k in ("int8", "int64", "int64", *["bool"] * 3)]),
    *[np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.int32, np.bool_)],
)


def layout_rule(training: TrainingGraph) -> UsualLayouts:
    """Return the layouts that a plan must not change; `NO_RULE` if none can.

    They are the layouts without a plan, ANY_LAYOUT for a read whose layout does not matter.

    Parameters
    ----------
    training : TrainingGraph
        The training graph of a network.
    """
    if not any(node.op in PRODUCES_BLOCKED for node in training.graph.nodes):
        return NO_RULE
    t, usual = training.arrays, find_usual_layouts(training)
    if not _may_change(training, usual):
        return NO_RULE
    read, written = usual.read.copy(), usual.written.copy()
    place, matters = usual.place.copy(), usual.matters.copy()
    read[~usual.facts.shows] = ANY_LAYOUT
    reads, outputs = int(t.read_start[t.forward_nodes]), int(t.output_start[t.forward_nodes])
    for array, count in ((read, reads), (written, outputs), (place, outputs), (matters, outputs)):
        array[count : 2 * count] = array[:count]  # a copy must have the layouts of its node
    return UsualLayouts(usual.facts, written, read, place, matters)


def _may_change(training: TrainingGraph, usual: UsualLayouts) -> bool:
    """Return whether a layout that matters depends on which operators run in place."""
    t, step, layouts, matters = training.arrays, training.unmarked, usual.facts, usual.matters
    shown = np.bincount(step.entry[layouts.shows & (usual.read >= 0)], minlength=len(matters))
    for row in step.order.tolist():
        first, last = int(t.read_start[row]), int(t.read_start[row + 1])
        inputs = usual.read[first:last]
        if not inputs.any():
            continue
        if layouts.adding[row]:
            return True
        possible: dict[int, set[int]] = {}  # layouts of each output
        for q in range(int(t.inplace_start[row]), int(t.inplace_start[row + 1])):
            out, read = int(t.inplace_output[q]), int(t.inplace_read[q])
            j = read - first
            if row >= 2 * t.forward_nodes and t.read_row[read] >= 2 * t.forward_nodes:
                continue  # gradients read gradients in the same order under any plan
            code, number, plays = layouts.code[out], layouts.number[out], layouts.plays[first:last]
            results = possible.setdefault(out, set())
            results.add(compiled.find_layout(code, number, j, inputs[j], inputs, plays))
            if not t.inplace_identity[q]:
                apart = compiled.find_layout(code, number, NOT_IN_PLACE, PLAIN, inputs, plays)
                results.add(apart)
            elif int(inputs[j]) not in results and shown[step.entry[read]]:
                return True  # its other readers may find the layout of the output
        if any(len(results) > 1 and matters[out] for out, results in possible.items()):
            return True
    return False
