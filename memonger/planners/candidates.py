"""What searches find: plans and what they cost, and the Pareto front of memory and time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Hashable, Iterable, Mapping, NamedTuple, Sequence, TypeVar

import numpy as np

from memonger.graph.forward import KeptCopy
from memonger.schedules.schedule import Schedule

T = TypeVar("T")


class MarkPlan(NamedTuple):
    """What marks are set on: the recomputed nodes, and saved identities."""

    mask: np.ndarray  # bool, of each node
    copies: tuple[KeptCopy, ...] = ()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a search has found, and what it costs.

    ``plan`` is a `MarkPlan` or a `Schedule`; within a search, the state or the tree that stands
    for one.
    """

    pool_bytes: int  # as the search counts them
    time: float  # that it adds to a step, or all its work; the unit is the search's
    plan: Any
    origin: str = ""  # what has found it
    added_time: float | None = None  # as a share of a step without a plan

    @property
    def schedule(self) -> Schedule | None:
        return self.plan if isinstance(self.plan, Schedule) else None

    @property
    def copies(self) -> tuple[KeptCopy, ...]:
        return self.plan.copies if isinstance(self.plan, MarkPlan) else ()

    @property
    def recomputes(self) -> bool:
        """Whether anything runs again."""
        return bool(self.recomputed().any())

    def recomputed(self, nodes: int = 0) -> np.ndarray:
        """Tell how often each of so many nodes runs again, int; of marks whether it does, bool."""
        schedule = self.schedule
        return self.plan.mask if schedule is None else schedule.recomputed(nodes)

    @property
    def key(self) -> Hashable:
        """What it is, whatever it costs."""
        schedule = self.schedule
        if schedule is not None:
            return schedule.operations.tobytes()
        return self.plan.mask.tobytes(), self.plan.copies


@dataclass(frozen=True, eq=False)
class Searched:
    """What a search has found: of two plans the faster first, or of the smallest the smaller."""

    plans: Sequence[Candidate]
    interrupted: bool  # by the user
    costs: Mapping[str, int] = field(default_factory=dict)  # of what was compared, as MXNet counts
    unfused: int | None = None  # the least bytes without pointwise fusion, where that is on


def by_memory(candidate: Candidate) -> tuple[float, float]:
    """Return what candidates are compared by for the least memory."""
    return candidate.pool_bytes, candidate.time


def by_time(candidate: Candidate) -> tuple[float, float]:
    """Return what candidates are compared by for the least time."""
    return candidate.time, candidate.pool_bytes


def not_dominated(plans: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the plans that no other beats in both costs (of equals one), the least first first."""
    front: list[T] = []
    for plan in sorted(plans, key=costs):
        if not front or costs(plan)[1] < costs(front[-1])[1]:
            front.append(plan)
    return front
