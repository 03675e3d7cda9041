"""The one place that imports MXNet, made to work on today's Python and NumPy.

MXNet 1.9.1 was released in 2022. What it lacks since is supplied here before its first import: the
name ``numpy.bool`` (gone in NumPy 1.24) and the module ``distutils`` (gone in Python 3.12, brought
back by setuptools). The CUDA libraries of the ``cu112`` extra are wheels of their own, which the
loader does not search: they are loaded here, in the order in which they need one another.

All of it costs seconds, so it is done when MXNet is first imported, by whoever does: this module
is light, and imports MXNet where its ``mx`` is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from memonger.support.errors import MXNetImportError

#: Folder in the ``nvidia`` namespace package and soname, each after those that it needs.
CUDA_LIBRARIES: tuple[tuple[str, str], ...] = (
    ("cuda_runtime", "libcudart.so.11.0"),
    ("nvtx", "libnvToolsExt.so.1"),
    ("cuda_nvrtc", "libnvrtc.so.11.2"),
    ("cublas", "libcublasLt.so.11"),
    ("cublas", "libcublas.so.11"),
    ("cufft", "libcufft.so.10"),
    ("curand", "libcurand.so.10"),
    ("cusolver", "libcusolver.so.11"),
    ("cudnn", "libcudnn.so.8"),
    ("nccl", "libnccl.so.2"),
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


def _installed_builds() -> list[tuple[str, Path]]:
    """Name and package folder of every MXNet wheel that is installed."""
    import importlib.metadata

    found: dict[tuple[str, Path], None] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name == "mxnet" or name.startswith("mxnet-"):
            folder = Path(str(distribution.locate_file("mxnet"))).resolve()
            if (folder / "__init__.py").exists():
                found[(name, folder)] = None
    return list(found)


def _chosen_build() -> str | None:
    """The wheel that ``import mxnet`` will take, or None if there is no MXNet.

    Raises
    ------
    MXNetImportError
        If two wheels were installed over each other: the files are then a mixture of both.
    """
    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parent
    names = sorted(name for name, place in _installed_builds() if place == folder)
    if len(names) > 1:
        raise MXNetImportError(
            f"{' and '.join(names)} are installed over each other, so the files of MXNet are a "
            f"mixture of them; remove both (pip uninstall -y {' '.join(names)}), then {INSTALL}"
        )
    return names[0] if names else "mxnet"


def _supply_missing_names() -> None:
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise MXNetImportError(
            f"MXNet 1.9 cannot be used with NumPy {numpy.__version__}; pip install "
            f"'numpy=={'1.26.4' if sys.version_info >= (3, 12) else '1.23.5'}'"
        )
    if "bool" not in vars(numpy):
        numpy.bool = numpy.bool_  # type: ignore[attr-defined, misc, unused-ignore]
    try:
        import distutils.version  # noqa: F401
    except ImportError:
        try:
            import distutils.version  # noqa: F401

            import setuptools  # noqa: F401  (its import hook brings distutils back)
        except ImportError as error:
            raise MXNetImportError(
                "MXNet 1.9 needs distutils, which Python %d.%d no longer has; "
                "pip install setuptools" % sys.version_info[:2]
            ) from error


def _load_cuda_libraries() -> list[str]:
    """Load the libraries of the CUDA wheels; returns the sonames for which no wheel was found.

    Raises
    ------
    MXNetImportError
        If one is there and cannot be loaded.
    """
    import ctypes

    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    missing = []
    for folder, soname in CUDA_LIBRARIES:
        files = [root / folder / "lib" / soname for root in roots]
        file = next((f for f in files if f.exists()), None)
        if file is None:
            missing.append(soname)
        else:
            try:
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise MXNetImportError(
                    f"the CUDA library {soname} cannot be loaded ({error}); install it anew: pip "
                    f"install --force-reinstall --no-deps nvidia-{folder.replace('_', '-')}-cu11"
                ) from error
    return missing


def _explain(error: BaseException, build: str | None, missing: list[str]) -> str:
    """What is missing, in plain words, when ``import mxnet`` fails."""
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
        return (
            f"MXNet needs the system library {library}; apt-get install {SYSTEM_LIBRARIES[library]}"
        )
    if library in [soname for _, soname in CUDA_LIBRARIES]:
        return (
            f"{build} needs {library}; pip install 'memonger[cu112]' brings the CUDA libraries "
            f"(missing: {', '.join(missing) or library})"
        )
    return f"MXNet ({build}) is installed but cannot be imported: {type(error).__name__}: {error}"


class _Preparation:
    """A finder of modules that finds none, but prepares the import of MXNet."""

    def __init__(self) -> None:
        self.build: str | None = None  # the wheel that is imported
        self.missing: list[str] = []  # sonames for which there is no wheel
        self._begun = "mxnet" in sys.modules

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


def _import() -> Any:
    try:
        import mxnet
    except MXNetImportError:
        raise
    except (ImportError, OSError) as error:
        said = _explain(error, _preparation.build, _preparation.missing)
        raise MXNetImportError(said) from error
    if not re.match(r"1\.9\.", mxnet.__version__):
        raise MXNetImportError(
            f"memonger knows how MXNet 1.9 plans memory, but MXNet {mxnet.__version__} is "
            "installed; pip install mxnet==1.9.1 (or mxnet-cu112==1.9.1)"
        )
    return mxnet


def __getattr__(name: str) -> Any:
    if name != "mx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _import()
    return found


# Every bind would print a line about MKLDNN on stderr; read once, at the first bind.
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
_preparation = _Preparation()
sys.meta_path.insert(0, _preparation)
