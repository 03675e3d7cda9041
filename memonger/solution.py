"""What a planner finds for a network, made into a symbol and confirmed by MXNet.

The memory that the search predicts for a plan is compared with one bind of the planned symbol. They
must agree; where they do not, it is said, and MXNet's figure is the plan's.
"""

import logging
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memonger import marks
from memonger.allocator import Replay, replay
from memonger.bounds import Floor, floor
from memonger.costs import MB, CostModel
from memonger.executor import bind, planned_mb
from memonger.explanation import Segment, floor_text, held_by_rule, slowest_segment
from memonger.flops import forward_flops
from memonger.forward import KeptCopy, mask_with_copies, no_collection
from memonger.memory import Memory, of_marks
from memonger.network import Network, Request, read_network
from memonger.planners import chen2016
from memonger.planners.smallest import NO_CUTS, smallest
from memonger.progress import Progress
from memonger.rules import kept_summary
from memonger.schedule import Schedule
from memonger.scheduled import scheduled
from memonger.training import TrainingGraph

log = logging.getLogger("memonger")

LITTLE = 0.05  # of the memory: a plan that saves less is explained
MOST, MOST_HELD = 0.8, 0.5  # shares of the peak that are reason enough

ALLOWED = "the budget allows the network as it is, so nothing is computed again"
SEARCHING = "memonger: searching"  # what the progress bar says
BARE = (
    "the bare plan was asked for (rules=False): it may abort on a GPU, move BatchNorm statistics "
    "twice, or give wrong gradients"
)


class Found(NamedTuple):
    """What a planner found: nodes by index, which candidate won, all candidates' costs."""

    mask: np.ndarray
    copies: Tuple[KeptCopy, ...]
    cost: int
    planner: str
    candidates: Dict[str, int]
    interrupted: bool


class Solution(NamedTuple):
    """What is remembered of a plan: nothing in it is the caller's, nor has an operator's name."""

    mask: np.ndarray
    native: Tuple[int, ...]
    copies: Tuple[KeptCopy, ...]
    facts: Mapping[str, Any]  # the fields of Plan that do not depend on the operators' names
    warnings: Tuple[str, ...]
    schedule: Optional[Schedule]
    floor: Floor
    slowest: Optional[Segment]

    def carry_out(self, symbol: Any) -> Any:
        """A copy of a symbol (without marks) that trains by this plan."""
        if self.schedule is not None:
            return scheduled(symbol, self.schedule)
        return marked(symbol, self.mask, self.native, self.copies)


@no_collection()
def solve(
    request: Request, planner: str, ntrial: int, kept_copies: bool, rules: bool, patience: float
) -> Tuple[Solution, Any]:
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
            "interrupted: this is the best plan that was found so far, of %.1f MB (%.1f MB without "
            "a plan)" % (found.cost / MB, cost.unplanned / MB)
        )
    return confirm(network, cost, found, warnings, leave=planner == "smallest")


def confirm(
    network: Network, cost: CostModel, found: Found, warnings: Sequence[str], leave: bool
) -> Tuple[Solution, Any]:
    """Make what was found into a symbol, and have MXNet confirm its memory with one bind.

    Parameters
    ----------
    leave : bool
        Whether the network is left as it is where the plan saves nothing.
    """
    request, warnings = network.request, list(warnings)
    native = tuple(network.rules.native(found.mask))
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    memory = unplanned = of_marks(network.training, nothing, cost.bound)
    symbol = marked(request.symbol, found.mask, native, found.copies)
    if found.mask.any():
        memory = _confirmed(network, found, symbol)
        if cost.exact and not (memory.exact and memory.counted_bytes == found.cost):
            warnings.append(
                "the memory of this plan was predicted as %.1f MB, and MXNet plans %d MB for it; "
                "the figures of the plan are MXNet's" % (found.cost / MB, memory.bound)
            )
            memory = memory._replace(inexact=("the bind differs from the search",))
    saved = memory.saved(unplanned)
    if leave and saved <= 0:
        found = found._replace(mask=nothing, copies=(), planner="no plan")
        native, memory, symbol = (), unplanned, marks.clear(request.symbol)
        warnings.append(left_as_it_is(network, unplanned, found.candidates))
    elif saved < 0:
        warnings.append(
            "this plan needs more memory (%.1f MB) than the network as it is (%.1f MB), which "
            "planner='smallest' never does"
            % (memory.counted_bytes / MB, unplanned.counted_bytes / MB)
        )
    elif leave and saved < LITTLE * unplanned.pool_bytes:
        warnings.append(saves_little(network, unplanned, memory, found.candidates))
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
    confirmed: Callable[[bool], Tuple[Solution, Any]]


def left_alone(network: Network, cost: CostModel) -> Tuple[Solution, Any]:
    """The network without a plan, where that may be: nothing is faster."""
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    candidates = {"no plan": cost.unplanned}
    found = Found(nothing, (), cost.unplanned, "no plan", candidates, False)
    solution, symbol = confirm(network, cost, found, [], leave=False)
    return solution._replace(facts={**solution.facts, "added_time": 0.0}), symbol


def memory_facts(memory: Memory, unplanned: Memory) -> Dict[str, Any]:
    """The fields of Plan that tell its memory."""
    return {
        "pool_bytes": memory.pool_bytes,
        "unplanned_bytes": unplanned.pool_bytes,
        "counted_bytes": memory.counted_bytes,
        "gradient_bytes": memory.gradient_bytes,
        "peak_bytes": memory.peak_bytes,
        "device_bytes": memory.device_bytes,
        "unplanned_device_bytes": unplanned.device_bytes,
        "exact": memory.exact,
    }


def left_as_it_is(network: Network, unplanned: Memory, candidates: Mapping[str, int]) -> str:
    """The warning that no plan helps, and why."""
    return (
        "no plan costs less than the network as it is (%.1f MB), so it is returned unmarked: %s"
        % (unplanned.counted_bytes / MB, _why(network, unplanned, candidates))
    )


def saves_little(
    network: Network, unplanned: Memory, planned: Memory, candidates: Mapping[str, int]
) -> str:
    """The warning that a plan helps little, and why."""
    return "the plan saves %.1f %% of %.1f MB: %s" % (
        100 * planned.saved(unplanned) / unplanned.pool_bytes,
        unplanned.pool_bytes / MB,
        _why(network, unplanned, candidates),
    )


def marked(symbol: Any, mask: np.ndarray, native: Sequence[int], copies: Sequence[KeptCopy]) -> Any:
    """A copy of a symbol (without marks) that carries out a plan; as it is if that is none."""
    return marks.apply(symbol, mask, native, copies) if mask.any() else marks.clear(symbol)


def _confirmed(network: Network, found: Found, symbol: Any) -> Memory:
    """What MXNet plans for the symbol that was made of what was found, and what is predicted."""
    asked = network.training.wanted
    bound = planned_mb(bind(symbol, network.graph, network.request.device, asked))
    training, mask = _with_copies(network, found.mask, found.copies)
    return of_marks(training, mask, bound)


def _with_copies(
    network: Network, mask: np.ndarray, copies: Sequence[KeptCopy]
) -> Tuple[TrainingGraph, np.ndarray]:
    """The training graph of the network with copies, and the nodes of it that are recomputed."""
    rules, moved = network.rules.with_copies(copies)
    full = mask_with_copies(mask, moved, copies, len(rules.graph.nodes))
    return rules.trainings[0], full


def _smallest(
    network: Network, cost: CostModel, ntrial: int, kept_copies: bool, patience: float
) -> Found:
    with Progress(SEARCHING) as progress:
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
        found = found._replace(cost=replay(*_with_copies(network, found.mask, copies)).pool_bytes)
    return Found(found.mask, copies, found.cost, winner, found.candidates, found.interrupted)


def _chen2016(network: Network, cost: CostModel, ntrial: int, rules: bool) -> Found:
    tried: List[Tuple[int, np.ndarray]] = []
    interrupted = False
    try:
        with Progress(SEARCHING) as progress:

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
    if not any(rules.allowed[i] for i in operators):
        until = network.request.until
        if until is not None and all(i >= until for i in operators if i not in rules.reasons):
            return "nothing that could be recomputed comes before %r" % graph.nodes[until].name
        return "every operator must be kept (%s)" % kept_summary(
            (graph.nodes[i].op, why) for i, why in rules.reasons.items()
        )
    least, peak = floor(network.training), unplanned.peak_bytes
    if least.own_bytes >= MOST * peak:
        return "%s alone needs %.1f MB at once, %.0f %% of the %.1f MB of the peak" % (
            floor_text(network.training, least),
            least.own_bytes / MB,
            100 * least.own_bytes / max(1, peak),
            peak / MB,
        )
    held = held_by_rule(unplanned, rules.reasons)
    if sum(held.values()) >= MOST_HELD * peak:
        return "%.1f MB of the %.1f MB of the peak must not be computed again (%s)" % (
            sum(held.values()) / MB,
            peak / MB,
            kept_summary((graph.nodes[i].op, rules.reasons[i]) for i in held),
        )
    if set(candidates) <= {"no plan", NO_CUTS}:
        return "there is no point at which it can be cut"
    tried = ", ".join(
        "%s give %.1f MB" % (name, cost / MB)
        for name, cost in candidates.items()
        if name != "no plan"
    )
    largest = max((t.nbytes, i) for i in operators for t in graph.tensors[i])
    return "%s; its largest result is %.1f MB, of node %r (%s)" % (
        tried,
        largest[0] / MB,
        graph.nodes[largest[1]].name,
        graph.nodes[largest[1]].op,
    )
