"""Builds the library of C and gives the wheel its tag; pyproject.toml has all else.

pip calls this file as the project's build backend: setuptools', which asks for a compiler too.
"""

import json
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
    """Read all headers without their comments."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.h")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def find_structs(headers: str) -> dict:
    """Find the types of fields, by struct: ``Int32s first, walk_row;`` are two fields."""
    found = {}
    for body, struct in re.findall(r"typedef struct \{([^}]*)\} (\w+);", headers):
        lines = [line.split(None, 1) for line in body.split(";")[:-1]]
        found[struct] = {name.strip(): kind for kind, names in lines for name in names.split(",")}
    return found


def find_constants(headers: str) -> dict:
    """Find the numbers of constants, those of any ``enum``."""
    found = {}
    for names in re.findall(r"enum \{([^}]*)\};", headers):
        number = -1
        for item in filter(None, map(str.strip, names.split(","))):
            name, _, value = item.partition("=")
            number = int(value) if value else number + 1
            found[name.strip()] = number
    return found


def write_entries() -> str:
    """Write the functions by which Python calls compiled code; see kernels.h.

    ``declarations`` returns what the headers declare, as JSON for support/kernels.py. ``functions``
    has (type, name, whether it is a result) of all that a function takes and returns.
    """
    headers, functions = read_headers(), {}
    text = "#include <setjmp.h>\n"
    for path in sorted(PACKAGE.rglob("*.h")):
        text += f'#include "{path.relative_to(PACKAGE)}"\n'
    for kind, name, given in re.findall(r"^KERNEL (\w+) (\w+)\(([^)]*)\);", headers, re.M):
        parts = re.findall(r"(const )?(\w+) (\*?)(\w+)", f"{kind} *returned, {given}")
        functions[name] = [
            (of, field, bool(star and not const))
            for const, of, star, field in parts
            if of not in {"void", "Memory"}
        ]
        text += ENTRY.format(
            name=name,
            result="" if kind == "void" else f"{kind} *returned, ",
            given=re.sub(r"^\s*Memory \*memory,", "", given).strip(),
            returned="" if kind == "void" else "*returned = ",
            names=", ".join(field for _, _, _, field in parts[1:]),
        )
    declared = {
        "structs": find_structs(headers),
        "functions": functions,
        "constants": find_constants(headers),
        "sources": {
            str(path.relative_to(PACKAGE)): zlib.crc32(path.read_bytes())
            for path in sorted(PACKAGE.rglob("*.[ch]"))
        },
    }
    literal = json.dumps(json.dumps(declared))
    return f"{text}KERNEL const char *declarations(void) {{ return {literal}; }}\n"


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
            text, code = write_entries(), [Path(folder, "entries.c"), *sorted(PACKAGE.rglob("*.c"))]
            code[0].write_text(text)
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
