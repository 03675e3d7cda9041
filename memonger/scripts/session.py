"""Plans for a script: for each network that it binds to train, each block that it hybridizes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from memonger.api import planning
from memonger.api.plan import Plan
from memonger.api.report import check_report
from memonger.gluon.cached_op import PlannedBlock
from memonger.gluon.planning import plan_others
from memonger.graph.operators.recompute import ANY, GPU
from memonger.scripts import kept
from memonger.scripts.binds import plan_binds
from memonger.solve.options import EITHER, read_plan_options
from memonger.support.errors import BudgetError, MemongerError, in_words
from memonger.support.symbols import as_json, read

package_log = logging.getLogger("memonger")
log = logging.getLogger("memonger.scripts")

#: Trains the network of one file by the plan of the other, and without.
_CHECK = """
import memonger, sys
network, plan = memonger.load(sys.argv[1]), memonger.load_plan(sys.argv[2])
(shapes, types), ctx = plan.request.spec, plan.request.ctx
about = {"type_dict": types, "grad_req": plan.request.grad_req, "ctx": ctx}
print(memonger.check(network, plan.symbol, shapes, **about))
"""
EQUAL = "equal: "  # so begins a CheckReport that has found no difference

_active: Session | None = None


class Session:
    """Training by plans from `enable` on; a context manager that ends it.

    Attributes
    ----------
    plans : list of Plan
        What was planned, one for each bind and each graph of a block.
    """

    def __init__(
        self, options: Mapping[str, Any], report: Any, check: bool, or_plain: bool, cache: bool
    ) -> None:
        usual = "marks" if options.get("budget") is None else EITHER
        self._options = {"how": usual, **options}
        self._budget = read_plan_options(**self._options).budget
        self._report, self._check, self._or_plain, self._cache = report, check, or_plain, cache
        if report is not None:
            check_report(report)
        self.plans: list[Plan] = []
        self._seconds = 0.0  # that planning took
        self._told: set[tuple[str, str]] = set()  # networks, and why they have no plan
        self._usual_logging = package_log.level, package_log.propagate
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(logging.Formatter("memonger: %(message)s"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        if _active is self:
            disable()

    def begin(self) -> None:
        """Plan from now on."""
        # The log of the script is its own, as it was.
        package_log.setLevel(logging.WARNING)
        package_log.propagate = False
        package_log.addHandler(self._handler)
        log.setLevel(logging.INFO)
        plan_binds(self)
        plan_others(self._asked_of)

    def end(self) -> None:
        """Plan no more; tell what was planned, and write the report."""
        plan_binds(None)
        plan_others(None)
        try:
            if self.plans:
                largest = max(self.plans, key=lambda plan: plan.unplanned_bytes)
                told = f"{len(self.plans)} planned, the largest {self._figures(largest)}"
                log.info("%s; %.1f s to plan", told, self._seconds)
                if self._report is not None:
                    largest.report(self._report)
        finally:
            package_log.removeHandler(self._handler)
            level, package_log.propagate = self._usual_logging
            package_log.setLevel(level)

    def _asked_of(self, block: Any) -> PlannedBlock:
        find_for = functools.partial(self._find, block.name, "Gluon")
        return PlannedBlock(block.name, self._options, self._budget, find_for)

    def planned(self, symbol: Any, ctx: Any, asked: Mapping[str, Any]) -> Any:
        """Make the symbol to bind in place of this one; this one if it is best as it is."""
        device = ctx if self._options.get("budget") == "device" else None
        usual = GPU if ctx.device_type == GPU else ANY
        given = {**asked, "ctx": device or usual, **self._options}
        plan = self._find(_name_of(symbol), str(ctx), symbol, **given)
        return plan.symbol if plan.pool_bytes < plan.unplanned_bytes else symbol

    def refuse(self, symbol: Any, reason: str) -> None:
        """Tell, once for each reason, why a network is trained without a plan."""
        name = _name_of(symbol)
        if (name, reason) not in self._told:
            self._told.add((name, reason))
            log.warning("%s trains without a plan: %s", name, reason)

    def _find(self, name: str, place: str, net: Any, shapes: Any, **keywords: Any) -> Plan:
        """Find a plan, or read the one that is kept, and tell of it."""
        start = time.monotonic()
        try:
            plan = self._kept_or_found(net, shapes, **keywords)
        except BudgetError as error:
            if not self._or_plain:
                raise
            raise MemongerError(str(error)) from None
        if plan.interrupted:  # Ctrl-C is for the script
            raise KeyboardInterrupt
        seconds = time.monotonic() - start
        if self._check:
            self._compare(name, net, plan)
        self.plans.append(plan)
        self._seconds += seconds
        request = plan.request
        states = request.symbol.list_auxiliary_states()
        fixed = {*states, *(n for n, request in request.grad_req.items() if request != "null")}
        inputs = [f"{n} {shape}" for n, shape in request.spec.shapes.items() if n not in fixed]
        about = f"{place}, {_some(inputs)}" if inputs else place
        log.info("%s on %s: %s; planned in %.1f s", name, about, self._figures(plan), seconds)
        return plan

    def _kept_or_found(self, net: Any, shapes: Any, **keywords: Any) -> Plan:
        file = kept.file_of(net, shapes, **keywords) if self._cache else None
        plan = kept.read(file) if file is not None else None
        if plan is None:
            plan = planning.plan(net, shapes, **keywords)
            if plan.added_time is None:
                with contextlib.suppress(MemongerError):
                    plan = replace(plan, added_time=plan.predict_time())
            if file is not None and not plan.interrupted:
                kept.write(file, plan)
        return plan

    def _figures(self, plan: Plan) -> str:
        """Tell what a plan takes of what the budget is of, and the time that it adds."""
        before, after = plan.unplanned_bytes, plan.pool_bytes
        if self._budget is not None and self._budget.of == "device":
            before, after = plan.unplanned_device_bytes, plan.device_bytes
        told = in_words(before)
        if plan.pool_bytes < plan.unplanned_bytes:
            told += f" -> {in_words(after)}"
            if plan.added_time is not None:
                told += f", {100 * plan.added_time:.0f} % of a step's time added"
        else:
            told += ", as it is"
        if self._budget is not None:
            told += f", within the budget of {self._options['budget']}"
        return told

    def _compare(self, name: str, network: Any, plan: Plan) -> None:
        """Train three steps with the plan and without, in a process with random numbers of its own.

        Raises
        ------
        MemongerError
            If the plan computes something else.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("net-symbol.json", "plan.json")]
            Path(files[0]).write_text(as_json(read(network)), encoding="utf-8")
            plan.save(files[1])
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _CHECK, *files],
                env=environment,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        if ran.returncode:
            said = (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1]
            log.warning("%s cannot be checked: %s", name, said)
        elif ran.stdout.startswith(EQUAL):
            log.info("%s, checked: %s", name, ran.stdout.strip())
        else:
            raise MemongerError(f"its plan computes something else: {ran.stdout.strip()}")


def _name_of(symbol: Any) -> str:
    return symbol.name or _some(symbol.list_outputs())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def enable(
    *,
    how: str | None = None,
    work: float | None = None,
    budget: Any = None,
    budget_of: str | None = None,
    optimizer: Any = None,
    measure: bool = False,
    patience: float | None = None,
    report: Any = None,
    check: bool = False,
    or_plain: bool = False,
    cache: bool = True,
) -> Session:
    """Plan all that this process trains from now on, as it is bound; the code stays as it is.

    That is what ``Module``, ``FeedForward``, ``Symbol.simple_bind`` and ``bind`` bind for
    gradients, at the shapes, types and devices of the bind, and the graphs of Gluon's hybridized
    blocks. Symbols, files and what is bound for inference stay as they are. What was planned
    already, or has marks of its own, is left so. One line on stderr tells of each bind.

    Parameters
    ----------
    how : {'marks', 'schedule', 'auto'}, optional
        As `plan` takes it; by default 'marks', and with a budget 'auto'.
    work, budget, budget_of, optimizer, measure, patience
        As `plan` takes them.
    report : str or path, optional
        Where a page of the largest network is written at the end.
    check : bool
        Train three steps of each network with its plan and without first, in another process, and
        compare them. Where anything differs the network is trained without the plan.
    or_plain : bool
        Where no plan fits the budget, train without a plan rather than to stop.
    cache : bool
        Keep plans in the user's cache folder, and take those that are kept there.

    Returns
    -------
    Session
        A context manager: what is planned ends with its block, or with `disable`.

    Raises
    ------
    MemongerError
        If an option is wrong.

    Examples
    --------
    >>> with memonger.enable(budget='60%'):
    ...     mod.fit(train_iter, num_epoch=10)
    """
    global _active
    asked = {"how": how, "work": work, "budget": budget, "budget_of": budget_of}
    asked.update(optimizer=optimizer, measure=measure or None, patience=patience)
    options = {name: value for name, value in asked.items() if value is not None}
    session = Session(options, report=report, check=check, or_plain=or_plain, cache=cache)
    disable()
    session.begin()
    _active = session
    return session


def disable() -> None:
    """Plan nothing more in this process; what is bound by then keeps its plans.

    Examples
    --------
    >>> memonger.enable(how='schedule')
    >>> mod.fit(train_iter, num_epoch=10)
    >>> memonger.disable()
    """
    global _active
    ended, _active = _active, None
    if ended is not None:
        ended.end()
