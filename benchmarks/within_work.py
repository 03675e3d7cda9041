"""The memory of networks trained by schedules, within a limit of forward work.

    python benchmarks/within_work.py                      # all networks at their limits: minutes
    python benchmarks/within_work.py vgg19 lstm-4x100     # some of them
    python benchmarks/within_work.py resnet50_v1 --work 2 3 inf --json out.json
    python benchmarks/within_work.py --patience 4         # times the usual search

Every figure is MB (2**20 bytes) of the pool less the bytes of the parameters' gradients, which the
pool of a schedule holds and that of a marks plan does not. Work is the forward work of a whole
step, times that of one forward pass. Seconds are those of a process of its own, from its start to
the symbol that is ready to be bound and whose memory is known: imports, search, writing, replay;
those of its processors follow. Then the symbol is bound: what MXNet reports must be what was
predicted.
"""

import argparse
import functools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

START = time.perf_counter()

import memonger
import mxnet as mx
from memonger.executor import planned_mb
from memonger.forward import ForwardGraph, forward_graph
from memonger.gradients import environment, unallocated
from memonger.inputs import read_shapes
from memonger.planners.recursive import Recursive
from memonger.schedule import Workload, plain, workload
from memonger.training import training_graph
from memonger.unrolled import BIND, TrainingStep, parts, unroll, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks

MB = 2**20

Builder = Callable[[], networks.Network]


def _zoo(name: str, batch: int, image: int = 224) -> Builder:
    return functools.partial(networks.model_zoo, name, batch=batch, image=image)


#: Networks and the limits of work at which they are measured.
NETWORKS: Dict[str, Tuple[Builder, Tuple[float, ...]]] = {
    "example_resnet": (networks.resnet, (2, 3, 4)),
    "resnet-10-100-213-10": (functools.partial(networks.resnet, (10, 100, 213, 10)), (2, 4)),
    "resnet152_v1": (_zoo("resnet152_v1", 16), (2, 3, 4)),
    "resnet50_v1": (_zoo("resnet50_v1", 64), (2, 3)),
    "densenet121": (_zoo("densenet121", 32), (2, 3)),
    "densenet201": (_zoo("densenet201", 16), (2, 3, 4)),
    "inceptionv3": (_zoo("inceptionv3", 32, 300), (2, 3)),
    "vgg19": (_zoo("vgg19", 64), (2,)),
    "alexnet": (_zoo("alexnet", 1024), (2,)),
    "lstm-4x100": (functools.partial(networks.lstm, steps=100), (2,)),
    "lstm-4x300": (functools.partial(networks.lstm, steps=300), (2,)),
    "lstm-4x1000": (functools.partial(networks.lstm, steps=1000), (2, 4)),
}


def workload_of(network: networks.Network) -> Tuple[Workload, int]:
    """What there is to schedule of a network, and the bytes of its parameters' gradients."""
    symbol, shapes = network
    graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))
    wanted = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    gradients = sum(4 * graph.tensors[a][0].elements for a in wanted)
    return workload(training_graph(graph, wanted)), gradients


def bound_mb(step: TrainingStep, symbol: Any, heads: Any, scratch: Any) -> int:
    """What MXNet reports when it binds the symbol of a training step, whole MB."""
    graph: ForwardGraph = step.graph
    tensors = {
        node.name: graph.tensors[i][0] for i, node in enumerate(graph.nodes) if node.is_variable
    }
    tensors.update(scratch)
    for head, name in heads.items():
        a, b = graph.heads[head]
        tensors[name] = graph.tensors[a][b]

    def arrays(names: List[str]) -> Dict[str, Any]:
        found = {name: tensors[name] for name in names}
        return {name: unallocated(t.shape, t.dtype, mx.cpu()) for name, t in found.items()}

    with environment(**BIND):
        executor = symbol.bind(
            mx.cpu(),
            arrays(symbol.list_arguments()),
            None,
            "null",
            arrays(symbol.list_auxiliary_states()),
        )
    return planned_mb(executor)


def measure(
    search: Recursive, gradients: int, limit: Optional[float], start: float = 0.0
) -> Dict[str, Any]:
    """The figures of the least memory with so much work; seconds are from ``start`` on."""
    found = search.least_memory(limit)
    best = found.best
    searched = time.perf_counter()
    step = unroll(parts(search.workload), best.schedule)
    written = write(step)
    replayed = step.replay().pool_bytes
    end = time.perf_counter()
    bound = bound_mb(step, written.symbol, written.heads, written.scratch)
    return {
        "limit": limit,
        "mb": (best.pool_bytes - gradients) / MB,
        "work": best.work,
        "origin": found.origin,
        "seconds": end - start,
        "writing_seconds": end - searched,
        "bound_mb": bound,
        "bound_as_predicted": bound == best.pool_bytes // MB and replayed == best.pool_bytes,
    }


def of_network(name: str, limit: Optional[float], patience: float) -> Dict[str, Any]:
    """The figures of one network, in this process."""
    work, gradients = workload_of(NETWORKS[name][0]())
    built = time.perf_counter()
    search = Recursive(work, patience)
    figures: Dict[str, Any] = {"name": name, "operators": len(work.operators)}
    figures["plain_mb"] = (search.judge(plain(work)).pool_bytes - gradients) / MB
    figures.update(measure(search, gradients, limit, START))
    figures["reading_seconds"] = built - START
    figures["gradients_mb"] = gradients / MB
    figures["cpu_seconds"] = time.process_time()
    return figures


def in_own_process(name: str, limit: Optional[float], options: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--one", name, repr(limit or math.inf)]
    done = subprocess.run(
        [*command, repr(options.patience)],
        capture_output=True,
        text=True,
        timeout=options.timeout,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError("%s failed:\n%s" % (name, done.stderr[-2000:]))
    return json.loads(done.stdout.splitlines()[-1])


HEADER = """| network | R | MB | work | s | s of processors | bound |
|---|---|---|---|---|---|---|"""


def line(figures: Dict[str, Any]) -> str:
    limit = "none" if figures["limit"] is None else "%g" % figures["limit"]
    cells = "| %(name)s | {} | %(mb).1f | %(work).2f | %(seconds).1f | %(cpu_seconds).1f | {} |"
    bound = "%d" % figures["bound_mb"]
    if not figures["bound_as_predicted"]:
        bound += " NOT AS PREDICTED"
    return (cells % figures).format(limit, bound)


def limit(text: str) -> Optional[float]:
    """A limit of forward work from the command line; None: there is none."""
    value = float(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError("%r: a limit of work is 1 or more, or inf" % text)
    return None if math.isinf(value) else value


def main(arguments: List[str]) -> int:
    if arguments[:1] == ["--one"]:
        name, one, patience = arguments[1:]
        print(json.dumps(of_network(name, limit(one), float(patience))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", metavar="NET", help=", ".join(NETWORKS))
    parser.add_argument("--work", nargs="+", type=limit, metavar="R", help="instead of each one's")
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one (1800)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.nets if name not in NETWORKS]
    if unknown:
        parser.error("no network %s; there are %s" % (", ".join(unknown), ", ".join(NETWORKS)))
    print(HEADER, flush=True)
    rows = []
    for name in options.nets or NETWORKS:
        for work in options.work or NETWORKS[name][1]:
            rows.append(in_own_process(name, work, options))
            print(line(rows[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(row["bound_as_predicted"] for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except memonger.MemongerError as error:
        sys.exit(str(error))
