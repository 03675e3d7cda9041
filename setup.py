import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "memonger"
LIBRARY = PACKAGE / "support" / "libkernels.so"
COMPILERS = os.environ.get("CC", ""), "cc", "gcc", "clang"
COMPILER = next((shlex.split(each) for each in COMPILERS if shutil.which(each.split(" ")[0])), None)
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu"]  # from a wheel
# For any CPU of this kind; the same numbers everywhere.
FLAGS = "-std=c11 -O3 -Wall -Wextra -fPIC -shared -fvisibility=hidden -ffp-contract=off".split()


ENTRY = """
KERNEL int64_t try_{name}(Memory *memory, {given}{result})
{{
    jmp_buf end;
    memory->ended = &end;
    int status = setjmp(end);
    if (status == DONE)
        {returned}{name}(memory, {names});
    return status;
}}
"""


def entries() -> str:
    """Write the functions by which Python calls those that take memory; see kernels.h."""
    headers = sorted(PACKAGE.rglob("*.h"))
    text = "#include <setjmp.h>\n"
    text += "".join(f'#include "{header.relative_to(PACKAGE)}"\n' for header in headers)
    kernel = re.compile(r"^KERNEL (\w+) (\w+)\(\s*Memory \*memory,([^)]*)\);", re.M)
    for kind, name, given in kernel.findall("".join(header.read_text() for header in headers)):
        if name == "give_back":
            continue
        names = ", ".join(re.findall(r"(\w+)(?=,|$)", given))
        result, returned = ("", "") if kind == "void" else (f", {kind} *returned", "*returned = ")
        parts = {"name": name, "given": given.strip(), "names": names}
        text += ENTRY.format(result=result, returned=returned, **parts)
    return text


class Build(build_py):
    """Builds the library of compiled code beside its sources, and then as usual."""

    def run(self) -> None:
        files = sorted(path for kind in ("*.c", "*.h") for path in PACKAGE.rglob(kind))
        sources = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        made = LIBRARY.with_name(f"libkernels-{os.getpid()}.tmp")  # who runs the old one keeps it
        flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), f'-DSOURCES="{sources}"']
        code = [str(path) for path in files if path.suffix == ".c"]
        with tempfile.TemporaryDirectory() as folder:
            code.append(os.path.join(folder, "entries.c"))
            Path(code[-1]).write_text(entries())
            command = [*(COMPILER or ZIG), *flags, "-I", str(PACKAGE), *code, "-lm"]
            subprocess.run([*command, "-o", str(made)], check=True)
        os.replace(made, LIBRARY)
        super().run()


class Binary(Distribution):
    """A package for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


# What comes with MXNet: on older Pythons also scripts that import MXNet first find np.bool in it.
NUMPY = "numpy<1.24; python_version<'3.12'"

CUDA = [
    "mxnet-cu112==1.9.1",
    NUMPY,
    "nvidia-cublas-cu11==11.11.3.6",
    "nvidia-cuda-nvrtc-cu11==11.8.89",
    "nvidia-cuda-runtime-cu11==11.8.89",
    "nvidia-cudnn-cu11>=8.9.6.50,<9",
    "nvidia-cufft-cu11==10.9.0.58",
    "nvidia-curand-cu11==10.3.0.86",
    "nvidia-cusolver-cu11==11.4.1.48",
    "nvidia-nccl-cu11==2.21.5",
    "nvidia-nvtx-cu11==11.8.86",
]

RUFF = "ruff==0.17.5"
PLOTLY = "plotly>=5.18,<7"  # 5 for Python 3.8 too; with plotly.js 2 and 3

setup(
    name="memonger",
    version="1.0.0.dev0",
    description="Train MXNet 1.9 networks in a fraction of the memory, with the same result",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["memonger", "memonger.*"]),
    package_data={"": ["*.c", "*.h", "*.so"], "memonger.api": ["page/*"]},
    cmdclass={"build_py": Build},
    distclass=Binary,
    setup_requires=[] if COMPILER else ["ziglang"],
    entry_points={"console_scripts": ["memonger=memonger.__main__:run"]},
    python_requires=">=3.8,<3.13",
    install_requires=[
        "numpy>=1.17,<2",  # memonger supplies np.bool, which MXNet needs, from 1.24 on
        "tqdm>=4.60",
        "setuptools; python_version>='3.12'",  # brings distutils back, which MXNet needs
    ],
    extras_require={
        "cpu": ["mxnet==1.9.1", NUMPY],
        "cu112": CUDA,
        "plot": ["matplotlib"],
        "report": [PLOTLY],
        "examples": ["scikit-learn", "matplotlib"],
        "test": [
            "pytest>=7",
            "pytest-xdist>=3.2",
            "hypothesis>=6",
            "scikit-learn",
            "matplotlib",
            PLOTLY,
        ],
        "browser": ["selenium>=4.11,<5"],  # for tests of reports in a browser
        # For tests of networks of gluoncv and gluonnlp. Later OpenCV and pandas need a later NumPy.
        "zoo": ["gluoncv==0.10.5.post0", "gluonnlp==0.10.0", "opencv-python<4.12", "pandas<3"],
        "lint": [RUFF, "mypy==1.14.1"],
        # A site of docs/. Ruff breaks long signatures into lines.
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.26,<2", RUFF],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
