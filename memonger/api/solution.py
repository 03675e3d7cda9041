"""What a planner finds for a network, made into a symbol and confirmed by MXNet.

The memory that the search predicts for a plan is compared with one bind of the planned symbol. They
must agree; where they do not, it is said, and MXNet's figure is the plan's.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.api.explain import NO_OPERATORS, Segment, floor_text, held_by_rule, slowest_segment
from memonger.api.memory import Memory, of_marks
from memonger.api.request import Network, Request, read_network
from memonger.costs.allocator import Replay
from memonger.costs.bind import bind, planned_mb
from memonger.costs.lower_bound import Floor, floor
from memonger.costs.model import MB, CostModel
from memonger.costs.time.flops import forward_flops
from memonger.graph import marks
from memonger.graph.forward import KeptCopy, mask_with_copies, no_collection
from memonger.graph.training import TrainingGraph
from memonger.planners.marks import chen2016
from memonger.planners.marks.rules import kept_summary
from memonger.planners.marks.smallest import NO_CUTS, smallest
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import Schedule
from memonger.support.errors import in_words
from memonger.support.parallel import progress_bar

log = logging.getLogger("memonger")

LITTLE = 0.05  # of the memory: a plan that saves less is explained
MOST, MOST_HELD = 0.8, 0.5  # shares of the peak that are reason enough

ALLOWED = "the budget allows the network as it is, so nothing is computed again"
SEARCHING = "memonger: searching"  # what the progress bar says
LAYOUTS = (
    "operators are kept so that MKLDNN lays out every tensor on the CPU as it does without a plan, "
    "and rounds alike; how='schedule', ctx=mx.gpu() (a plan for GPUs alone) or "
    "MXNET_MKLDNN_ENABLED=0 may allow more"
)
BARE = (
    "the bare plan was asked for (rules=False): it may abort on a GPU, move BatchNorm statistics "
    "twice, or give wrong gradients"
)


class Found(NamedTuple):
    """What a planner found: nodes by index, which candidate won, all candidates' costs."""

    mask: np.ndarray
    copies: tuple[KeptCopy, ...]
    cost: int
    planner: str
    candidates: dict[str, int]
    interrupted: bool
    unfused: int | None = None  # the least that was found without pointwise fusion


class Solution(NamedTuple):
    """What is remembered of a plan: nothing in it is the caller's, nor has an operator's name."""

    mask: np.ndarray
    native: tuple[int, ...]
    copies: tuple[KeptCopy, ...]
    facts: Mapping[str, Any]  # the fields of Plan that do not depend on the operators' names
    warnings: tuple[str, ...]
    schedule: Schedule | None
    floor: Floor
    slowest: Segment | None

    def carry_out(self, symbol: Any) -> Any:
        """A copy of a symbol (without marks) that trains by this plan."""
        if self.schedule is not None:
            return scheduled(symbol, self.schedule)
        return marked(symbol, self.mask, self.native, self.copies)


@no_collection()
def solve(
    request: Request, planner: str, ntrial: int, kept_copies: bool, rules: bool, patience: float
) -> tuple[Solution, Any]:
    """Search, and confirm what was found; the parameters are those of ``memonger.plan``.

    Returns
    -------
    Solution
    mx.sym.Symbol
        The planned network.
    """
    network = read_network(request, rules)
    cost = network.cost_model()
    warnings = [] if rules else [BARE]
    if planner == "chen2016":
        found = _chen2016(network, cost, ntrial, rules)
        if not network.stages:
            warnings.append(
                "the network has no mirror_stage marks, so the original planner cannot cut it; "
                "planner='smallest' needs none"
            )
    else:
        found = _smallest(network, cost, ntrial, kept_copies, patience)
    if found.interrupted:
        warnings.append(
            f"interrupted: this is the best plan that was found so far, of {found.cost / MB:.1f} "
            f"MB ({cost.unplanned / MB:.1f} MB without "
            "a plan)"
        )
    return confirm(network, cost, found, warnings, leave=planner == "smallest")


def confirm(
    network: Network, cost: CostModel, found: Found, warnings: Sequence[str], leave: bool
) -> tuple[Solution, Any]:
    """Make what was found into a symbol, and have MXNet confirm its memory with one bind.

    Parameters
    ----------
    leave : bool
        Whether the network is left as it is where the plan saves nothing.
    """
    request, warnings = network.request, list(warnings)
    native = tuple(network.rules.native(found.mask))
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    fuses = network.rules.fuses
    memory = unplanned = of_marks(network.training, nothing, cost.bound, network.held, fuses)
    symbol = marked(request.symbol, found.mask, native, found.copies)
    if found.mask.any():
        memory = _confirmed(network, found, symbol)
        if cost.exact and not (memory.exact and memory.counted_bytes == found.cost):
            warnings.append(
                "the memory of this plan was predicted as %.1f MB, and MXNet plans %d MB for it; "
                "the figures of the plan are MXNet's" % (found.cost / MB, memory.bound)
            )
            memory = memory._replace(inexact=("the bind differs from the search",))
    fusion = fusion_costs(memory, found.unfused)
    if fusion:
        warnings.append(fusion)
    saved = memory.saved(unplanned)
    if leave and (saved <= 0 or memory.holds_more_than(unplanned)):
        if saved > 0:
            warnings.append(left_for_copies(memory, unplanned))
        else:
            warnings.append(left_as_it_is(network, unplanned, found.candidates))
        found = found._replace(mask=nothing, copies=(), planner="no plan")
        native, memory, symbol = (), unplanned, marks.clear(request.symbol)
    elif saved < 0:
        warnings.append(
            f"this plan needs more memory ({in_words(memory.counted_bytes)}) than the network as "
            f"it is ({in_words(unplanned.counted_bytes)}), which "
            "planner='smallest' never does"
        )
    elif leave and saved < LITTLE * unplanned.pool_bytes:
        warnings.append(saves_little(network, unplanned, memory, found.candidates))
    if leave and saved < LITTLE * unplanned.pool_bytes and network.rules.watches_layouts:
        warnings.append(LAYOUTS)
    log.info("Find best plan with cost=%s MB", memory.bound)
    facts = {
        **memory_facts(memory, unplanned),
        "recomputed_flops": _work_added(memory.replay),
        "planner": found.planner,
        "candidates": found.candidates,
        "interrupted": found.interrupted,
    }
    slowest = slowest_segment(memory.replay)
    if slowest is not None:
        slowest = slowest.before(network.rules.with_copies(found.copies)[1])
    solution = Solution(
        found.mask,
        native,
        found.copies,
        facts,
        tuple(warnings),
        schedule=None,
        floor=floor(network.training, bare=network.rules.bare),
        slowest=slowest,
    )
    return solution, symbol


def fusion_costs(memory: Memory, least: int | None = None) -> str:
    """The warning that a plan takes less without pointwise fusion; empty where it does not.

    Parameters
    ----------
    memory : Memory
        Of the plan.
    least : int, optional
        Bytes, as MXNet counts them, of the smallest plan without fusion if that was searched for.
    """
    with_it, without = memory.planned.pool_bytes, memory.replay.pool_bytes
    what = "this plan takes"
    if least is not None and least < without:
        without, what = least, "there is a plan of"
    if without >= (1 - LITTLE) * with_it:
        return ""
    return (
        "pointwise fusion (MXNET_USE_FUSION, on by default on a GPU) takes memory here: without it "
        f"{what} {without / MB:.1f} MB, with it {with_it / MB:.1f} MB, for a fused operator keeps "
        "all that it reads until it runs; "
        "set MXNET_USE_FUSION=0 and plan again, or take how='schedule', which runs without fusion"
    )


class Candidate(NamedTuple):
    """A plan among which is chosen, not yet confirmed by MXNet.

    Attributes
    ----------
    pool_bytes : int
        As predicted.
    added_time : float
        Predicted, as a share of a step without a plan.
    confirmed : callable
        Makes the Solution and the planned symbol; is told whether the search was interrupted.
    """

    pool_bytes: int
    added_time: float
    confirmed: Callable[[bool], tuple[Solution, Any]]


def left_alone(network: Network, cost: CostModel) -> tuple[Solution, Any]:
    """The network without a plan, where that may be: nothing is faster."""
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    candidates = {"no plan": cost.unplanned}
    found = Found(nothing, (), cost.unplanned, "no plan", candidates, False)
    solution, symbol = confirm(network, cost, found, [], leave=False)
    return solution._replace(facts={**solution.facts, "added_time": 0.0}), symbol


def memory_facts(memory: Memory, unplanned: Memory) -> dict[str, Any]:
    """The fields of Plan that tell its memory."""
    taken = memory.taken
    return {
        "pool_bytes": memory.pool_bytes,
        "unplanned_bytes": unplanned.pool_bytes,
        "counted_bytes": memory.counted_bytes,
        "gradient_bytes": memory.gradient_bytes,
        "peak_bytes": memory.peak_bytes,
        "device_bytes": memory.device_bytes,
        "unplanned_device_bytes": unplanned.device_bytes,
        "held_bytes": taken.nbytes,
        "unplanned_held_bytes": unplanned.taken.nbytes,
        "temporary_bytes": taken.temporary,
        "exact": memory.exact,
    }


def left_as_it_is(network: Network, unplanned: Memory, candidates: Mapping[str, int]) -> str:
    """The warning that no plan helps, and why."""
    return (
        f"no plan costs less than the network as it is ({in_words(unplanned.counted_bytes)}), so "
        f"it is returned unmarked: {_why(network, unplanned, candidates)}"
    )


def left_for_copies(planned: Memory, unplanned: Memory) -> str:
    """The warning that a plan would take more of the CPU, although less of the pool."""
    return (
        f"the plan that was found takes {planned.pool_bytes / MB:.1f} MB of the pool in place of "
        f"{unplanned.pool_bytes / MB:.1f} MB, but operators that know no layouts of MKLDNN would "
        f"hold {planned.taken.nbytes / MB:.1f} MB of copies in place of "
        f"{unplanned.taken.nbytes / MB:.1f} MB, so that the network is returned unmarked; plan "
        "with MXNET_MKLDNN_ENABLED=0, by which there are none"
    )


def saves_little(
    network: Network, unplanned: Memory, planned: Memory, candidates: Mapping[str, int]
) -> str:
    """The warning that a plan helps little, and why."""
    return (
        f"the plan saves {100 * planned.saved(unplanned) / unplanned.pool_bytes:.1f} % of "
        f"{in_words(unplanned.pool_bytes)}: {_why(network, unplanned, candidates)}"
    )


def marked(symbol: Any, mask: np.ndarray, native: Sequence[int], copies: Sequence[KeptCopy]) -> Any:
    """A copy of a symbol (without marks) that carries out a plan; as it is if that is none."""
    return marks.apply(symbol, mask, native, copies) if mask.any() else marks.clear(symbol)


def _confirmed(network: Network, found: Found, symbol: Any) -> Memory:
    """What MXNet plans for the symbol that was made of what was found, and what is predicted."""
    asked = network.training.wanted
    bound = planned_mb(bind(symbol, network.graph, network.request.device, asked))
    training, mask = _with_copies(network, found.mask, found.copies)
    return of_marks(training, mask, bound, network.held, network.rules.fuses)


def _with_copies(
    network: Network, mask: np.ndarray, copies: Sequence[KeptCopy]
) -> tuple[TrainingGraph, np.ndarray]:
    """The training graph of the network with copies, and the nodes of it that are recomputed."""
    rules, moved = network.rules.with_copies(copies)
    full = mask_with_copies(mask, moved, copies, len(rules.graph.nodes))
    return rules.trainings[0], full


def _smallest(
    network: Network, cost: CostModel, ntrial: int, kept_copies: bool, patience: float
) -> Found:
    with progress_bar(SEARCHING) as progress:
        found = smallest(
            network.stages,
            cost,
            network.rules,
            ntrial,
            cost.exact,
            kept_copies,
            progress,
            patience=patience,
        )
    for name, counted in found.candidates.items():
        log.info("%s: %.1f MB", name, counted / MB)
    _log_kept(network)
    winner = min(found.candidates, key=lambda name: found.candidates[name])  # of equals the first
    copies = marks.inferable(network.request.symbol, found.copies, network.request.spec.shapes)
    if copies != found.copies:
        _, full = _with_copies(network, found.mask, copies)
        cost_with = network.rules.with_copies(copies)[0].replay(full).pool_bytes
        found = found._replace(cost=cost_with)
    return Found(
        found.mask,
        copies,
        found.cost,
        winner,
        found.candidates,
        found.interrupted,
        found.unfused,
    )


def _chen2016(network: Network, cost: CostModel, ntrial: int, rules: bool) -> Found:
    tried: list[tuple[int, np.ndarray]] = []
    interrupted = False
    try:
        with progress_bar(SEARCHING) as progress:

            def counted(mask: np.ndarray) -> int:
                mask = network.within(mask)
                tried.append((cost(mask) // MB, mask))
                progress(len(tried) / (3 + ntrial))
                return tried[-1][0]

            trials = chen2016.search(network.graph, network.stages, counted, ntrial)
    except KeyboardInterrupt:
        if not tried:
            raise
        interrupted = True
    else:
        for trial in trials:
            log.info("Search threshold=%d MB, cost=%d MB", trial.threshold, trial.cost)
        chosen = chen2016.best(trials)
        log.info("Find best plan with threshold=%d, cost=%d MB", chosen.threshold, chosen.cost)
    bare, mask = min(tried, key=lambda pair: pair[0])  # of equals the first
    if rules:
        mask = network.rules.apply(mask)
        _log_kept(network)
        log.info("cost=%s MB before the rules, %s MB with them", bare, cost(mask) // MB)
    candidates = {"no plan": cost.unplanned, "chen2016": cost(mask)}
    return Found(mask, (), cost(mask), "chen2016", candidates, interrupted)


def _work_added(found: Replay) -> float:
    """FLOPs of the recomputed operators that run, as a share of those of the forward pass."""
    each = forward_flops(found.training.graph)
    n = len(each)
    forward = each[found.order[found.order < n]].sum()
    again = each[found.order[(found.order >= n) & (found.order < 2 * n)] - n].sum()
    return float(again / forward) if forward else 0.0


def _log_kept(network: Network) -> None:
    nodes = network.graph.nodes
    kept = kept_summary((nodes[i].op, why) for i, why in network.rules.reasons.items())
    if kept:
        log.info("kept by rule: %s", kept)


def _why(network: Network, unplanned: Memory, candidates: Mapping[str, int]) -> str:
    """Why no plan of a network helps much."""
    graph, rules = network.graph, network.rules
    operators = graph.operators
    if not operators:
        return NO_OPERATORS
    if not any(rules.allowed[i] for i in operators):
        until = network.request.until
        if until is not None and all(i >= until for i in operators if i not in rules.reasons):
            return f"nothing that could be recomputed comes before {graph.nodes[until].name!r}"
        return (
            "every operator must be kept "
            f"({kept_summary(((graph.nodes[i].op, why) for i, why in rules.reasons.items()))})"
        )
    least, peak = floor(network.training), unplanned.peak_bytes
    if least.own_bytes >= MOST * peak:
        return (
            f"{floor_text(network.training, least)} alone needs {in_words(least.own_bytes)} at "
            f"once, {100 * least.own_bytes / max(1, peak):.0f} % of the {in_words(peak)} of the "
            "peak"
        )
    held = held_by_rule(unplanned, rules.reasons)
    if sum(held.values()) >= MOST_HELD * peak:
        return (
            f"{in_words(sum(held.values()))} of the {in_words(peak)} of the peak must not be "
            f"computed again ({kept_summary((graph.nodes[i].op, rules.reasons[i]) for i in held)})"
        )
    if set(candidates) <= {"no plan", NO_CUTS}:
        return "there is no point at which it can be cut"
    tried = ", ".join(
        f"{name} give {in_words(cost)}" for name, cost in candidates.items() if name != "no plan"
    )
    largest = max((t.nbytes, i) for i in operators for t in graph.tensors[i])
    return (
        f"{tried}; its largest result is {in_words(largest[0])}, of node "
        f"{graph.nodes[largest[1]].name!r} ({graph.nodes[largest[1]].op})"
    )
