"""Predict or measure how long the operators of a training step take."""

from __future__ import annotations

from typing import NamedTuple

from memonger.costs.time.measured import measure_times
from memonger.costs.time.roofline import Times, predict_times
from memonger.graph.training import TrainingGraph
from memonger.support.types import Context


class TimedDevice(NamedTuple):
    """The device whose times are predicted or measured."""

    sheet: str  # the device with the rates: `NOMINAL_CPU`, or the name of a GPU in `GPUS`
    ctx: Context | None = None  # the device on which operators are measured; None: none is measured


def find_times(training: TrainingGraph, device: TimedDevice) -> Times:
    """Return the times of a training step: predicted, or measured if ``device.ctx`` is given."""
    times = predict_times(training, device.sheet)
    return times if device.ctx is None else measure_times(training, device.ctx, times)
