"""``plan``: from a network and its shapes to a ``Plan``.

What was found (``solution``) is remembered in this process by everything that it depends on, so
that a ``sym_gen`` that plans may be called again and again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.api import fastest, plan_files
from memonger.api import plot as report
from memonger.api.budgets import Budget, read_budget
from memonger.api.choices import PlanExplanation, explain_choices
from memonger.api.explain import Segment, Step, step_of
from memonger.api.remembered import fingerprint
from memonger.api.request import Request, read_network, read_request
from memonger.api.scheduling import check_limits, solve_schedule
from memonger.api.solution import Solution, solve
from memonger.costs.time import measured as timing
from memonger.graph.forward import copy_names
from memonger.graph.inputs import check_count
from memonger.schedules.schedule import Schedule
from memonger.support.cache import Latest
from memonger.support.cache import forget as forget
from memonger.support.errors import BudgetError, MemongerError, in_words
from memonger.support.symbols import read

log = logging.getLogger("memonger")

WAYS = ("marks", "schedule")
EITHER = "auto"
PLANNERS = ("smallest", "chen2016")
REMEMBERED = 256  # plans


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A planned network and what it costs.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        The planned network, to be given to ``Module`` or ``FeedForward`` in place of the original.
    pool_bytes : int
        What MXNet's memory pool will take in training, with the real size of every element.
        Parameters, their gradients, inputs and operator workspaces are not in it.
    unplanned_bytes : int
        The same without a plan.
    counted_bytes : int
        The pool as MXNet reports it (``get_cost``), with 4 bytes for an element of any type, and
        with the gradients that it holds.
    gradient_bytes : int
        Gradients that the pool holds besides, which is where a schedule writes them; with marks
        they are arrays of their own, and this is 0. A pool takes ``pool_bytes + gradient_bytes``.
    peak_bytes : int
        The most bytes of activations and of gradients that are handed on that are alive at once,
        those of ``gradient_bytes`` apart. The whole pool is larger by what MXNet's planner leaves
        unused in its blocks. ``pool_bytes`` of a schedule can still be less: where the gradients
        are the most of it, activations lie for a while where a gradient will be.
    device_bytes : int
        What MXNet asks the device for (a GPU, where none was given): the pool, the inputs and
        parameters, the gradients of those that ``grad_req`` asks for, auxiliary states,
        ``held_bytes`` and ``temporary_bytes``, each rounded as MXNet rounds it. Not in it are the
        state of an optimiser, cuDNN's workspaces and what CUDA takes for itself. Pointwise fusion
        is in it only if the plan is for a GPU (``ctx``): it is on by default on a GPU
        (``MXNET_USE_FUSION``), and makes the ``copies`` of a plan for any device take memory of
        their own (ResNet-50 v1: 9 % more than is told here).
    unplanned_device_bytes : int
        The same without a plan.
    held_bytes : int
        What operators hold beside the pool for the life of the executor: the reserve spaces of
        ``RNN``, which no plan changes; and on the CPU plain copies of what MKLDNN has laid out in
        blocks. What cuDNN holds is not documented, and told as it was once measured.
    unplanned_held_bytes : int
        The same without a plan.
    temporary_bytes : int
        The largest temporary space that an operator is known to ask for; all share one. On the CPU
        it has the copies of MKLDNN's own operators.
    recomputed_flops : float
        Work added to a training step, as a share of the FLOPs of the forward pass.
    kept, recomputed : tuple of str
        Names of the operators, in execution order.
    copies : tuple of str
        Names of the nodes that were added to keep a result whose operator is recomputed, or a sum
        apart from pointwise fusion.
    planner : str
        What found it: one of ``candidates``, 'no plan' if the network is better left as it is.
    candidates : dict
        The cost of each candidate, in bytes as MXNet counts them; with pointwise fusion where the
        plan is for a GPU that has it on.
    exact : bool
        Whether the memory was replayed to the byte and agreed with MXNet. Where it is False, it was
        learned by binding: in whole MB (2**20 bytes), rounded down, and ``peak_bytes``,
        ``device_bytes`` and the sizes of elements that have not 4 bytes are estimates.
    interrupted : bool
        Whether the search was ended early (Ctrl-C); this is the best that it had found.
    floor_bytes : int
        What is alive at once under any plan of this network, at least.
    floor : str
        The operator that sets it; empty if none does.
    slowest : str
        The most work that is done again between two gradients; empty if nothing is.
    request : Request
        What was asked for: the network without a plan, its shapes, its gradients.
    added_time : float or None
        The time that the plan is predicted to add to a training step, as a share of the step's
        without a plan; None where the search did not look at time.
    schedule : Schedule or None
        What a training step runs, in which order; None where that is left to MXNet.
    """

    symbol: Any
    pool_bytes: int
    unplanned_bytes: int
    counted_bytes: int
    gradient_bytes: int
    peak_bytes: int
    device_bytes: int
    unplanned_device_bytes: int
    held_bytes: int
    unplanned_held_bytes: int
    temporary_bytes: int
    recomputed_flops: float
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    copies: tuple[str, ...]
    planner: str
    candidates: dict[str, int]
    exact: bool
    interrupted: bool
    floor_bytes: int
    floor: str
    slowest: str
    request: Request
    added_time: float | None = None
    schedule: Schedule | None = None

    def __str__(self) -> str:
        before = self.unplanned_bytes + self.gradient_bytes
        saved = self.unplanned_bytes - self.pool_bytes
        operators = len(self.kept) + len(self.recomputed)
        exact = "replayed to the byte" if self.exact else "bound, in whole MB"
        interrupted = "; the search was interrupted" if self.interrupted else ""
        lines = [
            ("before", self._before()),
            ("after", self._after()),
            ("saved", f"{in_words(saved)}, {100 * saved / max(1, before):.0f} %"),
            (
                "floor",
                f"{in_words(self.floor_bytes)} must be alive at once under any "
                f"plan{self.floor and ', in ' + self.floor}",
            ),
            ("device", self._device()),
            *self._held(),
            ("work", self._work()),
            ("slowest", self.slowest or "nothing is computed again"),
            (
                "again",
                "%d of %d operators are computed again, %s"
                % (
                    len(self.recomputed),
                    operators,
                    "once each" if self.schedule is None else "as often as the schedule says",
                ),
            ),
            (
                "kept",
                f"{len(self.kept)} operators, and {len(self.copies)} results in copies",
            ),
            (
                "plan",
                f"{self.planner}, memory {exact}{interrupted}",
            ),
        ]
        return "\n".join("%-8s %s" % line for line in lines)

    def _device(self) -> str:
        ctx = self.request.ctx
        if ctx is None or ctx.device_type == "gpu":
            where, blocks = "a GPU", ", in MXNet's blocks"
        else:
            where, blocks = "the CPU", ""
        return (
            f"{in_words(self.device_bytes)} of {where}, {in_words(self.unplanned_device_bytes)} "
            f"without a plan: that, parameters, gradients and inputs{blocks}"
        )

    def _held(self) -> list[tuple[str, str]]:
        """What of the device's memory is the operators' own, if anything is."""
        lines = []
        if self.held_bytes or self.unplanned_held_bytes:
            text = "%s of it are held by operators, %s without a plan"
            figures = in_words(self.held_bytes), in_words(self.unplanned_held_bytes)
            lines.append(("held", text % figures))
        if self.temporary_bytes:
            text = "%s of it are temporary space, which operators share"
            lines.append(("shared", text % in_words(self.temporary_bytes)))
        return lines

    def _before(self) -> str:
        if not self.gradient_bytes:
            return f"{in_words(self.unplanned_bytes)} without a plan"
        whole = self.unplanned_bytes + self.gradient_bytes
        return "{} without a plan: a pool of {}, and {} of gradients of parameters".format(
            *tuple(map(in_words, (whole, self.unplanned_bytes, self.gradient_bytes)))
        )

    def _after(self) -> str:
        text = "%s, of which %s are alive at once"
        if self.gradient_bytes:
            text = "%s, these gradients in it; %s of results are alive at once"
        return text % (in_words(self.pool_bytes + self.gradient_bytes), in_words(self.peak_bytes))

    def _work(self) -> str:
        text = f"{100 * self.recomputed_flops:.0f} % of the forward pass is done again"
        if self.added_time is None:
            return text
        return f"{text}; {100 * self.added_time:.1f} % of the time of a step is added, as predicted"

    def plot(self, file: Any) -> None:
        """Draw memory over the training step, without the plan and with it.

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
        >>> memonger.plan(net, {'data': (32, 3, 224, 224)}).plot('plan.png')
        """
        before, after = self._step(self.request.symbol), self._step(self.symbol)
        report.plot_memory(
            file,
            [
                (f"without a plan: a pool of {in_words(self.unplanned_bytes)}", before),
                (f"with the plan: a pool of {in_words(self.pool_bytes)}", after),
            ],
        )

    def save(self, file: Any) -> None:
        """Write the plan to a file, from which `load_plan` makes it in other processes.

        Plans with a budget depend on times that are measured on the machine, so workers of one job
        may find different ones: let one of them plan, and the others load its plan.

        Parameters
        ----------
        file : str or path
            JSON. It is whole or not there; one that was there is replaced.

        Raises
        ------
        MemongerError
            If it cannot be written.

        Examples
        --------
        >>> memonger.plan(net, {'data': (32, 3, 224, 224)}, budget='60%').save('plan.json')
        """
        apart = ("symbol", "schedule", "request")
        figures = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        figures = {name: value for name, value in figures.items() if name not in apart}
        plan_files.write(file, self.symbol, self.schedule, self.request, figures)

    def explain(self) -> PlanExplanation:
        """Tell tensor by tensor what is kept, what is computed again, and why.

        Returns
        -------
        PlanExplanation
            A table where it is printed.

        Examples
        --------
        >>> print(memonger.plan(net, {'data': (32, 3, 224, 224)}).explain())
        """
        return explain_choices(
            read_network(self.request),
            self._step(self.symbol),
            original=self.planner == "chen2016",
            budgeted=self.added_time is not None,
        )

    def predict_time(self, measure: bool = False) -> float:
        """Predict the time that the plan adds to a training step, where no budget asked for it.

        Parameters
        ----------
        measure : bool
            Whether each operator is measured on the device, once, instead of predicted.

        Returns
        -------
        float
            As a share of a step's time without a plan; ``added_time`` where that is known.

        Examples
        --------
        >>> memonger.plan(net, {'data': (32, 3, 224, 224)}).predict_time()
        """
        if self.added_time is not None:
            return self.added_time
        device = self.request.device
        if self.schedule is not None:
            times = timing.times_of(read_network(self.request).training, device, measure)
            runs = np.bincount(self.schedule.forwards, minlength=len(times.forward))
            return float((np.maximum(runs - 1, 0) * times.forward).sum() / times.step)
        found = self._step(self.symbol).memory.replay
        training: Any = found.training
        times = timing.times_of(training, device, measure)
        again = found.order[found.order >= len(times.forward)] - len(times.forward)
        return float(times.forward[again[again < len(times.forward)]].sum() / times.step)

    def _step(self, symbol: Any) -> Step:
        request = self.request
        return step_of(symbol, request.spec, request.grad_req, request.device)

    def __repr__(self) -> str:
        return (
            "Plan(pool_bytes=%d, unplanned_bytes=%d, recomputed_flops=%.3f, planner=%r, exact=%s)"
            % (
                self.pool_bytes,
                self.unplanned_bytes,
                self.recomputed_flops,
                self.planner,
                self.exact,
            )
        )


class _Asked(NamedTuple):
    """What was asked of a plan, beside the network; as for `plan`."""

    how: str
    work: float | None
    budget: Budget | None
    patience: float
    planner: str
    ntrial: int
    kept_copies: bool
    rules: bool
    measure: bool


_remembered: Latest[Solution] = Latest(REMEMBERED)


def plan(
    net: Any,
    shapes: Any = None,
    *,
    how: str = "marks",
    work: float | None = None,
    budget: Any = None,
    budget_of: str | None = None,
    optimizer: Any = None,
    measure: bool = False,
    patience: float = 1.0,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    planner: str = "smallest",
    ntrial: int = 6,
    until: str | None = None,
    devices: int = 1,
    kept_copies: bool = True,
    rules: bool = True,
    **input_shapes: Any,
) -> Plan:
    """Plan which results a network keeps and which it computes again in the backward pass.

    The plan is found without binding its trials, where MXNet's memory planner can be replayed, and
    confirmed by one bind; nothing is allocated. It is cached in this process.

    Parameters
    ----------
    net : mx.sym.Symbol
        The network. Marks (``mirror_stage``) are used if there are any, and not needed.
    shapes : dict or list of mx.io.DataDesc
        Shapes of the inputs: ``{'data': (32, 3, 224, 224)}``, or ``iterator.provide_data +
        iterator.provide_label``. They may be given as keywords too.
    how : {'marks', 'schedule', 'auto'}
        'marks': each result is computed again at most once, by marks on the operators that MXNet's
        executor reads. 'schedule': as often as it pays; the whole training step is written out
        when the symbol is bound. 'auto', with a budget: of both the one that is predicted to be
        faster, and that needs both searches. Mostly that is a schedule, for marks cannot keep the
        result of a convolution without what it was computed from, unless it runs again.
    work : float, optional
        The most forward work of a training step, in times that of one forward pass: 2.0 allows one
        pass more. Marks take at most 2. By default there is no limit but one for schedules: what
        O(log n) memory takes, at most 2 log2(n) for a network of n operators. More can be told.
    budget : int, str or float, optional
        The memory that may be taken: the plan is then the fastest that fits. Bytes (an int), text
        in decimal or binary units ('6GB', '6GiB', '800MB'), a share of the memory without a plan
        ('60%', or a float in (0, 1]), or 'device': what is free on the GPU ``ctx``.
    budget_of : {'pool', 'device'}, optional
        What the budget bounds: ``pool_bytes`` (the default), or all that the GPU holds:
        ``device_bytes`` and the optimiser's state; not what cuDNN and CUDA take for themselves.
    optimizer : str, (str, dict) or mx.optimizer.Optimizer, optional
        Whose state counts with ``budget_of='device'``: 'adam', or ``('sgd', {'momentum': 0.9})``.
    measure : bool
        Whether the time of each operator is measured on the device, once, instead of predicted
        from its FLOPs and bytes. For a budget.
    patience : float
        Times the usual length of the search, for smaller plans.
    type_dict : dict, optional
        Types of inputs by name, as ``simple_bind`` takes it; float32 where nothing is told.
    grad_req : str, list or dict
        'write', 'add' or 'null' as ``simple_bind`` takes it. The memory that is told is that with
        these gradients; the plan is right for others too. By default, as for ``simple_bind`` and
        ``get_cost``, gradients of all arguments; ``Module`` asks for none of its data and labels
        ('null'), by which its memory differs a little.
    ctx : mx.Context, optional
        The device to plan for. By default the plan is made on the CPU and holds for CPU and GPU;
        a plan for ``mx.cpu()`` leaves cuDNN's BatchNorm on and does not hold for a GPU. Where you
        train on a GPU, give it, such as ``mx.gpu(0)``: what is kept then costs nothing more with
        pointwise fusion, and the memory that is told is that with ``MXNET_USE_FUSION`` as it is
        set. Such a plan is not for the CPU: inference there may round differently.
    planner : {'smallest', 'chen2016'}
        'smallest' searches cuts of the network for the least memory, marks or no marks, and takes
        nothing that is worse than the original's plan with the rules or than none;
        'chen2016' is the original algorithm, on the marks of the network.
    ntrial : int
        Thresholds that the original's search tries beyond its first three.
    until : str, optional
        The name of a layer (or of its output, ``'conv1_output'``). Only what runs before it is
        recomputed: it and what follows is kept.
    devices : int
        The shapes are of the whole batch, and ``Module`` will split it among so many devices; the
        plan is made for, and tells the memory of, the largest share.
    kept_copies : bool
        Whether identities (named ``*_keep``) may be put behind operators to keep a result without
        what it was computed from; False leaves the operators of the network untouched.
    rules : bool
        False gives the bare plan, without the rules that keep it right on every device.
    **input_shapes
        Shapes of inputs by name, the batch first: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    Plan

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.
    BudgetError
        If no plan that was found fits the budget; it tells the least memory that was found.
    KeyboardInterrupt
        If it is interrupted before anything was found; later, the best so far is returned.

    Examples
    --------
    >>> plan = memonger.plan(net, {'data': (32, 3, 224, 224)}, ctx=mx.gpu())
    >>> print(plan)
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    check_choice("way (how)", how, (*WAYS, EITHER))
    check_choice("planner", planner, PLANNERS)
    ntrial = check_count("ntrial", ntrial, 1)
    work, patience = check_limits(how, work, patience)
    bound = read_budget(budget, budget_of, optimizer, ctx)
    if how == EITHER and bound is None:
        raise MemongerError(
            "how='auto' is for a budget, within which the faster of both ways is taken; give a "
            "budget, or how='marks' or how='schedule'"
        )
    request = read_request(net, shapes, input_shapes, type_dict, grad_req, ctx, until, devices)
    flags = map(bool, (kept_copies, rules, measure))
    asked = _Asked(how, work, bound, patience, planner, ntrial, *flags)
    return _faster(request, asked) if how == EITHER else _planned(request, asked)


def load_plan(file: Any, net: Any = None, shapes: Any = None, **input_shapes: Any) -> Plan:
    """Read a plan that `Plan.save` has written; nothing is searched or bound.

    Parameters
    ----------
    file : str or path
    net : mx.sym.Symbol, optional
        The network, to make sure that the plan is of it. Operators may have other names, inputs may
        not. Without it the plan's own is taken on trust.
    shapes : dict or list of mx.io.DataDesc, optional
        With ``net``: the shapes of inputs, to make sure that the plan is for them.
    **input_shapes
        Shapes of inputs by name.

    Returns
    -------
    Plan
        With the figures of when it was made. A warning is logged where MXNet's environment
        variables were others then.

    Raises
    ------
    MemongerError
        If the file cannot be read, is cut short, damaged or none of a plan, or if the plan is of
        another network or for other shapes; it says where they differ.

    Examples
    --------
    >>> plan = memonger.load_plan('plan.json', net, data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    return Plan(**plan_files.read(file, net, shapes, input_shapes))


def _planned(request: Request, asked: _Asked) -> Plan:
    """The plan by one way, searched for or remembered."""
    if asked.planner != "smallest" or not asked.rules:
        given = f"planner={asked.planner!r}, rules={asked.rules!r}: "
        if asked.how == "schedule":
            raise MemongerError(
                given + "these are of how='marks'; a schedule has a planner of its own, and needs "
                "no rules"
            )
        if asked.budget is not None:
            raise MemongerError(given + "a budget has a planner of its own, and needs the rules")
    key = fingerprint(request, asked)
    solution = _remembered.get(key)
    if solution is None:
        solution, symbol = _solved(request, asked)
        if not solution.facts["interrupted"]:
            _remembered.put(key, solution)
    else:
        log.info("this network was planned before; its plan is used again")
        symbol = solution.carry_out(request.symbol)
    for warning in solution.warnings:
        log.warning(warning)
    return plan_of(request, symbol, solution)


def _solved(request: Request, asked: _Asked) -> tuple[Solution, Any]:
    """What the search finds that is for what was asked, and the planned symbol."""
    _, work, budget, patience, planner, ntrial, kept_copies, rules, measure = asked
    if asked.how == "schedule":
        return solve_schedule(request, work, budget, patience, ntrial, measure)
    if budget is not None:
        options = fastest.Options(ntrial, kept_copies, patience, measure)
        return fastest.solve_budget(request, budget, options)
    return solve(request, planner, ntrial, kept_copies, rules, patience)


def _faster(request: Request, asked: _Asked) -> Plan:
    """The faster of the plans of both ways; marks where they are equally fast."""
    plans: list[Plan] = []
    refused: list[MemongerError] = []
    for way in WAYS:
        try:
            check_limits(way, asked.work, asked.patience)
            plans.append(_planned(request, asked._replace(how=way)))
        except MemongerError as error:  # no schedule of this network, or no plan that fits
            log.info("how='auto': no plan by how=%r: %s", way, error)
            refused.append(error)
        except KeyboardInterrupt:
            if not plans:
                raise
            log.warning("interrupted: this is the fastest plan that fits of those found so far")
            plans = [dataclasses.replace(plan, interrupted=True) for plan in plans]
            break
        if plans and (plans[-1].interrupted or not plans[-1].added_time):  # none can be faster
            break
    if not plans:
        short = [error for error in refused if isinstance(error, BudgetError)]
        raise min(short, key=lambda error: error.least_bytes) if short else refused[0]
    best = min(plans, key=lambda plan: plan.added_time or 0.0)
    return dataclasses.replace(best, interrupted=any(plan.interrupted for plan in plans))


def plan_of(request: Request, planned: Any, solution: Solution) -> Plan:
    """The Plan for a symbol, with the names of its operators."""
    nodes = read(request.symbol)["nodes"]
    names = [node["name"] for node in nodes]
    operators = [
        (node["name"], again) for node, again in zip(nodes, solution.mask) if node["op"] != "null"
    ]
    copies = copy_names(names, solution.copies)
    floor = solution.floor
    chosen = nodes[floor.operator]
    return Plan(
        symbol=planned,
        floor_bytes=floor.nbytes,
        floor=floor.sets(chosen["name"], chosen["op"], len(nodes)) if floor.row >= 0 else "",
        slowest=_segment(names, solution.slowest),
        request=request,
        kept=tuple(name for name, again in operators if not again),
        recomputed=tuple(name for name, again in operators if again),
        copies=tuple(itertools.chain(*copies.values())),
        schedule=solution.schedule,
        **{**solution.facts, "candidates": dict(solution.facts["candidates"])},
    )


def _segment(names: Sequence[str], segment: Segment | None) -> str:
    """The slowest segment in words."""
    if segment is None:
        return ""
    return "%r to %r: %d operators, %.0f %% of the forward pass, are run again at once" % (
        names[segment.first],
        names[segment.last],
        segment.operators,
        100 * segment.flops,
    )


def check_choice(what: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise MemongerError(
            f"there is no {what} {value!r}; there are {', '.join(map(repr, known))}"
        )
