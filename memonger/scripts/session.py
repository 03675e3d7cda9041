"""Plans for a script: for each network that it binds for training, each block it hybridizes."""

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
from typing import Any, Sequence

from memonger.api import planning
from memonger.api.plan import Plan
from memonger.api.report import check_report
from memonger.gluon.cached_op import PlannedBlock
from memonger.gluon.planning import plan_others
from memonger.graph.operators.recompute import ANY, GPU
from memonger.scripts import kept
from memonger.scripts.binds import plan_binds
from memonger.solve.options import EITHER, read_options
from memonger.solve.request import NAMING
from memonger.solve.selection import Selector
from memonger.support.errors import BudgetError, MemongerError, UnmatchedError, in_words
from memonger.support.files import Path as FilePath
from memonger.support.mxnet import mx
from memonger.support.symbols import as_json, read
from memonger.support.types import Block, Context, Keywords, Symbol

package_log = logging.getLogger("memonger")
log = logging.getLogger("memonger.scripts")

#: Trains the network of one file with the plan of the other, and without.
_CHECK = """
import memonger, mxnet, sys
mxnet.util.set_np_shape(sys.argv[3] == "True")
network, plan = memonger.load(sys.argv[1]), memonger.load_plan(sys.argv[2])
(shapes, types), ctx = plan.request.spec, plan.request.ctx
grad_req = plan.request.grad_req
print(memonger.check(network, plan.symbol, shapes, type_dict=types, ctx=ctx, grad_req=grad_req))
"""
EQUAL = "equal: "  # with which a CheckReport without a difference begins

_active: Session | None = None


class Session:
    """Training by plans from `enable` on; a context manager that ends it.

    Attributes
    ----------
    plans : list of Plan
        A plan for each bind, and for each graph of a block.
    """

    def __init__(
        self, options: Keywords, report: FilePath | None, check: bool, or_plain: bool, cache: bool
    ) -> None:
        limits = (options.get(name) for name in ("budget", "slower_than"))
        usual = "marks" if all(limit is None for limit in limits) else EITHER
        self._options = {"how": usual, **options}
        self._of_blocks = {"how": EITHER, **options}
        checked = {k: v for k, v in self._options.items() if k not in NAMING}
        self._budget = read_options(**checked).budget
        self._report, self._check, self._or_plain, self._cache = report, check, or_plain, cache
        if report is not None:
            check_report(report)
        self.plans: list[Plan] = []
        self._seconds = 0.0  # that planning took
        self._refusals: set[tuple[str, str]] = set()  # networks, and why they have no plan
        self._usual_logging = package_log.level, package_log.propagate
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(logging.Formatter("memonger: %(message)s"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if _active is self:
            disable()

    def begin(self) -> None:
        """Plan from now on."""
        # The script's own log stays as it was.
        package_log.setLevel(logging.WARNING)
        package_log.propagate = False
        package_log.addHandler(self._handler)
        log.setLevel(logging.INFO)
        plan_binds(self)
        plan_others(self._block)

    def end(self) -> None:
        """Plan no more, log what was planned, and write the report."""
        plan_binds(None)
        plan_others(None)
        try:
            if self.plans:
                largest = max(self.plans, key=lambda plan: plan.unplanned_bytes)
                figures = self._figures(largest)
                text = "%d planned, the largest %s; %.1f s to plan"
                log.info(text, len(self.plans), figures, self._seconds)
                if self._report is not None:
                    largest.report(self._report)
        finally:
            package_log.removeHandler(self._handler)
            level, package_log.propagate = self._usual_logging
            package_log.setLevel(level)

    def _block(self, block: Block) -> PlannedBlock:
        find = functools.partial(self._find, block.name, "Gluon")
        return PlannedBlock(block.name, self._of_blocks, self._budget, find)

    def planned(self, symbol: Symbol, ctx: Context, bind: Keywords) -> Symbol:
        """Return the symbol to bind in place of this one; this one if it is best as it is."""
        devices = GPU if ctx.device_type == GPU else ANY
        if self._options.get("budget") == "device":
            devices = ctx
        keywords = {**bind, "ctx": devices, **self._options}
        plan = self._find(_name_of(symbol), str(ctx), symbol, **keywords)
        return plan.symbol if plan.pool_bytes < plan.unplanned_bytes else symbol

    def refuse(self, symbol: Symbol, reason: str) -> None:
        """Warn, once for each reason, that a network is trained without a plan."""
        name = _name_of(symbol)
        if (name, reason) not in self._refusals:
            self._refusals.add((name, reason))
            log.warning("%s trains without a plan: %s", name, reason)

    def _find(  # type: ignore[misc]  # arguments of `plan` go through
        self, name: str, place: str, net: Symbol, shapes: object, **keywords: Any
    ) -> Plan:
        """Find a plan, or read the one that is kept, and log it."""
        start = time.monotonic()
        try:
            plan = self._kept_or_new(net, shapes, keywords)
        except BudgetError as error:
            if not self._or_plain:
                raise
            raise MemongerError(str(error)) from None
        except UnmatchedError as error:  # another network of the script may have the name
            raise MemongerError(str(error)) from None
        if plan.interrupted:  # Ctrl-C was meant for the script
            raise KeyboardInterrupt
        seconds = time.monotonic() - start
        if self._check:
            self._compare(name, net, plan)
        self.plans.append(plan)
        self._seconds += seconds
        request = plan.request
        trained = {n for n, gradient in request.grad_req.items() if gradient != "null"}
        trained.update(request.symbol.list_auxiliary_states())
        inputs = [f"{n} {shape}" for n, shape in request.spec.shapes.items() if n not in trained]
        place += f", {_some(inputs)}" if inputs else ""
        log.info("%s on %s: %s; planned in %.1f s", name, place, self._figures(plan), seconds)
        return plan

    def _kept_or_new(self, net: Symbol, shapes: object, keywords: Keywords) -> Plan:
        file = kept.file_of(net, shapes, keywords) if self._cache else None
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
        """Write the memory that the budget bounds, and the time that a plan adds."""
        before, after = plan.unplanned_bytes, plan.pool_bytes
        if self._budget is not None and self._budget.of == "device":
            before, after = plan.unplanned_device_bytes, plan.device_bytes
        text = in_words(before)
        if plan.pool_bytes < plan.unplanned_bytes:
            text += f" -> {in_words(after)}"
            if plan.added_time is not None:
                text += f", {100 * plan.added_time:.0f} % of a step's time added"
        else:
            text += ", as it is"
        if self._budget is not None:
            text += f", within the budget of {self._options['budget']}"
        return text

    def _compare(self, name: str, network: Symbol, plan: Plan) -> None:
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
            process = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _CHECK, *files, str(mx.util.is_np_shape())],
                env=environment,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        report, errors = process.stdout.strip(), process.stderr.strip().splitlines()
        if process.returncode:
            error = errors[-1] if errors else f"it ended with {process.returncode}"
            log.warning("%s cannot be checked: %s", name, error)
        elif report.startswith(EQUAL):
            log.info("%s, checked: %s", name, report)
        else:
            raise MemongerError(f"its plan computes something else: {report}")


def _name_of(symbol: Symbol) -> str:
    return symbol.name or _some(symbol.list_outputs())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def enable(
    *,
    how: str | None = None,
    work: float | None = None,
    budget: object = None,
    slower_than: float | None = None,
    budget_of: str | None = None,
    optimizer: object = None,
    measure: bool = False,
    gpu: str | None = None,
    patience: float | None = None,
    keep: Selector | None = None,
    recompute: Selector | None = None,
    report: FilePath | None = None,
    check: bool = False,
    or_plain: bool = False,
    cache: bool = True,
) -> Session:
    """Plan all that this process trains from now on, as it is bound; the code stays as it is.

    That is what ``Module``, ``FeedForward``, ``Symbol.simple_bind`` and ``bind`` bind for
    gradients, at the shapes, types and devices of the bind, and the graphs of Gluon's hybridized
    blocks. Symbols, files and binds for inference stay as they are. So do networks that are planned
    already, or have marks of their own. Each bind logs a line on stderr.

    Parameters
    ----------
    how : {'marks', 'schedule', 'auto'}, optional
        As `plan` takes it; by default 'auto' for Gluon's blocks and for limits of memory or time,
        and otherwise 'marks'.
    work, budget, slower_than, budget_of, optimizer, measure, gpu, patience, keep, recompute
        As `plan` takes them. A network that has no operator of a pattern trains without a plan.
    report : str or path, optional
        Where a page of the largest network is written at the end.
    check : bool
        Train three steps of each network with its plan and without first, in another process, and
        compare them. If anything differs the network is trained without the plan.
    or_plain : bool
        If no plan fits the budget, train without a plan rather than stop.
    cache : bool
        Keep plans in the user's cache folder, and take those that are kept there.

    Returns
    -------
    Session
        A context manager: planning ends with its block, or with `disable`.

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
    keywords = {"how": how, "work": work, "budget": budget, "budget_of": budget_of}
    keywords.update(optimizer=optimizer, measure=measure or None, gpu=gpu, patience=patience)
    keywords.update(keep=keep, recompute=recompute, slower_than=slower_than)
    options = {name: value for name, value in keywords.items() if value is not None}
    session = Session(options, report=report, check=check, or_plain=or_plain, cache=cache)
    disable()
    session.begin()
    _active = session
    return session


def disable() -> None:
    """Plan nothing more in this process; executors and blocks keep the plans that they have.

    Examples
    --------
    >>> memonger.enable(how='schedule')
    >>> mod.fit(train_iter, num_epoch=10)
    >>> memonger.disable()
    """
    global _active
    session, _active = _active, None
    if session is not None:
        session.end()
