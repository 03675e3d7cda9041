"""Helpers of the tests: what a planned symbol carries, plans of one's own, other processes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterable

import memonger
import mxnet as mx
import numpy as np
from memonger.costs.bind import read_planned_mb
from memonger.costs.pool import pool
from memonger.graph.forward import ForwardGraph
from memonger.graph.read import forward_graph
from memonger.graph.inputs import read_shapes
from memonger.graph import marks
from memonger.graph.operators.gradients import read_debug_str
from memonger.graph.operators.recompute import ANYWHERE
from memonger.planners.marks import chen2016
from memonger.planners.marks.cuts import Cut, cheap_cuts
from memonger.planners.marks.rules import Rules
from memonger.graph.training import training_graph
from memonger.support.symbols import read

from efforts import efforts

ROOT = Path(__file__).resolve().parents[2]
#: Packages that MXNet imports if it finds them, and does not need.
ABSENT = str(ROOT / "tests" / "helpers" / "absent")
HOWS: dict[str, dict[str, Any]] = {
    "marks": {"how": "marks"},
    "schedule": {"how": "schedule", "work": 2.0},
}


def python_path() -> str:
    """Return the ``PYTHONPATH`` by which a process imports what this one can."""
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def start_python(*arguments: Any, folder: Any = ROOT, **environment: str) -> subprocess.Popen[str]:
    """Start Python with what this process can import, by default in the project root.

    It imports no scikit-learn and no SciPy, unless ``PYTHONPATH`` is given.
    """
    path, pipe = os.pathsep.join([ABSENT, python_path()]), subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=str(folder),
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def run_python(
    *arguments: Any, typed: str = "", folder: Any = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; ``typed`` is its standard input."""
    with start_python(*arguments, folder=folder, **environment) as process:
        printed, log = process.communicate(typed, timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, log)


def run_code(code: str, **environment: str) -> str:
    """Run code in a process that imports what this one can; what it prints."""
    done = run_python("-W", "ignore", "-c", code, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


CALL = """
import efforts, pathlib, pickle, sys
file = pathlib.Path(sys.argv[1])
chosen, work, arguments = pickle.loads(file.read_bytes())
efforts.use(chosen)
file.write_bytes(pickle.dumps(work(*arguments)))
"""


def elsewhere(work: Callable[..., Any], *arguments: Any, **environment: str) -> tuple[Any, str]:
    """Run a function in another process; return its result, and what is said on stderr."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps((efforts(), work, arguments)))
        done = run_python("-W", "ignore", "-c", CALL, file.name, **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return pickle.loads(Path(file.name).read_bytes()), done.stderr


def process_mb(what: str = "VmRSS") -> float:
    """Return the MB of this process in memory: ``VmRSS`` now, ``VmHWM`` at most."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(what + r":\s+(\d+)", status)[0]) / 1024


def nodes(symbol: Any) -> list[dict[str, Any]]:
    """Return the nodes of a symbol's JSON."""
    listed: list[dict[str, Any]] = read(symbol)["nodes"]
    return listed


def marked(symbol: Any, value: str = "True") -> list[str]:
    """Return names of the nodes whose force_mirroring is ``value``."""
    return [n["name"] for n in nodes(symbol) if n.get("attrs", {}).get(marks.FORCE) == value]


def with_marks(symbol: Any, names: Iterable[str]) -> Any:
    """Return a copy in which just these nodes are recomputed, without any rule."""
    graph, names = read(symbol), set(names)
    for node in graph["nodes"]:
        if node["op"] != "null" and node["name"] in names:
            node.setdefault("attrs", {})[marks.FORCE] = "True"
    return mx.sym.load_json(json.dumps(graph))


def forward(symbol: Any, shapes: Any, type_dict: Any = None) -> ForwardGraph:
    """Return the forward graph of a symbol."""
    return forward_graph(symbol, read_shapes(symbol, shapes, {}, type_dict))


def every_cut(graph: ForwardGraph) -> list[Cut]:
    """Return the cuts after all operators but the last, where anything is alive."""
    return cheap_cuts(graph, len(graph.operators), graph.operators)


def positive(symbol: Any, shapes: Any) -> dict[str, np.ndarray]:
    """Return values in [0, 0.5) for all arguments, and 0.5 for auxiliary states."""
    random, graph = np.random.RandomState(0), forward(symbol, shapes)
    tensors = {graph.nodes[i].name: graph.tensors[i][0] for i in graph.arguments}
    values = {name: random.uniform(0, 0.5, t.shape) for name, t in tensors.items()}
    auxiliary = {graph.nodes[i].name: graph.tensors[i][0].shape for i in graph.auxiliary}
    return {**values, **{name: np.full(shape, 0.5) for name, shape in auxiliary.items()}}


def rules_of(symbol: Any, shapes: Any, targets: Any = ANYWHERE, type_dict: Any = None) -> Rules:
    """Return the rules of a network that is trained as Module trains it, or for all gradients."""
    graph = forward(symbol, shapes, type_dict)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    return Rules([training_graph(graph, w) for w in (None, parameters)], targets)


def cut_as_original(symbol: Any, shapes: Any, threshold: int) -> Any:
    """Return the original's plan for a threshold in MB, without any rule."""
    graph = forward(symbol, shapes)
    trial = chen2016.mirror_plan(chen2016.list_results(graph, marks.read_hints(graph)), threshold)
    return marks.write(symbol, trial.mask)


def search_as_original(symbol: Any, shapes: Any) -> tuple[list[list[int]], Any]:
    """Return the trials of the original's search, (threshold, MB), and its plan, without rules."""
    graph = forward(symbol, shapes)
    training, trials = training_graph(graph), [*chen2016.search(graph, marks.read_hints(graph))]
    costs = [pool(training, trial.mask).planned_bytes >> 20 for trial in trials]
    planned = marks.write(symbol, trials[costs.index(min(costs))].mask)
    return [[trial.threshold, cost] for trial, cost in zip(trials, costs)], planned


def as_module(symbol: Any, shapes: Any) -> dict[str, str]:
    """Return the gradients that Module asks for."""
    return {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}


def module_plan(symbol: Any, shapes: Any, **options: Any) -> memonger.Plan:
    """Return the plan for a network that is trained by Module."""
    return memonger.plan(
        symbol, shapes, grad_req=as_module(symbol, shapes), **{"how": "marks", **options}
    )


def is_trainable(symbol: Any, shapes: Any) -> bool:
    """Whether MXNet itself can train the network, which it cannot with some slices of blocks."""
    try:
        return bool(memonger.check(symbol, symbol, shapes, 1))
    except memonger.MemongerError:
        return False


def assert_alike(symbol: Any, planned: Any, shapes: Any, **options: Any) -> None:
    """Check that both train to the same bits."""
    report = memonger.check(symbol, planned, shapes, **options)
    assert report, str(report)


def assert_bound(replayed: Any, executor: Any) -> None:
    """Check that the replay is what MXNet has bound: its operators in order, and its pool in MB."""
    ops = [replayed.training.ops[row] for row in replayed.ran.order]
    nodes = read_debug_str(executor.debug_str())[1]
    assert [op for op in ops if op != "null"] == [node["op"] for node in nodes]
    assert replayed.planned_bytes >> 20 == read_planned_mb(executor)


def plan_of(network: Any, how: str, **options: Any) -> memonger.Plan:
    """Return the plan of what ``network.build()`` makes, by marks or by a schedule."""
    symbol, shapes = network.build()
    return module_plan(symbol, shapes, patience=0.02, **HOWS[how], **options)


def png_size(file: Path) -> list[int]:
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return [int.from_bytes(head[k : k + 4], "big") for k in (16, 20)]
