"""The one place that imports MXNet and reads its settings.

MXNet was last released in 2022. What it lacks since is supplied here before its first import, by
whoever imports it: the name ``numpy.bool`` (gone in NumPy 1.24) and the module ``distutils`` (gone
in Python 3.12, brought back by setuptools). The CUDA libraries of the ``cu112`` extra are wheels of
their own, which the loader does not search: they are loaded here. MXNet takes seconds to import, so
this module imports it where its ``mx`` is asked for.
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
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Callable, Iterator

from memonger.support.errors import MB, MemongerError, MXNetImportError

#: Folder in the ``nvidia`` namespace package and soname, each after those that it needs.
CUDA_LIBRARIES: list[tuple[str, str]] = re.findall(
    r"(\w+)/(\S+)",
    """
    cuda_runtime/libcudart.so.11.0 nvtx/libnvToolsExt.so.1 cuda_nvrtc/libnvrtc.so.11.2
    cublas/libcublasLt.so.11 cublas/libcublas.so.11 cufft/libcufft.so.10 curand/libcurand.so.10
    cusolver/libcusolver.so.11 cudnn/libcudnn.so.8 nccl/libnccl.so.2
    """,
)

#: With which the tests train, on a CPU, and the first with which it would not work.
TRIED, TOO_NEW = ("1.6.0", "1.7.0", "1.8.0", "1.9.0", "1.9.1"), (2, 0, 0)

log = logging.getLogger("memonger")

INSTALL = "pip install 'memonger[cpu]', or 'memonger[cu112]' for a machine with an NVIDIA GPU"


def _variable(name: str, usual: str, read: Callable[[str], Any]) -> Any:
    """Make a field that is read from an environment variable."""

    def value() -> Any:
        with environment():
            text = os.environ.get(name) or usual  # MXNet takes an empty one for none
        try:
            return read(text)
        except ValueError:
            reason = "MXNet reads a whole number there; set one, or unset it"
            raise MemongerError(f"{name}={text!r}: {reason}") from None

    return field(default_factory=value)


def _is_on(text: str) -> bool:
    return text not in ("", "0", "false", "False")


@functools.lru_cache(maxsize=1)
def built_with_mkldnn() -> bool:
    """Tell whether MXNet is built with MKLDNN: the wheel ``mxnet`` is since 1.7."""
    import mxnet

    return bool(mxnet.runtime.Features().is_enabled("MKLDNN"))


@dataclass(frozen=True)
class Settings:
    """What MXNet's environment variables say that bears on a plan, as they are when it is made."""

    mkldnn: bool = _variable(  # whether it may compute on a CPU
        "MXNET_MKLDNN_ENABLED", "1", lambda text: _is_on(text) and built_with_mkldnn()
    )
    mkldnn_rnn: bool = _variable("MXNET_USE_MKLDNN_RNN", "1", _is_on)
    fusion: bool = _variable("MXNET_USE_FUSION", "1", _is_on)  # of pointwise operators, on a GPU
    merging: bool = _variable("MXNET_ELIMINATE_COMMON_EXPR", "1", _is_on)  # of subexpressions
    #: From so many terms on a gradient is summed in a chain.
    sum_cap: int = _variable("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "8", int)
    #: Whether the memory planner colours its graph, which the replay does not know.
    coloring: bool = _variable("NNVM_EXEC_NUM_TEMP", "1", lambda text: text not in ("0", "1"))
    #: By which factor memory may be too large for a tensor; whether smaller powers of 2 are tried.
    match_range: int = _variable("NNVM_EXEC_MATCH_RANGE", "16", int)
    search_match_range: bool = _variable("NNVM_AUTO_SEARCH_MATCH_RANGE", "0", _is_on)
    #: How it rounds what it asks a GPU for: 'Naive', 'Round' or 'Unpooled'; the others in bytes.
    pool: str = _variable("MXNET_GPU_MEM_POOL_TYPE", "Naive", str)
    page: int = _variable("MXNET_GPU_MEM_POOL_PAGE_SIZE", "4096", int)
    large: int = _variable("MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE", str(2 * MB), int)
    cutoff: int = _variable("MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF", "24", lambda k: 1 << int(k))

    @property
    def match_ranges(self) -> list[int]:
        """The factors that MXNet will try (``MXPlanMemory``)."""
        if not self.search_match_range or self.match_range == 0:
            return [self.match_range]
        return [2**k for k in range(self.match_range.bit_length())]


@functools.lru_cache(maxsize=1)
def has_avx2() -> bool:
    """Tell whether oneDNN computes with AVX2, or more (``src/cpu/x64/cpu_isa_traits.cpp``).

    On aarch64 all convolutions are products of plain matrices, as without AVX2 their gradients
    are (seen with ``DNNL_VERBOSE=1``), but for CPUs with 512-bit SVE.
    """
    if platform.machine() != "x86_64":
        return False
    if os.environ.get("DNNL_MAX_CPU_ISA") in ("SSE41", "AVX"):  # which it too reads once
        return False
    try:
        return "avx2" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


class _Blocks(threading.local):
    """The blocks of `environment` that a thread is in."""

    depth = 0


_BLOCKS = _Blocks()
_ENVIRONMENT = threading.RLock()  # the environment is the process's
# A child that is forked meanwhile would keep what is set, and a lock that nobody frees.
os.register_at_fork(
    before=_ENVIRONMENT.acquire,
    after_in_parent=_ENVIRONMENT.release,
    after_in_child=_ENVIRONMENT.release,
)


@contextlib.contextmanager
def environment(**new: str) -> Iterator[None]:
    """Set environment variables for as long as the block runs; threads have their blocks in turn.

    What binds or reads settings here does it in a block, if only in one that sets nothing. What
    reads the environment outside of one cannot be kept waiting: another thread of the user's that
    binds a network without a plan, or starts a process, at that moment finds what is set here.
    """
    with _ENVIRONMENT:
        # Empty, they are as unset to MXNet (``dmlc::GetEnv``). One that is unset and set again
        # moves the array of all, which the C library frees while MXNet's threads may be reading it:
        # oneDNN reads DNNL_DEFAULT_FPMATH_MODE whenever it lays a tensor out anew (it ended one
        # process in a thousand), softmax and LayerNorm read MXNET_SAFE_ACCUMULATION.
        old = {name: os.environ.get(name, "") for name in new}
        _BLOCKS.depth += 1
        try:
            os.environ.update(new)
            yield
        finally:
            _BLOCKS.depth -= 1
            os.environ.update(old)


def binds_for_itself() -> bool:
    """Tell whether this thread is in a block of `environment`: what it binds is not the user's."""
    return _BLOCKS.depth > 0


def _chosen_build() -> str | None:
    """Return the wheel that ``import mxnet`` will take, or None; refuse one over another."""
    spec = PathFinder.find_spec("mxnet")  # does not ask `_Preparation`, which asks this
    if spec is None or spec.origin is None:
        return None
    beside = importlib.metadata.distributions(path=[str(Path(spec.origin).parents[1])])
    named = {(each.metadata["Name"] or "").lower().replace("_", "-") for each in beside}
    names = sorted(name for name in named if re.match("mxnet(-|$)", name))
    if len(names) > 1:
        raise MXNetImportError(
            f"{' and '.join(names)} are installed over each other, so the files of MXNet are a "
            f"mixture of them; remove both (pip uninstall -y {' '.join(names)}), then {INSTALL}"
        )
    return names[0] if names else "mxnet"


def _supply_missing_names() -> None:
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        said = f"MXNet cannot be used with NumPy {numpy.__version__}; pip install 'numpy<2'"
        raise MXNetImportError(said)
    if "bool" not in vars(numpy):
        numpy.bool = numpy.bool_  # type: ignore[attr-defined, misc, unused-ignore]
    if importlib.util.find_spec("distutils") is None:
        try:
            importlib.import_module("setuptools")  # its import hook brings distutils back
            importlib.import_module("distutils.version")
        except ImportError as error:
            said = "MXNet needs distutils, which this Python lacks; pip install setuptools"
            raise MXNetImportError(said) from error


def _load_cuda_libraries() -> None:
    """Load the libraries of the CUDA wheels, as far as they are installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for folder, soname in CUDA_LIBRARIES:
        files = [root / folder / "lib" / soname for root in roots]
        found = next(filter(Path.exists, files), None)
        try:
            if found is not None:
                ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MXNetImportError(
                f"the CUDA library {soname} cannot be loaded ({error}); install it anew: pip "
                f"install --force-reinstall --no-deps nvidia-{folder.replace('_', '-')}-cu11"
            ) from error


def _explain(error: BaseException) -> str:
    """Say in plain words what is missing when ``import mxnet`` fails."""
    build = _chosen_build()
    if build is None or (isinstance(error, ModuleNotFoundError) and error.name == "mxnet"):
        return "MXNet is not installed; " + INSTALL
    found = re.search(r"lib[\w+.-]*\.so\.\w+(\.\w+)*", str(error))
    library = found[0] if found else ""
    if library == "libcuda.so.1":
        return (
            f"{build} is installed, but this machine has no NVIDIA driver (libcuda.so.1); install "
            f"the driver, or use the CPU build: pip uninstall -y {build} && pip install "
            "'memonger[cpu]'"
        )
    if library in [soname for _, soname in CUDA_LIBRARIES]:
        return f"{build} needs {library}; pip install 'memonger[cu112]' brings the CUDA libraries"
    of_arm = re.search(r"lib(armpl|amath|astring)\w*\.so", str(error))
    if of_arm:
        return (
            f"MXNet for aarch64 needs {of_arm[0]} of Arm Performance Libraries, which are not in "
            "its wheel; install them from Arm, and name their folder in LD_LIBRARY_PATH"
        )
    package = f"; apt-get install {library.replace('.so.', '')}" if library else ""  # on Debian
    said = f"{type(error).__name__}: {error}{package}"
    return f"MXNet ({build}) is installed but cannot be imported: {said}"


_waiting: list[Callable[[], object]] = []  # for MXNet's import


def when_imported(action: Callable[[], object]) -> None:
    """Do something as soon as MXNet is imported, whoever imports it; now if it is already."""
    if "mxnet" in sys.modules:
        action()
    else:
        _waiting.append(action)


def _found_by_others(name: str, path: Any, target: Any) -> Any:
    """Find a module as the finders after `_Preparation` do: a checkout's, or what others hook."""
    finders = sys.meta_path[sys.meta_path.index(_Preparation) + 1 :]
    found = (f.find_spec(name, path, target) for f in finders if hasattr(f, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


class _Preparation:
    """A finder of modules that prepares the import of MXNet, and finds it if something waits."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "mxnet":
            return None
        build = _chosen_build()
        if build is not None:
            _supply_missing_names()
            if build != "mxnet":
                _load_cuda_libraries()
        spec = _found_by_others(name, path, target) if _waiting else None
        if spec is not None and spec.loader is not None:
            usual = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                usual(module)
                while _waiting:
                    _waiting.pop(0)()

            spec.loader.exec_module = exec_module
        return spec


def version_of(text: str) -> tuple[int, int, int]:
    """Read the version of an MXNet, such as 1.9.1, 1.9.1.post0 or 1.10.0b20220101."""
    major, minor, patch = map(int, [*re.findall(r"\d+", text), "0", "0", "0"][:3])
    return major, minor, patch


def _check_version(version: str) -> None:
    """Refuse a version with which nothing works, and tell of one that was not tried."""
    if not version_of(TRIED[0]) <= version_of(version) < TOO_NEW:
        raise MXNetImportError(
            f"memonger works with MXNet 1.6 to 1.9, but MXNet {version} is installed; "
            "pip install mxnet==1.9.1 (or mxnet-cu112==1.9.1)"
        )
    if ".".join(map(str, version_of(version))) not in TRIED:
        log.warning(
            "MXNet %s was never tried with memonger (but %s were): plans are confirmed by binds; "
            "compare the training of yours with memonger.check",
            version,
            ", ".join(TRIED),
        )


def __getattr__(name: str) -> Any:
    if name != "mx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import mxnet
    except MXNetImportError:
        raise
    except (ImportError, OSError) as error:
        raise MXNetImportError(_explain(error)) from error
    _check_version(mxnet.__version__)
    globals()[name] = mxnet
    return mxnet


_STDERR = threading.Lock()  # file descriptor 2 is the process's
#: What is logged for each operator that has no kernel of MKLDNN's (``src/common/utils.h``).
_FALLBACK = re.compile(
    rb"^\[[^\n]*\n?Storage type fallback detected:\n.*?suppress this warning\.\n", re.M | re.S
)


@contextlib.contextmanager
def without_fallbacks() -> Iterator[None]:
    """Keep what MXNet says of storage types from file descriptor 2; write the rest at the end."""
    with _STDERR, tempfile.TemporaryFile() as written:
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            written.seek(0)
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, _FALLBACK.sub(b"", written.read()))
            os.close(stderr)


# Every bind would print a line about MKLDNN on stderr; read once, at the first bind.
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
# Operators that are invoked take turns at so many temporary spaces, each as large as the largest;
# an executor has one. Read when the first operator asks for one (``src/resource.cc``).
os.environ.setdefault("MXNET_CPU_TEMP_COPY", "1")
for _name in (  # that `environment` sets: they are there before MXNet has threads
    "MXNET_ELIMINATE_COMMON_EXPR",
    "MXNET_SUBGRAPH_BACKEND",
    "MXNET_USE_FUSION",
    "NNVM_AUTO_SEARCH_MATCH_RANGE",
):
    os.environ.setdefault(_name, "")
sys.meta_path.insert(0, _Preparation)
