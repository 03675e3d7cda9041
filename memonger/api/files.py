"""Files of plans: what ``Plan.save`` writes and ``load_plan`` reads.

JSON in UTF-8: the planned network, what a schedule runs, the figures of the plan, and a checksum.
Nothing in it is run or unpickled, and MXNet sees nothing of a file that is not whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from typing import Any, Mapping

import numpy as np

from memonger.graph import marks
from memonger.graph.inputs import InputSpec, check_symbol, read_shapes, without_old_types
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import Schedule
from memonger.solve.request import Request, mxnet_variables, structure
from memonger.support import files
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx

log = logging.getLogger("memonger")

KIND = "memonger plan"
FORMAT = 1  # of what is written


def figures(plan: Any) -> dict[str, Any]:
    """Give the fields of a Plan that are data: all but its symbol, its request, its schedule."""
    names = [f.name for f in dataclasses.fields(plan)]
    return {n: getattr(plan, n) for n in names if n not in ("symbol", "request", "schedule")}


def write(file: Any, planned: Any) -> None:
    """Write a Plan whole or not at all."""
    request, schedule = planned.request, planned.schedule
    asked = {
        "symbol": planned.symbol.tojson(remove_amp_cast=False),
        "spec": request.spec._asdict(),
        "grad_req": request.grad_req,
        "ctx": request.ctx and [request.ctx.device_type, request.ctx.device_id],
        "until": request.until,
    }
    plan: dict[str, Any] = {"request": asked, "figures": figures(planned)}
    plan["schedule"] = None if schedule is None else schedule.events
    plan["settings"] = mxnet_variables()
    text = json.dumps(plan, sort_keys=True, default=_plain)
    whole = {KIND: FORMAT, "sha256": _checksum(text), "plan": json.loads(text)}
    files.write(file, json.dumps(whole).encode())


def read(file: Any, net: Any, shapes: Any, input_shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Read a plan; the fields of ``Plan``. Parameters and errors are those of ``load_plan``."""
    whole = _whole(file)
    asked, events = whole["request"], whole["schedule"]
    planned, schedule = mx.sym.load_json(asked["symbol"]), None
    bare = marks.clear(marks.unplan(planned))
    if events is not None:
        schedule = Schedule(np.array(events, dtype=np.int32))
        planned = scheduled(bare, schedule)
    shaped = {k: tuple(shape) for k, shape in asked["spec"]["shapes"].items()}
    ctx = None if asked["ctx"] is None else mx.Context(*asked["ctx"])
    spec = InputSpec(shaped, asked["spec"]["types"])
    request = Request(**{**asked, "symbol": bare, "spec": spec, "ctx": ctx})
    if net is not None:
        _compare(file, request, check_symbol(net), shapes, input_shapes)
    elif shapes is not None or input_shapes:
        raise MemongerError("load_plan: shapes are checked against the network; give net= too")
    here = mxnet_variables()
    others = sorted({name for name, _ in set(here.items()) ^ set(whole["settings"].items())})
    if others:
        said = "the plan in %r was made with other values of %s, so it may take other memory here"
        log.warning(said, file, ", ".join(others))
    figures = {k: tuple(v) if isinstance(v, list) else v for k, v in whole["figures"].items()}
    return {**figures, "symbol": planned, "request": request, "schedule": schedule}


def _whole(file: Any) -> dict[str, Any]:
    """Read what a file holds, if it is as it was written."""
    anew = "write it anew with plan.save()"
    try:
        with open(os.fsdecode(file), encoding="utf-8") as f:
            found = json.load(f)
    except OSError as error:
        raise MemongerError(f"the plan {file!r} cannot be read: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise MemongerError(f"{file!r} is not a plan, or is cut short ({error}); {anew}") from None
    if not isinstance(found, dict) or KIND not in found:
        raise MemongerError(f"{file!r} is not a file that plan.save() has written; {anew}")
    if found[KIND] != FORMAT:
        formats = f"has format {found[KIND]!r}, and this memonger reads format {FORMAT}"
        raise MemongerError(f"the plan {file!r} {formats}; {anew}")
    plan: Any = found.get("plan")
    if found.get("sha256") != _checksum(json.dumps(plan, sort_keys=True)):
        raise MemongerError(f"the plan {file!r} was changed later (its checksum differs); {anew}")
    return dict(plan)


def _compare(
    file: Any, request: Request, net: Any, shapes: Any, input_shapes: Mapping[str, Any]
) -> None:
    """Make sure that a plan is of this network and of these shapes."""
    spec, known = read_shapes(net, shapes, input_shapes, None), request.spec
    named = f"the plan {file!r} is of another network: "
    bare = marks.clear(marks.unplan(without_old_types(net, known)))
    here, there = structure(bare), structure(request.symbol)
    if here != there:
        ours, theirs = ([json.dumps(n, sort_keys=True) for n in g["nodes"]] for g in (here, there))
        for k, (one, other) in enumerate(zip(ours, theirs)):
            if one != other:
                raise MemongerError(named + f"node {k} is {one} here, {other} in the plan")
        count = f"your network has {len(ours)} nodes, and the plan {len(theirs)}"
        raise MemongerError(f"{named}{count}, or their outputs differ")
    pairs: Any = (("shape", spec.shapes, known.shapes), ("type", spec.types, known.types))
    for what, given, planned in pairs:
        for name, value in given.items():
            if planned.get(name, value) != value:
                raise MemongerError(
                    f"the plan {file!r} is for another {what} of input {name!r}: "
                    f"{planned[name]}, not {value}; plan for this {what}"
                )


def _checksum(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Give NumPy's numbers and arrays as JSON has them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a plan holds {value!r}, which no file can")
