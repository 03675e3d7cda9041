"""The one place that imports MXNet and reads its settings, and what it prints without being asked.

MXNet 1.9.1 was released in 2022. What it lacks since is supplied here before its first import: the
name ``numpy.bool`` (gone in NumPy 1.24) and the module ``distutils`` (gone in Python 3.12, brought
back by setuptools). The CUDA libraries of the ``cu112`` extra are wheels of their own, which the
loader does not search: they are loaded here, in the order in which they need one another.

All of it costs seconds, so it is done when MXNet is first imported, by whoever does: this module
is light, and imports MXNet where its ``mx`` is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

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

#: System libraries that MXNet's wheels expect, and the Debian package of each.
SYSTEM_LIBRARIES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libgfortran.so.4": "libgfortran4",
}

INSTALL = (
    "install one of the extras: pip install 'memonger[cpu]' for a machine without an NVIDIA GPU, "
    "pip install 'memonger[cu112]' for one with"
)


class GpuPool(NamedTuple):
    """How MXNet rounds what it asks a GPU for; in bytes."""

    kind: str  # 'Naive', 'Round' or 'Unpooled'
    page: int
    large: int
    cutoff: int


@dataclass(frozen=True)
class Settings:
    """What MXNet's environment variables say that bears on a plan."""

    mkldnn: bool  # whether MKLDNN may compute on a CPU
    mkldnn_rnn: bool  # and its RNN
    fusion: bool  # whether a GPU fuses pointwise operators
    merging: bool  # whether common subexpressions are merged
    sum_cap: int  # from so many terms on a gradient is summed in a chain
    coloring: bool  # whether the memory planner does, which the replay does not know
    match_range: int  # by which factor memory may be too large for a tensor
    search_match_range: bool  # whether all powers of two up to it are tried
    pool: GpuPool

    @property
    def match_ranges(self) -> list[int]:
        """The factors that MXNet will try (``MXPlanMemory``)."""
        if not self.search_match_range or self.match_range == 0:
            return [self.match_range]
        return [2**k for k in range(self.match_range.bit_length())]


def settings() -> Settings:
    """Read the environment variables as they are now."""
    return Settings(
        mkldnn=_whether("MXNET_MKLDNN_ENABLED"),
        mkldnn_rnn=_whether("MXNET_USE_MKLDNN_RNN"),
        fusion=_whether("MXNET_USE_FUSION"),
        merging=_whether("MXNET_ELIMINATE_COMMON_EXPR"),
        sum_cap=_whole("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", 8),
        coloring=os.environ.get("NNVM_EXEC_NUM_TEMP", "1") not in ("0", "1"),
        match_range=_whole("NNVM_EXEC_MATCH_RANGE", 16),
        search_match_range=_whether("NNVM_AUTO_SEARCH_MATCH_RANGE", "0"),
        pool=GpuPool(
            kind=os.environ.get("MXNET_GPU_MEM_POOL_TYPE", "Naive"),
            page=_whole("MXNET_GPU_MEM_POOL_PAGE_SIZE", 4096),
            large=_whole("MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE", 2 * MB),
            cutoff=1 << _whole("MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF", 24),
        ),
    )


def _whether(variable: str, usual: str = "1") -> bool:
    return os.environ.get(variable, usual) not in ("", "0", "false", "False")


def _whole(variable: str, usual: int) -> int:
    value = os.environ.get(variable, usual)
    try:
        return int(value)
    except ValueError:
        reason = "MXNet reads a whole number there; set one, or unset it"
        raise MemongerError(f"{variable}={value!r}: {reason}") from None


@contextlib.contextmanager
def environment(**new: str) -> Iterator[None]:
    """Set environment variables for as long as the block runs."""
    old = {name: os.environ[name] for name in new if name in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
        os.environ.update(old)


# ---------------------------------------------------------------- the import


def _chosen_build() -> str | None:
    """Return the wheel that ``import mxnet`` will take, or None; refuse one over another."""
    import importlib.metadata

    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:
        return None
    folder, names = Path(spec.origin).resolve().parent, set()
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.match("mxnet(-|$)", name):
            if Path(str(distribution.locate_file("mxnet"))).resolve() == folder:
                names.add(name)
    if len(names) > 1:
        both = sorted(names)
        raise MXNetImportError(
            f"{' and '.join(both)} are installed over each other, so the files of MXNet are a "
            f"mixture of them; remove both (pip uninstall -y {' '.join(both)}), then {INSTALL}"
        )
    return names.pop() if names else "mxnet"


def _supply_missing_names() -> None:
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise MXNetImportError(
            f"MXNet 1.9 cannot be used with NumPy {numpy.__version__}; pip install "
            f"'numpy=={'1.26.4' if sys.version_info >= (3, 12) else '1.23.5'}'"
        )
    if "bool" not in vars(numpy):
        numpy.bool = numpy.bool_  # type: ignore[attr-defined, misc, unused-ignore]
    if importlib.util.find_spec("distutils") is None:
        try:
            importlib.import_module("setuptools")  # its import hook brings distutils back
            importlib.import_module("distutils.version")
        except ImportError as error:
            version = ".".join(map(str, sys.version_info[:2]))
            raise MXNetImportError(
                f"MXNet 1.9 needs distutils, which Python {version} no longer has; pip install "
                "setuptools"
            ) from error


def _load_cuda_libraries() -> list[str]:
    """Load the libraries of the CUDA wheels; return the sonames for which no wheel was found."""
    import ctypes

    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    missing = []
    for folder, soname in CUDA_LIBRARIES:
        files = [root / folder / "lib" / soname for root in roots]
        found = next(filter(Path.exists, files), None)
        if found is None:
            missing.append(soname)
            continue
        try:
            ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MXNetImportError(
                f"the CUDA library {soname} cannot be loaded ({error}); install it anew: pip "
                f"install --force-reinstall --no-deps nvidia-{folder.replace('_', '-')}-cu11"
            ) from error
    return missing


def _explain(error: BaseException) -> str:
    """Say in plain words what is missing when ``import mxnet`` fails."""
    build, missing = _preparation.build, _preparation.missing
    if build is None or (isinstance(error, ModuleNotFoundError) and error.name == "mxnet"):
        return "MXNet is not installed; " + INSTALL
    found = re.search(r"(lib[\w+.-]*\.so[\w.]*)", str(error))
    library = found.group(1) if found else ""
    if library == "libcuda.so.1":
        return (
            f"{build} is installed, but this machine has no NVIDIA driver (libcuda.so.1); install "
            f"the driver, or use the CPU build: pip uninstall -y {build} && pip install "
            "'memonger[cpu]'"
        )
    if library in SYSTEM_LIBRARIES:
        package = SYSTEM_LIBRARIES[library]
        return f"MXNet needs the system library {library}; apt-get install {package}"
    if library in [soname for _, soname in CUDA_LIBRARIES]:
        return (
            f"{build} needs {library}; pip install 'memonger[cu112]' brings the CUDA libraries "
            f"(missing: {', '.join(missing) or library})"
        )
    return f"MXNet ({build}) is installed but cannot be imported: {type(error).__name__}: {error}"


class _Preparation:
    """A finder of modules that finds none, but prepares the import of MXNet."""

    build: str | None = None  # the wheel that is imported
    missing: Sequence[str] = ()  # sonames for which there is no wheel
    _begun = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Prepare the first import of MXNet; leave it to others to find it."""
        if name != "mxnet" or self._begun:
            return
        self._begun = True
        try:
            self.build = _chosen_build()
            if self.build is not None:
                _supply_missing_names()
                if self.build != "mxnet":
                    self.missing = _load_cuda_libraries()
        except BaseException:
            self._begun = False
            raise


def __getattr__(name: str) -> Any:
    if name != "mx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import mxnet
    except MXNetImportError:
        raise
    except (ImportError, OSError) as error:
        raise MXNetImportError(_explain(error)) from error
    if not mxnet.__version__.startswith("1.9."):
        raise MXNetImportError(
            f"memonger knows how MXNet 1.9 plans memory, but MXNet {mxnet.__version__} is "
            "installed; pip install mxnet==1.9.1 (or mxnet-cu112==1.9.1)"
        )
    globals()[name] = mxnet
    return mxnet


# ---------------------------------------------------------------- what it prints

_STDERR = threading.Lock()  # file descriptor 2 is the process's
_PATIENCE = 1.0  # seconds to wait for what was written


@contextlib.contextmanager
def without_line(text: bytes) -> Iterator[None]:
    """Keep the lines that hold a text from standard error; all others are handed on at once.

    For what MXNet logs without a condition: it writes to the file descriptor, so only there can it
    be stopped. A process that is forked meanwhile keeps the pipe, which is then handed on until
    that process ends.
    """
    with _STDERR:
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        read, write = os.pipe()
        forwarding = threading.Thread(target=_forward, args=(read, stderr, text), daemon=True)
        forwarding.start()
        os.dup2(write, 2)
        os.close(write)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            forwarding.join(_PATIENCE)


def _forward(read: int, stderr: int, text: bytes) -> None:
    """Hand on all lines but those with the text, until nothing can write any more."""
    with open(read, "rb") as lines:
        for line in lines:
            if text not in line:
                with contextlib.suppress(OSError):
                    os.write(stderr, line)
    os.close(stderr)


# Every bind would print a line about MKLDNN on stderr; read once, at the first bind.
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
_preparation = _Preparation()
sys.meta_path.insert(0, _preparation)
