"""The process of a dry run, ``python child.py job report``: a crash loses nothing of its report."""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import Any


class DryRun:
    def __init__(self, report: str) -> None:
        self._report = report
        # The whole CUDA stack is one library, so any of its names leads to the counters.
        self._device = ctypes.CDLL("libcudart.so.11.0")
        self._device.cudastub_used.restype = ctypes.c_size_t
        self._device.cudastub_peak.restype = ctypes.c_size_t

    def used_bytes(self, device: int = 0) -> int:
        return int(self._device.cudastub_used(device))

    def peak_bytes(self, device: int = 0) -> int:
        """Return the most that a GPU held since the start or ``reset_peak``."""
        return int(self._device.cudastub_peak(device))

    def reset_peak(self) -> None:
        self._device.cudastub_reset_peak()

    def resize(self, mb: float) -> None:
        """Give each GPU so many MB of 2**20 bytes from now on, rounded down."""
        self._device.cudastub_resize(ctypes.c_size_t(int(mb)))

    def note(self, text: str) -> None:
        self._device.cudastub_trace(b"%s", text.encode())

    def emit(self, value: Any) -> None:
        with open(self._report, "ab") as f:
            pickle.dump(value, f)


def main(job: str, report: str) -> None:
    dry = DryRun(report)
    from efforts import use  # and with it memonger and MXNet

    with open(job, "rb") as f:
        chosen, function, args = pickle.load(f)
    use(chosen)
    value = function(dry, *args)
    sys.modules["mxnet"].nd.waitall()  # operator errors are asynchronous: let them show here
    if value is not None:
        dry.emit(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
