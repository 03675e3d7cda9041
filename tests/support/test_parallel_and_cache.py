"""Threads, Ctrl-C, and what is kept in the process."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
import tqdm
from memonger.support import cache
from memonger.support.mxnet import Settings, environment
from memonger.support.parallel import Threads

import networks
from modules import stepped
from planned import HOWS, run_code


def test_jobs_give_their_results_in_order_and_count_their_steps() -> None:
    shares: list[float] = []
    threads = Threads(shares.append)

    def job(item: int, done: np.ndarray) -> int:
        for _ in range(10):
            time.sleep(0.03 / item)
            done[0] += 1
        return item**2

    assert threads.run(job, [1, 2, 3], 10, 0.5) == [1, 4, 9]
    assert threads.run(job, [], 10, 0.25) == []
    assert threads.done == 0.75 and not threads.interrupted
    assert shares == sorted(shares) and 0 < shares[0] < 0.5 and shares[-1] == 0.5
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda item, done: 1 // item, [1, 0], 1, 0.25)


@pytest.mark.parametrize("stopped", [False, True])
def test_ctrl_c_ends_the_jobs_with_what_they_have(stopped: bool) -> None:
    """Also those that have not begun; no thread is left. Once stopped, the bar is not told."""

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    def job(item: str, done: np.ndarray) -> str:
        while not threads.stop[0] and time.monotonic() < start + 30:
            time.sleep(0.01)
        return item

    before, start, threads = threading.active_count(), time.monotonic(), Threads(interrupt)
    threads.stop[0] = stopped
    assert threads.run(job, list("abcdef"), 1, 1.0) == list("abcdef")
    assert threads.interrupted and threading.active_count() == before
    assert time.monotonic() - start < 10


def test_a_second_ctrl_c_ends_the_search() -> None:
    before = threading.active_count()

    def twice(item: int, done: np.ndarray) -> None:
        for _ in range(2):
            time.sleep(0.2)
            _thread.interrupt_main()
        time.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        Threads().run(twice, [0], 1, 1.0)
    assert threading.active_count() == before


BAR = """
import sys, threading, time
from memonger.support.parallel import progress_bar
with progress_bar("searching") as progress:
    for done in range(8):
        progress(done / 8)
        time.sleep(float(sys.argv[1]) / 8)
assert threading.active_count() == 1  # no thread is left
"""


def shown(seconds: float, terminal: bool) -> str:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", BAR, str(seconds)], stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError), open(ours, "rb", 0) as file:  # a terminal that is closed
        for piece in iter(lambda: file.read(4096), b""):
            text += piece
    assert process.wait(100) == 0
    return text.decode()


@pytest.mark.late
def test_a_bar_on_a_terminal_for_what_takes_long() -> None:
    text = shown(2.4, True)
    assert "searching" in text and "75%" in text
    *_, wiped, end = text.split("\r")
    assert not wiped.strip() and not end
    assert shown(0.0, True) == "" == shown(2.4, False)


def test_what_takes_long_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches, binds, trials of batches, and steps of a check."""
    symbol, shapes = networks.chain(8, hidden=64, batch=512)
    open_shapes = {name: (None, *shape[1:]) for name, shape in shapes.items()}
    bars: dict[str, list[float]] = {}
    begin = tqdm.tqdm.__init__

    def init(bar: Any, *args: Any, **options: Any) -> None:
        begin(bar, *args, **options)
        bar.told = bars.setdefault(options["desc"], [])

    def update(bar: Any, done: float) -> None:
        bar.n += done
        bar.told.append(bar.n)

    monkeypatch.setattr(tqdm.tqdm, "__init__", init)
    monkeypatch.setattr(tqdm.tqdm, "update", update)
    quick: Any = {"how": "marks", "patience": 0.01}
    plans = memonger.frontier(symbol, shapes, points=4, **quick)
    assert [*bars] == ["memonger: searching", "memonger: binding plans"]
    assert bars["memonger: binding plans"] == [0.25, 0.5, 0.75, 1.0] and len(plans) == 4
    memonger.largest_batch(symbol, open_shapes, "1MB", **quick)
    tried = bars["memonger: trying batches"]
    assert tried[0] == pytest.approx(0, abs=1e-6) and 1.0 in tried
    assert memonger.check(symbol, plans[-1].symbol, dict.fromkeys(shapes, (2, 64)), steps=2)
    assert bars["memonger: training both"] == [0.25, 0.5, 0.75, 1.0]


def test_the_latest_values_are_kept() -> None:
    kept: cache.Latest[int] = cache.Latest(2)
    keys: list[str] = []

    def value(key: str) -> int:
        if kept.get(key) is None:
            keys.append(key)
            kept.put(key, len(keys))
        return kept.get(key) or 0

    assert [value(key) for key in "abacab"] == [1, 2, 1, 3, 1, 4]
    assert keys == ["a", "b", "c", "b"]  # b was of no use for longest when c came
    kept.put("a", 7)
    kept.put("d", 8)
    assert [kept.get(key) for key in "abd"] == [7, None, 8]
    other = cache.Latest[int](4)
    other.put("a", 1)
    cache.forget()  # what every room keeps
    assert kept.get("a") is None and other.get("a") is None


def test_the_cache_folder_is_the_first_of_three_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MEMONGER_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")):
        monkeypatch.setenv(name, value)
    assert cache.folder() == Path("/a")
    monkeypatch.delenv("MEMONGER_CACHE")
    assert cache.folder() == Path("/b/memonger")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path("/c/.cache/memonger")
    monkeypatch.setenv("HOME", "~")  # as Python leaves it for a user that no one knows
    assert cache.folder() is None


# -- environment variables that are set for a bind ------------------------------------------------


def twins(hidden: int, layers: int = 8) -> Any:
    """Build pairs of equal operators, one of which MXNet takes for both in a usual bind."""
    x = mx.sym.Variable("data")
    for k in range(layers):
        x = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"fc{k}")
        pair = mx.sym.tanh(x, name=f"t{k}"), mx.sym.tanh(x, name=f"u{k}")
        x = mx.sym.elemwise_mul(*pair, name=f"product{k}")
    return mx.sym.MakeLoss(mx.sym.sum(x, name="sum"), name="loss")


def planned_and_bound(job: int) -> tuple[Any, ...]:
    net, how, shapes = twins(16 + job), sorted(HOWS)[job % 2], {"data": (64, 8)}
    plan = memonger.plan(net, shapes, **HOWS[how], patience=0.02)
    counted = memonger.get_cost(net, shapes=shapes)
    costs = [counted, memonger.pool_bytes(plan.symbol, shapes=shapes)]
    executor = plan.symbol.simple_bind(mx.cpu(), **shapes)
    for name, array in executor.arg_dict.items():
        array[:] = np.random.RandomState(len(name)).uniform(-1, 1, array.shape)
    results = {name: array.tobytes() for name, array in stepped(executor).items()}
    return plan.symbol.tojson(), plan.pool_bytes, plan.unplanned_bytes, costs, results


def test_threads_plan_and_bind_at_the_same_time() -> None:
    expected = [planned_and_bound(job) for job in range(8)]
    cache.forget()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(planned_and_bound, range(8))) == expected


def test_a_setting_of_one_thread_is_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXNET_USE_FUSION", raising=False)
    begun = threading.Event()
    settings: list[tuple[str, bool]] = []

    def read(thread: str) -> None:
        settings.append((thread, Settings().fusion))

    def setting() -> None:
        with environment(MXNET_USE_FUSION="0"), environment(MXNET_USE_FUSION="1"):
            begun.set()
            time.sleep(0.2)
        with environment(MXNET_USE_FUSION="0"):
            read("setting")

    thread = threading.Thread(target=setting)
    with environment():
        thread.start()
        assert not begun.wait(0.1)  # a block that sets nothing is one too
    assert begun.wait(10)
    read("other")
    thread.join()
    assert sorted(settings) == [("other", True), ("setting", False)] and Settings().fusion


def test_variables_stay_where_threads_of_mxnet_find_them() -> None:
    """One that is added or unset would move the others while they are read."""
    clib = ctypes.CDLL(None)
    clib.getenv.restype = ctypes.c_char_p
    place, names = ctypes.c_void_p.in_dll(clib, "environ"), sorted(os.environ)
    before = place.value
    with environment(NNVM_AUTO_SEARCH_MATCH_RANGE="1", MXNET_USE_FUSION="0"):
        assert clib.getenv(b"MXNET_USE_FUSION") == b"0"
        assert place.value == before and sorted(os.environ) == names
    assert place.value == before and sorted(os.environ) == names
    assert clib.getenv(b"MXNET_USE_FUSION") == os.environb[b"MXNET_USE_FUSION"]


FORK = """
import os, threading, time
from memonger.support.mxnet import environment
begun = threading.Event()
def setting():
    with environment(MXNET_USE_FUSION="0"):
        begun.set()
        time.sleep(0.3)
threading.Thread(target=setting).start()
begun.wait()
child = os.fork()
if child:
    os.waitpid(child, 0)
with environment(MXNET_SUBGRAPH_BACKEND="NONE"):
    print("child" if child == 0 else "parent", os.environ["MXNET_USE_FUSION"], flush=True)
os._exit(0)
"""


def test_a_forked_process_has_none_of_it() -> None:
    printed = run_code(FORK, MXNET_USE_FUSION="1")
    assert printed.splitlines() == ["child 1", "parent 1"]
