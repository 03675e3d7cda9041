"""What the monitor of a network with a schedule is told: each result once, by MXNet's name."""

from __future__ import annotations

import ctypes
from typing import Any, Mapping

from memonger.schedules.execution.lowered import Step
from memonger.support.mxnet import mx


def once_each(callback: Any, symbol: Any, step: Step, inputs: bool) -> Any:
    """A monitor's callback that is not told of what is computed again, nor of names of ours.

    What it is told of has the name of the node, '_' and that of the output or input. Before an
    input that is a variable it is told of the variable, by its own name
    (``GraphExecutor::ExecuteMonInputCallback``).
    """
    ours = {*step.written.scratch, *step.written.totals.values()}
    variables = {*symbol.list_inputs(), *ours} if inputs else set()
    held: list[Any] = []

    def told(name: Any, array: Any, _: Any) -> None:
        text = mx.base.py_str(name)
        if not held and text in variables:
            held.append((name, array))
            return
        found = [*held, (_called(text, step.called), array)]
        held.clear()
        for said, value in found:
            if found[-1][0] is None:  # what is handed to a callback is its own to free
                mx.nd.NDArray(ctypes.cast(value, mx.base.NDArrayHandle))
            else:
                callback(said, value)

    return told


def _called(text: str, called: Mapping[str, str | None]) -> bytes | None:
    """What MXNet calls an input or output; None if it has none such."""
    for k, letter in enumerate(text):
        if letter == "_" and text[:k] in called:
            name = called[text[:k]]
            return None if name is None else (name + text[k:]).encode()
    return text.encode()
