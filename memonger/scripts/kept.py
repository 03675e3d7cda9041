"""Plans that are kept in the user's cache folder, so that a script that starts again has them.

A file's name is a hash of all that its plan depends on: network and options, MXNet with its
features and environment variables, the machine, and memonger's own code. ``Plan.save`` writes the
content, which is checked when it is read.
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

from memonger.api.plan import Plan, load_plan
from memonger.costs.time.measured import describe_device
from memonger.solve.options import Options
from memonger.solve.request import Request, fingerprint
from memonger.support import cache
from memonger.support.errors import MemongerError
from memonger.support.mxnet import has_avx2, mx
from memonger.support.types import Json
from memonger.support.versions import json_of

log = logging.getLogger("memonger")

MAX_BYTES = 2**28  # of all plans; those that were not used for longest go
PRIVATE = 0o700  # the mode of their folder


def file_of(request: Request, options: Options) -> Path:
    """Name the file of a plan."""
    timed_on = request.find_timed(options.gpu, options.measure)
    parts = [
        fingerprint(request, options),
        json_of(request.symbol),  # with the names that its nodes have
        request.keep.patterns,
        request.recompute.patterns,
        timed_on.sheet,
        timed_on.ctx and describe_device(timed_on.ctx),
        has_avx2(),
        _installed(),
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache.folder() / "plans" / f"{digest}.json"


@functools.lru_cache(None)
def _installed() -> list[Json]:
    """Return the version and the features of MXNet, and a hash of memonger's code."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.so")]):
        digest.update(path.read_bytes())
    features = mx.runtime.Features()
    enabled = [name for name in sorted(features) if features.is_enabled(name)]
    return [mx.__version__, enabled, digest.hexdigest()]


def read(file: Path) -> Plan | None:
    """Read a plan, if it is kept."""
    try:
        _check_private(file.parent)
        plan = load_plan(file)
        os.utime(file)  # for `_make_room`
    except (OSError, MemongerError):
        return None
    return plan


def write(file: Path, plan: Plan) -> None:
    """Keep a plan, if it can be written."""
    try:
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=PRIVATE, exist_ok=True)
        _check_private(file.parent)
        plan.save(file)
        _make_room(file.parent)
    except (OSError, MemongerError) as error:
        log.info("the plan is not kept: %s", error)


def _check_private(folder: Path) -> None:
    """Refuse a folder that others can look into, or write to."""
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != PRIVATE:
        raise MemongerError(f"others may use the folder {str(folder)!r}; remove it")


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
