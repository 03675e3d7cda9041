"""Child processes: what they are given, and what is known of one that ends early."""

from __future__ import annotations

import sys
from pathlib import Path

import memonger
import pytest
from memonger.support.child import run_child

pytestmark = pytest.mark.python_differs

ANSWERING = """
import os
import signal
import sys

import memonger

def answer(job):
    print("of no matter")
    yield memonger.__file__
    yield {name: os.environ.get(name) for name in job}
    yield sys.path
    os.kill(os.getpid(), signal.SIGKILL)
    yield "never"
"""


def test_a_child_answers_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has this memonger, though the path has another, and the path of its parent."""
    (tmp_path / "answering.py").write_text(ANSWERING)
    (tmp_path / "memonger.py").write_text("raise SystemExit('another one')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("DMLC_ROLE", "MXNET_PROFILER_AUTOSTART", "KEPT"):
        monkeypatch.setenv(name, "1")
    job = ["DMLC_ROLE", "MXNET_PROFILER_AUTOSTART", "KEPT"]
    answers, status = run_child("answering", job)
    assert answers == [memonger.__file__, dict(zip(job, [None, None, "1"])), sys.path]
    assert status == "the child process was killed by SIGKILL: of no matter"


def test_a_child_that_does_not_begin_has_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, status = run_child("memonger.absent", [])
    assert answers is None
    assert status.startswith("the child process exited with 1: ModuleNotFoundError: No module")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    answers, status = run_child("memonger.costs.time.measured", [])
    assert answers is None and "/nowhere/python" in status
