"""``examples/gpu_check.py``, where numbers are real (the CPU) and where memory is (the dry run)."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import memonger
import gpu_check
import mxnet as mx
import networks
import numpy as np

from planned import module_plan

from .child import DryRun
from .dry_run import PROJECT, GpuDryRun


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module that makes the rows."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    return importlib.import_module("gpu")


# -- what is compared -------------------------------------------------------------------------


def arrays(name: str = "0/gradient/w", more: float = 0) -> dict[str, np.ndarray]:
    """Make two steps with a gradient, an output and a statistic each, one of them spoilt."""
    kinds = ("gradient/w", "output/y", "statistic/m")
    values = {f"{k}/{kind}": np.array([1 + k, -2], "f") for k in range(2) for kind in kinds}
    values[name][0] += more
    return values


@pytest.mark.parametrize(
    "again, other, said",
    [
        (arrays(), arrays(), ""),
        # What repeats bit for bit must be equal bit for bit.
        (arrays(), arrays("1/gradient/w", 2**-22), r"1/gradient/w differs by \S+, allowed 0"),
        # What does not may differ ten times as far, and says nothing of what does.
        (arrays(more=1e-3), arrays(more=9e-3), ""),
        (arrays(more=1e-3), arrays(more=2e-2), "0/gradient/w differs by 0.02, allowed 0.01"),
        (arrays(more=1e-3), arrays("0/statistic/m", 1e-6), "0/statistic/m differs by"),
        (arrays(), arrays("1/output/y", np.nan), "1/output/y is not finite"),
        (arrays(), {**arrays(), "0/output/y": np.ones(3)}, "0/output/y is missing or of another"),
    ],
)
def test_differences_are_named_with_what_is_allowed(
    rows: Any, again: Any, other: Any, said: str
) -> None:
    lines = rows.differences(arrays(), again, other)
    assert len(lines) == bool(said) and re.match(said, "".join(lines))


def test_a_comparison_that_shows_nothing_is_none(rows: Any) -> None:
    assert rows.nothing_shown(arrays()) == ""
    still = {**arrays(), "1/statistic/m": arrays()["0/statistic/m"]}
    assert "0/statistic/m of the unplanned" in rows.nothing_shown(still)
    assert "0/gradient/w is not finite" in rows.nothing_shown(arrays(more=np.inf))
    unchanged = {**arrays(), "1/gradient/w": arrays()["0/gradient/w"]}
    assert "nothing was computed" in rows.nothing_shown(unchanged)


def test_the_relative_difference_is_that_of_all_arrays_together(rows: Any) -> None:
    one = {"a": np.array([3.0, 0]), "b": np.array([4.0])}
    other = {"a": np.array([3.0, 0.3]), "b": np.array([4.4])}
    assert rows.relative_difference(one, other) == pytest.approx(0.1)
    assert not rows.relative_difference(one, dict(one, b=np.array([np.nan]))) <= 1


def test_the_network_to_compare_with_has_the_same_kernels(rows: Any) -> None:
    net, shapes = networks.resnet_v2((1, 1, 1, 1), batch=2, image=32)
    plan = memonger.plan(net, shapes, how="marks")
    same = rows.same_kernels(net, plan)
    off = {name for name, a in same.attr_dict().items() if a.get("cudnn_off") == "True"}
    assert off == {name for name in plan.recomputed if "bn" in name} and len(off) > 5
    assert "force_mirroring" not in same.tojson()


def test_every_network_has_its_shapes(rows: Any) -> None:
    for build, batch, small in rows.NETWORKS.values():
        for arguments in ({"batch": batch}, {"batch": 2, **small}):
            net, shapes = build(**arguments)
            assert set(shapes) < set(net.list_arguments()) and net.infer_shape(**shapes)[1]


# -- the checks, on the CPU ---------------------------------------------------------------------


def table(folder: Path) -> list[list[str]]:
    """Read the rows that a check left: verdict, check, what, found."""
    return [line.split("\t") for line in (folder / "table.tsv").read_text().splitlines()]


def small_norms(batch: int) -> Any:
    """Build LayerNorm and BatchNorm; the first bears no copy that nobody reads."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="fc1")
    x = mx.sym.BatchNorm(x, fix_gamma=False, momentum=0.9, name="batch")
    x = mx.sym.LayerNorm(x, name="layer")
    x = mx.sym.FullyConnected(x, num_hidden=4, name="fc2")
    x = mx.sym.SoftmaxOutput(x, name="softmax")
    return x, {"data": (batch, 8), "softmax_label": (batch,)}


@pytest.mark.parametrize("broken", [False, True])
def test_a_plan_is_right_or_fails(
    rows: Any, broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A mark that our rules forbid makes MXNet's gradients wrong."""

    def planned(bench: Any, name: str, strategy: str, batch: int = 0) -> Any:
        plan = module_plan(*bench.network(name), ctx=mx.cpu(), **rows.STRATEGIES[strategy])
        if not broken or strategy != "marks":
            return plan
        nodes = mx.sym.load_json(plan.symbol.tojson()).get_internals()
        nodes["layer_output"]._set_attr(force_mirroring="True")
        return dataclasses.replace(plan, symbol=nodes["softmax_output"])

    monkeypatch.setitem(rows.NETWORKS, "norms", (small_norms, 8, {}))
    monkeypatch.setattr(rows.Bench, "plan", planned)
    rows.bits(rows.Bench(argparse.Namespace(device="cpu:0", small=False)), "norms")
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    verdicts = {what.split(": ")[1]: (verdict, found) for verdict, what, found in lines}
    assert verdicts["no plan, twice"] == ("", "0 of 33 arrays differ")
    right = ("PASS", "33 arrays as without a plan, bit for bit")
    assert verdicts["work=1"] == verdicts["work=2"] == right
    verdict, found = verdicts["marks"]
    assert (verdict, found) == right if not broken else verdict == "FAIL"
    assert not broken or re.search(r"first 0/gradient/\w+ (differs by|is not finite)", found)


@pytest.mark.parametrize(
    "options, words",
    [
        ("build", "CPU build.*--device cpu"),
        ("bit", "no check bit; there are prepare, build"),
    ],
)
def test_what_cannot_be_done_is_said(
    options: str, words: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    try:
        status: Any = gpu_check.main([*options.split(), "--out", str(tmp_path)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and re.search(words, said.splitlines()[-1])
    assert len(said.splitlines()) == 1 or options == "bit"


#: In the place of the checks: what each does.
CHECKS = """
import os, sys, time
check = sys.argv[1]
print("PASS\\tfirst\\tseen", flush=True)
print("noise")
if check == "gluon":
    print("Check failed: out of memory", file=sys.stderr, flush=True)
    os.abort()
if check == "front":
    time.sleep(60)
if check == "run":
    print("FAIL\\tsecond\\twrong")
if check == "largest":
    raise ValueError("of no use")
"""


def test_a_check_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checks.py").write_text(CHECKS)
    monkeypatch.setattr(gpu_check, "CHILD", tmp_path / "checks.py")
    chosen = ["gluon", "front", "largest", "run", "build", "memory"]
    monkeypatch.setattr(gpu_check, "CHECKS", dict.fromkeys(chosen, 20))
    monkeypatch.setitem(gpu_check.CHECKS, "front", 2)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: 4 checks failed"
    seen = ["PASS", "first", "seen"]
    found: dict[str, list[Any]] = {name: [] for name in chosen}
    for verdict, check, what, text in table(tmp_path):
        found[check].append([verdict, what, text])
    assert found["build"] == found["memory"] == [seen]
    assert found["gluon"] == [seen, ["FAIL", "gluon", "SIGABRT: Check failed: out of memory"]]
    assert found["front"] == [seen, ["FAIL", "front", "not done after 2 s"]]
    assert found["largest"] == [seen, ["FAIL", "largest", "ValueError: of no use"]]
    assert found["run"] == [seen, ["FAIL", "second", "wrong"]]
    assert gpu_check.main(["build", "--out", str(tmp_path), "--minutes", "0.01"]) == 0
    assert table(tmp_path)[0][0] == "SKIP"


@pytest.mark.exhaustive
def test_all_checks_pass_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    options = "--device cpu:0 --small --minutes 20 --out"
    assert gpu_check.main([*options.split(), str(tmp_path)]) == 0, table(tmp_path)
    verdicts = [verdict for verdict, *_ in table(tmp_path)]
    assert set(verdicts) == {"PASS", ""} and verdicts.count("PASS") == 27
    assert {check for _, check, *_ in table(tmp_path)} == set(gpu_check.CHECKS)


# -- in the dry run ---------------------------------------------------------------------------


def whole(dry: DryRun, *options: str) -> Any:
    return gpu_check.main([*options])


@pytest.mark.gpu_dry_run
def test_a_dry_run_measures_memory_and_passes_for_no_result(
    gpu_dry_run: GpuDryRun, tmp_path: Path
) -> None:
    """Memory is real there. Nothing is computed, and the script must not call that equal."""
    checks = "build memory:resnet50:256 --small --minutes 30 --out"
    done = gpu_dry_run.run(whole, *checks.split(), str(tmp_path))
    assert done.value == 1
    rows = {what: (verdict, found) for verdict, _, what, found in table(tmp_path)}
    assert "compute capability 7.0, driver for CUDA 11.2" in rows["device"][1]
    [(what, found)] = [
        (what, found) for what, (verdict, found) in rows.items() if verdict == "FAIL"
    ]
    assert what == "computes as the CPU does" and "nothing was computed" in found
    for strategy in ("marks", "work=1", "work=2"):
        verdict, found = rows[f"resnet50: {strategy}"]
        seen, predicted, saved, promised = map(float, re.findall(r"\d+\.\d", found))
        assert verdict == "PASS" and promised > 5
        assert seen == pytest.approx(predicted, rel=0.03)
        assert saved == pytest.approx(promised, rel=0.1)


@pytest.mark.gpu_dry_run
@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["bits", "largest", "time front", "gluon run"])
def test_a_dry_run_comes_to_the_end_of_all_checks(
    gpu_dry_run: GpuDryRun, kinds: str, tmp_path: Path
) -> None:
    """Rows end each check; those that compare results show nothing, and say so."""
    options = [*kinds.split(), "--small", "--minutes", "30", "--out", str(tmp_path)]
    done = gpu_dry_run.run(whole, *options, env={"CUDASTUB_MEM_MB": "1536"})
    rows = table(tmp_path)
    expected = {check for check in gpu_check.CHECKS if check.split(":")[0] in kinds.split()}
    assert {check for _, check, *_ in rows} == expected
    assert not [row for row in rows if row[0] == "SKIP" or row[1] == row[2]]
    passed = [row[2] for row in rows if row[0] == "PASS"]
    assert len(passed) == (2 if kinds == "largest" else 0), passed
    failed = [row[3] for row in rows if row[0] == "FAIL"]
    assert all(re.search("nothing is shown, for|nothing was learned", text) for text in failed)
    assert len(failed) == {"bits": 48, "gluon run": 2}.get(kinds, 0)
    assert done.value == bool(failed)


@pytest.mark.gpu_dry_run
@pytest.mark.parametrize(
    "gpu, env, words",
    [
        ("gpu:3", {}, "MXNet sees 1 GPUs, so that there is no gpu(3)"),
        ("gpu:0", {"CUDASTUB_SM": "90"}, "capability 9.0, for which mxnet-cu112 has no code; "),
    ],
    ids=["no-such-gpu", "hopper"],
)
def test_a_gpu_that_will_not_do(
    gpu_dry_run: GpuDryRun, gpu: str, env: Any, words: str, tmp_path: Path
) -> None:
    done = gpu_dry_run.run(whole, "--device", gpu, "--out", str(tmp_path), env=env)
    assert done.value == 2, done.stdout
    assert words in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def plan_on_hopper(dry: DryRun) -> None:
    """Plan for the GPU, for GPUs elsewhere, and for a script that binds on the GPU."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc")
    net = mx.sym.LinearRegressionOutput(x, name="out")
    try:
        memonger.plan(net, data=(2, 3), ctx=mx.gpu(0))
    except memonger.MemongerError as error:
        dry.emit(str(error))
    memonger.plan(net, data=(2, 3), ctx="gpu")
    with memonger.enable():
        net.simple_bind(mx.gpu(0), data=(2, 3))


@pytest.mark.gpu_dry_run
def test_a_gpu_without_code_is_named_with_what_helps(gpu_dry_run: GpuDryRun) -> None:
    done = gpu_dry_run.run(plan_on_hopper, env={"CUDASTUB_SM": "90"})
    assert re.match(r"gpu\(0\) has compute capability 9.0.*24.06-py3", done.value)
    assert f"memonger: out trains without a plan: {done.value}" in done.stderr
    assert gpu_dry_run.run(plan_on_hopper, env={"CUDASTUB_SM": "89"}).emitted == []
