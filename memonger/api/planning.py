"""The calls that plan: ``plan``, and ``search_plan`` under the original's name.

What is found is remembered in this process by everything that it depends on, so that a ``sym_gen``
that plans may be called again and again.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Mapping

from memonger.api.docstrings import documented
from memonger.api.plan import Plan, plan_of
from memonger.solve import request as requests
from memonger.solve.request import EITHER, WAYS, Options, Request
from memonger.solve.solution import Solution, solve
from memonger.solve.ways import way_of
from memonger.support.cache import Latest
from memonger.support.errors import BudgetError, MemongerError

log = logging.getLogger("memonger")

REMEMBERED = 256  # plans

_solutions: Latest[Solution] = Latest(REMEMBERED)


@documented
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

    Returns
    -------
    Plan

    Raises
    ------
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


@documented
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
    return _plan(locals()).symbol


def _plan(given: Mapping[str, Any]) -> Plan:
    """Plan as the arguments of a call say."""
    options = requests.read_options(given)
    if options.how == EITHER and options.budget is None:
        raise MemongerError(
            "how='auto' is for a budget, within which the faster of both ways is taken; give a "
            "budget, or how='marks' or how='schedule'"
        )
    request = requests.read_request(given)
    return _faster(request, options) if options.how == EITHER else _planned(request, options)


def _planned(request: Request, options: Options) -> Plan:
    """Plan by one way, or remember the plan."""
    key = requests.fingerprint(request, options)
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
    """Plan by both ways, and take the faster plan; marks where they are equally fast."""
    plans: list[Plan] = []
    refused: list[MemongerError] = []
    interrupted = False
    for how in WAYS:
        try:
            requests.check_work(how, options.work)
            plans.append(_planned(request, dataclasses.replace(options, how=how)))
        except MemongerError as error:  # no schedule of this network, or no plan that fits
            log.info("how='auto': no plan by how=%r: %s", how, error)
            refused.append(error)
        except KeyboardInterrupt:
            if not plans:
                raise
            log.warning("interrupted: this is the fastest plan that fits of those found so far")
            interrupted = True
            break
        if plans and (plans[-1].interrupted or not plans[-1].added_time):  # none can be faster
            break
    if not plans:
        short = [error for error in refused if isinstance(error, BudgetError)]
        raise min(short, key=lambda error: error.least_bytes) if short else refused[0]
    best = min(plans, key=lambda plan: plan.added_time or 0.0)
    interrupted = interrupted or any(plan.interrupted for plan in plans)
    return dataclasses.replace(best, interrupted=interrupted)
