"""The original's calls, but for ``search_plan``: ``make_mirror_plan`` and ``get_cost``."""

from __future__ import annotations

import logging
from typing import Any, Mapping, MutableMapping

from memonger.api.planning import as_for_plan, request_of
from memonger.costs.bind import bind, planned_mb
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
from memonger.solve.memory import measure
from memonger.solve.request import read_network
from memonger.solve.solution import BARE
from memonger.support.errors import MB, MemongerError

log = logging.getLogger("memonger")


@as_for_plan
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
    """Make the original's plan for one threshold, on the marks (``mirror_stage``) of the network.

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

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.

    Examples
    --------
    >>> info = {}
    >>> planned = memonger.make_mirror_plan(net, 576, info, data=(32, 3, 224, 224))
    """
    request = request_of({**locals(), "net": sym})
    threshold = check_count("threshold", threshold, 0)
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


@as_for_plan
def get_cost(
    sym: Any,
    type_dict: Mapping[str, Any] | None = None,
    *,
    ctx: Any = None,
    shapes: Any = None,
    **input_shapes: Any,
) -> int:
    """Tell the memory that MXNet plans for training a network, in MB of 2**20 bytes.

    It is bound for gradients of all arguments, and nothing is allocated. MXNet counts 4 bytes for
    every element; parameters, their gradients, inputs and operator workspaces are not in it. A
    schedule's pool holds the parameters' gradients too (``Plan.gradient_bytes``): they are in it.

    Parameters
    ----------
    sym : mx.sym.Symbol
        Planned or not.
    type_dict, ctx, shapes, **input_shapes
        As for ``plan``.

    Returns
    -------
    int

    Raises
    ------
    MemongerError
        If MXNet cannot bind the network, or the shapes are wrong; it says what to do.

    Examples
    --------
    >>> memonger.get_cost(net, data=(32, 3, 224, 224))
    14332
    """
    device = check_device(ctx)
    spec = read_shapes(check_symbol(sym), shapes, input_shapes, type_dict)
    return planned_mb(bind(sym, forward_graph(sym, spec), device))


@as_for_plan
def pool_bytes(
    sym: Any,
    type_dict: Mapping[str, Any] | None = None,
    *,
    ctx: Any = None,
    shapes: Any = None,
    **input_shapes: Any,
) -> int:
    """Tell the bytes that MXNet's pool takes in training, with the real size of every element.

    Where ``get_cost`` is in whole MB and counts 4 bytes for an element of any type, as MXNet
    reports it, this is what will be allocated: half of it for a network in float16.

    Parameters
    ----------
    sym : mx.sym.Symbol
        Planned or not.
    type_dict, ctx, shapes, **input_shapes
        As for ``plan``.

    Returns
    -------
    int

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
        why = "; ".join(found.inexact) or f"the replay disagrees with MXNet's {found.bound} MB"
        raise MemongerError(
            f"the memory of this network cannot be told to the byte ({why}); get_cost tells it "
            "in MB"
        )
    return found.pool_bytes
