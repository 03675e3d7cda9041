"""Candidates: plans that searches find, what they cost, and the Pareto front of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    NamedTuple,
    Sequence,
    TypeVar,
)

from memonger.graph.forward import SavedIdentity
from memonger.schedules.schedule import Schedule
from memonger.support.types import Bools, Int64s

T = TypeVar("T")


class MarkPlan(NamedTuple):
    """A plan by marks: the nodes that are recomputed, and saved identities."""

    mask: Bools  # whether each node is recomputed
    identities: tuple[SavedIdentity, ...] = ()


@dataclass(frozen=True, eq=False)
class Candidate:  # type: ignore[misc]  # of ``plan``
    """A plan that a search has found, and what it costs."""

    pool_bytes: int  # as the search counts them
    time: float  # that it adds to a step, or all its work; the unit is the search's
    #: A `MarkPlan` or a `Schedule`; within a search, the state or the tree of one.
    plan: Any  # type: ignore[misc]
    origin: str = ""  # the name of the search that found it
    added_time: float | None = None  # as a share of a step without a plan

    @property
    def schedule(self) -> Schedule | None:
        return self.plan if isinstance(self.plan, Schedule) else None

    @property
    def identities(self) -> tuple[SavedIdentity, ...]:
        return self.plan.identities if isinstance(self.plan, MarkPlan) else ()

    @property
    def recomputes(self) -> bool:
        """Whether anything runs again."""
        return bool(self.recomputed().any())

    def recomputed(self, nodes: int = 0) -> Bools | Int64s:
        """Count how often each of so many nodes runs again, int; of marks whether it does, bool."""
        schedule = self.schedule
        return self.plan.mask if schedule is None else schedule.recomputed(nodes)

    @property
    def key(self) -> Hashable:
        """The plan as something to hash, whatever it costs."""
        schedule = self.schedule
        if schedule is not None:
            return schedule.operations.tobytes()
        return self.plan.mask.tobytes(), self.plan.identities


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The plans of a search: first the fastest, or the smallest of a search for least memory."""

    plans: Sequence[Candidate]
    interrupted: bool  # by the user
    costs: Mapping[str, int] = field(default_factory=dict)  # bytes of each plan that was compared


def by_memory(candidate: Candidate) -> tuple[float, float]:
    """Return the key that sorts candidates by memory, then by time."""
    return candidate.pool_bytes, candidate.time


def by_time(candidate: Candidate) -> tuple[float, float]:
    """Return the key that sorts candidates by time, then by memory."""
    return candidate.time, candidate.pool_bytes


def by_added_time(candidate: Candidate) -> tuple[float, float]:
    """Return the key that sorts candidates by the time that they add to a step, then by memory."""
    return candidate.added_time or 0.0, candidate.pool_bytes


def pareto_front(plans: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the plans that no other beats in both costs (of equals one), the least first first."""
    front: list[T] = []
    for plan in sorted(plans, key=costs):
        if not front or costs(plan)[1] < costs(front[-1])[1]:
            front.append(plan)
    return front
