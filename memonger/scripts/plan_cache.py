"""Plans that are kept in the user's cache folder, so that a script that starts again has them.

A file's name is a hash of all that its plan depends on: network (whatever its names are) and
options, MXNet with its features and environment variables, the machine, and memonger's own code.
``Plan.save`` writes the content, which is checked when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
from pathlib import Path

from memonger.api.plan import Plan
from memonger.api.saved import restore_plan
from memonger.costs.time.measured import describe_device
from memonger.solve.limits import Limits
from memonger.solve.network import Network, fingerprint
from memonger.support import cache
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.types import Json

log = logging.getLogger("memonger.scripts")

MAX_BYTES = 2**28  # of all plans; those that were not used for longest go
PRIVATE = 0o700  # the mode of a new folder


def file_of(network: Network, limits: Limits) -> Path | None:
    """Name the file of a plan; None for a user without a home."""
    folder = cache.folder()
    if folder is None:
        return None
    timed_on = network.find_timing_device(limits.gpu, limits.measure)
    parts = [
        fingerprint(network, limits),
        timed_on.sheet,
        timed_on.ctx and describe_device(timed_on.ctx),
        _installed(),
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return folder / "plans" / f"{digest}.json"


@functools.lru_cache(None)
def _installed() -> list[Json]:
    """Return the version and the features of MXNet, and a hash of memonger's code."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.so")]):
        digest.update(path.read_bytes())
    features = mx.runtime.Features()
    enabled = [name for name in sorted(features) if features.is_enabled(name)]
    return [mx.__version__, enabled, digest.hexdigest()]


def read(file: Path, network: Network) -> Plan | None:
    """Read the plan of a network, if it is kept; warn where the file has another network's."""
    try:
        _check_owned(file.parent)
        plan = restore_plan(file, network)
    except (OSError, MemongerError):
        return None
    if plan is None:
        log.warning("%r has a plan of another network, and is written anew", str(file))
        return None
    with contextlib.suppress(OSError):  # a folder that cannot be written
        os.utime(file)  # for `_make_room`
    return plan


def write(file: Path, plan: Plan) -> None:
    """Keep a plan.

    Raises
    ------
    MemongerError
        If it cannot be written.
    """
    try:
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=PRIVATE, exist_ok=True)
        _check_owned(file.parent)
    except OSError as error:
        raise MemongerError(f"{str(file.parent)!r} cannot be made: {error.strerror}") from None
    plan.save(file)
    _make_room(file.parent)


def _check_owned(folder: Path) -> None:
    """Refuse a folder that is another user's, or to which others can write."""
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise MemongerError(f"the folder {str(folder)!r} is another user's")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise MemongerError(f"others can write to the folder {str(folder)!r}")


def _make_room(folder: Path) -> None:
    """Remove the plans that were not used for longest, if all plans take too many bytes."""
    files = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):  # another process has removed it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    left = MAX_BYTES
    for _, size, path in sorted(files, reverse=True):
        left -= size
        if left < 0:
            with contextlib.suppress(OSError):
                path.unlink()
