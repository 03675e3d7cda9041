"""Removed public names, and what to use instead."""

from __future__ import annotations

from memonger.support.errors import MemongerError

#: Name as a user writes it -> what to use.
REMOVED = {
    "kept_copies=": "leave it out; a plan saves results in identities wherever that takes less",
    "plan.lifetimes": "plan.report('plan.html') shows which tensors are alive when",
    "--lifetimes": "memonger report -o plan.html shows which tensors are alive when",
    "memonger cost": "memonger explain prints the pool and its peak",
    "plan.recomputed_flops": "use plan.recompute_overhead",
    "plan.added_time": "use plan.time_overhead",
    "plan.unplanned_held_bytes": "use plan.held_bytes, which no plan changes",
    "plan.gradient_bytes": "it was always 0; leave it out",
}


def refuse_removed(name: str) -> None:
    """Raise MemongerError, which names what to use, if this name was removed."""
    if name in REMOVED:
        raise MemongerError(f"{name} was removed: {REMOVED[name]}")
