"""What type checkers, and so editors, see of the package in a user's script, in strict mode."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import memonger
import pytest
from memonger import public

CHECKERS = ("mypy", "basedpyright")  # the second is Pyright, with a Node of its own

RIGHT = """
import memonger
import mxnet as mx  # type: ignore[import-untyped]

def train(net: mx.sym.Symbol, block: mx.gluon.HybridBlock) -> None:
    plan = memonger.plan(net, {"data": (32, 3, 224, 224)}, budget="60%", how="schedule")
    nbytes: int = plan.pool_bytes
    planned = memonger.search_plan(net, data=(32, 3, 224, 224))
    plans: memonger.Frontier = memonger.frontier(block, data=(32, 3, 224, 224), points=3)
    largest = memonger.largest_batch(block, {"data": (None, 3)}, "8GB", ctx="gpu", optimizer="adam")
    batch: int = largest.batch + len(plans)
    with memonger.enable(budget=0.6, or_plain=True) as session:
        count: int = len(session.plans)
    trained: mx.gluon.HybridBlock = memonger.gluon.plan(block, static_alloc=True, budget="1GB")
    print(nbytes, planned, batch, count, trained, memonger.explain(block, data=(2, 3)))
    memonger.plan(net, [mx.io.DataDesc("data", (2, 3))], budget=10**9, ctx=mx.gpu(0))
    memonger.plan(net, [("data", (2, 3)), ("label", (2,))], budget=0.6)
    try:
        report: memonger.CheckReport = memonger.check(net, planned, {"data": (2, 3)})
        print(report)
    except memonger.BudgetError as error:
        least: int = error.least_bytes
        print(least)
"""
#: A call that is wrong, what mypy says of it (None: it takes any of MXNet's classes), and Pyright.
WRONG = [
    (
        "memonger.plan(net, (8, 3, 32, 32))",
        'Argument 2 to "plan" has incompatible type',
        'parameter "shapes" of type "Shapes | None"',
    ),
    ('memonger.plan(net, {"data": 8})', 'expected "str": "Sequence[int]"', '"dict[str, int]"'),
    (
        'memonger.plan(net, budget=["1GB"])',
        'Argument "budget" to "plan" has incompatible type',
        'parameter "budget" of type "Amount | None"',
    ),
    (
        'memonger.plan(net, bugdet="60%")',
        '"bugdet" to "plan" has incompatible type',
        'parameter "bugdet" of type "Sequence[int]"',
    ),
    (
        'memonger.plan("net-symbol.json")',
        None,
        'parameter "net" of type "SymbolOrBlock"',
    ),
    (
        'memonger.explain(net, bugdet="60%")',
        '"bugdet" to "explain" has incompatible type',
        'parameter "bugdet" of type "Sequence[int]"',
    ),
    (
        'memonger.frontier(net, budget="60%")',
        '"budget" to "frontier" has incompatible type',
        'parameter "budget" of type "Sequence[int]"',
    ),
    (
        'memonger.largest_batch(net, {}, "1GB", work=2)',
        '"work" to "largest_batch" has incompatible',
        'parameter "work" of type "NoReturn"',
    ),
    (
        "memonger.enable(devices=2)",
        'Unexpected keyword argument "devices"',
        'No parameter named "devices"',
    ),
    (
        'memonger.enable(budget=b"1GB")',
        'Argument "budget" to "enable" has incompatible type',
        'parameter "budget" of type "Amount | None"',
    ),
    (
        "memonger.gluon.plan(block, grad_req='add')",
        'Unexpected keyword argument "grad_req"',
        'No parameter named "grad_req"',
    ),
    (
        "memonger.search_plan(net, ntrial='3')",
        'Argument "ntrial" to "search_plan" has',
        'parameter "ntrial" of type "int"',
    ),
    ("memonger.paln(net)", 'Module has no attribute "paln"', '"paln" is not a known attribute'),
]


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_wrong_call_is_an_error_in_the_editor(checker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "train.py").write_text(RIGHT + "".join(f"    {call}\n" for call, *_ in WRONG))
    root, environment = Path(memonger.__file__).parents[1], dict(os.environ)
    config: dict[str, object] = {"typeCheckingMode": "strict", "include": ["train.py"]}
    if root.name != "site-packages":
        environment["MYPYPATH"] = str(root)
        config["extraPaths"] = [str(root)]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    options = {
        "mypy": ["--strict", "--cache-dir", str(tmp_path), "train.py"],
        "basedpyright": ["--pythonpath", sys.executable],
    }
    done = subprocess.run(
        [sys.executable, "-m", checker, *options[checker]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = re.findall(r"train\.py:(\d+):.*error: (.*)", done.stdout)
    expected = {}
    for number, (_, *said) in enumerate(WRONG, RIGHT.count("\n") + 1):
        text = said[CHECKERS.index(checker)]
        if text is not None:
            expected[str(number)] = text
    for line, text in expected.items():
        assert any(line == found and text in error for found, error in errors), (text, done.stdout)
    assert {line for line, _ in errors} == {*expected}, done.stdout


def test_a_type_checker_sees_all_public_names() -> None:
    assert {*public.__all__} == {*memonger.__all__, "gluon"}
