"""Plan a Gluon block, return its plan, or remove it."""

from __future__ import annotations

import contextlib
import functools
import glob
import weakref
from types import FunctionType
from typing import Callable, MutableMapping, Sequence, TypeVar

from memonger.api.plan import Plan
from memonger.gluon import autograd
from memonger.gluon.cached_op import PlannedBlock, PlannedOp
from memonger.gluon.outputs import adding_afterwards
from memonger.gluon.runner import free_unused
from memonger.gluon.sparse import SplitOp, split
from memonger.schedules.execution.arena import address
from memonger.solve.limits import NAMES, OF_FIRST_CALL, check_keywords, read_limits
from memonger.support.errors import MemongerError, why_unplanned
from memonger.support.mxnet import may_wait, mx
from memonger.support.types import Block, GluonOptions, Keywords, NDArray, Parameter, Unpack
from memonger.support.versions import MXNET_ERRORS

Net = TypeVar("Net")

#: Block -> how it is planned. Copies and pickles of a block are not in it.
_blocks: MutableMapping[Block, PlannedBlock] = weakref.WeakKeyDictionary()
#: Returns how other blocks are planned, after `plan_others` was called.
_others: Callable[[Block], PlannedBlock] | None = None

_REPLACED = "_memonger"  # an attribute of the functions that are `_replacement`s
#: The options that are passed to ``hybridize``. (``backend`` would change the graph.)
_FLAGS = (
    "active clear static_alloc static_shape inline_limit forward_bulk_size backward_bulk_size"
).split()


def plan(net: Net, shapes: object = None, **options: Unpack[GluonOptions]) -> Net:
    """Plan a block, instead of ``net.hybridize()``; the training loop does not change.

    The plan is made at the first call under ``autograd.record()``, and is used for all later calls
    in training mode, with inputs of any shapes. Calls that run more gradients (because layers were
    frozen) or exceed a budget in bytes get their own plans. Results, gradients and running
    statistics equal those of ``net.hybridize()``, bit for bit. Inference, names, files and copies
    (which have no plan) are Gluon's. When Gluon makes a new graph (``hybridize``, ``cast``, a layer
    added), a new plan is made.

    A block that cannot be planned (with sparse gradients in the middle, for example) trains as
    after ``hybridize()``, and a warning says why. So does a block whose plan would save no memory,
    without a warning.

    Parameters
    ----------
    net : mx.gluon.HybridBlock
        The block. It is hybridized if it is not yet.
    **options
        Keywords of `memonger.plan`: ``how`` (by default 'auto'), ``work``, ``budget``,
        ``slower_than``, ``budget_of``, ``optimizer``, ``measure``, ``gpu``, ``patience``,
        ``planner``, ``ntrial``, ``ctx``, ``until``, ``keep``, ``recompute``. Keywords of
        ``hybridize`` are passed to it: ``active``, ``clear``, ``static_alloc``, ``static_shape``,
        ``inline_limit``, ``forward_bulk_size``, ``backward_bulk_size``.

    Returns
    -------
    mx.gluon.HybridBlock
        The same object.

    Raises
    ------
    MemongerError
        If ``net`` is not a HybridBlock, or an option is wrong.
    BudgetError
        From the first recorded call, if no plan that was found fits the budget.

    Examples
    --------
    >>> net.initialize(ctx=mx.gpu())
    >>> memonger.gluon.plan(net)
    >>> with mx.autograd.record():
    ...     loss = loss_fn(net(x), y)
    >>> loss.backward()
    >>> trainer.step(32)
    """
    hybrid = _check_block(net)
    keywords: dict[str, object] = dict(options)
    flags = {name: keywords.pop(name) for name in _FLAGS if name in options}
    if shapes is not None:
        keywords["shapes"] = shapes
    block = _read_options(hybrid, keywords)
    _install()
    if flags or not hybrid._active:
        hybrid.hybridize(**flags)
    # This removes an earlier plan and the CachedOp, which the next call makes anew.
    unplan(net)
    _plan_later(net, block)
    return net


def plan_of(net: Block) -> Plan:
    """Return the plan by which a block trains.

    Parameters
    ----------
    net : mx.gluon.HybridBlock
        A block that was planned and has been called under ``autograd.record()``.

    Returns
    -------
    Plan
        The plan of the latest call, with the shapes for which it was made.

    Raises
    ------
    MemongerError
        If the block was not planned, its plan is not made yet, or it could not be planned.

    Examples
    --------
    >>> print(memonger.gluon.plan_of(net))
    """
    block = _blocks.get(_check_block(net))
    if block is None:
        raise MemongerError(f"{net.name} has no plan; make one with memonger.gluon.plan(net)")
    if not net._active:
        raise MemongerError(
            f"{net.name} trains without a plan since hybridize(False); call net.hybridize() to "
            "plan it again"
        )
    decision = block.decision
    if decision is not None and decision.refusal:
        raise MemongerError(f"{net.name} trains without a plan: {decision.refusal}")
    if decision is None or decision.plan is None:
        raise MemongerError(
            f"{net.name} has no plan before its first call under autograd.record() for which a "
            "gradient is requested; call the block first"
        )
    return decision.plan


def unplan(net: Net) -> Net:
    """Remove the plan of a block, so that it trains as after ``hybridize()`` again.

    Parameters
    ----------
    net : mx.gluon.HybridBlock
        The block, planned or not.

    Returns
    -------
    mx.gluon.HybridBlock
        The same object.

    Raises
    ------
    MemongerError
        If ``net`` is not a HybridBlock.

    Examples
    --------
    >>> memonger.gluon.unplan(net)
    """
    hybrid = _check_block(net)
    _blocks.pop(hybrid, None)
    hybrid._clear_cached_op()
    free_unused()
    return net


def _check_block(net: object) -> Block:
    """Return ``net`` if it is a HybridBlock; otherwise raise MemongerError."""
    kind = type(net).__name__
    if isinstance(net, mx.gluon.HybridBlock):
        return net
    if isinstance(net, mx.gluon.Block):
        raise MemongerError(
            f"{net.name} ({kind}) is a Block that cannot be hybridized; make it a HybridBlock "
            "(HybridSequential for Sequential), or plan the HybridBlocks within it"
        )
    if isinstance(net, mx.sym.Symbol):
        raise MemongerError(f"{net!r} is a Symbol, not a Gluon block; plan it with memonger.plan")
    raise MemongerError(f"net must be an mx.gluon.HybridBlock, not {kind} {net!r}")


def _read_options(net: Block, keywords: Keywords) -> PlannedBlock:
    """Check the keywords of `plan`."""
    check_keywords("memonger.gluon.plan", keywords, _FLAGS)
    for name in keywords.keys() - {*NAMES}:  # shapes of inputs
        raise MemongerError(f"memonger.gluon.plan takes no {name}=; {OF_FIRST_CALL}")
    options = dict(keywords)
    for name in ("keep", "recompute"):
        if options.get(name) is not None:
            options[name] = _read_scopes(options[name])
    return PlannedBlock(net.name, options, read_limits(**keywords).budget)


def _read_scopes(selector: object) -> list[object]:
    """Replace each block in a selector by a pattern that matches the names of its operators."""
    selectors: list[object] = []
    for item in selector if isinstance(selector, (list, tuple)) else [selector]:
        if isinstance(item, mx.gluon.Block):
            scopes: set[str] = set()
            item.apply(lambda block, add=scopes.add: add(block.prefix))
            scopes = {s for s in scopes if s and not any(s[:k] in scopes for k in range(1, len(s)))}
            item = "|".join(f"{glob.escape(scope)}*" for scope in sorted(scopes)) or item.name
        selectors.append(item)
    return selectors


def plan_others(how: Callable[[Block], PlannedBlock] | None) -> None:
    """Plan every hybridized block that `plan` was not called for; ``how`` returns its options."""
    global _others
    _others = how
    _install()


def _plan_later(net: Block, block: PlannedBlock) -> None:
    """Plan a block at its next call; store its parameters in the plain layout first."""
    # Inference leaves the weights of convolutions in a layout of MKLDNN. The first training step
    # would copy them, and the memory of the old ones would not be used again: 60 of 220 MB with
    # ResNet-50. Inference converts a weight by another operator, which it pushes while it runs, so
    # waiting for the weights themselves is not enough.
    arrays: list[NDArray] = []
    for parameter in net.collect_params().values():
        with contextlib.suppress(*MXNET_ERRORS):  # not initialized yet, or sparse
            arrays += parameter.list_data()
    if may_wait():
        mx.nd.waitall()
        for array in arrays:
            address(array)
    _blocks[net] = block
    weakref.finalize(net, free_unused)


def _install() -> None:
    """Make Gluon use a `PlannedOp` instead of the CachedOp of a planned block, from now on."""
    autograd.install()
    classes = [mx.gluon.HybridBlock]
    for kind in classes:  # subclasses decorated by ``mx.util.use_np`` have their own methods
        classes += kind.__subclasses__()
        usual = vars(kind).get("_build_cache")
        if usual is not None and not hasattr(usual, _REPLACED):
            kind._build_cache = _replacement(usual)


def _replacement(usual: FunctionType) -> object:
    """Make the function that replaces the ``_build_cache`` of a block."""

    @functools.wraps(usual)
    def _build_cache(self: Block, *args: NDArray) -> None:
        usual(self, *args)
        if self not in _blocks and _others is not None:
            _plan_later(self, _others(self))
        block = _blocks.get(self)
        if block is not None and not isinstance(self._cached_op, PlannedOp):
            inputs, _ = mx.gluon.block._flatten(args, "input")
            inputs = [array for array in inputs if array is not None]
            self._cached_op = _planned_op(block, self, inputs)

    setattr(_build_cache, _REPLACED, True)  # decorators copy attributes
    return _build_cache


def _planned_op(block: PlannedBlock, net: Block, inputs: Sequence[NDArray]) -> PlannedOp:
    """Make the operator that replaces a block's CachedOp, which was made for these inputs."""
    usual = net._cached_op
    symbol = net._cached_graph[1].as_nd_ndarray()  # with the methods of mx.sym.Symbol
    if not dict(net._flags).get("static_alloc"):
        symbol = adding_afterwards(symbol)
    arrays: dict[str, NDArray] = {}
    parameters: dict[str, Parameter] = {}
    # A parameter whose ``data`` is computed (gluonnlp's WeightDropParameter) is an input: it is
    # another array at each call, and its gradient belongs to what it was computed from.
    stored = mx.gluon.Parameter.data
    for name, (is_input, source) in zip(symbol.list_inputs(), net._cached_op_args):
        if not is_input and getattr(source.data, "__func__", None) is stored:
            parameters[name] = source
        arrays[name] = inputs[source] if is_input else source.list_data()[0]
    refusal = ""
    try:
        parts = split(symbol, parameters, arrays)
        if parts is not None:
            return SplitOp(block, usual, symbol, parameters, parts, net._flags)
    except Exception as error:
        refusal = why_unplanned(error)
    return PlannedOp(block, usual, symbol, parameters, refusal)
