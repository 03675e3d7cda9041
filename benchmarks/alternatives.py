"""A network trained in every way that MXNet and memonger have: memory, time, and the same result?

    OMP_NUM_THREADS=1 python benchmarks/alternatives.py            # five networks, 11 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/alternatives.py vgg19      # one of them

A step is of the whole batch in every way. In smaller batches it is several passes, whose gradients
MXNet adds up (``grad_req='add'``), from zeros.

MB (2**20 bytes) are of the pool, as MXNet reports it when it binds as Module does, with no
gradients of inputs. Nothing is allocated for it. Parameters and their gradients come on top, as the
line above a table says; they are the same in every way.

Time and results are of smaller images or fewer time steps, which the same line names; every way is
planned anew for them. Time: CPU seconds of a step with its update; the ways take turns, and the
figure is the median of the ratios to the plain step of the same round. Results: one step from the
same parameters with the same seed, beside that of no plan, which runs twice. Where the bits differ,
the figure is the norm of the difference of all gradients, as a share of the norm of the gradients;
of BatchNorm's running statistics, as a share of how far the step moves them (1: it does not).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Mapping

import memonger
import mxnet as mx
import numpy as np
from memonger.costs.bind import bind, read_planned_mb
from memonger.graph.inputs import read_shapes
from memonger.graph.read import forward_graph
from memonger.support.mxnet import environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import as_module_does, check_names, in_turns, machine, plan_as_original

MB = 2**20
Arrays = Dict[str, Any]  # by name
Shapes = Mapping[str, networks.Shape]


@dataclass(frozen=True)
class Way:
    """How a batch is trained."""

    plan: Mapping[str, Any] | None = None  # what `memonger.plan` is asked for, if it is asked
    is_original: bool = False  # whether the plan is that of the original's algorithm, without rules
    parts: int = 1  # smaller batches, whose gradients are added
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables


MIRROR = "MXNET_BACKWARD_DO_MIRROR"
WAYS = {
    "no plan": Way(),
    f"{MIRROR}=1": Way(settings={MIRROR: "1"}),
    "original's plan": Way(is_original=True),
    "marks": Way({"how": "marks"}),
    "marks, 60 %": Way({"how": "marks", "budget": 0.6}),
    "schedule, R = 2": Way({"how": "schedule", "work": 2.0}),
    "schedule, R = 3": Way({"how": "schedule", "work": 3.0}),
    "2 smaller batches": Way(parts=2),
    "4 smaller batches": Way(parts=4),
    "2 smaller batches, marks": Way({"how": "marks"}, parts=2),
}


@dataclass(frozen=True)
class Subject:
    """A network, and what makes a smaller one of it for a step that is timed."""

    build: Callable[..., networks.Network]
    batch: int
    smaller: Mapping[str, int]


NETWORKS = {
    "resnet50-v2": Subject(networks.resnet_v2, 32, {"image": 112}),
    "inception-v3": Subject(networks.inception_v3, 32, {"image": 149}),
    "vgg19": Subject(functools.partial(networks.model_zoo, "vgg19"), 32, {"image": 64}),
    "mobilenetv2": Subject(networks.mobilenet_v2, 32, {"image": 112}),
    "lstm-4x100": Subject(
        functools.partial(networks.lstm, steps=100, use_loss=False), 64, {"steps": 12}
    ),
    "tiny": Subject(
        functools.partial(networks.resnet, (1, 1), image=32, classes=10, filters=8),
        256,
        {"image": 16},
    ),
}
USUAL = [name for name in NETWORKS if name != "tiny"]


@dataclass(frozen=True)
class Planned:
    """A network for a part of the batch, as a way has it."""

    way: Way
    symbol: Any
    shapes: Shapes  # of one part
    megabytes: int  # of the pool


def planned(
    build: Callable[..., networks.Network], batch: int, way: Way, patience: float
) -> Planned:
    """Plan a network for a way, and measure its pool.

    Raises
    ------
    memonger.BudgetError
        If no plan fits.
    """
    symbol, shapes = build(batch=batch // way.parts)
    request = requested(symbol, shapes, way)
    if way.is_original:
        symbol = plan_as_original(symbol, shapes, request)
    if way.plan is None:
        return Planned(way, symbol, shapes, bound_mb(symbol, shapes, request, way))
    plan = memonger.plan(symbol, shapes, grad_req=request, patience=patience, **way.plan)
    if not plan.exact:
        raise memonger.MemongerError(f"the bind differs from the prediction: {plan!r}")
    # The gradients of parameters stand in a schedule's pool.
    return Planned(way, plan.symbol, shapes, plan.pool_bytes // MB)


def requested(symbol: Any, shapes: Any, way: Way) -> dict[str, str]:
    """Return the ``grad_req`` of a way by argument."""
    add = {"write": "add", "null": "null"}
    request = as_module_does(symbol, shapes)
    return request if way.parts == 1 else {name: add[req] for name, req in request.items()}


def bound_mb(symbol: Any, shapes: Any, request: Mapping[str, str], way: Way) -> int:
    """Bind a network as it is, with arrays that are never allocated; return the MB of its pool."""
    graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))
    trained = [i for i in graph.arguments if request[graph.nodes[i].name] != "null"]
    with environment(**way.settings):
        return read_planned_mb(bind(symbol, graph, mx.cpu(), trained, request))


# -- training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What all ways share: inputs of the whole batch, parameters, gradients, running statistics."""

    inputs: Arrays
    parameters: Arrays
    gradients: Arrays
    statistics: Arrays

    def results(self) -> tuple[Arrays, Arrays]:
        """Copy the gradients and the statistics, as NumPy arrays."""
        copies = ({k: a.asnumpy() for k, a in d.items()} for d in (self.gradients, self.statistics))
        return next(copies), next(copies)


def parameter_shapes(symbol: Any, shapes: Shapes) -> dict[str, networks.Shape]:
    """Infer the shapes of all parameters by name."""
    found = zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])
    return {name: shape for name, shape in found if name not in shapes}


def training_of(symbol: Any, shapes: Shapes) -> Training:
    """Make parameters as they are initialised, and a batch of noise for a network."""
    mx.random.seed(0)
    inputs = {
        name: mx.nd.random.randint(0, 10, shape).astype("float32")
        if "label" in name
        else mx.nd.random.uniform(shape=shape)
        for name, shape in shapes.items()
    }
    auxiliary = zip(symbol.list_auxiliary_states(), symbol.infer_shape(**shapes)[2])
    parameters = {k: mx.nd.empty(shape) for k, shape in parameter_shapes(symbol, shapes).items()}
    statistics = {name: mx.nd.empty(shape) for name, shape in auxiliary}
    initialise, attributes = mx.init.Xavier(), symbol.attr_dict()
    for name, array in [*parameters.items(), *statistics.items()]:
        initialise(mx.init.InitDesc(name, attributes.get(name)), array)
    gradients = {name: mx.nd.zeros_like(array) for name, array in parameters.items()}
    return Training(inputs, parameters, gradients, statistics)


def gradients_of(found: Planned, training: Training) -> Callable[[], None]:
    """Bind a way to the shared arrays; return what computes the gradients of the whole batch."""
    way, inputs = found.way, {name: mx.nd.empty(shape) for name, shape in found.shapes.items()}
    with environment(**way.settings):
        executor = found.symbol.bind(
            mx.cpu(),
            {**training.parameters, **inputs},
            training.gradients,
            requested(found.symbol, found.shapes, way),
            training.statistics,
        )

    def run() -> None:
        with environment(**way.settings):
            if way.parts > 1:
                for gradient in training.gradients.values():
                    gradient[:] = 0
            for k in range(way.parts):
                for name, part in inputs.items():
                    rows = part.shape[0]
                    part[:] = training.inputs[name][k * rows : (k + 1) * rows]
                executor.forward(is_train=True)
                executor.backward()
            mx.nd.waitall()

    return run


def step_of(run: Callable[[], None], training: Training) -> Callable[[], None]:
    """Return a training step: the gradients, then the update of the parameters."""

    def step() -> None:
        run()
        for name, parameter in training.parameters.items():
            # A small rate: noise teaches nothing, and the steps are to stay alike.
            mx.nd.sgd_update(parameter, training.gradients[name], lr=1e-6, out=parameter)
        mx.nd.waitall()

    return step


def results_of(
    runs: Mapping[str, Callable[[], None]], training: Training
) -> dict[str, dict[str, str]]:
    """Run each way once from the same start; compare its results to those of no plan, in words."""
    _, start = training.results()

    def once(run: Callable[[], None]) -> tuple[Arrays, Arrays]:
        for name, array in training.statistics.items():
            array[:] = start[name]
        for gradient in training.gradients.values():
            gradient[:] = np.nan  # so that nothing is left of the run before
        mx.random.seed(0)
        run()
        return training.results()

    gradients, statistics = once(runs["no plan"])
    nought = {name: np.zeros_like(array) for name, array in gradients.items()}
    found = {}
    for name, run in runs.items():
        its_gradients, its_statistics = once(run)
        found[name] = {
            "gradients": difference(its_gradients, gradients, nought),
            "statistics": difference(its_statistics, statistics, start),
        }
    return found


def difference(found: Arrays, wanted: Arrays, start: Arrays) -> str:
    """Say how far arrays are from those wanted, as a share of how far these are from the start."""
    if not wanted:
        return "-"
    if all(found[name].tobytes() == wanted[name].tobytes() for name in wanted):
        return "same bits"
    return f"off by {norm(found, wanted) / norm(wanted, start):.2g}"


def norm(some: Arrays, others: Arrays) -> float:
    """Compute the Euclidean norm of the difference of arrays, all together."""
    squares = (np.square(some[k].astype(np.float64) - others[k]).sum() for k in some)
    return math.sqrt(sum(squares))


# -- the table --------------------------------------------------------------------------------


def measure(subject: Subject, rounds: int, patience: float) -> list[dict[str, Any]]:
    """Return a row of figures for each way; one that fits no budget has few."""
    smaller = functools.partial(subject.build, **subject.smaller)
    training = training_of(*smaller(batch=subject.batch))
    rows: dict[str, dict[str, Any]] = {name: {"way": name} for name in WAYS}
    runs = {}
    for name, way in WAYS.items():
        try:
            rows[name]["mb"] = planned(subject.build, subject.batch, way, patience).megabytes
        except memonger.BudgetError as error:
            rows[name]["least_mb"] = error.least_bytes // MB
            continue
        with contextlib.suppress(memonger.BudgetError):  # it fits at full size alone
            runs[name] = gradients_of(planned(smaller, subject.batch, way, patience), training)
    for name, result in results_of(runs, training).items():
        rows[name].update(result)
    steps = {name: step_of(run, training) for name, run in runs.items()}
    seconds = in_turns(steps, rounds, time.process_time)
    for name, each in seconds.items():
        rows[name]["seconds"] = float(np.median(each))
        rows[name]["time"] = float(np.median(each / seconds["no plan"]))
    return list(rows.values())


def headline(name: str, subject: Subject) -> str:
    """Say what a table is of."""
    sizes = parameter_shapes(*subject.build(batch=subject.batch)).values()
    more = 2 * 4 * sum(math.prod(shape) for shape in sizes) // MB
    timed = ", ".join(f"{key}={value}" for key, value in subject.smaller.items())
    return (
        f"{name}, batch {subject.batch}: parameters and their gradients take {more} MB more; "
        f"timed with {timed}"
    )


HEADER = """
| way | MB | of no plan | CPU s a step | time | gradients | statistics |
|---|---|---|---|---|---|---|"""


def line(row: dict[str, Any], none: dict[str, Any]) -> str:
    """Make a line of the table."""
    at_least = "at least " if "least_mb" in row else ""
    megabytes = row["least_mb"] if at_least else row["mb"]
    cells = [row["way"], f"{at_least}{megabytes}", f"{megabytes / none['mb']:.0%}"]
    if "time" in row:
        cells += [f"{row['seconds']:.2f}", f"{row['time']:.2f}"]
        cells += [row["gradients"], row["statistics"]]
    else:
        cells += ["-"] * 4
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {list(NETWORKS)}; all but tiny")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each way (3)")
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    check_names(parser, options.nets, NETWORKS)
    print(machine())
    found = []
    for name in options.nets or USUAL:
        print(f"\n{headline(name, NETWORKS[name])}\n{HEADER}", flush=True)
        rows = measure(NETWORKS[name], options.rounds, options.patience)
        print("\n".join(line(row, rows[0]) for row in rows), flush=True)
        found.append({"name": name, "rows": rows})
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
