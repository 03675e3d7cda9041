"""``python -m memonger``, and the script ``memonger``: the process of the command.

Imports take seconds, and a KeyboardInterrupt then can be lost in a callback of a library. So until
a search begins Ctrl-C ends the process at once. Python remembers one that passes through ``exec``,
with which MXNet makes its operators: ``python -m`` then ends by the signal, whatever its status is.
So the process ends without Python's shutdown.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from types import FrameType
from typing import Callable, NoReturn

from memonger.support.errors import INTERRUPTED, STOPPED


def end(*_: object) -> NoReturn:
    """End the process as one that was interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"memonger: {INTERRUPTED}\n".encode())
    os._exit(STOPPED)


def interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt; a second Ctrl-C ends the process at once, even in MXNet's code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def exchange(handler: object, other: Callable[[int, FrameType | None], object]) -> None:
    """Replace the handler of Ctrl-C, unless Ctrl-C is ignored, as in a shell's background jobs."""
    if signal.getsignal(signal.SIGINT) is handler:
        signal.signal(signal.SIGINT, other)


def run() -> None:
    """Carry out the command, and end the process."""
    exchange(signal.default_int_handler, end)
    from memonger.cli import main

    if sys.argv[1:2] == ["run"]:  # a script ends as under Python itself
        sys.exit(main(begin=functools.partial(exchange, end, signal.default_int_handler)))
    try:
        status = main(begin=functools.partial(exchange, end, interrupt))
    except SystemExit as error:
        status = int(error.code or 0)
    except KeyboardInterrupt:
        end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, BrokenPipeError):  # closed, or nobody reads
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
