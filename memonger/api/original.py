"""The original's calls, but for ``search_plan``: ``make_mirror_plan`` and ``get_cost``."""

from __future__ import annotations

import logging
from typing import Any, Mapping, MutableMapping

from memonger.api.docstrings import documented
from memonger.costs.bind import bind, planned_mb
from memonger.graph import marks
from memonger.graph.inputs import check_count
from memonger.graph.read import forward_graph
from memonger.planners.marks import chen2016
from memonger.solve.memory import measure
from memonger.solve.request import Options, read_call, read_request
from memonger.solve.solution import BARE
from memonger.solve.ways import Marks
from memonger.support.errors import MB, MemongerError

log = logging.getLogger("memonger")


@documented
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
    way = Marks(read_request(locals()), Options(rules=rules))
    threshold = check_count("threshold", threshold, 0)
    found = chen2016.mirror_plan(way.graph, way.stages, threshold)
    if plan_info is not None:
        plan_info.update(max_size=found.max_size, save_size=found.save_size)
    bare = way.within(found.mask)
    if not rules:
        log.warning(BARE)
        return marks.apply(way.request.symbol, bare)
    mask, cost = way.rules.apply(bare), way.cost
    log.info("cost=%d MB before the rules, %d MB with them", cost(bare) // MB, cost(mask) // MB)
    return marks.apply(way.request.symbol, mask, way.rules.native(mask))


@documented
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

    Returns
    -------
    int

    Examples
    --------
    >>> memonger.get_cost(net, data=(32, 3, 224, 224))
    14332
    """
    call = read_call(locals())
    return planned_mb(bind(sym, forward_graph(sym, call.spec), call.device))


@documented
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
    call = read_call(locals())
    found = measure(sym, call.spec, call.grad_req, call.device)
    if not found.exact:
        why = "; ".join(found.inexact) or f"the replay disagrees with MXNet's {found.bound} MB"
        raise MemongerError(
            f"the memory of this network cannot be told to the byte ({why}); get_cost tells it "
            "in MB"
        )
    return found.pool_bytes
