"""Write files atomically.

The data goes to a temporary file in the same folder, which replaces the old file once it is
complete. After a full disk, a limit or Ctrl-C, the old file is unchanged and nothing else is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import Union

from memonger.support.errors import MemongerError

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


def check_writable(path: Path) -> None:
    """Raise MemongerError for a path that cannot be written, before a long search."""
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    target = os.path.realpath(name)
    folder, base = os.path.split(target)
    reasons = {
        "it is not a file name": not name,
        "it is a folder": os.path.isdir(target),
        f"there is no folder {folder!r}": not os.path.isdir(folder),
        "its name is longer than 255 bytes": len(os.fsencode(base)) > 255,
        "it is write-protected": os.path.exists(target) and not os.access(target, os.W_OK),
        "its folder is write-protected": not (os.access(folder, os.W_OK) or _is_device(target)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise MemongerError(f"{name or path!r} cannot be written: {reason}")


def write(path: Path, data: bytes) -> None:
    """Write a file atomically; raise MemongerError if that fails."""
    check_writable(path)
    target = os.path.realpath(os.fsdecode(path))  # a link stays a link
    part = os.path.join(os.path.dirname(target), ".memonger-" + secrets.token_hex(8))
    try:
        if _is_device(target):
            with open(target, "wb") as file:
                file.write(data)
            return
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(target):
            shutil.copymode(target, part)
        os.replace(part, target)
    except OSError as error:
        raise MemongerError(f"{os.fsdecode(path)!r} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)  # fails if it was moved, as it should be


def _is_device(path: str) -> bool:
    """Return whether a path is something other than a file, such as /dev/null or a pipe."""
    return os.path.exists(path) and not os.path.isfile(path)
