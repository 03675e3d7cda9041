"""The plans that no other beats (``frontier``), and the ``largest_batch`` that fits a budget."""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import lru_cache, partial
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.api import plot
from memonger.api.docstrings import documented
from memonger.api.plan import Plan, plan_of
from memonger.graph.inputs import check_count, read_pairs
from memonger.planners.pareto import not_dominated
from memonger.solve.request import EITHER, WAYS, Options, Request, read_options, read_request
from memonger.solve.solution import Solution, in_bytes, solution_of, solve
from memonger.solve.ways import Candidate, Marks, Way, way_of
from memonger.support.errors import MB, BudgetError, MemongerError, TooLargeError

log = logging.getLogger("memonger")

FIRST_BATCH = 8  # whose smallest plan tells how large a batch may be
LARGEST = 2**20
ROUNDS = 2  # of looking for a smaller plan at the batch that was found


class Frontier(Tuple[Plan, ...]):
    """Plans that no other beats in both memory and time, the fastest first; prints as a table."""

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended early (Ctrl-C): these are the best that it had found."""
        return any(each.interrupted for each in self)

    def __str__(self) -> str:
        titles = ("memory (MB)", "share", "added time", "recomputed", "copies")
        lines = ["{:>12} {:>8} {:>12} {:>10} {:>8}".format(*titles)]
        for each in self:
            share = 100 * each.pool_bytes / max(1, each.unplanned_bytes)
            lines.append(
                f"{each.pool_bytes / MB:12.1f} {share:6.0f} % {100 * (each.added_time or 0):10.1f} "
                f"% {len(each.recomputed):10} {len(each.copies):8}"
            )
        return "\n".join(lines)

    @documented
    def plot(self, file: Any) -> None:
        """Draw memory against the predicted time."""
        pools, added = zip(*((each.pool_bytes, each.added_time or 0.0) for each in self))
        plot.plot_frontier(file, pools, added, self[0].unplanned_bytes)


@documented
def frontier(
    net: Any,
    shapes: Any = None,
    *,
    how: str = "marks",
    points: int = 20,
    measure: bool = False,
    patience: float = 1.0,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    ntrial: int = 6,
    until: str | None = None,
    devices: int = 1,
    kept_copies: bool = True,
    **input_shapes: Any,
) -> Frontier:
    """Find the plans that no other beats in both memory and time, from no plan to the smallest.

    Parameters
    ----------
    how : {'marks', 'schedule', 'auto'}
        Plans of which kind; 'auto': of both, by two searches.
    points : int
        The most plans that are returned; each is bound once. Where there are more, those are taken
        whose memory is nearest to equal steps between no plan and the smallest.

    Returns
    -------
    Frontier
        A tuple of ``Plan``, the fastest first. Printed it is a table; ``plot`` draws it.

    Examples
    --------
    >>> print(memonger.frontier(net, {'data': (32, 3, 224, 224)}))
    """
    points = check_count("points", points, 2)
    options, request = read_options(locals()), read_request(locals())
    plans, interrupted = _candidates(request, options)
    solutions: list[Solution] = []
    try:
        for k in _spread([pool for _, pool, *_ in plans], points):
            solutions.append(solution_of(*plans[k][2:]))
    except KeyboardInterrupt:
        if not solutions:
            raise
        interrupted = True
    if interrupted:
        log.warning("interrupted: these are the plans that were found so far")
    for warning in dict.fromkeys(text for each in solutions for text in each.warnings):
        log.warning(warning)
    made = [plan_of(request, solution) for solution in solutions]
    made = not_dominated(made, lambda plan: (plan.added_time or 0.0, plan.pool_bytes))
    return Frontier(dataclasses.replace(plan, interrupted=interrupted) for plan in made)


_Point = Tuple[float, int, Way, Candidate]  # the time that a plan adds, and its pool


def _candidates(request: Request, options: Options) -> tuple[list[_Point], bool]:
    """Search for the plans that no other beats, by one way or both; whether that was ended."""
    plans: list[_Point] = []
    interrupted = False
    for how in WAYS if options.how == EITHER else (options.how,):
        try:
            way = way_of(request, dataclasses.replace(options, how=how))
            found = way.front()
        except (MemongerError, KeyboardInterrupt) as error:  # a network that no schedule can hold
            if not plans:
                raise
            log.info("no plans by how=%r: %s", how, error)
            interrupted = isinstance(error, KeyboardInterrupt)
            break
        known = [plan if plan.recomputed.any() else way.no_plan for plan in found.plans]
        pools = way.pools(found.plans)
        plans += [(plan.added_time or 0.0, n, way, plan) for plan, n in zip(known, pools)]
        interrupted = found.interrupted
        if interrupted:
            break
    return not_dominated(plans, lambda plan: plan[:2]), interrupted


def _spread(pools: Sequence[int], points: int) -> list[int]:
    """Choose the places of at most so many plans, nearest to equal steps from first to last."""
    if len(pools) <= points:
        return list(range(len(pools)))
    steps = np.linspace(pools[0], pools[-1], points)
    return sorted({int(np.abs(np.array(pools) - step).argmin()) for step in steps})


class LargestBatch(NamedTuple):
    """The largest batch that fits a budget.

    If ``plan.interrupted``, the search was ended early (Ctrl-C), and this is the largest that was
    found so far.

    Attributes
    ----------
    batch : int
    plan : Plan
        The fastest that fits at this batch.
    unplanned_batch : int
        The largest that fits without a plan; 0 if none does.
    """

    batch: int
    plan: Plan
    unplanned_batch: int

    def __str__(self) -> str:
        fits = f"a batch of {self.batch} fits with a plan, of {self.unplanned_batch} without"
        return f"{fits}\n{self.plan}"


@documented
def largest_batch(
    net: Any,
    shapes: Any,
    budget: Any,
    *,
    budget_of: str | None = None,
    optimizer: Any = None,
    measure: bool = False,
    patience: float = 1.0,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    ntrial: int = 6,
    kept_copies: bool = True,
) -> LargestBatch:
    """Find the largest batch that fits a budget with a plan, and without.

    The smallest plan of a batch is found, and it is predicted how large the batch may grow with it;
    then a plan of that batch is looked for. Nothing is run, and little is bound.

    Parameters
    ----------
    shapes : dict or list of mx.io.DataDesc
        Shapes of the inputs with None where the batch goes: ``{'data': (None, 3, 224, 224)}``; or
        ``iterator.provide_data + iterator.provide_label``, whose layouts tell where it goes.
    budget : int or str
        Bytes, text such as '11GB', or 'device'.

    Examples
    --------
    >>> found = memonger.largest_batch(net, {'data': (None, 3, 224, 224)}, budget='11GB')
    """
    given = dict(locals())
    options = read_options(given)
    if options.budget is None or options.budget.is_share:
        said = "the largest batch needs a budget in bytes, such as '11GB'"
        raise MemongerError(f"budget={budget!r}: {said}")
    open_shapes, types = _open_shapes(shapes)
    given["type_dict"] = {**types, **(type_dict or {})}

    @lru_cache(maxsize=None)
    def way(batch: int) -> Marks:
        sizes = {n: tuple(batch if k is None else k for k in s) for n, s in open_shapes.items()}
        return Marks(read_request({**given, "shapes": sizes}), options)

    return _largest_batch(way, int(options.budget.amount))


def _largest_batch(way: Callable[[int], Marks], limit: int) -> LargestBatch:
    """Find the largest batch that takes at most ``limit`` bytes; ``way`` plans for a batch."""

    def taken(plan: Candidate, batch: int) -> float:
        """The bytes that the budget bounds, of a plan that was made at another batch."""
        try:
            here = way(batch)
        except TooLargeError:
            return math.inf
        return here.taken(here.memory(plan))

    nothing = Candidate("no plan", 0, way(1).nothing)
    batch = unplanned = _largest(partial(taken, nothing), limit)
    plans: list[Candidate] = []
    interrupted = False
    try:
        for _ in range(ROUNDS):
            start = max(FIRST_BATCH, unplanned) if not plans else batch
            found = way(start).front(plans)
            plans.append(found.plans[-1])
            batch = max(batch, _largest(partial(taken, plans[-1]), limit))
            interrupted = found.interrupted
            if interrupted or batch in (0, start):
                break
    except KeyboardInterrupt:
        if not batch:
            raise
        interrupted = True
    if not batch:
        least = int(min(taken(plan, 1) for plan in [nothing, *plans]))
        said = f"not even a batch of 1 fits into {in_bytes(limit)}: the least that was found is "
        raise BudgetError(said + in_bytes(least), least)
    if interrupted:
        log.warning("interrupted: a batch of %d is the largest that was found so far", batch)
    while True:
        here = way(batch)
        try:
            search = here.known if interrupted else here.front
            solution = solve(here, partial(search, plans))
            break
        except BudgetError as error:  # where memory is learned by binding alone
            if batch == 1:
                raise
            batch = max(1, min(batch - 1, batch * limit // error.least_bytes))
    for warning in solution.warnings:
        log.warning(warning)
    plan = plan_of(here.request, solution)
    plan = dataclasses.replace(plan, interrupted=interrupted or plan.interrupted)
    return LargestBatch(batch, plan, unplanned)


def _open_shapes(shapes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read shapes, with None where the batch goes, and the types that are told with them."""
    types: dict[str, Any] = {}
    axes: dict[str, int] = {}
    given = dict(read_pairs(shapes, types, axes))
    for name, shape in given.items():
        if not isinstance(shape, (list, tuple)):
            raise MemongerError(f"input {name!r}: a shape is a tuple of integers, not {shape!r}")
    if not any(None in shape for shape in given.values()):
        for name, axis in axes.items():  # an iterator knows where it is, and how large it was
            if 0 <= axis < len(given[name]):
                given[name] = (*given[name][:axis], None, *given[name][axis + 1 :])
    if not any(None in shape for shape in given.values()):
        example = "{'data': (None, 3, 224, 224)}"
        raise MemongerError(f"no shape in {shapes!r} has None for the batch; write {example}")
    return given, types


def _largest(taken: Callable[[int], float], limit: int) -> int:
    """Find the largest batch that takes at most ``limit`` bytes, 0 if not even one does.

    Each step expects a straight line through the last two batches.
    """
    low, high = 0, LARGEST + 1  # what fits, and what does not
    batch, before = 1, (0, 0.0)
    while high - low > 1:
        nbytes = taken(batch)
        low, high = (batch, high) if nbytes <= limit else (low, batch)
        slope = (nbytes - before[1]) / (batch - before[0])
        guess = batch + (limit - nbytes) / slope if 0 < slope < math.inf else (low + high) / 2
        before, batch = (batch, nbytes), min(high - 1, max(low + 1, int(guess)))
    return low
