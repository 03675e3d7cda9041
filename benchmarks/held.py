"""What operators take beside what is told, each alone.

    OMP_NUM_THREADS=1 python benchmarks/held.py              # all cases of the tests
    OMP_NUM_THREADS=1 python benchmarks/held.py log_softmax  # some of them

Each operator stands between two pointwise ones, on 4.5 MiB of data. A process of its own trains it
without a plan, and measures by how much its resident memory grows, at most, in the second step. The
table lists what is told (``unplanned_device_bytes`` of a plan for a CPU), what is taken, and the
difference in arrays of the operator's data, the largest first, where it is more than a twentieth of
one. Cases that know their sizes (a Reshape to numbers) are left out and counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any, Iterator

import memonger
import mxnet as mx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "helpers")]
from common import check_names, machine
from operator_cases import CASES, Case
from planned import process_mb

MB = 2**20
SMALL, LARGE = (4, 8, 6, 6), (4, 8, 192, 192)


def network(case: Case, shape: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """The case between operators whose results, and gradients, are in the pool."""
    with mx.name.NameManager():
        x = mx.sym.Variable("data") * 1.5 + 0.1
        symbol = mx.sym.MakeLoss(mx.sym.softsign(case.build(x)))
    return symbol, {"data": shape}


def step(symbol: Any, shapes: Any) -> Any:
    """Bind it, fill its arrays and train one step; the executor."""
    executor = symbol.simple_bind(mx.cpu(), grad_req="write", **shapes)
    for array in executor.arg_arrays:
        array[:] = 0.1
    for array in executor.aux_arrays:
        array[:] = 0.5
    again(executor)
    return executor


def again(executor: Any) -> None:
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def measured(case: Case) -> tuple[float, float]:
    """What is told, and what the second step takes at most, in MB."""
    step(*network(case, SMALL))  # loads what runs it
    ctypes.CDLL(None).malloc_trim(0)
    before = process_mb()
    symbol, shapes = network(case, LARGE)
    executor = step(symbol, shapes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    again(executor)
    taken = process_mb("VmHWM") - before
    plan = memonger.plan(symbol, shapes, how="marks", budget=1.0, ctx=mx.cpu())
    return plan.unplanned_device_bytes / MB, taken


def of_a_child(case: Case) -> tuple[float, float] | None:
    """Measure in a process that has run nothing before; None if it fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        try:
            os.write(writer, json.dumps(measured(case)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else None


def results(names: list[str]) -> Iterator[tuple[str, float, float]]:
    for name in names:
        pair = of_a_child(CASES[name])
        yield (name, *(pair or (0.0, 0.0)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What operators take beside what is told.")
    parser.add_argument("names", nargs="*", metavar="case", help="of tests/helpers")
    names = parser.parse_args(arguments).names
    check_names(parser, names, CASES)
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:  # both are read at a start
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # arrays go back at once
        os.environ["MALLOC_PERTURB_"] = "1"  # all that is requested is written, and so resident
        os.execv(sys.executable, [sys.executable, *sys.argv])
    rows = [*results(names or [*CASES])]
    array = 4 * 4 * 8 * 192 * 192 / MB
    print(machine(), "", sep="\n")
    print("| case | told, MiB | taken, MiB | more, in arrays |\n|---|---|---|---|")
    tried = [(name, told, taken) for name, told, taken in rows if told]
    for name, told, taken in sorted(tried, key=lambda row: row[1] - row[2]):
        if names or abs(taken - told) > array / 20:
            print(f"| {name} | {told:.1f} | {taken:.1f} | {(taken - told) / array:.2f} |")
    print(f"\n{len(tried)} of {len(rows)} cases were tried; the others know their sizes.")


if __name__ == "__main__":
    main()
