"""``largest_batch``: the largest batch that fits a budget."""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from memonger.api import fastest
from memonger.api.budgets import Budget, read_budget, told
from memonger.api.memory import of_marks
from memonger.api.plan import Plan, plan_of
from memonger.api.request import Network, read_network, read_request
from memonger.api.scheduling import check_limits
from memonger.costs.memory import MB
from memonger.graph.inputs import check_count, read_pairs
from memonger.graph.operators.tensors import Shape
from memonger.planners.marks.budget import Fast
from memonger.planners.marks.smallest import settle
from memonger.support.errors import BudgetError, MemongerError, TooLargeError

log = logging.getLogger("memonger")

FIRST_BATCH = 8  # whose smallest plan tells how large a batch may be
LARGEST = 2**20
ROUNDS = 2  # of looking for a smaller plan at the batch that was found


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
        return "a batch of %d fits with a plan, of %d without\n%s" % (
            self.batch,
            self.unplanned_batch,
            self.plan,
        )


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
    """The largest batch that fits a budget with a plan, and without.

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
    bound = read_budget(budget, budget_of, optimizer, ctx)
    if bound is None or bound.is_share:
        raise MemongerError(
            f"budget={budget!r}: the largest batch needs a budget in bytes, such as '11GB'; a "
            "share is of a network whose batch is known"
        )
    sized, types = _sized(shapes)
    types.update(type_dict or {})
    _, patience = check_limits("marks", None, patience)
    options = fastest.Options(
        check_count("ntrial", ntrial, 1), bool(kept_copies), patience, bool(measure)
    )

    def network(batch: int) -> Network:
        return read_network(read_request(net, sized(batch), {}, types, grad_req, ctx))

    memory = _Memory(network, bound)
    limit = int(bound.amount)
    nothing = memory.no_plan()
    unplanned = _largest(lambda n: memory(n, nothing), limit)
    plans, batch, start = [nothing], unplanned, max(FIRST_BATCH, unplanned)
    interrupted = False
    try:
        for _ in range(ROUNDS):
            at = memory.network(start)
            found = fastest.find_front(at, at.cost_model(), options, plans[1:])
            plans.append(found.front.plans[-1])
            batch = max(batch, _largest(lambda n: memory(n, plans[-1]), limit))
            interrupted = found.front.interrupted
            if interrupted or batch in (0, start):
                break
            start = batch
    except KeyboardInterrupt:
        if not batch:
            raise
        interrupted = True
    if not batch:
        least = min(memory(1, each) for each in plans)
        raise BudgetError(
            f"not even a batch of one was found to fit into {told(limit)}: it needs {told(least)}",
            least,
        )
    if interrupted:
        log.warning("interrupted: a batch of %d is the largest that was found so far", batch)
    while True:
        request = memory.network(batch).request
        try:
            solution, symbol = fastest.solve_budget(
                request, bound, options, plans[1:], searching=not interrupted
            )
            break
        except BudgetError as error:  # where memory is learned by binding alone
            if batch == 1:
                raise
            batch = max(1, min(batch - 1, batch * limit // error.least_bytes))
    if interrupted:
        solution = solution._replace(facts={**solution.facts, "interrupted": True})
    for warning in solution.warnings:
        log.warning(warning)
    return LargestBatch(batch, plan_of(request, symbol, solution), unplanned)


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


class _Memory:
    """What a plan takes at any batch, predicted."""

    def __init__(self, network: Callable[[int], Network], budget: Budget) -> None:
        self._make, self._budget = network, budget
        self._networks: dict[int, Network] = {}

    def network(self, batch: int) -> Network:
        """The network at a batch."""
        if batch not in self._networks:
            self._networks[batch] = self._make(batch)
        return self._networks[batch]

    def no_plan(self) -> Fast:
        """The plan that recomputes nothing."""
        nothing = np.zeros(len(self.network(1).graph.nodes), dtype=np.bool_)
        return Fast(0, 0.0, nothing, ())

    def __call__(self, batch: int, fast: Fast) -> int:
        """The bytes that the budget bounds, of a plan that was made at another batch."""
        try:
            network = self.network(batch)
        except TooLargeError:
            return round(self._budget.amount) * 2
        rules, full, _, _ = settle(network.rules, fast.mask, fast.copies)
        bound = rules.replay(full).pool_bytes // MB
        found = of_marks(rules.trainings[0], full, bound, network.held, rules.fuses)
        return self._budget.taken(found, network)


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
