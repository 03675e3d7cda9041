"""The calls that plan a network: ``plan``, which remembers its plans, and the original's."""

from __future__ import annotations

import logging
from typing import Any, Mapping, MutableMapping, Optional

from memonger.api.docstrings import documented
from memonger.api.plan import Plan, plan_of
from memonger.graph import marks
from memonger.planners.marks import chen2016
from memonger.solve.memory import measure as measured
from memonger.solve.options import Options, read_plan_options
from memonger.solve.request import read_call, read_request
from memonger.solve.solution import BARE, solve
from memonger.solve.ways import Marks
from memonger.support.allocator import giving_back
from memonger.support.checks import check_count
from memonger.support.errors import MB, MemongerError

log = logging.getLogger("memonger")

Types = Optional[Mapping[str, Any]]


@documented
@giving_back()
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
    patience: float | None = None,
    type_dict: Types = None,
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
    confirmed by one bind; nothing is allocated. This process remembers what the search found.

    Examples
    --------
    >>> plan = memonger.plan(net, {'data': (32, 3, 224, 224)}, ctx=mx.gpu())
    >>> print(plan)
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    options = read_plan_options(
        how=how,
        work=work,
        budget=budget,
        budget_of=budget_of,
        optimizer=optimizer,
        ctx=ctx,
        planner=planner,
        ntrial=ntrial,
        kept_copies=kept_copies,
        rules=rules,
        measure=measure,
        patience=patience,
    )
    request = read_request(
        net,
        shapes,
        input_shapes,
        type_dict=type_dict,
        grad_req=grad_req,
        ctx=ctx,
        until=until,
        devices=devices,
    )
    return plan_of(solve(request, options))


@documented
def search_plan(sym: Any, ntrial: int = 6, type_dict: Types = None, **options: Any) -> Any:
    """Plan a network as ``plan`` does, under the original's name and arguments.

    Parameters
    ----------
    **options
        What `plan` takes by keyword, and shapes of inputs by name: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym`` with the same arguments, auxiliary states and outputs, to be given to
        ``Module`` or ``FeedForward`` in its place.

    Raises
    ------
    BudgetError, KeyboardInterrupt
        As `plan` does.

    Examples
    --------
    >>> planned = memonger.search_plan(net, ctx=mx.gpu(), data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(planned, context=mx.gpu())
    """
    return plan(sym, ntrial=ntrial, type_dict=type_dict, **options).symbol


@documented
def search_plan_to_layer(
    sym: Any,
    layer_name: str | None = None,
    threshold: int = 500,
    ntrial: int = 6,
    type_dict: Types = None,
    **options: Any,
) -> Any:
    """Plan a network up to a layer, under the name and arguments of copies of the original.

    Parameters
    ----------
    layer_name : str, optional
        As ``until`` of `plan`; by default the whole network is planned.
    threshold : int
        MB; those copies start their search there. It has no effect here, where none is needed.
    **options
        What `plan` takes by keyword, and shapes of inputs by name: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym``, as of `search_plan`.

    Raises
    ------
    BudgetError, KeyboardInterrupt
        As `plan` does.

    Examples
    --------
    >>> planned = memonger.search_plan_to_layer(net, 'stage3_unit6_plus', data=(1, 3, 800, 1200))
    >>> mod = mx.mod.Module(planned, context=mx.gpu())
    """
    check_count("threshold", threshold, 0)
    if "until" in options:
        raise MemongerError("search_plan_to_layer takes no until=; give layer_name=")
    return plan(sym, ntrial=ntrial, type_dict=type_dict, until=layer_name, **options).symbol


@documented
def make_mirror_plan(
    sym: Any,
    threshold: int,
    plan_info: MutableMapping[str, int] | None = None,
    *,
    type_dict: Types = None,
    ctx: Any = None,
    shapes: Any = None,
    rules: bool = True,
    until: str | None = None,
    devices: int = 1,
    **input_shapes: Any,
) -> Any:
    """Make the original's plan for one threshold, on the marks (``mirror_stage``) of the network.

    Parameters
    ----------
    threshold : int
        MB of results that may gather between two that are kept.
    plan_info : dict, optional
        Receives 'save_size' and 'max_size', in bytes: of all that is kept, and of the largest block
        between; both before ``until`` and the rules are applied.

    Returns
    -------
    mx.sym.Symbol
        A marked copy of ``sym``.

    Examples
    --------
    >>> info = {}
    >>> planned = memonger.make_mirror_plan(net, 576, info, data=(32, 3, 224, 224))
    """
    network = {"type_dict": type_dict, "ctx": ctx, "until": until, "devices": devices}
    way = Marks(read_request(sym, shapes, input_shapes, **network), Options(rules=rules))
    found = chen2016.mirror_plan(way.graph, way.hints, check_count("threshold", threshold, 0))
    if plan_info is not None:
        plan_info.update(max_size=found.max_size, save_size=found.save_size)
    bare = found.mask & way.before
    if not rules:
        log.warning(BARE)
        return marks.apply(way.request.symbol, bare)
    mask = way.rules.apply(bare)
    costs = [way.cost(each) // MB for each in (bare, mask)]
    log.info("cost=%d MB before the rules, %d MB with them", *costs)
    return marks.apply(way.request.symbol, mask, way.rules.native(mask))


@documented
def get_cost(
    sym: Any, type_dict: Types = None, *, ctx: Any = None, shapes: Any = None, **input_shapes: Any
) -> int:
    """Tell the memory that MXNet plans for training a network, in MB of 2**20 bytes.

    It is bound for gradients of all arguments, and nothing is allocated. MXNet counts 4 bytes for
    every element; parameters, their gradients, inputs and operator workspaces are not in it.

    Examples
    --------
    >>> memonger.get_cost(net, data=(32, 3, 224, 224))
    14332
    """
    request = read_call(sym, shapes, input_shapes, type_dict=type_dict, ctx=ctx)
    return measured(request).counted_bytes // MB


@documented
def pool_bytes(
    sym: Any, type_dict: Types = None, *, ctx: Any = None, shapes: Any = None, **input_shapes: Any
) -> int:
    """Tell the bytes that MXNet's pool takes in training, with the real size of every element.

    Where ``get_cost`` is in whole MB and counts 4 bytes for an element of any type, as MXNet
    reports it, this is what will be allocated: half of it for a network in float16. It is without
    the parameters' gradients as well, also where a schedule's pool holds them.

    Raises
    ------
    MemongerError
        If the network holds something whose memory cannot be told without running it.

    Examples
    --------
    >>> memonger.pool_bytes(net, type_dict={'data': 'float16'}, data=(32, 3, 224, 224))
    """
    found = measured(read_call(sym, shapes, input_shapes, type_dict=type_dict, ctx=ctx))
    if not found.exact:
        why = found.why_inexact
        raise MemongerError(f"the pool is not known to the byte ({why}); get_cost returns it in MB")
    return found.pool_bytes
