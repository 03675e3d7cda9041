"""Files of plans: one plan for all workers of a job; damage is told in one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger import MemongerError

import networks
from planned import ROOT, run_python

S = mx.sym

IMAGES = {"data": (2, 3, 32, 32), "softmax_label": (2,)}


def residual(name: str = "relu", classes: int = 10) -> Any:
    """Return a residual network whose activations have this name."""
    x = S.Variable("data")
    for k in range(8):
        y = S.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{k}")
        y = S.Activation(S.BatchNorm(y, name=f"bn{k}"), act_type="relu", name=f"{name}{k}")
        x = y if k == 0 else x + y
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=classes, name="fc"), name="softmax")


@pytest.fixture(scope="module", params=["marks", "schedule"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a plan, and where it lies."""
    named: Any = {"keep": "conv2", "recompute": ["bn4", "conv6"]}
    plan = memonger.plan(
        residual(), IMAGES, how=request.param, budget="80%", patience=0.02, **named
    )
    assert plan.recomputed and (plan.schedule is None) == (request.param == "marks")
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(file)
    return plan, file


@pytest.mark.python_differs
def test_what_is_loaded_is_what_was_saved(saved: Any) -> None:
    plan, file = saved
    again = memonger.load_plan(file, residual(), IMAGES)
    for field in dataclasses.fields(plan):
        one, other = getattr(plan, field.name), getattr(again, field.name)
        assert type(one) is type(other), field.name
        if field.name not in ("symbol", "request", "schedule"):
            assert one == other, field.name
    assert again.symbol.tojson() == plan.symbol.tojson()
    if plan.schedule is not None and again.schedule is not None:
        assert np.array_equal(again.schedule.operations, plan.schedule.operations)
    assert str(again) == str(plan) and str(again.explain()) == str(plan.explain())
    assert memonger.unplan(again.symbol).tojson() == memonger.unplan(plan.symbol).tojson()
    assert memonger.check(residual(), again.symbol, IMAGES)


@pytest.mark.python_differs
def test_another_process_needs_not_even_the_network(saved: Any) -> None:
    plan, file = saved
    program = (
        "import sys, memonger; plan = memonger.load_plan(sys.argv[1]); "
        "print(plan); print(memonger.pool_bytes(plan.symbol, shapes=plan.request.spec.shapes))"
    )
    done = run_python("-c", program, str(file))
    assert done.returncode == 0 and done.stdout == f"{plan}\n{plan.pool_bytes}\n", done.stderr


def test_a_saved_plan_is_of_one_network_and_its_shapes(saved: Any) -> None:
    _, file = saved
    planned_before = memonger.search_plan(residual(), planner="chen2016", shapes=IMAGES)
    for same in (residual(), residual("other"), planned_before):
        memonger.load_plan(file, same, data=IMAGES["data"])
    for other in (residual(classes=9), residual().get_internals()["relu7_output"], residual() * 2):
        with pytest.raises(MemongerError, match="is of another network: "):
            memonger.load_plan(file, other)
    for said, network, shapes in (
        (r"another shape of input 'data': .*\(4, 3", residual(), {"data": (4, 3, 32, 32)}),
        ("not an input of the network", residual(), {"wrong": (4, 3, 32, 32)}),
        ("give net= too", None, {"data": IMAGES["data"]}),
        ("not a Symbol", mx.gluon.nn.Dense(3), {}),
    ):
        with pytest.raises(MemongerError, match=said):
            memonger.load_plan(file, network, **shapes)


@pytest.mark.python_differs
def test_a_loaded_plan_has_the_attributes_of_the_networks_variables(saved: Any) -> None:
    """Those that a plan does not depend on: initializers, factors of the learning rate."""
    network = residual()
    network.get_internals()["fc_weight"]._set_attr(__lr_mult__="2.0", __init__='["zero", {}]')
    again = memonger.load_plan(saved[1], network, IMAGES)
    assert again.symbol.attr_dict()["fc_weight"] == network.attr_dict()["fc_weight"]
    assert (again.schedule is None) == (saved[0].schedule is None)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_file_of_before_is_read(how: str, tmp_path: Path) -> None:
    """It lacks most figures of the network without a plan, which are predicted then."""
    text = gzip.decompress((ROOT / f"tests/golden/plans/older-{how}.json.gz").read_bytes())
    whole = json.loads(text)
    figures = whole["plan"]["figures"]
    figures["unplanned_bytes"] += 8  # than is predicted
    whole["sha256"] = sha256(json.dumps(whole["plan"], sort_keys=True).encode()).hexdigest()
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    plan = memonger.load_plan(tmp_path / "plan.json", residual(), IMAGES)
    for name, value in figures.items():
        told = getattr(plan, name)
        assert (list(told) if isinstance(told, tuple) else told) == value, name
    here = memonger.plan(residual(), IMAGES, how=how, patience=0.02).before
    assert plan.before == here._replace(pool_bytes=here.pool_bytes + 8)
    assert memonger.check(residual(), plan.symbol, IMAGES)
    plan.save(tmp_path / "again.json")
    assert memonger.load_plan(tmp_path / "again.json").before == plan.before


def test_a_damaged_plan_file_is_refused_in_one_line(saved: Any, tmp_path: Path) -> None:
    plan, file = saved
    whole, drawn, damaged = file.read_bytes(), random.Random(1), tmp_path / "damaged.json"
    texts = [whole[: drawn.randrange(len(whole))] for _ in range(40)]
    for _ in range(80):
        k = drawn.randrange(len(whole))
        texts.append(whole[:k] + bytes([drawn.randrange(256)]) + whole[k + 1 :])
    other = json.loads(whole)
    no_plans: list[Any] = [[], {}, 1, {**other, "plan": None}, other["plan"]]
    texts += [json.dumps(one).encode() for one in no_plans]
    texts.append(json.dumps({**other, "memonger plan": 2}).encode())
    refused = 0
    for text in texts:
        damaged.write_bytes(text)
        try:
            assert str(memonger.load_plan(damaged, residual())) == str(plan)
        except MemongerError as error:
            refused += 1
            assert "\n" not in str(error) and "damaged.json" in str(error)
    assert refused > 120  # a space may have become another


@pytest.mark.parametrize("file", ["", ".", "no/such/folder/plan.json", None, 7])
def test_what_cannot_be_a_file_is_refused(saved: Any, file: Any) -> None:
    with pytest.raises(MemongerError):
        memonger.load_plan(file)
    with pytest.raises(MemongerError, match="cannot be written"):
        saved[0].save(file)


def test_other_settings_are_told(
    saved: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memonger.load_plan(saved[1])
    assert not caplog.records
    monkeypatch.setenv("MXNET_EXEC_ENABLE_INPLACE", "0")
    memonger.load_plan(saved[1])
    assert "made with other values of MXNET_EXEC_ENABLE_INPLACE" in caplog.text


def test_types_and_the_device_are_kept(tmp_path: Path) -> None:
    symbol, shapes = networks.chain(6, hidden=16, batch=64)
    options = {"type_dict": {"data": "float64"}, "ctx": mx.cpu(), "until": "fc4"}
    plan, file = (
        memonger.plan(symbol, shapes, patience=0.02, how="marks", **options),
        tmp_path / "plan.json",
    )
    plan.save(file)
    again = memonger.load_plan(file, symbol, [mx.io.DataDesc("data", shapes["data"], "float64")])
    for field in ("spec", "grad_req", "ctx", "until"):
        assert getattr(again.request, field) == getattr(plan.request, field)
    assert again.pool_bytes == plan.pool_bytes
    with pytest.raises(MemongerError, match="another type of input 'data'"):
        memonger.load_plan(file, symbol, [mx.io.DataDesc("data", shapes["data"])])
