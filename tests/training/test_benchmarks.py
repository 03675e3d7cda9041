"""The benchmarks of memory and time on small networks, and the networks that they measure."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import networks
import pytest
from memonger.costs.bind import read_planned_mb
from planned import ROOT, as_module, forward, module_plan, run_python

MB = 2**20


def run(*options: str, script: str = "memory.py") -> subprocess.CompletedProcess[str]:
    return run_python("benchmarks/" + script, *options)


def measured(
    folder: Path, *options: str, script: str = "memory.py", status: int = 0
) -> tuple[Any, list[str], str]:
    """The figures as JSON, the lines printed, and what is said.

    The scripts search as long as a user does; so do tests that find the same again (slow).
    """
    out = folder / "out.json"
    done = run(*options, "--json", str(out), "--patience", "0.02", script=script)
    assert done.returncode == status, done.stderr
    return json.loads(out.read_text()), done.stdout.splitlines(), done.stderr


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_memory_measures_a_folder_of_symbols(tmp_path: Path) -> None:
    """What fails is left out, and told."""
    symbol, shapes = networks.resnet((1, 2, 1, 1), batch=16, image=96)
    with gzip.open(tmp_path / "small-symbol.json.gz", "wt") as file:
        file.write(symbol.tojson())
    networks.chain(depth=4, hidden=8, batch=4)[0].save(str(tmp_path / "broken-symbol.json"))
    given = {"small": {"data": shapes["data"]}, "broken": {"label": (4, 8)}}
    nets = {name: {"shapes": shapes} for name, shapes in given.items()}
    (tmp_path / "nets.json").write_text(json.dumps(nets))
    asked = ("--symbols", str(tmp_path), "broken", "small")
    found, lines, said = measured(tmp_path, *asked, status=1)
    assert cells(lines[-2]) == ["broken"] + ["-"] * 7
    assert "the shapes of these inputs are needed: 'data'" in said
    _, figures = found["networks"]
    original = memonger.search_plan(symbol, planner="chen2016", rules=False, shapes=shapes)
    ruled = memonger.search_plan(symbol, planner="chen2016", shapes=shapes)
    ours = memonger.plan(symbol, shapes, patience=0.02)
    expected: dict[str, Any] = {
        "name": "small",
        "none": memonger.get_cost(symbol, shapes=shapes),
        "original": memonger.get_cost(original, shapes=shapes),
        "ruled": memonger.get_cost(ruled, shapes=shapes),
        "ours": memonger.get_cost(ours.symbol, shapes=shapes),
    }
    assert expected["ours"] < expected["original"] < expected["none"]
    assert {key: figures.pop(key) for key in expected} == expected
    assert figures.pop("recomputed") == ours.recomputed_flops
    assert sorted(figures) == ["original_seconds", "seconds"]
    assert min(figures.values()) > 0.2  # a process that imports MXNet takes no less
    shown = [*map(str, expected.values()), f"{ours.recomputed_flops:.2f}"]
    assert cells(lines[-1])[:6] == shown


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The modules of the benchmarks by name, to be run in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    return importlib.import_module


def test_following_layouts_takes_no_less_memory(benchmark: Any, capsys: Any) -> None:
    benchmark("layouts").main(["--patience", "0.02", "DeepLab"])
    last = capsys.readouterr().out.splitlines()[-1]
    unplanned, followed, any_layouts = map(int, cells(last)[1:4])
    assert unplanned > followed >= any_layouts > 0


@pytest.mark.slow
def test_memory_measures_schedules(tmp_path: Path) -> None:
    symbol, shapes = networks.chain(depth=32, hidden=32, batch=8192)
    symbol.save(str(tmp_path / "small-symbol.json"))
    (tmp_path / "small.json").write_text(json.dumps({"shapes": shapes}))
    found, lines, _ = measured(tmp_path, "--symbols", str(tmp_path), "--work", "2", "inf")
    (figures,) = found["networks"]
    plan = module_plan(symbol, shapes, how="schedule", work=2.0, patience=0.02)
    marks = figures["marks"]
    two, endless = figures["schedules"]
    assert two["mb"] == plan.counted_bytes // MB
    assert two["work"] == 1 + plan.recomputed_flops <= 2 < endless["work"]
    assert endless["mb"] <= two["mb"] < marks["mb"] < figures["none"]
    shown = f"{two['mb']} ({two['work']:.2f}x, {two['seconds']:.0f} s)"
    assert cells(lines[-1])[3] == shown


OPTIONS = {
    "resnet51": "Model resnet51 is not supported",
    "--symbols tests": "there is no *-symbol.json",
    "--symbols tests/golden nothing": "no network nothing; there are lstm-4x16, ",
    "--symbols tests/golden --batch 2": "--batch is of our own networks",
    "--symbols tests/golden --list": "lstm-4x16\nlstm-4x64\n",
    "--list": "example_resnet\nresnet50-v2\n",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_the_memory_benchmark(
    options: str, benchmark: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with contextlib.suppress(SystemExit):
        assert benchmark("memory").main(options.split()) == 0
    assert OPTIONS[options] in "".join(capsys.readouterr())


def test_depth_tells_what_is_bound(benchmark: Any, capsys: Any, tmp_path: Path) -> None:
    options, out = "12 24 --hidden 32 --batch 512 --work 2 inf --patience 0.02", tmp_path / "out"
    benchmark("depth").main([*options.split(), "--json", str(out)])
    few, many = json.loads(out.read_text())
    symbol, shapes = networks.chain(24, 32, 512)
    assert many["none"] == memonger.get_cost(symbol, shapes=shapes)
    assert many["marks"] * MB < module_plan(symbol, shapes).unplanned_bytes
    two, endless = many["schedules"]
    assert endless["mb"] <= two["mb"] < many["marks"] and two["work"] <= 2
    assert all(found["bound_as_predicted"] for found in few["schedules"] + many["schedules"])
    assert cells(capsys.readouterr().out.splitlines()[-1])[0] == "24"


@pytest.mark.slow
def test_planning_measures_searches_and_binds(tmp_path: Path) -> None:
    found, lines, _ = measured(tmp_path, "mobilenetv2", "--rounds", "1", script="planning.py")
    (figures,) = found["networks"]
    symbol, shapes = networks.mobilenet_v2()
    marks = memonger.plan(symbol, shapes, patience=0.02)
    assert figures["no plan MB"] == memonger.get_cost(symbol, shapes=shapes)
    assert figures["marks MB"] == marks.counted_bytes // MB
    assert figures["schedule MB"] <= figures["marks MB"]
    assert 0.1 < figures["import mxnet"] < figures["nine binds"]
    assert cells(lines[-1]) == [str(value) for value in figures.values()]


@pytest.mark.slow
def test_a_step_takes_the_memory_that_was_predicted() -> None:
    """Of a network that is its own: those of the script take minutes."""
    program = """
import argparse, json, sys
sys.path.append('benchmarks')
import step
options = argparse.Namespace(work=[2.0], rounds=2, patience=0.02)
print(json.dumps(step.compare('chain', step.networks.chain(48, 32, 8192), options)['rows']))
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    rows = {row["plan"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert list(rows) == ["none", "marks", "R = 2"]
    # What is measured of a process is what was predicted, and what the allocator adds to it.
    for row in rows.values():
        assert 0.8 * row["predicted_mb"] < row["peak_mb"] < row["predicted_mb"] + 40
        assert row["seconds"] > 0
    assert rows["none"]["ratio"] == 1 and rows["R = 2"]["work"] <= 2


# MB of MXNet's own example symbols at batch 32, and millions of parameters as the papers give them
# (ResNet v2: of v1, which has a few BatchNorms elsewhere).
EXAMPLES = [
    (networks.resnet_v2, 2640, 25.6),
    (lambda: networks.resnet_v2((3, 8, 36, 3)), 5434, 60.2),
    (networks.inception_v3, 3208, 23.8),
    (networks.mobilenet_v2, 2670, 3.5),
]


@pytest.mark.parametrize("build, megabytes, millions", EXAMPLES)
def test_networks_have_the_sizes_of_mxnets_own(build: Any, megabytes: int, millions: float) -> None:
    symbol, shapes = build()
    assert memonger.get_cost(symbol, shapes=shapes) == megabytes
    graph = forward(symbol, shapes)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    count = sum(graph.tensors[a][0].elements for a in parameters)
    assert count / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.slow
def test_time_measures_plans_within_budgets(tmp_path: Path) -> None:
    options = "tiny --budgets 1.0 0.6 0.01 --rounds 2"
    found, printed, _ = measured(tmp_path, *options.split(), script="time.py")
    ((name, rows),) = [(net["name"], net["rows"]) for net in found]
    by = {(row["plan"], row["budget"]): row for row in rows}
    budgets = ["100 %", "60 %", "1 %", "as original"]
    assert list(by)[:2] == [("none", ""), ("original", "")]
    assert list(by)[2:] == [(how, budget) for how in ("marks", "schedule") for budget in budgets]
    none, original = by["none", ""], by["original", ""]
    assert none["measured"] == 0 < none["seconds"] and original["bytes"] < none["bytes"]
    for how in ("marks", "schedule"):
        assert by[how, "100 %"]["predicted"] == 0
        assert by[how, "60 %"]["bytes"] <= 0.6 * none["bytes"] and by[how, "60 %"]["predicted"] > 0
        assert by[how, "as original"]["bytes"] <= original["bytes"]
        assert 0.01 < by[how, "1 %"]["least"] < 0.6 and "measured" not in by[how, "1 %"]
    lines = printed[-len(rows) :]
    assert [cells(line)[:3] for line in lines] == [["tiny", plan, b] for plan, b in by]
    assert name == "tiny" and cells(lines[0])[3:6] == ["100 %", "+0.0 %", "+0.0 %"]
    assert cells(lines[3])[5] == f"{100 * by['marks', '60 %']['measured']:+.1f} %"


@pytest.mark.slow
def test_alternatives_are_compared_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, lines, _ = measured(tmp_path, "tiny", "--rounds", "1", script="alternatives.py")
    rows = {row["way"]: row for row in found[0]["rows"]}
    of_half = rows["2 smaller batches, marks"]

    def cost(batch: int) -> int:
        symbol, shapes = networks.resnet((1, 1), batch, image=32, classes=10, filters=8)
        requests = as_module(symbol, shapes)
        return read_planned_mb(symbol.simple_bind(mx.cpu(), grad_req=requests, **shapes))

    none = rows["no plan"]["mb"]
    halves, quarters = rows["2 smaller batches"], rows["4 smaller batches"]
    assert [none, halves["mb"], quarters["mb"]] == [cost(256), cost(128), cost(64)]
    assert of_half["mb"] < halves["mb"] and rows["marks, 60 %"]["mb"] <= 0.6 * (none + 1)
    assert rows["schedule, R = 2"]["mb"] <= rows["marks"]["mb"] < rows["original's plan"]["mb"]
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    assert rows["MXNET_BACKWARD_DO_MIRROR=1"]["mb"] == cost(256) < none
    for way, row in rows.items():  # BatchNorm sees smaller batches, and moves more than once
        same = "smaller" not in way
        assert (row["gradients"] == "same bits") is same, way
        moves = 0.9 if "2" in way else 0.9 + 0.9**2 + 0.9**3  # the others, by momentum
        assert row["statistics"] == ("same bits" if same else f"off by {moves:.2g}"), way
        assert row["seconds"] > 0
    assert rows["no plan"]["time"] == 1
    assert cells(lines[-len(rows)])[:3] == ["no plan", str(none), "100%"]
    assert cells(lines[-1])[5:] == [of_half["gradients"], of_half["statistics"]]


def test_smaller_batches_without_batchnorm_differ_by_rounding_alone() -> None:
    """Smaller batches sum up to the same but for rounding; what does not fit says so."""
    program = """
import functools, json, sys
sys.path.append('benchmarks')
import alternatives as a
few = functools.partial(a.networks.chain, depth=2, hidden=32)
rows = a.measure(a.Subject(few, 4096, {}), rounds=1, patience=0.02)
print(json.dumps([rows, [a.line(row, rows[0]) for row in rows]]))
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    rows, lines = json.loads(done.stdout.splitlines()[-1])
    for row, line in zip(rows, lines):
        if row["way"] == "marks, 60 %":
            assert row["least_mb"] > 0.6 * rows[0]["mb"]
            assert cells(line)[1] == f"at least {row['least_mb']}"
        elif "smaller" in row["way"]:
            assert 0 < float(row["gradients"].replace("off by", "")) < 1e-5
        else:
            assert (row["gradients"], row["statistics"]) == ("same bits", "-")
