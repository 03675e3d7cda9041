"""The pytest fixture ``gpu_dry_run``: run a function on MXNet's GPU build without a GPU.

    def binds(dry, hidden):
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden)
        net.simple_bind(mx.gpu(0), data=(4, 3)).forward(is_train=True)
        return net.list_arguments()

    @pytest.mark.gpu_dry_run
    def test_binds(gpu_dry_run):
        result = gpu_dry_run.run(binds, 8)
        assert result.ok, result.message
        assert result.value[0] == "data"

A function runs in a process of its own, so that a crash is a result and not the end of the tests.

The wheel and the stand-ins are installed once, below ``.gpu-dry-run/`` in the project root or where
``MEMONGER_GPU_DRY_RUN_DIR`` says (0.9 GB on disk, half a minute the first time).
"""

from __future__ import annotations

import dis
import fcntl
import hashlib
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import pytest

from . import gen_stub

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
PATHS = (PROJECT / "tests" / "helpers", PROJECT / "examples")
WHEEL = "mxnet-cu112==1.9.1"
# Settings of whoever runs the tests that would change what a dry run shows.
MXNET_SETTING = re.compile(r"(MXNET|NNVM|CUDASTUB|DMLC|PS)_")


class UnavailableError(Exception):
    """The dry run cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Result:
    """What came of one function.

    `returncode` is 1 after a Python exception, and minus the number of the signal that killed the
    process. `emitted` has what ``dry.emit`` was given and what was returned, and `trace` one line
    for each recorded call: ``cudaMalloc 2097152``, ``kernel <name>``, ``cudnnRNNForward``, ...
    Bytes are those of the first GPU at the end; after a crash, when the function emitted last.
    """

    returncode: int
    emitted: list[Any]
    used_bytes: int | None
    peak_bytes: int | None
    trace: list[str]
    stdout: str
    stderr: str
    error: str | None

    @property
    def value(self) -> Any:
        """What the function returned or, after a crash, emitted last."""
        return self.emitted[-1] if self.emitted else None

    @property
    def ok(self) -> bool:
        """Whether the function came to its end."""
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
    """An installed dry run."""

    def __init__(self, wheel: Path, stubs: Path) -> None:
        self.wheel, self.stubs = wheel, stubs

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        devices: int = 1,
        memory_mb: int = 32768,
        env: Mapping[str, str] | None = None,
        trace: bool = False,
    ) -> Result:
        """Run ``function(dry, *args)`` in a process of its own, on the GPU build of MXNet.

        Parameters
        ----------
        function : callable
            It is taken over as source, with the modules and functions that it uses; it cannot see
            the variables of a function around it. ``dry`` is a `child.DryRun`. What it emits and
            returns must be known to JSON.
        devices, memory_mb : int
            How many GPUs there are, at most 8, and the memory of each, in MB of 2**20 bytes.
        env : mapping, optional
            Environment variables. Those of MXNet that the tests run under are not inherited.
        trace : bool
            Whether to record calls.
        """
        with tempfile.TemporaryDirectory() as folder:
            body, report, calls = (
                os.path.join(folder, name) for name in ("body", "report", "calls")
            )
            source = "\n".join(dict.fromkeys(_source(function, set())))
            with open(body, "wb") as f:
                pickle.dump((source, function.__name__, pickle.dumps(args)), f)
            environment = {k: v for k, v in os.environ.items() if not MXNET_SETTING.match(k)}
            environment.update(
                LD_LIBRARY_PATH=str(self.stubs),
                PYTHONPATH=os.pathsep.join(map(str, (self.wheel, PROJECT, *PATHS))),
                CUDASTUB_DEVICES=str(devices),
                CUDASTUB_MEM_MB=str(memory_mb),
                CUDASTUB_SM="70",  # the compute capability, times ten
                # Timing convolutions that do nothing would only fill the log.
                MXNET_CUDNN_AUTOTUNE_DEFAULT="0",
                **({"CUDASTUB_TRACE": calls} if trace else {}),
            )
            process = subprocess.run(
                [sys.executable, str(HERE / "child.py"), body, report],
                env={**environment, **(env or {})},
                check=False,  # a crash is a result
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=600,
            )
            said = [json.loads(line) for line in _lines(report)]
            trace_lines = _lines(calls)
        last: dict[str, Any] = said[-1] if said else {}
        return Result(
            returncode=process.returncode,
            emitted=[x["value"] for x in said if "value" in x],
            used_bytes=last.get("used"),
            peak_bytes=last.get("peak"),
            trace=trace_lines,
            stdout=process.stdout,
            stderr=process.stderr,
            error=last.get("error"),
        )


def _source(function: Callable[..., Any], known: set[str]) -> Iterator[str]:
    """Yield the statements that define a function and the globals that it uses."""
    known.add(function.__name__)
    yield "import memonger"  # before MXNet
    for name in filter(str.isidentifier, sorted(_globals(function.__code__))):
        value = function.__globals__.get(name)
        if inspect.ismodule(value):
            yield f"import {value.__name__} as {name}"
        elif isinstance(value, (int, str, tuple)):
            yield f"{name} = {value!r}"
        elif value is not None and value.__module__.split(".")[0] != __name__.split(".")[0]:
            yield f"from {value.__module__} import {name}"
        elif value is not None and name not in known:
            yield from _source(value, known)
    yield textwrap.dedent(inspect.getsource(function))


def _globals(code: types.CodeType) -> set[str]:
    names = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals(c) for c in code.co_consts if inspect.iscode(c)))


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
    """Install the wheel and build the stand-ins, unless that was done before."""
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
