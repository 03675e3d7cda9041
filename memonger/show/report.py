"""A page of plans: one HTML file, which any browser opens without a network.

What it shows is in it as JSON: figures of each plan, which tensors live when, and the operators.
The scripts in ``page`` draw it with plotly.js (the extra ``report``).
"""

from __future__ import annotations

import gzip
import json
import shlex
from base64 import b64encode
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Iterable, Mapping, Sequence

import numpy as np

from memonger import __version__
from memonger.costs.time.roofline import Times
from memonger.costs.usage import Usage
from memonger.graph.read import forward_graph
from memonger.show.explain import Choice, explain_choices, find_results
from memonger.show.groups import Member, find_groups
from memonger.show.notebook import Page
from memonger.show.record import KINDS, PLACING, PlanRecord
from memonger.show.text import describe, write_lines
from memonger.show.timeline import NONE, find_rows, list_alive, list_operators
from memonger.solve.facts import count_state_bytes, find_times, predict
from memonger.solve.limits import OPTIONS, Budget, flag_of
from memonger.solve.network import Network, read_structure
from memonger.support import files
from memonger.support.errors import MemongerError
from memonger.support.symbols import read
from memonger.support.types import Json

PAGE = Path(__file__).with_name("page")
SCRIPTS = ("state.js", "timeline.js", "frontier.js", "batches.js", "table.js", "main.js")

INSTALL = "in the clone of memonger, pip install '.[report]'"
MAX_TENSORS = 40_000  # that a page draws, of all plans
MAX_REASONS = 40_000  # operators times plans; beyond it only the chosen plan shows reasons
MAX_INPUTS = 6  # whose shapes are written out in a command, or that are listed
OF_CALL = ("shapes", "type_dict", "grad_req")  # which a Gluon block's first call tells
#: Figures that a page shows.
FIGURES = (
    "pool_bytes unplanned_bytes peak_bytes device_bytes unplanned_device_bytes time_overhead "
    "interrupted"
).split()
COUNTED = "kept recomputed copies".split()  # of which a page shows how many there are


@dataclass(frozen=True)
class Shown:
    """The content of a page."""

    plans: Sequence[PlanRecord]  # of one network, the fastest first
    chosen: PlanRecord  # that is shown first
    budget: Mapping[str, Json] | None  # in bytes
    network: str  # the name of its file, or of a script's network
    batches: Mapping[int, PlanRecord] = field(default_factory=dict)  # by batch size
    command: str | None = None  # that makes them, where they are not of a file


def write_report(file: files.Path | None, shown: Shown) -> Page | None:
    """Write a page to a file; without one, return it."""
    library = check_report(file)
    data = json.dumps(data_of(shown), separators=(",", ":"), allow_nan=False)
    # Compressed, a page is smaller, and no text of a network can end the script around it.
    parts = {"data": _compress(data), "plotly": _compress(library), "style": _part("page.css")}
    parts["scripts"] = "\n".join(map(_part, SCRIPTS))
    pieces = _part("page.html").split("/*-*/")  # every second piece names a part
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    if file is None:
        return Page("".join(pieces))
    files.write(file, "".join(pieces).encode())
    return None


def _compress(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _part(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def check_report(file: files.Path | None) -> str:
    """Check that a page can be written, before a long search; return the code of plotly.js."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MemongerError(f"reports need plotly, which is not installed; {INSTALL}") from None
    if file is not None:
        files.check_writable(file)
    return str(get_plotlyjs())


def ordered(
    plans: Sequence[PlanRecord], others: Iterable[object], budget: Budget | None, network: str
) -> Shown:
    """Choose the plan to show first, and order all by time; check that they are of one network.

    Of several plans it is the fastest within the budget, or else the last.
    """
    if not isinstance(network, str) or not network:
        raise MemongerError(f"network={network!r}: give the name of the network's file, a str")
    if not isinstance(others, Iterable):
        raise MemongerError(f"others={others!r}: give Plans, as frontier() does")
    limit = None if budget is None else _limit(budget, plans[0])
    chosen = plans[-1]
    if limit is not None:
        within = (p for p in plans if getattr(p, f"{limit['of']}_bytes") <= limit["bytes"])
        chosen = next(within, chosen)
    facts_of = attrgetter("pool_bytes", "recompute_overhead", "recomputed", "copies")
    distinct, facts = [*plans], {*map(facts_of, plans)}
    for number, plan in enumerate(others):
        if not isinstance(plan, PlanRecord):
            raise MemongerError(f"others: element {number} is {plan!r}; give Plans, as plan() does")
        _check_same(chosen, plan, number)
        if facts_of(plan) not in facts:
            facts.add(facts_of(plan))
            distinct.append(plan)
    distinct.sort(key=lambda plan: (plan.time_overhead, -plan.pool_bytes))
    return Shown(distinct, chosen, limit, network)


def _limit(budget: Budget, plan: PlanRecord) -> dict[str, Json]:
    """Return the bytes that a budget leaves to a plan, to the optimizer's state, and to CUDA."""
    if budget.of == "pool":
        limit = budget.limit(plan.unplanned_bytes)
        return {"of": "pool", "bytes": limit, "state": 0, "room": 0}
    request = plan.request
    state = count_state_bytes(budget, forward_graph(request.symbol, request.spec), request)
    whole = budget.limit(plan.unplanned_device_bytes + state)
    return {"of": "device", "bytes": whole - state, "state": state, "room": budget.room}


def _check_same(plan: PlanRecord, another: PlanRecord, number: int) -> None:
    """Make sure that two plans are of one network at the same shapes, and timed for one device."""
    request, other = plan.request, another.request
    if request is other:
        return
    same = {
        "for other shapes": request.spec == other.spec,
        "for other gradients": request.grad_req == other.grad_req,
        "for another device": str(request.ctx) == str(other.ctx),
        "for the times of another GPU": plan.options.get("gpu") == another.options.get("gpu"),
        "of another network": read_structure(request.symbol) == read_structure(other.symbol),
    }
    for difference, is_same in same.items():
        if not is_same:
            raise MemongerError(
                f"others: plan {number} is {difference}; one report shows one network, so write a "
                "report of its own for it"
            )


def data_of(shown: Shown) -> dict[str, Json]:
    """Collect the data of a page."""
    chosen, unplanned = shown.chosen, predict(shown.chosen.request)
    times = _predict_times(chosen, unplanned)
    operators = list_operators(unplanned, times)

    def facts(plan: PlanRecord) -> dict[str, Json]:
        command = command_of(plan, shown.network) if shown.command is None else shown.command
        return {**_facts(plan), "command": command}

    # All sizes of a page have one unit, that of the largest.
    sizes = [plan.largest_bytes for plan in (*shown.plans, *shown.batches.values())]
    largest = max([*sizes, shown.budget["bytes"] if shown.budget else 0])
    most = MAX_TENSORS // (len(shown.plans) + 1)
    few = len(operators["name"]) * len(shown.plans) <= MAX_REASONS
    return {
        "version": __version__,
        "network": shown.network,
        "inputs": _inputs(chosen.request),
        "device": chosen.request.devices,
        "kinds": KINDS,
        "placing": PLACING,
        "largest": largest,
        "chosen": shown.plans.index(chosen),
        "budget": shown.budget,
        "plans": [
            {
                **facts(plan),
                **_choices(plan, operators, largest, most, has_reasons=few or plan is chosen),
            }
            for plan in shown.plans
        ],
        "batches": [
            {
                **facts(plan),
                "batch": batch,
                "step_seconds": float(_predict_times(plan, predict(plan.request)).step_seconds),
            }
            for batch, plan in sorted(shown.batches.items())
        ],
        "unplanned": list_alive(unplanned, operators, {}, most),
        "step_seconds": float(times.step_seconds),
        "operators": {**operators, "group": _groups(unplanned, operators)},
    }


def _inputs(request: Network) -> list[str]:
    """List the inputs that get no gradient, or all if none is told; the first of many."""
    shapes, trained = request.spec.shapes, {k for k, v in request.grad_req.items() if v != "null"}
    trained.update(request.symbol.list_auxiliary_states())
    names = [name for name in shapes if name not in trained] or [*shapes]
    texts = [f"{name} {tuple(shapes[name])}" for name in names]
    few = len(texts) <= MAX_INPUTS
    return texts if few else [*texts[:2], f"{len(texts) - 2} more inputs"]


def _predict_times(plan: PlanRecord, unplanned: Usage) -> Times:
    """Predict the times of operators without the plan, as they were when it was made."""
    options = plan.options
    device = plan.request.find_timing_device(options.get("gpu"), bool(options.get("measure")))
    return find_times(unplanned.training, device)


def _groups(memory: Usage, operators: Mapping[str, Sequence[Json]]) -> list[str]:
    """Return the name of each operator's group."""
    tensors = [memory.graph.shown_tensors(i) for i in memory.graph.operators]
    shapes = [shown[0].shape if shown else () for shown in tensors]
    columns = zip(operators["name"], operators["op"], shapes, operators["bytes"])
    groups = find_groups([Member(*column, "", "") for column in columns])
    names = {k: group.name for group in groups for k in group.members}
    return [names[k] for k in range(len(names))]


def _choices(
    plan: PlanRecord,
    operators: Mapping[str, Sequence[Json]],
    largest: int,
    most: int,
    has_reasons: bool,
) -> dict[str, Json]:
    """Return what a plan does with each operator, and its tensors over the training step.

    ``largest`` is the largest size of the page, in bytes.
    """
    memory = predict(plan.planned)
    explanation, nodes = explain_choices(plan, memory), memory.graph.nodes
    rows, places, n = find_rows(memory.graph), find_results(memory), len(operators["name"])
    #: The fate of each tensor of an operator: k(ept), r(ecomputed), f(reed), or c: a copy is kept.
    fates, again_bytes = [""] * n, [0] * n
    kept: dict[int, Choice] = {}  # the first tensor of an operator that is
    reasons = {}
    for place, choice in zip(places.tolist(), explanation.tensors):
        reasons[place] = choice.reason if has_reasons else ""
        node = memory.operators[memory.row[place]]
        row = int(rows[node])
        if row == NONE:
            continue
        is_copy = choice.choice == "kept" and nodes[node].is_inserted
        fates[row] += "c" if is_copy else choice.choice[0]
        if choice.choice == "kept":
            kept.setdefault(row, choice)
        elif choice.choice == "recomputed":
            again_bytes[row] += choice.nbytes
    again = rows[[node for node in memory.recomputed.tolist() if not nodes[node].is_inserted]]
    return {
        "text": write_lines(describe(plan, largest, explanation)),
        "sums": explanation.sums,
        "fates": fates,
        "again_bytes": again_bytes,
        "times": (1 + np.bincount(again[again >= 0], minlength=n)).tolist(),
        "why": [kept[x].why if x in kept else "" for x in range(n)],
        "reason": [kept[x].reason if x in kept else "" for x in range(n)] if has_reasons else None,
        "timeline": list_alive(memory, operators, reasons, most),
    }


def _facts(plan: PlanRecord) -> dict[str, Json]:
    """Return the kind of a plan, its figures by the names of attributes, and the call it is of."""
    data = {name: getattr(plan, name) for name in FIGURES}
    data.update({name: len(getattr(plan, name)) for name in COUNTED})
    return {"kind": plan.kind, "figures": data, "python": python_of(plan)}


def keywords_of(plan: PlanRecord) -> dict[str, Json]:
    """Return the keywords with which `memonger.plan` makes a plan of its network again."""
    request = plan.request
    requests = {*request.grad_req.values()}
    nodes = read(request.symbol)["nodes"]
    keywords = {
        "shapes": {name: tuple(shape) for name, shape in request.spec.shapes.items()},
        "type_dict": dict(request.spec.types),
        "grad_req": requests.pop() if len(requests) == 1 else dict(request.grad_req),
        "ctx": request.ctx,
        **plan.options,
        "until": None if request.until is None else nodes[request.until]["name"],
        "keep": [*request.keep.patterns],
        "recompute": [*request.recompute.patterns],
    }
    usual: tuple[object, ...] = (None, "write", {}, [])
    return {name: value for name, value in keywords.items() if value not in usual}


def python_of(plan: PlanRecord) -> str:
    """Write the line of Python that makes a plan of its network or block, ``net``."""
    keywords = keywords_of(plan)
    texts = {name: repr(value) for name, value in keywords.items()}
    if not isinstance(keywords["ctx"], str):
        texts["ctx"] = f"mx.{keywords['ctx']}"
    if len(plan.request.spec.shapes) > MAX_INPUTS:
        texts.update({name: name for name in ("shapes", "type_dict") if name in texts})
    if isinstance(keywords.get("grad_req"), dict):
        requests = keywords["grad_req"]
        nulls = [name for name, request in requests.items() if request == "null"]
        rule = f"'null' if name in {nulls} else 'write' for name in net.list_arguments()"
        is_short = {*requests.values()} == {"write", "null"} and len(nulls) <= MAX_INPUTS
        texts["grad_req"] = f"{{name: {rule}}}" if is_short else "grad_req"
    call = "plan = memonger.plan"
    if plan.of_block:  # whose first call tells the rest
        call, texts = "memonger.gluon.plan", {k: texts[k] for k in texts if k not in OF_CALL}
    return f"{call}({', '.join(['net', *(f'{k}={text}' for k, text in texts.items())])})"


def command_of(plan: PlanRecord, network: str) -> str:
    """Write the command that makes a plan; '' where the command lacks an option for it."""
    keywords = keywords_of(plan)
    shapes = keywords.get("shapes", {})
    if keywords.keys() - {*OPTIONS, "shapes"} or len(shapes) > MAX_INPUTS:
        return ""
    words = ["memonger", "plan", network]
    keywords["shapes"] = {name: ",".join(map(str, shape)) for name, shape in shapes.items()}
    if "budget" in keywords:
        keywords["budget"] = f"{keywords['budget']}B"
    for name, value in keywords.items():
        if isinstance(value, dict):
            value = [f"{key}={text}" for key, text in value.items()]
        for each in value if isinstance(value, list) else [value]:
            words += [flag_of(name)] if each is True else [flag_of(name), str(each)]
    words += [] if plan.schedule is not None else ["-o", "planned-symbol.json"]
    return " ".join(map(shlex.quote, words))
