"""The checks of ``examples/gpu_check.py``: plans beside the network without a plan, on a device.

    python benchmarks/gpu.py bits:resnet50 --plans FOLDER --device cpu:0 --small

Each call runs one check, and prints a row for each finding: PASS, FAIL or nothing, what was looked
at, and what was found, with tabs between. Plans are kept in the folder, and taken from there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import memonger

try:
    from memonger import plan  # noqa: F401  imports MXNet, and says what is missing
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import mxnet as mx
import networks
import numpy as np
from common import as_module_does
from memonger import MemongerError
from memonger.costs.time.gpus import read_gpu_name
from memonger.support.errors import mxnet_message
from memonger.support.mxnet import check_code, read_capability

MB = 2**20
STEPS = 3  # of which results are compared
LEARNING_RATE = 0.01
# Fusion changes the last bit of a result here and there, and a deep network makes more of that.
ALLOWED_BY_ROUNDING = 0.01
# Two runs that differ show how far they may, but only roughly.
NOISE = 10
# The share of the predicted saving that must be seen: cuDNN's workspaces are not predicted.
SAVING_SEEN = 0.9
# The oldest driver that loads what the extra's compiler writes for fused kernels.
LEAST_CUDA = 11080
HIDDEN = 1.05  # of the time without a plan: then the front end's time is hidden

Arrays = Mapping[str, np.ndarray]

#: Name -> builder, usual batch, and the arguments of a small one.
NETWORKS: dict[str, tuple[Callable[..., networks.Network], int, dict[str, Any]]] = {
    "resnet50": (
        networks.resnet_v2,
        64,
        {"layers": (1, 1, 1, 1), "image": 32, "filters": 8, "classes": 10},
    ),
    "mobilenet_v2": (networks.mobilenet_v2, 64, {"image": 32, "divide": 8, "classes": 10}),
    "unet": (networks.unet, 4, {"image": 32, "base": 4, "depth": 2}),
    "lstm": (
        functools.partial(networks.lstm, steps=100, use_loss=False),
        64,
        {"layers": 2, "steps": 6, "hidden": 8, "labels": 11, "input": 5},
    ),
    "transformer": (
        functools.partial(networks.transformer, dropout=0.1),
        8,
        {"layers": 2, "steps": 6, "hidden": 8, "heads": 2, "vocabulary": 31},
    ),
    "inception_v3": (networks.inception_v3, 64, {"image": 75, "divide": 16, "classes": 10}),
    "densenet121": (
        functools.partial(networks.model_zoo, "densenet121"),
        64,
        {"image": 221, "classes": 10},
    ),
    "vgg16": (functools.partial(networks.model_zoo, "vgg16"), 64, {"image": 32, "classes": 10}),
}
#: Name of a strategy -> options of ``memonger.plan``.
STRATEGIES: dict[str, dict[str, Any]] = {
    "marks": {"how": "marks"},
    "work=1": {"how": "schedule", "work": 1.0},
    "work=2": {"how": "schedule", "work": 2.0},
    "80 %": {"how": "schedule", "budget": 0.8},
    "60 %": {"how": "schedule", "budget": 0.6},
    "40 %": {"how": "schedule", "budget": 0.4},
}
PLAIN, AS_PLANNED = "no plan", ("marks", "work=1", "work=2")
WIDTHS = 64, 256, 1024, 4096  # of the LSTMs by which the front end is measured

#: A script that trains by Module, and knows nothing of memonger; its device, and its side.
SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[2])
import networks, mxnet as mx, numpy as np
device, number = sys.argv[1].split(":")
net, shapes = networks.resnet_v2((1, 1, 1, 1), batch=16, image=32, classes=10, filters=16)
mx.random.seed(7)
draw = np.random.RandomState(7)
images = draw.uniform(-1, 1, (64, 3, 32, 32)).astype("f")
data = mx.io.NDArrayIter(images, draw.randint(0, 10, 64).astype("f"), 16)
module = mx.mod.Module(net, context=mx.Context(device, int(number)))
module.bind(data.provide_data, data.provide_label)
module.init_params(mx.init.Xavier())
def digest():
    found = hashlib.sha256()
    for part in module.get_params():
        for _, array in sorted(part.items()):
            found.update(array.asnumpy().tobytes())
    return found.hexdigest()
before = digest()
module.fit(data, num_epoch=2, batch_end_callback=lambda _: mx.nd.waitall())
print("nothing was learned" if digest() == before else digest())
"""


def row(verdict: bool | None, what: str, found: str) -> None:
    """Print one row; True is a PASS, False a FAIL, and None a figure."""
    word = {True: "PASS", False: "FAIL", None: ""}[verdict]
    print("\t".join((word, what, " ".join(found.split()))), flush=True)


# -- networks, plans and steps ------------------------------------------------------------------


def first_values(net: Any, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Make values for all inputs and parameters, always the same ones."""
    found, _, auxiliary = net.infer_shape(**shapes)
    names = net.list_arguments() + net.list_auxiliary_states()
    nodes = json.loads(net.tojson())["nodes"]
    tokens = {nodes[node["inputs"][0][0]]["name"] for node in nodes if node["op"] == "Embedding"}
    inputs = {name: "token" if name in tokens else "data" for name in shapes}
    sizes = zip(names, [*found, *auxiliary])
    return dict(_draw(tuple((name, inputs.get(name, ""), shape) for name, shape in sizes)))


@functools.lru_cache(maxsize=1)  # planned and unplanned networks have the same
def _draw(tensors: Sequence[tuple[str, str, Any]]) -> Mapping[str, np.ndarray]:
    random, values = np.random.default_rng(7), {}
    for name, kind, shape in tensors:
        if kind == "token" or name.endswith("label"):
            value = random.integers(0, 2, shape)
        elif kind:
            value = random.random(shape, dtype="f") * 2 - 1
        elif name.endswith(("gamma", "var")):
            value = np.ones(shape)
        elif name.endswith(("bias", "beta", "mean")):
            value = np.zeros(shape)
        else:
            scale = (2 / max(1, np.prod(shape[1:]))) ** 0.5
            value = random.standard_normal(shape, dtype="f") * scale
        values[name] = value.astype("f")
    return values


class Training:
    """A bound network with its arrays."""

    def __init__(self, net: Any, shapes: Mapping[str, Any], ctx: Any) -> None:
        values = first_values(net, shapes)
        self.arguments = {n: mx.nd.array(values[n], ctx) for n in net.list_arguments()}
        self.gradients = {
            n: mx.nd.zeros(a.shape, ctx) for n, a in self.arguments.items() if n not in shapes
        }
        self.states = {n: mx.nd.array(values[n], ctx) for n in net.list_auxiliary_states()}
        self.batch, self.names = next(iter(shapes.values()))[0], net.list_outputs()
        self.executor = net.bind(
            ctx, self.arguments, self.gradients, as_module_does(net, shapes), self.states
        )

    def push(self) -> None:
        """Push a step to the engine, without an update."""
        self.executor.forward(is_train=True)
        self.executor.backward()

    def step(self, seed: int) -> None:
        """Run a step with SGD."""
        mx.random.seed(seed)
        self.push()
        scale = {"lr": LEARNING_RATE, "rescale_grad": 1 / self.batch}
        for name, gradient in self.gradients.items():
            mx.nd.sgd_update(self.arguments[name], gradient, out=self.arguments[name], **scale)
        mx.nd.waitall()

    def arrays(self) -> dict[str, np.ndarray]:
        """Copy outputs, gradients and running statistics: 'kind/name'."""
        kinds = {
            "gradient": self.gradients,
            "output": dict(zip(self.names, self.executor.outputs)),
            "statistic": self.states,
        }
        return {f"{kind}/{n}": a.asnumpy() for kind, of in kinds.items() for n, a in of.items()}


def train(net: Any, shapes: Mapping[str, Any], ctx: Any) -> dict[str, np.ndarray]:
    """Train for some steps; the arrays after each, by 'step/kind/name'."""
    training, found = Training(net, shapes, ctx), {}
    for step in range(STEPS):
        training.step(seed=step)
        found.update({f"{step}/{name}": array for name, array in training.arrays().items()})
    del training
    gc.collect()
    return found


class Bench:
    """What all checks need: the device, the size of the networks, and the folder of plans."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.small = options, options.small
        device, number = options.device.split(":")
        self.on_cpu = device == "cpu"
        self.ctx = mx.Context(device, int(number))

    def network(self, name: str, batch: int = 0) -> networks.Network:
        """Build a network at a batch, by default the usual one."""
        build, usual, small = NETWORKS[name]
        return build(batch=batch or (2 if self.small else usual), **small if self.small else {})

    def plan(self, name: str, strategy: str, batch: int = 0) -> Any:
        """Plan a network, or load the plan that is in the folder."""
        net, shapes = self.network(name, batch)
        batch = next(iter(shapes.values()))[0]
        kind = "cpu" if self.on_cpu and not self.options.prepare else "gpu"
        size = "small-" if self.small else ""
        strategy_name = re.sub(r"\W", "", strategy)
        file = self.options.plans / f"{kind}-{size}{name}-{batch}-{strategy_name}.json"
        if file.exists():
            return memonger.load_plan(file, net)
        options: dict[str, Any] = {"ctx": kind, "patience": 0.1 if self.small else 0.5}
        if kind == "gpu" and self.options.sheet:
            options["gpu"] = self.options.sheet
        plan = memonger.plan(
            net, shapes, grad_req=as_module_does(net, shapes), **options, **STRATEGIES[strategy]
        )
        plan.save(file)
        return plan


# -- what is compared ---------------------------------------------------------------------------


def same_kernels(net: Any, plan: Any) -> Any:
    """Return the network without a plan, with cuDNN off where the plan turns it off.

    Marks do that to a recomputed BatchNorm, schedules to a recomputed Dropout.
    """
    attributes, again = plan.symbol.attr_dict(), set(plan.recomputed)
    graph = json.loads(net.tojson(remove_amp_cast=False))
    for node in graph["nodes"]:
        drops = plan.schedule is not None and node["op"] == "Dropout" and node["name"] in again
        if drops or attributes.get(node["name"], {}).get("cudnn_off") == "True":
            node.setdefault("attrs", {})["cudnn_off"] = "True"
    return mx.sym.load_json(json.dumps(graph))


def allowed(one: np.ndarray, again: np.ndarray) -> float:
    """Tell by how much a third run may differ from the first: not at all, if the second did not."""
    noise = float(np.max(np.abs(one.astype("f8") - again), initial=0))
    if noise == 0:
        return 0
    return NOISE * noise + 1e-6 * float(np.max(np.abs(one), initial=0))


def differences(first: Arrays, again: Arrays, planned: Arrays) -> list[str]:
    """Name the arrays by which the planned network is not the unplanned one, which ran twice."""
    found = []
    for name in first:
        if name in planned and np.array_equal(planned[name], first[name]):
            continue
        if name not in planned or planned[name].shape != first[name].shape:
            found.append(f"{name} is missing or of another shape")
        elif not np.all(np.isfinite(planned[name])):
            found.append(f"{name} is not finite")
        else:
            by = float(np.max(np.abs(planned[name].astype("f8") - first[name]), initial=0))
            limit = allowed(first[name], again[name])
            if not by <= limit:
                found.append(f"{name} differs by {by:g}, allowed {limit:g}")
    return found


def nothing_shown(first: Arrays) -> str:
    """Say why a comparison with these arrays shows nothing; empty if it shows something."""
    bad = [name for name, value in first.items() if not np.all(np.isfinite(value))]
    if bad:
        return f"{bad[0]} is not finite in the unplanned network"
    gradients = [name[2:] for name in first if name.startswith("0/gradient/")]
    if all(np.array_equal(first["0/" + name], first["1/" + name]) for name in gradients):
        return "no gradient of the unplanned network changes in a step: nothing was computed"
    still = [
        name
        for name in first
        if name.startswith("0/statistic/") and np.array_equal(first[name], first["1/" + name[2:]])
    ]
    return f"{still[0]} of the unplanned network does not move" if still else ""


def relative_difference(one: Arrays, other: Arrays) -> float:
    """Tell the distance of two sets of arrays, as a share of the length of the first."""
    squares = [
        (np.sum(np.square(other[n].astype("f8") - one[n])), np.sum(np.square(one[n], dtype="f8")))
        for n in one
    ]
    distance, length = np.sum(squares, axis=0)
    return float(np.sqrt(distance / length)) if length else float("nan")


def difference_in_first_step(one: Arrays, other: Arrays) -> float:
    """Tell the distance of two trainings after the first step.

    Later steps tell nothing: BatchNorm and ReLU make more of each difference. On a CPU, inputs that
    were changed by a share of 1e-7 gave gradients that differed by 2e-6 in the first step of the
    network of `build`, and by 5e-2 in the third.
    """
    first = [{n: a for n, a in of.items() if n.startswith("0/")} for of in (one, other)]
    return relative_difference(*first)


# -- the checks ---------------------------------------------------------------------------------


def build(bench: Bench) -> None:
    """Check that this MXNet computes on the device, and nearly what it computes on the CPU."""
    wanted = re.compile(r"(mxnet|nvidia)[-_].*|mxnet|numpy", re.I)
    found = {
        f"{d.metadata['Name']} {d.version}"
        for d in importlib.metadata.distributions()
        if wanted.fullmatch(d.metadata["Name"] or "")
    }
    own = [f"memonger {memonger.__version__}", f"Python {platform.python_version()}"]
    row(None, "versions", ", ".join([*own, f"MXNet {mx.__version__}", *sorted(found)]))
    if bench.on_cpu:
        row(None, "device", platform.processor() or "CPU")
    else:
        row(None, "device", describe_gpu(bench.ctx.device_id))
    arrays = {}
    for ctx in (bench.ctx, mx.cpu()):
        start = time.perf_counter()
        net, shapes = networks.resnet_v2((1, 1, 1, 1), 16, 64, 10, 8)
        arrays[ctx] = train(net, shapes, ctx)
        row(None, f"three steps on {ctx}", f"{time.perf_counter() - start:.1f} s")
    first, expected = arrays[bench.ctx], arrays[mx.cpu()]
    by, reason = difference_in_first_step(expected, first), nothing_shown(first)
    row(not reason and by < 0.02, "computes as the CPU does", reason or f"differs by {by:.1e}")


def describe_gpu(number: int) -> str:
    """Name the GPU; refuse one that is not there, or that this MXNet has no code for."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise MemongerError(
            "this is MXNet's CPU build, which sees no GPU; on a machine with an NVIDIA GPU: pip "
            "uninstall -y mxnet && pip install '.[cu112]', or check this CPU with --device cpu:0"
        )
    try:
        count = mx.context.num_gpus()
    except mx.MXNetError as error:
        raise MemongerError(
            f"the NVIDIA driver does not answer ({str(error).strip().splitlines()[-1]}); see what "
            "nvidia-smi says"
        ) from None
    if count <= number:
        raise MemongerError(
            f"MXNet sees {count} GPUs, so that there is no gpu({number}); look with nvidia-smi "
            "whether the driver sees it and is of CUDA 11.8 (520) or newer"
        )
    check_code(number)
    capability, version = read_capability(number), ctypes.c_int()
    with contextlib.suppress(AttributeError):  # CUDA is linked into MXNet
        mx.base._LIB.cudaDriverGetVersion(ctypes.byref(version))
    text = f"{read_gpu_name(number) or 'a GPU'}, compute capability "
    text += "unknown" if capability is None else "{}.{}".format(*capability)
    text += f", driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if version.value < LEAST_CUDA:
        text += " (older than 11.8: fused kernels may not load, MXNET_USE_FUSION=0 avoids them)"
    return text


def prepare(bench: Bench, name: str) -> None:
    """Plan a network, so that its plans are in the folder."""
    batches = (64, 32, 128) if name == "resnet50" and not bench.small else (0,)
    for batch in batches:
        for strategy in STRATEGIES if name == "resnet50" else AS_PLANNED:
            start = time.perf_counter()
            plan = bench.plan(name, strategy, batch)
            figures = f"{plan.unplanned_bytes / MB:.0f} -> {plan.pool_bytes / MB:.0f} MB"
            added = f"{100 * plan.time_overhead:.0f} % of a step's time added"
            seconds = f"in {time.perf_counter() - start:.1f} s"
            size = next(iter(bench.network(name, batch)[1].values()))[0]
            what = f"{name}, batch {size}, {strategy}"
            row(None, what, f"{figures}, {added}, {seconds}")


def bits(bench: Bench, name: str) -> None:
    """Compare outputs, gradients and statistics of three steps, with fusion and without."""
    net, shapes = bench.network(name)
    plans = {strategy: bench.plan(name, strategy) for strategy in AS_PLANNED}
    for fusion in ("0",) if bench.on_cpu else ("0", "1"):
        os.environ["MXNET_USE_FUSION"] = fusion  # read at each bind
        where = f"{name}, fusion {'on' if fusion == '1' else 'off'}"
        first = _train_twice(net, shapes, bench.ctx)
        noisy = sum(not np.array_equal(first[0][n], first[1][n]) for n in first[0])
        row(None, f"{where}: no plan, twice", f"{noisy} of {len(first[0])} arrays differ")
        beside = {net.tojson(): first}
        for strategy, plan in plans.items():
            same = same_kernels(net, plan)
            if same.tojson() not in beside:
                off = beside[same.tojson()] = _train_twice(same, shapes, bench.ctx)
                by = difference_in_first_step(first[0], off[0])
                what = f"{where}: no plan, cuDNN off as in {strategy}"
                row(None, what, f"differs by {by:.1e} from cuDNN's in the first step")
            found = train(plan.symbol, shapes, bench.ctx)
            one, two = beside[same.tojson()]
            row(*_judge(f"{where}: {strategy}", one, two, found, fused=fusion == "1"))


def _train_twice(net: Any, shapes: Any, ctx: Any) -> tuple[Arrays, Arrays]:
    return train(net, shapes, ctx), train(net, shapes, ctx)


def _judge(
    what: str, first: Arrays, again: Arrays, found: Arrays, fused: bool
) -> tuple[bool, str, str]:
    """Judge a planned training; fused graphs differ, and so round differently."""
    reason = nothing_shown(first)
    if reason:
        return False, what, f"nothing is shown, for {reason}"
    wrong = differences(first, again, found)
    if not wrong:
        equal = all(np.array_equal(first[n], again[n]) for n in first)
        near = "bit for bit" if equal else "as near as it is to itself"
        return True, what, f"{len(first)} arrays as without a plan, {near}"
    by = relative_difference(first, found)
    text = f"{len(wrong)} of {len(first)} arrays differ, first {wrong[0]}; "
    text += f"relative difference {by:.1e}"
    if fused:
        return by <= ALLOWED_BY_ROUNDING, what, f"{text}, allowed {ALLOWED_BY_ROUNDING:g}"
    return False, what, text


def used_bytes(ctx: Any) -> int:
    """Device memory in use, or the peak resident memory of this process on the CPU."""
    mx.nd.waitall()
    if ctx.device_type == "gpu":
        free, total = mx.context.gpu_memory_info(ctx.device_id)
        return total - free
    with open("/proc/self/status") as status:
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read())[0]) * 1024


def take(options: argparse.Namespace, name: str, strategy: str, batch: int = 0) -> int:
    """Train two steps; the bytes of the device that they take. For a process of its own."""
    bench = Bench(options)
    symbol, shapes = bench.network(name, batch)
    if strategy != PLAIN:
        symbol = bench.plan(name, strategy, batch).symbol
    mx.nd.ones((1,), bench.ctx).wait_to_read()  # what CUDA takes for itself is not the network's
    start = used_bytes(bench.ctx)
    training = Training(symbol, shapes, bench.ctx)
    for step in range(2):
        training.step(step)
    return used_bytes(bench.ctx) - start


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory(bench: Bench, name: str, batch: int = 0) -> None:
    """Compare the memory that the card shows with what was predicted."""
    os.environ["MXNET_USE_FUSION"] = "0"  # predictions count none
    taken = elsewhere(take, bench.options, name, PLAIN, batch)
    for strategy in AS_PLANNED:
        plan = bench.plan(name, strategy, batch)
        without, predicted = plan.unplanned_device_bytes, plan.device_bytes
        if strategy == AS_PLANNED[0]:
            row(None, f"{name}: no plan", f"{taken / MB:.1f} MB, predicted {without / MB:.1f}")
        seen = elsewhere(take, bench.options, name, strategy, batch)
        text = f"{seen / MB:.1f} MB, predicted {predicted / MB:.1f}; {(taken - seen) / MB:.1f} MB "
        text += f"saved, predicted {(without - predicted) / MB:.1f}"
        enough = taken - seen >= SAVING_SEEN * (without - predicted)
        # The resident memory of a process holds more than its arrays.
        passed = None if bench.on_cpu else enough and seen >= SAVING_SEEN * predicted
        row(passed, f"{name}: {strategy}", text)


def largest(bench: Bench, name: str) -> None:
    """Train at the largest batch that marks fit; what takes 5 % more than the card must not fit."""
    net, shapes = bench.network(name)
    open_shapes = {n: (None, *shape[1:]) for n, shape in shapes.items()}
    options = {"grad_req": as_module_does(net, shapes), "patience": 0.1, **STRATEGIES["marks"]}
    if bench.on_cpu:
        budget: Any = {"budget": "64MB", "ctx": "cpu"}
    else:
        budget = {"budget": "device", "ctx": bench.ctx}
    found = memonger.largest_batch(net, open_shapes, **budget, **options)
    row(None, f"{name}: the largest batch", str(found).split("\n")[0])
    os.environ["MXNET_USE_FUSION"] = "0"
    whole = found.plan.device_bytes
    if not bench.on_cpu:
        whole = mx.context.gpu_memory_info(bench.ctx.device_id)[1]
    more = math.ceil(1.05 * found.batch * whole / found.plan.device_bytes)
    for batch, fits in ((found.batch, True), (more, False)):
        try:
            taken = elsewhere(take, bench.options, name, "marks", batch)
            text, trained = f"trains in {taken / MB:.0f} MB", True
        except (BrokenProcessPool, mx.MXNetError, MemongerError) as error:
            text, trained = f"does not train: {mxnet_message(error)}"[:200], False
        passed = None if bench.on_cpu else trained == fits
        row(passed, f"{name}: batch {batch} must {'' if fits else 'not '}fit", text)


def timed(bench: Bench, name: str, batch: int = 0) -> None:
    """Time steps of all strategies in turn, as one would train."""
    net, shapes = bench.network(name, batch)
    trainings, predicted = {PLAIN: Training(net, shapes, bench.ctx)}, {PLAIN: 0.0}
    for strategy in STRATEGIES:
        try:
            plan = bench.plan(name, strategy, batch)
        except memonger.BudgetError as error:
            row(None, f"{name}: {strategy}", f"no plan: {error}"[:200])
            continue
        same = same_kernels(net, plan)
        if same.tojson() != net.tojson():
            off = f"{PLAIN}, cuDNN off as in {strategy}"
            trainings[off], predicted[off] = Training(same, shapes, bench.ctx), 0.0
        trainings[strategy] = Training(plan.symbol, shapes, bench.ctx)
        predicted[strategy] = plan.time_overhead
    whole, pushed = in_turns(trainings, rounds=2 if bench.small else 10)
    batch = next(iter(shapes.values()))[0]
    for strategy in trainings:
        ratio = float(np.median(whole[strategy] / whole[PLAIN]))
        text = f"{1e3 * np.median(whole[strategy]):.1f} ms a step, {ratio:.3f} of no plan, "
        text += f"predicted {1 + predicted[strategy]:.3f}; "
        text += f"pushed in {1e3 * np.median(pushed[strategy]):.1f} ms"
        row(None, f"{name}, batch {batch}: {strategy}", text)


def in_turns(trainings: Mapping[str, Training], rounds: int) -> tuple[Any, Any]:
    """Run a step of each in turn: seconds until it is done, and until it is pushed, by round."""
    whole: dict[str, Any] = {name: np.empty(2 + rounds) for name in trainings}
    pushed = {name: np.empty(2 + rounds) for name in trainings}
    for turn in range(2 + rounds):  # the first ones choose algorithms and allocate
        for name, training in trainings.items():
            start = time.perf_counter()
            training.push()
            pushed[name][turn] = time.perf_counter() - start
            mx.nd.waitall()
            whole[name][turn] = time.perf_counter() - start
    timed = ({name: found[2:] for name, found in of.items()} for of in (whole, pushed))
    return next(timed), next(timed)


def front(bench: Bench) -> None:
    """Measure the front end's time an operator, and from which size of operators it is hidden."""
    ratios = {}
    for width in WIDTHS[:2] if bench.small else WIDTHS:
        net, shapes = networks.lstm(1, steps=20, batch=128, hidden=width, labels=10, use_loss=False)
        requests, kind = as_module_does(net, shapes), "cpu" if bench.on_cpu else "gpu"
        options = {"grad_req": requests, "patience": 0.05, "ctx": kind, **STRATEGIES["work=1"]}
        plan = memonger.plan(net, shapes, **options)
        assert plan.schedule is not None  # it was asked for
        symbols = {PLAIN: net, "work=1": plan.symbol}
        trainings = {name: Training(s, shapes, bench.ctx) for name, s in symbols.items()}
        whole, pushed = in_turns(trainings, rounds=3 if bench.small else 15)
        ratios[width] = float(np.median(whole["work=1"] / whole[PLAIN]))
        operators = len(plan.schedule.operations)
        push = 1e6 * np.median(pushed["work=1"]) / operators
        step = 1e6 * np.median(whole[PLAIN]) / operators
        text = f"{ratios[width]:.3f} of no plan; an operator with its gradient takes "
        text += f"{push:.1f} us to push, {step:.1f} us to run"
        row(None, f"LSTM of 20 steps, width {width}", text)
    from_here = [w for w in ratios if all(r <= HIDDEN for v, r in ratios.items() if v >= w)]
    text = f"from width {from_here[0]} on" if from_here else "at none of these widths"
    row(None, f"at most {HIDDEN:g} of the time of no plan", text)


def gluon(bench: Bench) -> None:
    """Train by Gluon's loop to the same weights."""
    os.environ["MXNET_USE_FUSION"] = "0"
    first, again, found = (_train_gluon(bench, planned) for planned in (False, False, True))
    row(*_judge("Gluon's loop", first, again, found, fused=False))


def _train_gluon(bench: Bench, planned: bool) -> dict[str, np.ndarray]:
    mx.random.seed(7)
    np.random.seed(7)
    net = mx.gluon.model_zoo.vision.resnet18_v1(classes=10, prefix="net_")
    net.initialize(mx.init.Xavier(), ctx=bench.ctx)
    if planned:
        memonger.gluon.plan(net, ctx=bench.ctx, patience=0.1, **STRATEGIES["work=2"])
    else:
        net.hybridize()
    side = 32 if bench.small else 128
    images = mx.nd.random.uniform(-1, 1, (4 if bench.small else 32, 3, side, side), ctx=bench.ctx)
    labels = mx.nd.zeros((images.shape[0],), ctx=bench.ctx)
    loss_fn = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": LEARNING_RATE})
    found = {}
    for step in range(2):
        with mx.autograd.record():
            loss = loss_fn(net(images), labels)
        loss.backward()
        trainer.step(len(images))
        mx.nd.waitall()
        for name, parameter in net.collect_params().items():
            kind = "statistic" if "running" in name else "weight"
            found[f"{step}/{kind}/{name}"] = parameter.data().asnumpy()
            if parameter.grad_req != "null":
                found[f"{step}/gradient/{name}"] = parameter.grad().asnumpy()
    return found


def run(bench: Bench) -> None:
    """Start a script of Module with ``memonger run``: the same weights."""
    script = bench.options.plans / "module_script.py"
    script.write_text(SCRIPT)
    arguments = [str(script), bench.options.device, str(Path(networks.__file__).parents[1])]
    planner = ["-m", "memonger", "run", "--how", "schedule", "--work", "2", "--patience", "0.1"]
    environment = dict(os.environ, MXNET_USE_FUSION="0")
    digests: list[str] = []
    for options in ([], [], planner):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *options, *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            row(False, "memonger run", (done.stderr.strip().splitlines() or ["it died"])[-1])
            return
        digests.append(done.stdout.strip())
    said = [line for line in done.stderr.splitlines() if line.startswith("memonger: ")]
    row(None, "memonger run", said[-1] if said else "it planned nothing")
    plain, again, planned = digests
    text = f"planned {planned[:19]}, no plan {plain[:19]} and {again[:19]}"
    learned = "nothing" not in plain
    row(learned and plain == again == planned, "memonger run: weights", text)


CHECKS: dict[str, Callable[..., None]] = {
    "build": build,
    "prepare": prepare,
    "bits": bits,
    "memory": memory,
    "largest": largest,
    "time": timed,
    "front": front,
    "gluon": gluon,
    "run": run,
}


def main(arguments: Sequence[str]) -> int:
    """Run one check; 2 if nothing can be checked, for want of a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", help="a check, or CHECK:NETWORK, or CHECK:NETWORK:BATCH")
    parser.add_argument("--plans", type=Path, required=True, help="their folder")
    parser.add_argument("--device", default="gpu:0", help="gpu:N or cpu:0")
    parser.add_argument("--small", action="store_true", help="small networks, in a minute")
    parser.add_argument("--sheet", help="gpu= of the plans, for times by a data sheet")
    options = parser.parse_args(arguments)
    check, _, network = options.check.partition(":")
    options.prepare = check == "prepare"
    options.plans.mkdir(parents=True, exist_ok=True)
    name, _, batch = network.partition(":")
    try:
        CHECKS[check](Bench(options), *([name] if name else []), *([int(batch)] if batch else []))
    except MemongerError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
