"""Read plans that ``Plan.save`` has written: JSON, of which nothing is run."""

from __future__ import annotations

import json
import logging
import os
import re
from hashlib import sha256
from itertools import zip_longest
from typing import Mapping, Sequence

import numpy as np

from memonger.api.plan import FORMAT, KIND, Plan, figures_of
from memonger.graph import inputs, marks
from memonger.graph.forward import INSERTED, RECORD
from memonger.graph.inputs import InputSpec, check_symbol, drop_old_types, read_shapes
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import Schedule
from memonger.show.record import Figures
from memonger.solve.facts import Facts
from memonger.solve.limits import Limits
from memonger.solve.network import Network, fingerprint, read_mxnet_variables, read_structure
from memonger.solve.selection import Selection
from memonger.support import files
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import attributes, load_nodes, read
from memonger.support.types import Json, Shapes, Symbol

log = logging.getLogger("memonger")

#: Attributes of a Plan that have names of nodes.
NAMING = ("kept", "recomputed", "copies", "floor", "slowest", "unmet", "declined", "warnings")


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
    return Plan(symbol=planned, request=request, schedule=schedule, **_read_data(content, request))


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
    data = _read_data(content, request)
    data.update({name: _rename(data[name], names) for name in NAMING})
    return Plan(symbol=planned, request=request, schedule=schedule, **data)


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


def _read_data(content: Mapping[str, Json], request: Network) -> dict[str, Json]:
    """Read the attributes of a Plan but its symbol, its request and its schedule."""
    data: dict[str, Json] = {}
    for name, value in content["figures"].items():
        data[name] = tuple(value) if isinstance(value, list) else value
    after = Figures(**{name: data.pop(name) for name in Figures._fields})
    known = {
        "pool_bytes": data.pop("unplanned_bytes"),
        "device_bytes": data.pop("unplanned_device_bytes"),
        "counted_bytes": data["candidates"]["no plan"],
    }
    if "before" in content:
        before = Figures(**content["before"])
    else:  # an older file, which has these figures alone
        before = figures_of(Facts(request, Limits()).predicted_unplanned)._replace(**known)
    return {"before": before, "after": after, **data}


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
