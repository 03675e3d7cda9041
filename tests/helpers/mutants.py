"""Damaged files of networks, and a process that tries the command line on them: for a fuzz test."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import resource
import traceback
from pathlib import Path
from typing import Any, Dict, Tuple

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
    return {
        "planned": (memonger.search_plan(two_heads, shapes=shapes, patience=0.01), shapes),
        "lstm": examples.lstm(layers=1, steps=2, batch=4, hidden=8, labels=5, input=3),
        "embedding": examples.embedding_net(4, 5, vocabulary=10, embed=8, filters=2, widths=(2,)),
        "loop": (small_net(CASES["foreach"]), {**SMALL_SHAPES}),
    }


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


def mutant(number: int, files: dict[str, tuple[str, Shapes]]) -> tuple[bytes, list[str]]:
    """The mutant of this number, of files with JSON and shapes by name; how it is tried."""
    draw = random.Random(number)
    which = list(files)[number % len(files)]
    verb = list(VERBS)[number // len(files) % len(VERBS)]
    text, shapes = files[which]
    graph = json.loads(text)
    with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
        for _ in range(draw.choice((1, 1, 1, 2))):  # the first may leave nothing to change
            _changed(graph, draw)
    content = json.dumps(graph, ensure_ascii=draw.random() < 0.3)
    data = content.encode("utf-8", "surrogatepass")
    arguments = [verb.split()[0], *["{net}"] * (2 if verb == "check" else 1), *VERBS[verb]]
    for name, (first, *others) in shapes.items():
        sizes = ["N" if verb == "batch" else str(first), *map(str, others)]
        arguments += ["--shape", f"{name}={','.join(sizes)}"]
    return data, arguments


_worker: dict[str, Any] = {}  # of this process: its folder, and the files that are damaged


def begin(folder: str, memory: int) -> None:
    """Make a process ready for `attempt`, with a folder of its own in this one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    from efforts import SHORT, use

    use(SHORT)
    files = {name: (net.tojson(), shapes) for name, (net, shapes) in networks().items()}
    _worker.update(folder=Path(folder) / str(os.getpid()), files=files)
    _worker["folder"].mkdir()


def attempt(number: int) -> tuple[int, str]:
    """Run the command on the mutant of this number: its status, and what is wrong, or ''."""
    import mxnet as mx
    from memonger import cli

    content, arguments = mutant(number, _worker["files"])
    folder = _worker["folder"]
    net, out = folder / "net-symbol.json", folder / "out-symbol.json"
    net.write_bytes(content)
    out.write_text("old")
    printed, said, status = io.StringIO(), io.StringIO(), -1
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            status = cli.main([argument.format(net=net, out=out) for argument in arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            said.write(traceback.format_exc())
    text, written = said.getvalue(), out.read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    wrong = ""
    if status not in (0, 1, 2) or "Traceback" in text + printed.getvalue() or "Stack trace" in text:
        wrong = f"status {status}: {text}"
    elif status and not printed.getvalue() and not (lines and lines[-1].startswith("memonger")):
        wrong = f"nothing is said: {text!r}"
    elif sorted(folder.iterdir()) != [net, out]:
        wrong = f"files are left: {sorted(folder.iterdir())}"
    elif written != "old" and status:
        wrong = f"half-written: {written[:80]!r}"
    elif written != "old":
        mx.sym.load(str(out))  # whole
    return status, wrong and f"{number}: {' '.join(arguments)}: {wrong}"
