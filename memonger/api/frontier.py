"""The Pareto-optimal plans (``frontier``), and the ``largest_batch`` that fits a budget."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Iterable, Mapping, NamedTuple, NoReturn, Sequence, Tuple

import numpy as np

from memonger.api.plan import Plan, make_plan
from memonger.graph.inputs import read_devices, read_pairs, trace
from memonger.planners.candidates import Candidate, SearchResult, by_seconds, pareto_front
from memonger.schedules.layouts import LayoutMismatch
from memonger.show import plot
from memonger.show.notebook import Page, write_table
from memonger.show.record import KINDS, PLACING
from memonger.show.report import check_report, ordered, write_report
from memonger.show.text import describe, write_lines
from memonger.solve.choose import (
    choose,
    choose_from,
    choose_refusal,
    choose_smallest,
    explain_marks,
    solution_or_none,
)
from memonger.solve.describe import format_bytes
from memonger.solve.facts import Facts
from memonger.solve.limits import Limits, bound_gpu, check_keywords, read_budget, read_limits
from memonger.solve.network import Network, read_call, read_unplanned
from memonger.solve.search import list_ways, predict_memory, search, search_by, settle
from memonger.solve.selection import Selector
from memonger.support.allocator import trim_heap
from memonger.support.checks import check_count
from memonger.support.errors import BudgetError, MemongerError, TooLargeError, format_size
from memonger.support.files import Path
from memonger.support.parallel import progress_bar
from memonger.support.types import Amount, Json, OpenShapes, Shapes, Symbol, SymbolOrBlock, Types

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("memonger")

FIRST_BATCH = 8  # with whose smallest plan the largest batch is predicted
OF_A_CARD = (  # how a budget bounds a whole card
    "for a card of that size: --ctx gpu --gpu T4 --optimizer sgd,momentum=0.9 (in Python: "
    "ctx='gpu', gpu='T4', optimizer=('sgd', {'momentum': 0.9}))"
)
MOST_BATCH = 2**20
QUARTERS = 4  # steps of a report up to the batch that fits without a plan, and beyond it


class Frontier(Tuple[Plan, ...]):
    """Pareto-optimal plans in memory and time, the fastest first; prints as a table."""

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended early (Ctrl-C), with the best plans until then."""
        return any(plan.interrupted for plan in self)

    def __str__(self) -> str:
        lines = ["      memory    share   added time recomputed   copies  plan"]
        for size, share, time, recomputed, copies, kind in self._rows:
            lines.append(f"{size:>12} {share:>8} {time:>12} {recomputed:>10} {copies:>8}  {kind}")
        return "\n".join([*lines, *self._placing])

    @property
    def _rows(self) -> Sequence[tuple[str, ...]]:
        """The texts of the table; all sizes have one unit."""
        largest, rows = max(plan.pool_bytes for plan in self), []
        for plan in self:
            share = 100 * plan.pool_bytes / max(1, plan.unplanned_bytes)
            figures = f"{share:.0f} %", f"{100 * plan.time_overhead:.1f} %"
            counts = str(len(plan.recomputed)), str(len(plan.copies))
            size = format_size(plan.pool_bytes, largest)
            rows.append((size, *figures, *counts, KINDS[plan.kind]))
        return rows

    @property
    def _placing(self) -> Sequence[str]:
        """A line on why placing alone saves memory, where a plan does only that."""
        is_told = any(plan.kind == "placed" for plan in self)
        return [f"where nothing is recomputed, {PLACING}"] if is_told else []

    def __repr__(self) -> str:
        return f"Frontier({len(self)} plans)"

    def _repr_html_(self) -> str:
        head = ["memory", "share", "added time", "recomputed", "copies", "plan"]
        return write_table(self._rows, head) + "".join(f"<p>{line}</p>" for line in self._placing)

    def plot(self, file: Path | None = None) -> Figure:
        """Draw memory against the predicted time; ``file`` and result are as of `Plan.plot`."""
        return plot.plot_frontier(file, self)

    def report(
        self,
        file: Path | None = None,
        *,
        others: Iterable[Plan] = (),
        budget: Amount | None = None,
        budget_of: str | None = None,
        optimizer: object = None,
        network: str = "net-symbol.json",
    ) -> Page | None:
        """Write a page of all plans, the fastest within the budget first, or else the smallest.

        Arguments and result are as of `Plan.report`.
        """
        limit = read_budget(budget, budget_of, optimizer, self[0].request.ctx)
        return write_report(file, ordered(self, others, limit, network))


@trim_heap()
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
        no ``work``, ``budget``, ``slower_than``, ``budget_of``, ``optimizer``, ``planner``,
        ``rules``.
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


class _Largest(NamedTuple):
    batch: int
    plan: Plan
    unplanned_batch: int


class LargestBatch(_Largest):
    """The largest batch that fits a budget; if ``plan.interrupted``, of those before Ctrl-C.

    Attributes
    ----------
    batch : int
    plan : Plan
        The fastest that fits at this batch.
    unplanned_batch : int
        The largest that fits without a plan; 0 if none does.
    """

    _network: Open
    _limits: Limits

    def __repr__(self) -> str:
        batches = f"batch={self.batch}, unplanned_batch={self.unplanned_batch}"
        return f"LargestBatch({batches}, plan={self.plan!r})"

    def __str__(self) -> str:
        return f"{self._fits}\n{write_lines(describe(self.plan, self._most))}"

    def _repr_html_(self) -> str:
        lines = "<br>".join(map(escape, self._fits.splitlines()))
        return f"<p>{lines}</p>{write_table([*describe(self.plan, self._most).items()])}"

    @property
    def _most(self) -> int:
        """The largest of all sizes that are printed, in bytes: they are in the unit of it."""
        budget = self._limits.budget
        return max(self.plan.largest_bytes, 0 if budget is None else int(budget.amount))

    @property
    def _fits(self) -> str:
        """Which batch fits with a plan, and without, into what; and if that is less than a card."""
        budget, plan = self._limits.budget, self.plan
        fits = f"a batch of {self.batch} fits with a plan, of {self.unplanned_batch} without"
        if budget is None:
            return fits
        size = format_size(int(budget.amount), self._most)
        if budget.of == "device":
            return f"{fits}, into {size} of the whole device{budget.describe_beside(self._most)}"
        fits += f", into {size} of MXNet's pool"
        if plan.device_bytes <= budget.amount:
            return fits
        taken = format_size(plan.device_bytes, self._most)
        more = f"{taken} of the device are taken, more than {size}"
        return f"{fits}\ncard       {more}; {OF_A_CARD}"

    def report(self, file: Path | None = None, *, network: str = "net-symbol.json") -> Page | None:
        """Write a page of the plan, and of the samples a second to hope for at smaller batches.

        At up to four of these the fastest plan that fits is searched for, as `memonger.plan` does.
        The others fit without one. Ctrl-C ends it, and no page is written. ``file``, ``network``
        and the result are as of `Plan.report`.
        """
        check_report(file)
        shown = ordered([self.plan], (), self._limits.budget, network)
        most, unplanned = self.batch, self.unplanned_batch
        batches = {max(1, unplanned * k // QUARTERS) for k in range(1, QUARTERS + 1)}
        batches |= {unplanned + (most - unplanned) * k // QUARTERS for k in range(1, QUARTERS)}
        plans = {most: self.plan}
        for batch in sorted(batches - {0, most}):
            with contextlib.suppress(BudgetError):  # this search may find less than that of `most`
                facts = Facts(self._network.at(batch), self._limits)
                plans[batch] = make_plan(choose(facts, search(facts)))
                if plans[batch].interrupted:
                    raise KeyboardInterrupt
        return write_report(file, replace(shown, batches=plans))


@trim_heap()
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
    largest._network, largest._limits = batches.network, limits
    return largest


class Open(NamedTuple):
    """A network whose batch is open: arguments of `read_unplanned`, with None in shapes."""

    symbol: Symbol
    shapes: Mapping[str, Json]
    type_dict: Types
    grad_req: object
    ctx: object

    def at(self, batch: int) -> Network:
        """Check the network at a batch."""
        sizes = {n: [batch if k is None else k for k in s] for n, s in self.shapes.items()}
        return read_unplanned(
            self.symbol, sizes, type_dict=self.type_dict, grad_req=self.grad_req, ctx=self.ctx
        )


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
    return LargestBatch(batch, make_plan(solution), unplanned)


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
