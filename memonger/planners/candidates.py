"""Candidates: plans that a search has found, with their costs, and their Pareto front."""

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
    """A plan of marks: the recomputed nodes, and the saved identities."""

    mask: Bools  # (nodes,): whether each node is recomputed
    identities: tuple[SavedIdentity, ...] = ()


@dataclass(frozen=True, eq=False)
class Candidate:  # type: ignore[misc]  # of ``recipe``
    """A plan that a search has found, and its costs."""

    #: Predicted; within a search of schedules, the most bytes alive at once in the arena.
    pool_bytes: int
    #: Of marks the seconds added to a step, of schedules all forward work in forward passes.
    time: float
    #: A `MarkPlan` or a `Schedule`; within a search, the state or the tree that encodes one.
    recipe: Any  # type: ignore[misc]
    origin: str = ""  # the name of the search that found it
    added_time: float | None = None  # as a share of the time of a step without a plan

    @property
    def schedule(self) -> Schedule | None:
        """The schedule; None of a plan of marks."""
        return self.recipe if isinstance(self.recipe, Schedule) else None

    @property
    def identities(self) -> tuple[SavedIdentity, ...]:
        """The saved identities; none of a schedule."""
        return self.recipe.identities if isinstance(self.recipe, MarkPlan) else ()

    @property
    def recomputes(self) -> bool:
        """Whether the plan recomputes anything."""
        return bool(self.recomputed().any())

    def recomputed(self, nodes: int = 0) -> Bools | Int64s:
        """Return which nodes are recomputed.

        Parameters
        ----------
        nodes : int
            The number of nodes of the network. Plans of marks do not need it.

        Returns
        -------
        array, (nodes,)
            How often each node is recomputed (schedules, int64), or whether it is (marks, bool).
        """
        schedule = self.schedule
        return self.recipe.mask if schedule is None else schedule.recomputed(nodes)

    @property
    def key(self) -> Hashable:
        """The plan without its costs, as a hashable object."""
        schedule = self.schedule
        if schedule is not None:
            return schedule.operations.tobytes()
        return self.recipe.mask.tobytes(), self.recipe.identities


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The plans of a search: the fastest first, or the smallest of a search for least memory."""

    plans: Sequence[Candidate]
    interrupted: bool  # whether the user has interrupted the search
    costs: Mapping[str, int] = field(default_factory=dict)  # origin of a compared plan -> bytes


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
    """Return the Pareto-optimal plans by two costs, in ascending order of the first cost.

    Of plans with equal costs, one is returned.
    """
    front: list[T] = []
    for plan in sorted(plans, key=costs):
        if not front or costs(plan)[1] < costs(front[-1])[1]:
            front.append(plan)
    return front
