"""The command ``memonger``: figures of the package, JSON, exit status, mistakes in one line."""

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
from planned import marked

pytestmark = pytest.mark.python_differs

MB = 2**20
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
numpy.bool = bool

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "memonger":
            raise ImportError("memonger is not installed")

sys.meta_path.insert(0, NotInstalled())
import mxnet as mx

net = mx.sym.load(%r)
data = mx.io.NDArrayIter(
    numpy.ones((4096, 64), "float32"), numpy.ones((4096, 64), "float32"), 4096, label_name="label"
)
mod = mx.mod.Module(net, label_names=["label"])
mod.fit(data, num_epoch=1, eval_metric="mse")
try:
    import memonger
except ImportError:
    pass
else:
    raise AssertionError("memonger is here")
executor = net.simple_bind(mx.cpu(), data=(4096, 64), label=(4096, 64))
print(executor.debug_str()[-200:])
"""


def test_plain_mxnet_trains_a_planned_file(net: Any, capsys: Any, tmp_path: Path) -> None:
    """A process in which memonger cannot be imported trains it, in the memory that was planned."""
    _, _, file = net
    out = tmp_path / "planned-symbol.json"
    status, printed, _ = run(capsys, "plan", file, *SHAPES, "-o", out, "--json")
    assert status == 0
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN % str(out)],
        env=environment,
        cwd=str(tmp_path),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    (total,) = re.findall(r"Total (\d+) MB allocated", done.stdout.decode())
    assert int(total) == json.loads(printed)["counted_bytes"] // MB


def test_cost(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    status, printed, _ = run(capsys, "cost", file, *SHAPES)
    pool = memonger.pool_bytes(symbol, shapes=shapes)
    assert status == 0 and f"pool     {pool / MB:.1f} MB" in printed
    status, printed, _ = run(capsys, "cost", file, *SHAPES, "--json")
    assert json.loads(printed) == {"pool_bytes": pool, "peak_bytes": 34 * MB, "exact": True}


def test_a_budget(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    for text, budget in (("60%", "60%"), ("0.6", 0.6), (str(24 * MB), 24 * MB), ("24MiB", 24 * MB)):
        status, printed, _ = run(capsys, "plan", file, *SHAPES, "--budget", text, "--json")
        told = json.loads(printed)
        plan = memonger.plan(symbol, shapes, budget=budget)
        assert status == 0 and told["pool_bytes"] == plan.pool_bytes < plan.unplanned_bytes
        assert told["added_time"] == plan.added_time and plan.recomputed
    of = ("--budget-of", "device", "--optimizer", "sgd,momentum=0.9")
    status, printed, _ = run(capsys, "plan", file, *SHAPES, "--budget", "60%", *of, "--json")
    asked: Any = {"budget_of": "device", "optimizer": ("sgd", {"momentum": 0.9})}
    plan = memonger.plan(symbol, shapes, budget="60%", **asked)
    assert json.loads(printed)["device_bytes"] == plan.device_bytes
    schedule = ("--how", "schedule", "--work", "3", "--budget", "30%")
    status, printed, _ = run(capsys, "plan", file, *SHAPES, *schedule, "--json")
    told = json.loads(printed)
    assert status == 0 and told["recomputed_flops"] <= 2 and told["schedule"]
    assert told["pool_bytes"] <= 0.3 * told["unplanned_bytes"]


def test_a_budget_that_cannot_be_met(net: Any, capsys: Any) -> None:
    """The answer is no: 1, and what is possible in one line."""
    status, printed, error = run(capsys, "plan", net[2], *SHAPES, "--budget", "1MB")
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
    status, printed, _ = run(capsys, *asked, "--json")
    assert [p["pool_bytes"] for p in json.loads(printed)] == [p.pool_bytes for p in plans]
    status, printed, _ = run(capsys, *asked, "--how", "schedule", "--json")
    scheduled = memonger.frontier(symbol, shapes, how="schedule", points=5)
    assert [p["pool_bytes"] for p in json.loads(printed)] == [p.pool_bytes for p in scheduled]
    assert scheduled[-1].pool_bytes != plans[-1].pool_bytes


def test_batch(net: Any, capsys: Any, tmp_path: Path) -> None:
    symbol, _, file = net
    out = tmp_path / "planned-symbol.json"
    shapes = ("--shape", "data=N,64", "--shape", "label=N,64")
    asked = ("batch", file, *shapes, "--budget", "10MB")
    status, printed, _ = run(capsys, *asked, "--json", "-o", out)
    told = json.loads(printed)
    found = memonger.largest_batch(symbol, {"data": (None, 64), "label": (None, 64)}, "10MB")
    assert status == 0 and (told["batch"], told["unplanned_batch"]) == found[::2]
    assert told["batch"] > told["unplanned_batch"] > 0
    assert marked(mx.sym.load(str(out))) == marked(found.plan.symbol)
    status, printed, _ = run(capsys, *asked)
    assert printed.startswith("a batch of %d fits with a plan, of %d without" % found[::2])
    status, _, error = run(capsys, "batch", file, *shapes, "--budget", "1kB")
    assert status == 1 and "not even a batch of one" in error


def test_explain(net: Any, capsys: Any) -> None:
    symbol, shapes, file = net
    status, printed, _ = run(capsys, "explain", file, *SHAPES)
    assert status == 0 and printed == str(memonger.explain(symbol, shapes)) + "\n"
    status, printed, _ = run(capsys, "explain", file, *SHAPES, "--plan", "--json")
    found = memonger.plan(symbol, shapes).explain()
    assert [t["name"] for t in json.loads(printed)["tensors"]] == [t.name for t in found.tensors]


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


MISTAKES = {
    "no file": ("cost nowhere.json --shape data=1", "no file 'nowhere.json'"),
    "no network": ("cost {folder}/text.json --shape data=1", "holds no network"),
    "a missing shape": ("plan {net}", "'data'"),
    "an unknown input": ("plan {net} --shape daat=4,64", "did you mean 'data'"),
    "no shape": ("plan {net} --shape data", "written as data=32,3,224,224"),
    "no number": ("plan {net} --shape data=4,x", "whole numbers"),
    "no type": ("cost {net} --shape data=4,64 --type data", "written as data=float16"),
    "no device": ("cost {net} --shape data=4,64 --device tpu", "'tpu' is no device"),
    "no verb": ("plot {net}", "invalid choice"),
    "a schedule's file": (
        "plan {net} --shape data=4096,64 --how schedule -o {folder}/x.json",
        "cannot be saved",
    ),
    "no folder": ("plan {net} --shape data=4096,64 -o {folder}/none/x.json", "there is no folder"),
    "a budget of no plan": (
        "explain {net} --shape data=4,64 --budget-of device",
        "--budget-of is of a plan; give --plan too",
    ),
    "times of no plan": ("explain {net} --shape data=4,64 --measure", "--measure is of a plan"),
    "no batch": ("batch {net} --shape data=4,64 --budget 1MB", "None where the batch goes"),
    "a batch elsewhere": ("plan {net} --shape data=N,64", "whole numbers"),
    "no budget": ("batch {net} --shape data=N,64", "--budget"),
    "an unknown unit": ("plan {net} --shape data=4,64 --budget 6XB", "no unit 'XB'"),
    "a share of no batch": ("batch {net} --shape data=N,64 --budget 60%", "budget in bytes"),
    "no optimizer": (
        "plan {net} --shape data=4,64 --budget 60% --budget-of device --optimizer adm",
        "cannot be made",
    ),
    "no parameters": (
        "plan {net} --shape data=4,64 --budget 60% --optimizer sgd,momentum",
        "written as sgd,momentum=0.9",
    ),
    "no picture's folder": (
        "frontier {net} --shape data=4096,64 --plot {folder}/none/x.png",
        "there is no folder",
    ),
    "shapes that do not fit": ("plan {net} --shape data=4,64 --shape label=5,64", "do not fit"),
    "work of marks": ("plan {net} --shape data=4,64 --work 1.5", "how='schedule' can"),
    "a shape twice": ("cost {net} --shape data=4,64 --shape data=4,64", "data is given twice"),
    "a type twice": ("cost {net} --type data=float16 --type data=int8", "data is given twice"),
    "a small number": ("cost {net} --shape data=²,64", "whole numbers"),
    "a long number": ("cost {net} --shape data=%s,64" % ("9" * 5000), "whole numbers"),
    "more than can be counted": ("cost {net} --shape data=99999999999,64", "2**31 - 1 elements"),
    "a product that is": ("cost {net} --shape data=2147483647,2", "2**31 - 1 elements"),
    "no size": ("explain {net} --shape data=0,64", "at least 1"),
    "no GPU of this number": ("cost {net} --device gpu(99999999999)", "is no device"),
    "auto without a budget": ("plan {net} --shape data=4,64 --how auto", "give a budget"),
}

#: What is seen before the search is begun.
PLACES = {
    "no name": ("plan {net} --shape data=4096,64 -o ''", "it is no name of a file"),
    "a folder": ("plan {net} --shape data=4096,64 -o {folder}", "it is a folder"),
    "here": ("batch {net} --shape data=N,64 --budget 1MB -o .", "it is a folder"),
    "no picture": ("plan {net} --shape data=4,64 --plot {folder}/x.xyz", "must end in .png"),
    "no ending": ("frontier {net} --shape data=4,64 --plot {folder}/x", "must end in .png"),
    "no name of a picture": ("frontier {net} --shape data=4,64 --plot ''", "must end in .png"),
    "one file twice": (
        "plan {net} --shape data=4,64 -o {folder}/x.png --plot {folder}/../{name}/x.png",
        "are the same file",
    ),
}


@pytest.mark.parametrize("case", [*MISTAKES, *PLACES])
def test_a_mistake_is_one_line(
    case: str, net: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case in PLACES:
        for search in ("plan", "frontier", "largest_batch"):
            monkeypatch.delattr(memonger, search, raising=False)
            monkeypatch.setattr(memonger, search, None)
    (tmp_path / "text.json").write_text("text")
    command, said = {**MISTAKES, **PLACES}[case]
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
    asked = ("plan", file, *SHAPES, "--budget", "60%", "--how", "auto", "--json")
    status, printed, _ = run(capsys, *asked)
    plan = memonger.plan(symbol, shapes, budget="60%", how="auto")
    assert status == 0 and json.loads(printed)["pool_bytes"] == plan.pool_bytes
    assert (json.loads(printed)["schedule"] is None) == (plan.schedule is None)
    status, printed, error = run(capsys, *asked, "-o", out)
    assert json.loads(printed)["pool_bytes"] == plan.pool_bytes
    if plan.schedule is None:
        assert status == 0 and marked(mx.sym.load(str(out))) == marked(plan.symbol)
    else:
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


def test_a_network_without_operators(capsys: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "net-symbol.json")
    mx.sym.Variable("x").save(file)
    for verb in ("cost", "explain"):
        status, printed, _ = run(capsys, verb, file, "--shape", "x=2,3")
        assert status == 0 and printed.startswith("the network has no operators")


def test_sizes_below_one_mb(capsys: Any, tmp_path: Path) -> None:
    symbol, _ = networks.chain(2, hidden=8, batch=4)
    file = str(tmp_path / "net-symbol.json")
    symbol.save(file)
    shapes = ("--shape", "data=4,8", "--shape", "label=4,8")
    pool = memonger.pool_bytes(symbol, data=(4, 8), label=(4, 8))
    for verb in ("cost", "explain", "plan"):
        status, printed, _ = run(capsys, verb, file, *shapes)
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


# -- as a process -----------------------------------------------------------------------------

LIGHT = """
import sys
from memonger import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code
heavy = {"mxnet", "numpy", "numba", "tqdm", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


def process(*command: str, path: Path) -> Any:
    """A process that finds stand-ins for what it imports at ``path``."""
    project = Path(memonger.__file__).resolve().parents[1]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(path), str(project)]))
    command = (sys.executable, "-W", "ignore", *command)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("asked", [("--version",), ("--help",), ("plan", "--help"), ()])
def test_help_imports_nothing_heavy(asked: Any, tmp_path: Path) -> None:
    """And needs no MXNet."""
    (tmp_path / "mxnet.py").write_text("raise ImportError('not here')")
    done = process("-c", LIGHT, *asked, path=tmp_path)
    assert done.returncode == (0 if asked else 1), done.stderr
    assert asked or done.stderr.startswith("memonger: the following arguments are required: VERB")


STAND_INS = {
    "no MXNet": ("mxnet", "raise ModuleNotFoundError('none', name='mxnet')", "is not installed"),
    "NumPy 2": ("numpy", "__version__ = '2.1.0'", "cannot be used with NumPy 2.1.0"),
    "Ctrl-C": ("mxnet", "raise KeyboardInterrupt", "interrupted before anything was found"),
}


@pytest.mark.parametrize("case", STAND_INS)
def test_what_cannot_be_imported_is_one_line(case: str, net: Any, tmp_path: Path) -> None:
    module, content, said = STAND_INS[case]
    (tmp_path / "stand-ins" / module).mkdir(parents=True)
    (tmp_path / "stand-ins" / module / "__init__.py").write_text(content)
    command = ("-m", "memonger", "cost", net[2], *SHAPES)
    done = process(*command, path=tmp_path / "stand-ins")
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    x = mx.sym.FullyConnected(mx.sym.Variable("данные"), num_hidden=3)
    file = tmp_path / "сеть-symbol.json"
    mx.sym.MakeLoss(x, name="слой").save(str(file))
    command = (
        "import os, sys; os.environ['PYTHONIOENCODING'] = 'ascii'; "
        "os.execv(sys.executable, [sys.executable, '-W', 'ignore', '-m', 'memonger', "
        "'explain', sys.argv[1], '--shape', 'данные=4,4'])"
    )
    done = process("-c", command, str(file), path=tmp_path)
    assert done.returncode == 0 and "\\u0441\\u043b" in done.stdout, done.stderr


@pytest.mark.parametrize("verb", sorted(cli.EXAMPLES))
def test_help_has_an_example(verb: str, capsys: Any) -> None:
    """And its arguments are understood."""
    status, printed, _ = run(capsys, verb, "--help")
    assert status == 0 and cli.EXAMPLES[verb] in printed
    words = shlex.split(cli.EXAMPLES[verb])
    assert words[0] == "memonger"
    assert cli._parser().parse_args(words[1:]).verb == verb


def test_the_command_line(net: Any) -> None:
    """As a process: status and one line."""
    command = [sys.executable, "-W", "ignore", "-m", "memonger", "cost", net[2]]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert "Traceback" not in done.stderr.decode()
    assert done.stderr.decode().strip().splitlines()[-1].startswith("memonger: ")


def test_a_reader_who_has_seen_enough(net: Any) -> None:
    """As with ``| head -1``: no traceback."""
    command = [sys.executable, "-W", "ignore", "-m", "memonger", "explain", net[2], *SHAPES]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    error = running.stderr.read().decode()
    assert running.wait(120) == 0 and "Traceback" not in error and "BrokenPipe" not in error
