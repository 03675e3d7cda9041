"""The Pareto front of memory and time."""

from __future__ import annotations

from typing import Callable, Iterable, TypeVar

T = TypeVar("T")


def not_dominated(plans: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Take the plans that no other beats in both costs, those of least first cost first.

    Parameters
    ----------
    plans : iterable
    costs : callable
        From a plan to what is to be little of it, such as (seconds, bytes). Of equals the first is
        taken.
    """
    front: list[T] = []
    least = float("inf")
    for plan in sorted(plans, key=costs):
        if costs(plan)[1] < least:
            least = costs(plan)[1]
            front.append(plan)
    return front
