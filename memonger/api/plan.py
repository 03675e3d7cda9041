"""``Plan``: a planned network and what it costs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from memonger.api import files, plot
from memonger.api.docstrings import documented
from memonger.api.explain import PlanExplanation, explain_choices
from memonger.costs.time import measured as timing
from memonger.graph.forward import copy_names
from memonger.schedules.schedule import Schedule
from memonger.solve.memory import Memory, predict
from memonger.solve.request import Options, Request
from memonger.solve.solution import Solution
from memonger.solve.ways import Marks
from memonger.support.errors import in_words
from memonger.support.symbols import read


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A planned network and what it costs; all memory is in bytes.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        The planned network, to be given to ``Module`` or ``FeedForward`` in place of the original.
    pool_bytes, unplanned_bytes : int
        What MXNet's memory pool takes in training, with the plan and without, with the real size of
        every element. Not in it: parameters, their gradients, inputs and operator workspaces.
    counted_bytes : int
        The pool as MXNet reports it (``get_cost``): 4 bytes for an element of any type, and with
        the gradients that it holds.
    gradient_bytes : int
        Gradients that the pool holds besides, where a schedule writes them; with marks they are
        arrays of their own, and this is 0. A pool takes ``pool_bytes + gradient_bytes``.
    peak_bytes : int
        The most bytes of activations, and of gradients on their way, that are alive at once. The
        pool is larger by what MXNet's planner leaves unused. That of a schedule can be less, for
        activations may lie where a gradient of ``gradient_bytes`` will be.
    device_bytes, unplanned_device_bytes : int
        What MXNet asks the device for (a GPU, where none was given): the pool, inputs, parameters,
        the gradients that ``grad_req`` asks for, auxiliary states, ``held_bytes`` and
        ``temporary_bytes``, each rounded as MXNet rounds it. Not in it: the state of an optimiser,
        cuDNN's workspaces and what CUDA takes for itself; and pointwise fusion, unless the plan is
        for a GPU (``ctx``). It is on by default there (``MXNET_USE_FUSION``), and makes the
        ``copies`` of a plan for any device take memory of their own (ResNet-50 v1: 9 % more).
    held_bytes, unplanned_held_bytes : int
        What operators hold beside the pool for the life of the executor: the reserve spaces of
        ``RNN``, which no plan changes; on the CPU plain copies of what MKLDNN has laid out in
        blocks. What cuDNN holds is not documented, and told as it was once measured.
    temporary_bytes : int
        The largest temporary space that an operator is known to ask for; all share one. On the CPU
        it has the copies of MKLDNN's own operators.
    recompute_overhead : float
        Work added to a training step, as a share of the FLOPs of the forward pass. The field has
        its old name, ``recomputed_flops``.
    kept, recomputed : tuple of str
        Names of the operators, in execution order.
    copies : tuple of str
        Names of the nodes that were added to keep a result whose operator is recomputed, or a sum
        apart from pointwise fusion.
    planner : str
        What found it: one of ``candidates``, 'no plan' if the network is better left as it is.
    candidates : dict
        The cost of each candidate, in bytes as MXNet counts them; with pointwise fusion where the
        plan is for a GPU that has it on.
    exact : bool
        Whether the memory was replayed to the byte and agreed with MXNet. Where it is False, it was
        learned by binding: in whole MB (2**20 bytes), rounded down, and ``peak_bytes``,
        ``device_bytes`` and the sizes of elements that have not 4 bytes are estimates.
    interrupted : bool
        Whether the search was ended early (Ctrl-C); this is the best that it had found.
    floor_bytes, floor : int, str
        What is alive at once under any plan of this network, at least; and the operator that sets
        this, empty if none does.
    slowest : str
        The most work that is recomputed between two gradients; empty if nothing is.
    request : Request
        What was asked for: the network without a plan, its shapes, its gradients.
    time_overhead : float or None
        The time that the plan is predicted to add to a training step, as a share of the step's
        without a plan; None where the search did not look at time. The field has its old name,
        ``added_time``.
    schedule : Schedule or None
        What a training step runs, in which order; None where that is left to MXNet.
    """

    symbol: Any
    pool_bytes: int
    unplanned_bytes: int
    counted_bytes: int
    gradient_bytes: int
    peak_bytes: int
    device_bytes: int
    unplanned_device_bytes: int
    held_bytes: int
    unplanned_held_bytes: int
    temporary_bytes: int
    recomputed_flops: float
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    copies: tuple[str, ...]
    planner: str
    candidates: dict[str, int]
    exact: bool
    interrupted: bool
    floor_bytes: int
    floor: str
    slowest: str
    request: Request
    added_time: float | None = None
    schedule: Schedule | None = None

    recompute_overhead = property(lambda self: self.recomputed_flops, doc="See `Plan`.")
    time_overhead = property(lambda self: self.added_time, doc="See `Plan`.")

    def __repr__(self) -> str:
        return (
            f"Plan(pool_bytes={self.pool_bytes}, unplanned_bytes={self.unplanned_bytes}, "
            f"recompute_overhead={self.recomputed_flops:.3f}, planner={self.planner!r}, "
            f"exact={self.exact})"
        )

    def __str__(self) -> str:
        inside, alive = self.gradient_bytes, in_words(self.peak_bytes)
        before = f"{in_words(self.unplanned_bytes + inside)} without a plan"
        after = f"of which {alive} are alive at once"
        if inside:
            before += f": a pool of {in_words(self.unplanned_bytes)}, and {in_words(inside)} of "
            before += "gradients of parameters"
            after = f"these gradients in it; {alive} of results are alive at once"
        saved = self.unplanned_bytes - self.pool_bytes
        share = 100 * saved / max(1, self.unplanned_bytes + inside)
        gpu = self.request.ctx is None or self.request.ctx.device_type == "gpu"
        held = f"{in_words(self.held_bytes)} of it are held by operators, "
        held += f"{in_words(self.unplanned_held_bytes)} without a plan"
        shared = (
            f"{in_words(self.temporary_bytes)} of it are temporary space, which operators share"
        )
        work = f"{100 * self.recomputed_flops:.0f} % of the forward pass is recomputed"
        if self.added_time is not None:
            work += f"; {100 * self.added_time:.1f} % of the time of a step is added, as predicted"
        operators = len(self.kept) + len(self.recomputed)
        times = "once each" if self.schedule is None else "as often as the schedule says"
        results = f", and the results of {len(self.copies)} recomputed ones"
        exact = "replayed to the byte" if self.exact else "bound, in whole MB"
        lines = {
            "before": before,
            "after": f"{in_words(self.pool_bytes + inside)}, {after}",
            "saved": f"{in_words(saved)}, {share:.0f} %",
            "floor": f"{in_words(self.floor_bytes)} must be alive at once under any plan"
            + (self.floor and f", in {self.floor}"),
            "device": f"{in_words(self.device_bytes)} of {'a GPU' if gpu else 'the CPU'}, "
            f"{in_words(self.unplanned_device_bytes)} without a plan: the pool, parameters, their "
            "gradients and inputs" + (gpu and ", in MXNet's blocks" or ""),
            "held": held if self.held_bytes or self.unplanned_held_bytes else "",
            "shared": shared if self.temporary_bytes else "",
            "work": work,
            "slowest": self.slowest or "nothing is recomputed",
            "recomputed": f"{len(self.recomputed)} of {operators} operators, {times}",
            "kept": f"{len(self.kept)} operators" + (results if self.copies else ""),
            "plan": f"{self.planner}, memory {exact}"
            + ("; the search was interrupted" if self.interrupted else ""),
        }
        return "\n".join(f"{name:10} {text}" for name, text in lines.items() if text)

    def explain(self) -> PlanExplanation:
        """Tell of each tensor of the forward pass whether it is kept, and why.

        Returns
        -------
        PlanExplanation
            Printed it is a table.
        """
        original, budgeted = self.planner == "chen2016", self.added_time is not None
        way = Marks(self.request, Options())
        return explain_choices(way, self._memory(self.symbol), original, budgeted)

    @documented
    def plot(self, file: Any) -> None:
        """Draw memory over the training step, without the plan and with it."""
        before, after = self._memory(self.request.symbol), self._memory(self.symbol)
        panels = {
            f"without a plan: a pool of {in_words(self.unplanned_bytes)}": before,
            f"with the plan: a pool of {in_words(self.pool_bytes)}": after,
        }
        plot.plot_memory(file, panels)

    def predict_time(self, measure: bool = False) -> float:
        """Predict the time that the plan adds to a training step, where no budget asked for it.

        Parameters
        ----------
        measure : bool
            Whether each operator is measured on the device, once, instead of predicted.

        Returns
        -------
        float
            As a share of a step's time without a plan; ``time_overhead`` where that is known.
        """
        if self.added_time is not None:
            return self.added_time
        memory = self._memory(self.symbol)
        times = timing.times_of(memory.training, self.request.device, measure)
        return float(times.forward[memory.recomputed].sum() / times.step)

    def save(self, file: Any) -> None:
        """Write the plan to a file, from which `load_plan` makes it in other processes.

        Plans with a budget depend on times that are measured on the machine, so workers of one job
        may find different ones: let one of them plan, and the others load its plan.

        Parameters
        ----------
        file : str or path
            JSON. It is whole or not there; one that was there is replaced.

        Raises
        ------
        MemongerError
            If it cannot be written.
        """
        files.write(file, self)

    def _memory(self, symbol: Any) -> Memory:
        """Predict what a training step of a symbol takes."""
        request = self.request
        return predict(symbol, request.spec, request.grad_req, request.device)


@documented
def load_plan(file: Any, net: Any = None, shapes: Any = None, **input_shapes: Any) -> Plan:
    """Read a plan that `Plan.save` has written; nothing is searched or bound.

    Parameters
    ----------
    file : str or path
    net : mx.sym.Symbol, optional
        The network, to make sure that the plan is of it. Operators may have other names, inputs may
        not. Without it the plan's own is taken on trust.
    shapes : dict or list of mx.io.DataDesc, optional
        With ``net``: the shapes of inputs, to make sure that the plan is for them.

    Returns
    -------
    Plan
        With the figures of when it was made. A warning is logged where MXNet's environment
        variables were others then.

    Raises
    ------
    MemongerError
        If the file cannot be read, is cut short, damaged or none of a plan, or if the plan is of
        another network or for other shapes; it says where they differ.

    Examples
    --------
    >>> plan = memonger.load_plan('plan.json', net, data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    return Plan(**files.read(file, net, shapes, input_shapes))


def plan_of(request: Request, planned: Any, solution: Solution) -> Plan:
    """Make the Plan of a planned symbol, with the names of its operators."""
    nodes = read(request.symbol)["nodes"]
    names = [node["name"] for node in nodes]
    found, floor = solution.plan, solution.floor
    operators = [(n["name"], r) for n, r in zip(nodes, found.recomputed) if n["op"] != "null"]
    chosen, slowest = nodes[floor.operator], ""
    if solution.slowest is not None:
        first, last, count, flops = solution.slowest
        slowest = (
            f"{names[first]!r} to {names[last]!r}: {count} operators, {100 * flops:.0f} % of the "
            "forward pass, are recomputed together"
        )
    return Plan(
        symbol=planned,
        floor_bytes=floor.nbytes,
        floor=floor.sets(chosen["name"], chosen["op"], len(nodes)) if floor.row >= 0 else "",
        slowest=slowest,
        request=request,
        kept=tuple(name for name, again in operators if not again),
        recomputed=tuple(name for name, again in operators if again),
        copies=tuple(itertools.chain(*copy_names(names, found.copies).values())),
        schedule=found.schedule,
        **{**solution.facts, "candidates": dict(solution.facts["candidates"])},
    )
