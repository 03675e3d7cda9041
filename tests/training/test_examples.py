"""The examples as a user runs them, and a detection network with an operator written in Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import memonger
import mxnet as mx
import networks
import numpy as np
import pictures
from planned import ROOT, as_module, marked, nodes, run_python

# -- the scripts ------------------------------------------------------------------------------


def run(script: str, *options: str) -> tuple[str, str]:
    """Run an example from the project root; return what it printed, and its log."""
    done = run_python("examples/" + script, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def number(pattern: str, text: str) -> float:
    """The one number that stands where ``pattern`` has its group."""
    (found,) = numbers(pattern, text)
    return found


def costs(printed: str) -> list[float]:
    """The MB before and after planning."""
    return numbers(r"(?:Old|New) feature map cost=(\d+) MB", printed)


def png_size(file: Path) -> list[int]:
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return [int.from_bytes(head[k : k + 4], "big") for k in (16, 20)]


def test_resnet_gives_the_figures_of_the_original() -> None:
    printed, log = run("example_resnet.py", "--planner", "chen2016")
    assert costs(printed) == [14332, 2520]
    assert "Search threshold=576 MB, cost=2520 MB" in log


def test_resnet_is_no_worse_than_the_original_by_default() -> None:
    printed, log = run("example_resnet.py")
    old, new = costs(printed)
    assert old == 14332 and new <= 2520
    assert number(r"Search took ([\d.]+) s", printed) < 60
    assert "INFO:memonger:" in log


@pytest.mark.parametrize(
    "command",
    [
        "example_resnet.py --layers 1,1,1,1 --batch 4 --image 64",
        "example_lstm.py --layers 2 --steps 12 --hidden 64 --batch 16",
    ],
)
def test_training_in_the_planned_network(command: str) -> None:
    printed, log = run(*command.split(), "--train", "3")
    old, new = costs(printed)
    assert new < old
    losses = numbers(r"Batch \d: loss=([\d.]+), ", printed)
    assert len(losses) == 3
    assert losses[2] < losses[0]  # it is always the same batch
    assert number(r"Peak resident memory=(\d+) MB", printed) > 50
    assert "lstm" not in command or "your marks" in log  # it is cut by time steps


DIGITS = r"""unplanned +accuracy=([\d.]+) +feature map cost=(\d+) MB +peak resident memory=(\d+) .*
planned +accuracy=([\d.]+) +feature map cost=(\d+) MB +peak resident memory=(\d+) .*
All \d+ parameters and auxiliary states are equal bit for bit
$"""


def digits(*options: str) -> tuple[float, float]:
    """Run the example of the digits; return the accuracy and the MB of resident memory saved."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    printed, _ = run("train_digits.py", *options)
    found = re.match(DIGITS, printed)
    assert found is not None, printed
    accuracy, cost, peak, planned_accuracy, planned_cost, planned_peak = map(float, found.groups())
    assert planned_accuracy == accuracy
    assert planned_cost < cost
    return accuracy, peak - planned_peak


def test_digits_learnt_planned_and_unplanned_are_equal() -> None:
    digits("--blocks", "5", "--filters", "8", "--batch", "500", "--epochs", "1")


@pytest.mark.slow
def test_digits_are_learnt_in_less_resident_memory() -> None:
    accuracy, saved = digits()
    assert accuracy > 0.8
    assert saved > 10


def test_the_pictures_of_the_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures.draw(*networks.chain(4, hidden=64, batch=4096), tmp_path)
    for name in ("memory-marks", "memory-schedule", "frontier"):
        assert png_size(tmp_path / (name + ".png")) == [1200, 800]
        assert (ROOT / "docs" / (name + ".png")).is_file()
    assert "added time" in capsys.readouterr().out


# -- detection: a Custom operator, MultiBox operators, two losses -----------------------------


@pytest.fixture(scope="module", params=["search_plan", "make_mirror_plan"])
def detection(request: Any) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Build and plan the network; return it, its plan and one batch of images with boxes.

    ``make_mirror_plan`` finds no mirror_stage to keep, and so recomputes all that it may.
    """
    net, shapes = networks.detection(
        batch=8, image=128, classes=20, objects=3, filters=32, blocks=2, scales=4
    )
    if request.param == "search_plan":
        planned = memonger.search_plan(net, shapes=shapes)
        assert memonger.get_cost(planned, shapes=shapes) < memonger.get_cost(net, shapes=shapes)
    else:
        planned = memonger.make_mirror_plan(net, 0, shapes=shapes)
    assert any(name.startswith("convolution") for name in marked(planned))
    batch, _, _ = shapes["label"]
    random = np.random.RandomState(3)
    corner = random.uniform(0, 0.5, (batch, 3, 2))
    boxes = np.concatenate([corner, corner + random.uniform(0.2, 0.5, (batch, 3, 2))], axis=2)
    label = np.concatenate([random.randint(0, 20, (batch, 3, 1)), boxes], axis=2)
    label[::2, 2] = -1  # no third object in every other image
    data = random.uniform(-1, 1, shapes["data"])
    return net, planned, {"data": data.astype("f"), "label": label.astype("f")}


def test_detection_step_by_step(detection: Any) -> None:
    net, planned, values = detection
    shapes = {name: value.shape for name, value in values.items()}
    requests = as_module(net, shapes)
    report = memonger.check(net, planned, shapes, steps=3, grad_req=requests, values=values)
    assert report, report
    (before,), (after,) = ([n for n in nodes(s) if n["op"] == "Custom"] for s in (net, planned))
    assert after["attrs"] == before["attrs"]  # any other would reach its Python constructor


def test_detection_by_module_fit(detection: Any) -> None:
    net, planned, values = detection
    ends = []
    for symbol in (net, planned):
        mx.random.seed(1)
        module = mx.mod.Module(symbol, label_names=["label"])
        batch = mx.io.NDArrayIter(
            {"data": values["data"]}, {"label": values["label"]}, batch_size=len(values["data"])
        )
        module.fit(
            mx.io.ResizeIter(batch, 3),
            num_epoch=1,
            eval_metric=mx.metric.Loss(output_names=["box_loss_output"]),
            optimizer_params={"learning_rate": 0.1},
            initializer=mx.init.Xavier(),
            batch_end_callback=lambda _: mx.nd.waitall(),  # for BatchNorm's statistics
        )
        ends.append([{k: v.asnumpy() for k, v in p.items()} for p in module.get_params()])
    for one, other in zip(*ends):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert np.all(np.isfinite(value)), name
            assert np.array_equal(value, other[name]), name


# -- memory against depth ---------------------------------------------------------------------


def test_a_deep_network_trains_within_its_budget() -> None:
    options = "--layers 60 --batch 512 --steps 40 --budget 0.8"
    printed, _ = run("example_log_memory.py", *options.split())
    unplanned = number(r"no plan +([\d.]+) MB", printed)
    marks = number(r"smallest marks +([\d.]+) MB", printed)
    assert number(r"schedule +([\d.]+) MB", printed) <= 0.8 < marks < unplanned / 4
    assert number(r"accuracy ([\d.]+)", printed) > 0.5  # of three arms
    assert number(r"memory (\d+) MB at most", printed) >= number(r"\((\d+) MB before", printed)


def test_the_picture_of_memory_against_depth(tmp_path: Path) -> None:
    import example_log_memory

    depths = (64, 128)
    names = ["no plan", "marks", "schedule, 3 x forward work", "schedule, any work"]
    found = example_log_memory.measure(depths, hidden=8, batch=16384)
    assert list(found) == names
    assert all(a > b for a, b in zip(found["no plan"], found["marks"]))
    for more, less in zip(names, names[1:]):
        assert found[more][1] >= found[less][1]
    growth = [found[name][1] / found[name][0] for name in names]
    assert growth[0] == pytest.approx(2, rel=0.05) and growth[1] < 1.7 and growth[3] < 1.35
    file = tmp_path / "memory.png"
    example_log_memory.draw(str(file), depths, found)
    assert png_size(file) == [1200, 800]
