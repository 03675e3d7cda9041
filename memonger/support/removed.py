"""Public names that are gone, and what to use in their place."""

from __future__ import annotations

from memonger.support.errors import MemongerError

#: By what a user writes.
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
    """Refuse a name that is gone, as a user writes it.

    Raises
    ------
    MemongerError
        If it is gone; it names what to use.
    """
    if name in REMOVED:
        raise MemongerError(f"{name} was removed: {REMOVED[name]}")
