"""The threads of a search, its progress bar, and Ctrl-C, which ends it with what it has found."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Callable, Iterator, Sequence, TypeVar

import numpy as np
from tqdm import tqdm

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """Run the rounds of one search in threads; ``progress`` is told the share done, from 0 to 1."""

    def __init__(self, progress: Callable[[float], None] | None = None) -> None:
        self.progress = progress or (lambda done: None)
        #: Not zero from the first Ctrl-C on, which ends the search early. (1,) of int64.
        self.stop = np.zeros(1, dtype=np.int64)
        self.done = 0.0  # the share of the search that the finished rounds made up

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the search."""
        return bool(self.stop[0])

    def each(
        self, job: Callable[[T, np.ndarray], R], items: Sequence[T], steps: int, share: float
    ) -> list[R]:
        """Run a job on each item, on all processors; return the results in the order of the items.

        A job takes an item and an array, (1,) of int64, in which it counts its ``steps`` for the
        bar, and ends soon, with the best that it has, once ``stop`` is set. All of them are this
        ``share`` of the search. The second Ctrl-C raises KeyboardInterrupt.
        """
        steps_done = np.zeros((len(items), 1), dtype=np.int64)
        on_linux = hasattr(os, "sched_getaffinity")
        workers = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count()
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(job, *pair) for pair in zip(items, steps_done)]
            running: Any = futures
            while running:
                try:
                    _, running = wait(running, timeout=0.1)
                    done = steps_done.sum() / max(1, steps * len(items))
                    if not self.interrupted:
                        self.progress(self.done + share * min(1.0, done))
                except KeyboardInterrupt:
                    if self.interrupted:
                        raise
                    self.stop[0] = 1
        self.done += share
        return [future.result() for future in futures]


class _Bar(tqdm):
    """A bar without the thread by which tqdm watches its bars, and which it never ends."""

    # Python collects garbage on any thread that runs, MXNet's executors too. MXNet deadlocks where
    # that happens while another thread trains with their parameters.
    monitor_interval = 0


@contextlib.contextmanager
def progress_bar(what: str = "memonger: searching") -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr; the callable that is given takes the share done, 0 to 1."""
    with _Bar(
        total=1.0,
        desc=what,
        delay=1,  # second, in which nothing is shown
        leave=False,
        disable=None,  # where stderr is no terminal
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:
        yield lambda done: bar.update(min(done, 1.0) - bar.n)
