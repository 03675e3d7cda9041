"""The calls that plan: ``plan``, and ``search_plan`` under the original's name.

What is found is remembered in this process by everything that it depends on, so that a ``sym_gen``
that plans may be called again and again.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any, Callable, Mapping, TypeVar

from memonger.api.plan import Plan, plan_of
from memonger.solve.request import (
    EITHER,
    WAYS,
    Options,
    Request,
    check_work,
    fingerprint,
    read_options,
    read_request,
)
from memonger.solve.solution import Solution, solve
from memonger.solve.ways import way_of
from memonger.support.cache import Latest
from memonger.support.errors import BudgetError, MemongerError

log = logging.getLogger("memonger")

REMEMBERED = 256  # plans

_solutions: Latest[Solution] = Latest(REMEMBERED)

F = TypeVar("F", bound=Callable[..., Any])


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
    """Plan which results a network keeps and which it recomputes in the backward pass.

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
        'marks': each result is recomputed at most once, by marks on the operators that MXNet's
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
    return _plan(locals())


def as_for_plan(function: F) -> F:
    """Spell out the parameters that a docstring says are "As for ``plan``."."""
    parameter = r"^    (\*{0,2}\w+)(?: : .*)?\n(?:        .*\n)+"
    texts = {found[1]: found[0] for found in re.finditer(parameter, plan.__doc__ or "", re.M)}

    def spelled(found: re.Match[str]) -> str:
        return "".join(texts[name] for name in re.split(r",\s+", found[1].strip()))

    doc = function.__doc__ or ""
    listed = r"^((?:    [*\w].*\n)+)        As for ``plan``\.\n"
    function.__doc__ = re.sub(listed, spelled, doc, flags=re.M)
    return function


@as_for_plan
def search_plan(
    sym: Any,
    ntrial: int = 6,
    type_dict: Mapping[str, Any] | None = None,
    *,
    planner: str = "smallest",
    how: str = "marks",
    work: float | None = None,
    budget: Any = None,
    budget_of: str | None = None,
    optimizer: Any = None,
    measure: bool = False,
    patience: float = 1.0,
    ctx: Any = None,
    shapes: Any = None,
    rules: bool = True,
    until: str | None = None,
    devices: int = 1,
    kept_copies: bool = True,
    grad_req: Any = "write",
    **input_shapes: Any,
) -> Any:
    """Plan a network as ``plan`` does, under the original's name and arguments.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network.
    ntrial, type_dict, planner, how, work, budget, budget_of, optimizer, measure, patience, ctx,
    shapes, rules, until, devices, kept_copies, grad_req, **input_shapes
        As for ``plan``.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym`` with the same arguments, auxiliary states and outputs, to be given to
        ``Module`` or ``FeedForward`` in its place.

    Raises
    ------
    MemongerError, BudgetError, KeyboardInterrupt
        As ``plan`` does.

    Examples
    --------
    >>> planned = memonger.search_plan(net, ctx=mx.gpu(), data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(planned, context=mx.gpu())
    """
    return _plan({**locals(), "net": sym}).symbol


def request_of(given: Mapping[str, Any]) -> Request:
    """Check which network is planned; ``given`` are the arguments of a call by name."""
    names = ("shapes", "input_shapes", "type_dict", "grad_req", "ctx", "until", "devices")
    return read_request(given["net"], **{name: given[name] for name in names if name in given})


def _plan(given: Mapping[str, Any]) -> Plan:
    """Plan as the arguments of a call say."""
    options = read_options(given)
    if options.how == EITHER and options.budget is None:
        raise MemongerError(
            "how='auto' is for a budget, within which the faster of both ways is taken; give a "
            "budget, or how='marks' or how='schedule'"
        )
    request = request_of(given)
    return _faster(request, options) if options.how == EITHER else _planned(request, options)


def _planned(request: Request, options: Options) -> Plan:
    """The plan by one way, searched for or remembered."""
    key = fingerprint(request, options)
    solution = _solutions.get(key)
    if solution is None:
        solution, symbol = solve(way_of(request, options))
        if not solution.facts["interrupted"]:
            _solutions.put(key, solution)
    else:
        log.info("this network was planned before; its plan is used again")
        symbol = solution.carry_out(request.symbol)
    for warning in solution.warnings:
        log.warning(warning)
    return plan_of(request, symbol, solution)


def _faster(request: Request, options: Options) -> Plan:
    """The faster of the plans of both ways; marks where they are equally fast."""
    plans: list[Plan] = []
    refused: list[MemongerError] = []
    for way in WAYS:
        try:
            check_work(way, options.work)
            plans.append(_planned(request, dataclasses.replace(options, how=way)))
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
