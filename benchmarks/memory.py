"""The memory of networks planned by the original's algorithm and by ours, in one table.

    python benchmarks/memory.py                             # all networks; the longest take minutes
    python benchmarks/memory.py vgg19 unet --json out.json  # some of them
    python benchmarks/memory.py --batch 8 alexnet vgg16     # any of Gluon's model zoo
    python benchmarks/memory.py --symbols DIR               # those of a folder
    python benchmarks/memory.py --work 2 3 4                # schedules instead, for so much work

Every figure is the pool that MXNet takes in MB (2**20 bytes), replayed and confirmed by a bind: of
the network without a plan (none), with the plan of the original's algorithm on the network's
mirror_stage marks, or on none (original), with what the rules leave of that plan (with rules), and
with ours. Then the forward operations that our plan does again, as a share of one forward pass.

Every step runs in a process of its own. Seconds are those of the whole process: imports, reading
the symbol, planning, and the bind that confirms the plan. The original's are its search as it is,
every trial bound by simple_bind.

With --work a table of schedules (how='schedule') instead: for each limit of the forward work of a
step, in times that of one forward pass, the MB of its arena and of the network's outputs, the work
that it takes, and the seconds. They are planned and bound as Module binds: with no gradients of
inputs.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict

import memonger
import mxnet as mx
from memonger.graph import marks
from memonger.costs.bind import read_planned_mb
from memonger.graph.read import forward_graph
from memonger.graph.inputs import read_shapes
from memonger.planners.marks import chen2016

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import as_module_does, as_plan_takes_it, check_names, limit_of_work

Builder = Callable[..., networks.Network]
MB = 2**20

# -- where networks come from -----------------------------------------------------------------

NETWORKS: dict[str, Builder] = {
    "example_resnet": networks.resnet,
    "resnet50-v2": networks.resnet_v2,
    "resnet152-v2": functools.partial(networks.resnet_v2, (3, 8, 36, 3)),
    "resnet-10-100-213-10": functools.partial(networks.resnet, (10, 100, 213, 10)),
    "vgg19": functools.partial(networks.model_zoo, "vgg19"),
    "inception-v3": networks.inception_v3,
    "densenet121": functools.partial(networks.model_zoo, "densenet121"),
    "densenet161": functools.partial(networks.model_zoo, "densenet161"),
    "unet": networks.unet,
    "googlenet": networks.googlenet,
    "mobilenetv2": networks.mobilenet_v2,
    "lstm-4x100": functools.partial(networks.lstm, steps=100),
    "lstm-4x300": functools.partial(networks.lstm, steps=300),
    "lstm-4x1000": functools.partial(networks.lstm, steps=1000),
}

SYMBOLS = (
    "a folder of NAME-symbol.json or NAME-symbol.json.gz, instead of our own networks; shapes are "
    'in its nets.json, {NAME: {"shapes": {INPUT: [...]}}}, or in NAME.json, {"shapes": {...}}; '
    "inputs that MXNet can infer may be left out"
)


def own(name: str, batch: int | None) -> Builder:
    """One of our own networks, or of Gluon's model zoo.

    Raises
    ------
    ValueError
        If it is in neither.
    """
    if name in NETWORKS:
        builder = NETWORKS[name]
    else:
        mx.gluon.model_zoo.vision.get_model(name)  # raises
        image = 299 if name == "inceptionv3" else 224
        builder = functools.partial(networks.model_zoo, name, image=image)
    return builder if batch is None else functools.partial(builder, batch=batch)


def saved(folder: Path) -> dict[str, Builder]:
    """The symbols of a folder, by name."""
    files = sorted(folder.glob("*-symbol.json")) + sorted(folder.glob("*-symbol.json.gz"))
    found = {file.name.split("-symbol.json")[0]: file for file in files}
    return {name: functools.partial(load, name, file) for name, file in found.items()}


def load(name: str, file: Path) -> networks.Network:
    single, common = file.parent / (name + ".json"), file.parent / "nets.json"
    if single.exists():
        told = json.loads(single.read_text())
    else:
        told = json.loads(common.read_text()).get(name) if common.exists() else None
    if told is None or "shapes" not in told:
        raise memonger.MemongerError(
            f"the shapes of {name} are neither in {single} nor in {common}"
        )
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    shapes = {key: tuple(shape) for key, shape in told["shapes"].items()}
    return mx.sym.load_json(text.decode()), shapes


class Failure(Exception):
    """A step that came to no result."""


# -- what runs in a process of its own --------------------------------------------------------

# Each step reads the network in a folder, and leaves its result there.


def patience_of(folder: Path) -> float:
    return float((folder / "patience").read_text())


def read(folder: Path) -> networks.Network:
    shapes = json.loads((folder / "shapes.json").read_text())
    return read_symbol(folder, "network"), {key: tuple(shape) for key, shape in shapes.items()}


def write(folder: Path, network: networks.Network, patience: float) -> None:
    write_symbol(folder, "network", network[0])
    (folder / "patience").write_text(str(patience))
    (folder / "shapes.json").write_text(json.dumps(network[1]))


def read_symbol(folder: Path, name: str) -> Any:
    return mx.sym.load(str(folder / (name + "-symbol.json")))


def write_symbol(folder: Path, name: str, symbol: Any) -> None:
    symbol.save(str(folder / (name + "-symbol.json")), remove_amp_cast=False)


def plan_ours(folder: Path) -> None:
    symbol, shapes = read(folder)
    plan = memonger.plan(symbol, shapes, how="marks", patience=patience_of(folder))
    write_symbol(folder, "ours", plan.symbol)
    (folder / "work.json").write_text(json.dumps({"recomputed": plan.recompute_overhead}))


def plan_original(folder: Path) -> None:
    """The original's search as it is: every trial bound by simple_bind, which allocates."""
    symbol, shapes = read(folder)
    graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))
    masks = [trial.mask for trial in chen2016.search(graph, marks.read_hints(graph))]
    symbols = [marks.write(symbol, mask) for mask in masks]
    bound = (planned.simple_bind(mx.cpu(), **shapes) for planned in symbols)
    costs = [*map(read_planned_mb, bound)]
    write_symbol(folder, "original", symbols[costs.index(min(costs))])


def plan_ruled(folder: Path) -> None:
    symbol, shapes = read(folder)
    planned = memonger.search_plan(symbol, planner="chen2016", shapes=shapes)
    write_symbol(folder, "ruled", planned)


def measure(folder: Path) -> None:
    """Bind the network and whatever plans of it there are."""
    symbol, shapes = read(folder)
    figures: dict[str, Any] = {"none": memonger.pool_bytes(symbol, shapes=shapes) // MB}
    for name in ("original", "ruled", "ours"):
        if not (folder / (name + "-symbol.json")).exists():
            continue
        planned = read_symbol(folder, name)
        figures[name] = memonger.pool_bytes(planned, shapes=shapes) // MB
    if "ours" in figures:
        figures.update(json.loads((folder / "work.json").read_text()))
    (folder / "figures.json").write_text(json.dumps(figures))


def plan_marks(folder: Path) -> None:
    plan_deep(folder, "marks", how="marks")


def plan_schedule(folder: Path) -> None:
    work = as_plan_takes_it(float((folder / "limit").read_text()))
    plan_deep(folder, "schedule", how="schedule", work=work)


def plan_deep(folder: Path, name: str, **options: Any) -> None:
    symbol, shapes = read(folder)
    options.update(grad_req=as_module_does(symbol, shapes), patience=patience_of(folder))
    plan = memonger.plan(symbol, shapes, **options)
    if not plan.exact:  # the bind that confirms it says otherwise
        raise Failure(f"the bind differs from the prediction: {plan!r}")
    figures = {
        "none": plan.unplanned_bytes // MB,
        "mb": plan.pool_bytes // MB,
        "work": 1 + plan.recompute_overhead,
    }
    (folder / (name + ".json")).write_text(json.dumps(figures))


Step = Callable[[Path], None]
STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (plan_ours, plan_original, plan_ruled, measure, plan_marks, plan_schedule)
}


def run(step: Step, folder: Path, timeout: float) -> float:
    """Run a step in a fresh process; return its seconds from start to end."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--step", step.__name__, str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{step.__name__} took more than {timeout:g} s") from None
    if done.returncode != 0:
        raise Failure(f"{step.__name__} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


# -- the table --------------------------------------------------------------------------------


Row = Dict[str, Any]


def compare(
    name: str, network: networks.Network, original: bool, patience: float, timeout: float
) -> Row:
    """Plan a network in every way and bind it; what fails is told on stderr and left out."""
    figures: Row = {"name": name}

    def attempt(step: Step) -> float | None:
        try:
            return run(step, folder, timeout)
        except Failure as failure:
            print(f"{name}: {failure}", file=sys.stderr)
            figures["failed"] = True
            return None

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, network, patience)
        figures["seconds"] = attempt(plan_ours)
        if original:
            figures["original_seconds"] = attempt(plan_original)
            attempt(plan_ruled)
        if attempt(measure) is not None:
            figures.update(json.loads((folder / "figures.json").read_text()))
    return figures


def deepen(
    name: str, network: networks.Network, limits: list[float], patience: float, timeout: float
) -> Row:
    """Plan a network by marks and by a schedule for each limit of work; all are bound."""
    figures: Row = {"name": name, "schedules": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, network, patience)
        for limit in [None, *limits]:
            (folder / "limit").write_text(str(limit))
            step, file = (plan_marks, "marks") if limit is None else (plan_schedule, "schedule")
            try:
                seconds = run(step, folder, timeout)
            except Failure as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                figures["failed"] = True
                continue
            found = json.loads((folder / (file + ".json")).read_text())
            figures["none"] = found.pop("none")
            found.update(limit=limit, seconds=seconds)
            if limit is None:
                figures["marks"] = found
            else:
                figures["schedules"].append(found)
    return figures


def deep_line(figures: Row, limits: list[float]) -> str:
    found = {one["limit"]: one for one in figures["schedules"]}
    cells = [figures["name"], f"{figures['none']}" if "none" in figures else "-"]
    for one in [figures.get("marks"), *map(found.get, limits)]:
        cells.append("{mb} ({work:.2f}x, {seconds:.0f} s)".format(**one) if one else "-")
    return f"| {' | '.join(cells)} |"


def deep_header(limits: list[float]) -> str:
    names = [f"R = {limit:g}" for limit in limits]
    return f"\n| network | none | marks | {' | '.join(names)} |\n{'|---' * (3 + len(names))}|"


HEADER = """
| network | none | original | with rules | ours | recomputed | s, ours | s, original |
|---|---|---|---|---|---|---|---|"""
COLUMNS = (
    ("name", "%s"),
    ("none", "%d"),
    ("original", "%d"),
    ("ruled", "%d"),
    ("ours", "%d"),
    ("recomputed", "%.2f"),
    ("seconds", "%.1f"),
    ("original_seconds", "%.1f"),
)


def line(figures: dict[str, Any]) -> str:
    cells = ["-" if figures.get(key) is None else form % figures[key] for key, form in COLUMNS]
    return f"| {' | '.join(cells)} |"


def start_up(timeout: float) -> float:
    """Seconds for a network of next to nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary), networks.chain(depth=8, hidden=4, batch=4), patience=0.01)
        return run(plan_ours, Path(temporary), timeout)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; ``options.nets`` is then a dict from names to builders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", help="names of networks; by default all of --list")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--symbols", type=Path, metavar="DIR", help=SYMBOLS)
    parser.add_argument("--batch", type=int, help="instead of 32 (U-Net: 4, LSTM: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--no-original", action="store_true", help="ours alone, to save time")
    parser.add_argument(
        "--work", nargs="+", type=limit_of_work, metavar="R", help="schedules (inf: no limit)"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="P", help="times the usual search"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="S", help="seconds for one step (1800)"
    )
    options = parser.parse_args(arguments)
    if options.symbols is not None and options.batch is not None:
        parser.error("--batch is of our own networks; those of --symbols have theirs in a file")
    if options.symbols is None:
        try:
            options.nets = {n: own(n, options.batch) for n in options.nets or NETWORKS}
        except ValueError as error:
            parser.error("{}\nOur own networks are\n\t{}".format(error, "\n\t".join(NETWORKS)))
        return options
    builders = saved(options.symbols)
    if not builders:
        parser.error(f"there is no *-symbol.json and no *-symbol.json.gz in {options.symbols}")
    check_names(parser, options.nets, builders)
    options.nets = {name: builders[name] for name in options.nets or builders}
    return options


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--step"]:
        STEPS[arguments[1]](Path(arguments[2]))
        return 0
    options = parse(arguments)
    if options.list:
        print("\n".join(options.nets))
        return 0
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "mxnet": mx.__version__,
    }
    print("{machine}, {cores} cores, Python {python}, MXNet {mxnet}".format(**result), flush=True)
    result["start_up_seconds"] = start_up(options.timeout)
    print(f"a network of next to nothing takes {result['start_up_seconds']:.1f} s")
    print(deep_header(options.work) if options.work else HEADER, flush=True)
    rows = result["networks"] = []
    for name, build in options.nets.items():
        if options.work:
            rows.append(deepen(name, build(), options.work, options.patience, options.timeout))
            print(deep_line(rows[-1], options.work), flush=True)
        else:
            original = not options.no_original
            rows.append(compare(name, build(), original, options.patience, options.timeout))
            print(line(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any("failed" in figures for figures in rows))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (memonger.MemongerError, Failure) as error:
        sys.exit(str(error))
