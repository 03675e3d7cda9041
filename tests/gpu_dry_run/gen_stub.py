"""Build the stand-ins for the CUDA libraries that a libmxnet.so needs.

A weak definition of every CUDA function that ``cuda_stub.c`` does not define is linked with it into
one library, with a symbolic link for each library name. Needs gcc, nm and readelf; takes a second.
"""

from __future__ import annotations

import re
import subprocess
from itertools import chain
from pathlib import Path
from typing import Iterator

SOURCE = Path(__file__).resolve().parent / "cuda_stub.c"

CUDA = re.compile(r"lib(cu|nccl|nv)")
# The driver and NCCL do not version their symbols: these are known by their names alone.
UNVERSIONED = re.compile(r"(cu[A-Z]|nccl[A-Z])")
# Functions that hand nothing back to the host, so that doing nothing is a faithful stand-in.
# Any other function that cuda_stub.c lacks reports an error when it is called.
NOTHING = re.compile(
    r".*(Destroy|Set|Restore|Synchronize|Register|Record|Wait|GetLastError|PeekAtLastError"
    r"|Unload|EnablePeer|Memset|Forward|Backward|AddTensor|gemm|Gemm|Compile|AddName"
    r"|DeriveBN|Generate|syrk|trmm|trsm|dot|MemcpyPeerAsync|nvtx|ncclGroup|ncclReduce|ncclBcast)"
)
# The version under which unversioned symbols and our own counters are exported.
OURS = "CUDASTUB"


def undefined_symbols(library: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (name, version or None) of the CUDA symbols that a library needs."""
    out = subprocess.check_output(["nm", "-D", "--undefined-only", str(library)], text=True)
    for line in out.splitlines():
        name, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if CUDA.match(version) or (not version and UNVERSIONED.match(name)):
            yield name, version or None


def weak_definition(name: str) -> str:
    """Return C code of a function that records its call, and reports an error if it is unknown."""
    note, status = ("", 0) if NOTHING.match(name) else (" (no stub)", 1)
    call = f'cudastub_trace("{name}{note}")'
    return f"__attribute__((weak)) int {name}() {{ {call}; return {status}; }}\n"


def build(library: Path, outdir: Path) -> None:
    outdir.mkdir()
    names: dict[str, list[str]] = {}
    for name, version in undefined_symbols(library):
        names.setdefault(version or OURS, []).append(name)
    definitions = [weak_definition(name) for name in sorted(chain(*names.values()))]
    rest = outdir / "rest.c"
    rest.write_text("".join(["void cudastub_trace(const char *fmt, ...);\n", *definitions]))

    names.setdefault(OURS, []).append("cudastub_*")
    versions = outdir / "versions.map"
    with versions.open("w") as f:
        for version, symbols in names.items():
            others = "local: *; " if version == OURS else ""
            f.write(f"{version} {{ global: {'; '.join(symbols)}; {others}}};\n")

    stub = outdir / "libcudastub.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-pthread", f"-Wl,--version-script={versions}"]
    subprocess.check_call([*command, "-o", str(stub), str(SOURCE), str(rest)])
    out = subprocess.check_output(["readelf", "-d", str(library)], text=True)
    for soname in re.findall(r"\(NEEDED\).*\[(.*)\]", out):
        if CUDA.match(soname):
            (outdir / soname).symlink_to(stub.name)
