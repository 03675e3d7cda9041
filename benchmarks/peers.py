"""Twelve falling budgets: what a plan takes, beside PyTorch's ``activation_memory_budget``.

    python benchmarks/peers.py                              # all networks, without PyTorch
    python benchmarks/peers.py --torch ~/torch/bin/python   # and with that of another Python
    python benchmarks/peers.py unet bert --json out.json    # some of them
    python benchmarks/peers.py --dropout --torch ~/torch/bin/python

Each figure is a share of what the same system takes without a plan, in %. Ours: the pool, as MXNet
has bound it, and behind it what is alive at once. PyTorch's: what is alive at once. Parameters,
their gradients and inputs are in none. In brackets the FLOPs of convolutions and products that run
again, as a share of the forward pass, and the time that is added to a step. Times are predicted by
one roofline for both, of a GPU's data sheet, operator by operator. PyTorch has more operators: it
divides BatchNorm and the like, which a compiler would fuse again. ``--dropout`` counts the elements
of a mask that PyTorch's backward pass draws anew.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import memonger
import numpy as np
from memonger.costs.time.gpus import GPUS, USUAL
from memonger.costs.time.roofline import predict_times
from memonger.costs.usage import Usage
from memonger.solve.facts import predict
from memonger.solve.network import read_unplanned

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import networks
from common import as_module_does, check_names, machine

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
HOWS = ("marks", "auto")
PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "batch_dot", "dot")
NETWORKS: dict[str, Callable[[], networks.Network]] = {
    "resnet50-v1": functools.partial(networks.model_zoo, "resnet50_v1"),
    "densenet121": functools.partial(networks.model_zoo, "densenet121"),
    "mobilenetv2": networks.mobilenet_v2,
    "vgg19": functools.partial(networks.model_zoo, "vgg19"),
    "inception-v3": networks.inception_v3,
    "unet": networks.unet,
    "bert": functools.partial(
        networks.transformer, batch=32, steps=128, vocabulary=10, dropout=0.1
    ),
    "lstm-4x100": functools.partial(networks.lstm, steps=100),
}


def figures_of(plan: memonger.Plan, unplanned: Usage) -> dict[str, float]:
    """Return what a plan takes, as shares."""
    memory = predict(replace(plan.request, symbol=plan.symbol))
    flops = memory.graph.flops.astype(np.float64)
    flops[[node.op not in PRODUCTS for node in memory.graph.nodes]] = 0
    return {
        "bytes": plan.pool_bytes,
        "share": plan.pool_bytes / plan.unplanned_bytes,
        "alive": plan.peak_bytes / unplanned.peak_bytes,
        "again": float(flops[memory.recomputed].sum() / flops.sum()),
        "time": plan.time_overhead or 0.0,
        "bound": plan.exact,
    }


def measure_ours(
    network: networks.Network, unplanned: Usage, how: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the figures of each budget; of one that nothing fits the least that was found."""
    symbol, shapes = network
    rows: list[dict[str, Any]] = []
    keywords = {"how": how, "ctx": "gpu", "gpu": options.gpu, "patience": options.patience}
    for budget in options.budgets:
        row: dict[str, Any] = {"asked": budget}
        try:
            plan = memonger.plan(
                symbol, shapes, budget=budget, grad_req=as_module_does(symbol, shapes), **keywords
            )
            row.update(figures_of(plan, unplanned), limit=int(budget * plan.unplanned_bytes))
        except memonger.BudgetError as error:
            row["least_bytes"] = error.least_bytes
        rows.append(row)
    return rows


def exported(network: networks.Network) -> dict[str, Any]:
    """Return a network as `peers_torch` reads it: its nodes, the shape of each, its inputs."""
    symbol, shapes = network
    internals = symbol.get_internals()
    names, sizes = internals.list_outputs(), internals.infer_shape(**shapes)[1]
    shape_of = dict(zip(names, sizes))
    nodes = json.loads(symbol.tojson())["nodes"]
    words = [nodes[node["inputs"][0][0]]["name"] for node in nodes if node["op"] == "Embedding"]
    ends = ("", "_output", "_output0")
    return {
        "nodes": nodes,
        "shapes": [
            next(shape_of[node["name"] + end] for end in ends if node["name"] + end in shape_of)
            for node in nodes
        ],
        "inputs": [*shapes],
        "indices": [name for name in shapes if "label" in name or name in words],
    }


def run_torch(python: str, content: Any) -> Any:
    """Measure PyTorch in another process; return its figures."""
    script = Path(__file__).with_name("peers_torch.py")
    with tempfile.TemporaryDirectory() as folder:
        asked, out = (Path(folder) / name for name in ("asked.json", "out.json"))
        asked.write_text(json.dumps(content))
        subprocess.run([python, "-W", "ignore", str(script), str(asked), str(out)], check=True)
        return json.loads(out.read_text())


def cell(row: dict[str, Any]) -> str:
    """Write a figure: memory, and in brackets what runs again, and the time that is added."""
    if "share" not in row:
        return "-"
    memory = " / ".join(f"{100 * row[place]:.0f}" for place in ("share", "alive") if place in row)
    return f"{memory} ({100 * row['again']:.0f}, {100 * row['time']:+.0f})"


def count_broken(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the plans over their budget, and those with less time or more memory than before."""
    plans = [row for row in rows if "share" in row]
    pairs = [*zip(plans, plans[1:])]
    return {
        "over budget": sum(
            row["bytes"] > row["limit"] if "bytes" in row else row["share"] > row["asked"]
            for row in plans
        ),
        "time fell": sum(after["time"] < before["time"] - 1e-9 for before, after in pairs),
        "memory rose": sum(after["share"] > before["share"] + 1e-9 for before, after in pairs),
        "not as bound": sum(not row.get("bound", True) for row in plans),
    }


def list_ahead(peers: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> list[str]:
    """List where peers take less memory than the best of ours in the same time; no plan is ours."""
    plans = [{"share": 1.0, "alive": 1.0, "time": 0.0}, *(row for row in ours if "share" in row)]
    texts: dict[str, None] = {}  # each once
    for peer in peers:
        in_time = [plan for plan in plans if plan["time"] <= peer["time"]]
        least = {key: min(plan[key] for plan in in_time) for key in ("share", "alive")}
        if peer["share"] < least["share"]:
            here = f"{100 * least['share']:.0f} / {100 * least['alive']:.0f}"
            texts[f"{cell(peer)}, ours {here}"] = None
    return [*texts]


def tell(name: str, figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table of a network, and what holds of it."""
    rows = {f"ours, {how}": figures["ours"][how] for how in HOWS}
    ours, peer = [row for plans in rows.values() for row in plans], figures.get("torch")
    if peer is not None:
        rows["PyTorch"] = peer["rows"]
    print(f"\n| {name}: asked | {' | '.join(rows)} |\n|---{'|---' * len(rows)}|")
    for k, budget in enumerate(options.budgets):
        cells = " | ".join(cell(plans[k]) for plans in rows.values())
        print(f"| {100 * budget:.0f} % | {cells} |", flush=True)
    for system, plans in rows.items():
        counts = (f"{what}: {count}" for what, count in count_broken(plans).items())
        print(f"{system}: {'; '.join(counts)}")
    print(f"a step without a plan: {1000 * figures['step_seconds']:.1f} ms")
    if peer is not None:
        print(f"with PyTorch's operators: {1000 * peer['step_seconds']:.1f} ms")
        print(f"PyTorch is ahead at: {'; '.join(list_ahead(peer['rows'], ours)) or 'none'}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="SHARE")
    parser.add_argument("--gpu", choices=GPUS, default=USUAL, help="whose roofline it is")
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual search")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--dropout", action="store_true", help="only look at PyTorch's Dropout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    check_names(parser, options.networks, NETWORKS)
    python = options.torch or (sys.executable if importlib.util.find_spec("torch") else None)
    if options.dropout:
        if python is None:
            parser.error("this Python has no PyTorch; name one that has, with --torch")
        for row in run_torch(python, {"budgets": (1.0, *options.budgets, 0.0)})["figures"]:
            print("{backend}, budget {budget}: {others} elements of another mask".format(**row))
        return 0
    print(f"{machine()}; times of a {options.gpu} by its data sheet")
    content: dict[str, Any] = {"machine": machine(), "gpu": options.gpu, "networks": {}}
    broken = 0
    for name in options.networks or NETWORKS:
        symbol, shapes = network = NETWORKS[name]()
        requests = as_module_does(symbol, shapes)
        unplanned = predict(read_unplanned(symbol, shapes, grad_req=requests, ctx="gpu"))
        figures: dict[str, Any] = {
            "step_seconds": float(predict_times(unplanned.training, options.gpu).step_seconds),
            "ours": {how: measure_ours(network, unplanned, how, options) for how in HOWS},
        }
        if python is not None:
            asked = {"budgets": options.budgets, "rates": GPUS[options.gpu]}
            content.update(run_torch(python, {**asked, "network": exported(network)}))
            figures["torch"] = content.pop("figures")
        content["networks"][name] = figures
        tell(name, figures, options)
        for counts in map(count_broken, figures["ours"].values()):
            broken += sum(counts[what] for what in ("over budget", "time fell", "not as bound"))
        if options.json:
            options.json.write_text(json.dumps(content, indent=1))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
