"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

import random
from typing import Callable, Iterator, TypeVar

import numpy as np

from memonger.support.compiled import compiled

S = TypeVar("S")

MORE = 0.3  # the probability of one more change in a step


@compiled
def acceptable(current, hot, cold, done, draw):  # type: ignore[no-untyped-def]
    """The most that the next state may cost, for a random number from 0 to 1 (Metropolis).

    The temperature falls from ``hot`` to ``cold``; ``done`` is the part of the tries that is over.
    """
    return current - hot * (cold / hot) ** done * np.log(1 - draw)


def anneal(
    state: S,
    objective: float,
    move: Callable[[S, Callable[[], float]], S],
    evaluate: Callable[[S, float], float | None],
    *,
    tries: int,
    temperatures: tuple[float, float],
    seed: int,
) -> Iterator[S]:
    """Change a state at random, again and again, and keep changes for the worse less and less.

    ``state`` costs ``objective``. ``move`` takes a state and a source of random numbers from 0 to
    1, and gives the same object where the change that was drawn cannot be made. ``evaluate`` tells
    what a state costs, None if that is more than a number. The ``temperatures`` at the beginning
    and at the end are shares of the least cost so far. It yields the state after each try; the same
    seed gives the same states in every version of Python.
    """
    draw = random.Random(seed).random
    hot, cold = temperatures
    current = least = objective
    for k in range(tries):
        new = move(state, draw)
        while draw() < MORE:
            new = move(new, draw)
        if new is not state:
            most = acceptable(float(current), hot * least, cold * least, k / tries, draw())
            cost = evaluate(new, most)
            if cost is not None:
                state, current = new, cost
                least = min(least, cost)
        yield state
