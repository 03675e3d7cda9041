"""``pip install '.[cu112]'`` for real, in an environment of its own: 2.2 GB to download.

The libraries that it installs are NVIDIA's own. What is not there is the driver: libcuda.so.1 is
the one library that no wheel brings. The stand-in takes its place; preloaded, it takes that of
CUDA's runtime too, which speaks to none but a real driver. What needs no GPU is carried out for
real: every library is loaded, and the compiler that pointwise fusion uses compiles a kernel.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator

import pytest

from .dry_run import PROJECT, GpuDryRun

pytestmark = [pytest.mark.slow, pytest.mark.gpu_dry_run]


try:
    ctypes.CDLL("libcuda.so.1")
    HAS_DRIVER = True
except OSError:
    HAS_DRIVER = False
without_driver = pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")

GB = 2**30
NEEDED_GB = 8  # the wheels and what is in them
# What pip says of a wheel that it cannot get, whatever its version.
NOT_TO_BE_HAD = re.compile(
    r"No matching distribution found for (mxnet|nvidia)\S*|.*\(from versions: none\)"
    r"|.*(ConnectionError|NewConnectionError|Max retries exceeded|Read timed out).*"
)


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """The Python of a fresh environment with the extra installed."""
    with tempfile.TemporaryDirectory(prefix="cu112") as name:
        folder = Path(name)
        if shutil.disk_usage(name).free < NEEDED_GB * GB:
            pytest.skip(f"less than {NEEDED_GB} GB free for the GPU wheels")
        source = folder / "source"  # pip writes into the folder that it builds
        source.mkdir()
        for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(str(PROJECT / file), str(source))
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(PROJECT / "memonger"), str(source / "memonger"), ignore=skipped)
        environment = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        python = environment / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--no-cache-dir", ".[cu112]"]
        done = subprocess.run(pip, cwd=str(source), capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        if done.returncode != 0:
            cannot = [line for line in said.splitlines() if NOT_TO_BE_HAD.match(line)]
            # With "from versions: 1, 2" the index was there, and it is our pin that is wrong.
            if cannot and not re.search(r"\(from versions: (?!none)", said):
                pytest.skip(f"pip cannot get the wheels: {cannot[-1]}")
            pytest.fail(said[-2000:])
        yield python


def run(python: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [str(python), "-W", "ignore", "-c", code],
        cwd=str(python.parent),  # not where the sources are
        env=dict(clean, **environment),
        capture_output=True,
        text=True,
        check=False,
    )


# Imports memonger and prints, of the libraries of CUDA that MXNet needs, where each came from.
LOADED = """
import importlib.util, re, subprocess, sys
from pathlib import Path
library = Path(importlib.util.find_spec('mxnet').origin).with_name('libmxnet.so')
needed = re.findall(r'NEEDED.*\\[(.*)\\]', subprocess.check_output(
    ['readelf', '-d', str(library)], text=True))
problem = None
try:
    import memonger
    memonger.plan  # MXNet is imported when it is first needed
except ImportError as error:
    problem = error
loaded = {Path(line.split()[-1]) for line in open('/proc/self/maps') if '.so' in line}
for name in needed:
    if re.match('libcu(?!rl)|libnv|libnccl', name):
        print(name, next((path for path in loaded if path.name == name), 'MISSING'))
if problem is not None:
    raise problem
"""


@without_driver
def test_every_library_but_the_drivers_is_found(python: Path) -> None:
    done = run(python, LOADED)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    wheels = str(python.parents[1])
    assert found.pop("libcuda.so.1") == "MISSING"
    assert len(found) >= 8
    assert all(path.startswith(wheels) and "/nvidia/" in path for path in found.values()), found
    # One sentence, at the end of the traceback.
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "memonger.support.errors.MXNetImportError: mxnet-cu112 is installed, but this machine has "
        "no NVIDIA driver (libcuda.so.1); install the driver, or use the CPU build: "
        "pip uninstall -y mxnet-cu112 && pip install 'memonger[cpu]'"
    )


@without_driver
def test_gpu_check_says_so_in_one_sentence(python: Path) -> None:
    script = str(PROJECT / "examples" / "gpu_check.py")
    code = "import runpy, sys; sys.argv = [%r]; runpy.run_path(%r, run_name='__main__')"
    done = run(python, code % (script, script))
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith("mxnet-cu112 is installed, but this machine has no NVIDIA driver")


@pytest.fixture(scope="module")
def driver(gpu_dry_run: GpuDryRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in as libcuda.so.1, alone in its folder."""
    folder = tmp_path_factory.mktemp("driver")
    shutil.copy(str(gpu_dry_run.stubs / "libcudastub.so"), str(folder / "libcuda.so.1"))
    return folder


def test_with_the_driver_it_imports(python: Path, driver: Path) -> None:
    done = run(python, LOADED, LD_LIBRARY_PATH=str(driver))
    assert done.returncode == 0, done.stderr
    assert "MISSING" not in done.stdout
    assert f"libcuda.so.1 {driver / 'libcuda.so.1'}" in done.stdout


def test_with_the_stand_in_there_is_a_gpu(python: Path, driver: Path) -> None:
    code = """
import memonger, mxnet as mx
net = mx.sym.Variable('data')
for i in range(8):
    net = mx.sym.tanh(mx.sym.FullyConnected(net, num_hidden=1024, name='fc%d' % i))
net = mx.sym.LinearRegressionOutput(net, mx.sym.Variable('label'), name='out')
plan = memonger.plan(net, data=(256, 1024))
print(mx.context.num_gpus(), plan.pool_bytes < plan.unplanned_bytes)
"""
    preloaded = str(driver / "libcuda.so.1")
    done = run(python, code, LD_LIBRARY_PATH=str(driver), LD_PRELOAD=preloaded)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]


def test_what_is_loaded_later_is_there_too(python: Path) -> None:
    """cuDNN's parts, which it loads when they are used, and NVRTC's, which a compilation does."""
    code = r"""
import ctypes, importlib.util
from pathlib import Path
try:
    import memonger
    memonger.plan  # MXNet is imported when it is first needed
except ImportError:
    pass  # for want of the driver; the CUDA libraries are loaded before
root = Path(list(importlib.util.find_spec('nvidia').submodule_search_locations)[0])
parts = sorted((root / 'cudnn' / 'lib').glob('libcudnn_*.so.8'))
for part in parts:
    ctypes.CDLL(str(part))
print(len(parts))
nvrtc = ctypes.CDLL('libnvrtc.so.11.2')
program, size = ctypes.c_void_p(), ctypes.c_size_t()
source = b'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
options = (ctypes.c_char_p * 1)(b'--gpu-architecture=compute_70')
assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b'twice.cu', 0, None, None) == 0
assert nvrtc.nvrtcCompileProgram(program, 1, options) == 0
assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
text = ctypes.create_string_buffer(size.value)
assert nvrtc.nvrtcGetPTX(program, text) == 0
print(b'.entry twice' in text.value)
"""
    done = run(python, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "True"]
