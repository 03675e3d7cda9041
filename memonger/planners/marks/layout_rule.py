"""The rule that a plan of marks leaves every tensor in the layout that it has without a plan.

A recomputed result is no longer held for its gradient. So an operator that knows no layouts of
MKLDNN writes over it in place, and leaves in blocks what is row-major without a plan
(``costs.layouts``). Its readers then round differently: outputs in the last bits, gradients by up
to a percent.

That can happen in some networks, such as those with gates. There the layouts of the planned step
are compared with those of the unplanned one. If an operator writes in place over what the unplanned
step still holds, one operator is kept whose gradient holds that. Otherwise what is around a
difference is kept. Such networks get no saved identities.
"""

from __future__ import annotations

import numpy as np

from memonger.costs.layouts import (
    ANY_LAYOUT,
    NOT_IN_PLACE,
    PLAIN,
    LayoutArrays,
    find_layouts,
    find_mattering,
)
from memonger.graph.arrays import Step
from memonger.graph.operators.layouts import PRODUCES_BLOCKED
from memonger.graph.training import TrainingGraph
from memonger.support.kernels import Struct, compiled
from memonger.support.types import Bools, Int64s


class LayoutRule(Struct):
    """The layouts of one training graph without a plan."""

    active: bool
    layouts: LayoutArrays


#: For networks of which no layout is to be watched.
NO_RULE = LayoutRule(
    False,
    LayoutArrays(*[np.zeros(0, dtype) for dtype in (np.int8, np.int64, *[np.bool_] * 3)]),
    *[np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.int32, np.bool_)],
)


def layout_rule(training: TrainingGraph) -> LayoutRule:
    """Make the rule for a network: that of no plan, if a plan can change a layout that matters."""
    if not any(node.op in PRODUCES_BLOCKED for node in training.graph.nodes):
        return NO_RULE
    t = training.arrays
    layouts = find_layouts(training)
    nothing = np.zeros(t.forward, dtype=np.bool_)
    step = compiled.find_step(t, nothing)
    output_layout, read_layout, place = compiled.follow_layouts(t, layouts, step)
    matters = find_mattering(training, layouts, step)
    if not _may_change(training, layouts, step, read_layout, matters):
        return NO_RULE
    wanted = np.where(layouts.shows, read_layout, ANY_LAYOUT)
    reads, outputs = int(t.read_start[t.forward]), int(t.output_start[t.forward])
    for array, count in (
        (wanted, reads),
        (output_layout, outputs),
        (place, outputs),
        (matters, outputs),
    ):
        array[count : 2 * count] = array[:count]  # a recomputed copy must be as its node
    return LayoutRule(True, layouts, wanted, output_layout, place, matters)


def _may_change(
    training: TrainingGraph,
    layouts: LayoutArrays,
    step: Step,
    read_layout: Int64s,
    matters: Bools,
) -> bool:
    """Return whether some layout that matters depends on what is in place."""
    t = training.arrays
    shown = np.bincount(step.entry[layouts.shows & (read_layout >= 0)], minlength=len(matters))
    for row in step.order.tolist():
        first, last = int(t.read_start[row]), int(t.read_start[row + 1])
        inputs = read_layout[first:last]
        if not inputs.any():
            continue
        if layouts.adding[row]:
            return True
        possible: dict[int, set[int]] = {}  # layouts of each output
        for q in range(int(t.inplace_start[row]), int(t.inplace_start[row + 1])):
            out, read = int(t.inplace_output[q]), int(t.inplace_read[q])
            j = read - first
            if row >= 2 * t.forward and t.read_row[read] >= 2 * t.forward:
                continue  # gradients read gradients in the same order under any plan
            code, number, plays = layouts.code[out], layouts.number[out], layouts.plays[first:last]
            results = possible.setdefault(out, set())
            results.add(compiled.find_layout(code, number, j, inputs[j], inputs, plays))
            if not t.inplace_identity[q]:
                apart = compiled.find_layout(code, number, NOT_IN_PLACE, PLAIN, inputs, plays)
                results.add(apart)
            elif int(inputs[j]) not in results and shown[step.entry[read]]:
                return True  # what other readers find depends on what is written over it
        if any(len(results) > 1 and matters[out] for out, results in possible.items()):
            return True
    return False
