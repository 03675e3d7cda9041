"""Simulated annealing (Kirkpatrick et al. 1983, "Optimization by Simulated Annealing")."""

from __future__ import annotations

import numpy as np

from memonger.support.compiled import compiled

MORE = 0.3  # the probability of one more change in a step


@compiled
def acceptable(current, hot, cold, done, draw):  # type: ignore[no-untyped-def]
    """The most that the next state may cost, for a random number from 0 to 1 (Metropolis).

    The temperature falls from ``hot`` to ``cold``; ``done`` is the part of the tries that is over.
    """
    return current - hot * (cold / hot) ** done * np.log(1 - draw)
