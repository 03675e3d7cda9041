"""Errors, whose messages name the thing and the remedy; MXNet's messages; sizes in words."""

from __future__ import annotations

import re

KB, MB, GB = 2**10, 2**20, 2**30
MISTAKE = 2  # exit status of the command
INTERRUPTED = "interrupted before anything was found"

#: For a GPU that is too new or too old; docs/gpu.md has the same.
NO_CODE = (
    " (this MXNet has no code for this GPU: MXNet's wheels have it for compute capability 5.0 to "
    "8.9, NVIDIA's container mxnet:24.06-py3 for 6.0 and up, Hopper among them)"
)


class MemongerError(ValueError):
    """Raised for every mistake that memonger can see: in the network, the shapes or the call."""


class MXNetImportError(MemongerError, ImportError):
    """Raised when a usable MXNet cannot be imported; the message says what to install."""


class TooLargeError(MemongerError):
    """Raised for a tensor with more elements than MXNet can count."""


class UnmatchedError(MemongerError):
    """Raised for a name or a pattern that no operator of the network has."""


class BudgetError(MemongerError):
    """Raised for a memory budget that no plan keeps.

    Attributes
    ----------
    least_bytes : int
        The least memory that was found, in bytes.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def mxnet_message(error: BaseException | str) -> str:
    """Return the message of an error of MXNet, in one line and without its stack trace."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"Stack trace|\[bt\]", line)]  # before 1.7
    lines = [line for line in lines if re.search("Error: |Check failed|JSONReader", line)] or lines
    message = lines[-1] if lines else type(error).__name__
    message = re.sub(r"^(\w+\.)*\w*Error: |\[[0-9:]+\] \S+: |Check failed: ", "", message)
    return message + (NO_CODE if "no kernel image" in message else "")


def format_size(nbytes: float) -> str:
    """Write bytes in KiB, MiB or GiB (2**10, 2**20, 2**30 bytes): '806.0 MiB'."""
    if abs(nbytes) < MB:
        return f"{nbytes / KB:.1f} KiB"
    return f"{nbytes / MB:.1f} MiB" if abs(nbytes) < 10 * GB else f"{nbytes / GB:.2f} GiB"
