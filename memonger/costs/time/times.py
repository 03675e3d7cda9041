"""The times that a plan goes by: predicted by the data sheet of a device, or measured on it."""

from __future__ import annotations

from typing import NamedTuple

from memonger.costs.time.measured import measure_times
from memonger.costs.time.roofline import Times, predict_times
from memonger.graph.training import TrainingGraph
from memonger.support.types import Context


class TimedDevice(NamedTuple):
    """The device whose times are meant."""

    sheet: str  # whose rates predict them: `NOMINAL_CPU`, or the name of a GPU in `GPUS`
    ctx: Context | None = None  # on which operators are measured; None: nothing is measured


def find_times(training: TrainingGraph, device: TimedDevice) -> Times:
    """Predict the times of a training step; measure those of its operators if that is wanted."""
    times = predict_times(training, device.sheet)
    return times if device.ctx is None else measure_times(training, device.ctx, times)
