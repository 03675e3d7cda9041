"""The original planner: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

Algorithm 3 of the paper (arXiv 1604.06174) as https://github.com/dmlc/mxnet-memonger implements it.
It walks the network once and adds up the bytes of results. At each hint of the user it saves the
result if the bytes since the last saved one exceed a threshold; everything else is recomputed. It
searches the threshold: three guesses, each the square root that balances the saved and the local
memory of the last, and a grid between them. The trials and the thresholds are exactly those of the
original. As there, an element counts 4 bytes, parameters are found by the endings of their names,
and labels and auxiliary states count as results.
"""

from __future__ import annotations

import math
from typing import Iterator, Mapping, NamedTuple

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
    save_size: int  # bytes that are saved
    max_size: int  # bytes of the largest segment between two saved results


class Results(NamedTuple):
    """The results of a network, as the original planner sees them."""

    recomputable: Bools  # (nodes,): whether a node has a result that may be recomputed
    #: Of each result with a hint its node, its bytes, those of all results up to it, and the hint.
    hinted: list[tuple[int, int, int, str]]


def list_results(graph: ForwardGraph, hints: Mapping[int, str]) -> Results:
    """List the results of a network.

    Parameters
    ----------
    graph : ForwardGraph
        The network.
    hints : mapping
        Node -> its ``mirror_stage``: 'True' for a cut at this node alone, any other label for one
        cut at all neighbouring nodes of that label.

    Returns
    -------
    Results
    """
    results, total = Results(np.zeros(len(graph.nodes), dtype=np.bool_), []), 0
    for i, node in enumerate(graph.nodes):
        for name, tensor in zip(graph.output_names[i], graph.tensors[i]):
            if name != "data" and name.endswith(PARAMETER_ENDINGS):
                continue
            size = 4 * tensor.elements
            total += size
            results.recomputable[i] = not node.is_variable and node.op not in UNTOUCHED
            if i in hints:
                results.hinted.append((i, size, total, hints[i]))
    return results


def mirror_plan(results: Results, threshold: int) -> Trial:
    """Save each result with a hint if more than ``threshold`` MB have accumulated before it.

    Parameters
    ----------
    results : Results
        The results of the network.
    threshold : int
        MiB.

    Returns
    -------
    Trial
    """
    mask, start, save_size, max_size = results.recomputable.copy(), 0, 0, 0
    last_stage, is_saved = "", False
    for i, size, total, hint in results.hinted:
        mask[i] = results.recomputable[i]
        if hint == "True" or hint != last_stage:
            is_saved = total - start > threshold * MB
            if is_saved:
                save_size += size
                max_size = max(max_size, total - start)
                start = total
                mask[i] = False
            last_stage = hint
        elif is_saved:
            save_size += size
            mask[i] = False
    return Trial(threshold, mask, save_size, max_size)


def search(graph: ForwardGraph, hints: Mapping[int, str], ntrial: int = 6) -> Iterator[Trial]:
    """Search over thresholds as the original does, which takes the first trial of least memory.

    Parameters
    ----------
    graph : ForwardGraph
        The network.
    hints : mapping
        Node -> its ``mirror_stage``.
    ntrial : int
        The number of thresholds in the grid.

    Yields
    ------
    Trial
    """
    results, guess, local_sizes = list_results(graph, hints), 0, []
    for _ in range(3):
        trial = mirror_plan(results, guess)
        yield trial
        local_sizes.append(trial.max_size // MB)
        guess = int(math.sqrt((trial.save_size // MB) * local_sizes[-1] / 2))
    smallest = min(local_sizes)
    step = int((guess * math.sqrt(2) - smallest) / ntrial)
    if step > 0:
        for k in range(1, ntrial + 1):
            yield mirror_plan(results, smallest + k * step)
