"""Helpers of the tests: schedules of one, two and many levels, at random."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np
from memonger.schedules.schedule import Schedule, Workload, of_marks, plain, run_again, workload
from memonger.graph.training import training_graph

from planned import forward


def work_of(
    symbol: Any, shapes: Any, wanted: Iterable[str] | None = None, type_dict: Any = None
) -> Workload:
    """What there is to schedule, by default with gradients of the parameters."""
    graph = forward(symbol, shapes, type_dict)
    names = [node.name for node in graph.nodes]
    chosen = {names[a] for a in graph.arguments} - set(shapes) if wanted is None else set(wanted)
    return workload(training_graph(graph, [a for a in graph.arguments if names[a] in chosen]))


def nested(work: Workload, levels: int, seed: int, share: float = 0.5) -> Schedule:
    """A random schedule that recomputes recursively.

    The gradients are cut into stretches; at the start of each, results are dropped at random, and
    what a gradient misses is computed again. With more levels there are more and shorter stretches.
    """
    random = np.random.RandomState(seed)
    events: list[int] = list(work.operators)
    gone = np.zeros(len(work.once), dtype=np.bool_)
    cuts = {k: depth for depth in range(levels) for k in _cuts(len(work.gradients), depth, random)}
    for k, x in enumerate(work.gradients):
        if k in cuts:
            drop(work, gone, random.uniform(size=len(gone)) < share)
        run_again(work, work.reads[x], gone, events)
        events.append(~x)
    return Schedule.of(events)


def drop(work: Workload, gone: np.ndarray, chosen: np.ndarray) -> None:
    """Let these results go, of operators that may run again."""
    may = np.zeros(len(gone), dtype=np.bool_)
    may[list(work.operators)] = True
    gone |= chosen & may & ~work.once


def everything(work: Workload) -> Schedule:
    """The schedule that keeps nothing: all that a gradient reads is computed anew for it."""
    events: list[int] = list(work.operators)
    for x in work.gradients:
        gone = np.zeros(len(work.once), dtype=np.bool_)
        drop(work, gone, np.ones(len(gone), dtype=np.bool_))
        run_again(work, work.reads[x], gone, events)
        events.append(~x)
    return Schedule.of(events)


LEVELS: dict[str, Callable[[Workload, int], Schedule]] = {
    "plain": lambda work, seed: plain(work),
    "marks": lambda work, seed: of_marks(work, _drawn(work, seed, 0.7)),
    "one level": lambda work, seed: nested(work, 1, seed, 0.9),
    "three levels": lambda work, seed: nested(work, 3, seed),
    "six levels": lambda work, seed: nested(work, 6, seed, 0.8),
    "everything": lambda work, seed: everything(work),
}


def schedules(work: Workload, seed: int = 0) -> Sequence[Schedule]:
    """Schedules without recomputation, and of one, two and many levels."""
    small = len(work.operators) < 60
    return [make(work, seed) for name, make in LEVELS.items() if small or name != "everything"]


def _drawn(work: Workload, seed: int, share: float) -> np.ndarray:
    return np.random.RandomState(seed).uniform(size=len(work.once)) < share


def _cuts(count: int, depth: int, random: Any) -> Iterable[int]:
    return random.randint(0, max(1, count), 2**depth).tolist()
