"""The examples as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import memonger  # noqa: F401
import networks
import pictures
from planned import ROOT, png_size, run_python


def run(script: str, *options: str) -> tuple[str, str]:
    """Run an example from the project root; return what it printed, and its log."""
    done = run_python("examples/" + script, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def costs(printed: str) -> list[float]:
    """The MB before and after planning."""
    return numbers(r"(?:Old|New) feature map cost=(\d+) MB", printed)


def test_example_resnet_has_the_figures_of_the_original() -> None:
    """The figures of the original, and no worse by default."""
    printed, log = run("example_resnet.py", "--planner", "chen2016")
    assert costs(printed) == [14332, 2520]
    assert "Search threshold=576 MB, cost=2520 MB" in log
    printed, log = run("example_resnet.py")
    old, new = costs(printed)
    assert old == 14332 and new <= 2520
    (seconds,) = numbers(r"Search took ([\d.]+) s", printed)
    assert seconds < 60 and "INFO:memonger:" in log


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
    """What a script ends with, its peak memory, and what memonger tells."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    ended, memory = done.stdout.splitlines()
    (peak,) = numbers(r"^peak resident memory (\d+) MB$", memory)
    return ended, peak, done.stderr


@pytest.mark.parametrize("script", ["examples/train_digits.py", "examples/train_gluon.py"])
def test_a_plain_script_is_planned(script: str) -> None:
    command = [script, *"--blocks 3 --filters 8 --batch 300 --epochs 1".split()]
    expected, _, log = digits_learnt("-c", PLAIN, *command)
    assert "memonger: " not in log and re.match(r"accuracy [\d.]+, parameters \w{16}$", expected)
    learnt, _, log = digits_learnt("-m", "memonger", "run", *command)
    assert learnt == expected and "memonger: 1 planned, " in log and " MB -> " in log


@pytest.mark.slow
def test_digits_are_learnt_in_less_resident_memory() -> None:
    script = "examples/train_digits.py"
    expected, peak, _ = digits_learnt("-c", PLAIN, script)
    for _ in range(2):  # the first times operators of this machine
        learnt, planned_peak, _ = digits_learnt("-m", "memonger", "run", script)
        assert learnt == expected
    assert numbers(r"accuracy ([\d.]+)", learnt)[0] > 0.8 and planned_peak < peak - 10


def test_the_pictures_of_the_documentation_are_drawn(tmp_path: Path, capsys: Any) -> None:
    pictures.draw(*networks.chain(4, hidden=64, batch=4096), tmp_path)
    for name in ("memory-marks", "memory-schedule", "frontier"):
        assert png_size(tmp_path / (name + ".png")) == [1200, 800]
        assert (ROOT / "docs" / (name + ".png")).is_file()
    assert "added time" in capsys.readouterr().out


def test_a_deep_network_trains_within_its_budget() -> None:
    options = "--layers 40 --batch 512 --steps 30 --budget 0.7"
    printed, _ = run("example_log_memory.py", *options.split())
    unplanned, marks = numbers(r"(?:no plan|smallest marks) +([\d.]+) MB", printed)
    (schedule,) = numbers(r"schedule +([\d.]+) MB", printed)
    (accuracy,) = numbers(r"accuracy ([\d.]+)", printed)
    assert schedule <= 0.7 < marks < unplanned / 4 and accuracy > 0.5  # of three arms
    assert numbers(r"memory (\d+) MB at most", printed) >= numbers(r"\((\d+) MB before", printed)


def test_memory_against_depth_grows_by_the_logarithm(tmp_path: Path) -> None:
    import example_log_memory

    depths = (24, 48)
    names = ["no plan", "marks", "schedule, 3 x forward work", "schedule, any work"]
    found = example_log_memory.measure(depths, hidden=8, batch=8192)
    assert list(found) == names
    assert all(a > b for a, b in zip(found["no plan"], found["marks"]))
    for more, less in zip(names, names[1:]):
        assert found[more][1] >= found[less][1]
    growth = [found[name][1] / found[name][0] for name in names]
    assert growth[0] == pytest.approx(2, rel=0.05) and growth[1] < 1.7 and growth[3] < 1.35
    file = tmp_path / "memory.png"
    example_log_memory.draw(str(file), depths, found)
    assert png_size(file) == [1200, 800]
