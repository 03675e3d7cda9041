"""What a user asks for, checked: which network, at which shapes, how to plan it, in what memory."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import numbers
import os
import re
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Mapping

import numpy as np

from memonger.graph import inputs, marks
from memonger.graph.forward import no_collection
from memonger.graph.operators.recompute import ANY, GPU, targets_of
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx
from memonger.support.symbols import read

log = logging.getLogger("memonger")

WAYS, EITHER = ("marks", "schedule"), "auto"
PLANNERS = ("smallest", "chen2016")

UNITS = {"B": 1, **{prefix + "B": 1000**k for k, prefix in enumerate("KMGT", 1)}}
UNITS.update({prefix + "IB": 1024**k for k, prefix in enumerate("KMGT", 1)})


@dataclass(frozen=True, eq=False)
class Request:
    """A network, and what is asked about it."""

    symbol: Any  # to be planned: without marks, and without what an earlier plan added
    spec: inputs.InputSpec  # of one device's inputs
    grad_req: dict[str, str]  # 'write', 'add' or 'null' for each argument
    ctx: Any  # for which devices a plan is, as `inputs.read_devices` returns it
    until: int | None = None  # the node from which on everything is kept

    @property
    def device(self) -> Any:
        """The device to bind on: the CPU, so that no CUDA context is made, if no GPU is named."""
        return mx.cpu() if isinstance(self.ctx, str) else inputs.check_device(self.ctx)

    @property
    def timed_on(self) -> Any:
        """The device to time operators on: a GPU for a plan for GPUs, if one is there."""
        return mx.gpu(0) if self.ctx == GPU and inputs.count_gpus() else self.device

    @property
    def device_type(self) -> str:
        """Where it is trained: 'cpu', 'gpu' or 'any'."""
        kind: str = self.ctx if isinstance(self.ctx, str) else self.ctx.device_type
        return kind

    @property
    def targets(self) -> frozenset[str]:
        """Where it is trained, as rules take it."""
        return targets_of(self.device_type)

    @property
    def devices(self) -> str:
        """Where it is trained, in words."""
        return {ANY: "any device", GPU: "any GPU"}.get(self.ctx, str(self.ctx))


def read_call(given: Mapping[str, Any]) -> Request:
    """Check the network of a call as it stands; ``given`` are the arguments of the call by name."""
    symbol = inputs.check_symbol(given["sym"] if "sym" in given else given["net"])
    ctx = inputs.read_devices(given.get("ctx"))
    keywords, devices = given.get("input_shapes", {}), given.get("devices", 1)
    shapes, types = given.get("shapes"), given.get("type_dict")
    spec = inputs.read_shapes(symbol, shapes, keywords, types, devices)
    grad_req = inputs.read_grad_req(symbol.list_arguments(), given.get("grad_req", "write"))
    return Request(symbol, spec, grad_req, ctx)


@no_collection()
def read_request(given: Mapping[str, Any]) -> Request:
    """Check which network is planned; ``given`` are the arguments of ``memonger.plan``, or some."""
    mirroring = os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0")
    if mirroring not in ("", "0"):
        raise MemongerError(
            f"MXNET_BACKWARD_DO_MIRROR is set to {mirroring!r}: MXNet then recomputes nearly every "
            "operator, whatever the plan says, and BatchNorm statistics may stop moving; unset it"
        )
    request, until = read_call(given), given.get("until")
    symbol = inputs.without_old_types(request.symbol, request.spec)
    symbol = marks.clear(marks.without_plan(symbol))
    layer = None if until in (None, "") else _layer(symbol, until)
    return replace(request, symbol=symbol, until=layer)


def _layer(symbol: Any, name: Any) -> int:
    """Find the first operator of this name, or with such an output; else one with it in its name.

    A name with ``*`` or ``?`` is a pattern. Copies of the original take parts of names too.
    """
    internals = symbol.get_internals()
    graph = read(internals)
    operators = [(i, n["name"]) for i, n in enumerate(graph["nodes"]) if n["op"] != "null"]
    outputs = zip((head[0] for head in graph["heads"]), internals.list_outputs())
    known = {i for i, _ in operators}
    named = sorted([*operators, *((i, output) for i, output in outputs if i in known)])
    if isinstance(name, str):
        pattern = re.compile(fnmatch.translate(name))
        tests = name.__eq__, pattern.match if {*"*?"} & {*name} else lambda each: name in each
        for test in tests:
            for i, each in named:
                if test(each):
                    log.info("until=%r is %r", name, graph["nodes"][i]["name"])
                    return i
    names = list(dict.fromkeys(each for _, each in operators))
    some = ", ".join(map(repr, names[len(names) // 2 :][:3]))
    hint = inputs.did_you_mean(name, names, f"give the name of one, such as {some}")
    raise MemongerError(f"until={name!r} is no operator of the network{hint}")


@dataclass(frozen=True)
class Options:
    """How to plan a network: what ``memonger.plan`` is told by keywords of these names, checked."""

    how: str = "marks"
    work: float | None = None
    budget: Budget | None = None
    planner: str = "smallest"
    ntrial: int = 6
    kept_copies: bool = True
    rules: bool = True
    measure: bool = False
    patience: float | None = None  # as the network is worth it


def read_options(given: Mapping[str, Any]) -> Options:
    """Check how to plan; ``given`` are the arguments of ``memonger.plan`` by name, or some."""
    asked = Options(**{f.name: given[f.name] for f in fields(Options) if f.name in given})
    choices = ("way (how)", asked.how, (*WAYS, EITHER)), ("planner", asked.planner, PLANNERS)
    for what, value, known in choices:
        if not isinstance(value, str) or value not in known:
            names = ", ".join(map(repr, known))
            raise MemongerError(f"unknown {what} {value!r}; give one of {names}")
    work, patience = _number("work", asked.work), _number("patience", asked.patience)
    if work is not None and not work >= 1:
        raise MemongerError(f"work={work:g} is less than one forward pass; give 1 or more")
    if work is not None and work < 2 and asked.how == "marks":
        raise MemongerError(f"work={work:g}: marks need up to 2; give that, or how='schedule'")
    if patience is not None and not 0 < patience <= 1e9:
        allowed = "must be more than 0 and at most 1e+09 (1 is the usual search)"
        raise MemongerError(f"patience={asked.patience} {allowed}")
    budget = read_budget(asked.budget, *map(given.get, ("budget_of", "optimizer", "ctx")))
    other = "a schedule" if asked.how == "schedule" else budget and "a budget"
    if other and (asked.planner != "smallest" or not asked.rules):
        told = f"planner={asked.planner!r}, rules={asked.rules!r}"
        raise MemongerError(f"{told}: {other} takes neither; leave out both")
    ntrial = inputs.check_count("ntrial", asked.ntrial, 1)
    switches: Any = {n: bool(getattr(asked, n)) for n in ("kept_copies", "rules", "measure")}
    return replace(asked, work=work, budget=budget, patience=patience, ntrial=ntrial, **switches)


def _number(name: str, value: Any) -> float | None:
    """Return a number as a float, None as it is."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise MemongerError(f"{name} is too large") from None


@dataclass(frozen=True)
class Budget:
    """The memory that a plan may take: bytes, or a share of what it takes without a plan."""

    amount: float
    is_share: bool
    of: str  # 'pool' (``Plan.pool_bytes``) or 'device' (``Plan.device_bytes`` and ``state``)
    state: float  # bytes of an optimiser for each element of a parameter

    def limit(self, unplanned: int) -> int:
        """Return it in bytes, for a network that takes ``unplanned`` without a plan."""
        return int(self.amount * unplanned if self.is_share else self.amount)


def read_budget(budget: Any, of: str | None, optimizer: Any, ctx: Any) -> Budget | None:
    """Check a budget as ``memonger.plan`` takes it; None where there is none."""
    if of not in (None, "pool", "device"):
        raise MemongerError(f"budget_of must be 'pool' or 'device', not {of!r}")
    if budget is None:
        if of is not None or optimizer is not None:
            raise MemongerError("budget_of= and optimizer= need a budget; give budget= too")
        return None
    if isinstance(budget, str) and budget.strip().lower() == "device":
        devices = inputs.read_devices(ctx)
        device = inputs.check_device(mx.gpu(0)) if devices == GPU else devices
        if of == "pool":
            raise MemongerError("budget='device' bounds all of the GPU; leave budget_of out")
        if device == ANY or device.device_type != GPU:
            raise MemongerError("budget='device' needs a GPU; say which, with ctx=mx.gpu(0)")
        free = mx.context.gpu_memory_info(device.device_id)[0]
        return Budget(float(free), False, "device", state_per_element(optimizer))
    if optimizer is not None and of != "device":
        raise MemongerError("optimizer= needs budget_of='device'; give that too")
    amount, is_share = _amount(budget)
    most = 1 if is_share else 2**63
    if not 0 < amount <= most or amount < 1 and not is_share:
        said = "must be at least one byte and no more than 2**63 bytes, or a share of at most 1"
        raise MemongerError(f"budget={budget!r} {said} (100 %); give bytes as an int")
    return Budget(float(amount), is_share, of or "pool", state_per_element(optimizer))


def _amount(budget: Any) -> tuple[float, bool]:
    """Read bytes, or a share and that it is one."""
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        return budget, not isinstance(budget, numbers.Integral)  # type: ignore[return-value]
    pattern = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+|%)\s*"
    found = re.fullmatch(pattern, budget, re.I) if isinstance(budget, str) else None
    if found is None:
        forms = "bytes (an int), text such as '6GB', '6GiB' or '60%', a share, or 'device'"
        raise MemongerError(f"budget={budget!r} cannot be read; give {forms}")
    number, unit = float(found[1]), found[2].upper()
    if unit == "%":
        return number / 100, True
    if unit not in UNITS:
        units = "kB, MB, GB and TB (thousands) and KiB, MiB, GiB and TiB (1024s)"
        raise MemongerError(f"budget={budget!r}: unknown unit {found[2]!r}; use {units}")
    return number * UNITS[unit], False


def state_per_element(optimizer: Any) -> float:
    """Ask an optimiser (or its name, or name and parameters) for its bytes an element."""
    if optimizer is None:
        return 0.0
    pair = isinstance(optimizer, tuple) and len(optimizer) == 2
    made, given = optimizer if pair else (optimizer, {})
    try:
        if not isinstance(made, mx.optimizer.Optimizer):
            made = mx.optimizer.create(made, **given)
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        forms = "such as 'adam', ('sgd', {'momentum': 0.9}), or an mx.optimizer.Optimizer"
        said = f"optimizer={optimizer!r} cannot be made: {error}; give one {forms}"
        raise MemongerError(said) from None
    weight = mx.nd.ones((4, 4))
    return _nbytes(made.create_state_multi_precision(0, weight)) / weight.size


def _nbytes(state: Any) -> int:
    """Add up the bytes of all arrays in the state of an optimiser."""
    if isinstance(state, (list, tuple)):
        return sum(map(_nbytes, state))
    return state.size * np.dtype(state.dtype).itemsize if isinstance(state, mx.nd.NDArray) else 0


def structure(symbol: Any) -> dict[str, Any]:
    """Read the graph of a symbol without names of operators: MXNet makes new ones each time."""
    graph = read(symbol)
    for node in graph["nodes"]:
        if node["op"] != "null":
            del node["name"]
    return graph


def mxnet_variables() -> dict[str, str]:
    """Read the environment variables that MXNet reads; an empty one is none to it."""
    with environment():
        return {k: v for k, v in os.environ.items() if v and k.startswith(("MXNET_", "NNVM_"))}


def fingerprint(request: Request, options: Options) -> str:
    """Make a fingerprint of everything that a plan depends on."""
    asked = [request.spec, request.grad_req, str(request.ctx), request.until]
    about = [structure(request.symbol), mxnet_variables(), asked, astuple(options)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
