"""``examples/gpu_check.py``, where numbers are real (the CPU) and where memory is (the dry run)."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from typing import Any

import pytest

import memonger
import gpu_check
import mxnet as mx
import networks
import numpy as np

from planned import module_plan, run_python

from .child import DryRun
from .dry_run import PROJECT, GpuDryRun

SMALL = ["--net", "resnet14", "--batch", "4", "--steps", "3"]


# -- what is compared -------------------------------------------------------------------------


def arrays(gradient: Any = (1.0, -2.0), statistic: Any = (0.5,)) -> dict[str, np.ndarray]:
    """Two steps of a network with one gradient, one output and one statistic."""
    found = {}
    for step in range(2):
        found[f"{step}/gradient/w"] = np.array(gradient, "f") + step
        found[f"{step}/output/y"] = np.ones(3, "f")
        found[f"{step}/statistic/m"] = np.array(statistic, "f") + step
    return found


def test_what_repeats_bit_for_bit_must_be_equal_bit_for_bit() -> None:
    one, other = arrays(), arrays()
    assert gpu_check.differences(one, arrays(), other, list(one)) == []
    other["1/gradient/w"][0] = np.nextafter(other["1/gradient/w"][0], np.float32(9))
    (said,) = gpu_check.differences(one, arrays(), other, list(one))
    assert re.fullmatch(r"1/gradient/w differs by \S+, allowed 0", said)


@pytest.mark.parametrize("by, passes", [(5e-3, True), (9e-3, True), (2e-2, False)])
def test_what_does_not_repeat_may_differ_as_far(by: float, passes: bool) -> None:
    one, again, other = arrays(), arrays(), arrays()
    again["0/gradient/w"][1] += 1e-3
    other["0/gradient/w"][0] += by
    assert (gpu_check.differences(one, again, other, list(one)) == []) == passes
    # It says nothing of the arrays that did repeat.
    other["0/statistic/m"][0] += 1e-6
    assert gpu_check.differences(one, again, other, ["0/statistic/m"])


def test_missing_and_not_finite_arrays_are_wrong() -> None:
    one, other = arrays(), arrays()
    del other["0/output/y"]
    other["1/gradient/w"][:] = np.nan
    assert gpu_check.differences(one, arrays(), other, list(one)) == [
        "0/output/y is missing or of another shape",
        "1/gradient/w is not finite",
    ]


def test_a_comparison_that_shows_nothing_is_none() -> None:
    assert gpu_check.nothing_shown(arrays()) is None
    zero = arrays()
    for step in "01":
        zero[step + "/gradient/w"][:] = 0
    still = arrays()
    still["1/statistic/m"] = still["0/statistic/m"]
    for found, words in (
        (zero, "nothing was computed"),
        (still, "0/statistic/m of the unplanned network does not move"),
        (arrays(gradient=(np.inf, 1)), "0/gradient/w is not finite"),
    ):
        assert words in str(gpu_check.nothing_shown(found))


def test_relative_difference() -> None:
    one = {"a": np.array([3.0, 0]), "b": np.array([4.0])}
    other = {"a": np.array([3.0, 0.3]), "b": np.array([4.4])}
    assert gpu_check.relative_difference(one, other, ["a", "b"]) == pytest.approx(0.1)
    assert not gpu_check.relative_difference(one, dict(one, b=np.array([np.nan])), ["b"]) <= 1


def test_the_network_to_compare_with_has_the_same_kernels() -> None:
    net, shapes = networks.resnet_v2((1, 1, 1, 1), batch=2, image=32)
    plan = memonger.plan(net, shapes)
    same = gpu_check.same_kernels(net, plan.symbol)
    off = {name for name, a in same.attr_dict().items() if a.get("cudnn_off") == "True"}
    norms = {name for name in plan.recomputed if "bn" in name}
    assert off == norms and len(off) > 5
    assert "force_mirroring" not in same.tojson()
    assert same.list_arguments() == net.list_arguments()


@pytest.mark.parametrize("name", sorted(gpu_check.NETS))
def test_every_network_has_values_to_start_from(name: str) -> None:
    build, side = gpu_check.NETS[name]
    net, shapes = build(1, side)
    _, outputs, _ = net.infer_shape(**shapes)
    assert set(shapes) < set(net.list_arguments())
    assert outputs


# -- the whole script, on the CPU -------------------------------------------------------------


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return run_python("-W", "ignore", "examples/gpu_check.py", *options)


def verdicts(printed: str) -> list[tuple[str, str]]:
    """PASS or FAIL, and of what."""
    return re.findall(r"^(PASS|FAIL)  ([^:]*)", printed, re.M)


def test_on_the_cpu_it_passes() -> None:
    done = command(*SMALL, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(done.stdout) == [
        ("PASS", "gradients and outputs"),
        ("PASS", "running statistics"),
    ]
    assert done.stdout.splitlines()[-1] == "PASS: all checks passed"
    assert done.stdout.count("bit for bit") == 2
    assert re.search(r"a step takes \d+\.\d\d times as long", done.stdout)
    assert "mxnet 1.9.1" in done.stdout and "numpy " in done.stdout


@pytest.mark.parametrize(
    "options, words",
    [
        ([], ["CPU build", "--device cpu"]),
        (["--batch", "0"], ["--batch must be at least 1"]),
        (["--steps", "-1"], ["--steps must be at least 1"]),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said(options: list[str], words: list[str]) -> None:
    done = command(*SMALL, *options)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 1 or options
    assert all(word in said[-1] for word in words)


def small_norms(batch: int, _: int) -> Any:
    """LayerNorm and BatchNorm; the first bears no copy that nobody reads."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="fc1")
    x = mx.sym.BatchNorm(x, fix_gamma=False, momentum=0.9, name="batch")
    x = mx.sym.LayerNorm(x, name="layer")
    x = mx.sym.FullyConnected(x, num_hidden=4, name="fc2")
    x = mx.sym.SoftmaxOutput(x, name="softmax")
    return x, {"data": (batch, 8), "softmax_label": (batch,)}


def altered(node: str, **attributes: str) -> Any:
    """What gives a node of a network other attributes."""

    def alter(net: Any) -> Any:
        nodes = mx.sym.load_json(net.tojson()).get_internals()
        nodes[node]._set_attr(**attributes)
        return nodes["softmax_output"]

    return alter


@pytest.mark.parametrize(
    "breaks, wrong, words",
    [
        (
            # A mark that our rules forbid: MXNet's gradients are wrong with it. Of the second step,
            # in which the parameters are others by then.
            altered("layer_output", force_mirroring="True"),
            ["gradients and outputs", "running statistics"],
            r"first 0/gradient/\w+ (differs by|is not finite)",
        ),
        (
            # Running statistics move otherwise, as cuDNN's would if they moved twice.
            altered("batch_output", momentum="0.81"),
            ["running statistics"],
            r"statistic/batch_moving_\w+ differs by",
        ),
        (
            altered("fc2_bias", __shape__="(5,)"),
            ["the planned network does not run"] * 2,
            r"exit status 1: ",
        ),
    ],
    ids=["unread LayerNorm", "momentum", "no bind"],
)
def test_a_broken_plan_fails(
    breaks: Any,
    wrong: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    right = gpu_check.planned

    def broken_plan(net: Any, shapes: Any, device: str) -> Any:
        return dataclasses.replace(right(net, shapes, device), symbol=breaks(net))

    monkeypatch.setitem(gpu_check.NETS, "norms", (small_norms, 0))
    monkeypatch.setattr(gpu_check, "planned", broken_plan)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    status = gpu_check.main(["--net", "norms", "--batch", "8", "--device", "cpu", "--steps", "3"])
    printed = capsys.readouterr().out
    assert status == 1
    assert [what for verdict, what in verdicts(printed) if verdict == "FAIL"] == wrong, printed
    assert re.search(words, printed), printed
    assert printed.splitlines()[-1].startswith(f"FAIL: {len(wrong)} of the checks")


# -- in the dry run ---------------------------------------------------------------------------


def whole(dry: DryRun, options: list[str]) -> Any:
    """Run the script; return its exit status."""
    return gpu_check.main(options)


@pytest.mark.gpu_dry_run
def test_dry_run(gpu_dry_run: GpuDryRun) -> None:
    """Memory is real there. Nothing is computed, and the script must not call that equal."""
    options = ["--net", "resnet14", "--batch", "32", "--image", "128", "--steps", "3"]
    done = gpu_dry_run.run(whole, options)
    assert done.ok, done.message
    assert done.value == 1
    assert verdicts(done.stdout) == [
        ("PASS", "device memory"),
        ("FAIL", "gradients and outputs"),
        ("FAIL", "running statistics"),
        ("FAIL", "gradients"),
        ("FAIL", "running statistics"),
    ]
    assert done.stdout.count("zero: nothing was computed") == 4
    assert "compute capability 7.0, driver for CUDA 11.2" in done.stdout
    (row,) = re.findall(r"^  planned +([\d.]+) +([\d.]+) +(-?[\d.]+)$", done.stdout, re.M)
    predicted, measured, _ = map(float, row)
    assert measured == pytest.approx(predicted, rel=0.03)
    (saved,) = re.findall(r"^  saved +([\d.]+) +([\d.]+) ", done.stdout, re.M)
    assert float(saved[1]) == pytest.approx(float(saved[0]), rel=0.1) and float(saved[0]) > 10


@pytest.mark.gpu_dry_run
@pytest.mark.parametrize(
    "options, env, words",
    [
        (["--gpu", "3"], {}, "MXNet sees 1 GPUs, so that there is no gpu(3)"),
        ([], {"CUDASTUB_SM": "90"}, "has compute capability 9.0; MXNet's GPU build has code for"),
        ([], {"CUDASTUB_MEM_MB": "64"}, "out of memory); try a smaller --batch"),
    ],
    ids=["no-such-gpu", "hopper", "small-gpu"],
)
def test_a_gpu_that_will_not_do(
    gpu_dry_run: GpuDryRun, options: list[str], env: dict[str, str], words: str
) -> None:
    options = ["--net", "resnet14", "--batch", "64", "--image", "128", "--steps", "2", *options]
    done = gpu_dry_run.run(whole, options, env=env)
    assert done.ok, done.message
    assert done.value == 2, done.stdout
    said = [line for line in done.stderr.splitlines() if not line.startswith("  training ")]
    assert words in said[-1], done.stderr
    assert "Traceback" not in done.stderr


def one_training(dry: DryRun, symbol: Any, shapes: Any, file: str) -> Any:
    """Train once, in this process; return what was measured, and the bytes that are held."""
    found = gpu_check.train(symbol, shapes, mx.gpu(0), 3, 2, file)
    return [found.arrays_bytes, found.step_bytes, dry.used_bytes()]


@pytest.mark.gpu_dry_run
def test_every_training_takes_its_steps(gpu_dry_run: GpuDryRun, tmp_path: Any) -> None:
    """Three steps of the network as it is, and of the one that its plan is compared with."""
    net, shapes = networks.resnet_v2((1, 1, 1, 1), batch=4, image=64)
    plan = module_plan(net, shapes)
    norms = [name for name in net.attr_dict() if re.search(r"bn(\d|_data)+$", name)]
    off = [name for name in norms if name in plan.recomputed]
    assert 0 < len(off) <= len(norms)
    for symbol, by_cudnn in (
        (net, len(norms)),
        (gpu_check.same_kernels(net, plan.symbol), len(norms) - len(off)),
        (plan.symbol, len(norms) - len(off)),
    ):
        file = str(tmp_path / "arrays.npz")
        env = {"MXNET_USE_FUSION": "0"}
        done = gpu_dry_run.run(one_training, symbol, shapes, file, trace=True, env=env)
        assert done.ok, done.message
        calls = [line.split()[0] for line in done.trace]
        assert calls.count("cudnnBatchNormalizationForwardTraining") == 3 * by_cudnn
        arrays_bytes, step_bytes, held = done.value
        assert 0 < arrays_bytes and 0 < step_bytes
        assert held >= arrays_bytes + step_bytes
        with np.load(file) as kept:
            steps = {name.split("/")[0] for name in kept.files}
            assert steps == {"0", "1"}
            assert len(gpu_check.of_kind(kept, "statistic")) == 2 * 2 * len(norms)
