"""Plans for a script: for each network that it binds for training, each block it hybridizes."""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from dataclasses import replace
from typing import Any, Callable, Mapping, MutableMapping, Sequence

from memonger.api.plan import Plan, make_plan
from memonger.costs.bind import trim_heap
from memonger.gluon.cached_op import PlannedBlock, count_bytes
from memonger.gluon.planning import plan_others
from memonger.graph.forward import no_collection
from memonger.graph.inputs import devices_like
from memonger.graph.marks import clear, is_marked, is_planned
from memonger.graph.operators.recompute import ANY, CPU
from memonger.schedules.execution.executor import ScheduledExecutor
from memonger.scripts import plan_cache
from memonger.scripts.binds import plan_binds
from memonger.scripts.checking import check_plan
from memonger.scripts.log import SessionLog
from memonger.scripts.optimizers import count_optimizer, find_of_block, find_of_fit
from memonger.scripts.run import check_options
from memonger.show.report import check_report, ordered, write_report
from memonger.solve.choose import choose
from memonger.solve.facts import Facts, measure
from memonger.solve.limits import Budget, Lent, Limits
from memonger.solve.network import Network, read_call, read_mxnet_variables, read_network
from memonger.solve.search import search
from memonger.support.cache import Latest
from memonger.support.errors import MB, BudgetError, MemongerError, UnmatchedError, format_size
from memonger.support.files import Path
from memonger.support.mxnet import mx
from memonger.support.symbols import json_of
from memonger.support.types import (
    Block,
    Context,
    EnableOptions,
    Executor,
    Keywords,
    Symbol,
    Unpack,
)

log = logging.getLogger("memonger.scripts")

GLUON = "Gluon"  # where blocks train, in place of a device
#: Bytes without a plan. Planning, and running by a plan, takes more of a process than the pool of a
#: smaller network. An option that asks for a plan plans it all the same.
LEAVE_BELOW = 64 * MB
ASKING = ("how", "budget", "keep", "recompute")

_active: Session | None = None


class Session:
    """Training by plans from `enable` on; a context manager that ends it.

    Attributes
    ----------
    plans : list of Plan
        A plan for each bind, and for each graph of a block.
    command : str
        That of ``memonger run``, which the report shows; '' where there is none.
    """

    command = ""

    def __init__(
        self, options: Keywords, report: Path | None, check: bool, or_plain: bool, cache: bool
    ) -> None:
        self._options, self._budget = options, check_options(options).budget
        self._check, self._or_plain, self._cache = check, or_plain, cache
        asks = any(options.get(name) is not None for name in ASKING)
        self._leave_below = 0 if asks else LEAVE_BELOW
        if report is not None:
            check_report(report)
            report = os.path.abspath(os.fsdecode(report))  # the script may change the folder
        self._report = report
        self.plans: list[Plan] = []
        self._networks: dict[Plan, tuple[str, Budget | None]] = {}  # their names and budgets
        #: The pools of MXNet's executors, bytes, for those that are bound to share them.
        self.pools: MutableMapping[Executor, int] = weakref.WeakKeyDictionary()
        self._found: Latest[Plan] = Latest(128)  # by the arguments of `_find`
        self._log = SessionLog(options.get("budget"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if _active is self:
            disable()

    def begin(self) -> None:
        """Plan from now on."""
        self._process = os.getpid()
        self._log.begin()
        plan_binds(self)
        plan_others(self._block)

    def end(self) -> None:
        """Plan no more, log what was planned, and write the report."""
        plan_binds(None)
        plan_others(None)
        try:
            is_child = os.getpid() != self._process  # of os.fork
            if (self.plans or self.command) and not is_child:
                self._log.tell_all()
                self._write_report()
        finally:
            self._log.end()

    def _write_report(self) -> None:
        """Write the page of the largest network; where it fails, the script ends as without it."""
        if self._report is None or not self.plans:
            return
        largest = max(self.plans, key=lambda plan: plan.unplanned_bytes)
        name, budget = self._networks[largest]
        try:
            shown = ordered([largest], (), budget, name)
            write_report(self._report, replace(shown, command=self.command))
        except Exception as error:
            log.error("the report is not written: %s", error)

    def _block(self, block: Block) -> PlannedBlock:
        find = functools.partial(self._find_of_block, weakref.ref(block))
        return PlannedBlock(block.name, self._options, self._budget, find)

    def _find_of_block(  # type: ignore[misc]  # arguments of `plan` go through
        self, reference: Callable[[], Block], net: Symbol, shapes: Keywords, **keywords: Any
    ) -> Plan:
        block = reference()
        bound = count_optimizer(self._options, keywords["ctx"], lambda: find_of_block(block))
        inputs = [name for name in net.list_inputs() if name not in block.collect_params()]

        def accept(plan: Plan) -> None:
            if plan.is_used:
                count_bytes(plan, inputs)

        keywords = {**keywords, **bound, "accept": accept}
        return self._find(block.name, GLUON, net, shapes, **keywords)

    def plan(self, symbol: Symbol, bind: Keywords, ctx: Context, shared: object) -> Plan | None:
        """Plan what is bound for training; None where it is already planned, or has marks.

        ``shared`` is the executor whose memory the new one uses, or None.
        """
        # With gpu= it has the times of a GPU. A budget of 'device' is what is free on this one.
        devices = devices_like(ctx, on_cpu=ANY if self._options.get("gpu") else CPU)
        if self._options.get("budget") == "device":
            devices = ctx
        if is_planned(symbol):
            self._log_once(logging.INFO, symbol, "is left as it is: already planned")
            return None
        if is_marked(symbol):
            requests = (read_network(net, ctx=ctx, **bind) for net in (symbol, clear(symbol)))
            with_marks, without = (measure(request).pool_bytes for request in requests)
            if with_marks < without:
                size = format_size(with_marks, without)
                text = f"trains by its own marks (force_mirroring), in {size} of "
                text += f"{format_size(without)}; to have it planned, remove them"
                self._log_once(logging.WARNING, symbol, text)
                return None
        lent, pool = None, self.pools.get(shared) if shared is not None else None
        if isinstance(shared, ScheduledExecutor):
            lent = Lent(shared.arena.nbytes, is_arena=True)
        elif pool is not None:
            lent = Lent(pool, is_arena=False)
        bound = count_optimizer(self._options, devices, find_of_fit)
        keywords = {**bind, "ctx": devices, "lent": lent, **bound}
        return self._find(_name_of(symbol), str(ctx), symbol, **keywords)

    def refuse(self, symbol: Symbol, reason: str) -> None:
        """Warn, once for each reason, that a network is trained without a plan."""
        self._log_once(logging.WARNING, symbol, f"trains without a plan: {reason}")

    def _log_once(self, level: int, symbol: Symbol, text: str) -> None:
        self._log.tell_once(level, f"{_name_of(symbol)} {text}")

    def _find(  # type: ignore[misc]  # arguments of `plan` go through
        self,
        name: str,
        place: str,
        net: Symbol,
        shapes: Keywords,
        lent: Lent | None = None,
        accept: Callable[[Plan], None] = lambda _: None,
        **keywords: Any,
    ) -> Plan:
        """Find a plan, or take the one that was found before, and log it.

        ``accept`` raises MemongerError for a plan that will not be used.
        """
        state = mx.util.is_np_shape(), read_mxnet_variables()
        key = json_of(net), repr((shapes, lent, sorted(keywords.items()), state))
        plan = self._found.get(key)
        if plan is not None:
            return plan
        start = time.monotonic()
        network = f"{name} on {place}{_describe_inputs(net, shapes, keywords['grad_req'])}"
        # The timer's thread must not collect garbage: MXNet deadlocks if a thread frees executors
        # while another one trains with their parameters.
        with no_collection(), self._log.announced(network):
            try:
                to_plan, limits = read_call("enable", net, shapes, {}, **keywords)
                limits = replace(limits, lent=lent, leave_below=self._leave_below)
                plan = self._kept_or_new(to_plan, limits)
                plan = replace(plan, of_block=place == GLUON)
            except BudgetError as error:
                if not self._or_plain:
                    raise
                raise MemongerError(str(error)) from None
            except UnmatchedError as error:  # another network of the script may have the name
                raise MemongerError(str(error)) from None
        if plan.interrupted:  # Ctrl-C was meant for the script
            raise KeyboardInterrupt
        accept(plan)
        seconds = time.monotonic() - start
        if self._check:
            check_plan(name, net, plan)
        self._found.put(key, plan)
        self.plans.append(plan)
        self._networks[plan] = name, limits.budget
        self._log.tell_plan(network, plan, limits.budget, seconds)
        return plan

    @trim_heap()
    def _kept_or_new(self, network: Network, limits: Limits) -> Plan:
        """Read the plan that is kept in the cache folder, or make one and keep it."""
        file = plan_cache.file_of(network, limits) if self._cache else None
        if self._cache and file is None:
            self._log.tell_unkept("this user has no home folder")
        plan = plan_cache.read(file, network) if file is not None else None
        if plan is None:
            facts = Facts(network, limits, must_pay=limits.is_free)
            plan = make_plan(choose(facts, search(facts)))
            if file is not None and not plan.interrupted:
                try:
                    plan_cache.write(file, plan)
                except MemongerError as error:
                    self._log.tell_unkept(str(error))
        return plan


def _name_of(symbol: Symbol) -> str:
    return symbol.name or _some(symbol.list_outputs())


def _describe_inputs(net: Symbol, shapes: Keywords, requests: Mapping[str, str]) -> str:
    """Describe the inputs of a bind that get no gradient, in the network's order."""
    trained = {name for name, request in requests.items() if request != "null"}
    trained.update(net.list_auxiliary_states())
    names = [name for name in net.list_inputs() if name in shapes and name not in trained]
    return f", {_some([f'{name} {shapes[name]}' for name in names])}" if names else ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def enable(
    *,
    report: Path | None = None,
    check: bool = False,
    or_plain: bool = False,
    cache: bool = True,
    **options: Unpack[EnableOptions],
) -> Session:
    """Plan all that this process trains from now on, as it is bound; the code stays as it is.

    That is what ``Module``, ``FeedForward``, ``Symbol.simple_bind`` and ``bind`` bind for
    gradients, at the shapes, types and devices of the bind, and the graphs of Gluon's hybridized
    blocks. Symbols, files and binds for inference stay as they are. So do networks that are planned
    already, or have marks of their own, and those that take less than 64 MiB without a plan, unless
    ``how``, ``budget``, ``keep`` or ``recompute`` is given. The first five networks log a line each
    on stderr.

    Parameters
    ----------
    **options
        As `plan` takes them: ``how``, ``work``, ``budget``, ``slower_than``,
        ``budget_of``, ``optimizer``, ``measure``, ``gpu``, ``patience``, ``keep``, ``recompute``.
        On a GPU a budget in bytes bounds the device, with the optimizer of the script's ``fit`` or
        ``Trainer``, unless ``budget_of='pool'`` is given. A network that has no operator of a
        pattern trains without a plan.
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
