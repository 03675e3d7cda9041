"""What ``frontier`` and ``largest_batch`` return."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Iterable, Mapping, NamedTuple, Sequence, Tuple

from memonger.api.plan import Plan, make_plan
from memonger.show import plot
from memonger.show.notebook import Page, write_table
from memonger.show.record import KINDS, PLACING
from memonger.show.report import check_report, ordered, write_report
from memonger.show.text import describe, write_lines
from memonger.solve.choose import choose
from memonger.solve.facts import Facts
from memonger.solve.limits import Limits, read_budget
from memonger.solve.network import Network, read_unplanned
from memonger.solve.search import search
from memonger.support.errors import BudgetError, format_size
from memonger.support.files import Path
from memonger.support.types import Amount, Json, Symbol, Types

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_A_CARD = (  # how a budget bounds a whole card
    "for a card of that size: --ctx gpu --gpu T4 --optimizer sgd,momentum=0.9 (in Python: "
    "ctx='gpu', gpu='T4', optimizer=('sgd', {'momentum': 0.9}))"
)
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


@dataclass(frozen=True, eq=False, repr=False)
class LargestBatch:
    """The largest batch that fits a budget; if ``plan.interrupted``, of those before Ctrl-C.

    Attributes
    ----------
    batch : int
    plan : Plan
        The fastest that fits at this batch.
    unplanned_batch : int
        The largest that fits without a plan; 0 if none does.
    request, limits
        The network with its batch open, and the limits, as the call gave them.
    """

    batch: int
    plan: Plan
    unplanned_batch: int
    request: Open
    limits: Limits

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
        budget = self.limits.budget
        return max(self.plan.largest_bytes, 0 if budget is None else int(budget.amount))

    @property
    def _fits(self) -> str:
        """Which batch fits with a plan, and without, into what; and if that is less than a card."""
        budget, plan = self.limits.budget, self.plan
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
        shown = ordered([self.plan], (), self.limits.budget, network)
        most, unplanned = self.batch, self.unplanned_batch
        batches = {max(1, unplanned * k // QUARTERS) for k in range(1, QUARTERS + 1)}
        batches |= {unplanned + (most - unplanned) * k // QUARTERS for k in range(1, QUARTERS)}
        plans = {most: self.plan}
        for batch in sorted(batches - {0, most}):
            with contextlib.suppress(BudgetError):  # this search may find less than that of `most`
                facts = Facts(self.request.at(batch), self.limits)
                plans[batch] = make_plan(choose(facts, search(facts)))
                if plans[batch].interrupted:
                    raise KeyboardInterrupt
        return write_report(file, replace(shown, batches=plans))
