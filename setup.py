"""Builds the library of C and gives the wheel its tag; pyproject.toml has all else.

pip calls this file as the project's build backend: setuptools', which asks for a compiler too.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:  # no wheels are made here
        bdist_wheel = object

PACKAGE = Path("memonger")
COMPILERS = os.environ.get("CC", ""), "cc", "gcc", "clang"
COMPILER = next((shlex.split(each) for each in COMPILERS if shutil.which(each.split(" ")[0])), None)
ZIG = [sys.executable, *f"-m ziglang cc -target {platform.machine()}-linux-gnu".split()]  # a wheel
# For any CPU of this kind; the same numbers everywhere.
FLAGS = "-std=c11 -O3 -fPIC -shared -fvisibility=hidden -ffp-contract=off".split()
FLAGS += ["-Wall", "-Wextra", "-Wconversion"]


def get_requires_for_build_wheel(config_settings=None):
    """Ask for a compiler where there is none."""
    return [] if COMPILER else ["ziglang"]


get_requires_for_build_editable = get_requires_for_build_wheel

ENTRY = """
KERNEL int64_t try_{name}(Memory *memory, {result}{given})
{{
    jmp_buf end;
    memory->ended = &end;
    int status = setjmp(end);
    if (status == DONE)
        {returned}{name}({names});
    return status;
}}
"""


def read_headers() -> str:
    """Read all headers without their comments, as support/kernels.py does: the two must agree."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.h")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def entries() -> str:
    """Write the functions by which Python calls compiled code; see kernels.h."""
    headers, declarations = sorted(PACKAGE.rglob("*.h")), read_headers()
    text = "#include <setjmp.h>\n"
    text += "".join(f'#include "{header.relative_to(PACKAGE)}"\n' for header in headers)
    text += f"KERNEL int headers(void) {{ return {zlib.crc32(declarations.encode()) >> 1}; }}\n"
    for kind, name, given in re.findall(r"^KERNEL (\w+) (\w+)\(([^)]*)\);", declarations, re.M):
        names = ", ".join(re.findall(r"(\w+)(?=,|$)", given))
        result, returned = ("", "") if kind == "void" else (f"{kind} *returned, ", "*returned = ")
        given = re.sub(r"^\s*Memory \*memory,", "", given).strip()
        parts = {"name": name, "given": given, "names": names}
        text += ENTRY.format(result=result, returned=returned, **parts)
    return text


class Library(build_ext):
    """Builds the library; with ``--inplace`` and for an editable install beside its sources."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"  # it is none of Python's modules

    def run(self):
        (extension,) = self.extensions
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            code = [Path(folder, "entries.c"), *sorted(PACKAGE.rglob("*.c"))]
            code[0].write_text(entries())
            made = Path(folder, library.name)
            command = [*(COMPILER or ZIG), *flags, "-I", PACKAGE, *code, "-lm", "-o", made]
            subprocess.run([str(part) for part in command], check=True)
            os.replace(made, library)  # who runs the old one keeps it


class Wheel(bdist_wheel):
    """A wheel for every Python 3 on one kind of machine."""

    def finalize_options(self):
        # The tree may be read-only, and others may build from it at the same time.
        self.folder = tempfile.TemporaryDirectory()
        self.distribution.get_command_obj("build").build_base = self.folder.name
        self.distribution.get_command_obj("egg_info").egg_base = self.folder.name
        super().finalize_options()

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("memonger.support.libkernels", [])],
        cmdclass={"build_ext": Library, "bdist_wheel": Wheel},
    )
