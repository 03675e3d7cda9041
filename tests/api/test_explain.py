"""What is told of a plan and of a network: read off the replay, so it adds up to the byte."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger.api import plot as report
from memonger.support.errors import MemongerError

import networks

pytestmark = pytest.mark.python_differs

S = mx.sym
MB = 2**20
CHAIN: Any = networks.chain(16)


# -- a network --------------------------------------------------------------------------------


def test_the_peak_of_a_chain() -> None:
    """At the first gradient: two results of each of 16 layers, the output, and its gradient."""
    symbol, shapes = CHAIN
    found = memonger.explain(symbol, shapes)
    assert found.pool_bytes == memonger.pool_bytes(symbol, shapes=shapes)
    assert found.peak_bytes == 34 * MB == sum(t.nbytes for t in found.tensors)
    assert found.peak == "the gradient of 'out' (LinearRegressionOutput)"
    assert [t.kind for t in found.tensors].count("gradient") == 1
    assert sorted(t.name for t in found.tensors if t.kind == "result") == sorted(
        ["out"] + ["%s%d" % (name, i) for name in ("fc", "tanh") for i in range(16)]
    )
    assert found.floor_bytes == 4 * MB and "'tanh15' (Activation)" in found.bounded_by
    text = str(found)
    assert "peak      34.0 MB alive at once, in the gradient of 'out'" in text
    assert "in 22 more" in text


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_planned_network_is_explained_with_its_plan(how: str) -> None:
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    plan = memonger.plan(symbol, shapes, how=how)
    found = memonger.explain(plan.symbol, shapes)
    assert found.peak_bytes == plan.peak_bytes == sum(t.nbytes for t in found.tensors)
    assert found.pool_bytes == plan.pool_bytes
    assert found.floor_bytes == plan.floor_bytes and plan.floor in str(found)


def test_what_must_not_be_computed_again_is_told() -> None:
    x = S.Dropout(S.FullyConnected(S.Variable("data"), num_hidden=64, name="fc"), name="drop")
    found = memonger.explain(S.SoftmaxOutput(x, name="softmax"), {"data": (1024, 64)})
    ruled = {t.name: t.rule for t in found.tensors if t.rule}
    assert "drop[1]" in ruled and "mask" in ruled["drop[1]"]
    assert "must not be computed again" in found.bounded_by


# -- why a plan saves little ------------------------------------------------------------------


def test_one_operator_that_makes_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    x = S.FullyConnected(S.Variable("data"), num_hidden=4096, name="wide")
    x = S.Activation(x, act_type="tanh", name="tanh")
    symbol = S.LinearRegressionOutput(S.FullyConnected(x, num_hidden=1, name="fc"), name="out")
    with caplog.at_level(logging.WARNING, logger="memonger"):
        plan = memonger.plan(symbol, {"data": (256, 8)})
    assert plan.pool_bytes > 0.95 * plan.unplanned_bytes
    assert "alone needs" in caplog.text and "of the peak" in caplog.text


def test_masks_that_make_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    x = S.Activation(S.Variable("data"), act_type="tanh")
    for _ in range(24):
        x = S.Dropout(x, p=0.5)
    with caplog.at_level(logging.WARNING, logger="memonger"):
        plan = memonger.plan(S.LinearRegressionOutput(x, name="out"), {"data": (256, 64)})
    saved = 1 - plan.pool_bytes / plan.unplanned_bytes
    assert saved < 0.05
    assert "of the peak must not be computed again (24 Dropout)" in caplog.text


# -- pictures ---------------------------------------------------------------------------------


def size_of(file: Path) -> Any:
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return tuple(int.from_bytes(head[k : k + 4], "big") for k in (16, 20))


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_the_picture(how: str, tmp_path: Path) -> None:
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    plan = memonger.plan(symbol, shapes, how=how)
    plan.plot(tmp_path / "plan.png")
    assert size_of(tmp_path / "plan.png") == (1200, 800)
    with pytest.raises(MemongerError, match="cannot be written"):
        plan.plot(tmp_path / "no such folder" / "plan.png")
    with pytest.raises(MemongerError, match="cannot be written"):
        plan.plot(tmp_path / "plan.xyz")


def test_long_names_are_shortened() -> None:
    assert report.shortened("a peak") == "a peak"
    short = report.shortened("peak 1.0 MB in " + "x" * 200 + "_end")
    assert len(short) == 64 and " ... " in short and short.endswith("x_end")


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    plan = memonger.plan(*networks.chain(4, hidden=8, batch=8))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MemongerError, match="pip install"):
        plan.plot(tmp_path / "plan.png")


# -- a plan, tensor by tensor -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_every_tensor_of_a_plan(how: str) -> None:
    """All of 16 layers are in it, and what is recomputed, kept or cut at agrees with the plan."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    plan = memonger.plan(symbol, shapes, how=how)
    found = plan.explain().tensors
    names = ["%s%d" % (name, i) for i in range(16) for name in ("fc", "tanh")] + ["out"]
    assert [t.name for t in found if t.name not in plan.copies] == names
    assert {t.nbytes for t in found} == {MB}
    assert {t.name for t in found if t.times > 1} - set(plan.copies) == set(plan.recomputed)
    kept = [t for t in found if t.choice == "kept"]
    assert [t.name for t in kept if t.why == "output"] == ["out"]
    cuts = [t for t in kept if t.why == "cut"]
    assert cuts and all("computed again from it" in t.reason for t in cuts)
    assert all(t.why and t.reason for t in kept)
    assert not any(t.why for t in found if t.choice != "kept")
    assert len(kept) * MB <= plan.peak_bytes
    text = str(plan.explain())
    assert f"kept   {len(kept):10.1f} MB in {len(kept)} tensors" in text
    assert len(text.splitlines()) == 5 + len(found)


def test_no_plan_keeps_all() -> None:
    plan = memonger.plan(*networks.chain(1, hidden=64, batch=64))
    assert plan.planner == "no plan"
    found = {t.name: (t.choice, t.why) for t in plan.explain().tensors}
    assert found["out"] == ("kept", "output") and found["tanh0"][0] == "kept"
    assert not any(choice == "again" for choice, _ in found.values())


def test_the_reasons_of_the_rules() -> None:
    """A Dropout, twins of which one is kept, and what comes after ``until``."""
    symbol, shapes = networks.chain(16, hidden=64, batch=4096)
    plan = memonger.plan(symbol, shapes, until="fc9")
    late = [t for t in plan.explain().tensors if t.name == "tanh12"]
    assert late[0].why == "rule" and late[0].reason == "it does not come before 'fc9'"
    x = S.Variable("data")
    for i in range(12):
        x = S.Activation(S.FullyConnected(x, num_hidden=64, name="fc%d" % i), act_type="tanh")
        x = S.Dropout(x, p=0.5, name="drop%d" % i) if i == 5 else x
    plan = memonger.plan(S.LinearRegressionOutput(x, name="out"), {"data": (4096, 64)})
    reasons = {t.name: t.reason for t in plan.explain().tensors if t.why == "rule"}
    assert "its mask is kept" in reasons["drop5[1]"]


def test_the_original_keeps_by_marks() -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=4, image=64, classes=10, filters=16)
    plan = memonger.plan(symbol, shapes, planner="chen2016")
    reasons = {t.why for t in plan.explain().tensors}
    assert "mark" in reasons and "cut" not in reasons


def test_what_a_budget_allows_is_kept_for_the_time() -> None:
    symbol, shapes = CHAIN
    plan = memonger.plan(symbol, shapes, budget="60%")
    assert plan.added_time and f"{100 * plan.added_time:.1f} % of the time" in str(plan)
    reasons = {t.reason for t in plan.explain().tensors if t.why == "budget"}
    assert reasons == {"the budget allows it, and computing it again takes time"}
    assert len(str(plan).splitlines()) == 10
    smallest = memonger.plan(symbol, shapes)
    assert not any(t.why == "budget" for t in smallest.explain().tensors)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_budget_that_needs_no_plan(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is wrong, so nothing is warned of."""
    symbol, shapes = CHAIN
    plan = memonger.plan(symbol, shapes, how=how, budget="100%")
    assert plan.planner == "no plan" and plan.added_time == 0 and not plan.recomputed
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert {t.why for t in plan.explain().tensors if t.choice == "kept"} <= {"budget", "output"}
