"""``Plan``: a planned network, what it costs, and what can be done with it."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Iterable

import numpy as np

from memonger.costs.usage import Usage
from memonger.graph.arrays import BACKWARD, RECOMPUTED
from memonger.graph.forward import insert_identities
from memonger.planners.candidates import Candidate
from memonger.planners.marks.smallest import NO_PLAN
from memonger.show import plot
from memonger.show.explain import PlanExplanation, explain_choices
from memonger.show.notebook import Page, write_table
from memonger.show.record import Figures, PlanRecord, as_data
from memonger.show.report import ordered, write_report
from memonger.show.text import describe, write_lines
from memonger.solve.choose import Solution
from memonger.solve.facts import Facts, find_times, predict
from memonger.solve.limits import Limits, read_budget
from memonger.solve.network import read_mxnet_variables
from memonger.support import files
from memonger.support.errors import format_size
from memonger.support.symbols import json_of
from memonger.support.types import Amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND, FORMAT = "memonger plan", 4  # of what is written


class Plan(PlanRecord):
    """A planned network and what it costs; all memory is in bytes.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        The planned network, to be given to ``Module`` or ``FeedForward`` in place of the original.
    before, after : tuple
        The figures of a training step without the plan, and with it: ``pool_bytes``,
        ``counted_bytes``, ``peak_bytes``, ``device_bytes``, ``held_bytes``, ``temporary_bytes``,
        ``recompute_overhead``, ``exact``. Below, each is that of ``after``; ``unplanned_bytes`` and
        ``unplanned_device_bytes`` are those of ``before``.
    pool_bytes, unplanned_bytes : int
        What MXNet's memory pool takes in training, with the plan and without, with the real size of
        every element. Not in it: parameters, their gradients, inputs and operator workspaces.
    counted_bytes : int
        The pool as ``get_cost`` counts it: 4 bytes for an element of any type.
    peak_bytes : int
        The most that is alive at once, of activations and of gradients on their way. The pool is
        larger, with what is left unused.
    device_bytes, unplanned_device_bytes : int
        What MXNet allocates on the device (a GPU, where none was given): the pool, inputs,
        parameters, the gradients of ``grad_req``, auxiliary states, ``held_bytes`` and
        ``temporary_bytes``, each rounded as MXNet rounds it. Not in it: the state of an optimiser,
        cuDNN's workspaces, what CUDA takes for itself. Unless ``ctx`` is a GPU that is there
        (``mx.gpu(0)``), marks are counted without pointwise fusion, with which the ``copies`` of a
        plan for any device take memory of their own (ResNet-50 v1: 9 % more).
    held_bytes : int
        What operators hold beside the pool, with a plan or without: the reserve spaces of ``RNN``
        (cuDNN's as they were once measured). Plain copies and workspaces of oneDNN's operators
        (MKLDNN) on the CPU are not counted.
    temporary_bytes : int
        The largest temporary space that an operator is known to use; all share one. On a CPU the
        operators of a schedule take turns at ``MXNET_CPU_TEMP_COPY`` spaces (4), and oneDNN copies
        gradients, data and weights to other layouts there.
    recompute_overhead : float
        Work added to a step, as a share of the forward FLOPs.
    kept, recomputed : tuple of str
        Names of the operators, in execution order.
    copies : tuple of str
        Names of nodes that were added to save a recomputed operator's result.
    is_used : bool
        Whether ``symbol`` saves memory; otherwise the network is to be trained as it is.
    kind : str
        Who recomputes and places: one of 'none', 'placed', 'marks', 'schedule', 'original'. With
        'placed' nothing is recomputed, and memonger places the tensors in an arena.
    planner : str
        Where it comes from: one of ``candidates``, 'no plan' if none is better than the network.
    candidates : dict
        The cost of each candidate in bytes, as MXNet counts.
    exact : bool
        Whether the memory was replayed to the byte and agreed with MXNet. Otherwise the replay is
        an estimate, corrected to the MiB that MXNet reports when it binds the plan.
    interrupted : bool
        Whether the search was ended early (Ctrl-C); this is the best plan until then.
    floor_bytes, floor : int, str
        What is alive at once under any plan, at least; and the operator that sets this, if any.
    slowest : str
        The most work that is recomputed between two gradients; empty if nothing is.
    request : Network
        The network without a plan, its shapes, its gradients.
    time_overhead : float
        The time that the plan is predicted to add to a step, as a share of that without a plan.
    schedule : Schedule or None
        The operators of a training step in order; None where the order is left to MXNet.
    unmet : dict
        Of each operator that ``recompute=`` names and the plan does not recompute, why.
    declined : str
        Why a plan that was found is not taken (``how='auto'``); empty otherwise.
    warnings : tuple of str
        What was logged when it was made: that it saves little, say, and why.
    of_block : bool
        Whether it is of a Gluon block, which trains by it.
    options : dict
        Keywords with which ``memonger.plan`` makes it again for this request; a budget in bytes.
    """

    @property
    def is_used(self) -> bool:
        return self.after.pool_bytes < self.before.pool_bytes

    def __repr__(self) -> str:
        memory = f"pool_bytes={self.pool_bytes}, unplanned_bytes={self.unplanned_bytes}"
        work = f"recompute_overhead={self.recompute_overhead:.3f}"
        return f"Plan({memory}, {work}, planner={self.planner!r}, exact={self.exact})"

    def __str__(self) -> str:
        return write_lines(describe(self, self.largest_bytes))

    def _repr_html_(self) -> str:
        return write_table([*describe(self, self.largest_bytes).items()])

    def explain(self) -> PlanExplanation:
        """Explain of each tensor of the forward pass whether it is kept, and why.

        Returns
        -------
        PlanExplanation
            Printed it is a table of groups; its ``details()`` are one of all tensors.
        """
        return explain_choices(self, predict(self.planned))

    def plot(self, file: files.Path | None = None) -> Figure:
        """Draw memory over the training step, without the plan and with it.

        Parameters
        ----------
        file : str or path, optional
            A picture of 1200 by 800 pixels if it ends in ``.png``; ``.svg`` and ``.pdf`` too.
            Without it nothing is written.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it.

        Raises
        ------
        MemongerError
            If matplotlib is not installed, or the file cannot be written.
        """
        whole = self.unplanned_bytes
        after = format_size(self.pool_bytes, whole)
        panels = {
            f"without a plan: a pool of {format_size(whole)}": predict(self.request),
            f"with the plan: a pool of {after}": predict(self.planned),
        }
        return plot.plot_memory(file, panels)

    def report(
        self,
        file: files.Path | None = None,
        *,
        others: Iterable[Plan] = (),
        budget: Amount | None = None,
        budget_of: str | None = None,
        optimizer: object = None,
        network: str = "net-symbol.json",
    ) -> Page | None:
        """Write a page of the plan: its figures, memory over the training step, the operators.

        Parameters
        ----------
        file : str or path, optional
            One HTML file. Without it nothing is written, and the page is returned.
        others : iterable of Plan, optional
            More plans of the same network at the same shapes, to be shown beside: those of a
            `frontier`.
        budget, budget_of, optimizer
            Memory that is drawn as a line, as `memonger.plan` takes it.
        network : str
            The name of the network's file, for the commands that are shown.

        Returns
        -------
        Page or None
            A notebook shows it; None where there is a file.

        Raises
        ------
        MemongerError
            If plotly is not installed, or the file cannot be written.
        """
        limit = read_budget(budget, budget_of, optimizer, self.request.ctx)
        return write_report(file, ordered([self], others, limit, network))

    def predict_time(self, measure: bool = False) -> float:
        """Return the time that the plan is predicted to add to a training step.

        Parameters
        ----------
        measure : bool
            Measure each operator on the device, in a child process, instead of predicting its time
            from its FLOPs and bytes.

        Returns
        -------
        float
            As a share of a step's time without a plan; without ``measure`` it is ``time_overhead``.
        """
        if not measure:
            return self.time_overhead
        memory = predict(self.planned)
        timed_on = self.request.find_timing_device(self.options.get("gpu"), measure)
        times = find_times(memory.training, timed_on)
        return float(times.forward_seconds[memory.recomputed].sum() / times.step_seconds)

    def save(self, file: files.Path) -> None:
        """Write the plan to a file, from which `load_plan` makes it again in any process.

        With ``measure=True`` workers of a job may find other plans for a budget: let one plan.

        Parameters
        ----------
        file : str or path
            JSON. It is whole or not there; one that was there is replaced.

        Raises
        ------
        MemongerError
            If it cannot be written.
        """
        request, schedule = self.request, self.schedule
        content = {
            "request": {
                **vars(request),
                "symbol": json_of(self.symbol),
                "spec": request.spec._asdict(),
                "ctx": str(request.ctx),
            },
            "figures": as_data(self),
            "before": self.before._asdict(),
            "schedule": schedule and schedule.operations,
            "settings": read_mxnet_variables(),
        }
        text = json.dumps(content, sort_keys=True, default=lambda value: value.tolist())  # NumPy's
        digest = sha256(text.encode()).hexdigest()
        whole = {KIND: FORMAT, "sha256": digest, "plan": json.loads(text)}
        files.write(file, json.dumps(whole).encode())


def figures_of(memory: Usage) -> Figures:
    """Return the figures of a training step, without the step itself, which may be large."""
    return Figures(
        pool_bytes=memory.pool_bytes,
        counted_bytes=memory.counted_bytes,
        peak_bytes=memory.peak_bytes,
        device_bytes=memory.device_bytes,
        held_bytes=memory.held.nbytes,
        temporary_bytes=memory.temporary_bytes,
        recompute_overhead=memory.recomputed_flops,
        exact=memory.exact,
    )


def describe_slowest(memory: Usage) -> str:
    """Describe the most work that is recomputed in one run, with no gradient in between."""
    places, nodes, flops = memory.find_places(RECOMPUTED), memory.recomputed, memory.graph.flops
    if not len(places):
        return ""
    phases = memory.step.phases[memory.ran.order]
    gradients = np.cumsum(phases == BACKWARD)[places]  # that have run before
    runs = np.split(nodes, np.flatnonzero(np.diff(gradients)) + 1)
    run = max(runs[::-1], key=lambda run: (flops[run].sum(), len(run)))
    share = f"{100 * flops[run].sum() / memory.forward_flops:.0f} % of the forward pass"
    first, last = (memory.graph.nodes[memory.graph.user_node(k)].name for k in run[[0, -1]])
    return f"{first!r} to {last!r}: {len(run)} operators, {share}, are recomputed together"


def describe_unmet(facts: Facts, plan: Candidate) -> dict[str, str]:
    """Return why operators that ``recompute=`` names are not recomputed: name -> reason."""
    network, graph = facts.network, facts.graph
    if not network.recompute.nodes:
        return {}
    nodes, until = graph.nodes, network.until
    heads, again = {x for x, _ in graph.heads}, plan.recomputed(len(nodes))
    kept, reasons = {*network.keep.nodes}, {}
    for x in network.recompute.nodes:
        if again[x]:
            continue
        rule = graph.why_kept(x) or facts.rules.reasons.get(x)
        if x in kept:
            reason = "keep= names it too"
        elif until is not None and x >= until:
            reason = f"it does not come before {nodes[until].name!r}"
        elif x in heads:
            reason = "it is an output of the network"
        elif rule and not (plan.schedule and nodes[x].op == "Dropout"):
            reason = rule
        elif plan.origin == NO_PLAN:
            reason = "no plan that recomputes it saves memory"
        elif plan.schedule:
            reason = "no gradient reads it, so it is not saved"
        else:
            reason = "the backward pass does not read it, or must read the original"
        reasons[nodes[x].name] = reason
    return dict(sorted(reasons.items()))


def make_plan(solution: Solution) -> Plan:
    """Make a Plan of a solution."""
    facts, plan, nodes = solution.facts, solution.plan, solution.facts.graph.nodes
    inserted = insert_identities([node.name for node in nodes], plan.identities).behind
    kept: list[str] = []
    recomputed: list[str] = []
    for node, again in zip(nodes, plan.recomputed(len(nodes))):
        if not node.is_variable:
            (recomputed if again else kept).append(node.name)
    limits = vars(replace(facts.limits, how=solution.way))
    options = {k: v for k, v in limits.items() if v != getattr(Limits, k)}
    for name in ("budget", "knee", "slower_than", "lent", "leave_below"):
        options.pop(name, None)
    if solution.is_fastest:
        options["budget"] = solution.memory.pool_bytes
    unmet, warnings = describe_unmet(facts, plan), solution.warnings
    if unmet:
        text = f"recompute= names {len(facts.network.recompute.nodes)} operators of which "
        warnings += (f"{text}{len(unmet)} are not recomputed; print the plan",)
    return Plan(
        symbol=solution.symbol,
        request=facts.network,
        schedule=plan.schedule,
        before=figures_of(facts.unplanned),
        after=figures_of(solution.memory),
        time_overhead=solution.added_time,
        kept=tuple(kept),
        recomputed=tuple(recomputed),
        copies=tuple(name for new in inserted.values() for name, *_ in new),
        planner=plan.origin,
        candidates=dict(solution.costs),
        interrupted=solution.interrupted,
        floor_bytes=facts.lower_bound.nbytes,
        floor=facts.lower_bound.name(nodes),
        slowest=describe_slowest(solution.memory),
        unmet=unmet,
        options=options,
        declined=solution.declined,
        warnings=warnings,
    )
