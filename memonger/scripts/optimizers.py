"""The optimizer with which a script trains a network, found while the network is being bound."""

from __future__ import annotations

import contextlib
import sys
from typing import Callable

from memonger.solve.limits import bound_gpu, measure_state_per_element
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.types import Block, Keywords

#: The functions of MXNet that get an optimizer, and bind before they use it.
FITS = {mx.mod.BaseModule.fit.__code__, mx.model._train_multi_device.__code__}


def count_optimizer(options: Keywords, ctx: object, find: Callable[[], object]) -> Keywords:
    """Return the options of a script for a device, with the optimizer if the budget counts it.

    ``find`` finds that of the script, and is called if the options have none.
    """
    budget, of = (options.get(name) for name in ("budget", "budget_of"))
    options = {**options, "budget_of": bound_gpu(budget, of, ctx)}
    if "device" not in (budget, options["budget_of"]):
        return options
    optimizer = options.get("optimizer") or find()
    with contextlib.suppress(MemongerError):  # an optimizer of the script's own
        measure_state_per_element(optimizer)
        options = {**options, "optimizer": optimizer}
    return options


def find_of_fit() -> object:
    """Find the optimizer of the ``fit`` that binds now: (name, parameters), or an Optimizer.

    Returns
    -------
    (str, dict), mx.optimizer.Optimizer or None
        As ``memonger.plan`` takes it; None if the script binds by itself.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code in FITS:
            optimizer = frame.f_locals["optimizer"]
            parameters = dict(frame.f_locals.get("optimizer_params") or ())
            return (optimizer, parameters) if isinstance(optimizer, str) else optimizer
        frame = frame.f_back
    return None


def find_of_block(block: Block) -> object:
    """Find the optimizer of the Trainer of a block's parameters; None if there is none yet."""
    for parameter in block.collect_params().values():
        if parameter._trainer is not None:
            return parameter._trainer.optimizer
    return None
