"""Errors: their classes, the checks that raise them, and what their messages are made of."""

from __future__ import annotations

import difflib
import numbers
import os
import re
from pathlib import Path
from types import FrameType
from typing import Iterable

KB, MB, GB = 2**10, 2**20, 2**30
MISTAKE = 2  # exit status of the command after a mistake of the user
STOPPED = 130  # and after Ctrl-C, as shells have it: 128 + SIGINT
PACKAGE = os.path.join(Path(__file__).parents[1], "")
INTERRUPTED = "interrupted before anything was found"

#: Appended for a GPU that is too new or too old (docs/gpu.md).
NO_CODE = (
    "MXNet's wheels have code for compute capability 5.0 to 8.9; use NVIDIA's container "
    "mxnet:24.06-py3 (docs/gpu.md)"
)
#: Appended where MXNet reads an array that MKLDNN has left in blocks as a view.
IN_BLOCKS = (
    "a fault of MXNet with MKLDNN's layouts, as of small 3-D convolutions; set "
    "MXNET_MKLDNN_ENABLED=0 before MXNet is imported"
)


class MemongerError(ValueError):
    """Raised for mistakes in the network, the shapes, the files or the call.

    The message names what is wrong, and what to do.
    """


class MXNetImportError(MemongerError, ImportError):
    """Raised if MXNet cannot be imported; the message says what to install."""


class TooLargeError(MemongerError):
    """Raised for a tensor with more elements than MXNet can count."""


class UnmatchedError(MemongerError):
    """Raised for a name or a pattern that no operator of the network has."""


class BudgetError(MemongerError):
    """Raised if no plan fits the memory budget, or the limits of time and work.

    Attributes
    ----------
    least_bytes : int
        The least memory, in bytes, of the plans that were found.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def check_count(name: str, value: object, least: int) -> int:
    """Return ``value`` as an int; raise MemongerError unless it is an integer >= ``least``.

    ``name`` is the name of the argument, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise MemongerError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise MemongerError(f"{name} must be at least {least}, not {value}")
    return int(value)


def check_number(name: str, value: object) -> float | None:
    """Return a number as a float and None as None; raise MemongerError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise MemongerError(f"{name} is too large; give at most 1e308") from None


def did_you_mean(name: object, choices: Iterable[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name: the most similar choice, or ``otherwise``.

    ``otherwise`` says what to do where no choice is similar.
    """
    matcher = difflib.SequenceMatcher(b=str(name))

    def similarity(choice: str) -> tuple[float, int]:  # the common beginning breaks ties
        matcher.set_seq1(choice)
        return matcher.ratio(), len(os.path.commonprefix([choice, str(name)]))

    best = max(choices, key=similarity, default="")
    return f"; did you mean {best!r}?" if similarity(best)[0] >= 0.5 else "; " + otherwise


def mxnet_message(error: BaseException | str) -> str:
    """Return the message of an MXNet error as one line, without its stack trace."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"Stack trace|\[bt\]", line)]  # before 1.7
    lines = [line for line in lines if re.search("Error: |Check failed|JSONReader", line)] or lines
    message = lines[-1] if lines else type(error).__name__
    message = re.sub(r"^(\w+\.)*\w*Error: |\[[0-9:]+\] \S+: |Check failed: ", "", message)
    causes = {"no kernel image": NO_CODE, "!is_view": IN_BLOCKS}
    known = [cause for words, cause in causes.items() if words in message]
    return f"{message} ({known[0]})" if known else message


def is_own(frame: FrameType) -> bool:
    """Return whether a frame of a call stack runs code of this package."""
    return frame.f_code.co_filename.startswith(PACKAGE)


def why_unplanned(error: Exception) -> str:
    """Return in one line why an error of planning leaves a network without a plan.

    An error that is neither a MemongerError nor MXNet's is a mistake in memonger, to be reported.
    """
    if isinstance(error, MemongerError):
        return str(error)
    if type(error).__module__.startswith("mxnet."):
        return mxnet_message(error)
    # Not by the module traceback, which hides these frames under ``memonger run``.
    trace, place = error.__traceback__, ""
    while trace is not None:
        if is_own(trace.tb_frame):
            file = Path(trace.tb_frame.f_code.co_filename)
            place = f"{file.name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return (
        f"planning failed in memonger itself ({type(error).__name__}: {text}; {place}); please "
        "report this line with the network (Symbol.save or HybridBlock.export) and the shapes of "
        "its inputs"
    )


def format_size(nbytes: float, largest: float | None = None) -> str:
    """Return bytes as text in KiB, MiB or GiB (2**10, 2**20, 2**30 bytes): '806.0 MiB'.

    In a listing all have the unit of its ``largest``: '<0.1 MiB' where '0.0 MiB' would be untrue.
    """
    whole = abs(nbytes) if largest is None else largest
    unit, size, digits = ("KiB", KB, 1) if whole < MB else ("MiB", MB, 1)
    if whole >= 10 * GB:
        unit, size, digits = "GiB", GB, 2
    text = f"{nbytes / size:.{digits}f}"
    if nbytes > 0 and float(text) == 0:
        text = f"<{10**-digits:.{digits}f}"
    return f"{text} {unit}"
