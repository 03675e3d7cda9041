"""Symbols and their JSON, and a check of what MXNet takes on trust.

MXNet's reader (``nnvm/src/pass/saveload_json.cc``, ``src/nnvm/legacy_json_util.cc``) follows the
numbers in a graph without looking: an input or a head that names an output that is not there, a
node that comes after its reader, an operator without the inputs that it needs, each makes it read
memory that is not its own, and ends the process. How many inputs and outputs an operator has
depends on its attributes: MXNet is asked of each operator alone.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Dict, Mapping, Sequence, Tuple

from memonger.support.errors import MemongerError, said_by_mxnet
from memonger.support.mxnet import mx

VERSION = 10901  # what MXNet 1.9.1 writes; a file that tells none is of 0.8
OWN_STATES = 900  # before, auxiliary states were not written: MXNet puts in the inputs that lack

#: What MXNet took for attributes of a variable before it hid them (``c_api_symbolic.cc``); until
#: 1.9.1 an attribute may begin or end so, as in ``weight_lr_mult``.
HIDDEN = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")

#: Attributes that tell a number of inputs or outputs (``key_var_num_args`` and the like).
COUNTS = ("num_args", "num_arrays", "num_weights", "num_tensors")
MOST_OUTPUTS = 2**20  # of one operator; MXNet would name each

#: Subgraphs of each operator of control flow, which ``num_args`` counts as inputs.
CONTROL_FLOW = {"_foreach": 1, "_while_loop": 2, "_cond": 3}

#: These hold a pointer, of the process that made them.
OF_A_PROCESS = ("_Native", "_NDArray")

#: The fields that a graph and a node must have, and those that they may have besides.
_Fields = Dict[str, type]
_GRAPH: tuple[_Fields, _Fields] = (
    {"nodes": list, "arg_nodes": list, "heads": list},
    {"node_row_ptr": list, "attrs": dict},
)
_NODE: tuple[_Fields, _Fields] = (
    {"op": str, "name": str, "inputs": list},
    {
        **dict.fromkeys(("attrs", "attr", "param"), dict),
        **{"control_deps": list, "subgraphs": list, "backward_source_id": int},
    },
)
_WORDS = {list: "a list", dict: "an object", str: "a text", int: "a whole number"}

_CONTROL = re.compile(r"\\(?:u00([01][0-9a-f])|([bf])|.)")


def read(symbol: Any) -> dict[str, Any]:
    """Return the graph of a Symbol: what its JSON holds, with the casts that AMP has put in."""
    return json.loads(symbol.tojson(remove_amp_cast=False), strict=False)


def as_json(graph: Mapping[str, Any]) -> str:
    r"""Return the JSON of a graph as MXNet reads it: it knows no ``\u``, ``\b`` and ``\f``."""

    def plain(found: Any) -> str:
        if found.group(2):
            return "\b" if found.group(2) == "b" else "\f"
        return chr(int(found.group(1), 16)) if found.group(1) else found.group()

    text = json.dumps(graph, ensure_ascii=False)
    return _CONTROL.sub(plain, text) if "\\" in text else text


def attributes(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes of a node of a symbol's JSON, by all the names that they have had."""
    last = [key for key in node if key in ("attr", "attrs")][-1:]
    return {**node.get("param", {}), **(node[last[0]] if last else {})}


def check_links(symbol: Any, what: str = "the network") -> None:
    """Check that all that a Symbol's nodes read is there, which MXNet does not.

    Raises
    ------
    MemongerError
        At the first node that reads an output that no node has, or has too few inputs.
    """
    try:
        graph = read(symbol)
    except (mx.MXNetError, ValueError) as error:  # a cycle, or a name that is not UTF-8
        raise MemongerError(f"{what} has no JSON: {said_by_mxnet(error)}") from None
    check_graph(graph, what)


def check_graph(graph: Any, what: str, version: int = VERSION) -> None:
    """Check that every node reads outputs of nodes before it, as many as its operator takes.

    Parameters
    ----------
    graph : dict
        The JSON of a symbol.
    what : str
        The beginning of a complaint.
    version : int
        Of the MXNet that has written it.

    Raises
    ------
    MemongerError
        At what is not there, has another type, or would make MXNet read what is not its own.
    """
    _check_fields(graph, _GRAPH, what)
    nodes: list[Mapping[str, Any]] = graph["nodes"]
    outputs: list[int] = []
    for i, node in enumerate(nodes):
        where = f"{what}: node {i}"
        _check_fields(node, _NODE, where)
        where = f"{where} ({node['name']!r})"
        _check_texts(node, where)
        _check_numbers(node.get("control_deps", ()), where, "control_deps")
        for a, b in _entries(node["inputs"], where, "an input"):
            _check_link(a, b, nodes, outputs, where, "an input")
        for a in node.get("control_deps", ()):
            _check_link(a, 0, nodes, outputs, where, "a control dependency")
        for subgraph in _subgraphs(node, where):
            check_graph(subgraph, where + ", subgraph")
        outputs.append(_count_outputs(node, nodes, where, version))
    for a, b in _entries(graph["heads"], what, "an output (heads)"):
        _check_link(a, b, nodes, outputs, what, "an output of the network")
    _check_numbers(graph.get("node_row_ptr", ()), what, "node_row_ptr")
    _check_numbers(graph["arg_nodes"], what, "arg_nodes")
    for a in graph["arg_nodes"]:
        if a >= len(nodes) or nodes[a]["op"] != "null":
            raise MemongerError(
                f"{what}: arg_nodes names node {a}, which is no variable (op 'null')"
            )


# ---------------------------------------------------------------- types


def _check_fields(found: Any, fields: tuple[_Fields, _Fields], where: str) -> None:
    def kind_of(value: Any) -> str:
        return _WORDS.get(type(value), repr(value))

    required, optional = fields
    if not isinstance(found, dict):
        raise MemongerError(f"{where}: it is {kind_of(found)}, not an object")
    for key, value in found.items():
        kind = required.get(key) or optional.get(key)
        if kind is None:
            raise MemongerError(f"{where}: MXNet knows no field {key!r}")
        if type(value) is not kind:
            raise MemongerError(f"{where}: {key!r} is {kind_of(value)}, not {_WORDS[kind]}")
    for key in required:
        if key not in found:
            raise MemongerError(f"{where}: it has no {key!r}")


def _check_texts(node: Mapping[str, Any], where: str) -> None:
    """What MXNet can hold: its texts are of UTF-8 and end with a NUL."""
    texts = [node["name"]]
    for field in ("attrs", "attr", "param"):
        for key, value in node.get(field, {}).items():
            if not isinstance(value, str):
                raise MemongerError(f"{where}: attribute {key!r} is no text: {value!r}")
            texts += [key, value]
    for text in texts:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise MemongerError(f"{where}: {text!r} is no UTF-8") from None
        if "\0" in text:
            raise MemongerError(f"{where}: {text!r} holds a NUL")


def _entries(entries: Sequence[Any], where: str, what: str) -> list[tuple[int, int]]:
    """Which node and which of its outputs each of some entries names."""
    for entry in entries:
        if type(entry) is not list or len(entry) not in (2, 3) or not all(map(_is_count, entry)):
            raise MemongerError(f"{where}: {what} is written as [node, output], not {entry!r}")
    return [(entry[0], entry[1]) for entry in entries]


def _check_numbers(numbers: Sequence[Any], where: str, what: str) -> None:
    for number in numbers:
        if not _is_count(number):
            raise MemongerError(f"{where}: {what!r} holds {number!r}, which numbers no node")


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**32


def _subgraphs(node: Mapping[str, Any], where: str) -> list[Any]:
    found = list(node.get("subgraphs", ()))
    if node["op"].startswith("_CachedOp") and "subgraph" in attributes(node):
        try:
            found.append(json.loads(attributes(node)["subgraph"], strict=False))
        except (ValueError, RecursionError) as error:
            raise MemongerError(f"{where}, subgraph: it is no JSON: {error}") from None
    return found


# ---------------------------------------------------------------- links


def _check_link(
    a: int, b: int, nodes: Sequence[Any], outputs: Sequence[int], where: str, what: str
) -> None:
    if a >= len(nodes):
        said = f"of node {a}, but there are only {len(nodes)} nodes"
    elif a >= len(outputs):
        said = f"of node {a}, which does not come before it"
    elif b >= outputs[a]:
        kind = "a variable" if nodes[a]["op"] == "null" else nodes[a]["op"]
        said = f"{b} of node {a} ({nodes[a]['name']!r}, {kind}), which has {outputs[a]}"
    else:
        return
    raise MemongerError(f"{where}: {what} is output {said}")


def _count_outputs(node: Mapping[str, Any], nodes: Sequence[Any], where: str, version: int) -> int:
    """How many outputs a node has; its inputs must be as many as its operator takes."""
    op, count = node["op"], len(node["inputs"])
    subgraphs: list[Any] = node.get("subgraphs", [])
    if op == "null":
        if count or subgraphs:
            raise MemongerError(f"{where}: it is a variable, and has inputs")
        return 1
    if op not in _operators():
        raise MemongerError(f"{where}: MXNet {mx.__version__} has no operator {op!r}")
    if op in OF_A_PROCESS:
        raise MemongerError(f"{where}: {op} is of the process that made it, and of no file")
    if "backward" in op.split("_"):
        raise MemongerError(f"{where}: {op} is a gradient; give the network without them")
    attrs = attributes(node)
    # What MXNet makes a hidden attribute of (``UpgradeJSON_FixParsing``).
    outgrown = [
        key
        for key in attrs
        if version < VERSION and any(key.rfind(w) == 0 or key.endswith(w) for w in HIDDEN)
    ]
    given = {key: value for key, value in attrs.items() if key not in outgrown}
    _check_counts(op, given, count, len(subgraphs), where)
    names, states, outputs = _asked(op, given, subgraphs, count, where)
    if outputs > MOST_OUTPUTS:
        raise MemongerError(f"{where}: {op} has {outputs} outputs")
    lacking = version < OWN_STATES and names is not None and count < len(names)
    if names is not None and len(names) != count and not lacking:
        raise MemongerError(f"{where}: {op} takes {len(names)} inputs, not {count}")
    for k in states:  # the operator writes there; MXNet dies when it is something else
        source = nodes[node["inputs"][k][0]] if k < count else {"op": "null"}
        if source["op"] != "null":
            raise MemongerError(
                f"{where}: input {k} of {op} must be a variable, not the output of "
                f"{source['name']!r} ({source['op']})"
            )
    for key in outgrown:  # MXNet looks the input up that an attribute such as gamma_lr_mult is of
        if key.rsplit("_", 2)[0] in (names or ())[count:]:
            raise MemongerError(f"{where}: its {key!r} is of an input that is not there")
    return outputs


def _check_counts(
    op: str, attrs: Mapping[str, str], count: int, subgraphs: int, where: str
) -> None:
    """What must hold before MXNet can be asked of an operator."""
    told = {key: _number(attrs[key]) for key in COUNTS if key in attrs}
    if op in CONTROL_FLOW:
        if subgraphs != CONTROL_FLOW[op]:
            raise MemongerError(
                f"{where}: {op} takes {CONTROL_FLOW[op]} subgraphs, not {subgraphs}"
            )
        if told.get("num_args") != count + subgraphs:
            raise MemongerError(
                f"{where}: it has {count} inputs and {subgraphs} subgraphs, but "
                f"num_args={attrs.get('num_args')!r}"
            )
        locations = [key for key in attrs if key.endswith("_locs")]
        places = {key: re.findall(r"[^\s,()[\]]+", attrs[key]) for key in locations}
        for key, found in places.items():
            if any("-" in place or _number(place) >= count for place in found):
                raise MemongerError(f"{where}: it has {count} inputs, but {key}={attrs[key]!r}")
        placed = sum(map(len, places.values()))
        if op == "_foreach" and placed != count:
            raise MemongerError(f"{where}: it has {count} inputs, but {placed} locations of them")
    elif subgraphs == 0 and op.startswith("_sg_"):
        raise MemongerError(f"{where}: {op} takes a subgraph, and has none")
    for key, number in told.items():
        if number > count and op not in CONTROL_FLOW:
            raise MemongerError(f"{where}: {op} takes {attrs[key]} inputs, not {count}")
    if _number(attrs.get("num_outputs", "")) > MOST_OUTPUTS:
        raise MemongerError(f"{where}: {op} has {attrs['num_outputs']} outputs")


def _number(text: str) -> int:
    """The number that MXNet reads, -1 where it reads none."""
    found = re.match(r"\s*\+?([0-9]+)\s*$", text)
    return int(found.group(1)[:18]) if found else -1


#: The names of an operator's inputs (None if any number will do), which of them are auxiliary
#: states, and how many outputs it has.
_Arity = Tuple["tuple[str, ...] | None", "tuple[int, ...]", int]


def _asked(
    op: str, attrs: Mapping[str, str], subgraphs: Sequence[Any], count: int, where: str
) -> _Arity:
    """Ask MXNet of an operator alone."""
    ask: Any = _arity
    if op == "Custom":  # what is registered may be another one tomorrow, and reads all attributes
        ask = _arity.__wrapped__
    else:
        attrs = {key: value for key, value in attrs.items() if not key.startswith("__")}
    try:
        return ask(op, tuple(sorted(attrs.items())), json.dumps(subgraphs), count)
    except (mx.MXNetError, UnicodeDecodeError) as error:
        said = said_by_mxnet(error)
    if "Cannot find custom operator" in said:
        said = f"no operator {attrs.get('op_type')!r} is registered (mx.operator.register)"
    raise MemongerError(f"{where}: {op}: {said}")


@functools.lru_cache(maxsize=4096)
def _arity(op: str, attrs: tuple[tuple[str, str], ...], subgraphs: str, count: int) -> _Arity:
    node = {"op": op, "name": "n", "attrs": dict(attrs), "inputs": []}
    if json.loads(subgraphs):
        node["subgraphs"] = json.loads(subgraphs)
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


@functools.lru_cache(maxsize=1)
def _operators() -> frozenset[str]:
    """The names of all operators, aliases too."""
    return frozenset(mx.operator.get_all_registered_operators())


def load_nodes(nodes: Sequence[Mapping[str, Any]], heads: Sequence[Sequence[int]]) -> Any:
    """Make a Symbol of nodes and heads as JSON has them; they are not checked."""
    return mx.sym.load_json(
        as_json(
            {
                "nodes": nodes,
                "arg_nodes": [i for i, n in enumerate(nodes) if n["op"] == "null"],
                "heads": heads,
                "attrs": {"mxnet_version": ["int", VERSION]},
            }
        )
    )
