"""The original planner: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

Algorithm 3 of the paper (arXiv 1604.06174) as dmlc/mxnet-memonger carries it out. It walks the
network once and adds up the bytes of results. At each hint of the user it keeps the result if those
since the last kept one exceed a threshold; everything else is recomputed. It searches the
threshold: three guesses, each the square root that balances the kept and the local memory of the
last, and a grid between them. Written anew after https://github.com/dmlc/mxnet-memonger, trial for
trial and threshold for threshold, its habits included: sizes count 4 bytes an element, names end as
those of parameters do, labels and auxiliary states count as results.
"""

from __future__ import annotations

import math
from typing import Callable, Mapping, NamedTuple

import numpy as np

from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import PARAMETER_ENDINGS
from memonger.graph.operators.recompute import UNTOUCHED
from memonger.support.errors import MB
from memonger.support.types import Bools


class Trial(NamedTuple):
    """One threshold (MB) of the search, and its plan."""

    threshold: int
    mask: Bools  # the recomputed nodes
    save_size: int  # bytes that are kept
    max_size: int  # bytes of the largest block between
    cost: int = 0  # of the mask, in the unit of `search`


def mirror_plan(graph: ForwardGraph, hints: Mapping[int, str], threshold: int) -> Trial:
    """Keep each result with a hint where more than ``threshold`` MB have gathered.

    The ``mirror_stage`` of a node is 'True' for a cut of its own, any other label for a cut that
    all nodes of that label make together.
    """
    mask = np.zeros(len(graph.nodes), dtype=np.bool_)
    local_size = save_size = max_size = 0
    last_stage, kept = "", False
    for i, node in enumerate(graph.nodes):
        for name, tensor in zip(graph.output_names[i], graph.tensors[i]):
            if name != "data" and name.endswith(PARAMETER_ENDINGS):
                continue
            size = 4 * tensor.elements
            local_size += size
            mask[i] = not node.is_variable and node.op not in UNTOUCHED
            hint = hints.get(i)
            if hint is None:
                continue
            if hint == "True" or hint != last_stage:
                kept = local_size > threshold * MB
                if kept:
                    save_size += size
                    max_size = max(max_size, local_size)
                    local_size = 0
                    mask[i] = False
                last_stage = hint
            elif kept:
                save_size += size
                mask[i] = False
    return Trial(threshold, mask, save_size, max_size)


def search(
    graph: ForwardGraph,
    hints: Mapping[int, str],
    cost: Callable[[Bools], int],
    ntrial: int = 6,
) -> list[Trial]:
    """Search over thresholds as the original does, ``ntrial`` of them in its grid.

    Returns every trial in order. ``cost`` returns what a mask of recomputed nodes costs; the
    original's unit is the whole MB.
    """
    trials: list[Trial] = []

    def attempt(threshold: int) -> Trial:
        trial = mirror_plan(graph, hints, threshold)
        trials.append(trial._replace(cost=cost(trial.mask)))
        return trial

    guess, local_sizes = 0, []
    for _ in range(3):
        trial = attempt(guess)
        local_sizes.append(trial.max_size // MB)
        guess = int(math.sqrt((trial.save_size // MB) * local_sizes[-1] / 2))
    smallest = min(local_sizes)
    step = int((guess * math.sqrt(2) - smallest) / ntrial)
    if step > 0:
        for k in range(1, ntrial + 1):
            attempt(smallest + k * step)
    return trials
