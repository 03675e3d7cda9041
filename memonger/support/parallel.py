"""Run a search on threads, with a progress bar; Ctrl-C ends it with the best result so far."""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Callable, Iterator, Sequence, TypeVar

import numpy as np
from tqdm.auto import tqdm

from memonger.support.types import Int64s

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """The threads of one search; ``progress`` is called with the share done, from 0 to 1."""

    def __init__(self, progress: Callable[[float], None] | None = None) -> None:
        self.progress = progress or (lambda share: None)
        #: (1,) of int64. Not zero from the first Ctrl-C on, which ends the search early.
        self.stop = np.zeros(1, dtype=np.int64)
        self.done = 0.0  # share of the search that the finished rounds make up

    @property
    def interrupted(self) -> bool:
        """Whether the user has ended the search by Ctrl-C."""
        return bool(self.stop[0])

    def run(
        self, job: Callable[[T, Int64s], R], items: Sequence[T], steps: int, share: float
    ) -> list[R]:
        """Run a job on every item, on all processors; return the results in the order of the items.

        A job is called with an item and an array, (1,) of int64, in which it counts its ``steps``
        for the progress bar. When ``stop`` is set, it returns its best result so far. All jobs
        together are this ``share`` of the search. A second Ctrl-C raises KeyboardInterrupt.
        """
        steps_done = np.zeros((len(items), 1), dtype=np.int64)
        on_linux = hasattr(os, "sched_getaffinity")
        workers = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count()
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(job, *pair) for pair in zip(items, steps_done)]
            running = {*futures}
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
    """A progress bar without tqdm's monitor thread, which would never end."""

    # Python may free garbage, such as MXNet's executors, on any thread. MXNet deadlocks if that
    # happens while another thread trains with their parameters.
    monitor_interval = 0


@contextlib.contextmanager
def progress_bar(title: str = "memonger: searching") -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr; yield a function that takes the share done, from 0 to 1."""
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    with _Bar(
        total=1.0,
        desc=title,
        delay=1,  # seconds before it is shown
        leave=False,
        disable=False if in_notebook else None,  # where stderr is no terminal
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:
        yield lambda share: bar.update(min(share, 1.0) - bar.n)
