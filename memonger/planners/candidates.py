"""What searches find: points on the way, candidates in the end; and their Pareto front."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import (
    Callable,
    Generic,
    Hashable,
    Iterable,
    Mapping,
    NamedTuple,
    Sequence,
    TypeVar,
    Union,
)

from memonger.graph.forward import SavedIdentity
from memonger.schedules.schedule import Schedule
from memonger.support.types import Bools, Int64s

T = TypeVar("T")
S = TypeVar("S")


class MarkPlan(NamedTuple):
    """A plan of marks: the recomputed nodes, and the saved identities."""

    mask: Bools  # (nodes,): whether each node is recomputed
    identities: tuple[SavedIdentity, ...] = ()


Recipe = Union[MarkPlan, Schedule]


@dataclass(frozen=True, eq=False)
class Point(Generic[S]):
    """What a search visits: the two costs that it compares, in its own units, and its state."""

    nbytes: int
    time: float
    state: S


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a search has found, and what it is predicted to cost."""

    recipe: Recipe
    #: The pool: of marks as MXNet counts it, of a schedule at least.
    pool_bytes: int
    seconds: float  # added to a training step
    origin: str  # the name of the search that found it

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
        recipe = self.recipe
        return recipe.mask if isinstance(recipe, MarkPlan) else recipe.recomputed(nodes)

    @property
    def key(self) -> Hashable:
        """The plan without its costs, as a hashable object."""
        recipe = self.recipe
        if isinstance(recipe, MarkPlan):
            return recipe.mask.tobytes(), recipe.identities
        return recipe.operations.tobytes()


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The plans of a search: the fastest first, or the smallest of a search for least memory."""

    plans: Sequence[Candidate]
    interrupted: bool  # whether the user has interrupted the search
    costs: Mapping[str, int] = field(default_factory=dict)  # origin of a compared plan -> bytes
    way: str = ""  # in which plans were searched for: 'schedule' or 'marks'
    is_settled: bool = False  # whether the one plan was taken without a search
    declined: str = ""  # why it leaves the network as it is, if that is told


def by_memory(point: Point[S]) -> tuple[float, float]:
    """Return the key that sorts points by memory, then by time."""
    return point.nbytes, point.time


def by_time(point: Point[S]) -> tuple[float, float]:
    """Return the key that sorts points by time, then by memory."""
    return point.time, point.nbytes


def by_seconds(candidate: Candidate) -> tuple[float, float]:
    """Return the key that sorts candidates by the time that they add to a step, then by memory."""
    return candidate.seconds, candidate.pool_bytes


def pareto_front(plans: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the Pareto-optimal plans by two costs, in ascending order of the first cost.

    Of plans with equal costs, one is returned.
    """
    front: list[T] = []
    for plan in sorted(plans, key=costs):
        if not front or costs(plan)[1] < costs(front[-1])[1]:
            front.append(plan)
    return front
