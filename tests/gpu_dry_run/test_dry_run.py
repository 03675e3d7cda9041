"""What the stand-ins promise: crashes come back, memory is counted, calls are recorded."""

from __future__ import annotations

import os
from typing import Any

import memonger  # noqa: F401
import mxnet as mx
import pytest

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import MB, step

pytestmark = pytest.mark.gpu_dry_run


def test_function_returns_its_value(gpu_dry_run: GpuDryRun) -> None:
    def body(dry: DryRun, *args: Any) -> Any:
        return [mx.__version__, mx.context.num_gpus(), args]

    result = gpu_dry_run.run(body, "a", 2)
    assert result.ok, result.message
    assert result.value == ["1.9.1", 1, ["a", 2]]


def test_function_reports_as_it_goes(gpu_dry_run: GpuDryRun) -> None:
    def body(dry: DryRun) -> None:
        for i in range(3):
            dry.emit(i)
        print("printed")
        raise SystemError("enough")

    result = gpu_dry_run.run(body)
    assert (result.returncode, result.emitted, result.value) == (1, [0, 1, 2], 2)
    assert result.message == "SystemError: enough"
    assert result.stdout == "printed\n"


def test_death_of_the_process_is_a_result(gpu_dry_run: GpuDryRun) -> None:
    def body(dry: DryRun) -> None:
        dry.emit("still here")
        os.abort()

    result = gpu_dry_run.run(body)
    assert (result.returncode, result.value) == (-6, "still here")
    assert result.message.startswith("SIGABRT")


@pytest.mark.parametrize("memory_mb, fits", [(64, True), (8, False)])
def test_arrays_hold_device_memory(gpu_dry_run: GpuDryRun, memory_mb: int, fits: bool) -> None:
    def body(dry: DryRun) -> Any:
        before = dry.used_bytes()
        x = mx.nd.zeros((3, 2**20), ctx=mx.gpu(0))
        x.wait_to_read()
        return dry.used_bytes() - before

    result = gpu_dry_run.run(body, memory_mb=memory_mb)
    assert result.ok == fits, result.message
    if fits:
        assert result.value == 12 * MB  # float32
        assert result.peak_bytes is not None and result.peak_bytes >= 12 * MB
    else:
        assert "out of memory" in result.message


def test_each_device_has_its_memory(gpu_dry_run: GpuDryRun) -> None:
    def body(dry: DryRun) -> Any:
        arrays = [mx.nd.zeros((n, 2**20), ctx=mx.gpu(k)) for k, n in enumerate((1, 3))]
        mx.nd.waitall()
        held = [dry.used_bytes(k) for k in range(3)]
        del arrays
        mx.gpu(1).empty_cache()
        return [mx.context.num_gpus(), held, dry.used_bytes(1), dry.peak_bytes(1)]

    result = gpu_dry_run.run(body, devices=2)
    assert result.ok, result.message
    assert result.value == [2, [4 * MB, 12 * MB, 0], 0, 12 * MB]


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_unread_cudnn_batch_norm_aborts(gpu_dry_run: GpuDryRun, fusion: str) -> None:
    """The reason why this folder exists: the original's plan for its own example does this."""

    def body(dry: DryRun) -> None:
        for cudnn_off in (True, False):
            norm = mx.sym.BatchNorm(mx.sym.Variable("data"), cudnn_off=cudnn_off)
            norm._set_attr(force_mirroring="True")
            net = mx.sym.MakeLoss(mx.sym.FullyConnected(norm, num_hidden=2))
            step(net.simple_bind(mx.gpu(0), data=(4, 3)))
            dry.emit(cudnn_off)

    result = gpu_dry_run.run(body, env={"MXNET_USE_FUSION": fusion})
    assert (result.ok, result.emitted) == (False, [True])
    # MXNet's Python side breaks up the '::' of its C++ messages.
    assert "req[cudnnbatchnorm: :kOut] == kWriteTo (0 vs. 1)" in result.message


def test_rnn_steps(gpu_dry_run: GpuDryRun) -> None:
    """MXNet checks cuDNN's parameter count against its own; what is kept is as once measured."""
    arrays = {"rnn_relu": 2, "rnn_tanh": 2, "lstm": 6, "gru": 7}
    modes = [(mode, bidirectional) for mode in arrays for bidirectional in (False, True)]
    shape, layers = (16, 4, 64), 2

    def body(dry: DryRun, modes: Any, shape: Any, num_layers: int) -> None:
        for mode, bidirectional in modes:
            options = {"mode": mode, "bidirectional": bidirectional, "num_layers": num_layers}
            net = mx.sym.RNN(mx.sym.Variable("data"), state_size=shape[2], **options)
            step(mx.sym.MakeLoss(net).simple_bind(mx.gpu(0), data=shape))

    result = gpu_dry_run.run(body, modes, shape, layers, trace=True)
    assert result.ok, result.message
    calls = ("cudnnGetRNNTrainingReserveSize", "cudnnRNNForward", "cudnnRNNBackward")
    expected = []
    for mode, bidirectional in modes:
        # Arrays of the size of a layer's output, in float32; the last is the output itself.
        kept = (arrays[mode] * layers - 1) * (2 if bidirectional else 1)
        expected += [
            f"cudnnGetRNNTrainingReserveSize {4 * 16 * 4 * 64 * kept}",
            "cudnnRNNForwardTrainingEx",
            "cudnnRNNBackwardDataEx",
            "cudnnRNNBackwardWeightsEx",
        ]
    assert [line for line in result.trace if line.startswith(calls)] == expected
