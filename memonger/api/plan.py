"""``Plan``: a planned network and what it costs; its file, JSON of which nothing is run."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING, Mapping, Sequence

import numpy as np

from memonger.api import plot
from memonger.api.explain import PlanExplanation, explain_choices
from memonger.api.report import PLACING, Reported
from memonger.costs.usage import Usage
from memonger.graph import inputs, marks
from memonger.graph.forward import INSERTED, RECORD, insert_identities
from memonger.graph.inputs import InputSpec, check_symbol, drop_old_types, read_shapes
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import Schedule
from memonger.show.notebook import write_table
from memonger.solve.choose import Solution
from memonger.solve.describe import describe_slowest, describe_unmet
from memonger.solve.facts import find_times, predict
from memonger.solve.limits import Limits
from memonger.solve.network import Network, fingerprint, read_mxnet_variables, read_structure
from memonger.solve.selection import Selection
from memonger.support import files
from memonger.support.errors import MemongerError, format_size
from memonger.support.mxnet import mx
from memonger.support.removed import refuse_removed
from memonger.support.symbols import attributes, json_of, load_nodes, read
from memonger.support.types import Json, Shapes, Symbol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("memonger")

KIND, FORMAT = "memonger plan", 4  # of what is written
#: Fields of a Plan that have names of nodes.
NAMING = ("kept", "recomputed", "copies", "floor", "slowest", "unmet", "declined", "warnings")
FEW = 3  # names that are printed
GROUPS = 4  # of tensors that are printed


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Reported):
    """A planned network and what it costs; all memory is in bytes.

    Attributes
    ----------
    symbol : mx.sym.Symbol
        The planned network, to be given to ``Module`` or ``FeedForward`` in place of the original.
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
        (cuDNN's as they were once measured). What the operators of oneDNN (MKLDNN) hold on the CPU
        is not counted.
    temporary_bytes : int
        The largest temporary space that an operator is known to use; all share one. On a CPU the
        operators of a schedule take turns at ``MXNET_CPU_TEMP_COPY`` spaces (4).
    recompute_overhead : float
        Work added to a step, as a share of the forward FLOPs.
    kept, recomputed : tuple of str
        Names of the operators, in execution order.
    copies : tuple of str
        Names of nodes that were added to save a recomputed operator's result.
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

    symbol: Symbol
    pool_bytes: int
    unplanned_bytes: int
    counted_bytes: int
    peak_bytes: int
    device_bytes: int
    unplanned_device_bytes: int
    held_bytes: int
    temporary_bytes: int
    recompute_overhead: float
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
    request: Network
    time_overhead: float
    schedule: Schedule | None = None
    unmet: dict[str, str] = field(default_factory=dict)
    options: dict[str, Json] = field(default_factory=dict)
    declined: str = ""
    warnings: tuple[str, ...] = ()
    of_block: bool = False

    if not TYPE_CHECKING:  # a type checker would take any name

        def __getattr__(self, name: str) -> object:
            refuse_removed(f"plan.{name}")
            raise AttributeError(f"a Plan has no {name!r}")

    @property
    def is_used(self) -> bool:
        """Whether ``symbol`` saves memory; otherwise the network is to be trained as it is."""
        return self.pool_bytes < self.unplanned_bytes

    @property
    def kind(self) -> str:
        """Who recomputes and places: one of 'none', 'placed', 'marks', 'schedule', 'original'.

        With 'placed' nothing is recomputed, and memonger places the tensors in an arena.
        """
        if not self.recomputed:
            return "none" if self.schedule is None else "placed"
        if self.schedule is not None:
            return "schedule"
        return "original" if self.planner == "chen2016" else "marks"

    @property
    def _plans(self) -> Sequence[Plan]:
        return [self]

    def __repr__(self) -> str:
        memory = f"pool_bytes={self.pool_bytes}, unplanned_bytes={self.unplanned_bytes}"
        work = f"recompute_overhead={self.recompute_overhead:.3f}"
        return f"Plan({memory}, {work}, planner={self.planner!r}, exact={self.exact})"

    def __str__(self) -> str:
        return self._describe(self._explain_or_not(), self._largest)

    def _repr_html_(self) -> str:
        return self._write_html(self._largest)

    def _write_html(self, largest: int) -> str:
        """Write the table of a notebook, in the unit of a listing with this ``largest``, bytes."""
        return write_table([*self._lines(self._explain_or_not(), largest).items()])

    def _explain_or_not(self) -> PlanExplanation:
        """Explain the plan; printing raises nothing, so of a symbol that was changed nothing."""
        try:
            return self.explain()
        except MemongerError:
            return PlanExplanation(())

    @property
    def _largest(self) -> int:
        """The most of the figures of its memory, in bytes: a listing is in the unit of it."""
        return max(self.unplanned_device_bytes, self.device_bytes)

    def _describe(self, explanation: PlanExplanation, largest: int) -> str:
        """Describe the plan, of which this is the explanation, as ``print`` does."""
        lines = self._lines(explanation, largest)
        return "\n".join(f"{name:10} {text}" for name, text in lines.items())

    def _lines(self, explanation: PlanExplanation, largest: int) -> dict[str, str]:
        """Describe the plan, a text for each name; those of many lines are indented."""

        def size(nbytes: int) -> str:
            return format_size(nbytes, largest)

        chosen = [group for group in explanation.groups if group.choice != "freed"][:GROUPS]
        fates = [g.choice + (f" ({g.why})" if g.why else "") for g in chosen]
        groups = [f"{g}: {fate}, {size(g.nbytes)}" for g, fate in zip(chosen, fates)]
        saved, count = self.unplanned_bytes - self.pool_bytes, len(self.kept) + len(self.recomputed)
        place = {"cpu": " of the CPU", "gpu": " of a GPU"}.get(self.request.device_type, "")
        blocks = "" if place == " of the CPU" else ", rounded as MXNet does on a GPU"
        gpu = f" for {self.options['gpu']}" if "gpu" in self.options else ""
        rounding = "; on a CPU it may round otherwise than the network without it"
        lines = {
            "before": f"{size(self.unplanned_bytes)} without a plan",
            "after": f"{size(self.pool_bytes)}, of which {size(self.peak_bytes)} are alive at once",
            "saved": f"{size(saved)}, {100 * saved / max(1, self.unplanned_bytes):.0f} %",
            "floor": f"{size(self.floor_bytes)} must be alive at once under any plan"
            + (f", in {self.floor}" if self.floor else ""),
            "device": f"{size(self.device_bytes)}{place}, "
            f"{size(self.unplanned_device_bytes)} without a plan: the pool, parameters, "
            f"their gradients and inputs{blocks}",
            "held": f"{size(self.held_bytes)} of it are held by operators, with any plan"
            if self.held_bytes
            else "",
            "shared": f"{size(self.temporary_bytes)} of it are temporary space, which "
            "operators share"
            if self.temporary_bytes
            else "",
            "work": f"{100 * self.recompute_overhead:.0f} % of the forward FLOPs are recomputed; "
            f"{100 * self.time_overhead:.1f} % of the time of a step is added, as predicted{gpu}",
            "slowest": self.slowest or "nothing is recomputed",
            "recomputed": f"{len(self.recomputed)} of {count} operators, "
            + {"placed": PLACING, "schedule": "as often as the schedule says"}.get(
                self.kind, "once each"
            ),
            "kept": f"{len(self.kept)} operators"
            + (f", and the results of {len(self.copies)} recomputed ones" if self.copies else ""),
            "declined": self.declined,
            **self._chosen(),
            "largest": ("\n" + 11 * " ").join(groups),
            "plan": f"{self.planner}, memory "
            + ("replayed to the byte" if self.exact else "known to the MiB, from a bind")
            + ("; the search was interrupted" if self.interrupted else ""),
            "for": self.request.devices + (rounding if self.request.device_type == "gpu" else ""),
        }
        return {name: text for name, text in lines.items() if text}

    def _chosen(self) -> dict[str, str]:
        """Describe what the user chose by name, and which of it could not be."""
        keep, recompute = self.request.keep, self.request.recompute
        lines = {}
        if keep.patterns:
            lines["keep"] = f"{_list(keep.patterns)}: {len(keep.nodes)} operators"
        if recompute.patterns:
            count, unmet = len(recompute.nodes), self.unmet
            lines["recompute"] = f"{_list(recompute.patterns)}: "
            lines["recompute"] += f"{count - len(unmet)} of {count} operators"
            for reason in dict.fromkeys(unmet.values()):
                names = [name for name, why in unmet.items() if why == reason]
                lines["recompute"] += f"; not {_list(names)}: {reason}"
        return lines

    def explain(self) -> PlanExplanation:
        """Explain of each tensor of the forward pass whether it is kept, and why.

        Returns
        -------
        PlanExplanation
            Printed it is a table of groups; its ``details()`` are one of all tensors.
        """
        return explain_choices(self, self._memory)

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
            f"without a plan: a pool of {format_size(whole)}": self._unplanned,
            f"with the plan: a pool of {after}": self._memory,
        }
        return plot.plot_memory(file, panels)

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
        memory = self._memory
        timed_on = self.request.find_timing_device(self.options.get("gpu"), measure)
        times = find_times(memory.training, timed_on)
        return float(times.forward[memory.recomputed].sum() / times.step)

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
            "figures": figures(self),
            "schedule": schedule and schedule.operations,
            "settings": read_mxnet_variables(),
        }
        text = json.dumps(content, sort_keys=True, default=lambda value: value.tolist())  # NumPy's
        digest = sha256(text.encode()).hexdigest()
        whole = {KIND: FORMAT, "sha256": digest, "plan": json.loads(text)}
        files.write(file, json.dumps(whole).encode())

    @cached_property
    def _memory(self) -> Usage:
        """The memory of a training step with the plan; that of the search, if it was made here."""
        return predict(replace(self.request, symbol=self.symbol))

    @cached_property
    def _unplanned(self) -> Usage:
        """The memory of a training step without the plan."""
        return predict(self.request)

    def __getstate__(self) -> dict[str, Json]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_plan(
    file: files.Path,
    net: Symbol | None = None,
    shapes: Shapes | None = None,
    **input_shapes: Sequence[int],
) -> Plan:
    """Read a plan that `Plan.save` has written; nothing is searched or bound.

    Parameters
    ----------
    file : str or path
    net : mx.sym.Symbol, optional
        The network, to make sure that the plan is of it. Operators may have other names. The plan's
        symbol then has this network's attributes of variables (initializers, ``lr_mult``).
    shapes : dict or list of mx.io.DataDesc, optional
        With ``net``: the shapes of inputs, to make sure that the plan is for them.
    **input_shapes
        These shapes by keyword: ``data=(32, 3, 224, 224)``.

    Returns
    -------
    Plan
        With the figures of when it was saved. A warning names MXNet's environment variables that
        had other values then.

    Raises
    ------
    MemongerError
        If the file cannot be read, is damaged or no plan, or is of another network or shapes.

    Examples
    --------
    >>> plan = memonger.load_plan('plan.json', net, data=(32, 3, 224, 224))
    >>> mod = mx.mod.Module(plan.symbol, context=mx.gpu())
    """
    content = _read_content(file)
    planned, schedule = mx.sym.load_json(content["request"]["symbol"]), _read_schedule(content)
    request = _read_request(content, planned)
    if net is not None:
        planned = _with_variables_of(drop_old_types(check_symbol(net), request.spec), planned)
        request = _read_request(content, planned)
    if schedule is not None:
        planned = scheduled(request.symbol, schedule)
    if net is not None:
        given = read_shapes(check_symbol(net), shapes, input_shapes, None)
        _compare(file, request, net, given)
    elif shapes is not None or input_shapes:
        raise MemongerError("load_plan: shapes are checked against the network; give net= too")
    settings = sorted({k for k, _ in read_mxnet_variables().items() ^ content["settings"].items()})
    if settings:
        log.warning(
            "the plan in %r was made with other values of %s, so it may take other memory here",
            file,
            ", ".join(settings),
        )
    return Plan(symbol=planned, request=request, schedule=schedule, **_read_figures(content))


def restore_plan(file: files.Path, request: Network) -> Plan | None:
    """Read a plan that was saved for this network and these inputs, whatever their names are.

    It gets the names of the request. None if the file has a plan of another network.

    Raises
    ------
    MemongerError
        If the file cannot be read, or is damaged.
    """
    content = _read_content(file)
    schedule, symbol = _read_schedule(content), request.symbol
    planned = mx.sym.load_json(content["request"]["symbol"])
    saved = _read_request(content, planned)
    if fingerprint(saved, Limits()) != fingerprint(request, Limits()):
        return None
    planned, names = _rename_nodes(planned, saved.symbol, symbol)
    if schedule is not None:
        planned = scheduled(symbol, schedule)
    read_here = _read_figures(content)
    read_here.update({field: _rename(read_here[field], names) for field in NAMING})
    return Plan(symbol=planned, request=request, schedule=schedule, **read_here)


def _rename_nodes(planned: Symbol, old: Symbol, new: Symbol) -> tuple[Symbol, dict[str, str]]:
    """Return a planned symbol with the names and variables of a copy of its network, and the names.

    ``old`` is the network of the plan, and ``new`` the copy: their nodes are in the same order.
    """
    graph, names = read(planned), {}
    pairs = zip(read(old)["nodes"], read(new)["nodes"])
    before, after = "", ""
    for node in graph["nodes"]:
        attrs, name = node.get("attrs", {}), node["name"]
        if attrs.get(RECORD) == INSERTED:  # `insert_identities` puts it behind the node it saves
            node["name"] = after + name[len(before) :]
        else:
            own, copy = next(pairs)
            before, after = own["name"], copy["name"]
            node["name"] = after
            if node["op"] == "null":
                node["attrs"] = attributes(copy)
        names[name] = node["name"]
    return load_nodes(graph["nodes"], graph["heads"]), names


def _rename(value: Json, names: Mapping[str, str]) -> Json:
    """Return a name, or names in quotes in a text, or these in a tuple or a dict, renamed."""
    if isinstance(value, dict):
        return {names.get(k, k): _rename(text, names) for k, text in value.items()}
    if isinstance(value, tuple):
        return tuple(_rename(text, names) for text in value)
    quoted = re.sub(r"'([^' ]+)'", lambda match: repr(names.get(match[1], match[1])), value)
    return names.get(value, quoted)


def _read_request(content: Mapping[str, Json], planned: Symbol) -> Network:
    """Read the request of a saved plan; ``planned`` is its symbol."""
    saved = content["request"]
    shapes = {name: tuple(shape) for name, shape in saved["spec"]["shapes"].items()}
    return Network(
        symbol=marks.clear(marks.unplan(planned)),
        spec=InputSpec(shapes, saved["spec"]["types"]),
        grad_req=saved["grad_req"],
        ctx=inputs.parse_devices(saved["ctx"]),
        until=saved["until"],
        **{k: Selection(*map(tuple, saved[k])) for k in ("keep", "recompute") if k in saved},
    )


def _list(names: Sequence[str]) -> str:
    """List the first of some names."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(repr, names[:FEW])) + more


def figures(plan: Plan) -> dict[str, Json]:
    """Return the fields of a Plan that are data: all but its symbol, its request, its schedule."""
    others = ("symbol", "request", "schedule")
    return {k: v for k, v in plan.__getstate__().items() if k not in others}


def _read_content(file: files.Path) -> dict[str, Json]:
    """Read the content of a file, if it is as it was written."""
    remedy = "write it anew with plan.save()"
    try:
        with open(os.fsdecode(file), encoding="utf-8") as stream:
            whole = json.load(stream)
        version, digest, content = whole[KIND], whole["sha256"], whole["plan"]
    except OSError as error:
        raise MemongerError(f"the plan {file!r} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MemongerError(f"{file!r} is no plan, or is cut short ({error}); {remedy}") from None
    if version != FORMAT:
        formats = f"has format {version!r}, and this memonger reads format {FORMAT}"
        raise MemongerError(f"the plan {file!r} {formats}; {remedy}")
    if digest != sha256(json.dumps(content, sort_keys=True).encode()).hexdigest():
        raise MemongerError(f"the plan {file!r} was changed later (its checksum differs); {remedy}")
    return dict(content)


def _read_schedule(content: Mapping[str, Json]) -> Schedule | None:
    operations = content["schedule"]
    return None if operations is None else Schedule(np.array(operations, dtype=np.int32))


def _read_figures(content: Mapping[str, Json]) -> dict[str, Json]:
    """Read the fields of a Plan that are data, as `figures` returns them."""
    pairs = content["figures"].items()
    return {k: tuple(v) if isinstance(v, list) else v for k, v in pairs}


def _with_variables_of(net: Symbol, planned: Symbol) -> Symbol:
    """Return a planned symbol whose variables have the attributes that they have in a network."""
    graph, of_net = read(planned), read(net)["nodes"]
    attrs = {node["name"]: attributes(node) for node in of_net if node["op"] == "null"}
    for node in graph["nodes"]:
        if node["op"] == "null" and node["name"] in attrs:
            node["attrs"] = attrs[node["name"]]
    return load_nodes(graph["nodes"], graph["heads"])


def _compare(file: files.Path, request: Network, net: Symbol, spec: InputSpec) -> None:
    """Make sure that a plan is of this network and of these shapes."""
    here = read_structure(marks.clear(marks.unplan(drop_old_types(net, request.spec))))
    there = read_structure(request.symbol)
    another = f"the plan {file!r} is of another network: "
    for k, (node, planned_node) in enumerate(zip_longest(here["nodes"], there["nodes"])):
        if node != planned_node:
            raise MemongerError(f"{another}node {k} is {node} here, {planned_node} in the plan")
    if here != there:
        raise MemongerError(f"{another}its outputs differ")
    pairs = zip(("shape", "type"), spec._asdict().values(), request.spec._asdict().values())
    for kind, values, planned_values in pairs:
        for name, value in values.items():
            if planned_values.get(name, value) != value:
                raise MemongerError(
                    f"the plan {file!r} is for another {kind} of input {name!r}: "
                    f"{planned_values[name]}, not {value}; plan for this {kind}"
                )


def make_plan(solution: Solution) -> Plan:
    """Make a Plan of a solution."""
    facts, plan, memory = solution.facts, solution.plan, solution.memory
    nodes, unplanned = facts.graph.nodes, facts.unplanned
    inserted = insert_identities([node.name for node in nodes], plan.identities).behind
    masked = [(n.name, r) for n, r in zip(nodes, plan.recomputed(len(nodes))) if not n.is_variable]
    limits = vars(replace(facts.limits, how=solution.way))
    options = {k: v for k, v in limits.items() if v != getattr(Limits, k)}
    for name in ("budget", "knee", "slower_than", "lent", "leave_below"):
        options.pop(name, None)
    if solution.is_fastest:
        options["budget"] = memory.pool_bytes
    unmet, warnings = describe_unmet(facts, plan), solution.warnings
    if unmet:
        text = f"recompute= names {len(facts.network.recompute.nodes)} operators of which "
        warnings += (f"{text}{len(unmet)} are not recomputed; print the plan",)
    planned = Plan(
        symbol=solution.symbol,
        unplanned_bytes=unplanned.pool_bytes,
        unplanned_device_bytes=unplanned.device_bytes,
        held_bytes=memory.held.nbytes,
        temporary_bytes=memory.temporary_bytes,
        kept=tuple(name for name, recomputed in masked if not recomputed),
        recomputed=tuple(name for name, recomputed in masked if recomputed),
        copies=tuple(name for new in inserted.values() for name, *_ in new),
        planner=plan.origin,
        candidates=dict(solution.costs),
        interrupted=solution.interrupted,
        floor_bytes=facts.lower_bound.nbytes,
        floor=facts.lower_bound.name(nodes),
        slowest=describe_slowest(memory),
        request=facts.network,
        time_overhead=solution.added_time,
        schedule=plan.schedule,
        unmet=unmet,
        options=options,
        declined=solution.declined,
        warnings=warnings,
        pool_bytes=memory.pool_bytes,
        counted_bytes=memory.counted_bytes,
        peak_bytes=memory.peak_bytes,
        device_bytes=memory.device_bytes,
        exact=memory.exact,
        recompute_overhead=memory.recomputed_flops,
    )
    vars(planned).update(_memory=memory, _unplanned=unplanned)
    return planned
