"""Helpers of the tests: schedules of one, two and many levels, at random."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import numpy as np
from memonger.schedules.schedule import Schedule, Workload, plain, workload
from memonger.graph.training import training_graph

from planned import forward


def work_of(
    symbol: Any, shapes: Any, wanted: Iterable[str] | None = None, type_dict: Any = None
) -> Workload:
    """Return what there is to schedule, by default with gradients of the parameters."""
    graph = forward(symbol, shapes, type_dict)
    names = [node.name for node in graph.nodes]
    chosen = {names[a] for a in graph.arguments} - set(shapes) if wanted is None else set(wanted)
    return workload(training_graph(graph, [a for a in graph.arguments if names[a] in chosen]))


def nested(work: Workload, levels: int, seed: int, share: float = 0.5) -> Schedule:
    """Draw a schedule that recomputes recursively.

    The gradients are cut into stretches, more of them with more levels; at the start of each,
    results are dropped at random, and what a gradient misses is computed again.
    """
    random, count = np.random.RandomState(seed), len(work.gradients)
    cuts = {k for d in range(levels) for k in random.randint(0, max(1, count), 2**d).tolist()}
    return _dropping(
        work, lambda k: k in cuts and random.uniform(size=len(work.recomputable)) < share
    )


def everything(work: Workload) -> Schedule:
    """Return the schedule that keeps nothing: all that a gradient reads is computed anew for it."""
    return _dropping(work, lambda k: True)


def _dropping(work: Workload, dropped: Callable[[int], Any]) -> Schedule:
    """Let these results go before each gradient, if their operators may run again."""
    operations: list[int] = list(work.operators)
    gone, may = np.zeros((2, len(work.recomputable)), dtype=np.bool_)
    may[operations] = True
    may &= work.recomputable
    for k, x in enumerate(work.gradients):
        gone |= may & dropped(k)
        run_again(work, work.reads[x], gone, operations)
        operations.append(~x)
    return Schedule.of(operations)


def of_marks(work: Workload, mask: np.ndarray) -> Schedule:
    """Return the schedule that does as MXNet does with these operators (bool) marked.

    The gradient of a marked operator runs what it reads of what has not been computed again; that
    of a kept operator runs nothing.
    """
    order = list(work.operators)
    recomputed = np.asarray(mask, dtype=np.bool_) & work.recomputable
    missing = recomputed.copy()
    for x in work.gradients:
        if recomputed[x]:
            run_again(work, work.reads[x], missing, order)
        order.append(~x)
    return Schedule.of(order)


def run_again(work: Workload, wanted: Iterable[int], missing: np.ndarray, order: list[int]) -> None:
    """Append what must run to have some results; ``missing`` (bool, of each node) changes too."""
    stack, operators = list(wanted), []
    while stack:
        x = stack.pop()
        if missing[x]:
            missing[x] = False
            operators.append(x)
            stack += work.inputs[x]
    order += sorted(operators)


LEVELS: dict[str, Callable[[Workload, int], Schedule]] = {
    "plain": lambda work, seed: plain(work),
    "marks": lambda work, seed: of_marks(
        work, np.random.RandomState(seed).uniform(size=len(work.recomputable)) < 0.7
    ),
    "one level": lambda work, seed: nested(work, 1, seed, 0.9),
    "three levels": lambda work, seed: nested(work, 3, seed),
    "six levels": lambda work, seed: nested(work, 6, seed, 0.8),
    "everything": lambda work, seed: everything(work),
}
