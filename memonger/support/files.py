"""Files, written whole or not at all.

What is written goes to a new file beside its place, and is moved there when all of it is on the
disk. A full disk, a limit or Ctrl-C leaves what was there before, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import Any, Union

from memonger.support.errors import MemongerError

Path = Union[str, bytes, "os.PathLike[Any]"]


def check_writable(path: Path) -> None:
    """Check that a file can be written, before a long search is begun for it; tell why not."""
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    place = os.path.realpath(name)
    folder, base = os.path.split(place)
    may_write = os.access(place, os.W_OK) or not os.path.exists(place)
    reasons = {
        "it is no name of a file": not name,
        "it is a folder": os.path.isdir(place),
        f"there is no folder {folder!r}": not os.path.isdir(folder),
        "File name too long": len(os.fsencode(base)) > 255,  # bytes, in most file systems
        "it is write-protected": not may_write,
        "its folder is write-protected": not (os.access(folder, os.W_OK) or _is_device(place)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise MemongerError(f"{name or path!r} cannot be written: {reason}")


def write(path: Path, data: bytes) -> None:
    """Write a file; what was there before is there until the new one is whole."""
    check_writable(path)
    place = os.path.realpath(os.fsdecode(path))  # a link stays a link
    part = os.path.join(os.path.dirname(place), ".memonger-" + secrets.token_hex(8))
    try:
        if _is_device(place):
            with open(place, "wb") as file:
                file.write(data)
            return
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(place):
            shutil.copymode(place, part)
        os.replace(part, place)
    except OSError as error:
        raise MemongerError(f"{os.fsdecode(path)!r} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)  # it is there only if it was not moved


def _is_device(place: str) -> bool:
    """Tell whether something else than a file is there, such as /dev/null or a pipe."""
    return os.path.exists(place) and not os.path.isfile(place)
