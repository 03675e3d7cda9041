"""Find the Pareto-optimal plans (``frontier``), or the ``largest_batch`` that fits a budget."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Mapping, NoReturn, Sequence

import numpy as np

from memonger.api.plan import make_plan
from memonger.api.results import Frontier, LargestBatch, Open
from memonger.costs.bind import trim_heap
from memonger.graph.forward import no_collection
from memonger.graph.inputs import read_devices, read_pairs, trace
from memonger.planners.candidates import Candidate, SearchResult, by_seconds, pareto_front
from memonger.schedules.layouts import LayoutMismatch
from memonger.solve.choose import (
    choose_from,
    choose_refusal,
    choose_smallest,
    explain_marks,
    solution_or_none,
)
from memonger.solve.describe import format_bytes
from memonger.solve.facts import Facts
from memonger.solve.limits import Limits, bound_gpu, check_keywords, read_limits
from memonger.solve.network import read_call
from memonger.solve.search import list_ways, predict_memory, search_by, settle
from memonger.solve.selection import Selector
from memonger.support.errors import BudgetError, MemongerError, TooLargeError, check_count
from memonger.support.parallel import progress_bar
from memonger.support.types import Json, OpenShapes, Shapes, SymbolOrBlock, Types

log = logging.getLogger("memonger")

FIRST_BATCH = 8  # with whose smallest plan the largest batch is predicted
MOST_BATCH = 2**20


@trim_heap()
@no_collection()
def frontier(
    net: SymbolOrBlock,
    shapes: Shapes | None = None,
    *,
    points: int = 20,
    how: str | None = None,
    measure: bool = Limits.measure,
    gpu: str | None = None,
    patience: float | None = None,
    type_dict: Types = None,
    grad_req: object = "write",
    ctx: object = None,
    ntrial: int = Limits.ntrial,
    until: str | None = None,
    keep: Selector | None = None,
    recompute: Selector | None = None,
    devices: int = 1,
    **input_shapes: Sequence[int],
) -> Frontier:
    """Find the Pareto-optimal plans in memory and time, after the network without a plan.

    Parameters
    ----------
    net, shapes, how, measure, gpu, patience, type_dict, grad_req, ctx, ntrial, until, keep
    recompute, devices, **input_shapes
        As `plan` takes them, but what limits or chooses one plan:
        no ``work``, ``budget``, ``slower_than``, ``budget_of``, ``optimizer``, ``planner``.
    points : int
        The most plans that are returned; each is bound once. Where there are more, those are taken
        whose memory is nearest to equal steps between the fastest plan and the smallest.

    Returns
    -------
    Frontier
        A tuple of ``Plan``, the fastest first. The first leaves the network as it is, unless
        ``recompute`` names operators. Printed it is a table; ``plot`` draws it.

    Raises
    ------
    MemongerError, KeyboardInterrupt
        As `plan` does.

    Examples
    --------
    >>> print(memonger.frontier(net, {'data': (32, 3, 224, 224)}))
    """
    points = check_count("points", points, 2)
    network, limits = read_call(
        "frontier",
        net,
        shapes,
        input_shapes,
        how=how,
        measure=measure,
        gpu=gpu,
        patience=patience,
        type_dict=type_dict,
        grad_req=grad_req,
        ctx=ctx,
        ntrial=ntrial,
        until=until,
        keep=keep,
        recompute=recompute,
        devices=devices,
    )
    facts = Facts(network, limits)
    way, *_ = list_ways(facts)
    searched = search_by(facts, way, for_front=True)
    candidates, as_it_is = pareto_front(searched.plans, by_seconds), []
    if not facts.forced:
        as_it_is, whole = [facts.no_plan], facts.predicted_unplanned.pool_bytes
        candidates = [plan for plan in candidates if plan.pool_bytes < whole]
    most, interrupted = points - len(as_it_is), searched.interrupted
    if len(candidates) > most:
        pools = np.array([candidate.pool_bytes for candidate in candidates])
        steps = np.linspace(pools[-1], pools[0], most)
        nearest = sorted({int(np.abs(pools - step).argmin()) for step in steps})
        candidates = [candidates[k] for k in nearest]
    solutions, found = [], [*as_it_is, *candidates]
    try:
        with progress_bar("memonger: binding plans") as progress:
            for plan in found:
                solutions.append(solution_or_none(facts, way, plan))
                progress(len(solutions) / len(found))
    except KeyboardInterrupt:
        if not solutions:
            raise
        interrupted = True
    if interrupted:
        log.warning("interrupted: these are the plans that were found so far")
    plans = [make_plan(replace(solution, interrupted=interrupted)) for solution in solutions]
    texts = [text for plan in plans for text in plan.warnings]
    for warning in dict.fromkeys((*explain_marks(facts, way), *texts)):
        log.warning(warning)
    optimal = pareto_front(plans, lambda plan: (plan.time_overhead, plan.pool_bytes))
    if as_it_is:  # also where placing alone saves memory
        optimal = [plans[0], *(plan for plan in optimal if plan.is_used)]
    return Frontier(optimal)


@trim_heap()
@no_collection()
def largest_batch(
    net: SymbolOrBlock,
    shapes: OpenShapes,
    budget: int | str,
    *,
    how: str | None = None,
    budget_of: str | None = None,
    optimizer: object = None,
    measure: bool = Limits.measure,
    gpu: str | None = None,
    patience: float | None = None,
    type_dict: Types = None,
    grad_req: object = "write",
    ctx: object = None,
    ntrial: int = Limits.ntrial,
    **others: NoReturn,
) -> LargestBatch:
    """Find the largest batch that fits a budget with a plan, and without.

    The smallest plan at one batch tells how large the batch may grow with it; then a plan for that
    batch is searched for. Nothing is run, and little is bound.

    Parameters
    ----------
    shapes : dict or list of mx.io.DataDesc
        Shapes of the inputs with None for the batch: ``{'data': (None, 3, 224, 224)}``; or
        ``iterator.provide_data + iterator.provide_label``, in whose layouts it is 'N'.
    budget : int or str
        Bytes, text such as '11GB', or 'device'. For a GPU it bounds the whole device, unless
        ``budget_of='pool'`` is given.
    net, how, budget_of, optimizer, measure, gpu, patience, type_dict, grad_req, ctx, ntrial
        As `plan` takes them.
    **others
        There are none: shapes by keyword are refused.

    Returns
    -------
    LargestBatch

    Raises
    ------
    MemongerError, BudgetError, KeyboardInterrupt
        As `plan` does.

    Examples
    --------
    >>> largest = memonger.largest_batch(net, {'data': (None, 3, 224, 224)}, budget='11GB')
    """
    check_keywords("largest_batch", others, has_shapes=False)
    devices = read_devices(ctx)
    limits = read_limits(
        how=how,
        budget=budget,
        budget_of=bound_gpu(budget, budget_of, devices),
        optimizer=optimizer,
        measure=measure,
        gpu=gpu,
        patience=patience,
        ntrial=ntrial,
        ctx=devices,
    )
    if limits.budget is None or limits.budget.is_share:
        raise MemongerError(
            f"budget={budget!r}: the largest batch needs a budget in bytes, such as '11GB'"
        )
    open_shapes, types = _open_shapes(shapes)
    if type_dict is None:
        type_dict = types
    elif isinstance(type_dict, Mapping):  # otherwise `read_unplanned` says what is wrong with it
        type_dict = {**types, **type_dict}
    symbol = trace(net, [*open_shapes])
    batches = Batches(Open(symbol, open_shapes, type_dict, grad_req, ctx), limits)
    facts, refusal = batches.facts(1), None
    for way in list_ways(facts):
        try:
            largest = _largest_batch(batches, way)
            break
        except (BudgetError, LayoutMismatch) as error:
            refusal = choose_refusal(facts, refusal, error)
    else:
        assert refusal is not None
        raise refusal
    for warning in (*explain_marks(facts, way, refusal), *largest.plan.warnings):
        log.warning(warning)
    return largest


class Batches:
    """The facts about a network at each batch."""

    def __init__(self, network: Open, limits: Limits) -> None:
        self.network, self.limits = network, limits
        self._facts: dict[int, Facts] = {}

    def facts(self, batch: int) -> Facts:
        """Return the facts about the network at a batch."""
        if batch not in self._facts:
            self._facts[batch] = Facts(self.network.at(batch), self.limits)
        return self._facts[batch]

    def count_bytes(self, batch: int, plan: Candidate | None = None) -> float:
        """Return the bytes that the budget bounds, of a plan that was made at another batch."""
        try:
            facts = self.facts(batch)
            memory = facts.predicted_unplanned if plan is None else predict_memory(facts, plan)
        except (TooLargeError, LayoutMismatch):
            return math.inf
        return facts.count_bytes(memory)


def _largest_batch(batches: Batches, way: str) -> LargestBatch:
    """Find the largest batch of a network that fits the budget, by plans of one way."""
    assert batches.limits.budget is not None
    limit = batches.limits.budget.limit()
    batch = unplanned = _largest(batches, None, limit)
    smallest, interrupted = None, False
    try:
        facts = batches.facts(max(FIRST_BATCH, unplanned))
        searched = search_by(facts, way, for_front=False)
        smallest, _ = choose_smallest(facts, searched.plans)
        interrupted = searched.interrupted
        if smallest is not None:
            batch = max(batch, _largest(batches, smallest, limit))
    except KeyboardInterrupt:
        if not batch:
            raise
        interrupted = True
    if not batch:
        least = int(min(batches.count_bytes(1, plan) for plan in (None, smallest)))
        raise BudgetError(
            f"not even a batch of 1 fits into {format_bytes(limit)}: the least that was found is "
            + format_bytes(least),
            least,
        )
    carried, solution = [smallest] if smallest else [], None
    while solution is None:
        facts = batches.facts(batch)
        try:
            front = settle(facts, way) or (
                SearchResult([], interrupted=True, way=way)
                if interrupted
                else search_by(facts, way, for_front=True)
            )
            solution = choose_from(facts, front, carried)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
        except BudgetError as error:  # where the memory of marks is known by a bind alone
            if batch == 1:
                raise
            batch = max(1, min(batch - 1, batch * limit // error.least_bytes))
    if interrupted or solution.interrupted:
        log.warning("interrupted: a batch of %d is the largest that was found so far", batch)
        solution = replace(solution, interrupted=True)
    return LargestBatch(batch, make_plan(solution), unplanned, batches.network, batches.limits)


def _open_shapes(shapes: object) -> tuple[dict[str, Json], dict[str, str]]:
    """Read shapes, with None where the batch goes, and the types that DataDescs have."""
    types: dict[str, str] = {}
    axes: dict[str, int] = {}
    sizes: dict[str, tuple[int | None, ...]] = {}
    for name, shape in read_pairs(shapes, types, axes):
        if not isinstance(shape, (list, tuple)):
            raise MemongerError(f"input {name!r}: a shape is a tuple of integers, not {shape!r}")
        sizes[name] = tuple(shape)
        if sizes[name].count(None) > 1:
            remedy = "None is the batch; give all other sizes"
            raise MemongerError(f"input {name!r}: shape {sizes[name]} has None twice; {remedy}")
    if not any(None in shape for shape in sizes.values()):
        for name, axis in axes.items():  # an iterator's layouts tell where the batch is
            if 0 <= axis < len(sizes[name]):
                sizes[name] = (*sizes[name][:axis], None, *sizes[name][axis + 1 :])
    if not any(None in shape for shape in sizes.values()):
        example = "{'data': (None, 3, 224, 224)} (in a shell: --shape data=N,3,224,224)"
        raise MemongerError(f"no shape in {shapes!r} has None for the batch; write {example}")
    return sizes, types


def _largest(batches: Batches, plan: Candidate | None, limit: int) -> int:
    """Find the largest batch at which a plan takes at most ``limit`` bytes; 0 if not even one does.

    Each step expects a straight line through the last two batches.
    """
    low, high = 0, MOST_BATCH + 1  # a batch that fits, and one that does not
    batch, before = 1, (0, 0.0)
    with progress_bar("memonger: trying batches") as progress:
        while high - low > 1:
            nbytes = batches.count_bytes(batch, plan)
            low, high = (batch, high) if nbytes <= limit else (low, batch)
            slope = (nbytes - before[1]) / (batch - before[0])
            guess = batch + (limit - nbytes) / slope if 0 < slope < math.inf else (low + high) / 2
            before, batch = (batch, nbytes), min(high - 1, max(low + 1, int(guess)))
            progress(1 - math.log(high - low, MOST_BATCH))
    return low
