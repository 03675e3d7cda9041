"""``pip install '.[cu112]'`` for real, in an environment of its own: 2.2 GB to download.

The libraries are NVIDIA's own, but for the driver (libcuda.so.1), which no wheel brings. The
stand-in takes its place; preloaded, that of CUDA's runtime too, which speaks to none but a driver.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from .dry_run import PROJECT, GpuDryRun

pytestmark = [pytest.mark.exhaustive, pytest.mark.gpu_dry_run]

NEEDED_GB = 8  # the wheels and what is in them
# What pip says of a wheel that it cannot get, whatever its version.
NOT_TO_BE_HAD = re.compile(
    r"No matching distribution found for (mxnet|nvidia)\S*|.*\(from versions: none\)"
    r"|.*(ConnectionError|NewConnectionError|Max retries exceeded|Read timed out).*"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cu112")
    if shutil.disk_usage(folder).free < NEEDED_GB * 2**30:
        pytest.skip(f"less than {NEEDED_GB} GB free for the GPU wheels")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--no-cache-dir", f"{PROJECT}[cu112]"]
    done = subprocess.run(pip, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        cannot = [line for line in said.splitlines() if NOT_TO_BE_HAD.match(line)]
        # With "from versions: 1, 2" the index was there, and it is our pin that is wrong.
        if cannot and not re.search(r"\(from versions: (?!none)", said):
            pytest.skip(f"pip cannot get the wheels: {cannot[-1]}")
        pytest.fail(said[-2000:])
    return python


@pytest.fixture(scope="module")
def driver(gpu_dry_run: GpuDryRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    return Path(shutil.copy(gpu_dry_run.stubs / "libcudastub.so", folder / "libcuda.so.1"))


def run(python: Path, *code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [str(python), "-W", "ignore", *code],
        cwd=python.parent,  # not where the sources are
        env={**clean, **environment},
        capture_output=True,
        text=True,
    )


# Imports memonger and prints, of the libraries of CUDA that MXNet needs, where each came from.
LOADED = r"""
import importlib.util, re, subprocess
from pathlib import Path
library = Path(importlib.util.find_spec('mxnet').origin).with_name('libmxnet.so')
needed = subprocess.check_output(['readelf', '-d', str(library)], text=True)
try:
    import memonger
    memonger.plan  # MXNet is imported when it is first needed
finally:
    loaded = {Path(line.split()[-1]) for line in open('/proc/self/maps') if '.so' in line}
    for name in re.findall(r'NEEDED.*\[(.*)\]', needed):
        if re.match('libcu(?!rl)|libnv|libnccl', name):
            print(name, next((path for path in loaded if path.name == name), 'MISSING'))
"""


@pytest.mark.skipif(find_library("cuda") is not None, reason="here is an NVIDIA driver")
def test_every_library_but_the_drivers_is_found(python: Path) -> None:
    done = run(python, "-c", LOADED)
    libraries = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    wheels = str(python.parents[1])
    assert libraries.pop("libcuda.so.1") == "MISSING"
    assert len(libraries) >= 8
    assert all(path.startswith(wheels) and "/nvidia/" in path for path in libraries.values()), (
        libraries
    )
    # One sentence, at the end of the traceback; the example prints no more than that.
    said = (
        "mxnet-cu112 is installed, but this machine has no NVIDIA driver (libcuda.so.1); install "
        "the driver, or use the CPU build, in the clone of memonger: pip uninstall -y mxnet-cu112 "
        "&& pip install '.[cpu]'"
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("\nmemonger.support.errors.MXNetImportError: " + said)
    done = run(python, str(PROJECT / "examples" / "gpu_check.py"))
    assert (done.returncode, done.stderr) == (2, said + "\n")


PLANNED = """
import memonger, mxnet as mx
net = mx.sym.Variable('data')
for i in range(8):
    net = mx.sym.tanh(mx.sym.FullyConnected(net, num_hidden=1024, name='fc%d' % i))
net = mx.sym.LinearRegressionOutput(net, name='out')
plan = memonger.plan(net, data=(256, 1024))
print(mx.context.num_gpus(), plan.pool_bytes < plan.unplanned_bytes)
"""


def test_what_needs_no_gpu_works(python: Path, driver: Path) -> None:
    search_path = {"LD_LIBRARY_PATH": str(driver.parent)}
    done = run(python, "-c", LOADED, **search_path)
    assert done.returncode == 0 and "MISSING" not in done.stdout, done.stderr
    assert f"libcuda.so.1 {driver}" in done.stdout
    done = run(python, "-c", PLANNED, LD_PRELOAD=str(driver), **search_path)
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr
