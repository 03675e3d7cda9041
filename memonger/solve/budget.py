"""Budgets of memory: what the user writes, read, and held against what a plan takes."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from memonger.graph.inputs import check_device
from memonger.support.errors import MemongerError, in_words
from memonger.support.mxnet import mx

OF = ("pool", "device")
UNITS = {"B": 1, **{prefix + "B": 1000**k for k, prefix in enumerate("KMGT", 1)}}
UNITS.update({prefix + "IB": 1024**k for k, prefix in enumerate("KMGT", 1)})
MOST_BYTES = 2**63
SAMPLE = (4, 4)  # the shape of a weight that an optimiser is asked to keep state for


@dataclass(frozen=True)
class Budget:
    """The memory that a plan may take: bytes, or a share of what it takes without a plan.

    It bounds the 'pool' (``Plan.pool_bytes``), or the 'device': ``Plan.device_bytes``, and
    ``state`` bytes of an optimiser for each element of a parameter.
    """

    amount: float
    is_share: bool
    of: str
    state: float

    def limit(self, unplanned: int) -> int:
        """Return it in bytes, for a network that takes ``unplanned`` without a plan."""
        return int(self.amount * unplanned) if self.is_share else int(self.amount)


def read_budget(budget: Any, of: str | None, optimizer: Any, ctx: Any) -> Budget | None:
    """Check a budget as ``memonger.plan`` takes it; None where there is none.

    >>> read_budget("6GiB", None, None, None).amount
    6442450944.0
    """
    if of is not None and of not in OF:
        raise MemongerError(f"budget_of must be 'pool' or 'device', not {of!r}")
    if budget is None:
        if of is not None or optimizer is not None:
            raise MemongerError("budget_of= and optimizer= need a budget; give budget= too")
        return None
    if isinstance(budget, str) and budget.strip().lower() == "device":
        if of == "pool":
            raise MemongerError("budget='device' bounds all of the GPU; leave budget_of out")
        return Budget(_free(ctx), False, "device", state_per_element(optimizer))
    if optimizer is not None and of != "device":
        raise MemongerError("optimizer= needs budget_of='device'; give that too")
    amount, is_share = _amount(budget)
    if not is_share and amount < 1:
        raise MemongerError(f"budget={budget!r} must be at least one byte")
    if amount > MOST_BYTES:
        raise MemongerError("budget: no memory has more than 2**63 bytes; give fewer")
    return Budget(float(amount), is_share, of or "pool", state_per_element(optimizer))


def _amount(budget: Any) -> tuple[float, bool]:
    """Read bytes, or a share and that it is one."""
    if isinstance(budget, numbers.Integral) and not isinstance(budget, bool):
        return int(budget), False
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        if 0 < float(budget) <= 1:
            return float(budget), True
        said = "a share must be more than 0 and at most 1; give bytes as an int"
        raise MemongerError(f"budget={budget!r}: {said}")
    pattern = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+|%)\s*"
    found = re.fullmatch(pattern, budget, re.I) if isinstance(budget, str) else None
    if found is None:
        forms = "bytes (an int), text such as '6GB', '6GiB' or '60%', a share, or 'device'"
        raise MemongerError(f"budget={budget!r} cannot be read; give {forms}")
    number, unit = float(found[1]), found[2].upper()
    if unit == "%" and 0 < number <= 100:
        return number / 100, True
    if unit == "%":
        raise MemongerError(f"budget={budget!r}: a share must be more than 0 % and at most 100 %")
    if unit not in UNITS:
        units = "kB, MB, GB and TB (thousands) and KiB, MiB, GiB and TiB (1024s)"
        raise MemongerError(f"budget={budget!r}: unknown unit {found[2]!r}; use {units}")
    return number * UNITS[unit], False


def _free(ctx: Any) -> int:
    """Ask for the bytes that are free on a GPU."""
    device = check_device(ctx)
    if device.device_type != "gpu":
        raise MemongerError("budget='device' needs a GPU; say which, with ctx=mx.gpu(0)")
    return int(mx.context.gpu_memory_info(device.device_id)[0])


def state_per_element(optimizer: Any) -> float:
    """Ask an optimiser how many bytes it keeps for each element of a parameter.

    It is given by name, by a name and ``optimizer_params``, or as it is.

    >>> state_per_element("adam"), state_per_element(("sgd", {"momentum": 0.9}))
    (8.0, 4.0)
    """
    if optimizer is None:
        return 0.0
    made = optimizer
    try:
        if isinstance(optimizer, str):
            made = mx.optimizer.create(optimizer)
        elif isinstance(optimizer, tuple) and len(optimizer) == 2:
            made = mx.optimizer.create(optimizer[0], **optimizer[1])
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise MemongerError(f"optimizer={optimizer!r} cannot be made: {error}") from None
    if not isinstance(made, mx.optimizer.Optimizer):
        forms = "such as 'adam' or ('sgd', {'momentum': 0.9}), or an mx.optimizer.Optimizer"
        raise MemongerError(f"optimizer must be {forms}, not {optimizer!r}")
    weight = mx.nd.ones(SAMPLE)
    return _nbytes(made.create_state_multi_precision(0, weight)) / weight.size


def _nbytes(state: Any) -> int:
    """Add up the bytes of all arrays in the state of an optimiser."""
    if isinstance(state, (list, tuple)):
        return sum(map(_nbytes, state))
    return state.size * np.dtype(state.dtype).itemsize if isinstance(state, mx.nd.NDArray) else 0


def in_bytes(nbytes: float) -> str:
    """Return bytes for a message, to the byte."""
    return f"{nbytes:.0f} bytes ({in_words(nbytes)})"
