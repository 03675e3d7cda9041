"""How many functions, files and classes one call meets: ceilings that only fall."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import memonger
import pytest

COUNTER = Path(__file__).parent / "helpers" / "concepts.py"
#: Call -> its functions, files and classes. Where one falls, lower its ceiling.
CEILINGS = {"auto": (633, 53, 48), "marks": (563, 47, 33), "gluon": (796, 65, 61)}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons take other ways")
@pytest.mark.parametrize("call", CEILINGS)
def test_no_call_meets_more_than_before(call: str) -> None:
    command = [sys.executable, str(COUNTER), call]
    place = {"PYTHONPATH": str(Path(memonger.__file__).parents[1])}  # also where it is no package
    environment = {**os.environ, **place}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(now <= most for now, most in zip(counts, CEILINGS[call])), (counts, CEILINGS[call])
