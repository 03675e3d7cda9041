"""The calls of the original: ``search_plan``, ``make_mirror_plan``, ``get_cost``."""

from __future__ import annotations

import logging
from typing import Any, Mapping, MutableMapping

from memonger.api.memory import measure
from memonger.api.plan import plan
from memonger.api.request import read_network, read_request
from memonger.api.solution import BARE
from memonger.costs.bind import bind, planned_mb
from memonger.costs.model import MB
from memonger.graph import marks
from memonger.graph.inputs import (
    check_count,
    check_device,
    check_symbol,
    read_grad_req,
    read_shapes,
)
from memonger.graph.read import forward_graph
from memonger.planners.marks import chen2016
from memonger.support.errors import MemongerError

log = logging.getLogger("memonger")


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
    """Plan a network: the symbol of ``plan``, under the original's name and arguments.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network.
    ntrial, type_dict, planner and all that follow it
        As for ``plan``.
    **input_shapes
        Shapes of inputs by name, the batch first: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym`` with the same arguments, auxiliary states and outputs, to be given to
        ``Module`` or ``FeedForward`` in its place.

    Examples
    --------
    >>> planned = memonger.search_plan(net, ctx=mx.gpu(), data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(planned, context=mx.gpu())
    """
    return plan(
        sym,
        shapes,
        how=how,
        work=work,
        budget=budget,
        budget_of=budget_of,
        optimizer=optimizer,
        measure=measure,
        patience=patience,
        type_dict=type_dict,
        grad_req=grad_req,
        ctx=ctx,
        planner=planner,
        ntrial=ntrial,
        until=until,
        devices=devices,
        kept_copies=kept_copies,
        rules=rules,
        **input_shapes,
    ).symbol


def make_mirror_plan(
    sym: Any,
    threshold: int,
    plan_info: MutableMapping[str, int] | None = None,
    *,
    type_dict: Mapping[str, Any] | None = None,
    ctx: Any = None,
    shapes: Any = None,
    rules: bool = True,
    until: str | None = None,
    devices: int = 1,
    **input_shapes: Any,
) -> Any:
    """The original's plan for one threshold, on the marks (``mirror_stage``) of the network.

    Parameters
    ----------
    sym : mx.sym.Symbol
    threshold : int
        MB of results that may gather between two that are kept.
    plan_info : dict, optional
        Receives 'save_size' and 'max_size', in bytes: of all that is kept, and of the largest block
        between; both before ``until`` and the rules are applied.
    type_dict, ctx, shapes, rules, until, devices, **input_shapes
        As for ``plan``.

    Returns
    -------
    mx.sym.Symbol
        A marked copy of ``sym``.

    Examples
    --------
    >>> info = {}
    >>> planned = memonger.make_mirror_plan(net, 576, info, data=(32, 3, 224, 224))
    """
    threshold = check_count("threshold", threshold, 0)
    request = read_request(
        sym, shapes, input_shapes, type_dict, ctx=ctx, until=until, devices=devices
    )
    network = read_network(request, rules)
    found = chen2016.mirror_plan(network.graph, network.stages, threshold)
    if plan_info is not None:
        plan_info["max_size"] = found.max_size
        plan_info["save_size"] = found.save_size
    bare = network.within(found.mask)
    if not rules:
        log.warning(BARE)
        return marks.apply(request.symbol, bare)
    mask = network.rules.apply(bare)
    cost = network.cost_model()
    log.info("cost=%d MB before the rules, %d MB with them", cost(bare) // MB, cost(mask) // MB)
    return marks.apply(request.symbol, mask, network.rules.native(mask))


def get_cost(
    sym: Any,
    type_dict: Mapping[str, Any] | None = None,
    *,
    ctx: Any = None,
    shapes: Any = None,
    **input_shapes: Any,
) -> int:
    """The memory that MXNet plans for training a network, in MB (2**20 bytes), as it reports it.

    It is bound for gradients of all arguments, and nothing is allocated. MXNet counts 4 bytes for
    every element; parameters, their gradients, inputs and operator workspaces are not in it. A
    schedule's pool holds the parameters' gradients too (``Plan.gradient_bytes``): they are in it.

    Parameters
    ----------
    sym : mx.sym.Symbol
        Planned or not.
    type_dict, ctx, shapes, **input_shapes
        As for ``plan``.

    Examples
    --------
    >>> memonger.get_cost(net, data=(32, 3, 224, 224))
    14332
    """
    device = check_device(ctx)
    spec = read_shapes(check_symbol(sym), shapes, input_shapes, type_dict)
    return planned_mb(bind(sym, forward_graph(sym, spec), device))


def pool_bytes(
    sym: Any,
    type_dict: Mapping[str, Any] | None = None,
    *,
    ctx: Any = None,
    shapes: Any = None,
    **input_shapes: Any,
) -> int:
    """The bytes that MXNet's memory pool takes in training, with the real size of every element.

    Where ``get_cost`` is in whole MB and counts 4 bytes for an element of any type, as MXNet
    reports it, this is what will be allocated: half of it for a network in float16.

    Parameters
    ----------
    sym, type_dict, ctx, shapes, **input_shapes
        As for ``get_cost``.

    Raises
    ------
    MemongerError
        If the network holds something whose memory cannot be told without running it.

    Examples
    --------
    >>> memonger.pool_bytes(net, type_dict={'data': 'float16'}, data=(32, 3, 224, 224))
    """
    device = check_device(ctx)
    spec = read_shapes(check_symbol(sym), shapes, input_shapes, type_dict)
    found = measure(sym, spec, read_grad_req(sym.list_arguments(), "write"), device)
    if not found.exact:
        raise MemongerError(
            "the memory of this network cannot be told to the byte (%s); get_cost tells it in MB"
            % ("; ".join(found.inexact) or "the replay disagrees with MXNet's %d MB" % found.bound)
        )
    return found.pool_bytes
