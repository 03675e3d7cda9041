"""Check the options of a plan that say how to plan: the limits, the kind of plan and the search.

MXNet takes seconds to import, and reads environment variables then that a script may still set. So
it is imported only where a budget depends on a device or an optimizer.
"""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass
from typing import Iterable

from memonger.costs.time.gpus import GPUS, USUAL
from memonger.support.errors import (
    MemongerError,
    check_count,
    check_number,
    did_you_mean,
    format_size,
)
from memonger.support.types import Keywords, NDArray, PlanOptions, Unpack

SCHEDULE, MARKS, AUTO = "schedule", "marks", "auto"
STRATEGIES = (SCHEDULE, MARKS, AUTO)
SMALLEST, CHEN2016 = PLANNERS = "smallest", "chen2016"
KNEE = "knee"

OF_FIRST_CALL = "the plan is made at the first call under autograd.record(), for its inputs"
ROOM = 2**30  # bytes of a GPU that a budget leaves to CUDA's context and cuDNN
UNITS = {"B": 1, **{prefix + "B": 1000**k for k, prefix in enumerate("KMGT", 1)}}
UNITS.update({prefix + "IB": 1024**k for k, prefix in enumerate("KMGT", 1)})


#: The options of ``memonger.plan`` that the command has: type (or choices; bool for a switch, list
#: for a repeatable option), placeholder, help.
OPTIONS: dict[str, tuple[object, str | None, str]] = {
    "type_dict": (dict, "data=float16", "type of an input (default: float32)"),
    "ctx": (str, "DEVICE", "cpu, gpu, gpu(1) or any (default: gpu if MXNet has CUDA, else any)"),
    "keep": (
        list,
        "PATTERN",
        "operators not to recompute: 'stage4_*', '::RNN' (repeatable)",
    ),
    "recompute": (list, "PATTERN", "operators to recompute wherever possible (repeatable)"),
    "devices": (int, "N", "number of devices that share the batch (default: 1)"),
    "how": (
        STRATEGIES,
        None,
        "schedule: recompute as often as it pays; marks: at most once; auto (default): schedule "
        "where possible",
    ),
    "work": (float, "TIMES", "limit of a step's forward work, in forward passes (default: none)"),
    "budget": (str, "MEMORY", "6GB, 6GiB, bytes, 60%% of the memory without a plan, device, knee"),
    "slower_than": (float, "TIMES", "limit of a step's time: 1.2 is a fifth more than without"),
    "budget_of": (
        ("pool", "device"),
        None,
        "what the budget limits: MXNet's pool (default), or the whole device (default with "
        "--optimizer)",
    ),
    "optimizer": (str, "NAME", "optimizer whose state counts too: adam, or sgd,momentum=0.9"),
    "measure": (bool, None, "measure operators on the device instead of predicting their times"),
    "gpu": (str, "NAME", "GPU whose data sheet predicts times: V100, T4, A100 ..."),
    "patience": (float, "TIMES", "length of the search (default: 1, or 0.05 under 16 MiB)"),
}
NAMES = (*OPTIONS, "grad_req", "until", "planner", "ntrial")  # all options of ``plan``
#: Call -> the options of ``plan`` that it does not take, and what to do instead.
LACKS = {
    "frontier": dict.fromkeys(
        ("work", "budget", "slower_than", "budget_of", "optimizer", "planner"),
        "give it to memonger.plan, for one plan",
    ),
    "largest_batch": dict.fromkeys(
        "work slower_than planner until keep recompute devices".split(),
        "give it to memonger.plan, at one batch",
    ),
    "search_plan_to_layer": {
        **dict.fromkeys(
            "keep recompute devices how work budget slower_than budget_of optimizer measure gpu "
            "patience grad_req planner".split(),
            "give it to memonger.search_plan, with until=",
        ),
        "until": "give layer_name=",
    },
    "enable": dict.fromkeys(
        "type_dict ctx devices grad_req until planner ntrial".split(),
        "what is bound has it already, or give it to memonger.plan",
    ),
    "memonger.gluon.plan": {
        **dict.fromkeys(("shapes", "type_dict"), OF_FIRST_CALL),
        "grad_req": "set it on the parameters: net.collect_params().setattr('grad_req', ...)",
        "devices": "each device's part of the batch is a call of the block",
    },
}


def options_of(call: str) -> tuple[str, ...]:
    """List the options that the command has of a call that plans."""
    return tuple(name for name in OPTIONS if name not in LACKS.get(call, {}))


def flag_of(name: str) -> str:
    """Name the flag of an option in a command."""
    return "--" + {"shapes": "shape", "type_dict": "type"}.get(name, name.replace("_", "-"))


def variable_of(name: str) -> str:
    """Name the environment variable of an option of ``memonger run``."""
    return f"MEMONGER_{name.upper()}"


def check_keywords(
    call: str, keywords: Keywords, others: Iterable[str] = (), has_shapes: bool = True
) -> None:
    """Check the names of keywords: options of ``memonger.plan``, or shapes of inputs.

    Parameters
    ----------
    call : str
        The name of the call, for messages.
    keywords : mapping
        The keywords of the call.
    others : iterable of str
        Options of the call that `plan` does not take, to suggest them for a misspelt name.
    has_shapes : bool
        Whether the call takes shapes of inputs as keywords.

    Raises
    ------
    MemongerError
        If an option is unknown, or if the call does not take it (`LACKS`).
    """
    lacks = LACKS.get(call, {})
    for name, value in keywords.items():
        if name in lacks:
            raise MemongerError(f"{call} takes no {name}=; {lacks[name]}")
        is_shape = has_shapes and (isinstance(value, (list, tuple)) or hasattr(value, "shape"))
        if name not in NAMES and not is_shape:
            names = [*others, *(option for option in NAMES if option not in lacks)]
            shape = "the shape of an input is a tuple of integers"
            otherwise = shape if has_shapes else "leave it out"
            hint = did_you_mean(name, names, otherwise)
            raise MemongerError(f"{call}: unknown option {name!r}{hint}")


@dataclass(frozen=True)
class Limits:
    """What a plan may take, and how it is searched for: keywords of ``memonger.plan``, checked."""

    how: str = AUTO
    work: float | None = None
    budget: Budget | None = None
    knee: bool = False  # budget='knee': the knee of the Pareto front of memory and time
    slower_than: float | None = None  # the most time of a step, in steps without a plan
    planner: str = SMALLEST
    ntrial: int = 6
    measure: bool = False
    gpu: str | None = None  # the GPU, one of `GPUS`, whose data sheet predicts times
    patience: float | None = None  # None: by the size of the network
    lent: Lent | None = None  # memory of another executor, in which a plan should fit first of all
    leave_below: int = 0  # bytes without a plan, below which a network is left alone

    @property
    def bounds_plans(self) -> bool:
        """Whether memory or time is limited: one of the Pareto-optimal plans is asked for."""
        return self.budget is not None or self.knee or self.slower_than is not None

    @property
    def is_free(self) -> bool:
        """Whether nothing is asked for, so that a plan must be worth its time."""
        return self.how == AUTO and self.work is None and not self.bounds_plans


def read_limits(**options: Unpack[PlanOptions]) -> Limits:
    """Check the options of ``memonger.plan`` that say how to plan; the others are ignored.

    ``ctx`` is the device of which a budget is a part, as `inputs.read_devices` returns it.
    """
    how, gpu, budget = options.get("how"), options.get("gpu"), options.get("budget")
    planner = options.get("planner", Limits.planner)
    measure = options.get("measure", Limits.measure)
    optimizer, budget_of = options.get("optimizer"), options.get("budget_of")
    patience = options.get("patience")
    if how is None:  # the original's algorithm places marks
        how = AUTO if planner == SMALLEST else MARKS
    choices = (
        ("how", how, STRATEGIES),
        ("planner", planner, PLANNERS),
        ("gpu", USUAL if gpu is None else gpu, GPUS),
    )
    for option, value, names in choices:
        if not isinstance(value, str) or value not in names:
            forms = ", ".join(map(repr, names))
            raise MemongerError(f"{option}={value!r} is unknown; give one of {forms}")
    slower_than = check_number("slower_than", options.get("slower_than"))
    if slower_than is not None and not slower_than >= 1:
        raise MemongerError(
            f"slower_than={slower_than:g} is less than the time without a plan; give 1 or more "
            "(1.2: a fifth more)"
        )
    work = check_number("work", options.get("work"))
    checked_patience = check_number("patience", patience)
    if work is not None and not work >= 1:
        raise MemongerError(f"work={work:g} is less than one forward pass; give 1 or more")
    if work is not None and work < 2 and how == MARKS:
        raise MemongerError(
            f"work={work:g} is not enough for marks, which may run each operator twice; give "
            "work=2, or how='schedule'"
        )
    if checked_patience is not None and not 0 < checked_patience <= 1e9:
        allowed = "must be more than 0 and at most 1e+09; 1 is the usual length of a search"
        raise MemongerError(f"patience={patience} {allowed}")
    if gpu is not None and measure:
        raise MemongerError(
            "measure=True measures the device of this machine, and gpu= predicts times by a data "
            "sheet; leave out one of them"
        )
    knee = isinstance(budget, str) and budget.strip().lower() == KNEE
    if knee and (budget_of is not None or optimizer is not None):
        raise MemongerError(
            "budget='knee' is no number of bytes, so that budget_of and optimizer do not apply; "
            "leave them out"
        )
    limit = None if knee else read_budget(budget, budget_of, optimizer, options.get("ctx"))
    taken = {"a schedule": how == SCHEDULE, "a budget": knee or limit is not None}
    taken.update({"slower_than": slower_than is not None, "how='auto'": how == AUTO})
    other = next((name for name, value in taken.items() if value), None)
    if other and planner != SMALLEST:
        raise MemongerError(
            f"planner={planner!r} cannot be combined with {other}; leave one of them out"
        )
    return Limits(
        how=how,
        work=work,
        budget=limit,
        knee=knee,
        slower_than=slower_than,
        planner=planner,
        ntrial=check_count("ntrial", options.get("ntrial", Limits.ntrial), 1),
        measure=bool(measure),
        gpu=gpu,
        patience=checked_patience,
    )


@dataclass(frozen=True)
class Lent:
    """The memory of a bound executor that the next one shares (``shared_exec``)."""

    nbytes: int
    is_arena: bool  # True: the arena of a schedule; False: a pool of MXNet


@dataclass(frozen=True)
class Budget:
    """The memory that a plan may take: bytes, or a share of the memory without a plan."""

    amount: float
    is_share: bool
    of: str  # 'pool' (``Plan.pool_bytes``) or 'device' (``Plan.device_bytes`` and ``state``)
    state: float  # bytes of the optimizer's state for each element of a parameter
    room: int = 0  # bytes of the amount that are left to CUDA and cuDNN

    def limit(self, unplanned: int = 0) -> int:
        """Return the budget in bytes; ``unplanned`` is the memory without a plan in bytes."""
        return int(self.amount * unplanned if self.is_share else self.amount - self.room)

    def describe_beside(self, largest: float | None = None) -> str:
        """Describe for a message what a budget of a GPU leaves to others; '' for other budgets.

        ``largest`` is the largest size of the message, in bytes, where all have one unit.
        """
        if not self.room:
            return ""
        each = f"{self.state:g} bytes a parameter" if self.state else "none"
        room = format_size(self.room, largest)
        return (
            f"; {room} of a GPU are left to CUDA and cuDNN, and {each} to the state of an optimizer"
        )


def bound_gpu(budget: object, of: str | None, ctx: object) -> str | None:
    """Return ``budget_of`` where a budget in bytes bounds a GPU as a whole by default."""
    if budget is None or of is not None or not _is_gpu(ctx):
        return of
    names_bytes = not isinstance(budget, str) or budget.strip().lower() not in (KNEE, "device")
    return "device" if names_bytes and not read_amount(budget)[1] else None


def _is_gpu(ctx: object) -> bool:
    return getattr(ctx, "device_type", ctx) == "gpu"


def read_budget(budget: object, of: str | None, optimizer: object, ctx: object) -> Budget | None:
    """Check the budget of ``memonger.plan`` and return it; None if there is none."""
    if of not in (None, "pool", "device"):
        raise MemongerError(f"budget_of must be 'pool' or 'device', not {of!r}")
    if budget is None:
        if of is not None or optimizer is not None:
            raise MemongerError("budget_of= and optimizer= need a budget; give budget= too")
        return None
    is_free = isinstance(budget, str) and budget.strip().lower() == "device"
    if of == "pool" and (is_free or optimizer is not None):
        option = "budget='device'" if is_free else "optimizer="
        raise MemongerError(f"{option} is of all that the GPU holds; leave out budget_of='pool'")
    amount, is_share = (read_free_bytes(ctx), False) if is_free else read_amount(budget)
    if not (0 < amount <= 1 if is_share else 1 <= amount <= 2**63):
        allowed = "must be at least one byte and no more than 2**63 bytes, or a share up to 1"
        raise MemongerError(f"budget={budget!r} {allowed} (100 %); give bytes as an int")
    of = of or ("pool" if optimizer is None and not is_free else "device")
    room = ROOM if of == "device" and not is_share and (is_free or _is_gpu(ctx)) else 0
    if room >= amount:
        raise MemongerError(
            f"budget={budget!r} leaves nothing: {format_size(room)} of a GPU are for CUDA's "
            "context and cuDNN; give more, or budget_of='pool' to bound MXNet's pool alone"
        )
    return Budget(float(amount), is_share, of, measure_state_per_element(optimizer), room)


def read_amount(budget: object) -> tuple[float, bool]:
    """Return an amount of memory, bytes or a share, and whether it is a share."""
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        return budget, not isinstance(budget, numbers.Integral)  # type: ignore[return-value]
    pattern = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+|%)\s*"
    match = re.fullmatch(pattern, budget, re.I) if isinstance(budget, str) else None
    if match is None:
        forms = "bytes (an int), text such as '6GB', '6GiB' or '60%', a share, 'device' or 'knee'"
        raise MemongerError(f"budget={budget!r} cannot be read; give {forms}")
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        return number / 100, True
    if unit not in UNITS:
        units = "kB, MB, GB and TB (thousands) and KiB, MiB, GiB and TiB (1024s)"
        raise MemongerError(f"budget={budget!r}: unknown unit {match[2]!r}; use {units}")
    return number * UNITS[unit], False


def read_free_bytes(ctx: object) -> float:
    """Return the free memory, in bytes, of the GPU that ``ctx`` names, or of the first one."""
    from memonger.graph.inputs import check_device, read_devices
    from memonger.support.mxnet import mx

    devices = read_devices(ctx)
    device = check_device(mx.gpu(0)) if devices == "gpu" else devices
    if isinstance(device, str) or device.device_type != "gpu":
        raise MemongerError("budget='device' needs a GPU; name one, such as ctx=mx.gpu(0)")
    return float(mx.context.gpu_memory_info(device.device_id)[0])


def measure_state_per_element(optimizer: object) -> float:
    """Return the bytes of an optimizer's state for each element of a parameter.

    ``optimizer`` is an mx.optimizer.Optimizer, its name, or its name and its parameters.
    """
    if optimizer is None:
        return 0.0
    from memonger.support.mxnet import mx

    pair = optimizer if isinstance(optimizer, tuple) and len(optimizer) == 2 else (optimizer, {})
    instance, parameters = pair
    try:
        if not isinstance(instance, mx.optimizer.Optimizer):
            instance = mx.optimizer.create(instance, **parameters)
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        forms = "such as 'adam', ('sgd', {'momentum': 0.9}), or an mx.optimizer.Optimizer"
        message = f"optimizer={optimizer!r} cannot be made: {error}; give one {forms}"
        raise MemongerError(message) from None
    weight = mx.nd.ones((4, 4))
    return _count_bytes(instance.create_state_multi_precision(0, weight)) / weight.size


def _count_bytes(state: NDArray) -> int:
    """Add up the bytes of an optimizer's state: an array, None, or lists of these."""
    if isinstance(state, (list, tuple)):
        return sum(map(_count_bytes, state))
    return int(state.size * state.dtype().itemsize) if hasattr(state, "asnumpy") else 0
