"""Plans for a script: for each network that it binds for training, each block it hybridizes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, MutableMapping, Sequence

from memonger.api.plan import Plan, make_plan
from memonger.api.report import check_report, ordered, write_report
from memonger.gluon.cached_op import PlannedBlock
from memonger.gluon.counting import count_bytes
from memonger.gluon.planning import plan_others
from memonger.graph.forward import no_collection
from memonger.graph.inputs import check_device
from memonger.graph.marks import clear, is_marked, is_planned
from memonger.graph.operators.recompute import ANY, CPU, GPU
from memonger.schedules.execution.executor import ScheduledExecutor
from memonger.scripts import plan_cache
from memonger.scripts.binds import plan_binds
from memonger.scripts.optimizers import find_of_block, find_of_fit
from memonger.scripts.run import check_options
from memonger.solve.choose import choose
from memonger.solve.facts import Facts, measure
from memonger.solve.limits import (
    Budget,
    Lent,
    Limits,
    bound_gpu,
    measure_state_per_element,
)
from memonger.solve.network import Network, read_call, read_mxnet_variables, read_network
from memonger.solve.search import search
from memonger.support.allocator import trim_heap
from memonger.support.cache import Latest
from memonger.support.errors import MB, BudgetError, MemongerError, UnmatchedError, format_size
from memonger.support.files import Path as FilePath
from memonger.support.mxnet import mx
from memonger.support.symbols import as_json, json_of, read
from memonger.support.types import (
    Block,
    Context,
    EnableOptions,
    Executor,
    Keywords,
    Symbol,
    Unpack,
)

package_log = logging.getLogger("memonger")
log = logging.getLogger("memonger.scripts")

#: Trains the network of one file with the plan of the other, and without.
_CHECK = """
import sys
sys.path.insert(0, sys.argv[4])  # the folder of the script may have a memonger.py of its own
import memonger
del sys.path[0]
import mxnet
mxnet.util.set_np_shape(sys.argv[3] == "True")
network, plan = memonger.load(sys.argv[1]), memonger.load_plan(sys.argv[2])
(shapes, types), ctx = plan.request.spec, plan.request.ctx
grad_req = plan.request.grad_req
print(memonger.check(network, plan.symbol, shapes, type_dict=types, ctx=ctx, grad_req=grad_req))
"""
GLUON = "Gluon"  # where blocks train, in place of a device
TOLD = 5  # networks that are told one by one
SILENCE = 2.0  # seconds of planning, after which a line says what is being planned
#: Bytes without a plan. Planning, and running by a plan, takes more of a process than the pool of a
#: smaller network. An option that asks for a plan plans it all the same.
LEAVE_BELOW = 64 * MB
ASKING = ("how", "budget", "keep", "recompute")
EQUAL = "equal: "  # with which a CheckReport without a difference begins

NOTHING = (
    "that is done for what this process binds for gradients, and for hybridized blocks that it "
    "records (call hybridize() on Gluon's); a line above names what was refused"
)

_active: Session | None = None


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # of stderr
    """Writes lines to stderr, each on a line of its own though tqdm shows a bar there."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # which clears and shows its bars
        if bars is None:
            super().emit(record)
        else:
            with bars.external_write_mode(file=self.stream):
                super().emit(record)


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
        self, options: Keywords, report: FilePath | None, check: bool, or_plain: bool, cache: bool
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
        self._seconds = 0.0  # that planning took
        #: The pools of MXNet's executors, bytes, for those that are bound to share them.
        self.pools: MutableMapping[Executor, int] = weakref.WeakKeyDictionary()
        self._found: Latest[Plan] = Latest(128)  # by the arguments of `_find`
        self._lines: set[str] = set()  # that are logged once
        self._kinds: set[str] = set()  # of warnings: how those begin that were logged
        self._is_silent = False  # whether a line said that no more networks are told one by one
        self._unkept = False  # whether a plan could not be kept
        self._usual_logging = package_log.level, package_log.propagate
        self._handler = _Handler()
        self._handler.setFormatter(logging.Formatter("memonger: %(message)s"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if _active is self:
            disable()

    def begin(self) -> None:
        """Plan from now on."""
        self._process = os.getpid()
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
            is_child = os.getpid() != self._process  # of os.fork
            if not self.plans and self.command and not is_child:
                self._log_nothing()
            elif self.plans and not is_child:
                largest = max(self.plans, key=lambda plan: plan.unplanned_bytes)
                text = "%s the largest %s; %.1f s to plan"
                figures = self._figures(largest, self._sum_unplanned())
                log.info(text, self._counted(), figures, self._seconds)
                if self._report is not None:
                    try:
                        name, budget = self._networks[largest]
                        shown = ordered([largest], (), budget, name)
                        write_report(self._report, replace(shown, command=self.command))
                    except Exception as error:  # the script ends as it would without a report
                        log.error("the report is not written: %s", error)
        finally:
            package_log.removeHandler(self._handler)
            level, package_log.propagate = self._usual_logging
            package_log.setLevel(level)

    def _block(self, block: Block) -> PlannedBlock:
        find = functools.partial(self._find_of_block, weakref.ref(block))
        return PlannedBlock(block.name, self._options, self._budget, find)

    def _find_of_block(  # type: ignore[misc]  # arguments of `plan` go through
        self, reference: Callable[[], Block], net: Symbol, shapes: Keywords, **keywords: Any
    ) -> Plan:
        block = reference()
        bound = self._bound(keywords["ctx"], lambda: find_of_block(block))
        inputs = [name for name in net.list_inputs() if name not in block.collect_params()]

        def accept(plan: Plan) -> None:
            if plan.is_used:
                count_bytes(plan, inputs)

        keywords = {**keywords, **bound, "accept": accept}
        return self._find(block.name, GLUON, net, shapes, **keywords)

    def _bound(self, ctx: object, find_optimizer: Callable[[], object]) -> Keywords:
        """Return the options, with what a budget of a device counts of the script's optimizer."""
        budget, of = (self._options.get(name) for name in ("budget", "budget_of"))
        options = {**self._options, "budget_of": bound_gpu(budget, of, ctx)}
        if "device" not in (options.get("budget"), options.get("budget_of")):
            return options
        optimizer = options.get("optimizer") or find_optimizer()
        with contextlib.suppress(MemongerError):  # an optimizer of the script's own
            measure_state_per_element(optimizer)
            options = {**options, "optimizer": optimizer}
        return options

    def plan(self, symbol: Symbol, bind: Keywords, ctx: Context, shared: object) -> Plan | None:
        """Plan what is bound for training; None where it is already planned, or has marks.

        ``shared`` is the executor whose memory the new one uses, or None.
        """
        on_cpu = ANY if self._options.get("gpu") else CPU  # with the times of a GPU
        devices = GPU if check_device(ctx).device_type == GPU else on_cpu
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
        bound = self._bound(devices, find_of_fit)
        keywords = {**bind, "ctx": devices, "lent": lent, **bound}
        return self._find(_name_of(symbol), str(ctx), symbol, **keywords)

    def refuse(self, symbol: Symbol, reason: str) -> None:
        """Warn, once for each reason, that a network is trained without a plan."""
        self._log_once(logging.WARNING, symbol, f"trains without a plan: {reason}")

    def _log_once(self, level: int, symbol: Symbol, text: str) -> None:
        line = f"{_name_of(symbol)} {text}"
        if line not in self._lines:
            self._lines.add(line)
            log.log(level, "%s", line)

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
        with no_collection(), self._announced(network):
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
            self._compare(name, net, plan)
        self._found.put(key, plan)
        self.plans.append(plan)
        self._networks[plan] = name, limits.budget
        self._seconds += seconds
        kinds = {re.split(r"[\d']", warning)[0] for warning in plan.warnings}
        if len(self.plans) <= TOLD or not kinds <= self._kinds:
            told = "; ".join([self._figures(plan), *plan.warnings])
            log.info("%s: %s; planned in %.1f s", network, told, seconds)
        elif not self._is_silent:
            log.info("more networks are planned; the end tells of all")
            self._is_silent = True
        self._kinds |= kinds
        return plan

    @contextlib.contextmanager
    def _announced(self, network: str) -> Iterator[None]:
        """Log which network is being planned, if that takes long."""
        text = "planning %s; Ctrl-C ends the script, --patience 0.1 plans faster"
        timer = threading.Timer(SILENCE, log.info, (text, network))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @trim_heap()
    def _kept_or_new(self, network: Network, limits: Limits) -> Plan:
        file = plan_cache.file_of(network, limits) if self._cache else None
        if self._cache and file is None:
            self._tell_unkept("this user has no home folder")
        plan = plan_cache.read(file, network) if file is not None else None
        if plan is None:
            facts = Facts(network, limits, must_pay=limits.is_free)
            # A copy, without its large replay.
            plan = replace(make_plan(choose(facts, search(facts))))
            if file is not None and not plan.interrupted:
                self._keep(file, plan)
        return plan

    def _keep(self, file: Path, plan: Plan) -> None:
        """Keep a plan for the next start; warn, once, where that is not possible."""
        try:
            plan_cache.write(file, plan)
        except MemongerError as error:
            self._tell_unkept(str(error))

    def _tell_unkept(self, reason: str) -> None:
        """Warn, once, that plans are not kept."""
        if not self._unkept:
            text = "plans are not kept for the next start: %s; MEMONGER_CACHE names the folder"
            log.warning(text, reason)
        self._unkept = True

    def _figures(self, plan: Plan, largest: int = 0) -> str:
        """Write the memory that the budget bounds, and the time that a plan adds.

        ``largest`` is that of the other sizes of the line, in bytes.
        """
        before, after = plan.unplanned_bytes, plan.pool_bytes
        _, budget = self._networks[plan]
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
            text += f", within the budget of {self._options['budget']}"
            text += budget.describe_beside(largest)
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
            package = str(Path(__file__).resolve().parents[2])
            arguments = [*files, str(mx.util.is_np_shape()), package]
            process = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _CHECK, *arguments],
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

    def _counted(self) -> str:
        """Count the networks that were planned, and sum what they take, if there are many."""
        planned = [plan for plan in self.plans if plan.pool_bytes < plan.unplanned_bytes]
        if len(self.plans) == 1:
            return f"{len(planned)} planned,"
        whole = self._sum_unplanned()
        after = format_size(sum(plan.pool_bytes for plan in self.plans), whole)
        sizes = f"{format_size(whole)} -> {after}"
        return f"{len(planned)} of {len(self.plans)} planned, {sizes} in all;"

    def _sum_unplanned(self) -> int:
        """Sum what all networks take without a plan, in bytes."""
        return sum(plan.unplanned_bytes for plan in self.plans)

    def _log_nothing(self) -> None:
        """Log that nothing was planned, and why; with a budget it is a warning."""
        budget = self._options.get("budget")
        if budget is not None:
            log.warning(
                "nothing was planned, so the budget of %s does not hold: %s", budget, NOTHING
            )
        else:
            log.info("nothing was planned: %s", NOTHING)


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
    report: FilePath | None = None,
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
