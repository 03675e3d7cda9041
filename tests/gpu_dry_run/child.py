"""The process in which a dry run happens: ``python child.py body report``.

Runs one function and appends what it has to say to the report line by line, so that nothing said
before a crash is lost.
"""

from __future__ import annotations

import __future__

import ctypes
import json
import pickle
import sys
import traceback
from typing import Any


class DryRun:
    """The first argument of a function that is run."""

    def __init__(self, report: str) -> None:
        self._report = report
        # The whole CUDA stack is one library, so any of its names leads to the counters.
        self._device = ctypes.CDLL("libcudart.so.11.0")
        self._device.cudastub_used.restype = ctypes.c_size_t
        self._device.cudastub_peak.restype = ctypes.c_size_t

    def used_bytes(self, device: int = 0) -> int:
        """Return the memory that a GPU holds now, in bytes."""
        return int(self._device.cudastub_used(device))

    def peak_bytes(self, device: int = 0) -> int:
        """Return the most that a GPU held since the start or ``reset_peak``, in bytes."""
        return int(self._device.cudastub_peak(device))

    def reset_peak(self) -> None:
        """Start over with the peaks at what is held now."""
        self._device.cudastub_reset_peak()

    def note(self, text: str) -> None:
        """Write a line into the trace, between the calls before and after it."""
        self._device.cudastub_trace(b"%s", text.encode())

    def emit(self, value: Any) -> None:
        """Report a value (anything that JSON can say) at once."""
        self.write(value=value)

    def write(self, **said: Any) -> None:
        line = json.dumps(dict(said, used=self.used_bytes(), peak=self.peak_bytes()))
        with open(self._report, "a") as f:
            f.write(line + "\n")


def main(body: str, report: str) -> int:
    with open(body, "rb") as f:
        source, name, args = pickle.load(f)
    dry = DryRun(report)
    namespace: dict[str, Any] = {"__name__": "__dry_run__"}
    try:
        # Annotations stay text: the names in them are not known here.
        exec(compile(source, name, "exec", __future__.annotations.compiler_flag), namespace)
        dry.emit(namespace[name](dry, *pickle.loads(args)))
        mxnet = sys.modules.get("mxnet")
        if mxnet is not None:
            mxnet.nd.waitall()  # operator errors are asynchronous: let them show here
    except Exception as error:
        traceback.print_exc()
        dry.write(error=f"{type(error).__name__}: {error}")
        return 1
    dry.write(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
