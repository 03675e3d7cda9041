"""Read symbols, their JSON and their files, and check what MXNet's reader does not.

MXNet's reader (``nnvm/src/pass/saveload_json.cc``, ``src/nnvm/legacy_json_util.cc``) does not check
the numbers in a graph: an output that does not exist, a node after its reader or an operator
without its inputs crashes the process. How many inputs and outputs an operator has depends on its
attributes; this module finds out by composing each operator alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
from pathlib import Path
from typing import Iterable, Mapping, Optional, Sequence, Tuple

from memonger.support import files
from memonger.support.errors import MemongerError, mxnet_message
from memonger.support.mxnet import mx
from memonger.support.types import Json, Symbol
from memonger.support.versions import VERSION

OLDEST = 800  # the version of a file without a version
OWN_STATES = 900  # older files lack auxiliary states, which MXNet adds as inputs
SYMBOL_FILE = "*-symbol.json"  # what MXNet calls the files of networks
PARAMETERS = b"\x12\x01\0\0\0\0\0\0"  # how files of arrays begin (src/ndarray/ndarray.cc)

#: Attributes of variables that later versions hide (``UpgradeJSON_FixParsing`` in
#: ``legacy_json_util.cc``); until 1.9.1 an attribute may begin or end so, as in ``weight_lr_mult``.
HIDDEN = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")

#: Attributes that hold a number of inputs (``key_var_num_args`` and the like).
COUNTS = ("num_args", "num_arrays", "num_weights", "num_tensors")
MAX_OUTPUTS = 2**20  # of one operator, because MXNet makes a name for each
#: Operator of control flow -> how many subgraphs it has, which ``num_args`` counts as inputs.
CONTROL_FLOW = {"_foreach": 1, "_while_loop": 2, "_cond": 3}
#: Inputs and outputs of an operator: input names (None: any), indices of its states, output count.
Arity = Tuple[Optional[Tuple[str, ...]], Tuple[int, ...], int]
_ESCAPE = re.compile(r"\\(u00[01][0-9a-f]|.)")


def json_of(symbol: Symbol) -> str:
    """Return the JSON of a symbol, with the casts that AMP has inserted."""
    options = {} if VERSION < 10700 else {"remove_amp_cast": False}  # 1.6 always keeps them
    return str(symbol.tojson(**options))


def read(symbol: Symbol) -> Json:
    """Return the graph in a symbol's JSON, with the casts that AMP has inserted."""
    return json.loads(json_of(symbol), strict=False)


def as_json(graph: Json) -> str:
    r"""Return the JSON of a graph for MXNet, which cannot read ``\u``, ``\b`` and ``\f``."""
    text = json.dumps(graph, ensure_ascii=False)
    return _ESCAPE.sub(lambda m: json.loads(f'"{m[0]}"') if m[1][0] in "ubf" else m[0], text)


def attributes(node: Json) -> dict[str, str]:
    """Return the attributes of a node in a symbol's JSON, in the format of any version."""
    last = [key for key in node if key in ("attr", "attrs")][-1:]
    return {**node.get("param", {}), **(node[last[0]] if last else {})}


def check_graph(graph: Json, subject: str, version: int = VERSION) -> None:
    """Raise MemongerError unless each node reads existing outputs of earlier nodes.

    It must also have as many inputs as its operator takes. ``subject`` begins the message; MXNet of
    this ``version`` wrote the JSON.
    """
    where = subject
    try:
        nodes: list[Json] = graph["nodes"]
        outputs: list[int] = []
        for i, node in enumerate(nodes):
            where = f"{subject}: node {i}"
            where += f" ({node['name']!r})"
            deps = [[d, 0] for d in node.get("control_deps", ())]
            _check_entries(node["inputs"], "an input", nodes, outputs)
            _check_entries(deps, "a control dependency", nodes, outputs)
            subgraphs = list(node.get("subgraphs", ()))
            if node["op"].startswith("_CachedOp") and "subgraph" in attributes(node):
                subgraphs.append(json.loads(attributes(node)["subgraph"], strict=False))
            for subgraph in subgraphs:
                check_graph(subgraph, "subgraph")
            outputs.append(_count_outputs(node, nodes, version))
        where = subject
        _check_entries(graph["heads"], "an output of the network", nodes, outputs)
        for a in graph["arg_nodes"]:
            if not _is_count(a) or a >= len(nodes) or nodes[a]["op"] != "null":
                raise MemongerError(
                    f"arg_nodes has node {a!r}, which is not a variable (op 'null')"
                )
    except MemongerError as error:
        raise MemongerError(f"{where}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise MemongerError(f"{where}: this is not MXNet's format ({error!r})") from None


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**32


def _check_entries(
    entries: Sequence[Sequence[int]], kind: str, nodes: Sequence[Json], outputs: Sequence[int]
) -> None:
    """Raise MemongerError unless entries name existing outputs of nodes before their reader."""
    for entry in entries:
        if type(entry) is not list or len(entry) not in (2, 3) or not all(map(_is_count, entry)):
            raise MemongerError(f"{kind} must be [node, output], not {entry!r}")
        a, b = entry[:2]
        if a >= len(outputs):
            before = f"only {len(outputs)} nodes come before"
            raise MemongerError(f"{kind} is an output of node {a}, but {before}")
        if b >= outputs[a]:
            name = f"node {a} ({nodes[a]['name']!r}, {nodes[a]['op']})"
            raise MemongerError(f"{kind} is output {b} of {name}, which has only {outputs[a]}")


def _count_outputs(node: Json, nodes: Sequence[Json], version: int) -> int:
    """Count the outputs of a node; raise MemongerError if its operator takes other inputs."""
    op, count = node["op"], len(node["inputs"])
    subgraphs: list[Json] = node.get("subgraphs", [])
    if op == "null":
        if count or subgraphs:
            raise MemongerError("it is a variable, but has inputs")
        return 1
    if op in ("_Native", "_NDArray"):  # they hold a pointer
        raise MemongerError(f"{op} points into the process that made it; use a Custom operator")
    if "backward" in op.split("_"):
        raise MemongerError(f"{op} is a gradient; give the network without gradients")
    attrs = attributes(node)
    hidden = HIDDEN if version < VERSION else ()
    outgrown = [key for key in attrs if key.startswith(hidden) or key.endswith(hidden)]
    for key in outgrown:
        del attrs[key]
    names, states, outputs = _ask_arity(op, attrs, subgraphs, count)
    if outputs > MAX_OUTPUTS:
        raise MemongerError(f"{op} has {outputs} outputs, more than {MAX_OUTPUTS}")
    if names is not None and len(names) != count:
        if version >= OWN_STATES or count > len(names):
            raise MemongerError(f"{op} takes {len(names)} inputs, not {count}")
    for k in [k for k in states if k < count]:  # MXNet crashes if the operator cannot write there
        source = nodes[node["inputs"][k][0]]
        if source["op"] != "null":
            written = f"the output of {source['name']!r} ({source['op']})"
            raise MemongerError(f"input {k} of {op} must be a variable, not {written}")
    for key in outgrown:  # MXNet looks up the input that an attribute such as gamma_lr_mult names
        if key.rsplit("_", 2)[0] in (names or ())[count:]:
            raise MemongerError(f"its attribute {key!r} names an input that it does not have")
    return outputs


def _check_counts(op: str, attrs: Mapping[str, str], count: int, subgraphs: int) -> None:
    """Raise MemongerError for counts with which MXNet would crash when it composes an operator."""
    if op in CONTROL_FLOW:
        if subgraphs != CONTROL_FLOW[op]:
            raise MemongerError(f"{op} takes {CONTROL_FLOW[op]} subgraphs, not {subgraphs}")
        if _number(attrs.get("num_args", "")) != count + subgraphs:
            inputs = f"it has {count} inputs and {subgraphs} subgraphs"
            raise MemongerError(f"{inputs}, but num_args={attrs.get('num_args')!r}")
        text = " ".join(attrs[key] for key in attrs if key.endswith("_locs"))
        places = re.findall(r"[^\s,()[\]]+", text)
        outside = any("-" in place or _number(place) >= count for place in places)
        if outside or (op == "_foreach" and len(places) != count):
            raise MemongerError(f"it has {count} inputs, but {text!r} for their locations")
    elif subgraphs == 0 and op.startswith("_sg_"):
        raise MemongerError(f"{op} takes a subgraph, but has none")
    for key in COUNTS:
        if op not in CONTROL_FLOW and _number(attrs.get(key, "")) > count:
            raise MemongerError(f"{op} takes {attrs[key]} inputs, not {count}")
    if _number(attrs.get("num_outputs", "")) > MAX_OUTPUTS:
        raise MemongerError(f"{op} has {attrs['num_outputs']} outputs, more than {MAX_OUTPUTS}")


def _number(text: str) -> int:
    """Return the number that MXNet reads from a text, or -1 if it reads none."""
    match = re.match(r"\s*\+?([0-9]+)\s*$", text)
    return int(match[1][:18]) if match else -1


def _ask_arity(op: str, attrs: Mapping[str, str], subgraphs: Sequence[Json], count: int) -> Arity:
    # A Custom operator reads all attributes, and may be registered anew, so it is not cached.
    ask = _arity.__wrapped__
    if op != "Custom":
        ask = _arity
        attrs = {key: value for key, value in attrs.items() if not key.startswith("__")}
    for key, value in attrs.items():
        if not isinstance(value, str):
            raise MemongerError(f"{op}: attribute {key!r} must be a string, not {value!r}")
    try:
        return ask(
            op, tuple(sorted(attrs.items())), json.dumps(subgraphs) if subgraphs else "[]", count
        )
    except (mx.MXNetError, UnicodeError) as error:
        reason = mxnet_message(error)
    if "Cannot find custom operator" in reason:
        reason = f"no operator {attrs.get('op_type')!r} is registered (mx.operator.register)"
    elif "is not registered" in reason:
        reason = "MXNet has no operator of this name"
    raise MemongerError(f"{op}: {reason}")


@functools.lru_cache(maxsize=4096)
def _arity(op: str, attrs: tuple[tuple[str, str], ...], subgraphs: str, count: int) -> Arity:
    node: Json = {"op": op, "name": "n", "attrs": dict(attrs), "inputs": []}
    node["subgraphs"] = json.loads(subgraphs)
    _check_counts(op, node["attrs"], count, len(node["subgraphs"]))
    alone = load_nodes([node], [[0, 0, 0]]) if node["subgraphs"] else without_inputs(op, attrs)
    outputs: int = read(alone)["node_row_ptr"][-1]
    if op in CONTROL_FLOW:
        return None, (), outputs
    try:
        composed = alone(name="n")
    except mx.MXNetError:  # an operator whose inputs have no names needs all of them
        composed = alone(*[mx.sym.var(f"n_{k}") for k in range(count)], name="n")
    names = composed.list_inputs()
    states = set(composed.list_auxiliary_states())
    places = tuple(k for k, name in enumerate(names) if name in states)
    return tuple(name[2:] for name in names), places, outputs


def without_inputs(op: str, attrs: Iterable[tuple[str, str]]) -> Symbol:
    """Make a Symbol of an operator that has no inputs yet; to call it makes variables for them."""
    handle, texts = mx.base.SymbolHandle(), dict(attrs)
    keys = mx.base.c_str_array([*texts])
    values = mx.base.c_str_array([*texts.values()])
    handle_of_op = ctypes.c_void_p(creator(op))
    create = mx.base._LIB.MXSymbolCreateAtomicSymbol
    mx.base.check_call(create(handle_of_op, len(texts), keys, values, ctypes.byref(handle)))
    return mx.sym.Symbol(handle)


@functools.lru_cache(maxsize=None)
def creator(op: str) -> int:
    """Return MXNet's handle of an operator."""
    handle = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(op.encode(), ctypes.byref(handle)))
    return handle.value or 0


def load_nodes(nodes: Sequence[Json], heads: Sequence[Sequence[int]]) -> Symbol:
    """Make a Symbol from nodes and outputs in the format of its JSON, without a check."""
    variables = [i for i, node in enumerate(nodes) if node["op"] == "null"]
    attrs = {"mxnet_version": ["int", VERSION]}
    if mx.util.is_np_shape():  # otherwise MXNet reads zeros in shapes of variables as unknown
        attrs["is_np_shape"] = ["int", 1]
    graph = {"nodes": nodes, "arg_nodes": variables, "heads": heads, "attrs": attrs}
    return mx.sym.load_json(as_json(graph))


class SymbolWithCasts(mx.sym.Symbol):
    """A network with casts of AMP, which ``save`` writes unless told otherwise.

    MXNet leaves them out by default, so that the file has the network in float32.
    """

    def save(self, fname: str, remove_amp_cast: bool = False) -> None:
        """Save to a file; parameters are those of ``mx.sym.Symbol.save``."""
        super().save(fname, remove_amp_cast)


def keep_casts(symbol: Symbol, nodes: Sequence[Json]) -> Symbol:
    """Return a symbol, which it takes over, as a `SymbolWithCasts` if it has casts of AMP."""
    if not any(node["op"] in ("amp_cast", "amp_multicast") for node in nodes):
        return symbol
    with_casts = SymbolWithCasts(symbol.handle)
    symbol.handle = mx.base.SymbolHandle()
    return with_casts


def all_outputs(graph: Json) -> Symbol:
    """Return a Symbol of all outputs of a graph; those of node i start at ``node_row_ptr[i]``.

    ``get_internals`` leaves out those that ``list_outputs`` does not show, such as a BatchNorm's
    mean and a Dropout's mask. MXNet infers their shapes and types, but has no names for them.
    """
    heads: list[list[int]] = []
    start = graph["node_row_ptr"]
    for i, (first, stop) in enumerate(zip(start, start[1:])):
        heads += [[i, k, 0] for k in range(stop - first)]
    return load_nodes(graph["nodes"], heads)


def _why_no_file(path: files.Path) -> str:
    """Tell why there is no file to read: it is absent, a folder, or a device."""
    shown = repr(os.fsdecode(path))
    if os.path.isdir(path):
        return f"{shown} is a folder; give the {SYMBOL_FILE} in it"
    if os.path.exists(path):
        return f"{shown} is not an ordinary file; give a {SYMBOL_FILE}"
    return f"there is no file {shown}"


def load(path: files.Path) -> Symbol:
    """Read a network from a file, and check it before MXNet reads it.

    MXNet's own ``mx.sym.load`` crashes the process on some damaged files. Files of older versions
    of MXNet can be read too.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file that ``Symbol.save`` or ``Module.save_checkpoint`` wrote: ``*-symbol.json``.

    Returns
    -------
    mx.sym.Symbol

    Raises
    ------
    MemongerError
        If the file does not exist, cannot be read, or does not contain a complete network; the
        message names the node and what is wrong with it.

    Examples
    --------
    >>> net = memonger.load('resnet-symbol.json')
    >>> planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    """
    shown = repr(os.fsdecode(path))
    try:
        if not os.path.isfile(path):
            raise MemongerError(_why_no_file(path))
        data = Path(os.fsdecode(path)).read_bytes()
    except OSError as error:
        raise MemongerError(f"{shown} cannot be read: {error.strerror}") from None
    if data.startswith(PARAMETERS):
        raise MemongerError(
            f"{shown} holds arrays, not a network; give the {SYMBOL_FILE} beside it"
        )
    subject = f"{shown} is not a network that MXNet can read"
    try:
        graph = json.loads(data.decode("utf-8-sig"), strict=False)  # names may hold any character
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        if os.fsdecode(path).endswith(".onnx"):
            convert = "convert it by mx.contrib.onnx.import_model, and save the symbol it returns"
            raise MemongerError(f"{shown} is a network of ONNX; {convert}") from None
        cut = f"it ends at byte {len(data)}; if it is cut off, copy or save it again"
        raise MemongerError(f"{subject}: {error}; {cut}") from None
    version = OLDEST
    with contextlib.suppress(TypeError, KeyError, ValueError):
        kind, number = graph["attrs"]["mxnet_version"]
        if kind == "int" and type(number) is int:
            version = number
    check_graph(graph, subject, version)
    try:
        symbol = mx.sym.load_json(as_json(graph))
    except (mx.MXNetError, UnicodeError) as error:  # MXNet may cut a line within a character
        raise MemongerError(f"{subject}: {mxnet_message(error)}") from None
    if version < OWN_STATES:
        check_graph(read(symbol), subject)  # with the inputs that MXNet has added
    return symbol
