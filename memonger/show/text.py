"""Describe a plan in lines: what ``print`` shows, and a notebook."""

from __future__ import annotations

from typing import Mapping, Sequence

from memonger.graph.operators.recompute import CPU, GPU
from memonger.show.explain import PlanExplanation, explain_choices
from memonger.show.record import PLACING, PlanRecord
from memonger.solve.facts import predict
from memonger.support.errors import MemongerError, format_size

FEW = 3  # names that are printed
GROUPS = 4  # of tensors that are printed
INDENT = 11  # of the texts


def write_lines(lines: Mapping[str, str]) -> str:
    """Write the texts of `describe` below each other, each behind its name."""
    return "\n".join(f"{name:{INDENT - 1}} {text}" for name, text in lines.items())


def describe(
    plan: PlanRecord, largest: int, explanation: PlanExplanation | None = None
) -> dict[str, str]:
    """Describe a plan.

    Parameters
    ----------
    plan : PlanRecord
    largest : int
        The largest size of the listing, in bytes: all sizes are in its unit.
    explanation : PlanExplanation, optional
        That of the plan, if it is known.

    Returns
    -------
    dict
        A text for each name; those of many lines are indented.
    """

    def size(nbytes: int) -> str:
        return format_size(nbytes, largest)

    if explanation is None:
        explanation = _explain_or_not(plan)
    chosen = [group for group in explanation.groups if group.choice != "freed"][:GROUPS]
    fates = [g.choice + (f" ({g.why})" if g.why else "") for g in chosen]
    groups = [f"{g}: {fate}, {size(g.nbytes)}" for g, fate in zip(chosen, fates)]
    before, after, network = plan.before, plan.after, plan.request
    saved, count = before.pool_bytes - after.pool_bytes, len(plan.kept) + len(plan.recomputed)
    device = network.device_type
    place = {CPU: " of the CPU", GPU: " of a GPU"}.get(device, "")
    blocks = "" if device == CPU else ", rounded as MXNet does on a GPU"
    gpu = f" for {plan.options['gpu']}" if "gpu" in plan.options else ""
    rounding = "; on a CPU it may round otherwise than the network without it"
    often = {"placed": PLACING, "schedule": "as often as the schedule says"}
    lines = {
        "before": f"{size(before.pool_bytes)} without a plan",
        "after": f"{size(after.pool_bytes)}, of which {size(after.peak_bytes)} are alive at once",
        "saved": f"{size(saved)}, {100 * saved / max(1, before.pool_bytes):.0f} %",
        "floor": f"{size(plan.floor_bytes)} must be alive at once under any plan"
        + (f", in {plan.floor}" if plan.floor else ""),
        "device": f"{size(after.device_bytes)}{place}, "
        f"{size(before.device_bytes)} without a plan: the pool, parameters, "
        f"their gradients and inputs{blocks}",
        "held": f"{size(after.held_bytes)} of it are held by operators, with any plan"
        if after.held_bytes
        else "",
        "shared": f"{size(after.temporary_bytes)} of it are temporary space, which operators share"
        if after.temporary_bytes
        else "",
        "work": f"{100 * after.recompute_overhead:.0f} % of the forward FLOPs are recomputed; "
        f"{100 * plan.time_overhead:.1f} % of the time of a step is added, as predicted{gpu}",
        "slowest": plan.slowest or "nothing is recomputed",
        "recomputed": f"{len(plan.recomputed)} of {count} operators, "
        + often.get(plan.kind, "once each"),
        "kept": f"{len(plan.kept)} operators"
        + (f", and the results of {len(plan.copies)} recomputed ones" if plan.copies else ""),
        "declined": plan.declined,
        **_describe_chosen(plan),
        "largest": ("\n" + INDENT * " ").join(groups),
        "plan": f"{plan.planner}, memory "
        + ("replayed to the byte" if after.exact else "known to the MiB, from a bind")
        + ("; the search was interrupted" if plan.interrupted else ""),
        "for": network.devices + (rounding if device == GPU else ""),
    }
    return {name: text for name, text in lines.items() if text}


def _explain_or_not(plan: PlanRecord) -> PlanExplanation:
    """Explain a plan; printing raises nothing, so of a symbol that was changed nothing."""
    try:
        return explain_choices(plan, predict(plan.planned))
    except MemongerError:
        return PlanExplanation(())


def _describe_chosen(plan: PlanRecord) -> dict[str, str]:
    """Describe what the user chose by name, and which of it could not be."""
    keep, recompute, lines = plan.request.keep, plan.request.recompute, {}
    if keep.patterns:
        lines["keep"] = f"{_list(keep.patterns)}: {len(keep.nodes)} operators"
    if recompute.patterns:
        count, unmet = len(recompute.nodes), plan.unmet
        text = f"{_list(recompute.patterns)}: {count - len(unmet)} of {count} operators"
        for reason in dict.fromkeys(unmet.values()):
            names = [name for name, why in unmet.items() if why == reason]
            text += f"; not {_list(names)}: {reason}"
        lines["recompute"] = text
    return lines


def _list(names: Sequence[str]) -> str:
    """List the first of some names."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(repr, names[:FEW])) + more
