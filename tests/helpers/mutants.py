"""Damaged files of networks, and a process that tries the command line on them: for a fuzz test."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import resource
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Tuple

BATCH, WIDTH = 4, 8
Shapes = Dict[str, Tuple[int, ...]]

#: The verbs of the command line, with the options that each takes here.
VERBS: dict[str, tuple[str, ...]] = {
    "plan": ("--patience", ".01", "-o", "{out}"),
    "plan --budget": ("--patience", ".01", "--budget", "80%", "-o", "{out}", "--json"),
    "plan --how schedule": ("--patience", ".01", "--how", "schedule", "--work", "1.5"),
    "cost": (),
    "explain": ("--json",),
    "frontier": ("--patience", ".01", "--points", "3"),
    "batch": ("--patience", ".01", "--budget", "1MB", "-o", "{out}"),
    "check": ("--steps", "1"),
}


def networks() -> dict[str, tuple[Any, Shapes]]:
    """Four small networks, one of them with a plan, and the shapes of their inputs."""
    import memonger
    import mxnet as mx

    s = mx.sym
    data = s.Variable("data")

    x = data
    for i in range(2):
        x = s.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name=f"conv{i}")
        x = s.Activation(s.BatchNorm(x, fix_gamma=False, name=f"bn{i}"), act_type="relu")
        x = s.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", name=f"pool{i}")
    convolutional = s.SoftmaxOutput(s.FullyConnected(x, num_hidden=3, name="fc"), name="softmax")
    planned = memonger.search_plan(convolutional, data=(64, 3, 8, 8), patience=0.01)

    parts = list(s.SliceChannel(data, num_outputs=2, axis=1, name="parts"))
    for i in range(2):
        gate = s.sigmoid(s.FullyConnected(parts[0], num_hidden=WIDTH, name=f"gate{i}"))
        parts = [s.tanh(s.FullyConnected(gate * parts[1], num_hidden=WIDTH)), gate]
    gated = s.MakeLoss(s.mean(s.square(s.Concat(*parts, dim=1))), name="loss")

    x = s.Embedding(data, input_dim=10, output_dim=WIDTH, name="embedding")
    x = s.Dropout(s.LayerNorm(x, name="norm"), p=0.1, name="dropout")
    x = s.slice_axis(s.transpose(x, axes=(1, 0, 2)), axis=0, begin=0, end=2, name="slice")
    two = s.Group([s.MakeLoss(s.sum(x)), s.BlockGrad(s.topk(x, k=1, ret_typ="indices"))])

    def body(item: Any, state: Any) -> Any:
        state = s.FullyConnected(item, num_hidden=WIDTH, name="inner") + state
        return s.tanh(state), state

    outputs, _ = s.contrib.foreach(body, data, s.zeros((BATCH, WIDTH)))
    loop = s.MakeLoss(s.sum(outputs), name="loss")
    return {
        "planned": (planned, {"data": (BATCH, 3, 8, 8)}),
        "gated": (gated, {"data": (BATCH, 2 * WIDTH)}),
        "two outputs": (two, {"data": (BATCH, 5)}),
        "loop": (loop, {"data": (3, BATCH, WIDTH)}),
    }


class Mutant(NamedTuple):
    """A damaged file and how it is tried."""

    name: str
    content: bytes
    arguments: tuple[str, ...]


# -- what damages a file -----------------------------------------------------------------------

Graph = Dict[str, Any]
Draw = random.Random


def _spot(graph: Any, draw: Draw) -> tuple[Any, Any]:
    """Some list or dict within a graph, and one of its keys."""
    while True:
        at: Any = graph
        for _ in range(draw.randint(0, 5)):
            into = at[draw.choice(list(at) if isinstance(at, dict) else range(len(at)))]
            if not isinstance(into, (list, dict)) or not into:
                break
            at = into
        if at:
            return at, draw.choice(list(at) if isinstance(at, dict) else range(len(at)))


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**32, 2**64, 1.5, 1e400, "", "x", "(0, 0)", "null", "None",
    [], [0], [[0, 0, 0]], [[0]], {}, {"a": 1}, {"op": "null", "name": "x", "inputs": []},
    "\ud800", "\x00", "\x01", "é",
)  # fmt: skip
VALUES = (
    "0|-1|1|2|3|99999999999|2147483648|1e3||()|(0, 0)|(0,)|(-1, -1)|(1,)|(3, 3, 3)|None|True|nan|"
    "relu|valid|x|(99999999999, 1)|[1, 2]|(2, 2|float16"
).split("|")
OPERATORS = (
    "BatchNorm RNN Custom _foreach _cond _CachedOp SliceChannel Concat _zeros null NoSuchOperator "
    "Pooling FullyConnected Deconvolution _backward_Convolution _sg_mkldnn_conv sgd_update dot "
    "_NDArray Reshape _split_v2 add_n _FusedOp _contrib_MultiBoxTarget _Native"
).split()


def _somewhere(graph: Graph, draw: Draw) -> None:
    """Some value is odd, gone, or there twice."""
    at, key = _spot(graph, draw)
    change = draw.randrange(3)
    if change == 0:
        at[key] = copy.deepcopy(draw.choice(ODD))
    elif change == 1:
        del at[key]
    elif isinstance(at, list):
        at.insert(key, copy.deepcopy(at[key]))
    else:
        at[key + draw.choice(("", "s", "_weight", "_lr_mult"))] = copy.deepcopy(at[key])


def _entry(graph: Graph, draw: Draw) -> None:
    """An input or a head names another output."""
    entries = [entry for node in graph["nodes"] for entry in node["inputs"]] + graph["heads"]
    entry, which = draw.choice(entries), draw.randint(0, 1)
    entry[which] = draw.choice((entry[which] + 1, 0, 1, 2, len(graph["nodes"]), 10**6, -1))
    if draw.random() < 0.3:
        entry[0] = draw.randrange(len(graph["nodes"]))


def _inputs(graph: Graph, draw: Draw) -> None:
    """A node has no inputs, one less, one more, or others."""
    node = draw.choice([n for n in graph["nodes"] if n["inputs"]] + graph["nodes"][:2])
    inputs = node["inputs"]
    more = [*inputs, [draw.randrange(len(graph["nodes"])), 0, 0]]
    node["inputs"] = draw.choice(([], inputs[:-1], more, draw.sample(inputs, len(inputs))))


def _operator(graph: Graph, draw: Draw) -> None:
    node = draw.choice(graph["nodes"])
    node["op"] = draw.choice((*OPERATORS, *(n["op"] for n in graph["nodes"])))
    if draw.random() < 0.3:
        node.pop("attrs", None)


def _attribute(graph: Graph, draw: Draw) -> None:
    node = draw.choice([n for n in graph["nodes"] if n.get("attrs")] or graph["nodes"])
    attrs = node.setdefault("attrs", {})
    keys = [*attrs, "num_args", "num_outputs", "__shape__", "__dtype__", "__force_mirroring__"]
    attrs[draw.choice(keys)] = draw.choice(VALUES)


def _name(graph: Graph, draw: Draw) -> None:
    others = [n["name"] for n in graph["nodes"]]
    odd = ("", "a\nb", "\x07", "\u202e", "x" * 5000, "%s", "{}")
    draw.choice(graph["nodes"])["name"] = draw.choice((*others, *odd))


def _order(graph: Graph, draw: Draw) -> None:
    """Nodes in another order, or one less."""
    if draw.random() < 0.5:
        draw.shuffle(graph["nodes"])
    else:
        del graph["nodes"][draw.randrange(len(graph["nodes"]))]


def _extra(graph: Graph, draw: Draw) -> None:
    last = len(graph["nodes"]) - 1
    key, value = draw.choice(
        [
            ("control_deps", [last]), ("control_deps", [0]), ("control_deps", "x"),
            ("subgraphs", [{"nodes": [], "arg_nodes": [], "heads": []}]), ("subgraphs", [{}]),
            ("subgraphs", [graph["nodes"][0]]), ("param", {"x": "y"}), ("attr", {"lr_mult": "x"}),
            ("attr", {"weight_lr_mult": "2"}), ("backward_source_id", -1), ("colour", "red"),
        ]
    )  # fmt: skip
    draw.choice(graph["nodes"])[key] = copy.deepcopy(value)


def _version(graph: Graph, draw: Draw) -> None:
    """Another version of MXNet, with attributes where old ones had them."""
    numbers = [["int", n] for n in (800, 904, 10901, 20000)]
    version = draw.choice([None, *numbers, ["str", "x"], ["int"], 3])
    graph["attrs"] = {draw.choice(("mxnet_version", "is_np_shape", "x")): version}
    if version is None:
        del graph["attrs"]
    if draw.random() < 0.5:
        for node in graph["nodes"]:
            if "attrs" in node:
                node[draw.choice(("attr", "param"))] = node.pop("attrs")


GRAPHS: tuple[Callable[[Graph, Draw], None], ...] = (
    *[_somewhere] * 3, _entry, _entry, _inputs, _operator, _attribute, _attribute, _name, _order,
    _extra, _version,
)  # fmt: skip


def _damaged(text: bytes, draw: Draw) -> bytes:
    """Cut off, with another byte, without some, or with more."""
    at = draw.randrange(len(text))
    put = (b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\xc3", b'"', b"]", b"}", b",", b"[" * 3000)
    where = draw.choice((0, len(text), at))
    return draw.choice(
        (
            text[:at],
            text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
            text[:at] + text[at + draw.randint(1, 40) :],
            text[:where] + draw.choice(put) + text[where:],
        )
    )


def mutant(number: int, files: dict[str, tuple[str, Shapes]]) -> Mutant:
    """The mutant of this number, of files with JSON and shapes by name."""
    draw = random.Random(number)
    which = list(files)[number % len(files)]
    verb = list(VERBS)[number // len(files) % len(VERBS)]
    text, shapes = files[which]
    made = ["_damaged"]
    if draw.random() < 0.75:
        graph = json.loads(text)
        changes = [draw.choice(GRAPHS) for _ in range(draw.choice((1, 1, 1, 2)))]
        made = [change.__name__ for change in changes]
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
            for change in changes:  # the one before may have left no such place
                change(graph, draw)
        content = json.dumps(graph, ensure_ascii=draw.random() < 0.3)
        data = content.encode("utf-8", "surrogatepass")
    else:
        data = _damaged(text.encode(), draw)
    arguments = [verb.split()[0], "{net}"]
    if arguments[0] == "check":
        arguments.append("{net}")
    for name, shape in shapes.items():
        sizes = [str(n) for n in shape]
        if arguments[0] == "batch":
            sizes[1 if which == "loop" else 0] = "N"
        arguments += ["--shape", f"{name}={','.join(sizes)}"]
    name = f"{number}:{' and'.join(made).replace('_', ' ')} of {which!r} for {verb!r}"
    return Mutant(name, data, (*arguments, *VERBS[verb]))


# -- trying them -------------------------------------------------------------------------------


class Tried(NamedTuple):
    """What came of a mutant: '' where all is well."""

    name: str
    complaint: str
    status: int


def tried(each: Mutant, folder: Path) -> Tried:
    """Run the command line on one mutant, within this process."""
    import traceback

    import mxnet as mx
    from memonger import cli

    net, out = folder / "net-symbol.json", folder / "out-symbol.json"
    net.write_bytes(each.content)
    out.write_text("old")
    names = {"net": str(net), "out": str(out)}
    arguments = [argument.format(**names) for argument in each.arguments]
    printed, said, status = io.StringIO(), io.StringIO(), -1
    complaint = ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            status = cli.main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            complaint = traceback.format_exc()
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    written = out.read_text()
    if complaint:
        pass
    elif status not in (0, 1, 2):
        complaint = f"status {status}"
    elif "Traceback" in said.getvalue() + printed.getvalue() or "Stack trace" in said.getvalue():
        complaint = "a trace: " + said.getvalue()
    elif status and not printed.getvalue() and not (lines and lines[-1].startswith("memonger")):
        complaint = f"nothing is said: {said.getvalue()!r}"
    elif sorted(p.name for p in folder.iterdir()) != [net.name, out.name]:
        complaint = f"files are left: {sorted(folder.iterdir())}"
    elif written != "old" and status == 0:
        mx.sym.load(str(out))  # whole
    elif written != "old":
        complaint = f"half-written: {written[:80]!r}"
    return Tried(each.name, complaint, status)


_worker: dict[str, Any] = {}  # of this process: its folder, and the files that are damaged


def begin(folder: str, memory: int) -> None:
    """Make a process ready for `attempt`, with a folder of its own in this one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    files = {name: (net.tojson(), shapes) for name, (net, shapes) in networks().items()}
    _worker.update(folder=Path(folder) / str(os.getpid()), files=files)
    _worker["folder"].mkdir()


def attempt(number: int) -> Tried:
    """Try the mutant of this number."""
    return tried(mutant(number, _worker["files"]), _worker["folder"])
