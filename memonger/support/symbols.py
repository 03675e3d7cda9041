"""Symbols, their JSON and their files, and a check of what MXNet takes on trust.

MXNet's reader (``nnvm/src/pass/saveload_json.cc``, ``src/nnvm/legacy_json_util.cc``) follows the
numbers in a graph without looking: an output that is not there, a node after its reader, an
operator without the inputs that it needs, each ends the process. How many inputs and outputs an
operator has depends on its attributes: MXNet is asked of each operator alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from pathlib import Path
from typing import Any, Mapping, Sequence

from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx
from memonger.support.versions import VERSION, json_of

OLDEST = 800  # of a file that tells no version
OWN_STATES = 900  # before, auxiliary states were not written: MXNet puts in the inputs that lack

#: What MXNet took for attributes of a variable before it hid them (``UpgradeJSON_FixParsing`` in
#: ``legacy_json_util.cc``); until 1.9.1 an attribute may begin or end so, as in ``weight_lr_mult``.
HIDDEN = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")

#: Attributes that tell a number of inputs (``key_var_num_args`` and the like).
COUNTS = ("num_args", "num_arrays", "num_weights", "num_tensors")
MOST_OUTPUTS = 2**20  # of one operator; MXNet would name each
#: Subgraphs of each operator of control flow, which ``num_args`` counts as inputs.
CONTROL_FLOW = {"_foreach": 1, "_while_loop": 2, "_cond": 3}
OF_A_PROCESS = ("_Native", "_NDArray")  # these hold a pointer, of the process that made them
_ESCAPE = re.compile(r"\\(u00[01][0-9a-f]|.)")


def read(symbol: Any) -> dict[str, Any]:
    """Return the graph of a Symbol: what its JSON holds, with the casts that AMP has put in."""
    return json.loads(json_of(symbol), strict=False)


def as_json(graph: Mapping[str, Any]) -> str:
    r"""Return the JSON of a graph as MXNet reads it: it knows no ``\u``, ``\b`` and ``\f``."""
    text = json.dumps(graph, ensure_ascii=False)
    return _ESCAPE.sub(lambda e: json.loads(f'"{e[0]}"') if e[1][0] in "ubf" else e[0], text)


def attributes(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes of a node of a symbol's JSON, by all the names that they have had."""
    last = [key for key in node if key in ("attr", "attrs")][-1:]
    return {**node.get("param", {}), **(node[last[0]] if last else {})}


def check_graph(graph: Any, what: str, version: int = VERSION) -> None:
    """Check that every node reads outputs of nodes before it, as many as its operator takes.

    ``what`` begins a complaint (MemongerError); ``version`` is of the MXNet that wrote the JSON.
    """
    where = what
    try:
        nodes: list[Mapping[str, Any]] = graph["nodes"]
        outputs: list[int] = []
        for i, node in enumerate(nodes):
            where = f"{what}: node {i}"
            where += f" ({node['name']!r})"
            waits = [[a, 0] for a in node.get("control_deps", ())]
            _check_links(node["inputs"], "an input", nodes, outputs)
            _check_links(waits, "a control dependency", nodes, outputs)
            subgraphs = list(node.get("subgraphs", ()))
            if node["op"].startswith("_CachedOp") and "subgraph" in attributes(node):
                subgraphs.append(json.loads(attributes(node)["subgraph"], strict=False))
            for subgraph in subgraphs:
                check_graph(subgraph, "subgraph")
            outputs.append(_count_outputs(node, nodes, version))
        where = what
        _check_links(graph["heads"], "an output of the network", nodes, outputs)
        for a in graph["arg_nodes"]:
            if not _is_count(a) or a >= len(nodes) or nodes[a]["op"] != "null":
                raise MemongerError(f"arg_nodes names node {a!r}, which is no variable (op 'null')")
    except MemongerError as error:
        raise MemongerError(f"{where}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise MemongerError(f"{where}: it is not as MXNet writes it ({error!r})") from None


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**32


def _check_links(entries: Any, what: str, nodes: Sequence[Any], outputs: Sequence[int]) -> None:
    """Check that entries name outputs that are there, of nodes before their reader."""
    for entry in entries:
        if type(entry) is not list or len(entry) not in (2, 3) or not all(map(_is_count, entry)):
            raise MemongerError(f"{what} is written as [node, output], not {entry!r}")
        a, b = entry[:2]
        if a >= len(outputs):
            before = f"none of the {len(outputs)} nodes before it"
            raise MemongerError(f"{what} is output of node {a}, which is {before}")
        if b >= outputs[a]:
            name = f"node {a} ({nodes[a]['name']!r}, {nodes[a]['op']})"
            raise MemongerError(f"{what} is output {b} of {name}, which has {outputs[a]}")


def _count_outputs(node: Mapping[str, Any], nodes: Sequence[Any], version: int) -> int:
    """Count the outputs of a node; its inputs must be as many as its operator takes."""
    op, count = node["op"], len(node["inputs"])
    subgraphs: list[Any] = node.get("subgraphs", [])
    if op == "null":
        if count or subgraphs:
            raise MemongerError("it is a variable, and has inputs")
        return 1
    if op in OF_A_PROCESS:
        raise MemongerError(f"{op} is of the process that made it, and of no file")
    if "backward" in op.split("_"):
        raise MemongerError(f"{op} is a gradient; give the network without them")
    given = attributes(node)
    hidden = HIDDEN if version < VERSION else ()
    outgrown = [key for key in given if key.startswith(hidden) or key.endswith(hidden)]
    attrs = {key: value for key, value in given.items() if key not in outgrown}
    names, states, outputs = _asked(op, attrs, subgraphs, count)
    if outputs > MOST_OUTPUTS:
        raise MemongerError(f"{op} has {outputs} outputs")
    if names is not None and len(names) != count:
        if version >= OWN_STATES or count > len(names):
            raise MemongerError(f"{op} takes {len(names)} inputs, not {count}")
    for k in [k for k in states if k < count]:  # the operator writes there, or MXNet dies
        source = nodes[node["inputs"][k][0]]
        if source["op"] != "null":
            written = f"the output of {source['name']!r} ({source['op']})"
            raise MemongerError(f"input {k} of {op} must be a variable, not {written}")
    for key in outgrown:  # MXNet looks the input up that an attribute such as gamma_lr_mult is of
        if key.rsplit("_", 2)[0] in (names or ())[count:]:
            raise MemongerError(f"its {key!r} is of an input that is not there")
    return outputs


def _check_counts(op: str, attrs: Mapping[str, str], count: int, subgraphs: int) -> None:
    """Check what must hold before MXNet can be asked of an operator."""
    if op in CONTROL_FLOW:
        if subgraphs != CONTROL_FLOW[op]:
            raise MemongerError(f"{op} takes {CONTROL_FLOW[op]} subgraphs, not {subgraphs}")
        if _number(attrs.get("num_args", "")) != count + subgraphs:
            inputs = f"it has {count} inputs and {subgraphs} subgraphs"
            raise MemongerError(f"{inputs}, but num_args={attrs.get('num_args')!r}")
        told = " ".join(attrs[key] for key in attrs if key.endswith("_locs"))
        places = re.findall(r"[^\s,()[\]]+", told)
        outside = any("-" in place or _number(place) >= count for place in places)
        if outside or (op == "_foreach" and len(places) != count):
            raise MemongerError(f"it has {count} inputs, but {told!r} for their locations")
    elif subgraphs == 0 and op.startswith("_sg_"):
        raise MemongerError(f"{op} takes a subgraph, and has none")
    for key in COUNTS:
        if op not in CONTROL_FLOW and _number(attrs.get(key, "")) > count:
            raise MemongerError(f"{op} takes {attrs[key]} inputs, not {count}")
    if _number(attrs.get("num_outputs", "")) > MOST_OUTPUTS:
        raise MemongerError(f"{op} has {attrs['num_outputs']} outputs")


def _number(text: str) -> int:
    """Return the number that MXNet reads, -1 where it reads none."""
    found = re.match(r"\s*\+?([0-9]+)\s*$", text)
    return int(found.group(1)[:18]) if found else -1


def _asked(op: str, attrs: Mapping[str, str], subgraphs: Sequence[Any], count: int) -> Any:
    """Ask MXNet of an operator alone: the names of inputs (None: any), states, count of outputs."""
    ask: Any = _arity
    if op == "Custom":  # what is registered may be another one tomorrow, and reads all attributes
        ask = _arity.__wrapped__
    else:
        attrs = {key: value for key, value in attrs.items() if not key.startswith("__")}
    try:
        return ask(op, tuple(sorted(attrs.items())), json.dumps(subgraphs), count)
    except (mx.MXNetError, UnicodeError) as error:
        said = said_by_mxnet(error)
    if "Cannot find custom operator" in said:
        said = f"no operator {attrs.get('op_type')!r} is registered (mx.operator.register)"
    raise MemongerError(f"{op}: {said}")


@functools.lru_cache(maxsize=4096)
def _arity(op: str, attrs: tuple[tuple[str, str], ...], subgraphs: str, count: int) -> Any:
    node: dict[str, Any] = {"op": op, "name": "n", "attrs": dict(attrs), "inputs": []}
    node["subgraphs"] = json.loads(subgraphs)
    _check_counts(op, node["attrs"], count, len(node["subgraphs"]))
    alone = load_nodes([node], [[0, 0, 0]])
    row = read(alone)["node_row_ptr"]
    if op in CONTROL_FLOW:
        return None, (), row[-1]
    try:
        composed = alone(name="n")
    except mx.MXNetError:  # it names no inputs, and is made with all or not at all
        composed = alone(*[mx.sym.var(f"n_{k}") for k in range(count)], name="n")
    names = [each["name"] for each in read(composed)["nodes"][:-1]]
    states = set(composed.list_auxiliary_states())
    places = tuple(k for k, name in enumerate(names) if name in states)
    return tuple(name[2:] for name in names), places, row[-1]


def load_nodes(nodes: Sequence[Mapping[str, Any]], heads: Sequence[Sequence[int]]) -> Any:
    """Make a Symbol of nodes and outputs as JSON has them; they are not checked."""
    variables = [i for i, node in enumerate(nodes) if node["op"] == "null"]
    version = {"mxnet_version": ["int", VERSION]}
    graph = {"nodes": nodes, "arg_nodes": variables, "heads": heads, "attrs": version}
    return mx.sym.load_json(as_json(graph))


def all_outputs(graph: Mapping[str, Any]) -> Any:
    """Return a Symbol of all outputs of a graph's nodes; ``node_row_ptr`` has where each's start.

    ``get_internals`` leaves out those that ``list_outputs`` does not show: a BatchNorm's mean, the
    mask of a Dropout. Their names cannot be asked for, but shapes and types can.
    """
    start = graph["node_row_ptr"]
    heads = [[i, k, 0] for i, n in enumerate(start[:-1]) for k in range(start[i + 1] - n)]
    return load_nodes(graph["nodes"], heads)


def load(path: str | bytes | os.PathLike[Any]) -> Any:
    """Read a network from a file, and check it before MXNet sees it.

    MXNet itself ends the process where a file is damaged in some ways. What it can load is loaded
    here too, also what older versions of it have saved.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file such as ``Symbol.save`` and ``Module.save_checkpoint`` write: ``*-symbol.json``.

    Returns
    -------
    mx.sym.Symbol

    Raises
    ------
    MemongerError
        If there is no such file, it is not whole, or no network of MXNet; it tells what is
        wrong at which node.

    Examples
    --------
    >>> net = memonger.load('resnet-symbol.json')
    >>> planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    """
    shown = repr(os.fsdecode(path))
    try:
        if not os.path.isfile(path):
            raise MemongerError(f"there is no file {shown}")
        data = Path(os.fsdecode(path)).read_bytes()
    except OSError as error:
        raise MemongerError(f"{shown} cannot be read: {error.strerror}") from None
    what = f"{shown} holds no network that MXNet can read"
    try:
        graph = json.loads(data.decode("utf-8-sig"), strict=False)  # names may hold any character
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, nested too deeply
        cut = f"it ends at byte {len(data)}; copy or save it again if that is too early"
        raise MemongerError(f"{what}: {error}; {cut}") from None
    version = OLDEST
    with contextlib.suppress(TypeError, KeyError, ValueError):
        kind, number = graph["attrs"]["mxnet_version"]
        if kind == "int" and type(number) is int:
            version = number
    check_graph(graph, what, version)
    try:
        symbol = mx.sym.load_json(as_json(graph))
    except (mx.MXNetError, UnicodeError) as error:  # MXNet cuts lines within a character
        raise MemongerError(f"{what}: {said_by_mxnet(error)}") from None
    if version < OWN_STATES:
        check_graph(read(symbol), what)  # with the inputs that MXNet has put in
    return symbol
