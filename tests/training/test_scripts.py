"""The examples and the benchmarks as a user runs them, on small networks: their figures fit."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from pathlib import Path
from typing import Any, Callable

import pytest

import memonger
import networks
from planned import ROOT, forward, png_size, python_path, run_python

MB = 2**20


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


# -- examples -----------------------------------------------------------------------------------


def run(script: str, *options: str) -> tuple[str, str]:
    """Run an example from the project root; return what it printed, and its log."""
    done = run_python("examples/" + script, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def costs(printed: str) -> list[float]:
    """Return the MB before and after planning."""
    return numbers(r"(?:Old|New) feature map cost=(\d+) MB", printed)


@pytest.mark.slow
def test_example_resnet_has_the_figures_of_the_original() -> None:
    printed, log = run("example_resnet.py", "--planner", "chen2016")
    assert costs(printed) == [14332, 2520]
    assert "Search threshold=576 MiB, cost=2520 MiB" in log
    printed, log = run("example_resnet.py")
    old, new = costs(printed)
    assert old == 14332 and new <= 2520
    (seconds,) = numbers(r"Search took ([\d.]+) s", printed)
    assert seconds < 60 and "INFO:memonger:" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "example_resnet.py --layers 1,1,1,1 --batch 4 --image 64",
        "example_lstm.py --layers 2 --steps 12 --hidden 64 --batch 16",
    ],
)
def test_examples_train_in_the_planned_network(command: str) -> None:
    printed, log = run(*command.split(), "--train", "3")
    old, new = costs(printed)
    assert new < old
    losses = numbers(r"Batch \d: loss=([\d.]+), ", printed)
    assert len(losses) == 3 and losses[2] < losses[0]  # it is always the same batch
    (peak,) = numbers(r"Peak resident memory=(\d+) MB", printed)
    assert peak > 50
    assert "lstm" not in command or "your marks" in log  # it is cut by time steps


#: Without a plan; of memonger it takes only that MXNet can be imported.
PLAIN = "import memonger, runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"


def digits_learnt(*command: str) -> tuple[str, float, str]:
    """Return what a script ends with, its peak memory, and what memonger tells."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    done = run_python(*command, PYTHONPATH=python_path())
    assert done.returncode == 0, done.stderr
    ended, memory = done.stdout.splitlines()
    (peak,) = numbers(r"^peak resident memory (\d+) MB$", memory)
    return ended, peak, done.stderr


def test_a_plain_script_is_planned() -> None:
    options = "--blocks 3 --filters 8 --batch 300 --epochs 1"
    command = ["examples/train_gluon.py", *options.split()]
    expected, _, log = digits_learnt("-c", PLAIN, *command)
    assert "memonger: " not in log and re.match(r"accuracy [\d.]+, parameters \w{16}$", expected)
    learnt, _, log = digits_learnt("-m", "memonger", "run", "--how=auto", *command)
    assert learnt == expected and "memonger: 1 planned, " in log and " MiB -> " in log


@pytest.mark.slow
def test_digits_are_learnt_in_less_resident_memory() -> None:
    script = "examples/train_digits.py"
    expected, peak, _ = digits_learnt("-c", PLAIN, script)
    learnt, planned_peak, _ = digits_learnt("-m", "memonger", "run", script)
    assert learnt == expected
    assert numbers(r"accuracy ([\d.]+)", learnt)[0] > 0.8 and planned_peak < peak - 10


@pytest.mark.slow
def test_a_deep_network_trains_within_its_budget() -> None:
    options = "--layers 40 --batch 512 --steps 30 --budget 0.7"
    printed, _ = run("example_log_memory.py", *options.split())
    unplanned, marks = numbers(r"(?:no plan|smallest marks) +([\d.]+) MB", printed)
    (schedule,) = numbers(r"schedule +([\d.]+) MB", printed)
    (accuracy,) = numbers(r"accuracy after 30 steps: ([\d.]+)", printed)
    assert schedule <= 0.7 < marks < unplanned / 4 and accuracy > 0.5  # of three arms


# -- benchmarks ---------------------------------------------------------------------------------

#: Runs the script of a benchmark, which knows a small network more, ``own``.
BENCHMARK = """
import importlib.util, sys
sys.path.append("benchmarks")
_, name, *arguments = sys.argv
spec = importlib.util.spec_from_file_location("benchmark", f"benchmarks/{name}.py")
script = sys.modules["benchmark"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
own = {"own": lambda: script.networks.chain(48, 32, 8192)}
script.NETWORKS = {**getattr(script, "NETWORKS", {}), **own}
sys.exit(script.main(arguments))
"""
SMALL = networks.resnet((1, 2, 1, 1), batch=16, image=96)


def check_memory(figures: Any) -> None:
    broken, small = figures["networks"]
    assert "failed" in broken and small["none"] == memonger.get_cost(SMALL[0], shapes=SMALL[1])
    assert small["ours"] == memonger.plan(*SMALL, patience=0.02, how="marks").counted_bytes // MB
    assert small["ours"] <= small["ruled"] <= small["original"] < small["none"]


def check_schedules(figures: Any) -> None:
    for row in figures if isinstance(figures, list) else figures["networks"]:
        two, endless = row["schedules"]
        marks = row["marks"] if isinstance(figures, list) else row["marks"]["mb"]
        assert endless["mb"] <= two["mb"] < marks < row["none"] and two["work"] <= 2
        assert two.get("bound_as_predicted", True) and endless.get("bound_as_predicted", True)


def check_planning(figures: Any) -> None:
    (row,) = figures["networks"]
    assert row["schedule MB"] <= row["marks MB"] < row["no plan MB"]
    assert 0.1 < row["import mxnet"] < row["nine binds"]


def check_steps(figures: Any) -> None:
    none, marks, schedule = figures[0]["rows"]
    assert none["ratio"] == 1 < schedule["work"] <= 2
    for row in (none, marks, schedule):  # the allocator adds a little
        assert 0.8 * row["predicted_mb"] < row["peak_mb"] < row["predicted_mb"] + 40


def check_times(figures: Any) -> None:
    rows = {(row["plan"], row["budget"]): row for row in figures[0]["rows"]}
    for how in ("marks", "schedule"):
        assert rows[how, "100 %"]["predicted"] == 0 < rows[how, "60 %"]["predicted"]
        assert rows[how, "60 %"]["bytes"] <= 0.6 * rows["none", ""]["bytes"]
        assert rows[how, "as original"]["bytes"] <= rows["original", ""]["bytes"]
        assert "measured" not in rows[how, "1 %"]


def check_alternatives(figures: Any) -> None:
    """BatchNorm sees smaller batches, and moves more than once; all else has the same bits."""
    rows = {row["way"]: row for row in figures[0]["rows"]}
    ways = ("schedule, R = 2", "marks", "original's plan", "no plan")
    sizes = [rows[way]["mb"] for way in ways]
    assert sizes == sorted(sizes) and rows["MXNET_BACKWARD_DO_MIRROR=1"]["mb"] < sizes[-1]
    for way, row in rows.items():
        assert (row["gradients"] == row["statistics"] == "same bits") == ("smaller" not in way)


def check_peers(figures: Any) -> None:
    """Twice within the budget, and slower with less of it; the last is refused."""
    for rows in figures["networks"]["own"]["ours"].values():
        large, small, none = rows
        assert all(row["bytes"] <= row["limit"] and row["bound"] for row in (large, small))
        assert 0 <= large["time"] < small["time"] and 0 <= small["again"] <= 2
        assert none["least_bytes"] <= small["bytes"] and "share" not in none


SLOW = pytest.mark.slow
#: A benchmark with its arguments, and what holds of the figures that it writes.
BENCHMARKS = [
    pytest.param("memory --symbols {folder} broken small", check_memory, marks=SLOW),
    pytest.param("memory chain --symbols {folder} --work 2 inf", check_schedules, marks=SLOW),
    pytest.param("depth 12 24 --hidden 32 --batch 512 --work 2 inf", check_schedules, marks=SLOW),
    pytest.param("planning mobilenetv2 --rounds 1", check_planning, marks=SLOW),
    pytest.param("step own --work 2 --rounds 2", check_steps, marks=SLOW),
    pytest.param("budgets tiny --budgets 1.0 0.6 0.01 --rounds 2", check_times, marks=SLOW),
    pytest.param("alternatives tiny --rounds 1", check_alternatives, marks=SLOW),
    pytest.param("peers own --budgets 0.9 0.6 0.01", check_peers, marks=SLOW),
]


@pytest.mark.parametrize(("command", "check"), BENCHMARKS)
def test_a_benchmark_writes_figures_that_fit_and_prints_a_line_of_each(
    command: str, check: Callable[[Any], None], tmp_path: Path
) -> None:
    chain, shapes = networks.chain(depth=32, hidden=32, batch=8192)
    for name, symbol in (("small", SMALL[0]), ("chain", chain), ("broken", chain)):
        symbol.save(str(tmp_path / f"{name}-symbol.json"))
    shapes_of = {"small": SMALL[1], "chain": shapes, "broken": {"label": (8192, 32)}}
    nets = {name: {"shapes": shapes} for name, shapes in shapes_of.items()}
    (tmp_path / "nets.json").write_text(json.dumps(nets))
    words = [*command.format(folder=tmp_path).split(), "--patience", "0.02"]
    out = tmp_path / "out.json"
    done = run_python("-W", "ignore", "-c", BENCHMARK, *words, "--json", str(out))
    assert done.returncode == ("broken" in words), done.stderr
    assert ("shapes of these inputs are needed: 'data'" in done.stderr) == ("broken" in words)
    check(json.loads(out.read_text()))
    assert done.stdout.count("\n| ") > 1


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a benchmark by its name, to run it in this process from the project root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_following_layouts_takes_no_less_memory(benchmark: Any, capsys: Any) -> None:
    benchmark("layouts").main(["--patience", "0.02", "DeepLab"])
    columns = capsys.readouterr().out.splitlines()[-1].split("|")
    unplanned, followed, any_layouts = map(int, columns[2:5])
    assert unplanned > followed >= any_layouts > 0


def test_the_pictures_of_the_documentation_are_drawn(
    benchmark: Any, tmp_path: Path, capsys: Any
) -> None:
    benchmark("pictures").draw(*networks.chain(4, hidden=64, batch=4096), tmp_path)
    for name in ("memory-marks", "memory-schedule", "frontier"):
        assert png_size(tmp_path / (name + ".png")) == [1200, 800]
        assert (ROOT / "docs" / (name + ".png")).is_file()
    assert "added time" in capsys.readouterr().out


def test_memory_against_depth_grows_by_the_logarithm(benchmark: Any, tmp_path: Path) -> None:
    picture, figures = tmp_path / "memory.png", tmp_path / "figures.json"
    options = f"24 48 --hidden 8 --batch 8192 --work 3 inf --plot {picture} --json {figures}"
    assert benchmark("depth").main(options.split()) == 0
    rows = json.loads(figures.read_text())
    sizes = [[row["none"], row["marks"], *(s["mb"] for s in row["schedules"])] for row in rows]
    for size in sizes:
        assert size == sorted(size, reverse=True)
    growth = [large / small for small, large in zip(*sizes)]
    assert growth[0] == pytest.approx(2, rel=0.05) and growth[1] < 1.7 and growth[3] < 1.35
    assert png_size(picture) == [1200, 800]


OPTIONS = {
    "resnet51": "Model resnet51 is not supported",
    "--symbols tests": "there is no *-symbol.json",
    "--symbols tests/golden nothing": "no network nothing; there are lstm-4x16, ",
    "--symbols tests/golden --batch 2": "--batch is of our own networks",
    "--symbols tests/golden --list": "lstm-4x16\nlstm-4x64\n",
    "--list": "example_resnet\nresnet50-v2\n",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_memory_benchmark_understands_its_options_or_tells_why_not(
    options: str, benchmark: Any, capsys: Any
) -> None:
    with contextlib.suppress(SystemExit):
        assert benchmark("memory").main(options.split()) == 0
    assert OPTIONS[options] in "".join(capsys.readouterr())


#: MB of MXNet's own example symbols at batch 32, and millions of parameters as the papers give them
#: (ResNet v2: of v1, which has a few BatchNorms elsewhere).
SIZES = [
    (networks.resnet_v2, 2640, 25.6),
    (lambda: networks.resnet_v2((3, 8, 36, 3)), 5434, 60.2),
    (networks.inception_v3, 3208, 23.8),
    (networks.mobilenet_v2, 2670, 3.5),
]


@pytest.mark.parametrize("build, megabytes, millions", SIZES)
def test_networks_have_the_sizes_of_mxnets_own(build: Any, megabytes: int, millions: float) -> None:
    symbol, shapes = build()
    assert memonger.get_cost(symbol, shapes=shapes) == megabytes
    graph = forward(symbol, shapes)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    count = sum(graph.tensors[a][0].elements for a in parameters)
    assert count / 1e6 == pytest.approx(millions, rel=0.01)
