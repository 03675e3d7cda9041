"""``PlanRecord``: a plan as data, of which texts, pictures and pages are made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memonger.schedules.schedule import Schedule
from memonger.solve.limits import CHEN2016
from memonger.solve.network import Network
from memonger.support.types import Json, Symbol

#: The kinds of plans, and their names for readers.
KINDS = {
    "none": "no plan",
    "placed": "nothing recomputed, placed by memonger",
    "marks": "marks",
    "schedule": "schedule",
    "original": "the original's plan",
}
PLACING = (
    "placing alone saves memory, because memonger puts each tensor anywhere in one arena, and "
    "MXNet does not split the blocks that it reuses"
)


class Figures(NamedTuple):
    """What a training step takes, in bytes; `memonger.Plan` tells of each."""

    pool_bytes: int
    counted_bytes: int
    peak_bytes: int
    device_bytes: int
    held_bytes: int
    temporary_bytes: int
    recompute_overhead: float
    exact: bool


@dataclass(frozen=True, eq=False, repr=False)
class PlanRecord:
    """A planned network, and what is known of it; `memonger.Plan` tells of each attribute.

    The training step is not in it: `predict` replays that of ``request``, or of ``planned``.
    """

    symbol: Symbol
    request: Network
    schedule: Schedule | None
    before: Figures
    after: Figures
    time_overhead: float
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    copies: tuple[str, ...]
    planner: str
    candidates: dict[str, int]
    interrupted: bool
    floor_bytes: int
    floor: str
    slowest: str
    unmet: dict[str, str] = field(default_factory=dict)
    options: dict[str, Json] = field(default_factory=dict)
    declined: str = ""
    warnings: tuple[str, ...] = ()
    of_block: bool = False

    @property
    def pool_bytes(self) -> int:
        return self.after.pool_bytes

    @property
    def unplanned_bytes(self) -> int:
        return self.before.pool_bytes

    @property
    def counted_bytes(self) -> int:
        return self.after.counted_bytes

    @property
    def peak_bytes(self) -> int:
        return self.after.peak_bytes

    @property
    def device_bytes(self) -> int:
        return self.after.device_bytes

    @property
    def unplanned_device_bytes(self) -> int:
        return self.before.device_bytes

    @property
    def held_bytes(self) -> int:
        return self.after.held_bytes

    @property
    def temporary_bytes(self) -> int:
        return self.after.temporary_bytes

    @property
    def recompute_overhead(self) -> float:
        return self.after.recompute_overhead

    @property
    def exact(self) -> bool:
        return self.after.exact

    @property
    def largest_bytes(self) -> int:
        """The most of the figures of memory: a listing is in the unit of it."""
        return max(self.before.device_bytes, self.after.device_bytes)

    @property
    def kind(self) -> str:
        if not self.recomputed:
            return "none" if self.schedule is None else "placed"
        if self.schedule is not None:
            return "schedule"
        return "original" if self.planner == CHEN2016 else "marks"

    @property
    def planned(self) -> Network:
        """The request, with the planned symbol."""
        return replace(self.request, symbol=self.symbol)


#: Attributes of a plan that are no data in themselves.
OBJECTS = ("symbol", "request", "schedule", "before", "after")


def as_data(plan: PlanRecord) -> dict[str, Json]:
    """Return what is known of a plan as data, by the names of its attributes."""
    return {
        **plan.after._asdict(),
        "unplanned_bytes": plan.unplanned_bytes,
        "unplanned_device_bytes": plan.unplanned_device_bytes,
        **{name: value for name, value in vars(plan).items() if name not in OBJECTS},
    }
