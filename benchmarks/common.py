"""What the benchmarks have in common: how they are called, what they run on, and how they time."""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from typing import Any, Callable, Collection, Mapping, Sequence

import mxnet as mx
import numpy as np
from memonger.costs.pool import pool
from memonger.graph import marks
from memonger.planners.marks import chen2016
from memonger.solve.facts import Facts
from memonger.solve.limits import Limits
from memonger.solve.network import read_network


def machine() -> str:
    """What figures were measured on, in a line."""
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    versions = f"Python {platform.python_version()}, MXNet {mx.__version__}"
    return (
        f"{platform.machine()}, {os.cpu_count() or 1} cores, {threads} OpenMP threads, {versions}"
    )


def check_names(
    parser: argparse.ArgumentParser, names: Sequence[str], known: Collection[str]
) -> None:
    """End with a message if not all names are those of known networks."""
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no network {', '.join(unknown)}; there are {', '.join(known)}")


def limit_of_work(text: str) -> float:
    """A limit of forward work on the command line, in forward passes; inf: there is none."""
    value = float(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a limit of work is 1 or more, or inf")
    return value


def as_plan_takes_it(limit: float) -> float | None:
    """The ``work`` of ``memonger.plan``."""
    return None if math.isinf(limit) else limit


def as_module_does(symbol: Any, shapes: Any) -> dict[str, str]:
    """The ``grad_req`` with which Module binds: no gradients of inputs."""
    return {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}


def plan_as_original(symbol: Any, shapes: Any, requests: Mapping[str, str]) -> Any:
    """The network with the plan of the original's algorithm on its marks, without any rule."""
    facts = Facts(read_network(symbol, shapes, grad_req=requests), Limits())
    masks = [trial.mask for trial in chen2016.search(facts.graph, facts.hints)]
    costs = [pool(facts.training, mask).planned_bytes // 2**20 for mask in masks]
    return marks.write(symbol, masks[costs.index(min(costs))])  # the first of least memory


def in_turns(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Run each of some steps once a round; the seconds of each, by round.

    One round more is run before, in which memory is allocated, and not counted.
    """
    seconds: dict[str, np.ndarray] = {key: np.empty(1 + rounds) for key in steps}
    for k in range(1 + rounds):
        for key, step in steps.items():
            start = clock()
            step()
            seconds[key][k] = clock() - start
    return {key: each[1:] for key, each in seconds.items()}
