"""The calls that plan a network: ``plan``, and those of the original memonger."""

from __future__ import annotations

import logging
from typing import Mapping, MutableMapping, Sequence

from memonger.api.plan import Plan, make_plan
from memonger.costs.bind import trim_heap
from memonger.graph.forward import no_collection
from memonger.solve.by_marks import write_original
from memonger.solve.choose import Solution, choose
from memonger.solve.describe import suggest_schedule
from memonger.solve.facts import Facts
from memonger.solve.facts import measure as measured
from memonger.solve.limits import MARKS, Limits
from memonger.solve.network import read_call, read_network, read_unplanned
from memonger.solve.search import search
from memonger.solve.selection import Selector
from memonger.support.errors import MB, MemongerError, check_count
from memonger.support.types import Amount, Shapes, Symbol, SymbolOrBlock, Types

log = logging.getLogger("memonger")


@trim_heap()
@no_collection()
def plan(
    net: SymbolOrBlock,
    shapes: Shapes | None = None,
    *,
    how: str | None = None,
    work: float | None = None,
    budget: Amount | None = None,
    slower_than: float | None = None,
    budget_of: str | None = None,
    optimizer: object = None,
    measure: bool = Limits.measure,
    gpu: str | None = None,
    patience: float | None = None,
    type_dict: Types = None,
    grad_req: object = "write",
    ctx: object = None,
    planner: str = Limits.planner,
    ntrial: int = Limits.ntrial,
    until: str | None = None,
    keep: Selector | None = None,
    recompute: Selector | None = None,
    devices: int = 1,
    **input_shapes: Sequence[int],
) -> Plan:
    """Plan which results a network keeps and which it recomputes in the backward pass.

    The plan is found without binding its trials, where MXNet's memory planner can be replayed, and
    confirmed by one bind; nothing is allocated. This process remembers what the search found.

    Parameters
    ----------
    net : mx.sym.Symbol or mx.gluon.HybridBlock
        The network. Marks (``mirror_stage``) are used if there are any, and not needed. A block is
        called on symbols and stays as it is: `memonger.gluon.plan` trains it by a plan.
    shapes : dict or list of mx.io.DataDesc
        Shapes of the inputs: ``{'data': (32, 3, 224, 224)}``, or ``iterator.provide_data +
        iterator.provide_label``. They may be given as keywords too. Those of a block are in the
        order of its arguments.
    how : {'auto', 'schedule', 'marks'}, optional
        'schedule': each result is recomputed as often as it pays; memonger runs the training step.
        'marks': at most once, by marks that MXNet's executor reads, and that a symbol's file keeps.
        'auto' (the default): a schedule, or marks where no schedule can hold the network or is
        within the limits, and a line says so. Without limits of memory, time or work it recomputes
        at most one more forward pass, and is the smallest that was found and is worth it: it saves
        a tenth of the memory, and at least as large a share of the memory as it adds of time. Where
        no schedule is, marks that are worth it and take less memory are taken. With
        ``planner='chen2016'`` the default is 'marks'.
    work : float, optional
        The most forward work of a training step, in forward passes: 2.0 allows one pass more. Marks
        take at most 2; schedules by default at most 2 log2(n) for n operators, as for O(log n)
        memory.
    budget : int, str or float, optional
        The memory that may be taken: the plan is then the fastest that fits. Bytes (an int), text
        ('6GB', '6GiB', '800MB'), a share of the memory without a plan ('60%', or a float in
        (0, 1]), or 'device': what is free on the GPU ``ctx``. 'knee' is the plan beyond which a
        little more memory stops buying much time.
    slower_than : float, optional
        The most time that a step may take, as predicted, in steps without a plan: 1.2 allows a
        fifth more. The plan is then the smallest within that time, or with a budget the fastest.
    budget_of : {'pool', 'device'}, optional
        What the budget bounds: ``pool_bytes``, or all that the device holds: ``device_bytes`` and
        the state of ``optimizer``. On a GPU, 1 GiB of it is left to CUDA's context and cuDNN. By
        default 'pool', but with ``optimizer`` or ``budget='device'``.
    optimizer : str, (str, dict) or mx.optimizer.Optimizer, optional
        Whose state counts too: 'adam', or ``('sgd', {'momentum': 0.9})``.
    measure : bool
        For a budget: measure each operator on the device, in a child process, instead of
        predicting its time from its FLOPs and bytes. By default nothing is measured.
    gpu : str, optional
        For a budget: the GPU whose times are predicted, from its data sheet: 'M60', 'P100',
        'GTX 1080 Ti', 'V100', 'T4', 'RTX 2080 Ti', 'A100', 'A10', 'RTX 3090', 'RTX 4090', 'L4',
        'H100', 'H200' or 'RTX 5090'.
        By default times are those of the device that ``ctx`` says: of the GPU here by its name (of
        a V100 if there is none, or none of these), or of a nominal CPU.
    patience : float, optional
        Times the usual length of the search, for smaller plans. By default a network that takes
        less than 16 MiB without a plan gets a twentieth (0.05), and the log says so; others 1.
    type_dict : dict, optional
        Types of inputs by name, as ``simple_bind`` takes it; inputs without one are float32.
    grad_req : str, list or dict
        'write', 'add' or 'null' as ``simple_bind`` takes it. The plan is right for others too; its
        memory is predicted for these. ``Module`` asks for none of its data and labels ('null').
    ctx : mx.Context or {'cpu', 'gpu', 'any'}, optional
        Where the network is trained: by default 'gpu' if MXNet is built with CUDA, and otherwise
        'any'. ``mx.gpu(0)`` must be there, and MXNet binds the plan on it. With 'gpu' nothing is
        bound on a GPU. A plan for 'any' is right on every device, and its times are those of a CPU
        (or see ``gpu``). One for 'cpu' leaves cuDNN's BatchNorm on, and does not hold for a GPU.
        Marks for a GPU save results where pointwise fusion (``MXNET_USE_FUSION``) leaves them
        alone; their memory is predicted without fusion, unless MXNet binds them on a GPU. On a CPU
        such a plan may round differently from the network without it.
    planner : {'smallest', 'chen2016'}
        'smallest' searches for the least memory, and takes nothing worse than no plan or than the
        original's plan with the rules. 'chen2016' is the original algorithm, on the marks of the
        network.
    ntrial : int
        Thresholds that the original's search tries beyond its first three.
    until : str, optional
        The name of a layer, or of its output (``'conv1_output'``), which is kept with all that
        follows. Part of a name, or a pattern (``'stage3_*_plus'``), is the first layer that it
        fits; '' is none.
    keep : str, function, or list of these, optional
        Operators whose results are kept, with any planner: patterns of names (``'stage4_*'``), of
        operators (``'::Activation'``), or of both (``'stage?_*::BatchNorm'``). A function gets each
        operator, with its ``name``, ``op``, ``attrs``, ``shapes`` and ``nbytes``. For a Gluon block
        also blocks within it.
    recompute : str, function, or list of these, optional
        Operators that are recomputed wherever that is possible, as ``keep`` names them. Where it is
        not (a rule, an output, ``keep``), the plan tells why.
    devices : int
        Among how many ``Module`` will split the batch; plan and memory are of the largest share.
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
        If no plan that was found fits the budget and ``slower_than``; it names the nearest.
    KeyboardInterrupt
        If it is interrupted before any plan was found; later, the best so far is returned.

    Examples
    --------
    >>> plan = memonger.plan(net, {'data': (32, 3, 224, 224)}, ctx=mx.gpu())
    >>> print(plan)
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    network, limits = read_call(
        "plan",
        net,
        shapes,
        input_shapes,
        how=how,
        work=work,
        budget=budget,
        slower_than=slower_than,
        budget_of=budget_of,
        optimizer=optimizer,
        measure=measure,
        gpu=gpu,
        patience=patience,
        type_dict=type_dict,
        grad_req=grad_req,
        ctx=ctx,
        planner=planner,
        ntrial=ntrial,
        until=until,
        keep=keep,
        recompute=recompute,
        devices=devices,
    )
    facts = Facts(network, limits, must_pay=limits.is_free)
    front = search(facts)
    chosen = choose(facts, front)
    return confirm(chosen)


def confirm(chosen: Solution) -> Plan:
    """Make the Plan of what was chosen and bound, and log its warnings."""
    planned = make_plan(chosen)
    for warning in planned.warnings:
        log.warning(warning)
    return planned


def search_plan(
    sym: Symbol,
    ntrial: int = Limits.ntrial,
    type_dict: Types = None,
    *,
    shapes: Shapes | None = None,
    how: str = "marks",
    work: float | None = None,
    budget: Amount | None = None,
    slower_than: float | None = None,
    budget_of: str | None = None,
    optimizer: object = None,
    measure: bool = Limits.measure,
    gpu: str | None = None,
    patience: float | None = None,
    grad_req: object = "write",
    ctx: object = None,
    planner: str = Limits.planner,
    until: str | None = None,
    keep: Selector | None = None,
    recompute: Selector | None = None,
    devices: int = 1,
    **input_shapes: Sequence[int],
) -> Symbol:
    """Plan a network by marks, under the original's name and arguments.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network.
    ntrial, type_dict, shapes, how, work, budget, slower_than, budget_of, optimizer, measure, gpu
    patience, grad_req, ctx, planner, until, keep, recompute, devices, **input_shapes
        As `plan` takes them, but by default with ``how='marks'``; with shapes of inputs by name:
        ``data=(32, 3, 224, 224)``.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym`` with the same arguments, auxiliary states and outputs, to be given to
        ``Module`` or ``FeedForward`` in its place.

    Raises
    ------
    MemongerError, BudgetError, KeyboardInterrupt
        As `plan` does.

    Examples
    --------
    >>> planned = memonger.search_plan(net, ctx=mx.gpu(), data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(planned, context=mx.gpu())
    """
    if isinstance(ntrial, (Mapping, list, tuple)):  # the second argument of `plan`
        raise MemongerError(
            f"search_plan: the second argument is ntrial, not {ntrial!r}; give shapes by name, as "
            "in search_plan(net, data=(32, 3, 224, 224)), or as shapes="
        )
    planned = plan(
        sym,
        shapes,
        how=how,
        work=work,
        budget=budget,
        slower_than=slower_than,
        budget_of=budget_of,
        optimizer=optimizer,
        measure=measure,
        gpu=gpu,
        patience=patience,
        type_dict=type_dict,
        grad_req=grad_req,
        ctx=ctx,
        planner=planner,
        ntrial=ntrial,
        until=until,
        keep=keep,
        recompute=recompute,
        devices=devices,
        **input_shapes,
    )
    if planned.schedule is None and log.isEnabledFor(logging.INFO):
        suggest_schedule(Facts(planned.request, Limits()), planned.pool_bytes)
    return planned.symbol


@trim_heap()
@no_collection()
def search_plan_to_layer(
    sym: Symbol,
    layer_name: str | None = None,
    threshold: int = 500,
    ntrial: int = Limits.ntrial,
    type_dict: Types = None,
    *,
    shapes: Shapes | None = None,
    ctx: object = None,
    **input_shapes: Sequence[int],
) -> Symbol:
    """Plan a network up to a layer, under the name and arguments of copies of the original.

    Other options are those of `search_plan`, whose ``until`` is the layer.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network.
    layer_name : str, optional
        As ``until`` of `plan`; by default the whole network is planned.
    threshold : int
        MiB; those copies start their search there. It has no effect here, where none is needed.
    ntrial, type_dict, shapes, ctx, **input_shapes
        As `search_plan` takes them.

    Returns
    -------
    mx.sym.Symbol
        A copy of ``sym``, as of `search_plan`.

    Raises
    ------
    MemongerError, KeyboardInterrupt
        As `plan` does.

    Examples
    --------
    >>> planned = memonger.search_plan_to_layer(net, 'stage3_unit6_plus', data=(1, 3, 800, 1200))
    """
    check_count("threshold", threshold, 0)
    network, limits = read_call(
        "search_plan_to_layer",
        sym,
        shapes,
        input_shapes,
        how=MARKS,
        type_dict=type_dict,
        ctx=ctx,
        ntrial=ntrial,
        until=layer_name,
    )
    facts = Facts(network, limits)
    return confirm(choose(facts, search(facts))).symbol


def make_mirror_plan(
    sym: Symbol,
    threshold: int,
    plan_info: MutableMapping[str, int] | None = None,
    *,
    type_dict: Types = None,
    ctx: object = None,
    shapes: Shapes | None = None,
    until: str | None = None,
    devices: int = 1,
    **input_shapes: Sequence[int],
) -> Symbol:
    """Make the original's plan for one threshold, on the marks (``mirror_stage``) of the network.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network.
    threshold : int
        MiB of results that may gather between two that are kept.
    plan_info : dict, optional
        Receives 'save_size' and 'max_size', in bytes: of all that is kept, and of the largest block
        between; both before ``until`` and the rules are applied.
    type_dict, ctx, shapes, until, devices, **input_shapes
        As `plan` takes them.

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
    network = read_unplanned(
        sym, shapes, input_shapes, type_dict=type_dict, ctx=ctx, until=until, devices=devices
    )
    facts = Facts(network, Limits())
    original, symbol = write_original(facts, check_count("threshold", threshold, 0))
    if plan_info is not None:
        plan_info.update(max_size=original.max_size, save_size=original.save_size)
    return symbol


def get_cost(
    sym: SymbolOrBlock,
    type_dict: Types = None,
    *,
    ctx: object = None,
    shapes: Shapes | None = None,
    **input_shapes: Sequence[int],
) -> int:
    """Return the memory that MXNet plans for training a network, in MiB.

    It is bound for gradients of all arguments, and nothing is allocated. MXNet counts 4 bytes for
    every element; parameters, their gradients, inputs and operator workspaces are not in it.

    Parameters
    ----------
    sym : mx.sym.Symbol
        The network.
    type_dict, ctx, shapes, **input_shapes
        As `plan` takes them.

    Returns
    -------
    int

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.

    Examples
    --------
    >>> memonger.get_cost(net, data=(32, 3, 224, 224))
    14332
    """
    network = read_network(sym, shapes, input_shapes, type_dict=type_dict, ctx=ctx)
    return measured(network).counted_bytes // MB


def pool_bytes(
    sym: SymbolOrBlock,
    type_dict: Types = None,
    *,
    ctx: object = None,
    shapes: Shapes | None = None,
    **input_shapes: Sequence[int],
) -> int:
    """Return the bytes of MXNet's pool in training, with the real size of every element.

    Where ``get_cost`` is in whole MiB and counts 4 bytes for an element of any type, as MXNet
    reports it, this is what will be allocated: half of it for a network in float16. It is without
    the parameters' gradients as well, also where a schedule's pool holds them.

    Parameters
    ----------
    sym, type_dict, ctx, shapes, **input_shapes
        As `get_cost` takes them.

    Returns
    -------
    int

    Raises
    ------
    MemongerError
        If the network holds something whose memory is only known when it runs.

    Examples
    --------
    >>> memonger.pool_bytes(net, type_dict={'data': 'float16'}, data=(32, 3, 224, 224))
    """
    memory = measured(read_network(sym, shapes, input_shapes, type_dict=type_dict, ctx=ctx))
    why = memory.why_inexact
    if why:
        text = f"the pool is not known to the byte ({why}); get_cost returns it in MiB"
        raise MemongerError(text)
    return memory.pool_bytes
