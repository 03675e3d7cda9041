"""What a type checker sees of the package in a user's script, in strict mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memonger
import pytest
from memonger import public

pytest.importorskip("mypy")

RIGHT = """
import memonger

plan = memonger.plan(None, {"data": (32, 3, 224, 224)}, budget="60%", how="schedule")
nbytes: int = plan.pool_bytes
planned = memonger.search_plan(None, data=(32, 3, 224, 224))
plans: memonger.Frontier = memonger.frontier(None, data=(32, 3, 224, 224), points=3)
largest = memonger.largest_batch(None, {"data": (None, 3)}, "8GB", ctx="gpu", optimizer="adam")
batch: int = largest.batch + len(plans)
with memonger.enable(budget="60%", or_plain=True) as session:
    count: int = len(session.plans)
memonger.gluon.plan(object(), static_alloc=True, budget="1GB")
try:
    report: memonger.CheckReport = memonger.check(None, None, {"data": (2, 3)})
except memonger.BudgetError as error:
    least: int = error.least_bytes
"""
#: A call that is wrong, and what is said of it.
WRONG = [
    ('memonger.plan(None, bugdet="60%")', '"bugdet" to "plan" has incompatible type'),
    ('memonger.frontier(None, budget="60%")', '"budget" to "frontier" has incompatible type'),
    (
        'memonger.largest_batch(None, {}, "1GB", work=2)',
        '"work" to "largest_batch" has incompatible',
    ),
    ("memonger.enable(devices=2)", 'Unexpected keyword argument "devices"'),
    ("memonger.gluon.plan(object(), grad_req='add')", 'Unexpected keyword argument "grad_req"'),
    ("memonger.search_plan(None, ntrial='3')", 'Argument "ntrial" to "search_plan" has'),
    ("memonger.paln(None)", 'Module has no attribute "paln"'),
]


def test_a_wrong_call_is_an_error_in_the_editor(tmp_path: Path) -> None:
    script, environment = tmp_path / "train.py", dict(os.environ)
    script.write_text(RIGHT + "".join(f"{call}\n" for call, _ in WRONG))
    root = Path(memonger.__file__).parents[1]
    if root.name != "site-packages":
        environment["MYPYPATH"] = str(root)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), script.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("train.py:")]
    first = RIGHT.count("\n") + 1
    for number, (_, said) in enumerate(WRONG, first):
        found = [line for line in errors if line.startswith(f"train.py:{number}:")]
        assert any(said in line for line in found), (number, errors)
    assert len({line.split(":")[1] for line in errors}) == len(WRONG), errors


def test_a_type_checker_sees_all_public_names() -> None:
    assert {*public.__all__} == {*memonger.__all__, "gluon"}
