"""The pytest fixture ``gpu_dry_run``: run a function on MXNet's GPU build without a GPU.

The wheel and the stand-ins are installed once, below ``.gpu-dry-run/`` in the project root or where
``MEMONGER_GPU_DRY_RUN_DIR`` says (0.9 GB on disk, half a minute the first time).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import pytest

from efforts import efforts

from . import gen_stub

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
PATHS = (PROJECT, HERE.parent, HERE.parent / "helpers", PROJECT / "examples")
WHEEL = "mxnet-cu112==1.9.1"
# Settings of whoever runs the tests that would change what a dry run shows.
MXNET_SETTING = re.compile(r"(MXNET|NNVM|CUDASTUB|DMLC|PS)_")


@dataclass(frozen=True)
class Result:
    """What came of one function.

    ``emitted`` has what ``dry.emit`` was given and what was returned, but for None, and ``trace``
    one line for each call: ``cudaMalloc 2097152``, ``kernel <name>``, ...
    """

    returncode: int
    emitted: list[Any]
    trace: list[str]
    stdout: str
    stderr: str

    @property
    def value(self) -> Any:
        """Return what the function returned or, after a crash, emitted last."""
        return self.emitted[-1]

    @property
    def message(self) -> str:
        """Why it did not come to its end: the signal, and MXNet's failed check or the exception."""
        lines = self.stderr.strip().splitlines()
        parts = [line for line in lines if "Check failed" in line or "what()" in line] or lines[-1:]
        killed = [signal.Signals(-self.returncode).name] if self.returncode < 0 else []
        return ": ".join([*killed, *map(str.strip, parts[:1])])


@dataclass(frozen=True)
class GpuDryRun:
    wheel: Path
    stubs: Path

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        crashes: bool | None = False,
    ) -> Result:
        """Run ``function(dry, *args)``, of a module that imports memonger before MXNet.

        In a process of its own: ``crashes`` says whether that is to end with an exception or a
        signal; None if either will do. The stand-ins have settings too (see ``cuda_stub.c``).
        """
        with tempfile.TemporaryDirectory() as folder:
            job, report, calls = (Path(folder, name) for name in ("job", "report", "calls"))
            job.write_bytes(pickle.dumps((efforts(), function, args)))
            environment = {k: v for k, v in os.environ.items() if not MXNET_SETTING.match(k)}
            environment.update(
                LD_LIBRARY_PATH=str(self.stubs),
                PYTHONPATH=os.pathsep.join(map(str, (self.wheel, *PATHS))),
                CUDASTUB_MEM_MB=str(2**17),
                CUDASTUB_TRACE=str(calls),
                # Timing convolutions that do nothing would only fill the log.
                MXNET_CUDNN_AUTOTUNE_DEFAULT="0",
                # Nothing is computed, so that nothing can be told of changed parameters.
                MEMONGER_WATCH="0",
            )
            process = subprocess.run(
                [sys.executable, str(HERE / "child.py"), str(job), str(report)],
                env={**environment, **(env or {})},
                check=False,  # a crash is a result
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=600,
            )
            result = Result(
                returncode=process.returncode,
                emitted=list(_emitted(report)),
                trace=calls.read_text(errors="replace").splitlines(),
                stdout=process.stdout,
                stderr=process.stderr,
            )
        ended = result.returncode != 0
        assert crashes in (None, ended), (result.message, result.emitted)
        return result


def _emitted(report: Path) -> Iterator[Any]:
    if report.exists():
        with report.open("rb") as f:
            while f.peek():
                yield pickle.load(f)


@pytest.fixture(scope="session")
def gpu_dry_run() -> GpuDryRun:
    """Run code on MXNet's GPU build without a GPU; skips where that cannot be installed."""
    root = Path(os.environ.get("MEMONGER_GPU_DRY_RUN_DIR") or PROJECT / ".gpu-dry-run").resolve()
    if shutil.which("gcc") is None:
        pytest.skip("GPU dry run: no gcc to build the CUDA stand-ins with")
    sources = gen_stub.SOURCE.read_bytes() + Path(gen_stub.__file__).read_bytes()
    wheel = root / "mxnet-cu112"
    stubs = root / f"stubs-{hashlib.sha256(sources).hexdigest()[:12]}"
    root.mkdir(parents=True, exist_ok=True)
    # A folder under its final name is whole: what fills it is renamed at the end.
    part = root / "part"
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest workers may want to install
        shutil.rmtree(part, ignore_errors=True)
        if not wheel.exists():
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(part)]
            done = subprocess.run([*pip, WHEEL], capture_output=True, text=True)
            if done.returncode != 0:
                said = (done.stdout + done.stderr).strip().splitlines() or ["pip said nothing"]
                pytest.skip(f"GPU dry run: pip cannot install {WHEEL}: {said[-1]}")
            part.rename(wheel)
        if not stubs.exists():
            gen_stub.build(wheel / "mxnet" / "libmxnet.so", part)
            part.rename(stubs)
    return GpuDryRun(wheel, stubs)
