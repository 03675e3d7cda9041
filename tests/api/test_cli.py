"""The command ``memonger``: figures, JSON, exit status, mistakes in one line, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger import cli

import networks
from planned import ROOT, marked, run_python

pytestmark = pytest.mark.python_differs

MB = 2**20
NOTHING = "memonger: interrupted before anything was found"
SHAPES = ("--shape", "data=4096,64", "--shape", "label=4096,64")


@pytest.fixture
def net(tmp_path: Path) -> tuple[Any, Any, str]:
    """A network, its shapes, and the file that it is in."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    file = tmp_path / "net-symbol.json"
    symbol.save(str(file))
    return symbol, shapes, str(file)


def run(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return (status, *capsys.readouterr())


def figures(capsys: Any, *arguments: Any) -> Any:
    status, printed, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(printed)


def test_a_planned_file_is_the_plan(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, shapes, file = net
    out, picture = tmp_path / "planned-symbol.json", tmp_path / "plan.png"
    status, printed, _ = run(capsys, "plan", file, *SHAPES, "-o", out, "--plot", picture)
    plan = memonger.plan(symbol, shapes)
    plan = dataclasses.replace(plan, added_time=plan.predict_time())
    assert status == 0 and printed == str(plan) + "\n" and "as predicted" in printed
    assert marked(mx.sym.load(str(out))) == marked(plan.symbol)
    assert picture.read_bytes()[1:4] == b"PNG"


PLAIN = """
import sys, numpy
numpy.bool, sys.modules["memonger"] = bool, None  # nothing can import it
import mxnet as mx

net, ones = mx.sym.load(%r), numpy.ones((4096, 64), "float32")
mod = mx.mod.Module(net, label_names=["label"])
mod.fit(mx.io.NDArrayIter(ones, ones, 4096, label_name="label"), num_epoch=1, eval_metric="mse")
executor = net.simple_bind(mx.cpu(), data=(4096, 64), label=(4096, 64))
print(executor.debug_str()[-200:])
"""


def test_plain_mxnet_trains_a_planned_file(net: Any, capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "planned-symbol.json"
    told = figures(capsys, "plan", net[2], *SHAPES, "-o", out)
    _, trained, _ = ended(started("-c", PLAIN % str(out), path=tmp_path))
    (total,) = re.findall(r"Total (\d+) MB allocated", trained)
    assert int(total) == told["counted_bytes"] // MB


def test_cost_and_explain(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    status, printed, _ = run(capsys, "cost", file, *SHAPES)
    pool = memonger.pool_bytes(symbol, shapes=shapes)
    assert status == 0 and f"pool     {pool / MB:.1f} MB" in printed
    told = figures(capsys, "cost", file, *SHAPES)
    assert told == {"pool_bytes": pool, "peak_bytes": 34 * MB, "exact": True}
    status, printed, _ = run(capsys, "explain", file, *SHAPES)
    assert status == 0 and printed == str(memonger.explain(symbol, shapes)) + "\n"
    told = figures(capsys, "explain", file, *SHAPES, "--plan")["tensors"]
    found = memonger.plan(symbol, shapes).explain()
    assert [t["name"] for t in told] == [t.name for t in found.tensors]


def test_a_budget(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    asked = ("plan", file, *SHAPES, "--budget")
    for text, budget in (("60%", "60%"), ("0.6", 0.6), (str(24 * MB), 24 * MB), ("24MiB", 24 * MB)):
        told, plan = figures(capsys, *asked, text), memonger.plan(symbol, shapes, budget=budget)
        assert told["pool_bytes"] == plan.pool_bytes < plan.unplanned_bytes
        assert told["added_time"] == plan.added_time and plan.recomputed
    of = ("--budget-of", "device", "--optimizer", "sgd,momentum=0.9")
    given: Any = {"budget_of": "device", "optimizer": ("sgd", {"momentum": 0.9})}
    plan = memonger.plan(symbol, shapes, budget="60%", **given)
    assert figures(capsys, *asked, "60%", *of)["device_bytes"] == plan.device_bytes
    told = figures(capsys, *asked, "30%", "--how", "schedule", "--work", "3")
    assert told["recomputed_flops"] <= 2 and told["schedule"]
    assert told["pool_bytes"] <= 0.3 * told["unplanned_bytes"]
    status, printed, error = run(capsys, *asked, "1MB")
    assert status == 1 and not printed and len(error.splitlines()) == 1
    assert "the smallest needs" in error and "No plan can do with less than" in error


def test_frontier(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, shapes, file = net
    picture = tmp_path / "frontier.png"
    asked = ("frontier", file, *SHAPES, "--points", "5")
    status, printed, _ = run(capsys, *asked, "--plot", picture)
    plans = memonger.frontier(symbol, shapes, points=5)
    assert status == 0 and printed == str(plans) + "\n"
    assert picture.read_bytes()[1:4] == b"PNG"
    scheduled = memonger.frontier(symbol, shapes, how="schedule", points=5)
    for found, more in ((plans, ()), (scheduled, ("--how", "schedule"))):
        told = figures(capsys, *asked, *more)
        assert [p["pool_bytes"] for p in told] == [p.pool_bytes for p in found]
    assert scheduled[-1].pool_bytes != plans[-1].pool_bytes


def test_batch(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, _, file = net
    out = tmp_path / "planned-symbol.json"
    shapes = ("--shape", "data=N,64", "--shape", "label=N,64")
    asked = ("batch", file, *shapes, "--budget", "10MB")
    told = figures(capsys, *asked, "-o", out)
    found = memonger.largest_batch(symbol, {"data": (None, 64), "label": (None, 64)}, "10MB")
    assert (told["batch"], told["unplanned_batch"]) == found[::2]
    assert told["batch"] > told["unplanned_batch"] > 0
    assert marked(mx.sym.load(str(out))) == marked(found.plan.symbol)
    status, printed, _ = run(capsys, *asked)
    assert printed.startswith(
        f"a batch of {found.batch} fits with a plan, of {found.unplanned_batch} without"
    )
    status, _, error = run(capsys, "batch", file, *shapes, "--budget", "1kB")
    assert status == 1 and "not even a batch of 1 fits" in error


def test_check(net: Any, capsys: Any, tmp_path: Path) -> None:
    """Equal: 0. A network with other results: 1."""
    symbol, shapes, file = net
    planned, other = tmp_path / "planned-symbol.json", tmp_path / "other-symbol.json"
    memonger.search_plan(symbol, shapes=shapes).save(str(planned))
    graph = json.loads(symbol.tojson())
    next(n for n in graph["nodes"] if n["name"] == "tanh3")["attrs"]["act_type"] = "sigmoid"
    other.write_text(json.dumps(graph))
    small = ("--shape", "data=4,64", "--shape", "label=4,64")
    status, printed, _ = run(capsys, "check", file, planned, *small)
    assert status == 0 and printed.startswith("equal:")
    status, printed, _ = run(capsys, "check", file, other, *small, "--json")
    assert status == 1 and json.loads(printed)["equal"] is False
    assert json.loads(printed)["differences"][0]["kind"] == "output"


MISTAKES = [
    ("cost nowhere.json --shape data=1", "no file 'nowhere.json'"),
    ("plan {net} --shape data", "written as data=32,3,224,224"),
    ("plan {net} --shape data=4,x", "whole numbers"),
    ("plan {net} --shape data=N,64", "shape (None, 64) holds None; every size"),
    ("cost {net} --shape data=²,64", "whole numbers"),
    (f"cost {{net}} --shape data={'9' * 5000},64", "whole numbers"),
    ("cost {net} --shape data=4,64 --shape data=4,64", "data is given twice"),
    ("cost {net} --shape data=4,64 --type data", "written as data=float16"),
    ("cost {net} --type data=float16 --type data=int8", "data is given twice"),
    ("cost {net} --shape data=4,64 --ctx tpu", "ctx must be a device such as"),
    ("cost {net} --ctx gpu(99999999999)", "not 'gpu(99999999999)'"),
    ("cost {net} --shape data=99999999999,64", "2**31 - 1 elements"),
    ("plot {net}", "invalid choice"),
    ("plan {net} --shape data=4096,64 --how schedule -o {folder}/x.json", "cannot be saved"),
    ("explain {net} --shape data=4,64 --budget-of device", "--budget-of is for a plan; give"),
    ("explain {net} --shape data=4,64 --measure", "--measure is for a plan"),
    ("batch {net} --shape data=N,64", "--budget"),
    ("plan {net} --budget 60% --optimizer sgd,momentum", "written as sgd,momentum=0.9"),
    ("plan {net} --shape data=4,64 --shape label=5,64", "do not fit"),
]

#: What is seen before the search is begun.
PLACES = [
    ("plan {net} --shape data=4096,64 -o {folder}/none/x.json", "there is no folder"),
    ("batch {net} --shape data=N,64 --budget 1MB -o .", "it is a folder"),
    ("plan {net} --shape data=4,64 --plot {folder}/x.xyz", "must end in .png"),
    ("frontier {net} --shape data=4,64 --plot ''", "must end in .png"),
    ("plan {net} -o {folder}/x.png --plot {folder}/../{name}/x.png", "are the same file"),
]


@pytest.mark.parametrize(("command", "said"), [*MISTAKES, *PLACES], ids=lambda text: text[:70])
def test_a_mistake_is_one_line(
    command: str, said: str, net: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (command, said) in PLACES:
        for search in ("plan", "frontier", "largest_batch"):
            monkeypatch.setattr(memonger, search, None)
    given = command.format(net=net[2], folder=tmp_path, name=tmp_path.name)
    status, printed, error = run(capsys, *shlex.split(given))
    assert status == 2 and not printed
    lines = [line for line in error.splitlines() if line.startswith("memonger")]
    assert len(lines) == 1 and said in lines[0], error
    assert "Traceback" not in error


def test_the_faster_of_both(net: Any, capsys: Any, tmp_path: Path) -> None:
    """By ``--how auto``; where that is a schedule it is told, and not saved."""
    symbol, shapes, file = net
    out = tmp_path / "planned-symbol.json"
    asked = ("plan", file, *SHAPES, "--budget", "60%", "--how", "auto", "-o", out, "--json")
    status, printed, error = run(capsys, *asked)
    told, plan = json.loads(printed), memonger.plan(symbol, shapes, budget="60%", how="auto")
    assert told["pool_bytes"] == plan.pool_bytes and told["schedule"]
    assert status == 2 and "cannot be saved" in error and not out.exists()


def test_ctrl_c_after_the_search(
    net: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it found is told and written."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "planned-symbol.json"
    monkeypatch.setattr(memonger.Plan, "predict_time", interrupted)
    status, printed, _ = run(capsys, "plan", net[2], *SHAPES, "-o", out)
    assert status == 0 and printed.startswith("before") and "as predicted" not in printed
    assert marked(mx.sym.load(str(out)))
    out.unlink()
    monkeypatch.setattr(memonger, "check", interrupted)
    status, printed, error = run(capsys, "plan", net[2], *SHAPES, "-o", out, "--check")
    assert status == 2 and printed.startswith("before") and "before the plan was checked" in error
    assert marked(mx.sym.load(str(out)))


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_plan_and_check(how: str, net: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of one device is trained; a difference is status 1."""
    asked = ("plan", net[2], "--shape", "data=64,64", "--shape", "label=64,64", "--devices", "2")
    status, printed, _ = run(capsys, *asked, "--how", how, "--check")
    assert status == 0 and re.search(r"^check      equal: \d+ arrays in 3 steps", printed, re.M)
    found = memonger.CheckReport(1, 1, (), ("softmax_output",), True)
    given = {}

    def check(net: Any, planned: Any, shapes: Any, **options: Any) -> memonger.CheckReport:
        given.update(shapes)
        return found

    monkeypatch.setattr(memonger, "check", check)
    status, printed, _ = run(capsys, *asked, "--how", how, "--check", "--json")
    assert status == 1 and json.loads(printed)["check"]["not_finite"] == ["softmax_output"]
    assert given == {"data": (32, 64), "label": (32, 64)}


def test_small_networks(capsys: Any, tmp_path: Path) -> None:
    """Without operators, and with sizes below one MB."""
    file = str(tmp_path / "net-symbol.json")
    mx.sym.Variable("x").save(file)
    for verb in ("cost", "explain"):
        status, printed, _ = run(capsys, verb, file, "--shape", "x=2,3")
        assert status == 0 and printed.startswith("the network has no operators")
    networks.chain(2, hidden=8, batch=4)[0].save(file)
    pool = memonger.pool_bytes(mx.sym.load(file), data=(4, 8), label=(4, 8))
    for verb in ("cost", "explain", "plan"):
        status, printed, _ = run(capsys, verb, file, "--shape", "data=4,8")
        assert status == 0 and f"{pool / 1024:.1f} KB" in printed and " MB" not in printed


def test_what_a_custom_operator_says(capsys: Any) -> None:
    """In the message, not on stdout; and without a trace."""

    @mx.operator.register("tests_bad_shape")
    class Bad(mx.operator.CustomOpProp):  # type: ignore[misc, name-defined, unused-ignore]
        def infer_shape(self, in_shape: Any) -> Any:
            raise ValueError(f"two inputs are wanted, \\1 not {len(in_shape)}")

    bad = mx.sym.Custom(mx.sym.Variable("data"), op_type="tests_bad_shape", name="mine")
    with pytest.raises(memonger.MemongerError) as caught:
        memonger.plan(mx.sym.MakeLoss(bad), data=(2, 3))
    message = str(caught.value)
    assert message.endswith("ValueError: two inputs are wanted, \\1 not 1") and "'mine'" in message
    assert "Traceback" not in message and not capsys.readouterr().out


def started(*command: str, path: Path) -> subprocess.Popen[str]:
    """A process that finds stand-ins for what it imports at ``path``."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(path), str(ROOT)]))
    command = (sys.executable, "-W", "ignore", *command)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its status, what it printed, and what it said."""
    printed, error = process.communicate(timeout=120)
    return process.returncode, printed, error


LIGHT = """
import sys
from memonger import cli
try:
    cli.main(sys.argv[1:])
finally:
    heavy = {"mxnet", "numpy", "tqdm", "matplotlib"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("asked", [("--version",), ("--help",), ("plan", "--help"), ()])
def test_help_imports_nothing_heavy(asked: Any, tmp_path: Path) -> None:
    """And needs no MXNet."""
    (tmp_path / "mxnet.py").write_text("raise ImportError('not here')")
    status, _, error = ended(started("-c", LIGHT, *asked, path=tmp_path))
    assert status == (0 if asked else 2), error
    assert asked or error.startswith("memonger: the following arguments are required: VERB")


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    x = mx.sym.FullyConnected(mx.sym.Variable("данные"), num_hidden=3)
    file = str(tmp_path / "сеть-symbol.json")
    mx.sym.MakeLoss(x, name="слой").save(file)
    command = ("-W", "ignore", "-m", "memonger", "explain", file, "--shape", "данные=4,4")
    done = run_python(*command, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\\u0441\\u043b" in done.stdout, done.stderr


@pytest.mark.parametrize("verb", sorted(cli.EXAMPLES))
def test_help_has_an_example(verb: str, capsys: Any) -> None:
    """And its arguments are understood."""
    status, printed, _ = run(capsys, verb, "--help")
    assert status == 0 and cli.EXAMPLES[verb] in printed
    words = shlex.split(cli.EXAMPLES[verb])
    assert words[0] == "memonger"
    status, printed, error = run(capsys, *words[1:])
    assert status == 2 and "there is no file" in error and not printed


def test_a_reader_who_has_seen_enough(net: Any) -> None:
    """As with ``| head -1``: no traceback."""
    running = started("-m", "memonger", "explain", net[2], *SHAPES, path=Path())
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    error = running.stderr.read()
    assert running.wait(120) == 0 and "Traceback" not in error and "BrokenPipe" not in error


CTRL_C = """
import os, signal
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
"""
LOST = "try: ctrl_c()\nexcept BaseException: pass"
NOT_THERE = "\nraise ModuleNotFoundError('none', name='mxnet')"
#: A module, what stands in for it, and what is said.
STAND_INS = {
    "no MXNet": ("mxnet", NOT_THERE, "is not installed"),
    "NumPy 2": ("numpy", "__version__ = '2.1.0'", "NumPy 2.1.0; pip install 'numpy<2'"),
    "Ctrl-C before main": ("argparse", "ctrl_c()", NOTHING),
    "Ctrl-C while a verb imports": ("mxnet", "ctrl_c()", NOTHING),
    "Ctrl-C in code that exec runs": ("mxnet", "exec('ctrl_c()')", NOTHING),
    "Ctrl-C where it would be lost": ("mxnet", LOST + NOT_THERE, NOTHING),
    "Ctrl-C at exit": ("mxnet", "import atexit; atexit.register(ctrl_c)" + NOT_THERE, "installed"),
}
#: What the installed script does.
MODULE, NAME = re.findall(r'memonger = "([\w.]+):(\w+)"', (ROOT / "pyproject.toml").read_text())[0]
SCRIPT = ("-c", f"import sys; from {MODULE} import {NAME} as f; sys.exit(f())")


@pytest.mark.parametrize("case", STAND_INS)
@pytest.mark.parametrize("command", [("-m", "memonger"), SCRIPT], ids=["-m memonger", "script"])
def test_one_line_and_status_2(command: Any, case: str, net: Any, tmp_path: Path) -> None:
    module, content, said = STAND_INS[case]
    (tmp_path / (module + ".py")).write_text(CTRL_C + content)
    status, printed, error = ended(started(*command, "cost", net[2], *SHAPES, path=tmp_path))
    assert status == 2 and not printed
    assert len(error.splitlines()) == 1 and said in error, error
