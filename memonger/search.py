"""The calls of the original: ``search_plan``, ``make_mirror_plan``, ``get_cost``."""

import logging
import os
from typing import Any, Dict, List, Mapping, MutableMapping, NamedTuple, Optional

import numpy as np

from memonger import marks
from memonger.allocator import replay
from memonger.costs import MB, CostModel
from memonger.errors import MemongerError
from memonger.executor import bind, planned_mb
from memonger.forward import ForwardGraph, forward_graph
from memonger.inputs import InputSpec, check_count, check_device, check_symbol, read_shapes
from memonger.operators import targets_of
from memonger.planners import chen2016
from memonger.planners.smallest import smallest
from memonger.rules import Rules, kept_summary, refuse
from memonger.training import TrainingGraph, training_graph

log = logging.getLogger("memonger")

PLANNERS = ("smallest", "chen2016")


class _Network(NamedTuple):
    """A user's network, ready to be planned."""

    symbol: Any  # without marks
    spec: InputSpec
    graph: ForwardGraph
    stages: Dict[int, str]
    training: TrainingGraph
    rules: Rules


def search_plan(
    sym: Any,
    ntrial: int = 6,
    type_dict: Optional[Mapping[str, Any]] = None,
    *,
    planner: str = "smallest",
    ctx: Any = None,
    shapes: Any = None,
    rules: bool = True,
    kept_copies: bool = True,
    **input_shapes: Any,
) -> Any:
    """Plan which results a network keeps and which it computes again in the backward pass.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network. Marks (``mirror_stage``) are used if there are any, and not needed.
    ntrial : int
        Thresholds that the original's search tries beyond its first three.
    type_dict : dict, optional
        Types of inputs by name, as ``simple_bind`` takes it; float32 where nothing is told.
    planner : {'smallest', 'chen2016'}
        'smallest' searches cuts of the network for the least memory, marks or no marks, and takes
        nothing that is worse than the original's plan with the rules or than none;
        'chen2016' is the original algorithm, on the marks of the network.
    ctx : mx.Context, optional
        The device to plan for. By default the plan is made on the CPU and holds for CPU and GPU;
        a plan for ``mx.cpu()`` leaves cuDNN's BatchNorm on and does not hold for a GPU.
    shapes : dict or list of mx.io.DataDesc, optional
        Shapes of inputs, as an alternative to keywords.
    rules : bool
        False gives the bare plan, without the rules that keep it right on every device.
    **input_shapes
        Shapes of inputs by name, the batch first: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym`` with the same nodes, arguments, auxiliary states and outputs, to be given
        to ``Module`` or ``FeedForward`` in its place.

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.

    Examples
    --------
    >>> planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(planned, context=mx.gpu())
    """
    if planner not in PLANNERS:
        raise MemongerError(
            "there is no planner %r; there are %s" % (planner, ", ".join(map(repr, PLANNERS)))
        )
    ntrial = check_count("ntrial", ntrial, 1)
    device = check_device(ctx)
    network = _network(sym, shapes, input_shapes, type_dict, ctx)
    cost = CostModel(network.symbol, network.graph, network.training, device)
    allow = network.rules.apply if rules else _anything
    if planner == "chen2016":
        trials = chen2016.search(
            network.graph, network.stages, lambda mask: cost(mask) // MB, ntrial
        )
        for trial in trials:
            log.info("Search threshold=%d MB, cost=%d MB", trial.threshold, trial.cost)
        chosen = chen2016.best(trials)
        log.info("Find best plan with threshold=%d, cost=%d MB", chosen.threshold, chosen.cost)
        if not network.stages:
            log.warning(
                "the network has no mirror_stage marks, so the original planner cannot cut it; "
                "planner='smallest' needs none"
            )
        mask = allow(chosen.plan.mask)
        _report_rules(network, chosen.cost, cost(mask) // MB, rules)
    else:
        found = smallest(network.stages, cost, network.rules, ntrial, cost.exact, kept_copies)
        mask = found.mask
        for name, mb in found.candidates.items():
            log.info("%s: %.1f MB", name, mb / MB)
        if not mask.any():
            log.warning(
                "no plan costs less than the network as it is (%.1f MB), so it is returned "
                "unmarked: %s",
                cost.unplanned / MB,
                _why_nothing_helps(network, found.candidates),
            )
            return marks.clear(network.symbol)
        _report_rules(network, None, found.cost // MB, rules)
        return marks.apply(
            network.symbol, mask, network.rules.native(mask) if rules else (), found.copies
        )
    return marks.apply(network.symbol, mask, network.rules.native(mask) if rules else ())


def make_mirror_plan(
    sym: Any,
    threshold: int,
    plan_info: Optional[MutableMapping[str, int]] = None,
    *,
    type_dict: Optional[Mapping[str, Any]] = None,
    ctx: Any = None,
    shapes: Any = None,
    rules: bool = True,
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
        between; both before the rules are applied.
    type_dict, ctx, shapes, rules, **input_shapes
        As for ``search_plan``.

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
    network = _network(sym, shapes, input_shapes, type_dict, ctx)
    plan = chen2016.mirror_plan(network.graph, network.stages, threshold)
    if plan_info is not None:
        plan_info["max_size"] = plan.max_size
        plan_info["save_size"] = plan.save_size
    if not rules:
        _report_rules(network, None, None, rules)
        return marks.apply(network.symbol, plan.mask)
    mask = network.rules.apply(plan.mask)
    cost = CostModel(network.symbol, network.graph, network.training, check_device(ctx))
    bare, ruled = cost(plan.mask) // MB, cost(mask) // MB
    _report_rules(network, bare, ruled, rules)
    return marks.apply(network.symbol, mask, network.rules.native(mask))


def get_cost(
    sym: Any,
    type_dict: Optional[Mapping[str, Any]] = None,
    *,
    ctx: Any = None,
    shapes: Any = None,
    **input_shapes: Any,
) -> int:
    """The memory that MXNet plans for training a network, in MB (2**20 bytes), as it reports it.

    It is bound for gradients of all arguments, and nothing is allocated. MXNet counts 4 bytes for
    every element; parameters, their gradients, inputs and operator workspaces are not in it.

    Parameters
    ----------
    sym : mx.sym.Symbol
        Planned or not.
    type_dict, ctx, shapes, **input_shapes
        As for ``search_plan``.

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
    type_dict: Optional[Mapping[str, Any]] = None,
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
    graph = forward_graph(sym, spec)
    training = training_graph(graph)
    found = replay(training, marks.recomputed(graph))
    bound = planned_mb(bind(sym, graph, device))
    if training.inexact or found.pool_bytes // MB != bound:
        raise MemongerError(
            "the memory of this network cannot be told to the byte (%s); get_cost tells it in MB"
            % ("; ".join(training.inexact) or "the replay disagrees with MXNet's %d MB" % bound)
        )
    return found.allocated_bytes


def _network(
    sym: Any,
    shapes: Any,
    input_shapes: Mapping[str, Any],
    type_dict: Optional[Mapping[str, Any]],
    ctx: Any,
) -> _Network:
    _refuse_global_mirroring()
    check_symbol(sym)
    spec = read_shapes(sym, shapes, input_shapes, type_dict)
    symbol = marks.unplan(sym)
    graph = forward_graph(symbol, spec)
    refuse(graph)
    if marks.recomputed(graph).any():
        log.info("the network carries force_mirroring marks already; they are planned anew")
    symbol = marks.clear(symbol)
    graph = forward_graph(symbol, spec)
    training = training_graph(graph)
    # Module asks for no gradients of its data and labels, which leaves fewer readers.
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in spec.shapes]
    targets = targets_of(None if ctx is None else ctx.device_type)
    rules = Rules([training, training_graph(graph, parameters)], targets)
    return _Network(symbol, spec, graph, marks.stages(graph), training, rules)


def _refuse_global_mirroring() -> None:
    value = os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0")
    if value not in ("", "0"):
        raise MemongerError(
            "MXNET_BACKWARD_DO_MIRROR is set to %r: MXNet then recomputes nearly every operator, "
            "whatever the plan says, and BatchNorm statistics may stop moving; unset it" % value
        )


def _anything(mask: np.ndarray) -> np.ndarray:
    return mask


def _report_rules(
    network: _Network, bare: Optional[int], ruled: Optional[int], rules: bool
) -> None:
    if not rules:
        log.warning(
            "the bare plan was asked for (rules=False): it may abort on a GPU, move BatchNorm "
            "statistics twice, or give wrong gradients"
        )
        return
    nodes = network.graph.nodes
    kept = kept_summary((nodes[i].op, why) for i, why in network.rules.reasons.items())
    if kept:
        log.info("kept by rule: %s", kept)
    if bare is not None:
        log.info("cost=%s MB before the rules, %s MB with them", bare, ruled)
    else:
        log.info("Find best plan with cost=%s MB", ruled)


def _why_nothing_helps(network: _Network, candidates: Mapping[str, int]) -> str:
    graph, rules = network.graph, network.rules
    operators: List[int] = graph.operators
    if not any(rules.allowed[i] for i in operators):
        return "every operator must be kept (%s)" % kept_summary(
            (graph.nodes[i].op, why) for i, why in rules.reasons.items()
        )
    if len(candidates) == 1:
        return "there is no point at which it can be cut"
    tried = ", ".join(
        "%s give %.1f MB" % (name, cost / MB)
        for name, cost in candidates.items()
        if name != "no plan"
    )
    largest = max((t.nbytes, i) for i in operators for t in graph.tensors[i])
    return "%s; its largest result is %.1f MB, of node %r (%s)" % (
        tried,
        largest[0] / MB,
        graph.nodes[largest[1]].name,
        graph.nodes[largest[1]].op,
    )
