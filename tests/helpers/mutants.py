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
from typing import Any, Dict, NamedTuple, Tuple

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
    import networks as examples
    from operator_cases import CASES, SMALL_SHAPES, small_net

    two_heads, shapes = examples.two_heads(blocks=1, filters=4, batch=4, image=8)
    planned = memonger.search_plan(two_heads, shapes=shapes, patience=0.01)
    return {
        "planned": (planned, shapes),
        "lstm": examples.lstm(layers=1, steps=2, batch=4, hidden=8, labels=5, input=3),
        "embedding": examples.embedding_net(4, 5, vocabulary=10, embed=8, filters=2, widths=(2,)),
        "loop": (small_net(CASES["foreach"]), {**SMALL_SHAPES}),
    }


# -- what damages a file -----------------------------------------------------------------------

Graph = Dict[str, Any]
Draw = random.Random

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**32, 2**64, 1.5, 1e400, "", "x", "(0, 0)", "null", "None",
    [], [0], [[0, 0, 0]], [[0]], {}, {"a": 1}, {"op": "null", "name": "x", "inputs": []},
    "\ud800", "\x00", "\x01", "é",
)  # fmt: skip
#: For what is a string: values of attributes, operators, names.
STRINGS = (
    "0|-1|1|2|3|99999999999|2147483648|1e3||()|(0, 0)|(0,)|(-1, -1)|(1,)|(3, 3, 3)|None|True|nan|"
    "relu|valid|x|(99999999999, 1)|[1, 2]|(2, 2|float16|a\nb|\x07|\u202e|%s|{}|BatchNorm|RNN|"
    "Custom|_foreach|_cond|_CachedOp|SliceChannel|Concat|_zeros|null|NoSuchOperator|Pooling|"
    "Deconvolution|FullyConnected|_backward_Convolution|_sg_mkldnn_conv|sgd_update|dot|_NDArray|Reshape|"
    "_split_v2|add_n|_FusedOp|_contrib_MultiBoxTarget|_Native"
).split("|")
#: What a node may have besides, and its attributes.
NODE_MORE: tuple[tuple[str, Any], ...] = (
    ("control_deps", [1]), ("control_deps", "x"), ("subgraphs", [{}]), ("param", {"x": "y"}),
    ("subgraphs", [{"nodes": [], "arg_nodes": [], "heads": []}]), ("attr", {"lr_mult": "x"}),
    ("attr", {"weight_lr_mult": "2"}), ("backward_source_id", -1), ("colour", "red"),
)  # fmt: skip
MORE: tuple[tuple[str, Any], ...] = (
    ("num_args", "1"), ("num_outputs", "3"), ("__shape__", "(0, 0)"), ("__dtype__", "9"),
    ("__force_mirroring__", "x"), ("is_np_shape", ["int", 1]), ("mxnet_version", ["int", 800]),
    ("mxnet_version", ["int", 20000]), ("mxnet_version", ["str", "x"]), ("mxnet_version", 3),
)  # fmt: skip


def _spot(graph: Graph, draw: Draw) -> tuple[Any, Any]:
    """Some list or dict, often the source of an input, and one of its keys."""
    if draw.random() < 0.3:
        entries = [entry for node in graph["nodes"] for entry in node["inputs"]] + graph["heads"]
        return draw.choice(entries), draw.randint(0, 1)
    at: Any = graph if draw.random() < 0.15 else draw.choice(graph["nodes"])
    while True:
        key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], (list, dict)) or not at[key] or draw.random() < 0.1:
            return at, key
        at = at[key]


def _changed(graph: Graph, draw: Draw) -> None:
    """Some value is another, gone, or there twice; something is added, or in another order."""
    (at, key), change = _spot(graph, draw), draw.random()
    if change < 0.65:
        same: tuple[Any, ...] = ODD
        if isinstance(at[key], str) and draw.random() < 0.9:
            same = (*STRINGS, *(node[which] for node in graph["nodes"] for which in ("op", "name")))
        elif isinstance(at[key], int) and draw.random() < 0.9:
            same = (at[key] + 1, 0, 1, 2, draw.randrange(len(graph["nodes"])), 10**6, -1)
        at[key] = copy.deepcopy(draw.choice(same))
    elif change < 0.8:
        inputs = draw.choice(graph["nodes"])["inputs"]
        draw.choice((inputs.clear, inputs.pop, lambda: inputs.extend(inputs), inputs.reverse))()
    elif change < 0.85:
        del at[key]
    elif isinstance(at, dict):
        at.update([copy.deepcopy(draw.choice(NODE_MORE if "op" in at else MORE))])
    elif change < 0.92:
        at.insert(key, copy.deepcopy(at[key]))
    else:
        draw.shuffle(at)


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


def mutant(number: int, files: dict[str, tuple[str, Shapes]]) -> tuple[bytes, list[str]]:
    """The mutant of this number, of files with JSON and shapes by name; how it is tried."""
    draw = random.Random(number)
    which = list(files)[number % len(files)]
    verb = list(VERBS)[number // len(files) % len(VERBS)]
    text, shapes = files[which]
    if draw.random() < 0.75:
        graph = json.loads(text)
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
            for _ in range(draw.choice((1, 1, 1, 2))):  # the first may leave nothing to change
                _changed(graph, draw)
        content = json.dumps(graph, ensure_ascii=draw.random() < 0.3)
        data = content.encode("utf-8", "surrogatepass")
    else:
        data = _damaged(text.encode(), draw)
    arguments = [verb.split()[0], *["{net}"] * (2 if verb == "check" else 1), *VERBS[verb]]
    for name, (first, *others) in shapes.items():
        sizes = ["N" if verb == "batch" else str(first), *map(str, others)]
        arguments += ["--shape", f"{name}={','.join(sizes)}"]
    return data, arguments


class Tried(NamedTuple):
    """What came of a mutant: '' where all is well."""

    name: str
    complaint: str
    status: int


def tried(number: int, files: dict[str, tuple[str, Shapes]], folder: Path) -> Tried:
    """Run the command line on one mutant, within this process."""
    import traceback

    import mxnet as mx
    from memonger import cli

    content, arguments = mutant(number, files)
    name = f"{number}: {' '.join(arguments)}"
    net, out = folder / "net-symbol.json", folder / "out-symbol.json"
    net.write_bytes(content)
    out.write_text("old")
    arguments = [argument.format(net=net, out=out) for argument in arguments]
    printed, said, status = io.StringIO(), io.StringIO(), -1
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            status = cli.main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            return Tried(name, traceback.format_exc(), status)
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    written, complaint = out.read_text(), ""
    if status not in (0, 1, 2):
        complaint = f"status {status}"
    elif "Traceback" in said.getvalue() + printed.getvalue() or "Stack trace" in said.getvalue():
        complaint = "a trace: " + said.getvalue()
    elif status and not printed.getvalue() and not (lines and lines[-1].startswith("memonger")):
        complaint = f"nothing is said: {said.getvalue()!r}"
    elif sorted(p.name for p in folder.iterdir()) != [net.name, out.name]:
        complaint = f"files are left: {sorted(folder.iterdir())}"
    elif written != "old" and status:
        complaint = f"half-written: {written[:80]!r}"
    elif written != "old":
        mx.sym.load(str(out))  # whole
    return Tried(name, complaint, status)


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
    return tried(number, _worker["files"], _worker["folder"])
