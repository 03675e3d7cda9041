"""The Pareto front of memory and time."""

from __future__ import annotations

from typing import Callable, Iterable, TypeVar

T = TypeVar("T")


def not_dominated(plans: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """The plans that no other beats in both costs (of equals one), the least first cost first."""
    front: list[T] = []
    for plan in sorted(plans, key=costs):
        if not front or costs(plan)[1] < costs(front[-1])[1]:
            front.append(plan)
    return front
