"""What is said when MXNet cannot be imported, and what is kept from stderr where it is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from memonger.support.errors import mxnet_message
from memonger.support.mxnet import without_notices
from planned import ROOT, run_code, run_python

pytestmark = pytest.mark.python_differs


def failure(folder: Path, wheels: str = "", init: str = "", before: str = "") -> str:
    """Return what is said where these wheels are installed, whose import does ``init``."""
    for wheel in wheels.split():
        info = folder / f"{wheel.replace('-', '_')}-1.9.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.9.1\n")
        (folder / "mxnet").mkdir(exist_ok=True)
        (folder / "mxnet" / "__init__.py").write_text(init)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = run_python("-c", before + "import memonger; memonger.plan", PYTHONPATH=path)
    last = done.stderr.strip().split("\n")[-1]
    assert done.returncode and last.startswith("memonger.support.errors.MXNetImportError: "), last
    return last


def without(library: str) -> str:
    said = f"{library}: cannot open shared object file: No such file or directory"
    return f"raise OSError({said!r})"


@pytest.mark.parametrize(
    "wheels, init, words",
    [
        ("mxnet-cu112", without("libcuda.so.1"), ["no NVIDIA driver", "'.[cpu]'"]),
        ("mxnet", without("libquadmath.so.0"), ["apt-get install libquadmath0"]),
        ("mxnet", without("libgomp.so.1"), ["apt-get install libgomp1"]),
        ("mxnet-cu112", without("libcudnn.so.8"), ["libcudnn.so.8", "'.[cu112]'"]),
        ("mxnet", without("libarmpl_lp64_mp.so"), ["Arm Performance", "LD_LIBRARY_PATH"]),
        ("mxnet", without("libodd.so.3"), ["cannot be imported", "libodd.so.3"]),
        ("mxnet", "import numpy; numpy.no_such_name", ["cannot be imported", "no_such_name"]),
        (
            "mxnet",
            "import no_such_package",
            [
                "MXNet (mxnet) needs no_such_package, which is not installed; in the clone of "
                "memonger, pip install '.[cpu]'"
            ],
        ),
        ("mxnet mxnet-cu112", "", ["installed over each other", "-y mxnet mxnet-cu112"]),
        *(
            ("mxnet", f"__version__ = {v!r}", [f"MXNet {v} is installed", "mxnet==1.9.1"])
            for v in ("1.5.1", "1.4.1.post0", "2.0.0b1")
        ),
    ],
)
def test_what_is_wrong_is_explained(
    wheels: str, init: str, words: list[str], tmp_path: Path
) -> None:
    message = failure(tmp_path, wheels, init)
    assert all(word in message for word in words), message


#: What makes this machine another one, and what is said of it where no MXNet is installed.
ELSEWHERE = {
    "windows": ("import os; del os.fork", ["no wheel for Windows", "WSL 2"]),
    "pypy": ("import sys; sys.implementation.name = 'pypy'", ["only on CPython"]),
    "musl": (
        "import platform; platform.libc_ver = lambda: ('', '')",
        ["glibc", "python:3.11-slim in place of python:3.11-alpine"],
    ),
    "mac": (
        "import platform, sys; sys.platform = 'darwin'; platform.machine = lambda: 'arm64'",
        ["no wheel for darwin on arm64", "container for linux/arm64"],
    ),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_where_mxnet_has_no_wheel_another_machine_is_named(where: str, tmp_path: Path) -> None:
    change, words = ELSEWHERE[where]
    hidden = "import sys; sys.modules['mxnet'] = None\n"
    message = failure(tmp_path, before=hidden + change + "\n")
    assert all(word in message for word in words) and "pip install '.[cpu]'" not in message, message


def test_without_a_wheel_it_is_said_of_an_mxnet_that_fails_too(tmp_path: Path) -> None:
    change, (words,) = ELSEWHERE["pypy"]
    message = failure(tmp_path, "mxnet", "import ctypes; ctypes.no_such_name", change + "\n")
    assert "no_such_name" in message and message.endswith(words)


@pytest.mark.parametrize(
    "change, words",
    [
        ("import sys; sys.modules['numpy'] = None", ["cannot be imported", "install --force-re"]),
        ("import numpy; numpy.__version__ = '1.16.6'", ["NumPy 1.16.6 is", "pip install -U numpy"]),
    ],
)
def test_a_numpy_that_is_absent_or_too_old_is_named(
    change: str, words: list[str], tmp_path: Path
) -> None:
    message = failure(tmp_path, "mxnet", before=change + "\n")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("package", ["", "py-mxnet", "nvidia-mxnet"])
def test_a_build_of_any_name_is_found(package: str, tmp_path: Path) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("__version__ = '2.1'")
    assert "MXNet 2.1 is installed" in failure(tmp_path, package, "__version__ = '2.1'")


def test_a_gpu_without_code_is_told_a_build_that_has_it() -> None:
    said = mxnet_message("Check failed: e == cudaSuccess: CUDA: no kernel image is available")
    assert said.startswith("e == cudaSuccess") and "24.06-py3" in said and "5.0 to 8.9" in said
    stack = "Error: no such thing\nStack trace:\n  [bt] (8) libmxnet.so(+0x1)"  # as 1.6 writes it
    assert mxnet_message(stack) == "no such thing"


def test_a_broken_cuda_library_is_named(tmp_path: Path) -> None:
    library = tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.11.0"
    library.parent.mkdir(parents=True)
    library.write_text("half a download")
    message = failure(tmp_path, "mxnet-cu112")
    assert "libcudart.so.11.0 cannot be loaded" in message
    assert message.endswith("--no-deps nvidia-cuda-runtime-cu11")


def test_without_mxnet_the_extras_are_named(tmp_path: Path) -> None:
    message = failure(tmp_path, before="import sys; sys.modules['mxnet'] = None\n")
    assert "not installed" in message and "'.[cpu]'" in message and "[cu112]" in message


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "uv-receipt.toml",
            "MXNet is not installed; in the clone of memonger, uv tool install --python 3.12 "
            "--with mxnet==1.9.1 . (for an NVIDIA GPU --with mxnet-cu112==1.9.1 '.[cu112]')",
        ),
        (
            "pipx_metadata.json",
            "MXNet is not installed; in the clone of memonger, pipx install --force '.[cpu]' && "
            "pipx inject memonger mxnet==1.9.1 --pip-args=--no-deps (for an NVIDIA GPU '.[cu112]' "
            "and mxnet-cu112==1.9.1)",
        ),
    ],
)
def test_without_mxnet_the_tool_that_installed_memonger_is_named(
    file: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).touch()
    before = f"import sys; sys.prefix = {str(tmp_path)!r}; sys.modules['mxnet'] = None\n"
    assert failure(tmp_path, before=before).endswith(said)


UNTRIED = """
import memonger.support.mxnet, mxnet as mx
mx.__version__ = "1.10.0b20230101"
del memonger.support.mxnet.mx  # its version is read when it is first used
net = mx.sym.MakeLoss(mx.sym.Activation(mx.sym.Variable("data"), act_type="tanh"))
for _ in range(2):
    memonger.get_cost(net, data=(8, 8))
"""


def test_a_version_that_was_not_tried_is_told_once() -> None:
    """Of others nothing is told (``test_binds_are_quiet``)."""
    done = run_python("-W", "ignore", "-c", UNTRIED)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "MXNet 1.10.0b20230101 is untested" in line


BINDS = """
import memonger, mxnet as mx
net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3)
for request in ("write", "null"):
    net.simple_bind(mx.cpu(), grad_req=request, data=(2, 3)).forward()
mx.nd.waitall()
"""
TRAIN = """
import memonger, mxnet as mx, os
x = mx.sym.FullyConnected(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4), num_hidden=4)
net = mx.sym.SoftmaxOutput(x, name="softmax")
planned = memonger.plan(net, {"data": (2, 3)}, how="schedule", patience=0.02).symbol
os.environ["MXNET_EXEC_VERBOSE_LOGGING"] = "1"  # MXNet logs its memory plan at each bind
for _ in range(3):
    executor = planned.simple_bind(mx.cpu(), data=(2, 3), softmax_label=(2,))
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
"""


def test_binds_are_quiet() -> None:
    done = run_python("-W", "ignore", "-c", BINDS)
    assert (done.returncode, done.stderr) == (0, "")
    done = run_python("-c", TRAIN)
    assert done.returncode == 0, done.stderr
    assert not any(said in done.stderr for said in ("is detected", "is untested")), done.stderr


FALLBACK = b"""[12:00:00] ../src/common/utils.h:472:\x20
Storage type fallback detected:
operator = Convolution
The operator with default storage type will be dispatched. Set a variable to suppress this warning.
"""


def test_all_else_is_handed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with without_notices():
        os.write(2, b"first\n" + FALLBACK + b"sec")
        os.write(2, b"ond\n" + FALLBACK)
        thread = threading.Thread(target=os.write, args=(2, b"third\n"))
        thread.start()
        thread.join()
    with without_notices(), pytest.raises(ValueError):
        os.write(2, b"unfinished")
        raise ValueError
    os.write(2, b", after\n")
    said = capfd.readouterr().err.splitlines()
    assert said == ["first", "second", "third", "unfinished, after"]


#: MXNet is found by a finder alone, as that of an editable installation.
FOUND = """
import distutils.version, importlib.machinery, numpy, os, sys  # what MXNet needs
from memonger.support.mxnet import when_imported

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = os.environ["CHECKOUT"]
        return importlib.machinery.PathFinder.find_spec(name, [folder]) if name == "mxnet" else None

when_imported(lambda: print(sys.modules["mxnet"].whose))
for folder in [*sys.path]:
    if HIDDEN and os.path.isdir(os.path.join(folder, "mxnet")):
        sys.path.remove(folder)
sys.meta_path.insert(1, Finder)
import mxnet
"""


@pytest.mark.parametrize("hidden", [False, True])
def test_what_waits_for_mxnet_is_done_whoever_finds_it(hidden: bool, tmp_path: Path) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("whose = 'of the checkout'")
    code = FOUND.replace("HIDDEN", str(hidden))
    assert run_code(code, CHECKOUT=str(tmp_path)) == "of the checkout\n"
