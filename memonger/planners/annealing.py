"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

import math
import random
from typing import Callable, Iterator, TypeVar

S = TypeVar("S")

MORE = 0.3  # the probability of one more change in a step


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
            heat = hot * (cold / hot) ** (k / tries) * least
            cost = evaluate(new, current - heat * math.log(1 - draw()))  # Metropolis
            if cost is not None:
                state, current = new, cost
                least = min(least, cost)
        yield state
