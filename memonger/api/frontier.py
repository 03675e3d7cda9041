"""The plans that no other beats (``frontier``), and the ``largest_batch`` that fits a budget."""

from __future__ import annotations

import dataclasses
import logging
from functools import lru_cache, partial
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from memonger.api import plot
from memonger.api.plan import Plan, plan_of
from memonger.api.planning import as_for_plan, request_of
from memonger.graph.inputs import check_count, read_pairs
from memonger.graph.operators.tensors import Shape
from memonger.planners.pareto import not_dominated
from memonger.solve.budget import in_bytes
from memonger.solve.request import EITHER, WAYS, read_options, read_request
from memonger.solve.solution import Solution, solution_of, solve
from memonger.solve.ways import Candidate, Marks, Way, way_of
from memonger.support.errors import MB, BudgetError, MemongerError, TooLargeError

log = logging.getLogger("memonger")

FIRST_BATCH = 8  # whose smallest plan tells how large a batch may be
LARGEST = 2**20
ROUNDS = 2  # of looking for a smaller plan at the batch that was found


# -- the plans that no other beats ------------------------------------------------------------


class Frontier(Tuple[Plan, ...]):
    """Plans that no other beats in both memory and time, the fastest first; prints as a table."""

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended early (Ctrl-C): these are the best that it had found."""
        return any(each.interrupted for each in self)

    def __str__(self) -> str:
        titles = ("memory (MB)", "of all", "added time", "recomputed", "copies")
        lines = ["{:>12} {:>8} {:>12} {:>10} {:>8}".format(*titles)]
        for each in self:
            share = 100 * each.pool_bytes / max(1, each.unplanned_bytes)
            lines.append(
                f"{each.pool_bytes / MB:12.1f} {share:6.0f} % "
                f"{100 * (each.added_time or 0):10.1f} % {len(each.recomputed):10} "
                f"{len(each.copies):8}"
            )
        return "\n".join(lines)

    def plot(self, file: Any) -> None:
        """Draw memory against the predicted time.

        Parameters
        ----------
        file : str or path
            A picture of 1200 by 800 pixels where it ends in ``.png``; ``.svg`` and ``.pdf`` too.

        Raises
        ------
        MemongerError
            If matplotlib is not installed, or the file cannot be written.

        Examples
        --------
        >>> memonger.frontier(net, {'data': (32, 3, 224, 224)}).plot('frontier.png')
        """
        pools, added = zip(*((each.pool_bytes, each.added_time or 0.0) for each in self))
        plot.plot_frontier(file, pools, added, self[0].unplanned_bytes)


@as_for_plan
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
    net : mx.sym.Symbol
    how : {'marks', 'schedule', 'auto'}
        Plans of which kind; 'auto': of both, by two searches.
    points : int
        The most plans that are returned; each is bound once. Where there are more, those are taken
        whose memory is nearest to equal steps between no plan and the smallest.
    shapes, measure, patience, type_dict, grad_req, ctx, ntrial, until, devices, kept_copies,
    **input_shapes
        As for ``plan``.

    Returns
    -------
    Frontier
        A tuple of ``Plan``, the fastest first. Printed it is a table; ``plot`` draws it.

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.
    KeyboardInterrupt
        If it is interrupted before anything was found; later, what was found so far is returned.

    Examples
    --------
    >>> plans = memonger.frontier(net, {'data': (32, 3, 224, 224)})
    >>> print(plans)
    """
    points = check_count("points", points, 2)
    options, request = read_options(locals()), request_of(locals())
    plans: list[tuple[float, int, Way, Candidate]] = []
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
        for plan, pool in zip(found.plans, way.pools(found.plans)):
            if not plan.recomputed.any():
                plan = way.no_plan
            plans.append((plan.added_time or 0.0, pool, way, plan))
        interrupted = found.interrupted
        if interrupted:
            break
    plans = not_dominated(plans, lambda plan: plan[:2])
    solutions: list[tuple[Solution, Any]] = []
    try:
        for k in _spread([pool for _, pool, *_ in plans], points):
            solutions.append(solution_of(*plans[k][2:]))
    except KeyboardInterrupt:
        if not solutions:
            raise
        interrupted = True
    if interrupted:
        log.warning("interrupted: these are the plans that were found so far")
    for warning in dict.fromkeys(text for solution, _ in solutions for text in solution.warnings):
        log.warning(warning)
    made = [plan_of(request, symbol, solution) for solution, symbol in solutions]
    made = [dataclasses.replace(plan, interrupted=interrupted) for plan in made]
    keys = [(plan.added_time or 0.0, plan.pool_bytes, plan) for plan in made]
    return Frontier(plan for *_, plan in not_dominated(keys, lambda key: key[:2]))


def _spread(pools: Sequence[int], points: int) -> list[int]:
    """The places of at most so many plans, nearest to equal steps from the first to the last."""
    if len(pools) <= points:
        return list(range(len(pools)))
    steps = np.linspace(pools[0], pools[-1], points)
    return sorted({int(np.abs(np.array(pools) - step).argmin()) for step in steps})


# -- the largest batch ------------------------------------------------------------------------


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


@as_for_plan
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
    net : mx.sym.Symbol
    shapes : dict or list of mx.io.DataDesc
        Shapes of the inputs with None where the batch goes: ``{'data': (None, 3, 224, 224)}``; or
        ``iterator.provide_data + iterator.provide_label``, whose layouts tell where it goes.
    budget : int or str
        Bytes, text such as '11GB', or 'device'.
    budget_of, optimizer, measure, patience, type_dict, grad_req, ctx, ntrial, kept_copies
        As for ``plan``.

    Returns
    -------
    LargestBatch

    Raises
    ------
    BudgetError
        If not even a batch of one fits.
    MemongerError
        If no shape says where the batch goes, or the budget is a share.
    KeyboardInterrupt
        If it is interrupted before any batch is known to fit; later, the largest so far is
        returned.

    Examples
    --------
    >>> found = memonger.largest_batch(net, {'data': (None, 3, 224, 224)}, budget='11GB')
    >>> found.batch, found.unplanned_batch
    """
    options = read_options(locals())
    if options.budget is None or options.budget.is_share:
        raise MemongerError(
            f"budget={budget!r}: the largest batch needs a budget in bytes, such as '11GB'; a "
            "share is of a network whose batch is known"
        )
    sized, types = _sized(shapes)
    types.update(type_dict or {})
    limit = int(options.budget.amount)

    @lru_cache(maxsize=None)
    def way(batch: int) -> Marks:
        return Marks(read_request(net, sized(batch), {}, types, grad_req, ctx), options)

    def taken(batch: int, plan: Candidate) -> int:
        """The bytes that the budget bounds, of a plan that was made at another batch."""
        try:
            here = way(batch)
        except TooLargeError:
            return 2 * limit
        return here.taken(here.memory(plan))

    nothing = Candidate("no plan", 0, way(1).nothing)
    unplanned = _largest(lambda batch: taken(batch, nothing), limit)
    plans, batch, interrupted = _grown(way, taken, limit, unplanned)
    if not batch:
        least = min(taken(1, each) for each in [nothing, *plans])
        raise BudgetError(
            f"not even a batch of one was found to fit into {in_bytes(limit)}: it needs "
            f"{in_bytes(least)}",
            least,
        )
    if interrupted:
        log.warning("interrupted: a batch of %d is the largest that was found so far", batch)
    while True:
        here = way(batch)
        try:
            search = here.known if interrupted else here.front
            solution, symbol = solve(here, partial(search, plans))
            break
        except BudgetError as error:  # where memory is learned by binding alone
            if batch == 1:
                raise
            batch = max(1, min(batch - 1, batch * limit // error.least_bytes))
    for warning in solution.warnings:
        log.warning(warning)
    plan = plan_of(here.request, symbol, solution)
    interrupted = interrupted or plan.interrupted
    return LargestBatch(batch, dataclasses.replace(plan, interrupted=interrupted), unplanned)


def _grown(
    way: Callable[[int], Marks], taken: Callable[[int, Candidate], int], limit: int, unplanned: int
) -> tuple[list[Candidate], int, bool]:
    """Find small plans, and predict how large the batch may grow with them.

    Returns the plans, the batch, and whether the user has ended the search.
    """
    plans: list[Candidate] = []
    batch, start = unplanned, max(FIRST_BATCH, unplanned)
    try:
        for _ in range(ROUNDS):
            found = way(start).front(plans)
            plans.append(found.plans[-1])
            batch = max(batch, _largest(lambda n: taken(n, plans[-1]), limit))
            if found.interrupted or batch in (0, start):
                return plans, batch, found.interrupted
            start = batch
    except KeyboardInterrupt:
        if not batch:
            raise
        return plans, batch, True
    return plans, batch, False


def _sized(shapes: Any) -> tuple[Callable[[int], dict[str, Shape]], dict[str, Any]]:
    """Shapes with a batch yet to be told: a function that puts it in; the types that are told."""
    types: dict[str, Any] = {}
    axes: dict[str, int] = {}
    given = dict(read_pairs(shapes, types, axes))
    for name, shape in given.items():
        if not isinstance(shape, (list, tuple)):
            raise MemongerError(f"input {name!r}: a shape is a tuple of integers, not {shape!r}")
    places = {name: [k for k, n in enumerate(s) if n is None] for name, s in given.items()}
    if not any(places.values()):  # an iterator knows where the batch is, and how large it was
        places = {name: [axis] for name, axis in axes.items() if 0 <= axis < len(given[name])}
    if not places:
        raise MemongerError(
            "no shape has None where the batch goes; give shapes such as "
            f"{{'data': (None, 3, 224, 224)}}, not {shapes!r}"
        )

    def sized(batch: int) -> dict[str, Shape]:
        return {
            name: tuple(batch if k in places.get(name, ()) else n for k, n in enumerate(shape))
            for name, shape in given.items()
        }

    return sized, types


def _largest(taken: Callable[[int], int], limit: int) -> int:
    """The largest batch that takes at most ``limit`` bytes, by steps that expect a straight line.

    0 if a batch of one takes more.
    """
    low, at_low = 1, taken(1)
    if at_low > limit:
        return 0
    high, at_high = 2, taken(2)
    while at_high <= limit:
        if high >= LARGEST:
            return high
        slope = max(1.0, (at_high - at_low) / (high - low))
        low, at_low = high, at_high
        high = min(LARGEST, max(low + 1, int(low + (limit - at_low) / slope) + 1))
        at_high = taken(high)
    while high - low > 1:
        slope = (at_high - at_low) / (high - low)
        middle = min(high - 1, max(low + 1, int(low + (limit - at_low) / slope)))
        at_middle = taken(middle)
        if at_middle <= limit:
            low, at_low = middle, at_middle
            if high - low > 1:  # the next is likely too large
                at_next = taken(low + 1)
                if at_next > limit:
                    return low
                low, at_low = low + 1, at_next
        else:
            high, at_high = middle, at_middle
    return low
