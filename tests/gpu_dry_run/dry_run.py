"""The pytest fixture ``gpu_dry_run``: run Python code on MXNet's GPU build without a GPU.

    @pytest.mark.gpu_dry_run
    def test_binds(gpu_dry_run):
        def body(dry):
            import mxnet as mx
            net = mx.sym.FullyConnected(mx.sym.Variable('data'), num_hidden=8)
            net.simple_bind(mx.gpu(0), data=(4, 3)).forward(is_train=True)
            return net.list_arguments()

        result = gpu_dry_run.run(body)
        assert result.ok, result.message
        assert result.value[0] == 'data'

A body runs in a process of its own, so that a crash is a result and not the end of the tests. To
make it known elsewhere: ``from gpu_dry_run.dry_run import gpu_dry_run`` in ``tests/conftest.py``
(with a ``noqa: F401``, or named in ``__all__``).

The wheel and the stand-ins are installed once, below ``.gpu-dry-run/`` in the project root or where
``MEMONGER_GPU_DRY_RUN_DIR`` says (0.9 GB on disk, half a minute the first time).
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import pytest

from . import gen_stub

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
WHEEL = "mxnet-cu112==1.9.1"
# Settings of whoever runs the tests that would change what a dry run shows.
MXNET_SETTING = re.compile(r"(MXNET|NNVM|CUDASTUB|DMLC|PS)_")


class UnavailableError(Exception):
    """The dry run cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Result:
    """What came of one body.

    Attributes
    ----------
    returncode : int
        0, or 1 after a Python exception, or minus the number of the signal that killed the process.
    value : object
        What the body returned; for source text, what it emitted last.
    emitted : list
        All that it emitted, in order; what a function returned is the last one.
    used_bytes, peak_bytes : int or None
        Memory that the (first) GPU held at the end, and the most it held. After a crash: when the
        body emitted last, or None if it never did.
    trace : list of str
        One line for each recorded call, if asked for: ``cudaMalloc 2097152``, ``kernel <name>``,
        ``cudnnConvolutionForward``, ...
    stdout, stderr : str
        What the process printed.
    error : str or None
        The Python exception, if there was one.
    """

    returncode: int
    value: Any
    emitted: list[Any]
    used_bytes: int | None
    peak_bytes: int | None
    trace: list[str]
    stdout: str
    stderr: str
    error: str | None

    @property
    def ok(self) -> bool:
        """Whether the body came to its end."""
        return self.returncode == 0

    @property
    def message(self) -> str:
        """Why it did not: the exception or the signal, and MXNet's failed check."""
        if self.ok:
            return ""
        said = self.error or self.stderr
        checks = [line for line in said.splitlines() if "Check failed" in line or "what()" in line]
        parts = checks[:1] or said.strip().splitlines()[-1:]
        if self.returncode < 0:
            parts.insert(0, signal.Signals(-self.returncode).name)
        return ": ".join(part.strip() for part in parts)


class GpuDryRun:
    """An installed dry run; see ``run``."""

    def __init__(self, wheel: Path, stubs: Path) -> None:
        self.wheel = wheel
        self.stubs = stubs

    def run(
        self,
        body: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        devices: int = 1,
        memory_mb: int = 32768,
        capability: int = 70,
        env: Mapping[str, str] | None = None,
        trace: bool = False,
        timeout: float = 600,
    ) -> Result:
        """Run a body in a process of its own, on the GPU build of MXNet.

        Parameters
        ----------
        body : str or function
            Source text, or a function, which is taken over as source: it must import what it uses,
            and cannot see variables around it. A function with one parameter gets ``dry``; source
            text finds it as a global: ``dry.emit(value)`` reports a value at once (importing MXNet
            takes 1-2 s, so let one body try many things), ``dry.args``, ``dry.used_bytes()``,
            ``dry.peak_bytes()``, ``dry.reset_peak()``.
        args : sequence
            Values for ``dry.args``, as JSON.
        devices : int
            How many GPUs there are, at most 8.
        memory_mb : int
            The memory of each, in MB of 2**20 bytes.
        capability : int
            Compute capability times ten.
        env : mapping, optional
            Environment variables. Those of MXNet that the tests run under are not inherited.
        trace : bool
            Whether to record calls (one line each; a long run makes many).
        timeout : float
            Seconds after which the process is killed, which raises ``subprocess.TimeoutExpired``.
        """
        with tempfile.TemporaryDirectory() as folder:
            body_path, report_path, trace_path = (
                os.path.join(folder, name) for name in ("body.json", "report.jsonl", "trace")
            )
            with open(body_path, "w") as f:
                json.dump(dict(_as_source(body), args=list(args)), f)
            environment = {k: v for k, v in os.environ.items() if not MXNET_SETTING.match(k)}
            environment.update(
                LD_LIBRARY_PATH=str(self.stubs),
                PYTHONPATH=os.pathsep.join([str(self.wheel), str(PROJECT)]),
                CUDASTUB_DEVICES=str(devices),
                CUDASTUB_MEM_MB=str(memory_mb),
                CUDASTUB_SM=str(capability),
                # Timing convolutions that do nothing would only fill the log.
                MXNET_CUDNN_AUTOTUNE_DEFAULT="0",
            )
            if trace:
                environment["CUDASTUB_TRACE"] = trace_path
            environment.update(env or {})
            process = subprocess.run(
                [sys.executable, str(HERE / "child.py"), body_path, report_path],
                env=environment,
                check=False,  # a crash is a result
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout,
            )
            said = [json.loads(line) for line in _lines(report_path)]
            recorded = _lines(trace_path)
        emitted = [x["value"] for x in said if "value" in x]
        last: dict[str, Any] = said[-1] if said else {}
        return Result(
            returncode=process.returncode,
            value=emitted[-1] if emitted else None,
            emitted=emitted,
            used_bytes=last.get("used"),
            peak_bytes=last.get("peak"),
            trace=recorded,
            stdout=process.stdout,
            stderr=process.stderr,
            error=last.get("error"),
        )


def _as_source(body: str | Callable[..., Any]) -> dict[str, Any]:
    if isinstance(body, str):
        return {"source": textwrap.dedent(body), "function": None}
    return {"source": textwrap.dedent(inspect.getsource(body)), "function": body.__name__}


def _lines(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as f:
        return f.read().splitlines()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone: several pytest workers may want to install."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def install() -> GpuDryRun:
    """Install the wheel and build the stand-ins, unless that was done before.

    Raises
    ------
    UnavailableError
        Where there is no gcc, or pip cannot get the wheel.
    """
    root = Path(os.environ.get("MEMONGER_GPU_DRY_RUN_DIR") or PROJECT / ".gpu-dry-run").resolve()
    if shutil.which("gcc") is None:
        raise UnavailableError("no gcc to build the CUDA stand-ins with")
    with _locked(root):
        wheel = root / "mxnet-cu112"
        if not wheel.exists():
            _install_wheel(wheel)
        sources = gen_stub.SOURCE.read_bytes() + Path(gen_stub.__file__).read_bytes()
        stubs = root / f"stubs-{hashlib.sha256(sources).hexdigest()[:12]}"
        if not stubs.exists():
            for old in root.glob("stubs*"):
                shutil.rmtree(old)
            part = root / "stubs.part"
            gen_stub.build(wheel / "mxnet" / "libmxnet.so", part)
            part.rename(stubs)
    return GpuDryRun(wheel, stubs)


def _install_wheel(target: Path) -> None:
    # A folder under its final name is whole: pip fills one beside it, which is renamed at the end.
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(part), WHEEL]
    done = subprocess.run(
        pip, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        said = done.stdout.strip().splitlines() or ["pip said nothing"]
        raise UnavailableError(f"pip cannot install {WHEEL}: {said[-1]}")
    part.rename(target)


@pytest.fixture(scope="session")
def gpu_dry_run() -> GpuDryRun:
    """Run code on MXNet's GPU build without a GPU; skips where that cannot be installed."""
    try:
        return install()
    except UnavailableError as reason:
        raise pytest.skip.Exception(f"GPU dry run: {reason}") from None
