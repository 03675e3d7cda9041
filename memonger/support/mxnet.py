"""Import MXNet and read its settings; no other module does.

MXNet was last released in 2022. Before it is imported, this module supplies what it needs and later
releases of others removed: NumPy as it was (`memonger.support.numpy1`) and the module ``distutils``
(removed in Python 3.12, but part of setuptools). It also loads the CUDA libraries of the ``cu112``
extra, which the dynamic loader would not find. MXNet takes seconds to import, so it is imported at
the first use of ``mx``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Callable, Iterator, Sequence, TypeVar

from memonger.support.errors import MB, NO_CODE, MemongerError, MXNetImportError

if TYPE_CHECKING:
    import mxnet as mx  # noqa: F401

T = TypeVar("T")

#: Folder in the ``nvidia`` namespace package, and soname; libraries come after those they need.
CUDA_LIBRARIES: list[tuple[str, str]] = re.findall(
    r"(\w+)/(\S+)",
    """
    cuda_runtime/libcudart.so.11.0 nvtx/libnvToolsExt.so.1 cuda_nvrtc/libnvrtc.so.11.2
    cublas/libcublasLt.so.11 cublas/libcublas.so.11 cufft/libcufft.so.10 curand/libcurand.so.10
    cusolver/libcusolver.so.11 cudnn/libcudnn.so.8 nccl/libnccl.so.2
    """,
)

#: The wheel for GPUs, and the compute capabilities that its code runs on.
WHEEL, OLDEST, NEWEST = "mxnet-cu112", (5, 0), (8, 9)

#: Versions with which the tests train on a CPU, and the first version that does not work.
TRIED, TOO_NEW = ("1.6.0", "1.7.0", "1.8.0", "1.9.0", "1.9.1"), (2, 0, 0)
OLDEST_NUMPY = (1, 17, 0)

log = logging.getLogger("memonger")

if not hasattr(os, "fork"):
    raise MXNetImportError(
        "memonger needs Linux or macOS, and MXNet has no wheel for Windows since 1.8; use WSL 2"
    )

#: A file at the root of an environment that a tool has made for memonger -> how it adds MXNet.
BY_TOOLS = {
    "uv-receipt.toml": "in the clone of memonger, uv tool install --python 3.12 --with "
    "mxnet==1.9.1 . (for an NVIDIA GPU --with mxnet-cu112==1.9.1 '.[cu112]')",
    "pipx_metadata.json": "in the clone of memonger, pipx install --force '.[cpu]' && pipx inject "
    "memonger mxnet==1.9.1 --pip-args=--no-deps (for an NVIDIA GPU '.[cu112]' and "
    "mxnet-cu112==1.9.1)",
}
BY_PIP = (
    "in the clone of memonger, pip install '.[cpu]' && pip install --no-deps mxnet==1.9.1 (for an "
    "NVIDIA GPU '.[cu112]' and mxnet-cu112==1.9.1)"
)
INSTALL = next((how for file, how in BY_TOOLS.items() if Path(sys.prefix, file).exists()), BY_PIP)


def _variable(name: str, default: str, parse: Callable[[str], T]) -> T:
    """Make a field that is read from an environment variable."""

    def read() -> T:
        with environment():
            text = os.environ.get(name) or default  # to MXNet an empty variable is unset
        try:
            return parse(text)
        except ValueError:
            reason = "MXNet expects an integer; set one, or unset it"
            raise MemongerError(f"{name}={text!r}: {reason}") from None

    return field(default_factory=read)


def _is_on(text: str) -> bool:
    return text not in ("", "0", "false", "False")


def read_capability(device_id: int) -> tuple[int, int] | None:
    """Read the compute capability of a GPU, without a CUDA context; None if CUDA does not say."""
    import mxnet

    values = []
    for attribute in (75, 76):  # cudaDevAttrComputeCapabilityMajor and Minor
        value = ctypes.c_int()
        try:
            read = mxnet.base._LIB.cudaDeviceGetAttribute
        except AttributeError:  # MXNet has no CUDA, or has it within
            return None
        if read(ctypes.byref(value), attribute, device_id):
            return None
        values.append(value.value)
    return values[0], values[1]


@functools.lru_cache(maxsize=None)
def check_code(device_id: int) -> None:
    """Refuse a GPU that MXNet's wheel has no code for."""
    capability = read_capability(device_id) if _chosen_build() == WHEEL else None
    if capability is not None and not OLDEST <= capability <= NEWEST:
        found = "{}.{}".format(*capability)
        raise MemongerError(
            f"gpu({device_id}) has compute capability {found}, for which {WHEEL} has no code; "
            + NO_CODE
        )


@functools.lru_cache(maxsize=1)
def built_with_mkldnn() -> bool:
    """Return whether MXNet is built with MKLDNN, as the wheel ``mxnet`` is since 1.7."""
    import mxnet

    return bool(mxnet.runtime.Features().is_enabled("MKLDNN"))


@dataclass(frozen=True)
class Settings:
    """MXNet's environment variables that affect a plan, read when an instance is made."""

    #: Whether MKLDNN may compute on a CPU.
    mkldnn: bool = _variable(
        "MXNET_MKLDNN_ENABLED", "1", lambda text: _is_on(text) and built_with_mkldnn()
    )
    mkldnn_rnn: bool = _variable("MXNET_USE_MKLDNN_RNN", "1", _is_on)
    #: How many temporary spaces imperative operators take in turn on a CPU.
    cpu_spaces: int = _variable("MXNET_CPU_TEMP_COPY", "4", int)
    fusion: bool = _variable("MXNET_USE_FUSION", "1", _is_on)  # of pointwise operators, on a GPU
    merging: bool = _variable("MXNET_ELIMINATE_COMMON_EXPR", "1", _is_on)  # of subexpressions
    #: A gradient of this many terms, or more, is summed in a chain.
    sum_cap: int = _variable("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "8", int)
    #: Whether the memory planner colours its graph, which the replay does not do.
    coloring: bool = _variable("NNVM_EXEC_NUM_TEMP", "1", lambda text: text not in ("0", "1"))
    #: A tensor may get a block up to this factor larger than it.
    match_range: int = _variable("NNVM_EXEC_MATCH_RANGE", "16", int)
    #: Whether smaller powers of 2 are tried as factors too.
    search_match_range: bool = _variable("NNVM_AUTO_SEARCH_MATCH_RANGE", "0", _is_on)
    #: How requests to a GPU are rounded ('Naive', 'Round' or 'Unpooled'), and its sizes in bytes.
    pool: str = _variable("MXNET_GPU_MEM_POOL_TYPE", "Naive", str)
    page: int = _variable("MXNET_GPU_MEM_POOL_PAGE_SIZE", "4096", int)
    large: int = _variable("MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE", str(2 * MB), int)
    cutoff: int = _variable("MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF", "24", lambda k: 1 << int(k))

    @property
    def match_ranges(self) -> list[int]:
        """The factors that MXNet tries (``MXPlanMemory``)."""
        if not self.search_match_range or self.match_range == 0:
            return [self.match_range]
        return [2**k for k in range(self.match_range.bit_length())]


_BLOCKS = threading.local()  # ``depth``: how many blocks of `environment` the thread is in
_ENVIRONMENT = threading.RLock()  # the process has one environment for all threads
# A child forked within a block would keep its variables, and a lock that nobody releases.
os.register_at_fork(
    before=_ENVIRONMENT.acquire,
    after_in_parent=_ENVIRONMENT.release,
    after_in_child=_ENVIRONMENT.release,
)


@contextlib.contextmanager
def environment(**new: str) -> Iterator[None]:
    """Set environment variables while the block runs; the blocks of threads run in turn.

    Every bind and every read of settings in memonger is in such a block, even if it sets nothing.
    Threads of the user do not wait: one that binds a network or starts a process at that moment
    sees the variables that are set here.
    """
    with _ENVIRONMENT:
        # MXNet treats an empty variable as unset (``dmlc::GetEnv``), so none is unset here.
        # Unsetting and setting a variable moves the array of all variables, and the C library frees
        # the old array. MXNet's threads may be reading it: oneDNN reads DNNL_DEFAULT_FPMATH_MODE
        # whenever it lays out a tensor (one process in a thousand crashed), softmax and LayerNorm
        # read MXNET_SAFE_ACCUMULATION.
        old = {name: os.environ.get(name, "") for name in new}
        depth = getattr(_BLOCKS, "depth", 0)
        _BLOCKS.depth = depth + 1
        try:
            os.environ.update(new)
            yield
        finally:
            _BLOCKS.depth = depth
            os.environ.update(old)


def is_internal_bind() -> bool:
    """Return whether this thread is in a block of `environment`: memonger binds, not the user."""
    return getattr(_BLOCKS, "depth", 0) > 0


def may_wait() -> bool:
    """Return whether this thread may wait for MXNet's engine without a deadlock.

    Custom operators and ``autograd.Function`` run on threads that MXNet has started, not Python
    (``CustomOperator`` in ``src/operator/custom/custom-inl.h``). Operators in the engine may wait
    for their results, so that a wait for the engine on such a thread may never end.
    """
    return not isinstance(threading.current_thread(), threading._DummyThread)


def wait_for_engine(purpose: str) -> None:
    """Wait until MXNet's engine is idle; raise MemongerError where that may be a deadlock."""
    if not may_wait():
        raise MemongerError(
            f"{purpose} waits for MXNet's engine, which may wait for this thread (of a Custom "
            "operator or an autograd.Function): a deadlock; do it on a thread of your own"
        )
    sys.modules["mxnet"].nd.waitall()


def _chosen_build() -> str | None:
    """Return the wheel that ``import mxnet`` loads, or None; raise if two are installed."""
    spec = PathFinder.find_spec("mxnet")  # skips `_Preparation`, which calls this function
    if spec is None or spec.origin is None:
        return None
    wheels = importlib.metadata.distributions(path=[str(Path(spec.origin).parents[1])])
    all_names = {(wheel.metadata["Name"] or "").lower().replace("_", "-") for wheel in wheels}
    names = sorted(name for name in all_names if re.match("mxnet(-|$)", name))
    if len(names) > 1:
        raise MXNetImportError(
            f"{' and '.join(names)} are installed over each other, which mixes their files; remove "
            f"all (pip uninstall -y {' '.join(names)}), then {INSTALL}"
        )
    return names[0] if names else "mxnet"


def _prepare_import(build: str | None) -> None:
    """Check NumPy, bring distutils back, and load the CUDA libraries that a build needs."""
    try:
        import numpy
    except ImportError as error:
        reason = str(error).strip().splitlines()[-1]  # NumPy's own advice comes before it
        raise MXNetImportError(
            f"MXNet needs NumPy, which cannot be imported ({reason}); pip install "
            "--force-reinstall numpy"
        ) from error
    if version_of(numpy.__version__) < OLDEST_NUMPY:
        raise MXNetImportError(
            f"memonger needs NumPy 1.17 or later, but NumPy {numpy.__version__} is installed; "
            "pip install -U numpy"
        )
    if importlib.util.find_spec("distutils") is None:
        try:
            importlib.import_module("setuptools")  # its import hook brings distutils back
            importlib.import_module("distutils.version")
        except ImportError as error:
            raise MXNetImportError(
                "MXNet needs distutils, which this Python lacks; pip install setuptools"
            ) from error
    if build not in (None, "mxnet"):
        _load_cuda_libraries()


def _load_cuda_libraries() -> None:
    """Load the libraries of the CUDA wheels that are installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for folder, soname in CUDA_LIBRARIES:
        files = [root / folder / "lib" / soname for root in roots]
        try:
            for file in [*filter(Path.exists, files)][:1]:
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MXNetImportError(
                f"the CUDA library {soname} cannot be loaded ({error}); install it anew: pip "
                f"install --force-reinstall --no-deps nvidia-{folder.replace('_', '-')}-cu11"
            ) from error


def _where_there_is_a_wheel() -> str | None:
    """Return what has a wheel of MXNet, where this Python or machine has none."""
    if sys.implementation.name != "cpython":
        return f"it does not run on {platform.python_implementation()}, only on CPython"
    if sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
        return (
            "its wheels need glibc, which this Linux lacks; use another one, such as the image "
            "python:3.11-slim in place of python:3.11-alpine"
        )
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64", "amd64"):
        return (
            f"it has no wheel for {sys.platform} on {machine}; use Linux on x86_64 or aarch64, "
            "on a Mac in a container for linux/arm64"
        )
    return None


def _explain(error: BaseException) -> str:
    """Return why ``import mxnet`` fails, and what to do."""
    build = _chosen_build()
    if build is None or (isinstance(error, ModuleNotFoundError) and error.name == "mxnet"):
        return "MXNet is not installed; " + (_where_there_is_a_wheel() or INSTALL)
    missing = re.search(r"lib[\w+.-]*\.so\.\w+(\.\w+)*", str(error))
    library = missing[0] if missing else ""
    if library == "libcuda.so.1":
        return (
            f"{build} is installed, but this machine has no NVIDIA driver (libcuda.so.1); install "
            "the driver, or use the CPU build, in the clone of memonger: "
            f"pip uninstall -y {build} && pip install '.[cpu]' && "
            "pip install --no-deps mxnet==1.9.1"
        )
    if library in [soname for _, soname in CUDA_LIBRARIES]:
        remedy = "in the clone of memonger, pip install '.[cu112]' brings the CUDA libraries"
        return f"{build} needs {library}; {remedy}"
    of_arm = re.search(r"lib(armpl|amath|astring)\w*\.so", str(error))
    if of_arm:
        return (
            f"MXNet for aarch64 needs {of_arm[0]} of the Arm Performance Libraries, which are "
            "not in its wheel; install them from Arm, and add their folder to LD_LIBRARY_PATH"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"MXNet ({build}) needs {error.name}, which is not installed; {INSTALL}"
    package = f"; apt-get install {library.replace('.so.', '')}" if library else ""  # on Debian
    reason = f"{type(error).__name__}: {error}{package}"
    where = _where_there_is_a_wheel()
    return f"MXNet ({build}) is installed but cannot be imported: {reason}" + (
        f"; {where}" if where else ""
    )


_actions: list[Callable[[], object]] = []  # to be run when MXNet is imported


def when_imported(action: Callable[[], object]) -> None:
    """Run an action when MXNet has been imported, by whoever it is; now, if it is imported."""
    if "mxnet" in sys.modules:
        action()
    else:
        _actions.append(action)


class _Preparation:
    """A finder that prepares the import of MXNet and its modules, and runs the actions after it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "mxnet":
            return None
        # The finders after this one find MXNet, in a clone or by hooks of others too.
        finders = sys.meta_path[sys.meta_path.index(_Preparation) + 1 :]
        specs = (f.find_spec(name, path, target) for f in finders if hasattr(f, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            if name == "mxnet":
                _prepare_import(_chosen_build())
            from memonger.support.numpy1 import OldNumPyLoader

            spec.loader = OldNumPyLoader(spec.loader, _actions if name == "mxnet" else [])
        return spec


def version_of(text: str) -> tuple[int, int, int]:
    """Parse a version of MXNet, such as 1.9.1, 1.9.1.post0 or 1.10.0b20220101."""
    major, minor, patch = map(int, [*re.findall(r"\d+", text), "0", "0", "0"][:3])
    return major, minor, patch


def _check_version(version: str) -> None:
    """Raise MXNetImportError for a version that does not work; warn of one that is untested."""
    if not version_of(TRIED[0]) <= version_of(version) < TOO_NEW:
        raise MXNetImportError(
            f"memonger works with MXNet 1.6 to 1.9, but MXNet {version} is installed; "
            "pip install mxnet==1.9.1 (or mxnet-cu112==1.9.1)"
        )
    if ".".join(map(str, version_of(version))) not in TRIED:
        log.warning(
            "MXNet %s is untested with memonger (tested: %s); compare the training of your network "
            "with and without a plan by memonger.check",
            version,
            ", ".join(TRIED),
        )


def __getattr__(name: str) -> object:
    if name != "mx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import mxnet
    except MemongerError:
        raise
    except Exception as error:  # of any kind: MXNet was not written for this NumPy or Python
        raise MXNetImportError(_explain(error)) from error
    _check_version(mxnet.__version__)
    globals()[name] = mxnet
    return mxnet


_STDERR = threading.RLock()  # the process has one file descriptor 2
#: What MXNet logs for each operator without a kernel of MKLDNN's (``src/common/utils.h``), and at
#: each bind of the subgraph backend (``src/executor/graph_executor.cc``).
_NOTICE = re.compile(
    rb"^\[[^\n]*\n?Storage type fallback detected:\n.*?suppress this warning\.\n"
    rb"|^\[[^\n]*(?:MXNET_SUBGRAPH_BACKEND=NONE is detected|Subgraph backend \S+ is activated)"
    rb"[^\n]*\n",
    re.M | re.S,
)


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Buffer what MXNet writes to file descriptor 2, and drop its notices about a bind."""
    with _STDERR, tempfile.TemporaryFile() as buffer:
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            buffer.seek(0)
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, _NOTICE.sub(b"", buffer.read()))
            os.close(stderr)


# Otherwise every bind prints a line about MKLDNN. MXNet reads the variable once, at the first bind.
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
for _name in (  # `environment` sets these, so they must exist before MXNet starts threads
    "MXNET_ELIMINATE_COMMON_EXPR",
    "MXNET_SUBGRAPH_BACKEND",
    "MXNET_USE_FUSION",
    "NNVM_AUTO_SEARCH_MATCH_RANGE",
):
    os.environ.setdefault(_name, "")
sys.meta_path.insert(0, _Preparation)
