"""Does memonger do on your GPU what it promises? One command, one verdict.

    python examples/gpu_check.py

A network is planned with marks, and as a schedule, whose tensors lie in one arena. It is trained
for a few steps as it is and as planned, each time in a process of its own and from the same values.
All gradients, outputs and running statistics are compared with those of the network without a plan
whose BatchNorms run on the same kernels, to the accuracy to which that network repeats itself. The
device memory that was predicted and measured is printed, and the time of a step. The exit status is
0 if all passed, 1 if something failed, and 2 if nothing could be checked, for want of a GPU or of
memory on it.

Three settings are run for each: without pointwise fusion and with repeatable algorithms, where
results can be compared strictly; the same with fusion, whose kernels round otherwise; and as you
would train.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

try:
    import memonger
    from memonger import plan  # noqa: F401  imports MXNet, and says what is missing
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(2)

import importlib.metadata

import mxnet as mx
import networks
import numpy as np
from memonger import MemongerError

MB = 2**20
HOWS = ("marks", "schedule")
LEARNING_RATE = 0.01
COMPARED_STEPS = 2  # the arrays of more would only fill the disk
# Fusion changes the last bit of a result here and there, and a deep network makes more of that.
ALLOWED_BY_ROUNDING = 0.01
# Two runs that differ show how far they may, but only roughly.
NOISE = 10
# The share of the predicted saving that must be seen: cuDNN's workspaces are not predicted.
SAVING_SEEN = 0.9
# CUDA's runtime of MXNet's wheels, whose machine code is for these major compute capabilities, and
# that of other builds.
WHEELS_RUNTIME, CAPABILITIES = "libcudart.so.11.0", (5, 6, 7, 8)
RUNTIMES = (WHEELS_RUNTIME, "libcudart.so.12", "libcudart.so")
# The oldest driver that loads what the extra's compiler writes for fused kernels.
LEAST_CUDA = 11080

REPEATABLE = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0", "MXNET_ENFORCE_DETERMINISM": "1"}
WITHOUT_FUSION = dict(REPEATABLE, MXNET_USE_FUSION="0")
WITH_FUSION = dict(REPEATABLE, MXNET_USE_FUSION="1")
# MXNet on the CPU is not repeatable with more threads.
ON_CPU = {"OMP_NUM_THREADS": "1"}

Shapes = Dict[str, Tuple[int, ...]]
Arrays = Mapping[str, np.ndarray]

#: Name -> builder (of batch and image size), and the size of an image.
NETS: Dict[str, Tuple[Callable[[int, int], Tuple[Any, Shapes]], int]] = {
    "resnet50": (lambda n, side: networks.resnet_v2(batch=n, image=side), 224),
    "resnet152": (lambda n, side: networks.resnet_v2((3, 8, 36, 3), batch=n, image=side), 224),
    "resnet14": (lambda n, side: networks.resnet_v2((1, 1, 1, 1), n, side, 10, 16), 64),
    "example_resnet": (lambda n, side: networks.resnet(batch=n, image=side), 224),
    "densenet121": (lambda n, side: networks.model_zoo("densenet121", n, side), 224),
    "inception_v3": (lambda n, side: networks.inception_v3(batch=n, image=side), 299),
    "mobilenet_v2": (lambda n, side: networks.mobilenet_v2(batch=n, image=side), 224),
    "unet": (lambda n, side: networks.unet(batch=n, image=side), 256),
    "ssd": (lambda n, side: networks.detection(batch=n, image=side), 256),
    "rcnn": (lambda n, side: networks.rcnn(batch=n, image=side), 512),
    "lstm": (lambda n, _: networks.lstm(steps=100, batch=n), 0),
    "transformer": (lambda n, _: networks.transformer(batch=n), 0),
}


class Trained(NamedTuple):
    """What a process found out about a network that it trained.

    Attributes
    ----------
    file : str
        Its arrays in the steps that are compared: 'step/kind/name', the kind being 'gradient',
        'output' or 'statistic'.
    seconds : list of float
        Of each step.
    arrays_bytes : int
        Memory that its inputs, parameters and gradients took.
    step_bytes : int
        Memory that binding and running it took besides.
    free_bytes, total_bytes : int
        Of the device, before; 0 on the CPU.
    """

    file: str
    seconds: List[float]
    arrays_bytes: int
    step_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def bytes(self) -> int:
        """All the memory that it took."""
        return self.arrays_bytes + self.step_bytes

    @property
    def step_seconds(self) -> float:
        """The time of a step; the first ones choose algorithms and allocate."""
        return statistics.median(self.seconds[min(2, len(self.seconds) - 1) :])

    def load(self) -> Dict[str, np.ndarray]:
        """Read its arrays, once: they may be large."""
        with np.load(self.file) as found:
            arrays = dict(found)
        os.remove(self.file)
        return arrays


class CrashError(Exception):
    """A training that did not come to its end; the message says how it ended."""


# -- one training, in a process of its own ----------------------------------------------------


def used_bytes(ctx: Any) -> int:
    """Device memory in use, or the peak resident memory of this process on the CPU."""
    mx.nd.waitall()
    if ctx.device_type == "gpu":
        free, total = mx.context.gpu_memory_info(ctx.device_id)
        return total - free
    with open("/proc/self/status") as status:
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read())[0]) * 1024


def first_values(net: Any, shapes: Shapes) -> Dict[str, np.ndarray]:
    """Make values for all inputs and parameters, always the same ones."""
    random = np.random.RandomState(7)
    found, _, auxiliary = net.infer_shape(**shapes)
    names = net.list_arguments() + net.list_auxiliary_states()
    nodes = json.loads(net.tojson())["nodes"]
    tokens = {nodes[node["inputs"][0][0]]["name"] for node in nodes if node["op"] == "Embedding"}
    values = {}
    for name, shape in zip(names, [*found, *auxiliary]):
        if name in tokens or name.endswith("label"):
            value = random.randint(0, 2, shape)
        elif name in shapes:
            value = random.uniform(-1, 1, shape)
        elif name.endswith(("gamma", "var")):
            value = np.ones(shape)
        elif name.endswith(("bias", "beta", "mean")):
            value = np.zeros(shape)
        else:
            value = random.normal(0, (2 / max(1, np.prod(shape[1:]))) ** 0.5, shape)
        values[name] = value.astype("float32")
    return values


def train(net: Any, shapes: Shapes, ctx: Any, steps: int, compared: int, file: str) -> Trained:
    """Train a network for some steps with plain SGD, and keep what it computed in the first."""
    free, total = mx.context.gpu_memory_info(ctx.device_id) if ctx.device_type == "gpu" else (0, 0)
    values = first_values(net, shapes)
    mx.nd.ones((1,), ctx).wait_to_read()  # what CUDA takes for itself is no part of the network
    start = used_bytes(ctx)
    arguments = {n: mx.nd.array(values[n], ctx) for n in net.list_arguments()}
    gradients = {n: mx.nd.zeros(a.shape, ctx) for n, a in arguments.items() if n not in shapes}
    auxiliary = {n: mx.nd.array(values[n], ctx) for n in net.list_auxiliary_states()}
    bound = used_bytes(ctx)
    requests = {n: "write" if n in gradients else "null" for n in arguments}
    executor = net.bind(ctx, arguments, gradients, requests, auxiliary)
    batch = next(iter(shapes.values()))[0]
    seconds = []
    kept: Dict[str, np.ndarray] = {}
    for step in range(steps):
        mx.random.seed(step)
        begin = time.perf_counter()
        executor.forward(is_train=True)
        executor.backward()
        for name, gradient in gradients.items():
            weight = arguments[name]
            mx.nd.sgd_update(weight, gradient, out=weight, lr=LEARNING_RATE, rescale_grad=1 / batch)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - begin)
        if step < compared:
            outputs = dict(zip(net.list_outputs(), executor.outputs))
            for kind, arrays in (
                ("gradient", gradients),
                ("output", outputs),
                ("statistic", auxiliary),
            ):
                kept.update({f"{step}/{kind}/{n}": a.asnumpy() for n, a in arrays.items()})
        if step == 0:
            end = used_bytes(ctx)
    end = max(end, used_bytes(ctx))
    np.savez(file, **kept)
    return Trained(file, seconds, bound - start, end - bound, free, total)


def trained(
    net: Any,
    shapes: Shapes,
    device: str,
    steps: int,
    compared: int,
    folder: str,
    env: Mapping[str, str],
) -> Trained:
    """Do the same in a process of its own, with these settings of MXNet.

    Raises
    ------
    CrashError
        If it does not come to its end.
    """
    number = len(os.listdir(folder))
    job = os.path.join(folder, f"{number}.json")
    with open(job[:-5] + ".pickle", "wb") as symbol:  # a symbol's JSON holds no schedule
        pickle.dump(net, symbol)
    with open(job, "w") as f:
        json.dump({"shapes": shapes, "device": device, "steps": steps, "compared": compared}, f)
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), "--job", job],
        env=dict(os.environ, **env),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        telling = [line for line in said if re.search(r"Check failed|what\(\)|out of memory", line)]
        how = (
            signal.Signals(-done.returncode).name
            if done.returncode < 0
            else f"exit status {done.returncode}"
        )
        raise CrashError("{}: {}".format(how, (telling or said or ["nothing said"])[-1]))
    return Trained(**json.loads(done.stdout.splitlines()[-1]))


def do_job(job: str) -> None:
    """Train what `trained` asks for, and print what came of it."""
    with open(job) as f:
        asked = json.load(f)
    with open(job[:-5] + ".pickle", "rb") as symbol:
        net = pickle.load(symbol)
    shapes = {name: tuple(shape) for name, shape in asked["shapes"].items()}
    device, number = asked["device"].split(":")
    ctx = mx.Context(device, int(number))
    result = train(net, shapes, ctx, asked["steps"], asked["compared"], job[:-5] + ".npz")
    print(json.dumps(result._asdict()))


# -- what is compared -------------------------------------------------------------------------


def same_kernels(net: Any, planned: Any) -> Any:
    """Return the network without a plan, with cuDNN off where the plan has turned it off."""
    attributes = planned.attr_dict()
    graph = json.loads(net.tojson(remove_amp_cast=False))
    for node in graph["nodes"]:
        if "cudnn_off" in attributes.get(node["name"], {}):
            node.setdefault("attrs", {})["cudnn_off"] = attributes[node["name"]]["cudnn_off"]
    return mx.sym.load_json(json.dumps(graph))


def of_kind(arrays: Arrays, *kinds: str) -> List[str]:
    """Name the arrays of some kinds."""
    return [name for name in arrays if name.split("/")[1] in kinds]


def allowed(one: np.ndarray, again: np.ndarray) -> float:
    """Tell by how much a third run may differ from the first: not at all, if the second did not."""
    noise = float(np.max(np.abs(one.astype("f8") - again), initial=0))
    if noise == 0:
        return 0
    return NOISE * noise + 1e-6 * float(np.max(np.abs(one), initial=0))


def differences(first: Arrays, again: Arrays, planned: Arrays, names: Sequence[str]) -> List[str]:
    """Name the arrays by which the planned network is not the unplanned one.

    Parameters
    ----------
    first, again : mapping of str to np.ndarray
        The unplanned network, trained twice.
    planned : mapping of str to np.ndarray
    names : sequence of str
        Which to compare.
    """
    found = []
    for name in names:
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


def nothing_shown(first: Arrays) -> Optional[str]:
    """Say why a comparison with these arrays shows nothing, if it does not."""
    bad = [name for name, value in first.items() if not np.all(np.isfinite(value))]
    if bad:
        return f"{bad[0]} is not finite in the unplanned network"
    gradients = of_kind(first, "gradient")
    if not any(np.any(first[name]) for name in gradients):
        return "all gradients of the unplanned network are zero: nothing was computed"
    still = [
        name
        for name in of_kind(first, "statistic")
        if name.startswith("0/") and np.array_equal(first[name], first["1/" + name[2:]])
    ]
    if still:
        return f"{still[0]} of the unplanned network does not move"
    return None


def relative_difference(one: Arrays, other: Arrays, names: Sequence[str]) -> float:
    """Tell the distance of two lists of arrays, as a share of the length of the first."""
    squares = [
        (np.sum(np.square(other[n].astype("f8") - one[n])), np.sum(np.square(one[n], dtype="f8")))
        for n in names
    ]
    distance, length = np.sum(squares, axis=0)
    return float(np.sqrt(distance / length)) if length else float("nan")


# -- the report -------------------------------------------------------------------------------


class Verdict:
    """PASS and FAIL lines, printed as they come."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, passed: bool, what: str) -> None:
        """Print one line."""
        self.failed += not passed
        print("{}  {}".format("PASS" if passed else "FAIL", what), flush=True)


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first to the left."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if k == 0 else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(row, widths))
        ]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def mb(nbytes: float) -> str:
    """Write bytes in MB."""
    return f"{nbytes / MB:.1f}"


def versions() -> str:
    """Name the software that runs."""
    wanted = re.compile(r"(mxnet|nvidia)[-_].*|mxnet|numpy", re.I)
    found = {
        "{} {}".format(d.metadata["Name"], d.version)
        for d in importlib.metadata.distributions()
        if wanted.fullmatch(d.metadata["Name"] or "")
    }
    own = ["memonger " + memonger.__version__, "Python " + platform.python_version()]
    return ", ".join([*own, platform.platform(), *sorted(found)])


def check_gpu(number: int) -> str:
    """Name the GPU.

    Raises
    ------
    MemongerError
        If there is none, or one that MXNet's GPU build cannot use.
    """
    try:
        count = mx.context.num_gpus()
    except mx.MXNetError as error:
        raise MemongerError(
            f"the NVIDIA driver does not answer ({str(error).strip().splitlines()[-1]}); see what "
            "nvidia-smi says"
        ) from None
    cuda = mx.runtime.Features().is_enabled("CUDA")
    if not cuda:
        raise MemongerError(
            "this is MXNet's CPU build, which sees no GPU; on a machine with an NVIDIA GPU: "
            "pip uninstall -y mxnet && pip install '.[cu112]', or check this CPU with --device cpu"
        )
    if count <= number:
        raise MemongerError(
            f"MXNet sees {count} GPUs, so that there is no gpu({number}); look with nvidia-smi "
            "whether the driver sees it and is of CUDA 11.8 (520) or newer"
        )
    runtime = None
    for library in RUNTIMES:  # loaded by memonger or by MXNet, so that the name is enough
        with contextlib.suppress(OSError):
            runtime = ctypes.CDLL(library)
            break
    if runtime is None:
        raise MemongerError(f"CUDA's runtime is not found, neither of {', '.join(RUNTIMES)}")
    name = ctypes.create_string_buffer(4096)  # cudaDeviceProp, which begins with it
    version, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    runtime.cudaGetDeviceProperties(name, number)
    runtime.cudaDriverGetVersion(ctypes.byref(version))
    for attribute, value in ((75, major), (76, minor)):
        runtime.cudaDeviceGetAttribute(ctypes.byref(value), attribute, number)
    if library == WHEELS_RUNTIME and major.value not in CAPABILITIES:
        raise MemongerError(
            f"gpu({number}), {name.value.decode()}, has compute capability {major.value}."
            f"{minor.value}; MXNet's GPU build has code for 5.0 to 8.9 only, that of NVIDIA's "
            "container mxnet:24.06-py3 for 6.0 and up"
        )
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    capability = f"compute capability {major.value}.{minor.value}"
    text = f"{name.value.decode()}, {capability}, driver for CUDA {cuda}"
    if version.value < LEAST_CUDA:
        text += (
            " (older than CUDA 11.8: fused kernels may not load, MXNET_USE_FUSION=0 avoids them)"
        )
    return text


# -- the three settings -----------------------------------------------------------------------


def planned(net: Any, shapes: Shapes, device: str, how: str) -> memonger.Plan:
    """Plan for the device, in a process of its own: this one keeps nothing of a GPU to itself."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(plan_here, net, shapes, device, how).result()


def plan_here(net: Any, shapes: Shapes, device: str, how: str) -> memonger.Plan:
    """Plan; a function of this file, so that operators in Python are there before the network."""
    name, number = device.split(":")
    requests = {n: "null" if n in shapes else "write" for n in net.list_arguments()}
    context = mx.Context(name, int(number))
    return memonger.plan(net, shapes, grad_req=requests, ctx=context, how=how)


class Check:
    """A network, its plan, and what is found out about them."""

    def __init__(
        self, net: Any, shapes: Shapes, device: str, how: str, steps: int, folder: str
    ) -> None:
        self.net, self.shapes, self.device = net, shapes, device
        self.steps, self.folder = steps, folder
        self.on_cpu = device.startswith("cpu")
        self.verdict = Verdict()
        self.plan = planned(net, shapes, device, how)
        self.same = same_kernels(net, self.plan.symbol)

    def run(self, what: str, net: Any, env: Mapping[str, str], timed: bool = False) -> Trained:
        """Train a network: to be compared, or to be timed.

        Raises
        ------
        CrashError
            If the planned network does not come to its end.
        MemongerError
            If another does not: then there is nothing to compare with.
        """
        if self.on_cpu:
            env = dict(env, **ON_CPU)
        steps, compared = (self.steps, 0) if timed else (COMPARED_STEPS, COMPARED_STEPS)
        print(f"  training {what} ...", file=sys.stderr, flush=True)
        try:
            return trained(net, self.shapes, self.device, steps, compared, self.folder, env)
        except CrashError as error:
            if net is self.plan.symbol:
                raise
            raise MemongerError(
                f"{what} cannot be trained here, so that there is nothing to compare with "
                f"({error}); try a "
                "smaller --batch"
            ) from None

    def strict(self) -> None:
        """Compare without fusion, with repeatable algorithms."""
        print("Without pointwise fusion, repeatable algorithms:")
        one = self.run("the unplanned network", self.same, WITHOUT_FUSION)
        two = self.run("the unplanned network again", self.same, WITHOUT_FUSION)
        first, again = one.load(), two.load()
        try:
            planned = self.run("the planned network", self.plan.symbol, WITHOUT_FUSION)
        except CrashError as error:
            self.verdict.say(False, f"the planned network does not run: {error}")
            return
        self.memory(one, planned)
        reason = nothing_shown(first)
        noisy = sum(not np.array_equal(first[name], again[name]) for name in first)
        print(
            f"  the unplanned network, run twice: {noisy} of {len(first)} arrays differ",
            flush=True,
        )
        found = planned.load()
        for what, kinds in (
            ("gradients and outputs", ("gradient", "output")),
            ("running statistics", ("statistic",)),
        ):
            names = of_kind(first, *kinds)
            if not names:
                continue
            wrong = differences(first, again, found, names)
            if reason:
                self.verdict.say(False, f"{what}: nothing is shown, for {reason}")
            elif wrong:
                self.verdict.say(
                    False, f"{what}: {len(wrong)} of {len(names)} wrong, first {wrong[0]}"
                )
            else:
                how = "as near as it is to itself" if noisy else "bit for bit"
                self.verdict.say(True, f"{what}: {len(names)} arrays as without a plan, {how}")

    def memory(self, unplanned: Trained, planned: Trained) -> None:
        """Compare what was predicted and what was measured."""
        without, predicted = self.plan.unplanned_device_bytes, self.plan.device_bytes
        saving = without - predicted
        rows = [["MB", "predicted", "measured", "more than predicted"]]
        for name, expected, seen in (
            ("unplanned, at least", without, unplanned.bytes),
            ("planned", predicted, planned.bytes),
            ("saved", saving, unplanned.bytes - planned.bytes),
        ):
            rows.append([name, mb(expected), mb(seen), mb(seen - expected)])
        table(rows)
        if self.on_cpu:
            return  # the resident memory of a process holds more than its arrays
        seen = unplanned.bytes - planned.bytes
        self.verdict.say(
            seen >= SAVING_SEEN * saving and planned.bytes >= SAVING_SEEN * predicted,
            f"device memory: {mb(seen)} MB saved of {mb(saving)} MB predicted",
        )

    def fused(self) -> None:
        """Compare with fusion: the graphs are fused differently and so round differently."""
        print("With pointwise fusion, repeatable algorithms:")
        one = self.run("the unplanned network", self.same, WITH_FUSION)
        first = one.load()
        try:
            planned = self.run("the planned network", self.plan.symbol, WITH_FUSION)
        except CrashError as error:
            self.verdict.say(False, f"the planned network does not run: {error}")
            return
        table(
            [
                ["MB measured", "unplanned", "planned"],
                ["", mb(one.bytes), mb(planned.bytes)],
            ]
        )
        found, reason = planned.load(), nothing_shown(first)
        for what, kind in (("gradients", "gradient"), ("running statistics", "statistic")):
            names = [name for name in of_kind(first, kind) if name.startswith("0/")]
            if not names:
                continue
            by = relative_difference(first, found, names)
            text = f"{what}: relative difference {by:.1e}, allowed {ALLOWED_BY_ROUNDING:g}"
            if reason:
                text = f"{what}: nothing is shown, for {reason}"
            self.verdict.say(not reason and by <= ALLOWED_BY_ROUNDING, text)

    def timed(self) -> None:
        """Measure time and memory as a user has them."""
        print("As you would train (your own settings of MXNet, cuDNN's BatchNorm without a plan):")
        unplanned = self.run("the unplanned network", self.net, {}, timed=True)
        try:
            planned = self.run("the planned network", self.plan.symbol, {}, timed=True)
        except CrashError as error:
            self.verdict.say(False, f"the planned network does not run: {error}")
            return
        rows = [["", "MB measured", "seconds a step"]]
        for name, found in (("unplanned", unplanned), ("planned", planned)):
            rows.append([name, mb(found.bytes), f"{found.step_seconds:.4f}"])
        table(rows)
        print(
            f"  a step takes {planned.step_seconds / unplanned.step_seconds:.2f} times as long; "
            f"{100 * self.plan.recompute_overhead:.0f} % of the forward pass is recomputed",
            flush=True,
        )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the check; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--net", choices=sorted(NETS), default="resnet50", help="(resnet50)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="(16)")
    parser.add_argument("--image", type=int, metavar="N", help="width and height of the images")
    parser.add_argument("--how", choices=HOWS, help="check plans of this kind (both)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps to time (10)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="(gpu)")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="which GPU (0)")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # how `trained` calls this script
    options = parser.parse_args(arguments)
    if options.job:
        do_job(options.job)
        return 0
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    on_cpu = options.device == "cpu"
    try:
        print(versions())
        print("Device: " + (platform.processor() or "CPU" if on_cpu else check_gpu(options.gpu)))
        build, side = NETS[options.net]
        net, shapes = build(options.batch, options.image or side)
        device = "cpu:0" if on_cpu else f"gpu:{options.gpu}"
        failed = 0
        for how in [options.how] if options.how else HOWS:
            with tempfile.TemporaryDirectory(prefix="gpu_check") as folder:
                check = Check(net, shapes, device, how, options.steps, folder)
                print(f"{options.net}, batch {options.batch}, {how}\n{check.plan}", flush=True)
                check.strict()
                if not on_cpu:
                    check.fused()
                check.timed()
            failed += check.verdict.failed
    except MemongerError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"FAIL: {failed} of the checks above failed" if failed else "PASS: all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
