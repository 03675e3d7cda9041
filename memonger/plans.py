"""``plan``: from a network and its shapes to a ``Plan``, searched, confirmed by MXNet, and cached.

A planner proposes which operators are recomputed; the symbol that is made of that is replayed once
more from its own graph, and bound once: the two must agree on the memory, or it is said that they
do not. What was found is remembered in this process by everything that it depends on, so that a
``sym_gen`` that plans may be called again and again.
"""

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memonger import marks
from memonger.allocator import Replay, replay
from memonger.costs import MB, CostModel
from memonger.errors import MemongerError
from memonger.executor import bind, planned_mb
from memonger.forward import ForwardGraph, forward_graph
from memonger.inputs import InputSpec, check_count
from memonger.network import Network, Request, read_network, read_request, wanted
from memonger.operators import flops
from memonger.planners import chen2016
from memonger.planners.smallest import smallest
from memonger.progress import Progress
from memonger.rules import kept_summary
from memonger.training import training_graph

log = logging.getLogger("memonger")

WAYS = ("marks",)
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
        The pool as MXNet reports it (``get_cost``), with 4 bytes for an element of any type.
    peak_bytes : int
        The most bytes of that memory that are alive at once; the pool is larger by what MXNet's
        planner leaves unused in its blocks.
    recomputed_flops : float
        Work added to a training step, as a share of the FLOPs of the forward pass.
    kept, recomputed : tuple of str
        Names of the operators, in execution order.
    copies : tuple of str
        Names of the nodes that were added to keep a result whose operator is recomputed.
    planner : str
        What found it: one of ``candidates``, 'no plan' if the network is better left as it is.
    candidates : dict
        The cost of each candidate, in bytes as MXNet counts them.
    exact : bool
        Whether the memory was replayed to the byte and agreed with MXNet. Where it is False, it was
        learned by binding: in whole MB (2**20 bytes), rounded down, and ``peak_bytes`` and the
        sizes of elements that have not 4 bytes are estimates.
    interrupted : bool
        Whether the search was ended early (Ctrl-C); this is the best that it had found.
    """

    symbol: Any
    pool_bytes: int
    unplanned_bytes: int
    counted_bytes: int
    peak_bytes: int
    recomputed_flops: float
    kept: Tuple[str, ...]
    recomputed: Tuple[str, ...]
    copies: Tuple[str, ...]
    planner: str
    candidates: Dict[str, int]
    exact: bool
    interrupted: bool

    def __str__(self) -> str:
        saved = self.unplanned_bytes - self.pool_bytes
        lines = [
            "memory   %.1f MB instead of %.1f MB (%.1f MB or %.0f %% saved), %.1f MB alive at once"
            % (
                self.pool_bytes / MB,
                self.unplanned_bytes / MB,
                saved / MB,
                100 * saved / max(1, self.unplanned_bytes),
                self.peak_bytes / MB,
            ),
            "work     %d of %d operators computed again: %.0f %% of the forward pass"
            % (
                len(self.recomputed),
                len(self.kept) + len(self.recomputed),
                100 * self.recomputed_flops,
            ),
            "plan     %s, memory %s%s"
            % (
                self.planner,
                "replayed to the byte" if self.exact else "bound, in whole MB",
                "; the search was interrupted" if self.interrupted else "",
            ),
        ]
        return "\n".join(lines)

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


class Memory(NamedTuple):
    """What a symbol takes in training: replayed and bound.

    Attributes
    ----------
    replay : Replay
    bound : int
        MXNet's own total, in whole MB rounded down.
    inexact : tuple of str
        Why the replay may be wrong.
    """

    replay: Replay
    bound: int
    inexact: Tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not self.inexact and self.replay.pool_bytes // MB == self.bound

    @property
    def counted_bytes(self) -> int:
        return self.replay.pool_bytes if self.exact else self.bound * MB

    @property
    def pool_bytes(self) -> int:
        return _real(self.replay, self.counted_bytes)


class _Found(NamedTuple):
    """What a planner found: marks by node index, which candidate won, all candidates' costs."""

    mask: np.ndarray
    copies: Tuple[int, ...]
    cost: int
    planner: str
    candidates: Dict[str, int]
    interrupted: bool


class _Solution(NamedTuple):
    """What is remembered of a plan: nothing in it is the caller's, nor has an operator's name."""

    mask: np.ndarray
    native: Tuple[int, ...]
    copies: Tuple[int, ...]
    facts: Mapping[str, Any]  # the fields of Plan that do not depend on the operators' names
    warnings: Tuple[str, ...]


_remembered: "OrderedDict[str, _Solution]" = OrderedDict()
_lock = threading.Lock()


def plan(
    net: Any,
    shapes: Any = None,
    *,
    how: str = "marks",
    type_dict: Optional[Mapping[str, Any]] = None,
    grad_req: Any = "write",
    ctx: Any = None,
    planner: str = "smallest",
    ntrial: int = 6,
    until: Optional[str] = None,
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
    how : {'marks'}
        'marks': each result is computed again at most once, by marks on the operators that MXNet's
        executor reads.
    type_dict : dict, optional
        Types of inputs by name, as ``simple_bind`` takes it; float32 where nothing is told.
    grad_req : str, list or dict
        'write', 'add' or 'null' as ``simple_bind`` takes it. The memory that is predicted is that of
        these gradients; the plan is right for any. By default, as ``get_cost`` counts, gradients of
        all arguments; ``Module`` asks for none of its data and labels, which costs a little less
        or more.
    ctx : mx.Context, optional
        The device to plan for. By default the plan is made on the CPU and holds for CPU and GPU;
        a plan for ``mx.cpu()`` leaves cuDNN's BatchNorm on and does not hold for a GPU.
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
    KeyboardInterrupt
        If it is interrupted before anything was found; later, the best so far is returned.

    Examples
    --------
    >>> plan = memonger.plan(net, {'data': (32, 3, 224, 224)})
    >>> print(plan)
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    _check_choice("way (how)", how, WAYS)
    _check_choice("planner", planner, PLANNERS)
    ntrial = check_count("ntrial", ntrial, 1)
    request = read_request(
        net, shapes, input_shapes, type_dict, grad_req, ctx, until, devices
    )
    key = _key(request, [how, planner, ntrial, bool(kept_copies), bool(rules)])
    with _lock:
        solution = _remembered.get(key)
        if solution is not None:
            _remembered.move_to_end(key)
    if solution is None:
        solution = _solve(request, planner, ntrial, kept_copies, rules)
        if not solution.facts["interrupted"]:
            with _lock:
                _remembered[key] = solution
                while len(_remembered) > REMEMBERED:
                    _remembered.popitem(last=False)
    else:
        log.info("this network was planned before; its plan is used again")
    for warning in solution.warnings:
        log.warning(warning)
    return _carried_out(request.symbol, solution)


def measure(symbol: Any, spec: InputSpec, grad_req: Mapping[str, str], device: Any) -> Memory:
    """Replay and bind a symbol, with the marks that it carries."""
    graph = forward_graph(symbol, spec)
    asked = wanted(graph, grad_req)
    training = training_graph(graph, asked)
    found = replay(training, marks.recomputed(graph))
    return Memory(found, planned_mb(bind(symbol, graph, device, asked)), training.inexact)


def _solve(
    request: Request, planner: str, ntrial: int, kept_copies: bool, rules: bool
) -> _Solution:
    """Search, and confirm what was found."""
    network = read_network(request)
    cost = network.cost_model()
    warnings: List[str] = []
    if not rules:
        warnings.append(BARE)
    if planner == "chen2016":
        found = _chen2016(network, cost, ntrial, rules)
        if not network.stages:
            warnings.append(
                "the network has no mirror_stage marks, so the original planner cannot cut it; "
                "planner='smallest' needs none"
            )
    else:
        found = _smallest(network, cost, ntrial, kept_copies, rules)
    if found.interrupted:
        warnings.append(
            "interrupted: this is the best plan that was found so far, %.1f MB (%.1f MB without a "
            "plan)" % (found.cost / MB, cost.unplanned / MB)
        )
    nothing = np.zeros(len(network.graph.nodes), dtype=np.bool_)
    unplanned = replay(network.training, nothing)
    if found.mask.any():
        native = tuple(network.rules.native(found.mask)) if rules else ()
        symbol = _marked(request.symbol, found.mask, native, found.copies)
        memory = measure(symbol, request.spec, request.grad_req, request.device)
        if cost.exact and not (memory.exact and memory.replay.pool_bytes == found.cost):
            warnings.append(
                "the memory of this plan was predicted as %.1f MB, and MXNet plans %d MB for it; "
                "the figures of the plan are MXNet's" % (found.cost / MB, memory.bound)
            )
            memory = memory._replace(inexact=memory.inexact + ("it differs from the search",))
        if planner == "smallest" and memory.counted_bytes >= cost.unplanned:
            found = found._replace(mask=nothing, copies=(), planner="no plan")
    if found.mask.any():
        if memory.counted_bytes > cost.unplanned:
            warnings.append(
                "this plan needs more memory (%.1f MB) than the network as it is (%.1f MB); "
                "planner='smallest' finds none that does"
                % (memory.counted_bytes / MB, cost.unplanned / MB)
            )
    else:
        native = ()
        memory = Memory(unplanned, cost.unplanned // MB, network.training.inexact)
        if planner == "smallest":
            warnings.append(
                "no plan costs less than the network as it is (%.1f MB), so it is returned "
                "unmarked: %s"
                % (cost.unplanned / MB, _why_nothing_helps(network, found.candidates))
            )
    log.info("Find best plan with cost=%s MB", memory.bound)
    facts = {
        "pool_bytes": memory.pool_bytes,
        "unplanned_bytes": _real(unplanned, cost.unplanned),
        "counted_bytes": memory.counted_bytes,
        "peak_bytes": memory.replay.peak_bytes,
        "recomputed_flops": _work_added(memory.replay),
        "planner": found.planner,
        "candidates": found.candidates,
        "exact": memory.exact,
        "interrupted": found.interrupted,
    }
    return _Solution(found.mask, native, found.copies, facts, tuple(warnings))
