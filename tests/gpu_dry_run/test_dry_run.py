"""What the stand-ins promise: memory is counted, crashes come back, calls are recorded."""

from __future__ import annotations

import os
from typing import Any

import memonger  # noqa: F401
import mxnet as mx
import pytest

from .child import DryRun
from .dry_run import GpuDryRun
from .steps import MB

pytestmark = pytest.mark.gpu_dry_run


def allocating(dry: DryRun, *args: Any) -> Any:
    """Fill two GPUs, and run out of the memory of one."""
    dry.emit((mx.__version__, mx.context.num_gpus(), args))
    print("printed")
    arrays = [mx.nd.zeros((n, 2**20), ctx=mx.gpu(k)) for k, n in enumerate((1, 3))]
    mx.nd.waitall()
    dry.emit([dry.used_bytes(k) for k in range(3)])
    del arrays
    mx.gpu(1).empty_cache()
    dry.emit([dry.used_bytes(1), dry.peak_bytes(1)])
    dry.resize(8)
    mx.nd.zeros((3, 2**20), ctx=mx.gpu(0))
    return "not waited for"


def dying(dry: DryRun) -> None:
    dry.emit("still here")
    os.abort()


def test_memory_is_counted(gpu_dry_run: GpuDryRun) -> None:
    result = gpu_dry_run.run(allocating, "a", 2, env={"CUDASTUB_DEVICES": "2"}, crashes=True)
    assert result.emitted == [("1.9.1", 2, ("a", 2)), [4 * MB, 12 * MB, 0], [0, 12 * MB]]
    assert result.returncode == 1 and "out of memory" in result.message
    assert result.stdout == "printed\n"
    assert f"cudaMalloc {12 * MB}" in result.trace


def test_death_of_the_process_is_a_result(gpu_dry_run: GpuDryRun) -> None:
    result = gpu_dry_run.run(dying, crashes=True)
    assert (result.returncode, result.value) == (-6, "still here")
    assert result.message.startswith("SIGABRT")
