"""The command ``memonger``: figures of the package, JSON, exit status, mistakes in one line."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Tuple

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
def net(tmp_path: Path) -> Tuple[Any, Any, str]:
    """A network, its shapes, and the file that it is in."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    file = tmp_path / "net-symbol.json"
    symbol.save(str(file))
    return symbol, shapes, str(file)


def run(capsys: Any, *arguments: Any) -> Tuple[int, str, str]:
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
    assert status == 0 and printed == str(plan) + "\n"
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
    assert status == 0 and "pool     %.1f MB" % (pool / MB) in printed
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
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case: str, net: Any, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("text")
    command, said = MISTAKES[case]
    given = command.format(net=net[2], folder=tmp_path)
    status, printed, error = run(capsys, *shlex.split(given))
    assert status == 2 and not printed
    lines = [line for line in error.splitlines() if line.startswith("memonger")]
    assert len(lines) == 1 and said in lines[0], error
    assert "Traceback" not in error


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
    command = [sys.executable, "-W", "ignore", "-m", "memonger.cli", "cost", net[2]]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    assert "Traceback" not in done.stderr.decode()
    assert done.stderr.decode().strip().splitlines()[-1].startswith("memonger: ")


def test_a_reader_who_has_seen_enough(net: Any) -> None:
    """As with ``| head -1``: no traceback."""
    command = [sys.executable, "-W", "ignore", "-m", "memonger.cli", "explain", net[2], *SHAPES]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    error = running.stderr.read().decode()
    assert running.wait(120) == 0 and "Traceback" not in error and "BrokenPipe" not in error
