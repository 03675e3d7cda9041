"""Tell a script of its plans, in lines on stderr."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from typing import Iterator

from memonger.api.plan import Plan
from memonger.solve.limits import Budget
from memonger.support.errors import format_size

package_log = logging.getLogger("memonger")
log = logging.getLogger("memonger.scripts")

TOLD = 5  # networks that are told one by one
SILENCE = 2.0  # seconds of planning, after which a line says what is being planned

NOTHING = (
    "that is done for what this process binds for gradients, and for hybridized blocks that it "
    "records (call hybridize() on Gluon's); a line above names what was refused"
)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # of stderr
    """Writes lines to stderr, each on a line of its own though tqdm shows a bar there."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # which clears and shows its bars
        if bars is None:
            super().emit(record)
        else:
            with bars.external_write_mode(file=self.stream):
                super().emit(record)


class SessionLog:
    """The lines of a session; ``asked`` is its budget, as it was given."""

    def __init__(self, asked: object) -> None:
        self._asked = asked
        self._planned: list[tuple[Plan, Budget | None]] = []
        self._seconds = 0.0  # that planning took
        self._lines: set[str] = set()  # that are told once
        self._kinds: set[str] = set()  # of warnings: how those begin that were told
        self._usual = package_log.level, package_log.propagate
        self._handler = _Handler()
        self._handler.setFormatter(logging.Formatter("memonger: %(message)s"))

    def begin(self) -> None:
        """Write what the package logs to stderr; the script's own log stays as it was."""
        package_log.setLevel(logging.WARNING)
        package_log.propagate = False
        package_log.addHandler(self._handler)
        log.setLevel(logging.INFO)

    def end(self) -> None:
        """Leave the package's log as it was."""
        package_log.removeHandler(self._handler)
        level, package_log.propagate = self._usual
        package_log.setLevel(level)

    def tell_once(self, level: int, line: str) -> None:
        """Write a line, unless it was written before."""
        if line not in self._lines:
            self._lines.add(line)
            log.log(level, "%s", line)

    def tell_unkept(self, reason: str) -> None:
        """Warn, once, that plans are not kept."""
        line = "plans are not kept for the next start"
        if line not in self._lines:
            self._lines.add(line)
            log.warning("%s: %s; MEMONGER_CACHE names the folder", line, reason)

    @contextlib.contextmanager
    def announced(self, network: str) -> Iterator[None]:
        """Tell which network is being planned, if that takes long."""
        text = "planning %s; Ctrl-C ends the script, --patience 0.1 plans faster"
        timer = threading.Timer(SILENCE, log.info, (text, network))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def tell_plan(self, network: str, plan: Plan, budget: Budget | None, seconds: float) -> None:
        """Tell of a plan; of the sixth and later only if it has a new kind of warning."""
        self._planned.append((plan, budget))
        self._seconds += seconds
        kinds = {re.split(r"[\d']", warning)[0] for warning in plan.warnings}
        if len(self._planned) <= TOLD or not kinds <= self._kinds:
            told = "; ".join([self._figures(plan, budget), *plan.warnings])
            log.info("%s: %s; planned in %.1f s", network, told, seconds)
        else:
            self.tell_once(logging.INFO, "more networks are planned; the end tells of all")
        self._kinds |= kinds

    def tell_all(self) -> None:
        """Tell of all plans; if there is none, why that may be, with a budget as a warning."""
        if self._planned:
            largest = max(self._planned, key=lambda pair: pair[0].unplanned_bytes)
            figures = self._figures(*largest, self._sum_unplanned())
            log.info("%s the largest %s; %.1f s to plan", self._counted(), figures, self._seconds)
        elif self._asked is not None:
            log.warning(
                "nothing was planned, so the budget of %s does not hold: %s", self._asked, NOTHING
            )
        else:
            log.info("nothing was planned: %s", NOTHING)

    def _figures(self, plan: Plan, budget: Budget | None, largest: int = 0) -> str:
        """Write the memory that the budget bounds, and the time that a plan adds.

        ``largest`` is that of the other sizes of the line, in bytes.
        """
        before, after = plan.unplanned_bytes, plan.pool_bytes
        if budget is not None and budget.of == "device":
            before, after = plan.unplanned_device_bytes, plan.device_bytes
        largest = max(before, largest)
        text = format_size(before, largest)
        if plan.pool_bytes < plan.unplanned_bytes:
            text += f" -> {format_size(after, largest)}"
            text += f", {100 * plan.time_overhead:.0f} % of a step's time added"
        else:
            text += f", as it is{plan.declined and ': '}{plan.declined}"
        if budget is not None:
            text += f", within the budget of {self._asked}{budget.describe_beside(largest)}"
        return text

    def _counted(self) -> str:
        """Count the networks that were planned, and sum what they take, if there are many."""
        plans = [plan for plan, _ in self._planned]
        planned = [plan for plan in plans if plan.pool_bytes < plan.unplanned_bytes]
        if len(plans) == 1:
            return f"{len(planned)} planned,"
        whole = self._sum_unplanned()
        after = format_size(sum(plan.pool_bytes for plan in plans), whole)
        sizes = f"{format_size(whole)} -> {after}"
        return f"{len(planned)} of {len(plans)} planned, {sizes} in all;"

    def _sum_unplanned(self) -> int:
        """Sum what all networks take without a plan, in bytes."""
        return sum(plan.unplanned_bytes for plan, _ in self._planned)
